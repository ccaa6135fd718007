"""The quicker interpreter computes and refuses what Triton's own does."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from even_dots import even_matmul
from triton.runtime.errors import InterpreterError

pytestmark = [
    pytest.mark.usefixtures("kernels_run"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here"),
]


@triton.jit
def halve(x):
    return x / 2


@triton.jit
def kernel(p_out, p_x, CASE: tl.constexpr):
    o_row = tl.arange(0, 4)
    x = tl.load(p_x + o_row)  # [4], int32
    if CASE == "a row and a column":
        y = tl.sum(x[:, None] * 10 + x[None, :], 1)
    elif CASE == "a column and a row":
        y = tl.sum(x[None, :] + x[:, None] * 10, 1)
    elif CASE == "ints are divided as floats":
        y = halve(x) * 100
    elif CASE == "a number in front":
        y = 10 - x + (x - 10) * 2
    elif CASE == "an integer and a float that are equal":
        y = ((x + 2) // 2 * 10 + (x.to(tl.float32) + 2.0) / 2 * 2).to(tl.int32)
    elif CASE == "halves keep their width":
        y = (x.to(tl.float16) * 2048 + 1 - x.to(tl.float16) * 2048).to(tl.int32)
    elif CASE == "bytes wrap":
        y = (x.to(tl.uint8) * 100).to(tl.int32)
    elif CASE == "a flag is one bit":
        y = ((x > 1) + (x > 2)).to(tl.int32)
    elif CASE == "shapes that do not fit":
        y = x + tl.arange(0, 8)
    elif CASE == "a pointer and a float":
        y = tl.load(p_x + o_row.to(tl.float32))
    elif CASE == "three rows":
        y = tl.sum(tl.zeros((3, 4), tl.int32), 0)
    tl.store(p_out + o_row, y)


@triton.jit
def dot_kernel(p_out, p_a, p_b):
    o = tl.arange(0, 16)
    o_tile = o[:, None] * 16 + o[None, :]
    o_a = tl.program_id(0) * 256 + o_tile
    tl.store(p_out + o_a, tl.dot(tl.load(p_a + o_a), tl.load(p_b + o_tile), input_precision="ieee"))


def run(case):
    out = torch.zeros(4, dtype=torch.int32)
    kernel[(1,)](out, torch.tensor([0, 1, 2, 3], dtype=torch.int32), CASE=case)
    return out.tolist()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("a row and a column", [6, 46, 86, 126]),
        ("a column and a row", [6, 46, 86, 126]),
        ("ints are divided as floats", [0, 50, 100, 150]),
        ("a number in front", [-10, -9, -8, -7]),
        ("an integer and a float that are equal", [12, 13, 24, 25]),
        ("halves keep their width", [1, 0, 0, 0]),  # 2049 is no number of 16 bits
        ("bytes wrap", [0, 100, 200, 44]),
        ("a flag is one bit", [0, 0, 1, 0]),
    ],
)
def test_values(case, expected):
    assert run(case) == expected
    assert run(case) == expected  # with types that it has met


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("shapes that do not fit", "incompatible dimensions"),
        ("a pointer and a float", "invalid operands of type"),
        ("three rows", "must be a power of 2"),
    ],
)
def test_refusals(case, said):
    for _ in range(2):
        with pytest.raises(InterpreterError, match=said):
            run(case)


@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (16, 512, 32), (32, 32, 512), (64, 64, 16)])
def test_a_dot_sums_every_element_alike(m: int, k: int, n: int):
    """In ascending order of K, whatever its row and column, which numpy's own library does on some CPUs only."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k)))
    want = np.zeros((m, n), np.float32)
    for i in range(k):
        want = want + a[:, i, None] * b[None, :, i]
    assert np.array_equal(even_matmul(a, b.T, np.float32), want)
    assert np.array_equal(even_matmul(a[None], b.T[None], np.float32)[0], want)


def test_a_dot_of_kernels_is_even():
    a, b = torch.randn(64, 16), torch.randn(16, 16)
    out = torch.zeros(64, 16)
    dot_kernel[(4,)](out, a, b)
    assert torch.equal(out, torch.from_numpy(even_matmul(a.numpy(), b.numpy(), np.float32)))
