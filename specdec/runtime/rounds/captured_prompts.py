"""Captured forwards over prompt chunks, padded to few sizes.

To launch a forward kernel by kernel takes the host as long as the device takes for a thousand tokens (40 ms, 42 layers
on an H200), whatever its length: a short prompt waits for the host alone, and everybody who decodes waits with it. What
comes behind the forward, a first token and the drafter's observation, is little and runs as it is.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch

from specdec.gpu.buckets import next_power_of_two
from specdec.gpu.captures import CaptureStore
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.kvcache.table import Rows
from specdec.models.target import FinalStates
from specdec.runtime.rounds.captured_rounds import Captures, wide_bucket
from specdec.runtime.rounds.round import Chunk, Round

MOST_POSITIONS = 2048
"""Of more, padding included, nothing is captured: what the captured forwards share of memory grows with it."""

NEW_SHAPE, UNCAPTURED = 1024, 8192
"""Positions that a forward counts more where its shape has not been captured yet, so that few are, and the fewest for
which one counts that never will be: the device takes as long for 4096 as the host for launching it, every time."""

NARROWEST, FINE_WIDTH = 16, 64
"""Positions a row: forwards are as wide as the next of 16, 64, 128, 256, ..., 2048. Few positions take as long as one,
since the weights are read all the same."""


class ChunkShape(NamedTuple):
    """All that decides what a forward over prompt chunks computes, but for data: `width` positions of each of `batch`
    rows, behind committed prefixes of which none is longer than `longest`; states: see `Chunk`."""

    batch: int
    width: int
    longest: int
    states: FinalStates = FinalStates.EVERY


class Results:
    """Where captured forwards leave what the drafter and the first draw read: one tensor for all shapes, since what one
    has left is read before the next runs."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}  # [positions, ...]; never replaced: captured forwards write them

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept.values())

    @torch.inference_mode()
    def keep(self, chunk: Chunk) -> Chunk:
        """The same, copied. Made by the first forward, which no capture is made of."""
        distinct = None if chunk.states is FinalStates.EVERY else 1
        return chunk._replace(
            fed=self._copy("fed", chunk.fed),
            committed_len=self._copy("committed_len", chunk.committed_len[:, None])[:, 0],
            hidden=self._copy("hidden", chunk.hidden[:, :distinct]).expand_as(chunk.hidden),
            aux_states=None if chunk.aux_states is None else self._copy("aux", chunk.aux_states),
        )

    def _copy(self, name: str, new: torch.Tensor) -> torch.Tensor:
        batch, width, *rest = new.shape
        if name not in self._kept:
            self._kept[name] = new.new_empty((MOST_POSITIONS, *rest))
        return self._kept[name][: batch * width].view(new.shape).copy_(new)


class ChunkProgram:
    """The forward of one shape: reads `inputs` [2, B], rows and lengths, and leaves `chunk`, at fixed addresses once
    it is captured. Rows of padding have no tokens."""

    def __init__(self, round: Round, shape: ChunkShape, results: Results) -> None:
        self.chunk: Chunk | None = None
        self._round = round
        self._shape = shape
        self._results = results
        self._inputs = torch.zeros((2, shape.batch), dtype=torch.int64, device=round.device)

    def feed(self, rows: IntArray, chunk_len: IntArray) -> None:
        """These chunks are next."""
        inputs = np.zeros((2, self._shape.batch), dtype=np.int64)
        inputs[0] = self._round.cache.table.padding_row
        inputs[:, : len(rows)] = rows, chunk_len
        self._inputs.copy_(upload(inputs, self._inputs.device))

    def __call__(self) -> torch.Tensor:
        rows = Rows(self._inputs[0], self._shape.longest)
        chunk = self._round.read(rows, self._inputs[1], self._shape.width, self._shape.states)
        self.chunk = self._results.keep(chunk)
        return self.chunk.hidden


class ChunkGraphs(Captures):
    """The captured chunks of one engine."""

    what, warning = "prompts", "prompts run without CUDA graphs: %s"

    def __init__(self, round: Round, store: CaptureStore, *, strict: bool) -> None:
        self._results = Results()
        super().__init__(round, store, strict=strict)
        self._programs: dict[Hashable, ChunkProgram] = {}

    @property
    def shared_bytes(self) -> int:
        return self._results.num_bytes

    def read(self, rows: IntArray, chunk_len: IntArray, states: FinalStates) -> Chunk | None:
        """The target reads the next `chunk_len` [B] tokens of `rows` [B]; None: they are too many to be captured.
        states: see `Chunk`."""
        shape = self.bucket(rows, chunk_len)._replace(states=states)
        if shape.batch * shape.width > MOST_POSITIONS:
            self.store.uncaptured[self.what] += 1
            return None
        program = self._programs.get(shape) or ChunkProgram(self.round, shape, self._results)
        program.feed(rows, chunk_len)
        self.run_captured(shape, [program])
        self._programs[shape] = program  # not before: where weights have moved, all programs are forgotten within
        chunk = program.chunk
        assert chunk is not None
        if shape.batch == 1:  # what comes with one prompt comes with others; a size of a batch may not come again
            self.capture_next(shape, [program])
        return chunk.first(len(rows))

    def bucket(self, rows: IntArray, chunk_len: IntArray) -> ChunkShape:
        """The shape under which they are read: padded to the next size there is."""
        table = self.round.cache.table
        longest = int(table.committed_len.host[rows].max())
        if longest or len(rows) > 1:  # the beginning of one prompt has a shape of its own, up to a tenth faster
            longest = min(wide_bucket(longest), table.slots.host.shape[1] - 1)
        return ChunkShape(next_power_of_two(len(rows)), width_bucket(int(chunk_len.max())), longest)

    def size(self, counts: IntArray, longest: int) -> IntArray:
        """Positions that forwards over `counts` chunks of at most `longest` tokens take (`grouping.Size`)."""
        width = width_bucket(longest)
        batches = 1 << np.ceil(np.log2(counts)).astype(np.int64)
        known = [shape.batch for shape in self._programs if isinstance(shape, ChunkShape) and shape.width == width]
        captured = batches * width + NEW_SHAPE * ~np.isin(batches, known)
        return np.where(batches * width <= MOST_POSITIONS, captured, np.maximum(counts * longest, UNCAPTURED))

    def clear(self) -> None:
        super().clear()
        self._programs.clear()

    def forget(self, shape: Hashable) -> None:
        super().forget(shape)
        self._programs.pop(shape, None)


def width_bucket(length: int) -> int:
    """Positions a row of a forward over chunks of at most `length` tokens."""
    width = NARROWEST
    while width < length:
        width *= 4 if width < FINE_WIDTH else 2
    return width
