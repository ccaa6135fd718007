"""Mixtures of experts: the kernels against the references, and both against transformers' eager modules."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from specdec.gpu.triton_shim import TL_DTYPES, pdl_options, triton
from specdec.layers.description.moe_families import experts_of, router_of
from specdec.layers.gemm.linear import Mlp, gated_linear, linear
from specdec.layers.gemm.product import finish, reference_finish
from specdec.layers.moe import dense_and_moe
from specdec.layers.moe import expert_tiles as tiles_of_experts
from specdec.layers.moe import experts as moe_experts
from specdec.layers.moe.dense_and_moe import mlp_and_experts, reference_mlp_and_experts
from specdec.layers.moe.expert_tiles import UNLISTED_ROWS, expert_tiles
from specdec.layers.moe.experts import Experts
from specdec.layers.moe.fork_join import BranchInputs
from specdec.layers.moe.routing import Router, Routing, list_kernel, pick_kernel, reference_route, route
from specdec.layers.norm import reference_rms_norm
from specdec.layers.packed.packed_weight import PackedWeight

from marks import deep, deep_cases, slow, usual_cases
from tiny_families import build_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("kernels_run")
FAMILIES = ["gemma4-moe", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_moe-raw", "glm4_moe", "step3p7"]
CORRECTED = ["glm4_moe", "glm4_moe-raw", "hy_v3", "ernie4_5_moe", "step3p7"]
"""Families that choose experts by a bias that weighs nothing."""
NAMES = {  # a config's numbers of experts, of those that a token chooses, and of channels, where they have other names
    "gemma4-moe": ("num_experts", "top_k_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_intermediate_size"),
    "step3p7": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
}


def build(family: str, hidden: int = 40, width: int = 24, num_experts: int = 9, top_k: int = 3) -> Any:
    """The mixture of a model's last layer, with random weights, float32; GLM's experts are of 3 groups, 2 of them kept.
    With "-raw" weights of the chosen are not normalised."""
    torch.manual_seed(len(family))
    name = family.removesuffix("-raw")
    others = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    fields: dict[str, Any] = dict(zip(NAMES.get(name, others), (num_experts, top_k, width), strict=True))
    if name == "glm4_moe":
        fields |= {"n_group": 3, "topk_group": 2}
    if name in ("glm4_moe", "qwen3_moe"):
        fields["norm_topk_prob"] = name == family
    model: Any = build_target(name, hidden_size=hidden, **fields)
    model.set_experts_implementation("eager")
    decoder = model.get_decoder()
    layer = getattr(decoder, "language_model", decoder).layers[-1]
    block = layer if name == "gemma4-moe" else layer.mlp
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5)
        for key, tensor in (*block.named_buffers(), *block.named_parameters()):
            if key.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.3)
    return block.eval().to(DEVICE)


def router_module(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


def described(block: Any) -> tuple[Router, Experts]:
    """The mixture as fused layers read it."""
    router, experts = router_of(router_module(block), block), experts_of(block.experts)
    assert router is not None and experts is not None
    return router, experts


def theirs(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each row as transformers' mixture has them."""
    bias = [block.e_score_correction_bias] if hasattr(block, "e_score_correction_bias") else []
    _, weights, experts = router_module(block)(x, *bias)
    return weights * getattr(block, "routed_scaling_factor", 1.0), experts


def router_input(x: torch.Tensor, router: Router) -> torch.Tensor:
    return x if router.gain is None else reference_rms_norm(x, router.gain) * router.factor


def apply_experts(*arguments: Any, **options: Any) -> torch.Tensor:
    return finish(moe_experts.apply_experts(*arguments, **options))


def reference_apply_experts(*arguments: Any) -> torch.Tensor:
    return reference_finish(moe_experts.reference_apply_experts(*arguments))


