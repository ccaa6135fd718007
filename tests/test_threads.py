"""Several threads: calls on one engine take turns, and engines over one model do not touch each other or the model."""

import pytest
import torch
from side_by_side import in_threads

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter

from inside import TargetModel, assert_idle
from marks import deep, deep_cases, examples, slow

NEW = 10


def modes_and_configs(model: torch.nn.Module) -> list[object]:
    """What an engine may not change about a model: its modules, their modes, hooks and classes, and its configs."""
    found: list[object] = []
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found += [name, type(module), type(module).forward, "forward" in vars(module), module.training, hooks]
        if hasattr(module, "config"):
            found += [id(module.config), module.config._attn_implementation_internal]
    return found


@deep_cases("mtp-24")
@pytest.mark.parametrize(("drafter", "count"), [deep(None, 40), ("ngram", 24), slow("mtp", 24), deep("mtp", 120)])
def test_eight_threads_share_an_engine(
    drafter, count, make_target, make_assistant, make_engine, greedy_oracle, random_prompt
):
    model = make_target("gemma4-e2b")
    module = make_assistant(model) if drafter == "mtp" else drafter
    engine = make_engine(model, module, max_batch_size=3, full_slots=160, swa_slots=160)
    prompts = [random_prompt(1 + n % 23) for n in range(count)]
    truths = [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    params = SamplingParams(max_new_tokens=NEW)
    got: dict[int, list[int]] = {}

    def job(first: int) -> None:
        for n in range(first, len(prompts), 8):
            if n % 3 == 0:
                got[n] = engine.generate(prompts[n], params)[0].token_ids
            elif n % 3 == 1:
                got[n] = [token for delta in engine.stream(prompts[n], params) for token in delta.token_ids]
                engine.stats()
            else:
                handle = engine.submit(prompts[n], params, priority=-1)
                while not handle.finished:
                    engine.step()
                got[n] = handle.output().token_ids

    in_threads([lambda first=first: job(first) for first in range(8)])
    assert [got[n] for n in range(len(prompts))] == truths
    assert_idle(engine)
    assert engine.stats().output_tokens == NEW * len(prompts)


@pytest.mark.deep
def test_four_engines_over_one_model_in_four_threads(make_target, make_assistant, greedy_oracle, random_prompt):
    """Plain, prompt lookup and two over one assistant; one engine has a model of its own of the same class."""
    model, other = make_target("gemma4-e2b"), make_target("gemma4-e2b", seed=5)
    model.train()
    assistant = make_assistant(model)
    prompts = [random_prompt(1 + 2 * n % 17) for n in range(examples(8, 50))]
    before = modes_and_configs(model), modes_and_configs(assistant)
    truths = {id(m): [greedy_oracle(m, prompt, NEW) for prompt in prompts] for m in (model, other)}
    config = EngineConfig(max_batch_size=2, max_model_len=64, prefill_chunk=8)
    shared = TargetModel(model)
    fitted = Gemma4MTPDrafter(assistant, shared)
    engines = [
        (model, Engine.from_pretrained(model, "ngram", config=config)),
        (model, Engine(shared, fitted, config=config)),
        (model, Engine(shared, fitted, spec=SpecConfig(3, 2, 6), config=config)),
        (other, Engine.from_pretrained(other, None, config=config)),
    ]
    got: list[list[list[int]]] = [[], [], [], []]

    def job(number: int, engine: Engine) -> None:
        for first in range(0, len(prompts), 4):
            outputs = engine.generate(prompts[first : first + 4], SamplingParams(max_new_tokens=NEW))
            got[number] += [out.token_ids for out in outputs]

    jobs = [lambda number=number, engine=engine: job(number, engine) for number, (_, engine) in enumerate(engines)]
    try:
        in_threads(jobs)
        for number, (target, _) in enumerate(engines):
            assert got[number] == truths[id(target)]
        assert (modes_and_configs(model), modes_and_configs(assistant)) == before
    finally:
        model.eval()


@pytest.mark.parametrize("drafter", [None, "gemma4-mtp"])
def test_an_engine_outlives_the_mode_it_was_made_in(drafter, make_target, make_assistant, random_prompt, greedy_oracle):
    """Tensors made in inference mode cannot be written to outside of it."""
    model, prompt = make_target("gemma4-31b"), random_prompt(12)
    assistant = make_assistant(model) if drafter else None
    with torch.inference_mode():
        engine = Engine.from_pretrained(model, assistant, config=EngineConfig(max_model_len=64))
    oracle = greedy_oracle(model, prompt, 6)
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            [out] = engine.generate(prompt, SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert out.token_ids == oracle


def test_a_model_keeps_its_training_mode(make_target):
    model = make_target("llama", fresh=True)
    model.train()
    model.model.layers[1].eval()
    before = modes_and_configs(model)
    Engine.from_pretrained(model, "ngram", config=EngineConfig(max_model_len=64)).generate(
        [1, 2, 3], SamplingParams(max_new_tokens=3)
    )
    assert modes_and_configs(model) == before


def test_a_stream_dropped_within_a_turn_is_released_when_the_turn_ends(make_target, make_engine, random_prompt):
    """The garbage collector may close a stream anywhere, also while this very thread holds the turn."""
    engine = make_engine(make_target("llama"), max_batch_size=2)
    stream = engine.stream(random_prompt(5), SamplingParams(max_new_tokens=NEW))
    next(stream)
    streams = [stream]
    del stream

    def step():
        streams.clear()  # closes it: its request is aborted, and must not be released under our feet
        assert len(engine.scheduler.running) == 1

    engine._in_turn(step)
    assert engine.scheduler.idle and engine.table.allocator.primary.held_pages == 0
