"""How near a model's packed rows must be to its own forward, and layers that are named or called in other ways."""

import pytest
import torch
import transformers

from specdec import SamplingParams
from specdec.errors import UnsupportedModelError
from specdec.models.probe import Tolerance, prove
from specdec.models.target import TargetModel


def test_a_bound_follows_the_noise_up_to_a_point():
    """In 16 bits, twice what the model's own forward differs from itself in a larger batch; one that differs by half is
    another model. The noise is measured only where the fixed bound does not hold."""
    asked = []

    def noise_of(noise):
        return lambda: asked.append(noise) or noise

    assert Tolerance(False, noise_of(0.3)).is_within(0.19, 0.2) and asked == []
    assert Tolerance(False, noise_of(0.3)).is_within(0.45, 0.2)
    assert not Tolerance(False, noise_of(0.1)).is_within(0.45, 0.2)
    assert not Tolerance(False, noise_of(0.9)).is_within(0.55, 0.2)
    assert not Tolerance(False, noise_of(0.9)).is_within(float("nan"), 0.2)
    asked.clear()
    assert not Tolerance(True, noise_of(0.9)).is_within(0.01, 1e-3) and asked == []


@pytest.mark.parametrize(("in_a_crowd", "served"), [(0.3, False), (0.0, True)])
def test_a_forward_that_differs_from_itself_is_given_room(in_a_crowd, served, make_target):
    """Its logits for two texts are 30 % off what packed rows give, and in a larger batch as far, or not at all."""
    model = make_target("llama", fresh=True).to(torch.bfloat16)
    target = TargetModel(model)
    texts = torch.arange(12).view(2, 6)
    own = model(input_ids=texts, use_cache=False).logits
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)) * own.float().std()

    def forward(tokens):
        logits = model(input_ids=tokens, use_cache=False).logits
        size = in_a_crowd if len(tokens) > 2 else 0.3
        logits[:2] += (size * noise).to(logits.dtype)
        return logits

    def tried():
        with torch.inference_mode():
            return prove(
                "it", target.layout, texts, run=target.run, head=target.head, own=forward,
                rules=[target.logit_rule], exact=False,
            )  # fmt: skip

    if served:
        assert tried().rule == target.logit_rule
        return
    with pytest.raises(UnsupportedModelError, match="differ from those of its own forward by"):
        tried()


def test_a_weight_that_is_no_number_is_named_and_not_the_attention(make_target):
    model = make_target("llama", fresh=True)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"NaN or infinite; model\.layers\.1\.mlp\.up_proj\.weight"):
        TargetModel(model)


def test_layers_may_lie_under_another_name():
    """DBRX has them in `blocks` and GPT-2 in `h`: both were "not a stack of decoder layers"."""
    rope_and_clip = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "max_seq_len": 64}
    experts = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
    config = transformers.DbrxConfig(**sizes, attn_config=rope_and_clip, ffn_config=experts)
    target = TargetModel(transformers.DbrxForCausalLM(config).eval())
    assert len(target.layout.layers) == 2 and target.can_pause


@pytest.mark.parametrize("family", ["StableLm", "Nemotron"])
def test_layers_that_pass_attention_no_keywords_get_the_context_through(family, greedy_oracle, make_engine):
    """They pass a mask, and were refused because they drop the context."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, num_key_value_heads=2, vocab_size=96, eos_token_id=None)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    prompt = [9, 33, 12, 70, 41, 22, 33]
    [out] = make_engine(model, None, page_size=4).generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert out.token_ids == greedy_oracle(model, prompt, 6)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
