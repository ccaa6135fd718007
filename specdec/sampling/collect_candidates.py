"""Lists the candidates of each row, the tokens that can be chosen: kernels read the logits for `choose_kernel`.

    scan_kernel       grid (tiles, rows)   the best logit of each group and tile of the vocabulary; with top-n-sigma
                                           also the number, sum and sum of squares of the finite logits
    floor_kernel      grid (rows)          the row's best logit, the least logit that top-n-sigma keeps, and a
                                           floor that candidates must reach
    collect_kernel    grid (Z, rows)       candidates of tiles z, z + Z, ... appended to the row's list

    greedy            nothing is listed: the token is the best one of the first tile that has the row's best logit
    noise, no filter  the tile's tokens within the error of `noise_bound` of its best
    top-k, top-p      the tokens that reach the floor: at most the k-th best logit, since k groups have a best that
                      reaches it. A vocabulary that fits the list is listed whole

A list is insufficient if more tokens reach the floor than it holds, or if the nucleus goes below the floor; then
`choose_kernel` reads the row itself. No token depends on how rows are cut, or on other rows.
"""

from typing import NamedTuple

import torch

from specdec.gpu.triton_shim import pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.sampling.noise import NOISE_ERROR, noise_bound, noise_stream
from specdec.sampling.row_scores import (
    INF,
    MIN_P,
    PENALTY,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    LogitRows,
    load_logits,
    mass_of,
    min_score_of,
    score_of,
)
from specdec.sampling.sampling_table import index_of
from specdec.sampling.softcap import capped

LARGEST_FLOAT = tl.constexpr(3e38)
N_SIGMA = index_of("top_n_sigma")

COLLECTORS = 2048
"""Upper bound on programs of `collect_kernel`: programs of greedy rows end at once, but each costs a launch slot."""


class VocabSplit(NamedTuple):
    """How a row is cut into tiles and groups, and the capacity of its list in tokens; changes no result."""

    tile: int = 4096
    group: int = 64
    capacity: int = 8192
    listed: int = 512


DEFAULT_VOCAB_SPLIT = VocabSplit()


class Shortlist(NamedTuple):
    """Results of the first kernels for R rows of logits; `choose_kernel` reads them.

    `list_id`, `list_x`: tokens that may win, and their logits. If `floor` is finite, only tokens whose logit reaches it
    were listed, so a row that needs others is searched again in full. None: not computed.
    """

    tile_max: torch.Tensor | None  # [R, tiles] float32
    row_max: torch.Tensor | None  # [R] float32
    floor: torch.Tensor | None  # [R] float32
    min_logit: torch.Tensor | None  # [R] float32: logit that top-n-sigma asks for
    listed: torch.Tensor | None  # [R] int32: tokens that were to be listed, also beyond the capacity
    mass: torch.Tensor | None  # [R] int64: of the whole row, where the nucleus needs it
    list_id: torch.Tensor  # [R, capacity] int32
    list_x: torch.Tensor  # [R, capacity] float32: logits
    sum_max: torch.Tensor | None  # [R, tiles] float32: largest perturbed score
    sums: torch.Tensor | None  # [R, tiles] float32: sum of e^(score - that)

    @classmethod
    def from_lists(cls, list_id: torch.Tensor, list_x: torch.Tensor) -> "Shortlist":
        """Rows that consist of these tokens and logits only."""
        return cls(None, None, None, None, None, None, list_id, list_x, None, None)


@triton.jit
def _floor_of(b_x: tl.tensor, needed: tl.tensor) -> tl.tensor:
    """A number that at least `needed` finite entries reach and, except for ties, few more; -inf if fewer are finite."""
    m_finite = b_x > -INF
    count = tl.sum(m_finite.to(tl.int32))
    lo, hi = tl.min(tl.where(m_finite, b_x, INF)), tl.max(b_x)
    enough = count >= needed
    steps = tl.where(enough, 24, 0)
    while (steps > 0) & (count > needed + needed // 8):
        middle = 0.5 * lo + 0.5 * hi
        reached = tl.sum((b_x >= middle).to(tl.int32))
        fits = reached >= needed
        lo, hi = tl.where(fits, middle, lo), tl.where(fits, hi, middle)
        count = tl.where(fits, reached, count)
        steps -= 1
    return tl.where(enough, lo, -INF)


@triton.jit
def _is_filtered(temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))


