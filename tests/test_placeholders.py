"""Ids of images, video and sound in a text: embedded as the model's own forward embeds them."""

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForConditionalGeneration,
    GraniteConfig,
    GraniteSpeechConfig,
    GraniteSpeechForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.errors import ConfigError
from specdec.models.placeholders import Placeholders
from specdec.models.target import TargetModel
from specdec.training.draft_loss import run_target
from specdec.training.packed_rows import PackedRows

from marks import deep, deep_cases
from tiny_families import multimodal_config, spread

IMAGE, VIDEO, AUDIO, BEGIN = 60, 61, 62, 63
PLAIN = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PLAIN |= {"pad_token_id": 3, "eos_token_id": None, "bos_token_id": None}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAVA = {"vision_config": CLIPVisionConfig(**TOWER, image_size=8, patch_size=4), "image_token_index": IMAGE}


class WantsPixels(LlavaForConditionalGeneration):
    """Its forward raises where an image is named and not given."""

    def forward(self, input_ids=None, **given):
        if bool((input_ids == IMAGE).any()):
            raise ValueError("no pixels")
        return super().forward(input_ids=input_ids, **given)


class EmbedsApart(LlavaForConditionalGeneration):
    """Like Gemma 3n, it has embeddings besides those of the vocabulary."""

    def forward(self, input_ids=None, **given):
        embeds = self.get_input_embeddings()(input_ids)
        embeds = torch.where((input_ids == IMAGE)[..., None], embeds.flip(-1), embeds)
        return super().forward(inputs_embeds=embeds, **given)


@pytest.fixture(scope="module")
def model():
    """Gemma 4 with a vision tower and per-layer embeddings; its padding is token 3."""
    config = multimodal_config(vocab_size=64, pad_token_id=3)
    config.image_token_id, config.video_token_id, config.audio_token_id = IMAGE, VIDEO, AUDIO
    config.boi_token_id = BEGIN
    torch.manual_seed(0)
    return spread(Gemma4ForConditionalGeneration(config))


def replaced_in(placeholders):
    return {token: other for token, other in enumerate(placeholders.table.tolist()) if other != token}


def test_replacements_of_placeholders_are_measured_in_a_forward(model, make_target):
    found = TargetModel(model).placeholders
    assert replaced_in(found) == {IMAGE: 3, VIDEO: 3, AUDIO: 3} and not found.unread
    assert TargetModel(make_target("gemma4-e2b")).placeholders == Placeholders()  # of text alone


def test_granite_speech_embeds_id_0_for_a_sound():
    former = {"model_type": "blip_2_qformer", **TOWER, "encoder_hidden_size": 16}
    encoder = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "dim_head": 8, "input_dim": 8, "output_dim": 8}
    config = GraniteSpeechConfig(
        text_config=GraniteConfig(**PLAIN), projector_config=former, encoder_config=encoder, audio_token_index=AUDIO
    )
    found = TargetModel(GraniteSpeechForConditionalGeneration(config)).placeholders
    assert replaced_in(found) == {AUDIO: 0}


@pytest.mark.parametrize(
    ("kind", "why"),
    [(WantsPixels, "(ValueError: no pixels)"), (EmbedsApart, "which it reads as no token of the vocabulary")],
)
def test_an_id_without_a_replacement_is_refused_in_prompts_only(kind, why):
    model = kind(LlavaConfig(text_config=LlamaConfig(**PLAIN), **LLAVA)).eval()
    engine = Engine.from_pretrained(model, config=EngineConfig(device="cpu", max_model_len=64))
    few = SamplingParams(max_new_tokens=3, logit_bias={IMAGE: 100.0})
    with pytest.raises(ConfigError, match=f"prompt 1 holds token id {IMAGE}, image_token_index of") as error:
        engine.generate([[5, 6], [5, IMAGE]], few)
    assert why in str(error.value)
    [out] = engine.generate([[5, 6, BEGIN]], few)
    assert out.token_ids == [IMAGE] * 3


def test_ids_without_a_per_layer_embedding_are_refused_in_prompts_and_harmless_in_outputs():
    """Gemma 3n has 256; they were an IndexError in the middle of a step, which on a GPU ends the process."""
    sizes = PLAIN | {"vocab_size_per_layer_input": 62, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    layers = {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 5, "num_kv_shared_layers": 0}
    config = Gemma3nTextConfig(**sizes | layers, layer_types=["sliding_attention", "full_attention"])
    engine = Engine.from_pretrained(Gemma3nForCausalLM(config).eval(), config=EngineConfig(max_model_len=64))
    said = "prompt 1 holds token id 62, of which Gemma3nForCausalLM has no per-layer embedding"
    with pytest.raises(ConfigError, match=said):
        engine.generate([[5, 61], [5, 62]], SamplingParams(max_new_tokens=3))
    [out] = engine.generate([[5, 61]], SamplingParams(max_new_tokens=3, logit_bias={63: 100.0}))
    assert out.token_ids == [63] * 3


def test_llava_embeds_its_id_as_it_is():
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**PLAIN), **LLAVA)).eval()
    assert TargetModel(model).placeholders == Placeholders()


def test_a_drafter_learns_from_the_states_that_the_target_has(model):
    ids = torch.tensor([[5, IMAGE, 9, AUDIO, 30]])
    rows = PackedRows(ids, torch.arange(5)[None], torch.ones_like(ids))
    with torch.inference_mode():
        hidden, _, _ = run_target(TargetModel(model), rows)
        torch.testing.assert_close(hidden, model.model(input_ids=ids).last_hidden_state)


@deep_cases("None-False", "suffix-False")
@pytest.mark.parametrize(("drafter", "deterministic"), [(None, False), ("suffix", False), ("suffix", True)])
def test_tokens_are_those_of_transformers(drafter, deterministic, model):
    """Such ids in a prompt, at its end, and alone."""
    config = EngineConfig(device="cpu", prefill_chunk=16, max_model_len=64, deterministic=deterministic)
    engine = Engine.from_pretrained(model, drafter, spec=SpecConfig(num_steps=3), config=config)
    for ids in ([5, IMAGE, 9, 10], [7, 8, VIDEO], [AUDIO, 4, IMAGE, IMAGE, 30], [IMAGE], [5, BEGIN, 9]):
        want = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        [out] = engine.generate([ids], SamplingParams(max_new_tokens=8))
        assert out.token_ids == want.tolist(), ids


@pytest.mark.parametrize("drafter", [deep(None), deep("ngram"), "suffix"])
def test_tokens_after_such_ids_in_the_output_are_those_of_transformers(drafter, model):
    """The model may write few other tokens, so that its output has them in many places."""
    allowed = [IMAGE, AUDIO, 9, 10]
    config = EngineConfig(device="cpu", prefill_chunk=16, max_model_len=64)
    engine = Engine.from_pretrained(model, drafter, spec=SpecConfig(num_steps=3), config=config)
    written = set()
    for ids in ([5, 9], [7, 8, 30], [11, IMAGE, 40], [21]):
        limits = {"max_new_tokens": 16, "do_sample": False, "prefix_allowed_tokens_fn": lambda row, seen: allowed}
        want = model.generate(torch.tensor([ids]), **limits)[0, len(ids) :].tolist()
        [out] = engine.generate([ids], SamplingParams(max_new_tokens=16, allowed_token_ids=allowed))
        assert out.token_ids == want, ids
        written |= set(want[:-1])
    assert written >= {IMAGE, 9}
