r"""Counter-based Gumbel noise, a fixed function of (seed, position, token): the torch form and the Triton form.

    stream(seed, p) = mix(mix(seed + G) + p G)        mix, G: SplitMix64 (Steele, Lea, Flood 2014)
    u(seed, p, v)   = (top 52 bits of mix(stream + (v + 1) G) + 1/2) / 2^52        in (0, 1)
    g               = -log(-log u), in float64, rounded to float32

`gumbel_noise` (torch) and `exact_noise` (Triton) have the same bits, so a CPU and a GPU draw the same tokens. Float64
makes draws the same on every machine: a float64 logarithm that is half a unit off rounds to the same float32, except in
one draw in 10^8. A kernel needs float64 only for the few tokens that can win. `noise_bound` is g in float32 from the
same bits, with an error below NOISE_ERROR: it uses a form of -log u without cancellation at either end.
"""

import torch

from specdec.gpu.triton_shim import tl, triton

_GAMMA: int = 0x9E3779B97F4A7C15
_MIX1: int = 0xBF58476D1CE4E5B9
_MIX2: int = 0x94D049BB133111EB
_ULP = 2.0**-52

GAMMA, MIX1, MIX2 = tl.constexpr(_GAMMA), tl.constexpr(_MIX1), tl.constexpr(_MIX2)
HALF = tl.constexpr(1 << 51)
WHOLE = tl.constexpr(1 << 52)
ULP = tl.constexpr(_ULP)
MINUS_LN2 = tl.constexpr(-0.6931471805599453)

NOISE_ERROR = tl.constexpr(2.0**-13)
"""Exceeds the error of `noise_bound` plus the rounding of its sum with a score, for every sum that can be the
largest."""


def _int64(value: int) -> int:
    """The two's complement of an unsigned 64-bit constant: torch has no uint64 arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _int64(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _int64(_MIX2)
    return x ^ _shift_right(x, 31)


def gumbel_noise(seed: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [B, K, V] float32 for seed [B] and positions [B, K] (int64)."""
    gamma = _int64(_GAMMA)
    stream = _mix(_mix(seed + gamma)[:, None] + positions * gamma)  # [B, K]
    tokens = torch.arange(1, vocab_size + 1, device=seed.device)
    bits = _shift_right(_mix(stream[:, :, None] + tokens * gamma), 12)  # 52 bits: x + 0.5 is exact in float64
    uniform = (bits.double() + 0.5) * _ULP
    return -torch.log(-torch.log(uniform)).float()


@triton.jit
def _mix64(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * MIX1
    x = (x ^ (x >> 27)) * MIX2
    return x ^ (x >> 31)


@triton.jit
def noise_stream(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """stream(seed, p), uint64 from int64."""
    return _mix64(_mix64(seed.to(tl.uint64) + GAMMA) + position.to(tl.uint64) * GAMMA)


@triton.jit
def _uniform_bits(stream: tl.tensor, token: tl.tensor) -> tl.tensor:
    return (_mix64(stream + (token + 1).to(tl.uint64) * GAMMA) >> 12).to(tl.int64)


@triton.jit
def exact_noise(stream: tl.tensor, token: tl.tensor) -> tl.tensor:
    """float32, with the bits of `gumbel_noise`."""
    u = (_uniform_bits(stream, token).to(tl.float64) + 0.5) * ULP
    return -tl.log(-tl.log(u)).to(tl.float32)


@triton.jit
def noise_bound(stream: tl.tensor, token: tl.tensor) -> tl.tensor:
    """float32, within NOISE_ERROR of `exact_noise`. Made of cheap operations: 32-bit conversions and log2."""
    bits = _uniform_bits(stream, token)
    low = bits < HALF
    least = tl.where(low, bits, WHOLE - 1 - bits)
    high, rest = (least >> 20).to(tl.int32).to(tl.float32), (least & 0xFFFFF).to(tl.int32).to(tl.float32)
    t = high * (1048576 * ULP) + (rest + 0.5) * ULP
    # t is u, or 1 - u: at most 1/2
    series = t * (1.0 + t * (0.5 + t * (0.33333334 + t * 0.25)))  # -log(1 - t)
    exponential = tl.where(low | (t >= 0.03125), tl.log2(tl.where(low, t, 1.0 - t)) * MINUS_LN2, series)
    return tl.log2(exponential) * MINUS_LN2
