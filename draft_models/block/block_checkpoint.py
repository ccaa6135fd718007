"""Block drafters on disk: a folder in one of the published formats <-> one spec and one state dict of `BlockHead`.

    format     published by           recognised by                            settings of the block are in
    DFlash     z-lab                  `dflash_config`, "DFlashDraftModel"      `dflash_config` and the top level
    JetSpec    JetSpec (JetFlow)      the same                                 the same, with causal_head
    DSpark     deepseek-ai            "Qwen3DSparkModel", "Gemma4DSparkModel"  the top level

A config key is read, compared with the tensors or the target, known to change nothing, or refused by name. Confidence
heads are not read: they say where a draft may be cut, never what is drafted.
"""

import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.draft_models.block.block_layers import KINDS
from specdec.draft_models.checkpoints import config_reader as head_config
from specdec.draft_models.checkpoints.checkpoint_files import (
    State,
    TargetShape,
    fill_head,
    naming_folder,
    read_config,
    read_tensors,
    write_folder,
)
from specdec.draft_models.checkpoints.config_reader import Kind, Settings
from specdec.errors import CheckpointError, UnsupportedModelError

DFLASH_CONFIG = "dflash_config"
GEMMA4_TYPES = ("gemma4_text", "gemma4_unified_text")
READ: dict[str, Kind] = {
    **{key: kind for key, (kind, _) in head_config.FIELDS.items()},
    **dict.fromkeys(("vocab_size", "num_hidden_layers"), head_config.COUNT),
    **dict.fromkeys(("num_target_layers", "target_hidden_size", "block_size"), head_config.COUNT),
    **dict.fromkeys(("markov_rank", "mask_token_id"), head_config.INDEX),
    **dict.fromkeys(("attention_bias", "use_sliding_window", "causal_head", "causal", "is_causal"), head_config.FLAG),
    **dict.fromkeys(("rope_theta", "max_window_layers", "final_logit_softcapping"), head_config.NUMBER),
    **dict.fromkeys(("rope_parameters", "rope_scaling", DFLASH_CONFIG), head_config.OBJECT),
    **dict.fromkeys(("hidden_activation", "markov_head_type", "model_type"), head_config.TEXT),
    **dict.fromkeys(("architectures", "layer_types", "sliding_window"), head_config.ANY),
    "target_layer_ids": head_config.LIST,
}
"""Keys that are read or compared, at the top or in `dflash_config`, and what they must hold."""
TRAINING = ("num_anchors", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha")
GEMMA4_HARMLESS = (
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config", "num_kv_shared_layers"),
    *("vocab_size_per_layer_input", "target_model_type", "target_text_model_type"),
)
"""Keys of a Gemma 4 config that change nothing here: shapes, which tensors decide, and settings of other layers."""
GEMMA4_OFF = ("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input", "use_bidirectional_attention")
"""What must be off."""
GEMMA4_V = "layers.0.self_attn.v_proj.weight"
CAUSAL_KEYS = ("causal_head", "causal", "is_causal")
IGNORED_TENSORS = re.compile(r"(^|\.)rotary_emb\.|^confidence_head\.")


def is_block_config(config: Mapping[str, Any]) -> bool:
    """Is this config.json one of a block drafter, of a family that runs here or of one that is refused by name?"""
    named = [*(config.get("architectures") or ()), config.get("speculators_model_type") or ""]
    return isinstance(config.get(DFLASH_CONFIG), dict) or any(
        word in str(name).lower() for name in named for word in ("dflash", "dspark")
    )


def read_block(folder: str | Path, target: TargetShape) -> BlockHead:
    """Read a block drafter for `target`: a head with the weights of its checkpoint, on the CPU.

    Raises CheckpointError (files missing, tensors that disagree with the config or with the target) and
    UnsupportedModelError (a family, layer or flag that this runtime does not know or cannot honour).
    """
    with naming_folder(folder):
        config = read_config(Path(folder))
        settings = read_block_settings(config)
        state = {
            key.removeprefix("model."): tensor
            for key, tensor in read_tensors(Path(folder)).items()
            if not IGNORED_TENSORS.search(key)
        }
        if settings["model_type"] != "qwen3":
            settings |= _gemma4_shape(state)
        spec = make_spec(config, settings, state, target)
        return fill_head(lambda: BlockHead(spec), state)


def read_block_settings(config: Mapping[str, Any]) -> Settings:
    """The keys of READ that are set, from both places. Raises as `read_block`."""
    _refuse_families(config)
    is_gemma4 = config.get("model_type") in GEMMA4_TYPES
    entries = [("", key, value) for key, value in config.items()]
    entries += [(f"{DFLASH_CONFIG}.", key, value) for key, value in (config.get(DFLASH_CONFIG) or {}).items()]
    for place, key, value in entries:
        if is_gemma4 and key in GEMMA4_OFF and value:
            raise UnsupportedModelError(
                f"{place}{key}={reprlib.repr(value)} of a drafter of Gemma 4's layers; it must be off"
            )
    harmless = (*TRAINING, *GEMMA4_HARMLESS, *GEMMA4_OFF) if is_gemma4 else TRAINING
    settings = head_config.read_keys(
        entries, READ, required=(*head_config.SIZES, "block_size", "mask_token_id"), harmless=harmless
    )
    if (kind := settings.get("model_type", "qwen3")) not in ("qwen3", *GEMMA4_TYPES):
        raise UnsupportedModelError(f"a block drafter of {kind} layers; specdec runs those of Qwen3 and Gemma 4 layers")
    heads = settings["num_attention_heads"]
    return {"num_key_value_heads": heads, "head_dim": 128, "model_type": "qwen3", **settings}


def _refuse_families(config: Mapping[str, Any]) -> None:
    nested = config.get(DFLASH_CONFIG) or {}
    names = ", ".join(map(str, config.get("architectures") or ["?"]))
    if kind := config.get("speculators_model_type"):
        raise UnsupportedModelError(
            f"a {kind} drafter in speculators' format; specdec reads block drafters as z-lab, JetSpec and deepseek-ai "
            "publish them, and EAGLE-3 heads in speculators' format"
        )
    if "dflash2" in names.lower() or any(str(key).startswith(("conv_", "selector_")) for key in nested):
        raise UnsupportedModelError(
            f"a DFlash2 drafter ({names}); specdec does not run its convolution and its candidate selector; use a "
            "DFlash, DSpark or JetSpec drafter of the same target"
        )


def make_spec(config: Mapping[str, Any], settings: Settings, state: State, target: TargetShape) -> BlockSpec:
    """What config and tensors say together; what they and the target say twice is checked, but for shapes."""
    num_layers = 1 + max((int(key.split(".")[1]) for key in state if re.match(r"layers\.\d+\.", key)), default=-1)
    if not num_layers:
        raise CheckpointError("there are no tensors layers.N.*")
    said = {
        ("num_hidden_layers", "the file"): num_layers,
        ("num_target_layers", f"target {target.name}"): target.num_layers,
        ("hidden_size", f"target {target.name}"): target.hidden_size,
        ("target_hidden_size", f"target {target.name}"): target.hidden_size,
    }
    head_config.require_same(settings, said)
    shifted = any("dspark" in str(name).lower() for name in config.get("architectures") or ())
    causal = {key: settings[key] for key in CAUSAL_KEYS if key in settings}
    if len(set(causal.values())) > 1:
        raise CheckpointError(f"{causal} contradict each other about whether blocks are causal")
    rank = settings.get("markov_rank", 0)
    kind = settings.get("markov_head_type") if rank else None
    if rank and kind not in KINDS:
        raise UnsupportedModelError(f"markov_head_type={kind!r} with markov_rank={rank}; known are {', '.join(KINDS)}")
    mask, vocab = settings["mask_token_id"], settings.get("vocab_size", target.vocab_size)
    if mask >= target.vocab_size:
        raise CheckpointError(
            f"mask_token_id={mask}, but target {target.name} has {target.vocab_size} rows in its embedding table"
        )
    if vocab != target.vocab_size:
        raise CheckpointError(f"vocab_size={vocab}, target {target.name} has {target.vocab_size} tokens")
    if settings["block_size"] < 2 and not shifted:
        raise CheckpointError("block_size=1 drafts nothing; expected 2 or more")
    special: dict[str, Any] = {}
    if settings["model_type"] == "qwen3":
        special = {
            "windows": head_config.read_windows(settings, num_layers),
            "rope": head_config.read_rope(settings, by_layer_type=False),
        }
    else:
        special = _gemma4_fields(settings, num_layers, keys_are_values=GEMMA4_V not in state)
    return BlockSpec(
        **(head_config.read_fields(settings) | special),
        vocab_size=target.vocab_size,
        attention_bias=settings.get("attention_bias", False),
        aux_layers=resolve_layer_ids(settings.get("target_layer_ids"), target.num_layers),
        block_size=settings["block_size"],
        mask_token=mask,
        causal=any(causal.values()),
        shifted=shifted,
        owns_vocabulary="embed_tokens.weight" in state,
        successor=kind,
        successor_rank=rank,
    )


def _gemma4_shape(state: State) -> Settings:
    """Head size and K/V heads by the tensors: a config of Gemma 4 has two of each, and several places for them."""
    try:
        head_dim = len(state["layers.0.self_attn.q_norm.weight"])
        return {"head_dim": head_dim, "num_key_value_heads": len(state["layers.0.self_attn.k_proj.weight"]) // head_dim}
    except (KeyError, ZeroDivisionError) as error:
        raise CheckpointError("tensors layers.0.self_attn.q_norm.weight and k_proj.weight are missing") from error


def _gemma4_fields(settings: Settings, num_layers: int, *, keys_are_values: bool) -> dict[str, Any]:
    kinds = settings.get("layer_types", ["full_attention"] * num_layers)
    if set(kinds) != {"full_attention"}:
        raise UnsupportedModelError(f"layer_types={kinds}; drafters of Gemma 4's layers attend fully in all of them")
    rope = settings.get("rope_parameters", {}).get("full_attention")
    if not isinstance(rope, dict) or rope.get("rope_type") not in ("default", "proportional"):
        raise UnsupportedModelError(
            f"rope_parameters.full_attention={rope}; expected an object of rope_type default or proportional"
        )
    return {
        "is_gemma4": True,
        "keys_are_values": keys_are_values,
        "rope": rope,
        "softcap": settings.get("final_logit_softcapping"),
        "hidden_act": settings.get("hidden_activation", "gelu_pytorch_tanh"),
        "windows": (None,) * num_layers,
    }


def resolve_layer_ids(ids: list[Any] | None, target_layers: int) -> tuple[int, ...]:
    """Boundaries (see `BlockSpec.aux_layers`) from ids that name layers by their output, -1 being the embeddings.

    The last layer's output is refused: transformers norms it, engines do not, and no published drafter says which it
    was trained with.
    """
    if ids is None:
        raise CheckpointError(
            "config.json says no target_layer_ids, the target layers whose states the drafter reads; every published "
            "block drafter has them, so take them from where it was published or trained"
        )
    if not ids or any(type(i) is not int or not -1 <= i < target_layers - 1 for i in ids):
        raise UnsupportedModelError(
            f"target_layer_ids={ids}; expected layers -1 (the embeddings) to {target_layers - 2} of the target's "
            f"{target_layers}"
        )
    return tuple(i + 1 for i in ids)


def write_block(folder: str | Path, spec: BlockSpec, state: State, target: TargetShape) -> None:
    """Write a head in DFlash's format, with JetSpec's `causal_head` where blocks are causal."""
    assert not (spec.is_gemma4 or spec.shifted or spec.owns_vocabulary or spec.successor), (
        "a head that DFlash's format has no room for"
    )
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **spec.stored_fields(),
        "num_target_layers": target.num_layers,
        "attention_bias": spec.attention_bias,
        **spec.stored_windows(),
        "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        "block_size": spec.block_size,
        DFLASH_CONFIG: {
            "mask_token_id": spec.mask_token,
            "target_layer_ids": [entered - 1 for entered in spec.aux_layers],
            **({"causal_head": True} if spec.causal else {}),
        },
    }
    write_folder(folder, config, state)
