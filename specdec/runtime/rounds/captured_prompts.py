"""Captured forwards over packed prompts, padded to a few numbers of tokens.

To launch a forward kernel by kernel, however short, the host needs as long as an H200 needs to compute a thousand
tokens (40 ms for 42 layers), and twice as long on a shared host. So an eager forward over a short prompt is bound by
the host, and all decoding requests wait for it. The draw and the drafter's observation after the forward are
small and run eagerly.

A shape is a number of places and a choice of final states. Prefixes, and the division of places among requests, are
data. So an engine captures at most 52 shapes: 23 sizes as a whole and three in parts, each with the states of last
tokens and with no states. Chunks that need every state, for scores of the prompt, are rare and run eagerly; but if a
target or drafter always needs every state, these are the only shapes, 26 in all.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from specdec.gpu.captures import SPARE_POOL, CaptureRule, CaptureStore, Program
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.models.target import StatesNeeded
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.prompt_chunks import Chunk, divide, read_chunk
from specdec.runtime.rounds.prompt_sizes import MIN_LONG_TOKENS, SIZES_IN_PARTS, PartShare, token_buckets

MAX_TOKENS = 8192
"""Largest captured chunks in tokens, padding included: the memory that captured forwards share grows with it. By
default no step reads more."""

TOKENS_PER_RUN = 8
"""A captured forward over T tokens has room for T / TOKENS_PER_RUN requests: the length of its tables."""

MIN_RUNS = 8
"""Minimum number of requests that a captured forward has room for."""


class ChunkShape(NamedTuple):
    """Key of a captured forward over prompts: `tokens` places of at most `runs` requests; needed: see `Chunk`. divided:
    each part is a program."""

    tokens: int
    runs: int
    needed: StatesNeeded
    divided: bool = False

    @property
    def rule(self) -> CaptureRule:
        """The rule for this shape. Each long size has a warning of its own, since smaller sizes may be captured."""
        if self.tokens <= MIN_LONG_TOKENS:
            return CaptureRule("prompts", "prompts", "prompts run without CUDA graphs: %s")
        warning = f"forwards over {self.tokens:,} prompt tokens run without CUDA graphs: %s"
        return CaptureRule("prompts", SPARE_POOL, warning)


class PromptParts(NamedTuple):
    """The parts that read some chunks: time share and program of each. read: returns the result after the last part.
    generation: that of the weights which the programs read (`WeightVersions`)."""

    shares: Sequence[PartShare]
    programs: Sequence[Callable[[], object]]
    read: Callable[[], Chunk]
    generation: int

    def run(self) -> Chunk:
        for program in self.programs:
            program()
        return self.read()


class ChunkProgram:
    """The forward of one shape. It reads rows and lengths from `inputs` [2, R] and leaves its result in `chunk`, at
    fixed addresses if it is captured.

    keep: copies a result to where it is kept; None: it is not captured. Then each layer of a divided forward is a part.
    Padding runs have no tokens.
    """

    def __init__(self, state: DeviceState, shape: ChunkShape, keep: Callable[[Chunk], Chunk] | None = None) -> None:
        self.shares = [PartShare()]
        self._chunk: Chunk | None = None
        self._layer_ends: list[int] = []
        self._reading: Generator[None, None, Chunk] | None = None  # between two parts
        self._state = state
        self._shape = shape
        self._keep = keep
        self._inputs = torch.zeros((2, shape.runs), dtype=torch.int64, device=state.device)

    @torch.inference_mode()
    def load_chunks(self, rows: IntArray, chunk_len: IntArray) -> None:
        """Upload the rows and lengths of the chunks that the next run reads."""
        inputs = np.zeros((2, self._shape.runs), dtype=np.int64)
        inputs[0] = self._state.cache.table.padding_row
        inputs[:, : len(rows)] = rows, chunk_len
        self._inputs.copy_(upload(inputs, self._inputs.device))
        if self._shape.divided:
            needed, captured = self._shape.needed, self._keep is not None
            self._layer_ends, self.shares = divide(self._state, needed, captured=captured)

    @property
    def programs(self) -> list[Program]:
        return [partial(self._run_part, number) for number in range(len(self.shares))]

    def result(self) -> Chunk:
        assert self._chunk is not None, "the forward has not run"
        return self._chunk

    @torch.inference_mode()
    def _run_part(self, number: int) -> torch.Tensor:
        if number == 0:
            (rows, length), shape = self._inputs, self._shape
            self._reading = read_chunk(self._state, rows, length, shape.tokens, shape.needed, self._layer_ends)
        assert self._reading is not None, f"part {number} before the first"
        try:
            next(self._reading)
        except StopIteration as end:
            self._reading, self._chunk = None, end.value if self._keep is None else self._keep(end.value)
        return self._inputs  # a program must return a tensor to keep


def eager_forward(
    state: DeviceState, rows: IntArray, chunk_len: IntArray, needed: StatesNeeded, *, divided: bool = False
) -> PromptParts:
    """A forward that is not captured, as a whole or with each layer as a part."""
    shape = ChunkShape(int(chunk_len.sum()), len(rows), needed, divided)
    program = ChunkProgram(state, shape)
    program.load_chunks(rows, chunk_len)
    return PromptParts(program.shares, program.programs, program.result, state.weights.generation())


class PromptForwards:
    """The forwards over prompts of one engine. store: its captures.

    All captured shapes share the tensors that receive results for the drafter and the first draw, since results are
    read before the next forward runs.
    """

    def __init__(self, state: DeviceState, store: CaptureStore) -> None:
        self._state = state
        self._store = store
        self._results: dict[str, torch.Tensor] = {}  # [places, ...]; never replaced: captured forwards write them
        self._made: dict[ChunkShape, ChunkProgram] = {}  # one per shape: captures read its inputs

    @torch.inference_mode()
    def _copy_chunk(self, chunk: Chunk) -> Chunk:
        """Copy a chunk into the shared tensors and return the copy. The first forward, which is not captured, allocates
        them."""
        return chunk._replace(
            pack=type(chunk.pack)(*(self._copy(f"pack.{name}", x) for name, x in chunk.pack._asdict().items())),
            tokens=self._copy("fed", chunk.tokens),
            hidden=self._copy("hidden", chunk.hidden),
            aux_states=None if chunk.aux_states is None else self._copy("aux", chunk.aux_states),
        )

    def _copy(self, name: str, new: torch.Tensor) -> torch.Tensor:
        count, *rest = new.shape
        if name not in self._results:
            self._results[name] = new.new_empty((MAX_TOKENS + 1, *rest))
            self._store.shared_bytes += self._results[name].nbytes
        return self._results[name][:count].copy_(new)

    def begin_forward(
        self, rows: IntArray, chunk_len: IntArray, needed: StatesNeeded, *, divided: bool = False
    ) -> PromptParts:
        """Prepare a forward over the next `chunk_len` [R] tokens of `rows` [R], with its inputs loaded.

        Not captured: sizes beyond the largest, and (rare) chunks with scores if the target otherwise makes fewer final
        states. divided: in parts, if such a size is captured in parts. needed: see `Chunk`.
        """
        store = self._store
        if not store.captures:
            return eager_forward(self._state, rows, chunk_len, needed, divided=divided)
        size = len(rows), int(chunk_len.sum())
        shape = (self.bucket(*size, needed, divided=True) if divided else None) or self.bucket(*size, needed)
        rare = needed is StatesNeeded.EVERY and self._state.states_needed(scored=False, ends_prompt=True) is not needed
        if shape is None or rare:
            store.uncaptured["prompts"] += 1
            return eager_forward(self._state, rows, chunk_len, needed)
        self._state.weights.generation()  # checked first: another model may have other layers
        program = self._made.get(shape) or ChunkProgram(self._state, shape, self._copy_chunk)
        self._made[shape] = program
        program.load_chunks(rows, chunk_len)
        programs = store.programs_to_run(shape, program.programs, shape.rule)

        def read() -> Chunk:
            chunk = program.result()
            store.capture_next(shape, program.programs, shape.rule)  # now: each of the few shapes occurs again
            return chunk

        return PromptParts(program.shares, programs, read, store.generation)

    def bucket(
        self, num_runs: int, num_tokens: int, needed: StatesNeeded, *, divided: bool = False
    ) -> ChunkShape | None:
        """The captured shape for `num_tokens` tokens, rounded up to the next size."""
        for tokens in SIZES_IN_PARTS if divided else token_buckets(MAX_TOKENS):
            runs = min(max(MIN_RUNS, tokens // TOKENS_PER_RUN), self._state.cache.table.max_requests)
            if num_tokens <= tokens <= MAX_TOKENS and runs >= num_runs:
                return ChunkShape(tokens, runs, needed, divided)
        return None
