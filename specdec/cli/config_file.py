"""The three sources of options for `specdec serve`: shell, environment, file. Imports nothing heavy.

--max-waiting 16                   the shell, before
SPECDEC_SERVE_MAX_WAITING=16       the environment, before
max-waiting: 16                    the file of --config (YAML or TOML), before the default
"""

import inspect
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from specdec.cli.command import shell_errors
from specdec.cli.options import read_text_file
from specdec.errors import ConfigError, shown

PREFIX = "SPECDEC_SERVE"
SERVICE_LINKS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT", "_ADDR", "_PROTO")
"""Kubernetes sets these for a service called specdec-serve; they are not options."""
EXPECTED = ((bool, "true or false"), (int, "an integer"), (float, "a number"))
"""Types of options that an entry must have in the file too; all others are texts."""


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's entries this command's defaults. Called before other options are read."""
    with shell_errors():
        declared = inspect.signature(context.command.callback).parameters  # type: ignore[arg-type]
        kinds = {name: _types_in(each.annotation) for name, each in declared.items()}
        _require_known_variables({*kinds, "help"})
        if path is not None:
            context.default_map = {**(context.default_map or {}), **_read_entries(path, kinds)}
    return path


def _read_entries(path: Path, kinds: Mapping[str, set[Any]]) -> dict[str, Any]:
    """Values by option, as texts that the shell could give; ranges and missing files are checked later, like the
    shell's. kinds: the types that each option may have."""
    found: dict[str, Any] = {}
    for entry, value in _read_table(path).items():
        name = entry.replace("-", "_")
        if name not in kinds or name == "config":
            raise ConfigError(f"{str(path)!r}: {entry!r} is not an option of specdec serve; see specdec serve --help")
        if name in found:
            raise ConfigError(f"{str(path)!r}: {entry!r} is there twice; leave one out")
        repeated = list[str] in kinds[name]
        place = f"{str(path)!r}: {entry}={shown(value)}"
        values = [
            _as_shell_text(place, kinds[name], each)
            for each in (value if repeated and type(value) is list else [value])
        ]
        found[name] = values if repeated else values[0]
    return found


def _read_table(path: Path) -> Mapping[str, Any]:
    text = read_text_file(path, "the file of --config")
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"the file {str(path)!r} of --config has to be called .toml, .yaml or .yml")
    import yaml

    try:
        table = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"{str(path)!r} cannot be read: {reason}") from None
    if table is None:  # an empty file
        return {}
    if not (isinstance(table, dict) and all(isinstance(key, str) for key in table)):
        raise ConfigError(f"{str(path)!r} holds no table; lines such as 'max-waiting: 16' are expected")
    return table


def _as_shell_text(place: str, kinds: set[Any], value: Any) -> str | bool:
    kind, expected = next((each for each in EXPECTED if each[0] in kinds), (str, "a text"))
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ConfigError(f"{place}: {expected} is expected")
    return value if isinstance(value, bool) else str(value)


def _types_in(annotation: Any) -> set[Any]:
    """The types that an annotation is made of: Annotated[list[str] | None, ...] has list, str and None."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        parts = parts[:1]
    return {annotation}.union(*map(_types_in, parts)) if parts else {annotation}


def _require_known_variables(known: set[str]) -> None:
    expected = {f"{PREFIX}_{name.upper()}" for name in known}
    for name in sorted(os.environ):
        linked = "_PORT_" in name or ("_SERVICE_" in name and name.endswith(SERVICE_LINKS))
        if name.startswith(f"{PREFIX}_") and name not in expected and not linked:
            raise ConfigError(f"the variable {name} is not an option of specdec serve; see specdec serve --help")
