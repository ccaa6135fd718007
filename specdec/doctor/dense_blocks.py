"""The dense form of block drafters: a block after every place of a text, without pages or kernels.

    root r    its block is the token at r and MASK, at positions r, r + 1, ..; it sees K/V of [0, r), made of the
              target's states there, and its own rows

Row d gives the draft of depth d; a successor head is given the text's own token before it. A block has no more depths
than it drafts, whatever is asked for.
"""

from dataclasses import dataclass

import torch

from specdec.attention.bridge import AttentionCall
from specdec.attention.dense import bias_of, dense_attention
from specdec.attention.kernels.draft_block import Order
from specdec.doctor.recorded_text import RecordedText
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_drafter import BlockDrafter


@dataclass(frozen=True, slots=True)
class BlocksOverText:
    """Attention of a block at each root: K/V of the text by layer [1, heads, T, D], then the block's own."""

    drafter: BlockDrafter
    text_kv: list[tuple[torch.Tensor, torch.Tensor]]
    positions: torch.Tensor  # [R, N] of the blocks' rows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        spec, query_pos = self.drafter.spec, self.positions
        k, v = (
            torch.cat([text.expand(len(query_pos), -1, -1, -1), own], dim=2)
            for text, own in zip(self.text_kv[call.layer], (call.key, call.value), strict=True)
        )
        text_pos = torch.arange(k.shape[2] - query_pos.shape[1], device=query_pos.device)
        key_pos = torch.cat([text_pos.expand(len(query_pos), -1), query_pos], dim=1)  # [R, T + N]
        seen = key_pos[:, None] < query_pos[:, :1, None]
        seen = seen.expand(-1, query_pos.shape[1], -1).clone()  # [R, N, T + N]
        apart = query_pos[:, :, None] - key_pos[:, None]
        seen[:, :, len(text_pos) :] = apart[:, :, len(text_pos) :] >= 0 if spec.order is Order.CAUSAL else True
        if (window := spec.windows[call.layer]) is not None:
            seen &= apart < window
        return dense_attention(call.query, k, v, bias_of(seen), scaling=call.scaling)


def block_drafts(drafter: Drafter, text: RecordedText, roots: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """`Dense` of block drafters, by the head's own modules."""
    assert isinstance(drafter, BlockDrafter)
    head, spec, form = drafter.head, drafter.spec, drafter.plain
    levels = min(num_steps, spec.num_drafts)
    taps = head.taps(text.aux_states(spec.aux_layers)[None])  # [1, T, H]
    rotary = head.rotary_emb(taps, text.positions[None])
    text_kv = [layer.self_attn.keys_values(taps, rotary) for layer in head.layers]  # type: ignore[operator, union-attr]
    steps = torch.arange(spec.rows_for(levels), device=roots.device)
    positions = roots[:, None] + steps
    tokens = torch.where(steps == 0, text.tokens[roots][:, None], spec.mask_token)
    states = form.run(tokens, positions, BlocksOverText(drafter, text_kv, positions))  # type: ignore[arg-type]
    states = states[:, spec.first_row : spec.first_row + levels]
    logits = form.logits(states)  # [R, levels, V]
    if head.markov_head is None:
        return list(logits.unbind(1))
    scores, carried = [], None
    for level in range(levels):
        bias, carried = head.markov_head(text.tokens[roots + level][:, None], states[:, level], carried)
        scores.append(logits[:, level] + bias[:, 0])
    return scores
