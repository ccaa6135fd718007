"""After a fault anywhere in a step, the state is as if the step had not begun.

Every call that a step makes inside the package is listed; the step is then run again with an exception at call k, for
one k after the other: the last call of every function that can change what is kept of a request, and of one function a
file elsewhere, each in the first case that calls it; of these calls every eighth (`make test-deep`: the last of every
function, in the first case of each stage), or with SPECDEC_FAULTS=all every call in every case there is (5,700, a
quarter of an hour). What was interrupted ends; every other stream is what it would have been alone, the table and the
allocator hold what their requests own and nothing else, and a new request is right.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

import specdec.engine
import specdec.kvcache.table
import specdec.runtime.engine_stats
from specdec import Engine, SamplingParams, SpecConfig
from specdec.runtime.request import Request

from engine_internals import assert_idle, capture_on_cpu
from marks import is_deep
from package_files import name_in_package
from tiny_families import FULL, SLIDING

NEW = 6  # more than the first stream has when the second has joined
LONG_ENOUGH = {"prompt": 3, "round": NEW}  # for the first stream to go on after the step that breaks
CHAIN, TREE = SpecConfig(3), SpecConfig(3, 2, 6)
CASES = {  # the one with most under way first
    "mtp-captured": ("mtp", TREE, 1, True),
    "mtp-tree-4": ("mtp", TREE, 4),
    "eagle3-tree-1": ("eagle3", TREE, 1),
    "mtp-chain-1": ("mtp", CHAIN, 1),
    "ngram-4": ("ngram", CHAIN, 4),
}


class Fault(BaseException):
    """Like KeyboardInterrupt: nothing catches it on the way."""


KEEPS = ("kvcache/", "specdec/runtime/", "specdec/engine")  # state of requests; elsewhere values are computed


def place_of(code: CodeType) -> CodeType | str:
    """What is broken once: a fault within a computation leaves the state that a fault in its neighbour leaves."""
    name = name_in_package(code.co_filename)
    assert name is not None
    return code if name.startswith(KEEPS) or is_deep() else name


class Calls:
    """Lists the calls of functions of the package, and raises at the one that is asked for."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.made = at, list[CodeType]()
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or name_in_package(frame.f_code.co_filename) is None:
            return
        self.made.append(frame.f_code)
        if len(self.made) == self.at:
            self.raised = True
            sys.setprofile(None)
            raise Fault(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")


@contextmanager
def profiled(calls: Calls) -> Iterator[None]:
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(None)


class Scene:
    """A stream that has begun, and a request that joins it: the step after that is the one to break."""

    def __init__(
        self, engine: Engine, truths: dict[tuple[int, ...], list[int]], prompts: list[list[int]], new: int
    ) -> None:
        self.engine, self.truths, self.prompts, self.new = engine, truths, prompts, new
        engine.clear_prefix_cache()  # every scene makes the same calls
        self.got: list[int] = []
        self.stream = engine.stream(prompts[0], SamplingParams(max_new_tokens=new))
        self.got += next(self.stream).token_ids
        self.other = engine.stream(prompts[1], SamplingParams(max_new_tokens=new))

    def begin(self, stage: str) -> None:
        """Up to the step that is to break: the other prompt's, or a round of both."""
        if stage == "round":
            next(self.other)
            self.got += next(self.stream).token_ids  # of the round in the same step

    def finish(self) -> None:
        """The rest of the first stream, and a new request next to it, are right; then nothing is held."""
        [out] = self.engine.generate(self.prompts[2], SamplingParams(max_new_tokens=2))
        assert out.token_ids == self.truths[tuple(self.prompts[2])][:2]
        self.got += [token for delta in self.stream for token in delta.token_ids]
        assert self.got == self.truths[tuple(self.prompts[0])][: self.new]
        self.other.close()
        assert_idle(self.engine)


@pytest.fixture
def scenes(make_target, make_drafter, make_engine, greedy_oracle, random_prompt, monkeypatch) -> Callable[..., Scene]:
    """scenes(drafter, spec, page_size, captured, new=6): a scene on one engine, that the faults before left usable.

    captured: with rounds that are replayed, the next launched before the one in front is settled.
    """
    # a warning would be a call that comes once
    monkeypatch.setattr(specdec.runtime.engine_stats, "REQUEST_ROUNDS_PER_CHECK", 1 << 30)
    layers = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1}
    model = make_target("gemma4-e2b", **layers)
    prompts = [random_prompt(n) for n in (5, 19, 8)]
    truths = {tuple(prompt): greedy_oracle(model, prompt, NEW) for prompt in prompts}
    engines: dict[Any, Engine] = {}

    def make(drafter: str | None, spec: SpecConfig, page_size: int, captured: bool = False, new: int = NEW) -> Scene:
        key = drafter, spec, page_size, captured
        if key not in engines:
            capture_on_cpu(monkeypatch, captured)
            sizes = {"page_size": page_size, "max_batch_size": 2, "max_model_len": 64, "prefill_chunk": 8}
            engines[key] = make_engine(model, make_drafter(drafter, model), spec=spec, **sizes)
        return Scene(engines[key], truths, prompts, new)

    return make


