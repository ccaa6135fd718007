"""Arithmetic of recurrent layers: blocks and folds against transformers' own recurrences, the launches of a fused layer
against its module; and what is refused."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_rig import KVLayout, LayerSpec
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as delta_rule

from specdec import EngineConfig
from specdec.attention.backend import TorchBackend, TritonBackend
from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, folded, run_blocks
from specdec.config import MAX_FORCED_TOKENS
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.gpu.ranks import map_tensors
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import RECORDS, CacheField
from specdec.kvcache.recurrent_state import FOLD, StateShape
from specdec.layers.description.families import described_mixer
from specdec.layers.description.merge import WeightGroups
from specdec.layers.gated_delta import DeltaHeads, delta_inputs, unit_length
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product
from specdec.layers.packed.packed_modules import PackedLinear
from specdec.layers.packed.weight_slices import StackedWeights, place_weight, rank_rows
from specdec.measurement.random_weights import FORMS, empty_packed, fill_packed
from specdec.models import probe_context
from specdec.models.probe_context import ProbeContext
from specdec.models.target import TargetModel
from specdec.runtime.calls.arguments import require_recurrent

from dense_oracle import OneText
from devices import DEVICE, close
from marks import slow, usual_cases
from tiny_families import BASE, build_target

HEADS, KEY_HEADS, K_DIM, V_DIM = 4, 2, 8, 12
ON_KERNELS = pytest.mark.usefixtures("kernels_run", "poison_empty", "seeded")


def tokens(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(count, *shape, generator=draw)  # noqa: E731
    return {
        "q": unit_length(normal(KEY_HEADS, K_DIM)) * K_DIM**-0.5,
        "k": unit_length(normal(KEY_HEADS, K_DIM)),
        "v": normal(HEADS, V_DIM),
        "g": -torch.rand(count, HEADS, generator=draw) * 0.3,
        "beta": torch.rand(count, HEADS, generator=draw),
    }


def in_block(rows: dict[str, torch.Tensor], begin: int, first: int, last: int, known: Any, state: Any) -> Any:
    """Places `first` to `last` of the block from position `begin` on; known: u of the places before."""

    def placed(x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros((1, FOLD, *x.shape[1:]))
        out[0, :last] = x[begin : begin + last]
        return out

    u = torch.zeros(1, FOLD, HEADS, V_DIM) if known is None else known
    block = RecordBlock(state, placed(rows["k"]), u, placed(rows["g"]))
    place = torch.arange(FOLD)[None]
    new = (placed(rows[name]) for name in ("q", "v", "beta"))
    out, u = run_blocks(block, NewPlaces((place >= first) & (place < last), *new))
    return out[0, first:last], u, block._replace(u=u)


def run(rows: dict[str, torch.Tensor], cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the last state of all rows, computed in pieces that end at `cuts`."""
    state, known, outs, begin = torch.zeros(1, HEADS, K_DIM, V_DIM), None, [], 0
    for first, last in itertools.pairwise([0, *cuts]):
        while first < last:
            end = min(last, begin + FOLD)
            out, known, block = in_block(rows, begin, first - begin, end - begin, known, state)
            outs.append(out)
            first = end
            if end == begin + FOLD:
                state, known, begin = folded(block), None, end
    return torch.cat(outs), state


def test_blocks_are_the_recurrence_of_transformers() -> None:
    rows = tokens(3 * FOLD + 5)
    repeated = {name: rows[name].repeat_interleave(2, 1) for name in ("q", "k")}
    exact = [x[None].double() for x in (repeated["q"] * K_DIM**0.5, repeated["k"], rows["v"], rows["g"], rows["beta"])]
    want, _ = delta_rule(*exact[:3], g=exact[3], beta=exact[4])
    found, _ = run(rows, [len(rows["q"])])
    torch.testing.assert_close(found, want[0].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("cuts", [[*range(1, 54)], [7, 8, 30, 53], [16, 32, 48, 53], [1, 52, 53]], ids=str)
def test_a_token_has_the_same_bits_in_any_piece(cuts: list[int]) -> None:
    rows = tokens(53)
    found, whole = run(rows, cuts), run(rows, [53])
    assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])


