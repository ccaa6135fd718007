r"""Arithmetic of recurrent layers, block by block, in plain torch. A token's bits depend on its path and position only.

A block is FOLD positions of one path and begins at a multiple of FOLD. S is the state before it, [DK, DV] per head. G_i
is the sum of the log decays g of its places up to i. Place i has a query q_i, a key k_i and a record u_i:

    u_i   beta_i (v_i - S'_i k_i),   S'_i k_i = e^{G_i} S^T k_i + sum_{j < i} e^{G_i - G_j} (k_j . k_i) u_j
          u_i = v_i in a layer without beta (no delta rule)
    o_i   e^{G_i} S^T q_i + sum_{j <= i} e^{G_i - G_j} (k_j . q_i) u_j
    fold  S <- e^{G_end} S + sum_j e^{G_end - G_j} k_j u_j^T

Every product has the shape of a whole block: each place has a fixed row, and absent places are zeros. So a place has
the same bits whether it is computed alone or with others, in a prompt, a chain or a tree. Columns of values are padded
to a multiple of VALUE_COLUMNS, since the order of a sum may depend on the address of a matrix. A convolution adds its
taps in order.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.kvcache.recurrent_state import FOLD

VALUE_COLUMNS = 4
"""Columns of values are a multiple of this, so that every matrix of a batch begins at a multiple of 16 bytes."""


class RecordBlock(NamedTuple):
    """X blocks. state [X, HV, DK, DV]. By place, 0 for absent places: k [X, FOLD, HK, DK], u [X, FOLD, HV, DV] and g
    [X, FOLD, HV]. HV is a multiple of HK: a key serves HV / HK heads."""

    state: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor


class NewPlaces(NamedTuple):
    """The places to compute in each block.

    is_new: mask [X, FOLD] of these. q [X, FOLD, HK, DK], v [X, FOLD, HV, DV] and beta [X, FOLD, HV] are ignored
    elsewhere. beta None: no delta rule.
    """

    is_new: torch.Tensor
    q: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor | None


def convolved(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolve inputs [T, K, C] (the newest K of each token's path, its own last) with weight [C, K] -> [T, C]."""
    out = inputs[:, 0] * weight[:, 0]
    for tap in range(1, inputs.shape[1]):
        out = out + inputs[:, tap] * weight[:, tap]
    return out if bias is None else out + bias


def run_blocks(block: RecordBlock, new: NewPlaces) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the new places -> their outputs [X, FOLD, HV, DV] (undefined elsewhere), and u [X, FOLD, HV, DV] with
    their records added. `block` must already have k and g of the new places; its u at these places is ignored."""
    if unaligned := -block.u.shape[3] % VALUE_COLUMNS:
        padded = block._replace(state=F.pad(block.state, (0, unaligned)), u=F.pad(block.u, (0, unaligned)))
        found = run_blocks(padded, new._replace(v=F.pad(new.v, (0, unaligned))))
        return found[0][..., :-unaligned], found[1][..., :-unaligned]
    count, _, key_heads, _ = block.k.shape
    heads, v_dim = block.u.shape[2:]

    def by_head(x: torch.Tensor) -> torch.Tensor:
        """Repeat x of key heads for value heads: [X * HK, FOLD, Y] -> [X * HV, FOLD, Y]."""
        return x.view(count, key_heads, 1, FOLD, -1).expand(-1, -1, heads // key_heads, -1, -1).flatten(0, 2)

    k, q = (x.transpose(1, 2).flatten(0, 1) for x in (block.k, new.q))  # [X * HK, FOLD, DK]
    state = block.state.flatten(0, 1)  # [X * HV, DK, DV]
    total = block.g.cumsum(1).transpose(1, 2)  # [X, HV, FOLD]: G
    from_start = total.exp()[..., None]  # [X, HV, FOLD, 1]
    causal = torch.ones((FOLD, FOLD), dtype=torch.bool, device=k.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()  # [X, HV, i, j]
    is_new = new.is_new[:, :, None, None]
    u = block.u.masked_fill(is_new, 0.0).transpose(1, 2).contiguous()  # [X, HV, FOLD, DV]
    if new.beta is None:
        u = u + new.v.masked_fill(~is_new, 0.0).transpose(1, 2)
    else:
        keys = by_head(torch.bmm(k, k.transpose(1, 2))).view_as(decay) * decay
        keys = keys.masked_fill(~causal.tril(-1), 0.0)
        read = torch.bmm(by_head(k), state).view_as(u) * from_start
        blocks = torch.arange(count, device=k.device)
        num_new = new.is_new.sum(1)
        order = new.is_new.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # new places first
        for step in range(int(num_new.max())):
            cell = blocks, order[:, step]
            place = blocks, slice(None), order[:, step]
            row = keys[place].reshape(-1, 1, FOLD)  # [X * HV, 1, FOLD]
            known = read[place] + torch.bmm(row, u.flatten(0, 1)).view(count, heads, v_dim)
            record = new.beta[cell][..., None] * (new.v[cell] - known)
            u[place] = torch.where((step < num_new)[:, None, None], record, u[place])
    queries = by_head(torch.bmm(q, k.transpose(1, 2))).view_as(decay) * decay
    out = torch.bmm(by_head(q), state).view_as(u) * from_start
    out = out + torch.bmm(queries.flatten(0, 1), u.flatten(0, 1)).view_as(u)
    return out.transpose(1, 2), u.transpose(1, 2)


def folded(block: RecordBlock) -> torch.Tensor:
    """The states [X, HV, DK, DV] after folding all places of these blocks."""
    key_heads, heads = block.k.shape[2], block.u.shape[2]
    total = block.g.cumsum(1)  # [X, FOLD, HV]
    weight = (total[:, -1:] - total).exp()[..., None]  # [X, FOLD, HV, 1]
    u = (block.u * weight).transpose(1, 2).flatten(0, 1)  # [X * HV, FOLD, DV]
    k = block.k.repeat_interleave(heads // key_heads, dim=2).permute(0, 2, 3, 1).flatten(0, 1)  # [X * HV, DK, FOLD]
    added = torch.bmm(k.contiguous(), F.pad(u, (0, -u.shape[2] % VALUE_COLUMNS)))[..., : u.shape[2]]
    added = added.reshape(block.state.shape)
    return block.state * total[:, -1].exp()[..., None, None] + added
