"""Times ways of generating against each other on the same prompts, and requires equal outputs before any figure.

The contestants take turns group by group, so that a slow moment of a shared machine affects all of them; processor time
shows how much of the machine others took. It does not know what is compared: a benchmark makes its contestants, lets
them take turns here, and writes its own report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.errors import SpecDecError
from specdec.runtime.request import RequestStats

TokenPrompts = list[list[int]]
"""Token ids of some prompts, or of the outputs to them."""


@dataclass(slots=True)
class Contestant:
    """One way of generating. processor_seconds: processor time of all threads of this process during `seconds`. laps:
    `seconds` by group. requests: statistics of an engine's requests, those of an interrupted group included."""

    name: str
    run: Callable[[TokenPrompts], TokenPrompts]
    seconds: float = 0.0
    processor_seconds: float = 0.0
    tokens: int = 0
    outputs: TokenPrompts = field(default_factory=list)
    laps: list[float] = field(default_factory=list)
    requests: list[RequestStats] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def finished_requests(self) -> list[RequestStats]:
        """Statistics of the requests whose outputs count, in their order."""
        return self.requests[: len(self.outputs)]


def engine_contestant(name: str, engine: Engine, params: SamplingParams) -> Contestant:
    """An engine that generates with `params`."""
    requests: list[RequestStats] = []

    def run(prompts: TokenPrompts) -> TokenPrompts:
        outputs = engine.generate(prompts, params, progress=False)
        requests.extend(out.stats for out in outputs)
        return [out.token_ids for out in outputs]

    return Contestant(name, run, requests=requests)


def take_turns(
    contestants: Sequence[Contestant], groups: Sequence[TokenPrompts], update: Callable[[int], None] = lambda done: None
) -> None:
    """Run every contestant on every group in turn. A group counts once all have finished it, so an interruption leaves
    whole groups.

    update: called with the number of finished groups.
    """
    for done, group in enumerate(groups, start=1):
        timed: list[tuple[TokenPrompts, float, float]] = []
        for contestant in contestants:
            start, processor = perf_counter(), process_time()
            outputs = contestant.run(group)
            timed.append((outputs, perf_counter() - start, process_time() - processor))
        for contestant, (outputs, seconds, processor_seconds) in zip(contestants, timed, strict=True):
            contestant.seconds += seconds
            contestant.laps.append(seconds)
            contestant.processor_seconds += processor_seconds
            contestant.tokens += sum(len(out) for out in outputs)
            contestant.outputs += outputs
        update(done)


def require_parity(plain: Contestant, other: Contestant) -> None:
    """Raises SpecDecError at the first output that differs from plain decoding."""
    for number, (ours, reference) in enumerate(zip(other.outputs, plain.outputs, strict=True)):
        at = first_difference(ours, reference)
        if at is not None:
            raise SpecDecError(
                f"no figures: prompt {number} differs from plain decoding at token {at} with {other.name}"
            )


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position of the first token that differs; None if the outputs are equal."""
    if ours == reference:
        return None
    shorter = min(len(ours), len(reference))
    return next((i for i in range(shorter) if ours[i] != reference[i]), shorter)
