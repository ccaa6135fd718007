"""A pretended GPU: launchers take tensors that claim to lie on it, and kernels are compiled, not run.

    with pretended_gpu(capability=90) as gpu:
        x = torch.empty(5, 2560, dtype=torch.bfloat16, device="cuda")     no memory, and no value
        linear(x, weight)                                                  compiled to machine code for sm_90
    gpu.compiled, gpu.failures, gpu.statements

Triton itself decides what a launch compiles, from the launcher's arguments: dtypes, integers that are 1 or divisible by
16, the offset of a tensor in its storage, constants, warps, stages. Triton's cache on disk is not used. The process
must have imported Triton with TRITON_INTERPRET=0.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

SHARED_MEMORY = {90: 232448, 80: 166912, 89: 101376}  # bytes of a program at most, by compute capability
MULTIPROCESSORS = 132
LEFT_UNDER_WAY = re.compile(r"warp_group_dot_wait.*pendings = [1-9]")
"""A packed weight's operand lies in registers, which the next tile overwrites: no product may still be in flight."""


class PretendedTensor(torch.Tensor):
    """A meta tensor that reports a GPU as its device, except to torch's own functions. Their results do so too."""

    within_torch = False

    @property
    def device(self) -> torch.device:
        return torch.device("meta") if PretendedTensor.within_torch else torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:
        return not PretendedTensor.within_torch

    def data_ptr(self) -> int:
        return int(self.storage_offset()) * self.element_size()  # its alignment is that of a view


class OnPretendedGpu(TorchFunctionMode):
    """Makes a `PretendedTensor` of each tensor that is created on "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and args[1:] and str(args[1]).startswith("cuda"):  # an upload
            func, args, kwargs = torch.empty_like, args[:1], {"device": args[1]}
        made_there = str(kwargs.get("device")).startswith("cuda")
        if made_there:
            kwargs = {**kwargs, "device": "meta"}
        with mock.patch.object(PretendedTensor, "within_torch", True):
            out = func(*args, **kwargs)
            return out.as_subclass(PretendedTensor) if made_there else out


@dataclass
class PretendedGpu:
    """Stands for Triton's driver, and records what was compiled.

    compiled: kernel -> a line for each variant.   failures: kernel -> variants that failed to compile or load.
    statements: jitted function -> its line numbers that became code in some variant.
    """

    capability: int
    compiled: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    statements: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    # of Triton's driver

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    @property
    def utils(self) -> "PretendedGpu":
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.capability], "multiprocessor_count": MULTIPROCESSORS}

    # of its compiler

    def launch(self, compile_only: Any, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile a variant that is new, and check that a GPU could load it. Nothing is launched."""
        known = len(kernel.device_caches[0][0])
        name = full_name(kernel)
        try:
            binary = compile_only(kernel, *args, grid=(1,), warmup=True, **options)
        except Exception as error:  # whatever a compiler raises; its passes are C++
            self.failures[name].append("\n".join(chain(error)))
            return
        if len(kernel.device_caches[0][0]) == known:
            return
        constants = {k: v for k, v in options.items() if k.isupper()}
        dtypes = [str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor)]
        meta = binary.metadata
        self.compiled[name].append(f"{dtypes} {constants} warps={meta.num_warps} stages={meta.num_stages}")
        if (
            LEFT_UNDER_WAY.search(binary.asm["ttgir"])
            and constants.get("CODE", constants.get("DENSE_CODE")) is not None
        ):
            self.failures[name].append(f"operands in registers still read in the next tile: {self.compiled[name][-1]}")
        if meta.shared > SHARED_MEMORY[self.capability]:
            self.failures[name].append(f"{meta.shared} bytes of shared memory: {self.compiled[name][-1]}")

    def note(self, function: Any, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and function.__module__.startswith("specdec."):
            self.statements[full_name(function)].add(node.lineno)


def full_name(function: Any) -> str:
    return f"{function.__module__}.{function.__name__}"


@contextmanager
def pretended_gpu(capability: int) -> Iterator[PretendedGpu]:
    import triton
    from triton.compiler.code_generator import CodeGenerator
    from triton.runtime.jit import JITFunction

    gpu = PretendedGpu(capability)
    run, visit = JITFunction.run, CodeGenerator.visit

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        gpu.launch(run, kernel, args, options)

    def visited(self: Any, node: ast.AST) -> Any:
        gpu.note(self.jit_fn, node)
        return visit(self, node)

    major_minor = divmod(capability, 10)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=major_minor),
        mock.patch.object(triton.runtime.driver, "_active", gpu),
        mock.patch.object(triton.knobs.compilation, "always_compile", True),
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(CodeGenerator, "visit", visited),
        OnPretendedGpu(),
    ):
        yield gpu


def chain(error: BaseException | None) -> Iterator[str]:
    """Describe the error and its causes: a compiler's last cause explains the line that the first error shows."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__
