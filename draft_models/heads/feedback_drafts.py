"""Drafting by feedback: each draft after the first reads a state that an earlier draft computed.

EAGLE-3 heads and MTP modules draft like this. `FeedbackWorker` drafts in an engine; `chained_rows` drafts from every
place of texts in a few dense forwards without pages, for training and measurement. Both number a row by its token:

    row (k, q)   of module k: token t_{q+1}, at position q and slot q        exists for q >= k
    state        k = 0: `first_state` of the target's h_q         k > 0: the carried state of row (k - 1, q - 1)

So K/V of slot q depend only on tokens up to q + 1, as the prefix cache requires. After a commit of m + 1 tokens all
modules run the same rows. The first new row of module k reads the last old row of module k - 1, so that row is kept for
each request. Depth 0 is the committed row S - 1, whose token is the root. The draft at depth l + 1 is drawn from module
l, or the only module, at the nodes of depth l. Invariant: after `observe`, K/V of [0, S) equal those of a fresh
prefill, as far as windows reach.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from specdec.attention.bridge import ForwardContext
from specdec.attention.draft_attention import ChainAttention
from specdec.attention.draft_block import DraftPlan
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Observation, PromptObservation
from specdec.draft_models.heads.draft_context import DraftContext, DraftTreeBuilder, StoreWorker, continued
from specdec.kvcache.layer_context import LayerContext
from specdec.layers.accepted_path import keep_last


class ModuleRows(NamedTuple):
    """States [B, N, H] that a module computed for rows. carried: read by the next rows, of the next module or of the
    same one. z: read by the head."""

    carried: torch.Tensor
    z: torch.Tensor


class FeedbackModel(Protocol):
    """One module that is applied again for each draft, or several that are chained. windows: of each layer. width: H of
    its states."""

    num_modules: int
    applied_again: bool
    windows: tuple[int | None, ...]
    width: int

    def first_state(self, states: torch.Tensor) -> Any:
        """Target states [B, N, ..] -> the states that rows of module 0 read."""

    def run(
        self, k: int, tokens: torch.Tensor, state: Any, positions: torch.Tensor, context: LayerContext
    ) -> ModuleRows:
        """Run rows of module k: tokens, positions [B, N]."""


class FeedbackWorker(StoreWorker):
    """Modules in one engine. Keeps their K/V and, for each row and module, the state that it computed at the last
    committed position."""

    def __init__(self, drafter: Any, chain: FeedbackModel, binding: Binding) -> None:
        super().__init__(drafter, binding)
        self.chain, table = chain, binding.cache.table
        shape = (chain.num_modules, len(ModuleRows._fields), table.max_requests + 1, chain.width)
        self._last = torch.zeros(shape, dtype=drafter.dtype, device=binding.cache.allocator.device)

    @torch.inference_mode()
    def observe(self, seen: Observation | PromptObservation) -> None:
        """Run every module over the observed tokens [B, N]."""
        chain, plan, made = self.chain, self.plan_of(seen), list[ModuleRows]()
        states, tokens = self.rows_of(seen)
        state = chain.first_state(states)
        for k in range(chain.num_modules):
            if k:
                state = self._states_above(seen, made[-1], k)
                state = state.masked_fill((plan.positions < k)[:, :, None], 0)  # this row does not exist
            context = ForwardContext.from_plan(replace(plan, first_key=k), self.own_view, chain.windows)
            made.append(chain.run(k, tokens, state, plan.positions, context))
        for kept, out in zip(self._last, made, strict=True):
            for part, rows_of in zip(kept, out, strict=True):
                if isinstance(seen, PromptObservation):
                    part[seen.pack.rows] = rows_of[0, seen.pack.last]
                else:
                    self.drafter.ops(keep_last)(part, seen.rows.index, rows_of, seen.length)

    observe_prompts = observe

    def _states_above(self, seen: Observation | PromptObservation, out: ModuleRows, k: int) -> torch.Tensor:
        """The states [B, N, H] that module k reads: carried by the previous row of module k - 1, in `out` or, for a
        first row, in the last observation."""
        if isinstance(seen, PromptObservation):
            pack, rows = seen.pack, seen.pack.rows
            first = (pack.positions == pack.start[pack.run_of])[None]  # [B, N]: the first observed token of its request
            before = rows[pack.run_of][None]  # [B, N]: row of each token
        else:
            rows = seen.rows.index
            first = (torch.arange(seen.path.shape[1], device=rows.device) == 0).expand_as(seen.path)
            before = rows[:, None].expand_as(seen.path)
        carried, above = ModuleRows(*self._last[k - 1]).carried[before], out.carried.roll(1, dims=1)
        return torch.where(first[:, :, None], carried, above)

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Draft level by level. A level runs the single module, or each of several modules that has yet to draft. Level
        l needs the states of level l - 1, so num_steps - 1 forwards of topk nodes run."""
        drafter, topk, levels = self.drafter, batch.topk, batch.num_steps
        chain, pos = self.chain, batch.positions()  # [levels + 1, B], S first
        count = chain.num_modules
        node_pos = pos[:, :, None].expand(-1, -1, topk).contiguous()  # [levels + 1, B, K]
        table, first_keys = self.binding.cache.table, None if chain.applied_again else range(count)
        draft = DraftPlan(table, batch.rows, pos[: levels - 1], topk, chain.windows, first_keys=first_keys)
        context = DraftContext(self, draft) if levels > 1 else None
        outs = {k: ModuleRows(*kept[:, batch.rows.index, None]) for k, kept in enumerate(self._last)}  # [B, 1, H]
        builder = DraftTreeBuilder(batch, self.binding.backend)
        for level in range(levels):
            logits = drafter.logits(min(level, count - 1), outs[min(level, count - 1)])
            beam, origin = builder.add_level(logits, node_pos[level + 1, :, : logits.shape[1]])  # [B, K]
            if context is None or level + 1 == levels:
                break
            context.block.enter_level(origin if level else None)
            new = {}
            for k in [0] if chain.applied_again else range(level + 1, count):
                state = continued(outs[k if chain.applied_again else k - 1].carried, origin)
                new[k] = chain.run(k, beam, state, node_pos[level], context)
            outs = new
        return builder.select()


