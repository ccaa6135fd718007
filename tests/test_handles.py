"""Requests in hand: `submit`, `step` and `abort`, what handles give out, and who may call them from where."""

import threading

import pytest
from side_by_side import in_threads

from specdec import SamplingParams
from specdec.errors import CapacityError, ConfigError, SpecDecError

from inside import assert_idle

NEW = 10
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def read_all(handle) -> list[int]:
    """The tokens of everything there is to read now."""
    return [token for delta in iter(handle.read, None) for token in delta.token_ids]


def test_steps_bring_what_handles_read(make_target, make_engine, greedy_oracle, random_prompt):
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


def test_letting_go_of_a_handle_aborts_nothing(make_target, make_engine, random_prompt):
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


def test_submit_and_abort_do_not_wait_for_a_step(make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"))
    handle = engine.submit(random_prompt(5), PARAMS)

    def step_of_this_thread():  # waiting would never end
        other = engine.submit(random_prompt(9), PARAMS)
        handle.abort()
        assert not handle.finished and not other.finished
        return other

    other = engine._in_turn(step_of_this_thread)
    assert handle.finished and other.output().finish_reason == "length"
    assert_idle(engine)


def test_who_waits_for_a_turn_comes_before_who_just_had_one(make_target, make_engine):
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
