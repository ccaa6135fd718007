"""All weights that one engine reads: its target's and its drafter's."""

import logging
from typing import Any

from specdec.layers.fuse import Weights

logger = logging.getLogger("specdec")


def watched_weights(target: Any, drafter: Any) -> list[Weights]:
    """The weights of a target, and of a drafter if it has any."""
    drafts = getattr(drafter, "weights", None)
    return [target.weights] if drafts is None else [target.weights, drafts]


def updates_are_counted(target: Any, drafter: Any) -> bool:
    """Does every update of these weights change `Weights.version`? Warns if not."""
    blind = [weights.name for weights in watched_weights(target, drafter) if not weights.counts_updates()]
    if blind:
        logger.warning(
            "%s: weights that were made under torch.inference_mode() do not count their updates, so no K/V are "
            "kept for later requests; load the model outside of it, or set prefix_cache=False",
            " and ".join(blind),
        )
    return not blind
