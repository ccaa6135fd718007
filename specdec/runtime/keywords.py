"""Keywords that a public method does not take: where each belongs, or which one was meant, instead of a TypeError.

It knows the names of settings, none of their values.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from typing import Any, TypeVar, cast

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

SAMPLING = {field.name: "params=SamplingParams({})" for field in fields(SamplingParams)}
ENGINE = {field.name: "config=EngineConfig({})" for field in fields(EngineConfig) if field.name != "dtype"}
ENGINE |= {field.name: "spec=SpecConfig({})" for field in fields(SpecConfig)}
"""Settings, and where they go; transformers knows a dtype as well."""
CLOSE = 0.8
"""Least similarity (of 1) at which a keyword is a misspelt setting, where transformers may know it as its own."""
NEAR = 0.55
"""Least similarity (of 1) at which a setting is suggested, where only the method may know the keyword."""


def known_keywords(function: Function) -> Function:
    """Decorates a method: a keyword that it does not take raises ConfigError. Of one that passes keywords on, to a chat
    template, only those that are sampling parameters do."""
    parameters = inspect.signature(function).parameters
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = [name for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)][1:]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known and (name in SAMPLING or not passes_on):
                raise _unknown(f"{function.__qualname__.removesuffix('.__init__')} takes no {name}", name, known)
        return function(*args, **kwargs)

    return cast(Function, checked)


def require_loading_arguments(options: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError where one of the arguments for transformers is a setting, or is nearly one of `known`, which
    `from_pretrained` takes itself, or of a setting. What is like none of them, transformers may know."""
    for name in options:
        if name in ENGINE | SAMPLING or difflib.get_close_matches(name, [*known, *ENGINE], cutoff=CLOSE):
            raise _unknown(f"Engine.from_pretrained takes no {name}", name, known)


def _unknown(what: str, name: str, known: Collection[str]) -> ConfigError:
    places = {**{each: each + "=..." for each in known}, **SAMPLING, **ENGINE}
    if name in SAMPLING:
        what += ", which is a sampling parameter"
    elif name in ENGINE:
        what += ", which is a setting of the engine"
    for meant in difflib.get_close_matches(name, places, n=1, cutoff=NEAR):
        return ConfigError(f"{what}; did you mean {places[meant].format(meant + '=...')}?")
    return ConfigError(f"{what}; it takes {', '.join(known)}")
