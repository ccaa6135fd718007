"""Two defects that the interpreter hides and a GPU does not are failures here.

A load or a store outside of the tensors that a launch was given is an error: the interpreter reads whatever lies at an
address, so a missing mask would not show if what it loads is not used. Kernels that find tensors by a table of
addresses (`INDIRECT`) may touch others, too.

Every other launch runs its programs in reverse order: if two programs store different numbers at one place, the result
depends on which is last.

A plugin of conftest.py on machines without a GPU.
"""

from bisect import bisect_right
from typing import Any, ClassVar

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

INDIRECT = ("_copy_rows_kernel", "fold_kernel", "exchange_kernel", "exchange_tagged_kernel")


class Launch:
    """The launch that runs now."""

    kernel = ""
    backwards = True
    begins: ClassVar[list[int]] = []  # addresses of the storages of its tensors, in ascending order, and of their ends
    ends: ClassVar[list[int]] = []


def storages_of(value: Any) -> set[tuple[int, int]]:
    if isinstance(value, tuple):
        return set().union(*map(storages_of, value))
    tensor = getattr(value, "base", value)  # of a descriptor
    if not hasattr(tensor, "untyped_storage"):
        return set()
    storage = tensor.untyped_storage()
    return {(storage.data_ptr(), storage.data_ptr() + storage.nbytes())}


def outside(addresses: np.ndarray, size: int) -> bool:
    """Does one of these addresses lie outside of the launch's tensors?"""
    begins, ends = Launch.begins, Launch.ends
    first = True
    while addresses.size:
        low = int(addresses.min())
        at = bisect_right(begins, low) - 1
        if at < 0 or low > ends[at] - size:
            return not (first and Launch.kernel in INDIRECT)
        addresses = addresses[addresses > ends[at] - size]  # mostly none: a tile lies in one tensor
        first = False
    return False


def require_inside(ptrs: Any, mask: Any, does: str) -> None:
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    seen = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
    assert not outside(ptrs.data[seen], size), f"{Launch.kernel} {does} {size} bytes outside of its tensors"


ready, place = GridExecutor._init_args_hst, InterpreterBuilder.set_grid_idx
load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def noted(self: Any, args: Any, options: Any) -> Any:
    made = ready(self, args, options)
    found = sorted(storages_of((*made[0], *made[1].values())))
    Launch.kernel, Launch.backwards = self.fn.__name__, not Launch.backwards
    Launch.begins, Launch.ends = [begin for begin, _ in found], [end for _, end in found]
    return made


def placed(self: Any, *program: int) -> None:
    if Launch.backwards:
        program = tuple(count - 1 - i for count, i in zip(self.grid_dim, program, strict=True))
    place(self, *program)


def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
    require_inside(ptrs, mask, "loads")
    return load(self, ptrs, mask, *rest, **options)


def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
    require_inside(ptrs, mask, "stores")
    return store(self, ptrs, value, mask, *rest)


GridExecutor._init_args_hst = noted
InterpreterBuilder.set_grid_idx = placed
InterpreterBuilder.create_masked_load = checked_load
InterpreterBuilder.create_masked_store = checked_store