ALL = os.environ.get("SPECDEC_FAULTS") == "all"
# a step with a prompt has a round in it as well, so that alone will do for those of which both would take longest
STEPS = [("prompt", name) for name in ("mtp-captured", "eagle3-tree-1")]  # the others do nothing else in it
STEPS += [("round", name) for name in CASES if ALL or ("prompt", name) not in STEPS]


BROKEN_BY_PROMPTS: set[CodeType | str] = set()
"""What the stage "prompt" has broken, for the stage "round"."""


def calls_of(scene: Scene, stage: str) -> list[CodeType]:
    """The calls that the step makes."""
    for _ in range(3):  # work that an engine does once is done, and every round is captured
        scene.begin(stage)
        next(scene.other)
        scene.finish()
        scene = Scene(scene.engine, scene.truths, scene.prompts, scene.new)
    scene.begin(stage)
    counted = Calls()
    with profiled(counted):
        next(scene.other)
    scene.stream.close()
    scene.other.close()
    assert_idle(scene.engine)
    assert len(set(counted.made)) > 40
    return counted.made


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prompt", "round"])
def test_a_fault_at_any_call_of_a_step_is_as_if_it_had_not_begun(stage, scenes) -> None:
    """A function that an earlier case has broken is left out: what begins the step again is the same for all."""
    broken: set[CodeType | str] = set()
    if stage == "round" and not is_deep():  # what a step with a prompt calls, is broken there
        if not BROKEN_BY_PROMPTS:  # this stage runs alone
            for _, name in (step for step in STEPS if step[0] == "prompt"):
                made = calls_of(scenes(*CASES[name], new=LONG_ENOUGH["prompt"]), "prompt")
                BROKEN_BY_PROMPTS.update(map(place_of, made))
        broken |= BROKEN_BY_PROMPTS
    for _, name in (step for step in STEPS if step[0] == stage):
        scene = functools.partial(scenes, *CASES[name], new=LONG_ENOUGH[stage])
        made = calls_of(scene(), stage)
        last = {place_of(code): at for at, code in enumerate(made, start=1) if place_of(code) not in broken}
        broken |= last.keys()
        if stage == "prompt":
            BROKEN_BY_PROMPTS.update(last)
        chosen = sorted(last.values())[:: 1 if is_deep() else 64]
        for at in range(1, len(made) + 1) if ALL else chosen:
            calls = break_step(scene(), stage, at)
            if not calls.raised:  # a scene in the row of the one before the last finds its parameters on the device
                calls = break_step(scene(), stage, at)
            if not calls.raised:  # what the device has already is not sent again: a call or two fewer than there were
                assert at - len(calls.made) <= 2, f"{name}: {at=} {len(calls.made)=}"
                again = len(calls.made) - calls.made[::-1].index(made[at - 1])
                assert break_step(scene(), stage, again).raised


def break_step(scene: Scene, stage: str, at: int) -> Calls:
    """Raise at a call of the step, and see that nothing is left of it."""
    scene.begin(stage)
    calls = Calls(at)
    try:
        with profiled(calls):
            next(scene.other)  # the call that makes the step raises the fault
    except (Fault, StopIteration):
        pass
    scene.finish()
    return calls


def break_round(scene: Scene, name: str, broken: Any) -> None:
    """A round of both in which this attribute of a request raises, and what is left of it."""
    scene.begin("round")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, name, broken)
        with pytest.raises(Fault):
            next(scene.other)
    scene.finish()


def test_a_fault_between_append_and_commit_doubles_no_token(scenes) -> None:
    """Settling one request of two: the other had its tokens already."""
    settle, settled = Request.settle, []

    def interrupted(request, *arguments, **options):
        if settled:
            raise Fault
        settled.append(request)
        settle(request, *arguments, **options)

    break_round(scenes("mtp", CHAIN, 1), "settle", interrupted)


def test_a_fault_while_tokens_are_appended_doubles_none(scenes) -> None:
    """The stream has its tokens of the round, but they are not settled yet."""

    def interrupted(*settled):
        raise Fault

    break_round(scenes("mtp", CHAIN, 1), "settled", property(Request.settled.__get__, interrupted))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_fault_after_a_request_finished_leaks_no_row(rows, make_target, make_engine, greedy_oracle, random_prompt):
    """With one row the engine would be dead."""
    model, prompts = make_target("llama"), [random_prompt(n) for n in (5, 9)]
    engine = make_engine(model, "ngram", max_batch_size=rows)
    remove_ended = engine.inbox.remove_ended
    engine.inbox.remove_ended = lambda number: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate(prompts, SamplingParams(max_new_tokens=4))
    engine.inbox.remove_ended = remove_ended
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=4))
    assert [out.token_ids for out in outputs] == [greedy_oracle(model, prompt, 4) for prompt in prompts]
    assert_idle(engine)


def test_an_interrupted_recovery_is_made_again(scenes, monkeypatch) -> None:
    scene = scenes("ngram", CHAIN, 4)
    scene.begin("round")
    with monkeypatch.context() as broken:
        broken.setattr(scene.engine.target, "logits", lambda hidden: 1 / 0)
        broken.setattr(scene.engine.scheduler, "restart", lambda requests: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(scene.other)
        with pytest.raises(ZeroDivisionError):
            next(scene.stream)
    [out] = scene.engine.generate(scene.prompts[2], SamplingParams(max_new_tokens=NEW))
    assert out.token_ids == scene.truths[tuple(scene.prompts[2])]
    assert_idle(scene.engine)
