"""Reading EAGLE-3 heads: the auxiliary-layer rule as a table, what is honoured, and every refusal with its message."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from specdec.draft_models.checkpoint_files import TargetShape
from specdec.draft_models.eagle3.checkpoint import ReadHead, read_head, write_head
from specdec.draft_models.eagle3.checkpoint_formats import HONOURED, NEUTRAL, is_eagle3_config, resolve_aux_ids
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.head_config import HARMLESS, HARMLESS_NAME
from specdec.errors import CheckpointError, SpecDecError, UnsupportedModelError
from specdec.kvcache.index_spaces import PRIMARY
from specdec.kvcache.layout import KVLayout

TARGET = TargetShape(name="target", num_layers=8, hidden_size=16, vocab_size=60)
SPEC = Eagle3Spec(
    hidden_size=16,
    target_hidden_size=16,
    vocab_size=60,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    aux_layers=(2, 4, 5),
    draft_vocab_size=20,
)
IDS = torch.arange(0, 60, 3)
AUX = "eagle_aux_hidden_state_layer_ids"


def fresh(spec: Eagle3Spec = SPEC) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Eagle3Head(spec).state_dict()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head in the SpecForge format, for tests to spoil."""
    write_head(tmp_path, SPEC, fresh(), TARGET, IDS)
    return tmp_path


@pytest.fixture
def edit(folder: Path) -> Callable[..., Path]:
    """edit(config={...}, tensors={...}): change entries; None removes one."""

    def change(config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        stored = json.loads((folder / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))
        state = load_file(folder / "model.safetensors") | (tensors or {})
        save_file({k: v.contiguous() for k, v in state.items() if v is not None}, folder / "model.safetensors")
        return folder

    return change


def load(folder: Path, **kwargs: Any) -> ReadHead:
    return read_head(folder, TARGET, **kwargs)


@pytest.mark.parametrize(
    ("config", "num_layers", "override", "boundaries", "warns"),
    [
        ({}, 32, None, (2, 16, 29), True),  # yuhuili: nothing said
        ({"eagle_config": {"use_aux_hidden_state": True}}, 36, None, (2, 18, 33), True),
        ({"eagle_config": {AUX: [1, 15, 28]}}, 32, None, (2, 16, 29), False),  # SpecForge: outputs
        ({"eagle_config": {AUX: [1, 17, 32]}}, 36, None, (2, 18, 33), False),  # gpt-oss-120b, long context
        ({"eagle_config": {AUX: [24, 30, 36]}}, 36, None, (24, 30, 36), False),  # gpt-oss-120b v3: 36 leaves the last
        ({"eagle_config": {AUX: [2, 16, 29]}}, 32, None, (2, 16, 29), False),  # written as boundaries
        ({"eagle_config": {AUX: [5, 10, 20]}}, 32, None, (6, 11, 21), True),  # could be either
        ({"eagle_config": {AUX: [5, 10, 20]}}, 32, [5, 10, 20], (5, 10, 20), False),  # the user knows
        ({AUX: [2, 30, 57]}, 60, None, (2, 30, 57), False),  # speculators: boundaries
        ({AUX: [2, 46, 91, 93]}, 94, None, (2, 46, 91, 93), False),
        ({AUX: [1, 15, 28]}, 32, None, (1, 15, 28), False),  # the top level is never shifted
        ({AUX: None, "eagle_config": None}, 12, None, (2, 6, 9), True),
        ({AUX: [0, 1, 12]}, 12, None, (0, 1, 12), False),
        ({"eagle_config": {AUX: [1, 5, 11]}}, 12, None, (2, 6, 12), False),  # output of the last layer
    ],
)
def test_the_rule_of_auxiliary_layers(config, num_layers, override, boundaries, warns, caplog) -> None:
    with caplog.at_level(logging.WARNING, "specdec"):
        assert resolve_aux_ids(config, num_layers, override) == boundaries
    assert bool(caplog.records) is warns


@pytest.mark.parametrize("ids", [[1, 2, 33], [-2, 1, 2], [], [1.5], [True, 2]])
def test_auxiliary_layers_out_of_range(ids) -> None:
    with pytest.raises(UnsupportedModelError, match=r"states 0\.\.32"):
        resolve_aux_ids({}, 32, ids)


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, True),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, True),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, True),
        ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, False),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, False),
        ({"model_type": "gemma4_assistant"}, False),
    ],
)
def test_recognition(config, answer) -> None:
    assert is_eagle3_config(config) is answer


