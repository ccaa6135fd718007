"""What the pages in docs/ and the README show is what the code does.

Python   the ```python blocks of a page run in order, in one namespace, in an empty folder, on the bundled models. A
         block after `<!-- not executed: why -->` must only compile.
Output   a ```text (or ```console) block right after a ```python block is what that block prints; `...` stands for
         anything and white space is not compared, as in doctest.
Shell    a ```sh block is parsed: commands, options and values of `specdec`, options of scripts, targets of `make`. With
         a ```text block right after it, it is run as well (`specdec` commands only) and its output compared.
Links    a relative link leads to a file, and its #anchor to a heading there. Names in backticks: test_docs_names.py.
Notebook the cells of the first hour run as they stand, in one namespace.

A page that is added to docs/ is held to the same rules, and must be in its index: docs/README.md or
docs/decisions/README.md.
"""

import contextlib
import doctest
import inspect
import io
import json
import logging
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import specdec
from specdec.cli.app import app, program
from specdec.loading.model_loading import Checkpoint
from specdec.models import published
from specdec.runtime.drafts.draft_policy import DraftPolicy

from marks import deep, is_deep, usual_cases

ROOT = Path(__file__).resolve().parent.parent
AT_THE_ROOT = ("CONTRIBUTING.md", "README.md", "tests/README.md")
PAGES = [
    *(page for page in AT_THE_ROOT if (ROOT / page).exists()),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]

AFTER_FIRST = "Target and drafter are each a bundled name"
"""What the README says right after the first code that it shows."""

TRUE_OF_ANY_PAIR = ("docs/adding.md", "docs/exactness.md", "docs/structured_output.md")
"""Pages that compare outputs of engines, and print nothing that tells one target from another."""

pytestmark = [
    pytest.mark.usefixtures("bundled_once"),
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout"),
]


class Block(NamedTuple):
    """A fenced block: the line its code starts on, and the block of output right after it, if there is one."""

    language: str
    line: int
    code: str
    skipped: bool
    output: str | None


OUTPUTS = ("text", "console")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!-- not executed: [^<>]+ -->\n\Z")


def blocks(text: str) -> list[Block]:
    found = list(FENCE.finditer(text))
    result = []
    for i, fence in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        is_output = after is not None and after[1] in OUTPUTS and not text[fence.end() : after.start()].strip()
        result.append(
            Block(
                language=fence[1],
                line=text.count("\n", 0, fence.start(2)) + 1,
                code=fence[2],
                skipped=SKIP.search(text[: fence.start()]) is not None,
                output=after[2] if is_output and after is not None else None,
            )
        )
    return result


def require_output(where: str, wanted: str, got: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(wanted, got, flags):
        raise AssertionError(f"{where}: the page says\n{wanted}and the code prints\n{got}")


def run_python(text: str, name: str, namespace: dict[str, Any]) -> None:
    """Run the python blocks of a page; a traceback names the page and its line."""
    for block in blocks(text):
        if block.language != "python":
            continue
        code = compile("\n" * (block.line - 1) + block.code, name, "exec")
        if block.skipped:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None:
            require_output(f"{name}:{block.line}", block.output, printed.getvalue())


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block as words, without comments, assignments in front and a prompt."""
    lines = code.replace("\\\n", " ").splitlines()
    split = (shlex.split(line.removeprefix("$ "), comments=True) for line in lines)
    bare = ([*words[next((i for i, w in enumerate(words) if "=" not in w), len(words)) :]] for words in split)
    return [words for words in bare if words]


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a `specdec`, `make` or script command could not be started as written."""
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if {"-m", "specdec"} <= {*words}:  # accelerate launch -m specdec ...
        words = words[words.index("specdec") :]
    if words[0] == "specdec":
        assert words[1:], "specdec alone does nothing"
        name, *arguments = words[1:]
        assert name in (*program.commands, "--help"), f"no command {name!r}; there are {', '.join(program.commands)}"
        if "--help" not in words:
            program.commands[name].make_context(name, arguments).close()
    elif words[0] == "make":
        targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        for target in (word for word in words[1:] if "=" not in word):
            assert target in targets, f"no make target {target!r}"
    elif script is not None:
        text = help_of(words[script], monkeypatch)
        for option in (word.partition("=")[0] for word in words[script + 1 :] if word.startswith("--")):
            assert re.search(rf"{option}(?![\w-])", text), f"{words[script]} has no option {option}"


def help_of(script: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `python SCRIPT --help` prints."""
    printed = io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [script, "--help"])
        patch.setenv("COLUMNS", "200")
        patch.syspath_prepend(str((ROOT / script).parent))
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not stop.value.code, f"{script} --help ends with {stop.value.code}"
    return printed.getvalue()


def run_shell(text: str, name: str, monkeypatch: pytest.MonkeyPatch, runs: bool = True) -> None:
    """Check that commands exist, and run those whose output the page shows."""
    for block in blocks(text):
        if block.language != "sh":
            continue
        printed, is_run = "", runs and block.output is not None and not block.skipped
        for words in commands(block.code):
            where = f"{name}:{block.line}: {shlex.join(words)}"
            try:
                check_command(words, monkeypatch)
            except Exception as error:
                raise AssertionError(f"{where}: {error}") from error
            if is_run:
                assert words[0] == "specdec", f"{where}: only specdec commands are run; leave out the output"
                result = CliRunner().invoke(app, words[1:])
                assert result.exit_code == 0, f"{where}: {result.output}"
                printed += result.stdout
        if is_run:
            require_output(f"{name}:{block.line}", block.output, printed)


def anchors(text: str) -> set[str]:
    """The ids that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))
        broken += [] if found else [link]
    return broken


