"""`specdec chat`: typed into a pseudo-terminal and read from a pipe; and how long conversations are cut."""

import io
import os
import pty
import re
import select
import signal
import time
from functools import cache

import pytest
from typer.testing import CliRunner

from specdec import Engine, EngineConfig, SamplingParams
from specdec.cli.actions.conversation import Conversation, Session
from specdec.cli.app import app
from specdec.errors import CapacityError, ConfigError
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.text.detokenize import DraftColours

from processes import start
from served_engine import bundled_engine

NEW = 24
TOM = "Tom has 3 apples and buys 5 more. How many apples does he have?"
ANN = "Ann has 4 boxes of 6 eggs. She eats 3 eggs. How many eggs are left?"
GREEN = "\x1b[1;32m"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
ANSWERED = rf"(?:{ESCAPES.pattern}|[^\w\x1b])*\w{{2}}"
"""Text after what is typed: the codes with which a terminal ends a line of input are none."""
FIGURES = (
    r"(\d+) tokens, [\d.]+ tokens/s, the first after [\d.]+ s; "
    r"acceptance length ([\d.]+)(?: in the .* that drafted)?"
)
LEGEND = ", from accepted drafts"
pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


class Terminal:
    """`specdec chat` in a pseudo-terminal of its own."""

    def __init__(self, *options):
        self.end, its_end = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM_PROGRAM")}
        environment |= {"TERM": "xterm", "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
        command = ["-m", "specdec", "chat", *options]
        self.process = start(command, terminal=True, stdin=its_end, stdout=its_end, stderr=its_end, env=environment)
        os.close(its_end)
        self.unread = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.end)

    def type(self, text):
        os.write(self.end, text.encode())

    def until(self, pattern, seconds=300):
        """What is shown up to the pattern, from where the last call ended."""
        shown = self.shows(pattern, seconds)
        assert shown is not None, f"no {pattern!r} in {self.unread!r}"
        return shown

    def shows(self, pattern, seconds):
        """Reads like `until`; None where it does not come in time."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.unread)) is None:
            if time.monotonic() > deadline:
                return None
            if select.select([self.end], [], [], 0.2)[0]:
                try:
                    read = os.read(self.end, 4096)
                except OSError:  # the other end is closed
                    raise AssertionError(f"it left, with no {pattern!r} in {self.unread!r}") from None
                self.unread += read.decode(errors="replace").replace("\r\n", "\n")
        shown, self.unread = self.unread[: found.end()], self.unread[found.end() :]
        return shown


@pytest.fixture
def at_keyboard(monkeypatch):
    """Makes standard input a terminal at which these lines are typed."""

    class Keyboard(io.StringIO):
        def isatty(self):
            return True

    def typing(*lines):
        left = iter(lines)
        monkeypatch.setattr("sys.stdin", Keyboard())
        monkeypatch.setattr("builtins.input", lambda _: next(left))

    return typing


engine = bundled_engine()


@cache
def told(engine, *turns):
    """What the model answers to each turn, with those before in its history."""
    messages, outputs = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        outputs += engine.chat(messages, SamplingParams(max_new_tokens=NEW))
        messages.append({"role": "assistant", "content": outputs[-1].text})
    return outputs


def test_several_pasted_lines_are_one_turn():
    """A terminal marks a paste (bracketed paste); Python turns that off by default, so each line was a turn."""
    pasted = "Tom has 3 boxes.\nEach has 12 pencils.\nHow many pencils are there?"
    with Terminal("--max-new-tokens", "8") as terminal:
        terminal.until("> ")
        terminal.type(f"\x1b[200~{pasted}\x1b[201~\r")
        shown = terminal.until(r"tokens, .*\n")
        assert len(re.findall("tokens/s", shown)) == 1
        terminal.type("/help\r")
        assert "/reset  forget what was said" in terminal.until("sent with Enter")


def test_a_single_token_has_no_acceptance_length():
    """Its only token comes from the prompt's own forward: "acceptance length 0.00" was said of it."""
    result = CliRunner().invoke(app, ["generate", TOM, "--max-new-tokens", "1"])
    assert result.exit_code == 0 and "1 token, finished by length; 0 target forwards" in result.stderr
    assert "acceptance length" not in result.stderr


