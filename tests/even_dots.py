"""`tl.dot` in Triton's interpreter with every element summed alike, as a tensor core does it.

The interpreter multiplies with numpy, whose library sums the last columns of a matrix in another order than the first;
which columns depends on the CPU. So a row's bits would depend on its tile. Here every element is the sum of its
products in ascending order. A plugin of conftest.py where there is no GPU.
"""

from typing import Any

import numpy as np
from triton.runtime import interpreter

from quick_interpreter import replaces


def even_matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """[..., M, K] and [..., K, N] -> [..., M, N]; of contiguous arrays einsum adds up K, row of b by row of b."""
    return np.einsum("...mk,...kn->...mn", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype))


@replaces(interpreter.InterpreterBuilder, "create_dot")
def summed_alike(create_dot: Any) -> Any:
    def of(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype.kind != "f" or b.data.dtype.kind != "f":  # bfloat16 lies there as integers
            return create_dot(self, a, b, d, *options)
        return interpreter.TensorHandle(even_matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    return of
