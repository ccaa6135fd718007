"""Block drafters with random weights for tiny targets, one of each published kind."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.draft_models.block.block_checkpoint import write_block
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.gpu.operations import Operations
from specdec.models.target import TargetModel

DFLASH: dict[str, Any] = {}
JETSPEC: dict[str, Any] = {"causal": True}
DSPARK: dict[str, Any] = {"shifted": True, "owns_embed": True, "successor": "vanilla", "successor_rank": 6}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH,
    "jetspec": JETSPEC,
    "dspark": DSPARK,
    "dspark-gated": DSPARK | {"successor": "gated"},
    "dspark-rnn": DSPARK | {"successor": "rnn"},
    "dspark-gemma4": {
        **DSPARK,
        "is_gemma4": True,
        "keys_are_values": True,
        "softcap": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "rope": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        "windows": (None, None),
    },
    "speculators": {"causal": True, "anchored": True, "windows": (4, 4), "draft_vocab_size": 5},
    "deepspec-dflash": {"shifted": True, "owns_embed": True},
}


def random_head(target: Any, kind: str, *, seed: int = 3, std: float = 0.3, **changes: Any) -> BlockHead:
    """Build a head of random weights for a target of few layers."""
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "aux_layers": (0, 1),
        "block_size": 6,
        "mask_token": target.vocab_size - 1,
        "windows": (None, 5),
        "draft_vocab_size": target.vocab_size if "owns_embed" in KINDS[kind] else None,
    }
    torch.manual_seed(seed)
    head = BlockHead(BlockSpec(**fields | KINDS[kind] | changes))
    if (size := head.spec.draft_vocab_size) not in (None, target.vocab_size):
        head.target_ids = torch.arange(1, 1 + 2 * size, 2)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=std) if weight.dim() > 1 else weight.data.add_(torch.randn(len(weight)) * 0.1)
    return head.place(target.device, target.dtype).eval()


def random_block(
    model: PreTrainedModel, kind: str = "dflash", ops: Operations | None = None, **changes: Any
) -> BlockDrafter:
    """Build a drafter with a random head for the model. ops: operations of its fused layers."""
    target = TargetModel(model)
    target.ops = ops  # of the head alone
    return BlockDrafter(random_head(target, kind, **changes), target)


def written_block(folder: Path, model: PreTrainedModel, kind: str = "dflash", **changes: Any) -> BlockHead:
    """Write a checkpoint of random weights into a folder."""
    target = TargetModel(model)
    write_block(folder, head := random_head(target, kind, **changes), target)
    return head
