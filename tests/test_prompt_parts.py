"""Prompts that are read a few layers a step beside rounds: the same tokens, and nothing left over, whatever happens."""

import gc
import weakref

import pytest
import torch

import specdec.runtime.warm_up
from specdec import Engine, SamplingParams, SpecConfig
from specdec.kvcache.sanitize import SETTING
from specdec.models.paused_forward import walker_of
from specdec.runtime import startup_timing
from specdec.runtime.rounds.captured_prompts import ChunkProgram

from inside import (
    REFERENCE,
    Division,
    FinalStates,
    PartShare,
    PromptGap,
    PromptLoad,
    PromptRoom,
    TargetModel,
    assert_idle,
    capture_on_tape,
    divide,
)
from marks import deep, deep_cases, examples, is_deep, usual_cases
from tiny_models import FAMILIES, TWO_OWNERS, random_eagle3

NEW = examples(6, 12)
BOTH = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


def params(new: int = NEW, **changes) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **changes)


@pytest.fixture
def engine_for(make_target, make_engine, monkeypatch):
    """engine_for(captured, drafter, **config): beside streams it reads 8 tokens of prompts at a time, a part a step."""

    def make(captured=False, drafter=None, model=None, **config) -> Engine:
        capture_on_tape(monkeypatch, captured)
        model = make_target("gemma4-e2b") if model is None else model
        sizes = {"max_batch_size": 3, "max_model_len": 128, "prefill_chunk": None, **config}
        engine = make_engine(model, drafter, **sizes)
        assert (engine.scheduler.prompt_gap.division is None) == (config.get("prefill_chunk") is not None)
        monkeypatch.setattr(PromptGap, "tokens", lambda gap, room, num_waiting, prefix: 8)
        monkeypatch.setattr(PromptGap, "budget", lambda gap, room, num_waiting, load: 0.0)
        return engine

    return make


def stream_of(engine: Engine, prompt: list[int], new: int = 60):
    handle = engine.submit(prompt, params(new))
    while not handle.num_output:
        engine.step()
    return handle


def parts_run(engine: Engine) -> int | None:
    """Parts of the forward that is under way; None: there is none."""
    return None if engine.steps.prefill.reading is None else engine.steps.prefill.reading.begun


def until_divided(engine: Engine) -> None:
    for _ in range(20):
        if parts_run(engine) is not None:
            return
        engine.step()
    raise AssertionError("no forward is divided")


def divided(engine: Engine, prompt: list[int], first: list[int], new: int = 60):
    """A stream that begins with `first`, and a request whose prompt is being read in parts beside it."""
    stream = stream_of(engine, first, new)
    late = engine.submit(prompt, params())
    until_divided(engine)
    return stream, late


def test_a_step_runs_a_part_beside_its_round(engine_for, make_target, greedy_oracle, random_prompt):
    """Five layers, each a part: a chunk of 8 tokens is committed with the fifth. The stream has a token of each."""
    engine, model = engine_for(), make_target("gemma4-e2b")
    num_layers = len(engine.target.layout.layers)
    stream = stream_of(engine, random_prompt(5))
    late, seen = engine.submit(random_prompt(20), params()), []
    had = stream.num_output
    for _ in range(3 * num_layers):
        engine.step()
        done = [int(engine.table.committed_len.host[r.row]) for r in engine.scheduler.running if r.number == late.id]
        seen.append((parts_run(engine), done[0]))
    chunk = [*range(1, num_layers), None]
    committed = [0] * (num_layers - 1) + [8] * num_layers + [16] * num_layers + [20]
    assert seen == list(zip(chunk * 3, committed, strict=True))
    assert stream.num_output - had == 3 * num_layers and late.num_output == 1
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 60)
    assert late.output().token_ids == greedy_oracle(model, random_prompt(20), NEW)
    assert late.output().stats.prefill_seconds > 0
    assert_idle(engine)


@usual_cases("None-captured", "mtp-captured", "eagle3-eager")
@BOTH
@pytest.mark.parametrize("drafter", [None, "ngram", "suffix", "mtp", "eagle3"])
def test_tokens_are_those_of_each_alone(
    drafter, captured, engine_for, make_target, make_assistant, greedy_oracle, random_prompt
):
    model = make_target("gemma4-e2b")
    made = {"mtp": make_assistant, "eagle3": random_eagle3}[drafter](model) if drafter in ("mtp", "eagle3") else drafter
    specs = [SpecConfig(3, adaptive=False), SpecConfig(3, 2, 6, adaptive=False)]
    if drafter not in ("mtp", "eagle3"):
        specs.pop()
    for spec in specs if is_deep() else specs[-1:]:
        engine = engine_for(captured, made, spec=spec)
        stream = stream_of(engine, random_prompt(5))
        late = [engine.submit(random_prompt(n, seed=n), params()) for n in (29, 11)]
        divided = 0
        while engine.step():
            divided += parts_run(engine) is not None
        assert divided > 4
        assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 60)
        for handle, length in zip(late, (29, 11), strict=True):
            assert handle.output().token_ids == greedy_oracle(model, random_prompt(length, seed=length), NEW)
        assert_idle(engine)


