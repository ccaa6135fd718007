"""Remembers, for the types of its operands, which calls an operation of Triton's interpreter makes.

What: in an interpreted kernel `x + y` is one call of numpy and about a hundred of Python, which only look at the types
of x and y: what is cast, what is broadcast, which function is called. Here the calls to the interpreter's builder are
recorded the first time that an operation meets these types. The next time they are made again, with the new values.

Why: Python's part is most of the time of the kernel tests (docs/decisions/0063 has the figures).

When it is safe: NAMES lists operations that never look at the values in a tensor. A record is used only for the same
types, and the same Python numbers, as those it was made with. An argument of another kind is left to Triton; a call
with the same tensor twice, one that cannot be repeated, or one that fails is not recorded. Two things are shorter
than in Triton: a copy that only widens a number or row for numpy is not made where numpy widens it itself to the same
bits, and a call that reads no tensor (a constant) is not made again. tests/test_quick_interpreter.py has literal
values. quick_interpreter.py installs it.
"""

import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
BOOL = np.dtype(bool)
OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod and rand or ror xor rxor lshift rlshift"
)
OPERATORS += " rshift rrshift gt ge lt le eq ne neg invert getitem"
FUNCTIONS = "where minimum maximum exp exp2 log log2 sqrt rsqrt abs floor ceil fma cast to load store expand_dims"
FUNCTIONS += " broadcast_to logical_and logical_or add sub mul"
NAMES = {f"__{name}__" for name in OPERATORS.split()} | set(FUNCTIONS.split())
"""Operations that look at types and Python's numbers, never at the values in a tensor."""
TWO_OPERANDS = {f"__{name}__" for name in OPERATORS.split()} - {"__neg__", "__invert__", "__getitem__"}
WIDENED = {"create_splat", "create_broadcast"}


class UnknownArgumentError(Exception):
    """An argument that may mean something else in the next call."""


def described(value: Any) -> Any:
    """The part of an argument that the builder's calls depend on: the type of a tensor, else the value."""
    if value.__class__ is core.tensor:
        try:
            return value.type.described
        except AttributeError:
            return described_type(value.type)
    return described_value(value)


def described_value(value: Any) -> Any:
    """For arguments that hold no tensor. One that holds a tensor is refused: its values are not part of the key."""
    kind = value.__class__
    if value is None or kind is str or kind is int or kind is bool:
        return kind, value
    if kind is float and value == value:
        return kind, value, str(value)  # -0.0 is equal to 0.0
    if kind is core.constexpr:
        return kind, described_value(value.value)
    if kind is core.dtype:
        return kind, value.name
    if kind is slice:
        return kind, described_value(value.start), described_value(value.stop), described_value(value.step)
    if kind in (tuple, list):
        return kind, *map(described_value, value)
    raise UnknownArgumentError


def described_type(type: Any) -> Any:
    """By identity for block types, of which quick_interpreter.py makes one each; by name for pointers."""
    type.described = (
        id(type) if type.__class__ is core.block_type else (type.name, getattr(type, "address_space", None))
    )
    return type.described


class Recorder:
    """Takes the place of the builder for one operation: passes calls on and records those that use its operands."""

    def __init__(self, builder: Any, operands: list[Any]) -> None:
        self._builder = builder
        self.values = {id(handle): number for number, handle in enumerate(operands)}  # id of a handle: its number
        self.handles = list(operands)
        self.steps: list[tuple[str, list[Any], Any]] = []  # name, arguments, result
        self.known = True
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._builder, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            result = attribute(*args, **options)
            given = [*args, *options.values()]
            if any(id(arg) in self.values for arg in given):
                self.known &= not options and (isinstance(result, Handle) or result is None)
                self.steps.append((name, list(args), result))
                if result is not None:
                    self.values[id(result)] = len(self.handles)
                self.handles.append(result)
            self.known &= not any(
                isinstance(arg, list | tuple) and any(isinstance(each, Handle) for each in arg) for arg in given
            )
            self.known &= threading.get_ident() == self.thread
            return result

        return call


CODE: dict[str, CodeType] = {}


def planned(recorder: Recorder, builder: Any, result: Any) -> Callable[..., Any]:
    """A function of the operands that makes the recorded calls and returns the result."""
    first = len(recorder.handles) - len(recorder.steps)
    elided = elided_values(recorder, first, result)
    known: dict[str, Any] = {"builder": builder, "elementwise": elementwise, "new": object.__new__}

    def named(value: Any) -> str:
        if id(value) in recorder.values:
            return f"v{recorder.values[id(value)]}"
        known[name := f"c{len(known)}"] = value
        return name

    lines = [f"def plan({', '.join(f't{number}' for number in range(first))}):"]
    lines += [f"    v{number} = t{number}.handle" for number in range(first)]
    for number, (name, args, _) in enumerate(recorder.steps, first):
        if number in elided:
            lines.append(f"    v{number} = {named(elided[number])}")
        elif name in FUNCTION_OF:
            function = named(FUNCTION_OF[name])
            lines.append(f"    v{number} = elementwise(builder, {function}, {', '.join(map(named, args))})")
        else:
            method = named(getattr(builder, name))
            lines.append(f"    v{number} = {method}({', '.join(map(named, args))})")
    if result is not None and result.handle is not None:  # a store gives an empty tensor
        known["tensor"], known["Handle"] = core.tensor, Handle
        known["attributes"] = {name: value for name, value in result.__dict__.items() if name != "handle"}
        lines += ["    result = new(tensor)", "    result.__dict__.update(attributes)"]
        if id(result.handle) in recorder.values:
            lines.append(f"    result.handle = {named(result.handle)}")
        else:  # a constant, in a handle of its own
            known["data"], known["dtype"] = result.handle.data, result.handle.dtype
            lines.append("    result.handle = Handle(data, dtype)")
        lines.append("    return result")
    source = "\n".join(lines)
    if source not in CODE:
        made: dict[str, Any] = {}
        exec(source, made)
        CODE[source] = made["plan"].__code__
    return FunctionType(CODE[source], known)