@pytest.mark.slow
def test_a_conversation_in_a_terminal(engine):
    first, second = told(engine, TOM, ANN)
    alone = told(engine, ANN)[0]
    assert alone.text != second.text  # so history can be seen
    with Terminal("--max-new-tokens", str(NEW), "--fixed-drafts") as terminal:
        assert "/reset forgets what was said" in terminal.until("> ")
        for typed, want in ((TOM, first), (ANN, second), ("/reset", None), (ANN, alone)):
            terminal.type(typed + "\n")
            if want is None:
                assert "forgotten" in terminal.until("> ")
                continue
            shown = terminal.until(r"accepted drafts.*\n")
            plain = ESCAPES.sub("", shown).replace("\r", "")
            assert f"{typed}\n{want.text}\n" in plain
            found = re.search(FIGURES + LEGEND, plain)
            assert int(found[1]) == len(want.token_ids)
            assert found[2] == f"{want.stats.acceptance_length:.2f}"
            pieces = DraftColours(engine.tokenizer).read(StreamDelta("", want.token_ids, want.drafted, want))
            drafted = "".join(text for text, drafted in pieces if drafted)
            assert "".join(re.findall(rf"{re.escape(GREEN)}(.*?)\x1b\[0m", shown)) == drafted.replace("\n", "")
            terminal.until("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.process.wait(300) == 0


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_not_the_program(whole_pair):
    # noise that goes on for thousands of tokens
    with Terminal("--temperature", "5", "--seed", "1", "--max-new-tokens", "4000") as terminal:
        terminal.until("> ")
        # at the prompt it ends nothing; between the prompt and the wait for a key it is only seen with the next key
        while not terminal.shows("> ", 1.0):
            terminal.type("\x03")
        for presses in (1, 3):
            terminal.type(TOM + "\n")
            terminal.until(re.escape("have?") + ANSWERED)
            for _ in range(presses):
                terminal.type("\x03")
            assert "Traceback" not in terminal.until(r"accepted drafts.*; interrupted")
            terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(300) == 0


@pytest.mark.slow
def test_without_a_terminal_each_line_is_a_turn(engine):
    first, second = told(engine, TOM, ANN)
    lines = f"{TOM}\n\n{ANN}\n/nonsense\n/exit\nnot asked\n"
    options = ["--max-new-tokens", str(NEW), "--fixed-drafts"]  # on a busy machine an answer may need none
    result = CliRunner().invoke(app, ["chat", *options], input=lines)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{first.text}\n{second.text}\n"
    assert len(re.findall(FIGURES, result.stderr)) == 2
    assert LEGEND not in result.stderr  # of a colour that a pipe does not have
    assert "no command /nonsense; /reset forgets" in result.stderr


@pytest.mark.slow
def test_without_a_terminal_ctrl_c_ends_it_all(engine, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOM}\n{ANN}\n"))
    session = Session(engine, Conversation(engine), SamplingParams(max_new_tokens=48))
    before = signal.getsignal(signal.SIGINT)

    def interrupted(pieces):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.run("")
    assert engine.stats().aborted >= 1 and session.conversation.turns == []
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_between_a_question_and_its_answer_ends_neither_the_program_nor_the_answer(engine, at_keyboard, capsys):
    """In this moment only Python's own handler saw it, and the program ended."""

    class Typed(str):
        def strip(self):  # the first thing that happens after Enter
            signal.raise_signal(signal.SIGINT)
            return str(self)

    at_keyboard(Typed(TOM), "/exit")
    session = Session(engine, Conversation(engine), SamplingParams(max_new_tokens=8))
    session.run("")
    assert [turn.asked for turn in session.conversation.turns] == [TOM]
    assert "interrupted" not in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["abort", "figures"])
