"""One table of a pair over several prompt files, draft shapes and temperatures, each row against plain decoding.

    python tools/bench_matrix.py --target DIR --drafter DIR --data gsm8k.jsonl mt_bench.jsonl --limit 12

Every file is run by plain decoding, a chain, a tree and transformers' plain `generate`, prompt by prompt in turn. A row
is printed only if the chain's and the tree's outputs are those of plain decoding, token for token.
"""

import argparse
from pathlib import Path

from result_table import table_head, table_row
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.drafter_loading import load_any_drafter
from specdec.evaluation.conditions import VERSIONS, hardware
from specdec.evaluation.contest import engine_contestant, require_parity, take_turns
from specdec.evaluation.transformers_peer import plain_peer
from specdec.progress import progress_bar
from specdec.text.prompt_files import read_prompts

CHAIN, TREE = SpecConfig(4, adaptive=False), SpecConfig(4, 4, 16, adaptive=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL: 'question', 'prompt' or 'turns'")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file, spread over it evenly")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = EngineConfig(max_batch_size=1, prefix_cache=False)
    plain = Engine.from_pretrained(args.target, config=config)
    drafter = load_any_drafter(args.drafter, plain.target)
    heads = "prompts", "T", "draft", "acceptance length", "by position", "tokens/s", "plain", "transformers", "vs plain"
    print(table_head(*heads))
    for path in args.data:
        prompts = read_prompts(path)
        chosen = prompts[:: max(1, len(prompts) // args.limit)][: args.limit]
        ids = [plain.chat_prompt(prompt.text) for prompt in chosen]
        for temperature in args.temperatures:
            params = SamplingParams(args.max_new_tokens, temperature, seed=0)
            engines = {
                name: Engine(plain.target, drafter, tokenizer=plain.tokenizer, spec=spec, config=config)
                for name, spec in (("chain of 4", CHAIN), ("tree of 16", TREE))
            }
            ours = [engine_contestant("specdec, plain", plain, params)]
            ours += [engine_contestant(f"specdec, {name}", engine, params) for name, engine in engines.items()]
            runs = [*ours, plain_peer(plain, params)]
            with progress_bar(f"{path.name}, temperature {temperature:g}", len(ids)) as update:
                take_turns(runs, [[prompt] for prompt in ids], update)
            require_parity(ours)
            speed = {run.name: run.tokens_per_second for run in runs}
            base, peer = speed["specdec, plain"], speed["transformers, plain"]
            for name, engine in engines.items():
                stats, mine = engine.stats(), speed[f"specdec, {name}"]
                positions = ", ".join(f"{share:.2f}" for share in stats.accepted_per_position)
                cells = [f"{path.resolve().parent.name}/{path.stem} ({len(ids)})", f"{temperature:g}", name]
                cells += [f"{stats.acceptance_length:.2f}", positions]
                cells += [f"{mine:.1f}", f"{base:.1f}", f"{peer:.1f}", f"{mine / base:.2f}x"]
                print(table_row(cells), flush=True)
                engine.close()
    print(f"\n{hardware(plain.target.device)}, {VERSIONS}, batch 1, at most {args.max_new_tokens} new tokens")


if __name__ == "__main__":
    main()
