"""How near a model's packed rows must be to its own forward, and layers that are named or called in other ways."""

from dataclasses import replace

import pytest
import torch
import transformers

from specdec import SamplingParams
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layer_context import AttentionCall
from specdec.kvcache.layout import KVLayout
from specdec.models.probe import Tolerance, prove, require_finite
from specdec.models.probe_context import ProbeContext
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


def test_a_buffer_that_is_no_number_is_named_too():
    module = torch.nn.BatchNorm1d(2)
    module.running_mean[1] = float("inf")
    with pytest.raises(UnsupportedModelError, match="NaN or infinite; running_mean holds such values too"):
        require_finite("it", module, torch.tensor([float("nan")]))


def test_every_row_must_agree_where_products_are_exact():
    rows = torch.eye(5)
    found = rows.clone()
    found[3, 3] = 2.0
    assert not Tolerance(True, float).holds(found, rows, 1) and Tolerance(False, float).holds(found, rows, 1)


def rows_of(heads: int, dim: int = 8, count: int = 3) -> torch.Tensor:
    return torch.ones(1, heads, count, dim)


CALL = AttentionCall(1, rows_of(4), rows_of(2), rows_of(2), 1.0, 5, None, None, {})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"layer": 3}, "reports layer_idx 3, but the config has 3 layers"),
        ({"layer": -1}, "reports layer_idx -1"),
        ({"layer": 2}, "reads the K/V of a layer that has not run"),
        ({"layer": 0, "sliding_window": None}, "calls attention more than once"),
        ({"key": rows_of(4)}, "its owner keeps heads x size [(2, 8), (2, 8)]"),
        ({"value": rows_of(2, 4)}, "its owner keeps heads x size"),
        ({"value": rows_of(2).half()}, "one dtype is supported"),
        ({"query": rows_of(4).half()}, "one dtype is supported"),
        ({"query": rows_of(3)}, "do not group over (2, 8) keys"),
        ({"query": rows_of(4, 4)}, "do not group over (2, 8) keys"),
        ({"query": rows_of(4, 8, 2)}, "asks for 2 queries and 3 keys for 3 tokens"),
        ({"key": rows_of(2, 8, 4)}, "asks for 3 queries and 4 keys for 3 tokens"),
        ({"sliding_window": 4}, "uses sliding_window=4, but the config says 5"),
        ({"sinks": torch.ones(2)}, "attention sinks of shape (2,)"),
        ({"sinks": torch.ones(4)}, None),
        ({"extra": {"bias": torch.ones(1)}}, "passes ['bias'] to attention"),
        ({"extra": {"bias": 3}}, None),
    ],
)
def test_a_call_that_a_cache_could_not_serve_is_a_fault(changes, fault):
    """Layer 2 reads the K/V of layer 1."""
    layout = KVLayout.from_windows((None, 5, 5), 2, 8)
    layout = layout.map(lambda spec: replace(spec, owner=min(spec.layer, 1)))
    context = ProbeContext(layout, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    context.attend(CALL._replace(layer=0, sliding_window=None))
    call = CALL._replace(**changes)
    assert context.attend(call).shape == (1, call.query.shape[2], call.query.shape[1], call.value.shape[3])
    assert context.faults.keys() == (set() if fault is None else {call.layer})
    assert fault is None or fault in context.faults[call.layer]


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
