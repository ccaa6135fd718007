"""A model that changes after its engine was made: the engine answers with what the model is now, or refuses.

What fused layers make of re-pointed weights is in `test_fused_engine.py`, K/V of updated weights in
`test_prefix_sharing.py`; here are adapters, hooks, replaced modules, and changes that used to leave no trace.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, EngineConfig, SamplingParams
from specdec.errors import UnsupportedModelError
from specdec.layers import merge

from inside import TargetModel, Watch, capture_on_tape, captured_rounds
from marks import each_value

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


@contextmanager
def counted_copies(engine: Engine) -> Iterator[list[int]]:
    """One entry for each time that the target's modules are copied again."""
    weights, copies = engine.target.weights, list[int]()
    copy_again = weights._copy_again
    assert copy_again is not None
    weights._copy_again = lambda: copies.append(1) or copy_again()  # type: ignore[func-returns-value]
    yield copies
    weights._copy_again = copy_again


@pytest.fixture
def adapted(make_target) -> tuple[Any, Adapter]:
    """A model with two adapters in one of its layers, the first one active."""
    model = make_target("llama", fresh=True)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = adapter = Adapter(mlp.down_proj)
    adapter.add("first", 1)
    adapter.add("second", 2)
    adapter.active = ["first"]
    return model, adapter


def switch(adapter: Adapter) -> None:
    adapter.active = ["second"]


def switch_in_place(adapter: Adapter) -> None:
    adapter.active[0] = "second"


def disable(adapter: Adapter) -> None:
    adapter.active = []


def rescale(adapter: Adapter) -> None:
    adapter.scaling["first"] = -2.0


def add_another(adapter: Adapter) -> None:
    adapter.add("third", 3)
    adapter.active = ["third"]


@pytest.mark.parametrize(
    ("change", "cleared"),
    each_value(
        (change, cleared)
        for change in (switch, switch_in_place, disable, rescale, add_another)
        for cleared in (False, True)
    ),
)
def test_an_adapter_that_is_switched_behind_an_engine_answers(change, cleared, adapted, make_engine):
    """The old one did, after `clear_prefix_cache` too: the private copy had the attributes of the day it was made."""
    model, adapter = adapted
    engine = make_engine(model, "ngram")
    before = truth(model)
    assert answer(engine) == answer(engine) == before
    change(adapter)
    after = truth(model)
    assert after != before
    if cleared:
        engine.clear_prefix_cache()
    assert answer(engine) == after


def test_a_running_request_goes_on_with_the_adapter_that_is_active_now(adapted, make_engine):
    """What it has made by then are K/V of the other adapter, which are not kept for later requests."""
    model, adapter = adapted
    engine = make_engine(model, None)
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    switch(adapter)
    list(stream)
    [out] = engine.generate(PROMPT, GREEDY)
    assert (out.token_ids, out.stats.cached_tokens) == (truth(model), 0)


def test_captured_rounds_follow_an_adapter(adapted, make_engine, monkeypatch):
    capture_on_tape(monkeypatch)
    model, adapter = adapted
    engine = make_engine(model, None)
    for name in ("first", "second", "first"):
        adapter.active = [name]
        want = truth(model)
        for _ in range(3):
            assert answer(engine) == want
        assert captured_rounds(engine)


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
    check_unloaded = model.unload()
    check(check_unloaded)


def scaled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * -1.5


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_that_are_added_and_removed_are_followed(fused, make_target, make_engine):
    """A hook was not seen by an engine that existed, and three pages of the docs disagreed about it."""
    model = make_target("qwen2", fresh=True)
    engine = make_engine(model, "ngram", fused=fused)
    before = truth(model)
    assert answer(engine) == before
    hook = model.model.layers[1].mlp.register_forward_hook(scaled)
    after = truth(model)
    assert answer(engine) == answer(engine) == after != before
    assert engine.target.unfused is not None
    hook.remove()
    assert answer(engine) == before
    assert (engine.target.unfused is None) == fused


def test_a_hook_that_does_something_else_is_followed_after_clearing(make_target, make_engine, monkeypatch):
    """It leaves no trace. A captured round holds what it did before."""
    capture_on_tape(monkeypatch)
    model, factor = make_target("llama", fresh=True), [1.0]
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * factor[0])
    engine = make_engine(model, None)
    before = truth(model)
    for _ in range(3):
        assert answer(engine) == before
    factor[0] = -1.5
    engine.clear_prefix_cache()
    after = truth(model)
    for _ in range(3):
        assert answer(engine) == after != before