def elided_values(recorder: Recorder, first: int, result: Any) -> dict[int, Any]:
    """Widened copies that can be left out, by number, and what they are copies of: numpy widens that itself."""
    elided: dict[int, Any] = {}
    final = None if result is None else result.handle
    for number, (name, args, widened) in enumerate(recorder.steps, first):
        source = args[-1] if name == "create_splat" else args[0]
        if name not in WIDENED or widened is final:
            continue
        types = {source.data.dtype, widened.data.dtype}
        if len(types) > 1 or BOOL in types:
            continue
        readers = [(other, given) for other, given, _ in recorder.steps if any(arg is widened for arg in given)]
        tried = {**elided, number: source}
        if all(other in BROADCASTING and _is_as_wide(given, recorder, tried) for other, given in readers):
            elided[number] = source
    return elided


def _is_as_wide(args: list[Any], recorder: Recorder, elided: dict[int, Any]) -> bool:
    """Does numpy widen the arguments to the same shape when the copies in `elided` are left out?"""
    given = [elided.get(recorder.values.get(id(arg), -1), arg) for arg in args]
    return np.broadcast_shapes(*(arg.data.shape for arg in given)) == args[0].data.shape == args[1].data.shape


class _Probe:
    """Takes the place of a builder to find which function of numpy one of its methods calls."""

    def binary_op(self, left: Any, right: Any, function: Any) -> Any:
        return function


def functions_of_numpy() -> dict[str, Any]:
    found = {}
    for name, method in vars(interpreter.InterpreterBuilder).items():
        if name.startswith("create_") and callable(method):
            try:
                function = method(_Probe(), None, None)
            except Exception:
                continue
            if isinstance(function, np.ufunc):
                found[name] = function
    return found


FUNCTION_OF = functions_of_numpy()
# which of 0.0 and -0.0 is the smaller depends in numpy on whether it broadcasts
BY_SIGN = {np.minimum, np.maximum, np.fmin, np.fmax}
BROADCASTING = {name for name, function in FUNCTION_OF.items() if function not in BY_SIGN}


def elementwise(builder: Any, function: Any, left: Any, right: Any) -> Any:
    """`builder.binary_op` without its conversions, where there is nothing to convert."""
    a, b, dtype = left.data, right.data, left.dtype
    if (a.dtype is BOOL and b.dtype is BOOL) or dtype.__class__ is not core.dtype:
        return builder.binary_op(left, right, function)
    data = function(a, b)
    if data.itemsize * 8 > max(8, dtype.primitive_bitwidth):
        return builder.binary_op(left, right, function)
    handle = object.__new__(Handle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


RECORDING: list[Recorder] = []


def remembered(builtin: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """The builtin, by recorded calls where it has met operands of these types."""
    plans: dict[Any, Callable[..., Any] | None] = {}  # None: the builtin itself is called

    def first(key: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        operands = [arg.handle for arg in (*args, *options.values()) if arg.__class__ is core.tensor]
        if len({id(handle) for handle in operands}) < len(operands):  # the next time they may be two
            return builtin(*args, **options, _semantic=semantic)
        builder = semantic.builder
        recorder = Recorder(builder, operands)
        RECORDING.append(recorder)
        semantic.builder = recorder
        try:
            result = builtin(*args, **options, _semantic=semantic)
        finally:
            semantic.builder = builder
            RECORDING.pop()
        known = recorder.known and (result is None or result.__class__ is core.tensor)
        plans[key] = planned(recorder, builder, result) if known else None
        return result

    def call(*args: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        if RECORDING:
            return builtin(*args, **options, _semantic=semantic)
        try:
            key = tuple(map(described, args))
            if options:
                key = *key, tuple(options), *map(described, options.values())
        except UnknownArgumentError:
            return builtin(*args, **options, _semantic=semantic)
        plan = plans.get(key, key)
        if plan is key:
            return first(key, args, options)
        if plan is None:
            return builtin(*args, **options, _semantic=semantic)
        tensors = [arg for arg in args if arg.__class__ is core.tensor]
        if options:
            tensors += [arg for arg in options.values() if arg.__class__ is core.tensor]
        return plan(*tensors)

    def operator(left: Any, right: Any) -> Any:
        if left.__class__ is right.__class__ is core.tensor and not RECORDING:
            try:
                plan = plans.get((left.type.described, right.type.described))
            except AttributeError:
                plan = None
            if plan is not None:
                return plan(left, right)
        return call(left, right)

    return operator if builtin.__name__ in TWO_OPERANDS else call
