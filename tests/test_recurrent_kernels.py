"""Kernels of recurrent layers against plain torch, over random prompts, trees and commits; their bits; engines."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cpu_capture import record
from kv_rig import ints
from recurrent_scene import Scene, Shape, as_answer, as_prompt, chosen, in_float64

from specdec import SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend, TritonBackend
from specdec.attention.plan import Pack
from specdec.attention.recurrence.gpu_recurrence import spans_of
from specdec.gpu.triton_shim import INTERPRETED
from specdec.kvcache.layer_context import Recurrence

from marks import deep, is_deep, usual_cases

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty")
DELTA = Shape(heads=2, key_heads=1, k_dim=8, v_dim=12, channels=24)
MAMBA = Shape(heads=2, key_heads=2, k_dim=20, v_dim=36, channels=24, corrected=False)  # two tiles, two chunks
LITTLE = Shape(heads=2, key_heads=2, k_dim=4, v_dim=4, channels=520)  # several programs of channels


def require_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def random_parents(draw: random.Random, num_nodes: int, *, deep: bool) -> list[int]:
    return [-1, *(max(0, n - draw.choice((1, 1, 2))) if deep else draw.randrange(n) for n in range(1, num_nodes))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@pytest.mark.cpu
@usual_cases("1-0", "mamba-4-0", "fast-0")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("shape", "page_size", "deterministic"),
    [(DELTA, 1, True), (MAMBA, 4, True), (DELTA, 4, True), (DELTA, 16, False), (MAMBA, 1, False)],
    ids=["1", "mamba-4", "4", "fast", "mamba-fast"],
)
def test_kernels_are_plain_torch(shape, page_size, deterministic, seed) -> None:
    """Prompts in chunks, chains and trees that cross a fold, accepted paths that are permuted or moved, copies."""
    draw = random.Random(seed)
    oracle, scene = (Scene(backend, shape, page_size) for backend in (TorchBackend(), TritonBackend(deterministic)))
    for one in (oracle, scene):
        assert [one.table.open_row() for _ in range(2)] == [0, 1]
    rows = np.arange(2)
    in_depth, usual = (0, 0, 1, 18, draw.choice((4, 33))), (0, 0, 1, 18, 4) if shape == DELTA else (0, 6)
    for step, num_nodes in enumerate(in_depth if is_deep() else usual):
        if num_nodes == 0:
            length = ints(*(draw.randrange(1, 29) for _ in rows))
            given = shape.random_rows(int(length.sum()) + 3, seed * 100 + step)
            require_close(*(one.read(rows, length, given) for one in (scene, oracle)))
            continue
        parents = [random_parents(draw, num_nodes, deep=draw.random() < 0.6) for _ in range(3)]
        given = shape.random_rows(3 * num_nodes, seed * 100 + step)
        require_close(*(one.verify(rows, parents, given) for one in (scene, oracle)))
        paths = [path_to(parents[row], draw.randrange(num_nodes)) for row in rows]
        length = ints(*(draw.randrange(1, len(path) + 1) for path in paths))
        padded = np.array([path + [0] * (num_nodes - len(path)) for path in paths])
        for one in (oracle, scene):
            one.commit(rows, length, padded)
        if step % 2:
            require_close(*(one.keep(0) for one in (scene, oracle)))


@pytest.mark.parametrize("deterministic", [True, False], ids=["exact", "fast"])
def test_runs_and_trees_that_begin_next_to_the_end_of_a_block(deterministic) -> None:
    """Inputs that a convolution reads are in the state, in records and in the forward. Two nodes end a block, and each
    of their children reads the state of its own parent."""
    scenes = [Scene(backend, LITTLE, 4) for backend in (TorchBackend(), TritonBackend(deterministic))]
    for scene in scenes:
        assert [scene.table.open_row() for _ in range(3)] == [0, 1, 2]
    rows = np.arange(3)
    for step, lengths in enumerate(((13, 0, 15), (17, 1, 3))):
        given = LITTLE.random_rows(sum(lengths) + 3, step)
        require_close(*(scene.read(rows, ints(*lengths), given) for scene in scenes))
    assert scenes[0].table.committed_len.host[rows].tolist() == [30, 1, 18]
    for step, parents in enumerate(([-1, 0, 0, 1, 2], [-1, 0])):
        given = LITTLE.random_rows(4 * len(parents), 9 + step)
        require_close(*(scene.verify(rows, [parents] * 4, given) for scene in scenes))
        for scene in scenes:
            scene.commit(rows, ints(1, 1, 1), np.array([[0] * len(parents)] * 3))
    require_close(*(scene.keep(0) for scene in scenes))


@pytest.mark.cpu
@pytest.mark.parametrize("seed", [0, *map(deep, range(1, 12))])
@pytest.mark.parametrize("corrected", [True, False], ids=["delta", "mamba"])
def test_prompts_in_spans_are_the_recurrence_in_float64(corrected, seed) -> None:
    """Lengths, heads and sizes of any kind, decays near 0 and near 1, betas near 0 and 1, keys that repeat; what
    follows a chunk, and the state, too."""
    draw = random.Random(seed)
    key_heads = draw.choice((1, 2))
    shape = Shape(key_heads * draw.choice((1, 3)), key_heads, draw.choice((8, 20)), draw.choice((12, 66)), 4, corrected)
    count = draw.randrange(90, 150)
    text = shape.random_rows(count, seed)
    layer = text[0]
    kind = torch.rand(layer["g"].shape, generator=torch.Generator().manual_seed(seed))
    layer["g"] = torch.where(kind < 0.3, layer["g"] * 1e-5, torch.where(kind < 0.4, layer["g"] * 60, layer["g"]))
    if corrected:
        layer["beta"] = torch.where(kind < 0.5, layer["beta"].round(), layer["beta"])
    layer["k"][30:60] = layer["k"][29]
    cuts = sorted({draw.randrange(1, count) for _ in range(2)} | {count})
    scene = Scene(TritonBackend(), shape, 4)
    _, out, _ = as_prompt(scene, text, cuts)
    want = in_float64(Recurrence(layer["q"], layer["k"], layer["v"], layer["g"], layer.get("beta")))
    require_close([out.double(), scene.keep(0)[0].double()], want)


def test_spans_are_those_of_their_runs() -> None:
    """Runs that begin within a block of 16, an empty one, and places of padding; a span of one token, and its rest."""
    start, length = torch.tensor([5, 16, 64, 3]), torch.tensor([60, 0, 64, 1])
    run_of, position = spans_of(Pack.from_lengths(torch.arange(4), start, length, 130))
    assert run_of.tolist() == [0, 0, 2, 3, 3, 3] and position.tolist() == [0, 64, 64, 0, 64, 128]
    run_of, position = spans_of(Pack.from_lengths(torch.tensor([0]), torch.tensor([15]), torch.tensor([50]), 50))
    assert run_of.tolist() == [0, 0] and position.tolist() == [0, 64]


# bits


def exact_scene(shape: Shape, page_size: int) -> Scene:
    return Scene(TritonBackend(deterministic=True), shape, page_size)


@pytest.mark.parametrize("shape", [DELTA, MAMBA], ids=["delta", "mamba"])
def test_a_token_has_the_same_bits_as_prompt_and_as_answer(shape) -> None:
    """`make test` reads answers from shortly before the end of a block to shortly after it."""
    count, cuts, reads = 36, [[5, 16, 29, 36]], [(14, 1, 17), (30, 7, 36)]
    if shape == MAMBA:
        count, cuts, reads = 20, [[5, 16, 20]], reads[:1]
    if is_deep():
        count, cuts, reads = 52, [[5, 16, 37, 52], [33, 34, 52]], [(14, 1, 52), (20, 5, 52), (33, 18, 52)]
    text = shape.random_rows(count, 3)
    whole = as_prompt(exact_scene(shape, 4), text, [count])
    found = [as_prompt(exact_scene(shape, 4), text, ends) for ends in cuts]
    for begin, num_nodes, end in reads:
        found.append(as_answer(exact_scene(shape, 1), chosen(text, range(end)), begin, num_nodes, seed=begin))
    for other in found:
        assert all(torch.equal(x, y[: len(x)]) for x, y in zip(other, whole, strict=True))


def test_a_copy_has_the_same_bits_whenever_it_is_made() -> None:
    text = DELTA.random_rows(52 if is_deep() else 17, 3)
    scenes = [exact_scene(DELTA, 4) for _ in range(2)]
    as_prompt(scenes[0], text, [len(text[0]["k"])])
    as_answer(scenes[1], text, 9 if is_deep() else 13, 4, seed=1)
    copies = [scene.keep(0) for scene in scenes]
    assert all(torch.equal(x, y) for x, y in zip(*copies, strict=True))


# engines


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: see python -m bench recurrent")
@pytest.mark.parametrize(
    ("family", "captured"), [("qwen3_5", True), deep("qwen3_5", False), deep("lfm2", True), deep("nemotron_h", True)]
)
def test_engines_on_kernels_have_the_tokens_of_plain_torch(
    family, captured, make_target, make_engine, random_prompt, scripted, tree_script, monkeypatch
) -> None:
    """Trees with wrong nodes, and a hit on the copy that an answer left; a captured engine launches a round before it
    knows the one before."""
    small = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]} if "qwen" in family else {}
    model = make_target(family, **small)
    prompts = [random_prompt(14)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    plain = [out.token_ids for out in make_engine(model).generate(prompts, params)]
    after, short = [*prompts[0], *plain[0], 3], SamplingParams(max_new_tokens=2, ignore_eos=True)
    [expected] = make_engine(model, prefix_cache=False).generate(after, short)
    monkeypatch.setattr("specdec.runtime.rounds.prompt_sizes.MIN_TOKENS", 4)
    monkeypatch.setattr("specdec.engine.capture_for", lambda *_: record if captured else None)
    trees = scripted(tree_script([prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]))
    settings = {"page_size": 4, "max_batch_size": 1, "max_model_len": 64, "attention": "triton", "fused": False}
    engine = make_engine(model, trees, spec=SpecConfig(3, 2, 6, adaptive=False), **settings)
    assert [out.token_ids for out in engine.generate(prompts, params)] == plain
    assert not captured or engine.stats().captures
    [again] = engine.generate(after, short)
    assert again.stats.cached_tokens == 16 and again.token_ids == expected.token_ids
