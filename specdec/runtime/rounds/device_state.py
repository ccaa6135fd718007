"""The device state that rounds and prompt chunks read and change, and the programs of prompt chunks.

NOTICE: captured programs replay this file without Python. Do not add here: a request, a text or a policy; a branch on a
model family or a kind of drafter; the state of one feature (a class of its own holds it, as `SeenBits` and `MaskBuffer`
do); a host value that a program uses, unless it is in `RoundShape`; a tensor that is replaced between rounds.

State is indexed by row of the request table: slots, committed lengths, tokens, sampling parameters, the drafter's
state. A round (`decode_round.py`) is a program over this state; the host launches programs and settles their results.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.attention.backend import Backend
from specdec.attention.plan import KVPlan, Pack, plan_last, plan_packed
from specdec.config import MAX_FORCED_TOKENS
from specdec.draft_models.base import Binding, Drafter, Observation, PromptObservation
from specdec.draft_models.finished_texts import FinishedTexts
from specdec.gpu.mirrored_array import IntArray, MirroredArray, upload
from specdec.gpu.stage_clock import StageClock
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import own_view
from specdec.kvcache.table import Rows
from specdec.models.paused_forward import PausedForward
from specdec.models.target import StatesNeeded, TargetModel
from specdec.runtime.rounds.opening import Opening
from specdec.runtime.rounds.result import RoundShape, pack_round_result
from specdec.runtime.rounds.round_weights import RoundWeights
from specdec.runtime.rounds.unread import MAX_UNREAD, UnreadTokens, reads_late
from specdec.sampling.kernel_sampler import KernelSampler
from specdec.sampling.log_probs import LogProbs
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler
from specdec.sampling.sampling_table import SamplingTable
from specdec.sampling.token_bitmaps import MaskBuffer, RowMasks, SeenBits, write_masks

PREFILL_STAGES = ("prefill",)
"""Stages of a group of prompt chunks that the clock times."""


class Chunk(NamedTuple):
    """Prompt tokens that the target has read, and its final states at them.

    pack: the runs of R requests in T places. tokens [T]: their tokens, 0 on padding. hidden: [T, H] if `needed` is
    EVERY, the last state of each run [R, H] if it is LAST, zeros [R, H] if it is NONE. aux_states: [T, A * H].
    """

    pack: Pack
    tokens: torch.Tensor
    hidden: torch.Tensor
    aux_states: torch.Tensor | None
    needed: StatesNeeded

    @classmethod
    def from_pack(
        cls, pack: Pack, tokens: torch.Tensor, done: tuple[torch.Tensor, torch.Tensor | None], needed: StatesNeeded
    ) -> "Chunk":
        """Make a chunk from the result of the target's forward: hidden and auxiliary states."""
        hidden, aux_states = done
        hidden = hidden[0].expand(len(pack.rows), -1) if needed is StatesNeeded.NONE else hidden[0]
        return cls(pack, tokens, hidden, None if aux_states is None else aux_states[0], needed)

    def last_hidden(self) -> torch.Tensor:
        """Final states at the end of each run [R, H]; zeros if none were made."""
        return self.hidden[self.pack.last] if self.needed is StatesNeeded.EVERY else self.hidden


def runs_on_kernels(backend: Backend, device: torch.device) -> bool:
    """Do kernels open, draw and close a round? Not in Triton's interpreter, where they are slow."""
    return backend.name == "triton" and device.type == "cuda"


