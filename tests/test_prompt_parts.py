"""Prompts that are read a few layers per step, next to rounds: the same tokens, also after faults; nothing is left."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import specdec.runtime.warm_up
from specdec import SamplingParams, SpecConfig
from specdec.config import EngineConfig
from specdec.kvcache.sanitize import SETTING
from specdec.models.paused_forward import start_forward_of
from specdec.runtime.rounds.captured_prompts import ChunkProgram

from engine_internals import (
    REFERENCE,
    Division,
    PartShare,
    PromptBudget,
    PromptGap,
    PromptLoad,
    StatesNeeded,
    TargetModel,
    assert_idle,
    capture_on_cpu,
    captured_prompts,
    divide,
)
from marks import deep, deep_cases, examples, usual_cases
from tiny_families import TWO_OWNERS
from tiny_models import FAMILIES

NEW = examples(6, 12)
BOTH = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


def params(new: int = NEW, **changes) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **changes)


class Scene:
    """An engine that decodes a stream: next to it, 8 tokens of prompts are read at a time, a part a step."""

    def __init__(self, engine, continued, random_prompt):
        self.engine, self.continued, self.random_prompt = engine, continued, random_prompt
        self.num_layers = len(engine.target.layout.layers)
        self.asked = []
        self.stream = self.submit(5, 60)
        while not self.stream.num_output:
            engine.step()

    def submit(self, length, new=NEW, prompt=None, **changes):
        """A request whose prompt has this many tokens, or this one."""
        prompt = self.random_prompt(length, seed=length) if prompt is None else prompt
        self.asked.append((self.engine.submit(prompt, params(new, **changes)), prompt, new))
        return self.asked[-1][0]

    def submit_divided(self, length, **changes):
        """A request whose prompt is being read in parts."""
        handle = self.submit(length, **changes)
        for _ in range(20):
            if self.reading is not None:
                return handle
            self.engine.step()
        raise AssertionError("no forward is divided")

    @property
    def reading(self):
        """The forward that is under way; None: there is none."""
        return self.engine.steps.prefill.reading

    @property
    def parts_run(self) -> int | None:
        return None if self.reading is None else self.reading.num_parts_run

    def finish(self) -> None:
        """Requests that were not aborted have the tokens of plain decoding. The stream is aborted after the others."""
        for handle, prompt, new in self.asked[1:]:
            output = handle.output()
            assert output.finish_reason == "abort" or output.token_ids == self.continued(prompt, new)
        self.stream.abort()
        tokens, [_, prompt, new] = self.stream.output().token_ids, self.asked[0]
        assert tokens == self.continued(prompt, new)[: len(tokens)]
        assert_idle(self.engine)


@pytest.fixture
def scene_of(make_target, make_engine, greedy_oracle, random_prompt, monkeypatch):
    """scene_of(captured, drafter, model, **config)"""

    def make(captured=False, drafter=None, model=None, **config) -> Scene:
        capture_on_cpu(monkeypatch, captured)
        model = make_target("gemma4-e2b") if model is None else model
        sizes = {"max_batch_size": 3, "max_model_len": 128, "prefill_chunk": None, **config}
        engine = make_engine(model, drafter, **sizes)
        assert engine.scheduler.prompt_gap.division is not None
        monkeypatch.setattr(PromptGap, "tokens", lambda gap, num_waiting, prefix: 8)
        monkeypatch.setattr(PromptGap, "seconds_allowed", lambda gap, num_waiting, load: 0.0)
        return Scene(engine, lambda prompt, new: greedy_oracle(model, prompt, new), random_prompt)

    return make


def test_a_step_runs_its_round_and_a_part_of_a_forward(scene_of):
    """Five layers, each a part: a chunk of 8 tokens is committed with the fifth. The stream has a token of each."""
    scene = scene_of()
    engine, num_layers = scene.engine, scene.num_layers
    late, had, seen = scene.submit(20), scene.stream.num_output, []
    for _ in range(3 * num_layers):
        engine.step()
        done = [int(engine.table.committed_len.host[r.row]) for r in engine.scheduler.running if r.id == late.id]
        seen.append((scene.parts_run, done[0]))
    chunk = [*range(1, num_layers), None]
    committed = [0] * (num_layers - 1) + [8] * num_layers + [16] * num_layers + [20]
    assert seen == list(zip(chunk * 3, committed, strict=True))
    assert scene.stream.num_output - had == 3 * num_layers and late.num_output == 1
    scene.finish()
    assert late.stats.prefill_seconds > 0


@usual_cases("mtp-captured", "eagle3-eager")
@BOTH
@pytest.mark.parametrize("drafter", [None, "ngram", "suffix", "mtp", "eagle3"])
def test_tokens_are_those_of_each_alone(drafter, captured, scene_of, make_target, make_drafter):
    made = make_drafter(drafter, make_target("gemma4-e2b"))
    tree = (2, 6) if drafter in ("mtp", "eagle3") else ()
    scene, divided = scene_of(captured, made, spec=SpecConfig(3, *tree, adaptive=False)), 0
    late = [scene.submit(29), scene.submit(11)]
    while not all(handle.finished for handle in late):
        scene.engine.step()
        divided += scene.reading is not None
    assert divided > 4
    scene.finish()


@pytest.mark.parametrize("family", [f if f == "gpt_oss" else deep(f) for f in FAMILIES])
def test_every_family_stops_between_layers(family, scene_of, make_target):
    scene = scene_of(model=make_target(family), page_size=4)
    scene.submit_divided(40)
    scene.finish()


@deep_cases("eager")
@BOTH
def test_fused_layers_stop_too(captured, scene_of):
    """Captured, three layers are a program, and those for the last token another; each is replayed by itself."""
    scene = scene_of(captured, fused=True)
    late = [scene.submit(29), scene.submit_divided(17)]
    while not all(handle.finished for handle in late):
        scene.engine.step()
    if captured:
        assert max(len(one.replays) for one in captured_prompts(scene.engine).values()) > 1
    scene.finish()


@deep_cases("captured")
@BOTH
def test_an_abort_in_the_middle_drops_what_was_read(captured, scene_of):
    """Its slots go to a third request at once, whose K/V no layer of the dropped forward may touch."""
    scene = scene_of(captured, full_slots=150, swa_slots=150)
    doomed = scene.submit_divided(50)
    scene.engine.step()
    doomed.abort()
    late = scene.submit(40)
    scene.engine.step()
    assert scene.reading is None or late.id in [request.id for request in scene.reading.batch.requests]
    scene.finish()
    assert doomed.finish_reason == "abort"


def test_an_abort_of_all_releases_the_forward_in_progress_at_once(scene_of):
    """No step follows: states of a paused prompt, of any length, lay on the device until the next request."""
    scene = scene_of()
    late = scene.submit_divided(20)
    kept = weakref.ref(scene.reading.parts.read)
    late.abort()
    scene.stream.abort()
    gc.collect()
    assert kept() is None and not scene.engine.steps.launches.unsettled
    assert_idle(scene.engine)


def test_a_preemption_in_the_middle_reads_again(scene_of):
    scene = scene_of(full_slots=110, swa_slots=110, prefix_cache=False)
    request = scene.engine.inbox.live[scene.submit_divided(40).id]
    scene.engine.scheduler._make_room()
    while request.row >= 0:  # slack after the windows goes first
        scene.engine.scheduler._make_room()
    scene.engine.step()
    assert request.stats.preemptions == 1
    assert scene.reading is None or scene.reading.batch.requests == [request]
    scene.finish()


@deep_cases("eager")
@BOTH
def test_weights_that_move_in_the_middle_are_read_from_the_start(captured, scene_of, make_target):
    """All of the chunk comes from the new weights, none of it from the old ones."""
    model = make_target("gemma4-e2b", fresh=True)
    scene = scene_of(captured, model=model, prefix_cache=False)
    late = scene.submit_divided(20)
    before = scene.reading
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight * 3.0)
    scene.engine.step()
    assert scene.reading is not before and scene.parts_run == 1
    assert late.output().token_ids == scene.engine.generate([scene.asked[-1][1]], params())[0].token_ids


def test_an_interrupted_step_begins_again(scene_of, monkeypatch):
    scene = scene_of()
    scene.submit_divided(20)
    launches = scene.engine.steps.launches
    settle = launches.settle

    def fail(*, busy):
        monkeypatch.setattr(launches, "settle", settle)
        raise MemoryError("in the middle of a forward")

    monkeypatch.setattr(launches, "settle", fail)
    with pytest.raises(MemoryError):
        scene.engine.step()
    scene.finish()


def test_a_request_that_arrives_midway_waits_for_the_end(scene_of):
    """And is read then, before the rest of the long one, which it passes."""
    scene = scene_of()
    scene.submit(60)
    scene.engine.step()
    assert scene.parts_run == 1
    short = scene.submit(3)
    for _ in range(2 * scene.num_layers - 1):
        assert short.num_output == 0
        scene.engine.step()
    assert short.num_output == 1


def test_without_streams_the_rest_is_read_at_once(scene_of):
    scene = scene_of()
    late = scene.submit(7)
    scene.engine.step()
    assert scene.parts_run == 1
    scene.stream.abort()
    scene.engine.step()
    assert scene.reading is None and late.num_output == 1


@deep_cases("eager")
@BOTH
def test_scores_of_a_prompt_are_those_of_the_prompt_alone(captured, scene_of, make_target):
    scene = scene_of(captured, model=make_target("llama"), prefix_cache=False)
    asked = {"logprobs": 2, "prompt_logprobs": 2}
    out = scene.submit(20, 3, **asked).output()
    assert not scene.stream.finished
    [alone] = scene.engine.generate([out.prompt_token_ids], params(3, **asked))
    for one, other in zip(out.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    scene.finish()


def test_a_cached_prefix_goes_on_in_parts(scene_of, random_prompt):
    scene = scene_of()
    scene.submit(24).output()
    late = scene.submit_divided(39, prompt=random_prompt(24, seed=24) + random_prompt(15, seed=4))
    scene.finish()
    assert late.stats.cached_tokens > 8


def test_a_configured_chunk_is_read_whole_and_tiles_are_not_divided(make_engine, make_target):
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

    assert start_forward_of(target.decoder, proof) is not None
    target.decoder.__class__ = Twice
    assert start_forward_of(target.decoder, proof) is None


def test_where_a_forward_is_divided(make_target, monkeypatch):
    """Six layers, of which the second and the last see everything; the third stores the last K/V."""
    target = TargetModel(make_target("gemma4-e2b", **TWO_OWNERS), REFERENCE)
    every, last, none = StatesNeeded.EVERY, StatesNeeded.LAST, StatesNeeded.NONE
    assert target.windows == (8, None, 8, 8, 8, None) and target.narrows_at() == 2
    third, half = pytest.approx(1 / 3), pytest.approx(1 / 2)
    state = SimpleNamespace(target=target, aux_layers=())
    monkeypatch.setattr("specdec.runtime.rounds.prompt_chunks.LAYERS_A_PART", 2)
    shares = [(third, half, 0), (third, 0, 0), (third, half, 0)]
    assert divide(state, every, captured=True) == ([2, 4, 6], shares)
    assert divide(state, none, captured=True)[0] == [1, 3]
    ends, shares = [1, 2, 3, 6], [(third, 0, 0), (third, 1, 0), (third, 0, 0), (0, 0, 1)]
    assert divide(state, last, captured=False) == (ends, shares)
    full = SimpleNamespace(layout=target.layout, windows=(None,) * 6, narrows_at=target.narrows_at)  # even the third
    shares = [(third, half, 0), (third, half, 0), (third, 0, 0), (0, 0, 1)]
    assert divide(SimpleNamespace(target=full, aux_layers=()), last, captured=False) == (ends, shares)


SHARES = [PartShare(1 / 8, 1 / 3 if number % 2 and number < 7 else 0.0) for number in range(8)]


def gap_of(round_seconds: float) -> PromptGap:
    """A gap with timings of E4B on an H100: a round of 32 takes 4.8 ms, forwards from 2.3 ms on."""
    gap = PromptGap(PromptBudget.from_config(EngineConfig(), "cuda"), Division(SHARES, 256, 64))
    gap.learn_round(round_seconds)
    for tokens in (64, 128, 256, 2048):
        gap.cost.time(PromptLoad(tokens, tokens**2 / 2), 2.3e-3 + 6.2e-6 * tokens)
        gap.cost.time(
            PromptLoad(tokens, tokens * (16384 + tokens / 2)), 2.3e-3 + 6.2e-6 * tokens + 0.5e-9 * tokens * 16384
        )
    return gap


def test_parts_next_to_a_round_take_at_most_half_of_it() -> None:
    for round_seconds in (4.8e-3, 9e-3, 30e-3):
        gap = gap_of(round_seconds)
        for prefix in (0, 4096, 32768):
            tokens = gap.tokens(1, prefix)
            load = PromptLoad(tokens, tokens * (prefix + tokens / 2))
            budget = gap.seconds_allowed(1, load)
            if budget is None:
                assert gap.cost.seconds(load) <= round_seconds / 2 or tokens > 256
                continue
            assert 64 <= tokens <= 256 and budget < round_seconds / 2
            assert max(gap.part_seconds(load, share) for share in SHARES) <= budget
        assert gap.longest_gap(32768) <= 1.5 * round_seconds


def test_a_queue_of_prompts_is_not_divided() -> None:
    """Sixteen that wait have eight rounds of time, in which thousands of tokens are read as before."""
    gap = gap_of(4.8e-3)
    assert gap.tokens(16, 0) > 2048
    assert gap.seconds_allowed(16, PromptLoad(2048, 2048**2 / 2)) is None
    lone = PromptGap(gap.budget)
    lone.learn_round(4.8e-3)
    assert lone.seconds_allowed(1, PromptLoad(200, 200**2 / 2)) is None
    gap.budget = gap.budget._replace(user_set=True)
    assert gap.seconds_allowed(1, PromptLoad(200, 200**2 / 2)) is None


def test_parts_are_captured_before_the_first_request(scene_of, monkeypatch):
    """In three sizes, with states of last tokens and of none; no long prompt waits for a capture."""
    monkeypatch.delenv(SETTING, raising=False)  # which knows of no rows without slots, so nothing is warmed up
    scene = scene_of(True, fused=True, max_model_len=256)
    divided = [shape for shape in captured_prompts(scene.engine) if shape.divided]
    assert {(shape.tokens, shape.needed) for shape in divided} == {
        (tokens, states) for tokens in (64, 128, 256) for states in (StatesNeeded.LAST, StatesNeeded.NONE)
    }
    made = scene.engine.stats().captures.made
    late = scene.submit(20, 1)
    while not late.finished:
        scene.engine.step()
    assert scene.engine.stats().captures.made == made


def test_a_prefix_is_on_the_device_when_forwards_after_it_are_timed(make_engine, make_target, measured, monkeypatch):
    """A replayed forward reads what is there. Once that was no prefix, and attention over one took no time."""
    monkeypatch.delenv(SETTING, raising=False)  # which knows of no rows without slots, so nothing is warmed up
    seen, load_chunks = set(), ChunkProgram.load_chunks

    def watched(program, rows, chunk_len):
        lengths = program._state.cache.table.committed_len
        seen.add((int(lengths.host[rows[0]]), int(lengths._tensor[rows[0]])))
        load_chunks(program, rows, chunk_len)

    monkeypatch.setattr(ChunkProgram, "load_chunks", watched)
    for name, function in measured.items():
        monkeypatch.setattr(specdec.runtime.warm_up, name, function)
    capture_on_cpu(monkeypatch)
    make_engine(make_target("gemma4-e2b"), max_batch_size=1, max_model_len=300, prefill_chunk=None)
    assert len(seen) > 1 and all(host == device for host, device in seen)
