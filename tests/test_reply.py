"""What one choice says, out of pieces of any size: reasoning, text and tool calls in order, a chat's message, scores,
colours."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.errors import ConfigError, StoppingError
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.openai.chat_message import MessageBuilder, whole_message
from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Text
from specdec.serving.tools.answer_parser import AnswerParser, AnswerReader
from specdec.serving.tools.reasoning_formats import REASONING, reasoning_format
from specdec.serving.tools.tool_parsers import PARSERS
from specdec.text.detokenize import Detokenizer, token_bytes, token_text
from specdec.text.token_texts import TokenTexts

from tiny_tokenizers import byte_level

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
GEMMA_CALL = "<|tool_call>call:f{a:1}<tool_call|>"
CALLED = ("call", "f", '{"a": 1}', True)


def items(pieces):
    """Texts as (kind, text), calls as ("call", name, arguments, whole)."""
    found: list[list] = []
    for piece in pieces:
        match piece.event:
            case Text(kind, text, begins):
                if begins:
                    found.append([kind, ""])
                assert found[-1][0] == kind, "a text that goes on goes on with the last item"
                found[-1][1] += text
            case CallBegin(_, _, name):
                found.append(["call", name, ""])
            case CallArguments(_, text):
                found[-1][2] += text
            case CallEnd(_, whole):
                found[-1].append(whole)
    return [tuple(item) for item in found]


def read(parser, text, sizes, *, cut=False, begun=""):
    parser.prime(begun)
    pieces, at = [], 0
    for size in sizes:
        pieces += parser.feed(text[at : at + size])
        at += size
    pieces += parser.feed(text[at:]) + parser.finish(cut=cut)
    return items(pieces)


def in_all_cuts(kind, thoughts, text, **options):
    """The items of a text, which are the same however it is cut."""
    form = REASONING.get(thoughts)
    whole = read(kind(None, form), text, [], **options)
    for seed in range(12):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 1 + seed) for _ in text]
        assert read(kind(None, form), text, sizes, **options) == whole, seed
    return whole


CASES = {
    # format, what the prompt has begun, text -> items
    "qwen": ("qwen3", "", "<think>\nI count.\n\n</think>\n\nEight.", [("thought", "I count."), ("content", "Eight.")]),
    "opened": (
        *("qwen3", "<think>", "\nI count.\n</think>\n\nEight. <think>"),
        [("thought", "I count."), ("content", "Eight. <think>")],
    ),
    "no thought": ("qwen3", "", "  Eight, < 9 <think>x</think>", [("content", "  Eight, < 9 <think>x</think>")]),
    "empty": ("qwen3", "", "<think>\n\n</think>\n\nEight.", [("content", "Eight.")]),
    "closed at once": ("qwen3", "", "\n</think>\n\nEight.</think>", [("content", "Eight.</think>")]),
    "mistral": ("mistral", "", "[THINK]I count.[/THINK]Eight.", [("thought", "I count."), ("content", "Eight.")]),
    "cut": ("qwen3", "", "<think>I count </thi", [("thought", "I count </thi")]),
    "silent": ("deepseek_r1", "", "I count.</think>Eight.\n", [("thought", "I count."), ("content", "Eight.\n")]),
    "said": ("deepseek_r1", "", "<think>\nI count.\n</think>\nOk.", [("thought", "I count."), ("content", "Ok.")]),
    "quoted mark": ("qwen3", "", "<think> <think>a <think> b</think>c", [("thought", "a <think> b"), ("content", "c")]),
    "gemma": ("gemma4", "", "<|channel>thought\nHm.\n<channel|>Eight.", [("thought", "Hm."), ("content", "Eight.")]),
    "gemma twice": (
        *("gemma4", "", "<|channel>thought\nA<channel|>B<|channel>thought\nC<channel|>D"),
        [("thought", "A"), ("content", "B"), ("thought", "C"), ("content", "D")],
    ),
    "gemma in a row": (
        *("gemma4", "", "<|channel>thought A <channel|> <|channel>thought B<channel|>"),
        [("thought", "A"), ("thought", "B")],
    ),
    "gemma none": ("gemma4", "", " Eight, <b>.", [("content", " Eight, <b>.")]),
    "space": ("qwen3", "", "   ", [("content", "   ")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_thought_and_answer_of_pieces_of_any_size(case):
    thoughts, begun, text, expected = CASES[case]
    assert in_all_cuts(AnswerParser, thoughts, text, begun=begun) == expected


CALLS_AND_THOUGHTS = {
    # parser, thoughts, text -> items
    "order": (
        *("hermes", "qwen3", f"<think>Which?</think>I look. {CALL}\nThen."),
        [("thought", "Which?"), ("content", "I look. "), CALLED, ("content", "\nThen.")],
    ),
    "between thoughts": (
        *("gemma4", "gemma4", f"A{GEMMA_CALL}<|channel>thought B<channel|>C{GEMMA_CALL}D"),
        [("content", "A"), CALLED, ("thought", "B"), ("content", "C"), CALLED, ("content", "D")],
    ),
    # a call in a thought that is never closed is one; in one that is closed it is a quotation
    "never closed": ("hermes", "qwen3", f"<think>I call. {CALL}", [("thought", "I call."), CALLED]),
    "never closed, gemma": (
        *("gemma4", "gemma4", f"<|channel>thought\nI call {GEMMA_CALL} now"),
        [("thought", "I call"), CALLED, ("content", " now")],
    ),
    "marks before it": (
        *("hermes", "qwen3", f"<think><tool_call> is <tool_call>no{CALL}{CALL}"),
        [("thought", "<tool_call> is <tool_call>no"), CALLED, CALLED],
    ),
    "straight after a call that broke off": (  # it was lost
        *("hermes", "qwen3", f"<think>I {CALL[:39]}{CALL}"), [("thought", f"I {CALL[:39]}"), CALLED],
    ),
    "not whole": ("hermes", "qwen3", f"<think>I {CALL[:30]}", [("thought", f"I {CALL[:30]}")]),
    "quoted": ("hermes", "qwen3", f"<think>No {CALL} x</think>B", [("thought", f"No {CALL} x"), ("content", "B")]),
    "quoted, then called": (
        *("hermes", "qwen3", f"<think>{CALL}</think>{CALL}"),
        [("thought", CALL), CALLED],
    ),
    "silent": ("hermes", "deepseek_r1", f"I call.\n{CALL}", [("thought", "I call."), CALLED]),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS_AND_THOUGHTS)
def test_thoughts_calls_and_texts_stand_in_their_order(case):
    kind, thoughts, text, expected = CALLS_AND_THOUGHTS[case]
    assert in_all_cuts(PARSERS[kind], thoughts, text) == expected


def test_a_call_in_a_thought_that_the_length_cut_off_is_thought():
    """The thought may have gone on, and have been a quotation."""
    assert in_all_cuts(PARSERS["hermes"], "qwen3", f"<think>{CALL}", cut=True) == [("thought", CALL)]


HARMONY = (
    "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>"
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HARMONY, [("thought", "I need it."), ("content", "I look."), CALLED]),
        (' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', [CALLED]),
        (' to=f<|channel|>commentary<|message|>{"a": 1}<|call|>', [CALLED]),
        (' to=g<|channel|>commentary<|message|>{"a": 1}<|call|>', [("content", '{"a": 1}')]),
        ("<|channel|>analysis to=python<|message|>1 + 1<|end|>", [("thought", "1 + 1")]),
        (
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
            "<|start|>assistant<|channel|>final<|message|> Yes.\n<|return|>",
            [("thought", "A"), ("thought", "B"), ("content", " Yes.\n")],
        ),
    ],
)
def test_messages_of_harmony(text, expected):
    for seed in range(8):
        rng = random.Random(seed)
        parser = PARSERS["harmony"]({"f": {}})
        begun = parser.begun_by("<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant")
        assert begun == "<|start|>assistant"
        sizes = [rng.randint(1, 1 + 2 * seed) for _ in text] if seed else []
        assert read(parser, text, sizes, begun=begun) == expected


def test_whether_the_prompt_has_opened_a_thought():
    qwen = AnswerParser(None, REASONING["qwen3"])
    assert qwen.begun_by("<|im_start|>assistant\n<think>\n") == "<think>"
    assert qwen.begun_by("<|im_start|>assistant\n<think>\n\n</think>\n\n") == ""
    assert qwen.begun_by("<|im_start|>assistant\n") == ""
    assert qwen.begun_by("what is <think>?<|im_end|>\n<|im_start|>assistant\n") == ""  # the user's word
    assert qwen.begun_by("...", "<think>I count") == "<think>I count"
    assert qwen.begun_by("...", "<think>I count</think>Ei") == "" == AnswerParser().begun_by("<think>")
    assert reasoning_format("none") is None
    with pytest.raises(ConfigError, match=r"^reasoning_parser='deep' is unknown; choose one of none, deepseek_r1"):
        reasoning_format("deep")


@pytest.mark.parametrize(
    ("prompt_end", "continued", "kind"),
    [
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "content"),  # of a template that is told not to think
        ("<|Assistant|></think>", "", "content"),
        ("...", "<think>It is easy.</think>Tom has", "content"),
        ("...", "<think>It is", "thought"),
        ("<|Assistant|>", "", "thought"),
    ],
)
def test_a_thought_that_the_prompt_has_closed_is_over(prompt_end, continued, kind):
    """If answers always begin with a thought, the whole answer was one, and its content was empty."""
    for cuts in ([], [1, 2, 3]):
        parser = AnswerParser(None, REASONING["deepseek_r1"])
        begun = parser.begun_by(prompt_end, continued)
        space = " " * (bool(continued) and kind == "content")
        assert read(parser, space + "8 pens.", cuts, begun=begun) == [(kind, space + "8 pens.")]


@pytest.mark.parametrize("name", ["hermes", "gemma4"])
def test_a_thought_of_marks_that_begin_no_call_is_read_in_time_that_grows_with_it(name):
    """Each mark could be a call up to the end of the text: what was read as one is not read again."""
    begins = {"hermes": '<tool_call>{"name": "f", "arguments": {"a": "', "gemma4": '<|tool_call>call:f{a:<|"|>'}[name]
    parser = PARSERS[name](None, REASONING["qwen3" if name == "hermes" else "gemma4"])
    opens = parser._thoughts.opens
    steps = 0
    original = PARSERS[name].feed

    class Counted(PARSERS[name]):
        def feed(self, text):
            nonlocal steps
            steps += len(text)
            return original(self, text)

    text = opens + begins * 400
    reader = Counted(None, parser._thoughts)
    reader.feed(text)
    assert items(reader.finish()) == [("thought", begins.rstrip() * 1 + begins * 399)]
    assert steps < 4 * len(text)


# replies, out of deltas of any number of tokens


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
    reply, builder = AnswerReader(byte_tokenizer, hermes(), show_drafts=True), MessageBuilder()
    chunks = [chunk for delta in deltas for chunk in builder.deltas(reply.read(delta))]
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
    reply = AnswerReader(byte_tokenizer, scored=True)
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
    reply = AnswerReader(byte_tokenizer, hermes(), ("STOP",))
    said = [said for delta in deltas for said in reply.read(delta)]
    assert "".join(event.text for event, _ in said) == "One. "


def test_a_call_that_a_stop_string_cut_is_not_what_the_answer_ended_with(byte_tokenizer):
    text = '<tool_call>{"name": "f", "arguments": {"a": "x'
    reply = AnswerReader(byte_tokenizer, hermes())
    deltas = deltas_of(byte_tokenizer, text, random.Random(0))
    said = [said for delta in deltas for said in reply.read(delta)]
    assert said[-1].event == CallEnd(0, whole=False)
    assert reply.finish_reason(deltas[-1].output) == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_no_second_call_where_one_is_allowed(seed, byte_tokenizer):
    """parallel_tool_calls=false: what follows the first call is left out, in pieces of any size."""
    one = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    reply = AnswerReader(byte_tokenizer, hermes(), max_calls=1)
    deltas = deltas_of(byte_tokenizer, f"So: {one}{one} and more", random.Random(seed))
    message = whole_message([x for delta in deltas for x in MessageBuilder().deltas(reply.read(delta))])
    assert message["content"] == "So: " and [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert reply.finish_reason(deltas[-1].output) == "tool_calls"


def test_an_aborted_answer_raises(byte_tokenizer):
    [*_, last] = deltas_of(byte_tokenizer, TEXT, random.Random(0), "abort")
    with pytest.raises(StoppingError):
        AnswerReader(byte_tokenizer).finish_reason(last.output)


def test_only_the_first_reader_of_a_format_lists_the_vocabulary(monkeypatch):
    """That takes 0.3 s for 262,144 tokens, and each choice of each request has a reader."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    delta = StreamDelta("a", [tokenizer.vocab["a"]], [False])
    listed, own = [], type(tokenizer).get_vocab
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: listed.append(1) or own(self))

    def read_calls() -> int:
        AnswerReader(tokenizer, PARSERS["hermes"]({"f": {}})).read(delta)
        return len(listed)

    first = read_calls()
    assert first > 0 and read_calls() == first
    tokenizer.add_tokens(["</tool_call>"])
    assert read_calls() > first, "the format's tokens may be added later"


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


