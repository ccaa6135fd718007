"""Recurrent layers on kernels: results, bits and times of one layer, and small engines, captured or not.

Floors are bytes: of a verify one state read a request; of a prompt queries, keys and values read and outputs written.
Forms: how a token is computed under `deterministic=True`, as the precision of products, and if given columns, warps and
stages of a program ("tf32x3/16/1"); "fast" is the fast mode, if given with parts, columns, warps and stages of prompts
("fast/2/32/8/2").
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from bench.device import DEVICE, DTYPE, ON_CPU  # isort: skip - before triton
import numpy as np
import torch
from recurrent_scene import LOOKAHEAD, Scene, Shape, as_answer, as_prompt, in_float64

from bench.cases.greedy import SIZES, differences
from bench.clock import copies_of, graph_seconds, profiled, timed_row
from bench.report import Row
from bench.subjects import prompts_of
from bench.tiny_targets import CHAIN, VOCAB, Setting, greedy, tiny_engine, tiny_target
from bench.verify import attempt, attempt_all, bits_row, distance
from specdec.attention.backend import TorchBackend, TritonBackend
from specdec.attention.plan import KVPlan, Pack, plan_packed, plan_verify
from specdec.attention.recurrence import gpu_recurrence
from specdec.attention.recurrence.gpu_recurrence import FORM, RecurrentKernels
from specdec.attention.recurrence.span_kernels import SPAN_PARTS
from specdec.attention.trees.tree import DraftTree
from specdec.config import SamplingParams
from specdec.gpu.operations import choose_operations
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.recurrent_state import FOLD
from specdec.models.target import TargetModel

SHAPES = {
    "Qwen3.5-4B": Shape(32, 16, 128, 128, 8192),  # and 9B
    "Qwen3.5-27B": Shape(48, 16, 128, 128, 10240),
    "Nemotron-H 8B": Shape(128, 8, 128, 64, 10240, corrected=False),
    "Granite 4": Shape(48, 1, 128, 64, 3328, corrected=False),
}
if ON_CPU:
    SHAPES = {name: Shape(2, 1, 16, 12, 24, shape.corrected) for name, shape in SHAPES.items()}
LENGTH, CUTS = (40, (5, 16, 40)) if ON_CPU else (300, (5, 16, 37, 170, 300))
ANSWERS = ((3, 1), (20, 18)) if ON_CPU else ((3, 1), (290, 4), (100, 16), (200, 33))
"""First token of an answer, and the nodes of its trees."""
LIMIT = 2e-5
"""Distance of outputs from plain torch, at most; of prompts in the fast mode too, whose products are of bf16 in two
parts. Of states from float64 likewise."""
LIMIT_OF_ONE_PART = 1e-2
"""Distance of prompts in the fast mode whose operands have one part."""
FAST = "fast"
"""Form of the fast mode."""
TREES = (18,) if ON_CPU else (4, 18)
"""Nodes of the trees that are compared with plain torch."""


def kernels_in(form: str) -> AbstractContextManager[Any]:
    """form: see above. In Triton's interpreter prompts are in one part."""
    kind, *sizes = form.split("/")
    numbers = [int(size) for size in sizes]
    if kind == FAST:
        parts = SPAN_PARTS if ON_CPU or not numbers else (numbers[0], SPAN_PARTS[1])
        given = dict(zip(("SPAN_COLUMNS", "SPAN_WARPS", "SPAN_STAGES"), numbers[1:], strict=False))
        return mock.patch.multiple(gpu_recurrence, SPAN_PARTS=parts, **given)
    options = FORM | {"PRECISION": kind} | dict(zip(("num_warps", "num_stages"), numbers[1:], strict=False))
    return mock.patch.multiple(gpu_recurrence, FORM=options, COLUMNS=(*numbers, gpu_recurrence.COLUMNS)[0])


