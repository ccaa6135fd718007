"""The bundled pair with a target of 6 layers instead of 30, for tests that only need a model to run.

Forwards of the bundled target are most of the cost of a test of a command, a page or an endpoint. The target of 6
layers (made by `git show 3c17b9af:tools/distil_shallow_target.py` with KEPT = (0, 4, 18, 19, 27, 29) and 240 steps)
writes similar sentences and accepts drafts of the bundled drafters (2.9 and 2.6 tokens a round), but solves no problem.
Tests of answers, acceptance, sizes or states use the bundled pair; `make test-deep` uses it everywhere. A plugin of
conftest.py.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.models import published

from marks import is_deep

WHOLE = published.BUNDLED_DIR
TARGET = Path(__file__).with_name("shallow_target")
VARIABLE = "SHALLOW_PAIR"  # tells a fork of forked_command.py the folder
AUX_LAYERS = [0, 1, 3]  # of the 6, for 1, 14 and 26 of the 30


@pytest.fixture(scope="session")
def shallow_folder() -> Iterator[Path]:
    """A folder of links to all bundled models, with the shallow target and an EAGLE-3 head that reads its layers."""
    with tempfile.TemporaryDirectory(prefix="shallow-pair-") as name:
        folder = Path(name)
        for path in WHOLE.iterdir():
            if path.name not in ("tiny-gemma4", "tiny-gemma4-eagle3"):
                (folder / path.name).symlink_to(path)
        for model in ("tiny-gemma4", "tiny-gemma4-eagle3"):
            (folder / model).mkdir()
            for path in (WHOLE / model).iterdir():
                own = TARGET / path.name
                (folder / model / path.name).symlink_to(own if model == "tiny-gemma4" and own.exists() else path)
        head = folder / "tiny-gemma4-eagle3" / "config.json"
        config = json.loads(head.read_text("utf-8"))
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = AUX_LAYERS
        head.unlink()
        head.write_text(json.dumps(config), "utf-8")
        yield folder


@pytest.fixture(scope="module")
def shallow_pair(shallow_folder: Path) -> Iterator[None]:
    """Let the bundled names mean the shallow pair, in this process and in forks that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_deep():
            patch.setattr(published, "BUNDLED_DIR", shallow_folder)
            patch.setenv(VARIABLE, str(shallow_folder))
        yield


@pytest.fixture
def whole_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bundled names mean the bundled pair again."""
    monkeypatch.setattr(published, "BUNDLED_DIR", WHOLE)
    monkeypatch.delenv(VARIABLE, raising=False)