@deep_cases("gemma2")
@pytest.mark.parametrize("family", [deep(f) if f not in ("gemma4-e2b", "gpt_oss", "gemma2") else f for f in FAMILIES])
def test_every_family_stops_between_layers(family, engine_for, make_target, greedy_oracle, random_prompt):
    model = make_target(family)
    engine = engine_for(model=model, page_size=4)
    stream, late = divided(engine, random_prompt(40), random_prompt(5))
    assert late.output().token_ids == greedy_oracle(model, random_prompt(40), NEW)
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 60)


@deep_cases("eager")
@BOTH
def test_fused_layers_stop_too(captured, engine_for, make_target, greedy_oracle, random_prompt):
    """Captured, three layers are a program, and those for the last token another; each is replayed by itself."""
    model = make_target("gemma4-e2b")
    engine = engine_for(captured, fused=True)
    stream = stream_of(engine, random_prompt(5), 90)
    late = [engine.submit(random_prompt(n, seed=n), params()) for n in (29, 17)]
    until_divided(engine)
    while not all(handle.finished for handle in late):
        engine.step()
    if captured:
        kept = [one for one in engine.steps.prefill.chunks._captured.values() if one]
        assert max(len(one.replays) for one in kept) > 1
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 90)
    for handle, length in zip(late, (29, 17), strict=True):
        assert handle.output().token_ids == greedy_oracle(model, random_prompt(length, seed=length), NEW)
    assert_idle(engine)


@deep_cases("captured")
@BOTH
def test_an_abort_in_the_middle_drops_what_was_read(captured, engine_for, make_target, greedy_oracle, random_prompt):
    """Its slots go to a third request at once, whose K/V no layer of the dropped forward may touch."""
    model = make_target("gemma4-e2b")
    engine = engine_for(captured, full_slots=150, swa_slots=150)
    stream, doomed = divided(engine, random_prompt(50), random_prompt(5))
    engine.step()
    doomed.abort()
    late = engine.submit(random_prompt(40, seed=3), params())
    engine.step()
    assert engine.steps.prefill.reading is None or late.id in [
        r.number for r in engine.steps.prefill.reading.batch.requests
    ]
    assert late.output().token_ids == greedy_oracle(model, random_prompt(40, seed=3), NEW)
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 60)
    assert doomed.output().finish_reason == "abort"
    assert_idle(engine)


def test_an_abort_of_all_lets_go_of_what_was_read_at_once(engine_for, random_prompt):
    """No step follows: states of a paused prompt, of any length, lay on the device until the next request."""
    engine = engine_for()
    stream, late = divided(engine, random_prompt(20), random_prompt(5))
    kept = weakref.ref(engine.steps.prefill.reading.parts.read)
    late.abort()
    stream.abort()
    gc.collect()
    assert kept() is None and not engine.steps.launches.unsettled
    assert_idle(engine)


def test_a_preemption_in_the_middle_reads_again(engine_for, make_target, greedy_oracle, random_prompt):
    model = make_target("gemma4-e2b")
    engine = engine_for(full_slots=110, swa_slots=110, prefix_cache=False)
    stream, late = divided(engine, random_prompt(40), random_prompt(5))
    request = engine.inbox.live[late.id]
    engine.scheduler._make_room()
    while request.row >= 0:  # slack after the windows goes first
        engine.scheduler._make_room()
    engine.step()
    assert request.stats.preemptions == 1 and (
        parts_run(engine) is None or engine.steps.prefill.reading.batch.requests == [request]
    )
    assert late.output().token_ids == greedy_oracle(model, random_prompt(40), NEW)
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 60)
    assert_idle(engine)


@deep_cases("eager")
@BOTH
def test_weights_that_move_in_the_middle_are_read_from_the_start(captured, engine_for, make_target, random_prompt):
    """All of the chunk comes from the new weights, none of it from the old ones."""
    model = make_target("gemma4-e2b", fresh=True)
    engine = engine_for(captured, model=model, prefix_cache=False)
    _, late = divided(engine, random_prompt(20), random_prompt(5))
    before = engine.steps.prefill.reading
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight * 3.0)
    engine.step()
    assert engine.steps.prefill.reading is not before and parts_run(engine) == 1
    assert late.output().token_ids == engine.generate([random_prompt(20)], params())[0].token_ids


