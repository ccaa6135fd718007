"""Ids of images, video and sound in a text: embedded as the model's own forward embeds them."""

import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.models.placeholders import Placeholders
from specdec.models.target import TargetModel

IMAGE, VIDEO, AUDIO, BEGIN = 60, 61, 62, 63


@pytest.fixture(scope="module")
def model():
    """Gemma 4 with a vision tower and per-layer embeddings; its padding is token 3."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    text = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    text |= {"num_kv_shared_layers": 0, "pad_token_id": 3, "eos_token_id": None, "bos_token_id": None}
    vision = {**sizes, "num_hidden_layers": 1}
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "boi_token_id": BEGIN}
    torch.manual_seed(0)
    made = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config={**sizes, **text}, vision_config=vision, audio_config=None, **names)
    ).eval()
    for weight in made.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.3)
    made.generation_config.eos_token_id = None
    return made


def test_what_replaces_them_is_read_off_the_forward(model, make_target):
    found = TargetModel(model).placeholders
    assert found is not None
    assert dict(zip(found.ids.tolist(), found.embedded.tolist(), strict=True)) == {IMAGE: 3, VIDEO: 3, AUDIO: 3}
    assert TargetModel(make_target("gemma4-e2b")).placeholders is None  # of text alone


def test_tokens_by_eye():
    placeholders = Placeholders(torch.tensor([60, 62]), torch.tensor([3, 4]))
    assert placeholders.replaced_in(torch.tensor([[1, 60], [62, 63]])).tolist() == [[1, 3], [4, 63]]


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_tokens_are_those_of_transformers(drafter, model):
    """Such ids in a prompt, at its end, and alone."""
    config = EngineConfig(device="cpu", prefill_chunk=16, max_model_len=64)
    engine = Engine.from_pretrained(model, drafter, spec=SpecConfig(num_steps=3), config=config)
    for ids in ([5, IMAGE, 9, 10], [7, 8, VIDEO], [AUDIO, 4, IMAGE, IMAGE, 30], [IMAGE], [5, BEGIN, 9]):
        want = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        [out] = engine.generate([ids], SamplingParams(max_new_tokens=12))
        assert out.token_ids == want.tolist(), ids


def test_such_ids_among_the_output(model):
    """Written by the model itself: every logit after them is as if they had stood in the prompt."""
    engine = Engine.from_pretrained(model, None, config=EngineConfig(device="cpu", max_model_len=64))
    biased = SamplingParams(max_new_tokens=4, logit_bias={IMAGE: 100.0}, logprobs=4)
    [written] = engine.generate([[5, 9]], biased)
    [read] = engine.generate(
        [[5, 9, IMAGE, IMAGE, IMAGE]], SamplingParams(max_new_tokens=1, logit_bias=biased.logit_bias, logprobs=4)
    )
    assert written.token_ids == [IMAGE] * 4
    for ours, theirs in zip(written.logprobs[3].top.items(), read.logprobs[0].top.items(), strict=True):
        assert ours == pytest.approx(theirs)
