"""EAGLE-3 heads on disk: a folder in one of the published formats <-> one spec and one state dict of `Eagle3Head`.

`checkpoint_formats.py` says what the formats hold. Invariant: config, tensors and target agree, or the head is refused.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
from specdec.draft_models.checkpoints.drafter_formats import (
    AUX_IDS,
    EAGLE_CONFIG,
    is_speculators,
    own_name,
    read_norm_output,
    read_settings,
    resolve_aux_ids,
)
from specdec.draft_models.checkpoints.config_reader import Settings
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.errors import CheckpointError, UnsupportedModelError

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm")
FIRST_TENSOR = "layers.0.self_attn.q_proj.weight"
VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight", "t2d")
SHAPING: tuple[str, ...] = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("norm_before_fc", "fc_norm", "use_last_layernorm", "use_aux_hidden_state"),
)
"""Keys that decide which tensors a head has, and their shapes."""


class ReadHead(NamedTuple):
    """A head with the weights of its checkpoint, in float32 on the CPU. target_ids [draft_V]: target token of each
    draft token, None for the full vocabulary."""

    head: Eagle3Head
    target_ids: torch.Tensor | None


def read_head(folder: str | Path, target: TargetShape, aux_layers: Sequence[int] | None = None) -> ReadHead:
    """Read a head for `target`. `aux_layers` overrides which target states it gets (see `Eagle3Spec.aux_layers`).

    Raises CheckpointError (files missing, tensors that disagree with the config or with the target's widths) and
    UnsupportedModelError (a flag that this runtime does not know or cannot honour).
    """
    with naming_folder(folder):
        config = read_config(Path(folder))
        settings = read_settings(config)
        state = {own: tensor for key, tensor in read_tensors(Path(folder)).items() if (own := own_name(key))}
        spec = _make_spec(config, settings, state, target, aux_layers)
        target_ids = _target_ids(state.pop("d2t", None), state.pop("t2d", None), spec, target)
        if not spec.final_norm and settings.get("use_last_layernorm", True):
            state.pop("norm.weight", None)  # SpecForge writes one that its head does not use
        if spec.owns_embed and "embed_tokens.weight" in state:  # a table may be padded beyond the target's vocabulary
            state["embed_tokens.weight"] = state["embed_tokens.weight"][: spec.vocab_size]

        def explain(fault: str) -> str:
            hint = ""
            if fault.startswith("fc.weight is ["):
                states = list(spec.aux_layers) or "after the final norm"
                hint = f"; trained on other states than {states}? Then give eagle3_drafter(..., aux_layers=[...])"
            says = ", ".join(f"{key}={settings[key]}" for key in SHAPING if key in settings)
            return f"{hint}; config.json has {says}"

        return ReadHead(fill_head(lambda: Eagle3Head(spec), state, explain), target_ids)


def write_head(
    folder: str | Path, spec: Eagle3Spec, state: State, target: TargetShape, target_ids: torch.Tensor | None
) -> None:
    """Write a head in the SpecForge format, such that every reader takes the same target states from it."""
    eagle_config: dict[str, Any] = {AUX_IDS: [entered - 1 for entered in spec.aux_layers], "use_aux_hidden_state": True}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if spec.qk_norm else "llama",
        **spec.stored_fields(),
        **{flag: True for flag in FLAGS if getattr(spec, flag)},
        "target_hidden_size": spec.target_hidden_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "torch_dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        EAGLE_CONFIG: eagle_config,
    }
    if any(spec.windows):
        config |= spec.stored_windows()
    if spec.norm_output:  # servers read it at the top level, where it means something else to SpecForge
        config["norm_output"] = eagle_config["norm_output"] = True
    if not spec.final_norm:
        eagle_config["use_last_layernorm"] = False
    if not spec.aux_layers or resolve_aux_ids(config, target.num_layers, None) != spec.aux_layers:
        raise UnsupportedModelError(
            f"a head on target states {list(spec.aux_layers)} cannot be told from another in the SpecForge format; "
            f"begin with state 2, as in {[2, target.num_layers // 2, target.num_layers - 3]}"
        )
    tensors = {key.replace("layers.0.", "midlayer.", 1): tensor for key, tensor in state.items()}
    if target_ids is not None:
        ids = target_ids.detach().cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    write_folder(folder, config, tensors)


# tensors


def _make_spec(
    config: Mapping[str, Any],
    settings: Settings,
    state: State,
    target: TargetShape,
    aux_layers: Sequence[int] | None,
) -> Eagle3Spec:
    """What config and tensors say together; all that they and the target say twice is checked, but for shapes."""
    if FIRST_TENSOR not in state:
        raise UnsupportedModelError(f"there is no {FIRST_TENSOR} (or midlayer); specdec runs Llama-type layers")
    ids = resolve_aux_ids(config, target.num_layers, aux_layers) if settings.get("use_aux_hidden_state", True) else ()
    lm_head_normed, fed_back = read_norm_output(config, state.get("norm.weight"))
    num_layers = 1 + max(int(key.split(".")[1]) for key in state if re.match(r"layers\.\d+\.", key))
    table, head, t2d = (len(state[key]) if key in state else None for key in VOCABULARY_TENSORS)
    biases = frozenset(key.removesuffix(".bias") for key in state if key.endswith(".bias"))
    said = {
        ("target_hidden_size", f"target {target.name}"): target.hidden_size,
        ("num_hidden_layers", "the file"): num_layers,
        ("vocab_size", "embed_tokens"): table,
        ("vocab_size", "t2d"): t2d,
        ("draft_vocab_size", "lm_head"): head,
        ("num_aux_hidden_states", "the list of states"): len(ids) or None,
        ("has_lm_head", "the file, by its lm_head.weight,"): False if head is None else None,
        ("attention_bias", "the file, by its self_attn.q_proj.bias,"): "layers.0.self_attn.q_proj" in biases,
        ("mlp_bias", "the file, by its mlp.gate_proj.bias,"): "layers.0.mlp.gate_proj" in biases,
    }
    head_config.require_same(settings, said)
    vocab, drafted = settings.get("vocab_size", table), settings.get("draft_vocab_size")
    if vocab is not None and vocab < target.vocab_size:
        raise CheckpointError(f"vocab_size={vocab}, target {target.name} has {target.vocab_size} tokens")
    if head is None and t2d is None and drafted not in (None, vocab, target.vocab_size):
        raise CheckpointError(f"draft_vocab_size={drafted}, but there is no lm_head and no d2t")
    if head is None and table is not None and config.get("tie_word_embeddings"):
        raise UnsupportedModelError("tie_word_embeddings=True with embed_tokens and no lm_head; store an lm_head too")
    if settings.get("use_last_layernorm") and not lm_head_normed:
        raise CheckpointError(
            "use_last_layernorm=True, but norm_output=False at the top level means that lm_head reads what is not "
            "normed; put norm_output into eagle_config if it says what is fed back"
        )
    same_width = settings["hidden_size"] == target.hidden_size
    spec = Eagle3Spec(
        **head_config.read_fields(settings),
        **{key: settings[key] for key in FLAGS if key in settings},
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        aux_layers=ids,
        windows=head_config.read_windows(settings, num_layers),
        draft_vocab_size=head,
        rope=head_config.read_rope(settings, is_speculators(config)),
        qk_norm="layers.0.self_attn.q_norm.weight" in state,
        biases=biases,
        has_fc="fc.weight" in state or bool(ids) or not same_width,
        owns_embed=table is not None or not same_width,
        final_norm=lm_head_normed and settings.get("use_last_layernorm", True),
        norm_output=fed_back,
    )
    for key in ("query_pre_attn_scalar", "rotary_dim"):
        if settings.get(key, spec.head_dim) != spec.head_dim:
            raise UnsupportedModelError(f"{key}={settings[key]:g}; supported is head_dim, {spec.head_dim}")
    if spec.norm_before_fc and spec.fc_norm:
        raise CheckpointError("norm_before_fc=True and fc_norm=True; a head has one or the other")
    return spec


def _target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, spec: Eagle3Spec, target: TargetShape
) -> torch.Tensor | None:
    """Target token of each draft token. d2t holds offsets: draft token j is target token j + d2t[j]."""
    size = spec.draft_vocab_size
    if d2t is None:
        if size not in (None, target.vocab_size):
            raise CheckpointError(
                f"lm_head has {size} rows, the target {target.vocab_size} tokens, and there is no d2t"
            )
        return None
    if size != len(d2t):
        raise CheckpointError(f"d2t maps {len(d2t)} draft tokens, lm_head has {size or 'no'} rows")
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise CheckpointError(
            f"d2t leads to tokens {low}..{high}, target {target.name} has {target.vocab_size}; d2t must hold offsets, "
            "not ids"
        )
    if len(ids.unique()) != len(ids):
        raise CheckpointError("d2t leads two draft tokens to one target token")
    if t2d is not None and (int(t2d.sum()) != len(ids) or high >= len(t2d) or not bool(t2d[ids].all())):
        raise CheckpointError("d2t and t2d disagree about which target tokens are in the draft vocabulary")
    return ids
