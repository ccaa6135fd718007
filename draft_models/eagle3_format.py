"""EAGLE-3 heads on disk: three published formats in, one spec and one state dict out.

    specforge    SafeAILab / SpecForge / lmsys: llama fields at the top level, `eagle_config`, `midlayer.*`
    modelopt     NVIDIA: the same with more flags in `eagle_config`
    speculators  RedHatAI: `transformer_layer_config` nested, flags at the top level, `layers.0.*`

Invariant: a setting that could change what the head computes is honoured or refused, never skipped. What cannot be told
from the file at all (is an id the layer a state enters or leaves) follows the rule of `resolve_aux_ids`.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec.kvcache.errors import CheckpointError, UnsupportedModelError

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
    "add_cross_attention do_sample early_stopping embed_requires_grad enable_sp_ulysses has_no_defaults_at_init is_decoder "
    "is_encoder_decoder output_attentions output_hidden_states output_scores parallel_draft_heads_num_layers "
    "pretraining_tp remove_invalid_values return_dict return_dict_in_generate tie_encoder_decoder tie_word_embeddings "
    "torchscript use_bfloat16 use_cache use_sliding_window attention_bias mlp_bias rms_norm_eps rope_scaling "
    "draft_vocab_size eagle_config target_hidden_size length_penalty num_eagle_features norm_topk_prob".split()
)
"""Keys of a config that are read elsewhere, or that belong to training and generation."""
FLAG_NAME = re.compile(r"norm|eagle|draft|scale|scaling|residual|multiplier|softcap|parallel|fc_|_fc")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
RENAMED = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
UNUSED_TENSORS = re.compile(r"(^|\.)rotary_emb\.|^verifier_(lm_head|norm)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """What a head computes.

    aux_layers: target states it reads, each named by the layer it enters; empty: the final state, after the norm.
    windows: sliding window of each draft layer, None: full. draft_vocab_size None: the target's head and vocabulary.
    has_fc False: features pass as they are. biases: linear layers with a bias, by name. owns_embed: the head has a table.
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


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """A head read from disk: tensors under the names of `Eagle3Head`; target_ids [draft_V]: target token of each draft
    token, None for the full vocabulary."""

    spec: Eagle3Spec
    state: dict[str, torch.Tensor]
    target_ids: torch.Tensor | None


def is_eagle3_config(config: Mapping[str, Any]) -> bool:
    """Does this config.json describe an EAGLE-3 head? (A plain Llama with `draft_vocab_size` is one: yuhuili's heads.)"""
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
    if override is not None:
        ids, where = list(override), "aux_layers"
    elif config.get(AUX_IDS):
        ids, where = list(config[AUX_IDS]), AUX_IDS
    elif nested:
        ids, where = list(nested), f"eagle_config.{AUX_IDS}"
        if num_layers not in ids and ids[0] != 2:
            if ids[0] != 1:
                logger.warning(
                    "%s=%s is read as the outputs of those layers; if acceptance is near zero, pass aux_layers=%s",
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
            f"{num_layers} being what leaves its last layer; pass aux_layers=[...] to say which"
        )
    return tuple(ids)


def read_head(folder: str | Path, target: TargetShape, aux_layers: Sequence[int] | None = None) -> Eagle3Checkpoint:
    """Read a head for `target`. `aux_layers` overrides which target states it gets (see `Eagle3Spec.aux_layers`).

    Raises CheckpointError (files missing, tensors that disagree with the config or with the target's widths) and
    UnsupportedModelError (a flag that this runtime does not know or cannot honour).
    """
    path = Path(folder)
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{str(folder)!r} holds no config.json, so it is not an EAGLE-3 head")
    config: dict[str, Any] = json.loads(file.read_text("utf-8"))
    name = str(folder)
    flags, layer = _read_flags(config, name)
    state = _normalise(_load_tensors(path))
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    spec = _make_spec(config, layer, flags, state, target, aux_layers, name)
    return Eagle3Checkpoint(spec, state, _target_ids(d2t, t2d, spec, target, name))


