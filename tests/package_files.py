"""Finds the package's own source files by the real paths of its folders; parses files, and loads scripts as modules.

"specdec/" in a path does not prove that: a checkout may lie in a folder of that name next to an environment.
"""

import ast
import functools
import gc
import importlib.util
from pathlib import Path
from types import ModuleType

import specdec
import specdec.attention
import specdec.draft_models
import specdec.kvcache

# in a wheel the other three lie within specdec/, so that is tried last
FOLDERS = {
    Path(str(module.__file__)).resolve().parent: module.__name__.rpartition(".")[2]
    for module in (specdec.attention, specdec.draft_models, specdec.kvcache, specdec)
}


@functools.cache
def name_in_package(file: str) -> str | None:
    """Return the file's path in a checkout, such as "kvcache/table.py"; None if it is not of the package."""
    path = Path(file).resolve()
    for folder, name in FOLDERS.items():
        if path.is_relative_to(folder):
            return f"{name}/{path.relative_to(folder).as_posix()}"
    return None


@functools.cache
def parse_file(text: str) -> ast.Module:
    """Parse a file, with the garbage collector off: it would visit the tree's many objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if enabled:
            gc.enable()


def module_of(path: Path) -> ModuleType:
    """Load a script of tools/, examples/ or another folder as a module. It runs again in each call."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
