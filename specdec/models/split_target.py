"""Divides a target that is whole on one device: it is checked there like any other, then its layers are copied.

The first device keeps the whole model. `Engine.from_pretrained` avoids that: see `shared_weights.py`.
"""

import copy
from functools import partial

from specdec.attention.bridge import record_states
from specdec.gpu.ranks import Ranks
from specdec.layers.decoder import FusedDecoder
from specdec.layers.fuse import FusedLinear
from specdec.layers.split.split_decoder import SplitDecoder
from specdec.models.shared_weights import PlacedOnce, SplitWeights, prepare_ranks, share_head, unfused_error
from specdec.models.target import TargetModel


def split_target(target: TargetModel, ranks: Ranks) -> TargetModel:
    """Returns the target with its layers divided among ranks. Raises ConfigError or UnsupportedModelError if that is
    impossible."""
    whole, head = target.decoder, target.head
    if not isinstance(whole, FusedDecoder):
        raise unfused_error(target.name, target.unfused, len(ranks))
    prepare_ranks(target.name, whole.parts, ranks)
    split = copy.copy(target)
    split.decoder = SplitDecoder(whole.config, whole.parts, whole.embedding, whole.ops, ranks)
    split.head = share_head(
        head.source if isinstance(head, FusedLinear) else head, whole.ops, ranks, PlacedOnce(partial(ranks.put, 0))
    )
    split.ranks = ranks
    split.weights = SplitWeights(target.weights)  # type: ignore[assignment]
    record_states(list(split.decoder.layers))
    return split
