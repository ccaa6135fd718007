"""One forward of the engine at a time: a group of prefill chunks, or one speculative round of all decoding requests.

    draft -> verify (one target forward) -> sample and match -> observe -> one device-to-host copy -> commit

It owns the tensors that live across rounds (token history by position); the scheduler decides who takes part.
"""

from collections.abc import Sequence

import numpy as np
import torch

from specdec.attention.plan import plan_prefill, plan_verify, runs_kernels
from specdec.attention.tree import DraftTree
from specdec.clock import StageClock
from specdec.config import SpecConfig
from specdec.draft_models.base import DraftBatch, Drafter, Observation
from specdec.kvcache.frozen import target_view
from specdec.kvcache.mirror import IntArray, MirroredArray
from specdec.kvcache.table import RequestTable
from specdec.models.target import TargetModel
from specdec.request import Request, RequestState, TokenLogprob
from specdec.sampling import SamplingBatch, seen_tokens
from specdec.verify import accept


class Runner:
    """Runs target and drafter over one request table. `spec`: the shape of the drafts."""

    def __init__(self, target: TargetModel, drafter: Drafter | None, table: RequestTable, spec: SpecConfig) -> None:
        self.target = target
        self.drafter = drafter
        self.table = table
        self.spec = spec
        self.taps = drafter.taps if drafter is not None else ()
        self.view = target_view(table.allocator)
        self.history = MirroredArray(table.slots.host.shape, table.allocator.device)  # token ids by row and position
        self.clock = StageClock(table.allocator.device)
        if drafter is not None:
            drafter.start(table.max_requests)

    def load_history(self, request: Request) -> None:
        """A request got its row: make its tokens known to drafters and penalties."""
        self.history[request.row, : len(request.tokens)] = np.array(request.tokens, dtype=np.int64)

    @torch.inference_mode()
    def prefill(self, requests: Sequence[Request], chunk_len: IntArray) -> None:
        """Make K/V of the next `chunk_len` [B] tokens of each request; those that are through draw a first token."""
        self.clock.start("prefill")
        rows = _rows(requests)
        done = self.table.committed_len[rows]
        plan = plan_prefill(self.table, rows, chunk_len)
        width = int(chunk_len.max())
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            tokens[i, : chunk_len[i]] = self.history.host[row, done[i] : done[i] + chunk_len[i]]
        fed = self._upload(tokens)
        hidden, taps = self.target.forward(fed, plan, self.view, self.taps)
        self.table.commit(rows, chunk_len)
        self.table.evict(rows)

        through = [r for r in requests if self.table.committed_len[r.row] == r.prefill_target]
        first = [i for i, r in enumerate(requests) if r in through and r.num_output == 0]
        if first:
            last = hidden[self._upload(np.array(first)), self._upload(chunk_len[first] - 1)]
            self._draw_first([requests[i] for i in first], last)
        for request in through:
            if request.state is RequestState.PREFILL:
                request.state = RequestState.DECODE
        if self.drafter is not None:
            path = torch.arange(width, device=hidden.device).expand(len(rows), width)
            self._tell_drafter(rows, done, fed, hidden, taps, path, chunk_len)
        seconds = self.clock.stop()["prefill"] / len(requests)
        for request in requests:
            request.stats.prefill_seconds += seconds

    @torch.inference_mode()
    def decode(self, requests: Sequence[Request]) -> None:
        """One round: every request gains at least one token."""
        self.clock.start("other")
        rows = _rows(requests)
        row_index = self._upload(rows)
        committed = self.table.committed_len[rows]
        history = self.history.tensor[row_index, : int(committed.max()) + 1]  # [B, L]
        history_len = self._upload(committed) + 1
        root = history.gather(1, history_len[:, None] - 1)[:, 0]
        # no request can use more drafts than it has tokens to go, less the bonus
        to_go = max(r.params.max_new_tokens - r.num_output for r in requests)
        num_steps, num_nodes = self.spec.shortened(to_go - 1) if self.drafter is not None else (0, 1)
        sampling = self._sampling(requests).at(history_len, num_steps + 1, self.target.vocab_size)

        self.clock.mark("draft")
        if self.drafter is not None and num_steps > 0:
            batch = DraftBatch(
                table=self.table,
                rows=rows,
                row_index=row_index,
                root=root,
                history=history,
                history_len=history_len,
                num_steps=num_steps,
                topk=self.spec.topk,
                num_nodes=num_nodes,
                sample=sampling.sample,
                log_scores=sampling.log_scores,
            )
            tree = self.drafter.propose(batch)
        else:
            tree = DraftTree.chain(root[:, None])

        self.clock.mark("verify")
        plan = plan_verify(self.table, rows, tree)
        hidden, taps = self.target.forward(tree.tokens, plan, self.view, self.taps)  # [B, N, H]
        logits = self.target.logits(hidden)  # [B, N, V]

        self.clock.mark("other")
        scores = logits
        if sampling.any_penalty:
            scores = sampling.penalised(logits, seen_tokens(history, history_len, logits.shape[-1], tree))
        accepted = accept(tree, sampling.sample(scores, plan.positions + 1), kernels=runs_kernels(self.table))
        # the round's only device-to-host copy
        packed = torch.cat([accepted.length[:, None], accepted.path, accepted.tokens], dim=1).cpu().numpy()
        logprobs = self._logprobs(requests, logits, accepted.path, accepted.tokens)
        length, path, tokens = packed[:, 0], packed[:, 1 : 1 + tree.num_nodes], packed[:, 1 + tree.num_nodes :]
        taken = np.zeros(len(rows), dtype=np.int64)
        for i, request in enumerate(requests):
            emitted = tokens[i, : length[i]].tolist()
            taken[i] = request.append(emitted)
            request.stats.record_round(int(taken[i]), min(int(taken[i]), int(length[i]) - 1), num_steps)
            request.logprobs += logprobs[i][: taken[i]]
            self.history[request.row, committed[i] + 1 : committed[i] + 1 + taken[i]] = tokens[i, : taken[i]]
        self.table.commit(rows, taken, path)
        self.table.evict(rows)
        if self.drafter is not None:
            self._tell_drafter(rows, committed, tree.tokens, hidden, taps, accepted.path[:, : int(taken.max())], taken)
        seconds = self.clock.stop()
        for request in requests:
            request.stats.draft_seconds += seconds["draft"] / len(requests)
            request.stats.verify_seconds += seconds["verify"] / len(requests)
            request.stats.other_seconds += seconds["other"] / len(requests)

    def _tell_drafter(
        self,
        rows: IntArray,
        start: IntArray,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        taps: torch.Tensor | None,
        path: torch.Tensor,
        length: IntArray,
    ) -> None:
        """After a commit of `length` [B] tokens: what the target saw there, and which token comes next."""
        assert self.drafter is not None
        self.drafter.observe(
            Observation(
                table=self.table,
                rows=rows,
                row_index=self._upload(rows),
                start=self._upload(start),
                tokens=tokens,
                hidden=hidden,
                taps=taps,
                path=path,
                length=self._upload(length),
                next_token=self._upload(self.history.host[rows, start + length]),
            )
        )

    def _draw_first(self, requests: Sequence[Request], hidden: torch.Tensor) -> None:
        """The token behind the prompt, from the state at its last token: hidden [B, H]."""
        rows = _rows(requests)
        logits = self.target.logits(hidden)[:, None]  # [B, 1, V]
        length = self._upload(self.table.committed_len[rows])
        sampling = self._sampling(requests)
        scores = logits
        if sampling.any_penalty:
            history = self.history.tensor[self._upload(rows), : int(self.table.committed_len[rows].max())]
            scores = sampling.penalised(logits, seen_tokens(history, length, logits.shape[-1], None))
        drawn = sampling.sample(scores, length[:, None])  # [B, 1]
        tokens = drawn.cpu().numpy()
        logprobs = self._logprobs(requests, logits, torch.zeros_like(drawn), drawn)
        for i, request in enumerate(requests):
            request.logprobs += logprobs[i]
            self.history[request.row, len(request.tokens)] = int(tokens[i, 0])
            request.append(tokens[i].tolist())

    def _sampling(self, requests: Sequence[Request]) -> SamplingBatch:
        return SamplingBatch.of([r.params for r in requests], [r.seed for r in requests], self.table.allocator.device)

    def _logprobs(
        self, requests: Sequence[Request], logits: torch.Tensor, path: torch.Tensor, tokens: torch.Tensor
    ) -> list[list[TokenLogprob]]:
        """Per request, the log-probabilities of tokens [B, N] drawn after nodes path [B, N]; empty if nobody asks."""
        most = max((-1 if r.params.logprobs is None else r.params.logprobs) for r in requests)
        if most < 0:
            return [[] for _ in requests]
        log_p = logits.float().log_softmax(dim=-1)
        log_p = log_p.gather(1, path[:, :, None].expand(-1, -1, log_p.shape[-1]))  # [B, N, V] by step
        chosen = log_p.gather(2, tokens[:, :, None])[:, :, 0].cpu().tolist()
        values, ids = (x.cpu().tolist() for x in log_p.topk(min(most, log_p.shape[-1]), dim=-1))
        ids_by_step = tokens.cpu().tolist()
        result: list[list[TokenLogprob]] = []
        for i, request in enumerate(requests):
            count = request.params.logprobs
            steps = range(0 if count is None else len(chosen[i]))
            result.append(
                [
                    TokenLogprob(
                        ids_by_step[i][s], chosen[i][s], dict(zip(ids[i][s][:count], values[i][s][:count], strict=True))
                    )
                    for s in steps
                ]
            )
        return result

    def _upload(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.table.allocator.device, non_blocking=True)


def _rows(requests: Sequence[Request]) -> IntArray:
    return np.array([r.row for r in requests], dtype=np.int64)
