"""Counts the cost of reading results, which grows with new tokens, not with all; and of a step for the serving
thread."""

import asyncio

import pytest

from specdec import SamplingParams
from specdec.runtime.calls.handle import Handle
from specdec.runtime.request import Request
from specdec.serving.async_engine import AsyncEngine
from specdec.text.detokenize import Detokenizer

from marks import examples

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
    assert len(request.settled.reader._pending) <= 20


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


def test_a_step_looks_only_at_requests_that_it_brought_something(make_target, make_engine, random_prompt, monkeypatch):
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
