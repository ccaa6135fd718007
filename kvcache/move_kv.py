"""Copy K/V from slot to slot in every tensor of one space, in two launches however many layers there are.

    for every tensor:   scratch = tensor[source];   tensor[destination] = scratch          source, destination [M]

All sources are read before any destination is written, so an accepted path may be moved onto itself in any order.
Destinations are distinct, but for the null slot 0, which padded pairs (0, 0) name as often as they like.

The tensors differ in heads and head size; the kernels see a table of their addresses, and a slot as 8-byte words (or
fewer, where it is not made of those). The table names storage, nothing else: build it once, it holds the tensors alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.index_spaces import FullLoc, SwaLoc

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class StoreAddresses:
    """Where the rows of P pools lie.

    table: [P, 3] int64 on the device: address, words in a row, words before it in a row of the scratch buffer.
    """

    pools: tuple[torch.Tensor, ...]
    table: torch.Tensor
    word: torch.dtype
    longest: int
    total: int

    @classmethod
    def of(cls, pools: Sequence[torch.Tensor]) -> "StoreAddresses":
        """The rows of contiguous pools [slots, Hkv, D] on one device; Hkv, D and dtype may differ."""
        assert pools and all(pool.is_contiguous() for pool in pools), "pools are contiguous"
        row_bytes = [pool[0].numel() * pool.element_size() for pool in pools]
        size = next(s for s in WORDS if all(n % s == 0 for n in (*row_bytes, *(pool.data_ptr() for pool in pools))))
        row_len = torch.tensor(row_bytes, dtype=torch.int64) // size
        addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64)
        table = torch.stack([addresses, row_len, row_len.cumsum(0) - row_len], dim=1)
        return cls(tuple(pools), table.to(pools[0].device), WORDS[size], int(row_len.max()), int(row_len.sum()))


def reference_move_kv(pools: Sequence[torch.Tensor], source: FullLoc | SwaLoc, destination: FullLoc | SwaLoc) -> None:
    """Copy rows source [M] of pools [slots, Hkv, D] to destination [M]."""
    for pool in pools:
        pool.index_copy_(0, destination, pool.index_select(0, source))


@triton.jit
def _copy_rows_kernel(
    p_table: tl.tensor,
    p_slots: tl.tensor,
    p_scratch: tl.tensor,
    stride_slots: tl.tensor,
    total: tl.tensor,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_pool = tl.program_id(1)
    o_word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    p_pool = tl.load(p_table + i_pool * 3).to(p_scratch.dtype)
    row_len = tl.load(p_table + i_pool * 3 + 1)
    row_start = tl.load(p_table + i_pool * 3 + 2)
    slot = tl.load(p_slots + i_row * stride_slots).to(tl.int64)
    m_word = o_word < row_len
    p_pool += slot * row_len + o_word
    p_scratch += i_row * total + row_start + o_word
    if GATHER:
        tl.store(p_scratch, tl.load(p_pool, mask=m_word, other=0), mask=m_word)
    else:
        tl.store(p_pool, tl.load(p_scratch, mask=m_word, other=0), mask=m_word)


def move_kv(
    pools: StoreAddresses | Sequence[torch.Tensor], source: FullLoc | SwaLoc, destination: FullLoc | SwaLoc
) -> None:
    """Copy K/V of slots source [M] of tensors [slots, Hkv, D] to destination [M].

    A CUDA graph needs a `StoreAddresses` made before.
    """
    assert source.shape == destination.shape and source.dim() == 1, f"{source.shape=} {destination.shape=}"
    if len(source) == 0:
        return
    rows = pools if isinstance(pools, StoreAddresses) else StoreAddresses.of(pools)
    scratch = torch.empty((len(source), rows.total), dtype=rows.word, device=source.device)
    block = min(triton.next_power_of_2(rows.longest), 1024)
    grid = (len(source), len(rows.pools), triton.cdiv(rows.longest, block))
    for slots, gather in ((source, True), (destination, False)):
        _copy_rows_kernel[grid](rows.table, slots, scratch, slots.stride(0), rows.total, GATHER=gather, BLOCK=block)
