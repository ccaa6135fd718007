"""One speculative round of the seated rows, as a program on the device.

    draft    the drafter proposes a tree for each row; it reads nothing that the round changes
    verify   one forward of the target over all nodes
    accept   the target's token at every node, the walk down the tree, the commit, the drafter's observation

The host passes only a `RoundShape` and reads only one packed result. So a round can be captured once per shape and
replayed. With grammars it is three programs, and the host computes masks between them.
"""

from collections.abc import Callable, Sequence

import torch

from specdec.attention.plan import plan_verify
from specdec.attention.trees.tree import DraftTree, force_tokens, without_blanks
from specdec.draft_models.base import DraftBatch, Observation
from specdec.kvcache.table import Rows
from specdec.runtime.rounds.closing import VerifiedRound, closing, reference_closing
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.drafter_lag import added_lag
from specdec.runtime.rounds.opening import opening, reference_opening
from specdec.runtime.rounds.result import RoundShape, empty_result, pack_round_result
from specdec.sampling.log_probs import LogProbs
from specdec.sampling.reference_sampler import ReferenceSampler, RootMaskedSampler
from specdec.sampling.token_bitmaps import mark_seen

DECODE_STAGES = ("other", "draft", "verify", "other")
"""Stages of a round that the clock times."""


def decode_programs(state: DeviceState, shape: RoundShape) -> Sequence[Callable[[], torch.Tensor]]:
    """The programs of one round; the last returns its packed result.

    With grammars there are three: draft, verify, accept. Draft returns the trees [2, B, N]: tokens, then parents. The
    host writes masks to `DeviceState.masks`: of the roots (N = 1) before draft, of all nodes before accept.
    """
    if not shape.features.masked:
        return [lambda: DecodeRound(state, shape).run()]  # its tensors are freed when it returns
    state.masks.view(shape.batch, shape.width)  # allocated before the capture
    decode = DecodeRound(state, shape)
    return [decode.draft, decode.verify, decode.accept]