class DeviceState:
    """Target and drafter over one KV cache, and the state of both. `tokens`: token ids by row and position.

    lags: if the drafter can, it reads the tokens of rounds without drafts later (`unread.py`). finished_tokens: number
    of tokens of finished requests that the drafter may propose from.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: KVCache,
        backend: Backend,
        *,
        lags: bool = False,
        finished_tokens: int = 0,
    ) -> None:
        self.target = target
        self.cache = cache
        self.backend = backend
        self.device = cache.allocator.device
        self.aux_layers = drafter.aux_layers if drafter is not None else ()
        # a drafter that does not inherit our base class may lack this attribute
        self._drafter_reads_every_state = drafter is not None and getattr(drafter, "reads_every_state", True)
        store = cache.add_store(target.stored_layout, target.dtype, target.ranks)
        self.view = own_view(cache.allocator, store)
        self.worker = None if drafter is None else drafter.bind(Binding(cache, backend, store, finished_tokens))
        self.has_lookup: bool = getattr(drafter, "has_lookup", False)
        self.finished: FinishedTexts | None = getattr(self.worker, "finished", None)
        self.tokens = MirroredArray(cache.table.slots.host.shape, self.device)
        self.on_kernels = runs_on_kernels(backend, self.device)
        self.sampler = KernelSampler if self.on_kernels else ReferenceSampler
        self.sampling = SamplingTable(len(self.tokens.host), self.device)
        self.max_drafts = MirroredArray((len(self.tokens.host),), self.device)  # per row and round
        self.prompt_len = MirroredArray((len(self.tokens.host),), self.device)
        self.forced = MirroredArray((len(self.tokens.host), 1 + MAX_FORCED_TOKENS), self.device)  # number, then tokens
        self.masks = MaskBuffer(target.vocab_size, cache.table.max_requests, self.device)
        self.seen_bits = SeenBits(len(self.tokens.host), target.vocab_size, self.device) if self.on_kernels else None
        self.seats = MirroredArray((cache.table.max_requests,), self.device)  # rows of the next round, then padding
        self.clock = StageClock(self.device)
        self.draft_seats = self.seats  # the drafter's seats: padding replaces rows past its last position
        self.unread: UnreadTokens | None = None
        self.max_positions: int | None = getattr(drafter, "max_positions", None)
        if reads_late(drafter, lags):
            width = target.hidden_size * max(1, len(self.aux_layers))
            self.unread = UnreadTokens(len(self.tokens.host), width, target.dtype, self.device)
            self.draft_seats = MirroredArray((cache.table.max_requests,), self.device)
        self.weights = RoundWeights(target, drafter)

    def reset(self) -> None:
        """Clear the state of all rows after an interrupted step, and detach all views."""
        if self.worker is not None:
            self.worker.view = None
        if self.unread is not None:
            self.unread.clear_rows(slice(None))
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
        if self.unread is None:
            return
        seats[: len(rows)][self.unread.ended[rows]] = padding
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

    @torch.inference_mode()
    def read(self, rows: torch.Tensor, length: torch.Tensor, num_places: int, needed: StatesNeeded) -> Chunk:
        """Run the target over the next `length` [R] tokens of rows [R], at most `num_places` together.

        Makes their K/V and the final states that `needed` names. Layers that are needed for neither do not run.
        """
        pack, tokens, plan, fewer = self._prepare_reading(rows, length, num_places, needed)
        done = self.target.forward(tokens[None], plan, self.view, self.aux_layers, **fewer)
        return Chunk.from_pack(pack, tokens, done, needed)

    @torch.inference_mode()
    def begin_reading(
        self, rows: torch.Tensor, length: torch.Tensor, num_places: int, needed: StatesNeeded
    ) -> PausedForward[Chunk]:
        """Begin the forward of `read`, stopped before its first layer. Requires a target that can pause."""
        pack, tokens, plan, fewer = self._prepare_reading(rows, length, num_places, needed)
        paused = self.target.begin(tokens[None], plan, self.view, self.aux_layers, **fewer)
        return PausedForward(paused.advance, lambda: Chunk.from_pack(pack, tokens, paused.finish(), needed))

    def _prepare_reading(
        self, rows: torch.Tensor, length: torch.Tensor, num_places: int, needed: StatesNeeded
    ) -> tuple[Pack, torch.Tensor, KVPlan, dict[str, Any]]:
        table = self.cache.table
        pack = Pack.from_lengths(rows, table.committed_len.tensor[rows], length, num_places)
        plan = plan_packed(self.backend, table, pack)
        last_column = self.tokens.tensor.shape[1] - 1
        tokens = self.tokens.tensor[rows[pack.run_of], pack.positions.clamp(max=last_column)]  # [T]
        tokens = tokens.masked_fill(~pack.exists, 0)
        fewer: dict[str, Any] = {}
        if needed is StatesNeeded.LAST:
            fewer = {"last_plan": plan_last(self.backend, table, pack)}
        elif needed is StatesNeeded.NONE:
            fewer = {"kv_only": True}
        return pack, tokens, plan, fewer

    @torch.inference_mode()
    def prefill(
        self,
        chunk: Chunk,
        through: IntArray,
        max_prompt_len: int,
        shape: RoundShape,
        allowed: RowMasks | None,
        earlier: torch.Tensor | None = None,
        *,
        first_position: int = 0,
    ) -> torch.Tensor:
        """Draw the first token after the chunks with indices `through` [B], which end their prompts, and show all
        chunks to the drafter. Returns the packed result, like that of a round of one node for B rows.

        max_prompt_len: tokens of the longest of these prompts. allowed: masks of the requests with a grammar. earlier:
        device nanoseconds of parts that ran in earlier steps. first_position: the first position that was read. Drawn
        tokens are written to `tokens`, so a round may follow. The host commits the chunks after the launch; the drafter
        observes them as committed.
        """
        pack, last_hidden = chunk.pack, chunk.last_hidden()
        first, scores = pack.rows.new_zeros((0, 1)), None
        if len(through):
            chosen = upload(through, self.device)
            logits, softcap = self.logits(last_hidden[chosen][:, None], shape.logprobs)  # [B, 1, V]
            drawing = Rows(pack.rows[chosen], max_prompt_len)
            history_len = (pack.start + pack.length)[chosen]
            bits = None
            if allowed is not None:
                bits = chosen.new_empty((len(through), 1, self.masks.num_words), dtype=torch.int32)
                write_masks(bits, allowed)
            sampler = self.sampler_of(drawing, history_len, shape)
            first = sampler.draw_after(None, bits, logits, history_len[:, None], softcap)  # [B, 1]
            self.tokens.tensor[drawing.index, history_len] = first[:, 0]
            if self.seen_bits is not None and shape.features.penalty:
                self.seen_bits.add(drawing.index, first, torch.ones_like(first[:, 0]))
            scores = None if shape.logprobs is None else LogProbs.from_logits(logits, first, shape.logprobs)
        self._observe_prompts(chunk, last_hidden, first_position)
        one_node = torch.cat([torch.ones_like(first), torch.zeros_like(first), first], dim=1)
        stamps = self.clock.stop()
        if earlier is not None:
            stamps = torch.stack([stamps[0] - earlier, stamps[1]])
        return pack_round_result(one_node, scores, stamps)

    def _observe_prompts(self, chunk: Chunk, last_hidden: torch.Tensor, first_position: int) -> None:
        """Show the drafter the chunks and the target's states, unless all are after the drafter's last position."""
        if self.worker is None:
            return
        pack = chunk.pack
        if self.unread is not None:
            self.unread.read[pack.rows] = pack.start + pack.length
        if self.max_positions is not None and first_position >= self.max_positions:
            return
        column = (pack.positions + 1).clamp(max=self.tokens.tensor.shape[1] - 1)
        seen = PromptObservation(
            pack=pack,
            tokens=chunk.tokens,
            following=self.tokens.tensor[pack.rows[pack.run_of], column],
            hidden=chunk.hidden if chunk.needed is StatesNeeded.EVERY else None,
            last_hidden=last_hidden,
            aux_states=chunk.aux_states,
        )
        self.worker.observe_prompts(seen)

    def history(self, rows: Rows) -> torch.Tensor:
        """Tokens by position [B, L], up to the root of the longest row."""
        return self.tokens.tensor[rows.index, : rows.max_committed_len + 1]

    def sampler_of(
        self, rows: Rows, history_len: torch.Tensor, shape: RoundShape, opened: Opening | None = None
    ) -> ReferenceSampler:
        """The sampler for these rows of `history_len` [B] tokens, with the parameters that the shape allows.

        opened: the round's opening, which has read the parameters; None: read them here.
        """
        prompt_len = self.prompt_len.tensor[rows.index] if shape.features.counts else None
        seen = self.seen_bits.select_rows(rows.index) if self.seen_bits is not None and shape.features.penalty else None
        return self.sampler(
            *self.sampling.row_params(rows.index, shape.features, opened and opened.params),
            inputs=EditInputs(history_len, None, lambda: self.history(rows), prompt_len, None, seen),
        )

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
        if self.unread is not None:
            self.unread.read[seen.rows.index] = seen.start + seen.length
        self.worker.observe(seen)

    def keep_unread(
        self,
        rows: Rows,
        start: torch.Tensor,
        hidden: torch.Tensor,
        aux_states: torch.Tensor | None,
        path: torch.Tensor,
    ) -> None:
        """Keep the states [B, N, H] of a round that the drafter does not read now: nodes of `path` [B, D], committed
        from `start` [B] on. States of rejected nodes are stored too; later rounds overwrite them before they are read.
        """
        assert self.unread is not None, "this drafter reads every round"
        states = hidden if aux_states is None else aux_states
        if (depth := path.shape[1]) == 1:
            self.unread.states[rows.index, start % MAX_UNREAD] = states[:, 0]
            return
        position = start[:, None] + torch.arange(depth, device=self.device)  # [B, D]
        on_path = states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))
        self.unread.states[rows.index[:, None], position % MAX_UNREAD] = on_path

    @torch.inference_mode()
    def catch_up(self, shape: RoundShape, max_tokens: int) -> torch.Tensor:
        """Let the drafter read at most `max_tokens` unread tokens of each seated row. Returns the number of tokens
        [B]."""
        assert self.unread is not None, "this drafter reads every round"
        table, index = self.cache.table, self.draft_seats.tensor[: shape.batch]
        committed = table.committed_len.tensor[index]
        start = self.unread.read[index]
        length = (committed - start).clamp(min=0)
        has_unread = length > 0
        start = torch.where(has_unread, start, 0)
        steps = torch.arange(max_tokens, device=self.device)
        position = start[:, None] + steps  # [B, most]
        states = self.unread.states[index[:, None], position % MAX_UNREAD]
        tokens = self.tokens.tensor[index[:, None], position.clamp(max=self.tokens.tensor.shape[1] - 1)]
        seen = Observation(
            rows=Rows(
                torch.where(has_unread, index, table.padding_row), shape.max_committed_len
            ),  # other rows keep their state
            start=start,
            tokens=tokens,
            hidden=states,
            aux_states=states if self.aux_layers else None,
            path=steps.expand_as(tokens),
            length=length,
            next_token=self.tokens.tensor[index, committed],
        )
        self.observe(seen)
        return length
