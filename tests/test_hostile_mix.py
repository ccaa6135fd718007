"""tools/hostile.py in its short form: a few kinds of harm beside a few good streams; nothing about time."""

import argparse
import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("psutil")

TOOLS = Path(__file__).resolve().parent.parent / "tools"
KINDS = ["4 MB of zeros as messages", "a body half sent, then gone", "streams reset in the middle", "cache probing"]
KINDS += ["schemas of thousands of refs", "wrong keys", "HTTP/2 and TLS", "60 prompts without an end"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "hostile.py").exists(), reason="needs the checkout"),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc"),
]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(TOOLS))
    try:
        import hostile
    finally:
        sys.path.remove(str(TOOLS))
    return hostile


@pytest.fixture(scope="module")
def record(tool):
    """One server, four good streams, eight kinds at once."""
    given = ["--streams", "4", "--new", "8", "--seconds", "1", "--quiet", "0.1", "--settle", "0", "--together"]
    with tool.running_server(tool.OPTIONS) as served:
        return asyncio.run(tool.hold_under_attack(tool.options(given), KINDS, served))


@pytest.mark.deep
def test_good_streams_have_their_texts_beside_eight_kinds_of_harm(tool, record):
    assert [answer.wrong for answer in record.answers if answer.wrong] == []
    assert len(record.answers) >= 8
    [attacked] = [phase for phase in record.phases if phase.kinds]
    assert sorted(attacked.got) == sorted(KINDS) and all(attacked.got.values()), attacked.got


@pytest.mark.deep
def test_the_server_outlives_them_and_answers_nothing_that_it_must_not(tool, record):
    """All lines of the tool but those of time and of memory, which a loaded machine may miss."""
    lines = {line: holds for line, _, holds in tool.verdicts(record, 1.0)}
    for line in (tool.WRONG, tool.UNWELL, tool.STATUSES, tool.LIVES, tool.TRACEBACKS):
        assert lines[line], tool.verdicts(record, 1.0)


@pytest.mark.parametrize("fault", ["text", "health", "status", "leak", "dead", "traceback", "slow", "memory"])
def test_each_line_can_fail(fault, tool):
    """A run that was made up: what is wrong with it fails its line, and no other."""
    answers = [tool.Answer(at / 10, 0.01, "") for at in range(30)]
    probed = [tool.Probed(at / 10, 0.002, 0.0, 100, "") for at in range(30)]
    got = {"kind": {"400": 5, "503": 1, "429": 2}}
    log, alive, line = "quiet", True, tool.WRONG
    if fault == "text":
        answers[15] = answers[15]._replace(wrong="another text")
    elif fault == "slow":
        answers[15], line = answers[15]._replace(per_token=0.031), tool.SLOWEST
    elif fault == "health":
        probed[15], line = probed[15]._replace(trouble="500"), tool.UNWELL
    elif fault == "memory":
        probed[20:], line = [each._replace(memory=120) for each in probed[20:]], tool.GROWN
    elif fault in ("status", "leak"):
        got["kind"]["500" if fault == "status" else "leak"], line = 1, tool.STATUSES
    elif fault == "dead":
        alive, line = False, tool.LIVES
    else:
        log, line = "Traceback (most recent call last)", tool.TRACEBACKS
    phases = [
        tool.Phase(kinds, at, at + 1.0, got if kinds else {}, 0.0) for at, kinds in enumerate([(), ("kind",), ()])
    ]
    lines = tool.verdicts(tool.Record(phases, answers, probed, log, alive, 100), 1e-4)
    assert [name for name, _, holds in lines if not holds] == [line]


def test_at_least_fifty_kinds_are_told_apart(tool):
    assert len(tool.KINDS) >= 50


def test_options_are_read(tool):
    assert isinstance(tool.options([]), argparse.Namespace)
