"""What published EAGLE-3 checkpoints hold: tables of config keys and tensors, and rules for what tables cannot say.

    dialect      published by                    recognised by                    layer keys stand in
    SpecForge    SafeAILab, SpecForge, lmsys     an architecture with "eagle3"    the top level
    ModelOpt     NVIDIA                          in it, or `draft_vocab_size`     the same; more flags in `eagle_config`
    speculators  RedHatAI                        `speculators_model_type`         `transformer_layer_config`

`head_config.py` says what becomes of keys that are in no table.
"""

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.draft_models.checkpoints import config_reader as head_config
from specdec.draft_models.checkpoints.config_reader import Kind, Settings
from specdec.errors import UnsupportedModelError

logger = logging.getLogger("specdec")

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_CONFIG, EAGLE_CONFIG = "transformer_layer_config", "eagle_config"
FIRST_AFTER_CHANGE = (5, 18)
"""The first release of transformers after SpecForge changed what `norm_output` means, on 2026-09-15."""
LAYERS = ("llama", "qwen3", "mistral")
"""Values of `model_type`: kinds of decoder layers that a head can be made of."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def is_eagle3_config(config: Mapping[str, Any]) -> bool:
    """Is this config.json one of an EAGLE-3 head? (A plain Llama with `draft_vocab_size` is: yuhuili's heads.)"""
    if is_speculators(config):
        return bool(config["speculators_model_type"] == "eagle3")
    names = [str(name).lower() for name in config.get("architectures") or ()]
    return any("eagle3" in name for name in names) or config.get("draft_vocab_size") is not None


HONOURED: dict[str, Kind] = {
    **{key: kind for key, (kind, _) in head_config.FIELDS.items()},
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm"), head_config.FLAG),
    **dict.fromkeys(("norm_output", "use_aux_hidden_state", "use_last_layernorm"), head_config.FLAG),
    **dict.fromkeys(("attention_bias", "mlp_bias", "has_lm_head", "use_sliding_window"), head_config.FLAG),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "target_hidden_size"), head_config.COUNT),
    **dict.fromkeys(("num_hidden_layers", "num_aux_hidden_states"), head_config.COUNT),
    **dict.fromkeys(("max_window_layers", "query_pre_attn_scalar", "rope_theta", "rotary_dim"), head_config.NUMBER),
    **dict.fromkeys(("rope_parameters", "rope_scaling", LAYER_CONFIG, EAGLE_CONFIG), head_config.OBJECT),
    **dict.fromkeys(("architectures", "layer_types", "model_type", "sliding_window"), head_config.ANY),
    AUX_IDS: head_config.LIST,
}
"""Keys that are read into `Eagle3Spec`, or compared with the tensors and the target."""
BY_PLACE = (AUX_IDS, "norm_output")
"""Keys whose meaning depends on where they stand: `resolve_aux_ids` and `read_norm_output` read them."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1.0,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_drafting": (False,),
    "partial_rotary_factor": (1.0,),
    "position_embedding_type": ("rope",),
    "pruned_heads": ({}, []),
    "rotary_pct": (1.0,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_mtp_layernorm": (False,),
}
"""Keys with the values (None is always one) under which a head computes what `Eagle3Head` does."""
TENSORS: tuple[tuple[str, str | None], ...] = (
    # pattern in a file, its replacement in the names of `Eagle3Head` (None: the tensor is not read)
    (r"(^|\.)rotary_emb\.", None),
    (r"^(model\.)?verifier_(lm_head|norm)\.", None),
    (r"^model\.", ""),
    (r"midlayer\.", "layers.0."),
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
)


def own_name(key: str) -> str | None:
    """The name in `Eagle3Head` of a tensor in a file; None: it is not read."""
    for pattern, name in TENSORS:
        if name is None and re.search(pattern, key):
            return None
        key = re.sub(pattern, name or "", key)
    return key


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The honoured keys that are set, wherever they stand, except those of `BY_PLACE`; defaults of three sizes.
    Raises as `read_keys`."""
    # a speculator's top level has a model_type of its own
    entries = [("", k, v) for k, v in config.items() if k != "model_type" or not is_speculators(config)]
    for place in (LAYER_CONFIG, EAGLE_CONFIG):
        if isinstance(inner := config.get(place), dict):
            entries += [(f"{place}.", k, v) for k, v in inner.items()]
    for place, key, value in entries:  # before others: other kinds of layers have keys of their own
        if key == "model_type" and value not in (None, *LAYERS):
            made_of = ", ".join(map(str, config.get("architectures") or ["?"]))
            raise UnsupportedModelError(
                f"a head of {value} layers ({made_of}); specdec runs Llama- and Qwen3-type layers"
            )
        if key in BY_PLACE and place == f"{LAYER_CONFIG}.":
            raise head_config.unknown_flag(f"{place}{key}={reprlib.repr(value)}", HONOURED | NEUTRAL)
    settings = head_config.read_keys(entries, HONOURED, neutral=NEUTRAL, by_place=BY_PLACE, required=head_config.SIZES)
    heads = settings["num_attention_heads"]
    head_dim = 128 if settings.get("model_type") == "qwen3" else settings["hidden_size"] // heads
    return {"num_key_value_heads": heads, "head_dim": head_dim, "model_type": "llama", **settings}


