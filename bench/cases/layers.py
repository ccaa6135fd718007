"""The fused layers at Gemma 4 E4B's shapes: small kernels against their references, and the whole decoder and head.

forward   in one CUDA graph, context 1,024, next to the bytes it must read; peers: of these rows, next to the Hugging
          Face modules in a graph, and without attention
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.device import DEVICE, DIVISOR, DTYPE, ON_CPU  # isort: skip - before triton
import torch

from bench.clock import bandwidth_row, floor_us, graph_seconds
from bench.kernel_calls import Call, Make, check_calls
from bench.report import Row
from bench.verify import distance
from specdec.attention.bridge import AttentionCall
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_target
from specdec.gpu.operations import FAST, KERNELS
from specdec.kvcache.index_spaces import PrimaryLoc
from specdec.kvcache.layout import layout_from_config
from specdec.layers.fuse import fuse
from specdec.layers.linear import linear, vendor_linear
from specdec.layers.norm import Gain, norm, reference_norm
from specdec.layers.per_layer_embedding import gated_projection, reference_gated_projection
from specdec.layers.product import MAX_SMALL_ROWS, finish
from specdec.layers.rope_store import Destination, Heads, reference_rope_store, reference_rotary, rope_store, rotary
from specdec.modules.private_copy import ATTENTION_NAME, text_configs

CONTEXT = 24 if ON_CPU else 1024
HIDDEN, INTERMEDIATE, LAYERS, PLE = (64, 96, 3, 32) if ON_CPU else (2560, 10240, 42, 256)
HEADS = ((32, 2), (64, 0)) if ON_CPU else ((256, 2), (512, 2), (512, 0))  # channels of a head, heads of K and V
LIMIT = 4e-3
FORWARDS = {n: (1, n) for n in (1, 5, 8, 16)} | {n: (n, 1) for n in (32, 64, 128, 256)} | {40: (8, 5), 160: (32, 5)}
"""rows -> requests, nodes"""


def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) * std


def norm_call(rows: int, parts: str, seed: int) -> Call:
    product = linear(randn(rows, INTERMEDIATE), randn(HIDDEN, INTERMEDIATE, std=INTERMEDIATE**-0.5))
    gain, hidden, scale = Gain(randn(HIDDEN), 1e-6), randn(rows, HIDDEN), randn(1)
    every = {"pre": gain, "post": gain, "residual": hidden, "scale": scale}
    options: dict[str, Any] = {name: every[name] for name in parts.split()}
    return Call(lambda: norm(product, **options), lambda: reference_norm(product, **options), limit=LIMIT)


def rope_call(rows: int, dim: int, num_kv: int, seed: int) -> Call:
    """Rotary angles, and queries and keys turned and stored."""
    gains = Gain(randn(dim), 1e-6), *((Gain(randn(dim), 1e-6), Gain(None, 1e-6)) if num_kv else (None, None))
    heads = Heads(8, num_kv, dim, *gains)
    qkv = linear(randn(rows, HIDDEN), randn(heads.width, HIDDEN, std=HIDDEN**-0.5))
    positions = torch.randint(0, 100000, (rows,), device=DEVICE)
    frequencies = 1e4 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    pools = torch.zeros((4, 200, max(1, num_kv), dim), device=DEVICE, dtype=DTYPE)
    slots = PrimaryLoc(1 + torch.randperm(199, device=DEVICE)[:rows])
    table = rotary(positions, frequencies, 1.0, DTYPE)

    def outcome(store: Callable[..., Any], angles: Callable[..., Any], own: torch.Tensor) -> tuple[Any, ...]:
        turned = store(qkv, heads, table, Destination(own[0], own[1], slots))
        return (torch.stack(angles(positions, frequencies, 1.0, DTYPE)), *turned, *(own if num_kv else ()))

    return Call(
        lambda: outcome(rope_store, rotary, pools[:2]),
        lambda: outcome(reference_rope_store, reference_rotary, pools[2:]),
        limit=LIMIT,
    )


def projection_call(rows: int, seed: int) -> Call:
    inputs, weight = randn(rows, LAYERS, PLE)[:, 1], randn(HIDDEN, PLE, std=PLE**-0.5)
    gate = linear(randn(rows, HIDDEN), randn(PLE, HIDDEN, std=HIDDEN**-0.5))
    return Call(
        lambda: gated_projection(gate, inputs, weight, "gelu_tanh").parts,
        lambda: reference_gated_projection(gate, inputs, weight, "gelu_tanh").parts,
        limit=LIMIT,
    )


def check_rows(rows: Sequence[int]) -> Iterator[Row]:
    calls: list[tuple[str, Make]] = []
    for count in rows:
        for parts in ("pre", "post residual pre", "residual scale"):
            calls.append((f"norm of {parts}, {count} rows", partial(norm_call, count, parts)))
        for dim, num_kv in HEADS:
            calls.append(
                (f"rotary and store, {num_kv} heads of {dim}, {count} rows", partial(rope_call, count, dim, num_kv))
            )
        calls.append((f"gated projection, {count} rows", partial(projection_call, count)))
    yield from check_calls(calls)


class Requests:
    """`batch` requests of CONTEXT committed keys, a chain of `nodes` rows each, slots in random order."""

    def __init__(self, config: Any, batch: int, nodes: int) -> None:
        self.layout = layout_from_config(config)
        self.batch, self.nodes = batch, nodes
        length = CONTEXT + nodes
        order = 1 + torch.randperm(batch * length, device=DEVICE).view(batch, length)
        window = min(config.sliding_window, CONTEXT)
        windows = {None: CONTEXT, config.sliding_window: window}
        self.pages = {each: order[:, CONTEXT - keys : CONTEXT].contiguous() for each, keys in windows.items()}
        self.committed_len = torch.full((batch,), CONTEXT, device=DEVICE)
        self.start = {None: None, config.sliding_window: self.committed_len - window}
        write = order[:, CONTEXT:].contiguous()
        self.slots = PrimaryLoc(write.flatten())
        self.own = {
            each: own_keys(self.pages[each], self.start[each], self.committed_len, write, page_size=1)
            for each in self.pages
        }
        self.positions = self.committed_len[:, None] + torch.arange(nodes, device=DEVICE)
        self.pools = {
            spec.layer: [randn(batch * length + 1, spec.num_kv_heads, spec.head_dim) for _ in "kv"]
            for spec in self.layout.layers
            if spec.owner == spec.layer
        }

    @property
    def kv_bytes(self) -> int:
        keys = (min(CONTEXT, s.window or CONTEXT) * 2 * s.num_kv_heads * s.head_dim for s in self.layout.layers)
        return self.batch * sum(keys) * DTYPE.itemsize

    def destination(self, layer: int) -> Destination | None:
        return Destination(*self.pools[layer], self.slots) if layer in self.pools else None

    def attend_rows(
        self, layer: int, q: torch.Tensor, k: Any, v: Any, *, scaling: float, softcap: Any = None, sinks: Any = None
    ) -> torch.Tensor:
        assert softcap is None, "no model measured here has a softcap on its attention"
        spec = self.layout.layers[layer]
        out = tree_attention(
            q.view(self.batch, self.nodes, *q.shape[1:]).transpose(1, 2),
            *(*self.pools[spec.owner], self.own[spec.window], self.pages[spec.window], self.start[spec.window]),
            *(self.committed_len, self.positions),
            page_size=1,
            scaling=scaling,
            window=spec.window,
            sinks=sinks,
        )
        return out.view(q.shape)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Does for unfused modules what `attend_rows` does for fused ones."""
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        for pool, rows in zip(self.pools.get(call.layer, ()), (k, v), strict=False):
            pool.index_copy_(0, self.slots, rows)
        return self.attend_rows(call.layer, q, None, None, scaling=call.scaling)[None]


