"""Engines on fused layers: the same tokens, the user's weights as they are at each moment, and why some run unfused."""

import copy
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.centroid_head import centroid_best, centroid_sample
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.gpu.operations import FAST, REFERENCE, choose_operations
from specdec.layers.decoder import FusedDecoder
from specdec.layers.description import merge as merge_module
from specdec.layers.description.merge import is_merged, merge
from specdec.layers.fuse import FusedLinear
from specdec.layers.gemm.linear import gated_linear, linear
from specdec.layers.norm import norm
from specdec.layers.rope_store import rotary
from specdec.models.target import StatesNeeded, TargetModel

from marks import deep, deep_cases, examples, is_deep, pairs, quick, slow, usual_cases
from watched_drafts import watch_proposals

NEW = examples(8, 12)
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = [
    SamplingParams(max_new_tokens=NEW, temperature=0.9, seed=1),
    SamplingParams(max_new_tokens=NEW, temperature=1.3, top_k=20, top_p=0.9, seed=2),
    SamplingParams(max_new_tokens=NEW, temperature=0.7, min_p=0.02, repetition_penalty=1.3, seed=3),
]
FUSABLE = ["gemma4-e2b", "llama", "gpt_oss", "gemma4-moe"]
SLOW = ["gemma4-31b", "gemma4-multimodal", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"]
NEWER = [
    *("cohere", "cohere2", "exaone4", "gemma2", "gemma3", "glm", "glm4", "granite", "olmo2", "phi3", "smollm3"),
    *("ernie4_5_moe", "exaone_moe", "hy_v3", "glm4_moe", "mellum", "step3p7", "qwen2_moe"),
    *("deepseek_v3", "glm4_moe_lite", "mimo_v2_flash"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; see make gpu-test")
DRAFTS = {"chain": SpecConfig(num_steps=3), "tree": SpecConfig(num_steps=3, topk=2, num_draft_tokens=6)}


@pytest.fixture
def generate(make_engine: Callable[..., Engine]) -> Callable[..., list[list[int]]]:
    """generate(model, drafter, prompts, params, fused=..., **settings): tokens, and that `fused` is what ran."""

    def run(model: Any, drafter: Any, prompts: list[list[int]], params: Any, **settings: Any) -> list[list[int]]:
        with make_engine(model, drafter, max_batch_size=2, **settings) as engine:
            assert isinstance(engine.target.decoder, FusedDecoder) == settings["fused"]
            assert isinstance(engine.target.head, FusedLinear) == settings["fused"]
            if isinstance(engine.drafter, Gemma4MTPDrafter):
                assert isinstance(engine.drafter.model.model, FusedDecoder) == settings["fused"]
                assert isinstance(engine.drafter.model.post_projection, FusedLinear) == settings["fused"]
            return [out.token_ids for out in engine.generate(prompts, params)]

    return run


@usual_cases("gpt_oss-tree-4", "gemma4-moe-chain-1", "gemma4-31b-tree-4")
@pytest.mark.parametrize(
    ("family", "shape", "page_size"),
    quick(pairs([*FUSABLE, *SLOW], ["chain", "tree"], [1, 4]), lambda family, *_: family == "gpt_oss"),
)
def test_tokens_are_those_of_unfused_layers(
    family, shape, page_size, generate, make_target, make_assistant, random_prompt
):
    """Greedy and sampled, past the sliding window, in chunks, more requests than rows; by default both at once."""
    model = make_target(family)
    drafters = [make_assistant(model)] if family.startswith("gemma4") else ["ngram" if shape == "chain" else None]
    if family == "gemma4-e2b":
        drafters.append(make_assistant(model, ordered=True))
    prompts = [random_prompt(length, seed=length) for length in (5, 13, 21)]
    for drafter in drafters:
        for params in (GREEDY, SAMPLED) if is_deep() else ([GREEDY, *SAMPLED[1:]],):
            settings = {"spec": DRAFTS[shape], "page_size": page_size, "prefill_chunk": 7}
            want = generate(model, drafter, prompts, params, fused=False, **settings)
            assert generate(model, drafter, prompts, params, fused=True, **settings) == want


@usual_cases("glm4-True", "step3p7-False", "deepseek_v3-True")
@pytest.mark.parametrize(("family", "deterministic"), list(itertools.product(NEWER, [False, True])))
def test_newer_families_decode_greedily_as_transformers_does(
    family, deterministic, make_target, make_engine, greedy_oracle, random_prompt
):
    """Past the sliding window, in chunks, two prompts at once, with drafts; also where rows keep their bits."""
    model, prompts = make_target(family), [random_prompt(5), random_prompt(19)]
    settings = {"fused": True, "deterministic": deterministic, "prefill_chunk": 7, "max_batch_size": 2}
    with make_engine(model, "ngram", **settings) as engine:
        assert engine.target.unfused is None and engine.target.deterministic == deterministic
        tokens = [out.token_ids for out in engine.generate(prompts, GREEDY)]
    assert tokens == [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    assert len({token for row in tokens for token in row}) > 3


@deep_cases("gpt_oss", "granite")
@pytest.mark.parametrize("family", ["gemma4-e2b", "gpt_oss", "granite", "olmo2"])
def test_states_that_drafters_ask_for_are_those_of_unfused_layers(family, make_target, make_engine, random_prompt):
    """Those that enter layers, the one that leaves the last, and the final one."""
    seen = []
    for fused in (False, True):
        engine = make_engine(make_target(family), None, fused=fused)
        layers = len(engine.target.layout.layers)
        inner, outputs = engine.target.forward, []

        engine.state.states_needed = lambda **_: StatesNeeded.EVERY

        def forward(tokens, plan, view, aux_layers=(), inner=inner, outputs=outputs, layers=layers):
            outputs.append(inner(tokens, plan, view, (0, 2, layers)))
            return outputs[-1][0], None

        engine.target.forward = forward
        engine.generate([random_prompt(9)], SamplingParams(max_new_tokens=3))
        seen.append([tuple(states.clone() for states in out) for out in outputs])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("family", [deep("gemma4-e2b"), slow("gpt_oss")])
def test_tokens_are_the_same_on_the_kernels(family, generate, make_target, make_assistant, random_prompt, monkeypatch):
    """The layers' own, and the centroid head's: for greedy and sampled requests at once."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if family == "gpt_oss":
        model = make_target(family, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
        drafter, spec = None, DRAFTS["chain"]
    else:
        model = make_target(family)
        drafter, spec = make_assistant(model, ordered=True), DRAFTS["tree"]
    prompts, new = [random_prompt(examples(5, 10)), random_prompt(3)], examples(2, 4)
    params = [SamplingParams(max_new_tokens=new), SamplingParams(max_new_tokens=new, temperature=0.9, seed=1)]
    settings = {"spec": spec, "prefill_chunk": 4}
    want = generate(model, drafter, prompts, params, fused=False, **settings)
    assert generate(model, drafter, prompts, params, fused=True, attention="triton", **settings) == want


def test_a_model_that_was_asked_for_hidden_states_is_fused_all_the_same(make_target):
    """transformers leaves its own hooks on such a model: they take notes when asked, and change nothing."""
    model = make_target("llama", fresh=True)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert model.get_decoder().layers[0]._forward_hooks, "transformers takes its notes in another way now"
    assert TargetModel(model, REFERENCE).unfused is None


@pytest.mark.parametrize(
    ("fused", "attention", "wanted"),
    [(False, "triton", None), ("auto", "triton", None), (True, "torch", REFERENCE), (True, "auto", REFERENCE)],
)
def test_operations_by_setting(fused, attention, wanted):
    assert choose_operations(fused, attention, CPU, torch.float32) is wanted


@interpreted
def test_operations_in_the_interpreter_are_the_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_operations(True, "triton", CPU, torch.float32) is FAST
    with pytest.raises(ConfigError, match="works in"):
        choose_operations(True, "triton", CPU, torch.bfloat16)


# refusals


def test_a_family_without_fused_layers(make_target, make_engine, greedy_oracle, random_prompt):
    model = make_target("starcoder2")
    with pytest.raises(ConfigError, match=r"fused=True, .* Starcoder2Model has no fused form; Cohere2Model, .*auto"):
        make_engine(model, fused=True)
    target = TargetModel(model, REFERENCE)
    assert "Starcoder2Model has no fused form" in target.unfused
    prompt = random_prompt(9)
    [out] = Engine(target, config=EngineConfig(max_model_len=64)).generate(prompt, GREEDY)
    assert out.token_ids == greedy_oracle(model, prompt, NEW)


def test_a_drafter_that_cannot_be_fused(make_target, make_assistant, make_engine):
    model = make_target("gemma4-31b")
    assistant = make_assistant(model, seed=7)
    handle = assistant.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match=r"gemma4_mtp runs unfused: the forward of its module layers.0.mlp"):
            make_engine(model, assistant, fused=True)
    finally:
        handle.remove()


def test_a_target_that_contradicts_the_config_is_refused(make_target):
    target = TargetModel(make_target("llama"), REFERENCE)
    Engine(target, config=EngineConfig(fused=True, max_model_len=64))
    with pytest.raises(ConfigError, match="was made with fused layers"):
        Engine(target, config=EngineConfig(fused=False, max_model_len=64))
    with pytest.raises(ConfigError, match="made without operations"):
        Engine(TargetModel(make_target("llama")), config=EngineConfig(fused=True, max_model_len=64))


def wrong_norm(*args: Any, **kwargs: Any) -> Any:
    hidden, normed = REFERENCE(norm)(*args, **kwargs)
    return hidden, normed * 1.05


def shifted_rotary(positions: torch.Tensor, *args: Any) -> Any:
    """Right for each query and key together: attention scores depend on differences. Stored keys would be wrong."""
    return REFERENCE(rotary)(positions + 1, *args)


def failing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("out of shared memory\nand more lines")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({norm: wrong_norm}, "the queries of layer 0"),
        ({rotary: shifted_rotary}, "the queries of layer 0"),
        (
            {gated_linear: lambda x, w, act, *limit: REFERENCE(gated_linear)(x, w, "gelu_tanh", *limit)},
            "the queries of layer 1",
        ),
        ({linear: failing}, "its fused layers do not run (RuntimeError: out of shared memory)"),
    ],
    ids=["norm", "rotary", "activation", "failing"],
)
def test_layers_that_do_not_prove_equal_do_not_run(
    change, reason, make_target, greedy_oracle, random_prompt, caplog, monkeypatch
):
    """Said once, in a warning; the text is the model's own."""
    model = make_target("llama")
    with caplog.at_level(logging.INFO, "specdec"):
        target = TargetModel(model, REFERENCE.replacing(change))
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "runs unfused" in record.message and reason in record.message
    assert reason in target.unfused and not isinstance(target.decoder, FusedDecoder)
    prompt = random_prompt(9)
    [out] = Engine(target, config=EngineConfig(max_model_len=64)).generate(prompt, GREEDY)
    assert out.token_ids == greedy_oracle(model, prompt, NEW)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({norm: lambda *a, **k: tuple(x * 3 for x in REFERENCE(norm)(*a, **k))}, "do not compute the same"),
        ({linear: failing}, "out of shared memory"),
    ],
    ids=["norm", "failing"],
)
def test_a_drafter_that_does_not_prove_equal_runs_unfused(change, reason, make_target, make_assistant, caplog):
    target = TargetModel(make_target("gemma4-31b"), REFERENCE)
    target.ops = REFERENCE.replacing(change)
    with caplog.at_level(logging.INFO, "specdec"):
        drafter = Gemma4MTPDrafter(make_assistant(target.model), target)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and reason in record.message and reason in drafter.unfused
    assert not any(isinstance(module, FusedDecoder | FusedLinear) for module in drafter.model.modules())


# weights that change


def test_a_captured_graph_is_told_that_weights_moved(make_target):
    """Also an unfused one: another engine may merge what it reads."""
    model = make_target("llama", fresh=True)
    unfused = TargetModel(model)
    assert unfused.weights.generation() == unfused.weights.generation() == 0
    fused, twin = TargetModel(model, REFERENCE), TargetModel(model, REFERENCE)
    assert unfused.weights.generation() == 1
    assert (fused.weights.generation(), twin.weights.generation()) == (0, 0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    assert (unfused.weights.generation(), fused.weights.generation()) == (1, 0)
    param = model.model.layers[0].mlp.up_proj.weight
    param.data = param.data.clone()
    assert fused.weights.generation() == 1
    assert is_merged([model.model.layers[0].mlp.gate_proj.weight, param])
    assert (unfused.weights.generation(), twin.weights.generation(), fused.weights.generation()) == (2, 1, 1)
    assert twin.decoder.parts.layers[0].mlp.gate_up.data_ptr() == fused.decoder.parts.layers[0].mlp.gate_up.data_ptr()


def test_weights_of_another_dtype_are_refused_until_they_are_back(make_target, make_engine, random_prompt):
    model, prompt = make_target("llama", fresh=True), random_prompt(5)
    engine = make_engine(model, None, fused=True)
    [want] = engine.generate(prompt, GREEDY)
    model.double()
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"are torch.float64 on cpu now, and were torch.float32 on cpu"):
            engine.generate(prompt, GREEDY)
    model.float()
    assert engine.generate(prompt, GREEDY)[0].token_ids == want.token_ids


def test_weights_that_fused_layers_cannot_run_are_refused(make_target, make_engine, random_prompt):
    """A hook that comes later is not seen, as in any engine; another activation in the place of the old one is."""
    model = make_target("llama", fresh=True)
    target = TargetModel(model, REFERENCE)
    target.decoder.source.layers[0].mlp.act_fn = nn.ReLU()  # before weights move
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="its fused layers cannot run"):
            target.weights.generation()


class Quantised(torch.Tensor):
    """A tensor that is more than its numbers."""


def tied(model: Any) -> None:
    layers = model.model.layers
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight


def of_another_class(model: Any) -> None:
    proj = model.model.layers[1].mlp.up_proj
    proj.weight = nn.Parameter(proj.weight.data.as_subclass(Quantised))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (tied, "tied to one another"),
        (nn.Module.share_memory, "that other processes share"),
        (of_another_class, "layers.1.mlp.up_proj.weight is no plain tensor"),
    ],
)
def test_weights_that_cannot_be_merged_run_unfused(prepare, reason, make_target, greedy_oracle, random_prompt):
    model, prompt = make_target("llama", fresh=True), random_prompt(7)
    prepare(model)
    shared = [param.is_shared() for param in model.parameters()]
    target = TargetModel(model, REFERENCE)
    assert reason in target.unfused and [param.is_shared() for param in model.parameters()] == shared
    [out] = Engine(target, config=EngineConfig(max_model_len=64)).generate(prompt, GREEDY)
    assert out.token_ids == greedy_oracle(model, prompt, NEW)


