"""EAGLE-3 heads with one setting of their config.json changed: `changes` of the table of causes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specdec.doctor.changes.change import Change
from specdec.doctor.changes.changed_drafters import changed_head
from specdec.doctor.pair_in_question import PairInQuestion
from specdec.draft_models.eagle3.checkpoint_formats import AUX_IDS
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter

USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
"""Of RoPE: Llama's first, Llama 3, Qwen 3 and Gemma's full layers, Qwen 3 of long contexts."""


def taps(pair: PairInQuestion) -> Iterator[Change]:
    """All states one layer later or earlier, and the default of the field."""
    spec, layers = _head(pair).spec, len(pair.target.layout.layers)
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
            yield _changed(pair, f"target states {_list(spec.aux_layers)} -> {_list(ids)}", do, aux_layers=ids)


def norms(pair: PairInQuestion) -> Iterator[Change]:
    """What is normed before the residual, before the next step, and before lm_head."""
    spec = _head(pair).spec
    flags = {
        "norm_before_residual": "write norm_before_residual: {value} into the head's config.json",
        "norm_output": "write norm_output: {value} into the eagle_config of the head's config.json",
    }
    for flag, do in flags.items():
        value = not getattr(spec, flag)
        yield _changed(pair, f"{flag} -> {str(value).lower()}", do.format(value=str(value).lower()), **{flag: value})
    if not spec.final_norm:
        do = "remove use_last_layernorm, and norm_output at the top level, from the head's config.json"
        yield _changed(pair, "a norm before lm_head", do, final_norm=True)


def rope_bases(pair: PairInQuestion) -> Iterator[Change]:
    """The target's bases, and the usual ones."""
    spec = _head(pair).spec
    bases = dict.fromkeys((*target_bases(pair.target.config), *USUAL_BASES))
    for base in bases:
        if base != spec.rope["rope_theta"]:
            what = f"rope_theta {spec.rope['rope_theta']:g} -> {base:g}"
            do = f"write rope_theta: {base:g} into the head's config.json"
            yield _changed(pair, what, do, rope={**spec.rope, "rope_theta": base})


def embeddings(pair: PairInQuestion) -> Iterator[Change]:
    """The target's table in the place of the head's own."""
    spec = _head(pair).spec
    if spec.owns_embed and spec.hidden_size == spec.target_hidden_size:
        do = "remove embed_tokens.weight from the head's checkpoint, so that it reads the target's table"
        yield _changed(pair, "the target's embedding table", do, owns_embed=False)


def windows(pair: PairInQuestion) -> Iterator[Change]:
    """One key more or less, and none, where it slides at all."""
    spec = _head(pair).spec
    if set(spec.windows) == {None}:
        return
    for step in (1, -1):
        changed = tuple(None if window is None else max(window + step, 1) for window in spec.windows)
        value = next(window for window in changed if window is not None)
        do = f"write sliding_window: {value} into the head's config.json"
        yield _changed(pair, f"sliding_window -> {value}", do, windows=changed)
    do = "write use_sliding_window: false and no layer_types into the head's config.json"
    yield _changed(pair, "no sliding window", do, windows=(None,) * spec.num_layers)


def target_bases(config: Any) -> list[float]:
    """Every rope_theta of a target's config."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [float(part["rope_theta"]) for part in parts if part.get("rope_theta")]


def _changed(pair: PairInQuestion, what: str, do: str, **spec: Any) -> Change:
    drafter = changed_head(_head(pair), pair.target, **spec)
    return Change(what=what, do=do, pair=replace(pair, drafter=drafter))


def _head(pair: PairInQuestion) -> Eagle3Drafter:
    assert isinstance(pair.drafter, Eagle3Drafter)
    return pair.drafter


def _list(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))
