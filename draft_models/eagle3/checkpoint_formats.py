"""What published EAGLE-3 checkpoints hold: tables of config keys and tensors, and rules for what tables cannot say.

    dialect      published by                    recognised by                    layer keys stand in
    SpecForge    SafeAILab, SpecForge, lmsys     an architecture with "eagle3"    the top level
    ModelOpt     NVIDIA                          in it, or `draft_vocab_size`     the same; more flags in `eagle_config`
    speculators  RedHatAI                        `speculators_model_type`         `transformer_layer_config`

A config key is HONOURED (read into `Eagle3Spec`, or compared with the tensors and the target), NEUTRAL (accepted with
a value that changes nothing) or HARMLESS (training, generation, storage). Any other key that is set is refused by name.
"""

import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger("specdec")

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_CONFIG, EAGLE_CONFIG = "transformer_layer_config", "eagle_config"
LAYERS = ("llama", "qwen3", "mistral")
"""Values of `model_type`: kinds of decoder layers that `Eagle3Head` can be made of."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def is_eagle3_config(config: Mapping[str, Any]) -> bool:
    """Is this config.json one of an EAGLE-3 head? (A plain Llama with `draft_vocab_size` is: yuhuili's heads.)"""
    if is_speculators(config):
        return bool(config["speculators_model_type"] == "eagle3")
    names = [str(name).lower() for name in config.get("architectures") or ()]
    return any("eagle3" in name for name in names) or config.get("draft_vocab_size") is not None


class Kind(NamedTuple):
    """What a key must hold."""

    words: str
    holds: Callable[[Any], bool]


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and value >= 0)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
TEXT = Kind("a string", lambda value: isinstance(value, str))
ANY = Kind("anything", lambda value: True)

HONOURED: dict[str, tuple[Kind, str | None]] = {
    # key: what it must hold, field of Eagle3Spec (None: compared, or read by a rule of checkpoint.py)
    "hidden_size": (COUNT, "hidden_size"),
    "intermediate_size": (COUNT, "intermediate_size"),
    "num_attention_heads": (COUNT, "num_heads"),
    "num_key_value_heads": (COUNT, "num_kv_heads"),
    "head_dim": (COUNT, "head_dim"),
    "max_position_embeddings": (COUNT, "max_position_embeddings"),
    "rms_norm_eps": (NUMBER, "rms_norm_eps"),
    "hidden_act": (TEXT, "hidden_act"),
    "norm_before_residual": (FLAG, "norm_before_residual"),
    "norm_before_fc": (FLAG, "norm_before_fc"),
    "fc_norm": (FLAG, "fc_norm"),
    **dict.fromkeys(("norm_output", "use_aux_hidden_state", "use_last_layernorm"), (FLAG, None)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "has_lm_head", "use_sliding_window"), (FLAG, None)),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "target_hidden_size"), (COUNT, None)),
    **dict.fromkeys(("num_hidden_layers", "num_aux_hidden_states"), (COUNT, None)),
    **dict.fromkeys(("max_window_layers", "query_pre_attn_scalar", "rope_theta", "rotary_dim"), (NUMBER, None)),
    **dict.fromkeys(("rope_parameters", "rope_scaling", LAYER_CONFIG, EAGLE_CONFIG), (OBJECT, None)),
    **dict.fromkeys(("architectures", "layer_types", "model_type", "sliding_window"), (ANY, None)),
    "quantization_config": (ANY, None),
    AUX_IDS: (LIST, None),
}
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
HARMLESS_NAMES = """
training, precision, serving:
    chunk_size_feed_forward embed_requires_grad enable_sp_ulysses has_no_defaults_at_init is_decoder initializer_range
    model_max_length num_eagle_features parallel_draft_heads_num_layers attn_implementation auto_map pretraining_tp
    use_bfloat16 use_cache
generation and output, which old releases of transformers kept in every config:
    bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size num_beam_groups num_beams
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_return_sequences
    output_attentions output_hidden_states output_scores remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate begin_suppress_tokens suppress_tokens temperature top_k top_p torchscript typical_p
    cross_attention_hidden_size finetuning_task id2label label2id prefix problem_type task_specific_params
    tf_legacy_loss tie_encoder_decoder tokenizer_class
decided by the tensors (a head has a table, an lm_head and a dense MLP, or says nothing of them):
    decoder_sparse_step mlp_only_layers norm_topk_prob tie_word_embeddings
"""
HARMLESS = frozenset(re.sub(r"^\S.*$", "", HARMLESS_NAMES, flags=re.MULTILINE).split())
HARMLESS_NAME = re.compile(r"^_|^speculators_|(^|_)(token_ids?|version|dtype|path|dropout|experts?|router|moe)(_|$)")
"""Names of bookkeeping, of training, and of parts that would need tensors of their own."""

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
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    # the numbers that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROPE_KEYS: dict[str, Kind] = {
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor"), NUMBER),
    **dict.fromkeys(("low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"), NUMBER),
    **dict.fromkeys(("partial_rotary_factor", "rope_theta"), NUMBER),
    **dict.fromkeys(("rope_type", "truncate"), ANY),
    **dict.fromkeys(("mrope_section", "mrope_interleaved"), ANY),  # the three positions of a text token are one
}

