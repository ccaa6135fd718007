"""Recurrent layers on kernels: results, bits and times of one layer, and small engines, captured or not.

Floors are bytes: of a verify one state read a request; of a prompt queries, keys and values read and outputs written.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from bench.device import DEVICE, ON_CPU, ROOT  # isort: skip - before triton
import numpy as np
import torch

from bench.cases.greedy import SIZES, differences
from bench.clock import copies_of, graph_seconds, timed_row
from bench.report import Row
from bench.subjects import prompts_of
from bench.tiny_targets import CHAIN, VOCAB, Setting, greedy, tiny_engine, tiny_target
from bench.verify import attempt, attempt_all, bits_row, distance
from specdec.attention.pack import Pack
from specdec.attention.plan import KVPlan, plan_packed, plan_verify
from specdec.attention.recurrence import kernel_forward
from specdec.attention.recurrence.kernel_forward import RecurrentKernels
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.trees.tree import DraftTree
from specdec.attention.triton_backend import TritonBackend
from specdec.config import SamplingParams
from specdec.gpu.operations import choose_operations
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.recurrent_state import FOLD
from specdec.models.target import TargetModel

sys.path.insert(0, str(ROOT / "tests"))
from recurrent_scene import LOOKAHEAD, Scene, Shape, as_answer, as_prompt

SHAPES = {
    "Qwen3.5-4B": Shape(32, 16, 128, 128, 8192),
    "Nemotron-H 8B": Shape(128, 8, 128, 64, 10240, corrected=False),
    "Granite 4": Shape(48, 1, 128, 64, 3328, corrected=False),
}
if ON_CPU:
    SHAPES = {name: Shape(2, 1, 16, 12, 24, shape.corrected) for name, shape in SHAPES.items()}
LENGTH, CUTS = (40, (5, 16, 40)) if ON_CPU else (300, (5, 16, 37, 170, 300))
ANSWERS = ((3, 1), (20, 18)) if ON_CPU else ((3, 1), (290, 4), (100, 16), (200, 33))
"""Where an answer begins, and nodes of its trees."""
LIMIT = 2e-5


def kernels_in(form: str) -> AbstractContextManager[Any]:
    """form: the precision of products, and if given columns, warps and stages of a program, as in "ieee/32/4/3"."""
    precision, *sizes = form.split("/")
    given = dict(zip(("COLUMNS", "WARPS", "STAGES"), map(int, sizes), strict=False))
    return mock.patch.multiple(kernel_forward, PRECISION=precision, **given)


def check_rows(shapes: Sequence[str], precisions: Sequence[str]) -> Iterator[Row]:
    """A prompt, and an answer in trees of 18 nodes, next to plain torch in float32 on the host."""
    for name in shapes:
        shape = SHAPES[name]
        text = shape.random_rows(LENGTH, 3)
        plain = Scene(TorchBackend(), shape, 4, device=torch.device("cpu"), max_len=LENGTH)
        want = as_prompt(plain, text, [LENGTH])
        prompt = partial(as_prompt, text=text, cuts=CUTS)
        answer = partial(as_answer, text=text, begin=LENGTH - 21, num_nodes=18, seed=1)
        for precision in precisions:
            for what, read in (("prompt", prompt), ("trees of 18", answer)):
                words = f"{name}, {precision}, {what}"
                yield attempt(words, _check_row, words, precision, shape, read, want)


def _check_row(name: str, precision: str, shape: Shape, read: Callable[[Scene], Any], want: Any) -> Row:
    with kernels_in(precision):
        worst = max(distance(x, y) for x, y in zip(read(_scene(shape)), want, strict=True))
    return Row(name, f"{worst:.1e}", ok=worst < LIMIT)


def bits_rows(shapes: Sequence[str], precisions: Sequence[str]) -> Iterator[Row]:
    """A token as prompt, in other chunks, and as answer: alone in a chain, and in trees, next to another request."""
    for name in shapes:
        for precision in precisions:
            words = f"{name}, {precision}"
            yield attempt(words, _bits_row, words, precision, SHAPES[name])


def _bits_row(name: str, precision: str, shape: Shape) -> Row:
    text = shape.random_rows(LENGTH, 3)
    with kernels_in(precision):
        whole, scene = as_prompt(_scene(shape), text, [LENGTH]), _scene(shape)
        others = {"in chunks": as_prompt(scene, text, CUTS)}
        copies = [scene.keep(0)]
        for begin, num_nodes in ANSWERS:
            scene = _scene(shape, 1)
            others[f"answer in trees of {num_nodes}"] = as_answer(scene, text, begin, num_nodes, seed=begin)
        copies.append(scene.keep(0))
    same = [(what, _equal(found, whole)) for what, found in others.items()]
    return bits_row(name, [*same, ("copies of states", _equal(*copies))])


def times_rows(
    shapes: Sequence[str], forms: Sequence[str], batches: Sequence[int], nodes: Sequence[int], tokens: int
) -> Iterator[Row]:
    """One layer, with a cold L2. forms: see `kernels_in`."""
    for name in shapes:
        words = f"{name}, a prompt of {tokens}"
        yield from attempt_all(words, _prompt_times(words, SHAPES[name], forms, tokens))
        for batch in batches:
            words = f"{name}, batch {batch}"
            yield from attempt_all(words, _tree_times(words, SHAPES[name], forms, batch, nodes))


def _prompt_times(name: str, shape: Shape, forms: Sequence[str], tokens: int) -> Iterator[Row]:
    scene = _scene(shape, 1, max_requests=1, max_len=tokens)
    row = scene.table.open_row()
    scene.table.ensure_slots(row, tokens)
    pack = Pack.of(*(torch.tensor([x], device=DEVICE) for x in (row, 0, tokens)), tokens)
    plan = plan_packed(scene.backend, scene.table, pack)
    read = 4 * tokens * (2 * shape.key_heads * shape.k_dim + 2 * shape.heads * shape.v_dim)
    yield from _timed(name, [scene], [plan], forms, tokens, read)


def _tree_times(name: str, shape: Shape, forms: Sequence[str], batch: int, nodes: Sequence[int]) -> Iterator[Row]:
    state = 4 * shape.heads * shape.k_dim * shape.v_dim
    made = [_scene(shape, 1, max_requests=batch) for _ in range(copies_of(batch * state, 24))]
    text = shape.random_rows(40 * batch, 1)
    for scene in made:
        rows = [scene.table.open_row() for _ in range(batch)]
        scene.read(np.array(rows), np.full(batch, 40), text, padding=0)
        scene.table.ensure_all_slots(np.array(rows), np.full(batch, 40 + LOOKAHEAD))
    for num_nodes in nodes:
        chain = DraftTree.chain(torch.zeros((batch, num_nodes), dtype=torch.int64, device=DEVICE))
        plans = [plan_verify(scene.backend, scene.table, scene.table.rows(np.arange(batch)), chain) for scene in made]
        yield from _timed(f"{name}, {num_nodes} nodes", made, plans, forms, batch * num_nodes, batch * state)


def _timed(
    name: str, made: list[Scene], plans: list[KVPlan], forms: Sequence[str], count: int, num_bytes: int
) -> Iterator[Row]:
    """The recurrence, the convolution, and what precedes the first layer where nothing is folded."""
    [given, _] = made[0].shape.random_rows(count, 2)
    x: dict[str, Any] = {key: tensor.to(DEVICE) for key, tensor in given.items()}
    rows = Recurrence(x["q"], x["k"], x["v"], x["g"], x.get("beta"))
    inputs, weight, dtype = x["inputs"], made[0].weight, torch.float32
    forwards = [RecurrentKernels(plan, scene.view) for plan, scene in zip(plans, made, strict=True)]
    for forward in forwards:
        forward.recur(0, rows)  # folds
    for form in forms:
        words = f"{name}: recurrence, {form}"
        yield attempt(
            words, _recurrence_row, words, form, [partial(forward.recur, 0, rows) for forward in forwards], num_bytes
        )
    us = graph_seconds([partial(forward.convolve, 0, inputs, weight, None) for forward in forwards]) * 1e6
    yield timed_row(f"{name}: convolution", us, 2 * inputs.numel() * dtype.itemsize)
    if len(plans) > 1:
        begun = [RecurrentKernels(plan, scene.view) for plan, scene in zip(plans, made, strict=True)]
        kept = [scene.store.layers[0] for scene in made]

        def begin(number: int) -> None:
            begun[number]._slots = None
            begun[number]._begun(kept[number])

        us = graph_seconds([partial(begin, number) for number in range(len(begun))]) * 1e6
        yield timed_row(f"{name}: nothing to fold", us, 0)


def _recurrence_row(name: str, form: str, calls: Sequence[Callable[[], object]], num_bytes: int) -> Row:
    with kernels_in(form):
        return timed_row(name, graph_seconds(calls) * 1e6, num_bytes)


def engine_rows(families: Sequence[str], new: int) -> Iterator[Row]:
    """Tokens of transformers' own full forward; captured and not."""
    prompts = prompts_of((1, 9, 40) if ON_CPU else (1, 9, 40, 200), VOCAB, 0)
    for family in families:
        yield from attempt_all(family, _engines_of(family, prompts, new))


