"""Drafters' folders that cannot be read as they are: each is refused by the name of what is wrong, in one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_folders import IDS, SPEC, TARGET, change_drafter, fresh, read_drafter, write_drafter

from specdec.draft_models.checkpoints.drafter_formats import AUX_IDS, EAGLE3_KEYS
from specdec.draft_models.eagle3.checkpoint import read_head, write_head
from specdec.errors import CheckpointError, SpecDecError, UnsupportedModelError

DFLASH = "z-lab/Qwen3-8B-DFlash-b16"
GEMMA4, MUSE = "deepseek-ai/dspark_gemma4_12b_block7", "meta-models/Muse-Glimmer-30B-assistant"
ones = torch.ones
SLIDING = {"layer_types": ["sliding_attention"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 2.0}
TABLE = {"embed_tokens.weight": ones(50, 16)}
NO_HEAD = {"lm_head.weight": None, "d2t": None, "t2d": None}

UNSUPPORTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    # (what is changed in a whole drafter, words of the refusal)
    "SpecForge": [
        ({"use_hidden_norm": False}, "use_hidden_norm=False is not known .*known are .*norm_output"),
        ({"eagle_config.layer_ids": [1, 3, 4]}, r"eagle_config.layer_ids=\[1, 3, 4\] is not known"),
        ({"eagle_config.use_mtp_layernorm": True}, "eagle_config.use_mtp_layernorm=True; .* False only"),
        ({"quantization_config": {"bits": 8}}, "the head is quantised; specdec loads fp32, fp16 and bf16"),
        (
            {"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            "deepseek_v3 layers .Eagle3DeepseekV2ForCausalLM.; specdec runs Llama- and Qwen3-type",
        ),
        ({"architectures": ["PEagleDraftModel"]}, "a P-EAGLE drafter .PEagleDraftModel.; .*use an EAGLE-3 head"),
        ({"head_dim": 7}, "head_dim=7; .* even"),
        ({"head_dim": None, "num_attention_heads": 32}, "head_dim=0; .* even"),  # more heads than columns
        ({"hidden_act": "swish2"}, "hidden_act='swish2' is not an activation"),
        ({"midlayer.self_attn.q_proj.weight": None}, r"there is no layers\.0\.self_attn\.q_proj\.weight"),
        ({"eagle_config." + AUX_IDS: ["1", "2"]}, r"auxiliary layers \['1', '2'\] .*the target has states 0\.\.8"),
        (
            {"tie_word_embeddings": True, "draft_vocab_size": 60, **NO_HEAD, "embed_tokens.weight": ones(60, 16)},
            "tie_word_embeddings=True with embed_tokens and no lm_head",
        ),
        # windows
        ({"layer_types": ["chunked_attention"]}, "layer_types=.'chunked_attention'."),  # no window, still unknown
        ({"layer_types": "full_attention"}, "layer_types='full_attention'"),
        ({"layer_types": []}, r"layer_types=\[\] on 1 layer"),
        (SLIDING, "sliding_window=None with layer_types"),
        (SLIDING | {"sliding_window": 0}, "sliding_window=0 .*whole number of 1 or more"),
        (SLIDING | {"sliding_window": True}, "sliding_window=True"),
        # RoPE
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type='dynamic'.*llama3"),
        ({"rope_scaling": YARN | {"slope": 3}}, "slope=3 of its RoPE is not known"),
        ({"rope_scaling": YARN | {"mscale": 0.5}}, "mscale=0.5 and mscale_all_dim=None"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 0.5}}, "mscale=None and mscale_all_dim=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention=.* is not known"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "sliding_attention=.* is not known"),
    ],
    DFLASH: [
        ({"architectures": ["DFlash2DraftModel"]}, "a DFlash2 drafter .* convolution"),
        ({"dflash_config.conv_kernel_size": 2}, "a DFlash2 drafter"),
        ({"dflash_config.selector_rank": 8}, "a DFlash2 drafter"),
        ({"dflash_config.projector_type": "dspark"}, "projector_type='dspark' .*as SpecForge trains them"),
        ({"speculators_model_type": "dflash2"}, "a DFlash2 drafter"),
        ({"architectures": ["QwenDFlareDraftModel"]}, r"a DFlare drafter \(QwenDFlareDraftModel\)"),
        ({"speculators_model_type": "xpress"}, "a xpress drafter in speculators' format; .*eagle3, dflash and dspark"),
        ({"model_type": "laguna"}, "laguna layers .*Qwen3 and Gemma 4"),
        ({"dflash_config.attention_mode": "mla"}, "dflash_config.attention_mode='mla' is not known"),
        ({"logit_scale": 2.0}, "flag logit_scale=2.0 is not known"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"dflash_config.target_layer_ids": [1, 35]}, r"expected layers -1 \(the embeddings\) to 34"),
        ({"hidden_act": "swish9"}, "not an activation"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, "markov_head_type='lstm' .*known are vanilla, gated, rnn"),
    ],
    "speculators": [
        ({"speculators_model_type": "peagle"}, "a peagle drafter in speculators' format; .*eagle3, dflash"),
        # known keys, where they have no meaning
        ({f"transformer_layer_config.{AUX_IDS}": [1]}, f"flag transformer_layer_config.{AUX_IDS}=.* is not known"),
        ({"transformer_layer_config.norm_output": [1]}, "flag transformer_layer_config.norm_output=.* is not known"),
    ],
    "speculators, dflash": [
        ({"aux_hidden_state_layer_ids": [2, 12]}, r"layer_ids=\[2, 12\]; expected layers 0 \(the embeddings\) to 11"),
        ({"transformer_layer_config.model_type": "gpt_oss"}, "gpt_oss layers"),
        (
            {
                "transformer_layer_config.layer_types": ["sliding_attention", "full_attention"],
                "transformer_layer_config.sliding_window": 5,
                "transformer_layer_config.use_sliding_window": True,
            },
            "without sliding_window_non_causal: .*alike in all layers",
        ),
    ],
    MUSE: [
        ({"sliding_window": 4}, "sliding_window=4 with block_size=6; .*windows of block_size - 1 or more"),
        ({"markov_rank": 4}, "markov_rank=4 is not known"),
    ],
    GEMMA4: [
        ({"enable_moe_block": True}, "enable_moe_block=True; .*Gemma 4's layers with False only"),
        ({"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input=4; .* 0 only"),
        ({"layer_types": ["sliding_attention"] * 5}, "attend fully in all of them"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type default or proportional"),
        ({"hidden_activation": "swish9"}, "'swish9' is not an activation"),
    ],
}
DOES_NOT_FIT: dict[str, list[tuple[dict[str, Any], str]]] = {
    "SpecForge": [
        (
            {"norm_before_fc": False, "eagle_config.norm_before_fc": True},
            "norm_before_fc is False in one place of its config and True in another",
        ),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc=True and fc_norm=True"),
        ({"norm_output": False, "eagle_config.use_last_layernorm": True}, "use_last_layernorm=True, but norm_output="),
        (SLIDING | {"sliding_window": 9, "use_sliding_window": False}, "sliding_window=9 .* is not true"),
        ({"fc.weight": ones(16, 48).to(torch.float8_e4m3fn)}, "fc.weight is torch.float8"),
        (
            {"fc.weight": ones(16, 96)},
            r"fc.weight is \[16, 96\], the config says \[16, 48\]; trained on other states than .*aux_layers",
        ),
        # tensors that are there, or not
        ({"fc_norm": True}, "fc_norm.0.weight is missing .*fc_norm=True"),
        ({"eagle_config.use_last_layernorm": False}, "norm.weight is not known; .*use_last_layernorm=False"),
        ({"mask_hidden": ones(1, 48)}, "mask_hidden is not known"),  # P-EAGLE
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states=4, but the list of states says 3"),
        ({"attention_bias": True}, "attention_bias=True, but the file, by its self_attn.q_proj.bias, says False"),
        ({"mlp_bias": True}, "mlp_bias=True, but the file, by its mlp.gate_proj.bias, says False"),
        # vocabularies
        (TABLE, "vocab_size=60, but embed_tokens says 50"),
        (TABLE | {"vocab_size": None, "t2d": None}, "vocab_size=50, target target has 60 tokens"),
        ({"vocab_size": 58, "t2d": None}, "vocab_size=58, target target has 60 tokens"),
        ({"vocab_size": 64}, "vocab_size=64, but t2d says 60"),
        ({"draft_vocab_size": 30}, "draft_vocab_size=30, but lm_head says 20"),
        (NO_HEAD, "draft_vocab_size=20, but there is no lm_head and no d2t"),
        (NO_HEAD | {"has_lm_head": True, "draft_vocab_size": None}, "has_lm_head=True, but .*lm_head.*, says False"),
        ({"d2t": None}, "lm_head has 20 rows, the target 60 tokens, and there is no d2t"),
        ({"lm_head.weight": None}, "d2t maps 20 draft tokens, lm_head has no rows"),
        ({"d2t": IDS, "t2d": None}, r"tokens 0\.\.76, .* another target's, or .* offsets are expected"),
        ({"d2t": torch.full((20,), 41), "t2d": None}, r"tokens 41\.\.60, target target has 60"),
        ({"d2t": torch.full((20,), -1), "t2d": None}, r"tokens -1\.\.18, target"),
        ({"t2d": torch.ones(60, dtype=torch.bool)}, "d2t and t2d disagree"),
        ({"t2d": torch.arange(57) < 20, "vocab_size": None}, "d2t and t2d disagree"),
        ({"d2t": -torch.arange(20), "t2d": None}, "two draft tokens to one"),
        ({"t2d": torch.arange(60) % 3 == 1}, "d2t and t2d disagree"),
        # sizes
        ({"num_attention_heads": 8}, r"q_proj.weight is \[24, 32\], .* says \[48, 32\] .*num_attention_heads=8"),
        ({"head_dim": None}, r"q_proj.weight is \[24, 32\].*head_dim=4"),
        ({"head_dim": None, "model_type": "qwen3"}, r"q_proj.weight is \[24, 32\], the config says \[512, 32\]"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 do not group over num_key_value_heads=3"),
        ({"num_key_value_heads": None}, r"k_proj.*num_key_value_heads=4"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, but the file says 1"),
        ({"target_hidden_size": 32}, "target_hidden_size=32, but target target says 16"),
        ({"hidden_size": 20, "fc.weight": ones(20, 48)}, r"lm_head.weight is .* says \[20, 20\] .*hidden_size=20"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_attention_heads": None}, "config.json has no num_attention_heads"),
        # kinds of values
        ({"num_attention_heads": 4.0}, "num_attention_heads=4.0, expected a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0, expected a whole number above 0"),
        ({"fc_norm": "yes"}, "fc_norm='yes', expected true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small', expected a number"),
        ({"eagle_config": [1]}, r"eagle_config=\[1\], expected an object"),
        ({"eagle_config." + AUX_IDS: 3}, f"eagle_config.{AUX_IDS}=3, expected a list"),
        # RoPE
        ({"rope_scaling": LLAMA3}, "rope_type='llama3' without original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' without factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2', expected a number above 0"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters=.*contradict rope_scaling=",
        ),
        ({"rope_theta": 0}, "rope_theta=0, expected a number above 0"),
    ],
    DFLASH: [
        ({"dflash_config.target_layer_ids": None}, "has no target_layer_ids.*take them from where it was published"),
        ({"dflash_config.target_layer_ids": [1, 9]}, "fc.weight is"),
        ({"num_target_layers": 40}, "num_target_layers=40, but target target says 36"),
        ({"num_hidden_layers": 4}, "num_hidden_layers=4, but the file says 5"),
        ({"hidden_size": 64}, "hidden_size=64, but target target says 32"),
        ({"vocab_size": 9}, "vocab_size=9, target target has 7"),
        ({"dflash_config.mask_token_id": 7}, "mask_token_id=7, but target target has 7 rows"),
        ({"dflash_config.mask_token_id": None}, "config.json has no mask_token_id"),
        ({"block_size": None}, "config.json has no block_size"),
        ({"block_size": 1}, "block_size=1 drafts nothing"),
        ({"dflash_config.block_size": 8}, "block_size is 16 in one place of its config and 8 in another"),
        ({"dflash_config.causal_head": True, "is_causal": False}, "contradict each other"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping=0, expected a number above 0"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, "markov_head.markov_w1.weight is missing"),
        ({"norm.weight": ones(32, dtype=torch.int32)}, "torch.int32"),
    ],
    "speculators, dflash": [
        ({"aux_hidden_state_layer_ids": None}, "has no aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 5}, "draft_vocab_size=5, but the file, by its lm_head.weight, says 4"),
        ({"d2t": None}, "lm_head has 4 rows, the target 7 tokens, and there is no d2t"),
    ],
    GEMMA4: [({"layers.0.self_attn.q_norm.weight": None}, "q_norm.weight and k_proj.weight are missing")],
}
ROWS = [
    pytest.param(kind, changes, error, says, id=f"{kind}-{'-'.join(changes)}-{i}")
    for error, tables in ((UnsupportedModelError, UNSUPPORTED), (CheckpointError, DOES_NOT_FIT))
    for kind, rows in tables.items()
    for i, (changes, says) in enumerate(rows)
]


def refused(kind: str, folder: Path, changes: dict[str, Any], error: type[SpecDecError], says: str) -> None:
    change_drafter(write_drafter(kind, folder), changes)
    with pytest.raises(error, match=says) as caught:
        read_drafter(kind, folder)
    text = str(caught.value)
    assert text.startswith(f"{folder}: ") and "\n" not in text
    assert len(text.partition("known are")[0]) - len(str(folder)) < 350


@pytest.mark.parametrize(("kind", "changes", "error", "says"), ROWS)
def test_every_fault_of_a_drafter_is_named(kind, changes, error, says, tmp_path) -> None:
    refused(kind, tmp_path, changes, error, says)


ONLY = [
    (name, value)
    for name, key in sorted(EAGLE3_KEYS.items())
    for value in (0.25, "alibi", True, False)
    if key.only and value not in key.only
]


@pytest.mark.parametrize(("key", "value"), ONLY)
def test_a_key_that_is_neutral_at_one_value_only_is_refused_at_others(key, value, tmp_path) -> None:
    says = rf"{key}={value!r}; specdec runs EAGLE-3 heads with"
    refused("SpecForge", tmp_path, {key: value}, UnsupportedModelError, says)
    change_drafter(tmp_path, {key: EAGLE3_KEYS[key].only[0]})
    assert read_drafter("SpecForge", tmp_path) == SPEC


# a hunt over configs: each was read as if it were not there
UNREAD: dict[str, Any] = {
    "attn_type": "linear",
    "attention_chunk_size": 64,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 30.0,
    "clip_qkv": 8,
    "final_logit_softcapping": 30.0,
    "no_rope_layers": [0],
    "partial_rotary_factor": 0.5,
    "position_embedding_type": "alibi",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 1e4,
    "rotary_dim": 4,
    "rotary_pct": 0.25,
    "swiglu_limit": 7.0,
}


@pytest.mark.parametrize("place", ["", "eagle_config.", "transformer_layer_config."])
@pytest.mark.parametrize("key", sorted(UNREAD))
def test_a_key_that_changes_the_computation_is_refused_by_name(key, place, tmp_path) -> None:
    kind = "speculators" if place.startswith("transformer") else "SpecForge"
    refused(kind, tmp_path, {place + key: UNREAD[key]}, UnsupportedModelError, key)


@pytest.mark.parametrize(
    ("lacks", "others"), [("embed_tokens.weight", {}), ("fc.weight", {"eagle_config.use_aux_hidden_state": False})]
)
def test_a_head_of_another_width_needs_a_table_and_a_projection(lacks, others, tmp_path) -> None:
    spec = replace(SPEC, hidden_size=20, owns_embed=True)
    write_head(tmp_path, fresh(spec), TARGET)
    change_drafter(tmp_path, {lacks: None, **others})
    with pytest.raises(CheckpointError, match=rf"tensor {lacks} is missing; config.json has hidden_size=20"):
        read_head(tmp_path, TARGET)


@pytest.mark.parametrize("width", [8, 24, 32])
def test_a_head_for_a_target_of_another_width_names_both(width, tmp_path) -> None:
    """It was said to be trained on other states, which no choice of states mends."""
    change_drafter(write_drafter("SpecForge", tmp_path), {"target_hidden_size": None})
    says = f"made for a target of hidden size 16 .* reads 3 states.*, target target has {width}"
    with pytest.raises(CheckpointError, match=says):
        read_head(tmp_path, SimpleNamespace(**{**vars(TARGET), "hidden_size": width}))  # type: ignore[arg-type]


def test_folders_that_are_no_heads(tmp_path) -> None:
    def refuses(says: str) -> None:
        with pytest.raises(CheckpointError, match=says):
            read_head(tmp_path, TARGET)

    refuses(r"no config\.json")
    (tmp_path / "config.json").write_text("[1]")
    refuses("expected an object")
    write_drafter("SpecForge", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuses(r"no \*\.safetensors")
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(r"model-00001-of-00002\.safetensors is not there, though an index names it")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"broken")
    refuses("cannot be read")


def test_a_pickle_that_runs_code_is_refused(tmp_path) -> None:
    write_drafter("SpecForge", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_head(tmp_path, TARGET)
