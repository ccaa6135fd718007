"""Compiles the kernels of `launches` for a GPU that is absent, and prints the results as one JSON object.

    python tests/compile_launches.py

It runs in a separate process: here kernels are compiled; in the tests' process they run in the interpreter.
"""

import json
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "0"

import torch

torch.version.cuda = torch.version.cuda or "13.0"  # the project asks when it is imported

from specdec.gpu.triton_shim import tl, triton  # noqa: E402

import launches  # noqa: E402 - after those settings
from no_gpu import chain, pretended_gpu  # noqa: E402


@triton.jit
def defective_kernel(p_x: tl.tensor, scale: tl.tensor, N: tl.constexpr) -> None:
    """A defect that the interpreter does not see: a local has the name of a parameter that is a constant (None)."""
    b_x = tl.load(p_x + tl.arange(0, N))
    if tl.max(b_x) > 1.0:
        scale = tl.sum(b_x)
    tl.store(p_x + tl.arange(0, N), b_x * scale)


@triton.jit
def greedy_kernel(p_x: tl.tensor, N: tl.constexpr) -> None:
    """Needs more shared memory than a GPU has."""
    o_x = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_sum = tl.zeros([N, N], tl.float32)
    for i in range(100):
        b_x = tl.load(p_x + i * N * N + o_x)
        b_sum = tl.dot(b_x, b_x, b_sum)
    tl.store(p_x + o_x, b_sum.to(tl.bfloat16))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, pretended_gpu(90) as gpu:
        triton.knobs.cache.dir = folder
        not_launched = {}
        for name, call in launches.usual():
            try:
                call()
            except Exception as error:
                not_launched[name] = "\n".join(chain(error))
        project = {name: set(lines) for name, lines in gpu.statements.items()}
        x = launches.numbers(512, 512)
        defective_kernel[(1,)](x, None, N=16)
        greedy_kernel[(1,)](x, N=128, num_warps=8, num_stages=9)
    report = {
        "statements": {name: sorted(lines) for name, lines in project.items()},
        "compiled": gpu.compiled,
        "failures": gpu.failures,
        "not_launched": not_launched,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
