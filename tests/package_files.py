"""The package's own source files, by the real paths of its folders.

A checkout may lie in a folder named `specdec` that holds an environment, so "specdec/" in a path does not prove that
the file is the package's.
"""

import ast
import functools
import gc
from pathlib import Path

import specdec
import specdec.attention
import specdec.draft_models
import specdec.kvcache

# a wheel has the other three within the first, so the first is tried last
FOLDERS = {
    Path(str(module.__file__)).resolve().parent: module.__name__.rpartition(".")[2]
    for module in (specdec.attention, specdec.draft_models, specdec.kvcache, specdec)
}


@functools.cache
def name_in_package(file: str) -> str | None:
    """The file as the checkout names it, "kvcache/table.py" or "specdec/engine.py"; None: it is not the package's."""
    path = Path(file).resolve()
    for folder, name in FOLDERS.items():
        if path.is_relative_to(folder):
            return f"{name}/{path.relative_to(folder).as_posix()}"
    return None


@functools.cache
def parse_file(text: str) -> ast.Module:
    """The syntax tree of a file. The collector is off meanwhile: it would look at the tree's many objects again and
    again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if enabled:
            gc.enable()
