"""The K/V of one model: one pool [slots, Hkv, D] per field of a layer, and how to write to and move within pools.

    store_kv   pool_k[slots[t]] = k[t],  pool_v[slots[t]] = v[t]           t = 0..T-1, one layer a launch
    move_kv    scratch = tensor[source];  tensor[destination] = scratch    every tensor of a group, in two launches

A store owns tensors and nothing else. Each model of an engine that keeps K/V has one store, made from its layout, or
one per rank. One allocator gives the slots of all stores, and a tensor is indexed by the slots of its group. All
padding writes to the null slot: any of these writes may win, and no query reads the slot. All other destinations are
distinct. A move reads all sources before it writes, so source and destination of a path may overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specdec.gpu.ranks import Ranks
from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.fp8_pool import FieldPool, Fp8Pool, store_fp8, tensors_of
from specdec.kvcache.layer_context import Destination
from specdec.kvcache.layout import CacheField, GroupId, GroupLoc, KVLayout
from specdec.kvcache.recurrent_state import RecurrentState, StateShape

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class LayerKV(NamedTuple):
    """The pools of one layer in the order of its fields, and the group whose slots index them. A recurrent layer also
    has states, indexed by row of the request table."""

    fields: tuple[FieldPool, ...]
    group: GroupId
    state: RecurrentState | None = None

    @property
    def k(self) -> Any:
        """Keys of an attention layer, [slots, Hkv, D]: a tensor or a `Fp8Pool`."""
        return self.fields[0]

    @property
    def v(self) -> Any:
        """Values of an attention layer, [slots, Hkv, DV]."""
        return self.fields[1]

    @property
    def recurrent_state(self) -> RecurrentState:
        """The states of a recurrent layer."""
        assert self.state is not None
        return self.state

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the pools."""
        return tuple(tensor for pool in self.fields for tensor in tensors_of(pool))

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, and of the states."""
        return sum(tensor.nbytes for tensor in (*self.tensors, *(self.state or ())))


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """Row addresses of P tensors for `move_kv`. The tensors may differ in heads and head size; they are kept alive.

    table: [P, 3] int64 on the device: address, words in a row, words before it in a row of the scratch buffer. A word
    has 8 bytes, or fewer if the row size is not a multiple of 8.
    """

    pools: tuple[torch.Tensor, ...]
    table: torch.Tensor
    word: torch.dtype
    longest: int
    total: int

    @classmethod
    def from_pools(cls, pools: Sequence[torch.Tensor]) -> "PoolAddresses":
        """The rows of contiguous pools [slots, Hkv, D] on one device; Hkv, D and dtype may differ."""
        assert pools and all(pool.is_contiguous() for pool in pools), "pools are contiguous"
        row_bytes = [pool[0].numel() * pool.element_size() for pool in pools]
        size = next(s for s in WORDS if all(n % s == 0 for n in (*row_bytes, *(pool.data_ptr() for pool in pools))))
        row_len = torch.tensor(row_bytes, dtype=torch.int64, device="cpu") // size
        addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device="cpu")
        table = torch.stack([addresses, row_len, row_len.cumsum(0) - row_len], dim=1)
        return cls(tuple(pools), table.to(pools[0].device), WORDS[size], int(row_len.max()), int(row_len.sum()))


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Recurrent layers of one shape, for kernels that visit all of them.

    table: [L, 6] int64 addresses on the device: matrices and inputs of the states, then the pools in order; 0: none.
    sample: the states of the first layer; kernels use its folded lengths for all layers.
    """

    table: torch.Tensor
    shape: StateShape
    key_heads: int
    sample: RecurrentState
    layers: tuple[LayerKV, ...]

    @classmethod
    def of_layers(cls, shape: StateShape, key_heads: int, layers: Sequence[LayerKV]) -> "RecurrentLayers":
        sample, rows = layers[0].recurrent_state, []
        for kept in layers:
            found = [tensor.data_ptr() for tensor in (*kept.recurrent_state[:2], *kept.tensors)]
            rows.append(found + [0] * (6 - len(found)))
        table = torch.tensor(rows, dtype=torch.int64, device=sample.inputs.device)
        return cls(table, shape, key_heads, sample, tuple(layers))


