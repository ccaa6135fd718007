"""Captured rounds: the device's part of a round recorded once for each shape, then replayed without Python.

    1st round of a shape   runs as it is: compiles kernels, warms what libraries set up lazily
    2nd                    is captured, then replayed
    later                  replayed

Everything that differs from round to round is data in tensors that are never replaced: seats, slots, lengths, tokens,
sampling parameters, the drafter's state. Page tables, translations, write locations and views are made inside, from
those, at every replay: nothing made in one round outlives it. A captured round belongs to the view that it was captured
under, and to a live cache; a replay under anything else is an error. When weights have moved, all are captured again.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, NamedTuple

import torch

from specdec.errors import ConfigError, FrozenKVError, first_line
from specdec.rounds.result import RoundShape
from specdec.rounds.round import Round

logger = logging.getLogger(__name__)

Program = Callable[[], torch.Tensor]
Capture = Callable[[Program], tuple[Callable[[], None], torch.Tensor]]
"""Records a program instead of running it -> (what replays it, the tensor that it returns, written anew each time)."""
Between = Callable[[int, torch.Tensor], None]
"""What the host does behind each program of a round but the last: (its number, what it returned)."""

SHORTEST = 1024
"""Tokens: tables are at least this wide, since narrow ones gain nothing."""


def nothing(_number: int, _out: torch.Tensor) -> None:
    """The host has nothing to do within the round."""


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory, since they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, program: Program) -> tuple[Callable[[], None], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # another thread may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = program()
        return graph.replay, out


class Captured(NamedTuple):
    """A round that can be replayed, program by program, each with what it returns; and the view that it was captured
    under. programs: hold what one leaves for the next, so that no other round is given that memory."""

    replays: list[tuple[Callable[[], None], torch.Tensor]]
    programs: Sequence[Program]
    view_key: tuple[object, ...]


class Captures:
    """What one engine has captured of programs of one sort, by shape. strict: what cannot be captured is an error, else
    it runs as it is."""

    what: ClassVar[str]
    warning: ClassVar[str]

    def __init__(self, round: Round, capture: Capture, *, strict: bool) -> None:
        self.round = round
        self._capture = capture
        self._strict = strict
        self._captured: dict[Hashable, Captured | None] = {}  # None: it ran once
        self._generation = round.weights_generation()
        self._refused = False  # the model or the drafter does what a graph cannot hold

    def run_captured(self, shape: Hashable, programs: Sequence[Program], between: Between = nothing) -> torch.Tensor:
        """These programs, or what was captured of those of this shape -> what the last returns."""
        if self._generation != (now := self.round.weights_generation()):
            self._generation = now
            self.clear()
        self.capture_next(shape, programs)
        captured = self._captured.get(shape)
        if captured is None:
            self._captured[shape] = None
            return run_programs(programs, between)
        if captured.view_key != self.round.view.key:
            raise FrozenKVError("a captured round is replayed under another view than its own")
        self.round.cache.allocator.require_unfrozen("a captured round")
        for number, (replay, out) in enumerate(captured.replays):
            replay()
            if number + 1 < len(captured.replays):
                between(number, out)
        return out

    def capture_next(self, shape: Hashable, programs: Sequence[Program]) -> None:
        """Capture at once what has run, so that the next time it is replayed."""
        if shape in self._captured and self._captured[shape] is None and not self._refused:
            self._captured[shape] = self._try(programs)

    def clear(self) -> None:
        """Let go of all that was captured, and of its memory."""
        self._captured.clear()

    def _try(self, programs: Sequence[Program]) -> Captured | None:
        try:
            replays = [self._capture(program) for program in programs]
        except Exception as error:  # of many kinds: whatever the model does that a graph cannot hold
            if self._strict:
                raise ConfigError(
                    f"{self.what} cannot be captured in a CUDA graph ({first_line(error)}); "
                    "use cuda_graphs='auto' or False"
                ) from error
            logger.warning(self.warning, first_line(error))
            self._refused = True
            return None
        return Captured(replays, programs, self.round.view.key)


class RoundGraphs(Captures):
    """The captured rounds of one engine."""

    what, warning = "rounds", "rounds run without CUDA graphs: %s"

    def bucket(self, shape: RoundShape) -> RoundShape:
        """The shape under which a round runs: padded to the next size there is."""
        table = self.round.cache.table
        batch = min(size for size in batch_sizes(table.max_requests) if size >= shape.batch)
        longest = min(length_bucket(shape.longest), table.slots.host.shape[1] - 1)
        return shape._replace(batch=batch, longest=longest)

    def run(self, shape: RoundShape, between: Between = nothing) -> torch.Tensor:
        """One round of the seated rows -> its packed result, which the next round of this shape overwrites."""
        return self.run_captured(shape, self.round.programs(shape), between)


def run_programs(programs: Sequence[Program], between: Between) -> torch.Tensor:
    """A round as it is -> its packed result."""
    for number, program in enumerate(programs[:-1]):
        between(number, program())
    return programs[-1]()


def capture_for(device: torch.device, setting: str | bool) -> Capture | None:
    """What `EngineConfig.cuda_graphs` means on a device. Raises ConfigError when it is True, and there is no GPU."""
    if device.type != "cuda":
        if setting is True:
            raise ConfigError(
                f"cuda_graphs=True needs a CUDA device, and this model is on {device}; use 'auto' or False"
            )
        return None
    return None if setting is False else CudaCapture()


def batch_sizes(most: int) -> list[int]:
    """Numbers of seats that rounds are captured for: 1, 2, 4, 8, then every 8th up to 64, every 32nd behind, `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most + 32, 32)]
    return [size for size in sizes if size < most] + [most]


def length_bucket(length: int, shortest: int = SHORTEST) -> int:
    """The next of 1024, 1536, 2048, 3072, 4096, ... (from a power of two on): at most a half longer than need be."""
    size = shortest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
