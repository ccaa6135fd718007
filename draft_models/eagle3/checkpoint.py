"""EAGLE-3 heads on disk: a folder in one of the published formats <-> one spec and one state dict.

Tensors get the names of `Eagle3Head` (`midlayer.` becomes `layers.0.`), the draft vocabulary becomes a list of target
tokens. Invariant: what config, tensors and target say about each other agrees, or the head is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

from specdec.draft_models.eagle3.checkpoint_keys import AUX_IDS, NORM_FLAGS, Settings, is_speculators, read_settings
from specdec.draft_models.eagle3.head_config import (
    Eagle3Spec,
    TargetShape,
    read_norm_output,
    read_rope,
    read_windows,
    resolve_aux_ids,
)
from specdec.errors import CheckpointError, UnsupportedModelError, first_line, naming_file

RENAMED = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
UNUSED_TENSORS = re.compile(r"(^|\.)rotary_emb\.|^verifier_(lm_head|norm)\.")


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """A head read from disk: tensors under the names of `Eagle3Head`; target_ids [draft_V]: target token of each draft
    token, None for the full vocabulary."""

    spec: Eagle3Spec
    state: dict[str, torch.Tensor]
    target_ids: torch.Tensor | None


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises CheckpointError when there is none, or it is no JSON object."""
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} holds no config.json that can be read ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{str(path)!r}: config.json holds {type(config).__name__}, an object is wanted")
    return config


def read_head(folder: str | Path, target: TargetShape, aux_layers: Sequence[int] | None = None) -> Eagle3Checkpoint:
    """Read a head for `target`. `aux_layers` overrides which target states it gets (see `Eagle3Spec.aux_layers`).

    Raises CheckpointError (files missing, tensors that disagree with the config or with the target's widths) and
    UnsupportedModelError (a flag that this runtime does not know or cannot honour).
    """
    path = Path(folder)
    config, name = read_config(path), str(folder)
    settings = read_settings(config, name)
    state = _normalise(_load_tensors(path))
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    _check_sizes(settings, state, t2d, target, name)
    spec = _make_spec(config, settings, state, target, aux_layers, name)
    if not spec.final_norm:
        state.pop("norm.weight", None)  # SpecForge's, which its head does not use
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
    if windows := {window for window in spec.windows if window is not None}:
        if len(windows) > 1:
            raise UnsupportedModelError(f"a head with sliding windows {sorted(windows)}; the format has room for one")
        kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
        config |= {"layer_types": kinds, "sliding_window": windows.pop(), "use_sliding_window": True}
    config |= {flag: True for flag in NORM_FLAGS if getattr(spec, flag)}
    if spec.norm_output:  # servers read it at the top level, where SpecForge means something else by it
        config["eagle_config"]["norm_output"] = True
    if not spec.final_norm:
        config["eagle_config"]["use_last_layernorm"] = False
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
    with naming_file(out / "config.json"):
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    weights = out / "model.safetensors"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{str(weights)!r} cannot be written: {first_line(error)}") from error


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(f"{str(path)!r} holds no *.safetensors and no pytorch_model*.bin")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except Exception as error:  # a broken or hostile file can raise anything
            raise CheckpointError(
                f"{str(file)!r} cannot be read: {str(error).strip().partition(chr(10))[0]}"
            ) from error
    return tensors


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


