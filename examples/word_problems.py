"""Grade-school word problems with worked answers, in the format of GSM8K, drawn from a seed.

`generate(seed, count)` always gives the same problems for the same seed. The 200 problems of `HELDOUT_SEED` are the
bundled evaluation set: pass `exclude=heldout_questions()` wherever problems are made for training. `check` works every
`<<expr=value>>` out again, so a wrong answer cannot pass unnoticed.

    python examples/word_problems.py --seed 7 --count 1000 --out problems.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

import word_problem_templates
from word_problem_story import TEMPLATES, Reject, Story

assert word_problem_templates  # importing them fills TEMPLATES
HELDOUT_SEED = 20_261_120
HELDOUT_COUNT = 200

# sentences that change nothing; none mentions an amount of what a template counts
NOISE = (
    "It [was|is] a [sunny|rainy|cold|windy|warm] {day}.",
    "{A} lives {z} [blocks|minutes] from the {place}.",
    "The {place} [opens|closes] at {h} o'clock.",
    "{A} likes {colour} [shirts|shoes|hats] [best|a lot].",
    "{B}, {his} {kin}, is {tall} feet tall.",
    "{A} woke up at {h} o'clock that day.",
    "{His} {kin} [lives|works] near the {place}.",
    "There are {z} [trees|cars|houses] on {his} street.",
)


def _write(rng: random.Random) -> dict[str, str]:
    """One problem; the template is kept until its numbers fit, so that rare ones are not crowded out."""
    template = rng.choice(TEMPLATES)
    while True:
        story = Story(rng)
        try:
            template(story)
        except Reject:
            continue
        if rng.random() < 0.15 and not story.quiet:
            story.n(z=(3, 40), h=(6, 11), tall=(5, 6))
            story.told.insert(rng.randrange(len(story.told)), story.fill(rng.choice(NOISE)))
        return story.problem()


def stream(seed: int, exclude: Collection[str] = ()) -> Iterator[dict[str, str]]:
    """Endless problems of this seed, without those whose question is in `exclude`."""
    rng = random.Random(seed)
    while True:
        problem = _write(rng)
        if problem["question"] not in exclude:
            yield problem


def generate(seed: int, count: int, exclude: Collection[str] = ()) -> list[dict[str, str]]:
    return list(islice(stream(seed, exclude), count))


def heldout() -> list[dict[str, str]]:
    """The evaluation problems, all with different questions."""
    unique: dict[str, dict[str, str]] = {}
    for problem in stream(HELDOUT_SEED):
        unique.setdefault(problem["question"], problem)
        if len(unique) == HELDOUT_COUNT:
            return list(unique.values())
    raise AssertionError("unreachable: the stream is endless")


def heldout_questions() -> frozenset[str]:
    return frozenset(problem["question"] for problem in heldout())


def final_answer(text: str) -> str | None:
    """The number after the last `####`, without commas; None where there is none."""
    found = re.findall(r"####\s*(-?[\d,.]*\d)", text)
    return found[-1].replace(",", "") if found else None


def check(problem: dict[str, str]) -> None:
    """Raise unless every annotation is right and the final answer is the last value."""
    notes = re.findall(r"<<([-+*/().\d]+)=([-.\d]+)>>([-.\d]*\d)", problem["answer"])
    assert notes and problem["answer"].count("<<") == len(notes), problem
    for expr, value, shown in notes:
        assert abs(eval(expr) - float(value)) < 1e-9 and value == shown, problem
    assert final_answer(problem["answer"]) == notes[-1][1], problem
    assert not re.search(r"[{}\[\]|]", problem["question"] + problem["answer"]), problem


def main() -> None:
    parser = argparse.ArgumentParser(description="Write grade-school word problems as JSON lines.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", action="store_true", help="write the held-out problems instead")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count {args.count}: at least one problem is expected")
    problems = heldout() if args.heldout else generate(args.seed, args.count, heldout_questions())
    try:
        with args.out.open("w", encoding="utf-8") as file:
            for problem in problems:
                check(problem)
                file.write(json.dumps(problem, ensure_ascii=False) + "\n")
    except OSError as error:
        parser.error(str(error))
    print(f"{len(problems)} problems of {len(TEMPLATES)} templates in {args.out}")


if __name__ == "__main__":
    main()