@usual_cases(
    *("gemma4-moe-1", "gemma4-moe-19", "gpt_oss-5", "mixtral-1", "qwen3_moe-19", "qwen3_moe-raw-1", "glm4_moe-5"),
    "step3p7-19",
)
@torch.no_grad()
@pytest.mark.parametrize("num_rows", [slow(1), 5, slow(19)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_is_that_of_transformers(family, num_rows, poison_empty):
    block = build(family)
    router, experts = described(block)
    x = torch.randn(num_rows, 40, device=DEVICE) * 2
    expected = block.experts(x, *reversed(theirs(block, x)))
    normed = router_input(x, router)
    routing = route(normed, router)
    torch.testing.assert_close(routing, reference_route(normed, router), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(reference_apply_experts(x, routing, experts), expected, atol=2e-4, rtol=1e-5)
    for few in (True, False) if num_rows <= UNLISTED_ROWS else (False,):
        torch.testing.assert_close(apply_experts(x, routing, experts, few=few), expected, atol=2e-4, rtol=1e-5)


@deep_cases("gemma4-moe-520-40", "gpt_oss-520-40")
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "hidden", "width"),
    [deep("gpt_oss", 40, 24), ("glm4_moe", 40, 24), slow("gemma4-moe", 520, 40), slow("gpt_oss", 520, 40)],
)
def test_a_row_has_the_same_bits_with_any_other_rows(family, hidden, width, poison_empty):
    """520 channels are several ranges of the router's."""
    router, experts = described(build(family, hidden=hidden, width=width))
    x = torch.randn(21, hidden, device=DEVICE)
    normed = router_input(x, router)
    routing = route(normed, router)
    out = apply_experts(x, routing, experts)
    assert torch.equal(apply_experts(x, routing, experts, few=False), out)
    for rows in ([4], [20, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]):
        alone = route(normed[rows], router)
        assert torch.equal(alone.weights, routing.weights[rows]) and torch.equal(alone.experts, routing.experts[rows])
        for few in (True, False) if len(rows) < 3 or DEVICE.type == "cuda" else (False,):
            assert torch.equal(apply_experts(x[rows], alone, experts, few=few), out[rows])


@torch.no_grad()
@pytest.mark.parametrize("family", CORRECTED)
def test_scores_choose_and_weigh_as_those_of_transformers(family, poison_empty):
    """With a correction, groups, and experts that are equals, of which either library may take either."""
    torch.manual_seed(1)
    block = build(family, num_experts=12, top_k=4)
    router, _ = described(block)
    router.weight[1::2] = router.weight[::2]
    router.correction[1::2] = router.correction[::2]
    x = torch.randn(23, 40, device=DEVICE) * 0.3
    weights, experts = theirs(block, x)
    for routing in (reference_route(x, router), route(x, router)):
        ours, wanted = (
            torch.zeros(23, 12, device=DEVICE).scatter_(1, index.long(), weight).unflatten(1, (6, 2)).sum(-1)
            for index, weight in ((routing.experts, routing.weights), (experts, weights))
        )
        torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=2e-6)
    assert torch.equal(route(x, router).experts, reference_route(x, router).experts)
    by_score = reference_route(x, router._replace(correction=torch.zeros_like(router.correction), groups=1))
    assert not torch.equal(by_score.experts.sort(-1).values, experts.sort(-1).values.int()), "what chooses matters"
    chosen = route(x, router).experts
    own = torch.where((chosen >= 4) & (chosen < 8), chosen - 4, -1)  # of a rank with four of them
    assert torch.equal(route(x, router._replace(owned=(4, 4))).experts, own)


@pytest.mark.parametrize("normalised", [True, False])
def test_a_pick_of_groups_by_eye(normalised, poison_empty):
    """Logits of 6 experts in 3 groups; the correction chooses, and weighs nothing."""
    router = Router(torch.eye(6, device=DEVICE), 2, sigmoid=True, groups=3, kept_groups=1, scaling=3.0)
    router = router._replace(normalised=normalised, correction=torch.tensor([0, 0, 0.5, 0, 0, 0], device=DEVICE))
    x = torch.tensor([[9.0, -9, 0, 0, 2, 2], [0, 0, -9, -9, 0, 0], [0, 1, 0, 1, 0, 0]], device=DEVICE)
    experts = [[4, 5], [0, 1], [2, 3]]
    for routing in (route(x, router), reference_route(x, router)):
        assert routing.experts.tolist() == experts
        scores = x.sigmoid().gather(1, routing.experts.long())
        wanted = 3.0 * (scores / scores.sum(-1, keepdim=True) if normalised else scores)
        torch.testing.assert_close(routing.weights, wanted)