@triton.jit(do_not_specialize=["rows_per_request", "num_requests", "s_seen", "path_len"])
def scan_kernel(
    p_logits: tl.tensor,  # [R, V]
    p_real: tl.tensor,  # [FLOAT_COLUMNS, B]
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_group_max: tl.tensor,  # [R, tiles * TILE / GROUP]
    p_tile_max: tl.tensor,  # [R, tiles]
    p_moments: tl.tensor,  # [R, 3, tiles] float64: only where top-n-sigma is used
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    num_requests: tl.tensor,  # B
    softcap: tl.tensor,  # or None
    cap_inverse: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_tile, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_request = i_row // rows_per_request
    o_token = i_tile * TILE + tl.arange(0, TILE)
    p_penalty = p_real + PENALTY * num_requests + i_request
    wait_for_previous(PDL)
    n_sigma = tl.load(p_real + N_SIGMA * num_requests + i_request)
    if p_seen is not None:
        p_seen += i_request * s_seen
        p_path += i_row * path_len
    p_row = p_logits + i_row * s_row
    # a softcap that rounds to 16 bits is monotonic, so only the best of a group is capped: capping takes longer than
    # reading; in float32 a larger logit may come out a little smaller
    CAP_LAST: tl.constexpr = softcap is not None and p_seen is None and p_logits.dtype.element_ty != tl.float32
    row = (p_row, p_penalty, p_seen, p_path, vocab_size, None if CAP_LAST else softcap, cap_inverse, path_len)
    b_group = tl.max(tl.reshape(load_logits(row, o_token), [TILE // GROUP, GROUP]), axis=1)
    if CAP_LAST:
        b_group = capped(b_group.to(p_logits.dtype.element_ty), softcap, cap_inverse).to(tl.float32)
        o_first = i_tile * TILE + tl.arange(0, TILE // GROUP) * GROUP
        b_group = tl.where(o_first < vocab_size, b_group, -INF)
    best = tl.max(b_group)
    o_group = (i_row * tl.num_programs(0) + i_tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(p_group_max + o_group, b_group)
    tl.store(p_tile_max + i_row * tl.num_programs(0) + i_tile, best)
    if n_sigma > 0:
        b_x = load_logits((p_row, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len), o_token)
        m_finite = b_x > -INF
        b_wide = tl.where(m_finite, b_x, 0.0).to(tl.float64)
        p_moments += i_row * 3 * tl.num_programs(0) + i_tile
        tl.store(p_moments, tl.sum(m_finite.to(tl.float64)))
        tl.store(p_moments + tl.num_programs(0), tl.sum(b_wide))
        tl.store(p_moments + 2 * tl.num_programs(0), tl.sum(b_wide * b_wide))


@triton.jit
def sigma_bound(
    row_max: tl.tensor, n_sigma: tl.tensor, count: tl.tensor, total: tl.tensor, squares: tl.tensor
) -> tl.tensor:
    """max x - n sigma in float32, from float64 sums: summed in another order, they round to the same."""
    variance = tl.maximum((squares - total * total / count) / count, 0.0)
    return (row_max.to(tl.float64) - n_sigma.to(tl.float64) * tl.sqrt(variance)).to(tl.float32)


@triton.jit(do_not_specialize=["num_tiles", "num_groups", "vocab_size", "rows_per_request", "num_requests", "capacity"])
def floor_kernel(
    p_group_max: tl.tensor,  # [R, groups]
    p_tile_max: tl.tensor,  # [R, tiles]
    p_whole: tl.tensor,  # [INT_COLUMNS, B]
    p_real: tl.tensor,  # [FLOAT_COLUMNS, B]
    p_moments: tl.tensor,  # [R, 3, tiles]
    p_row_max: tl.tensor,  # [R]
    p_floor: tl.tensor,  # [R]
    p_min_logit: tl.tensor,  # [R]
    p_count: tl.tensor,  # [R]
    p_mass: tl.tensor,  # [R]
    num_tiles: tl.tensor,
    num_groups: tl.tensor,
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    num_requests: tl.tensor,  # B
    capacity: tl.tensor,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_request = i_row // rows_per_request
    o_tile, o_group = tl.arange(0, TILES), tl.arange(0, GROUPS)
    wait_for_previous(PDL)
    temperature = tl.load(p_real + TEMPERATURE * num_requests + i_request)
    top_p = tl.load(p_real + TOP_P * num_requests + i_request)
    top_k = tl.load(p_whole + TOP_K * num_requests + i_request)
    n_sigma = tl.load(p_real + N_SIGMA * num_requests + i_request)
    b_tile = tl.load(p_tile_max + i_row * num_tiles + o_tile, mask=o_tile < num_tiles, other=-INF)
    row_max = tl.max(b_tile)
    tl.store(p_row_max + i_row, row_max)
    min_logit = -INF
    if (temperature > 0) & (n_sigma > 0):
        p_tile = p_moments + i_row * 3 * num_tiles + o_tile
        count = tl.sum(tl.load(p_tile, mask=o_tile < num_tiles, other=0.0))
        total = tl.sum(tl.load(p_tile + num_tiles, mask=o_tile < num_tiles, other=0.0))
        squares = tl.sum(tl.load(p_tile + 2 * num_tiles, mask=o_tile < num_tiles, other=0.0))
        min_logit = sigma_bound(row_max, n_sigma, count, total, squares)
    tl.store(p_min_logit + i_row, min_logit)
    tl.store(p_count + i_row, 0)
    tl.store(p_mass + i_row, tl.zeros([], tl.int64))
    floor = -INF
    listed = _is_filtered(temperature, top_k, top_p, vocab_size)
    if SCORES:
        listed = listed | (temperature == 0)
    if listed & (vocab_size > capacity):
        most = num_groups - num_groups // 4
        wanted = most
        if temperature == 0:
            wanted = tl.minimum(most, K)
        elif (top_k > 0) & (top_k < most):
            wanted = top_k.to(tl.int32)
        b_group = tl.load(p_group_max + i_row * num_groups + o_group, mask=o_group < num_groups, other=-INF)
        floor = _floor_of(b_group, wanted)
        floor = tl.where(floor > min_logit, floor, -INF)  # all that top-n-sigma keeps is listed
    tl.store(p_floor + i_row, floor)


@triton.jit(do_not_specialize=["num_tiles", "rows_per_request", "num_requests", "capacity", "s_seen", "path_len"])
def collect_kernel(
    p_logits: tl.tensor,  # [R, V]
    p_positions: tl.tensor,  # [R]
    p_whole: tl.tensor,  # [INT_COLUMNS, B]
    p_real: tl.tensor,  # [FLOAT_COLUMNS, B]
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_row_max: tl.tensor,  # [R]
    p_floor: tl.tensor,  # [R]
    p_min_logit: tl.tensor,  # [R]
    p_count: tl.tensor,  # [R]
    p_mass: tl.tensor,  # [R]
    p_list_id: tl.tensor,  # [R, capacity]
    p_list_x: tl.tensor,  # [R, capacity]
    p_sum_max: tl.tensor,  # [R, tiles]: largest perturbed score
    p_sum: tl.tensor,  # [R, tiles]: sum of e^(score - that)
    num_tiles: tl.tensor,
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    num_requests: tl.tensor,  # B
    capacity: tl.tensor,
    softcap: tl.tensor,  # or None
    cap_inverse: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(1).to(tl.int64)
    i_request = i_row // rows_per_request
    wait_for_previous(PDL)
    p_penalty = p_real + PENALTY * num_requests + i_request
    temperature = tl.load(p_real + TEMPERATURE * num_requests + i_request)
    if SCORES or temperature > 0:
        top_k = tl.load(p_whole + TOP_K * num_requests + i_request)
        top_p = tl.load(p_real + TOP_P * num_requests + i_request)
        row_max, min_logit = tl.load(p_row_max + i_row), tl.load(p_min_logit + i_row)
        if p_seen is not None:
            p_seen += i_request * s_seen
            p_path += i_row * path_len
        row = (p_logits + i_row * s_row, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len)
        for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            o_token = i_tile * TILE + tl.arange(0, TILE)
            b_x = load_logits(row, o_token)
            m_list = (b_x > -INF) & (b_x >= min_logit)
            if _is_filtered(temperature, top_k, top_p, vocab_size):
                if (top_k <= 0) | (top_k >= vocab_size):
                    b_mass = tl.where(m_list, mass_of(score_of(b_x, row_max, temperature)), 0)
                    tl.atomic_add(p_mass + i_row, tl.sum(b_mass), sem="relaxed")
                m_list = m_list & (b_x >= tl.load(p_floor + i_row))
            else:
                # approximates the score; the list's consumer computes it exactly
                inverse = tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0), LARGEST_FLOAT)
                b_z = (b_x - row_max) * inverse
                if temperature > 0:
                    min_score = min_score_of(tl.load(p_real + MIN_P * num_requests + i_request))
                    m_list = m_list & (b_z >= min_score - NOISE_ERROR)
                    stream = noise_stream(
                        tl.load(p_whole + SEED * num_requests + i_request), tl.load(p_positions + i_row)
                    )
                    b_z = tl.where(m_list, b_z + noise_bound(stream, o_token), -INF)
                    if K == 1:
                        floor = tl.max(b_z)
                    else:
                        floor = _floor_of(b_z, K)
                    m_list = m_list & (b_z >= floor - 2 * NOISE_ERROR)
                else:
                    m_list = m_list & (b_x >= tl.load(p_floor + i_row))
                if SCORES:
                    best = tl.max(b_z)
                    total = tl.sum(tl.where(b_z > -INF, tl.exp(b_z - tl.where(best > -INF, best, 0.0)), 0.0))
                    tl.store(p_sum_max + i_row * num_tiles + i_tile, best)
                    tl.store(p_sum + i_row * num_tiles + i_tile, total)
            count = tl.sum(m_list.to(tl.int32))
            if count > 0:
                if count <= 16:  # a prefix sum over the tile costs more than 16 atomic additions
                    o_list = tl.atomic_add(p_count + i_row + o_token * 0, 1, mask=m_list, sem="relaxed")
                else:
                    first = tl.atomic_add(p_count + i_row, count, sem="relaxed")
                    o_list = first + tl.cumsum(m_list.to(tl.int32)) - 1
                m_list = m_list & (o_list < capacity)
                tl.store(p_list_id + i_row * capacity + o_list, o_token, mask=m_list)
                tl.store(p_list_x + i_row * capacity + o_list, b_x, mask=m_list)


def collect(given: LogitRows, k: int, vocab_split: VocabSplit, *, scores: bool) -> Shortlist:
    """The candidates for the k best tokens of each row and, if `scores`, for their log-probabilities: see
    `KernelSampler`."""
    logits, positions, params, *_ = given
    batch, num_nodes, vocab_size = logits.shape
    rows, device = batch * num_nodes, logits.device
    num_tiles = triton.cdiv(vocab_size, vocab_split.tile)
    num_groups = num_tiles * (vocab_split.tile // vocab_split.group)
    pointers, scalars = given.pointers, given.scalars
    options = pdl_options(device)

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    group_max, moments = buffer(rows, num_groups), buffer(rows, 3, num_tiles, dtype=torch.float64)
    found = Shortlist(
        tile_max=buffer(rows, num_tiles),
        row_max=buffer(rows),
        floor=buffer(rows),
        min_logit=buffer(rows),
        listed=buffer(rows, dtype=torch.int32),
        mass=buffer(rows, dtype=torch.int64),
        list_id=buffer(rows, vocab_split.capacity, dtype=torch.int32),
        list_x=buffer(rows, vocab_split.capacity),
        sum_max=buffer(rows, num_tiles),
        sums=buffer(rows, num_tiles),
    )
    scan_kernel[(num_tiles, rows)](
        *(logits, params.real, *pointers, group_max, found.tile_max, moments),
        *(vocab_size, num_nodes, batch, *scalars),
        TILE=vocab_split.tile,
        GROUP=vocab_split.group,
        num_warps=8,
        **options,
    )
    floor_kernel[(rows,)](
        *(group_max, found.tile_max, *params, moments),
        *(found.row_max, found.floor, found.min_logit, found.listed, found.mass),
        *(num_tiles, num_groups, vocab_size, num_nodes, batch, vocab_split.capacity),
        SCORES=scores,
        K=k,
        TILES=triton.next_power_of_2(num_tiles),
        GROUPS=triton.next_power_of_2(num_groups),
        num_warps=8,
        **options,
    )
    collect_kernel[(min(num_tiles, triton.cdiv(COLLECTORS, rows)), rows)](
        *(logits, positions, *params, *pointers, *found[1:]),
        *(num_tiles, vocab_size, num_nodes, batch, vocab_split.capacity, *scalars),
        SCORES=scores,
        K=k,
        TILE=vocab_split.tile,
        num_warps=8,
        **options,
    )
    return found
