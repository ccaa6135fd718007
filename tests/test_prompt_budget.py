"""How much of which prompts a step reads, and how long streams wait for it: by simulated clocks, what is promised
holds, and loads keep their speed."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from unittest.mock import Mock

import numpy as np
import pytest

from specdec import EngineConfig, SamplingParams
from specdec.runtime.prompts.prompt_budget import (
    GAP_SHARE,
    MIN_CAP,
    PROMISED_GAP,
    Division,
    PromptBudget,
    PromptCost,
    PromptGap,
    PromptLoad,
    UnreadPrompt,
    share_tokens,
)
from specdec.runtime.rounds.prompt_sizes import PartShare, captured_size

from marks import examples

GPU = PromptBudget.from_config(EngineConfig(), "cuda")
CPU = PromptBudget.from_config(EngineConfig(), "cpu")


def load_of(tokens: int, prefix: int = 0) -> PromptLoad:
    return PromptLoad.from_runs(np.array([prefix]), np.array([tokens]))


def gpu_seconds(load: PromptLoad) -> float:
    """Seconds on an H200 for four billion parameters: weights are read as long as 128 tokens are computed."""
    return 2e-3 + 10.5e-6 * max(0, load.tokens - 128) + 0.24e-9 * load.pairs


def cpu_seconds(load: PromptLoad) -> float:
    return 4e-3 + 1e-3 * load.tokens + 0.2e-6 * load.pairs


def gpu_round(batch: int) -> float:
    return float(np.interp(batch, [1, 8, 32, 64, 128, 256], [3.3e-3, 3.6e-3, 4.1e-3, 5.2e-3, 7.0e-3, 10.4e-3]))


def cpu_round(batch: int) -> float:
    return 5e-3 + 1e-3 * batch


def timed(longest_round: float, room: PromptBudget) -> PromptGap:
    """A gap as an engine on a GPU has it when it is made."""
    gap = PromptGap(room)
    gap.longest_round = longest_round
    gap.learn_round(longest_round)
    loads = [load_of(tokens) for tokens in (16, 24, 32, 48, 64, 96, 128, 192, 256, 2048, 4096, 8192)]
    for load in [*loads, load_of(64, 16384), load_of(256, 16384)]:
        gap.cost.time(load, gpu_seconds(load))
    gap.cap_budget()
    return gap


class StoppedClock(PromptGap):
    """A gap whose rounds take as long as is said."""

    def learn_round(self, seconds: float) -> None:
        pass


@dataclass
class Simulation:
    """An engine of whose steps only the time is computed. Requests are (arrival, prompt tokens, new tokens)."""

    gap: PromptGap
    rows: int
    on_cpu: bool = False
    now: float = 0.0
    gaps: list[float] = field(default_factory=list)  # of steps in which others decode
    first: dict[int, float] = field(default_factory=dict)  # seconds to the first token, by prompt tokens
    promised: float = 0.0  # at most, while prompts were read next to streams

    def run(self, requests: list[tuple[float, int, int]]) -> float:
        waiting, reading, decoding = deque(sorted(requests)), [], []
        while waiting or reading or decoding:
            if not reading and not decoding:
                self.now = max(self.now, waiting[0][0])
            begin, streams = self.now, len(decoding)
            if streams:
                spent = cpu_round(streams) if self.on_cpu else gpu_round(streams)
                self.now += spent
                self.gap.learn_round(spent)
            decoding = [left - 1 for left in decoding if left > 1]
            while waiting and waiting[0][0] <= self.now and len(reading) + len(decoding) < self.rows:
                arrival, length, new = waiting.popleft()
                reading.append([arrival, length, new, 0])
            if reading:
                self.read(reading, decoding, sum(arrival <= self.now for arrival, _, _ in waiting))
            if streams:
                self.gaps.append(self.now - begin)
            if streams and reading:
                self.promised = max(self.promised, self.gap.longest_gap(max(each[1] for each in reading)))
        return self.now

    def read(self, reading: list, decoding: list, waiting: int) -> None:
        done = np.array([request[3] for request in reading])
        remaining = np.array([request[1] for request in reading]) - done
        tokens = self.gap.budget.idle_tokens(int(remaining.sum()))
        if decoding:
            tokens = self.gap.tokens(len(reading) + waiting, int(done.max()))
        prompts = [UnreadPrompt(0, int(each)) for each in remaining]
        given = np.array(share_tokens(prompts, tokens, self.gap.budget.chunk))
        assert 0 < given.sum() <= tokens
        load = PromptLoad.from_runs(done, given)
        spent = cpu_seconds(load) if self.on_cpu else gpu_seconds(load)
        self.now += spent
        self.gap.cost.learn(load, spent)
        for request, share in zip(reading, given.tolist(), strict=True):
            request[3] += share
            if request[3] == request[1]:
                self.first[request[1]] = self.now - request[0]
                decoding += [request[2] - 1] * (request[2] > 1)
        reading[:] = [request for request in reading if request[3] < request[1]]


def test_times_are_learned_from_forwards_of_any_length() -> None:
    draw = random.Random(0)
    for _ in range(examples(5, 100)):
        truth = [10 ** draw.uniform(low, low + 2) for low in (-4, -6, -10)]
        truth[2] *= draw.choice([0, 1])
        learned, timed = PromptCost(), PromptCost()
        for _ in range(150):
            load = load_of(draw.randint(1, 4096), draw.choice([0, draw.randint(1, 30000)]))
            spent = truth[0] + truth[1] * load.tokens + truth[2] * load.pairs
            learned.learn(load, spent)
            timed.time(load, spent)
        for load in (load_of(7), load_of(3000), load_of(500, 20000)):
            spent = truth[0] + truth[1] * load.tokens + truth[2] * load.pairs
            assert learned.seconds(load) == pytest.approx(spent, rel=0.05)
            assert timed.seconds(load) == pytest.approx(spent, rel=0.01)


def test_no_part_of_a_forward_is_ever_thought_to_save_time() -> None:
    """Two forwards of noise would otherwise say that more tokens take less, and the whole cap be read at once."""
    cost = PromptCost()
    cost.learn(load_of(64), 0.0)  # a clock that stood still
    assert not cost.is_known
    for tokens, spent in ((16, 0.02), (96, 0.01), (32, 0.03)):
        cost.learn(load_of(tokens), spent)
        sizes = [cost.seconds(load_of(count)) for count in (1, 20, 400, 8000)]
        assert sizes == sorted(sizes) and sizes[0] >= 0


def test_one_forward_that_was_interrupted_changes_little() -> None:
    cost = PromptCost()
    for tokens in [16, 96, 48] * 10:
        cost.learn(load_of(tokens), 0.01 + 0.001 * tokens)
    cost.learn(load_of(64), 30.0)
    assert cost.seconds(load_of(64)) < 1.2 * 0.074
    for _ in range(200):
        cost.learn(load_of(64), 0.74)  # it has really become slower
    assert cost.seconds(load_of(64)) > 0.5


def test_a_time_of_a_prompt_after_a_prefix_is_none_of_a_whole_prompt() -> None:
    cost = PromptCost()
    for load in (load_of(64), load_of(64, 16384), load_of(8)):
        cost.time(load, gpu_seconds(load))
    assert cost.seconds(load_of(64)) == gpu_seconds(load_of(64))
    assert cost.seconds(PromptLoad(64, 0.0)) == gpu_seconds(load_of(64))  # 64 prompts of a token take no less


def test_loads_that_are_all_alike_leave_the_rest_as_it_was() -> None:
    """A long prompt is read in hundreds of equal steps: they do not say that more tokens take no longer."""
    cost = PromptCost()
    for tokens in [16, 96, 48] * 10:
        cost.learn(load_of(tokens), 0.01 + 0.001 * tokens)
    for _ in range(1000):
        cost.learn(load_of(16), 0.026)
    assert cost.seconds(load_of(96)) == pytest.approx(0.106, rel=0.05)


def test_prompts_take_half_a_round_for_each_request_that_waits() -> None:
    """What any device reads: as many tokens as fit, none past the promised gap, and enough to get on."""
    draw = random.Random(1)
    for _ in range(examples(100, 1000)):
        gap = PromptGap(room := draw.choice([GPU, CPU]))
        forward, token, pair = 10 ** draw.uniform(-4, -2), 10 ** draw.uniform(-6, -3), 10 ** draw.uniform(-11, -8)
        loads = [load_of(100), load_of(2000), load_of(500, 10_000), load_of(1)]
        for load in loads:
            gap.cost.time(load, forward + token * load.tokens + pair * load.pairs)
        gap.learn_round(10 ** draw.uniform(-3, -1))
        waiting, prefix = draw.randint(1, 100), draw.choice([0, 100, 30_000])
        tokens = gap.tokens(waiting, prefix)
        assert room.min_tokens <= tokens <= room.while_decoding
        budget = min(GAP_SHARE * waiting * gap.round, PROMISED_GAP - gap.round)
        one = min(tokens, room.chunk)  # the others are of other requests, and see fewer tokens
        spent = gap.cost.seconds(PromptLoad(tokens, tokens * (prefix + one / 2)))
        assert tokens == room.min_tokens or spent <= budget * 1.001
        more = next(size for size in itertools.count(tokens + 1) if captured_size(size) == size)
        assert tokens == room.while_decoding or gap.cost.seconds(PromptLoad(more, more * (prefix + more / 2))) > budget


def test_streams_wait_for_a_long_prompt_half_a_round_at_most() -> None:
    """32 streams stood still for 156 ms, 35 rounds, while a prompt of 32,768 tokens was read in chunks of 2,048."""
    engine = Simulation(timed(gpu_round(32), GPU), 33)
    engine.run([(0.0, 512, 3000)] * 32 + [(1.0, 32768, 1)])
    late = engine.gaps[200:]
    assert max(late) <= 1.5 * gpu_round(32) + gpu_seconds(load_of(64, 32768)) - gpu_seconds(load_of(64))
    assert max(late) <= 1.001 * engine.promised < 1.1 * max(late)
    assert engine.first[32768] < 4.0  # which is 5,000 rounds of nothing else
    alone = Simulation(timed(gpu_round(32), GPU), 33)
    alone.run([(0.0, 32768, 1)])
    assert alone.first[32768] < 0.6  # in the largest chunks


def test_on_a_cpu_the_same_is_learned_from_nothing() -> None:
    gap = PromptGap(CPU)
    assert gap.longest_gap(4096) == 0.0
    engine = Simulation(gap, 33, on_cpu=True)
    engine.run([(0.0, 64, 3000)] * 32 + [(10.0, 4096, 1)])
    late = engine.gaps[300:]
    least = cpu_seconds(load_of(16, 4096))
    assert max(late) <= max(1.5 * cpu_round(32), cpu_round(32) + least) * 1.02
    assert max(late) <= 1.02 * engine.promised < 1.1 * max(late)
    assert engine.first[4096] < 20.0


@pytest.mark.parametrize("rows", [128, 256])
def test_a_load_of_many_prompts_keeps_its_speed(rows: int) -> None:
    """256 requests of 512 + 128 tokens: reading them a little at a time would halve it."""
    seconds = {}
    for room in (GPU, GPU._replace(user_set=True)):  # by the gap, and always as many as the cap
        engine = Simulation(timed(gpu_round(rows), room), rows)
        seconds[room.user_set] = engine.run([(0.0, 512, 128)] * 256)
        assert max(engine.gaps) <= PROMISED_GAP
    assert seconds[False] < 1.03 * seconds[True]


def test_prompts_that_arrive_now_and_then_do_not_pile_up() -> None:
    """At 20 requests a second, more than half of what the device can do, all have a token soon."""
    draw = random.Random(2)
    arrivals, now = [], 0.0
    for number in range(200):
        now += draw.expovariate(20.0)
        arrivals.append((now, 400 + number, 128))
    engine = Simulation(timed(gpu_round(256), GPU), 256)
    engine.run(arrivals)
    assert max(engine.first.values()) < 0.2
    assert np.mean(engine.gaps) < 2.0 * gpu_round(32)


def test_the_cap_of_a_step_is_read_within_the_promised_gap() -> None:
    """10 ms a forward and 40 us a token: 5,500 tokens and a round of 20 ms are a quarter of a second."""

    def capped(room: PromptBudget, token: float = 4e-5) -> PromptBudget:
        gap = PromptGap(room)
        gap.longest_round = 0.02
        for tokens in (512, 2048, 4096):
            gap.cost.time(load_of(tokens), 0.01 + token * tokens)
        gap.cap_budget()
        return gap.budget

    room = capped(GPU)
    assert (room.while_decoding, room.while_idle, room.chunk) == (5120, 5120, 8192)  # a size that is captured
    assert capped(GPU, 1.1e-4).while_decoding == 1792  # 2,000 next to the longest round, 2,181 without it
    assert capped(GPU, 1e-6).while_decoding == 8192  # a quick model
    assert capped(GPU, 1.0).while_decoding == MIN_CAP  # it must get on
    configured = PromptBudget.from_config(EngineConfig(max_prefill_tokens=3000), "cuda")
    assert capped(configured).while_decoding == 3000
    assert capped(CPU).while_decoding == 96


def test_the_longest_gap_is_the_longest_round_and_a_prompt_to_its_end() -> None:
    gap = timed(0.01, GPU)
    gap.learn_round(0.0)
    gap.ending = 0.003
    assert gap.longest_gap(64) == pytest.approx(0.01 + gap.cost.seconds(load_of(64, 64)) + 0.003)


def test_the_parts_of_a_forward_together_take_few_steps() -> None:
    gap = PromptGap(GPU, Division([PartShare(1 / 20, 1 / 20)] * 20, 256, 16))
    for tokens in (1, 16, 256):
        gap.cost.time(load_of(tokens), 1e-4 * tokens)
    gap.learn_round(6.4e-3)  # a step may take 2.56 ms for a part
    assert gap.tokens(1, 0) == 128  # 256 take ten steps, in parts of half a step


def test_a_configured_number_of_tokens_is_read_however_long_it_takes() -> None:
    gap = timed(0.004, PromptBudget.from_config(EngineConfig(max_prefill_tokens=3000), "cuda"))
    assert gap.tokens(1, 30_000) == 3000
    said = gap.longest_gap(32768)
    assert said > 0.004 + gpu_seconds(load_of(3000))
    gap.ending = 0.001
    assert gap.longest_gap(32768) == pytest.approx(said + 0.001)


def test_an_engine_reads_prompts_by_what_it_has_measured(make_engine, make_target, random_prompt) -> None:
    """The clock is set by hand: prompts that take long are read a little at a time, unless many wait."""
    engine = make_engine(make_target("llama"), max_batch_size=7, prefill_chunk=None, prefix_cache=False)
    assert engine.scheduler.prompt_gap.budget == PromptBudget.from_config(engine.config, "cpu")
    assert engine.stats().prompt_gap_ms == 0.0
    engine.generate([random_prompt(40)], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert engine.stats().prompt_gap_ms > 0.0  # learned
    gap = engine.scheduler.prompt_gap = StoppedClock(engine.scheduler.prompt_gap.budget)
    gap.round = 0.1
    for load in (load_of(16), load_of(48), load_of(96), load_of(16, 200)):
        gap.cost.time(load, 0.001 * load.tokens)

    def step(expected: int) -> None:
        before = sum(int(engine.table.committed_len.host[request.row]) for request in engine.scheduler.running)
        decoding = sum(request.num_output > 0 for request in engine.scheduler.running)
        engine.step()
        after = sum(int(engine.table.committed_len.host[request.row]) for request in engine.scheduler.running)
        assert after - before - decoding == expected

    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    engine.submit(random_prompt(5), params)
    step(5)  # no request decodes
    engine.submit(random_prompt(150, seed=1), params)
    step(32)  # 50 ms, and powers of two
    late = [engine.submit(random_prompt(150, seed=seed), params) for seed in (2, 3)]
    step(96)  # 150 ms, and the cap
    for each in late:
        each.abort()
    step(22)  # all that there is


def test_a_fit_changes_nothing_of_the_process(monkeypatch):
    """numpy's solver sets how errors of numbers are taken while it runs; an interrupt in it left that so."""
    for module, name in ((np, "errstate"), (np.linalg, "solve")):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("numpy's error handling is changed")))
    cost = PromptCost()
    for tokens in (16, 64, 256):
        cost.time(PromptLoad(tokens, tokens**2 / 2), 0.002 + 1e-5 * tokens)
    assert cost.seconds(PromptLoad(128, 128**2 / 2)) == pytest.approx(0.00328, rel=0.01)


