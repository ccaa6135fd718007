"""Activations that gate a product, act(g) u, in float32, in torch and in kernels."""

import torch
import torch.nn.functional as F

from specdec.gpu.triton_shim import tl, triton

ACTIVATIONS = ("gelu_tanh", "silu")


def reference_activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """float32 in and out."""
    return F.gelu(x, approximate="tanh") if activation == "gelu_tanh" else F.silu(x)


@triton.jit
def activate(b_x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """float32 in and out."""
    b_u = b_x
    if ACTIVATION == "gelu_tanh":  # 1 + tanh(u) = 2 sigmoid(2 u), and 1.59.. = 2 sqrt(2 / pi)
        b_u = 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x)
    return b_x * tl.sigmoid(tl.maximum(b_u, -80.0))  # e^80 is a float32
