"""Prompt lookup: proposes the tokens that followed the last occurrence of the newest tokens. Needs no model and no KV.

For each request it finds the longest suffix of at most `max_ngram` tokens that occurred before, takes the latest
occurrence, and proposes its continuation (Saxena, "Prompt Lookup Decoding", 2023). If the continuation reaches the end
of the text, it repeats with the same period. Without a match the newest token is repeated.
"""

import torch

from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import DraftBatch, StatelessDrafter


class NgramDrafter(StatelessDrafter):
    """Proposes a chain by lookup, for all requests at once and without a host synchronisation."""

    name = "ngram"
    reads_every_state = False

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram

    def propose(self, batch: DraftBatch) -> DraftTree:
        tokens, length = batch.history, batch.history_len
        after = length - 1  # [B] where the continuation of the match starts; the root repeats when nothing matches
        found = torch.zeros_like(length, dtype=torch.bool)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        for size in range(min(self.max_ngram, tokens.shape[1] - 1), 0, -1):
            windows = tokens.unfold(1, size, 1)  # [B, L - size + 1, size]
            starts = columns[: windows.shape[1]]
            suffix_start = (length - size).clamp(min=0)
            suffix = tokens.gather(1, suffix_start[:, None] + columns[:size])  # [B, size]
            earlier = starts < (length - size)[:, None]  # an occurrence before the suffix itself
            match = (windows == suffix[:, None]).all(-1) & earlier
            latest = torch.where(match, starts, -1).amax(-1)
            hit = (latest >= 0) & ~found
            after = torch.where(hit, latest + size, after)
            found |= hit
        period = length - after  # [B] >= 1
        steps = torch.arange(batch.num_steps, device=tokens.device) % period[:, None]
        drafts = tokens.gather(1, after[:, None] + steps)  # [B, num_steps]
        return DraftTree.chain(torch.cat([batch.root[:, None], drafts], dim=1))
