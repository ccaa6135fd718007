"""Training of EAGLE-3 heads and block drafters: all drafts from all positions of packed rows at once.

    EAGLE-3    Row i of step t is step t of a draft that begins after position i: its token is x_{i+1+t}, its hidden
               state the feedback of step t - 1 (the target's feature at t = 0), its RoPE position i + t. It attends, in
               one softmax, to the step-0 keys of positions up to i and to its own row's keys of steps 1..t, and
               predicts x_{i+2+t}.
    block      A block at a sampled place i has the token there and MASK after it. Its rows see K/V of the true states
               of positions before i in the same document, and their own block (--causal: up to themselves). Row t + 1
               learns the target's distribution of token i + 1 + t.

Invariant: the states equal those of the head run as the drafter runs it (tests/test_parallel_drafts.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from specdec.draft_models.block.block_checkpoint import write_block
from specdec.draft_models.block.block_head import BlockHead, BlockSpec, block_states, spread_layers
from specdec.draft_models.eagle3.checkpoint import write_head
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec, PlainHead
from specdec.draft_models.heads.feedback_drafts import chained_rows
from specdec.errors import ConfigError
from specdec.models.target import TargetModel
from specdec.training.draft_loss import TargetStates, TrainableDrafter
from specdec.training.packed_rows import Document, PackedRows, predicted_rows
from specdec.training.train_settings import TrainSettings


class TrainableEagle3(TrainableDrafter):
    """A head and its target. Row i reads token i + 1 and predicts token i + 2, so `ahead` is 2."""

    module: Eagle3Head
    ahead = 2

    def choose_vocabulary(self, documents: list[Document], size: int) -> None:
        """Draft the `size` most frequent tokens of the answers. If the widths agree, the lm_head starts as the
        target's rows of these tokens."""
        head, weight = self.module, cast(torch.Tensor, self.target.head.weight)
        if size < len(weight):
            counts = np.bincount(np.concatenate([tokens[cut:] for tokens, cut in documents]), minlength=len(weight))
            ids = np.sort(np.argsort(-counts, kind="stable")[:size])
            covered = counts[ids].sum() / counts.sum()
            print(f"draft vocabulary of {len(ids)} tokens covers {covered:.3%} of the answers", flush=True)
            head.target_ids = torch.from_numpy(ids).to(self.target.device)
            weight = weight[head.target_ids]
        if head.lm_head is not None and weight.shape[1] == head.spec.hidden_size:
            head.lm_head.weight.data.copy_(weight)

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        form = PlainHead(self.module, self.target.embed, self.target.head)
        for out in chained_rows(form, batch.ids, known["states"], batch.pos, steps):
            yield out.z

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return PlainHead(self.module, self.target.embed, self.target.head).logits(states)

    def save(self, folder: Path) -> None:
        write_head(folder, self.module, self.target)


BLOCKS = 64
"""Blocks per packed row; the next epoch samples others."""


class TrainableBlock(TrainableDrafter):
    """A head and its target. A packed row stands for the block at its place: it reads the token there, and the block
    drafts from the next token on."""

    module: BlockHead
    ahead = 1
    places: torch.Tensor  # [B, A] of the batch under way

    def learnt_rows(self, batch: PackedRows) -> torch.Tensor:
        begins = predicted_rows(batch, 1, self.ahead)[0]  # blocks begin before a token of an answer
        order = torch.rand(begins.shape, dtype=torch.float32, device=begins.device).masked_fill(~begins, -1.0)
        self.places = order.topk(min(BLOCKS, begins.shape[1]), dim=1).indices.sort(dim=1).values  # [B, A]
        chosen = torch.zeros_like(begins).scatter_(1, self.places, True)
        return chosen & begins

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        """States of each draft step at the places chosen by `learnt_rows`; zeros elsewhere."""
        head, places = self.module, self.places
        assert steps == head.spec.num_drafts, f"{steps=} of a head that drafts {head.spec.num_drafts}"
        states = block_states(head, self.target.embed, *batch[:2], known["states"], places)  # [B, A, K, H]
        into = places[:, :, None].expand(-1, -1, states.shape[-1])
        for step in range(steps):
            empty = states.new_zeros((*batch.ids.shape, states.shape[-1]))
            yield empty.scatter(1, into, states[:, :, head.spec.first_row + step])

    def score(self, states: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.target.head(states.to(self.target.dtype))
        return scores

    def save(self, folder: Path) -> None:
        write_block(folder, self.module, self.target)


def trainable_eagle3(target: TargetModel, settings: TrainSettings) -> TrainableEagle3:
    """A new head. Raises ConfigError if heads and widths do not match."""
    hidden, num_layers = settings.hidden or target.hidden_size, len(target.layout.layers)
    spec = Eagle3Spec(
        **_layer_shape(target, settings, hidden, settings.layers or 1),
        target_hidden_size=target.hidden_size,
        aux_layers=(min(2, num_layers), num_layers // 2, max(0, num_layers - 3)),
        draft_vocab_size=min(settings.draft_vocab, target.vocab_size),
        owns_embed=hidden != target.hidden_size,
        fc_norm=True,
        norm_output=True,
    )
    return TrainableEagle3(Eagle3Head(spec).place(target.device, torch.bfloat16), target)


def trainable_block(target: TargetModel, settings: TrainSettings) -> TrainableBlock:
    """A new block drafter. Raises ConfigError if widths, heads or MASK do not match."""
    hidden, num_layers = target.hidden_size, len(target.layout.layers)
    if settings.hidden not in (None, hidden):
        raise ConfigError(f"--hidden {settings.hidden}: a block drafter has the target's width, {hidden}; leave it out")
    layers = settings.layers or 2
    shape = _layer_shape(target, settings, hidden, layers)
    pad = getattr(target.config, "pad_token_id", None)
    mask = settings.mask_token if settings.mask_token is not None else pad
    if mask is None or not 0 <= mask < target.vocab_size:
        raise ConfigError(
            f"MASK is token {mask}; give --mask-token, an id below {target.vocab_size} that texts do not contain"
        )
    spec = BlockSpec(
        **shape,
        aux_layers=spread_layers(max(3, layers), num_layers),
        block_size=1 + settings.draft_steps,
        mask_token=mask,
        causal=settings.causal,
    )
    return TrainableBlock(BlockHead(spec).place(target.device, torch.bfloat16), target)


def _layer_shape(target: TargetModel, settings: TrainSettings, hidden: int, layers: int) -> dict[str, Any]:
    """Fields of `HeadSpec`. Raises ConfigError where heads and widths do not fit each other."""
    heads = query_heads(target, settings)
    if settings.head_dim is None and hidden % heads:
        raise ConfigError(f"--heads {heads} does not divide --hidden {hidden}; give a divisor, or --head-dim")
    head_dim = settings.head_dim or hidden // heads
    if head_dim % 2:
        raise ConfigError(f"--head-dim {head_dim} is odd, but RoPE turns pairs of numbers; give an even --head-dim")
    kv_heads = settings.kv_heads or target.layout.layers[-1].k.heads
    require_groups(heads, kv_heads, "--kv-heads")
    return {
        "hidden_size": hidden,
        "vocab_size": target.vocab_size,
        "intermediate_size": settings.intermediate or 3 * hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "windows": (None,) * layers,
        "max_position_embeddings": target.max_position_embeddings or 4096,
    }


def query_heads(target: TargetModel, settings: TrainSettings) -> int:
    return settings.heads or int(target.config.num_attention_heads)


def require_groups(heads: int, kv_heads: int, name: str) -> None:
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} does not group over {kv_heads} ({name}); give a multiple of {kv_heads}")
