"""What one choice says, out of deltas of any number of tokens: events in order, a chat's message, scores, colours."""

import itertools
import random

import pytest

from specdec.errors import StoppingError
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.openai.reply import MessageFold, Reply, whole_message
from specdec.serving.tools.answer_events import CallEnd
from specdec.serving.tools.tool_parsers import PARSERS
from specdec.text.detokenize import Detokenizer, token_text
from specdec.text.token_texts import TokenTexts

TEXT = 'I look. <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call><tool_call>{"name": "g"}</tool_call>'


def deltas_of(tokenizer, text, rng, reason="stop", stops=()):
    """The deltas of an answer, cut anywhere."""
    ids, reader, deltas = tokenizer(text)["input_ids"], Detokenizer(tokenizer), []
    drafted = [rng.random() < 0.5 for _ in ids]
    scores = [TokenLogprob(token, -float(at), {}) for at, token in enumerate(ids)]
    output = GenerationOutput([], ids, text, reason, RequestStats(), drafted, scores)
    cuts = sorted({0, len(ids), *rng.sample(range(1, len(ids)), min(6, len(ids) - 1))})
    for begin, end in itertools.pairwise(cuts):
        last = end == len(ids)
        new = reader.stream(ids[:end], stops, finished=last)
        known = output if last else None
        deltas.append(StreamDelta(new, ids[begin:end], drafted[begin:end], known, scores[begin:end]))
    return deltas


def hermes(tools=None, thoughts=None):
    return PARSERS["hermes"](tools, thoughts)


@pytest.mark.parametrize("seed", range(3))
def test_content_calls_and_colours_of_any_deltas(seed, byte_tokenizer):
    deltas = deltas_of(byte_tokenizer, TEXT, random.Random(seed))
    reply, fold = Reply(byte_tokenizer, (), True, hermes()), MessageFold()
    chunks = [chunk for delta in deltas for chunk in fold.deltas(reply.read(delta))]
    assert all(len(chunk) == 1 for chunk in chunks)
    for calls in (chunk["tool_calls"] for chunk in chunks if "tool_calls" in chunk):
        assert len({part["index"] for part in calls}) == len(calls)
    assert reply.finish_reason(deltas[-1].output) == "tool_calls"
    message = whole_message(chunks)
    assert message["content"].strip() == "I look."
    said = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert said == [("f", '{"a": "é"}'), ("g", "{}")]
    assert all("index" not in call and call["id"] and call["type"] == "function" for call in message["tool_calls"])
    pieces = [piece for delta in deltas for piece in reply.colours(delta) or ()]
    assert "".join(text for text, _ in pieces) == TEXT


def test_each_token_begins_where_its_text_does(byte_tokenizer):
    """Behind a character of several tokens too."""
    text = "é 😀!\ufffd€"
    reply = Reply(byte_tokenizer, scored=True)
    for delta in deltas_of(byte_tokenizer, text, random.Random(0)):
        reply.read(delta)
    ids = byte_tokenizer(text)["input_ids"]
    assert len(reply.begins) == len(ids)
    for begin, token in zip(reply.begins, ids, strict=True):
        said = token_text(byte_tokenizer, token)
        assert text[begin].encode() and (said == "\ufffd" or text.startswith(said, begin))
    assert [text[begin] for begin in reply.begins] == [char for char in text for _ in char.encode()]


def test_a_stop_string_ends_events_where_it_ends_the_text(byte_tokenizer):
    text = "One. STOP two"
    deltas = deltas_of(byte_tokenizer, text, random.Random(1), stops=("STOP",))
    reply = Reply(byte_tokenizer, ("STOP",), False, hermes())
    said = [said for delta in deltas for said in reply.read(delta)]
    assert "".join(event.text for event, _ in said) == "One. "


def test_a_call_that_a_stop_string_cut_is_not_what_the_answer_ended_with(byte_tokenizer):
    text = '<tool_call>{"name": "f", "arguments": {"a": "x'
    reply = Reply(byte_tokenizer, (), False, hermes())
    deltas = deltas_of(byte_tokenizer, text, random.Random(0))
    said = [said for delta in deltas for said in reply.read(delta)]
    assert said[-1].event == CallEnd(0, whole=False)
    assert reply.finish_reason(deltas[-1].output) == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_no_second_call_where_one_is_allowed(seed, byte_tokenizer):
    """parallel_tool_calls=false: what follows the first call is left out, in pieces of any size."""
    one = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    reply = Reply(byte_tokenizer, (), False, hermes(), max_calls=1)
    deltas = deltas_of(byte_tokenizer, f"So: {one}{one} and more", random.Random(seed))
    message = whole_message([x for delta in deltas for x in MessageFold().deltas(reply.read(delta))])
    assert message["content"] == "So: " and [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert reply.finish_reason(deltas[-1].output) == "tool_calls"


def test_an_answer_that_somebody_ended_is_no_answer(byte_tokenizer):
    [*_, last] = deltas_of(byte_tokenizer, TEXT, random.Random(0), "abort")
    with pytest.raises(StoppingError):
        Reply(byte_tokenizer).finish_reason(last.output)


def test_a_token_across_a_border_is_of_the_first_text_alone():
    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(["One.\n", "</t", "> T", "wo"][token] for token in ids)

        def convert_ids_to_tokens(self, token):
            return None

    texts = TokenTexts(Words())
    assert texts.read([0, 1], finished=False) + texts.read([2, 3], finished=True) == "One.\n</t> Two"
    assert texts.begins == [0, 5, 8, 11]
    assert [texts.tokens_in(0, 6), texts.tokens_in(6, 9), texts.tokens_in(10, 13)] == [
        range(2),
        range(2, 3),
        range(3, 4),
    ]
    assert texts.tokens_in(0, 13) == range(4, 4)
