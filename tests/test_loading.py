"""Checkpoints from a folder: every tensor is the checkpoint's, in whatever class and layout it was saved."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusal_checks import one_sentence
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MiniMaxM2Config

from specdec import Engine, EngineConfig, SamplingParams, SpecDecError
from specdec.errors import CheckpointError, ConfigError
from specdec.loading.model_loading import Checkpoint, load_tokenizer, pick_dtype
from specdec.models.published import resolve_name
from specdec.text.prompts import text_ids

from marks import deep, deep_cases, slow

PARAMS = SamplingParams(max_new_tokens=12)
CONFIG = EngineConfig(max_batch_size=1, max_model_len=64)
CPU = torch.device("cpu")


def edited(folder, edit):
    """The folder, with these changes of its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    return str(folder)


@deep_cases("gemma4-e2b", "gpt_oss", "mistral")
@pytest.mark.parametrize(
    "family",
    ["gemma4-multimodal", slow("gemma4-e2b"), "gemma4-moe", "gpt_oss", slow("qwen3"), slow("mistral"), "step3p7"],
)
def test_a_saved_model_generates_what_it_did(family, make_target, greedy_oracle, random_prompt, tmp_path):
    """Multimodal Gemma 4 among them, whose text part a careless class would fill with random numbers, and Step 3.7,
    which transformers has in no class of causal models."""
    model = make_target(family)
    prompt = random_prompt(17)
    want = greedy_oracle(model, prompt, PARAMS.max_new_tokens)
    model.save_pretrained(tmp_path)
    with Engine.from_pretrained(str(tmp_path), "ngram", config=CONFIG) as engine:
        assert engine.generate(prompt, PARAMS)[0].token_ids == want


def test_shards_are_read_and_a_missing_one_and_an_index_that_is_cut_off_are_named(
    make_target, greedy_oracle, random_prompt, tmp_path
):
    model, prompt = make_target("llama"), random_prompt(9)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards, index = sorted(tmp_path.glob("*.safetensors")), tmp_path / "model.safetensors.index.json"
    assert len(shards) > 1
    with Engine.from_pretrained(str(tmp_path), config=CONFIG) as engine:
        assert engine.generate(prompt, PARAMS)[0].token_ids == greedy_oracle(model, prompt, PARAMS.max_new_tokens)
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(CheckpointError, match=f'{index.name} has no "metadata", which transformers reads; add'):
        Checkpoint.from_name(str(tmp_path)).load(torch.float32, CPU)
    shards[1].unlink()
    said = f"cannot be loaded: the checkpoint lacks {shards[1].name}, which {index.name} names$"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.from_name(str(tmp_path)).load(torch.float32, CPU)
    index.write_text(index.read_text()[:50])
    with pytest.raises(CheckpointError, match=f"{index.name} cannot be read .* download or copy it again"):
        Checkpoint.from_name(str(tmp_path)).load(torch.float32, CPU)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"num_attention_heads": 0}, r"num_attention_heads=0, expected a whole number above 0"),  # ZeroDivisionError
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0, expected a whole number above 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4 do not group over num_key_value_heads=3"),
        ({"head_dim": 0}, "head_dim=0, expected a whole number above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, expected a whole number above 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1, expected a whole number above 0"),
        ({"hidden_size": "x"}, "hidden_size='x', expected a whole number above 0"),
        ({"hidden_size": 33}, r"hidden size \(33\) is not a multiple"),  # StrictDataclassClassValidationError
        ({"tie_word_embeddings": "x"}, "'tie_word_embeddings' expected bool"),  # ...FieldValidationError
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a number of 0 or more"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            "rope_parameters.factor=0, expected a number above",
        ),
        ({"architectures": 5}, "architectures=5, expected a list of names"),
        ({"hidden_act": "nix"}, "cannot be loaded: hidden_act='nix', which transformers does not know"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type='su', which transformers does not know"),
        ({"dtype": "bf16"}, "cannot be used: dtype='bf16', which transformers does not know"),
        ({"intermediate_size": 40}, r"proj.weight is \[.*48.*\], and by the config.json it would be \[.*40.*\]"),
    ],
    ids=str,
)
def test_a_config_whose_numbers_do_not_fit_is_refused_in_one_sentence(edit, says, make_target, tmp_path):
    """Loaded as a target, and as a drafter."""
    make_target("llama").save_pretrained(tmp_path)
    path = edited(tmp_path, edit)
    for given in ((path,), (make_target("llama"), path)):
        with pytest.raises(SpecDecError, match=says) as error:
            Engine.from_pretrained(*given, config=CONFIG)
        assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForQuestionAnswering"])
