"""Which prompt a step reads, and how much of it: short prompts pass long ones, and every prompt makes progress."""

import itertools
import random

import pytest

from specdec import EngineConfig, SamplingParams
from specdec.runtime.prompts.prompt_budget import PromptBudget, UnreadPrompt, shares

LONG = 900


def same_level(*lengths: int) -> list[UnreadPrompt]:
    return [UnreadPrompt(0, length) for length in lengths]


def test_a_short_prompt_passes_long_ones_in_half_of_a_step() -> None:
    """Long prompts of others held up everybody's first token: 40 steps of 96 tokens for four of 900."""
    assert shares(same_level(LONG, LONG, LONG, LONG, 60), 96, 512) == [48, 0, 0, 0, 48]
    assert shares(same_level(LONG, LONG, 9, 7), 96, 512) == [80, 0, 9, 7]
    assert shares(same_level(LONG, 60, 60, 50), 96, 512) == [48, 0, 0, 48]  # the shortest of them


def test_prompts_of_about_one_length_stay_in_their_order() -> None:
    assert shares(same_level(12, 9, 9), 10, 8) == [8, 2, 0]
    assert shares(same_level(100, 51, 50), 96, 512) == [48, 0, 48]


def test_what_the_first_cannot_use_is_for_others() -> None:
    """Its chunk is bounded too, so half of a large step is more than it can read."""
    assert shares(same_level(LONG, 200, 200, 900), 2048, 512) == [512, 200, 200, 512]
    assert shares(same_level(20, 900), 96, 512) == [20, 76]


def test_nobody_passes_a_prompt_of_higher_priority() -> None:
    assert shares([UnreadPrompt(-1, LONG), UnreadPrompt(0, 3)], 96, 512) == [96, 0]
    assert shares([UnreadPrompt(-1, 90), UnreadPrompt(0, 300), UnreadPrompt(0, 3)], 96, 512) == [90, 6, 0]


def test_any_prompts_keep_the_bounds_and_the_first_advances() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        lengths = [draw.choice([1, 5, 40, 300]) for _ in range(draw.randint(1, 9))]
        prompts = [UnreadPrompt(draw.randint(0, 1), length) for length in lengths]
        prompts.sort(key=lambda prompt: prompt.level)
        room, chunk = draw.randint(1, 400), draw.randint(1, 200)
        given = shares(prompts, room, chunk)
        assert all(0 <= each <= min(chunk, prompt.remaining) for each, prompt in zip(given, prompts, strict=True))
        assert sum(given) == min(room, sum(min(chunk, prompt.remaining) for prompt in prompts))  # none is left over
        assert given[0] >= min(chunk, prompts[0].remaining, (room + 1) // 2)
    assert shares([], 96, 512) == []


def test_a_step_reads_fewer_prompt_tokens_on_a_cpu_unless_it_is_told() -> None:
    """2,048 tokens take a CPU as long as ten rounds: streams stood still meanwhile."""
    assert EngineConfig().max_prefill_tokens is None
    cpu, gpu = (PromptBudget.from_config(EngineConfig(), device) for device in ("cpu", "cuda"))
    assert [room.while_decoding for room in (cpu, gpu)] == [96, 8192]
    assert [room.idle_tokens(10_000) for room in (cpu, gpu)] == [384, 8192]
    assert [room.idle_tokens(300) for room in (cpu, gpu)] == [300, 300]
    for device, least in (("cpu", 16), ("cuda", 64)):
        assert PromptBudget.from_config(EngineConfig(max_prefill_tokens=7, prefill_chunk=5), device) == PromptBudget(
            7, 7, 5, user_set=True, min_tokens=least
        )
    assert (cpu.chunk, gpu.chunk) == (512, 8192)
    assert PromptBudget.from_config(EngineConfig(), "cuda", recurrent=True).chunk == 2048  # a prefix ends with a chunk


def test_an_engine_has_the_room_of_its_device(make_engine, make_target) -> None:
    engine = make_engine(make_target("llama"), max_batch_size=2)
    assert engine.scheduler.prompt_budget == PromptBudget.from_config(engine.config, "cpu")


@pytest.mark.parametrize("beside", [1, 3])
def test_a_short_prompt_has_its_token_while_long_ones_are_read(beside, make_engine, make_target, random_prompt) -> None:
    """Counted in steps: after the long ones it would wait for twelve times as many."""
    engine = make_engine(make_target("llama"), max_batch_size=6, max_prefill_tokens=16, max_model_len=256)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    stream = engine.submit(random_prompt(3), params)
    engine.step()
    long = [engine.submit(random_prompt(190, seed=i), SamplingParams(max_new_tokens=1)) for i in range(beside)]
    engine.step()
    short = engine.submit(random_prompt(12, seed=9), params)
    steps = next(count for count in itertools.count(1) if engine.step() and short.read() is not None)
    assert steps <= 3
    assert all(each.read() is None for each in long)
    assert stream.finished is False
