r"""The next token from logits on the device, with no sort of the vocabulary and no float32 copy of it.

    x = penalise(softcap(logits)),   s = (x - max x) / T,   P = e^s over what top-k, top-p and min-p keep
    token(p) = argmax_v ( log P_v + g(seed, p, v) )      g: `noise`;   T = 0: argmax_v x_v, the lowest id first
    top-k keeps what ties with the k-th best; top-p keeps a token while better ones (score, then lower id) weigh less
    than p, and always the best; min-p keeps what is min_p times as likely as the best

`sample` draws it; `best_tokens` gives the K best of log P + g with their log-probabilities (the children of a tree's
node); `log_probs` those of the model's own distribution. Every parameter is a vector by request, so that one captured
launch serves any mix of them. `sample_kernels` and `choose_kernel` say how; the references here sort.
"""

from typing import NamedTuple

import torch

from specdec.gpu.dependent_launch import pdl_options
from specdec.gpu.triton_shim import triton
from specdec.sampling.choose_kernel import choose_kernel
from specdec.sampling.noise import reference_noise
from specdec.sampling.sample_kernels import collect_kernel, floor_kernel, scan_kernel
from specdec.sampling.softcap import inverse_of

MAX_BEST = 64
"""Most tokens that `best_tokens` and `log_probs` return a row."""

COLLECTORS = 2048
"""Programs that list tokens. Those of greedy rows end at once, yet each takes a multiprocessor's time."""