def another_module(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def another_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 2.0


@pytest.mark.parametrize("change", [another_module, another_forward])
def test_a_module_in_the_place_of_another_is_followed(change, make_target, make_engine):
    model = make_target("qwen2", fresh=True)
    engine = make_engine(model, "ngram")
    before = answer(engine)
    change(model)
    after = truth(model)
    assert answer(engine) == after != before


def another_epsilon(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 50.0


@pytest.mark.parametrize("fused", [False, True])
def test_an_attribute_is_followed_after_clearing(fused, make_target, make_engine):
    """Nobody compares all attributes of all modules in each step."""
    model = make_target("qwen2", fresh=True)
    engine = make_engine(model, "ngram", fused=fused)
    before = answer(engine)
    another_epsilon(model)
    engine.clear_prefix_cache()
    after = truth(model)
    assert answer(engine) == after != before


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


def test_what_changes_nothing_copies_nothing(make_target, make_engine):
    """Training steps, modes, and the hooks that transformers keeps for hidden states."""
    model = make_target("qwen2", fresh=True)
    engine = make_engine(model, "ngram")
    with counted_copies(engine) as copies:
        before = answer(engine)
        model(torch.tensor([PROMPT]), output_hidden_states=True)
        model.train().eval()
        model.requires_grad_(False)
        engine.clear_prefix_cache()
        assert answer(engine) == before
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
        assert answer(engine) == truth(model) != before
    assert not copies


def test_a_copy_is_made_once_for_a_change(adapted, make_engine):
    model, adapter = adapted
    engine, other = make_engine(model, "ngram"), make_engine(model, None)
    with counted_copies(engine) as copies:
        for change in (switch, disable):
            change(adapter)
            assert answer(engine) == answer(other) == answer(engine) == truth(model)
    assert len(copies) == 2


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


def test_memory_that_was_freed_and_is_used_again_is_a_move(monkeypatch):
    """An address says nothing once its tensor is gone: weights that are re-pointed twice may be where they were."""
    monkeypatch.setattr(merge, "_addresses", lambda tensors: [4096] * len(tensors))  # an allocator that likes one place
    layer = nn.Linear(4, 4, bias=False)
    watch = Watch(layer)
    assert not watch.moved()
    layer.weight.data = torch.zeros(4, 4)
    assert watch.moved()
    assert not watch.moved()


def test_watching_keeps_no_memory_of_weights_that_were_replaced():
    layer = nn.Linear(64, 64, bias=False)
    watch, storage = Watch(layer), layer.weight.untyped_storage()._weak_ref()
    layer.weight.data = torch.zeros(64, 64)
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    assert watch.moved()


def test_updates_of_a_model_made_in_inference_mode_are_noticed(make_target, make_engine, caplog):
    """Its tensors have no version counters, so cached K/V of the weights before were served."""
    with torch.inference_mode():
        model = make_target("llama", fresh=True)
        other = {name: tensor.clone() for name, tensor in make_target("llama", seed=4, fresh=True).state_dict().items()}
    with caplog.at_level(logging.WARNING, logger="specdec"):
        engine = make_engine(model, "ngram")
    assert "made under torch.inference_mode()" in caplog.text
    before = truth(model)
    assert answer(engine) == before
    with torch.inference_mode():
        model.load_state_dict(other)
    assert answer(engine) == truth(model) != before


def test_a_model_that_becomes_one_of_inference_tensors_is_noticed(make_target, make_engine):
    model = make_target("llama", fresh=True)
    engine = make_engine(model, "ngram")
    assert answer(engine) == truth(model)
    for seed in (4, 5):
        state = make_target("llama", seed=seed, fresh=True).state_dict()
        with torch.inference_mode():
            state = {name: tensor.clone() for name, tensor in state.items()}
            model.load_state_dict(state, assign=seed == 4)
        assert answer(engine) == truth(model)


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


def test_a_target_copied_again_is_proved_again(adapted) -> None:
    model, adapter = adapted
    target = TargetModel(model)
    proofs: list[int] = []
    probe: Callable[..., Any] = TargetModel._probe
    TargetModel._probe = lambda self: proofs.append(1) or probe(self)  # type: ignore[method-assign, func-returns-value]
    try:
        switch(adapter)
        assert (target.weights.generation(), target.weights.generation()) == (1, 1)
    finally:
        TargetModel._probe = probe  # type: ignore[method-assign]
    assert len(proofs) == 1
