"""Which key a query sees: the one rule of every forward, written once for everything in plain torch.

    visible(i, j) = known(i, j)  and  q_i - p_j < window         window None: no limit

`known` says which keys exist for a query at all: the committed prefix for everyone, an ancestor or the node itself in a
tree, the rows up to its own in a chunk. Windows go by position, so by depth in a tree, never by index.
"""

import torch


def visible(query_pos: torch.Tensor, key_pos: torch.Tensor, known: torch.Tensor, window: int | None) -> torch.Tensor:
    """query_pos [B, N], key_pos [B, L], known [B, L] or [B, N, L] bool -> [B, N, L] bool."""
    seen = known if known.dim() == 3 else known[:, None].expand(-1, query_pos.shape[1], -1)
    if window is not None:
        seen = seen & (query_pos[:, :, None] - key_pos[:, None, :] < window)
    return seen


def bias_of(seen: torch.Tensor) -> torch.Tensor:
    """What is added to scores: 0 where seen [B, N, L], else -inf; [B, 1, N, L] float32, to be broadcast over heads."""
    bias = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    return bias.masked_fill_(~seen, -torch.inf)[:, None]
