"""Reading EAGLE-3 heads: the auxiliary-layer rule as a table, and what each format's keys mean.

`test_refused_drafters.py` has what is refused.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import IDS, SPEC, TARGET, change_drafter, fresh, read_drafter, write_drafter
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from specdec.draft_models.checkpoints.checkpoint_files import damaged_file, tensor_files
from specdec.draft_models.checkpoints.drafter_formats import AUX_IDS, HARMLESS, OUTPUT_IDS, SPECFORGE, is_eagle3_config
from specdec.draft_models.eagle3.checkpoint import read_head, resolve_aux_ids, write_head
from specdec.draft_models.eagle3.head import Eagle3Spec
from specdec.errors import CheckpointError, UnsupportedModelError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 60}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head in the SpecForge format."""
    return write_drafter("SpecForge", tmp_path)


def changed(folder: Path, changes: dict[str, Any]) -> Eagle3Spec:
    return read_drafter("SpecForge", change_drafter(folder, changes))


NESTED = "eagle_config"


@pytest.mark.parametrize(
    ("config", "num_layers", "override", "boundaries", "warns"),
    [
        ({}, 32, None, (2, 16, 29), True),  # yuhuili: nothing said
        ({NESTED: {"use_aux_hidden_state": True}}, 36, None, (2, 18, 33), True),
        ({NESTED: {AUX_IDS: [1, 15, 28]}}, 32, None, (2, 16, 29), False),  # SpecForge: outputs
        ({NESTED: {AUX_IDS: [1, 17, 32]}}, 36, None, (2, 18, 33), False),  # gpt-oss-120b, long context
        ({NESTED: {AUX_IDS: [24, 30, 36]}}, 36, None, (24, 30, 36), False),  # gpt-oss-120b v3: 36 leaves the last
        ({NESTED: {AUX_IDS: [2, 16, 29]}}, 32, None, (2, 16, 29), False),  # written as boundaries
        ({NESTED: {AUX_IDS: [5, 10, 20]}}, 32, None, (6, 11, 21), True),  # could be either
        ({NESTED: {AUX_IDS: [5, 10, 20]}}, 32, [5, 10, 20], (5, 10, 20), False),  # the user knows
        ({AUX_IDS: [2, 30, 57]}, 60, None, (2, 30, 57), False),  # speculators: boundaries
        ({AUX_IDS: [2, 46, 91, 93]}, 94, None, (2, 46, 91, 93), False),
        ({AUX_IDS: [1, 15, 28]}, 32, None, (1, 15, 28), False),  # the top level is never shifted
        ({AUX_IDS: None, NESTED: None}, 12, None, (2, 6, 9), True),
        ({AUX_IDS: [0, 1, 12]}, 12, None, (0, 1, 12), False),
        ({OUTPUT_IDS: [1, 9, 17, 25, 33]}, 36, None, (2, 10, 18, 26, 34), False),  # deepseek-ai: outputs
        ({NESTED: {AUX_IDS: [1, 5, 11]}}, 12, None, (2, 6, 12), False),  # output of the last layer
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


# written and read again


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, draft_vocab_size=None),
        replace(SPEC, draft_vocab_size=60),
        replace(SPEC, qk_norm=True, norm_before_residual=True, norm_before_fc=True),
        replace(SPEC, fc_norm=True, norm_output=True, windows=(None, 7)),
        replace(SPEC, final_norm=False),
        replace(SPEC, hidden_size=20, owns_embed=True, head_dim=10),
        replace(SPEC, hidden_size=18, owns_embed=True),  # the heads do not divide it: transformers' config refuses that
        replace(SPEC, aux_layers=(2, 3, 6, 8)),
        replace(SPEC, rope={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, rms_norm_eps=1e-5),
        replace(SPEC, biases=frozenset(f"layers.0.self_attn.{p}_proj" for p in "qkv")),
    ],
    ids=lambda spec: f"{spec.aux_layers}-{spec.windows}-{spec.draft_vocab_size}-{spec.hidden_size}-{spec.final_norm}",
)
def test_what_is_written_is_read_again(spec: Eagle3Spec, tmp_path: Path) -> None:
    head = fresh(spec)
    write_head(tmp_path, head, TARGET)
    again = read_head(tmp_path, TARGET)
    assert again.spec == spec
    torch.testing.assert_close(dict(again.state_dict()), dict(head.state_dict()), atol=0, rtol=0)
    assert again.target_ids is None if head.target_ids is None else torch.equal(again.target_ids, head.target_ids)
    heads = {(layer.k.heads, layer.k.dim) for layer in spec.kv_layout.layers}
    assert len(spec.kv_layout.layers) == spec.num_layers and heads == {(spec.num_kv_heads, spec.head_dim)}


