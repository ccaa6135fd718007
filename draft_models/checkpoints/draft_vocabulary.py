"""The draft vocabulary of a head in a file: which of the target's tokens it drafts (`d2t`, `t2d`)."""

import torch

from specdec.draft_models.checkpoints.checkpoint_files import TargetShape
from specdec.errors import CheckpointError


def take_target_ids(state: dict[str, torch.Tensor], target: TargetShape) -> torch.Tensor | None:
    """Target token of each draft token, for the rows of `lm_head.weight`; d2t and t2d leave `state`. None: all tokens,
    in their order. d2t holds offsets: draft token j is target token j + d2t[j]."""
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    size = len(state["lm_head.weight"]) if "lm_head.weight" in state else None
    if d2t is None:
        if size not in (None, target.vocab_size):
            raise CheckpointError(
                f"lm_head has {size} rows, the target {target.vocab_size} tokens, and there is no d2t"
            )
        return None
    if size != len(d2t):
        raise CheckpointError(f"d2t maps {len(d2t)} draft tokens, lm_head has {size or 'no'} rows")
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise CheckpointError(
            f"d2t leads to tokens {low}..{high}, target {target.name} has {target.vocab_size}; d2t must hold offsets, "
            "not ids"
        )
    if len(ids.unique()) != len(ids):
        raise CheckpointError("d2t leads two draft tokens to one target token")
    if t2d is not None and (int(t2d.sum()) != len(ids) or high >= len(t2d) or not bool(t2d[ids].all())):
        raise CheckpointError("d2t and t2d disagree about which target tokens are in the draft vocabulary")
    return ids
