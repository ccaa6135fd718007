"""Prompts that a round's forward reads along: one forward a step, the same tokens, and what is learned of its time."""

import pytest

from specdec import SamplingParams
from specdec.models.joined_forward import can_join
from specdec.runtime.prompt_gap import PromptCost, PromptLoad
from specdec.runtime.prompt_shares import PromptRoom
from specdec.runtime.rounds.carried_prompts import MAX_CARRYING

from marks import deep, examples
from tiny_models import random_eagle3

NEW = examples(6, 12)


def params(new: int, **changes) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **changes)


def rows_of_forwards(engine, monkeypatch) -> list[int]:
    """How many rows each forward of the target has, from now on."""
    found, run = [], engine.target.run

    def watched(tokens, *args):
        found.append(tokens.numel())
        return run(tokens, *args)

    monkeypatch.setattr(engine.target, "run", watched)
    return found


def test_a_step_is_one_forward_while_requests_decode(
    make_engine, make_target, greedy_oracle, random_prompt, monkeypatch
):
    """Two streams, and a prompt of 20 tokens that is read 8 at a time. Its first token comes with the last of them."""
    model = make_target("gemma4-e2b")
    engine = make_engine(model, None, max_batch_size=4, max_prefill_tokens=8, prefix_cache=False)
    streams = [engine.submit(random_prompt(n), params(20)) for n in (5, 7)]
    engine.step()
    engine.step()  # 7 tokens of prompt are left beside the stream that decodes, or none
    rows = rows_of_forwards(engine, monkeypatch)
    late = engine.submit(random_prompt(20), params(NEW))
    for _ in range(4):
        engine.step()
    assert rows == [2 + 8, 2 + 8, 2 + 4, 3]
    assert len(late.read().token_ids) == 2
    for handle, length, new in (*zip(streams, (5, 7), (20, 20), strict=True), (late, 20, NEW)):
        assert handle.output().token_ids == greedy_oracle(model, random_prompt(length), new)
    engine.table.check()


def test_prompts_are_read_while_rounds_are_held(make_engine, make_target, random_prompt):
    engine = make_engine(make_target("gemma4-e2b"), None, max_batch_size=2, max_prefill_tokens=8)
    with engine.prompts_only():
        handles = [engine.submit(random_prompt(n), params(NEW)) for n in (5, 20)]
        for _ in range(6):
            engine.step()
        assert [handle.num_output for handle in handles] == [1, 1]
    assert [len(handle.output().token_ids) for handle in handles] == [NEW, NEW]


@pytest.mark.parametrize("page_size", [1, deep(16)])
@pytest.mark.parametrize("drafter", [deep(None), deep("ngram"), deep("mtp"), "eagle3"])
def test_drafters_read_what_a_round_carries(
    drafter, page_size, make_engine, make_target, make_assistant, greedy_oracle, random_prompt, monkeypatch
):
    model = make_target("gemma4-e2b")
    made = {"mtp": make_assistant, "eagle3": random_eagle3}[drafter](model) if drafter in ("mtp", "eagle3") else drafter
    engine = make_engine(model, made, max_batch_size=3, max_prefill_tokens=6, page_size=page_size)
    stream = engine.submit(random_prompt(5), params(40))
    engine.step()
    rows = rows_of_forwards(engine, monkeypatch)
    late = [engine.submit(random_prompt(n, seed=n), params(NEW)) for n in (15, 9)]
    for _ in range(3):
        engine.step()
    assert len(rows) == 3 and min(rows) > 6
    for handle, prompt, new in (
        (stream, random_prompt(5), 40),
        *((h, random_prompt(n, seed=n), NEW) for h, n in zip(late, (15, 9), strict=True)),
    ):
        assert handle.output().token_ids == greedy_oracle(model, prompt, new)
    engine.table.check()


def test_what_a_prompt_is_asked_for_is_there(make_engine, make_target, random_prompt):
    """Log-probabilities of a prompt that a round carried, and of its first token, are those of the prompt alone."""
    engine = make_engine(make_target("llama"), None, max_batch_size=2, max_prefill_tokens=7, prefix_cache=False)
    asked = params(3, logprobs=2, prompt_logprobs=2)
    [alone] = engine.generate([random_prompt(18)], asked)
    stream = engine.submit(random_prompt(4), params(30))
    engine.step()
    out = engine.submit(random_prompt(18), asked).output()
    assert not stream.finished and out.token_ids == alone.token_ids
    for one, other in zip(out.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    stream.abort()


def test_a_round_runs_by_itself_now_and_then(make_engine, make_target, random_prompt, monkeypatch):
    """How long one takes is known of those alone."""
    engine = make_engine(make_target("llama"), None, max_batch_size=2, max_prefill_tokens=1, prefix_cache=False)
    stream = engine.submit([5], params(60))
    engine.step()
    rows = rows_of_forwards(engine, monkeypatch)
    late = engine.submit(random_prompt(40), params(1))
    for _ in range(2 * MAX_CARRYING + 2):
        engine.step()
    assert rows == 2 * [*[2] * MAX_CARRYING, 1]
    stream.abort()
    late.abort()


def test_tiles_of_deterministic_models_carry_nothing(make_engine, make_target):
    assert can_join(make_engine(make_target("llama"), None).target)
    assert not can_join(make_engine(make_target("llama"), None, deterministic=True).target)
    assert not can_join(make_engine(make_target("llama"), None, fused=True).target)


def test_what_a_round_took_longer_is_what_its_prompts_take() -> None:
    cost = PromptCost()
    for number in range(40):
        load = PromptLoad(16, 16.0 * 100 * number)
        cost.learn(load, 0.05 + 0.001 * load.tokens + 1e-7 * load.pairs, 0.05)
    assert cost.seconds(PromptLoad(16, 16 * 2000)) == pytest.approx(0.016 + 0.0032, rel=0.05)
    cost = PromptCost()
    for _ in range(40):
        cost.learn(PromptLoad(16, 128.0), 0.049, 0.05)  # no longer than others, by chance
    assert cost.seconds(PromptLoad(16, 128.0)) == 0.0


def test_few_tokens_are_read_where_rounds_carry_them(make_engine, make_target):
    usual = PromptRoom.of(None, None, "cpu")
    model = make_target("llama")
    assert make_engine(model, None).scheduler.prompt_room.least < usual.least
    assert make_engine(model, None, deterministic=True).scheduler.prompt_room.least == usual.least