def test_an_interrupted_step_begins_again(engine_for, make_target, greedy_oracle, random_prompt, monkeypatch):
    model = make_target("gemma4-e2b")
    engine = engine_for()
    stream, late = divided(engine, random_prompt(20), random_prompt(5))
    launches = engine.steps.launches
    settle = launches.settle

    def fail(*, busy):
        monkeypatch.setattr(launches, "settle", settle)
        raise MemoryError("in the middle of a forward")

    monkeypatch.setattr(launches, "settle", fail)
    with pytest.raises(MemoryError):
        engine.step()
    assert late.output().token_ids == greedy_oracle(model, random_prompt(20), NEW)
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 60)
    assert_idle(engine)


def test_who_comes_in_the_middle_waits_for_its_end(engine_for, random_prompt):
    """And is read then, before the rest of the long one, which it passes."""
    engine = engine_for()
    num_layers = len(engine.target.layout.layers)
    stream = stream_of(engine, random_prompt(5))
    engine.submit(random_prompt(60), params())
    engine.step()
    assert parts_run(engine) == 1
    short = engine.submit(random_prompt(3), params())
    for _ in range(2 * num_layers - 1):
        assert short.num_output == 0
        engine.step()
    assert short.num_output == 1
    stream.abort()


def test_without_streams_the_rest_is_read_at_once(engine_for, random_prompt):
    engine = engine_for()
    stream = stream_of(engine, random_prompt(5))
    late = engine.submit(random_prompt(7), params())
    engine.step()
    assert parts_run(engine) == 1
    stream.abort()
    engine.step()
    assert parts_run(engine) is None and late.num_output == 1


@deep_cases("eager")
@BOTH
def test_scores_of_a_prompt_are_those_of_the_prompt_alone(captured, engine_for, make_target, random_prompt):
    engine = engine_for(captured, model=make_target("llama"), prefix_cache=False)
    asked = params(3, logprobs=2, prompt_logprobs=2)
    [alone] = engine.generate([random_prompt(20)], asked)
    stream = stream_of(engine, random_prompt(4))
    out = engine.submit(random_prompt(20), asked).output()
    assert not stream.finished and out.token_ids == alone.token_ids
    for one, other in zip(out.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    stream.abort()


def test_a_cached_prefix_goes_on_in_parts(engine_for, make_target, greedy_oracle, random_prompt):
    model, engine = make_target("gemma4-e2b"), engine_for()
    engine.generate([random_prompt(24)], params())
    stream = stream_of(engine, random_prompt(5, seed=8))
    prompt = random_prompt(24) + random_prompt(15, seed=4)
    late = engine.submit(prompt, params())
    until_divided(engine)
    assert late.output().token_ids == greedy_oracle(model, prompt, NEW) and late.output().stats.cached_tokens > 8
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5, seed=8), 60)


def test_who_sets_a_chunk_has_it_read_whole_and_tiles_are_not_divided(make_engine, make_target):
    model = make_target("llama")
    assert make_engine(model, None, prefill_chunk=None).scheduler.prompt_gap.division is not None
    assert make_engine(model, None, prefill_chunk=8).scheduler.prompt_gap.division is None
    assert make_engine(model, None, prefill_chunk=None, deterministic=True).scheduler.prompt_gap.division is None


def test_a_decoder_with_another_loop_is_not_divided(make_target):
    """It calls its second layer twice; stand-ins for layers would be told once too often."""
    target = TargetModel(make_target("llama", fresh=True))
    proof = target._probe()

    class Twice(type(target.decoder)):
        def forward(self, *args, **kwargs):
            self.layers[0](torch.zeros(1, 1, target.hidden_size), **kwargs)
            return super().forward(*args, **kwargs)

    assert walker_of(target.decoder, proof) is not None
    target.decoder.__class__ = Twice
    assert walker_of(target.decoder, proof) is None


def test_where_a_forward_is_divided(make_target):
    """Six layers, of which the second and the last see everything; the third stores the last K/V."""
    target = TargetModel(make_target("gemma4-e2b", **TWO_OWNERS), REFERENCE)
    every, last, none = FinalStates.EVERY, FinalStates.LAST, FinalStates.NONE
    assert target.windows == (8, None, 8, 8, 8, None) and target.narrows_at() == 2
    third, half = pytest.approx(1 / 3), pytest.approx(1 / 2)
    assert divide(target, (), every, 2) == ([2, 4, 6], [(third, half, 0), (third, 0, 0), (third, half, 0)])
    assert divide(target, (), none, 2)[0] == [1, 3]
    ends, shares = [1, 2, 3, 6], [(third, 0, 0), (third, 1, 0), (third, 0, 0), (0, 0, 1)]
    assert divide(target, (), last, 1) == (ends, shares)


