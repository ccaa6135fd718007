"""Interrupts an engine at random moments, thousands of times: does anything hang, is the next answer right?

    python tools/interrupts.py                  10,000 timer signals over four scenes, some minutes
    python tools/interrupts.py --count 400      a short form

A timer signal raises an exception in the main thread after a random delay, in the middle of whatever runs there, and
the exception is kept, as `sys.last_exc` keeps it. Then a prompt is asked whose answer is known. Each scene runs in a
process of its own, which ends with the stacks of its threads when it says nothing for a while: a hang.

    idle       steps, statistics, requests handed in and aborted, with hardly anything to compute
    generate   a batch of two prompts
    stream     a stream that is read, left and dropped in turn
    serve      another thread steps the engine (`EngineThread`), this one hands in, reads and aborts
"""

import argparse
import faulthandler
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import Engine, EngineConfig, SamplingParams
from specdec.serving.engine_thread import EngineThread, Sample

SCENES = ("idle", "generate", "stream", "serve")
SILENCE = 120.0  # seconds without a word are a hang
REPORT = 25  # interrupts after which a scene shows that it goes on
PROMPTS = [[2, 105, 7, 31, 9], [2, 44, 3, 88, 61, 12, 9, 140, 33]]
PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True)
LONGER = SamplingParams(max_new_tokens=6, ignore_eos=True)


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt: only Python itself catches it, where it strikes within a finalizer."""


class Timer:
    """Raises Interrupt once, after a while. fired: it has, whether or not the exception got through."""

    def __init__(self) -> None:
        self.fired = False
        signal.signal(signal.SIGALRM, self._raise)

    def start(self, seconds: float) -> None:
        self.fired = False
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _raise(self, number: int, frame: object) -> None:
        self.fired = True
        raise Interrupt


def tiny_engine() -> Engine:
    """A random model of two layers, so that most of the time is spent in what is interrupted here."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=160, num_key_value_heads=2, **sizes)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4)
    config = EngineConfig(max_batch_size=4, max_model_len=128, prefill_chunk=16, device="cpu")
    return Engine.from_pretrained(model, config=config)


class Scene:
    """`work` is what is interrupted, `answer` what is asked then."""

    longest = 8e-3  # seconds until an interrupt

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def work(self) -> None:
        self.engine.generate(PROMPTS, LONGER, progress=False)

    def answer(self) -> list[int]:
        return self.engine.generate(PROMPTS[0], PARAMS, progress=False)[0].token_ids


class Idle(Scene):
    longest = 300e-6

    def work(self) -> None:
        for _ in range(10):
            self.engine.stats()
            self.engine.submit(PROMPTS[0], PARAMS).abort()
            self.engine.step()


class Stream(Scene):
    def work(self) -> None:
        for left_after in range(4):
            for number, _ in enumerate(self.engine.stream(PROMPTS[1], LONGER)):
                if number == left_after:
                    break


class Serve(Scene):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.thread = EngineThread(engine, lambda samples: None, [])

    def work(self) -> None:
        self._read(PROMPTS[1], LONGER)
        samples = [Sample(self.engine.submit(PROMPTS[0], LONGER), None)]
        self.thread.watch(samples)
        self.thread.abort(samples)

    def answer(self) -> list[int]:
        return self._read(PROMPTS[0], PARAMS)

    def _read(self, prompt: list[int], params: SamplingParams) -> list[int]:
        sample = Sample(self.engine.submit(prompt, params), None)
        self.thread.watch([sample])
        tokens: list[int] = []
        while not sample.handle.finished:
            tokens += [token for delta in iter(sample.handle.read, None) for token in delta.token_ids]
            time.sleep(1e-4)
        return tokens + [token for delta in iter(sample.handle.read, None) for token in delta.token_ids]


KINDS: dict[str, type[Scene]] = {"idle": Idle, "generate": Scene, "stream": Stream, "serve": Serve}


def interrupt_scene(name: str, count: int, seed: int, say: Callable[[int, int], None]) -> None:
    """In this process, `count` times; `say(interrupts, wrong answers)` now and then."""
    rng = random.Random(seed)
    timer = Timer()
    sys.unraisablehook = lambda unraisable: None  # what a finalizer swallows is not worth a line each
    engine = tiny_engine()
    truth = engine.generate(PROMPTS[0], PARAMS, progress=False)[0].token_ids
    scene = KINDS[name](engine)
    scene.answer()
    kept: list[BaseException] = []
    interrupts = wrong = 0
    while interrupts < count:
        try:
            timer.start(rng.uniform(1e-6, scene.longest))
            while not timer.fired:
                scene.work()
        except Interrupt as error:
            kept = [*kept[-20:], error]
        interrupts += 1
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        wrong += scene.answer() != truth or modes != (False, True)
        if interrupts % REPORT == 0 or interrupts == count:
            say(interrupts, wrong)
    if isinstance(scene, Serve):
        scene.thread.stop()


def run_scene(name: str, count: int, seed: int) -> int:
    """In this process -> exit status."""
    began, wrong = time.monotonic(), 0

    def say(interrupts: int, answers: int) -> None:
        nonlocal wrong
        wrong = answers
        faulthandler.dump_traceback_later(SILENCE, exit=True)

    say(0, 0)
    interrupt_scene(name, count, seed, say)
    print(f"{name:10} {count:6} interrupts, {wrong} wrong answers, {time.monotonic() - began:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return int(wrong > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="interrupts in all, or of the one scene")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=SCENES, help="this one alone, in this process")
    given = parser.parse_args(arguments)
    if given.scene:
        return run_scene(given.scene, given.count, given.seed)
    each = ["--count", str(-(-given.count // len(SCENES))), "--seed", str(given.seed)]
    commands = [[sys.executable, __file__, "--scene", scene, *each] for scene in SCENES]
    return max(int(subprocess.run(command, check=False).returncode != 0) for command in commands)


if __name__ == "__main__":
    sys.exit(main())