Settings = dict[str, Any]


def own_name(key: str) -> str | None:
    """The name in `Eagle3Head` of a tensor in a file; None: it is not read."""
    for pattern, name in TENSORS:
        if name is None and re.search(pattern, key):
            return None
        key = re.sub(pattern, name or "", key)
    return key


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The honoured keys that are set, wherever they stand, except those of `BY_PLACE`; defaults of three sizes.

    Raises UnsupportedModelError for a key that is unknown or has a value that is not neutral, CheckpointError for one
    that has two values, has the wrong kind or is missing.
    """
    # a speculator's top level has a model_type of its own
    entries = [("", k, v) for k, v in config.items() if k != "model_type" or not is_speculators(config)]
    for place in (LAYER_CONFIG, EAGLE_CONFIG):
        if isinstance(inner := config.get(place), dict):
            entries += [(f"{place}.", k, v) for k, v in inner.items()]
    entries.sort(key=lambda entry: entry[1] != "model_type")  # other kinds of layers have keys of their own
    settings: Settings = {}
    for place, key, value in entries:
        where = f"{place}{key}={reprlib.repr(value)}"
        if value is None or key in HARMLESS or HARMLESS_NAME.search(key):
            continue
        if key == "model_type" and value not in LAYERS:
            made_of = ", ".join(map(str, config.get("architectures") or ["?"]))
            raise UnsupportedModelError(
                f"a head of {value} layers ({made_of}); specdec runs Llama- and Qwen3-type layers"
            )
        if key == "quantization_config":
            raise UnsupportedModelError("the head is quantised; specdec loads fp32, fp16 and bf16 heads")
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                raise UnsupportedModelError(f"{where}; specdec runs EAGLE-3 heads with {NEUTRAL[key][0]} only")
            continue
        if key not in HONOURED or (place == f"{LAYER_CONFIG}." and key in BY_PLACE):
            raise UnsupportedModelError(
                f"flag {where} is not known and may change what the head computes; remove it from config.json "
                f"if it does not; known are {', '.join(sorted(HONOURED | NEUTRAL))}"
            )
        kind = HONOURED[key][0]
        if not kind.holds(value):
            raise CheckpointError(f"{where}, expected {kind.words}")
        value = float(value) if kind is NUMBER else value
        if key not in BY_PLACE and settings.setdefault(key, value) != value:
            raise CheckpointError(f"{key} is {settings[key]} in one place of its config and {value} in another")
    for key in ("hidden_size", "num_attention_heads", "intermediate_size"):
        if key not in settings:
            raise CheckpointError(f"config.json says no {key}")
    heads = settings["num_attention_heads"]
    head_dim = 128 if settings.get("model_type") == "qwen3" else settings["hidden_size"] // heads
    return {"num_key_value_heads": heads, "head_dim": head_dim, "model_type": "llama", **settings}


def resolve_aux_ids(config: Mapping[str, Any], num_layers: int, override: Sequence[int] | None) -> tuple[int, ...]:
    """Boundaries (layers that the states enter; num_layers: what leaves the last) from a config of n layers.

    The caller's ids, else the top level's (boundaries), else those of `eagle_config`: boundaries if n or a leading 2 is
    among them, else layers named by their output, so one more. Default: 2, n // 2, n - 3, as [1, n // 2 - 1, n - 4]
    says.
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
    if not ids or any(type(i) is not int or not 0 <= i <= num_layers for i in ids):
        raise UnsupportedModelError(
            f"EAGLE-3 auxiliary layers {ids} (from {where}): the target has states 0..{num_layers}, "
            f"{num_layers} being what leaves its last layer; eagle3_drafter(..., aux_layers=[...]) says which"
        )
    return tuple(ids)


