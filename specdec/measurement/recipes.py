"""Recipes: the command of a published pair, its memory on GPUs of four sizes, and the time of its steps.

`tools/recipe_figures.py` computes the figures at each release, without weights, and writes them to
`bundled/recipes.json`: reading them needs no torch and no model.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from specdec.errors import ConfigError, shown
from specdec.models.published import BUNDLED_DIR, RECIPES, PublishedPair, last_part, nearest_recipe

CARDS = (24, 48, 80, 141)
"""Sizes of GPUs: GB of memory free before loading."""
READ_BANDWIDTHS = {"H100": 3.09e12, "H200": 4.30e12}
"""Bytes a second, measured: docs/results/2026-11-26-h100.md and 2026-11-22-rounds.md."""
REQUESTS, TOKENS, CONTEXT = 8, 8192, 1024
"""Concurrent requests; planned tokens per request; context tokens of the step whose time is stated."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """K/V that an engine allocates on a GPU of `gigabytes`, or on the GPUs that share the target. pools: bytes by
    group; empty: the weights leave no room. tokens: room for all requests together. requests: concurrent requests of
    `TOKENS` tokens."""

    gigabytes: int
    pools: dict[str, int]
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """A plain step of one request. measured: the multiple of the floor was measured for this pair on this GPU."""

    gpu: str
    floor_ms: float
    multiple: float
    measured: bool
    expected_ms: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of one published pair.

    weights: bytes by role. groups: K/V of all requests. rest: bytes of all else. on_less: advice for a smaller GPU.
    """

    pair: PublishedPair
    command: str
    weights: dict[str, int]
    groups: list[dict[str, Any]]
    rest: int
    cards: list[CardMemory]
    steps: list[StepTime]
    on_less: str


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes by the short name of their pair, in the order of `RECIPES`."""
    figures = json.loads((BUNDLED_DIR / "recipes.json").read_text("utf-8"))
    for found in figures.values():
        found["cards"] = [CardMemory(**card) for card in found["cards"]]
        found["steps"] = [StepTime(**step) for step in found["steps"]]
    return {name: Recipe(pair=pair, **figures[name]) for name, pair in RECIPES.items()}


def find_recipe(model: str) -> PublishedPair:
    """The pair with this target name or short name. Raises ConfigError that names the nearest recipe."""
    near = nearest_recipe(model, 0.0)
    assert near is not None
    if last_part(model) not in (last_part(near.target), last_part(near.name)):
        raise ConfigError(
            f"there is no recipe for {shown(model)}; the nearest is `specdec recipe {near.name}`, of {near.target}, "
            "and `specdec recipe` lists them all"
        )
    return near


HEADS = ("model", "drafter", "weights GB", "K/V GB", *(f"{gigabytes} GB" for gigabytes in CARDS), *READ_BANDWIDTHS)
"""Heads of the columns of `row`."""


def row(found: Recipe) -> tuple[str, ...]:
    """Cells of a table of recipes."""
    pair = found.pair
    weights = " + ".join(f"{count / 1e9:.1f}" for count in found.weights.values() if count)
    pools = ", ".join(
        f"{each['name'].replace('window ', 'w')} {each['batch_bytes'] / 1e9:.1f}" for each in found.groups
    )
    fit = (str(card.requests or (f"{card.tokens:,} tokens" if card.pools else "-")) for card in found.cards)
    name = pair.target if pair.gpus == 1 else f"{pair.target} on {pair.gpus}"
    return (name, pair.drafter, weights, pools, *fit, *map(step_words, found.steps))


def step_words(step: StepTime) -> str:
    """The floor and the expected time; ~: from an assumed multiple."""
    return f"{step.floor_ms:.1f}, {'' if step.measured else '~'}{step.expected_ms:.1f}"
