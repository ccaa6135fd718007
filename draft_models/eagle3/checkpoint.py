"""EAGLE-3 heads on disk: reads and writes a folder in a published format as the spec and state dict of an `Eagle3Head`.

`drafter_formats.py` describes the formats. Invariant: config, tensors and target agree, or the head is refused.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.draft_models.base import TargetInfo
from specdec.draft_models.checkpoints.checkpoint_files import fill_head, take_target_ids, write_folder
from specdec.draft_models.checkpoints.config_reader import Config, HeadFiles, read_files, read_rope, read_windows
from specdec.draft_models.checkpoints.drafter_formats import (
    AUX_IDS,
    EAGLE3_FORMATS,
    EAGLE_CONFIG,
    OUTPUT_IDS,
    is_speculators,
)
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.errors import CheckpointError, UnsupportedModelError, about

logger = logging.getLogger("specdec")

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm")
FIRST_TENSOR = "layers.0.self_attn.q_proj.weight"
VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight", "t2d")
SHAPING: tuple[str, ...] = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("norm_before_fc", "fc_norm", "use_last_layernorm", "use_aux_hidden_state"),
)
"""Keys that decide which tensors a head has, and their shapes."""
FIRST_AFTER_CHANGE = (5, 18)
"""The first release of transformers after SpecForge changed what `norm_output` means, on 2026-09-15."""


def read_head(folder: str | Path, target: TargetInfo, aux_layers: Sequence[int] | None = None) -> Eagle3Head:
    """Read a head for `target`, in float32 on the CPU. `aux_layers` overrides the target states that it reads (see
    `Eagle3Spec.aux_layers`).

    Raises CheckpointError (files missing, tensors that disagree with the config or with the target's widths) and
    UnsupportedModelError (a flag that this runtime does not know or cannot honour).
    """
    with about(str(folder)):
        files = read_files(Path(folder), EAGLE3_FORMATS)
        settings, state = files.settings, files.state
        spec = _make_spec(files, target, aux_layers)
        target_ids = take_target_ids(state, target)
        if not spec.final_norm and settings.get("use_last_layernorm", True):
            state.pop("norm.weight", None)  # SpecForge writes an unused one
        if spec.owns_embed and "embed_tokens.weight" in state:  # the table may be padded
            state["embed_tokens.weight"] = state["embed_tokens.weight"][: spec.vocab_size]
        try:
            head = fill_head(lambda: Eagle3Head(spec), state)
        except CheckpointError as error:
            hint = ""
            if str(error).startswith("tensor fc.weight is ["):
                states = list(spec.aux_layers) or "after the final norm"
                hint = f"; trained on other states than {states}? Then give eagle3_drafter(..., aux_layers=[...])"
            says = ", ".join(f"{key}={settings[key]}" for key in SHAPING if key in settings)
            raise CheckpointError(f"{error}{hint}; config.json has {says}") from error
        head.target_ids = target_ids
        if (Path(folder) / "adapter_config.json").is_file():
            logger.warning(
                "%s has an adapter next to the head, which was trained with it on the target: without the adapter "
                "fewer drafts are accepted; load the target with it by peft, and give that model as target",
                folder,
            )
        return head


def write_head(folder: str | Path, head: Eagle3Head, target: TargetInfo) -> None:
    """Write a head in the SpecForge format, so that every reader finds the same target states in it."""
    spec, state = head.spec, head.state_dict()
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
    if spec.norm_output:  # servers read it at the top level, but there SpecForge gives it another meaning
        config["norm_output"] = eagle_config["norm_output"] = True
    if not spec.final_norm:
        eagle_config["use_last_layernorm"] = False
    count = len(target.layout.layers)
    if not spec.aux_layers or resolve_aux_ids(config, count, None) != spec.aux_layers:
        raise UnsupportedModelError(
            f"target states {list(spec.aux_layers)} of a head would be read as others in the SpecForge format; "
            f"begin with state 2, as in {[2, count // 2, count - 3]}"
        )
    tensors = {key.replace("layers.0.", "midlayer.", 1): tensor for key, tensor in state.items()}
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = ids.new_zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    write_folder(folder, config, tensors)


# keys whose meaning depends on their place


def resolve_aux_ids(config: Config, num_layers: int, override: Sequence[int] | None) -> tuple[int, ...]:
    """Read the boundaries from the config of a head for n target layers: numbers of layers that the states enter; n
    means the output of the last layer.

    The caller's ids come first, then those at the top level (boundaries), then those in `eagle_config`. The latter are
    boundaries if they contain n or begin with 2; otherwise they name layers by their output, so 1 is added, as to
    `target_layer_ids`. Default, with a warning: 2, n // 2, n - 3, which is [1, n // 2 - 1, n - 4] by output.
    """
    nested, where, shift = (config.get(EAGLE_CONFIG) or {}).get(AUX_IDS), AUX_IDS, 0
    ids: list[Any]
    if override is not None:
        ids, where = list(override), "aux_layers"
    elif config.get(AUX_IDS):
        ids = config[AUX_IDS]
    elif nested:
        ids, where = nested, f"{EAGLE_CONFIG}.{AUX_IDS}"
        shift = int(num_layers not in ids and ids[0] != 2)
        if shift and ids[0] != 1:
            hint = "%s=%s is read as layers' outputs; if acceptance is near zero, try eagle3_drafter(aux_layers=%s)"
            logger.warning(hint, where, ids, ids)
    elif config.get(OUTPUT_IDS):
        ids, where, shift = config[OUTPUT_IDS], OUTPUT_IDS, 1
    else:
        ids, where = [2, num_layers // 2, num_layers - 3], "the default"
        logger.warning(
            "an EAGLE-3 head whose config.json has no %s: it is assumed to read the states that enter layers %s of the "
            "target, as most do; if acceptance is near zero, `specdec doctor` tries others",
            AUX_IDS,
            ", ".join(map(str, ids)),
        )
    if not ids or any(type(i) is not int or not 0 <= i + shift <= num_layers for i in ids):
        raise UnsupportedModelError(
            f"EAGLE-3 auxiliary layers {ids} (from {where}): the target has states 0..{num_layers}, of which "
            f"{num_layers} is its last layer's output; name the right ones by eagle3_drafter(..., aux_layers=[...])"
        )
    return tuple(i + shift for i in ids)


def read_norm_output(config: Config, norm: torch.Tensor | None) -> tuple[bool, bool]:
    """Interpret `norm_output`, which has two meanings. Returns (does lm_head read norm(a), does the next draft step
    read it).

    In `eagle_config` and in speculators' format it concerns the next draft step, as in vLLM and SGLang. At the top
    level of the SpecForge format it concerned lm_head until 2026-09-15, and concerns the next draft step since. If it
    is False there: lm_head reads norm(a) if `norm` was trained, that is, if its gains [H] differ from each other. If it
    is True there: a file from a later release of transformers has the new meaning; for any other the old one is
    assumed, with a warning.
    """
    nested, top = (config.get(EAGLE_CONFIG) or {}).get("norm_output"), config.get("norm_output")
    if nested is not None:
        return True, bool(nested)
    if top is None or is_speculators(config):
        return True, bool(top)
    if not top:
        return norm is not None and not bool(torch.all(norm == norm[0])), False
    saved_by = re.fullmatch(r"(\d+)\.(\d+)\.\d+", str(config.get("transformers_version")))
    if saved_by and (int(saved_by[1]), int(saved_by[2])) >= FIRST_AFTER_CHANGE:
        return True, True
    logger.warning(
        "norm_output=True of an EAGLE-3 head is read as SpecForge meant it until 2026-09-15 (the next draft step reads "
        "a, not norm(a)); if it was trained later, put norm_output into eagle_config: `specdec doctor` tries both"
    )
    return True, False


# config, tensors and target together


def _make_spec(files: HeadFiles, target: TargetInfo, aux_layers: Sequence[int] | None) -> Eagle3Spec:
    """Make the spec from config and tensors. Where two of config, tensors and target state a value, they must agree;
    shapes are checked later."""
    settings, state = files.settings, files.state
    if FIRST_TENSOR not in state:
        raise UnsupportedModelError(f"there is no {FIRST_TENSOR} (or midlayer); specdec runs Llama-type layers")
    reads_states = settings.get("use_aux_hidden_state", True)
    ids = resolve_aux_ids(files.config, len(target.layout.layers), aux_layers) if reads_states else ()
    lm_head_normed, fed_back = read_norm_output(files.config, state.get("norm.weight"))
    table, head, t2d = (len(state[key]) if key in state else None for key in VOCABULARY_TENSORS)
    stated: dict[tuple[str, str], Any] = {
        ("vocab_size", "embed_tokens"): table,
        ("vocab_size", "t2d"): t2d,
        ("draft_vocab_size", "lm_head"): head,
        ("num_aux_hidden_states", "the list of states"): len(ids) or None,
        ("num_target_layers", f"target {target.name}"): len(target.layout.layers),
        ("has_lm_head", "the file, by its lm_head.weight,"): False if head is None else None,
    }
    if settings.get("num_hidden_layers") == len(target.layout.layers):
        stated[("num_hidden_layers", "the file")] = None  # the target's, as in the config.json of Vicuna 13B's head
    files.require_same(stated, target)
    vocab, drafted = settings.get("vocab_size", table), settings.get("draft_vocab_size")
    if vocab is not None and vocab < target.vocab_size:
        raise CheckpointError(f"vocab_size={vocab}, target {target.name} has {target.vocab_size} tokens")
    if head is None and t2d is None and drafted not in (None, vocab, target.vocab_size):
        raise CheckpointError(f"draft_vocab_size={drafted}, but there is no lm_head and no d2t")
    if head is None and table is not None and files.config.get("tie_word_embeddings"):
        raise UnsupportedModelError("tie_word_embeddings=True with embed_tokens and no lm_head; store an lm_head too")
    if settings.get("use_last_layernorm") and not lm_head_normed:
        raise CheckpointError(
            "use_last_layernorm=True, but norm_output=False at the top level means that lm_head reads states without "
            "a norm; put norm_output into eagle_config if it is about the next draft step"
        )
    _require_width(settings["hidden_size"], state.get("fc.weight"), len(ids), target)
    same_width = settings["hidden_size"] == target.hidden_size
    spec = Eagle3Spec(
        **files.fields(),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        aux_layers=ids,
        windows=read_windows(files.format, settings, files.num_layers),
        draft_vocab_size=head,
        rope=read_rope(settings, by_layer_type=is_speculators(files.config)),
        qk_norm="layers.0.self_attn.q_norm.weight" in state,
        has_fc="fc.weight" in state or bool(ids) or not same_width,
        owns_embed=table is not None or not same_width,
        final_norm=lm_head_normed and settings.get("use_last_layernorm", True),
        norm_output=fed_back,
    )
    for key in ("query_pre_attn_scalar", "rotary_dim", "attention_head_dim"):
        if settings.get(key, spec.head_dim) != spec.head_dim:
            raise UnsupportedModelError(f"{key}={settings[key]:g}; supported is head_dim, {spec.head_dim}")
    if is_speculators(files.config) and "norm_before_residual" not in settings:
        logger.warning(
            "an EAGLE-3 head in speculators' format whose config.json has no norm_before_residual: it is read as "
            "false, as speculators does; vLLM reads true; if acceptance is low, `specdec doctor` tries both"
        )
    if spec.norm_before_fc and spec.fc_norm:
        raise CheckpointError("norm_before_fc=True and fc_norm=True; a head has one or the other")
    return spec


def _require_width(hidden_size: int, fc: torch.Tensor | None, num_states: int, target: TargetInfo) -> None:
    """Raise CheckpointError if `fc` [H, states * W] was made for states of another width than the target's."""
    if fc is None or not num_states or fc.shape[-1] % num_states:
        return
    width = fc.shape[-1] // num_states
    other_states = fc.shape[-1] % target.hidden_size == 0 and width != hidden_size  # or more or fewer of the same width
    if width != target.hidden_size and not other_states:
        raise CheckpointError(
            f"the head was made for a target of hidden size {width} (fc.weight reads {num_states} states), target "
            f"{target.name} has {target.hidden_size}; give the target that it was trained with"
        )
