"""Checkpoints by short names: the bundled ones, and pairs of targets and drafters (bundled, or on the hub) with their
settings and published acceptance lengths, from `bundled/published_pairs.json`.

Steps for Gemma 4 (except 12B) are the fastest in vLLM's figures for one H100 (PR 41745). Memory is for the weights of
both models, without encoders, as in `specdec recipe`; the KV cache takes a share of the rest. Acceptance lengths are
others' figures on their own data; only those of bundled pairs were measured here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

BUNDLED_DIR = Path(__file__).parent.parent / "bundled"
BUNDLED_NAMES = ("tiny-gemma4", "tiny-gemma4-mtp", "tiny-gemma4-eagle3", "smollm2-135m-eagle3")
HELD_OUT_PROBLEMS = BUNDLED_DIR / "word_problems_heldout.jsonl"


def resolve_name(name: str) -> str:
    """The local path of a bundled name; any other name (a path, a hub id) is returned unchanged."""
    return str(BUNDLED_DIR / name) if name in BUNDLED_NAMES else name


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAcceptance:
    """Acceptance stated by a publisher.

    num_steps: drafts per round. length: tokens per round, bonus included. by_depth: share of the rounds that accepted
    drafts 1, 2, ..., if known. data, source: the prompts, and the publication.
    """

    num_steps: int
    length: float
    data: str
    source: str
    by_depth: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedPair:
    """A target and its drafter. num_steps: drafts per round. memory: weights of both in `dtype`; `quantised` target
    weights as stored.

    shape: name in `measurement/model_shapes.py`; a pair with a shape is a recipe.
    form: storage of `quantised` weights, a name of `specdec bench --weights`.
    gpus: devices that share the target.
    multiples: measured time of a plain step of one request divided by its memory floor, by GPU.
    assumed: the multiple of a similar pair, if this one was not measured; 0: that of its other GPU.
    """

    name: str
    target: str
    drafter: str
    num_steps: int
    dtype: str
    memory: str
    quantised: str = ""
    shape: str = ""
    form: str = ""
    gpus: int = 1
    multiples: dict[str, float] = field(default_factory=dict)
    assumed: float = 0.0

    @property
    def accepts(self) -> PublishedAcceptance | None:
        """Published acceptance; None: unknown."""
        return ACCEPTED.get(self.published_name)

    @property
    def published_name(self) -> str:
        """The name under which figures are published: the drafter's, or the target's if it contains its drafter."""
        return self.target if self.drafter == "mtp" else self.drafter


_TABLES = json.loads((BUNDLED_DIR / "published_pairs.json").read_text("utf-8"))
ACCEPTED = {
    drafter: PublishedAcceptance(**{**figure, "by_depth": tuple(figure.get("by_depth", ()))})
    for drafter, figure in _TABLES["accepted"].items()
}
"""Published acceptance by `PublishedPair.published_name`, which is unique."""
PAIR_GROUPS = {
    name: tuple(PublishedPair(**pair) for pair in group["pairs"]) for name, group in _TABLES["groups"].items()
}
"""Pairs by the name of their group. gemma4 QAT: targets trained for int4, each with its own assistant: drafts of the
plain target's assistant are accepted less often. block: steps are the drafts of a block, or fewer if its size was not
found in a public file; more are refused."""
PAIRS_BY_TITLE = {_TABLES["groups"][name]["title"]: pairs for name, pairs in PAIR_GROUPS.items()}
_ALL = tuple(pair for pairs in PAIRS_BY_TITLE.values() for pair in pairs)
PAIRS = tuple(pair for pair in _ALL if pair.drafter not in ("mtp", "suffix"))
"""Pairs whose drafter is a checkpoint."""
RECIPES = {pair.name: pair for pair in _ALL if pair.shape}


def published_acceptance(target: str, drafter: str | None) -> PublishedAcceptance | None:
    """Published acceptance of a pair, by the last parts of both names, ignoring case; None: unknown."""
    if drafter is None:
        return None
    asked = last_part(target), last_part(drafter)
    return next((pair.accepts for pair in _ALL if (last_part(pair.target), last_part(pair.drafter)) == asked), None)


def published_steps(drafter: str) -> int | None:
    """Most published drafts per round with this drafter, by the last part of its name; None: unknown."""
    return max((pair.num_steps for pair in PAIRS if last_part(pair.drafter) == last_part(drafter)), default=None)


def nearest_recipe(target: str, cutoff: float) -> PublishedPair | None:
    """The recipe whose name is most similar to a target's, of the same family if there is one. cutoff: 0 accepts any,
    1 only the same name."""
    named = {last_part(name): pair for pair in RECIPES.values() for name in (pair.name, pair.target)}
    alike = [name for name in named if family_part(name) == family_part(target)]
    near = get_close_matches(last_part(target), alike or named, n=1, cutoff=cutoff)
    return named[near[0]] if near else None


def last_part(name: str) -> str:
    """Last part of a path or hub id, in lower case."""
    return name.rstrip("/").rpartition("/")[2].lower()


def family_part(name: str) -> str:
    """The family of a path or hub id: `qwen3.5` of "Qwen/Qwen3.5-4B"."""
    return last_part(name).partition("-")[0]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def pair_table(pairs: Sequence[PublishedPair]) -> str:
    """The pairs as lines of text under a heading. accepted: published tokens per round, and the maximum."""
    rows = [("name", "target", "drafter", "steps", "accepted", "memory")]
    for p in pairs:
        accepted = "" if p.accepts is None else f"{p.accepts.length:.2f} of {p.accepts.num_steps + 1}"
        rows.append((p.name, p.target, p.drafter, str(p.num_steps), accepted, f"{p.memory} {p.quantised or p.dtype}"))
    return text_table(rows)
