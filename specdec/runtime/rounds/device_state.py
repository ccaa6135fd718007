"""The device state that rounds and prompt chunks read and change.

NOTICE: captured programs replay the launches of this file, not its Python. Do not add here: a request, a text or a
policy; a branch on a model family or a kind of drafter; the state of one feature (a class of its own holds it, as
`SeenBits` and `MaskBuffer` do); a host value that a program uses, unless it is in `RoundShape`; a tensor that is
replaced between rounds.

State is indexed by row of the request table: slots, committed lengths, tokens, sampling parameters, the drafter's
state. A round (`decode_round.py`) is a program over this state; the host launches programs and settles their results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from specdec.attention.backend import Backend
from specdec.attention.trees.tree import DraftTree
from specdec.config import MAX_FORCED_TOKENS, EngineConfig, SpecConfig
from specdec.draft_models.base import Binding, Drafter, Observation
from specdec.draft_models.finished_texts import FinishedTexts
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.gpu.stage_clock import StageClock
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import own_view
from specdec.kvcache.table import Rows
from specdec.models.target import StatesNeeded, TargetModel
from specdec.modules.weight_watch import watched_weights
from specdec.runtime.rounds.drafter_lag import DrafterLag, lag_allowed
from specdec.runtime.rounds.opening import Opening
from specdec.runtime.rounds.result import RoundShape
from specdec.sampling.kernel_sampler import KernelSampler
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler
from specdec.sampling.sampling_table import SamplingTable
from specdec.sampling.token_bitmaps import MaskBuffer, SeenBits

T = TypeVar("T")


def runs_on_kernels(backend: Backend, device: torch.device) -> bool:
    """Do kernels open, draw and close a round? Not in Triton's interpreter, where they are slow."""
    return backend.name == "triton" and device.type == "cuda"


