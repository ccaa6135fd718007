"""One request whose steps raise errors stops no other: it ends, with the reason, and the others have their tokens."""

import asyncio
import json
from contextlib import ExitStack

import httpx
import pytest

from specdec import SamplingParams
from specdec.errors import KVStateError, RequestFailedError, RoundFailedError, name_row
from specdec.serving.async_engine import AsyncEngine

from engine_internals import Request, assert_idle, capture_on_cpu
from marks import deep
from served_engine import served, until

NEW = 6
LENGTHS = (5, 9, 13, 17)
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=220, ignore_eos=True)


class Scene:
    """An engine, prompts, and what each is continued with."""

    def __init__(self, engine, prompts, truths):
        self.engine, self.prompts, self.truths = engine, prompts, truths

    def finish(self, handles) -> int:
        """Step until all have ended -> how often a step raised."""
        raised = 0
        for _ in range(400):
            if all(handle.finished for handle in handles):
                break
            try:
                self.engine.step()
            except (ValueError, MemoryError):
                raised += 1
        step_on(self.engine)
        assert_idle(self.engine)
        return raised

    def serve(self, *, raised: int, ended=()):
        """Submit all prompts -> handles. `raised` steps raise, and all requests but `ended` have their tokens."""
        handles = self.engine.submit_many(self.prompts, PARAMS)
        assert self.finish(handles) == raised
        assert [number for number, handle in enumerate(handles) if handle.error] == sorted(ended)
        assert_right(handles, self.truths, but=ended)
        return handles


both_usual = pytest.mark.parametrize("scene", [False, True], ids=["eager", "captured"], indirect=True)
"""Captured rounds in the usual sample too: a step is launched before the one before it has settled."""


@pytest.fixture(params=[False, deep(True)], ids=["eager", "captured"])
def scene(request, make_target, make_engine, greedy_oracle, random_prompt, monkeypatch):
    capture_on_cpu(monkeypatch, request.param)
    model, prompts = make_target("gemma4-e2b", seed=1), [random_prompt(n) for n in LENGTHS]
    engine = make_engine(model, "ngram", max_batch_size=8)
    return Scene(engine, prompts, [greedy_oracle(model, prompt, NEW) for prompt in prompts])


def breaks(engine, bad, error=ValueError, *, where="round", names=False):
    """Rounds (or groups of prompts) that hold a request with this prompt raise."""
    owner, name = (engine.steps, "launch_round") if where == "round" else (engine.steps.prefill, "launch")
    whole = getattr(owner, name)

    def broken(launched, *rest):
        for request in (launched if where == "round" else launched.batch).requests:
            if request.prompt == bad:
                raise name_row(error("no such thing"), request.row) if names else error("no such thing")
        return whole(launched, *rest)

    setattr(owner, name, broken)


def raises_first(engine, fault):
    """`fault(requests)` is called before each round."""
    whole = engine.steps.launch_round

    def broken(batch, *rest):
        fault(batch.requests)
        return whole(batch, *rest)

    engine.steps.launch_round = broken


def step_on(engine):
    while engine.step():
        pass


def assert_right(handles, truths, but=()):
    for number, (handle, truth) in enumerate(zip(handles, truths, strict=True)):
        if number not in but:
            assert handle.output().token_ids == truth


@pytest.mark.parametrize("where", ["round", "prompts"])
@pytest.mark.parametrize("bad", [0, 3])
def test_an_error_that_names_a_row_ends_the_request_of_that_row_alone(bad, where, scene):
    breaks(scene.engine, scene.prompts[bad], where=where, names=True)
    handles = scene.serve(raised=0, ended=[bad])
    assert handles[bad].finish_reason == "error"
    with pytest.raises(RequestFailedError, match="in this request alone: ValueError: no such thing"):
        handles[bad].read()


