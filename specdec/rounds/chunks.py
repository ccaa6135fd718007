"""Captured forwards over prompt chunks, padded to few sizes.

To launch a forward kernel by kernel takes the host as long as the device takes for a thousand tokens (40 ms, 42 layers
on an H200), whatever its length: a short prompt waits for the host alone, and everybody who decodes waits with it. What
comes behind the forward, a first token and the drafter's observation, is little and runs as it is.
"""

from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.graft import rounded_up
from specdec.kvcache.mirror import IntArray
from specdec.kvcache.table import Rows
from specdec.rounds.graphs import Capture, Captures, length_bucket
from specdec.rounds.round import Chunk, Round

MOST_POSITIONS = 2048
"""Of more, padding included, nothing is captured: what the captured forwards share of memory grows with it."""

NEW_SHAPE, UNCAPTURED = 1024, 8192
"""Positions that a forward counts more where its shape has not been captured yet, so that few are, and the fewest for
which one counts that never will be: the device takes as long for 4096 as the host for launching it, every time."""

NARROWEST = 16


class ChunkShape(NamedTuple):
    """All that decides what a forward over prompt chunks computes, but for data: `width` positions of each of `batch`
    rows, behind committed prefixes of which none is longer than `longest`."""

    batch: int
    width: int
    longest: int


class ChunkProgram:
    """The forward of one shape: reads `inputs` [2, B], rows and lengths, and leaves `chunk`, at fixed addresses once
    it is captured. Rows of padding have no tokens."""

    def __init__(self, round: Round, shape: ChunkShape) -> None:
        self.chunk: Chunk | None = None
        self._round = round
        self._shape = shape
        self._inputs = torch.zeros((2, shape.batch), dtype=torch.int64, device=round.device)

    def feed(self, rows: IntArray, chunk_len: IntArray) -> None:
        """These chunks are next."""
        inputs = np.zeros((2, self._shape.batch), dtype=np.int64)
        inputs[0] = self._round.cache.table.padding_row
        inputs[:, : len(rows)] = rows, chunk_len
        sent = torch.from_numpy(inputs)
        self._inputs.copy_(sent.pin_memory() if self._inputs.is_cuda else sent, non_blocking=True)

    def __call__(self) -> torch.Tensor:
        rows = Rows(self._inputs[0], self._shape.longest)
        self.chunk = self._round.read(rows, self._inputs[1], self._shape.width)
        return self.chunk.out.hidden


class ChunkGraphs(Captures):
    """The captured chunks of one engine."""

    what, warning = "prompts", "prompts run without CUDA graphs: %s"

    def __init__(self, round: Round, capture: Capture, *, strict: bool) -> None:
        super().__init__(round, capture, strict=strict)
        self._programs: dict[ChunkShape, ChunkProgram] = {}

    def read(self, rows: IntArray, chunk_len: IntArray) -> Chunk | None:
        """The target reads the next `chunk_len` [B] tokens of `rows` [B]; None: they are too many to be captured."""
        shape = self.bucket(rows, chunk_len)
        if shape.batch * shape.width > MOST_POSITIONS:
            return None
        program = self._programs.get(shape) or ChunkProgram(self.round, shape)
        program.feed(rows, chunk_len)
        self.run_captured(shape, [program])
        self._programs[shape] = program  # not before: where weights have moved, all programs are forgotten within
        chunk = program.chunk
        assert chunk is not None
        self.capture_next(shape, [program])  # what comes with one prompt comes with others
        return chunk.first(len(rows))

    def bucket(self, rows: IntArray, chunk_len: IntArray) -> ChunkShape:
        """The shape under which they are read: padded to the next size there is."""
        table = self.round.cache.table
        longest = int(table.committed_len.host[rows].max())
        if longest:  # a shape of its own has what begins a prompt, with nothing behind it
            longest = min(length_bucket(longest), table.slots.host.shape[1] - 1)
        return ChunkShape(rounded_up(len(rows)), length_bucket(int(chunk_len.max()), NARROWEST), longest)

    def size(self, counts: IntArray, longest: int) -> IntArray:
        """Positions that forwards over `counts` chunks of at most `longest` tokens take (`grouping.Size`)."""
        width = length_bucket(longest, NARROWEST)
        batches = 1 << np.ceil(np.log2(counts)).astype(np.int64)
        known = [shape.batch for shape in self._programs if shape.width == width]
        captured = batches * width + NEW_SHAPE * ~np.isin(batches, known)
        return np.where(batches * width <= MOST_POSITIONS, captured, np.maximum(counts * longest, UNCAPTURED))

    def clear(self) -> None:
        super().clear()
        self._programs.clear()
