"""Families beyond those of test_greedy_exact.py: served with the model's own tokens, or refused in one sentence.

The oracle is one full eager forward of the model for each token. `tools/family_survey.py` does the same for every class
that transformers has; here are the documented ones, and what was once served wrong.
"""

import copy
import functools
import re
from functools import partial

import pytest
import torch
import transformers
from refusal_checks import one_sentence
from torch import nn
from transformers import PreTrainedModel

from specdec import Engine, EngineConfig, SamplingParams
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.models.target import TargetModel
from specdec.modules.transformers_names import auto_class

from marks import deep, examples, usual_cases
from tiny_families import LATENT, TARGETS, VOCAB, build_target, spread

NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
BASE = {**SIZES, **TOKENS, "intermediate_size": 48, "max_position_embeddings": 256}
OLD = {**TOKENS, "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
GQA = {**BASE, "num_key_value_heads": 2}
HEADS = {**GQA, "head_dim": 8}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ROUTED = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
PATCHES = {"image_size": 8, "patch_size": 4}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
QWEN_IDS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}


def opt(**changes):
    sizes = {**SIZES, "ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32}
    return transformers.OPTConfig(**{**sizes, "pad_token_id": 1, "dropout": 0.0, **changes})


def llava(kind, **extra):
    text = transformers.LlamaConfig(**HEADS)
    vision = transformers.CLIPVisionConfig(**TOWER, **PATCHES, projection_dim=16)
    return kind(text_config=text, vision_config=vision, image_token_index=200, **extra)


def qwen2_vl(kind):
    text = {**GQA, **MROPE}
    vision = {"embed_dim": 16, "mlp_ratio": 1} if kind is transformers.Qwen2VLConfig else {"intermediate_size": 16}
    return kind(text_config=text, vision_config={**QWEN_TOWER, **vision, "hidden_size": 32}, **QWEN_IDS)


def qwen3_vl():
    text = {**HEADS, **MROPE}
    vision = {**QWEN_TOWER, "intermediate_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS)


def mistral3():
    text = transformers.MistralConfig(**HEADS, sliding_window=None)
    vision = transformers.PixtralVisionConfig(**TOWER, **PATCHES, head_dim=8)
    return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=200)


def mistral4():
    """Its queries grow with their positions, by a step every four."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 4}
    rope["llama_4_scaling_beta"] = 0.3
    return transformers.Mistral4Config(**BASE | LATENT | ROUTED | {"head_dim": 12}, rope_parameters=rope)


def glm4v_moe():
    text = {**HEADS, "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 0]}, **ROUTED}
    vision = {**QWEN_TOWER, "image_size": 8, "intermediate_size": 16}
    return transformers.Glm4vMoeConfig(text_config=text, vision_config=vision)


def smolvlm():
    vision = {**TOWER, **PATCHES}
    return transformers.SmolVLMConfig(text_config=transformers.LlamaConfig(**HEADS), vision_config=vision, **IMAGE)


IMAGE = {"image_token_id": 200, "scale_factor": 2}
MADE_HERE = {
    "opt": opt,
    "opt-post-norm": lambda: opt(do_layer_norm_before=False, word_embed_proj_dim=16, tie_word_embeddings=False),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**BASE),
    "gpt_neox-serial": lambda: transformers.GPTNeoXConfig(**BASE, use_parallel_residual=False),
    "gpt2": lambda: transformers.GPT2Config(**SIZES, **TOKENS, n_positions=256),
    "gptj": lambda: transformers.GPTJConfig(**OLD, rotary_dim=6, n_inner=40),
    "codegen": lambda: transformers.CodeGenConfig(**OLD, rotary_dim=4),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        **BASE, window_size=5, attention_types=[[["global", "local"], 1], [["local"], 1]]
    ),
    "falcon": lambda: transformers.FalconConfig(**BASE | {"num_attention_heads": 2}),
    "falcon-serial": lambda: transformers.FalconConfig(**BASE, parallel_attn=False, multi_query=False, bias=True),
    "falcon-grouped": lambda: transformers.FalconConfig(**BASE, new_decoder_architecture=True, num_kv_heads=2),
    "phi": lambda: transformers.PhiConfig(**BASE),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(**HEADS, logits_scaling=0.5),  # multiplies, granite divides
    "nanochat": lambda: transformers.NanoChatConfig(**GQA),
    "afmoe": lambda: transformers.AfmoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "qwen2_vl": lambda: qwen2_vl(transformers.Qwen2VLConfig),
    "qwen2_5_vl": lambda: qwen2_vl(transformers.Qwen2_5_VLConfig),
    "qwen3_vl": qwen3_vl,
    "llava": lambda: llava(transformers.LlavaConfig),
    "llava_next": lambda: llava(transformers.LlavaNextConfig),
    "mistral3": mistral3,
    "mistral4": mistral4,
    "glm4v_moe": glm4v_moe,
    "smolvlm": smolvlm,
}
SERVED = [
    *("phi3", "mixtral", "granite", "cohere", "cohere2", "olmo2", "starcoder2", "glm", "glm4", "smollm3"),
    *MADE_HERE,
]
IMPLIED = ("cohere", "cohere2", "olmo2", "starcoder2", "glm", "glm4", "smollm3", "hyperclovax")
IMPLIED += ("qwen2_vl", "qwen2_5_vl", "llava_next", "mistral3", "smolvlm")
"""Families whose layers are those of others here: in `make test-deep` alone."""


def build(name: str, seed: int = 0, **fields) -> PreTrainedModel:
    """A random model of a family; `fields` go to the config of one of tiny_models.py."""
    torch.manual_seed(seed)
    if name in TARGETS:
        return spread(build_target(name, **fields))
    config = MADE_HERE[name]()
    return spread(auto_class(config).from_config(config))


build_once = functools.cache(build)


@pytest.fixture
def served(make_target):
    """served(name): the model of a served family, built once."""
    return lambda name: make_target(name) if name in TARGETS else build_once(name)


# served, with the model's own tokens

FAMILIES = [deep(name) if name in IMPLIED else name for name in SERVED]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_models_own(name, served, make_engine, make_drafter, greedy_oracle, random_prompt):
    """With drafts in trees, in pages of one token or of four."""
    model, prompts = served(name), [random_prompt(7), random_prompt(19)]
    wanted = [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    trees, page_size = make_drafter("trees", model, prompts, wanted), (1, 4)[SERVED.index(name) % 2]
    engine = make_engine(model, trees, page_size=page_size, max_batch_size=2, num_steps=5, prefill_chunk=7)
    assert [out.token_ids for out in engine.generate(prompts, GREEDY)] == wanted
    assert len({token for tokens in wanted for token in tokens}) > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_rounding_refuses_no_model(name):
    """In 16 bits a packed row differs from a lone one by rounding, and a router may choose otherwise."""
    for seed in range(examples(1, 4)):
        TargetModel(build(name, seed).to((torch.bfloat16, torch.float16)[(SERVED.index(name) + seed) % 2]))


def test_logits_are_scaled_as_the_model_scales_them(served):
    for name, times, over, softcap in [
        ("granite", 1.0, 6.0, None),
        ("hyperclovax", 0.5, 1.0, None),
        ("cohere", 0.25, 1.0, None),
        ("nanochat", 1.0, 1.0, 15.0),
        ("opt", 1.0, 1.0, None),
    ]:
        rule = TargetModel(served(name)).logit_rule
        assert (rule.times, rule.over, rule.softcap) == (times, over, softcap), name


# refused, in a sentence

SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "max_position_embeddings": 64}
SEQ2SEQ |= {
    f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 48))
}
SEQ2SEQ |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
COUNTING = ["Bart", "MBart", "PLBart", "Pegasus", "BigBirdPegasus", "Marian", "Blenderbot", "BlenderbotSmall"]


def seq2seq(name: str, kind: str) -> PreTrainedModel:
    return getattr(transformers, f"{name}For{kind}")(getattr(transformers, f"{name}Config")(**SEQ2SEQ))


def t5_gemma() -> PreTrainedModel:
    stack = transformers.T5GemmaModuleConfig(**HEADS)
    config = transformers.T5GemmaConfig(encoder=stack, decoder=copy.deepcopy(stack), vocab_size=VOCAB)
    return transformers.T5GemmaForConditionalGeneration(config)


def rwkv() -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))


REFUSED = {
    # they ignore position_ids, so every row of a packed forward was at the wrong position
    **{f"{name}, causal": (partial(seq2seq, name, "CausalLM"), (name, "position_ids")) for name in COUNTING},
    **{
        name: (partial(seq2seq, name, "ConditionalGeneration"), (name, "encoder-decoder"))
        for name in ("Bart", "MBart", "Pegasus")
    },
    "T5Gemma": (t5_gemma, ("T5Gemma", "encoder-decoder")),
    "RWKV": (rwkv, ("RwkvForCausalLM", "num_attention_heads")),  # recurrent; no attribute is missed
}


@usual_cases("Bart, causal", "Marian, causal", "Bart", "T5Gemma", "RWKV")
@pytest.mark.parametrize("name", REFUSED)
def test_models_of_other_kinds_are_refused(name):
    """In 16 bits, where rows may differ by rounding, a causal one is told by its positions, too."""
    make, parts = REFUSED[name]
    torch.manual_seed(0)
    model = spread(make()).to(torch.bfloat16 if name == "Marian, causal" else torch.float32)
    with one_sentence(UnsupportedModelError, *parts):
        Engine.from_pretrained(model, config=EngineConfig(max_model_len=32))


class Meddler(nn.Module):
    """A module in the place of another, whose output goes through `change`."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args, **kwargs):
        return self.change(self.inner(*args, **kwargs))


CHANGES = {
    "mix_neighbours": lambda x: x + 0.5 * x.roll(1, dims=1),
    "look_ahead": lambda x: x + x.mean(dim=1, keepdim=True),
    "by_row": lambda x: x * (1 + torch.arange(x.shape[1]).to(x.dtype)[None, :, None] / 4),
}


@usual_cases("fp32-mlp-mix_neighbours", "fp32-norm-look_ahead", "bf16-mlp-by_row", "bf16-norm-mix_neighbours")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["mlp", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_whose_rows_depend_on_each_other_is_refused(change, where, dtype):
    """In a layer it shows in the next one's keys; in the last norm, in the states alone."""
    model = build("llama").to(dtype)
    holder = model.model if where == "norm" else model.model.layers[0]
    setattr(holder, where, Meddler(getattr(holder, where), CHANGES[change]))
    with one_sentence(UnsupportedModelError, "rows of several requests cannot share" if where == "norm" else "layer 1"):
        TargetModel(model)


LOGIT_CHANGES = {
    "by [0-9.]+%": torch.abs,
    "in masked or overflowing numbers": lambda x: x.index_fill(-1, torch.arange(9), torch.finfo(x.dtype).min),
}


@pytest.mark.parametrize("says", LOGIT_CHANGES)
def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(says):
    """Chameleon masks those of image tokens; the message said that they differ by nan%."""
    model = build("llama")
    forward = model.forward

    def odd(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = LOGIT_CHANGES[says](out.logits)
        return out

    model.forward = odd
    with one_sentence(UnsupportedModelError, "differ from those of its own forward") as refused:
        TargetModel(model)
    assert re.search(f"own forward {says}, so something", str(refused.value))


@pytest.mark.parametrize("error_type", [IndexError, ValueError, AssertionError, NotImplementedError])
def test_whatever_a_foreign_forward_raises_is_one_sentence_and_out_of_memory_stays_what_it_is(error_type):
    def fail(out):
        raise error_type("first line\nsecond line")

    model = build("llama")
    model.model.layers[1].mlp = Meddler(model.model.layers[1].mlp, fail)
    with one_sentence(UnsupportedModelError, "LlamaForCausalLM", error_type.__name__, "first line"):
        TargetModel(model)
    error_type = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        TargetModel(model)


def test_the_proof_leaves_no_trace(served):
    """No random state is used, no buffer changes, no hook stays."""
    model = served("phi3")
    before = torch.get_rng_state(), {name: value.clone() for name, value in model.named_buffers()}
    TargetModel(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in model.named_buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# how long a sequence may be

LIMIT = 32


def with_rope(kind, most=LIMIT, **extra):
    """Llama with this kind of RoPE and `most` positions."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **extra}
    return build("llama", max_position_embeddings=most, rope_parameters=rope)


def rope_model(kind):
    """Phi-3 with longrope (32 of 128 positions original), or Llama with dynamic NTK scaling after 32 positions."""
    if kind == "dynamic":
        return with_rope(kind)
    rope = {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    sizes = {"max_position_embeddings": 128, "original_max_position_embeddings": LIMIT}
    return build("phi3", sliding_window=None, rope_parameters=rope, **sizes)


def learnt(most):
    """OPT, whose positions are rows of a table."""
    return spread(transformers.OPTForCausalLM(opt(max_position_embeddings=most)))


def wrong(known, n):
    return [(known[-1] + 1 + i) % VOCAB for i in range(n)], None


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_no_batch_and_no_draft_crosses_the_limit_of_rope(kind, make_engine, greedy_oracle, random_prompt, scripted):
    """One request ends at the limit with drafts beyond it; the other must not see frequencies change."""
    model, prompts = rope_model(kind), [random_prompt(LIMIT - 9), random_prompt(3)]
    new = 9
    wanted = [greedy_oracle(model, prompt, new) for prompt in prompts]

    for drafter in (None, scripted(wrong)):
        engine = make_engine(model, drafter, max_model_len=None, max_batch_size=2, num_steps=7, prefill_chunk=16)
        assert engine.max_model_len == LIMIT
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (new, 20)]
        outputs = engine.generate(prompts, params)
        assert [out.token_ids[:new] for out in outputs] == wanted


@pytest.mark.parametrize("page_size", [deep(1), 4])
def test_drafts_and_padding_beyond_a_learnt_position_table(
    page_size, make_engine, greedy_oracle, random_prompt, scripted
):
    """A draft after the last position, or the padding of a chunk next to a longer one, had no row in the table."""
    model = learnt(LIMIT)
    prompts = [random_prompt(LIMIT - 4), random_prompt(5), random_prompt(LIMIT - 15)]
    new = [4, 20, 15]
    wanted = [greedy_oracle(model, prompt, n) for prompt, n in zip(prompts, new, strict=True)]

    engine = make_engine(
        model, scripted(wrong), max_model_len=None, max_batch_size=3, num_steps=7, prefill_chunk=27, page_size=page_size
    )
    outputs = engine.generate(prompts, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in new])
    assert [out.token_ids for out in outputs] == wanted


LENGTHS = {
    "learnt": (lambda: learnt(64), 64, 64),
    "rope": (lambda: build("llama", max_position_embeddings=64), 64, 64),
    "linear": (lambda: with_rope("linear", 64), 64, 256),
    "yarn": (lambda: with_rope("yarn", 64, original_max_position_embeddings=32), 64, 128),
    # beyond it rope would change
    "longrope": (lambda: rope_model("longrope"), LIMIT, LIMIT),
    "dynamic": (lambda: rope_model("dynamic"), LIMIT, LIMIT),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_max_model_len_above_the_models_own_is_refused(kind, make_engine):
    """It was cut to the model's limit without a message."""
    make, default, most = LENGTHS[kind]
    model = make()
    assert make_engine(model, max_model_len=most).max_model_len == most
    assert make_engine(model, max_model_len=None, max_batch_size=1).max_model_len == default
    with one_sentence(ConfigError, f"max_model_len={most + 1}", f"at most {most}", kind if most == LIMIT else ""):
        make_engine(model, max_model_len=most + 1)


# adapters and quantised weights


@pytest.mark.parametrize("page_size", [1, 4])
def test_int8_weights_of_torchao(page_size, make_engine, greedy_oracle, random_prompt):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = build("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    prompts = [random_prompt(7), random_prompt(19)]
    engine = make_engine(model, "ngram", page_size=page_size, max_batch_size=2)
    outputs = engine.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == [greedy_oracle(model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("drafter", [deep(None), "ngram"])
def test_autocast_around_an_engine_changes_nothing(drafter, make_engine, greedy_oracle, random_prompt):
    """The engine computes in the model's dtype; K/V in another one did not fit the pools."""
    model = build("llama")
    prompts = [random_prompt(7), random_prompt(19)]
    wanted = [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = make_engine(model, drafter, max_batch_size=2)
        assert [out.token_ids for out in engine.generate(prompts, GREEDY)] == wanted
        streamed = [token for delta in engine.stream(prompts[0], GREEDY) for token in delta.token_ids]
    assert streamed == wanted[0]


def test_the_users_own_long_forward_changes_no_engine(greedy_oracle) -> None:
    """Dynamic RoPE writes the frequencies of a long forward to its buffer; the engine has its own buffers."""
    model = rope_model("dynamic")
    prompt, new = list(range(1, 20)), 10
    want = greedy_oracle(model, prompt, new)
    engine = Engine.from_pretrained(model, config=EngineConfig(max_model_len=32))
    model(torch.arange(60)[None] % 90, use_cache=False)
    assert engine.generate(prompt, SamplingParams(max_new_tokens=new))[0].token_ids == want
