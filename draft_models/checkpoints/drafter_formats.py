"""The published formats of drafters' folders. Each is a table of its config.json keys; `config_reader.py` reads them.

    format             published by                            recognised by                   keys stand in
    SPECFORGE          SafeAILab, SpecForge, lmsys, AngelSlim; an architecture with "eagle3",  the top level,
                       NVIDIA ModelOpt; deepseek-ai (Qwen3)    or `draft_vocab_size`           EAGLE_CONFIG
    SPECULATORS        RedHatAI                                `speculators_model_type` eagle3 the same, LAYER_CONFIG
    BLOCK              z-lab, AngelSlim, ModelOpt (DFlash),    `dflash_config`, an architec-   the top level,
                       JetSpec, deepseek-ai (DSpark, Qwen3)    ture with "dflash" or "dspark"  DFLASH_CONFIG
    GEMMA4_BLOCK       deepseek-ai (DSpark for Gemma 4)        the same, and `model_type`      the same
    SPECULATORS_BLOCK  RedHatAI (DFlash, DSpark)               `speculators_model_type`        the top level,
                                                               dflash or dspark                LAYER_CONFIG
    HF_BLOCK           transformers                            `model_type`                    the top level
                                                               muse_glimmer_assistant
    refused by name    z-lab, RedHatAI (DFlash2)               "dflash2", conv_*, selector_*
                       RedHatAI (P-EAGLE, xPress)              `speculators_model_type`
                       SpecForge (DSpark)                      `projector_type`
                       SpecForge (P-EAGLE)                     an architecture with "peagle"
                       AngelSlim (DFlare)                      an architecture with "dflare"

To add a format, add a table here. If a key's meaning does not fit a table, code in its family's `checkpoint` reads it.
`layout_of_config` gives the K/V that a head keeps, from its config.json alone.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from specdec.draft_models.checkpoints.checkpoint_files import COUNT, FLAG, INDEX, LIST, NUMBER, OBJECT, POSITIVE, TEXT
from specdec.draft_models.checkpoints.config_reader import Config, Format, HeadFiles, Key, read_settings, read_windows
from specdec.kvcache.layout import KVLayout

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_IDS = "target_layer_ids"
EAGLE_CONFIG, LAYER_CONFIG, DFLASH_CONFIG = "eagle_config", "transformer_layer_config", "dflash_config"
QWEN3_TYPES, GEMMA4_TYPES = ("qwen3",), ("gemma4_text", "gemma4_unified_text")
HF_BLOCK_TYPES, SPECULATORS_BLOCK_TYPES = ("muse_glimmer_assistant",), ("dflash", "dspark")

HARMLESS_NAMES = """
what recognises a format (`Format.matches`), training, precision, serving:
    architectures chunk_size_feed_forward embed_requires_grad enable_sp_ulysses has_no_defaults_at_init is_decoder
    initializer_range model_max_length num_eagle_features parallel_draft_heads_num_layers attn_implementation auto_map
    attention_backend draft_num_hidden_layers loss_decay_gamma modal_type pretraining_tp step_loss_decay
    target_model_type ttt_length use_bfloat16 use_cache
generation and output, which old releases of transformers kept in every config:
    bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size num_beam_groups num_beams
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_return_sequences
    output_attentions output_hidden_states output_scores remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate begin_suppress_tokens suppress_tokens temperature top_k top_p torchscript typical_p
    cross_attention_hidden_size finetuning_task id2label label2id prefix problem_type task_specific_params
    tf_legacy_loss tie_encoder_decoder tokenizer_class
of the target's config, which heads for Hunyuan keep:
    add_classification_head cla_share_factor class_num dense_list im_end_id im_newline_id im_start_id mask_init_id
    org_vocab_size pad_id pool_type text_end_id text_start_id
decided by the tensors (its tensors show whether a head has a table, an lm_head, norms of Q and K and a dense MLP):
    decoder_sparse_step mlp_only_layers norm_topk_prob tie_word_embeddings use_qk_norm
