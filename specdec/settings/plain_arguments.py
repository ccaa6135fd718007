"""Converts arguments of other types (numpy scalars, dtype names) to Python's own types."""

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from specdec.errors import ConfigError, first_line, shown

DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

Dataclass = TypeVar("Dataclass", bound=type)


def plain_arguments(cls: Dataclass) -> Dataclass:
    """Decorates a frozen dataclass: its arguments become Python's own types before they are checked and stored."""
    init = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @functools.wraps(init)
    def plain_init(*args: Any, **kwargs: Any) -> None:
        for name in sorted(kwargs.keys() - signature.parameters.keys()):
            known = list(signature.parameters)[1:]  # without self
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
            raise ConfigError(f"{cls.__name__} has no setting {name}; {meant}")
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = OWN_FORMS.get(name, _plain)(value)
        init(*bound.args, **bound.kwargs)

    cls.__init__ = plain_init  # type: ignore[misc]
    cls.__setattr__ = cls.__delattr__ = _refuse_change  # type: ignore[assignment]
    return cls


def _refuse_change(settings: Any, name: str, *_: Any) -> NoReturn:
    """Unlike a dataclass's own refusal, it does not raise TypeError for a name that is no field."""
    raise FrozenInstanceError(
        f"{name} cannot be set: a {type(settings).__name__} does not change; make another, for example with "
        "dataclasses.replace"
    )


def _plain(value: Any) -> Any:
    """Convert a numpy or torch number, or a collection of them, to Python's types; leave all else unchanged.

    Collections are copied, so later changes have no effect: views, ranges and arrays to a tuple, which can be compared.
    """
    if isinstance(value, Mapping):
        return {plain_number(key): plain_number(each) for key, each in value.items()}
    value = plain_number(value)
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        kind: Any = type(value) if type(value) in (list, set, frozenset) else tuple
        return kind(map(plain_number, value))
    return value


def _schema_text(value: Any) -> Any:
    """A schema as JSON text; text that is not JSON is refused here."""
    try:
        if isinstance(value, Mapping):
            return json.dumps(dict(value), allow_nan=False)
        if isinstance(value, str):
            json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema={shown(value)} is not JSON ({first_line(error)}); correct it") from None
    return value


def plain_number(value: Any) -> Any:
    """Convert a numpy or torch number to a Python number; leave all else unchanged."""
    boxed = isinstance(value, (np.generic, np.ndarray, torch.Tensor)) and value.ndim == 0
    return value.item() if boxed else value


def as_dtype(value: Any) -> Any:
    """The dtype that "bf16", "bfloat16" or "torch.bfloat16" names; a value that names no floating dtype is
    unchanged."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    dtype = getattr(torch, DTYPE_ALIASES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else value


OWN_FORMS: dict[str, Callable[[Any], Any]] = {"dtype": as_dtype, "json_schema": _schema_text}
"""Converters of arguments that are not numbers, by field name."""
