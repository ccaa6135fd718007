"""An operation of Triton's interpreter is worked out once for the types it meets, and replayed after that.

`x + y` in an interpreted kernel is one step of numpy and a hundred of Python, which find out from the types of both what
is cast, broadcast and called. They come to the same calls of the interpreter's builder each time. So the calls are
recorded the first time, and later ones make the same calls on other values. What a builder is not asked for again:
a constant, and the copies of a number or a row which numpy broadcasts by itself. quick_interpreter.py wraps the
builtins of `triton.language` in it.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
BOOL = np.dtype(bool)
OPERATORS = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod and rand or ror xor rxor lshift rlshift"
OPERATORS += " rshift rrshift gt ge lt le eq ne neg invert getitem"
FUNCTIONS = "where minimum maximum exp exp2 log log2 sqrt rsqrt abs floor ceil fma cast to load store expand_dims"
FUNCTIONS += " broadcast_to logical_and logical_or add sub mul"
NAMES = {f"__{name}__" for name in OPERATORS.split()} | set(FUNCTIONS.split())
"""Builtins that look at types and Python's numbers alone, never at the values in a tensor."""
WIDENED = {"create_splat", "create_broadcast"}


class UnknownArgumentError(Exception):
    """An argument of which it is not known whether it is the same the next time."""


def described(value: Any) -> Any:
    """What the calls of the builder depend on of an argument: a tensor's type, or the value."""
    kind = value.__class__
    if kind is core.tensor:
        type = value.type
        # one object a block type, see quick_interpreter.py; a launch has pointers of its own
        return id(type) if type.__class__ is core.block_type else (type.name, getattr(type, "address_space", None))
    if value is None or kind is str:
        return kind, value
    if kind is int or kind is bool:
        return kind, value
    if kind is float and value == value:
        return kind, value, str(value)  # -0.0 is equal to 0.0
    if kind is core.constexpr:
        return kind, described(value.value)
    if kind is core.dtype:
        return kind, value.name
    if kind is slice:
        return kind, described(value.start), described(value.stop), described(value.step)
    if kind in (tuple, list):
        if any(each.__class__ is core.tensor for each in value):
            raise UnknownArgumentError
        return kind, *map(described, value)
    raise UnknownArgumentError


class Recorder:
    """Stands in for the interpreter's builder: makes its calls and notes those that depend on the operands."""

    def __init__(self, builder: Any, operands: list[Any]) -> None:
        self._builder = builder
        self.values = {id(handle): number for number, handle in enumerate(operands)}  # where each handle comes from
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


class Operand(int):
    """In the arguments of a step: the number of the value that stands there."""


class Plan:
    """The calls of the builder for operands of some types."""

    def __init__(self, recorder: Recorder, builder: Any, result: Any) -> None:
        self.type, self.attributes, self.place, self.data = None, None, -1, None
        if result is not None and result.handle is not None:  # a store gives an empty tensor
            self.type = result.type
            self.attributes = {name: value for name, value in result.__dict__.items() if name != "handle"}
            self.place = recorder.values.get(id(result.handle), -1)
            self.data = result.handle
        elided = self._elided(recorder)
        self.steps = []
        for number, (name, args, _) in enumerate(recorder.steps, len(recorder.handles) - len(recorder.steps)):
            places = [recorder.values.get(id(arg)) for arg in args]
            if number in elided:
                name, args, places = "", [None], [recorder.values[id(elided[number])]]
            wanted = [arg if place is None else Operand(place) for arg, place in zip(args, places, strict=True)]
            self.steps.append(step_of(name, builder, wanted))

    def _elided(self, recorder: Recorder) -> dict[int, Any]:
        """Values that are another one, widened for operations of numpy that would widen it as well."""
        elided: dict[int, Any] = {}
        first = len(recorder.handles) - len(recorder.steps)
        for number, (name, args, result) in enumerate(recorder.steps, first):
            source = args[-1] if name == "create_splat" else args[0]
            if name not in WIDENED or number == self.place or source.data.dtype == BOOL:
                continue
            readers = [(other, given) for other, given, _ in recorder.steps if any(arg is result for arg in given)]
            if all(other in FUNCTION_OF and _is_as_wide(given, recorder, {**elided, number: source}) for other, given in readers):
                elided[number] = source
        return elided

    def __call__(self, operands: list[Any]) -> Any:
        values = operands
        for step in self.steps:
            values.append(step(values))
        if self.type is None:
            return None
        if self.place < 0:  # a constant, in a handle of its own
            handle = Handle(self.data.data, self.data.dtype)
        else:
            handle = values[self.place]
        tensor = object.__new__(core.tensor)
        tensor.__dict__.update(self.attributes)
        tensor.handle = handle
        return tensor


def _is_as_wide(args: list[Any], recorder: Recorder, elided: dict[int, Any]) -> bool:
    """Does numpy widen the arguments to the same shape, with those in `elided` as they were?"""
    given = [elided.get(recorder.values.get(id(arg), -1), arg) for arg in args]
    return np.broadcast_shapes(*(arg.data.shape for arg in given)) == args[0].data.shape == args[1].data.shape


class _Probe:
    """Finds the function of numpy that an operation of the builder is."""

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


def step_of(name: str, builder: Any, args: list[Any]) -> Callable[[list[Any]], Any]:
    """One call: of the values so far to the next one."""
    if not name:
        place = args[0]
        return lambda values: values[place]
    if name in FUNCTION_OF:
        function, (left, right) = FUNCTION_OF[name], args
        if isinstance(left, Operand) and isinstance(right, Operand):
            return lambda values: elementwise(builder, function, values[left], values[right])
        if isinstance(left, Operand):
            return lambda values: elementwise(builder, function, values[left], right)
        return lambda values: elementwise(builder, function, left, values[right])
    method = getattr(builder, name)
    places = [(at, arg) for at, arg in enumerate(args) if isinstance(arg, Operand)]
    if len(places) == 1 and places[0][0] == 0:
        place, rest = places[0][1], args[1:]
        return lambda values: method(values[place], *rest)

    def step(values: list[Any]) -> Any:
        given = list(args)
        for at, place in places:
            given[at] = values[place]
        return method(*given)

    return step


def elementwise(builder: Any, function: Any, left: Any, right: Any) -> Any:
    """`builder.binary_op`, by what it does where it has nothing to convert."""
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
    """The builtin, computed by what is known of operands of these types."""
    plans: dict[Any, Plan | None] = {}  # None: as it is without

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
        plans[key] = Plan(recorder, builder, result) if known else None
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
        operands = [arg.handle for arg in args if arg.__class__ is core.tensor]
        if options:
            operands += [arg.handle for arg in options.values() if arg.__class__ is core.tensor]
        return plan(operands)

    return call