# shares: short prompts pass long ones, and every prompt makes progress


LONG = 900


def same_level(*lengths: int) -> list[UnreadPrompt]:
    return [UnreadPrompt(0, length) for length in lengths]


def test_a_short_prompt_passes_long_ones_in_half_of_a_step() -> None:
    """Four prompts of 900 tokens delayed every other request's first token by 40 steps of 96 tokens."""
    assert share_tokens(same_level(LONG, LONG, LONG, LONG, 60), 96, 512) == [48, 0, 0, 0, 48]
    assert share_tokens(same_level(LONG, LONG, 9, 7), 96, 512) == [80, 0, 9, 7]
    assert share_tokens(same_level(LONG, 60, 60, 50), 96, 512) == [48, 0, 0, 48]  # the shortest of them


def test_prompts_of_about_one_length_stay_in_their_order() -> None:
    assert share_tokens(same_level(12, 9, 9), 10, 8) == [8, 2, 0]
    assert share_tokens(same_level(100, 51, 50), 96, 512) == [48, 0, 48]


def test_tokens_that_the_first_prompt_cannot_use_go_to_others() -> None:
    """Its chunk is bounded too, so half of a large step is more than it can read."""
    assert share_tokens(same_level(LONG, 200, 200, 900), 2048, 512) == [512, 200, 200, 512]
    assert share_tokens(same_level(20, 900), 96, 512) == [20, 76]


