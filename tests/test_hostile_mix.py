"""tools/hostile.py in its short form: some kinds of harm next to good streams; nothing about time."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from script_module import module_of
from server_process import running_server

TOOL = Path(__file__).resolve().parent.parent / "tools" / "hostile.py"
KINDS = ["a body of 8 MB in chunks", "streams that nobody reads", "noise, HTTP/2, TLS", "a body half sent, then gone"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TOOL.exists(), reason="needs the checkout"),
]


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOL.parent))  # for what it shares with others
        return module_of(TOOL)


@pytest.mark.deep
def test_good_streams_have_their_texts_beside_harm_and_the_server_outlives_it(tool):
    given = tool.options(["--seconds", "1", "--clients", "2", "--only", *KINDS])
    with running_server(*tool.OPTIONS) as server:
        found = asyncio.run(tool.run(server.url, given))
        assert "Traceback" not in server.log()
    assert [figures.kind for figures in found] == KINDS
    assert all(figures.holds and figures.streams for figures in found), found


@pytest.mark.parametrize(
    ("seen", "wrong", "holds"),
    [
        ("400 404", [], True),
        ("503", [], True),
        ("12 x 200, 1 x 500", [], False),
        ("200", ["another text"], False),
    ],
)
def test_a_wrong_stream_and_a_fault_of_the_server_do_not_hold(seen, wrong, holds, tool):
    assert tool.Figures("kind", Counter([seen]), 9, wrong, 0.1).holds is holds