def test_experts_of_scores_that_are_0_are_chosen_by_logits_and_weigh_numbers(poison_empty):
    """Weights of a sigmoid's are divided by their sum, 0 in float32."""
    x = torch.tensor([[0.0, -200.0, -150.0]], device=DEVICE)
    table, last = torch.eye(3, device=DEVICE), torch.eye(3, device=DEVICE)[1:2].repeat(3, 1)
    for choose in (route, reference_route):
        assert choose(x, Router(table, 2)).experts.tolist() == [[0, 2]]
        assert choose(x, Router(last, 2, sigmoid=True, min_sum=1e-20)).weights.tolist() == [[pytest.approx(0)] * 2]


def test_equal_logits_choose_the_lower_expert(poison_empty):
    router = Router(torch.ones(5, 16, device=DEVICE), 3)
    routing = route(torch.randn(2, 16, device=DEVICE), router)
    assert routing.experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(routing.weights, torch.full((2, 3), 1 / 3, device=DEVICE))


def pick(logits: torch.Tensor, top_k: int, normalised: bool = True) -> Routing:
    """logits [T, E], as a product that is summed already."""
    num_rows, num_experts = logits.shape
    routing = Routing(
        torch.full((num_rows, top_k), -1, dtype=torch.int32, device=DEVICE),
        torch.full((num_rows, top_k), -1.0, device=DEVICE),
    )
    pick_kernel[(num_rows,)](
        *(logits[None], None, None, None, *routing, num_rows, num_experts, 0, num_experts, 0.0, 1.0),
        TOP_K=top_k,
        SIGMOID=False,
        NORMALISED=normalised,
        GROUPS=1,
        KEPT=1,
        SHARED=False,
        DTYPE=TL_DTYPES[logits.dtype],
        SPLITS=1,
        BLOCK_G=1,
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=1,
        **pdl_options(DEVICE),
    )
    return routing


PICKED = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", PICKED, ids=str)
def test_a_pick_by_eye(dtype):
    """Minus zero is zero, minus infinity is still an expert, and what is negative is the better the nearer to 0."""
    inf = float("inf")
    logits = torch.tensor([[-0.0, 0.0, -1.0], [-2.0, -1.0, -4.0], [-inf, -inf, 9.0], [1.0, 8.0, 2.0]], device=DEVICE)
    routing = pick(logits.to(dtype), 3)
    assert routing.experts.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [1, 2, 0]]
    torch.testing.assert_close(routing.weights[:2], logits[:2].sort(descending=True).values.softmax(-1))
    assert routing.weights[2].tolist() == [1, 0, 0]


