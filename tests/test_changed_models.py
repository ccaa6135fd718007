"""A model that changes after its engine was made: the engine answers with what the model is now, or refuses.

K/V of updated weights are in `test_prefix_sharing.py`; here are weights, adapters, hooks, replaced modules, and changes
that used to leave no trace.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, EngineConfig, SamplingParams
from specdec.draft_models.lookup import NgramDrafter
from specdec.errors import UnsupportedModelError
from specdec.modules import weight_watch

from engine_internals import StorageWatch, TargetModel, capture_on_cpu, captured_prompts, captured_rounds
from marks import deep, deep_cases, each_value

NEW = 10
GREEDY = SamplingParams(max_new_tokens=NEW)
PROMPT = list(range(3, 25))


class Adapter(nn.Module):
    """Adapters of one product, one of them active, as peft keeps them: in attributes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.adapters = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.active: list[str] = []

    def add(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        added = nn.Linear(self.base_layer.in_features, self.base_layer.out_features, bias=False)
        nn.init.normal_(added.weight, std=0.3)
        self.adapters[name], self.scaling[name] = added, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in self.active:
            out = out + self.adapters[name](x) * self.scaling[name]
        return out


def truth(model: Any, prompt: list[int] = PROMPT, count: int = NEW) -> list[int]:
    """Greedy tokens by a whole forward of the model as it is now for each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answer(engine: Engine) -> list[int]:
    [out] = engine.generate(PROMPT, GREEDY)
    return out.token_ids


@pytest.fixture
def prepared(make_target) -> Callable[[str], Any]:
    """prepared(family): a model of its own. "adapted": with two adapters in one of its layers, the first one active;
    "hooked": with a hook that multiplies by a number of the model's, for now 1."""

    def make(family: str) -> Any:
        model = make_target("llama" if family in ("adapted", "hooked") else family, fresh=True)
        if family == "adapted":
            mlp = model.model.layers[1].mlp
            mlp.down_proj = adapter = Adapter(mlp.down_proj)
            adapter.add("first", 1)
            adapter.add("second", 2)
            adapter.active = ["first"]
        if family == "hooked":
            model.factor = [1.0]
            model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * model.factor[0])
        return model

    return make


def change(model: Any, how: str, other: dict[str, torch.Tensor] | None = None) -> None:
    """Change a model in one of these ways. other: the weights of another."""
    mlp = model.model.layers[1].mlp
    match how:
        case "in_place":
            model.load_state_dict(other)
        case "assigned":
            model.load_state_dict(other, assign=True)
            model.tie_weights()
        case "assigned_in_part":  # one weight of a merged group, one of none, and a norm
            names = ["1.self_attn.k_proj.weight", "2.self_attn.o_proj.weight", "0.input_layernorm.weight"]
            part = {f"model.layers.{name}": other[f"model.layers.{name}"] for name in names}
            model.load_state_dict(part, strict=False, assign=True)
        case "pointed_elsewhere":
            for name, param in model.named_parameters():
                if name.endswith("up_proj.weight"):
                    param.data = other[name].clone()
        case "there_and_back":
            model.double().load_state_dict(other)
            model.float()
        case "switch":
            mlp.down_proj.active = ["second"]
        case "switch_in_place":
            mlp.down_proj.active[0] = "second"
        case "disable":
            mlp.down_proj.active = []
        case "rescale":
            mlp.down_proj.scaling["first"] = -2.0
        case "add_another":
            mlp.down_proj.add("third", 3)
            mlp.down_proj.active = ["third"]
        case "another_factor":
            model.factor[0] = -1.5
        case "another_module":
            mlp.act_fn = nn.ReLU()
        case "another_forward":
            forward = mlp.forward
            mlp.forward = lambda x: forward(x) * 2.0
        case "another_epsilon":
            for layer in model.model.layers:
                layer.input_layernorm.variance_epsilon = 50.0


