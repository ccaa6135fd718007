"""Every name that a page has in backticks exists: classes, functions, parameters, options, commands, files, messages.

A name is looked up where a reader would: `Engine.stats` must be a member of `Engine`, `kvcache/table.py` a file,
`--limit` an option of some program, `SpecConfig(topk=4)` a call that `SpecConfig` takes, and three words or more a
message that the code can print, with `...` for what it fills in. Names of torch, transformers and Python are theirs.
One or two letters are mathematics.
"""

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from specdec.cli.app import program
from specdec.measurement.model_shapes import SHAPES

from package_files import parse_file

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ("docs/results/",)  # of what was: they name what has gone since
AT_THE_ROOT = ("README.md", "CONTRIBUTING.md", "tests/README.md")
ALL_PAGES = [*AT_THE_ROOT, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in ALL_PAGES if not page.startswith(RECORDS) and (ROOT / page).exists()]
PACKAGES = {"kvcache": "specdec.kvcache", "attention": "specdec.attention", "draft_models": "specdec.draft_models"}
PACKAGES |= {"specdec": "specdec"}  # root folder -> package
SCRIPTS = ("examples", "tools", "bench", "tests")
CLIENTS = "tests/test_real_clients.py"  # has names of other packages, which a page repeats
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r"[\w./*-]*[\w*]\.(?:py|md|toml|txt|jsonl?|ya?ml|safetensors)\b(?!:\d)"
)  # data.jsonl:7 is a place in somebody's file
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FILLED_IN = re.compile(r"\.\.\.|\bN\b|\bM\b|\[|\]|'[^']*'")  # places in a message
FOREIGN = re.compile(r"^(pip|git|accelerate|torchrun|pre-commit|pytest|vllm|guidellm)\b")  # options of other programs

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout")