def varied(**changes: Any) -> Eagle3Spec:
    return replace(SPEC, **changes)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        varied(draft_vocab_size=None),
        varied(draft_vocab_size=60),
        varied(qk_norm=True, norm_before_residual=True, norm_before_fc=True),
        varied(fc_norm=True, norm_output=True, windows=(None, 7)),
        varied(hidden_size=20, owns_embed=True, head_dim=10),
        varied(aux_layers=(2, 3, 6, 8)),
        varied(rope={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, rms_norm_eps=1e-5),
        varied(biases=frozenset(f"layers.0.self_attn.{p}_proj" for p in "qkv")),
    ],
    ids=lambda spec: f"{spec.aux_layers}-{spec.windows}-{spec.draft_vocab_size}-{spec.hidden_size}",
)
def test_what_is_written_is_read_again(spec: Eagle3Spec, tmp_path: Path) -> None:
    state = fresh(spec)
    ids = IDS if spec.draft_vocab_size == 20 else None
    write_head(tmp_path, spec, state, TARGET, ids)
    again = load(tmp_path)
    assert again.head.spec == spec
    assert again.head.state_dict().keys() == state.keys()
    for key, tensor in state.items():
        torch.testing.assert_close(again.head.state_dict()[key], tensor, atol=0, rtol=0)
    assert (again.target_ids is None) == (ids is None)
    if ids is not None:
        assert torch.equal(again.target_ids, ids)
    layout = KVLayout.uniform(spec.num_layers, spec.num_kv_heads, spec.head_dim)  # what a drafter of this head keeps
    assert layout.numbers_per_slot(PRIMARY) == 2 * spec.num_layers * 2 * spec.head_dim


def test_a_written_head_has_published_names(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and is_eagle3_config(config)
    assert config["eagle_config"] == {AUX: [1, 3, 4], "use_aux_hidden_state": True}
    tensors = load_file(folder / "model.safetensors")
    assert {"midlayer.self_attn.q_proj.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} < set(
        tensors
    )
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (12, 32)


def test_states_that_the_format_cannot_say_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="begin with state 2"):
        write_head(tmp_path, varied(aux_layers=(3, 4, 5)), fresh(), TARGET, IDS)


def test_pytorch_files_and_prefixes(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    more = {"model.rotary_emb.inv_freq": torch.ones(3), "verifier_lm_head.weight": torch.ones(2, 2)}
    torch.save({f"model.{k}" if k[0] == "m" else k: v for k, v in state.items()} | more, folder / "pytorch_model.bin")
    assert load(folder).head.spec == SPEC


def test_legacy_names_of_state_norms(folder: Path, edit) -> None:
    names = {f"aux_norm_{part}.weight": torch.full((16,), float(i)) for i, part in enumerate(("low", "mid", "high"))}
    norms = load(edit({"fc_norm": True}, names)).head.state_dict()
    assert [float(norms[f"fc_norm.{i}.weight"][0]) for i in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("layer", "windows"),
    [
        ({}, (None,)),
        ({"sliding_window": 9}, (None,)),  # nothing says which layers it is for: full, as in both reference packages
        ({"sliding_window": 9, "use_sliding_window": True}, (None,)),
        ({"sliding_window": 9, "use_sliding_window": False}, (None,)),
        ({"sliding_window": 9, "model_type": "mistral"}, (None,)),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, (9,)),
        # Qwen3's config makes the list: full up to max_window_layers (28 unless it says so), sliding behind
        ({"sliding_window": 9, "use_sliding_window": True, "model_type": "qwen3"}, (None,)),
        ({"sliding_window": 9, "use_sliding_window": True, "model_type": "qwen3", "max_window_layers": 0}, (9,)),
        ({"sliding_window": 9, "model_type": "qwen3", "max_window_layers": 0}, (None,)),  # not to be used
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, (None,)),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 4}, (9,)),  # the target's list, cut
    ],
)
def test_sliding_windows(layer, windows, edit) -> None:
    assert load(edit(layer)).head.spec.windows == windows


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 500000.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
        ),
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
)
def test_rope_spellings(config, rope, edit) -> None:
    assert load(edit(config)).head.spec.rope == rope


