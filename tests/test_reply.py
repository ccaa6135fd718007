"""What one choice says, out of deltas of any number of tokens: content, tool calls, and colours."""

import itertools
import random
from functools import partial

import pytest

from specdec.errors import StoppingError
from specdec.runtime.request import GenerationOutput, RequestStats, StreamDelta
from specdec.serving.openai.reply import Reply
from specdec.serving.tools.tool_parsers import PARSERS
from specdec.text.detokenize import Detokenizer

TEXT = 'I look. <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call><tool_call>{"name": "g"}</tool_call>'


def deltas_of(tokenizer, text, rng, reason="stop"):
    """The deltas of an answer, cut anywhere."""
    ids, reader, deltas = tokenizer(text)["input_ids"], Detokenizer(tokenizer), []
    drafted = [rng.random() < 0.5 for _ in ids]
    output = GenerationOutput([], ids, text, reason, RequestStats(), drafted)
    cuts = sorted({0, len(ids), *rng.sample(range(1, len(ids)), min(6, len(ids) - 1))})
    for begin, end in itertools.pairwise(cuts):
        last = end == len(ids)
        new = reader.stream(ids[:end], (), finished=last)
        deltas.append(StreamDelta(new, ids[begin:end], drafted[begin:end], output if last else None))
    return deltas


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("show_drafts", [False, True], ids=["plain", "colours"])
def test_content_calls_and_colours_of_any_deltas(seed, show_drafts, byte_tokenizer):
    rng = random.Random(seed)
    wanted = partial(Reply, byte_tokenizer, (), show_drafts, PARSERS["hermes"])
    deltas, reply = deltas_of(byte_tokenizer, TEXT, rng), wanted()
    said = [reply.read(delta) for delta in deltas]
    assert "".join(one.content for one in said).strip() == "I look."
    calls: dict[int, list[str]] = {}
    for part in (call for one in said for call in one.tool_calls):
        if "id" in part:
            assert part["type"] == "function"
            calls[part["index"]] = [part["function"]["name"], part["function"]["arguments"]]
        else:
            calls[part["index"]][1] += part["function"]["arguments"]
    assert calls == {0: ["f", '{"a": "é"}'], 1: ["g", "{}"]}
    assert all(len({part["index"] for part in one.tool_calls}) == len(one.tool_calls) for one in said)
    assert reply.finish_reason(deltas[-1].output) == "tool_calls"
    pieces = [piece for one in said for piece in one.drafted or ()]
    assert "".join(text for text, _ in pieces) == (TEXT if show_drafts else "")
    whole = wanted().read_whole(deltas[-1].output)
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in whole.tool_calls] == [
        tuple(call) for call in calls.values()
    ]
    assert all("index" not in call and call["id"] for call in whole.tool_calls)


def test_without_tools_a_call_is_text(byte_tokenizer):
    reply = Reply(byte_tokenizer)
    deltas = deltas_of(byte_tokenizer, TEXT, random.Random(0), "length")
    said = [reply.read(delta) for delta in deltas]
    assert "".join(one.content for one in said) == TEXT and not any(one.tool_calls or one.drafted for one in said)
    assert reply.finish_reason(deltas[-1].output) == "length"


def test_an_answer_that_somebody_ended_is_no_answer(byte_tokenizer):
    [*_, last] = deltas_of(byte_tokenizer, TEXT, random.Random(0), "abort")
    with pytest.raises(StoppingError):
        Reply(byte_tokenizer).finish_reason(last.output)