def test_a_written_head_has_published_names(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and is_eagle3_config(config)
    assert config["eagle_config"] == {AUX_IDS: [1, 3, 4], "use_aux_hidden_state": True}
    tensors = load_file(folder / "model.safetensors")
    published = {"midlayer.self_attn.q_proj.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert published < set(tensors)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (12, 32)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (replace(SPEC, aux_layers=(3, 4, 5)), "begin with state 2"),
        (replace(SPEC, windows=(7, 9)), r"sliding windows \[7, 9\]"),
    ],
)
def test_heads_that_the_format_cannot_describe_are_not_written(spec, says, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        write_head(tmp_path, fresh(spec), TARGET)


def test_frequencies_stay_float32_in_bf16(folder: Path) -> None:
    head = read_head(folder, TARGET).place(torch.device("cpu"), torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    assert head.rotary_emb.inv_freq.dtype == torch.float32


# names of tensors


def test_pytorch_files_and_prefixes(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    more = {"model.rotary_emb.inv_freq": torch.ones(3), "verifier_lm_head.weight": torch.ones(2, 2)}
    torch.save({f"model.{k}" if k[0] == "m" else k: v for k, v in state.items()} | more, folder / "pytorch_model.bin")
    assert read_drafter("SpecForge", folder) == SPEC


def test_files_next_to_the_weights_are_no_part_of_a_head(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ModelOpt writes an adapter of the target next to a head that was trained with it; trainers leave other files."""
    assert read_drafter("SpecForge", folder) == SPEC and not caplog.records
    others = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 3)}
    for name in ("adapter_model.safetensors", "export.safetensors"):
        save_file(others, folder / name)
    (folder / "adapter_config.json").write_text("{}")
    assert read_drafter("SpecForge", folder) == SPEC
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "by peft" in caplog.text
    (folder / "export.safetensors").unlink()
    (folder / "model.safetensors").rename(folder / "head.safetensors")
    assert read_drafter("SpecForge", folder) == SPEC


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    """Others are found too, such as MTP modules that were copied next to a model."""
    for file, names in (("listed", "a"), ("other", "ab")):
        save_file({name: torch.ones(1) for name in names}, tmp_path / f"{file}.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "listed.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: path.stem for name, path in tensor_files(tmp_path).items()} == {"a": "listed", "b": "other"}
    assert damaged_file(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert 'has no "metadata"' in str(damaged_file(tmp_path)), "which transformers reads"


def test_legacy_names_of_state_norms(folder: Path) -> None:
    names = {f"aux_norm_{part}.weight": torch.full((16,), float(i)) for i, part in enumerate(("low", "mid", "high"))}
    norms = read_head(change_drafter(folder, {"fc_norm": True, **names}), TARGET).state_dict()
    assert [float(norms[f"fc_norm.{i}.weight"][0]) for i in range(3)] == [0.0, 1.0, 2.0]


# what keys mean


@pytest.mark.parametrize(
    ("layer", "windows"),
    [
        ({}, (None,)),
        ({"sliding_window": 9}, (None,)),  # nothing says which layers it is for: full, as in both reference packages
        ({"sliding_window": 9, "use_sliding_window": True}, (None,)),
        ({"sliding_window": 9, "use_sliding_window": False}, (None,)),
        ({"sliding_window": 9, "model_type": "mistral"}, (None,)),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, (9,)),
        # Qwen3's config makes the list: full up to max_window_layers (28 unless it says so), sliding after that
        ({"sliding_window": 9, "use_sliding_window": True, "model_type": "qwen3"}, (None,)),
        ({"sliding_window": 9, "use_sliding_window": True, "model_type": "qwen3", "max_window_layers": 0}, (9,)),
        ({"sliding_window": 9, "model_type": "qwen3", "max_window_layers": 0}, (None,)),  # not to be used
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, (None,)),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 4}, (9,)),  # the target's list, cut
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "linear_attention"]}, (9,)),
        ({"use_sliding_window": True, "model_type": "qwen3", "max_window_layers": 0}, (None,)),  # of no size
    ],
)
def test_sliding_windows(layer, windows, folder) -> None:
    assert changed(folder, layer).windows == windows


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
BOTH = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_theta": 1e4}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}
MROPE = DEFAULT | {"mrope_section": [1, 1, 1]}


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 500000.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, LINEAR),
        ({"rope_theta": 10000.0, "rope_parameters": DEFAULT}, DEFAULT),
        (BOTH, LLAMA3 | {"rope_theta": 5e5}),  # as SpecForge exports it
        ({"rope_scaling": YARN}, YARN | {"rope_theta": 1e4}),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, MROPE),  # Qwen2.5-VL
    ],
)
def test_rope_spellings(config, rope, folder) -> None:
    assert changed(folder, config).rope == rope


NVIDIA = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "has_lm_head": True,
}
PADDED = torch.zeros(64, dtype=torch.bool).index_fill_(0, IDS, True)


@pytest.mark.parametrize(
    "changes",
    [
        {f"eagle_config.{key}": value for key, value in NVIDIA.items()},
        {"query_pre_attn_scalar": 6, "rotary_dim": 6, "rotary_pct": 1.0},  # the head's own
        {"vocab_size": 64, "t2d": PADDED},  # a vocabulary that is padded beyond the target's
        {"model_type": "qwen2", "max_window_layers": 64},  # SpecForge's for QwQ 32B and Phi 4: layers of Llama
        {"model_type": "phi3"},
        {"architectures": ["Eagle3LlamaForCausalLM"], "use_mrope": False, "modal_type": "VLM"},  # AngelSlim's
        {"attention_head_dim": 6, "norm_type": "rms", "use_cla": False, "use_rotary_pos_emb": True},  # for Hunyuan
        {"num_hidden_layers": len(TARGET.layout.layers)},  # Vicuna 13B's, whose config.json counts its target's
        dict.fromkeys([*HARMLESS, "torch_dtype", "bos_token_id", "num_experts", "attention_dropout"], 7)
        | {"architectures": ["LlamaForCausalLMEagle3"]},
    ],
    ids=["NVIDIA", "head_dim", "padded", "qwen2", "phi3", "AngelSlim", "Hunyuan", "target's layers", "harmless"],
)
def test_settings_that_change_nothing_are_accepted(changes, folder) -> None:
    assert changed(folder, changes) == SPEC


def test_a_head_without_a_vocabulary_has_the_targets(folder) -> None:
    none = {"lm_head.weight": None, "d2t": None, "t2d": None}
    stated = {"tie_word_embeddings": True, "draft_vocab_size": 60, "vocab_size": 64}
    assert changed(folder, none | stated) == replace(SPEC, draft_vocab_size=None)


def test_a_table_may_be_padded(folder) -> None:
    padded = {"embed_tokens.weight": torch.ones(64, 16), "vocab_size": 64, "t2d": PADDED}
    assert changed(folder, padded) == replace(SPEC, owns_embed=True)


@pytest.mark.parametrize("config_class", [PreTrainedConfig, LlamaConfig, Qwen3Config, MistralConfig])
def test_every_key_of_transformers_configs_is_known(config_class, folder) -> None:
    """The table knows each, and what a fresh config says changes nothing."""
    config = config_class(**SIZES).to_dict()
    assert [key for key in config if key not in SPECFORGE.keys and not SPECFORGE.harmless.search(key)] == []
    config |= {"rms_norm_eps": SPEC.rms_norm_eps, "max_position_embeddings": SPEC.max_position_embeddings}
    config["model_type"] = config["model_type"] or "llama"
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    assert changed(folder, config | {"rope_theta": None, "rope_scaling": None}) == SPEC


def test_every_key_of_speculators_config_is_known(folder: Path) -> None:
    """A head as speculators 0.9 writes it: flags at the top, layer fields nested."""
    written = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 20,
        AUX_IDS: [2, 4, 5],
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
    written["transformer_layer_config"]["architectures"] = ["LlamaForCausalLM"]  # of the verifier it was made for
    (folder / "config.json").write_text(json.dumps(written))
    said = {"norm_before_residual": True, "norm_output": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    assert read_drafter("speculators", folder) == replace(SPEC, **said)


@pytest.mark.parametrize(("said", "warns"), [({"norm_before_residual": None}, True), ({}, False)])
def test_an_assumed_residual_of_speculators_is_a_warning(said, warns, tmp_path, caplog) -> None:
    change_drafter(write_drafter("speculators", tmp_path), said)
    assert read_drafter("speculators", tmp_path).norm_before_residual is False
    assert ("no norm_before_residual: it is read as false" in caplog.text) is warns


def test_a_head_of_deepseek_is_read(tmp_path: Path) -> None:
    """Its config.json is its target's, with the layers whose outputs it reads; it has copies of both vocabularies."""
    spec = replace(SPEC, aux_layers=(2, 4, 6), draft_vocab_size=60, owns_embed=True, qk_norm=True)
    write_head(tmp_path, fresh(spec), TARGET)
    tensors = {key.replace("midlayer", "layers.0"): t for key, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = Qwen3Config(**SIZES, rms_norm_eps=spec.rms_norm_eps).to_dict()
    config |= {"architectures": ["Qwen3Eagle3Model"], OUTPUT_IDS: [1, 3, 5]}
    config |= {"num_target_layers": 8, "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
    config |= {"target_model_name_or_path": "Qwen/Qwen3-4B", "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(read_drafter("SpecForge", tmp_path), max_position_embeddings=spec.max_position_embeddings) == spec
    change_drafter(tmp_path, {"num_target_layers": 9})
    with pytest.raises(CheckpointError, match="num_target_layers=9, but target target says 8"):
        read_head(tmp_path, TARGET)


def test_a_head_on_the_final_state(folder) -> None:
    spec = changed(folder, {"eagle_config": {"use_aux_hidden_state": False}, "fc.weight": torch.ones(16, 16)})
    assert spec.aux_layers == () and spec.has_fc and spec.feature_size == 16
    assert not changed(folder, {"fc.weight": None}).has_fc


def test_a_head_that_names_no_target_layers_says_what_it_is_given(folder, caplog) -> None:
    with caplog.at_level(logging.WARNING, "specdec"):
        assert changed(folder, {"eagle_config": None}).aux_layers == (2, 4, 5)
    said = "has no eagle_aux_hidden_state_layer_ids: it is assumed to read the states that enter layers 2, 4, 5"
    assert said in caplog.text
    caplog.clear()
    read_head(folder, TARGET, aux_layers=[2, 4, 5])
    assert not caplog.text


@pytest.mark.parametrize(
    ("top", "nested", "kind", "final_norm", "fed_back", "warns"),
    [
        (None, None, "SpecForge", True, False, False),
        (True, None, "SpecForge", True, False, True),  # lm_head reads norm(a), the next step a
        (False, None, "SpecForge", False, False, False),  # as the gains of its norm say: nothing is normed
        (None, True, "SpecForge", True, True, False),
        (True, True, "SpecForge", True, True, False),  # as write_head says it, for servers and for itself
        (False, False, "SpecForge", True, False, False),
        (None, None, "speculators", True, False, False),
        (True, None, "speculators", True, True, False),
        (False, None, "speculators", True, False, False),
    ],
)
def test_norm_output_means_what_its_format_means(
    top, nested, kind, final_norm, fed_back, warns, tmp_path, caplog
) -> None:
    change_drafter(write_drafter(kind, tmp_path), {"norm_output": top, "eagle_config.norm_output": nested})
    with caplog.at_level(logging.WARNING, "specdec"):
        spec = read_drafter(kind, tmp_path)
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
def test_specforge_changed_what_norm_output_means(top, trained, version, read, warns, folder, caplog) -> None:
    """Until 2026-09-15 it said what lm_head reads, since then what the next step does: tensors and version decide."""
    gains = {None: None, False: torch.full((16,), 0.99), True: torch.linspace(0.5, 2, 16)}[trained]
    with caplog.at_level(logging.WARNING, "specdec"):
        spec = changed(folder, {"norm_output": top, "transformers_version": version, "norm.weight": gains})
    assert (spec.final_norm, spec.norm_output) == read
    assert ("specdec doctor" in caplog.text) is warns
