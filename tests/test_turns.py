"""A turn is always given back: after interrupts, kept exceptions, finalizers, calls within calls. Also the order of
waiting threads, and that a thread's torch modes are restored."""

import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch
from run_in_threads import in_threads

from specdec import SamplingParams
from specdec.errors import SpecDecError
from specdec.modules.weight_watch import StorageWatch, holding, weights_lock_held
from specdec.runtime.calls.turns import Turns, with_modes_restored
from specdec.serving.engine_thread import EngineThread

from marks import deep_cases, examples

NEW = 6
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def no_reader(handle):
    return Mock(handles=[handle], failure=lambda _: None)  # its loop is closed


FEW = SamplingParams(max_new_tokens=3, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("quick_collections")


class Interrupt(BaseException):
    """An exception like KeyboardInterrupt."""


def within(seconds, job):
    """Run a job that must not hang, on a thread of its own."""
    faults = []

    def run():
        try:
            job()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if faults:
        raise faults[0]


class Timer:
    """Raises Interrupt once, after this many seconds; 0 cancels it. fired: it has, even if a finalizer swallowed it."""

    fired = False

    def __call__(self, seconds):
        self.fired = False
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def interrupt(self, number, frame):
        self.fired = True
        raise Interrupt


@pytest.fixture
def interrupts(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # of an interrupt within a finalizer
    timer = Timer()
    before = signal.signal(signal.SIGALRM, timer.interrupt)
    yield timer
    timer(0)
    signal.signal(signal.SIGALRM, before)


def test_no_interrupt_leaves_a_turn_taken(interrupts):
    """Short turns, so that most of 2,000 signals come between two instructions of one."""
    turns, kept = Turns(), []
    for n in range(2000):
        try:
            interrupts((1 + n % 89) * 1e-6)
            while not interrupts.fired:
                turns.run(lambda: None)
                turns.attempt(lambda: None)
        except Interrupt as error:
            kept.append(error)  # its frames stay alive
        interrupts(0)
        assert turns.attempt(lambda: None), f"taken after {n + 1} interrupts"


class Scene:
    """`work` is interrupted, `answer` is asked then. longest: seconds until an interrupt."""

    longest, count = 8e-3, examples(10, 200)

    def __init__(self, engine, prompts):
        self.engine, self.prompts = engine, prompts

    def work(self):
        self.engine.generate(self.prompts, PARAMS)

    def answer(self):
        return self.engine.generate(self.prompts[0], PARAMS)[0].token_ids

    def close(self):
        self.engine.close()


class Idle(Scene):
    """Hardly anything is computed, so most signals come between two instructions of a call."""

    longest, count = 300e-6, 400

    def work(self):
        self.engine.stats()
        self.engine.submit(self.prompts[0], PARAMS).abort()
        self.engine.step()


class Stream(Scene):
    """Streams that are read, left and dropped in turn."""

    def work(self):
        for left_after in range(4):
            for number, _ in enumerate(self.engine.stream(self.prompts[1], PARAMS)):
                if number == left_after:
                    break


class Serve(Scene):
    """Another thread steps the engine; this one hands in, reads and aborts."""

    def __init__(self, engine, prompts):
        super().__init__(engine, prompts)
        self.thread = EngineThread(engine, [])

    def work(self):
        self.read(self.prompts[1])
        handle = self.engine.submit(self.prompts[0], PARAMS)
        self.thread.watch(no_reader(handle))
        self.thread.abort([handle])

    def answer(self):
        return self.read(self.prompts[0])

    def read(self, prompt):
        handle = self.engine.submit(prompt, PARAMS)
        self.thread.watch(no_reader(handle))
        while not handle.finished:
            time.sleep(1e-4)
        return [token for delta in iter(handle.read, None) for token in delta.token_ids]

    def close(self):
        self.thread.stop()
        super().close()


@deep_cases("idle", "stream")
@pytest.mark.parametrize("kind", [Idle, Scene, Stream, Serve], ids=["idle", "generate", "stream", "serve"])
def test_after_every_interrupt_the_next_answer_is_right(
    kind, interrupts, make_target, make_engine, greedy_oracle, random_prompt
):
    model, prompts, kept, answers = make_target("llama"), [random_prompt(5), random_prompt(9)], [], []
    truth = list(greedy_oracle(model, prompts[0], NEW))
    scene, draw = kind(make_engine(model, "ngram", max_batch_size=4), prompts), random.Random(1)
    for n in range(kind.count):
        try:
            interrupts(draw.uniform(1e-6, kind.longest))
            while not interrupts.fired:
                scene.work()
        except Interrupt as error:
            kept = [*kept[-20:], error]
        interrupts(0)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
        within(20, scene.engine.stats)
        if kind is not Idle or n % 20 == 0:
            within(20, lambda: answers.append(scene.answer()))
    assert kept and answers == [truth] * len(answers)
    scene.close()


def test_an_exception_that_is_kept_keeps_no_turn(make_target, make_engine, random_prompt, monkeypatch):
    """Keeps it as `sys.last_exc` does: wherever a step raises, its frames live on and the turn is over."""
    engine, prompt, kept = make_engine(make_target("llama")), random_prompt(5), []
    for where, at in (engine.inbox, "restart"), (engine.inbox, "process"), (engine, "_run"):
        with monkeypatch.context() as broken:
            broken.setattr(where, at, lambda: 1 / 0)
            engine._interrupted = True
            with pytest.raises(ZeroDivisionError) as caught:
                engine.step()
            kept.append(caught.value)
        within(20, engine.stats)
    assert len(engine.generate(prompt, PARAMS)) == 1


@deep_cases("generate")
@pytest.mark.parametrize("looks", ["generate", "clear_prefix_cache"])
def test_a_stream_collected_during_a_check_of_weights_causes_no_deadlock(
    looks, make_target, make_engine, random_prompt, monkeypatch
):
    """Another engine over the same weights: releasing its request looks at them, under the lock that is held."""
    model = make_target("llama")
    engine, other = (make_engine(model) for _ in range(2))
    other.state.weights = engine.state.weights  # as of two engines over one TargetModel
    streams = [other.stream(random_prompt(5), PARAMS)]
    next(streams[0])
    moved = StorageWatch.moved

    def collected(self):
        if streams:
            streams.clear()  # what the garbage collector does here
            gc.collect()
        return moved(self)

    monkeypatch.setattr(StorageWatch, "moved", collected)
    look = {
        "generate": lambda: engine.generate(random_prompt(9), PARAMS),
        "clear_prefix_cache": engine.clear_prefix_cache,
    }
    within(20, look[looks])
    assert not streams
    other.step()
    assert other.scheduler.idle and other.table.allocator.primary.held_pages == 0


def test_a_request_is_submitted_and_aborted_without_waiting_for_a_turn(make_target, make_engine, random_prompt):
    """`submit` looked whether a step ran and then waited for its turn: a step that began in between held it up."""
    engine = make_engine(make_target("llama"))
    run, engine._turns.run = engine._turns.run, lambda *_: pytest.fail("it waits for the step")
    handle = engine.submit(random_prompt(5), PARAMS)
    handle.abort()
    engine._turns.run = run
    assert handle.finished and engine.scheduler.idle


@pytest.mark.parametrize("instruction", range(0, 40, 3))
def test_an_interrupt_while_the_lock_over_weights_is_taken_leaves_no_trace(instruction):
    """The thread seemed to hold it ever after, and what it submitted or aborted waited for another call's turn."""
    lock, count = threading.Lock(), itertools.count()

    def trace(frame, event, _):
        frame.f_trace_opcodes = True
        if event == "opcode" and next(count) == instruction:
            raise KeyboardInterrupt
        return trace if frame.f_code.co_name == "holding" else None

    with suppress(KeyboardInterrupt):
        sys.settrace(trace)
        try:
            with holding(lock):
                assert weights_lock_held()
        finally:
            sys.settrace(None)
    assert not weights_lock_held()


def test_a_call_within_a_step_of_the_same_thread_is_refused(make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"))
    with pytest.raises(SpecDecError, match="would wait for the step in which it is made"):
        engine._in_turn(lambda: engine.generate(random_prompt(5), PARAMS))
    assert len(engine.generate(random_prompt(5), PARAMS)) == 1


def in_fork(work):
    """What a fork of this process that calls `work` says of it: "done", or the error's text."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.alarm(20)  # ends it if it hangs
            work()
            os.write(writer, b"done")
        except SpecDecError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_a_fork_made_within_a_turn_is_refused_and_one_made_between_turns_works():
    turns, inside, go = Turns(), threading.Event(), threading.Event()

    def twice():
        turns.run(int)
        turns.run(int)

    thread = threading.Thread(target=turns.run, args=(lambda: (inside.set(), go.wait(20)),))
    thread.start()
    assert inside.wait(20)
    assert "in a step of this engine" in in_fork(twice)
    go.set()
    thread.join()
    assert in_fork(twice) == "done"
    assert in_fork(lambda: in_threads([twice] * 4)) == "done"


def test_turns_go_in_order_of_arrival_and_skip_those_that_gave_up(interrupts):
    turns, order, inside, go = Turns(), [], threading.Event(), threading.Event()

    def first():
        turns.run(lambda: (inside.set(), go.wait(20)))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    interrupts(0.05)
    with pytest.raises(Interrupt):
        turns.run(lambda: order.append("gave up"))
    assert not turns.attempt(lambda: order.append("attempt"))

    def later(name):
        turns.run(lambda: order.append(name))

    threads = []
    for name in "abc":
        newest = turns._newest
        threads.append(threading.Thread(target=later, args=(name,)))
        threads[-1].start()
        while turns._newest is newest:
            time.sleep(0.001)
    go.set()
    in_threads([thread.join for thread in (*threads, thread)])
    assert order == ["a", "b", "c"]


# modes: an exception at any instruction of a turn leaves inference and grad mode as they were, kept or not


def modes():
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.fixture(params=["__enter__ begun", "__enter__ done", "__exit__ begun", "__exit__ done"])
def interrupted(request, monkeypatch):
    """interrupted(n): the n-th inference mode from now on is struck within `__enter__` or `__exit__`, at either end."""
    name, when = request.param.split()
    real, remaining = getattr(torch.inference_mode, name), [0]

    def struck(self, *details):
        remaining[0] -= 1
        if remaining[0] == 0 and when == "begun":
            raise Interrupt
        real(self, *details)
        if remaining[0] == 0:
            raise Interrupt

    struck.__code__ = struck.__code__.replace(co_name=name)
    monkeypatch.setattr(torch.inference_mode, name, struck)
    return lambda number: remaining.__setitem__(0, number)


@deep_cases("__enter__ begun-False", "__enter__ done-True", "__exit__ begun-True", "__exit__ done-False")
@pytest.mark.parametrize("grad", [True, False])
def test_modes_are_restored_wherever_an_interrupt_strikes(make_target, make_engine, interrupted, grad):
    engine = make_engine(make_target("llama"), None)
    with torch.set_grad_enabled(grad):
        truth = engine.generate([5, 6, 7], FEW)[0].token_ids
        kept, number, ended = [], 0, False
        while not ended:
            number += 1
            interrupted(number)
            try:
                engine.generate([5, 6, 7], FEW)
                ended = True
            except Interrupt as error:
                kept.append(error)
            interrupted(0)
            assert modes() == (False, grad), f"struck at the {number}. inference mode"
            assert engine.generate([5, 6, 7], FEW)[0].token_ids == truth
            assert modes() == (False, grad)
        assert number > 5
        kept.clear()
        gc.collect()
        assert modes() == (False, grad)


def test_a_guard_that_dies_late_changes_nothing(interrupted):
    """The exception is dropped in another inference mode, which ends as it began."""

    def work():
        with torch.inference_mode(), torch.inference_mode(False):
            pass

    kept = []
    for number in range(1, 5):
        interrupted(number)
        try:
            with_modes_restored(work)
        except Interrupt as error:
            kept.append(error)
        interrupted(0)
    with torch.inference_mode():
        kept.clear()
        gc.collect()
        assert modes() == (True, False)
    assert modes() == (False, True)


def test_modes_of_the_caller_stay_within_a_turn():
    with torch.inference_mode():
        assert with_modes_restored(modes) == (True, False)
        assert modes() == (True, False)
    with torch.no_grad():
        assert with_modes_restored(modes) == (False, False)
    assert with_modes_restored(modes) == (False, True)