def test_a_model_that_judges_texts_is_not_served_with_its_embedding_as_head(name, make_target, tmp_path):
    make_target("llama").save_pretrained(tmp_path)
    path = edited(tmp_path, {"architectures": [name], "tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match=f"cannot be loaded: its class is {name}, which continues no text"):
        Engine.from_pretrained(path, config=CONFIG)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_class_without_a_head_has_its_embedding_as_head_where_the_config_ties_them(tied, make_target, tmp_path):
    """transformers does the same. A head that is missing is not replaced by an embedding."""
    model = make_target("llama", tie_word_embeddings=tied)
    model.model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.from_name(tmp_path)
    with nullcontext() if tied else pytest.raises(CheckpointError, match=r"lacks 1 tensors of .*, lm_head\.weight"):
        torch.testing.assert_close(checkpoint.load(torch.float32, CPU).lm_head.weight, model.model.embed_tokens.weight)


def test_gpt2s_own_names_of_sizes_are_checked_too(tmp_path):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=96, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="n_layer=0, expected a whole number above 0"):
        Engine.from_pretrained(edited(tmp_path, {"n_layer": 0}), config=CONFIG)


def test_the_parts_of_a_multimodal_config_and_those_of_heads_are_checked_too(make_target, tmp_path):
    make_target("gemma4-multimodal").save_pretrained(tmp_path)
    text = make_target("gemma4-multimodal").config.text_config.to_dict()
    with pytest.raises(CheckpointError, match=r"text_config\.num_attention_heads=0, expected a whole number above 0"):
        Engine.from_pretrained(edited(tmp_path, {"text_config": text | {"num_attention_heads": 0}}))
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_attention_heads": 0, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(head))
    with pytest.raises(CheckpointError, match="num_attention_heads=0, expected a whole number above 0"):
        Engine.from_pretrained(make_target("llama"), str(tmp_path))


@pytest.mark.parametrize("left", [-100, 4, 0])
def test_a_safetensors_file_that_is_cut_off_is_named_with_the_remedy(left, make_target, tmp_path):
    """Checkpoints of a target, of a language model that drafts, and of a head."""
    make_target("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:left])
    says = rf"{shard.name} cannot be read .* is cut off or damaged; download or copy it again"
    for given in ((str(tmp_path),), (make_target("llama"), str(tmp_path))):
        with pytest.raises(CheckpointError, match=says):
            Engine.from_pretrained(*given, config=CONFIG)
    edited(tmp_path, {"architectures": ["LlamaForCausalLMEagle3"]})
    with pytest.raises(CheckpointError, match=says):
        Engine.from_pretrained(make_target("llama"), str(tmp_path), config=CONFIG)


def test_return_dict_false_changes_nothing(make_target, make_assistant, tmp_path):
    """With it modules return tuples, of which nothing is named; the model was refused."""
    target = make_target("gemma4-multimodal")
    for name, model in (("target", target), ("drafter", make_assistant(target))):
        model.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        edited(tmp_path / name, {"return_dict": False, "text_config": config["text_config"] | {"return_dict": False}})
    with Engine.from_pretrained(str(tmp_path / "target"), str(tmp_path / "drafter"), config=CONFIG) as engine:
        tokens = engine.generate([5, 6, 7], PARAMS)[0].token_ids
    with Engine.from_pretrained(target, config=CONFIG) as engine:
        assert engine.generate([5, 6, 7], PARAMS)[0].token_ids == tokens


def test_a_chunk_size_changes_nothing_where_every_layer_is_full_or_sliding(make_target, tmp_path):
    """MiMo-V2-Flash's config.json has one; it was refused as chunked attention."""
    model = make_target("mimo_v2_flash")
    model.save_pretrained(tmp_path)
    with Engine.from_pretrained(edited(tmp_path, {"attention_chunk_size": 4}), config=CONFIG) as engine:
        tokens = engine.generate([5, 6, 7], PARAMS)[0].token_ids
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert engine.generate([5, 6, 7], PARAMS)[0].token_ids == tokens


@pytest.mark.parametrize("rope", [{"rope_parameters": None, "rope_theta": 5e6}, {}], ids=["published", "saved again"])
def test_only_the_channels_that_rotary_dim_counts_rotate(rope, tmp_path):
    """In MiniMax-M2; transformers 5.17 reads no rotary_dim and rotated whole heads."""
    MiniMaxM2Config(rotary_dim=64).save_pretrained(tmp_path)
    config = Checkpoint.from_name(edited(tmp_path, rope)).hf_config()
    assert config.rope_parameters["partial_rotary_factor"] * config.head_dim == 64
    assert config.rope_parameters["rope_theta"] == 5e6 and config.name_or_path == str(tmp_path)


def test_rotary_dim_without_a_head_dim_counts_of_the_default(tmp_path):
    stored = {"model_type": "minimax_m2", "rotary_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = Checkpoint.from_name(str(tmp_path)).hf_config()
    assert config.rope_parameters["partial_rotary_factor"] * config.head_dim == 32


MIMO_OF_THE_HUB = {
    "hybrid_layer_pattern": [1, 0, 1],
    "moe_layer_freq": [0, 0, 1],
    "layernorm_epsilon": 1e-6,
    "rope_theta": 640000,
    "swa_rope_theta": 500,
    "partial_rotary_factor": 0.5,
    "sliding_window_size": 6,
}


def test_the_keys_of_mimo_v2_flash_on_the_hub_are_read(tmp_path):
    """transformers 5.17 passes them over, and takes the values of the one published checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mimo_v2_flash", "num_hidden_layers": 3}))
    config = Checkpoint.from_name(edited(tmp_path, MIMO_OF_THE_HUB)).hf_config()
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.mlp_layer_types == ["dense", "dense", "sparse"]
    assert (config.rms_norm_eps, config.sliding_window) == (1e-6, 6)
    assert [config.rope_parameters[kind]["rope_theta"] for kind in config.layer_types[:2]] == [500, 640000]
    assert {rope["partial_rotary_factor"] for rope in config.rope_parameters.values()} == {0.5}
    for name, other, usual in (("add_full_attention_sink_bias", True, False), ("rope_scaling", {"type": "yarn"}, None)):
        with one_sentence(CheckpointError, f"{name}={other}"):
            Checkpoint.from_name(edited(tmp_path, {name: other})).hf_config()
        edited(tmp_path, {name: usual})


def test_kimi_k2_is_read_as_deepseek_v3(make_target, tmp_path):
    """It was refused for its own code, which is not needed."""
    model = make_target("deepseek_v3")
    model.save_pretrained(tmp_path)
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    published = Checkpoint.from_name(edited(tmp_path, {"model_type": "kimi_k2", "auto_map": code}))
    loaded = published.load(torch.float32, CPU)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("text", ['{"eos_token_id": ', "[1, 2]"])
def test_a_damaged_generation_config_is_named(text, make_target, tmp_path):
    """transformers passed it over, so that answers did not end."""
    make_target("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read .*; download or copy it again"):
        Engine.from_pretrained(str(tmp_path), config=CONFIG)


@pytest.mark.parametrize("ends", ["3", 3.0, True, [3, None], [[3]]], ids=str)
def test_end_tokens_that_are_no_ids_are_named(ends, make_target, tmp_path):
    """Answers did not end, or requests ended in a TypeError."""
    make_target("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with one_sentence(CheckpointError, f"generation_config.json: eos_token_id={ends!r}, expected a token id or a list"):
        Engine.from_pretrained(str(tmp_path), config=CONFIG)


def test_end_tokens_of_a_multimodal_config_come_before_those_of_its_text(make_target, tmp_path):
    """If a generation_config.json had none, those of the text part were taken, which has one by default."""
    make_target("gemma4-multimodal").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    with Engine.from_pretrained(edited(tmp_path, {"eos_token_id": [3, 77]}), config=CONFIG) as engine:
        assert engine.end_tokens == {3, 77}


def test_a_length_of_a_tokenizer_may_be_a_string(tmp_path):
    """Every text ended in a TypeError of transformers."""
    for file in Path(resolve_name("tiny-gemma4")).glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "4096"}))
    assert text_ids(load_tokenizer(str(tmp_path)), "one") == text_ids(load_tokenizer("tiny-gemma4"), "one")


def test_a_folder_with_an_adapter_alone_says_what_to_give(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with one_sentence(CheckpointError, str(tmp_path), "holds a peft adapter and no model; load it with peft"):
        Engine.from_pretrained(str(tmp_path), config=CONFIG)


def test_an_adapter_beside_a_model_hides_nothing_that_the_model_lacks(make_target, monkeypatch, tmp_path, caplog):
    """With peft, transformers reports what the adapter lacks: tensors that the model lacked were random numbers."""
    model = make_target("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda: False)
    Checkpoint.from_name(tmp_path).load(torch.float32, torch.device("cpu"))
    assert "the peft adapter beside the model is not applied" in caplog.text
    monkeypatch.setattr(type(model), "_hf_peft_config_loaded", True)  # as where peft has applied one
    with one_sentence(CheckpointError, str(tmp_path), "holds a peft adapter beside its model"):
        Engine.from_pretrained(str(tmp_path), config=CONFIG)
    (tmp_path / "model.safetensors").unlink()
    with one_sentence(CheckpointError, str(tmp_path), "holds a peft adapter and no model; load it with peft"):
        Engine.from_pretrained(str(tmp_path), config=CONFIG)


@pytest.mark.parametrize("ordered", [deep(False), True], ids=["dense", "centroid"])
def test_an_assistant_is_read_from_a_folder(ordered, make_target, make_assistant, random_prompt, tmp_path):
    target = make_target("gemma4-e2b")
    assistant = make_assistant(target, ordered)
    assistant.save_pretrained(tmp_path)
    prompt = random_prompt(30)
    outputs = []
    for drafter in (assistant, str(tmp_path)):
        with Engine.from_pretrained(target, drafter, config=CONFIG) as engine:
            engine.generate(prompt, PARAMS)
            outputs.append((engine.drafter.assistant.state_dict(), engine.stats().accepted_counts))
    for name, tensor in outputs[0][0].items():
        torch.testing.assert_close(outputs[1][0][name], tensor, rtol=0, atol=0)
    assert outputs[0][1] == outputs[1][1]


def test_the_text_model_of_another_layout_is_not_filled_with_random_numbers(make_target, tmp_path):
    """The config of a text model over the tensors of a multimodal one: every name is off by a prefix."""
    model = make_target("gemma4-multimodal")
    model.save_pretrained(tmp_path)
    model.config.text_config.save_pretrained(tmp_path)
    edited(tmp_path, {"architectures": ["Gemma4ForCausalLM"]})
    says = r"lacks .* of Gemma4ForCausalLM.* \(and has \d+ others, such as model\.language_model"
    with pytest.raises(SpecDecError, match=says):
        Checkpoint.from_name(str(tmp_path)).load(torch.float32, CPU)


def test_dtype_is_float32_on_the_cpu_and_the_checkpoints_elsewhere(make_target):
    config = make_target("llama", fresh=True).config
    assert pick_dtype(None, CPU, config) == torch.float32
    assert pick_dtype(torch.bfloat16, CPU, config) == torch.bfloat16
    config.dtype = torch.float16
    assert pick_dtype(None, torch.device("cuda"), config) == torch.float16
    config.dtype = "bfloat16"
    assert pick_dtype(None, torch.device("cuda"), config) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, deep(torch.float16)])
def test_half_precision_runs(dtype, make_target, random_prompt, tmp_path):
    make_target("gemma4-e2b").save_pretrained(tmp_path)
    config = EngineConfig(max_batch_size=2, max_model_len=64, dtype=dtype)
    with Engine.from_pretrained(str(tmp_path), "ngram", config=config) as engine:
        assert {kept.k.dtype for store in engine.cache.stores for kept in store.layers.values()} == {dtype}
        outs = engine.generate([random_prompt(5), random_prompt(20)], PARAMS)
        assert [len(out.token_ids) for out in outs] == [12, 12]


# what users hand in


@pytest.mark.slow
def test_paths_words_and_options_are_understood(shallow_folder, monkeypatch):
    """A Path, "none", and loading arguments, which go to transformers for the target and, on request, the drafter."""
    seen = []

    def spied(cls, path, *args, **options):
        seen.append((Path(path).name, {k: v for k, v in options.items() if k in ("revision", "token", "attn_bias")}))
        return original(path, *args, **options)

    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(spied))
    config = EngineConfig(max_model_len=64)
    folder = shallow_folder / "tiny-gemma4"
    plain = Engine.from_pretrained(folder, "none", tokenizer=folder, config=config)
    assert plain.drafter is None and plain.tokenizer is not None
    Engine.from_pretrained(
        folder,
        shallow_folder / "tiny-gemma4-mtp",
        config=config,
        revision="v1",
        token="secret",
        drafter_options={"revision": "v2"},
    )
    assert seen == [
        ("tiny-gemma4", {}),
        ("tiny-gemma4", {"revision": "v1", "token": "secret"}),
        ("tiny-gemma4-mtp", {"revision": "v2", "token": "secret"}),
    ]


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoints_own_runs_when_it_is_trusted(make_target, greedy_oracle, monkeypatch, tmp_path):
    """transformers knows neither its config nor its model; without leave it is one sentence."""
    monkeypatch.setattr("sys.modules", dict(sys.modules))  # transformers keeps what it imports from there
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("builtins.input", lambda *_: "n")  # it asks on a terminal
    model, folder = make_target("llama"), tmp_path / "own"
    model.save_pretrained(folder)
    (folder / "own_code.py").write_text(OWN_CODE)
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    edited(folder, {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto_map})
    config = EngineConfig(max_model_len=64)
    with one_sentence(CheckpointError, "contains custom code", "If you trust it, give trust_remote_code=True"):
        Engine.from_pretrained(folder, config=config)
    engine = Engine.from_pretrained(folder, config=config, trust_remote_code=True)
    assert type(engine.target.model).__name__ == "OwnForCausalLM"
    prompt = [1, 2, 3]
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=6))
    assert out.token_ids == greedy_oracle(model, prompt, 6)


def test_loading_arguments_without_anything_to_load_are_refused(make_target):
    with pytest.raises(ConfigError, match=r"^revision, token: loading arguments are for names, and a loaded model was"):
        Engine.from_pretrained(make_target("llama"), token="secret", revision="v1")


class Compiled(torch.nn.Module):
    """A model where torch.compile puts it. Importing torch's compiler takes seconds."""

    def __init__(self, base):
        super().__init__()
        self._orig_mod = base


@pytest.mark.parametrize("compile_model", [Compiled, deep(torch.compile)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it imports its compiler
def test_a_compiled_model_is_asked_for_what_it_wraps(compile_model, make_target):
    compiled = compile_model(make_target("llama"))
    for arguments, role in (((compiled,), "target"), ((make_target("llama"), compiled), "drafter")):
        with pytest.raises(ConfigError, match=rf"^{role} is a torch.compile'd LlamaForCausalLM; .* {role}._orig_mod$"):
            Engine.from_pretrained(*arguments)


class Adapted(torch.nn.Module):
    """What specdec asks of a peft model: adapters in place in a base model, or prompts that live outside."""

    def __init__(self, base, learned_prompts=False):
        super().__init__()
        self.base = base
        self.peft_config = {"default": None}
        self.active_peft_config = SimpleNamespace(is_prompt_learning=learned_prompts, peft_type="PROMPT_TUNING")

    def get_base_model(self):
        return self.base


def test_a_model_with_adapters_in_place_is_its_base(make_target, greedy_oracle):
    model = make_target("llama")
    [out] = Engine.from_pretrained(Adapted(model), config=EngineConfig(max_model_len=64)).generate(
        [1, 2, 3], SamplingParams(max_new_tokens=4)
    )
    assert out.token_ids == greedy_oracle(model, [1, 2, 3], 4)
    with pytest.raises(
        ConfigError, match=r"^target is a peft model with learned prompts \(PROMPT_TUNING\), which live"
    ):
        Engine.from_pretrained(Adapted(model, learned_prompts=True))


@pytest.mark.parametrize("loaded", [False, True], ids=["name", "module"])
def test_a_drafter_is_no_target(loaded, make_target, make_assistant):
    target = make_assistant(make_target("gemma4-e2b")) if loaded else "tiny-gemma4-mtp"
    with pytest.raises(ConfigError, match=r"^target.* a drafter.*; give the model that it drafts for as the target"):
        Engine.from_pretrained(target)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tiny-gemma", "tiny-gemma4"), ("smollm2-135m-eagle", "smollm2-135m-eagle3"), ("n-gram", "ngram")],
)
def test_a_misspelt_name_is_answered_at_once(name, meant, monkeypatch, make_target):
    monkeypatch.setattr("specdec.loading.model_loading.cached_file", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=f"^no checkpoint '{name}' here; did you mean '{meant}'"):
        Engine.from_pretrained(make_target("llama"), name)


def test_a_quantiser_places_what_it_makes(monkeypatch, tmp_path):
    """`.to(device)` is refused by some quantised models, and undoes the placement of others."""
    moved = []
    original = AutoModelForCausalLM.from_pretrained

    def quantised(cls, *args, **options):
        model, info = original(*args, **options)
        model.is_quantized = True
        monkeypatch.setattr(type(model), "to", lambda self, *a, **k: moved.append(a) or self)
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(quantised))
    Checkpoint.from_name("tiny-gemma4").load(torch.float32, CPU)
    assert moved == []
