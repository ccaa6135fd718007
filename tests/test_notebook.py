"""The notebook of the first hour runs as it stands, cell by cell in one namespace."""

import json
import re
from pathlib import Path

import pytest

from marks import is_deep

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"

pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="needs the checkout")


def cells(kind: str) -> list[str]:
    found = json.loads(NOTEBOOK.read_text("utf-8"))
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.usefixtures("shallow_pair", "bundled_once")
def test_every_cell_runs_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for number, source in enumerate(cells("code")):
        source = source if is_deep() else re.sub(r"(?<=SamplingParams\()(max_new_tokens=)?\d+", "12", source)
        exec(compile(source, f"cell {number}", "exec"), names)
        assert capsys.readouterr().out.strip(), f"cell {number} shows nothing"
    assert names["diagnosis"].healthy in (True, False)
    assert not any(tmp_path.iterdir())


def test_it_is_kept_without_output_and_its_links_lead_somewhere():
    found = json.loads(NOTEBOOK.read_text("utf-8"))
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in found["cells"] if "outputs" in cell)
    links = re.findall(r"\]\(([^)]+)\)", "".join(cells("markdown")))
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)