def fallback():
    """Byte fallback, of which a run of bytes is decoded as a whole, and a space, which alone is no text."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, fallback])
@pytest.mark.parametrize(
    ("written", "begins"),
    [
        ("😀😀!".encode(), [0, 0, 0, 0, 1, 1, 1, 1, 2]),
        (b"\xa1" * 6, [0, 1, 2, 3, 4, 5]),
        (b"\xe5\xa5\xa1\xa1!\xc3", [0, 0, 0, 1, 2, 3]),
        (b"\xca \xca \xae", [0, 1, 2, 3, 4]),
    ],
    ids=["two emoji", "no character", "a byte too many", "spaces"],
)
def test_each_token_is_of_one_text_whatever_its_bytes_make(make, written, begins):
    """Bytes that continue no character began with the last that was one, so that some were of no text at all."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make())
    vocab = tokenizer.get_vocab()
    of_byte = {token_bytes(tokenizer, token): token for token in range(256)}
    ids = [vocab[f"<0x{byte:02X}>"] if make is fallback else of_byte[bytes([byte])] for byte in written]
    for size in (1, 2, 9):
        texts, given = TokenTexts(tokenizer), []
        for at in range(0, len(ids), size):
            start = texts.length
            texts.read(ids[at : at + size], finished=at + size >= len(ids))
            given += texts.tokens_in(start, texts.length)
        assert [*given, *texts.tokens_after()] == list(range(len(ids)))
        if make is byte_level or b" " in written or written.decode(errors="ignore").encode() == written:
            assert texts.begins == begins