WEIGHTS = ("in_place", "assigned", "assigned_in_part", "pointed_elsewhere", "there_and_back")
ADAPTERS = ("switch", "switch_in_place", "disable", "rescale", "add_another")
CHANGES = [  # what is changed, in which model, and how its engine is made and asked again
    *((name, "qwen2", "fused") for name in WEIGHTS),
    deep("assigned", "qwen2", "fused, captured"),
    *each_value((name, "adapted", how) for name in ADAPTERS for how in ("", "cleared")),
    ("switch", "adapted", "captured"),
    *((name, "qwen2", "") for name in ("another_module", "another_forward")),
    # no engine compares all attributes of all modules in each step, and a hook may do anything
    *(("another_epsilon", "qwen2", how) for how in ("cleared", "fused, cleared")),
    ("another_factor", "hooked", "captured, cleared"),
]


@deep_cases(
    *("assigned-qwen2-fused", "assigned_in_part-qwen2-fused", "there_and_back-qwen2-fused"),
    "switch_in_place-adapted-cleared",
    *("another_epsilon-qwen2-cleared", "disable-adapted-", "rescale-adapted-cleared", "add_another-adapted-"),
)
@pytest.mark.parametrize(("name", "family", "how"), CHANGES)
def test_an_engine_answers_with_what_its_model_is_now(
    name, family, how, prepared, make_target, make_engine, monkeypatch
):
    """A private copy had the attributes of the day it was made, a captured graph the tensors and what a hook did."""
    capture_on_cpu(monkeypatch, "captured" in how)
    model = prepared(family)
    other = {} if family in ("adapted", "hooked") else make_target(family, seed=4, fresh=True).state_dict()
    engine = make_engine(model, None if "captured" in how else "ngram", fused="fused" in how)
    before = truth(model)
    times = 3 if "captured" in how else 1
    for _ in range(times):
        assert answer(engine) == before
    change(model, name, other)
    after = truth(model)
    assert after != before
    if "cleared" in how:
        engine.clear_prefix_cache()
    for _ in range(times):
        assert answer(engine) == after
    assert bool("captured" in how) == bool(captured_rounds(engine))


def test_a_running_request_goes_on_with_the_adapter_that_is_active_now(prepared, make_engine):
    """What it has made by then are K/V of the other adapter, which are not kept for later requests."""
    model = prepared("adapted")
    engine = make_engine(model, None)
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    change(model, "switch")
    list(stream)
    [out] = engine.generate(PROMPT, GREEDY)
    assert (out.token_ids, out.stats.cached_tokens) == (truth(model), 0)


def test_adapters_of_peft_are_followed(make_target, make_engine):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = make_target("llama", fresh=True)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).eval()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.4)
    engine = make_engine(model, "ngram")
    seen = [answer(engine)]

    def check(wanted_model: Any = model) -> None:
        seen.append(truth(wanted_model))
        assert answer(engine) == seen[-1] != seen[-2]

    assert seen == [truth(model)]
    model.set_adapter("other")
    check()
    with model.disable_adapter():
        check()
    check()
    model.set_adapter("default")
    check()
    check(model.unload())


def scaled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * -1.5


def test_hooks_that_are_added_and_removed_are_followed(make_target, make_engine):
    """A hook was not seen by an engine that existed, and three pages of the docs disagreed about it."""
    model = make_target("qwen2", fresh=True)
    engine = make_engine(model, "ngram", fused=True)
    before = truth(model)
    assert answer(engine) == before
    hook = model.model.layers[1].mlp.register_forward_hook(scaled)
    after = truth(model)
    assert answer(engine) == answer(engine) == after != before
    assert engine.target.unfused is not None
    hook.remove()
    assert answer(engine) == before
    assert engine.target.unfused is None


def test_a_change_that_cannot_be_served_is_refused_until_it_is_undone(make_target, make_engine):
    model = make_target("llama", fresh=True)
    engine = make_engine(model, "ngram")
    before = truth(model)
    assert answer(engine) == before
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out.roll(1, dims=1))
    for ask in (engine.clear_prefix_cache, lambda: answer(engine)):
        with pytest.raises(UnsupportedModelError):
            ask()
    hook.remove()
    assert answer(engine) == before