@usual_cases("1-torch.float32", "37-torch.float16", "128-torch.bfloat16", "300-torch.float32")
@pytest.mark.parametrize("dtype", PICKED, ids=str)
@pytest.mark.parametrize("num_experts", [1, 37, 128, 300])
def test_a_pick_among_many_equals_is_a_stable_sort(num_experts, dtype):
    torch.manual_seed(num_experts)
    logits = torch.randint(-3, 4, (9, num_experts), device=DEVICE).to(dtype) / 2
    top_k = min(10, num_experts)
    expected = logits.float().sort(dim=-1, descending=True, stable=True)
    for normalised in (True, False):
        routing = pick(logits, top_k, normalised)
        assert torch.equal(routing.experts, expected.indices[:, :top_k].int())
        if normalised:
            wanted = expected.values[:, :top_k].softmax(-1)
        else:
            wanted = logits.float().softmax(-1).gather(1, expected.indices[:, :top_k])
        torch.testing.assert_close(routing.weights, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", PICKED, ids=str)
def test_a_row_without_numbers_still_picks_experts_that_exist(dtype):
    """What comes of it is no number either, but its neighbours' weights are read where they are."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for number in (torch.tensor(float("nan"), dtype=dtype), torch.tensor(-1, dtype=bits).view(dtype)):
        routing = pick(number.to(DEVICE).expand(1, 5).contiguous(), 3)
        assert len({*routing.experts[0].tolist()} & {*range(5)}) == 3


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("hidden", [70, 600])
def test_a_router_that_stays_in_float32_multiplies_all_of_its_bits(hidden, dtype, poison_empty):
    """ERNIE's, next to rows of 2 bytes; 600 columns are three ranges."""
    torch.manual_seed(0)
    router = Router(torch.randn(40, hidden, device=DEVICE) * hidden**-0.5, 5, float_logits=True)
    x = torch.randn(19, hidden, device=DEVICE).to(dtype)
    torch.testing.assert_close(route(x, router), reference_route(x, router), atol=2e-6, rtol=4e-6)


@torch.no_grad()
@pytest.mark.parametrize(("rows", "few"), [(16, True), (37, False)])
def test_tokens_that_all_choose_one_expert(rows, few, poison_empty):
    """They are one tile, or its list is as long as the batch. Those of the others are empty."""
    experts = Experts(
        torch.randn(4, 12, 20, device=DEVICE), torch.randn(4, 20, 6, device=DEVICE), "silu"
    )  # [E, 2 I, H], [E, H, I]
    x = torch.randn(rows, 20, device=DEVICE)
    routing = Routing(torch.full((rows, 1), 2, dtype=torch.int32, device=DEVICE), torch.rand(rows, 1, device=DEVICE))
    expected = reference_apply_experts(x, routing, experts)
    torch.testing.assert_close(apply_experts(x, routing, experts, few=few), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10], ids=["99 KB", "163 KB", "227 KB"])
@pytest.mark.parametrize("code", [None, "e4m3", "e2m1"])
def test_tiles_of_experts_fit_the_shared_memory_of_a_device(code, shared, monkeypatch):
    """Weights [32, 5760, 2880] of 1 to 8,192 rows with four assignments each: all stages are in memory at once."""
    monkeypatch.setattr(tiles_of_experts, "device_limits", lambda _: (132, shared))
    with torch.device("meta"):
        weight = torch.empty(32, 5760, 2880, dtype=torch.bfloat16)
        if code == "e4m3":
            weight = PackedWeight(
                code, torch.empty(32, 5760, 720, dtype=torch.int32), torch.empty(32, 1, 5760), None, 2880
            )
        if code == "e2m1":
            words = torch.empty(32, 5760, 360, dtype=torch.int32)
            weight = PackedWeight(code, words, torch.empty(32, 90, 5760, dtype=torch.bfloat16), None, 32)
    rows_of_tiles = []
    for rows in (1, 16, 17, 100, 500, 2000, 8192):
        tiles = expert_tiles(4 * rows, weight, torch.bfloat16, listed=rows > UNLISTED_ROWS)
        weight_bytes = tiles.block_n * tiles.block_k * {None: 16, "e4m3": 8, "e2m1": 4}[code] // 8
        in_memory = tiles.num_stages - (code is None and shared < 227 << 10)  # before Hopper one is in registers
        assert 1 <= tiles.num_stages <= 6
        assert in_memory * (weight_bytes + tiles.block_m * tiles.block_k * 2) <= shared
        rows_of_tiles.append(tiles.block_m)
    assert rows_of_tiles == sorted(rows_of_tiles) and rows_of_tiles[0] == 16 and rows_of_tiles[-1] == 128


def test_a_list_of_more_assignments_than_a_block():
    """1,024 are read at a time; after them the lists go on, each expert's in ascending order."""
    experts = (torch.arange(1500, device=DEVICE) ** 2 % 3).int()  # 0, 1, 1, 0, 1, 1, ... and never 2
    first, order = torch.zeros(4, dtype=torch.int32, device=DEVICE), torch.zeros(1500, dtype=torch.int32, device=DEVICE)
    list_kernel[(3,)](experts, first, order, 1500, BLOCK=1024, **pdl_options(DEVICE))
    assert first.tolist() == [0, 500, 1500, 1500]
    assert order.tolist() == [n for expert in (0, 1) for n in range(1500) if n**2 % 3 == expert]