def with_blocks(language: str) -> list[str]:
    return [page for page in PAGES if any(b.language == language for b in blocks((ROOT / page).read_text("utf-8")))]


@pytest.fixture
def readers_names() -> dict[str, Any]:
    """What the reader of the README has already, where it changes one line of working Hugging Face code."""
    float32, cpu = torch.float32, torch.device("cpu")
    model = Checkpoint.from_name("tiny-gemma4").load(float32, cpu)
    assistant = Checkpoint.from_name("tiny-gemma4-mtp").load(float32, cpu)
    input_ids = torch.tensor([[0, 2, 531, 17], [2, 531, 17, 1728]])
    return {"specdec": specdec, "model": model, "assistant": assistant, "input_ids": input_ids, "mask": input_ids > 0}


@pytest.fixture
def levels_of_loggers() -> Iterator[None]:
    """A page may set levels; other tests get their own back."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("specdec")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@usual_cases(
    *("README.md", "docs/adding.md", "docs/choosing.md", "docs/frozen_kv.md", "docs/logging.md", "docs/quantised.md"),
    *("docs/serving.md", "docs/troubleshooting.md"),
)
@pytest.mark.usefixtures("levels_of_loggers")
@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_runs_and_prints_what_the_page_says(page, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page in TRUE_OF_ANY_PAIR and not is_deep():
        monkeypatch.setattr(published, "BUNDLED_DIR", request.getfixturevalue("shallow_folder"))
    names = request.getfixturevalue("readers_names") if page == "README.md" else {}
    text = (ROOT / page).read_text("utf-8")
    if page == "README.md" and not is_deep():  # fewer tokens, and what it shows first is run by the test below
        first = text.index(AFTER_FIRST)
        text = "\n" * text.count("\n", 0, first) + text[first:].replace("max_new_tokens=64", "max_new_tokens=8")
    run_python(text, str(ROOT / page), {"__name__": "docs", **names})


@pytest.mark.slow
@pytest.mark.parametrize("script", ["README", deep("demo")])
def test_output_of_the_readme_and_the_demo_depends_on_no_timing(script, monkeypatch, capsys):
    """On a busy machine adaptive drafts were off, and both printed "1.00"."""
    init = inspect.unwrap(specdec.SpecConfig.__init__)
    monkeypatch.setattr(init, "__defaults__", (*init.__defaults__[:-1], True))  # as outside tests
    monkeypatch.setattr(DraftPolicy, "choose", lambda choice, *_, **__: choice.shapes[0])  # where none pays
    if script == "README":
        text = (ROOT / "README.md").read_text("utf-8")
        run_python(text[: text.index(AFTER_FIRST)], "README.md", {"__name__": "docs"})
        return
    monkeypatch.setattr(sys, "argv", ["demo.py", "--count", "1"])
    runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert "acceptance length 5.00, identical to plain decoding: yes" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks("sh"))
def test_shell_commands_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = page != "docs/quick_start.md" or is_deep()  # what it runs, test_cli.py does too
    run_shell((ROOT / page).read_text("utf-8"), page, monkeypatch, runs)


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    assert broken_links((ROOT / page).read_text("utf-8"), ROOT / page) == []


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_index_names_every_page(folder):
    index = (ROOT / folder / "README.md").read_text("utf-8")
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages
    assert sorted(page for page in pages if f"({page})" not in index) == []


NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs_and_prints(shallow_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if not is_deep():
        monkeypatch.setattr(published, "BUNDLED_DIR", shallow_folder)
    names = {"__name__": "notebook"}
    for number, cell in enumerate(cells("code")):
        source = "".join(cell["source"])
        source = source if is_deep() else re.sub(r"(?<=SamplingParams\()(max_new_tokens=)?\d+", "12", source)
        exec(compile(source, f"cell {number}", "exec"), names)
        assert capsys.readouterr().out.strip(), f"cell {number} shows nothing"
    assert names["diagnosis"].healthy in (True, False)
    assert not any(tmp_path.iterdir())


def test_the_notebook_is_kept_without_output_and_its_links_lead_somewhere():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells("code"))
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    assert "](" in text and broken_links(text, NOTEBOOK) == []
