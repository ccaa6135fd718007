"""A target on several devices: proved on one as any other, then its layers are shared among ranks.

The first device keeps the whole model, and with it embeddings, the head, tables, sampling and drafters; every rank has
copies of its share of the layers. So what is split must not change afterwards: weights that are re-pointed or updated
raise at the next step.
"""

import copy

from specdec.attention.bridge import record_states
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.gpu.ranks import MAX_ROWS, Ranks
from specdec.layers.decoder import FusedDecoder
from specdec.layers.fuse import Weights
from specdec.layers.split.layer_shares import most_part_numbers, require_shares
from specdec.layers.split.split_decoder import SplitDecoder
from specdec.models.target import TargetModel


class SplitWeights:
    """`Weights` that must stay as they were when ranks copied them."""

    def __init__(self, weights: Weights) -> None:
        self.name = weights.name
        self._weights = weights
        self._copied = weights.version() if weights.counts_updates() else (weights.generation(), None)

    def generation(self) -> int:
        """See `Weights`. Raises UnsupportedModelError once they are others than those that were copied."""
        return self._checked(self._weights.generation())

    def version(self) -> tuple[int, object]:
        """Likewise."""
        version = self._weights.version()
        if self._weights.counts_updates() and version != self._copied:
            self._refuse()
        self._checked(version[0])
        return version

    def counts_updates(self) -> bool:
        return self._weights.counts_updates()

    def look_closely(self) -> None:
        """See `Weights`."""
        self._weights.look_closely()
        self.version()

    def _checked(self, generation: int) -> int:
        if generation != self._copied[0]:
            self._refuse()
        return generation

    def _refuse(self) -> None:
        raise UnsupportedModelError(
            f"the weights of {self.name} changed after they were split over several devices, which have copies; make "
            "a new engine"
        )


def split_target(target: TargetModel, ranks: Ranks) -> TargetModel:
    """The same target with its layers shared by ranks. Raises ConfigError, UnsupportedModelError: it cannot be."""
    count = len(ranks)
    whole = target.decoder
    if not isinstance(whole, FusedDecoder):
        raise ConfigError(
            f"tensor_parallel={count} splits fused layers, and {target.name} runs unfused: {target.unfused}; use a "
            "family that has them (on a CPU with fused=True), or tensor_parallel=1"
        )
    for spec in target.layout.layers:
        if spec.num_kv_heads % count:
            raise UnsupportedModelError(
                f"tensor_parallel={count} cannot divide the {spec.num_kv_heads} K/V heads of layer {spec.layer} of "
                f"{target.name}; use a number that divides them, or replicas"
            )
    require_shares(target.name, whole.parts, count)
    ranks.reserve(MAX_ROWS * most_part_numbers(whole.parts))
    split = copy.copy(target)
    split.decoder = SplitDecoder(whole, ranks)
    split.ranks = ranks
    split.weights = SplitWeights(target.weights)  # type: ignore[assignment]
    record_states(list(split.decoder.layers))
    return split
