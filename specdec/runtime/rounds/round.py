"""The device's part: a group of prompt chunks, or one speculative round of all seated requests.

    draft -> verify (one target forward) -> sample and match -> commit -> observe -> one packed result

What a round reads and changes lies on the device, by row of the request table: slots, committed lengths, tokens,
sampling parameters, the drafter's state. `decode` is a program over that: nothing in it comes from the host but a
`RoundShape`, and nothing goes back but what it returns. So it can be captured once a shape and replayed (`launch.py`);
the host settles what came out afterwards (`settling.py`). It knows no request.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.backend import Backend
from specdec.attention.plan import KVPlan, Located, plan_chunk, plan_verify
from specdec.attention.trees.forced_tokens import graft, without_blanks
from specdec.attention.trees.tree import DraftTree
from specdec.config import MAX_FORCED_TOKENS
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Observation
from specdec.gpu.mirrored_array import IntArray, MirroredArray, upload
from specdec.gpu.stage_clock import StageClock
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import own_view
from specdec.kvcache.table import Rows
from specdec.models.target import TargetModel, TargetOutput
from specdec.models.watched_weights import watched_weights
from specdec.runtime.rounds.closing import closing, reference_closing
from specdec.runtime.rounds.opening import Opening, opening, reference_opening
from specdec.runtime.rounds.result import Packed, RoundShape, pack
from specdec.sampling.first_level import Draws, FirstLevel
from specdec.sampling.grammar_masks import MaskBuffer, RowMasks, write_masks
from specdec.sampling.kernel_sampling import KernelSampling
from specdec.sampling.log_probs import LogProbs
from specdec.sampling.sampling_table import Past, SamplingBatch, SamplingTable, Uses
from specdec.sampling.seen_bits import SeenBits

PREFILL_STAGES, DECODE_STAGES = ("prefill",), ("other", "draft", "verify", "other")
"""What the clocks of the two programs time."""


class Drafted(NamedTuple):
    """What a round has drafted, and from what. located: of the nodes that were asked for. most [B]: longest path that
    each request may accept."""

    rows: Rows
    opened: Opening
    located: Located
    sampling: SamplingBatch
    tree: DraftTree
    most: torch.Tensor


class Chunk(NamedTuple):
    """What the target has read of prompts: the next `length` [B] tokens `fed` [B, N] of each row, 0 behind them, where
    `committed_len` [B] were before."""

    rows: Rows
    length: torch.Tensor
    committed_len: torch.Tensor
    fed: torch.Tensor
    out: TargetOutput

    def first(self, count: int) -> "Chunk":
        """Of the first `count` rows only."""
        hidden, aux_states = self.out
        out = TargetOutput(hidden[:count], None if aux_states is None else aux_states[:count])
        rows = Rows(self.rows.index[:count], self.rows.longest)
        return Chunk(rows, self.length[:count], self.committed_len[:count], self.fed[:count], out)


class Verified(NamedTuple):
    """What the target made of it. fed: the tree with a token at every node."""

    fed: DraftTree
    plan: KVPlan
    out: TargetOutput
    logits: torch.Tensor
    softcap: float | None


def runs_on_kernels(backend: Backend, device: torch.device) -> bool:
    """Does a round open, draw and close by kernels? They are slow in the interpreter."""
    return backend.name == "triton" and device.type == "cuda"


class Round:
    """Target and drafter over one KV cache, and the state of both. `tokens`: token ids by row and position."""

    def __init__(self, target: TargetModel, drafter: Drafter | None, cache: KVCache, backend: Backend) -> None:
        self.target = target
        self.cache = cache
        self.backend = backend
        self.device = cache.allocator.device
        self.aux_layers = drafter.aux_layers if drafter is not None else ()
        store = cache.add_store(target.layout, target.dtype)
        self.view = own_view(cache.allocator, store)
        self.worker = None if drafter is None else drafter.bind(Binding(cache, backend, store))
        self.tokens = MirroredArray(cache.table.slots.host.shape, self.device)
        self.on_kernels = runs_on_kernels(backend, self.device)
        self.sampling = SamplingTable(
            len(self.tokens.host), self.device, KernelSampling if self.on_kernels else SamplingBatch
        )
        self.max_drafts = MirroredArray((len(self.tokens.host),), self.device)  # that a row accepts in a round
        self.prompt_len = MirroredArray((len(self.tokens.host),), self.device)
        self.forced = MirroredArray((len(self.tokens.host), 1 + MAX_FORCED_TOKENS), self.device)  # how many, and which
        self.masks = MaskBuffer(target.vocab_size, cache.table.max_requests, self.device)
        self.seen_bits = SeenBits(len(self.tokens.host), target.vocab_size, self.device) if self.on_kernels else None
        self.seats = MirroredArray((cache.table.max_requests,), self.device)  # rows that take part, padding behind
        self.clock = StageClock(self.device)
        self._weights = watched_weights(target, drafter)
        self._versions: tuple[tuple[int, object], ...] | None = (
            None  # as of the step under way, once somebody has asked
        )
        self._in_step = False

    def reset(self) -> None:
        """A step was interrupted: nobody holds a view, and every row is to be taken again."""
        if self.worker is not None:
            self.worker.view = None
        for mirrored in self._mirrored():
            mirrored.clear()

    def _mirrored(self) -> list[MirroredArray]:
        return [self.tokens, *self.sampling.arrays, self.max_drafts, self.prompt_len, self.forced, self.seats]

    def weights_generation(self) -> int:
        """Another number whenever weights of target or drafter have been re-pointed: see `Weights`."""
        return sum(generation for generation, _ in self.weights_version())

    def weights_version(self) -> tuple[tuple[int, object], ...]:
        """Another value whenever weights have been re-pointed or changed in place: see `Weights.version`."""
        if self._versions is not None:
            return self._versions
        versions = tuple(weights.version() for weights in self._weights)
        self._versions = versions if self._in_step else None
        return versions

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Within, weights are looked at once, by whoever asks first: a look takes the host 0.2 us a tensor."""
        self._versions, self._in_step = None, True
        try:
            yield
        finally:
            self._versions, self._in_step = None, False

    def seat(self, rows: IntArray) -> None:
        """These rows take part in the next round; the seats behind them are padding."""
        seats = np.full(self.cache.table.max_requests, self.cache.table.padding_row, dtype=np.int64)
        seats[: len(rows)] = rows
        if (self.seats.host != seats).any():
            self.seats[:] = seats

    def flush(self) -> None:
        """Send what the host has changed anywhere, in one upload."""
        self.cache.flush(*self._mirrored())

    @torch.inference_mode()
    def read(self, rows: Rows, length: torch.Tensor, width: int) -> "Chunk":
        """The target reads the next `length` [B] tokens of each row, at most `width`: makes their K/V."""
        plan = plan_chunk(self.backend, self.cache.table, rows, length, width)
        last_column = self.tokens.tensor.shape[1] - 1
        fed = self.tokens.tensor[rows.index[:, None], plan.positions.clamp(max=last_column)]  # [B, N]
        fed = fed.masked_fill(plan.positions >= (plan.committed_len + length)[:, None], 0)
        out = self.target.forward(fed, plan, self.view, self.aux_layers)
        return Chunk(rows, length, plan.committed_len, fed, out)

    @torch.inference_mode()
    def prefill(
        self,
        chunk: "Chunk",
        through: IntArray,
        uses: Uses,
        logprobs: int | None,
        allowed: RowMasks | None,
    ) -> torch.Tensor:
        """Behind what the target has read: those numbered `through` [T] draw a token, and the drafter observes.

        allowed: what grammars let those of them draw that have one. -> the packed result of T rounds of one node. What
        they draw is in its place in `tokens`, so a round may follow. The host commits the chunks, from its own side,
        once they are launched; the drafter observes them as if it had.
        """
        rows, length, committed, fed, out = chunk
        width = fed.shape[1]
        last_column = self.tokens.tensor.shape[1] - 1
        behind = self.tokens.tensor[rows.index, (committed + length).clamp(max=last_column)]
        first, scores = behind.new_zeros((0, 1)), None
        if len(through):
            chosen = upload(through, self.device)
            logits, softcap = self._logits(out.hidden[chosen, length[chosen] - 1][:, None], logprobs)  # [T, 1, V]
            drawing = Rows(rows.index[chosen], rows.longest + width - 1)
            history_len = (committed + length)[chosen]
            sampling = self.sampling.at(drawing.index, uses)
            bits = None
            if allowed is not None:
                bits = chosen.new_empty((len(through), 1, self.masks.num_words), dtype=torch.int32)
                write_masks(bits, allowed)
            past = self._past(drawing, history_len, None, uses, bits)
            first = sampling.draw(logits, history_len[:, None], past, softcap)  # [T, 1]
            behind = behind.index_copy(0, chosen, first[:, 0])
            self.tokens.tensor[drawing.index, history_len] = first[:, 0]
            if self.seen_bits is not None and uses.penalty:
                self.seen_bits.add(drawing.index, first, torch.ones_like(first[:, 0]))
            scores = None if logprobs is None else LogProbs.of(logits, first, logprobs)
        steps = torch.arange(width, device=self.device).expand(len(fed), width)
        self._observe(rows, committed, fed, out, steps, length, behind)
        one_node = torch.cat([torch.ones_like(first), torch.zeros_like(first), first], dim=1)
        return pack(one_node, scores, self.clock.stop())

    def decode(self, shape: RoundShape) -> torch.Tensor:
        """One round: every seated row gains at least one token. -> the packed result."""
        drafted = self._draft(shape)
        return self._draw(shape, drafted, self._verify(shape, drafted))

    def programs(self, shape: RoundShape) -> "Sequence[Callable[[], torch.Tensor]]":
        """`decode`, cut where the host has something to do. Where grammars have a say these are: draft, which returns
        the tokens and parents of the trees [2, B, N]; verify; and draw, once `allowed` is what these trees allow."""
        if not shape.uses.masked:
            return [lambda: self.decode(shape)]
        parts = GrammarRound(self, shape)
        return [parts.draft, parts.verify, parts.draw]

    @torch.inference_mode()
    def _draft(self, shape: RoundShape) -> "Drafted":
        self.clock.start("other")
        table = self.cache.table
        rows = Rows(self.seats.tensor[: shape.batch], shape.longest)
        state = (table.committed_len.tensor, self.tokens.tensor, self.max_drafts.tensor, self.sampling.cells.tensor)
        opened = (opening if self.on_kernels else reference_opening)(rows.index, *state, depth=shape.num_steps + 1)
        root, history_len = opened.root, opened.history_len
        located = self.backend.locate(table, rows, opened.committed_len, shape.width)
        sampling = self.sampling.batch(rows.index, shape.uses, opened.whole, opened.real)
        sampling = sampling.ahead(history_len, max(shape.num_steps + 1, shape.depth), self.target.vocab_size)

        self.clock.mark("draft")
        draws: Draws = sampling
        if shape.uses.masked:
            draws = FirstLevel(sampling, history_len, self.allowed(shape)[:, 0])
        if self.worker is not None and shape.num_steps > 0:
            batch = DraftBatch(
                rows=rows,
                root=root,
                history=lambda: self._history(rows),
                history_len=history_len,
                num_steps=shape.num_steps,
                topk=shape.topk,
                num_nodes=shape.num_nodes,
                sample=draws.sample,
                best=draws.best,
                params=None if shape.uses.masked else sampling.params,  # or it would draw with no row to mask
                prefix=located.prefix,
                level_pos=opened.level_pos[:-1],
            )
            tree = self.worker.propose(batch)
        else:
            tree = DraftTree.chain(root[:, None])
        most = opened.most
        if shape.forced:
            forced = self.forced.tensor[rows.index]
            tree = graft(tree, forced[:, 1:], forced[:, 0], shape.forced)
            most = torch.maximum(most, 1 + forced[:, 0])
        return Drafted(rows, opened, located, sampling, tree, most)

    @torch.inference_mode()
    def _verify(self, shape: RoundShape, drafted: "Drafted") -> "Verified":
        self.clock.mark("verify")
        rows, opened, tree = drafted.rows, drafted.opened, drafted.tree
        # a drafter may propose less than it was asked for
        located = drafted.located if tree.num_nodes == shape.width else None
        at_hand = {"committed_len": opened.committed_len, "positions": opened.chain_pos if opened.fits(tree) else None}
        plan = plan_verify(self.backend, self.cache.table, rows, tree, located=located, **at_hand)
        fed = without_blanks(tree) if shape.forced else tree
        out = self.target.forward(fed.tokens, plan, self.view, self.aux_layers)  # [B, N, H]
        return Verified(fed, plan, out, *self._logits(out.hidden, shape.logprobs))  # [B, N, V]

    @torch.inference_mode()
    def _draw(self, shape: RoundShape, drafted: "Drafted", verified: "Verified") -> torch.Tensor:
        self.clock.mark("other")
        rows, opened, tree = drafted.rows, drafted.opened, drafted.tree
        fed, plan, out, logits, softcap = verified
        allowed = self.allowed(shape) if shape.uses.masked else None
        past = self._past(rows, opened.history_len, fed, shape.uses, allowed)
        drawn_pos = opened.drawn_pos if opened.fits(tree) else plan.positions + 1
        drawn = drafted.sampling.draw(logits, drawn_pos, past, softcap)
        packed = Packed.empty(shape, len(DECODE_STAGES) + 1, self.device)
        close = closing if self.on_kernels else reference_closing
        closed = close(
            *(tree, drawn, drafted.most, rows, opened.committed_len, self.cache, self.tokens.tensor, packed.rows),
            width=shape.width,
            depth=shape.depth,
        )
        _, nodes, tokens = packed.rows.split([1, shape.width, shape.depth], dim=1)
        path = nodes[:, : shape.depth]  # none is longer
        if self.seen_bits is not None and shape.uses.penalty:
            self.seen_bits.add(rows.index, tokens, closed.length)
        self._observe(rows, opened.committed_len, fed.tokens, out, path, closed.length, closed.bonus)
        if shape.logprobs is None:
            self.clock.stop(packed.stamps)
            return packed.numbers
        on_path = logits.gather(1, path[:, :, None].expand(-1, -1, logits.shape[-1]))  # [B, D, V]
        return pack(packed.rows, LogProbs.of(on_path, tokens, shape.logprobs), self.clock.stop())

    def allowed(self, shape: RoundShape) -> torch.Tensor:
        """[B, N, V / 32] int32, the tokens that grammars allow behind each node: the host writes them each round."""
        return self.masks.at(shape.batch, shape.width)

    def _history(self, rows: Rows) -> torch.Tensor:
        """[B, L] tokens by position, a root behind the longest prefix included."""
        return self.tokens.tensor[rows.index, : rows.longest + 1]

    def _past(
        self,
        rows: Rows,
        history_len: torch.Tensor,
        tree: DraftTree | None,
        uses: Uses,
        allowed: torch.Tensor | None,
    ) -> Past:
        """What draws of these uses depend on."""
        prompt_len = self.prompt_len.tensor[rows.index] if uses.counts else None
        seen = self.seen_bits.of(rows.index) if self.seen_bits is not None and uses.penalty else None
        return Past(lambda: self._history(rows), history_len, tree, prompt_len, allowed, seen)

    def _logits(self, hidden: torch.Tensor, logprobs: int | None) -> tuple[torch.Tensor, float | None]:
        """Logits, and the softcap that they are still to get: kernels that draw cap what they read, in passing, and may
        round another way, so not where bits must not depend on whether a neighbour asks for log-probabilities."""
        if self.on_kernels and logprobs is None and not self.target.deterministic:
            return self.target.uncapped_logits(hidden)
        return self.target.logits(hidden), None

    def _observe(
        self,
        rows: Rows,
        start: torch.Tensor,
        tokens: torch.Tensor,
        out: TargetOutput,
        path: torch.Tensor,
        length: torch.Tensor,
        next_token: torch.Tensor,
    ) -> None:
        """Show the drafter what the target saw at the `length` [B] tokens behind `start` [B], and what comes next."""
        if self.worker is None:
            return
        seen = Observation(
            rows=rows,
            start=start,
            tokens=tokens,
            hidden=out.hidden,
            aux_states=out.aux_states,
            path=path,
            length=length,
            next_token=next_token,
        )
        self.worker.observe(seen)


class GrammarRound:
    """One round in three programs, and what they leave for each other."""

    drafted: Drafted
    verified: Verified

    def __init__(self, round: Round, shape: RoundShape) -> None:
        self.round = round
        self.shape = shape
        round.allowed(shape)  # is there before anything is captured

    @torch.inference_mode()
    def draft(self) -> torch.Tensor:
        self.drafted = self.round._draft(self.shape)
        return torch.stack([self.drafted.tree.tokens, self.drafted.tree.parents])

    def verify(self) -> torch.Tensor:
        self.verified = self.round._verify(self.shape, self.drafted)
        return self.verified.fed.tokens  # small: nobody reads it, and it is kept

    def draw(self) -> torch.Tensor:
        return self.round._draw(self.shape, self.drafted, self.verified)
