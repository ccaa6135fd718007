"""`specdec chat`: a conversation in a terminal, or one answer for each line of standard input.

Answers are written to standard output, notes about them to standard error. An interrupted answer stays in the history
as far as it was written; a turn that cannot be answered is dropped.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from specdec.cli.actions.answer import LEGEND, in_colour
from specdec.cli.actions.settings import load_engine, prepare_output, request_params
from specdec.cli.commands import ChatOptions
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.errors import CapacityError, SpecDecError, counted, shown
from specdec.runtime.drafts.draft_reports import acceptance_in_words
from specdec.runtime.request_output import GenerationOutput
from specdec.text.detokenize import DraftColours

with suppress(ImportError):  # Windows has none
    import readline  # lets the user edit lines, and recall earlier ones with the arrow keys

    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one turn; Python turns it off

PROMPT = "> "
COMMANDS = "/reset forgets what was said, /help lists all, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
HELP = """/help   this list
/reset  forget what was said; the system prompt stays
/exit   leave, as Ctrl-D does
Ctrl-C  end the answer that is being written
A paste of several lines is one turn, sent with Enter."""


def converse(options: ChatOptions) -> None:
    prepare_output(options)
    params = request_params(options)
    with load_engine(options, batch_size=1) as engine:
        Session(engine, Conversation(engine, options.system), params).run(f"{options.target}: {COMMANDS}")


class Interrupts:
    """At a terminal, Ctrl-C raises KeyboardInterrupt at most once in each block of `interruptible`. Further ones are
    ignored, so that they cannot interrupt the handling of the first, and so are those outside of these blocks: the user
    cannot see whether the program is between a question and its answer."""

    _armed = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Use it within the `try` that expects a KeyboardInterrupt: it may be raised as the block begins or ends."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def on_signal(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt


class Turn(NamedTuple):
    """One question and its answer. number: counted from 1; it stays when earlier turns are dropped."""

    number: int
    asked: str
    answer: str


class Conversation:
    """The turns that still fit into the model's context, after an optional system message."""

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        """Raises ConfigError if the chat template cannot render such messages."""
        self._engine = engine
        self._before = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[Turn] = []
        self._num_turns = 0
        self._prompt_ids("Hello")

    def reset(self) -> None:
        self.turns, self._num_turns = [], 0

    def ask(self, text: str, max_new_tokens: int) -> tuple[list[int], list[Turn]]:
        """The prompt of the next turn, and the oldest turns, which are dropped until it and its answer fit.

        Raises CapacityError if the turn alone does not fit.
        """
        most, dropped = self._engine.max_model_len, []
        room = min(max_new_tokens, most // 2)
        while len(ids := self._prompt_ids(text)) + room > most and self.turns:
            dropped.append(self.turns.pop(0))
        if len(ids) >= most:
            raise CapacityError(
                f"these are {len(ids)} tokens, and the model reads and writes {most} at most; say less at a time"
            )
        return ids, dropped

    def add(self, text: str, answer: str) -> None:
        self._num_turns += 1
        self.turns.append(Turn(self._num_turns, text, answer))

    def _prompt_ids(self, text: str) -> list[int]:
        messages: list[dict[str, Any]] = list(self._before)
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.asked}, {"role": "assistant", "content": turn.answer}]
        return self._engine.chat_prompt([*messages, {"role": "user", "content": text}])


def _at_terminal() -> bool:
    """Is standard input a terminal? None: the shell closed it, as with `<&-`."""
    return sys.stdin is not None and sys.stdin.isatty()


class Session:
    """A conversation at a terminal, or with the lines of a pipe."""

    def __init__(self, engine: Engine, conversation: Conversation, params: SamplingParams) -> None:
        self.engine = engine
        self.conversation = conversation
        self.params = params
        self.out = Console(highlight=False, soft_wrap=True)
        self.notes = Console(stderr=True, highlight=False, soft_wrap=True, style="dim")

    def run(self, greeting: str) -> None:
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not text is refused, and the next one read
        interrupts = Interrupts()
        if not _at_terminal():  # Ctrl-C ends the program
            return self._run(interrupts)
        self.notes.print(Text(greeting))
        before = signal.signal(signal.SIGINT, interrupts.on_signal)
        try:
            self._run(interrupts)
        finally:
            signal.signal(signal.SIGINT, before)

    def _run(self, interrupts: Interrupts) -> None:
        for line in self._lines(interrupts):
            if line in ("/exit", "/quit"):
                return
            if line == "/help":
                self.notes.print(Text(HELP))
            elif line == "/reset":
                self.conversation.reset()
                self.notes.print("forgotten")
            elif line.startswith("/") and line[1:].isalpha():
                self.notes.print(Text(f"no command {line}; {COMMANDS}"))
            elif line:
                try:
                    with interrupts.interruptible():
                        self._turn(line)
                except SpecDecError as error:
                    self.notes.print(Text(f"not answered: {error}"))
                except KeyboardInterrupt:  # before the answer began, or when it had ended
                    if not _at_terminal():
                        raise
                    print()

    def _lines(self, interrupts: Interrupts) -> Iterator[str]:
        """Lines from the terminal or a pipe, stripped."""
        if not _at_terminal():
            for number, line in enumerate(sys.stdin or ()):
                yield (line if number else line.removeprefix("\ufeff")).strip()  # the mark that may begin a file
            return
        while True:
            try:
                with interrupts.interruptible():
                    line = input(PROMPT)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            yield line.strip()

    def _turn(self, text: str) -> None:
        ids, dropped = self.conversation.ask(text, self.params.max_new_tokens)
        if dropped:
            which = ", ".join(f"turn {turn.number} ({shown(turn.asked[:40])})" for turn in dropped)
            self.notes.print(Text(f"the conversation outgrew {self.engine.max_model_len} tokens; forgotten: {which}"))
        room = min(self.params.max_new_tokens, self.engine.max_model_len - len(ids))
        began = time.perf_counter()
        output = self._answer(ids, replace(self.params, max_new_tokens=room))
        self.conversation.add(text, output.text)
        self.notes.print(self._summary(output, time.perf_counter() - began))

    def _answer(self, ids: list[int], params: SamplingParams) -> GenerationOutput:
        """Generate an answer and print it. At a terminal, Ctrl-C ends the answer, and more of them change nothing."""
        handle, colours = self.engine.submit(ids, params), DraftColours(self.engine.tokenizer)
        try:
            for delta in handle:
                self._print(colours.read(delta))
        except BaseException as error:
            handle.abort()
            if not (isinstance(error, KeyboardInterrupt) and _at_terminal()):
                raise
            while (rest := handle.read()) is not None:
                self._print(colours.read(rest))
        print(flush=True)
        return handle.output()

    def _print(self, pieces: list[tuple[str, bool]]) -> None:
        self.out.print(in_colour(pieces), end="")

    def _summary(self, output: GenerationOutput, seconds: float) -> Text:
        count, stats = len(output.token_ids), output.stats
        line = Text(
            f"{counted(count, 'token')}, {count / seconds:.1f} tokens/s, "
            f"the first after {stats.first_token_seconds:.2f} s"
        )
        if self.engine.drafter is not None:
            line.append(f"; {acceptance_in_words(stats, self.engine.drafts_off)}" if stats.rounds else "")
            if self.out.color_system is not None:
                line.append(", " if stats.rounds else "; ").append_text(in_colour(LEGEND))
        if output.finish_reason != "stop":
            line.append(f"; {'interrupted' if output.finish_reason == 'abort' else 'cut at its length'}")
        return line
