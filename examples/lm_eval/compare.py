"""How far two runs of lm-evaluation-harness differ, document by document.

    python examples/lm_eval/compare.py out_hf out_server

Reads the samples that `--log_samples` wrote under both folders: of multiple choice, the largest difference of a
log-likelihood and the documents whose scores differ; of generation, the documents whose texts differ.
"""

import json
import sys
from pathlib import Path
from typing import Any


def samples(folder: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Task -> document -> its sample; of several filters over one text, the first."""
    tasks: dict[str, dict[int, dict[str, Any]]] = {}
    for file in sorted(Path(folder).rglob("samples_*.jsonl")):
        documents = tasks.setdefault(file.name.removeprefix("samples_").rsplit("_", 1)[0], {})
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            documents.setdefault(sample["doc_id"], sample)
    return tasks


def compare(task: str, one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> str:
    """A line about a task of both runs."""
    if one.keys() != other.keys():
        raise SystemExit(
            f"{task}: the runs have other documents ({len(one)} and {len(other)}); give both the same --limit"
        )
    if "acc" not in next(iter(one.values())):
        texts = sum(one[number]["resps"] != other[number]["resps"] for number in one)
        return f"{task}: {texts} of {len(one)} texts differ"
    pairs = [
        (float(mine[0]), float(theirs[0]))
        for number in one
        for [mine], [theirs] in zip(one[number]["resps"], other[number]["resps"], strict=True)
    ]
    apart = max(abs(mine - theirs) for mine, theirs in pairs)
    unequal = sum(mine != theirs for mine, theirs in pairs)
    scores = sum(any(one[number][name] != other[number][name] for name in ("acc", "acc_norm")) for number in one)
    return (
        f"{task}: {unequal} of {len(pairs)} log-likelihoods differ, by at most {apart:.2g}; "
        f"{scores} of {len(one)} documents have other scores"
    )


def main() -> None:
    """Prints a line for each task."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    one, other = (samples(folder) for folder in sys.argv[1:])
    if not one or one.keys() != other.keys():
        raise SystemExit(
            f"no samples of the same tasks: {sorted(one)} and {sorted(other)}; run lm_eval with --log_samples"
        )
    for task in one:
        print(compare(task, one[task], other[task]))


if __name__ == "__main__":
    main()