class SampleParams(NamedTuple):
    """The parameters of B requests: vectors [B] on the device, float32 but for top_k and seed, which are int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    seed: torch.Tensor


class Seen(NamedTuple):
    """Tokens that the penalty is for. bits [B, ceil(V / 32)] int32: bit v % 32 of word v // 32 is set for a token v of
    the request's history; path [B, N, D] int64: tokens on a node's own path, padded with -1."""

    bits: torch.Tensor
    path: torch.Tensor


class Best(NamedTuple):
    """tokens [B, N, K] int64, best first and lowest id among equals, and their log-probabilities float32."""

    tokens: torch.Tensor
    scores: torch.Tensor


class TokenScores(NamedTuple):
    """Log-probabilities of the chosen tokens [B, N], and the K likeliest tokens of each node."""

    chosen: torch.Tensor
    best: Best


class Cut(NamedTuple):
    """How a row, and its list of at most `capacity` tokens, is cut; changes no result."""

    tile: int = 4096
    group: int = 64
    capacity: int = 8192
    listed: int = 512


DEFAULT_CUT = Cut()


def reference_logits(
    logits: torch.Tensor, params: SampleParams, softcap: float | None = None, seen: Seen | None = None
) -> torch.Tensor:
    """logits [B, N, V] after softcap and repetition penalty, float32."""
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.float()
    if seen is None:
        return logits
    vocab_size = logits.shape[-1]
    token = torch.arange(vocab_size, device=logits.device)
    repeated = (seen.bits[:, token // 32] >> (token % 32) & 1).bool()[:, None].repeat(1, logits.shape[1], 1)
    on_path = torch.zeros((*logits.shape[:2], vocab_size + 1), dtype=torch.bool, device=logits.device)
    on_path.scatter_(2, seen.path.where(seen.path >= 0, vocab_size), True)
    penalty = params.repetition_penalty[:, None, None]
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(repeated | on_path[..., :-1], penalised, logits)


def reference_scores(x: torch.Tensor, positions: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """log P + g up to a constant, -inf where filtered; x itself where greedy. x [B, N, V] float32."""
    vocab_size = x.shape[-1]
    temperature, top_p, min_p = (p[:, None, None] for p in (params.temperature, params.top_p, params.min_p))
    s = (x - x.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
    ordered, order = s.sort(dim=-1, descending=True, stable=True)
    k = torch.where(params.top_k > 0, params.top_k.clamp(max=vocab_size), vocab_size)[:, None, None]
    kth = ordered.gather(-1, (k - 1).expand(-1, x.shape[1], 1))
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    weights = ordered.softmax(dim=-1)
    outside = (weights.cumsum(dim=-1) - weights >= top_p) & (top_p < 1)
    outside[..., 0] = False
    s = torch.empty_like(s).scatter_(-1, order, ordered.masked_fill(outside, -torch.inf))
    s = s.masked_fill(s < torch.log(min_p), -torch.inf)
    token = torch.arange(vocab_size, device=x.device)
    noise = reference_noise(params.seed[:, None, None], positions[:, :, None], token)
    return torch.where(temperature > 0, s + noise, x)


def reference_sample(
    logits: torch.Tensor,
    positions: torch.Tensor,
    params: SampleParams,
    softcap: float | None = None,
    seen: Seen | None = None,
) -> torch.Tensor:
    """[B, N] int64; see `sample`."""
    return reference_scores(reference_logits(logits, params, softcap, seen), positions, params).argmax(dim=-1)


def reference_best_tokens(
    logits: torch.Tensor, positions: torch.Tensor, params: SampleParams, k: int, softcap: float | None = None
) -> Best:
    """See `best_tokens`."""
    scores = reference_scores(reference_logits(logits, params, softcap), positions, params).log_softmax(dim=-1)
    values, tokens = scores.sort(dim=-1, descending=True, stable=True)
    return Best(tokens[..., :k], values[..., :k])


def reference_log_probs(
    logits: torch.Tensor, chosen: torch.Tensor, k: int, softcap: float | None = None
) -> TokenScores:
    """See `log_probs`."""
    x = logits.float() if softcap is None else (torch.tanh(logits / softcap) * softcap).float()
    scores = x.log_softmax(dim=-1)
    values, tokens = scores.sort(dim=-1, descending=True, stable=True)
    return TokenScores(scores.gather(2, chosen[..., None])[..., 0], Best(tokens[..., :k], values[..., :k]))


def sample(
    logits: torch.Tensor,
    positions: torch.Tensor,
    params: SampleParams,
    softcap: float | None = None,
    seen: Seen | None = None,
    *,
    cut: Cut = DEFAULT_CUT,
) -> torch.Tensor:
    """The token drawn at each node: logits [B, N, V] of any floating dtype, positions [B, N] int64 -> [B, N] int64."""
    return _choose(logits, positions, params, softcap, seen, 1, None, cut, scores=False)[0][..., 0]


def best_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    params: SampleParams,
    k: int,
    softcap: float | None = None,
    *,
    cut: Cut = DEFAULT_CUT,
) -> Best:
    """The k best tokens of log P + g at each node and their log-probabilities, which are those of the sum over all
    tokens; greedy: of the logits. Where the filters leave fewer, the lowest ids that they remove follow, with -inf."""
    tokens, scores, _ = _choose(logits, positions, params, softcap, None, k, None, cut, scores=True)
    return Best(tokens, scores)


def log_probs(
    logits: torch.Tensor, chosen: torch.Tensor, k: int, softcap: float | None = None, *, cut: Cut = DEFAULT_CUT
) -> TokenScores:
    """Log-probabilities of the chosen tokens [B, N] and of the k likeliest of each node, before any parameter."""
    greedy, unread = torch.zeros(len(logits), device=logits.device), torch.empty_like(chosen[:, 0])
    params = SampleParams(greedy, unread, greedy, greedy, greedy, unread)
    tokens, scores, of_chosen = _choose(logits, chosen, params, softcap, None, max(k, 1), chosen, cut, scores=True)
    return TokenScores(of_chosen, Best(tokens[..., :k], scores[..., :k]))


def _choose(
    logits: torch.Tensor,
    positions: torch.Tensor,
    params: SampleParams,
    softcap: float | None,
    seen: Seen | None,
    k: int,
    chosen: torch.Tensor | None,
    cut: Cut,
    *,
    scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, num_nodes, vocab_size = logits.shape
    rows = batch * num_nodes
    assert 1 <= k <= min(MAX_BEST, vocab_size), f"{k=} {vocab_size=}"
    assert positions.shape == (batch, num_nodes) and logits.stride(2) == 1, f"{positions.shape=} {logits.stride()=}"
    assert num_nodes == 1 or batch == 1 or logits.stride(0) == num_nodes * logits.stride(1), f"{logits.stride()=}"
    assert all(p.shape == (batch,) and p.is_contiguous() for p in params), [p.shape for p in params]
    device = logits.device
    num_tiles, groups_per_tile = triton.cdiv(vocab_size, cut.tile), cut.tile // cut.group

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens = buffer(batch, num_nodes, k, dtype=torch.int64)
    values = buffer(batch, num_nodes, k)
    of_chosen = buffer(batch, num_nodes)
    if rows == 0:
        return tokens, values, of_chosen
    group_max, tile_max = buffer(rows, num_tiles * groups_per_tile), buffer(rows, num_tiles)
    row_max, floor, mass = buffer(rows), buffer(rows), buffer(rows, dtype=torch.int64)
    count = buffer(rows, dtype=torch.int32)
    list_id, list_x = buffer(rows, cut.capacity, dtype=torch.int32), buffer(rows, cut.capacity)
    sum_max, sums = buffer(rows, num_tiles), buffer(rows, num_tiles)
    bits, path, s_seen, path_len = None, None, 0, 0
    if seen is not None:
        assert seen.path.shape[:2] == (batch, num_nodes) and seen.bits.stride(1) == 1, f"{seen.path.shape=}"
        bits, path = seen.bits, seen.path.contiguous()
        s_seen, path_len = bits.stride(0), path.shape[2]
    s_row = logits.stride(1) if num_nodes > 1 else logits.stride(0)
    filters = params.temperature, params.top_k, params.top_p
    cap = (softcap, None if softcap is None else inverse_of(softcap))
    options = pdl_options(device)
    scan_kernel[(num_tiles, rows)](
        *(logits, params.repetition_penalty, bits, path, group_max, tile_max),
        *(vocab_size, num_nodes, *cap, s_row, s_seen, path_len),
        TILE=cut.tile,
        GROUP=cut.group,
        num_warps=8,
        **options,
    )
    floor_kernel[(rows,)](
        *(group_max, tile_max, *filters, row_max, floor, count, mass),
        *(num_tiles, num_tiles * groups_per_tile, vocab_size, num_nodes, cut.capacity),
        SCORES=scores,
        K=k,
        TILES=triton.next_power_of_2(num_tiles),
        GROUPS=triton.next_power_of_2(num_tiles * groups_per_tile),
        num_warps=8,
        **options,
    )
    positions = positions.contiguous()
    collect_kernel[(min(num_tiles, triton.cdiv(COLLECTORS, rows)), rows)](
        *(logits, positions, *params, bits, path, row_max, floor, count, mass, list_id, list_x, sum_max, sums),
        *(num_tiles, vocab_size, num_nodes, cut.capacity, *cap, s_row, s_seen, path_len),
        SCORES=scores,
        K=k,
        TILE=cut.tile,
        num_warps=8,
        **options,
    )
    for listed in (True, False):
        choose_kernel[(rows,)](
            *(logits, positions, *params, bits, path, tile_max, row_max, floor, count, mass),
            *(list_id, list_x, sum_max, sums, None if chosen is None else chosen.contiguous()),
            *(tokens, values if scores else None, of_chosen if chosen is not None else None),
            *(num_tiles, vocab_size, num_nodes, cut.capacity, 0, *cap, s_row, s_seen, path_len),
            LISTED=listed,
            SCORES=scores,
            K=k,
            SLOTS=max(2, triton.next_power_of_2(k)),
            TILES=triton.next_power_of_2(num_tiles),
            TILE=cut.listed if listed else cut.tile,
            SCAN_TILE=cut.tile,
            num_warps=4 if listed else 16,
            **options,
        )
    return tokens, values, of_chosen