def test_no_rows():
    experts = Experts(torch.randn(4, 12, 20, device=DEVICE), torch.randn(4, 20, 6, device=DEVICE), "silu")
    x = torch.randn(0, 20, device=DEVICE)
    routing = route(x, Router(torch.randn(4, 20, device=DEVICE), 2))
    assert apply_experts(x, routing, experts).shape == (0, 20)


@deep_cases("gemma4-moe-dtype1", "gpt_oss-dtype0")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", [slow("gemma4-moe"), "gpt_oss"])
def test_half_precision_is_within_rounding(family, dtype, poison_empty):
    router, experts = described(build(family, hidden=256, width=64).to(dtype))
    x = (torch.randn(7, 256, device=DEVICE) * 0.1).to(dtype)
    routing = route(router_input(x, router), router)
    wide = Experts(*(f.float() if isinstance(f, torch.Tensor) else f for f in experts))
    expected = reference_apply_experts(x.float(), routing, wide)
    for few in (True, False):
        got = apply_experts(x, routing, experts, few=few).float()
        assert (got - expected).norm() / expected.norm() < (1e-3 if dtype == torch.float16 else 1e-2)


@torch.no_grad()
def test_an_early_product_writes_to_memory_that_was_free_before_the_router_began(monkeypatch):
    """Its programs may run while the router's do, which may still read memory that the router has returned."""
    router, experts = described(build("gemma4-moe"))
    mlp = Mlp(torch.randn(72, 40, device=DEVICE), "gelu_tanh", torch.randn(40, 36, device=DEVICE))
    made, early = [], []
    route, launch = dense_and_moe.route, dense_and_moe._launch_both

    def noted_route(*arguments: Any, **options: Any) -> Routing:
        assert options == {"hold_next": True}
        made.append("router")
        return route(*arguments, **options)

    def noted_launch(x: Any, weight: Any, out: torch.Tensor, *arguments: Any, start: str) -> None:
        early.append((tuple(out.shape), start))
        launch(x, weight, out, *arguments, start=start)

    class Allocations(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function is torch.empty:
                made.append(arguments[0])
            return function(*arguments, **(options or {}))

    monkeypatch.setattr(dense_and_moe, "route", noted_route)
    monkeypatch.setattr(dense_and_moe, "_launch_both", noted_launch)
    with Allocations():
        mlp_and_experts(BranchInputs(*torch.randn(4, 5, 40, device=DEVICE)), mlp, router, experts)
    assert made[:2] == [(5, 36), "router"]
    assert early == [((5, 36), "early"), ((1, 5, 40), "usual")]


@deep_cases("40-36-7")
@torch.no_grad()
@pytest.mark.parametrize(
    ("hidden", "dense_width", "num_rows"),
    [
        (40, 36, 1),
        (40, 36, 7),
        (40, 600, 2),
        deep(520, 600, 2),
        deep(520, 600, 7),
        slow(40, 36, 70),
        deep(520, 600, 70),
    ],
)
def test_a_dense_mlp_next_to_experts_has_the_bits_that_it_has_alone(hidden, dense_width, num_rows, poison_empty):
    """600 channels are several ranges of the dense product; 70 rows are launched one by one."""
    router, experts = described(build("gemma4-moe", hidden=hidden))
    mlp = Mlp(
        torch.randn(2 * dense_width, hidden, device=DEVICE) / hidden**0.5,
        "gelu_tanh",
        torch.randn(hidden, dense_width, device=DEVICE) / dense_width**0.5,
    )
    x = BranchInputs(*torch.randn(4, num_rows, hidden, device=DEVICE))
    dense, chosen = mlp_and_experts(x, mlp, router, experts)
    alone = linear(gated_linear(x.mlp, mlp.gate_up, mlp.activation), mlp.down)
    assert len(dense.parts) == len(alone.parts) and torch.equal(finish(dense), finish(alone))
    assert torch.equal(finish(chosen), apply_experts(x.experts, route(x.router, router), experts))
    for got, want in zip((dense, chosen), reference_mlp_and_experts(x, mlp, router, experts), strict=True):
        value = reference_finish(want)
        torch.testing.assert_close(finish(got), value, atol=5e-6 * float(value.abs().max()), rtol=1e-5)
