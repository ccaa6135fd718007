"""Pairs of targets and drafters by short names: the bundled ones and those published on the hub, with settings and
the lengths that they are published to accept, as `bundled/published_pairs.json` has them.

Steps of Gemma 4: the best of vLLM's figures for one H100 (PR 41745; 12B is not among them). Memory is for the weights
of both models, without encoders where these are quantised; the KV cache takes a share of the rest. Accepted lengths are
figures of others on their own data, there to be looked at; only those of bundled pairs were measured here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from specdec.models.bundled import BUNDLED_DIR


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAcceptance:
    """Acceptance as a publisher states it.

    num_steps: drafts a round. length: tokens a round, with the bonus. by_depth: share of the rounds that accepted
    drafts 1, 2, ..., if it is known. data, source: the prompts, and the publication.
    """

    num_steps: int
    length: float
    data: str
    source: str
    by_depth: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedPair:
    """A target and its drafter. num_steps: drafts a round. memory: weights of both in `dtype`; `quantised` ones of the
    target as they are stored.

    shape: that of `evaluation/model_shapes.py`; a pair that has one is a recipe. form: how `quantised` weights are
    stored, by the name that `specdec bench --weights` has for it. gpus: devices that share the target. multiples: a
    plain step of one request over its memory floor, as measured, by GPU. assumed: the same of a pair like it, where
    this one was not measured; 0: none is known.
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
        """None: no figure is known."""
        return ACCEPTED.get(self.known_by)

    @property
    def known_by(self) -> str:
        """The name that figures are published under: the drafter's, or that of a target which brings its own."""
        return self.target if self.drafter == "mtp" else self.drafter


_TABLES = json.loads((BUNDLED_DIR / "published_pairs.json").read_text("utf-8"))
ACCEPTED = {
    drafter: PublishedAcceptance(**{**figure, "by_depth": tuple(figure.get("by_depth", ()))})
    for drafter, figure in _TABLES["accepted"].items()
}
"""Published acceptance by `PublishedPair.known_by`, each of which is in one pair."""
_GROUPS = {
    name: (group["title"], tuple(PublishedPair(**pair) for pair in group["pairs"]))
    for name, group in _TABLES["groups"].items()
}
PAIRS_BY_TITLE = dict(_GROUPS.values())
_ALL = tuple(pair for pairs in PAIRS_BY_TITLE.values() for pair in pairs)
PAIRS = tuple(pair for pair in _ALL if pair.drafter not in ("mtp", "suffix"))
"""Those whose drafter is a checkpoint."""
RECIPES = {pair.name: pair for pair in _ALL if pair.shape}
BUNDLED_MTP, BUNDLED_EAGLE3, _ = _GROUPS["bundled"][1]
GEMMA4_PAIRS, EAGLE3_PAIRS = _GROUPS["gemma4"][1], _GROUPS["EAGLE-3"][1]
QAT_PAIRS = _GROUPS["gemma4 QAT"][1]
"""Targets trained for int4, each with the assistant trained for it: that of the plain target is accepted less."""
BLOCK_PAIRS = _GROUPS["block"][1]
"""Steps: what a block drafts, or fewer where its size was not found in a public file; more are refused."""


def published_acceptance(target: str, drafter: str | None) -> PublishedAcceptance | None:
    """Published acceptance of a pair, by the last parts of both names, whatever their case; None: nothing is known."""
    if drafter is None:
        return None
    asked = last_part(target), last_part(drafter)
    return next((pair.accepts for pair in _ALL if (last_part(pair.target), last_part(pair.drafter)) == asked), None)


def published_steps(drafter: str) -> int | None:
    """Most drafts a round that pairs with this drafter are published for, by the last part of its name; None: nothing
    is known."""
    return max((pair.num_steps for pair in PAIRS if last_part(pair.drafter) == last_part(drafter)), default=None)


def nearest_recipe(target: str, cutoff: float) -> PublishedPair | None:
    """The recipe whose name is nearest to a target's. cutoff: 0 takes any, 1 only the same name."""
    named = {last_part(name): pair for pair in RECIPES.values() for name in (pair.name, pair.target)}
    near = get_close_matches(last_part(target), named, n=1, cutoff=cutoff)
    return named[near[0]] if near else None


def last_part(name: str) -> str:
    """Last part of a path or a hub id, in small letters."""
    return name.rstrip("/").rpartition("/")[2].lower()


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def pair_table(pairs: Sequence[PublishedPair]) -> str:
    """The pairs as lines of text under a line of headings. accepted: published tokens a round, of the most."""
    rows = [("name", "target", "drafter", "steps", "accepted", "memory")]
    for p in pairs:
        accepted = "" if p.accepts is None else f"{p.accepts.length:.2f} of {p.accepts.num_steps + 1}"
        rows.append((p.name, p.target, p.drafter, str(p.num_steps), accepted, f"{p.memory} {p.quantised or p.dtype}"))
    return text_table(rows)