def test_nvidia_flags_that_change_nothing(edit) -> None:
    flags = {
        AUX: [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
        "has_lm_head": True,
    }
    assert load(edit({"eagle_config": flags})).head.spec == SPEC


def test_a_head_on_the_final_state(edit) -> None:
    flags = {"eagle_config": {"use_aux_hidden_state": False}}
    spec = load(edit(flags, {"fc.weight": torch.ones(16, 16)})).head.spec
    assert spec.aux_layers == () and spec.has_fc and spec.feature_size == 16
    assert not load(edit(flags, {"fc.weight": None})).head.spec.has_fc


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[SpecDecError], str]] = {
    "unknown flag": ({"use_attention_gate": True}, {}, UnsupportedModelError, "use_attention_gate=True is not known"),
    "unknown false flag": (
        {"use_hidden_norm": False},
        {},
        UnsupportedModelError,
        "use_hidden_norm=False .*norm_output",
    ),
    "unknown eagle flag": (
        {"eagle_config": {"layer_ids": [1, 3, 4]}},
        {},
        UnsupportedModelError,
        r"eagle_config.layer_ids=\[1, 3, 4\] is not known",
    ),
    "scaled logits": ({"logit_scale": 0.5}, {}, UnsupportedModelError, "logit_scale=0.5; .* 1.0 only"),
    "mtp norm": ({"eagle_config": {"use_mtp_layernorm": True}}, {}, UnsupportedModelError, "use_mtp_layernorm=True"),
    "parallel": ({"eagle_config": {"parallel_draft_step": 4}}, {}, UnsupportedModelError, "parallel_draft_step=4"),
    "no first norm": (
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
        {},
        UnsupportedModelError,
        "use_input_layernorm_in_first_layer=False",
    ),
    "two answers": (
        {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
        {},
        CheckpointError,
        "norm_before_fc is False in one place of its config and True in another",
    ),
    "quantised": ({"quantization_config": {"bits": 8}}, {}, UnsupportedModelError, "the head is quantised"),
    "fp8": (
        {},
        {"fc.weight": torch.ones(16, 48).to(torch.float8_e4m3fn)},
        CheckpointError,
        "fc.weight is torch.float8",
    ),
    "rope": ({"rope_scaling": {"rope_type": "dynamic"}}, {}, UnsupportedModelError, "rope_type='dynamic'.*llama3"),
    "partial rope": ({"partial_rotary_factor": 0.5}, {}, UnsupportedModelError, "partial_rotary_factor=0.5"),
    "MLA": (
        {"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {},
        UnsupportedModelError,
        "deepseek_v3 layers .Eagle3DeepseekV2ForCausalLM.; specdec runs Llama- and Qwen3-type",
    ),
    "other target": (
        {},
        {"fc.weight": torch.ones(16, 96)},
        CheckpointError,
        r"fc.weight is \[16, 96\], the config says \[16, 48\]; trained on other states than \[2, 4, 5\]\? .*aux_layers",
    ),
    "state norms missing": ({"fc_norm": True}, {}, CheckpointError, "fc_norm.0.weight is missing .*fc_norm=True"),
    "input norm there": (
        {},
        {"input_norm.weight": torch.ones(48)},
        CheckpointError,
        "input_norm.weight is not known",
    ),
    "last norm": (
        {"eagle_config": {"use_last_layernorm": False}},
        {},
        CheckpointError,
        "norm.weight is not known; .*use_last_layernorm=False",
    ),
    "no last norm": ({}, {"norm.weight": None}, CheckpointError, "norm.weight is missing"),
    "states": (
        {"num_aux_hidden_states": 4},
        {},
        CheckpointError,
        "num_aux_hidden_states=4, but the list of states says 3",
    ),
    "bias": ({"attention_bias": True}, {}, CheckpointError, "attention_bias=True, but .*q_proj.bias, says False"),
    "missing": ({}, {"midlayer.mlp.up_proj.weight": None}, CheckpointError, "layers.0.mlp.up_proj.weight is missing"),
    "P-EAGLE": ({}, {"mask_hidden": torch.ones(1, 48)}, CheckpointError, "mask_hidden is not known"),
    "shape": (
        {"num_key_value_heads": 4},
        {},
        CheckpointError,
        r"k_proj.weight is \[12, 32\], the config says \[24, 32\]",
    ),
    "small table": (
        {},
        {"embed_tokens.weight": torch.ones(50, 16)},
        CheckpointError,
        "vocab_size=60, but embed_tokens says 50",
    ),
    "small table alone": (
        {"vocab_size": None},
        {"embed_tokens.weight": torch.ones(50, 16), "t2d": None},
        CheckpointError,
        "vocab_size=50, target target has 60 tokens",
    ),
    "no lm_head as said": (
        {"has_lm_head": True, "draft_vocab_size": None},
        {"lm_head.weight": None, "d2t": None, "t2d": None},
        CheckpointError,
        "has_lm_head=True, but the file, by its lm_head.weight, says False",
    ),
    "no d2t": ({}, {"d2t": None}, CheckpointError, "lm_head has 20 rows, the target 60 tokens, and there is no d2t"),
    "no lm_head": ({}, {"lm_head.weight": None}, CheckpointError, "d2t maps 20 draft tokens, lm_head has no rows"),
    "d2t of ids": ({}, {"d2t": IDS, "t2d": None}, CheckpointError, r"tokens 0\.\.76, .* offsets, not ids"),
    "d2t twice": ({}, {"d2t": -torch.arange(20), "t2d": None}, CheckpointError, "two draft tokens to one"),
    "t2d": ({}, {"t2d": torch.arange(60) % 3 == 1}, CheckpointError, "d2t and t2d disagree"),
    "no table of its own": (
        {"hidden_size": 20},
        {"fc.weight": torch.ones(20, 48)},
        CheckpointError,
        r"q_proj.weight is \[24, 32\], the config says \[24, 40\] .*hidden_size=20",
    ),
    "no fc": ({}, {"fc.weight": None}, CheckpointError, "tensor fc.weight is missing"),
    "layer types": (
        {"sliding_window": 4, "layer_types": ["chunked_attention"]},
        {},
        UnsupportedModelError,
        "sliding_window=4 with layer_types=.'chunked_attention'.",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals(kind: str, edit) -> None:
    config, tensors, error, message = REFUSALS[kind]
    with pytest.raises(error, match=message):
        load(edit(config, tensors))


def test_a_head_of_another_width_needs_a_table(tmp_path: Path) -> None:
    spec = varied(hidden_size=20, owns_embed=True)
    state = fresh(spec)
    del state["embed_tokens.weight"]
    write_head(tmp_path, spec, state, TARGET, IDS)
    with pytest.raises(CheckpointError, match=r"tensor embed_tokens.weight is missing; config.json has hidden_size=20"):
        load(tmp_path)


def test_a_width_that_the_heads_do_not_divide(tmp_path: Path) -> None:
    """transformers' config refuses it, and the head does not need it."""
    spec = varied(hidden_size=18, owns_embed=True)
    write_head(tmp_path, spec, fresh(spec), TARGET, IDS)
    assert load(tmp_path).head.spec == spec


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 60}


@pytest.mark.parametrize("config_class", [PreTrainedConfig, LlamaConfig, Qwen3Config, MistralConfig])
def test_every_key_of_transformers_configs_is_known(config_class, edit) -> None:
    """The table knows each, and what a fresh config says changes nothing."""
    config = config_class(**SIZES).to_dict()
    known = HONOURED.keys() | NEUTRAL.keys() | HARMLESS
    assert {key for key in config if key not in known and not HARMLESS_NAME.search(key)} == set()
    config |= {"rms_norm_eps": SPEC.rms_norm_eps, "max_position_embeddings": SPEC.max_position_embeddings}
    config["model_type"] = config["model_type"] or "llama"
    assert load(edit(config | {"rope_theta": None, "rope_scaling": None})).head.spec == SPEC


def test_every_key_of_speculators_config_is_known(folder: Path) -> None:
    """A head as speculators 0.9 writes it: flags at the top, layer fields nested."""
    config = json.loads((folder / "config.json").read_text())
    written = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 20,
        AUX: [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "has_no_defaults_at_init": False,
        "model_type": "speculator_model",
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": True,
        "transformer_layer_config": LlamaConfig(**SIZES, rms_norm_eps=1e-5).to_diff_dict(),
        "transformers_version": "5.17.0",
    }
    assert config["draft_vocab_size"] == 20
    (folder / "config.json").write_text(json.dumps(written))
    wanted = varied(norm_before_residual=True, norm_output=True, rms_norm_eps=1e-5, max_position_embeddings=2048)
    assert load(folder).head.spec == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, other) for key in sorted(NEUTRAL) for other in (0.25, "alibi", True, False) if other not in NEUTRAL[key]],
)
def test_a_key_that_is_neutral_at_one_value_only_is_refused_at_others(key, value, edit) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{key}={value!r}; specdec runs EAGLE-3 heads with"):
        load(edit({key: value}))
    assert load(edit({key: NEUTRAL[key][0]})).head.spec == SPEC