def test_a_block_has_the_same_bits_in_company() -> None:
    rows = [tokens(FOLD, seed) for seed in range(3)]
    alone = [
        in_block(one, 0, 5, 11, torch.randn(1, FOLD, HEADS, V_DIM).mul(0.1), torch.ones(1, 4, 8, 12)) for one in rows
    ]
    blocks = RecordBlock(*(torch.cat(parts) for parts in zip(*(each[2] for each in alone), strict=True)))
    place = torch.arange(FOLD).expand(3, -1)
    new = [torch.stack([one[name] for one in rows]) for name in ("q", "v", "beta")]
    out, u = run_blocks(blocks, NewPlaces((place >= 5) & (place < 11), *new))
    assert torch.equal(out[:, 5:11], torch.stack([each[0] for each in alone]))
    assert torch.equal(u, torch.cat([each[1] for each in alone]))
    assert torch.equal(folded(blocks), torch.cat([folded(each[2]) for each in alone]))


@pytest.mark.parametrize(("k_dim", "v_dim"), [(7, 5), (5, 27), (64, 1)])
def test_a_block_of_odd_sizes_has_the_same_bits_at_any_address(k_dim: int, v_dim: int) -> None:
    """Regression: a matrix of such a size begins at another alignment for each block of a batch, which changed sums."""
    draw, count = torch.Generator().manual_seed(0), 7

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=draw)

    blocks = RecordBlock(
        normal(3, k_dim, v_dim), normal(FOLD, 1, k_dim), normal(FOLD, 3, v_dim), -(normal(FOLD, 3) ** 2)
    )
    new = normal(FOLD, 1, k_dim), normal(FOLD, 3, v_dim), normal(FOLD, 3).sigmoid()
    places = NewPlaces(torch.ones(count, FOLD, dtype=torch.bool), *new)
    together = *run_blocks(blocks, places), folded(blocks)
    for i in range(count):
        block, place = (type(each)(*(x[i : i + 1].clone() for x in each)) for each in (blocks, places))
        alone = *run_blocks(block, place), folded(block)
        assert all(torch.equal(x[i], y[0]) for x, y in zip(together, alone, strict=True))


def test_records_have_the_window_of_a_block_and_two_rounds() -> None:
    """A round commits its nodes, or what a grammar forces."""
    fields = CacheField("inputs", 1, 6), CacheField("u", 2, 4, dtype=torch.float32)
    state = StateShape(2, 3, 4, 3, 6)
    layout = KVLayout((LayerSpec(0, 0, "linear_attention", fields, RECORDS, state=state),))
    assert RECORDS.num_kept(1) == 2 * FOLD and MAX_FORCED_TOKENS < FOLD
    assert RECORDS.num_kept(9) == FOLD + 18
    assert layout.slot_bytes(RECORDS, torch.bfloat16) == 6 * 2 + 8 * 4
    assert layout.state_bytes(torch.bfloat16) == 2 * 3 * 4 * 4 + 3 * 6 * 2 + 8


def test_a_probe_has_the_same_products_whatever_its_rows(make_target, monkeypatch) -> None:
    """On a GPU the library chooses a product by its number of blocks, so the proof of bits would find others."""
    counts, run = [], probe_context.run_blocks

    def counted(block: RecordBlock, new: NewPlaces) -> Any:
        counts.append(len(block.k))
        return run(block, new)

    monkeypatch.setattr(probe_context, "run_blocks", counted)
    layout, every = TargetModel(make_target("qwen3_5")).layout, Recurrence(**tokens(40))
    found = []
    for count in (40, 5, 1):
        probe = ProbeContext(layout, torch.arange(count) // 2, torch.arange(count) % 2)
        found.append(probe.recur(0, every.map(lambda x, count=count: x[:count])))
        assert torch.equal(found[-1], found[0][:count]) and len(found[-1]) == count
    assert set(counts) == {1}


# the launches of a fused layer


@ON_KERNELS
def test_a_small_step_is_exact() -> None:
    """log(1 + e^x) of an x far below 0 is e^x, and no 0 of 1 + e^x rounded."""
    heads = DeltaHeads(1, 2, 1, 1)
    product = Product.from_value(torch.tensor([[0.0, 0, 0, 0, 0, 0, 0, 0, -30.0, -17.0]], device=DEVICE))
    _, _, g, _ = delta_inputs(product, product, torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE), heads)
    torch.testing.assert_close(g, -torch.tensor([[-30.0, -17.0]], device=DEVICE).exp(), rtol=1e-4, atol=0)


