"""Every fused operation of layers against its reference in plain torch, over a sample of arguments.

An operation has a function in `ARGUMENTS` that makes its arguments: odd sizes, no rows, rows at any stride, parts of
sums, packed weights of every code. Ten cases have every value of each of these.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

import pytest
import torch
from packed_weights import CODES, random_weight

from specdec.gpu.operations import FAST, KERNELS, REFERENCE
from specdec.gpu.ranks import map_tensors
from specdec.gpu.triton_shim import INTERPRETED, tl, triton
from specdec.kvcache.layout import PrimaryLoc
from specdec.layers.embedding import embed, embed_and_norm
from specdec.layers.gated_delta import COLUMNS, DeltaHeads, delta_heads, delta_inputs, gate_norm
from specdec.layers.gemm.linear import Mlp, gated_linear, linear
from specdec.layers.gemm.product import Product, finish, reference_finish, split_k_of
from specdec.layers.head_gates import gate_channels, gate_heads
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.experts import Experts, apply_experts
from specdec.layers.moe.fork_join import BranchInputs, fork_norm, join_norm
from specdec.layers.moe.routing import Router, Routing
from specdec.layers.norm import Norm, norm, qk_norm
from specdec.layers.per_layer_embedding import EmbeddingParts, gated_projection, layer_inputs
from specdec.layers.rope_store import Destination, Heads, Rotary, rope_store, rotary

from devices import DEVICE, DTYPES, TOLERANCES
from marks import examples

FORMS = [*CODES, None, None, None]  # of weights; None: plain
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")


class Draw:
    """Arguments of case number `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed, self.calls = seed, 0
        torch.manual_seed(seed)

    def one(self, values: Sequence[T]) -> T:
        """One of the values: N consecutive cases have each of N values once, in an order of their own."""
        self.calls += 1
        turn, number = divmod(self.seed, len(values))
        return Random(f"{self.calls} {turn}").sample(values, len(values))[number]

    def rows(self) -> int:
        return self.one([0, 1, 2, 5, 17, 40, 70, 3])

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    def strided(self, rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor [rows, *shape] whose rows are those of a wider one."""
        return self.tensor(rows, 2, *shape, dtype=dtype)[:, 1]

    def product(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Product:
        splits = self.one([1, 2, 3])
        if splits == 1 and self.one([False, True]):
            return Product.from_value(self.tensor(rows, width, dtype=dtype))
        bias = self.tensor(width, dtype=dtype) if self.one([False, True]) else None
        return Product(self.tensor(splits, rows, width), bias, dtype)

    def gain(self, width: int, **form: bool) -> Norm:
        return Norm(self.tensor(width), self.one([1e-6, 0.1]), **form)


def of_linear(draw: Draw, heights: Sequence[int] = (1, 33, 64, 70, 130)) -> Arguments:
    dtype, rows, n = draw.one(DTYPES), draw.rows(), draw.one(heights)
    code, k, short = draw.one(FORMS), draw.one([128, 384, 1152]), draw.one([1, 100, 600, 1000])
    k = k if code else short
    weight = random_weight(code, n, k, dtype=dtype) if code else draw.strided(n, k, dtype=dtype).mul_(k**-0.5)
    bias = draw.tensor(n, dtype=dtype) if draw.one([False, True]) else None
    return (draw.strided(rows, k, dtype=dtype), weight, bias), {}


def of_gated_linear(draw: Draw) -> Arguments:
    (x, weight, _), _ = of_linear(draw, (2, 64, 66, 130))
    limit = {"limit": 0.5} if draw.one([False, False, True]) else {}
    return (x, weight, draw.one(["silu", "gelu_tanh"])), limit


def of_embed(draw: Draw) -> Arguments:
    rows, width, dtype = draw.one([0, 1, 5, 4]), draw.one([3, 512, 700, 33]), draw.one(DTYPES)
    scale, beside = draw.one([None, torch.tensor(50.5964, device=DEVICE)]), draw.one([None, 512, 5, 1030])
    tokens = torch.randint(0, 11, (rows, 3), device=DEVICE)[:, 1]
    right = None if beside is None else draw.strided(rows, beside, dtype=dtype)
    return (tokens, draw.tensor(11, width, dtype=dtype), scale, right), {}


def of_embed_and_norm(draw: Draw) -> Arguments:
    width, dtype = draw.one([1, 24, 130]), draw.one(DTYPES)
    one, two = draw.tensor(2, width, dtype=dtype)
    tokens, product = torch.tensor([3, 0, 3, 5], device=DEVICE), draw.product(4, width, dtype)
    table = draw.strided(6, width, dtype=dtype)
    return (tokens, table, product, Norm(one, 1e-3, round_first=True), Norm(two, 1.0)), {}


def of_norm(draw: Draw) -> Arguments:
    rows, width = draw.one([0, 1, 3]), draw.one([1, 63, 100, 2000])
    form = draw.one([{"round_first": True}, {"plus_one": True}, {"centred": True}, {}])
    weighted = draw.one([True, True, False])  # without a weight a norm may have any form, too
    options: dict[str, Any] = {
        "post": draw.gain(width, **form),
        "pre": draw.gain(width, **form) if weighted else draw.gain(width, **form)._replace(weight=None),
        "residual": draw.strided(rows, width),
        "scale": draw.tensor(1),
        "factor": 0.22,
        "addend": draw.product(rows, width)._replace(bias=None),
    }
    return (draw.product(rows, width),), {k: v for k, v in options.items() if draw.one([False, True])}


def of_qk_norm(draw: Draw) -> Arguments:
    q_width, k_width = draw.one([(1, 1), (63, 21), (64, 64), (100, 20)])
    round_first = draw.one([False, True])
    gains = (Norm(draw.tensor(n), eps, round_first) for n, eps in ((q_width, 0.1), (k_width, 0.2)))
    return (draw.product(3, q_width + 2 * k_width), *gains), {}


def of_fork_norm(draw: Draw) -> Arguments:
    rows, width = draw.one([0, 1, 3]), draw.one([1, 63, 100, 2000])
    readers = {name: draw.gain(width) for name in ("post", "mlp", "experts")}
    options = {"residual": draw.strided(rows, width), "router": draw.gain(width, round_first=True), "factor": 0.3}
    return (draw.product(rows, width),), {**readers, **options}


def of_join_norm(draw: Draw) -> Arguments:
    rows, width, top_k = draw.one([0, 1, 3]), draw.one([1, 63, 100, 2000]), draw.one([1, 8])
    options: dict[str, Any] = {name: draw.gain(width) for name in ("dense_gain", "chosen_gain", "post")}
    end = draw.one([(), ("pre",), ("scale", "pre")])
    options |= {name: draw.gain(width) if name == "pre" else draw.tensor(1) for name in end}
    chosen = Product(draw.tensor(top_k, rows, width), None, torch.float32)
    return (draw.product(rows, width)._replace(bias=None), chosen), {**options, "residual": draw.strided(rows, width)}


def heads_of(draw: Draw, d: int) -> Heads:
    q, k, v = draw.gain(d), draw.gain(d), Norm(None, 1e-6)
    one, first = (draw.gain(d, plus_one=True) for _ in range(2)), (draw.gain(d, round_first=True) for _ in range(2))
    return draw.one(
        [
            Heads(4, 2, d, q, k, v),  # Gemma 4
            Heads(2, 1, d, q, k, v, values_are_keys=True),
            Heads(3, 0, d, q),  # shared K/V
            Heads(4, 1, d),  # Llama
            Heads(2, 1, d, *one),  # Gemma 3
            Heads(4, 2, d, interleaved=True),  # GLM
            Heads(4, 2, d, narrow_v_dim=d // 2 - 1, v_scale=0.707),  # MiMo
            Heads(2, 2, d, last=True, narrow_v_dim=d - 2),  # latents
            Heads(2, 1, d, draw.gain(d, plus_one=True), draw.gain(d, plus_one=True), gated=True),  # Qwen3.5
            Heads(2, 2, d, *first),  # Qwen3
        ]
    )


def of_rope_store(draw: Draw) -> Arguments:
    rows, (dim, rotated) = draw.one([5, 0]) if draw.seed > 9 else 5, draw.one([(8, 8), (20, 12), (64, 16)])
    heads = heads_of(draw, dim)
    table = Rotary(*draw.tensor(2, rows, rotated // 2 + 3)[..., : rotated // 2])
    pools = (torch.zeros((12, heads.num_kv, size), device=DEVICE) for size in (dim, heads.v_dim))
    slots = torch.tensor([[7, 1], [3, 1], [0, 1], [11, 1], [0, 1]], device=DEVICE)[:rows, 0]  # two padded rows
    stored = Destination(*pools, PrimaryLoc(slots)) if draw.one([True, True, False]) else None
    return (draw.product(rows, heads.width), heads, table, stored), {}


def of_rotary(draw: Draw) -> Arguments:
    positions = torch.tensor([[0, 9], [1, 9], [77, 9], [131071, 9]], device=DEVICE)[:, 0]
    frequencies = 1e4 ** (-torch.arange(0, 70, device=DEVICE) / 70)
    return (positions, frequencies, 0.9, torch.float16 if draw.one([False, True]) else torch.float32), {}


def of_gate_heads(draw: Draw) -> Arguments:
    rows, heads, width = draw.one([0, 4]), draw.one([1, 6, 3]), draw.one([1030, 8, 20])
    return (draw.tensor(rows, heads + 1, width)[:, 1:], draw.product(rows, heads)), {}


def of_gate_channels(draw: Draw) -> Arguments:
    """What follows the pairs of queries and gates, keys and values, is not read. Heads may lie in any order: those of
    torch's attention, which proves a target's layers, lie before tokens."""
    rows, heads, width = draw.one([0, 4, 3]), draw.one([1, 3]), draw.one([33, 8])
    return (draw.tensor(heads, rows, width).transpose(0, 1), draw.product(rows, 2 * heads * width + 5)), {}


def of_layer_inputs(draw: Draw) -> Arguments:
    rows, layers, width = draw.one([0, 1, 4, 3]), draw.one([1, 2, 3]), draw.one([8, 20, 64])
    tokens = torch.randint(0, 9, (rows,), device=DEVICE)
    table = draw.tensor(9, layers * width + 3)[:, : layers * width]
    context = draw.product(rows, layers * width)._replace(bias=None)
    parts = EmbeddingParts(context=table, table=table, norm=draw.gain(width), context_scale=0.3, table_scale=4.0)
    return (context, tokens, parts), {}


def of_gated_projection(draw: Draw) -> Arguments:
    dtype, rows = draw.one(DTYPES), draw.one([0, 1, 5, 40, 200, 65])
    code = draw.one(FORMS)
    n, k = draw.one([32, 70, 33]), 128 if code else draw.one([8, 20, 24])
    weight = random_weight(code, n, k, dtype=dtype) if code else draw.tensor(n, k, dtype=dtype) * k**-0.5
    gate = Product(draw.tensor(draw.one([1, 2, 3]), rows, k), None, dtype)
    return (gate, draw.strided(rows, k, dtype=dtype), weight, draw.one(["gelu_tanh", "silu"])), {}


def of_experts(draw: Draw) -> Arguments:
    """Rows that choose two of three experts; listed or not."""
    form = draw.one(CODES)
    up, down = random_weight(form, 3, 256, 128), random_weight(form, 3, 128, 128)
    biases = draw.tensor(3, 256), draw.tensor(3, 128)
    experts = Experts(up, down, "swiglu_clamped", *biases, interleaved=True, alpha=1.702, limit=7.0)
    rows = examples(3, 6)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0], [0, 1]], dtype=torch.int32, device=DEVICE)[:rows]
    return (draw.strided(rows, 128), Routing(chosen, torch.rand(rows, 2, device=DEVICE)), experts), {}


DELTA_HEADS = [
    DeltaHeads(2, 4, 8, 12),
    DeltaHeads(3, 3, 5, 7),
    DeltaHeads(2, 6, 8, 12, groups=2),
    DeltaHeads(4, 8, 16, COLUMNS // 16, groups=4),  # more than one program, and the groups across them
]


def of_delta_inputs(draw: Draw) -> Arguments:
    heads, dtype, apart = draw.one(DELTA_HEADS), draw.one(DTYPES), draw.one([False, True])
    product = Product(draw.tensor(3, 3, heads.width + (0 if apart else 2 * heads.num_v)), None, dtype)
    gates = Product.from_value(draw.tensor(3, 2 * heads.num_v, dtype=dtype)) if apart else product
    return (product, gates, draw.tensor(heads.num_v), 12 * draw.tensor(heads.num_v), heads), {}  # steps: 0 to over 20


def of_delta_heads(draw: Draw) -> Arguments:
    heads, dtype = draw.one(DELTA_HEADS[:2]), draw.one(DTYPES)
    return (draw.tensor(3, heads.channels + 3, dtype=dtype)[:, : heads.channels], heads, "silu"), {}


def of_gate_norm(draw: Draw) -> Arguments:
    (heads, dim), dtype = draw.one([(4, 12), (1, 64)]), draw.one(DTYPES)
    gain = Norm(draw.tensor(dim, dtype=dtype), 1e-6, round_first=True)
    return (3 * draw.tensor(3, heads, dim), draw.tensor(3, heads * dim, dtype=dtype), gain, "silu"), {}


ARGUMENTS: dict[Callable[..., Any], Callable[[Draw], Arguments]] = {
    linear: of_linear,
    gated_linear: of_gated_linear,
    embed: of_embed,
    embed_and_norm: of_embed_and_norm,
    norm: of_norm,
    qk_norm: of_qk_norm,
    fork_norm: of_fork_norm,
    join_norm: of_join_norm,
    rope_store: of_rope_store,
    rotary: of_rotary,
    gate_heads: of_gate_heads,
    gate_channels: of_gate_channels,
    layer_inputs: of_layer_inputs,
    gated_projection: of_gated_projection,
    apply_experts: of_experts,
    delta_inputs: of_delta_inputs,
    delta_heads: of_delta_heads,
    gate_norm: of_gate_norm,
}


APART = {rotary: 1e-3, embed: 0.0}
"""Operations with a tolerance of their own."""


def values(found: Any, end: Callable[[Product], torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a result, with the last sum of a product done."""
    if isinstance(found, Product):
        return [end(found)]
    tensors: list[torch.Tensor] = []
    map_tensors(found, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def pools_of(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The pools that `rope_store` writes to, without slot 0: padded rows store anything there."""
    return [pool[1:] for it in arguments if isinstance(it, Destination) for pool in it[:2]]


def cases() -> Iterator[Any]:
    """Ten of each operation, and of experts, which take longest, one of each form of weights."""
    for operation in ARGUMENTS:
        for seed in range(examples(len(CODES) if operation is apply_experts else 10, 60)):
            yield pytest.param(operation, seed, id=f"{operation.__name__}-{seed}")


@pytest.mark.parametrize(("operation", "seed"), list(cases()))
def test_an_operation_is_its_reference(operation: Callable[..., Any], seed: int):
    given, options = ARGUMENTS[operation](Draw(seed))
    want = values(REFERENCE(operation)(*given, **options), reference_finish)
    kept = [pool.clone() for pool in pools_of(given)]
    kernels = [KERNELS(operation)]
    if FAST(operation) is not kernels[0]:
        kernels.append(FAST(operation))
    if operation is apply_experts:
        kernels = [lambda *x, few=few, **more: apply_experts(*x, few=few, **more) for few in (True, False)]
    for kernel in kernels:
        for pool in pools_of(given):
            pool.zero_()
        found = values(kernel(*given, **options), finish)
        assert [x.dtype for x in found] == [x.dtype for x in want]
        for got, expected in zip([*found, *pools_of(given)], [*want, *kept], strict=True):
            tolerance = APART.get(operation, TOLERANCES[got.dtype])
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    if operation is linear:
        product = linear(*given)
        assert len(product.parts) in (1, split_k_of(given[1]).splits)


interpreted = pytest.mark.skipif(not INTERPRETED, reason="on a GPU these are undefined")


@triton.jit
def _copy_kernel(p_x: tl.tensor, p_out: tl.tensor, BLOCK: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.load(p_x + o))


@triton.jit
def _place_kernel(p_out: tl.tensor) -> None:
    tl.store(p_out, tl.program_id(0))


@interpreted
@pytest.mark.parametrize(("sizes", "does"), [((3, 4), "loads"), ((4, 3), "stores")])
def test_memory_outside_of_the_tensors_of_a_launch_is_an_error(sizes: tuple[int, int], does: str):
    x, out = (torch.zeros(size) for size in sizes)
    with pytest.raises(Exception, match=f"_copy_kernel {does} 4 bytes outside of its tensors"):
        _copy_kernel[(1,)](x, out, BLOCK=4)


@interpreted
def test_what_the_last_program_of_a_launch_stores_depends_on_the_launch():
    outs = torch.zeros(2, dtype=torch.int32)
    for out in outs:
        _place_kernel[(5,)](out)
    assert sorted(outs.tolist()) == [0, 4]


def test_an_assignment_to_another_rank_reads_no_weight():
    up, down, x = (torch.randn(shape, device=DEVICE) for shape in ((2, 16, 8), (2, 8, 8), (1, 8)))
    experts = Experts(up, down, "silu", shared=True)
    routing = Routing(torch.tensor([[-1, 1]], dtype=torch.int32, device=DEVICE), torch.ones(1, 2, device=DEVICE))
    for few in (True, False):
        got, want = apply_experts(x, routing, experts, few=few), REFERENCE(apply_experts)(x, routing, experts)
        torch.testing.assert_close(got.parts[1], want.parts[1], rtol=1e-5, atol=1e-5)


def test_an_mlp_next_to_experts_keeps_its_limit():
    torch.manual_seed(0)
    sizes = ((24, 8), (8, 12), (3, 8), (3, 8, 8), (3, 8, 4))
    gate_up, down, table, *weights = (torch.randn(size, device=DEVICE) for size in sizes)
    experts, inputs = Experts(*weights, "silu"), BranchInputs(*torch.randn(4, 2, 8, device=DEVICE))
    dense, _ = mlp_and_experts(inputs, Mlp(gate_up, "silu", down, limit=0.5), Router(table, 2), experts)
    gate, up = (inputs.mlp @ gate_up.T).chunk(2, -1)
    want = (torch.nn.functional.silu(gate).clamp(max=0.5) * up.clamp(-0.5, 0.5)) @ down.T
    torch.testing.assert_close(finish(dense), want, rtol=2e-5, atol=2e-5)
