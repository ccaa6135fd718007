"""K/V in 8 bits: e4m3 numbers with one float32 scale per slot and head.

    write    scale = max |row| / 448,   bits = e4m3(row / scale)       a row is the D numbers of one head of one token
    read     e4m3 -> float32, times scale, rounded to the model's dtype; kernels do not round: see `fp8_kernels.py`

A row's scale is computed from that row alone, so its bits depend on no other token, chunk or request. A move copies the
bits and does not round again. Invariant: target, frozen drafter and draft in progress all attend to the numbers that
`read` returns.
"""

from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite number of e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Pool:
    """Rows [slots, heads, D] in 8 bits. It replaces a tensor of `dtype` and has the tensor methods that pools use.

    bits: [slots, heads, D] uint8, e4m3. scales: [slots, heads] float32.
    """

    bits: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def zeros(cls, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> "Fp8Pool":
        bits = torch.zeros((slots, heads, dim), dtype=torch.uint8, device=device)
        return cls(bits, torch.zeros((slots, heads), device=device), dtype)

    @classmethod
    def from_rows(cls, rows: torch.Tensor) -> "Fp8Pool":
        """Round these rows [slots, heads, D] into a pool. A row with a NaN has the scale NaN."""
        slots, heads, dim = rows.shape
        pool = cls.zeros(slots, heads, dim, rows.dtype, rows.device)
        pool.index_copy_(0, torch.arange(slots, device=rows.device), rows)
        return pool

    @property
    def shape(self) -> torch.Size:
        return self.bits.shape

    @property
    def device(self) -> torch.device:
        return self.bits.device

    def new_empty(self, shape: tuple[int, ...]) -> "Fp8Pool":
        """An uninitialised pool of this shape [slots, heads, D]."""
        return Fp8Pool(self.bits.new_empty(shape), self.scales.new_empty(shape[:-1]), self.dtype)

    def index_select(self, dim: int, slots: torch.Tensor) -> "Fp8Pool":
        return Fp8Pool(self.bits.index_select(dim, slots), self.scales.index_select(dim, slots), self.dtype)

    def index_copy_(self, dim: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Round rows [T, heads, D] and store them at slots [T]."""
        rows = rows.float()
        largest = rows.abs().amax(-1)
        scales = torch.where(largest == 0, 1.0, largest / E4M3_MAX)
        self.bits.index_copy_(dim, slots, (rows / scales[..., None]).to(E4M3).view(torch.uint8))
        self.scales.index_copy_(dim, slots, scales)

    def read(self) -> torch.Tensor:
        """All rows [slots, heads, D] in `dtype`."""
        return (self.bits.view(E4M3).float() * self.scales[..., None]).to(self.dtype)


FieldPool = torch.Tensor | Fp8Pool
"""The rows of one field of a layer."""


def read_rows(pool: FieldPool, slots: torch.Tensor) -> torch.Tensor:
    """Rows at slots [T] -> [T, heads, D]."""
    return all_rows(pool.index_select(0, slots))


def all_rows(pool: FieldPool) -> torch.Tensor:
    return pool.read() if isinstance(pool, Fp8Pool) else pool


def numbers_and_scales(pool: FieldPool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors of a pool that kernels read: rows [slots, heads, D] and None; for a rounded pool, pairs of numbers
    [slots, heads, D / 2] int16 and scales [slots, heads]."""
    return (pool.bits.view(torch.int16), pool.scales) if isinstance(pool, Fp8Pool) else (pool, None)


def tensors_of(pool: FieldPool) -> tuple[torch.Tensor, ...]:
    """The tensors of a pool, to be moved, poisoned with NaN or counted."""
    return (pool.bits, pool.scales) if isinstance(pool, Fp8Pool) else (pool,)
