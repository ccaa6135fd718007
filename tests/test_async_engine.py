"""AsyncEngine over a real tiny engine: what callers on event loops get, and that they leak nothing."""

import asyncio
import gc
import os
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from run_in_threads import in_threads

from specdec import Engine, EngineConfig, SamplingParams
from specdec.errors import CapacityError, ConfigError, QueueFullError, RoundFailedError, SpecDecError, StoppingError
from specdec.serving.async_engine import INTAKE_THREADS, AsyncEngine
from specdec.serving.fair_pool import CLIENT, FairPool

from engine_internals import assert_idle
from processes import run

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
NEW = 12
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(make_target, pair_tokenizer):
    """A model, and engines over it."""
    model = make_target("gemma4-e2b")

    def make(**sizes) -> Engine:
        return Engine.from_pretrained(
            model, "ngram", tokenizer=pair_tokenizer, config=EngineConfig(max_model_len=512, **sizes)
        )

    return model, make


def serving(pair, scene, max_waiting=256, **sizes):
    """Run `scene(served)` over an engine of its own; nothing may be left in it."""
    _, make = pair
    with make(**({"max_batch_size": 4} | sizes)) as engine:

        async def run():
            async with AsyncEngine(engine, max_waiting=max_waiting) as served:
                result = await scene(served)
                await until(lambda: not served.samples and not engine.inbox.live)
                assert served.open_requests == 0
                return result

        result = asyncio.run(run())
        assert_idle(engine)
        return result


async def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.002)


def test_streams_and_outputs_are_those_of_the_engine(pair, greedy_oracle, random_prompt):
    model, _ = pair
    prompts = [random_prompt(n) for n in (3, 21, 40, 9, 5, 17)]

    async def read(served, prompt):
        return [delta async for delta in served.stream(prompt, PARAMS)]

    async def scene(served):
        streamed = await asyncio.gather(*(read(served, prompt) for prompt in prompts))
        return streamed, await served.generate(prompts, PARAMS)

    streamed, outputs = serving(pair, scene)
    for prompt, deltas, output in zip(prompts, streamed, outputs, strict=True):
        assert [t for delta in deltas for t in delta.token_ids] == greedy_oracle(model, prompt, NEW)
        assert output.token_ids == deltas[-1].output.token_ids
        assert "".join(delta.text for delta in deltas) == output.text
        assert [delta.output is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]


@pytest.mark.parametrize("how", ["break", "cancel", "cancel-generate", "abort"])
def test_an_aborted_request_frees_its_slots_within_a_round(how, pair, random_prompt):
    """A request of 400 tokens is gone after at most two more steps: the one under way, and the one that ends it."""

    async def scene(served):
        engine, steps = served.engine, []
        step = engine.step
        engine.step = lambda: (steps.append(None), step())[1]

        async def leave():
            if how == "cancel-generate":
                await served.generate(random_prompt(5), LONG)
            async with await served.submit(random_prompt(5), LONG) as streams:
                async for _ in streams:
                    if how == "abort":
                        streams.abort()
                    if not how.startswith("cancel"):
                        break

        task = asyncio.create_task(leave())
        if how.startswith("cancel"):
            await until(lambda: any(sample.handle.num_output for sample in served.samples))
            task.cancel()
        [left] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(left, asyncio.CancelledError) == how.startswith("cancel")
        before = len(steps)
        await until(lambda: not engine.inbox.live)
        assert len(steps) - before <= 2
        assert engine.stats().aborted == 1

    serving(pair, scene)


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing(pair, random_prompt):
    async def scene(served):
        submit_many, here = served.engine.submit_many, threading.Event()

        def slow(*arguments, **options):
            here.set()
            time.sleep(0.05)
            return submit_many(*arguments, **options)

        served.engine.submit_many = slow
        task = asyncio.create_task(served.generate(random_prompt(5), LONG))
        await until(here.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: served.engine.stats().aborted == 1)

    serving(pair, scene)


def test_a_full_queue_refuses_at_once_and_says_how_many_wait(pair, random_prompt):
    async def scene(served):
        tasks = [asyncio.create_task(served.generate(random_prompt(5 + i), LONG)) for i in range(3)]
        await until(lambda: served.open_requests == 3)
        with pytest.raises(QueueFullError, match="1 requests run and 2 wait, and at most 2 may wait"):
            await served.generate(random_prompt(4), PARAMS)
        with pytest.raises(ConfigError, match="4 samples at once are more than the 3"):
            await served.generate(random_prompt(4), SamplingParams(n=4))
        for task in tasks:
            task.cancel()
        await until(lambda: served.open_requests < 3)
        [output] = await served.generate(random_prompt(4), PARAMS)
        assert len(output.token_ids) == NEW

    serving(pair, scene, max_waiting=2, max_batch_size=1)