class WeightVersions:
    """Values that change when the weights change: see `Weights`."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._weights = watched_weights(target, drafter)
        self._found: dict[object, Any] | None = None  # results of look-ups in the current step; None: between steps

    def generation(self) -> int:
        """A number that changes when weights are re-pointed to other storage."""
        return sum(self._once(weights, weights.generation) for weights in self._weights)

    def version(self) -> tuple[object, ...]:
        """A value that changes when weights are re-pointed or updated in place."""
        return self._once("version", lambda: (self.generation(), *(weights.updates() for weights in self._weights)))

    def _once(self, name: object, look_up: Callable[[], T]) -> T:
        if self._found is None:
            return look_up()
        if name not in self._found:
            self._found[name] = look_up()
        found: T = self._found[name]
        return found

    @contextmanager
    def cached_lookups(self) -> Iterator[None]:
        """Within the block, look the weights up only once: a look-up costs the host 0.3 us per tensor, and more if they
        have left its caches. The drafter's are looked up when the block begins; the target looks at its own in each
        forward."""
        self._found = {}
        try:
            for weights in self._weights[1:]:
                self._once(weights, weights.generation)
            yield
        finally:
            self._found = None


class DeviceState:
    """Target and drafter over one KV cache, and the state of both. `tokens`: token ids by row and position.

    If drafts are adaptive, the drafter may lag: it reads the tokens of rounds without drafts later (`drafter_lag.py`).
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: KVCache,
        backend: Backend,
        spec: SpecConfig,
        config: EngineConfig,
    ) -> None:
        self.target = target
        self.cache = cache
        self.backend = backend
        self.device = cache.allocator.device
        self.aux_layers = drafter.aux_layers if drafter is not None else ()
        self._drafter_reads_every_state = drafter is not None and drafter.reads_every_state
        store = cache.add_store(target.stored_layout, target.dtype, target.ranks)
        self.view = own_view(cache.allocator, store)
        self.worker = None if drafter is None else drafter.bind(Binding(cache, backend, store, config.finished_tokens))
        self.has_lookup = drafter is not None and drafter.has_lookup
        self.finished: FinishedTexts | None = getattr(self.worker, "finished", None)
        self.tokens = MirroredArray(cache.table.slots.host.shape, self.device)
        self.on_kernels = runs_on_kernels(backend, self.device)
        self.sampler = KernelSampler if self.on_kernels else ReferenceSampler
        self.sampling = SamplingTable(len(self.tokens.host), self.device)
        self.max_drafts = MirroredArray((len(self.tokens.host),), self.device)  # per row and round
        self.prompt_len = MirroredArray((len(self.tokens.host),), self.device)
        self.forced = MirroredArray((len(self.tokens.host), 1 + MAX_FORCED_TOKENS), self.device)  # number, then tokens
        max_nodes = max(spec.num_nodes, 1 + MAX_FORCED_TOKENS)
        self.masks = MaskBuffer(target.vocab_size, cache.table.max_requests, max_nodes, self.device)
        self.seen_bits = SeenBits(len(self.tokens.host), target.vocab_size, self.device) if self.on_kernels else None
        self.seats = MirroredArray((cache.table.max_requests,), self.device)  # rows of the next round, then padding
        self.clock = StageClock(self.device)
        self.draft_seats = self.seats  # the drafter's seats: padding replaces rows past its last position
        self.lag: DrafterLag | None = None
        self.max_positions = None if drafter is None else drafter.max_positions
        if lag_allowed(drafter, spec.adaptive):
            self.lag = DrafterLag(len(self.tokens.host), target, len(self.aux_layers))
            self.draft_seats = MirroredArray((cache.table.max_requests,), self.device)
        self.weights = WeightVersions(target, drafter)

    def reset(self) -> None:
        """Clear the state of all rows after an interrupted step, and detach all views."""
        if self.worker is not None:
            self.worker.view = None
        for mirrored in self._mirrored():
            mirrored.clear()
        if self.finished is not None:
            self.finished.clear()

    def _mirrored(self) -> list[MirroredArray]:
        salts = [] if self.finished is None else [self.finished.salt_of_row]
        own = (self.tokens, self.max_drafts, self.prompt_len, self.forced, self.seats)
        drafting = [] if self.draft_seats is self.seats else [self.draft_seats]
        return [*own, *drafting, *self.sampling.arrays, *salts]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make this the current device, on which Triton launches, and turn autocast off, since K/V have the model's
        dtype."""
        kind = self.device.type
        unchanged = not torch.is_autocast_enabled(kind)
        with (
            torch.cuda.device_of(self.seats.tensor),
            nullcontext() if unchanged else torch.autocast(kind, enabled=False),
        ):
            yield

    def seat(self, rows: IntArray) -> None:
        """Seat these rows for the next round; the other seats hold the padding row."""
        padding = self.cache.table.padding_row
        seats = np.full(self.cache.table.max_requests, padding, dtype=np.int64)
        seats[: len(rows)] = rows
        if (self.seats.host != seats).any():
            self.seats[:] = seats
        if self.lag is None:
            return
        seats[: len(rows)][self.lag.ended[rows]] = padding
        if (self.draft_seats.host != seats).any():
            self.draft_seats[:] = seats

    def flush(self) -> None:
        """Upload all changes of the host's arrays in one copy, and new finished texts in a second one."""
        self.cache.flush(*self._mirrored())
        if self.finished is not None:
            self.finished.flush()

    def states_needed(self, *, scored: bool, ends_prompt: bool) -> StatesNeeded:
        """Which final states chunks need; all of them if fewer would save no layer.

        scored: the chunks' tokens need log-probabilities. ends_prompt: a prompt ends with one of the chunks, so a draw
        or a draft needs its last state.
        """
        if scored or self._drafter_reads_every_state or self.target.narrows_at(self.aux_layers) is None:
            return StatesNeeded.EVERY
        return StatesNeeded.LAST if ends_prompt else StatesNeeded.NONE

    def history(self, rows: Rows) -> torch.Tensor:
        """Tokens by position [B, L], up to the root of the longest row."""
        return self.tokens.tensor[rows.index, : rows.max_committed_len + 1]

    def sampler_of(self, rows: Rows, shape: RoundShape, opened: Opening | None = None) -> ReferenceSampler:
        """The sampler for these rows, with the parameters that the shape allows.

        opened: the round's opening, which has read the parameters; None: read them here.
        """
        return self.sampler(*self.sampling.row_params(rows.index, shape.features, opened and opened.params))

    def edit_inputs(
        self,
        rows: Rows,
        history_len: torch.Tensor,
        shape: RoundShape,
        tree: DraftTree | None,
        allowed: torch.Tensor | None,
    ) -> EditInputs:
        """Inputs of edits of logits: the histories of these rows, `history_len` [B] tokens each, and the drafts of
        `tree` after them."""
        prompt_len = self.prompt_len.tensor[rows.index] if shape.features.counts else None
        seen = self.seen_bits.bits[rows.index] if self.seen_bits is not None and shape.features.penalty else None
        return EditInputs(history_len, tree, lambda: self.history(rows), prompt_len, allowed, seen)

    def logits(self, hidden: torch.Tensor, logprobs: int | None) -> tuple[torch.Tensor, float | None]:
        """Logits, and the softcap that the caller must still apply, or None.

        Drawing kernels apply the softcap as they read, with different rounding. So it is applied here if
        log-probabilities are reported or if bits must not depend on the batch.
        """
        if self.on_kernels and logprobs is None and not self.target.deterministic:
            return self.target.uncapped_logits(hidden)
        return self.target.logits(hidden), None

    def observe(self, seen: Observation) -> None:
        """Show the drafter the target's states at the rows' new tokens, and the token after them."""
        if self.worker is None:
            return
        if self.lag is not None:
            self.lag.read[seen.rows.index] = seen.start + seen.length
        self.worker.observe(seen)

    @torch.inference_mode()
    def read_lag(self, shape: RoundShape, max_tokens: int) -> torch.Tensor:
        """Let the drafter read the lag of each seated row, `max_tokens` at most. Returns the number of tokens [B]."""
        assert self.lag is not None, "this drafter reads every round"
        seats = self.draft_seats.tensor[: shape.batch]
        seen = self.lag.observation(self.cache.table, self.tokens.tensor, seats, shape.max_committed_len, max_tokens)
        self.observe(seen)
        return seen.length
