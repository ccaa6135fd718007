"""Import order, package list and file sizes, read from the source with `ast`: nothing is imported."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from package_files import module_of, parse_file


@functools.cache
def named_nodes(text: str) -> list[ast.expr | ast.stmt]:
    """All that imports, calls, or is an attribute of something."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute)
    return [node for node in ast.walk(parse_file(text)) if isinstance(node, kinds)]


ROOT = Path(__file__).resolve().parent.parent
FLOORS = (  # a module imports from lower floors and from its own room; the longest name that fits counts
    (
        *("specdec.errors", "specdec.lazy", "specdec.settings", "specdec.progress", "specdec.text", "specdec.config"),
        "specdec.gpu",
    ),
    ("specdec.kvcache", "specdec.modules"),
    ("specdec.attention", "specdec.sampling", "specdec.layers"),
    ("specdec.models", "specdec.draft_models"),
    ("specdec.runtime",),
    ("specdec.loading", "specdec.engine", "specdec.hf_generate", "specdec", "specdec.measurement"),
    ("specdec.serving", "specdec.evaluation", "specdec.training", "specdec.doctor"),
    ("specdec.cli", "specdec.__main__"),
)
OPEN_FLOORS = (0, 5, 7)
"""Their rooms are single files, or folders; they import each other in the order in which they stand."""

LIGHT_FILES = tuple(f"specdec.cli.{name}" for name in ("app", "command", "commands", "options", "config_file"))
LIGHT_FILES += ("specdec.serving.http_options",)
NEVER = (  # what a room does not know, beyond its floor
    ("specdec.runtime.rounds", "specdec.runtime", "the device's part knows no request and no scheduler"),
    ("specdec.runtime.rounds", "specdec.sampling.grammars", "a round is handed masks, and knows no grammar"),
    ("specdec.runtime.scheduler", "specdec.runtime.rounds", "who runs is decided without a look at the device"),
    ("specdec.serving.http", "specdec.serving.openai", "connections, bodies and keys are those of any route"),
    ("specdec.serving.http", "specdec.serving.responses", "connections, bodies and keys are those of any route"),
    ("specdec.sampling.grammars", "torch", "grammars are of the host"),
    *(
        (file, heavy, "help takes half a second at most")
        for file in LIGHT_FILES
        for heavy in ("specdec.cli.actions", "specdec.engine", "specdec.config", "torch", "transformers", "numpy")
    ),
)
NEVER_EVEN_INDIRECTLY = tuple(  # nor any file that it imports
    ("specdec.runtime.scheduler", room, "who runs is decided without a look at the device")
    for room in ("specdec.runtime.rounds.device_state", "specdec.models", "specdec.attention", "specdec.draft_models")
)
ASKS_THE_ENGINE = ("specdec.serving", "specdec.evaluation", "specdec.measurement")
"""Rooms that use an engine through its public answers (`Engine.running_ids`, `AsyncEngine.tokenizer`, ...)."""
REACHES_THROUGH = re.compile(r"\.(engine\.engine|table\.allocator|cache\.allocator|scheduler\.\w+)$")
ROOT_MODULE = "specdec"  # its names are looked up when they are used: to a type checker it imports them all the same
LAZY = "specdec.lazy"  # help and `import specdec` must not import torch
LAZY_USERS = ("specdec", "specdec.cli.commands")
MAPPED = ("specdec.kvcache", "specdec.attention", "specdec.draft_models")
FOLDERS = {name.rpartition(".")[2]: name for name in (*MAPPED, "specdec")}  # root folder -> package
IMPORTERS = ("import_module", "__import__")
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout")


@functools.cache
def product_sources() -> dict[str, str]:
    """Module name -> source, for the four folders as they are installed."""
    sources = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            sources[".".join((package, *parts)).removesuffix(".__init__")] = path.read_text("utf-8")
    return sources


def room_of(module: str) -> str:
    rooms = [room for floor in FLOORS for room in floor if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len)


def may_import(module: str, other: str) -> bool:
    """Do the floors allow it?"""
    here, there = room_of(module), room_of(other)
    [floor], [below] = ([i for i, rooms in enumerate(FLOORS) if room in rooms] for room in (here, there))
    if floor == below and floor in OPEN_FLOORS:
        return FLOORS[floor].index(there) <= FLOORS[floor].index(here)
    return below < floor or here == there