@pytest.mark.parametrize("key", [*sorted(HARMLESS), "torch_dtype", "bos_token_id", "num_experts", "attention_dropout"])
def test_a_harmless_key_changes_nothing(key, edit) -> None:
    assert load(edit({key: 7})).head.spec == SPEC


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


@pytest.mark.parametrize("place", ["top", "eagle_config", "speculators"])
@pytest.mark.parametrize("key", sorted(UNREAD))
def test_a_key_that_changes_the_computation_is_refused_by_name(key, place, folder, edit) -> None:
    added = {key: UNREAD[key]}
    if place == "speculators":
        layer = json.loads((folder / "config.json").read_text()) | added
        flags = {"draft_vocab_size": 20, "norm_before_residual": False, "speculators_model_type": "eagle3"}
        for flag in ("eagle_config", "architectures", "torch_dtype"):
            layer.pop(flag)
        (folder / "config.json").write_text(json.dumps(flags | {"transformer_layer_config": layer}))
    else:
        edit(added if place == "top" else {"eagle_config": {AUX: [1, 3, 4]} | added})
    with pytest.raises(UnsupportedModelError, match=key):
        load(folder)


def test_a_scale_of_queries_and_a_rotated_width_that_are_the_heads_own_pass(edit) -> None:
    assert load(edit({"query_pre_attn_scalar": 6, "rotary_dim": 6, "rotary_pct": 1.0})).head.spec == SPEC


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_attention_heads": 8}, r"q_proj.weight is \[24, 32\], .* says \[48, 32\] .*num_attention_heads=8"),
        ({"head_dim": 8}, r"q_proj.weight is \[24, 32\], the config says \[32, 32\] .*head_dim=8"),
        ({"head_dim": None}, r"q_proj.weight is \[24, 32\].*head_dim=4"),
        ({"head_dim": 7}, "head_dim=7; .* even"),
        ({"num_key_value_heads": 1}, r"k_proj.weight is \[12, 32\].*num_key_value_heads=1"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 do not group over num_key_value_heads=3"),
        ({"num_key_value_heads": None}, r"k_proj.*num_key_value_heads=4"),
        ({"intermediate_size": 25}, r"gate_proj.weight is \[24, 16\].*intermediate_size=25"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, but the file says 1"),
        ({"vocab_size": 64}, "vocab_size=64, but t2d says 60"),
        ({"vocab_size": 32}, "vocab_size=32, but t2d says 60"),
        ({"draft_vocab_size": 30}, "draft_vocab_size=30, but lm_head says 20"),
        ({"target_hidden_size": 32}, "target_hidden_size=32, but target target says 16"),
        ({"hidden_size": 24}, "hidden_size"),
        ({"hidden_size": None}, "config.json says no hidden_size"),
        ({"num_attention_heads": None}, "config.json says no num_attention_heads"),
        ({"hidden_size": "16"}, "hidden_size='16', expected a whole number above 0"),
        ({"num_attention_heads": 4.0}, "num_attention_heads=4.0, expected a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0, expected a whole number above 0"),
        ({"fc_norm": "yes"}, "fc_norm='yes', expected true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small', expected a number"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear', expected an object"),
        ({"eagle_config": [1]}, r"eagle_config=\[1\], expected an object"),
        ({"eagle_config": {AUX: 3}}, f"eagle_config.{AUX}=3, expected a list"),
        ({"hidden_act": "swish2"}, "hidden_act='swish2'"),
        ({"attention_bias": True}, "attention_bias=True, but the file, by its self_attn.q_proj.bias, says False"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc=True"),
    ],
)
def test_sizes_that_contradict_the_file_or_the_target_are_named(changed, says, edit) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says) as caught:
        read_head(edit(changed), TARGET)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_head_of_a_smaller_vocabulary_than_the_targets_is_refused(edit) -> None:
    with pytest.raises(CheckpointError, match="vocab_size=58, target target has 60 tokens"):
        load(edit({"vocab_size": 58}, {"t2d": None}))


def test_a_padded_vocabulary_is_accepted(edit) -> None:
    padded = torch.zeros(64, dtype=torch.bool).index_fill_(0, IDS, True)
    assert load(edit({"vocab_size": 64}, {"t2d": padded})).head.spec == SPEC


@pytest.mark.parametrize(
    ("top", "nested", "speculators", "final_norm", "fed_back", "warns"),
    [
        (None, None, False, True, False, False),
        (True, None, False, True, False, True),  # SpecForge: lm_head reads norm(a), the next step a
        (False, None, False, False, False, False),  # SpecForge, as the gains of its norm say: nothing is normed
        (None, True, False, True, True, False),
        (True, True, False, True, True, False),  # as write_head says it, for servers and for itself
        (False, False, False, True, False, False),
        (None, None, True, True, False, False),
        (True, None, True, True, True, False),
        (False, None, True, True, False, False),
    ],
)
def test_norm_output_means_what_its_format_means(
    top, nested, speculators, final_norm, fed_back, warns, folder, caplog
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["norm_output"] = nested
    if speculators:
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config, AUX: [2, 4, 5]}
        config |= {"norm_before_residual": False, "draft_vocab_size": 20}
        config["transformer_layer_config"].pop("eagle_config")
    (folder / "config.json").write_text(json.dumps(config | {"norm_output": top}))
    with caplog.at_level(logging.WARNING, "specdec"):
        spec = load(folder).head.spec
    assert (spec.final_norm, spec.norm_output) == (final_norm, fed_back)
    assert any("norm_output" in record.getMessage() for record in caplog.records) is warns


@pytest.mark.parametrize(
    ("top", "trained", "version", "read", "warns"),
    [
        (True, True, "5.8.1", (True, False), True),  # before and after have the same tensors
        (True, True, None, (True, False), True),
        (True, True, "5.17.0", (True, False), True),  # released a week before the change
        (True, True, "5.18.0.dev0", (True, False), True),
        (True, True, "5.18.0", (True, True), False),
        (True, True, "6.0.1", (True, True), False),
        (False, True, "5.8.1", (True, False), False),  # a norm that was trained is one that lm_head reads after
        (False, False, "5.8.1", (False, False), False),
        (False, None, "5.8.1", (False, False), False),
    ],
)
def test_specforge_changed_what_norm_output_means(top, trained, version, read, warns, edit, caplog) -> None:
    """Until 2026-09-15 it said what lm_head reads, since then what the next step does: tensors and version decide."""
    gains = {None: None, False: torch.full((16,), 0.99), True: torch.linspace(0.5, 2, 16)}[trained]
    changed = edit({"norm_output": top, "transformers_version": version}, {"norm.weight": gains})
    with caplog.at_level(logging.WARNING, "specdec"):
        spec = load(changed).head.spec
    assert (spec.final_norm, spec.norm_output) == read
    assert ("specdec doctor" in caplog.text) is warns


def test_a_head_that_names_no_target_layers_says_what_it_is_given(edit, caplog) -> None:
    with caplog.at_level(logging.WARNING, "specdec"):
        assert load(edit({"eagle_config": None})).head.spec.aux_layers == (2, 4, 5)
    assert "has no eagle_aux_hidden_state_layer_ids: it is assumed to read the states that enter layers 2, 4, 5" in (
        caplog.text
    )
    caplog.clear()
    load(edit({"eagle_config": None}), aux_layers=[2, 4, 5])
    assert not caplog.text


def test_norm_output_that_contradicts_the_last_norm_is_refused(edit) -> None:
    flags = {AUX: [1, 3, 4], "use_last_layernorm": True}
    with pytest.raises(CheckpointError, match="use_last_layernorm=True, but norm_output=False"):
        load(edit({"norm_output": False, "eagle_config": flags}))


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"layer_types": ["chunked_attention"]}, "layer_types=.'chunked_attention'."),  # no window, still unknown
        ({"layer_types": "full_attention"}, "layer_types='full_attention'"),
        ({"layer_types": []}, r"layer_types=\[\] on 1 layers"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window=None with layer_types"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window=0"),
        ({"layer_types": ["sliding_attention"], "sliding_window": True}, "sliding_window=True"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": False},
            "sliding_window=9 .* use_sliding_window is not true",
        ),
    ],
)
def test_layer_types_that_cannot_be_meant_are_refused(layer, says, edit) -> None:
    with pytest.raises(SpecDecError, match=says):
        load(edit(layer))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_scaling": LLAMA3}, "rope_type='llama3' without original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' without factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2', expected a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "slope": 3}}, "slope=3 of its RoPE is not known"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.5}}, "mscale=0.5 and mscale_all_dim=None"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention=.* is not known"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters=.*contradict rope_scaling=",
        ),
        ({"rope_theta": 0}, "rope_theta=0, expected a number above 0"),
    ],
)
def test_rope_that_is_incomplete_or_contradicts_itself_is_refused(rope, says, edit) -> None:
    with pytest.raises(SpecDecError, match=says):
        read_head(edit(rope), TARGET)