def chained_rows(
    chain: FeedbackModel,
    tokens: torch.Tensor,
    states: torch.Tensor,
    pos: torch.Tensor,
    num_steps: int,
    places: torch.Tensor | None = None,
    *,
    in_float32: bool = False,
) -> Iterator[ModuleRows]:
    """Rows [B, T] from which draft 1, 2, ... is drawn, at each place of tokens and pos [B, T]:

    place p, draft j + 1     token t_{p+1+j}, the text's own; predicts t_{p+2+j}
    state                    j = 0: from the target's at row p      j > 0: the state that row (p, j - 1) passes on

    A module that is applied again runs for each draft; a place's rows see keys of true states up to p and their own
    keys, as in the draft block. Several modules run over the whole text one after another, since their rows depend only
    on the tokens. Several texts may be packed into a row; position 0 begins a text. states: of the target, [B, T, ..],
    as the drafter reads them. places [P]: only these places are used. in_float32: see `ChainAttention`.
    """
    again, state = chain.applied_again, chain.first_state(states)
    context = ChainAttention(chain.windows, pos, in_float32=in_float32)
    at: slice | torch.Tensor = slice(None) if places is None else places
    here: slice | torch.Tensor = slice(None) if again else at
    for step in range(num_steps):
        context.step = step if again else 0
        row_tokens, row_pos = tokens.roll(-1 - step, 1), pos + step
        if again and step:
            row_tokens, row_pos = row_tokens[:, at], row_pos[:, at]
        out = chain.run(0 if again else step, row_tokens, state, row_pos, context)
        if again and not step:
            context.rows = places
            out = ModuleRows(*(part[:, at] for part in out))
        yield ModuleRows(*(part[:, here] for part in out))
        state = out.carried