def check_rows(shapes: Sequence[str], precisions: Sequence[str]) -> Iterator[Row]:
    """A prompt, and an answer in trees, next to plain torch in float32 on the host."""
    for name in shapes:
        shape = SHAPES[name]
        text = shape.random_rows(LENGTH, 3)
        plain = Scene(TorchBackend(), shape, 4, device=torch.device("cpu"), max_len=LENGTH)
        want = as_prompt(plain, text, [LENGTH])
        reads = {"prompt": partial(as_prompt, text=text, cuts=CUTS)}
        for nodes in TREES:
            reads[f"trees of {nodes}"] = partial(as_answer, text=text, begin=LENGTH - 21, num_nodes=nodes, seed=1)
        for form in (*precisions, FAST):
            for what, read in reads.items():
                words = f"{name}, {form}, {what}"
                yield attempt(words, _check_row, words, form, shape, read, want)


def _check_row(name: str, form: str, shape: Shape, read: Callable[[Scene], Any], want: Any) -> Row:
    with kernels_in(form):
        scene = _scene(shape, deterministic=form != FAST)
        worst = max(distance(x, y) for x, y in zip(read(scene), want, strict=True))
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
    shapes: Sequence[str],
    forms: Sequence[str],
    batches: Sequence[int],
    nodes: Sequence[int],
    tokens: Sequence[int],
    serial: int,
) -> Iterator[Row]:
    """One layer, with a cold L2. serial: prompts of at most this length also run in decoding's order."""
    for name in shapes:
        shape = SHAPES[name]
        [text, _] = shape.random_rows(max(tokens), 2, DEVICE)
        for count in tokens:
            words = f"{name}, a prompt of {count}"
            given = {key: x[:count].to(DTYPE if key in ("inputs", "v", "beta") else x.dtype) for key, x in text.items()}
            used = [form for form in forms if form.startswith(FAST) or count <= serial]
            yield from attempt_all(words, _prompt_times(words, shape, given, used))
        for batch in batches:
            words = f"{name}, batch {batch}"
            yield from attempt_all(words, _tree_times(words, shape, forms, batch, nodes))


def _prompt_times(name: str, shape: Shape, given: dict[str, torch.Tensor], forms: Sequence[str]) -> Iterator[Row]:
    """Each form is compared with float64 before it is timed."""
    tokens = len(given["g"])
    rows = Recurrence(given["q"], given["k"], given["v"], given["g"], given.get("beta"))
    want = in_float64(rows)
    read = tokens * (8 * shape.key_heads * shape.k_dim + (4 + DTYPE.itemsize) * shape.heads * shape.v_dim)
    for form in forms:
        words = f"{name}: recurrence, {form}"
        yield from attempt_all(words, _prompt_rows(words, shape, rows, form, want, read))
    scene, plan = _prompt_plan(shape, tokens, deterministic=False)
    forward = RecurrentKernels(plan, scene.view)
    us = graph_seconds([lambda: forward.convolve(0, given["inputs"], scene.weight, None)]) * 1e6
    yield timed_row(f"{name}: convolution", us, 2 * given["inputs"].nbytes)


def _prompt_rows(
    name: str, shape: Shape, rows: Recurrence, form: str, want: tuple[torch.Tensor, torch.Tensor], num_bytes: int
) -> Iterator[Row]:
    scene, plan = _prompt_plan(shape, len(rows.g), deterministic=not form.startswith(FAST))
    forward = plan.backend.recurrence(plan, scene.view)
    with kernels_in(form):
        out = forward.recur(0, rows)
        state = scene.store.layers[0].state
        assert state is not None
        errors = [distance(out, want[0]), distance(state.matrices[plan.rows[0]], want[1])]
        ok = max(errors) < (LIMIT_OF_ONE_PART if form.startswith(f"{FAST}/1") else LIMIT)
        yield Row(name, f"{errors[0]:.1e}, state {errors[1]:.1e}", ok=ok)
        us = graph_seconds([lambda: forward.recur(0, rows)], 5) * 1e6
        _, _, kernels = profiled(lambda: forward.recur(0, rows))
        found = (f"{kernel} {ms * 1e3:.0f}" for kernel, (ms, _) in kernels.items() if kernel.endswith("_kernel"))
        yield timed_row(name, us, num_bytes, note=", ".join(found))