def test_another_vocabulary_is_refused(make_target, make_engine):
    model = make_target("llama", fresh=True)
    engine = make_engine(model, "ngram")
    size = model.config.vocab_size
    answer(engine)
    torch.manual_seed(0)
    model.resize_token_embeddings(size + 8)
    with pytest.raises(UnsupportedModelError, match=f"make a new engine \\({size} before, {size + 8} now\\)"):
        answer(engine)


def test_uses_that_change_no_module_copy_none(make_target, make_engine, monkeypatch):
    """Training steps, modes, and the hooks that transformers keeps for hidden states."""
    model = make_target("qwen2", fresh=True)
    engine = make_engine(model, "ngram")
    assert engine.target.weights._copy_again is not None
    monkeypatch.setattr(engine.target.weights, "_copy_again", lambda: pytest.fail("the modules are copied again"))
    before = answer(engine)
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    model.train().eval()
    model.requires_grad_(False)
    engine.clear_prefix_cache()
    assert answer(engine) == before
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    assert answer(engine) == truth(model) != before


def test_captured_prompts_see_changed_weights(make_target, make_engine, random_prompt, monkeypatch):
    """One shape, unlike lengths: what is captured after the change reads what the next prompt is fed into."""
    capture_on_cpu(monkeypatch)
    model, other = make_target("qwen2", fresh=True), make_target("qwen2", seed=4, fresh=True).state_dict()
    engine = make_engine(model, None)
    for changed in (False, True):
        if changed:
            change(model, "assigned", other)
        for length in (11, 9):
            prompt = random_prompt(length, seed=length)
            assert engine.generate(prompt, GREEDY)[0].token_ids == truth(model, prompt)
    assert captured_prompts(engine)


# weights that change without a trace


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_weights_swapped_and_swapped_back_during_a_run_leave_no_kv(drafter, make_target, make_engine):
    """There and back counted as no move: unfused layers were looked at only when the prefix cache was used."""
    model = make_target("llama", fresh=True)
    engine, weight = make_engine(model, drafter), model.model.layers[0].mlp.down_proj.weight
    stream, own = engine.stream(PROMPT, SamplingParams(max_new_tokens=24)), weight.data
    made = list(next(stream).token_ids)
    weight.data = own * -1.5
    made += [token for _ in range(3) for token in next(stream).token_ids]
    weight.data = own
    made += [token for delta in stream for token in delta.token_ids]
    text = [*PROMPT, *made]
    [out] = engine.generate(text, GREEDY)
    assert (out.token_ids, out.stats.cached_tokens) == (truth(model, text), 0)


def test_a_step_looks_at_weights_once(make_target, make_engine, random_prompt, monkeypatch):
    """A look takes the host longer than all else in a round of one request; updates count only for cached K/V."""
    capture_on_cpu(monkeypatch)
    engine, looks = make_engine(make_target("llama", fresh=True), None, prefix_cache=True), []
    for name in ("moved", "versions"):
        look = getattr(StorageWatch, name)
        monkeypatch.setattr(StorageWatch, name, lambda self, name=name, look=look: (looks.append(name), look(self))[1])
    handle = engine.submit(random_prompt(9), SamplingParams(max_new_tokens=9, ignore_eos=True))
    while handle.num_output < 3:
        engine.step()
    looks.clear()
    for _ in range(4):
        engine.step()
    assert looks == ["moved"] * 4
    engine.submit_many([random_prompt(5, seed=seed) for seed in (1, 2)], SamplingParams(max_new_tokens=1))
    looks.clear()
    engine.step()  # two that begin and keep what they read
    assert looks.count("versions") == 1
    while not handle.finished:
        engine.step()


def test_a_step_looks_at_a_drafters_weights(make_target, make_engine, random_prompt):
    """Regression: without a prefix cache and captures, MTP modules drafted with the weights that they had."""
    drafter, layer = NgramDrafter(), nn.Linear(4, 4)
    drafter.weights = weight_watch.Weights("a drafter", layer)
    engine = make_engine(make_target("llama"), drafter, prefix_cache=False)
    stream = engine.stream(random_prompt(5), SamplingParams(max_new_tokens=24))
    next(stream)
    layer.weight.data = torch.zeros(4, 4)
    for _ in range(2):
        next(stream)
    assert not drafter.weights.watch.moved()
    stream.close()