def test_a_moment_without_threads_fails_only_the_prompts_that_come_in_it(pair, random_prompt, monkeypatch):
    """Each thread that could not be started counted as running for ever: after four, every prompt was refused."""

    def refuse(*call):
        raise RuntimeError("can't start new thread")

    async def scene(served):
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", refuse)
            for _ in range(INTAKE_THREADS):
                with pytest.raises(QueueFullError, match="no thread could be started for this request"):
                    await served.generate(random_prompt(4), PARAMS)
        [output] = await asyncio.wait_for(served.generate(random_prompt(4), PARAMS), 20)
        assert len(output.token_ids) == NEW

    serving(pair, scene)


def test_bad_input_is_refused_and_gives_its_place_back(pair):
    async def scene(served):
        for prompt, params, error in (([], None, ConfigError), ([5], SamplingParams(9999), CapacityError)):
            with pytest.raises(error):
                await served.generate([prompt], params)
        with pytest.raises(ConfigError, match="a stream has one sample"):
            served.stream([5], SamplingParams(n=2))
        assert served.open_requests == 0

    serving(pair, scene)


def test_a_slow_reader_delays_no_other_and_gets_the_rest_at_once(pair, random_prompt):
    async def scene(served):
        async with await served.submit([random_prompt(5)], PARAMS) as streams:
            await until(lambda: not served.samples)
            deltas = [delta async for _, delta in streams]
        [other] = await served.generate(random_prompt(6), PARAMS)
        return deltas, other

    deltas, other = serving(pair, scene)
    assert len(deltas) == 1 and len(deltas[0].token_ids) == NEW == len(other.token_ids)


def test_rounds_that_keep_failing_fail_their_requests_with_the_reason_and_the_engine_goes_on(
    pair, greedy_oracle, random_prompt, monkeypatch
):
    model, _ = pair

    async def scene(served):
        passing, leaving = [], []

        def broken(hidden):
            if passing:
                return passing.pop()(hidden)
            for sample in served.samples if leaving else ():
                served.engine.inbox.abort_later(sample.handle.id)
            raise torch.OutOfMemoryError("no memory for 3 GB")

        logits = served.engine.target.logits
        monkeypatch.setattr(served.engine.target, "logits", broken)

        async def read():
            return [delta async for delta in served.stream(random_prompt(9), PARAMS)]

        calls = served.generate(random_prompt(5), PARAMS), read(), read()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RoundFailedError), result
            assert str(result) == "the round failed, and failed again: OutOfMemoryError: no memory for 3 GB"
        for _ in range(3):
            with pytest.raises(RoundFailedError):
                await served.generate(random_prompt(5), PARAMS)
        assert "rounds with requests failed" in served.trouble
        passing.append(logits)  # a prompt's token is none of a round
        with pytest.raises(RoundFailedError):
            await served.generate(random_prompt(5), PARAMS)
        leaving.append(True)  # nor does a client that leaves show that rounds work
        assert [each.finish_reason for each in await served.generate(random_prompt(5), PARAMS)] == ["abort"]
        assert "rounds with requests failed" in served.trouble
        monkeypatch.undo()
        [output] = await served.generate(random_prompt(5), PARAMS)
        assert served.trouble is None
        return output

    output = serving(pair, scene)
    assert output.token_ids == greedy_oracle(model, random_prompt(5), NEW)


def test_an_idle_engine_takes_no_steps(pair, random_prompt):
    async def scene(served):
        await served.generate(random_prompt(5), PARAMS)
        steps = []
        step = served.engine.step
        served.engine.step = lambda: (steps.append(None), step())[1]
        await asyncio.sleep(0.2)
        return len(steps)

    assert serving(pair, scene) <= 1


def test_several_event_loops_share_one_engine(pair, greedy_oracle, random_prompt):
    model, make = pair
    with make(max_batch_size=2) as engine:
        served = AsyncEngine(engine)
        results = {}

        def one(length):
            async def read():
                return [t async for delta in served.stream(random_prompt(length), PARAMS) for t in delta.token_ids]

            results[length] = asyncio.run(read())

        in_threads([partial(one, n) for n in (4, 5, 6, 7)])
        asyncio.run(served.close())
    assert results == {n: greedy_oracle(model, random_prompt(n), NEW) for n in (4, 5, 6, 7)}


