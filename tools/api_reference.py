"""The API reference, docs/api.md, made from the code: the public names of `specdec`, and the options of every command.

    python tools/api_reference.py    writes docs/api.md, as `make api` does

Signatures, fields and docstrings are read from the source, so they are the same on every version of Python and torch.
tests/test_generated_pages.py fails while the page is stale.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import specdec
from specdec import errors
from specdec.cli.app import program
from specdec.doctor import diagnose
from specdec.errors import SpecDecError
from specdec.gpu.captures import CaptureStats
from specdec.models.published import BUNDLED_DIR
from specdec.runtime.drafts.draft_reports import DraftStats
from specdec.runtime.engine_stats import DeviceStats, EngineStats, PoolStats
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.settings.sampling_numbers import SamplingNumbers

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
RETURNED = (StreamDelta, TokenLogprob, EngineStats, PoolStats, CaptureStats, DraftStats, DeviceStats)
"""Not exported, because users receive them from methods and never make one."""
INTERNAL = {
    *("RequestStats.copy", "RequestStats.add", "EngineStats.count", "PoolStats.from_pool"),
    *("SamplingParams.restricted", "SamplingParams.stop_strings", "SpecConfig.shortened", "Handle.report_to"),
}
"""Members that the engine and the server call, and no user."""
WIDTH = 100
"""Longer signatures have one parameter a line."""
HEAD = """# API reference

<!-- Written by tools/api_reference.py from the code. Do not edit it: run `make api`. -->

[Quick start](quick_start.md) shows the names in use, [Serving](serving.md) the HTTP API. A ``Prompt`` is a text or a
sequence of token ids.
"""


def page() -> str:
    parts = [HEAD, "## Python\n"]
    for name in specdec.__all__:
        if name not in ("__version__", "SpecDecError"):
            parts += described(getattr(specdec, name))
    parts += ["## Doctor\n", *described(diagnose)]
    parts.append("## Classes that methods return\n")
    for kind in RETURNED:
        parts += described(kind)
    parts += ["## Exceptions\n", *exceptions(), "## Commands\n", *commands()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def commands() -> Iterator[str]:
    """Lists of options; those that several commands have in the same words stand once, before all commands."""
    lines = {name: option_lines(command) for name, command in program.commands.items()}
    takers: dict[str, list[str]] = {}
    for name, own in lines.items():
        for line in own:
            takers.setdefault(line, []).append(name)
    shared: dict[tuple[str, ...], list[str]] = {}
    for line, names in takers.items():
        shared.setdefault(tuple(names), []).append(line)
    yield "### Options of several commands\n"
    for names, group in sorted(shared.items(), key=lambda each: -len(each[0])):
        if len(names) > 1:
            yield f"Taken by {', '.join(f'`{name}`' for name in names)}:\n"
            yield "\n".join(group) + "\n"
    for name, command in program.commands.items():
        yield f"### specdec {name}\n\n" + " ".join(command.help.replace("\\[", "[").split()) + "\n"
        yield "\n".join(shared.get((name,), [])) + "\n"


def described(value: Any) -> Iterator[str]:
    """A function, or a class with its fields and public methods."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    yield f"### {node.name}\n"
    if isinstance(node, ast.FunctionDef):
        yield code(signature(node.name, node)) + prose(node)
        return
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id not in ("Protocol", "NamedTuple")]
    declared = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    if value in (*RETURNED, GenerationOutput, RequestStats):  # users never make one, so its defaults say nothing
        declared = [ast.AnnAssign(each.target, each.annotation, None, each.simple) for each in declared]
    values = [ast.unparse(each) for each in declared]
    if issubclass(value, SamplingNumbers):  # declared elsewhere, and part of it
        bases.remove(SamplingNumbers.__name__)
        inherited = [(each.name, inspect.formatannotation(each.type), each.default) for each in fields(SamplingNumbers)]
        values = [*(f"{name}: {kind} = {default}" for name, kind, default in inherited), *values]
    kind = f"{node.name}({', '.join(bases)})" if bases else node.name
    if values:
        yield code("\n".join([kind, *(f"    {each}" for each in values)]))
    yield prose(node)
    for each in node.body:
        whole = f"{node.name}.{getattr(each, 'name', '_')}"
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and whole not in INTERNAL:
            is_property = any(ast.unparse(mark) == "property" for mark in each.decorator_list)
            head = f"{whole}: {unquoted(each.returns)}" if is_property and each.returns else signature(whole, each)
            yield (code(head) if "\n" in head else f"**``{head}``**\n\n") + prose(each)


def signature(name: str, node: ast.FunctionDef) -> str:
    """Without `self`; one parameter a line where it is long."""
    given = node.args
    named = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(named) - len(given.defaults)) + given.defaults
    pieces = [parameter(*each) for each in zip(named, defaults, strict=True)]
    if given.posonlyargs:
        pieces.insert(len(given.posonlyargs), "/")
    pieces = pieces[1:] if pieces[:1] in (["self"], ["cls"]) else pieces
    pieces += ["*"] if given.kwonlyargs else []
    pieces += [parameter(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    pieces += [f"**{parameter(given.kwarg, None)}"] if given.kwarg else []
    result = f" -> {unquoted(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(pieces)}){result}"
    long = "\n    ".join([f"{name}(", *(f"{each}," for each in pieces)]) + f"\n){result}"
    return line if len(line) <= WIDTH else long


def parameter(given: ast.arg, default: ast.expr | None) -> str:
    kind = f": {unquoted(given.annotation)}" if given.annotation else ""
    return f"{given.arg}{kind}{' = ' + ast.unparse(default) if default else ''}"


def unquoted(kind: ast.expr) -> str:
    return re.sub(r"['\"](\w+)['\"]", r"\1", ast.unparse(kind))


def exceptions() -> Iterator[str]:
    """All of them, with the first paragraph of their docstrings."""
    yield "All are in `specdec.errors`, here with the classes that they are kinds of.\n"
    for kind in (each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, SpecDecError)):
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        yield f"* `{kind.__name__}` ({bases}): {cell((kind.__doc__ or '').partition(chr(10) * 2)[0])}"
    yield ""


def option_lines(command: Any) -> list[str]:
    """One line an option. Paths in the package are shown without the folder that it is installed in."""
    lines = []
    signature = inspect.signature(command.callback)
    for each in command.params:
        if each.name == "help":
            continue
        named = "/".join([*each.opts, *each.secondary_opts]) if each.param_type_name == "option" else each.name.upper()
        declared = signature.parameters[each.name]
        value = "" if declared.default in (inspect.Parameter.empty, None, "", []) else declared.default
        default = "" if value is False or value == "" else f" (``{str(value).replace(f'{BUNDLED_DIR}/', '')}``)"
        kind = (*get_args(declared.annotation), declared.annotation)[0]
        choices = [one for each in (kind, *get_args(kind)) if get_origin(each) is Literal for one in get_args(each)]
        said = cell(each.help or "") + (f" One of {', '.join(choices)}." if choices else "")
        lines.append(f"* ``{named}``{default}{': ' if said else ''}{said.strip()}")
    return lines


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def code(text: str) -> str:
    return f"```text\n{text}\n```\n\n"


def prose(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown. A line that begins with the name of a parameter or field begins a paragraph."""
    text = re.sub(r"`([^`]*)`", r"``\1``", (ast.get_docstring(node) or "").replace("<", "&lt;").replace("*", "\\*"))
    return re.sub(r"(?<=[.)])\n(?=\w+(, \w+)*: )", "\n\n", text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