def test_an_error_that_is_raised_from_one_that_names_a_row_names_it_too(scene):
    def fault(requests):
        if len(requests) == 4:
            raise RuntimeError("the drafter failed") from name_row(KVStateError("row 7 is not open"), requests[1].row)

    raises_first(scene.engine, fault)
    error = scene.serve(raised=0, ended=[1])[1].error
    assert isinstance(error, RequestFailedError) and "the drafter failed" in str(error)


def test_an_error_of_specdec_that_names_a_row_is_that_requests_own_error(scene):
    """Raises it as it is, so that a `LocationError` is one where the output is read."""
    breaks(scene.engine, scene.prompts[2], KVStateError, names=True)
    handles = scene.serve(raised=0, ended=[2])
    with pytest.raises(KVStateError, match="no such thing") as raised:
        handles[2].output()
    assert raised.value.__cause__ is None and raised.value.__context__ is None  # and holds no frames of the step


def test_an_error_in_settling_a_request_ends_that_one_alone(scene, monkeypatch):
    settle = Request.settle

    def broken(request, *arguments, **options):
        if request.prompt == scene.prompts[1] and request.num_output:
            raise ValueError("half of it")
        settle(request, *arguments, **options)

    monkeypatch.setattr(Request, "settle", broken)
    handles = scene.serve(raised=0, ended=[1])
    with pytest.raises(RequestFailedError, match="half of it"):
        handles[1].output()


@pytest.mark.parametrize("bad", range(4))
def test_a_request_whose_rounds_always_raise_stops_no_older_one_and_one_newer(bad, scene):
    """The newest ends when its step raises again; if that was not it, the others come back one at a time."""
    breaks(scene.engine, scene.prompts[bad])
    ended = {bad, 3}
    handles = scene.serve(raised=1 + len(ended), ended=ended)
    for number in ended:
        with pytest.raises(RoundFailedError, match="the round failed, and failed again: ValueError: no such thing"):
            handles[number].output()


@pytest.mark.parametrize(("times", "ended"), [(1, []), (2, [3])])
def test_the_same_step_raising_twice_ends_the_newest_and_once_none(times, ended, scene):
    faults = [MemoryError("none left")] * times

    def fault(requests):
        if faults:
            raise faults.pop()

    raises_first(scene.engine, fault)
    scene.serve(raised=times, ended=ended)


@both_usual
def test_steps_that_always_raise_end_all_their_requests_each_with_the_reason(scene):
    engine = scene.engine
    engine.steps.launch_round = lambda *asked: 1 / 0
    handles = engine.submit_many(scene.prompts, PARAMS)
    for _ in range(1 + len(handles)):
        with pytest.raises(ZeroDivisionError):
            step_on(engine)
    assert [str(handle.error) for handle in handles] == [
        "the round failed, and failed again: ZeroDivisionError: division by zero"
    ] * 4
    assert not engine.step()
    assert_idle(engine)


def test_requests_that_arrive_meanwhile_neither_hide_the_culprit_nor_end_for_it(scene):
    """The set of requests is never the same twice, under load."""
    engine, prompts, truths = scene.engine, scene.prompts, scene.truths
    breaks(engine, prompts[3])
    handles, raised = engine.submit_many([prompts[0], prompts[3]], PARAMS), 0
    for _ in range(6):
        handles.append(engine.submit(prompts[1], PARAMS))
        try:
            engine.step()
        except ValueError:
            raised += 1
    raised += scene.finish(handles)
    assert raised == 2
    assert [number for number, handle in enumerate(handles) if handle.error] == [1]
    assert_right(handles, [truths[0], truths[3], *[truths[1]] * 6], but=[1])


@both_usual
def test_tokens_in_between_are_progress(scene):
    """Errors that come now and then end none, where each request has gained a token since the last.

    Of captured rounds, the second error comes at the launch of round 2, before round 1 has settled.
    """
    failed_at = set()

    def fault(requests):
        least = min(request.num_output for request in requests)
        if len(requests) == 4 and least not in failed_at:
            failed_at.add(least)
            raise ValueError("now and then")

    raises_first(scene.engine, fault)
    handles = scene.engine.submit_many(scene.prompts, PARAMS)
    assert scene.finish(handles) >= 2
    assert_right(handles, scene.truths)