def _prompt_plan(shape: Shape, tokens: int, *, deterministic: bool) -> tuple[Scene, KVPlan]:
    scene = _scene(shape, 1, deterministic=deterministic, max_requests=1, max_len=tokens, dtype=DTYPE)
    row = scene.table.open_row()
    scene.table.ensure_slots(row, tokens)
    pack = Pack.from_lengths(*(torch.tensor([x], device=DEVICE) for x in (row, 0, tokens)), tokens)
    return scene, plan_packed(scene.backend, scene.table, pack)


def _tree_times(name: str, shape: Shape, forms: Sequence[str], batch: int, nodes: Sequence[int]) -> Iterator[Row]:
    state = 4 * shape.heads * shape.k_dim * shape.v_dim
    made = [_scene(shape, 1, max_requests=batch, dtype=DTYPE) for _ in range(copies_of(batch * state, 24))]
    text = shape.random_rows(40 * batch, 1)
    for scene in made:
        rows = [scene.table.open_row() for _ in range(batch)]
        scene.read(np.array(rows), np.full(batch, 40), text, padding=0)
        scene.table.ensure_slots(np.array(rows), np.full(batch, 40 + LOOKAHEAD))
    for num_nodes in nodes:
        chain = DraftTree.chain(torch.zeros((batch, num_nodes), dtype=torch.int64, device=DEVICE))
        plans = [plan_verify(scene.backend, scene.table, scene.table.rows(np.arange(batch)), chain) for scene in made]
        yield from _timed(f"{name}, {num_nodes} nodes", made, plans, forms, batch * num_nodes, batch * state)


def _timed(
    name: str, made: list[Scene], plans: list[KVPlan], forms: Sequence[str], count: int, num_bytes: int
) -> Iterator[Row]:
    """The recurrence, the convolution, and what precedes the first layer where nothing is folded."""
    [given, _] = made[0].shape.random_rows(count, 2)
    x = {key: y.to(DEVICE, DTYPE if key in ("inputs", "v", "beta") else y.dtype) for key, y in given.items()}
    rows = Recurrence(x["q"], x["k"], x["v"], x["g"], x.get("beta"))
    inputs, weight = x["inputs"], made[0].weight
    kept = [scene.store.layers[0] for scene in made]

    def begun(form: str) -> list[RecurrentKernels]:
        deterministic = not form.startswith(FAST)
        forwards = [
            RecurrentKernels(plan, scene.view, deterministic=deterministic)
            for plan, scene in zip(plans, made, strict=True)
        ]
        for forward, layer in zip(forwards, kept, strict=True):
            forward._begun(layer)
        return forwards

    for form in forms:
        calls = [partial(forward.recur, 0, rows) for forward in begun(form)]
        words = f"{name}: recurrence, {form}"
        yield attempt(words, _recurrence_row, words, form, calls, num_bytes)
    forwards = begun(FAST)
    us = graph_seconds([partial(forward.convolve, 0, inputs, weight, None) for forward in forwards]) * 1e6
    yield timed_row(f"{name}: convolution", us, 2 * inputs.nbytes)

    def begin(number: int) -> None:
        forwards[number]._slots = None
        forwards[number]._begun(kept[number])

    us = graph_seconds([partial(begin, number) for number in range(len(forwards))]) * 1e6
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
            name = f"{family}, {setting.summary}{', captured' if graphs else ''}"
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


def _scene(shape: Shape, page_size: int = 4, *, deterministic: bool = True, **sizes: Any) -> Scene:
    return Scene(TritonBackend(deterministic), shape, page_size, **{"max_len": LENGTH + FOLD, **sizes})


def _equal(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
