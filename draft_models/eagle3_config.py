"""What an EAGLE-3 head's config.json says, in any of the three published formats.

    specforge    SafeAILab / SpecForge / lmsys: llama fields at the top level, `eagle_config`
    modelopt     NVIDIA: the same with more flags in `eagle_config`
    speculators  RedHatAI: `transformer_layer_config` nested, flags at the top level

Invariant: a setting that could change what the head computes is honoured or refused, never skipped. What cannot be told
from the file at all (is an id the layer a state enters or leaves) follows the rule of `resolve_aux_ids`.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger("specdec")

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FIXED_FLAGS: dict[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "is_causal": True,
    "logit_scale": 1.0,
}
"""Flags with the one value (None counts as it) under which a head computes what `Eagle3Head` does."""
READ_FLAGS = (*NORM_FLAGS, "use_aux_hidden_state", "use_last_layernorm", "has_lm_head", "num_aux_hidden_states")
HARMLESS = frozenset(
    {"add_cross_attention", "attention_bias", "do_sample", "draft_vocab_size", "eagle_config"}
    | {"early_stopping", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init", "is_decoder"}
    | {"is_encoder_decoder", "mlp_bias", "norm_topk_prob", "num_eagle_features", "output_attentions"}
    | {"output_hidden_states", "output_scores", "parallel_draft_heads_num_layers", "pretraining_tp"}
    | {"remove_invalid_values", "return_dict", "return_dict_in_generate", "rms_norm_eps", "rope_scaling"}
    | {"target_hidden_size", "tie_encoder_decoder", "tie_word_embeddings", "torchscript", "use_bfloat16"}
    | {"use_cache", "use_sliding_window"}
)
"""Keys of a config that are read elsewhere, or that belong to training and generation."""
FLAG_NAME = re.compile(r"norm|eagle|draft|scale|scaling|residual|multiplier|softcap|parallel|fc_|_fc")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """What a head computes.

    aux_layers: target states it reads, each named by the layer it enters; empty: the final state, after the norm.
    windows: sliding window of each draft layer, None: full. draft_vocab_size None: the target's head and vocabulary.
    has_fc False: features pass as they are. biases: names of linear layers with one. owns_embed: it has a table.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    aux_layers: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)
    draft_vocab_size: int | None = None
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qk_norm: bool = False
    biases: frozenset[str] = frozenset()
    has_fc: bool = True
    owns_embed: bool = False
    final_norm: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def feature_size(self) -> int:
        """Width of what the target hands over."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a reader must know of the target."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int


def is_eagle3_config(config: Mapping[str, Any]) -> bool:
    """Is this config.json one of an EAGLE-3 head? (A plain Llama with `draft_vocab_size` is: yuhuili's heads.)"""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    names = [str(name).lower() for name in config.get("architectures") or ()]
    return any("eagle3" in name for name in names) or config.get("draft_vocab_size") is not None


def resolve_aux_ids(config: Mapping[str, Any], num_layers: int, override: Sequence[int] | None) -> tuple[int, ...]:
    """Boundaries (layers that the states enter; num_layers: what leaves the last) from a config of n layers.

    The user's word, then the top level (boundaries), then `eagle_config`: boundaries if n or a leading 2 is among them,
    else outputs of the layers named, so one more. The default 2, n // 2, n - 3 is what [1, n // 2 - 1, n - 4] says.
    """
    nested = (config.get("eagle_config") or {}).get(AUX_IDS)
    ids: list[Any]
    if override is not None:
        ids, where = list(override), "aux_layers"
    elif config.get(AUX_IDS):
        ids, where = list(config[AUX_IDS]), AUX_IDS
    elif nested:
        ids, where = list(nested), f"eagle_config.{AUX_IDS}"
        if num_layers not in ids and ids[0] != 2:
            if ids[0] != 1:
                logger.warning(
                    "%s=%s is read as layers' outputs; if acceptance is near zero, try eagle3_drafter(aux_layers=%s)",
                    where,
                    ids,
                    ids,
                )
            ids = [layer + 1 for layer in ids]
    else:
        ids, where = [2, num_layers // 2, num_layers - 3], "the default"
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= num_layers for i in ids):
        raise UnsupportedModelError(
            f"EAGLE-3 auxiliary layers {ids} (from {where}): the target has states 0..{num_layers}, "
            f"{num_layers} being what leaves its last layer; eagle3_drafter(..., aux_layers=[...]) says which"
        )
    return tuple(ids)


def read_flags(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(values of READ_FLAGS, the llama fields), after refusing what is not known."""
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    layer: Mapping[str, Any] = config.get("transformer_layer_config") or config
    known = {*FIXED_FLAGS, *READ_FLAGS, AUX_IDS}
    for key, value in [*config.items(), *layer.items()]:
        flag = isinstance(value, bool) or (value is not None and FLAG_NAME.search(key))
        if flag and key not in known | HARMLESS and not key.startswith("speculators_"):
            raise _unknown(name, key, value)
    for key, value in nested.items():
        if key not in known | HARMLESS:
            raise _unknown(name, f"eagle_config.{key}", value)
    flags: dict[str, Any] = {}
    for source in (config, layer, nested):
        for key in known - {AUX_IDS}:
            value = source.get(key)
            if value is None:
                continue
            if flags.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{name}: {key} is {flags[key]} in one place of its config and {value} in another"
                )
    for key, wanted in FIXED_FLAGS.items():
        if flags.get(key, wanted) != wanted:
            raise UnsupportedModelError(f"{name}: {key}={flags[key]}; specdec runs EAGLE-3 heads with {wanted} only")
    if config.get("quantization_config") or layer.get("quantization_config"):
        raise UnsupportedModelError(f"{name}: the head is quantised; specdec loads fp32, fp16 and bf16 heads")
    if "speculators_model_type" in config and "norm_before_residual" not in config:
        logger.warning("%s: norm_before_residual is absent and read as False, as speculators does (vLLM: True)", name)
    return flags, layer


def _unknown(name: str, key: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}: flag {key}={value!r} is not known and may change what the head computes; "
        f"known are {', '.join(sorted({*FIXED_FLAGS, *READ_FLAGS, AUX_IDS}))}"
    )


def read_windows(layer: Mapping[str, Any], num_layers: int, name: str) -> tuple[int | None, ...]:
    """Sliding window of each draft layer: by `layer_types`, else on every layer that a window is set for."""
    window = layer.get("sliding_window")
    if window is None or layer.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = list(layer.get("layer_types") or ["sliding_attention"] * num_layers)[:num_layers]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"} or int(window) < 1:
        raise UnsupportedModelError(f"{name}: sliding_window={window} with layer_types={kinds} on {num_layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def read_rope(layer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`rope_parameters` of transformers 5 from whichever spelling the config has; the newer one wins."""
    rope: dict[str, Any] = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor") or layer.get("partial_rotary_factor") or 1.0
    if rope["rope_type"] not in ROPE_TYPES or partial != 1.0:
        raise UnsupportedModelError(
            f"{name}: rope_type={rope['rope_type']!r} with partial_rotary_factor={partial}; supported are "
            f"{', '.join(ROPE_TYPES)} over whole heads"
        )
    return rope