@both_usual
def test_a_request_that_breaks_the_step_right_after_another_ended_ends_no_older_one(scene):
    """The older one would have had no token between the two, so each end lets the others back one at a time."""
    engine, (good, bad) = scene.engine, scene.prompts[:2]
    breaks(engine, bad)
    handles = [engine.submit(good, LONG)]
    for _ in range(4):
        handles.append(engine.submit(bad, PARAMS))
        for _ in range(40):
            if handles[-1].finished:
                break
            try:
                engine.step()
            except ValueError:
                continue
    assert [handle.error is not None for handle in handles] == [False, True, True, True, True]
    engine.abort(handles[0].id)
    step_on(engine)


def test_interrupts_end_none_however_often(scene):
    interrupts = [None] * 5

    def fault(requests):
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    raises_first(scene.engine, fault)
    handles = scene.engine.submit_many(scene.prompts, PARAMS)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            step_on(scene.engine)
    assert scene.finish(handles) == 0
    assert_right(handles, scene.truths)


# served


def test_requests_that_fail_one_after_the_other_are_no_broken_engine_while_others_gain_tokens(scene):
    engine, prompts = scene.engine, scene.prompts
    breaks(engine, prompts[3])

    async def run():
        async with AsyncEngine(engine) as running:
            stream = running.stream(prompts[0], LONG)
            await anext(stream)
            for _ in range(4):
                with pytest.raises(RoundFailedError):
                    await running.generate(prompts[3], PARAMS)
                until(lambda: running.open_requests <= 1)  # a reader may see the end before its place is free
                assert running.trouble is None and running.open_requests == 1
            await stream.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("names", [False, deep(True)], ids=["unnamed", "named"])
def test_over_http_one_request_that_breaks_every_step_is_a_500_and_health_stays_good(
    names, make_target, make_engine, byte_tokenizer, random_prompt
):
    engine = make_engine(make_target("llama", vocab_size=300), "ngram", tokenizer=byte_tokenizer, max_batch_size=8)
    good, bad = (random_prompt(n, vocab=256) for n in (5, 9))
    """The 500 has the headers of any answer; a stream that has begun ends with the error."""
    body = {"model": "tiny-gemma4", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    origin = "https://a.example"
    headers = {"Authorization": "Bearer one", "Origin": origin, "X-Request-Id": "mine"}
    [truth] = engine.generate([good], SamplingParams(max_new_tokens=60, ignore_eos=True))
    breaks(engine, bad, names=names)
    with (
        served(engine, cors_origins=[origin], api_keys={"a": "one"}) as (url, running, _),
        httpx.Client(timeout=120, headers=headers) as client,
        ExitStack() as open_streams,
    ):
        streams = []
        for _ in range(2):
            sent = body | {"prompt": good, "stream": True}
            stream = open_streams.enter_context(client.stream("POST", f"{url}/v1/completions", json=sent))
            lines = stream.iter_lines()
            streams.append(([next(lines)], lines))
        answer = client.post(f"{url}/v1/completions", json=body | {"prompt": bad})
        streamed = client.post(f"{url}/v1/completions", json=body | {"prompt": bad, "stream": True})
        assert client.get(f"{url}/health").status_code == 200 and running.trouble is None
        for begun, lines in streams:
            begun.extend(lines)
            chunks = [json.loads(line[6:]) for line in begun if line.startswith("data: {")]
            assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == truth.text
            assert begun[-2] == "data: [DONE]"
        after = client.post(f"{url}/v1/completions", json=body | {"prompt": good, "max_tokens": 4})
        assert after.status_code == 200 and truth.text.startswith(after.json()["choices"][0]["text"])
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["type"] == "server_error" and "no such thing" in error["message"]
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == origin
    last = [line for line in streamed.text.splitlines() if line][-1]
    assert streamed.status_code == 200 and json.loads(last.removeprefix("data: "))["error"] == error
    assert_idle(engine)
