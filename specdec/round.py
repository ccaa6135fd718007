"""The device's part: a group of prompt chunks, or one speculative round of all decoding requests.

    draft -> verify (one target forward) -> sample and match -> commit -> observe -> one packed device-to-host copy

It reads the request table and the tokens of each row, and changes them on the device only; the host settles what came
out afterwards (`settle.py`). It knows no request: rows, sampling parameters and seeds are its input.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.backend import Backend
from specdec.attention.plan import plan_chunk, plan_verify
from specdec.attention.tree import DraftTree
from specdec.clock import StageClock
from specdec.config import SamplingParams
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Observation
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import own_view
from specdec.kvcache.mirror import IntArray, MirroredArray
from specdec.kvcache.table import Rows
from specdec.models.target import TargetModel, TargetOutput
from specdec.request import TokenLogprob
from specdec.sampling import SamplingBatch, seen_tokens


class Seats(NamedTuple):
    """Who takes part: rows of the request table [B] and, for each, how it samples and with which seed."""

    rows: IntArray
    params: Sequence[SamplingParams]
    seeds: Sequence[int]

    def take(self, chosen: Sequence[int]) -> "Seats":
        return Seats(self.rows[chosen], [self.params[i] for i in chosen], [self.seeds[i] for i in chosen])


class ChunkResult(NamedTuple):
    """After prompt chunks: the first token of those that are through, and its log-probabilities."""

    tokens: IntArray
    logprobs: list[list[TokenLogprob]]
    seconds: dict[str, float]


class RoundResult(NamedTuple):
    """After a round: length [B] of the accepted path [B, N] of nodes; tokens [B, D], the first `length` are emitted.

    num_steps: levels of the draft. seconds: by stage.
    """

    length: IntArray
    path: IntArray
    tokens: IntArray
    logprobs: list[list[TokenLogprob]]
    num_steps: int
    seconds: dict[str, float]


class Round:
    """Runs target and drafter over one KV cache. `tokens`: token ids by row and position."""

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
        self.clock = StageClock(self.device)

    def reset(self) -> None:
        """A step was interrupted: nobody holds a view, and every row's tokens are to be loaded again."""
        if self.worker is not None:
            self.worker.view = None
        self.tokens.clear()

    @torch.inference_mode()
    def prefill(self, seats: Seats, chunk_len: IntArray, through: Sequence[int]) -> ChunkResult:
        """Make K/V of the next `chunk_len` [B] tokens of each row; the seats `through` draw a first token.

        The host commits the chunks afterwards; the drafter observes them as if it had.
        """
        self.clock.start("prefill")
        self.cache.flush(self.tokens)
        rows = self.cache.table.rows(seats.rows)
        length = self._upload(chunk_len)
        width = int(chunk_len.max())
        plan = plan_chunk(self.backend, self.cache.table, rows, length, width)
        last_column = self.tokens.tensor.shape[1] - 1
        fed = self.tokens.tensor[rows.index[:, None], plan.positions.clamp(max=last_column)]  # [B, N]
        fed = fed.masked_fill(plan.positions >= (plan.committed_len + length)[:, None], 0)
        out = self.target.forward(fed, plan, self.view, self.aux_layers)

        behind = self.tokens.tensor[rows.index, (plan.committed_len + length).clamp(max=last_column)]
        drawn, logprobs = np.zeros(0, dtype=np.int64), list[list[TokenLogprob]]()
        if through:
            chosen = self._upload(np.array(through, dtype=np.int64))
            last = out.hidden[chosen, length[chosen] - 1]  # [T, H]
            history = self.tokens.tensor[rows.index[chosen], : rows.longest + width]
            first, logprobs = self._draw_first(
                seats.take(through), last, history, (plan.committed_len + length)[chosen]
            )
            behind = behind.index_copy(0, chosen, first)
            drawn = first.cpu().numpy()
        steps = torch.arange(width, device=self.device).expand(len(seats.rows), width)
        self._observe(rows, plan.committed_len, fed, out, steps, length, behind)
        return ChunkResult(drawn, logprobs, self.clock.stop())

    @torch.inference_mode()
    def decode(self, seats: Seats, num_steps: int, topk: int, num_nodes: int) -> RoundResult:
        """One round: every row gains at least one token. `num_nodes`: verify width, the root included."""
        self.clock.start("other")
        self.cache.flush(self.tokens)
        table = self.cache.table
        rows = table.rows(seats.rows)
        committed = table.committed_len.tensor[rows.index]  # [B], a copy: S before the commit
        history = self.tokens.tensor[rows.index, : rows.longest + 1]  # [B, L]
        history_len = committed + 1
        root = history.gather(1, committed[:, None])[:, 0]
        sampling = self._sampling(seats).at(history_len, num_steps + 1, self.target.vocab_size)

        self.clock.mark("draft")
        if self.worker is not None and num_steps > 0:
            batch = DraftBatch(
                rows=rows,
                root=root,
                history=history,
                history_len=history_len,
                num_steps=num_steps,
                topk=topk,
                num_nodes=num_nodes,
                sample=sampling.sample,
                log_scores=sampling.log_scores,
            )
            tree = self.worker.propose(batch)
        else:
            tree = DraftTree.chain(root[:, None])

        self.clock.mark("verify")
        plan = plan_verify(self.backend, table, rows, tree)
        out = self.target.forward(tree.tokens, plan, self.view, self.aux_layers)  # [B, N, H]
        logits = self.target.logits(out.hidden)  # [B, N, V]

        self.clock.mark("other")
        scores = logits
        if sampling.any_penalty:
            scores = sampling.penalised(logits, seen_tokens(history, history_len, logits.shape[-1], tree))
        accepted = self.backend.accept(tree, sampling.sample(scores, plan.positions + 1))
        depth = min(tree.num_nodes, num_steps + 1)  # no path is longer
        path, tokens = accepted.path[:, :depth], accepted.tokens[:, :depth]
        self.cache.commit_on_device(rows, accepted.length, accepted.path)
        self._append(rows, committed, tokens, accepted.length)
        bonus = tokens.gather(1, accepted.length[:, None] - 1)[:, 0]
        self._observe(rows, committed, tree.tokens, out, path, accepted.length, bonus)
        # the round's only device-to-host copy, unless somebody asks for log-probabilities
        packed = torch.cat([accepted.length[:, None], accepted.path, tokens], dim=1).cpu().numpy()
        length, nodes, emitted = np.split(packed, (1, 1 + tree.num_nodes), axis=1)
        logprobs = self._logprobs(seats, logits, path, tokens)
        return RoundResult(length[:, 0], nodes, emitted, logprobs, num_steps, self.clock.stop())

    def _append(self, rows: Rows, committed: torch.Tensor, tokens: torch.Tensor, length: torch.Tensor) -> None:
        """Write the emitted tokens behind the root: tokens [B, D], of which the first `length` [B] count."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        cells = committed[:, None] + 1 + steps
        before = self.tokens.tensor[rows.index[:, None], cells]
        self.tokens.tensor[rows.index[:, None], cells] = torch.where(steps < length[:, None], tokens, before)

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

    def _draw_first(
        self, seats: Seats, hidden: torch.Tensor, history: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, list[list[TokenLogprob]]]:
        """The token [T] behind prompts, `length` [T] tokens of history [T, L], from the states at their ends [T, H]."""
        logits = self.target.logits(hidden)[:, None]  # [T, 1, V]
        sampling = self._sampling(seats)
        scores = logits
        if sampling.any_penalty:
            scores = sampling.penalised(logits, seen_tokens(history, length, logits.shape[-1], None))
        drawn = sampling.sample(scores, length[:, None])  # [T, 1]
        return drawn[:, 0], self._logprobs(seats, logits, torch.zeros_like(drawn), drawn)

    def _sampling(self, seats: Seats) -> SamplingBatch:
        return SamplingBatch.of(seats.params, seats.seeds, self.device)

    def _logprobs(
        self, seats: Seats, logits: torch.Tensor, path: torch.Tensor, tokens: torch.Tensor
    ) -> list[list[TokenLogprob]]:
        """Per row, the log-probabilities of tokens [B, D] drawn after nodes path [B, D]; empty if nobody asks."""
        most = max((-1 if p.logprobs is None else p.logprobs) for p in seats.params)
        if most < 0:
            return [[] for _ in seats.params]
        log_p = logits.float().log_softmax(dim=-1)
        log_p = log_p.gather(1, path[:, :, None].expand(-1, -1, log_p.shape[-1]))  # [B, D, V] by step
        chosen = log_p.gather(2, tokens[:, :, None])[:, :, 0].cpu().tolist()
        values, ids = (x.cpu().tolist() for x in log_p.topk(min(most, log_p.shape[-1]), dim=-1))
        drawn = tokens.cpu().tolist()
        result: list[list[TokenLogprob]] = []
        for i, params in enumerate(seats.params):
            count = params.logprobs
            steps = range(0 if count is None else len(chosen[i]))
            alternatives = [dict(zip(ids[i][s][:count], values[i][s][:count], strict=True)) for s in steps]
            result.append([TokenLogprob(drawn[i][s], chosen[i][s], alternatives[s]) for s in steps])
        return result

    def _upload(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