def e4b(layers: int) -> Any:
    model = make_target(find_shape("gemma4-e4b"), Shrink(layers or None, DIVISOR), DEVICE, DTYPE, 0)
    for config in text_configs(model):
        config._attn_implementation_internal = ATTENTION_NAME
    return model


def forward_rows(rows: Sequence[int], peers: Sequence[int], layers: int) -> Iterator[Row]:
    yield bandwidth_row()
    model = e4b(layers)
    decoder, head = model.model, model.lm_head.weight
    skipped = {id(decoder.embed_tokens_per_layer.weight)}
    weight_bytes = sum(p.nbytes for p in model.parameters() if id(p) not in skipped)
    fused, fast = fuse(decoder, KERNELS), fuse(decoder, FAST)
    for count in rows:
        requests = Requests(decoder.config, *FORWARDS[count])
        tokens = torch.randint(0, decoder.config.vocab_size, (1, count), device=DEVICE)
        inputs = {"input_ids": tokens, "position_ids": requests.positions.view(1, -1), "use_cache": False}

        def run(body: Any, last: Callable[[Any], Any] | None = None, inputs: Any = inputs, ctx: Any = requests) -> Any:
            hidden = body(**inputs, specdec_ctx=ctx).last_hidden_state
            return hidden if last is None else last(hidden[0])

        ours = partial(run, fused, lambda x: finish(linear(x, head)))
        error = distance(run(fused), run(decoder))
        times = {"all": ours, "without head": partial(run, fused)}
        if count > MAX_SMALL_ROWS:
            times["in any order"] = partial(run, fast, lambda x: finish(vendor_linear(x, head)))
        if count in peers:
            times["HF in a graph"] = partial(run, decoder, model.lm_head)
        ms = {what: graph_seconds([call]) * 1e3 for what, call in times.items()}
        if count in peers:
            requests.attend_rows = lambda layer, q, k, v, **_: q  # type: ignore[method-assign]
            ms["without attention"] = graph_seconds([ours]) * 1e3
        floor = floor_us(weight_bytes + requests.kv_bytes) / 1e3
        name = f"forward, {count} rows ({requests.batch} x {requests.nodes})"
        found = f"{error:.1e} from HF; floor {floor:.3f} ms, {ms['all'] / floor:.2f} x floor"
        yield Row(name, found, ", ".join(f"{what} {each:.3f} ms" for what, each in ms.items()), error < 0.05)


def warm_jobs(rows: Sequence[int]) -> list[Callable[[], Any]]:
    """A forward of twelve layers compiles the kernels of all, once for each set of kernels that row counts need."""
    needs = {(min(n, 16) > 8, n > 16, n > 32, n > 64, n == 1): n for n in rows}

    def forward(count: int) -> None:
        model = e4b(12).model
        requests, tokens = (
            Requests(model.config, *FORWARDS[count]),
            torch.zeros((1, count), dtype=torch.int64, device=DEVICE),
        )
        fuse(model, KERNELS)(input_ids=tokens, position_ids=requests.positions.view(1, -1), specdec_ctx=requests)

    return [partial(forward, count) for count in needs.values()]
