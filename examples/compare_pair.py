"""Streamed answers of a pair, compared with plain decoding: what gemma4_mtp.py and eagle3.py run.

It knows nothing about the kind of drafter: a `PublishedPair` names a target, a drafter and the settings that suit them.
A short name, a hub id or a folder names the pair; a target that is not in the table needs `--drafter`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, GenerationOutput, RequestStats, SamplingParams, SpecConfig, SpecDecError
from specdec.cli.bodies.answer import DRAFTED_STYLE, in_colour
from specdec.errors import ConfigError
from specdec.evaluation.contest import first_difference
from specdec.models.bundled import BUNDLED_NAMES
from specdec.models.published import PublishedPair, pair_table
from specdec.runtime.draft_reports import acceptance_in_words, depths_in_words, why_slower
from specdec.text.detokenize import DraftColours


def find_pair(pairs: Sequence[PublishedPair], model: str, drafter: str | None) -> PublishedPair:
    """The pair meant by a short name, a hub id, or a folder or hub id whose last part is a target's of the table."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    for pair in pairs:
        if last in (pair.name.lower(), pair.target.rpartition("/")[2].lower()):
            target = pair.target if model.lower() == pair.name.lower() else model
            return replace(pair, target=target, drafter=drafter or pair.drafter)
    if drafter is None:
        names = ", ".join(pair.name for pair in pairs)
        raise ConfigError(f"--model {model!r} is not in the table ({names}); name its drafter too, with --drafter")
    return PublishedPair(model, model, drafter, num_steps=4, dtype="", memory="")


def answer(
    engine: Engine, prompt: list[int], params: SamplingParams, show: Callable[[Text], None] | None = None
) -> tuple[GenerationOutput, float]:
    """One streamed answer and its seconds; `show` gets the text round by round, and its time does not count."""
    colours, seconds, output = DraftColours(engine.tokenizer), 0.0, None
    start = time.perf_counter()
    for delta in engine.stream(prompt, params):
        seconds += time.perf_counter() - start
        if show is not None:
            show(in_colour(colours.read(delta)))
        output = delta.output
        start = time.perf_counter()
    assert output is not None, "a stream ends with its output"
    return output, seconds


def chat_prompt(engine: Engine, text: str, system: str | None) -> list[int]:
    """Token ids of one user turn, after a system turn if there is one."""
    if system is None:
        return engine.chat_prompt(text)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise ConfigError("--system needs a tokenizer with a chat template, and this target has none; leave it out")
    return engine.chat_prompt([{"role": "system", "content": system}, {"role": "user", "content": text}])


def chat(pair: PublishedPair, args: argparse.Namespace) -> bool:
    """Answer every prompt, with `--compare` also without drafts; False when an answer differs."""
    console = Console(highlight=False, soft_wrap=True)
    if pair.target in BUNDLED_NAMES:  # of a large model the bar tells how far its download is
        transformers_logging.disable_progress_bar()
    config = EngineConfig(
        max_batch_size=1, dtype=getattr(torch, args.dtype) if args.dtype else None, device=args.device
    )
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    spec = SpecConfig(args.steps or pair.num_steps, args.draft_topk, args.nodes, adaptive=False)
    engine = Engine.from_pretrained(pair.target, pair.drafter, spec=spec, config=config)
    prompts = [chat_prompt(engine, text, args.system) for text in args.prompt]
    plain = Engine(engine.target, None, tokenizer=engine.tokenizer, config=config) if args.compare else None
    if plain is not None:
        for contestant in (engine, plain):
            contestant.generate(prompts[0], replace(params, max_new_tokens=8))  # warm up

    total, identical = RequestStats(), True
    seconds = {"drafts": 0.0, "plain": 0.0}
    for text, prompt in zip(args.prompt, prompts, strict=True):
        console.print(Text(text, style="bold"))
        out, took = answer(engine, prompt, params, lambda piece: console.print(piece, end=""))
        seconds["drafts"] += took
        total.add(out.stats)
        console.print(
            f"\n[dim]{len(out.token_ids)} tokens, {sum(out.drafted)} of them [/][{DRAFTED_STYLE}]accepted drafts[/]"
            f"[dim]; {out.stats.rounds} target forwards in {took:.2f} s[/]\n"
        )
        if plain is not None:
            reference, took = answer(plain, prompt, params)
            seconds["plain"] += took
            at = first_difference(out.token_ids, reference.token_ids)
            if at is not None:
                identical = False
                ours, theirs = (engine.decode(ids[at : at + 1]) for ids in (out.token_ids, reference.token_ids))
                console.print(Text(f"differs from plain decoding at token {at}: {ours!r}, without drafts {theirs!r}"))

    by_depth = depths_in_words(total.accepted_per_position, total.drafted_counts)
    console.print(acceptance_in_words(total) + (f" (by position {by_depth})" if total.drafted_rounds else ""))
    if plain is not None:
        speed_up = seconds["plain"] / seconds["drafts"]
        console.print(
            f"identical to plain decoding: {'yes' if identical else 'NO'}, "
            f"{total.output_tokens / seconds['drafts']:.0f} tokens/s, "
            f"speed-up {speed_up:.2f}x"
        )
        if slower := why_slower(speed_up, total):
            console.print(f"slower, since {slower}")
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
    parser.add_argument("--system", help="a system prompt, through the chat template")
    tree = parser.add_argument_group("draft")
    tree.add_argument("--steps", type=int, help="levels of the draft; default: the table's")
    tree.add_argument("--draft-topk", type=int, default=1, help="branches a node; 1 is a chain")
    tree.add_argument("--nodes", type=int, help="verified nodes, the root included; default: 1 + draft-topk * steps")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=256)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0: all")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="decode without drafts as well: same text? how fast?")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on the CPU")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: the first GPU, else the CPU")
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