class KVStore:
    """Pools for every owner layer of a layout and every slot of an allocator, on one device.

    ranks: the devices that share the model; `layout` is one rank's share. rank: the rank whose heads this store holds.
    other_ranks: the stores of the ranks after the first, which use the same slots; only rank 0's store has them.
    num_states: states per recurrent layer: one per row of the request table and one per copy.
    """

    def __init__(
        self,
        layout: KVLayout,
        allocator: HybridAllocator,
        dtype: torch.dtype,
        ranks: Ranks,
        *,
        rank: int = 0,
        num_states: int = 0,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.ranks = ranks
        self.rank = rank
        more = () if rank else range(1, len(ranks))
        self.other_ranks: tuple[KVStore, ...] = tuple(
            KVStore(layout, allocator, dtype, ranks, rank=i, num_states=num_states) for i in more
        )
        device = ranks.devices[rank]
        self.layers: dict[int, LayerKV] = {}
        shapes: dict[tuple[StateShape, int], list[LayerKV]] = {}  # recurrent layers by state shape and key heads
        with torch.inference_mode(False):  # ordinary tensors, in whatever mode the store is made
            for spec in layout.owners:
                group = allocator.groups.group_of(spec.retention)
                slots = allocator.num_slots(group)
                pools = tuple(empty_pool(field, slots, dtype, device) for field in spec.fields)
                state = None if spec.state is None else RecurrentState.zeros(num_states, spec.state, dtype, device)
                self.layers[spec.layer] = kept = LayerKV(pools, group, state)
                if spec.state is not None:
                    key_heads = spec.fields[1].heads if spec.state.heads else 1
                    shapes.setdefault((spec.state, key_heads), []).append(kept)
            groups = {layer.group for layer in self.layers.values() if layer.fields}
            self.recurrent = tuple(RecurrentLayers.of_layers(*shape, layers) for shape, layers in shapes.items())
            self.addresses = {group: PoolAddresses.from_pools(self.tensors(group)) for group in groups}

    @property
    def by_rank(self) -> tuple["KVStore", ...]:
        """The stores of all ranks of the model, of which this is rank 0's."""
        return self, *self.other_ranks

    def tensors(self, group: GroupId) -> tuple[torch.Tensor, ...]:
        """All tensors that are indexed by the slots of one group."""
        return tuple(tensor for layer in self.layers.values() if layer.group == group for tensor in layer.tensors)

    def clear(self) -> None:
        self.layers.clear()
        self.addresses.clear()
        self.recurrent = ()


def empty_pool(field: CacheField, slots: int, dtype: torch.dtype, device: torch.device) -> FieldPool:
    """A pool of zeros for every slot."""
    if field.fp8:
        return Fp8Pool.zeros(slots, field.heads, field.dim, dtype, device)
    return torch.zeros((slots, field.heads, field.dim), dtype=field.dtype or dtype, device=device)


# writing


def reference_store_kv(destination: Destination, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, DV] to a destination."""
    destination.pool_k.index_copy_(0, destination.slots, k)
    destination.pool_v.index_copy_(0, destination.slots, v)


@triton.jit
def _store_kv_kernel(
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_slots: tl.tensor,
    p_pool_k: tl.tensor,
    p_pool_v: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_k_dim: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_v_dim: tl.tensor,
    stride_slots: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_token = tl.program_id(0).to(tl.int64)
    o_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] of a row of HEADS * DIM numbers
    slot = tl.load(p_slots + i_token * stride_slots).to(tl.int64)
    p_k += i_token * stride_k_token + o_row // K_DIM * stride_k_head + o_row % K_DIM * stride_k_dim
    p_v += i_token * stride_v_token + o_row // V_DIM * stride_v_head + o_row % V_DIM * stride_v_dim
    m_k, m_v = o_row < HEADS * K_DIM, o_row < HEADS * V_DIM
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    tl.store(p_pool_k + slot * (HEADS * K_DIM) + o_row, b_k, mask=m_k)
    tl.store(p_pool_v + slot * (HEADS * V_DIM) + o_row, b_v, mask=m_v)


def store_kv(destination: Destination, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, DV], of any strides, to a destination in contiguous pools."""
    pool_k, pool_v, slots = destination
    num_tokens, num_heads, head_dim = k.shape
    assert v.shape[:2] == k.shape[:2] and slots.shape == (num_tokens,), f"{k.shape=} {v.shape=} {slots.shape=}"
    assert pool_k.shape[1:] == k.shape[1:] and pool_v.shape[1:] == v.shape[1:], f"{pool_k.shape=} {pool_v.shape=}"
    assert k.dtype == v.dtype == pool_k.dtype == pool_v.dtype, f"{k.dtype=} {v.dtype=} {pool_k.dtype=}"
    if num_tokens == 0:
        return
    if isinstance(pool_k, Fp8Pool):
        assert isinstance(pool_v, Fp8Pool), "K and V are fp8, or neither"
        store_fp8(k, v, slots, pool_k, pool_v)
        return
    assert pool_k.is_contiguous() and pool_v.is_contiguous(), "a pool is contiguous"
    row_len = num_heads * max(head_dim, v.shape[2])
    block = min(triton.next_power_of_2(row_len), 1024)
    _store_kv_kernel[(num_tokens, triton.cdiv(row_len, block))](
        *(k, v, slots, pool_k, pool_v),
        *(*k.stride(), *v.stride(), slots.stride(0)),
        HEADS=num_heads,
        K_DIM=head_dim,
        V_DIM=v.shape[2],
        BLOCK=block,
        num_warps=4,
    )


# moving


def reference_move_kv(pools: Sequence[torch.Tensor], source: GroupLoc, destination: GroupLoc) -> None:
    """Copy slots source [M] of pools [slots, Hkv, D] to slots destination [M]."""
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


def move_kv(rows: PoolAddresses, source: GroupLoc, destination: GroupLoc) -> None:
    """Copy K/V of slots source [M] of tensors [slots, Hkv, D] to destination [M]."""
    assert source.shape == destination.shape and source.dim() == 1, f"{source.shape=} {destination.shape=}"
    if len(source) == 0:
        return
    scratch = torch.empty((len(source), rows.total), dtype=rows.word, device=source.device)
    block = min(triton.next_power_of_2(rows.longest), 1024)
    grid = (len(source), len(rows.pools), triton.cdiv(rows.longest, block))
    for slots, gather in ((source, True), (destination, False)):
        _copy_rows_kernel[grid](rows.table, slots, scratch, slots.stride(0), rows.total, GATHER=gather, BLOCK=block)
