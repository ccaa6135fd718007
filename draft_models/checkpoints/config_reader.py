"""What config.json of a head of any family says: keys by table, sliding windows, RoPE, and whom it must agree with.

A key is known to its family (read, or compared with tensors and target), neutral (accepted with a value that changes
nothing) or harmless (training, generation, storage). Any other key that is set is refused by name.
"""

import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from transformers.activations import ACT2FN

from specdec.errors import CheckpointError, UnsupportedModelError

Settings = dict[str, Any]


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
INDEX = Kind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)

FIELDS: dict[str, tuple[Kind, str]] = {
    # key: what it must hold, field of HeadSpec
    "hidden_size": (COUNT, "hidden_size"),
    "intermediate_size": (COUNT, "intermediate_size"),
    "num_attention_heads": (COUNT, "num_heads"),
    "num_key_value_heads": (COUNT, "num_kv_heads"),
    "head_dim": (COUNT, "head_dim"),
    "max_position_embeddings": (COUNT, "max_position_embeddings"),
    "rms_norm_eps": (NUMBER, "rms_norm_eps"),
    "hidden_act": (TEXT, "hidden_act"),
}
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")
"""Keys that every config must have."""
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


def read_keys(
    entries: Iterable[tuple[str, str, Any]],
    known: Mapping[str, Kind],
    *,
    required: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] = {},
    by_place: Collection[str] = (),
    harmless: Collection[str] = (),
) -> Settings:
    """The known keys that are set, of entries (place, key, value). by_place: keys whose meaning depends on the place,
    which are only checked.

    Raises UnsupportedModelError for a key that is unknown or has a value that is not neutral, CheckpointError for one
    that has two values, has the wrong kind or is missing.
    """
    settings: Settings = {}
    for place, key, value in entries:
        where = f"{place}{key}={reprlib.repr(value)}"
        if value is None:
            continue
        if key not in known and (key in HARMLESS or key in harmless or HARMLESS_NAME.search(key)):
            continue
        if key == "quantization_config":
            raise UnsupportedModelError("the head is quantised; specdec loads fp32, fp16 and bf16 heads")
        if key in neutral:
            if value not in neutral[key]:
                raise UnsupportedModelError(f"{where}; specdec runs EAGLE-3 heads with {neutral[key][0]} only")
            continue
        if key not in known:
            raise unknown_flag(where, {*known, *neutral})
        if not known[key].holds(value):
            raise CheckpointError(f"{where}, expected {known[key].words}")
        value = float(value) if known[key] is NUMBER else value
        if key not in by_place and settings.setdefault(key, value) != value:
            raise CheckpointError(f"{key} is {settings[key]} in one place of its config and {value} in another")
    for key in required:
        if key not in settings:
            raise CheckpointError(f"config.json says no {key}")
    return settings


def unknown_flag(where: str, known: Collection[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"flag {where} is not known and may change what the head computes; remove it from config.json if it does "
        f"not; known are {', '.join(sorted(known))}"
    )


def require_same(settings: Settings, said: Mapping[tuple[str, str], Any]) -> None:
    """Raise CheckpointError for a key that is not what another says. said: (key, who else says it) -> what the key must
    be if it is set; None: anything."""
    for (key, where), expected in said.items():
        if expected is not None and settings.get(key, expected) != expected:
            raise CheckpointError(
                f"{key}={settings[key]}, but {where} says {expected}; give a config.json, weights and a target "
                "that belong together"
            )


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of `HeadSpec`. Raises CheckpointError and UnsupportedModelError for heads that do not group, or turn, and
    an activation that is not known."""
    heads, kv_heads, head_dim = (settings[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads={heads} do not group over num_key_value_heads={kv_heads}")
    if head_dim % 2 or not head_dim:
        raise UnsupportedModelError(f"head_dim={head_dim}; RoPE turns pairs of numbers, so it must be even")
    if settings.get("hidden_act", "silu") not in ACT2FN:
        raise UnsupportedModelError(f"hidden_act={settings['hidden_act']!r} is no activation that transformers knows")
    return {field: settings[key] for key, (_, field) in FIELDS.items() if key in settings}


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