def test_changed_weights_of_an_assistant_are_seen(make_target, make_assistant, make_engine, random_prompt):
    """Its drafts are those of unfused layers, before and after; the first of each round tells."""
    model = make_target("gemma4-31b")
    assistant, other = copy.deepcopy(make_assistant(model)), make_assistant(model, seed=9).state_dict()
    seen = []
    engines = [make_engine(model, assistant, fused=fused) for fused in (True, False)]
    proposals = [watch_proposals(engine) for engine in engines]
    for changes in (False, True, False, True):
        if changes:
            assistant.load_state_dict(other, assign=len(seen) > 1)  # in place, and then in other tensors
            assistant.tie_weights()
            other = make_assistant(model, seed=10).state_dict()
        for engine in engines:
            engine.generate(random_prompt(9), GREEDY)
        drafts = [[draft.tokens for draft in each] for each in proposals]
        assert drafts[0] == drafts[1]
        seen.append(drafts[0])
        for each in proposals:
            each.clear()
    assert seen[0] != seen[1] == seen[2] != seen[3] != seen[0]


@deep_cases("chain")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_centroid_head_draws_from_its_list(shape, make_target, make_assistant, make_engine, random_prompt):
    """Fused, no row of the vocabulary is made for a draft; a list shorter than `topk` falls back to one."""
    model, calls = make_target("gemma4-e2b"), []

    def counted(head: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(head) or REFERENCE(head)(*args)

    target = TargetModel(model, REFERENCE)
    target.ops = REFERENCE.replacing({head: counted(head) for head in (centroid_sample, centroid_best)})
    drafter = Gemma4MTPDrafter(make_assistant(model, ordered=True), target)
    engine = Engine(target, drafter, spec=DRAFTS[shape], config=EngineConfig(max_model_len=64))
    drafter.logits = lambda hidden: pytest.fail("the head made a row of the vocabulary")
    engine.generate(random_prompt(5), GREEDY)
    assert set(calls) == {centroid_sample if shape == "chain" else centroid_best}
    del drafter.logits
    wide = Engine(target, drafter, spec=SpecConfig(1, 25), config=EngineConfig(max_model_len=64))
    calls.clear()
    wide.generate(random_prompt(5), GREEDY)
    assert calls == []


# threads


def test_one_thread_at_a_time_merges(make_target, monkeypatch):
    model, inside, most = make_target("llama", fresh=True), [], []

    def slow_merge(params, dim):
        inside.append(0)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return merge(params, dim)

    monkeypatch.setattr(merge_module, "merge", slow_merge)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: TargetModel(model, REFERENCE), range(4)))
    assert len(most) == 4 * 2 * 2 and set(most) == {1}  # threads, layers, merged weights of a layer