def read_norm_output(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """(does lm_head read norm(a), does the next draft step): `norm_output` means one or the other.

    In `eagle_config` and in speculators' format it is the second, as for vLLM and SGLang. At the top level of the
    SpecForge format it is the first, as SpecForge trains up to 0.2: its heads feed a back un-normed, always.
    """
    nested, top = (config.get(EAGLE_CONFIG) or {}).get("norm_output"), config.get("norm_output")
    if nested is not None:
        return True, bool(nested)
    if top is None or is_speculators(config):
        return True, bool(top)
    logger.warning(
        "norm_output=%s of an EAGLE-3 head is read as SpecForge means it (lm_head reads %s, the next draft step a); if "
        "it says whether norm(a) is fed back, as for vLLM and SGLang, put it into eagle_config",
        top,
        "norm(a)" if top else "a",
    )
    return bool(top), False


def read_windows(settings: Settings, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each draft layer, by `layer_types`. Without them a `sliding_window` means nothing, as in both
    reference packages, except to Qwen3's config, where the layers from `max_window_layers` on slide if asked to."""
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    use = settings.get("use_sliding_window", kinds is not None)
    says = f"sliding_window={window} with layer_types={reprlib.repr(kinds)} on {num_layers} layers"
    if kinds is None:
        is_qwen3 = settings["model_type"] == "qwen3"
        first = int(settings.get("max_window_layers", 28)) if is_qwen3 and use and window else num_layers
        kinds = [LAYER_TYPES[i >= first] for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(k not in LAYER_TYPES for k in kinds[:num_layers]):
        raise UnsupportedModelError(f"{says}; expected one of {', '.join(LAYER_TYPES)} for each")
    kinds = kinds[:num_layers]  # some heads carry the list of their target
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    if type(window) is not int or window < 1:
        raise UnsupportedModelError(f"{says}; a sliding layer needs a whole number of 1 or more")
    if not use:
        raise CheckpointError(f"{says}, but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_rope(settings: Settings, by_layer_type: bool) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, from either spelling; for `rope_theta` the newer one wins."""
    newer, older = (_rope_object(settings.get(key)) for key in ("rope_parameters", "rope_scaling"))
    if by_layer_type and isinstance(newer.get("sliding_attention"), dict):
        newer = _rope_object(newer["sliding_attention"])
    stated = [{key: value for key, value in rope.items() if key != "rope_theta"} for rope in (newer, older) if rope]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise CheckpointError(f"rope_parameters={newer} contradict rope_scaling={older}")
    rope = {"rope_type": "default"} | (newer or older)
    rope["rope_theta"] = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    kind, partial = rope["rope_type"], rope.get("partial_rotary_factor", 1.0)
    if kind not in ROPE_TYPES or partial != 1.0:
        raise UnsupportedModelError(
            f"rope_type={kind!r} with partial_rotary_factor={partial}; supported over whole heads are "
            f"{', '.join(ROPE_TYPES)}"
        )
    for key, value in rope.items():
        if key not in ROPE_KEYS:
            raise UnsupportedModelError(f"{key}={reprlib.repr(value)} of its RoPE is not known")
        if not ROPE_KEYS[key].holds(value):
            raise CheckpointError(f"{key}={reprlib.repr(value)} of its RoPE, expected {ROPE_KEYS[key].words}")
    if missing := [key for key in ("rope_theta", *ROPE_TYPES[kind]) if not rope.get(key)]:
        raise CheckpointError(f"rope_type={kind!r} without {', '.join(missing)}")
    rope["rope_theta"] = float(rope["rope_theta"])
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if (not mscale) if all_dim else mscale not in (None, 1):
        raise UnsupportedModelError(
            f"RoPE with mscale={mscale} and mscale_all_dim={all_dim}, which SpecForge and transformers read "
            "differently; supported are both above 0, or neither"
        )
    return rope


def _rope_object(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries that are set, `type` under its newer name."""
    return {"rope_type" if key == "type" else key: v for key, v in (value or {}).items() if v is not None}
