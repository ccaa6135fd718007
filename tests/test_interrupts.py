"""tools/interrupts.py in its short form: timer signals while an engine idles, generates, streams and is served."""

import signal
import sys
from pathlib import Path

import pytest
from script_module import module_of

from marks import examples

TOOL = Path(__file__).resolve().parent.parent / "tools" / "interrupts.py"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="needs the checkout")


@pytest.fixture(scope="module")
def tool():
    return module_of(TOOL)


INTERRUPTS = examples(20, 60)


@pytest.mark.parametrize("scene", ["idle", "generate", "stream", "serve"])
def test_after_every_interrupt_the_next_answer_is_right(scene, tool, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back afterwards
    before, said = signal.getsignal(signal.SIGALRM), []
    try:
        tool.interrupt_scene(scene, INTERRUPTS, 1, lambda interrupts, wrong: said.append((interrupts, wrong)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert said[-1] == (INTERRUPTS, 0)