def test_no_prompt_passes_one_of_higher_priority() -> None:
    assert share_tokens([UnreadPrompt(-1, LONG), UnreadPrompt(0, 3)], 96, 512) == [96, 0]
    assert share_tokens([UnreadPrompt(-1, 90), UnreadPrompt(0, 300), UnreadPrompt(0, 3)], 96, 512) == [90, 6, 0]


def test_any_prompts_keep_the_bounds_and_the_first_advances() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        lengths = [draw.choice([1, 5, 40, 300]) for _ in range(draw.randint(1, 9))]
        prompts = [UnreadPrompt(draw.randint(0, 1), length) for length in lengths]
        prompts.sort(key=lambda prompt: prompt.level)
        room, chunk = draw.randint(1, 400), draw.randint(1, 200)
        given = share_tokens(prompts, room, chunk)
        assert all(0 <= each <= min(chunk, prompt.remaining) for each, prompt in zip(given, prompts, strict=True))
        assert sum(given) == min(room, sum(min(chunk, prompt.remaining) for prompt in prompts))  # none is left over
        assert given[0] >= min(chunk, prompts[0].remaining, (room + 1) // 2)
    assert share_tokens([], 96, 512) == []


def test_a_step_reads_fewer_prompt_tokens_on_a_cpu_unless_it_is_told() -> None:
    """2,048 tokens take a CPU as long as ten rounds: streams stood still meanwhile."""
    assert EngineConfig().max_prefill_tokens is None
    cpu, gpu = (PromptBudget.from_config(EngineConfig(), device) for device in ("cpu", "cuda"))
    assert [room.while_decoding for room in (cpu, gpu)] == [96, 8192]
    assert [room.idle_tokens(10_000) for room in (cpu, gpu)] == [384, 8192]
    assert [room.idle_tokens(300) for room in (cpu, gpu)] == [300, 300]
    for device, least in (("cpu", 16), ("cuda", 64)):
        told = PromptBudget.from_config(EngineConfig(max_prefill_tokens=7, prefill_chunk=5), device)
        assert told == PromptBudget(7, 7, 5, user_set=True, min_tokens=least)
    assert (cpu.chunk, gpu.chunk) == (512, 8192)
    assert PromptBudget.from_config(EngineConfig(), "cuda", recurrent=True).chunk == 2048  # a prefix ends with a chunk