"""
HARMLESS = frozenset(re.sub(r"^\S.*$", "", HARMLESS_NAMES, flags=re.MULTILINE).split())
HARMLESS_NAME = r"^_|^speculators_|(^|_)(token_ids?|version|dtype|path|dropout|experts?|router|moe)(_|$)"
"""Keys that change nothing: bookkeeping, training, and parts whose tensors would be refused."""


def harmless(*names: str) -> re.Pattern[str]:
    """A pattern for names that change nothing in any format, plus these names."""
    return re.compile(f"{HARMLESS_NAME}|^({'|'.join(sorted({*HARMLESS, *names}))})$")


LAYER_KEYS: dict[str, Key] = {
    # fields of `HeadSpec`
    "hidden_size": Key(COUNT, "hidden_size", required=True),
    "num_attention_heads": Key(COUNT, "num_heads", required=True),
    "intermediate_size": Key(COUNT, "intermediate_size", required=True),
    "num_key_value_heads": Key(COUNT, "num_kv_heads"),
    "head_dim": Key(COUNT, "head_dim"),
    "max_position_embeddings": Key(COUNT, "max_position_embeddings"),
    "rms_norm_eps": Key(NUMBER, "rms_norm_eps"),
    "hidden_act": Key(TEXT, "hidden_act"),
    # windows and RoPE
    "use_sliding_window": Key(FLAG),
    **dict.fromkeys(("max_window_layers", "rope_theta"), Key(NUMBER)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), Key(OBJECT)),
    **dict.fromkeys(("layer_types", "model_type", "sliding_window"), Key()),
    "use_mrope": Key(only=(False,)),
    # compared with the tensors and the target
    **dict.fromkeys(("vocab_size", "num_hidden_layers", "target_hidden_size"), Key(COUNT)),
}
"""Keys of decoder layers, common to all formats."""
EAGLE3_KEYS: dict[str, Key] = LAYER_KEYS | {
    "norm_before_residual": Key(FLAG, "norm_before_residual"),
    "norm_before_fc": Key(FLAG, "norm_before_fc"),
    "fc_norm": Key(FLAG, "fc_norm"),
    **dict.fromkeys(
        ("use_aux_hidden_state", "use_last_layernorm", "attention_bias", "mlp_bias", "has_lm_head"), Key(FLAG)
    ),
    **dict.fromkeys(("draft_vocab_size", "num_aux_hidden_states", "num_target_layers"), Key(COUNT)),
    OUTPUT_IDS: Key(LIST, places=("",)),
    **dict.fromkeys(("query_pre_attn_scalar", "rotary_dim", "attention_head_dim"), Key(NUMBER)),
    **dict.fromkeys((LAYER_CONFIG, EAGLE_CONFIG), Key(OBJECT)),
    # their meaning depends on their place: `resolve_aux_ids`, `read_norm_output`
    AUX_IDS: Key(LIST, places=("", EAGLE_CONFIG), merged=False),
    "norm_output": Key(FLAG, places=("", EAGLE_CONFIG), merged=False),
    # the values with which a head computes the same as `Eagle3Head`
    **dict.fromkeys(
        ("add_cross_attention", "is_encoder_decoder", "parallel_drafting", "use_cla", "use_mtp_layernorm"),
        Key(only=(False,)),
    ),
    **dict.fromkeys(
        ("is_causal", "next_layer_regular", "use_input_layernorm_in_first_layer", "use_rotary_pos_emb"),
        Key(only=(True,)),
    ),
    "norm_type": Key(only=("rms",)),
    **dict.fromkeys(("logit_scale", "partial_rotary_factor", "rotary_pct"), Key(only=(1.0,))),
    "parallel_draft_step": Key(only=(1,)),
    "position_embedding_type": Key(only=("rope",)),
    "pruned_heads": Key(only=({}, [])),
}
BLOCK_KEYS: dict[str, Key] = LAYER_KEYS | {
    "block_size": Key(COUNT, "block_size", required=True),
    "mask_token_id": Key(INDEX, "mask_token", required=True),
    "attention_bias": Key(FLAG),
    "final_logit_softcapping": Key(POSITIVE, "softcap"),
    OUTPUT_IDS: Key(LIST),
    "num_target_layers": Key(COUNT),
    "markov_rank": Key(INDEX),
    "markov_head_type": Key(TEXT),
    **dict.fromkeys(("causal_head", "causal", "is_causal", "sample_from_anchor"), Key(FLAG)),
    DFLASH_CONFIG: Key(OBJECT),
}
TRAINING = ("num_anchors", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha")
"""Keys of block drafters. Confidence heads are ignored: they decide where to cut a draft, never its tokens."""
GEMMA4_SHAPES = (
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config", "num_kv_shared_layers"),
    *("vocab_size_per_layer_input", "target_text_model_type"),
)
"""Keys of a Gemma 4 config that change nothing here: shapes, which come from the tensors, and settings of other
layers."""


def is_speculators(config: Config) -> bool:
    return "speculators_model_type" in config


def published_names(config: Config) -> str:
    """The names of classes and of the kind of drafter in a config.json, in lower case."""
    return " ".join(map(str, (*(config.get("architectures") or ()), config.get("speculators_model_type")))).lower()


def is_eagle3_config(config: Config) -> bool:
    """Does this config.json belong to an EAGLE-3 head, or to a related kind that is refused by name? A plain Llama
    config with `draft_vocab_size` does (yuhuili's heads)."""
    if is_speculators(config):
        return config["speculators_model_type"] in ("eagle3", "peagle")
    named = any(word in published_names(config) for word in ("eagle3", "peagle"))
    return named or config.get("draft_vocab_size") is not None


def is_block_config(config: Config) -> bool:
    """Does this config.json belong to a block drafter, of a family that runs here or of one that is refused by name?"""
    return (
        isinstance(config.get(DFLASH_CONFIG), dict)
        or config.get("model_type") in HF_BLOCK_TYPES
        or any(word in published_names(config) for word in ("dflash", "dspark", "xpress"))
    )


def why_refused_speculator(config: Config) -> str | None:
    """A sentence if this drafter in speculators' format is of a kind that does not run here; None: it runs."""
    kind = config.get("speculators_model_type")
    if kind in (None, "eagle3", "mtp", *SPECULATORS_BLOCK_TYPES):
        return None
    return (
        f"a {kind} drafter in speculators' format; specdec reads mtp, eagle3, "
        f"{' and '.join(SPECULATORS_BLOCK_TYPES)} in that format, so use one of these for the same target"
    )


def why_refused_head(config: Config) -> str | None:
    """A sentence if this head of SpecForge is of a kind that does not run here; None: it runs."""
    if "peagle" not in published_names(config):
        return None
    return (
        f"a P-EAGLE drafter ({', '.join(map(str, config['architectures']))}); specdec does not run its rows, which "
        "draft side by side from a trained state; use an EAGLE-3 head or a block drafter of the same target"
    )


def why_refused_block(config: Config) -> str | None:
    """A sentence if this is a known family of block drafters that does not run here; None: it is not."""
    nested = config.get(DFLASH_CONFIG)
    keys = nested if isinstance(nested, Mapping) else {}
    names = ", ".join(map(str, config.get("architectures") or ["?"]))
    if "dflash2" in published_names(config) or any(str(key).startswith(("conv_", "selector_")) for key in keys):
        return (
            f"a DFlash2 drafter ({names}); specdec does not run its convolution and its candidate selector; use a "
            "DFlash, DSpark or JetSpec drafter of the same target"
        )
    if "dflare" in published_names(config):
        return (
            f"a DFlare drafter ({names}); specdec does not run its layers, each of which has its own mixture of target "
            "states; use a DFlash, DSpark or JetSpec drafter of the same target"
        )
    if reason := why_refused_speculator(config):
        return reason
    if projector := keys.get("projector_type"):
        return (
            f"a drafter with projector_type={projector!r} ({names}), as SpecForge trains them; its rows draft other "
            "positions than those of deepseek-ai's DSpark; use a DFlash, DSpark or JetSpec drafter of the same target"
        )
    return None


SPECFORGE = Format(
    name="EAGLE-3 heads",
    matches=is_eagle3_config,
    places=(LAYER_CONFIG, EAGLE_CONFIG),
    layers=("llama", "qwen3", "mistral", "qwen2", "phi3"),  # SpecForge builds Llama layers for the last three too
    layer_words="Llama- and Qwen3-type layers",
    keys=EAGLE3_KEYS,
    harmless=harmless(),
    tensors=(
        (r"(^|\.)rotary_emb\.", None),
        (r"^(model\.)?verifier_(lm_head|norm)\.", None),
        (r"^model\.", ""),
        (r"midlayer\.", "layers.0."),
        (r"aux_norm_low\.", "fc_norm.0."),
        (r"aux_norm_mid\.", "fc_norm.1."),
        (r"aux_norm_high\.", "fc_norm.2."),
    ),
    why_refused=why_refused_head,
)
SPECULATORS = replace(
    SPECFORGE,
    matches=is_speculators,
    keys=EAGLE3_KEYS | {"model_type": Key(places=(LAYER_CONFIG, EAGLE_CONFIG))},  # on top it is "a speculator"
    harmless=harmless("model_type"),
    why_refused=why_refused_speculator,
)
BLOCK = Format(
    name="block drafters",
    matches=is_block_config,
    places=(DFLASH_CONFIG,),
    layers=QWEN3_TYPES,
    layer_words="those of Qwen3 and Gemma 4 layers",
    keys=BLOCK_KEYS,
    harmless=harmless(*TRAINING, "hidden_activation"),
    tensors=((r"(^|\.)rotary_emb\.|^confidence_head\.", None), (r"^model\.", "")),
    why_refused=why_refused_block,
)
GEMMA4_BLOCK = replace(
    BLOCK,
    name="block drafters of Gemma 4's layers",
    matches=lambda config: config.get("model_type") in GEMMA4_TYPES,
    layers=GEMMA4_TYPES,
    keys={name: key for name, key in BLOCK_KEYS.items() if name != "hidden_act"}
    | {"hidden_activation": Key(TEXT, "hidden_act"), "layer_types": Key(LIST)}
    | dict.fromkeys(("enable_moe_block", "use_double_wide_mlp", "use_bidirectional_attention"), Key(only=(False,)))
    | {"hidden_size_per_layer_input": Key(only=(0,))},
    harmless=harmless(*TRAINING, *GEMMA4_SHAPES, "hidden_act"),
)
SPECULATORS_BLOCK = replace(
    BLOCK,
    matches=is_speculators,
    places=(LAYER_CONFIG,),
    layers=(*QWEN3_TYPES, "llama"),  # speculators builds Qwen3 layers from both
    keys={name: key for name, key in BLOCK_KEYS.items() if name not in (OUTPUT_IDS, DFLASH_CONFIG)}
    | {"aux_hidden_state_layer_ids": Key(LIST), "model_type": Key(places=(LAYER_CONFIG,)), LAYER_CONFIG: Key(OBJECT)}
    | {"sliding_window_non_causal": Key(FLAG), "draft_vocab_size": Key(COUNT)},
    harmless=harmless(*TRAINING, "model_type", "mlp_bias"),
    tensors=((r"^verifier_(lm_head|norm)\.", None), *BLOCK.tensors),
    sees_edge=True,
)
HF_BLOCK = replace(
    BLOCK,
    name="block drafters of transformers",
    matches=lambda config: config.get("model_type") in HF_BLOCK_TYPES,
    places=(),
    layers=HF_BLOCK_TYPES,
    keys=LAYER_KEYS | {name: BLOCK_KEYS[name] for name in ("block_size", "mask_token_id", OUTPUT_IDS)},
    tensors=((r"^model\.", ""), (r"^encoder\.fc\.", "fc."), (r"^encoder\.output_norm_enc\.", "hidden_norm.")),
    sees_edge=True,
)
EAGLE3_FORMATS = (SPECULATORS, SPECFORGE)
BLOCK_FORMATS = (SPECULATORS_BLOCK, HF_BLOCK, GEMMA4_BLOCK, BLOCK)


def layout_of_config(config: Config) -> KVLayout:
    """K/V of an EAGLE-3 head or a block drafter, from the config alone; when a head is loaded, its tensors decide.
    Raises CheckpointError and UnsupportedModelError, see `read_settings`."""
    formats = BLOCK_FORMATS if is_block_config(config) else EAGLE3_FORMATS
    form = next((each for each in formats if each.matches(config)), formats[-1])
    settings = read_settings(config, form)
    num_layers = settings.get("num_hidden_layers", 1)
    windows = (None,) * num_layers if form is GEMMA4_BLOCK else read_windows(form, settings, num_layers)
    if form is GEMMA4_BLOCK:  # its layers are Gemma 4's full-attention layers
        settings["head_dim"] = config.get("global_head_dim") or settings["head_dim"]
        settings["num_key_value_heads"] = config.get("num_global_key_value_heads") or settings["num_key_value_heads"]
    fields = HeadFiles(form, config, settings, {}).fields()
    return KVLayout.from_windows(windows, fields["num_kv_heads"], fields["head_dim"])