@cache
def sources() -> dict[str, str]:
    """Path from the root -> text of every program file."""
    paths = (path for folder in (*PACKAGES, *SCRIPTS) for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


@cache
def modules() -> list[ModuleType]:
    """Every module of the product."""
    found = []
    for path in sources():
        folder, *parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        if folder in PACKAGES:
            found.append(importlib.import_module(".".join((PACKAGES[folder], *parts))))
    return found


@cache
def literals() -> str:
    """Every string that a program holds, one after the other, white space as one blank."""
    trees = (parse_file(text) for path, text in sources().items() if not path.startswith("tests/"))
    texts = (
        n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )
    return re.sub(r"\s+", " ", "\0".join(texts))


@cache
def words() -> set[str]:
    """Every word of a program, in a string or not, the names of tests, and the variables of what runs them."""
    found = set()
    for name in ("Makefile", ".github/workflows/ci.yml"):
        found |= set(re.findall(r"[A-Z][A-Z_]+", (ROOT / name).read_text("utf-8")))
    for path, text in sources().items():
        names_of_tests = path.startswith("tests/test_") and path != CLIENTS
        found |= set(re.findall(r"(?<=def )test_\w+" if names_of_tests else r"[A-Za-z_]\w*", text))
    return found


@cache
def options() -> set[str]:
    return set(OPTION.findall(literals())) | {f"--{word.replace('_', '-')}" for word in parameters_of_commands()}


def parameters_of_commands() -> Iterator[str]:
    """typer makes an option of a parameter's name where none is given."""
    for command in program.commands.values():
        yield from (parameter.name for parameter in command.params if parameter.name)


def product_object(name: str) -> Any:
    """The class or function that the product calls by this name, also `engine` for an `Engine`; else None."""
    defined = [vars(module).get(each) for each in (name, name.title()) for module in modules()]
    return next((x for x in defined if inspect.isclass(x) or inspect.isfunction(x)), None)


def has_member(owner: Any, name: str) -> bool:
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    return inspect.isclass(owner) and any(
        cls.__module__.startswith("specdec") and re.search(rf"\bself\.{name}\b", inspect.getsource(cls))
        for cls in owner.__mro__
    )


def can_be_imported(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def faults_of_expression(node: ast.AST) -> Iterator[str]:
    """Names in an expression that nothing is called by."""
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("specdec."):
        if not can_be_imported(ast.unparse(node)):
            yield ast.unparse(node)
        return
    if isinstance(node, ast.Attribute):
        owner = product_object(ast.unparse(node.value).rpartition(".")[2])
        found = node.attr in words() if owner is None else has_member(owner, node.attr)
        if not found and not foreign(node.attr):
            yield f"{ast.unparse(node)}"
    elif isinstance(node, ast.Name) and len(node.id) > 2 and node.id not in words() and not foreign(node.id):
        yield node.id
    elif isinstance(node, ast.Call) and isinstance(
        called := product_object(ast.unparse(node.func).rpartition(".")[2]), Callable
    ):
        taken = inspect.signature(called).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            yield from (f"{ast.unparse(node.func)}({k.arg}=)" for k in node.keywords if k.arg not in taken)
    elif isinstance(node, ast.keyword) and node.arg not in words():
        yield f"{node.arg}="
    for child in ast.iter_child_nodes(node):
        yield from faults_of_expression(child)


def foreign(name: str) -> bool:
    """A name of Python, torch or transformers, arguments of a checkpoint's loading among them."""
    owners = (builtins, torch, torch.Tensor, torch.nn, torch.nn.Module, transformers)
    return any(hasattr(owner, name) for owner in owners) or name in foreign_words()


@cache
def foreign_words() -> set[str]:
    return set(
        re.findall(
            r"\w+", inspect.getsource(transformers.modeling_utils) + inspect.getsource(transformers.configuration_utils)
        )
    )


def parsed(span: str) -> ast.AST | None:
    """The span as an expression or as arguments of a call; None when it is neither."""
    for form in (span, f"f({span})"):
        try:
            return ast.parse(form, mode="eval")
        except SyntaxError:
            pass
    return None


def is_file(name: str) -> bool:
    """A file here, or one that a program reads or writes. Relative to the root, or its last parts alone."""
    if name in literals() or (ROOT / name).exists():
        return True
    tree = (folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return any(next(folder.rglob(name), None) for folder in tree)


def faults(span: str) -> list[str]:
    """What of one span in backticks does not exist."""
    if FOREIGN.match(span) or span in SHAPES:
        return []
    if span.startswith("make "):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return [word for word in span.partition(" ARGS=")[0].split()[1:] if "=" not in word and word not in targets]
    if span.startswith("python -m bench "):  # cases and their options; test_bench_cases.py runs them
        cases = tomllib.loads((ROOT / "bench" / "cases.toml").read_text("utf-8"))
        known = {"plot", "--list", "--quick", "--device", "--parts", *cases}
        known |= {f"--{name.replace('_', '-')}" for case in cases.values() for name in case.get("options", {})}
        named = re.match(r"[a-z -]*", span.removeprefix("python -m bench "))[0].partition(" --")[0].split()
        return [word for word in (*named, *OPTION.findall(span)) if word not in known]
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", span):
        return [] if (ROOT / span).is_dir() else [span]
    files = [] if span.startswith("http") else FILE.findall(span)
    found = [name for name in files if not is_file(name)]
    found += [option for option in OPTION.findall(span) if option not in options() and option != "--help"]
    if files or "--" in span:
        return found
    if (node := parsed(span)) is not None:
        return [*found, *faults_of_expression(node)]
    if len(re.findall(r"\b[A-Za-z]{2,}\b", span)) >= 3:
        pieces = [re.sub(r"\s+", " ", piece.strip()) for piece in FILLED_IN.split(span)]
        found += [piece for piece in pieces if piece not in literals()]
    return found


def missing_names(text: str) -> list[str]:
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text))
    return [f"`{span}`: {fault}" for span in dict.fromkeys(spans) for fault in faults(span)]


def missing_files(text: str) -> list[str]:
    """Files of a list in a ```text block that are not in the folder at the start of their line, or of one above."""
    missing = []
    for language, block in FENCE.findall(text):
        folder = ""
        for line in block.splitlines() if language == "text" else ():
            folder = start[1] if (start := re.match(r"([\w/]+)/ ", line)) else folder
            missing += [
                f"{folder}/{name}" for name in FILE.findall(line) if folder and not any((ROOT / folder).rglob(name))
            ]
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_exist(page):
    assert missing_names((ROOT / page).read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_listed_on_a_page_exist(page):
    assert missing_files((ROOT / page).read_text("utf-8")) == []
