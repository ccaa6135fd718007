"""Generate with an EAGLE-3 head: Llama, Qwen3, GPT-OSS or any other target, and a published head for it.

    python examples/eagle3.py                                             # the bundled target and head
    python examples/eagle3.py --target meta-llama/Llama-3.1-8B-Instruct --drafter yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    python examples/eagle3.py --target DIR --drafter DIR --topk 4 --nodes 16 --compare

Heads are read in the formats of SafeAILab / SpecForge, NVIDIA ModelOpt and speculators. Text from accepted drafts is
coloured; `--compare` also decodes without the head and says whether the text is the same.
"""

import argparse
import time

from rich.console import Console
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli import coloured

PROMPT = "A farmer has 12 rows of 8 apple trees. A storm breaks 15 of the trees. How many apple trees are left?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny-gemma4", help="hub id, folder or bundled name")
    parser.add_argument("--drafter", default="tiny-gemma4-eagle3", help="hub id, folder or bundled name of the head")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--steps", type=int, default=4, help="levels of the draft")
    parser.add_argument("--topk", type=int, default=1, help="branches a node; 1 is a chain")
    parser.add_argument("--nodes", type=int, help="verified nodes, the root included")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="decode without the head as well")
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    console = Console(highlight=False)
    config = EngineConfig(max_batch_size=1)
    spec = SpecConfig(args.steps, args.topk, args.nodes)
    engine = Engine.from_pretrained(args.target, args.drafter, spec=spec, config=config)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    prompt = engine.chat_prompt(args.prompt)
    start = time.perf_counter()
    [out] = engine.generate(prompt, params)
    seconds = time.perf_counter() - start
    console.print(coloured(out, engine.tokenizer))
    by_position = ", ".join(f"{share:.2f}" for share in out.stats.accepted_per_position)
    console.print(
        f"{len(out.token_ids)} tokens in {seconds:.2f} s, {out.stats.rounds} target forwards, acceptance length "
        f"{out.stats.acceptance_length:.2f} (by position {by_position})"
    )
    if args.compare:
        plain = Engine(engine.target, None, tokenizer=engine.tokenizer, config=config)
        start = time.perf_counter()
        [reference] = plain.generate(prompt, params)
        same = "yes" if reference.token_ids == out.token_ids else "NO"
        console.print(f"identical to plain decoding: {same}; plain took {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