def _engines_of(family: str, prompts: list[list[int]], new: int) -> Iterator[Row]:
    model = tiny_target(family, 16 if ON_CPU else 64)
    wanted = [greedy(model, prompt, new) for prompt in prompts]
    bound = TargetModel(model, choose_operations("auto", "triton", DEVICE, torch.float32))
    for setting in (Setting("none", CHAIN, 1), Setting("n-gram", CHAIN, 1), Setting("n-gram", CHAIN, 16)):
        for graphs in (False,) if ON_CPU else (False, True):
            name = f"{family}, {setting.words}{', captured' if graphs else ''}"
            yield attempt(name, _engine_row, name, bound, setting, graphs, prompts, wanted)


def _engine_row(
    name: str, bound: TargetModel, setting: Setting, graphs: bool, prompts: list[list[int]], wanted: Any
) -> Row:
    sizes = {**SIZES, "prefix_cache": True, "attention": "triton", "cuda_graphs": graphs, "max_model_len": 512}
    engine = tiny_engine(bound, setting, **sizes)
    params = SamplingParams(max_new_tokens=len(wanted[0][0]), ignore_eos=True)
    wrong = ties = hits = 0
    for _ in range(1 if ON_CPU else 3):  # the same prompts again: with cached prefixes, and captured
        outputs = engine.generate(prompts, params, progress=False)
        more = differences([out.token_ids for out in outputs], wanted)
        wrong, ties = wrong + more[0], ties + more[1]
        hits += sum(out.stats.cached_tokens for out in outputs)
    engine.table.check()
    found = f"{wrong} tokens differ, {ties} after a tie; {hits} tokens cached; {bound.unfused or 'fused'}"
    return Row(name, found, ok=not wrong)


def _scene(shape: Shape, page_size: int = 4, **sizes: int) -> Scene:
    return Scene(TritonBackend(), shape, page_size, **{"max_len": LENGTH + FOLD, **sizes})


def _equal(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
