"""Block drafters with one setting of their config.json changed: `changes` of the table of causes."""

from collections.abc import Iterator
from typing import Any

from specdec.doctor.changes.change import Change
from specdec.doctor.changes.changed_drafters import changed_block
from specdec.doctor.pair_in_question import PairInQuestion
from specdec.draft_models.block.block_drafter import BlockDrafter


def mask_ids(pair: PairInQuestion) -> Iterator[Change]:
    """The ids that tokenizer and config could mean by MASK."""
    spec = _block(pair).spec
    for token in possible_masks(pair.tokenizer, pair.target.config, pair.target.vocab_size):
        if token != spec.mask_token:
            yield Change(
                what=f"MASK {spec.mask_token} -> {token}",
                do=f"write mask_token_id: {token} into the drafter's config.json",
                pair=pair.changed(drafter=changed_block(_block(pair), pair.target, mask_token=token)),
            )


def taps(pair: PairInQuestion) -> Iterator[Change]:
    """All states one layer later or earlier."""
    spec, layers = _block(pair).spec, len(pair.target.layout.layers)
    for step in (1, -1):
        ids = tuple(layer + step for layer in spec.aux_layers)
        if all(0 < layer < layers for layer in ids):
            outputs = [layer - 1 for layer in ids]  # the file counts layers that states leave
            yield Change(
                what=f"target states {_list(spec.aux_layers)} -> {_list(ids)}",
                do=f"write target_layer_ids: {outputs} into the drafter's config.json",
                pair=pair.changed(drafter=changed_block(_block(pair), pair.target, aux_layers=ids)),
            )


def possible_masks(tokenizer: Any | None, config: Any, vocab_size: int) -> list[int]:
    """Ids of MASK, padding and unknown, of special tokens called so, the first row behind the tokenizer's tokens, and
    the last row of the table; those of padding are what drafters were trained with most often."""
    names = ("pad_token_id", "mask_token_id", "unk_token_id", "eos_token_id")
    found: list[Any] = [getattr(source, name, None) for source in (tokenizer, config) for name in names]
    if tokenizer is not None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        found += [number for number, token in added.items() if any(word in str(token).lower() for word in WORDS)]
        found.append(len(tokenizer))
    found += [vocab_size - 1, 0]
    ids = (token for token in found if isinstance(token, int))
    return [token for token in dict.fromkeys(ids) if 0 <= token < vocab_size]


WORDS = ("mask", "pad", "fim", "unused0")
"""Of names of special tokens."""


def _block(pair: PairInQuestion) -> BlockDrafter:
    assert isinstance(pair.drafter, BlockDrafter)
    return pair.drafter


def _list(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))