class DecodeRound:
    """One round, with the tensors that its three parts share. Each seated request gains at least one token."""

    def __init__(self, state: DeviceState, shape: RoundShape) -> None:
        self.state = state
        self.shape = shape

    def run(self) -> torch.Tensor:
        self.draft()
        self.verify()
        return self.accept()

    @torch.inference_mode()
    def draft(self) -> torch.Tensor:
        """Propose `self.tree`. Returns its tokens and parents [2, B, N]."""
        state, shape, draft = self.state, self.shape, self.shape.draft
        state.clock.start("other")
        table = state.cache.table
        rows = self.rows = Rows(state.seats.tensor[: shape.batch], shape.max_committed_len)
        # the rows as the drafter reads them; a lookup reads only tokens
        read_seats = (state.seats if draft.by_lookup else state.draft_seats).tensor
        self.read_rows = Rows(read_seats[: shape.batch], shape.max_committed_len)
        tables = (table.committed_len.tensor, state.tokens.tensor, state.max_drafts.tensor, state.sampling.cells.tensor)
        opened = (opening if state.on_kernels else reference_opening)(rows.index, *tables, depth=draft.num_steps + 1)
        self.opened, root, history_len = opened, opened.root, opened.history_len
        self.prefix = state.backend.locate(table, rows, opened.committed_len, shape.width)
        sampler = state.sampler_of(rows, shape, opened)
        depth = max(draft.num_steps + 1, shape.depth)
        self.sampler = sampler = sampler.with_noise(history_len, depth, state.target.vocab_size)

        state.clock.mark("draft")
        draws: ReferenceSampler | RootMaskedSampler = sampler
        if shape.features.masked:
            draws = RootMaskedSampler(sampler, history_len, state.masks.view(shape.batch, 1)[:, 0])
        if state.worker is not None and draft.num_steps > 0:
            batch = DraftBatch(
                rows=self.read_rows,
                root=root,
                read_history=lambda: state.history(rows),
                history_len=history_len,
                num_steps=draft.num_steps,
                topk=draft.topk,
                num_nodes=draft.num_nodes,
                sample=draws.sample,
                best=draws.best,
                params=None if shape.features.masked else sampler.params,  # its own draws could not be masked
                prefix=self.prefix,
                level_pos=opened.level_pos[:-1],
                by_lookup=draft.by_lookup,
            )
            tree = state.worker.propose(batch)
            assert tree.num_nodes <= draft.num_nodes, f"{tree.num_nodes} nodes drafted, {draft.num_nodes=}"
        else:
            tree = DraftTree.chain(root[:, None])
        self.max_path = opened.max_path
        if shape.forced:
            forced = state.forced.tensor[rows.index]
            tree = force_tokens(tree, forced[:, 1:], forced[:, 0], shape.forced)
            self.max_path = torch.maximum(opened.max_path, 1 + forced[:, 0])
        self.tree = tree
        return torch.stack([tree.tokens, tree.parents]) if shape.features.masked else tree.tokens

    @torch.inference_mode()
    def verify(self) -> torch.Tensor:
        """Run the target over all nodes. Sets `self.states` and `self.logits`."""
        state, shape, opened, tree = self.state, self.shape, self.opened, self.tree
        state.clock.mark("verify")
        table = state.cache.table
        if tree.num_nodes != shape.width:  # a drafter may propose fewer nodes than requested
            self.prefix = state.backend.locate(table, self.rows, opened.committed_len, tree.num_nodes)
        positions = opened.chain_pos if opened.fits(tree) else None
        self.plan = plan_verify(state.backend, table, self.rows, tree, prefix=self.prefix, positions=positions)
        self.verify_tree = without_blanks(tree) if shape.forced else tree  # every node gets a valid token
        self.states = state.target.forward(
            self.verify_tree.tokens, self.plan, state.view, state.aux_layers
        )  # [B, N, H]
        self.logits, self.softcap = state.logits(self.states[0], shape.logprobs)  # [B, N, V]
        return self.verify_tree.tokens  # a program must return a tensor to keep: this one is small

    @torch.inference_mode()
    def accept(self) -> torch.Tensor:
        """Draw, walk down the tree, commit, and let the drafter observe. Returns the packed result."""
        state, shape, rows, opened, tree = self.state, self.shape, self.rows, self.opened, self.tree
        state.clock.mark("other")
        allowed = state.masks.view(shape.batch, tree.num_nodes) if shape.features.masked else None
        drawn_pos = opened.drawn_pos if opened.fits(tree) else self.plan.positions + 1
        inputs = state.edit_inputs(rows, opened.history_len, shape, self.verify_tree, allowed)
        drawn = self.sampler.draw(self.logits, drawn_pos, inputs, self.softcap)
        numbers, packed, stamps = empty_result(shape, len(DECODE_STAGES) + 1, state.device)
        verified = VerifiedRound(
            tree, drawn, self.max_path, rows, opened.committed_len, width=shape.width, depth=shape.depth
        )
        close = closing if state.on_kernels else reference_closing
        length, bonus, move = close(verified, state.cache.table, state.tokens.tensor, packed)
        if move is not None:
            state.cache.move(move)
        _, nodes, tokens = packed.split([1, shape.width, shape.depth], dim=1)
        path = nodes[:, : shape.depth]  # no path is longer
        if state.seen_bits is not None and shape.features.penalty:
            mark_seen(state.seen_bits.bits, rows.index, tokens, length)
        if state.lag is not None and added_lag(shape):
            state.lag.keep_states(rows, opened.committed_len, *self.states, path)
        else:
            hidden, aux_states = self.states
            seen = Observation(
                rows=self.read_rows,
                start=opened.committed_len,
                tokens=self.verify_tree.tokens,
                hidden=hidden,
                aux_states=aux_states,
                path=path,
                length=length,
                next_token=bonus,
            )
            state.observe(seen)
        if shape.logprobs is None:
            state.clock.stop(stamps)
            return numbers
        on_path = self.logits.gather(1, path[:, :, None].expand(-1, -1, self.logits.shape[-1]))  # [B, D, V]
        return pack_round_result(packed, LogProbs.from_logits(on_path, tokens, shape.logprobs), state.clock.stop())