def test_rope_in_both_spellings_as_specforge_exports_it(edit) -> None:
    scaling = LLAMA3 | {"original_max_position_embeddings": 64}
    config = {"rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 5e5}, "rope_theta": 5e5}
    assert load(edit(config)).head.spec.rope == scaling | {"rope_theta": 5e5}


def test_windows_of_two_sizes_are_not_written(tmp_path: Path) -> None:
    spec = varied(windows=(7, 9))
    with pytest.raises(UnsupportedModelError, match=r"sliding windows \[7, 9\]"):
        write_head(tmp_path, spec, fresh(spec), TARGET, IDS)


def test_a_head_without_a_last_norm_is_written(tmp_path: Path) -> None:
    spec = varied(final_norm=False)
    write_head(tmp_path, spec, fresh(spec), TARGET, IDS)
    assert load(tmp_path).head.spec == spec


def test_a_tied_head_is_refused(edit) -> None:
    tensors = {"embed_tokens.weight": torch.ones(60, 16), "lm_head.weight": None, "d2t": None, "t2d": None}
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings=True"):
        load(edit({"tie_word_embeddings": True, "draft_vocab_size": 60}, tensors))


def test_folders_that_are_no_heads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_head(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected an object"):
        read_head(tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **SIZES}))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_head(tmp_path, TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_head(tmp_path, TARGET)


def test_a_pickle_that_runs_code_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_head(folder, TARGET)


def test_frequencies_stay_float32_in_bf16(folder: Path) -> None:
    head = load(folder).head.place(torch.device("cpu"), torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    assert head.rotary_emb.inv_freq.dtype == torch.float32