def test_a_loop_that_is_closed_under_its_streams_aborts_them(pair, random_prompt):
    """If it had been told of news and never ran that call, they were served to their end."""
    _, make = pair
    with make() as engine:
        served = AsyncEngine(engine)
        loop = asyncio.new_event_loop()
        streams = loop.run_until_complete(served.submit([random_prompt(5)], LONG))
        deltas = aiter(streams)
        loop.run_until_complete(anext(deltas))
        asyncio.run(until(lambda: streams._posted))
        loop.close()
        asyncio.run(until(lambda: not served.samples))
        assert engine.stats().aborted == 1
        asyncio.run(served.close())


def test_close_lets_streams_end_or_aborts_them(pair, random_prompt):
    _, make = pair

    async def closed(timeout, params):
        with make() as engine:
            served = AsyncEngine(engine)
            task = asyncio.create_task(served.generate(random_prompt(5), params))
            await until(lambda: served.samples)
            await served.close(timeout)
            with pytest.raises(SpecDecError, match="closed"):
                await served.generate(random_prompt(5), params)
            [output] = await task
            assert served.trouble and engine.table.allocator.primary.held_pages == 0
            return output.finish_reason

    assert asyncio.run(closed(None, PARAMS)) == "length"
    assert asyncio.run(closed(0.01, LONG)) == "abort"


def test_close_fails_prompts_that_are_still_read_or_wait_to_be(pair, random_prompt, monkeypatch):
    """Their callers saw a cancellation that nobody had asked for: a server logged a traceback and answered 500."""
    _, make = pair
    go, begun = threading.Event(), threading.Semaphore(0)

    def read(*call, **options):
        begun.release()
        assert go.wait(60)
        return []

    async def scene(engine):
        served = AsyncEngine(engine)
        monkeypatch.setattr(engine, "submit_many", read)
        calls = [asyncio.create_task(served.generate(random_prompt(4), PARAMS)) for _ in range(2 * INTAKE_THREADS)]
        assert await asyncio.to_thread(begun.acquire, timeout=20)
        await served.close()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert {type(each) for each in results} == {StoppingError}
        go.set()

    with make() as engine:
        asyncio.run(scene(engine))


def test_the_engine_of_from_pretrained_is_closed_with_it_and_an_existing_one_is_not(pair, random_prompt):
    model, make = pair
    own = AsyncEngine.from_pretrained(model, "ngram")
    asyncio.run(own.close())
    with pytest.raises(SpecDecError, match="closed"):
        own.engine.generate([[5]], PARAMS)
    with make() as engine:
        asyncio.run(AsyncEngine(engine).close())
        assert len(engine.generate([random_prompt(5)], PARAMS)) == 1


def test_an_engine_that_is_forgotten_ends_its_thread(pair):
    _, make = pair
    with make() as engine:
        served = AsyncEngine(engine)
        thread, gone = served._thread._thread, weakref.ref(served)
        del served
        gc.collect()
        assert gone() is None
        thread.join(20)
        assert not thread.is_alive()


def test_a_fork_is_refused_and_ends(pair):
    """The child has no engine thread; it must neither hang nor go on as if it had."""
    _, make = pair
    with make() as engine:
        served = AsyncEngine(engine)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                asyncio.run(served.generate([5], PARAMS))
            except SpecDecError as error:
                code = 0 if "another process" in str(error) else 2
            finally:
                served._finalizer()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        asyncio.run(served.close())


@pytest.mark.deep
def test_a_program_that_never_closes_it_ends():
    program = """
import asyncio
from specdec import SamplingParams
from specdec.serving.async_engine import INTAKE_THREADS, AsyncEngine
async def main():
    served = AsyncEngine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp")
    async for delta in served.stream([2, 5, 7], SamplingParams(400, ignore_eos=True)):
        print("on its way", flush=True)
        break
    globals()["kept"] = served
asyncio.run(main())
"""
    done = run(["-c", program], timeout=120)
    assert (done.returncode, done.stdout) == (0, "on its way\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_clients_have_turns_at_one_thread():
    pool, go, order = FairPool(1, "test"), threading.Event(), list[str]()
    jobs = []
    for client in "aaabb":
        token = CLIENT.set(client)
        jobs.append(pool.submit(lambda client=client: go.wait(120) and order.append(client)))
        CLIENT.reset(token)
    go.set()
    assert [job.result(120) for job in jobs] == [None] * 5 and "".join(order) == "aabab"
    pool.shutdown()