def write_head(
    folder: str | Path,
    spec: Eagle3Spec,
    state: Mapping[str, torch.Tensor],
    target: TargetShape,
    target_ids: torch.Tensor | None,
) -> None:
    """Write a head in the SpecForge format, such that every reader takes the same target states from it."""
    outputs = [boundary - 1 for boundary in spec.aux_layers]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if spec.qk_norm else "llama",
        "hidden_size": spec.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope["rope_theta"],
        "rope_scaling": None if spec.rope["rope_type"] == "default" else dict(spec.rope),
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        "eagle_config": {AUX_IDS: outputs, "use_aux_hidden_state": True},
    }
    if set(spec.windows) != {None}:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
        config |= {"layer_types": kinds, "sliding_window": max(w for w in spec.windows if w is not None)}
    config |= {flag: True for flag in NORM_FLAGS if getattr(spec, flag)}
    if not spec.aux_layers or resolve_aux_ids(config, target.num_layers, None) != spec.aux_layers:
        raise UnsupportedModelError(
            f"a head on target states {list(spec.aux_layers)} cannot be told from another in the SpecForge format; "
            f"begin with state 2, as in {[2, target.num_layers // 2, target.num_layers - 3]}"
        )
    tensors = {key.replace("layers.0.", "midlayer.", 1): t.detach().cpu().contiguous() for key, t in state.items()}
    if target_ids is not None:
        ids = target_ids.detach().cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _read_flags(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
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


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors"))
    if files:
        return {key: tensor for file in files for key, tensor in load_file(file).items()}
    files = sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(f"{str(path)!r} holds no *.safetensors and no pytorch_model*.bin")
    return {key: tensor for file in files for key, tensor in torch.load(file, "cpu", weights_only=True).items()}


def _normalise(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under one set of names: no `model.` prefix, `midlayer.` as `layers.0.`, `fc_norm.i.`."""
    state: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
        for old, new in RENAMED.items():
            key = key.replace(old, new)
        if not UNUSED_TENSORS.search(key):
            state[key] = tensor
    return state


def _make_spec(
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    flags: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    target: TargetShape,
    aux_layers: Sequence[int] | None,
    name: str,
) -> Eagle3Spec:
    if (
        layer.get("model_type", "llama") not in ("llama", "qwen3", "mistral")
        or "layers.0.self_attn.q_proj.weight" not in state
    ):
        raise UnsupportedModelError(
            f"{name}: a head of {layer.get('model_type')} layers ({', '.join(config.get('architectures') or ['?'])}); "
            "specdec runs Llama- and Qwen3-type layers"
        )
    ids = resolve_aux_ids(config, target.num_layers, aux_layers) if flags.get("use_aux_hidden_state", True) else ()
    hidden = int(layer["hidden_size"])
    num_heads = int(layer["num_attention_heads"])
    num_layers = int(layer.get("num_hidden_layers", 1))
    width = max(1, len(ids)) * target.hidden_size
    fc = state.get("fc.weight")
    if fc is not None and fc.shape[1] != width:
        raise CheckpointError(
            f"{name}: fc takes {fc.shape[1]} numbers, but the states {list(ids) or 'after the final norm'} of target "
            f"{target.name} (hidden size {target.hidden_size}) give {width}; it was made for another target, or needs "
            "aux_layers=[...]"
        )
    if fc is None and (ids or hidden != target.hidden_size):
        raise CheckpointError(f"{name}: no fc.weight, needed to bring {width} target numbers to hidden size {hidden}")
    _require_agreement(flags, state, len(ids), name)
    names = {key.removesuffix(".bias") for key in state if key.endswith(".bias")}
    for flag, part in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")):
        if layer.get(flag) and f"layers.0.{part}" not in names:
            raise CheckpointError(f"{name}: {flag}=True, but there is no layers.0.{part}.bias")
    table = state.get("embed_tokens.weight")
    if table is not None and len(table) < target.vocab_size:
        raise CheckpointError(f"{name}: embeds {len(table)} tokens, target {target.name} has {target.vocab_size}")
    if table is None and hidden != target.hidden_size:
        raise CheckpointError(
            f"{name}: hidden size {hidden} differs from the target's {target.hidden_size}, and it has no embed_tokens "
            "of its own"
        )
    head = state.get("lm_head.weight")
    return Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=int(layer["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(layer.get("num_key_value_heads") or num_heads),
        head_dim=int(layer.get("head_dim") or hidden // num_heads),
        aux_layers=ids,
        windows=_windows(layer, num_layers, name),
        draft_vocab_size=None if head is None else len(head),
        rope=_rope(layer, name),
        max_position_embeddings=int(layer.get("max_position_embeddings", 4096)),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        hidden_act=str(layer.get("hidden_act", "silu")),
        qk_norm="layers.0.self_attn.q_norm.weight" in state,
        biases=frozenset(names),
        has_fc=fc is not None,
        owns_embed=table is not None,
        final_norm=bool(flags.get("use_last_layernorm", True)),
        **{flag: bool(flags.get(flag, False)) for flag in NORM_FLAGS},
    )


def _require_agreement(flags: Mapping[str, Any], state: Mapping[str, torch.Tensor], num_states: int, name: str) -> None:
    """Flags that own tensors must have them, and the other way round."""
    owners = (
        ("norm_before_fc", False, "input_norm.weight"),
        ("fc_norm", False, "fc_norm.0.weight"),
        ("use_last_layernorm", True, "norm.weight"),
    )
    for flag, default, tensor in owners:
        value = bool(flags.get(flag, default))
        if value != (tensor in state):
            has = "is there" if tensor in state else "is missing"
            raise CheckpointError(
                f"{name}: {flag}={value}, but {tensor} {has}; the config does not belong to the weights"
            )
    count = flags.get("num_aux_hidden_states")
    if count is not None and num_states and count != num_states:
        raise CheckpointError(f"{name}: num_aux_hidden_states={count}, but {num_states} states are named")
    if flags.get("has_lm_head") and "lm_head.weight" not in state:
        raise CheckpointError(f"{name}: has_lm_head=True, but lm_head.weight is missing")


def _windows(layer: Mapping[str, Any], num_layers: int, name: str) -> tuple[int | None, ...]:
    """Sliding window of each draft layer: by `layer_types`, else on every layer that a window is set for."""
    window = layer.get("sliding_window")
    if window is None or layer.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = list(layer.get("layer_types") or ["sliding_attention"] * num_layers)[:num_layers]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"} or int(window) < 1:
        raise UnsupportedModelError(f"{name}: sliding_window={window} with layer_types={kinds} on {num_layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rope(layer: Mapping[str, Any], name: str) -> dict[str, Any]:
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


def _target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, spec: Eagle3Spec, target: TargetShape, name: str
) -> torch.Tensor | None:
    """d2t holds offsets: draft token j is target token j + d2t[j]."""
    size = spec.draft_vocab_size
    if d2t is None:
        if size not in (None, target.vocab_size):
            raise CheckpointError(
                f"{name}: lm_head has {size} rows for a target of {target.vocab_size} tokens, and there is no d2t to map them"
            )
        return None
    if size != len(d2t):
        raise CheckpointError(f"{name}: d2t maps {len(d2t)} draft tokens, lm_head has {size or 'no'} rows")
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise CheckpointError(
            f"{name}: d2t leads to tokens {int(ids.min())}..{int(ids.max())}, target {target.name} has "
            f"{target.vocab_size}; d2t must hold offsets, not ids"
        )
    if len(ids.unique()) != len(ids):
        raise CheckpointError(f"{name}: d2t leads two draft tokens to one target token")
    if t2d is not None and (int(t2d.sum()) != len(ids) or int(ids.max()) >= len(t2d) or not bool(t2d[ids].all())):
        raise CheckpointError(f"{name}: d2t and t2d disagree about which target tokens are in the draft vocabulary")
    return ids