def resolve_aux_ids(config: Mapping[str, Any], num_layers: int, override: Sequence[int] | None) -> tuple[int, ...]:
    """Boundaries (layers that the states enter; num_layers: what leaves the last) from a config of n layers.

    The caller's ids, else the top level's (boundaries), else those of `eagle_config`: boundaries if n or a leading 2 is
    among them, else layers named by their output, so one more. Default: 2, n // 2, n - 3, as [1, n // 2 - 1, n - 4]
    says; a warning tells what was assumed.
    """
    nested, where = (config.get(EAGLE_CONFIG) or {}).get(AUX_IDS), AUX_IDS
    ids: list[Any]
    if override is not None:
        ids, where = list(override), "aux_layers"
    elif config.get(AUX_IDS):
        ids = config[AUX_IDS]
    elif nested:
        ids, where = nested, f"{EAGLE_CONFIG}.{AUX_IDS}"
        if num_layers not in ids and ids[0] != 2:
            if ids[0] != 1:
                hint = "%s=%s is read as layers' outputs; if acceptance is near zero, try eagle3_drafter(aux_layers=%s)"
                logger.warning(hint, where, ids, ids)
            ids = [layer + 1 for layer in ids]
    else:
        ids, where = [2, num_layers // 2, num_layers - 3], "the default"
        logger.warning(
            "an EAGLE-3 head whose config.json has no %s: it is assumed to read the states that enter layers %s of the "
            "target, as most do; if acceptance is near zero, `specdec doctor` tries others",
            AUX_IDS,
            ", ".join(map(str, ids)),
        )
    if not ids or any(type(i) is not int or not 0 <= i <= num_layers for i in ids):
        raise UnsupportedModelError(
            f"EAGLE-3 auxiliary layers {ids} (from {where}): the target has states 0..{num_layers}, "
            f"{num_layers} being what leaves its last layer; eagle3_drafter(..., aux_layers=[...]) says which"
        )
    return tuple(ids)


def read_norm_output(config: Mapping[str, Any], norm: torch.Tensor | None) -> tuple[bool, bool]:
    """(does lm_head read norm(a), does the next draft step): `norm_output` means one or the other.

    In `eagle_config` and in speculators' format it is the second, as for vLLM and SGLang. At the top level of the
    SpecForge format it was the first until 2026-09-15, and is the second since. False: a `norm` [H] that was trained
    has gains that differ, so lm_head reads norm(a); one that was not keeps those that it was made with. True: files of
    a transformers released later are of the second kind; of any other the first is assumed, and a warning says so.
    """
    nested, top = (config.get(EAGLE_CONFIG) or {}).get("norm_output"), config.get("norm_output")
    if nested is not None:
        return True, bool(nested)
    if top is None or is_speculators(config):
        return True, bool(top)
    if not top:
        return norm is not None and not bool(torch.all(norm == norm[0])), False
    if _was_saved_by(config, FIRST_AFTER_CHANGE):
        return True, True
    logger.warning(
        "norm_output=True of an EAGLE-3 head is read as SpecForge meant it until 2026-09-15 (the next draft step reads "
        "a, not norm(a)); if it was trained later, put norm_output into eagle_config: `specdec doctor` tries both"
    )
    return True, False


def _was_saved_by(config: Mapping[str, Any], first: tuple[int, int]) -> bool:
    """Was this config.json written by a release of transformers not older than `first`?"""
    version = re.fullmatch(r"(\d+)\.(\d+)\.\d+", str(config.get("transformers_version")))
    return version is not None and (int(version[1]), int(version[2])) >= first
