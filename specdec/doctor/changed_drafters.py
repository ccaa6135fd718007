"""A drafter made again with one setting changed. The one in question is left as it is; weights are shared where they
can be."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.models.target import TargetModel

TABLE, NORM = "embed_tokens.weight", "norm.weight"


def changed_head(drafter: Eagle3Drafter, target: TargetModel, **spec: Any) -> Eagle3Drafter:
    """With these fields of its `Eagle3Spec`. Without `owns_embed` it takes the target's table; a final norm that it did
    not have gets a gain of 1."""
    head = Eagle3Head(replace(drafter.spec, **spec))
    state = dict(drafter.head.state_dict())
    if head.embed_tokens is None:
        state.pop(TABLE, None)
    if NORM in head.state_dict() and NORM not in state:
        state[NORM] = torch.ones(drafter.spec.hidden_size)
    head.load_state_dict(state)
    return Eagle3Drafter(head.place(target.device, target.dtype).eval(), drafter.target_ids, target)


def changed_block(drafter: BlockDrafter, target: TargetModel, **spec: Any) -> BlockDrafter:
    """With these fields of its `BlockSpec`, none of which shapes a weight: modules are shared."""
    head = copy.copy(drafter.head)
    head.spec = replace(drafter.spec, **spec)
    return BlockDrafter(head, target)


def changed_assistant(drafter: Gemma4MTPDrafter, target: TargetModel, **conventions: int) -> Gemma4MTPDrafter:
    """With another `query_offset` or `window_shift`."""
    kept = {"query_offset": drafter.query_offset, "window_shift": drafter.window_shift}
    return Gemma4MTPDrafter(drafter.assistant, target, **{**kept, **conventions})


def assistant_with_rope(
    drafter: Gemma4MTPDrafter, target: TargetModel, rope: Mapping[str, Mapping[str, Any]]
) -> Gemma4MTPDrafter:
    """With these `rope_parameters`, of each layer type."""
    assistant = copy.deepcopy(drafter.assistant)
    config = assistant.config.get_text_config()
    config.rope_parameters = {**config.rope_parameters, **copy.deepcopy(dict(rope))}
    rotary = assistant.model.rotary_emb
    assistant.model.rotary_emb = type(rotary)(config).to(target.device)
    return Gemma4MTPDrafter(assistant, target, query_offset=drafter.query_offset, window_shift=drafter.window_shift)
