"""Several threads and requests in hand: `submit`, `step` and `abort`, what handles give out and what reading it costs;
calls on one engine take turns, and engines over one model do not touch each other or the model."""

import asyncio
import threading

import pytest
import torch
from run_in_threads import in_threads

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.errors import CapacityError, ConfigError, SpecDecError
from specdec.runtime.calls.handle import Handle
from specdec.runtime.request import Request
from specdec.serving.async_engine import AsyncEngine
from specdec.text.detokenize import Detokenizer

from engine_internals import TargetModel, assert_idle
from marks import deep, deep_cases, examples, slow

NEW = 10
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def read_all(handle) -> list[int]:
    """The tokens of everything there is to read now."""
    return [token for delta in iter(handle.read, None) for token in delta.token_ids]


def test_handles_read_what_steps_produce(make_target, make_engine, greedy_oracle, random_prompt):
    """One thread, by hand: nothing is read twice, and a read never steps."""
    model, prompts = make_target("gemma4-e2b"), [random_prompt(n) for n in (3, 21, 40)]
    engine = make_engine(model, "ngram", max_batch_size=2)
    assert engine.step() is False
    handles = [engine.submit(prompt, PARAMS) for prompt in prompts]
    assert [handle.id for handle in handles] == [0, 1, 2]
    got, more = [[] for _ in handles], True
    assert [handle.read() for handle in handles] == [None] * 3
    while more:
        more = engine.step()
        before = engine.table.committed_len.host.copy()
        for tokens, handle in zip(got, handles, strict=True):
            tokens += read_all(handle)
            assert handle.read() is None
        assert (before == engine.table.committed_len.host).all()
    assert got == [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    assert all(handle.finished for handle in handles) and list(handles[0]) == []
    assert [handle.output().token_ids for handle in handles] == got
    assert_idle(engine)


def test_the_output_takes_nothing_from_the_deltas(make_target, make_engine, random_prompt, pair_tokenizer):
    engine = make_engine(make_target("llama"), tokenizer=pair_tokenizer)
    handle = engine.submit(random_prompt(5), PARAMS)
    first = next(handle)
    out = handle.output()
    rest = list(handle)
    assert first.token_ids + [t for delta in rest for t in delta.token_ids] == out.token_ids
    assert first.text + "".join(delta.text for delta in rest) == out.text
    assert rest[-1].output.finish_reason == "length"


def test_bad_input_is_refused_when_it_is_submitted(make_target, make_engine):
    engine = make_engine(make_target("llama"), max_model_len=32)
    for prompt, params, error in (([], None, ConfigError), ([5], SamplingParams(max_new_tokens=99), CapacityError)):
        with pytest.raises(error):
            engine.submit(prompt, params)
    with pytest.raises(ConfigError, match=r"^priority=1.5: an integer from"):
        engine.submit([5], PARAMS, priority=1.5)
    with pytest.raises(ConfigError):
        engine.submit_many([[5], []], PARAMS)
    assert_idle(engine)


def test_dropping_a_handle_aborts_nothing(make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"))
    engine.submit(random_prompt(5), PARAMS)  # the handle is gone
    while engine.step():
        pass
    assert engine.stats().output_tokens == NEW


def test_unknown_and_ended_ids_are_no_error(make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"))
    handle = engine.submit(random_prompt(5), PARAMS)
    engine.abort(77)
    handle.output()
    handle.abort()
    engine.abort(handle.id)
    assert handle.output().finish_reason == "length"
    assert_idle(engine)


def test_a_closed_engine_ends_its_handles_and_streams(make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"), "ngram")
    handle, unread = engine.submit(random_prompt(5), PARAMS), engine.submit(random_prompt(9), PARAMS)
    stream = engine.stream(random_prompt(9), PARAMS)
    next(stream)
    engine.close()
    engine.close()
    assert handle.finished and handle.output().finish_reason == "abort"
    assert [delta.finish_reason for delta in unread][-1] == "abort"
    with pytest.raises(SpecDecError, match="closed before the request had ended"):
        list(stream)
    for ask in (engine.step, lambda: engine.submit([5]), lambda: engine.generate([5]), lambda: engine.stream([5])):
        with pytest.raises(SpecDecError, match="closed"):
            ask()
    engine.abort(handle.id)
    assert engine.stats().rounds == 0


def test_a_waiting_thread_gets_the_turn_before_the_one_that_just_had_it(make_target, make_engine):
    """A thread that steps without pause once kept the others out for as long as it liked."""
    engine = make_engine(make_target("llama"))
    inside, waiting, order = threading.Event(), threading.Event(), []

    def first_turn():
        inside.set()
        waiting.wait()
        while len(engine._turns._threads) < 2:  # the other stands in the queue
            pass

    def busy():
        engine._in_turn(first_turn)
        for _ in range(50):
            engine._in_turn(lambda: order.append("busy"))

    def patient():
        inside.wait()
        waiting.set()
        engine._in_turn(lambda: order.append("patient"))

    in_threads([busy, patient])
    assert order[0] == "patient" and len(order) == 51


# costs, counted: of reading results, which grow with new tokens and not with all; of a step for the serving thread


LENGTH = 1500


class Counted(list):
    """A list that counts what slices copy out of it."""

    copied = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        if isinstance(at, slice):
            Counted.copied += len(got)
        return got


class CountingTokenizer:
    """Two characters a token; token 1 is special. Counts the tokens that are decoded."""

    all_special_ids = (1,)

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return "".join(f"{token % 90 + 10}" for token in ids if token != 1 or not skip_special_tokens)


def one_at_a_time(tokens, params):
    """A request that gains one token after the other, and what a handle reads of it: (texts, output, tokenizer)."""
    tokenizer = CountingTokenizer()
    request = Request([3, 4, 5], params, 0, Detokenizer(tokenizer), frozenset())
    handle = Handle(request, lambda request: None, lambda id: None)
    request._tokens, request._drafted = Counted(request._tokens), Counted()
    Counted.copied, texts = 0, []
    for token in tokens:
        request.settle([token])
        delta = handle.read()
        texts.append(delta.text)
        assert delta.token_ids == [token]
    return texts, delta.output, tokenizer


@pytest.mark.parametrize("stop", [(), ("nowhere",)], ids=["free", "stop string"])
@pytest.mark.parametrize("kind", ["text", "special tokens"])
def test_a_long_output_is_read_in_linear_time(kind, stop):
    tokens = [1 if kind == "special tokens" else 2 + n % 80 for n in range(LENGTH)]
    params = SamplingParams(max_new_tokens=LENGTH, stop=stop, ignore_eos=True)
    texts, output, tokenizer = one_at_a_time(tokens, params)
    assert "".join(texts) == output.text and output.token_ids == tokens
    assert Counted.copied < 40 * LENGTH
    assert tokenizer.decoded < 60 * LENGTH


def test_a_reader_of_stop_strings_keeps_no_text():
    """It was copied for every token."""
    params = SamplingParams(max_new_tokens=LENGTH, stop=["nowhere"])
    request = Request([3], params, 0, Detokenizer(CountingTokenizer()), frozenset())
    for n in range(100):
        request.settle([2 + n % 80])
    assert len(request.settled.reader.pending) <= 20


def test_a_read_that_is_interrupted_has_read_nothing(monkeypatch):
    request = Request([3], SamplingParams(max_new_tokens=9), 0, Detokenizer(CountingTokenizer()), frozenset())
    handle = Handle(request, lambda request: None, lambda id: None)
    request.settle([7, 8])
    first = handle.read()
    request.settle([9, 10, 11])
    stream = Detokenizer.stream

    def interrupted(self, *arguments, **options):
        stream(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Detokenizer, "stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.read()
    second = handle.read()
    request.end("abort")
    last = handle.read()
    assert first.token_ids + second.token_ids + last.token_ids == [7, 8, 9, 10, 11]
    assert first.text + second.text + last.text == last.output.text


def test_a_step_visits_only_requests_that_gained_tokens_or_ended(make_target, make_engine, random_prompt, monkeypatch):
    """Many requests wait while two run: a step looks at those two, and not at the others."""
    engine = make_engine(make_target("llama"), max_batch_size=2)
    asked, steps, count = [], [], examples(80, 200)
    finished, step = Handle.finished.fget, engine.step

    def asking(handle):
        asked.append(handle.id)
        return finished(handle)

    def stepping():
        steps.append(None)
        return step()

    monkeypatch.setattr(Handle, "finished", property(asking))
    engine.step = stepping

    async def run():
        async with AsyncEngine(engine) as served:
            params = SamplingParams(max_new_tokens=2, ignore_eos=True)
            async with await served.submit([random_prompt(3)] * count, params) as streams:
                while served.samples:
                    await asyncio.sleep(0.01)
                done = len(asked)
                outputs = await streams.outputs()
            return done, outputs

    done, outputs = asyncio.run(run())
    assert len(outputs) == count and len(steps) >= count // 2
    assert done < 20 * len(steps)


# several threads


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
