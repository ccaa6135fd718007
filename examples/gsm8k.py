"""GSM8K accuracy of a pair, with and without speculation; what `specdec eval gsm8k` does, in a few lines of Python.

    python examples/gsm8k.py                                              # the bundled pair on generated problems
    python examples/gsm8k.py --target DIR --drafter DIR --data gsm8k_test.jsonl --limit 200 --folder runs/gsm8k
    accelerate launch examples/gsm8k.py --target google/gemma-4-E4B-it --drafter google/gemma-4-E4B-it-assistant

The last one uses every GPU, and takes the test split from the hub (`pip install 'specdec-runtime[datasets]'`). With
`--folder` a killed evaluation continues where it stopped.
"""

import argparse

from accelerate import PartialState
from transformers.utils import logging as transformers_logging

from specdec import EngineConfig, SamplingParams, SpecConfig, SpecDecError
from specdec.evaluation.accuracy import evaluate
from specdec.evaluation.accuracy_report import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny-gemma4", help="hub id, folder or bundled name")
    parser.add_argument("--drafter", default="tiny-gemma4-mtp", help="hub id, folder, bundled name or ngram")
    parser.add_argument("--data", default="auto", help="JSONL file with GSM8K's fields, hub, bundled or auto")
    parser.add_argument("--limit", type=int, default=20, help="only the first N problems; 0: all")
    parser.add_argument("--steps", type=int, default=4, help="levels of the draft")
    parser.add_argument("--draft-topk", type=int, default=1, help="branches a node; 1 is a chain")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--folder", help="keeps finished problems, to continue from")
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    try:
        report = evaluate(
            "gsm8k",
            args.target,
            args.drafter,
            data=args.data,
            limit=args.limit,
            compare=True,
            params=SamplingParams(max_new_tokens=args.max_new_tokens),
            spec=SpecConfig(args.steps, args.draft_topk),
            config=EngineConfig(max_batch_size=args.batch_size),
            folder=args.folder,
        )
    except SpecDecError as error:
        parser.error(str(error))
    if PartialState().is_main_process:
        print(markdown(report))


if __name__ == "__main__":
    main()
