"""Makes Triton's interpreter several times as fast, and the order of sums in its products fixed.

An operation takes one numpy call and a hundred Python steps: the interpreter makes a new type for every value, compares
identical types, and checks for overflow only to discard the result. Here a type is made once and compared by identity.
None of this is public, so parts that a version of Triton lacks are skipped: tests are then only slower.

The interpreter multiplies with numpy, whose library sums the last columns of a matrix in another order than the first;
which columns depends on the CPU, so a row's bits would depend on its tile. Here every element of `tl.dot` is the sum of
its products in ascending order, as on a tensor core. Apart from this no value changes.

A plugin of conftest.py on machines without a GPU.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def replaces(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], None]:
    """Decorate a function that makes the new `owner.name` from the old one."""

    def replace(make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            setattr(owner, name, make(getattr(owner, name)))

    return replace


class Replaced:
    """The attributes that a scope of the interpreter has replaced, to replace and restore them without a search."""

    def __init__(self, changes: list[tuple[Any, str, Any]]) -> None:
        before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, original in changes:  # an attribute that is replaced twice has its first original
            before.setdefault((id(owner), name), (owner, name, original))
        self.changes = [(owner, name, original, getattr(owner, name)) for owner, name, original in before.values()]

    def again(self) -> "Replaced":
        for owner, name, _, replacement in self.changes:
            setattr(owner, name, replacement)
        return self

    def restore(self) -> None:
        for owner, name, original, _ in self.changes:
            if original is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@replaces(interpreter, "_patch_lang")
class ReplacedOnce:
    """Replaces the builtins of `triton.language` once per kernel, and searches for them once per process.

    The interpreter replaces them before a kernel, restores them after it, and replaces them again at every call of a
    function inside the kernel, where nothing is left to replace.
    """

    def __init__(self, replace: Callable[[FunctionType], Any]) -> None:
        self.replace = replace
        self.done: list[ModuleType] = []  # empty outside of a kernel
        self.outermost: Any = None
        self.modules: dict[FunctionType, list[ModuleType]] = {}  # that hold builtins, by the function that sees them
        self.known: dict[tuple[bool, *tuple[ModuleType, ...]], Replaced] = {}

    def __call__(self, fn: FunctionType) -> Any:
        if fn not in self.modules:
            seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            self.modules[fn] = [module for module in (tl, core) if module in seen]
        modules = self.modules[fn]
        if self.done and all(module in self.done for module in modules):
            return self
        inside, self.done = bool(self.done), self.done + modules
        scope = self._replace(fn, (inside, *modules))
        if inside:
            return scope
        self.outermost = scope
        return self

    def _replace(self, fn: FunctionType, key: tuple[bool, *tuple[ModuleType, ...]]) -> Any:
        if key in self.known:
            return self.known[key].again()
        scope = self.replace(fn)
        if not hasattr(interpreter, "_MISSING"):
            return scope
        self.known[key] = Replaced(scope._changes)
        return self.known[key]

    def restore(self) -> None:
        """Restore the builtins after a kernel. After a function inside it the interpreter restores nothing."""
        self.done = []
        self.outermost.restore()


@replaces(interpreter, "_patch_attr")
def direct_calls(_: Any) -> Any:
    """Call a builtin without the check that it is called inside a kernel."""

    def replace(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        builtin = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return builtin(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return replace


@replaces(interpreter.interpreter_builder, "options")
def no_overflow_check(options: Any) -> Any:
    """Drop the check of integer sums, which the interpreter computes and then ignores without `debug`."""
    return options if options.debug else interpreter.InterpreterOptions(sanitize_overflow=False)


@replaces(interpreter, "_get_np_dtype")
def numpy_types_by_name(find: Any) -> Any:
    known: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return of


BLOCKS: dict[tuple[Any, ...], Any] = {}  # every block type, for good: so two are equal when they are the same


@replaces(core.block_type, "__init__")
def one_block_type_of_a_shape(init: Any) -> Any:
    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in BLOCKS:
            block = object.__new__(cls)
            init(block, element_ty, shape)
            BLOCKS[key] = block
        return BLOCKS[key]

    core.block_type.__new__ = new
    return lambda self, element_ty, shape: None


@replaces(core.tensor, "__init__")
def attributes_by_type(init: Any) -> Any:
    """Keep a tensor's attributes on its type: all except the handle follow from it."""

    def quick(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get("of_tensors")
        if attributes is None:
            init(self, None, type)
            attributes = type.of_tensors = dict(self.__dict__)
        self.__dict__.update(attributes)
        self.handle = handle

    return quick


@replaces(TritonSemantic, "binary_op_type_checking_impl")
def one_type_needs_no_check(check: Any) -> Any:
    """Remember pairs of types that need no cast, and the blocks that numbers became."""
    blocks: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # and the type, which is kept for its id
    casts: dict[tuple[Any, ...], bool] = {}  # by names

    def meet(self: Any, left: Any, right: Any, number: Any, flags: tuple[bool, ...]) -> Any:
        block, first = (left, True) if right is number else (right, False)
        if block.type.__class__ is core.pointer_type:  # a launch has its own
            return check(self, left, right, *flags)
        case = id(block.type), number.__class__, number, first, flags
        if case in blocks:
            met = blocks[case][1]
            return (block, met) if first else (met, block)
        left, right = check(self, left, right, *flags)
        same, met = (left, right) if first else (right, left)
        if same is block and number != 0.0:  # which may be -0.0
            blocks[case] = block.type, met
        return left, right

    def quick(self: Any, left: Any, right: Any, *flags: bool, **options: bool) -> Any:
        if not options:
            if left.__class__ is core.tensor and right.__class__ in (int, float):
                return meet(self, left, right, right, flags)
            if right.__class__ is core.tensor and left.__class__ in (int, float):
                return meet(self, left, right, left, flags)
        # a fourth flag is that of a division, which promotes even equal types
        if len(flags) > 3 or options or not left.__class__ is right.__class__ is core.tensor:
            return check(self, left, right, *flags, **options)
        if left.type is right.type and left.dtype.__class__ is core.dtype:
            return left, right
        types = left.type.name, right.type.name, flags
        if types not in casts:
            dtypes = left.dtype, right.dtype
            left, right = check(self, left, right, *flags)
            casts[types] = (left.dtype, right.dtype) != dtypes
            return left, right
        if casts[types]:
            return check(self, left, right, *flags)
        return self.broadcast_impl_value(left, right)

    return quick


@replaces(TritonSemantic, "computation_type_impl")
def promotions_by_name(promote: Any) -> Any:
    known: dict[tuple[Any, ...], Any] = {}

    def quick(self: Any, left: Any, left_is_scalar: bool, right: Any, right_is_scalar: bool, divides: bool) -> Any:
        case = left.name, left_is_scalar, right.name, right_is_scalar, divides
        if case not in known:
            known[case] = promote(self, left, left_is_scalar, right, right_is_scalar, divides)
        return known[case]

    return quick


@replaces(TritonSemantic, "broadcast_impl_value")
def broadcasts_by_types(broadcast: Any) -> Any:
    """Remember the types to which two types of operands are broadcast."""
    known: dict[tuple[int, int], tuple[Any, Any, tuple[int, ...]]] = {}
    wide: dict[tuple[int, str], Any] = {}  # by the block's type, of which there is one, and the scalar's

    def splat(self: Any, scalar: Any, block: Any) -> Any:
        types = id(block.type), scalar.type.name
        if types not in wide:
            wide[types] = block.type.with_element_ty(scalar.type)
        return core.tensor(self.builder.create_splat(wide[types], scalar.handle), wide[types])

    def quick(self: Any, left: Any, right: Any) -> Any:
        if left.type is right.type:
            return left, right
        if left.type.__class__ is not core.block_type:
            if right.type.__class__ is not core.block_type:
                return broadcast(self, left, right)
            return splat(self, left, right), right
        if right.type.__class__ is not core.block_type:
            return left, splat(self, right, left)
        types = id(left.type), id(right.type)
        if types not in known:
            left, right = broadcast(self, left, right)
            known[types] = left.type, right.type, tuple(left.type.shape)
            return left, right
        left_type, right_type, shape = known[types]
        if left.type is not left_type:
            left = core.tensor(self.builder.create_broadcast(left.handle, shape), left_type)
        if right.type is not right_type:
            right = core.tensor(self.builder.create_broadcast(right.handle, shape), right_type)
        return left, right

    return quick


# products


def even_matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """Multiply [..., M, K] by [..., K, N]. With contiguous arrays einsum sums over K in ascending order."""
    return np.einsum("...mk,...kn->...mn", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype))


@replaces(interpreter.InterpreterBuilder, "create_dot")
def summed_alike(create_dot: Any) -> Any:
    def of(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype.kind != "f" or b.data.dtype.kind != "f":  # bfloat16 lies there as integers
            return create_dot(self, a, b, d, *options)
        return interpreter.TensorHandle(even_matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    return of