def is_within(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def reached_from(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The modules that it imports, directly or not."""
    reached, new = set[str](), {module}
    while new:
        reached |= new
        new = set().union(*(graph.get(name, set()) for name in new)) - reached
    return reached - {module}


def broken_walls(graph: dict[str, set[str]], walls: tuple[tuple[str, str, str], ...] = NEVER) -> list[str]:
    """Imports of these walls; what is within the room itself is its own."""
    return [
        f"{module} imports {name}: {why}"
        for module, names in graph.items()
        for room, never, why in walls
        if is_within(module, room)
        for name in sorted(names)
        if is_within(name, never) and not is_within(name, room)
    ]


def reaching(sources: dict[str, str]) -> list[str]:
    """Attributes of attributes of an engine, in rooms that ask the engine itself."""
    return [
        f"{module}: {text}"
        for module, source in sources.items()
        if any(is_within(module, room) for room in ASKS_THE_ENGINE)
        for node in named_nodes(source)
        if isinstance(node, ast.Attribute)
        for text in [ast.unparse(node)]
        if REACHES_THROUGH.search(text)
    ]


def imported(node: ast.AST, modules: set[str]) -> Iterator[str]:
    """The modules that one import statement names; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        base = node.module or ""
        names = (f"{base}.{alias.name}" for alias in node.names)
        yield from {name if name in modules else base for name in names}


def is_own(module: str) -> bool:
    return module.split(".")[0] == "specdec"


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> own modules it imports, wherever in the file the import stands."""
    return {module: set(filter(is_own, names)) for module, names in every_import(sources).items()}


def every_import(sources: dict[str, str]) -> dict[str, set[str]]:
    """All imports, with those of other packages."""
    modules = set(sources)
    return {
        module: {name for node in named_nodes(text) for name in imported(node, modules)}
        for module, text in sources.items()
    }


def top_level(module: str, tree: ast.Module) -> list[ast.stmt]:
    """Places where imports of own modules may stand: the root may also name them for type checkers."""
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [*tree.body, *(child for node in guarded if module == ROOT_MODULE for child in node.body)]


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` and of `c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def import_errors(sources: dict[str, str]) -> list[str]:
    errors, modules = [], set(sources)
    for module, text in sources.items():
        at_the_top = top_level(module, parse_file(text))
        for node in named_nodes(text):
            where = f"{module}:{node.lineno}"
            for name in imported(node, modules):
                if name.split(".")[0] in FOLDERS and not is_own(name):
                    errors.append(f"{where} bare import of {name}")
                if not is_own(name):
                    continue
                if not may_import(module, name):
                    errors.append(f"{where} imports {name} of a higher floor, or of another room of its own")
                if name == LAZY and module not in LAZY_USERS:
                    errors.append(f"{where} imports {name}")
                if node not in at_the_top:
                    errors.append(f"{where} imports {name} below the top level")
            if isinstance(node, ast.Call) and last_name(node.func).endswith(IMPORTERS) and module != LAZY:
                errors.append(f"{where} dynamic import")
    return errors


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of one import circle, empty when there is none: strips the modules that nothing left waits for."""
    left = {module: targets & set(graph) for module, targets in graph.items()}
    while ready := [module for module, targets in left.items() if not targets & set(left)]:
        for module in ready:
            del left[module]
    return sorted(left)


def dropped_comparisons(text: str) -> list[int]:
    """Lines on which the result of a tensor comparison is thrown away."""
    calls = (n.value for n in ast.walk(parse_file(text)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call))
    return [call.lineno for call in calls if last_name(call.func) in COMPARISONS]


def test_imports_point_down_and_stand_at_the_top():
    assert import_errors(product_sources()) == []


def test_no_wall_is_broken():
    graph = every_import(product_sources())
    assert broken_walls(graph) == []
    assert broken_walls({module: reached_from(module, graph) for module in graph}, NEVER_EVEN_INDIRECTLY) == []


def test_serving_evaluation_and_measurement_ask_the_engine_and_do_not_reach_through_it():
    assert reaching(product_sources()) == []


def test_no_file_name_stands_twice():
    names = [name.rpartition(".")[2] for name in product_sources() if "." in name]
    sources = set(product_sources())
    packages = {name for name in sources if any(is_within(other, name) for other in sources - {name})}
    assert {name for name in names if names.count(name) > 1} - {p.rpartition(".")[2] for p in packages} == set()


def test_no_public_name_stands_twice():
    """A class, an alias or a function has a name of its own, so that a search for it ends in one file."""
    counts = Counter(name for text in product_sources().values() for name in public_names(parse_file(text)))
    assert {name for name, count in counts.items() if count > 1} == {"main"}


def public_names(module: ast.Module) -> Iterator[str]:
    """Classes and functions at the top of a module, and aliases of types: those have small letters too."""
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name


def test_no_import_circle():
    assert find_cycle(import_graph(product_sources())) == []


def test_every_package_is_listed_and_mapped():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packages = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sorted(config["packages"]) == sorted(packages)
    mapped = {package: folder for folder, package in FOLDERS.items() if folder != package}
    assert config["package-dir"] == mapped


@pytest.mark.parametrize("package", MAPPED)
def test_mapped_package_refuses_its_bare_name(package: str):
    body = parse_file((ROOT / package.rpartition(".")[2] / "__init__.py").read_text("utf-8")).body
    tests = [ast.unparse(node.test) for node in body if isinstance(node, ast.Assert)]
    assert f"__name__ == '{package}'" in tests


def test_no_file_is_long_without_a_reason():
    run = subprocess.run([sys.executable, ROOT / "tools" / "size.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_sizes_are_counted_by_part():
    size = module_of(ROOT / "tools" / "size.py")
    texts = {"kvcache/page.py": "a = 1\n\nb = 2\n", "docs/page.md": "three plain words\n", "Makefile": "all:\n"}
    counts = size.count_files(texts | {"docs/decisions/0001.md": "two words\n"})
    assert counts == {"docs/decisions/0001.md": 2, "docs/page.md": 3, "kvcache/page.py": 3}
    assert size.sums_by_part(counts) == {"product": 3, "docs": 3, "decisions": 2}
    [message] = size.too_long({"kvcache/page.py": 401, "kvcache/table.py": 400, "tests/test_a.py": 500})
    assert message.startswith("kvcache/page.py: 401 lines, at most 400")


def test_no_comparison_is_dropped():
    compares = re.compile(rf"\b({'|'.join(COMPARISONS)})\s*\(")  # other files need not be parsed
    texts = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}
    dropped = {name: dropped_comparisons(text) for name, text in texts.items() if compares.search(text)}
    assert {name: lines for name, lines in dropped.items() if lines} == {}


# the checks themselves


WRONG = """\
import torch
from specdec.kvcache.store import KVStore
from specdec import attention as a, engine
import kvcache.stores
importlib.import_module(name)
if TYPE_CHECKING:
    import specdec.kvcache
"""


def test_import_errors_are_found():
    found = import_errors({"specdec.attention.x": WRONG, "specdec": "", "specdec.engine": "", "specdec.kvcache": ""})
    said = ["3 imports", "3 imports", "4 bare", "5 dynamic", "7 imports specdec.kvcache below"]
    assert all(error.startswith(f"specdec.attention.x:{part}") for error, part in zip(sorted(found), said, strict=True))


def test_walls_reaches_and_circles_are_found():
    [error] = broken_walls({"specdec.runtime.rounds.x": {"specdec.runtime.rounds.y", "specdec.runtime.request"}})
    assert "specdec.runtime.rounds.x imports specdec.runtime.request" in error
    assert reached_from("a", {"a": {"b"}, "b": {"c", "a"}, "d": {"e"}}) == {"b", "c"}
    assert reaching({"specdec.serving.x": "f(a.engine.engine.b)"}) == ["specdec.serving.x: a.engine.engine"]
    circle = {"specdec.a": "import specdec.b", "specdec.b": "def g():\n    from specdec.a import h", "specdec.c": ""}
    assert find_cycle(import_graph(circle)) == ["specdec.a", "specdec.b"]


def numbers(text: str) -> Iterator[tuple[str, str]]:
    """Module constants that are numbers, or arithmetic of numbers, with their source."""
    arithmetic = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    for node in parse_file(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                parts = list(ast.walk(value))
                constants = [part.value for part in parts if isinstance(part, ast.Constant)]
                if all(isinstance(part, arithmetic) for part in parts) and not any(
                    isinstance(x, str) for x in constants
                ):
                    yield name, ast.unparse(value)


SIZES_OF_KERNELS = {"BLOCK", "BLOCK_K", "COLUMNS"}
"""Elements per program: one meaning, and each kernel has its own."""


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout")
def test_a_number_that_modules_name_alike_is_one_number():
    """`PATIENCE` was 3.0 s, 20.0 s, 64 requests and 8000 rounds."""
    assert list(numbers("A = 3\nB = 1 << 4\nC = 'x'\nd = 4\nE = f(2)\n")) == [("A", "3"), ("B", "1 << 4")]
    values: dict[str, set[str]] = {}
    for folder in ("specdec", "kvcache", "attention", "draft_models"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, value in numbers(path.read_text("utf-8")):
                values.setdefault(name, set()).add(value)
    assert {name: found for name, found in values.items() if len(found) > 1 and name not in SIZES_OF_KERNELS} == {}
