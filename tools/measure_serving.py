"""What many requests cost one another: a table, and JSON with `--out`.

    gap         32 streams: the longest time between two tokens of any of them, without and with a prompt of 8,000
                tokens arriving
    prefix      64 requests whose prompts begin with the same 500 tokens: seconds to the first token, of the first and
                of the later ones, beside 64 whose prompts have nothing in common
    throughput  64 requests at once (on a GPU 128 as well), plain and with a drafter: tokens a second

    python tools/measure_serving.py                                  the bundled pair on the CPU
    python tools/measure_serving.py --device cuda                    random weights at the shape of Gemma 4 E4B
    python tools/measure_serving.py --against ../other --repeats 5   every figure of another checkout as well

Each figure is taken in a process of its own, those of the two checkouts in turn, so that what the machine does
meanwhile hits both. Reported is the median of the repeats, and all of them in the JSON.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STREAMS, PREFIXED, PREFIX, TAIL = 32, 64, 500, 20
SPACES = ("full_slots", "swa_slots")
TARGETS: list[Any] = []  # on a GPU: made once a process


# in the process that measures; of specdec only what old checkouts have too


def make_engine(options: argparse.Namespace, *, batch: int, max_len: int, drafter: str | None, **config: Any) -> Any:
    """The bundled pair on the CPU, the E4B shape on a GPU."""
    import torch
    from transformers.utils import logging as transformers_logging

    from specdec import Engine, EngineConfig, SpecConfig

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = EngineConfig(max_batch_size=batch, max_model_len=max_len, device=options.device, **config)
    if options.device == "cpu":
        torch.set_num_threads(1)
        from specdec.loading import load_target

        model = load_target("tiny-gemma4", dtype=None, device=options.device, options={})
        model.config.max_position_embeddings = max(max_len, 4096)  # what it says beyond does not matter here
        return Engine.from_pretrained(model, drafter, tokenizer="tiny-gemma4", spec=SpecConfig(4), config=settings)
    from specdec.evaluation.model_shapes import Shrink, find_shape
    from specdec.evaluation.phases.random_weights import make_drafter, make_target
    from specdec.gpu.operations import choose_operations
    from specdec.models.target import TargetModel

    shape, shrink = find_shape(options.shape), Shrink(options.layers, options.shrink)
    device = torch.device(options.device)
    if not TARGETS:
        model = make_target(shape, shrink, device, torch.bfloat16, 0)
        TARGETS.append(TargetModel(model, choose_operations("auto", "auto", device, torch.bfloat16)))
    [target] = TARGETS
    made = None if drafter is None else make_drafter(shape, shrink, target, 1)
    return Engine(target, made, spec=SpecConfig(4), config=settings)


def prompts_of(engine: Any, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, engine.target.vocab_size - 3) for _ in range(length)] for length in lengths]


def hand_in(engine: Any, prompts: Sequence[list[int]], new: int, *, ignore_eos: bool = True) -> list[Any]:
    """Requests, whose `num_output` says how far they are."""
    from specdec import SamplingParams

    params = SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos)
    if hasattr(engine, "submit"):
        return [engine.submit(prompt, params)._request for prompt in prompts]
    requests: list[Any] = engine._make_requests(list(prompts), params)
    engine._submit(requests)
    return requests


def step(engine: Any) -> None:
    (engine.step if hasattr(engine, "step") else engine._step)()


def measure_gap(options: argparse.Namespace) -> dict[str, float]:
    rounds = options.rounds
    needed = 64 + 5 * (4 * rounds + options.long // 32)
    engine = make_engine(
        options,
        batch=STREAMS + 1,
        max_len=options.long + needed,
        drafter=drafter_name(options),
        **slots(options, needed),
    )
    new = needed - 32
    streams = hand_in(engine, prompts_of(engine, [16] * STREAMS), new)
    while min(stream.num_output for stream in streams) < 2:
        step(engine)
    for _ in range(rounds):  # whatever a shape costs the first time
        step(engine)
    [warm] = hand_in(engine, prompts_of(engine, [options.long], 9), 1)
    while not warm.finished:
        step(engine)

    def longest_gap(goes_on: Callable[[int], bool]) -> tuple[float, float, int]:
        """(longest gap, longest step, steps) in seconds."""
        count = [stream.num_output for stream in streams]
        last = [time.perf_counter()] * len(streams)
        longest, slowest, steps = 0.0, 0.0, 0
        while goes_on(steps):
            begin = time.perf_counter()
            step(engine)
            now = time.perf_counter()
            steps, slowest = steps + 1, max(slowest, now - begin)
            for i, stream in enumerate(streams):
                if stream.num_output > count[i]:
                    longest, last[i], count[i] = max(longest, now - last[i]), now, stream.num_output
        return max(longest, now - min(last)), slowest, steps

    without, quiet_step, _ = longest_gap(lambda steps: steps < rounds)
    [late] = hand_in(engine, prompts_of(engine, [options.long], 1), 2)
    begin = time.perf_counter()
    with_prompt, busy_step, steps = longest_gap(lambda steps: late.num_output == 0)
    assert not any(stream.finished for stream in streams), "the streams ended too soon to be measured"
    return {
        "longest gap without, ms": 1e3 * without,
        "longest gap with the prompt, ms": 1e3 * with_prompt,
        "longest step without, ms": 1e3 * quiet_step,
        "longest step with the prompt, ms": 1e3 * busy_step,
        "steps until its first token": steps,
        "its first token after, ms": 1e3 * (time.perf_counter() - begin),
        **{f"{name} held at most": use.peak for name in SPACES if (use := getattr(engine.stats(), name, None))},
    }


def measure_prefix(options: argparse.Namespace) -> dict[str, float]:
    figures = {}
    for name, shared in (("in common", True), ("of its own", False)):
        engine = make_engine(
            options, batch=PREFIXED, max_len=PREFIX + TAIL + 64, drafter=drafter_name(options), prefill_chunk=256
        )
        first_token(engine, prompts_of(engine, [PREFIX + TAIL], 5))  # compiles, captures
        [common] = prompts_of(engine, [PREFIX], 1)
        own = prompts_of(engine, [TAIL] * PREFIXED, 2)
        heads = [common] * PREFIXED if shared else prompts_of(engine, [PREFIX] * PREFIXED, 3)
        prompts = [head + tail for head, tail in zip(heads, own, strict=True)]
        [first] = first_token(engine, prompts[:1])
        later = first_token(engine, prompts[1:])
        figures[f"prefix {name}: the first, ms"] = 1e3 * first
        figures[f"prefix {name}: median of the later, ms"] = 1e3 * statistics.median(later)
        figures[f"prefix {name}: the last, ms"] = 1e3 * max(later)
        figures[f"prefix {name}: prompt tokens cached"] = getattr(engine.stats(), "cached_tokens", 0)
        engine.close()
    return figures


def first_token(engine: Any, prompts: Sequence[list[int]]) -> list[float]:
    """Seconds until each has its first token, all handed in at once; then they run to their end."""
    begin = time.perf_counter()
    requests = hand_in(engine, prompts, 4)
    came: dict[int, float] = {}
    while not all(request.finished for request in requests):
        step(engine)
        for i, request in enumerate(requests):
            if i not in came and request.num_output:
                came[i] = time.perf_counter() - begin
    return [came[i] for i in range(len(requests))]


def measure_throughput(options: argparse.Namespace) -> dict[str, float]:
    from specdec.models.bundled import HELD_OUT_PROBLEMS
    from specdec.text.prompt_files import read_prompts

    figures = {}
    for batch in (64,) if options.device == "cpu" else (64, 128):
        for drafter in (None, drafter_name(options)):
            engine = make_engine(options, batch=batch, max_len=64 + options.new + 64, drafter=drafter)
            problems = read_prompts(HELD_OUT_PROBLEMS) if options.device == "cpu" else []
            # on other prompts: none is found in a cache; a GPU captures a shape of prompts when it comes again
            warm_ups = 1 if options.device == "cpu" else 3
            for part, new in enumerate((*[8] * warm_ups, options.new)):
                draw = random.Random(part)
                prompts = prompts_of(engine, [draw.randint(16, 64) for _ in range(batch)], part)
                if problems:  # what the pair was trained on, for its drafts to be worth something
                    own = problems[part * batch : (part + 1) * batch]
                    prompts = [engine.chat_prompt(problem.text) for problem in own]
                begin = time.perf_counter()
                requests = hand_in(engine, prompts, new, ignore_eos=options.device != "cpu")
                while not all(request.finished for request in requests):
                    step(engine)
                seconds = time.perf_counter() - begin
            tokens = sum(request.num_output for request in requests)
            figures[f"{batch} requests, {drafter or 'plain'}, tokens/s"] = tokens / seconds
            engine.close()
    return figures


def drafter_name(options: argparse.Namespace) -> str:
    return "tiny-gemma4-mtp" if options.device == "cpu" else "mtp"


def slots(options: argparse.Namespace, needed: int) -> dict[str, int]:
    """For the long prompt and all streams."""
    full = options.long + (STREAMS + 1) * (needed + 64)
    return {"full_slots": full, "swa_slots": full, "prefill_chunk": 256}


MEASURES = {"gap": measure_gap, "prefix": measure_prefix, "throughput": measure_throughput}


# in the process that was started


def measured(part: str, checkout: Path, arguments: Sequence[str]) -> dict[str, float]:
    """One part, in a process of its own on that checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *arguments, "--worker", part]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{part} failed on {checkout}:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--against", type=Path, help="another checkout of specdec, measured in turn with this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", type=int, default=8000, help="tokens of the prompt that arrives")
    parser.add_argument("--rounds", type=int, default=40, help="of the streams, before the prompt arrives")
    parser.add_argument("--new", type=int, default=64, help="tokens of every request of `throughput`")
    parser.add_argument("--shape", default="gemma4-e4b", help="on a GPU")
    parser.add_argument("--layers", type=int, help="on a GPU: fewer layers")
    parser.add_argument("--shrink", type=int, default=1, help="on a GPU: divide widths")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("--worker", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(MEASURES[options.worker](options)))
        return
    checkouts = {"here": ROOT} if options.against is None else {"here": ROOT, "there": options.against.resolve()}
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for part in options.parts:
        for repeat in range(options.repeats):
            names = list(checkouts) if repeat % 2 == 0 else list(reversed(checkouts))
            for name in names:
                for figure, value in measured(part, checkouts[name], sys.argv[1:]).items():
                    taken[name].setdefault(figure, []).append(value)
    print(f"| figure | {' | '.join(checkouts)} |{' here / there |' if len(checkouts) > 1 else ''}")
    print(f"|---|{'---:|' * (len(checkouts) + (len(checkouts) > 1))}")
    for figure in taken["here"]:
        medians = [statistics.median(taken[name][figure]) for name in checkouts if figure in taken[name]]
        cells = [f"{median:.1f}" for median in medians]
        if len(checkouts) > 1:  # the other may not know the figure
            cells += [f"{medians[0] / medians[1]:.2f}" if medians[1] else ""] if len(medians) > 1 else ["", ""]
        print(f"| {figure} | {' | '.join(cells)} |")
    print(f"\n{options.device}, median of {options.repeats}, {time.strftime('%Y-%m-%d')}")
    if options.out:
        record = {"options": {k: str(v) for k, v in vars(options).items()}, "figures": taken}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
