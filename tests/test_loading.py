"""Checkpoints from a folder: every tensor is the checkpoint's, in whatever class and layout it was saved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, EngineConfig, SamplingParams, SpecDecError
from specdec.models.loading import load_model, pick_dtype

PARAMS = SamplingParams(max_new_tokens=12)
CONFIG = EngineConfig(max_batch_size=1, max_model_len=64)


@pytest.mark.parametrize("family", ["gemma4-multimodal", "gemma4-e2b", "gemma4-moe", "gpt_oss", "qwen3", "mistral"])
def test_a_saved_model_generates_what_it_did(family, make_target, greedy_oracle, random_prompt, tmp_path):
    """Multimodal Gemma 4 among them, whose text part a careless class would fill with random numbers."""
    model = make_target(family)
    prompt = random_prompt(17)
    want = greedy_oracle(model, prompt, PARAMS.max_new_tokens)
    model.save_pretrained(tmp_path)
    with Engine.from_pretrained(str(tmp_path), "ngram", config=CONFIG) as engine:
        assert engine.generate(prompt, PARAMS)[0].token_ids == want


def test_shards_are_read(make_target, greedy_oracle, random_prompt, tmp_path):
    model = make_target("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = random_prompt(9)
    with Engine.from_pretrained(str(tmp_path), config=CONFIG) as engine:
        assert engine.generate(prompt, PARAMS)[0].token_ids == greedy_oracle(model, prompt, PARAMS.max_new_tokens)


@pytest.mark.parametrize("ordered", [False, True], ids=["dense", "centroid"])
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


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_an_error_and_not_a_random_number(name, make_target, tmp_path):
    make_target("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecDecError, match=name):
        Engine.from_pretrained(str(tmp_path))


def test_the_text_model_of_another_layout_is_not_filled_with_random_numbers(make_target, tmp_path):
    """The config of a text model over the tensors of a multimodal one: every name is off by a prefix."""
    model = make_target("gemma4-multimodal")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    config["architectures"] = ["Gemma4ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecDecError, match=r"lacks .* tensors of Gemma4ForCausalLM"):
        load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


def test_dtype_is_float32_on_the_cpu_and_the_checkpoints_elsewhere(make_target):
    config = make_target("llama", fresh=True).config
    assert pick_dtype(None, torch.device("cpu"), config) == torch.float32
    assert pick_dtype(torch.bfloat16, torch.device("cpu"), config) == torch.bfloat16
    config.dtype = torch.float16
    assert pick_dtype(None, torch.device("cuda"), config) == torch.float16
    config.dtype = "bfloat16"
    assert pick_dtype(None, torch.device("cuda"), config) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype, make_target, random_prompt, tmp_path):
    make_target("gemma4-e2b").save_pretrained(tmp_path)
    config = EngineConfig(max_batch_size=2, max_model_len=64, dtype=dtype)
    with Engine.from_pretrained(str(tmp_path), "ngram", config=config) as engine:
        assert {kept.k.dtype for store in engine.cache.stores for kept in store.layers.values()} == {dtype}
        assert [len(out.token_ids) for out in engine.generate([random_prompt(5), random_prompt(20)], PARAMS)] == [
            12,
            12,
        ]
