"""Streamed answers of a pair, compared with plain decoding: what gemma4_mtp.py and eagle3.py run.

It knows nothing about the kind of drafter: a `PublishedPair` names a target, a drafter and the settings that suit them.
A short name, a hub id or a folder names the pair; a target that is not in the table needs `--drafter`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, GenerationOutput, RequestStats, SamplingParams, SpecConfig, SpecDecError
from specdec.cli.actions.answer import DRAFTED_STYLE, in_colour
from specdec.errors import ConfigError
from specdec.measurement.timed_comparison import TokenPrompts, run_figures, run_interleaved
from specdec.models.published import BUNDLED_NAMES, PublishedPair, last_part, pair_table
from specdec.runtime.drafts.draft_reports import acceptance_in_words, depths_in_words, why_slower
from specdec.text.detokenize import DraftColours


def find_pair(pairs: Sequence[PublishedPair], model: str, drafter: str | None) -> PublishedPair:
    """The pair meant by a short name, a hub id, or a folder or hub id whose last part is a target's of the table."""
    for pair in pairs:
        if last_part(model) in (pair.name.lower(), last_part(pair.target)):
            target = pair.target if model.lower() == pair.name.lower() else model
            return replace(pair, target=target, drafter=drafter or pair.drafter)
    if drafter is None:
        names = ", ".join(pair.name for pair in pairs)
        raise ConfigError(f"--model {model!r} is not in the table ({names}); name its drafter too, with --drafter")
    return PublishedPair(model, model, drafter, num_steps=4, dtype="", memory="")


def answer(engine: Engine, prompt: list[int], params: SamplingParams, show: Callable[[Text], None]) -> GenerationOutput:
    """One streamed answer; `show` gets the text round by round."""
    colours, output = DraftColours(engine.tokenizer), None
    for delta in engine.stream(prompt, params):
        show(in_colour(colours.read(delta)))
        output = delta.output
    assert output is not None, "a stream ends with its output"
    return output


def chat(pair: PublishedPair, args: argparse.Namespace) -> bool:
    """Answer every prompt, with `--compare` also without drafts; False when an answer differs."""
    console = Console(highlight=False, soft_wrap=True)
    if pair.target in BUNDLED_NAMES:  # of a large model the bar tells how far its download is
        transformers_logging.disable_progress_bar()
    config = EngineConfig(max_batch_size=1, dtype=getattr(torch, args.dtype) if args.dtype else None)
    params = SamplingParams(args.max_new_tokens, args.temperature, seed=args.seed)
    steps = pair.num_steps if args.steps is None else args.steps
    spec = SpecConfig(steps, args.draft_topk, args.nodes, adaptive=False)
    engine = Engine.from_pretrained(pair.target, pair.drafter, spec=spec, config=config)
    prompts = [engine.chat_prompt(text) for text in args.prompt]

    total = RequestStats()
    for text, prompt in zip(args.prompt, prompts, strict=True):
        console.print(Text(text, style="bold"))
        out = answer(engine, prompt, params, lambda piece: console.print(piece, end=""))
        total.add(out.stats)
        console.print(
            f"\n[dim]{len(out.token_ids)} tokens, {sum(out.drafted)} of them [/][{DRAFTED_STYLE}]accepted drafts[/]"
            f"[dim]; {out.stats.rounds} target forwards[/]\n"
        )
    by_depth = depths_in_words(total.accepted_per_position, total.drafted_counts)
    console.print(acceptance_in_words(total) + (f" (by position {by_depth})" if total.drafted_rounds else ""))
    return not args.compare or compare(engine, [[prompt] for prompt in prompts], params, console)


def compare(engine: Engine, groups: Sequence[TokenPrompts], params: SamplingParams, console: Console) -> bool:
    """Decode each group of prompts with and without drafts, and say how fast; False when an answer differs."""
    plain = Engine(engine.target, None, tokenizer=engine.tokenizer, config=engine.config)
    both = {"drafts": engine, "plain": plain}
    runners = {name: partial(each.generate, params=params, progress=False) for name, each in both.items()}
    run_interleaved(runners, dict.fromkeys(runners, groups[0]))  # warm up
    runs = [run for group in groups for run in run_interleaved(runners, dict.fromkeys(runners, group))]
    identical = all(run["drafts"]["token_ids"] == run["plain"]["token_ids"] for run in runs)
    timing = run_figures([{"index": at, "runs": run} for at, run in enumerate(runs)], comparable=True)["timing"]
    speed, speed_up = timing["drafts"]["tokens_per_second"], timing["speed_up"]
    total = RequestStats.total(RequestStats(**run["drafts"]["stats"]) for run in runs)
    found = f"speed-up {speed_up:.2f}x" if total.drafted_rounds else "no speed-up: no drafts were made"
    console.print(f"identical to plain decoding: {'yes' if identical else 'NO'}, {speed:.0f} tokens/s, {found}")
    if total.drafted_rounds and (slower := why_slower(speed_up, total, off=engine.drafts_off)):
        console.print(f"slower, since {slower}", soft_wrap=True)
    if not identical and engine.target.dtype != torch.float32:
        console.print("in 16 bits two tokens that score within rounding may swap: --dtype float32 tells")
    return identical


def run(doc: str, pairs: Sequence[PublishedPair], default: PublishedPair, prompt: str) -> None:
    """The command line of both scripts; exit code 1 when a comparison finds a difference, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", "--target", default=default.name, help="short name, hub id or folder of the target")
    parser.add_argument("--drafter", help="hub id or folder; default: the one in the table")
    parser.add_argument("--models", action="store_true", help="print the table and stop")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--steps", type=int, help="levels of the draft; default: the table's")
    parser.add_argument("--draft-topk", type=int, default=1, help="branches a node; 1 is a chain")
    parser.add_argument("--nodes", type=int, help="verified nodes, the root included; default: 1 + draft-topk * steps")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="decode without drafts as well: same text? how fast?")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on the CPU")
    args = parser.parse_args()
    args.prompt = args.prompt or [prompt]
    if args.models:
        print(pair_table(pairs))
        return
    try:
        identical = chat(find_pair((default, *pairs), args.model, args.drafter), args)
    except SpecDecError as error:
        parser.error(str(error))
    if not identical:
        raise SystemExit(1)