SHARES = [PartShare(1 / 8, 1 / 3 if number % 2 and number < 7 else 0.0) for number in range(8)]


def gap_of(round_seconds: float) -> PromptGap:
    """A gap with timings of E4B on an H100: a round of 32 takes 4.8 ms, forwards from 2.3 ms on."""
    gap = PromptGap()
    gap.learn_round(round_seconds)
    for tokens in (64, 128, 256, 2048):
        gap.cost.time(PromptLoad(tokens, tokens**2 / 2), 2.3e-3 + 6.2e-6 * tokens)
        gap.cost.time(
            PromptLoad(tokens, tokens * (16384 + tokens / 2)), 2.3e-3 + 6.2e-6 * tokens + 0.5e-9 * tokens * 16384
        )
    gap.division = Division(SHARES, 256, 64)
    return gap


def test_parts_beside_a_round_fit_half_of_it() -> None:
    room = PromptRoom.from_settings(None, None, "cuda")
    for round_seconds in (4.8e-3, 9e-3, 30e-3):
        gap = gap_of(round_seconds)
        for prefix in (0, 4096, 32768):
            tokens = gap.tokens(room, 1, prefix)
            load = PromptLoad(tokens, tokens * (prefix + tokens / 2))
            budget = gap.budget(room, 1, load)
            if budget is None:
                assert gap.cost.seconds(load) <= round_seconds / 2 or tokens > 256
                continue
            assert 64 <= tokens <= 256 and budget < round_seconds / 2
            assert max(gap.part_seconds(load, share) for share in SHARES) <= budget
        assert gap.promised(room, 32768) <= 1.5 * round_seconds


def test_a_queue_of_prompts_is_not_divided() -> None:
    """Sixteen that wait have eight rounds of time, in which thousands of tokens are read as before."""
    gap, room = gap_of(4.8e-3), PromptRoom.from_settings(None, None, "cuda")
    assert gap.tokens(room, 16, 0) > 2048
    assert gap.budget(room, 16, PromptLoad(2048, 2048**2 / 2)) is None
    assert gap.budget(room._replace(fixed=True), 1, PromptLoad(200, 200**2 / 2)) is None
    lone = PromptGap()
    lone.learn_round(4.8e-3)
    assert lone.budget(room, 1, PromptLoad(200, 200**2 / 2)) is None


def test_parts_are_captured_before_the_first_request(engine_for, random_prompt, monkeypatch):
    """In three sizes, with states of last tokens and of none; nobody waits for a capture when a long prompt comes."""
    monkeypatch.delenv(SETTING, raising=False)  # which knows of no rows without slots, so nothing is warmed up
    engine = engine_for(True, fused=True, max_model_len=256)
    kept = engine.steps.prefill.chunks._captured
    divided = {shape: one for shape, one in kept.items() if shape.divided}
    assert {(shape.tokens, shape.states) for shape in divided} == {
        (tokens, states) for tokens in (64, 128, 256) for states in (FinalStates.LAST, FinalStates.NONE)
    }
    assert all(divided.values())
    stream = stream_of(engine, random_prompt(5))
    made = engine.stats().captures.made
    late = engine.submit(random_prompt(20), params(1))
    while not late.finished:
        engine.step()
    assert engine.stats().captures.made == made
    stream.abort()


def test_a_prefix_is_on_the_device_when_forwards_behind_it_are_timed(engine_for, monkeypatch):
    """A replayed forward reads what is there. Once that was no prefix, and attention over one took no time."""
    monkeypatch.delenv(SETTING, raising=False)  # which knows of no rows without slots, so nothing is warmed up
    seen, load_chunks = set(), ChunkProgram.load_chunks

    def watched(program, rows, chunk_len):
        lengths = program._round.cache.table.committed_len
        seen.add((int(lengths.host[rows[0]]), int(lengths._tensor[rows[0]])))
        load_chunks(program, rows, chunk_len)

    monkeypatch.setattr(ChunkProgram, "load_chunks", watched)
    for name in ("time_prompts", "time_rounds"):  # tests do without otherwise
        monkeypatch.setattr(specdec.runtime.warm_up, name, getattr(startup_timing, name))
    engine_for(True, max_model_len=300)
    assert len(seen) > 1 and all(host == device for host, device in seen)