def test_memory_that_was_freed_and_is_used_again_is_a_move(monkeypatch):
    """An address says nothing once its tensor is gone: weights that are re-pointed twice may be where they were."""
    # an allocator that likes one place
    monkeypatch.setattr(weight_watch, "_addresses", lambda tensors: [4096] * len(tensors))
    layer = nn.Linear(4, 4, bias=False)
    watch = StorageWatch(layer)
    assert not watch.moved()
    layer.weight.data = torch.zeros(4, 4)
    assert watch.moved()
    watch.note()
    assert not watch.moved()


def test_watching_keeps_no_memory_of_weights_that_were_replaced():
    layer = nn.Linear(64, 64, bias=False)
    watch, storage = StorageWatch(layer), layer.weight.untyped_storage()._weak_ref()
    layer.weight.data = torch.zeros(64, 64)
    assert torch.UntypedStorage._expired(storage)
    assert watch.moved()


@pytest.mark.parametrize("made_so", [False, True])
def test_updates_of_inference_tensors_are_noticed(made_so, make_target, make_engine, caplog):
    """They have no version counters, so cached K/V of the weights before were served. made_so: from the beginning."""
    with torch.inference_mode(made_so), caplog.at_level(logging.WARNING, logger="specdec"):
        model = make_target("llama", fresh=True)
    engine = make_engine(model, "ngram")
    assert ("made under torch.inference_mode()" in caplog.text) == made_so
    assert answer(engine) == truth(model)
    for seed in (4, 5):
        state = make_target("llama", seed=seed, fresh=True).state_dict()
        before = truth(model)
        with torch.inference_mode():
            state = {name: tensor.clone() for name, tensor in state.items()}
            model.load_state_dict(state, assign=not made_so and seed == 4)
        assert answer(engine) == truth(model) != before


@pytest.mark.usefixtures("shallow_pair")
def test_a_checkpoint_loaded_in_inference_mode_has_ordinary_weights():
    """The engine loads it, so it decides."""
    with torch.inference_mode():
        engine = Engine.from_pretrained(
            "tiny-gemma4", "tiny-gemma4-mtp", config=EngineConfig(max_batch_size=1, max_model_len=64)
        )
        outs = [engine.generate(PROMPT, SamplingParams(max_new_tokens=2))[0] for _ in range(2)]
    assert [out.stats.cached_tokens for out in outs] == [0, len(PROMPT) - 1]
    assert not any(tensor.is_inference() for tensor in engine.target.model.parameters())
    assert not any(tensor.is_inference() for tensor in engine.drafter.assistant.parameters())


def test_a_target_copied_again_is_proved_again(prepared, monkeypatch) -> None:
    model = prepared("adapted")
    target, proofs, probe = TargetModel(model), list[int](), TargetModel._probe
    monkeypatch.setattr(TargetModel, "_probe", lambda self: proofs.append(1) or probe(self))
    change(model, "switch")
    assert (target.weights.generation(), target.weights.generation()) == (1, 1)
    assert len(proofs) == 1


def test_engines_with_an_adapter_each_share_the_base_weights(prepared):
    """Copies of the modules around the same tensors: each engine answers by its own adapter, and the base is one."""
    base = prepared("llama")
    models = [copy.deepcopy(base, {id(weight): weight for weight in base.parameters()}) for _ in range(2)]
    for seed, model in enumerate(models):
        mlp = model.model.layers[1].mlp
        mlp.down_proj = adapter = Adapter(mlp.down_proj)
        adapter.add("own", seed)
        adapter.active = ["own"]
    config = EngineConfig(max_batch_size=1, max_model_len=64, fused=False)
    first, second = (answer(Engine.from_pretrained(model, config=config)) for model in models)
    assert first == truth(models[0]) and second == truth(models[1]) and first != second
    held = [
        {weight.data_ptr() for name, weight in model.named_parameters() if "adapters" not in name} for model in models
    ]
    assert held[0] == held[1] == {weight.data_ptr() for weight in base.parameters()}
