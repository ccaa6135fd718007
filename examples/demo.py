"""Solve a few held-out word problems with the bundled pair, with and without speculation, and compare.

    python examples/demo.py [--count 5]

Text from accepted drafts is shown in colour; each other token took a forward of the target. The last lines give the
acceptance length, whether every output equals plain decoding, and the speed-up on this machine. Every round has the
same draft, so on any machine, however busy, only the times differ.
"""

import argparse
import time

from rich.console import Console
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.actions.answer import DRAFTED_STYLE, in_colour, pieces_of
from specdec.evaluation.accuracy_report import is_correct
from specdec.models.published import HELD_OUT_PROBLEMS
from specdec.runtime.drafts.draft_reports import busy_in_words, why_slower
from specdec.text.prompt_files import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5, help="how many held-out problems to solve")
    count = parser.parse_args().count
    if count < 1:
        parser.error(f"--count {count}: at least one problem is expected")

    transformers_logging.disable_progress_bar()
    console = Console(highlight=False)
    config = EngineConfig(max_batch_size=1)
    spec = SpecConfig(num_steps=4, adaptive=False)
    speculative = Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=spec, config=config)
    plain = Engine(speculative.target, None, tokenizer=speculative.tokenizer, config=config)
    params = SamplingParams(max_new_tokens=256)

    problems = read_prompts(HELD_OUT_PROBLEMS, count)
    prompts = [speculative.chat_prompt(problem.text) for problem in problems]
    for engine in (speculative, plain):
        engine.generate(prompts[0], params)  # warm up
    warm_up = speculative.stats()

    seconds = {"speculative": 0.0, "plain": 0.0}
    tokens, identical, processor = 0, True, time.process_time()
    for problem, prompt in zip(problems, prompts, strict=True):
        start = time.perf_counter()
        [out] = speculative.generate(prompt, params)
        middle = time.perf_counter()
        [reference] = plain.generate(prompt, params)
        seconds["speculative"] += middle - start
        seconds["plain"] += time.perf_counter() - middle
        tokens += len(out.token_ids)
        identical &= out.token_ids == reference.token_ids
        right = is_correct(out.text, problem.answer or "")
        console.print(f"\n[bold]{problem.text}[/bold]")
        console.print(in_colour(pieces_of(out, speculative.tokenizer)))
        console.print(
            f"[dim]{'correct' if right else 'wrong'}, {out.stats.rounds} target forwards for "
            f"{len(out.token_ids)} tokens[/dim]"
        )

    speed_up, all_seconds = seconds["plain"] / seconds["speculative"], sum(seconds.values())
    processor = time.process_time() - processor
    stats = speculative.stats()
    stats.add(warm_up, sign=-1)
    console.print(
        f"\n[{DRAFTED_STYLE}]coloured: accepted drafts[/]; "
        f"{tokens / seconds['speculative']:.0f} tokens/s, {tokens / seconds['plain']:.0f} without drafts"
    )
    console.print(
        f"acceptance length {stats.acceptance_length:.2f}, "
        f"identical to plain decoding: {'yes' if identical else 'NO'}, "
        f"speed-up {speed_up:.2f}x"
    )
    if slower := why_slower(speed_up, stats):
        reasons = filter(None, (slower, busy_in_words(processor / all_seconds)))
        console.print(f"slower, since {'; '.join(reasons)}")
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