def _check_sizes(
    settings: Settings,
    state: Mapping[str, torch.Tensor],
    t2d: torch.Tensor | None,
    target: TargetShape,
    name: str,
) -> None:
    """Raise CheckpointError when a size that the config states is not that of the file or of the target."""
    first = "layers.0.self_attn.q_proj.weight"
    if first not in state:
        raise UnsupportedModelError(f"{name}: there is no {first} (or midlayer); specdec runs Llama-type layers")
    for key in ("hidden_size", "num_attention_heads", "intermediate_size"):
        if key not in settings:
            raise CheckpointError(f"{name}: config.json says no {key}")
    _check_vocabulary(settings, state, t2d, target, name)
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv_heads, head_dim = kv_heads_of(settings), head_dim_of(settings)
    if heads % kv_heads:
        raise CheckpointError(f"{name}: num_attention_heads={heads} do not group over num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise UnsupportedModelError(f"{name}: head_dim={head_dim}; RoPE turns pairs of numbers, so it must be even")
    for key in ("query_pre_attn_scalar", "rotary_dim"):
        if settings.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"{name}: {key}={settings[key]}; with head_dim={head_dim} it must be that too")
    count = count_layers(state)
    if settings.get("num_hidden_layers", count) != count:
        raise CheckpointError(f"{name}: num_hidden_layers={settings['num_hidden_layers']}, the file holds {count}")
    queries, keys = heads * head_dim, kv_heads * head_dim
    of_queries = f"num_attention_heads={heads} with head_dim={head_dim}"
    of_keys = f"num_key_value_heads={kv_heads} with head_dim={head_dim}"
    of_hidden, of_mlp = f"hidden_size={hidden}", f"intermediate_size={settings['intermediate_size']}"
    for layer in range(count):
        width = hidden * (2 if layer == 0 else 1)
        wanted = {
            "self_attn.q_proj": (of_queries, [queries, width]),
            "self_attn.k_proj": (of_keys, [keys, width]),
            "self_attn.v_proj": (of_keys, [keys, width]),
            "self_attn.o_proj": (of_hidden, [hidden, queries]),
            "mlp.gate_proj": (of_mlp, [settings["intermediate_size"], hidden]),
        }
        for part, (says, shape) in wanted.items():
            tensor = state.get(f"layers.{layer}.{part}.weight")
            if tensor is not None and list(tensor.shape) != shape:
                raise CheckpointError(
                    f"{name}: {says} and hidden_size={hidden} contradict the file: layers.{layer}.{part}.weight is "
                    f"{list(tensor.shape)}, the config says {shape}"
                )


def _check_vocabulary(
    settings: Settings,
    state: Mapping[str, torch.Tensor],
    t2d: torch.Tensor | None,
    target: TargetShape,
    name: str,
) -> None:
    if settings.get("target_hidden_size", target.hidden_size) != target.hidden_size:
        raise CheckpointError(
            f"{name}: target_hidden_size={settings['target_hidden_size']}, but target {target.name} has "
            f"{target.hidden_size}; the head was made for another target"
        )
    table, head = state.get("embed_tokens.weight"), state.get("lm_head.weight")
    if table is None and settings["hidden_size"] != target.hidden_size:
        raise CheckpointError(
            f"{name}: hidden size {settings['hidden_size']} differs from the target's {target.hidden_size}, and it has "
            "no embed_tokens of its own (hidden_size in config.json)"
        )
    vocab, draft_vocab = settings.get("vocab_size"), settings.get("draft_vocab_size")
    if table is not None and len(table) < target.vocab_size:
        raise CheckpointError(f"{name}: embeds {len(table)} tokens, target {target.name} has {target.vocab_size}")
    if vocab is not None:
        for tensor, what in ((table, "embed_tokens embeds"), (t2d, "t2d tells of")):
            if tensor is not None and len(tensor) != vocab:
                raise CheckpointError(f"{name}: vocab_size={vocab}, but {what} {len(tensor)} tokens")
        if vocab < target.vocab_size:
            raise CheckpointError(f"{name}: vocab_size={vocab}, target {target.name} has {target.vocab_size} tokens")
    if head is not None and draft_vocab not in (None, len(head)):
        raise CheckpointError(f"{name}: draft_vocab_size={draft_vocab}, but lm_head has {len(head)} rows")
    if head is None and t2d is None and draft_vocab not in (None, vocab, target.vocab_size):
        raise CheckpointError(f"{name}: draft_vocab_size={draft_vocab}, but there is no lm_head and no d2t")


def count_layers(state: Mapping[str, torch.Tensor]) -> int:
    return 1 + max(int(key.split(".")[1]) for key in state if re.match(r"layers\.\d+\.", key))


def kv_heads_of(settings: Settings) -> int:
    heads: int = settings["num_attention_heads"]
    return int(settings.get("num_key_value_heads", heads))


def head_dim_of(settings: Settings) -> int:
    """As the config says, else by the rule of its kind of layers."""
    by_kind = 128 if settings["model_type"] == "qwen3" else settings["hidden_size"] // settings["num_attention_heads"]
    return int(settings.get("head_dim", by_kind))


