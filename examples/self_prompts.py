"""Let a chat model write prompts itself, to train a drafter without a file of prompts.

    python examples/self_prompts.py --target DIR --count 4000 --out prompts.jsonl

The model is given its chat template up to the place where the user would speak, and sampled until it ends that turn: it
has learnt what users ask (Magpie, arXiv 2406.08464). Turns that it does not end, short ones and repeats are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from specdec import Engine, EngineConfig, SamplingParams, SpecDecError
from specdec.errors import ConfigError

PLACE = "(the user speaks here)"
SHORTEST = 12  # characters


def user_turn(engine: Engine) -> list[int]:
    """Token ids of the chat template up to the user's first word. Raises ConfigError without a template."""
    tokenizer = engine.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{engine.target.name!r} has no chat template, so it does not know where a user speaks")
    text = tokenizer.apply_chat_template([{"role": "user", "content": PLACE}], tokenize=False)
    before, found, _ = text.partition(PLACE)
    if not found:
        raise ConfigError("the chat template does not repeat what the user says word for word")
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


def write_prompts(engine: Engine, path: Path, count: int, params: SamplingParams) -> tuple[int, int]:
    """Write `count` prompts, or fewer if 2 x `count` turns do not give them. Returns (prompts, turns)."""
    prefix, batch = user_turn(engine), engine.config.max_batch_size
    seen: set[str] = set()
    turns = 0
    with path.open("w", encoding="utf-8") as file:
        while len(seen) < count and turns < 2 * count:
            seeded = [dataclasses.replace(params, seed=(params.seed or 0) + turns + i) for i in range(batch)]
            for out in engine.generate([prefix] * batch, seeded):
                text = out.text.strip()
                if out.finish_reason == "stop" and len(text) >= SHORTEST and text not in seen and len(seen) < count:
                    seen.add(text)
                    file.write(json.dumps({"prompt": text}) + "\n")
            turns += batch
            print(f"{len(seen)} prompts of {turns} turns", flush=True)
    return len(seen), turns


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--target", required=True, help="hub id, folder or bundled name of a chat model")
    p.add_argument("--out", type=Path, required=True, help="JSON-lines file for specdec train --prompts")
    p.add_argument("--count", type=int, default=2000)
    p.add_argument("--max-new", type=int, default=128, help="longest turn, in tokens")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--top-p", type=float, default=0.98)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if args.count < 1:
        p.error(f"--count {args.count}: at least one prompt is expected")
    try:
        params = SamplingParams(args.max_new, args.temperature, top_p=args.top_p, seed=args.seed)
        config = EngineConfig(max_batch_size=args.batch, max_model_len=args.max_new + 256)
        with Engine.from_pretrained(args.target, config=config) as engine:
            written, turns = write_prompts(engine, args.out, args.count, params)
    except (SpecDecError, OSError) as error:
        p.error(str(error))
    print(f"{args.out}: {written} prompts of {turns} turns")


if __name__ == "__main__":
    main()
