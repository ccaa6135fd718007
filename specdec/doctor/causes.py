"""The causes of low acceptance, one row each, with the way to recognise it.

    SIGNS     read from config, weights and names: certain, and needs no generation
    CAUSES    the pair with one setting changed; a change that raises acceptance clearly names the cause

A drafter is built again with one setting changed; the original stays unchanged, and weights are shared if possible.
A new kind of drafter adds its rows to both tables and, for changes of its drafter, its dense form to `DENSE_FORMS`.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from specdec.doctor.examined_pair import ExaminedPair
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_checkpoint import ENTERED_IDS
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.checkpoints.drafter_formats import AUX_IDS, OUTPUT_IDS
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.native_mtp.conventions import all_conventions, difference
from specdec.draft_models.native_mtp.mtp_checkpoint import CONVENTIONS
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.loading.load_check import (
    ASSISTANTS,
    HEADS,
    LOAD_SYMPTOMS,
    CheckedPair,
    Symptom,
    changed_assistant,
    module_of,
)
from specdec.models.published import last_part
from specdec.models.target import TargetModel

TABLE, NORM = "embed_tokens.weight", "norm.weight"


def changed_head(drafter: Eagle3Drafter, target: TargetModel, **spec: Any) -> Eagle3Drafter:
    """A copy with these fields of its `Eagle3Spec` changed. Without `owns_embed` it takes the target's table; a final
    norm that it lacked gets gains of 1."""
    head = Eagle3Head(replace(drafter.spec, **spec))
    state = dict(drafter.head.state_dict())
    if head.embed_tokens is None:
        state.pop(TABLE, None)
    if NORM in head.state_dict() and NORM not in state:
        state[NORM] = torch.ones(drafter.spec.hidden_size, dtype=torch.float32, device="cpu")
    head.load_state_dict(state)
    head.target_ids = drafter.target_ids
    return Eagle3Drafter(head.place(target.device, target.dtype).eval(), target)


def changed_block(drafter: BlockDrafter, target: TargetModel, **spec: Any) -> BlockDrafter:
    """A copy with these fields of its `BlockSpec` changed. None of them shapes a weight, so modules are shared."""
    head = copy.copy(drafter.head)
    head.spec = replace(drafter.spec, **spec)
    return BlockDrafter(head, target)


CHANGED: dict[type, Callable[..., Drafter]] = {
    Eagle3Drafter: changed_head,
    BlockDrafter: changed_block,
    Gemma4MTPDrafter: changed_assistant,
}
USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
"""RoPE bases: of the first Llama, Llama 3, Qwen 3 (and Gemma's full layers), Qwen 3 with long contexts."""
MASK_WORDS = ("mask", "pad", "fim", "unused0")
"""Parts of names: a special token whose name has one may be MASK."""
BY_ARGUMENTS = "make it by Gemma4MTPDrafter(assistant, target, {how}) and give that as drafter=..."
THINKING = "enable_thinking"


class Change(NamedTuple):
    """A pair with its drafter or its prompts changed. what: the change in a few words, such as "taps 3, 16, 28 -> 2,
    15, 27". do: a sentence of advice to the user."""

    what: str
    do: str
    pair: ExaminedPair


def taps_of_heads(drafter: Eagle3Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """All states one layer later or earlier, and the field's default."""
    spec, layers = drafter.spec, len(pair.target.layout.layers)
    if not spec.aux_layers:
        return
    usual = (2, layers // 2, layers - 3)
    tried = [tuple(layer + step for layer in spec.aux_layers) for step in (1, -1)]
    if len(spec.aux_layers) == len(usual):
        tried.append(usual)
    for ids in dict.fromkeys(tried):
        if ids != spec.aux_layers and all(0 <= layer <= layers for layer in ids):
            do = (
                f"write {AUX_IDS}: {list(ids)} at the top level of the head's config.json (states that enter these "
                f"layers), or load it by eagle3_drafter(..., aux_layers={list(ids)})"
            )
            yield _changed(pair, f"target states {list(spec.aux_layers)} -> {list(ids)}", do, aux_layers=ids)


def norms(drafter: Eagle3Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """Norms before the residual, before the next step and before lm_head, on or off."""
    spec = drafter.spec
    for flag, place in (("norm_before_residual", ""), ("norm_output", "the eagle_config of ")):
        value = not getattr(spec, flag)
        yield _rewritten(pair, flag, value, place, **{flag: value})
    if not spec.final_norm:
        do = "remove use_last_layernorm, and norm_output at the top level, from the head's config.json"
        yield _changed(pair, "a norm before lm_head", do, final_norm=True)


def rope_bases(drafter: Eagle3Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """The target's bases, and the usual ones."""
    spec = drafter.spec
    rope = getattr(pair.target.config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    own = [float(part["rope_theta"]) for part in parts if part.get("rope_theta")]
    for base in dict.fromkeys((*own, *USUAL_BASES)):
        if base != spec.rope["rope_theta"]:
            yield _rewritten(pair, "rope_theta", base, rope={**spec.rope, "rope_theta": base})


def embeddings(drafter: Eagle3Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """The target's table instead of the head's own."""
    spec = drafter.spec
    if spec.owns_embed and spec.hidden_size == spec.target_hidden_size:
        do = "remove embed_tokens.weight from the head's checkpoint, so that it reads the target's table"
        yield _changed(pair, "the target's embedding table", do, owns_embed=False)


def windows_of_heads(drafter: Eagle3Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """For a sliding window: one key more, one key less, and no window."""
    spec = drafter.spec
    if set(spec.windows) == {None}:
        return
    for step in (1, -1):
        changed = tuple(None if window is None else max(window + step, 1) for window in spec.windows)
        value = next(window for window in changed if window is not None)
        yield _rewritten(pair, "sliding_window", value, windows=changed)
    do = "write use_sliding_window: false and no layer_types into the head's config.json"
    yield _changed(pair, "no sliding window", do, windows=(None,) * spec.num_layers)


def mtp_conventions(drafter: NativeMtpDrafter, pair: ExaminedPair) -> Iterator[Change]:
    """All choices that no tensor shows, tried together: one wrong choice can hide another."""
    for other in all_conventions(drafter)[1:]:
        stated = json.dumps(asdict(other.family))
        do = f"write {stated} into {CONVENTIONS} next to the modules (specdec doctor --write-conventions does)"
        yield Change(difference(drafter, other), do, replace(pair, drafter=other))


def mask_ids(drafter: BlockDrafter, pair: ExaminedPair) -> Iterator[Change]:
    """The ids that may be MASK according to tokenizer and config."""
    for token in possible_masks(pair.tokenizer, pair.target.config, pair.target.vocab_size):
        if token != drafter.spec.mask_token:
            yield _rewritten(pair, "mask_token_id", token, mask_token=token)


def taps_of_blocks(drafter: BlockDrafter, pair: ExaminedPair) -> Iterator[Change]:
    """All states one layer later or earlier. The file counts layers that states leave, the spec those they enter."""
    for step in (1, -1):
        ids = tuple(layer + step for layer in drafter.spec.aux_layers)
        if all(0 < layer < len(pair.target.layout.layers) for layer in ids):
            left = [layer - 1 for layer in ids]
            do = (
                f"write {OUTPUT_IDS}: {left} into the drafter's config.json, or {ENTERED_IDS}: {list(ids)} if it is in "
                "speculators' format"
            )
            yield _changed(pair, f"{OUTPUT_IDS} -> {left}", do, aux_layers=ids)


def rows_of_blocks(drafter: BlockDrafter, pair: ExaminedPair) -> Iterator[Change]:
    """Rows that draft one token later or earlier, which no tensor states."""
    other = not drafter.spec.shifted
    if other or drafter.spec.block_size > 1:
        yield _rewritten(pair, "sample_from_anchor", other, shifted=other)


def possible_masks(tokenizer: Any | None, config: Any, vocab_size: int) -> list[int]:
    """Ids of the mask, padding and unknown tokens, of special tokens with such names, of the first row after the
    tokenizer's tokens, and of the table's last row. Most drafters were trained with padding ids."""
    names = ("pad_token_id", "mask_token_id", "unk_token_id", "eos_token_id")
    found: list[Any] = [getattr(source, name, None) for source in (tokenizer, config) for name in names]
    if tokenizer is not None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        found += [number for number, token in added.items() if any(word in str(token).lower() for word in MASK_WORDS)]
        found.append(len(tokenizer))
    found += [vocab_size - 1, 0]
    ids = (token for token in found if isinstance(token, int))
    return [token for token in dict.fromkeys(ids) if 0 <= token < vocab_size]


def positions(drafter: Gemma4MTPDrafter, pair: ExaminedPair) -> Iterator[Change]:
    """Queries at the last committed position, like SGLang or vLLM, or at the bonus token's own position; the keys are
    the same."""
    offset = -1 if drafter.query_offset == 0 else 0
    shift = drafter.window_shift + offset - drafter.query_offset
    names = {0: "S, the bonus token's own", -1: "S - 1, the last committed one"}
    do = BY_ARGUMENTS.format(how=f"query_offset={offset}, window_shift={shift}")
    yield _changed(pair, f"queries at position {names[offset]}", do, query_offset=offset, window_shift=shift)


def windows_of_assistants(drafter: Gemma4MTPDrafter, pair: ExaminedPair) -> Iterator[Change]:
    """One key more or less on sliding layers."""
    if set(drafter.windows) == {None}:
        return
    for step, key in ((-1, "less"), (1, "more")):
        shift = drafter.window_shift + step
        do = BY_ARGUMENTS.format(how=f"window_shift={shift}")
        yield _changed(pair, f"one key {key} on sliding layers", do, window_shift=shift)


def templates(drafter: Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """Raw texts become turns of a chat. Never the reverse: raw text that repeats itself has high acceptance and says
    nothing about the pair."""
    if not pair.chat and pair.has_template and any(isinstance(prompt, str) for prompt in pair.prompts):
        do = "put prompts through the chat template: engine.chat_prompt(text), or no --raw"
        yield Change("the chat template", do, replace(pair, chat=True))


def thinking(drafter: Drafter, pair: ExaminedPair) -> Iterator[Change]:
    """The other value of `enable_thinking`, if the template reads it."""
    template = getattr(pair.tokenizer, "chat_template", None)
    texts = any(isinstance(prompt, str) for prompt in pair.prompts)
    if not (pair.chat and texts and re.search(THINKING, str(template))):
        return
    for value in (True, False):
        if pair.template.get(THINKING) is not value:
            do = f"pass {THINKING}={value} to the chat template: engine.chat_prompt(text, {THINKING}={value})"
            yield Change(f"{THINKING}={value}", do, replace(pair, template={**pair.template, THINKING: value}))


def _changed(pair: ExaminedPair, what: str, do: str, **settings: Any) -> Change:
    """The pair with its drafter built again with these settings of its kind."""
    drafter = CHANGED[type(pair.drafter)](pair.drafter, pair.target, **settings)
    return Change(what, do, replace(pair, drafter=drafter))


def _rewritten(pair: ExaminedPair, key: str, value: Any, place: str = "", **settings: Any) -> Change:
    """The pair with its drafter built again as if its config.json had another value. place: of the key in the file."""
    written = json.dumps(value)
    do = f"write {key}: {written} into {place}the drafter's config.json"
    return _changed(pair, f"{key} -> {written}", do, **settings)


class Cause(NamedTuple):
    """One reason for low acceptance, and the changes that show it. name: its name in reports. kinds: drafters that it
    applies to; `changes` is called with these only. by_token: changes are compared token by token
    (`conventions.py`)."""

    name: str
    kinds: tuple[type, ...]
    changes: Callable[[Any, ExaminedPair], Iterator[Change]]
    by_token: bool = False


def norm_of_ones(drafter: Drafter, subject: CheckedPair) -> Symptom | None:
    """A norm that was never loaded still has its initial gains."""
    gains = {
        name: bool(torch.all(parameter == 1))
        for name, parameter in module_of(drafter).named_parameters()
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight")
    }
    untrained = [name for name, ones in gains.items() if ones]
    if not untrained or len(untrained) > len(gains) / 2:
        return None  # a drafter whose norms have no gains at all
    return Symptom(
        what=f"all gains of its {', '.join(untrained)} are 1, those of its other norms are not: it was not exported",
        do=f"export the drafter again with {untrained[0]}",
    )


def no_template(drafter: Drafter, subject: CheckedPair) -> Symptom | None:
    """A chat model whose tokenizer has no chat template."""
    target, _, tokenizer = subject
    chats = isinstance(drafter, Gemma4MTPDrafter) or re.search(r"(?i)[-_](it|instruct|chat)\b", last_part(target.name))
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is not None or not chats:
        return None
    return Symptom(
        what=f"the tokenizer of {last_part(target.name)} has no chat template; drafters of chat models learn from "
        "chats",
        do="put chat_template.jinja (or chat_template in tokenizer_config.json) of the published target next to it",
    )


BLOCKS, MODULES, ANY = (BlockDrafter,), (NativeMtpDrafter,), (object,)

SIGNS = (*LOAD_SYMPTOMS, ("norm", (*HEADS, *ASSISTANTS), norm_of_ones), ("template", ANY, no_template))
CAUSES = (
    Cause("taps", HEADS, taps_of_heads),
    Cause("taps", BLOCKS, taps_of_blocks),
    Cause("MASK id", BLOCKS, mask_ids),
    Cause("rows", BLOCKS, rows_of_blocks),
    Cause("norm", HEADS, norms),
    Cause("rope base", HEADS, rope_bases),
    Cause("embedding", HEADS, embeddings),
    Cause("window", HEADS, windows_of_heads),
    Cause("window", ASSISTANTS, windows_of_assistants),
    Cause("frozen position", ASSISTANTS, positions),
    Cause("MTP conventions", MODULES, mtp_conventions, by_token=True),
    Cause("template", ANY, templates),
    Cause("thinking mode", ANY, thinking),
)