def _make_spec(
    config: Mapping[str, Any],
    settings: Settings,
    state: Mapping[str, torch.Tensor],
    target: TargetShape,
    aux_layers: Sequence[int] | None,
    name: str,
) -> Eagle3Spec:
    ids = resolve_aux_ids(config, target.num_layers, aux_layers) if settings.get("use_aux_hidden_state", True) else ()
    hidden = settings["hidden_size"]
    width = max(1, len(ids)) * target.hidden_size
    fc = state.get("fc.weight")
    if fc is not None and fc.shape[1] != width:
        cause = "made for another target"
        if fc.shape[1] % target.hidden_size == 0:
            cause = f"trained on other states: give eagle3_drafter(..., aux_layers=[...]), or {cause}"
        raise CheckpointError(
            f"{name}: fc takes {fc.shape[1]} numbers, but the states {list(ids) or 'after the final norm'} of target "
            f"{target.name} (hidden size {target.hidden_size}) give {width}; it was {cause}"
        )
    if fc is None and (ids or hidden != target.hidden_size):
        raise CheckpointError(f"{name}: no fc.weight, needed to bring {width} target numbers to hidden size {hidden}")
    lm_head_normed, norm_fed_back = read_norm_output(config, name)
    _require_agreement(settings, state, len(ids), lm_head_normed, name)
    activation = settings.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise UnsupportedModelError(f"{name}: hidden_act={activation!r} is no activation that transformers knows")
    head, table = state.get("lm_head.weight"), state.get("embed_tokens.weight")
    if head is None and table is not None and config.get("tie_word_embeddings"):
        raise UnsupportedModelError(
            f"{name}: tie_word_embeddings=True with embed_tokens and no lm_head; store lm_head beside it"
        )
    return Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=settings["intermediate_size"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=kv_heads_of(settings),
        head_dim=head_dim_of(settings),
        aux_layers=ids,
        windows=read_windows(settings, count_layers(state), name),
        draft_vocab_size=None if head is None else len(head),
        rope=read_rope(settings, name, speculators=is_speculators(config)),
        max_position_embeddings=settings.get("max_position_embeddings", 4096),
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        hidden_act=activation,
        qk_norm="layers.0.self_attn.q_norm.weight" in state,
        biases=frozenset(key.removesuffix(".bias") for key in state if key.endswith(".bias")),
        has_fc=fc is not None,
        owns_embed=table is not None,
        final_norm=lm_head_normed and settings.get("use_last_layernorm", True),
        norm_before_residual=settings.get("norm_before_residual", False),
        norm_before_fc=settings.get("norm_before_fc", False),
        fc_norm=settings.get("fc_norm", False),
        norm_output=norm_fed_back,
    )


def _require_agreement(
    settings: Settings, state: Mapping[str, torch.Tensor], num_states: int, lm_head_normed: bool, name: str
) -> None:
    """Flags that own tensors must have them, and the other way round; flags must not contradict each other."""
    owners = (
        ("norm_before_fc", False, "input_norm.weight"),
        ("fc_norm", False, "fc_norm.0.weight"),
        ("use_last_layernorm", True, "norm.weight"),
    )
    for flag, default, tensor in owners:
        value = bool(settings.get(flag, default))
        if value != (tensor in state):
            has = "is there" if tensor in state else "is missing"
            raise CheckpointError(
                f"{name}: {flag}={value}, but {tensor} {has}; the config does not belong to the weights"
            )
    for flag, part in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")):
        bias = f"layers.0.{part}.bias"
        if flag in settings and settings[flag] != (bias in state):
            raise CheckpointError(
                f"{name}: {flag}={settings[flag]}, but there is {'a' if bias in state else 'no'} {bias}"
            )
    if settings.get("norm_before_fc") and settings.get("fc_norm"):
        raise CheckpointError(f"{name}: norm_before_fc=True and fc_norm=True; a head has one or the other")
    if settings.get("use_last_layernorm") and not lm_head_normed:
        raise CheckpointError(
            f"{name}: use_last_layernorm=True, but norm_output=False at the top level means that lm_head reads what is "
            "not normed; put norm_output into eagle_config if it says what is fed back"
        )
    count = settings.get("num_aux_hidden_states")
    if count is not None and num_states and count != num_states:
        raise CheckpointError(f"{name}: num_aux_hidden_states={count}, but {num_states} states are named")
    if settings.get("has_lm_head") and "lm_head.weight" not in state:
        raise CheckpointError(f"{name}: has_lm_head=True, but lm_head.weight is missing")


def _target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, spec: Eagle3Spec, target: TargetShape, name: str
) -> torch.Tensor | None:
    """d2t holds offsets: draft token j is target token j + d2t[j]."""
    size = spec.draft_vocab_size
    if d2t is None:
        if size not in (None, target.vocab_size):
            raise CheckpointError(
                f"{name}: lm_head has {size} rows, the target {target.vocab_size} tokens, and no d2t maps them"
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
