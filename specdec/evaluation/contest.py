"""Ways of generating that are timed against each other on the same prompts, and the parity that comes before a figure.

The contestants take turns group by group, so that a slow moment of a shared machine hits all of them; the processor's
time tells how much of it others took. Knows nothing of what is compared: a benchmark makes its contestants, lets them
take turns here, and reports what it likes.
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
    """One way of generating. judged: its outputs must be those of the first contestant, token for token.
    processor_seconds: of `seconds`, those that this process had a core, of all its threads together. laps: `seconds` by
    group. requests: figures of an engine's requests, in the order of outputs; more where a group was interrupted."""

    name: str
    run: Callable[[TokenPrompts], TokenPrompts]
    judged: bool = True
    seconds: float = 0.0
    processor_seconds: float = 0.0
    tokens: int = 0
    outputs: TokenPrompts = field(default_factory=list)
    laps: list[float] = field(default_factory=list)
    requests: list[RequestStats] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


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
    """Every contestant on every group in turn. A group counts when all have done it: an interruption leaves whole ones.

    update: is told how many groups are done.
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


def require_parity(contestants: Sequence[Contestant]) -> None:
    """Raises SpecDecError at the first output of a judged contestant that is not the first contestant's."""
    plain = contestants[0].outputs
    for contestant in contestants[1:]:
        if not contestant.judged:
            continue
        for number, (ours, reference) in enumerate(zip(contestant.outputs, plain, strict=True)):
            at = first_difference(ours, reference)
            if at is not None:
                raise SpecDecError(
                    f"no figures: prompt {number} differs from plain decoding at token {at} with {contestant.name}"
                )


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first token at which two outputs part; None when they are equal."""
    if ours == reference:
        return None
    shorter = min(len(ours), len(reference))
    return next((i for i in range(shorter) if ours[i] != reference[i]), shorter)
