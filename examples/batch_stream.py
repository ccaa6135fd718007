"""Many prompts through one engine, every answer shown while it grows.

    python examples/batch_stream.py                                # held-out word problems on the bundled pair
    python examples/batch_stream.py --batch-size 8 --limit 32 --compare
    python examples/batch_stream.py --prompt "..." --prompt "..." --target DIR --drafter DIR

Open streams share the engine's rounds: reading the next tokens of one advances all of them, and the tokens of the
others are kept until they are read. A stream holds KV from its first token on, so no more are open than fit in a batch.
On a terminal the table is live; elsewhere its last state is printed. `--compare` decodes all prompts with and without
drafts, and fails if an answer differs.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from compare_pair import compare
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from specdec import Engine, EngineConfig, GenerationOutput, RequestStats, SamplingParams, SpecConfig, SpecDecError
from specdec.models.published import BUNDLED_NAMES, HELD_OUT_PROBLEMS
from specdec.runtime.drafts.draft_reports import acceptance_in_words
from specdec.runtime.request_output import StreamDelta
from specdec.text.prompt_files import read_prompts


@dataclass(slots=True)
class Answer:
    """One prompt's row of the table."""

    prompt: str
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    output: GenerationOutput | None = None


@dataclass(slots=True)
class Board:
    """All answers, as the table that rich draws."""

    answers: list[Answer]
    start: float = field(default_factory=time.perf_counter)

    def read(self, row: int, delta: StreamDelta) -> None:
        answer = self.answers[row]
        answer.text += delta.text
        answer.tokens += len(delta.token_ids)
        answer.seconds = time.perf_counter() - self.start
        answer.output = delta.output

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(12, (options.max_width - 50) // 2)  # the columns of figures take 50
        table = Table("prompt", "answer so far")
        for name in ("tokens", "forwards", "acceptance\nlength", "done at"):
            table.add_column(name, justify="right")
        for answer in self.answers:
            stats = answer.output.stats if answer.output else None
            table.add_row(
                Text(answer.prompt[:width]),
                Text(" ".join(answer.text.split())[-width:], style="" if stats else "dim"),
                str(answer.tokens),
                str(stats.rounds) if stats else "",
                f"{stats.acceptance_length:.2f}" if stats and stats.drafted_rounds else "",
                f"{answer.seconds:.2f} s" if stats else "",
            )
        yield table


def stream_all(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> Iterator[tuple[int, StreamDelta]]:
    """(number of the prompt, its next tokens), as they are generated. At most a batch of streams is open at a time."""
    waiting = deque(enumerate(prompts))
    streams: dict[int, Iterator[StreamDelta]] = {}
    while waiting or streams:
        while waiting and len(streams) < engine.config.max_batch_size:
            row, prompt = waiting.popleft()
            streams[row] = engine.stream(prompt, params)
        for row, stream in list(streams.items()):
            delta = next(stream)
            yield row, delta
            if delta.output is not None:
                del streams[row]


def run(args: argparse.Namespace) -> bool:
    """Stream every prompt, with `--compare` also without drafts; False when an answer differs."""
    if args.target in BUNDLED_NAMES:
        transformers_logging.disable_progress_bar()
    console = Console(highlight=False)
    config = EngineConfig(max_batch_size=args.batch_size)
    engine = Engine.from_pretrained(args.target, args.drafter, spec=SpecConfig(args.steps), config=config)
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    texts = args.prompt or [prompt.text for prompt in read_prompts(args.data, args.limit)]
    prompts = [engine.chat_prompt(text) for text in texts]

    board, total = Board([Answer(text) for text in texts]), RequestStats()
    with Live(board, console=console, transient=True) if console.is_terminal else nullcontext():
        for row, delta in stream_all(engine, prompts, params):
            board.read(row, delta)
            if delta.output is not None:
                total.add(delta.output.stats)
    seconds = time.perf_counter() - board.start
    console.print(board)
    console.print(
        f"{len(prompts)} answers, at most {args.batch_size} at a time: {total.output_tokens} tokens in {seconds:.2f} s"
        f" ({total.output_tokens / seconds:.0f} tokens/s), {acceptance_in_words(total, engine.drafts_off)}",
        soft_wrap=True,
    )
    return not args.compare or compare(engine, [prompts], params, console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-gemma4", help="hub id, folder or bundled name")
    parser.add_argument("--drafter", default="tiny-gemma4-mtp", help="the same, or 'ngram'")
    parser.add_argument("--prompt", action="append", help="may be given several times; default: the problems of --data")
    parser.add_argument("--data", type=Path, default=HELD_OUT_PROBLEMS, help="JSONL with 'question' or 'prompt'")
    parser.add_argument("--limit", type=int, default=8, help="only the first N of --data; 0: all")
    parser.add_argument("--batch-size", type=int, default=4, help="answers generated at a time")
    parser.add_argument("--steps", type=int, default=4, help="drafts a round")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--compare", action="store_true", help="with and without drafts: same answers? how fast?")
    args = parser.parse_args()
    try:
        identical = run(args)
    except SpecDecError as error:
        parser.error(str(error))
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