def packed(linear: torch.nn.Linear) -> PackedLinear:
    draw = torch.Generator(DEVICE).manual_seed(len(linear.weight))
    return PackedLinear(fill_packed(empty_packed(FORMS["int4-g32"], DEVICE, linear.weight.shape), draw))


@ON_KERNELS
@usual_cases(
    *("qwen3_5-plain-kernels", "qwen3_5-gates left in 16 bits-reference", "qwen3_next-plain-reference"),
    *("qwen3_next-packed-kernels", "qwen3_5_moe-packed-reference"),
)
@torch.no_grad()
@pytest.mark.parametrize("ops", [REFERENCE, slow(KERNELS)], ids=["reference", "kernels"])
@pytest.mark.parametrize("form", ["plain", "packed", "gates left in 16 bits"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_a_mixer_is_the_module_it_replaces(family: str, form: str, ops: Operations) -> None:
    module = build_target(family).eval().model.layers[0].linear_attn.to(DEVICE)
    for name, param in module.named_parameters():
        param.add_(torch.randn_like(param), alpha=0.1 if "proj" in name else 0.3)
    for name, child in list(module.named_children()):
        gates = name in ("in_proj_ba", "in_proj_b", "in_proj_a")
        if form != "plain" and name.startswith("in_proj") and not (gates and form != "packed"):
            setattr(module, name, packed(child))
    parts = described_mixer(module, WeightGroups(unmerged=False))
    x = torch.randn(9, module.hidden_size, device=DEVICE)
    want = module(x[None])[0]
    rows = parts["mixer"].run(ops(linear)(x, parts["qkv"]), x, 0, OneText(), ops)
    close(parts["mixer"].finish(rows, ops) @ parts["out"].T, want)
    some = tuple(row[[1, 5]] for row in rows)
    close(parts["mixer"].finish(some, ops) @ parts["out"].T, want[[1, 5]])
    by_rank = []
    for rank in range(2):  # which has the heads of one of two devices
        own = map_tensors(parts["mixer"].share(rank, 2), lambda rows: place_weight(rows, torch.cat), StackedWeights)
        qkv = place_weight(rank_rows(parts["qkv"], parts["mixer"].sections, rank, 2), torch.cat)
        by_rank.append(own.finish(own.run(ops(linear)(x, qkv), x, 0, OneText(), ops), ops))
    whole = parts["mixer"].finish(rows, ops)
    close(torch.cat(by_rank, dim=1), whole)
    assert ops is REFERENCE or torch.cat(by_rank, dim=1).equal(whole)


# what is refused


def test_plain_torch_is_refused_on_a_gpu() -> None:
    target = SimpleNamespace(recurrent=True, device=torch.device("cuda:0"), name="m")
    config = EngineConfig(attention="torch")
    with pytest.raises(ConfigError, match="attention='torch' is plain torch on cuda:0, and m has recurrent layers"):
        require_recurrent(target, config, TorchBackend())
    require_recurrent(target, config, TritonBackend())


def test_steps_of_mamba_are_within_the_limits_of_its_config(make_target) -> None:
    """A target is served only if its mixers compute what its own forward does."""
    model = make_target("granitemoehybrid", fresh=True, time_step_limit=(0.4, 0.5))
    assert model.model.layers[0].mamba.time_step_limit == (0.4, 0.5)
    assert TargetModel(model).recurrent


def test_records_of_8_bits_are_refused(make_target, make_engine) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype='fp8', and .* has recurrent layers, whose records"):
        make_engine(make_target("qwen3_5"), kv_dtype="fp8")


def test_a_drafter_with_recurrent_layers_is_refused(make_target, make_engine) -> None:
    with pytest.raises(UnsupportedModelError, match="has recurrent layers, and a drafter's states are not kept yet"):
        make_engine(make_target("llama"), make_target("qwen3_5"))


def test_a_recurrent_layer_of_another_kind_is_refused() -> None:
    import transformers

    config = transformers.MiniMaxConfig(**{**BASE, "num_local_experts": 2})
    with pytest.raises(UnsupportedModelError, match=r"layer 1 is of type 'linear_attention', and its module \(Mini"):
        TargetModel(transformers.MiniMaxForCausalLM(config).eval())