def test_a_second_ctrl_c_cuts_nothing_short(moment, engine, at_keyboard, monkeypatch, capsys):
    """Whenever it comes: before the answer is ended, or while its figures are printed."""
    session = Session(engine, Conversation(engine), SamplingParams(max_new_tokens=48))
    before, printed, figures, submit = signal.getsignal(signal.SIGINT), session._print, session._summary, engine.submit

    def press(*_):
        signal.raise_signal(signal.SIGINT)

    def interrupted(pieces):
        printed(pieces)
        monkeypatch.setattr(session, "_print", printed)
        press()

    def submitted(*arguments):
        handle = submit(*arguments)
        if moment == "abort":
            abort = handle.abort
            monkeypatch.setattr(handle, "abort", lambda: (press(), abort()))
        return handle

    at_keyboard(TOM, "/exit")
    monkeypatch.setattr(session, "_print", interrupted)
    monkeypatch.setattr(engine, "submit", submitted)
    if moment == "figures":
        monkeypatch.setattr(session, "_summary", lambda *about: (press(), figures(*about))[1])
    session.run("")
    assert "tokens/s" in (said := capsys.readouterr().err) and "; interrupted" in said
    assert [turn.asked for turn in session.conversation.turns] == [TOM]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_system_message_goes_first(engine):
    conversation = Conversation(engine, "Be brief.")
    conversation.add("Hi", "Yes?")
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Go")]
    ids, dropped = conversation.ask("Go", 16)
    assert ids == engine.chat_prompt([{"role": role, "content": text} for role, text in said])
    assert dropped == []


def test_without_a_template_there_is_no_conversation(make_target, make_engine, byte_tokenizer):
    engine = make_engine(make_target("llama", vocab_size=300), tokenizer=byte_tokenizer)
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(engine)


@pytest.fixture
def small(engine):
    config = EngineConfig(max_batch_size=1, max_model_len=120)
    with Engine(engine.target, engine.drafter, tokenizer=engine.tokenizer, config=config) as small:
        yield small


def test_a_conversation_that_outgrows_the_model_forgets_its_oldest_turns(small):
    conversation = Conversation(small)
    asked, forgotten = [f"Ann has {i} eggs. How many?" for i in range(12)], []
    for text in asked:
        ids, dropped = conversation.ask(text, 30)
        assert len(ids) + 30 <= 120
        forgotten += dropped
        conversation.add(text, "She has some eggs.")
    assert [turn.asked for turn in [*forgotten, *conversation.turns]] == asked  # the oldest first, none twice
    assert [turn.number for turn in forgotten] == list(range(1, len(forgotten) + 1)) and len(forgotten) > 2
    with pytest.raises(CapacityError, match=r"these are \d+ tokens, and the model reads and writes 120 at most"):
        conversation.ask("eggs " * 200, 30)
    conversation.reset()
    assert conversation.ask(asked[0], 30) == (small.chat_prompt(asked[0]), [])


def test_dropped_and_unanswered_turns_are_reported_and_the_session_goes_on(small, monkeypatch, capsys):
    lines = [TOM, ANN, "eggs " * 200, "\ud800", TOM]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    Session(small, Conversation(small), SamplingParams(max_new_tokens=100)).run("")
    printed = capsys.readouterr()
    assert printed.out.count("####") >= 2
    said = " ".join(printed.err.split())
    assert f"the conversation outgrew 120 tokens; forgotten: turn 1 ('{TOM[:40]}')" in said
    assert "not answered: these are" in said and "half a surrogate pair" in said
    assert len(re.findall(FIGURES, said)) == 3


def test_a_line_of_a_pipe_that_is_not_utf_8_is_refused_and_the_next_is_read(small, monkeypatch, capsys):
    piped = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf/reset\r\nhello \xff there\n" + TOM.encode()), "utf-8")
    monkeypatch.setattr("sys.stdin", piped)
    Session(small, Conversation(small), SamplingParams(max_new_tokens=4)).run("")
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("forgotten not answered: ") and "half a surrogate pair" in said
    assert len(re.findall(FIGURES, said)) == 1


def test_colours_hold_all_text_of_an_output_that_ends_without_a_token_more(byte_tokenizer):
    ids = byte_tokenizer("é")["input_ids"]
    colours = DraftColours(byte_tokenizer)
    assert colours.read(StreamDelta("", ids[:1], [False])) == []  # half a character
    aborted = GenerationOutput([], ids[:1], "\ufffd", "abort", RequestStats(), [False])
    assert colours.read(StreamDelta("\ufffd", [], [], aborted)) == [("\ufffd", False)]


@pytest.mark.deep
def test_an_answer_is_as_long_as_there_is_room(small, capsys):
    session = Session(small, Conversation(small), SamplingParams(max_new_tokens=4000, temperature=5, seed=1))
    session._turn(ANN)
    used = len(small.chat_prompt(ANN))
    assert f"{120 - used} tokens, " in capsys.readouterr().err
    assert len(session.conversation.turns) == 1
