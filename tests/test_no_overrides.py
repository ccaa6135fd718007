"""No method of the server's libraries is overridden and none of their names assigned to: each of their releases would
be a risk. What FastAPI documents as a point of extension (`APIRoute`, `Request`, `Response`) may be derived from."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specdec

from package_files import parse_file

ROOT = Path(specdec.__file__).parent
SOCKETS = ("asyncio", "h11", "http", "httptools", "socket", "socketserver", "ssl", "uvicorn", "uvloop")
"""Libraries with protocols, servers and sockets."""


def found(source: str) -> Iterator[str]:
    """Classes of these libraries that are derived from, and attributes of any library that are assigned to."""
    tree = parse_file(source)
    names: dict[str, str] = {}  # as the file calls it -> what it is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def library(expression: ast.expr) -> str:
        """A name, or attributes of a name."""
        while isinstance(expression, ast.Attribute):
            expression = expression.value
        name = names.get(expression.id, "") if isinstance(expression, ast.Name) else ""
        return "" if name.startswith("specdec") else name.partition(".")[0]

    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (f"class {node.name}" for base in node.bases if library(base) in SOCKETS)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and library(target):
                    yield ast.unparse(target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and library(node.args[0]):
            yield ast.unparse(node)


def test_nothing_of_a_library_is_overridden_or_assigned_to():
    marks = {str(path): list(found(path.read_text("utf-8"))) for path in ROOT.rglob("*.py")}
    assert {path: each for path, each in marks.items() if each} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import uvicorn\nclass Server(uvicorn.Server): ...",
        "from uvicorn.protocols.http.h11_impl import H11Protocol as Base\nclass Connection(Base): ...",
        "import socket\nclass Listener(socket.socket): ...",
        "import uvicorn.server\nuvicorn.server.Server.shutdown = None",
        "from uvicorn import Server\nsetattr(Server, 'run', None)",
    ],
)
def test_overrides_of_a_library_are_found(source):
    assert len(list(found(source))) == 1


def test_code_without_overrides_is_accepted():
    assert (
        list(found("import enum\nfrom fastapi import Request\nclass Kind(enum.Enum): ...\nclass R(Request): ...")) == []
    )
