"""Every key that the config of an EAGLE-3 head may hold, and what is done about it.

    HONOURED   read into `Eagle3Spec`, or compared with the tensors and the target
    NEUTRAL    would change what the head computes: accepted with a value under which it changes nothing
    HARMLESS   training, generation, storage, and what the tensors of the file decide by themselves

Any other key that is set is refused by name. Invariant: a setting that could change what the head computes is honoured
or refused, never skipped.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.errors import CheckpointError, UnsupportedModelError

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_CONFIG, EAGLE_CONFIG = "transformer_layer_config", "eagle_config"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLAGS = frozenset(
    {*NORM_FLAGS, "attention_bias", "has_lm_head", "mlp_bias", "use_aux_hidden_state", "use_last_layernorm"}
    | {"use_sliding_window"}
)
"""Honoured keys that are true or false."""
COUNTS = frozenset(
    {"draft_vocab_size", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings"}
    | {"num_attention_heads", "num_aux_hidden_states", "num_hidden_layers", "num_key_value_heads"}
    | {"target_hidden_size", "vocab_size"}
)
"""Honoured keys that are whole numbers above 0."""
NUMBERS = frozenset({"max_window_layers", "query_pre_attn_scalar", "rms_norm_eps", "rope_theta", "rotary_dim"})
"""Honoured keys that are numbers."""
BY_PLACE = frozenset({AUX_IDS, "norm_output"})
"""Honoured keys whose meaning depends on where they stand; `read_norm_output` and `resolve_aux_ids` read them."""
HONOURED = frozenset(
    {*FLAGS, *COUNTS, *NUMBERS, *BY_PLACE, LAYER_CONFIG, EAGLE_CONFIG, "architectures", "hidden_act", "layer_types"}
    | {"model_type", "quantization_config", "rope_parameters", "rope_scaling", "sliding_window"}
)
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
HARMLESS = frozenset(
    # training, precision, serving
    {"chunk_size_feed_forward", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init", "is_decoder"}
    | {"initializer_range", "model_max_length", "num_eagle_features", "parallel_draft_heads_num_layers"}
    | {"attn_implementation", "auto_map", "pretraining_tp", "use_bfloat16", "use_cache"}
    # generation and output, which old releases of transformers kept in every config
    | {"bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"}
    | {"exponential_decay_length_penalty", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"}
    | {"num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states"}
    | {"output_scores", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate"}
    | {"begin_suppress_tokens", "suppress_tokens", "temperature", "top_k", "top_p", "torchscript", "typical_p"}
    | {"cross_attention_hidden_size", "finetuning_task", "id2label", "label2id", "prefix", "problem_type"}
    | {"task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class"}
    # decided by the tensors: a head has a table, an lm_head and a dense MLP, or says nothing of them
    | {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "tie_word_embeddings"}
)
HARMLESS_NAME = re.compile(r"^_|^speculators_|(^|_)(token_ids?|version|dtype|path|dropout|experts?|router|moe)(_|$)")
"""What the name alone says to be bookkeeping, training, or a part that would need tensors of its own."""
LAYERS = ("llama", "qwen3", "mistral")

Settings = dict[str, Any]


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def read_settings(config: Mapping[str, Any], name: str) -> Settings:
    """The honoured keys that are set, wherever they stand, less those of `BY_PLACE`; `model_type` is always there.

    Raises UnsupportedModelError for a key that is unknown or has a value that is not neutral, CheckpointError for one
    with two values or of the wrong kind.
    """
    entries = list(_entries(config, name))
    settings: Settings = {"model_type": _layers(config, entries, name)}
    for place, key, value in entries:
        where = f"{place}{key}={reprlib.repr(value)}"
        if value is None or key in HARMLESS or HARMLESS_NAME.search(key):
            continue
        if key == "quantization_config":
            raise UnsupportedModelError(f"{name}: the head is quantised; specdec loads fp32, fp16 and bf16 heads")
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                raise UnsupportedModelError(f"{name}: {where}; specdec runs EAGLE-3 heads with {NEUTRAL[key][0]} only")
            continue
        if key not in HONOURED or (place == f"{LAYER_CONFIG}." and key in BY_PLACE):
            raise UnsupportedModelError(
                f"{name}: flag {where} is not known and may change what the head computes; remove it from config.json "
                f"if it does not; known are {', '.join(sorted(HONOURED | NEUTRAL.keys()))}"
            )
        if (wanted := _wanted_kind(key, value)) is not None:
            raise CheckpointError(f"{name}: {where}, {wanted} is wanted")
        if key not in BY_PLACE and settings.setdefault(key, value) != value:
            raise CheckpointError(f"{name}: {key} is {settings[key]} in one place of its config and {value} in another")
    return settings


def _entries(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, str, Any]]:
    """(place with a dot behind it, key, value). A speculator's top level has a `model_type` of its own."""
    for key, value in config.items():
        if key not in (LAYER_CONFIG, EAGLE_CONFIG) and not (key == "model_type" and is_speculators(config)):
            yield "", key, value
    for nested in (LAYER_CONFIG, EAGLE_CONFIG):
        inner = config.get(nested)
        if inner is not None and not isinstance(inner, dict):
            raise CheckpointError(f"{name}: {nested}={reprlib.repr(inner)}, an object is wanted")
        for key, value in (inner or {}).items():
            yield f"{nested}.", key, value


def _layers(config: Mapping[str, Any], entries: Sequence[tuple[str, str, Any]], name: str) -> str:
    """The kind of the head's layers; the first thing to look at, since other kinds have keys of their own."""
    for _, key, value in entries:
        if key == "model_type" and value is not None:
            if value not in LAYERS:
                made_of = ", ".join(map(str, config.get("architectures") or ["?"]))
                raise UnsupportedModelError(
                    f"{name}: a head of {value} layers ({made_of}); specdec runs Llama- and Qwen3-type layers"
                )
            return str(value)
    return "llama"


def _wanted_kind(key: str, value: Any) -> str | None:
    """What `key` should hold, when it holds something else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in FLAGS and not isinstance(value, bool):
        return "true or false"
    if key in COUNTS and not (number and isinstance(value, int) and value > 0):
        return "a whole number above 0"
    if key in NUMBERS and not (number and value >= 0):
        return "a number"
    if key in ("rope_parameters", "rope_scaling") and not isinstance(value, dict):
        return "an object"
    if key == AUX_IDS and not isinstance(value, list):
        return "a list"
    return None
