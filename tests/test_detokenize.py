"""Streamed pieces of text, joined, equal the final text, for any tokenizer, stop strings and rounds."""

import copy
import random
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec import SamplingParams
from specdec.runtime.request import Request
from specdec.text.detokenize import Detokenizer, end_tokens
from specdec.text.stop_strings import StopStrings, find_first, thought_end
from specdec.text.token_texts import TokenTexts

from marks import examples
from tiny_tokenizers import byte_level

SPECIAL = ["<s>", "<|im_end|>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte_pairs():
    """One token a byte, and a few that hold two: half characters, whole ones, and halves of two."""
    return byte_level([("Ã", "©"), ("å", "¥"), ("½", "ł"), ("Ġ", "a"), ("a", "b"), ("©", "Ã")])


def llama():
    """Byte-fallback BPE with the decoder of Llama 2: a leading space is stripped, a run of bytes read as a whole."""
    pieces = [*BYTES, "▁", "a", "b", "é", "▁a", "▁the", "\n", ".", "'", "\ufffd"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram():
    """Unigram with byte fallback and Metaspace."""
    pieces = ["<unk>", *BYTES, "▁", "a", "b", "▁a", "▁▁", "▁word", "s", ".", "é"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always", True)])
    return tokenizer


def word_piece():
    words = ["[UNK]", "do", "not", "n", "'", "t", "##t", "##s", "m", "s", "ve", "re"]
    pieces = [*words, ".", "?", "!", ",", "a", "##ing", "é"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece("##", True)
    return tokenizer


def suffixed():
    """BPE whose words end in </w>, which the last token does not show."""
    pieces = ["a", "b</w>", "c</w>", ".</w>", "'</w>", "n", "t</w>"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def words():
    """No decoder at all: words joined by spaces."""
    pieces = ["a", "b", ".", "'", "n't", "s", "'s", "?", "x"]
    return Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="a"))


MAKERS = {
    "byte-level": (byte_pairs, False),
    "llama": (llama, False),
    "llama-flagged": (llama, True),  # clean-up asked for, and ignored for BPE
    "unigram": (unigram, False),
    "unigram-clean": (unigram, True),
    "word-piece": (word_piece, False),
    "word-piece-clean": (word_piece, True),
    "suffixed": (suffixed, False),
    "words": (words, False),
    "words-clean": (words, True),
}


def make_tokenizer(name):
    make, cleans_up = MAKERS[name]
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=cleans_up)


TOKENIZERS = {name: make_tokenizer(name) for name in MAKERS}


def run(tokenizer, ids, params, rounds):
    """A request that is given `ids` in rounds of the given sizes, and what its stream hands out: (request, deltas)."""
    request = Request([0], params, 0, Detokenizer(tokenizer), frozenset())
    deltas, at = [], 0
    while not request.finished:
        size = rounds[len(deltas) % len(rounds)]
        request.settle(ids[at : at + size])
        at += size
        finished = request.finished
        deltas.append(request.detokenizer.stream(request.output_ids, params.stop_strings, finished=finished))
    return request, deltas


def expected(tokenizer, ids, stops):
    """(tokens until a stop string is there, the text before it), decoding everything at every token."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        written = tokenizer.decode(ids[:end], skip_special_tokens=False)
        if any(stop in text or stop in written for stop in stops):
            return end, text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]
    return len(ids), tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=examples(15, 60), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("name", list(MAKERS))
def test_deltas_joined_are_the_final_text(name, data):
    tokenizer = TOKENIZERS[name]
    # few kinds of token at a time, so that runs, half characters and patterns come up, or all of them
    any_token = st.integers(0, len(tokenizer) - 1)
    few = st.lists(any_token, min_size=1, max_size=8).map(st.sampled_from)
    ids = data.draw(st.lists(data.draw(few | st.just(any_token)), min_size=1, max_size=60))
    rounds = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = [text[a : a + n] for a, n in data.draw(st.lists(spans, max_size=2))]
    stops = [*(stop for stop in stops if stop), *data.draw(st.lists(st.sampled_from(SPECIAL), max_size=1))]
    request, deltas = run(tokenizer, ids, SamplingParams(max_new_tokens=len(ids), stop=stops), rounds)
    out = request.output()
    assert "".join(deltas) == out.text
    if any(special in stop or stop in special for stop in stops for special in SPECIAL):
        return  # what the text is then, is said by examples below
    end, want = expected(tokenizer, ids, stops)
    assert len(out.token_ids) == end
    # a space may stand before a special token only; the text then ends before the string all the same
    assert out.text == want or (want.startswith(out.text) and not any(stop in want for stop in stops))


def ids_of(tokenizer, *pieces):
    return [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def test_an_invalid_byte_takes_back_no_streamed_text():
    """E5 A5 BD is a character; with FF after it, the run is four replacement characters."""
    tokenizer = TOKENIZERS["llama"]
    ids = ids_of(tokenizer, "▁the", "<0xE5>", "<0xA5>", "<0xBD>", "<0xFF>", "a")
    request, deltas = run(tokenizer, ids, SamplingParams(max_new_tokens=6), [1])
    assert request.output().text == "the" + "\ufffd" * 4 + "a"
    assert deltas == ["the", "", "", "", "", "\ufffd" * 4 + "a"]


@pytest.mark.parametrize("rounds", [[1], [2], [9]])
@pytest.mark.parametrize(
    ("stop", "pieces", "text", "taken"),
    [
        ("<|im_end|>", ["a", "b", "<|im_end|>", "a"], "ab", 3),
        ("im_end", ["a", "<|im_end|>", "b"], "a", 2),
        ("b<|im", ["a", "b", "<|im_end|>", "a"], "a", 3),
        ("b<|im_end|>b", ["a", "b", "<|im_end|>", "b", "a"], "a", 4),
        ("<|im_end|>\n", ["a", "<|im_end|>", "b", "<|im_end|>", "\n", "a"], "ab", 5),
        ("<s><|im_end|>", ["a", "<s>", "b", "<s>", "<|im_end|>"], "ab", 5),
        ("é<|im_end|>", ["a", "<0xC3>", "<0xA9>", "<|im_end|>", "a"], "a", 4),
        ("ab", ["a", "<s>", "b", "a"], "", 3),  # what the reader sees counts too
    ],
)
def test_special_tokens_as_stop_strings(stop, pieces, text, taken, rounds):
    """The text has them removed, and yet they end it."""
    tokenizer = TOKENIZERS["llama"]
    ids = ids_of(tokenizer, *pieces)
    request, deltas = run(tokenizer, ids, SamplingParams(max_new_tokens=len(ids), stop=stop), rounds)
    out = request.output()
    assert (out.text, out.token_ids, out.finish_reason) == (text, ids[:taken], "stop")
    assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("stop", "pieces", "taken"),
    [(" ", ["<s>", "a", "a"], 2), ("a <|im", ["<|im_end|>", "a", "<|im_end|>", "b"], 3)],
    ids=["found a word too late", "left the space in the text"],
)
def test_a_space_between_a_special_token_and_a_word(stop, pieces, taken):
    """It is no text, and yet it may be a stop string or stand before one."""
    ids = ids_of(TOKENIZERS["words"], *pieces)
    request, _ = run(TOKENIZERS["words"], ids, SamplingParams(max_new_tokens=len(ids), stop=stop), [1])
    assert (request.output().text, len(request.output_ids)) == ("", taken)


def test_a_stop_string_before_min_tokens_hides_no_special_token_after_them():
    """The early "a" was still in the text that is searched, so the written <|im_end|> was looked for too late."""
    tokenizer = TOKENIZERS["byte-level"]
    params = SamplingParams(max_new_tokens=5, stop=["a", "<|im_end|>"], min_tokens=1)
    request, _ = run(tokenizer, ids_of(tokenizer, "a", "<|im_end|>", "b", "b", "b"), params, [1])
    assert (len(request.output_ids), request.output().text, request.finish_reason) == (2, "a", "stop")


def test_a_stop_string_that_begins_in_the_prompt_does_not_count():
    """Only what was generated is searched, as in vLLM. `specdec.generate` does as transformers."""
    tokenizer = TOKENIZERS["words"]
    request = Request(
        ids_of(tokenizer, "x"), SamplingParams(max_new_tokens=2, stop="x b"), 0, Detokenizer(tokenizer), frozenset()
    )
    request.settle(ids_of(tokenizer, "b", "a"))
    assert request.output().text == "b a" and request.finish_reason == "length"


THINKERS = {}
for kind, added in {"bytes": [], "text": [False, False], "special": [True, True], "special end": [False, True]}.items():
    tokenizer = byte_pairs()
    marks = zip(("<think>", "</think>"), added, strict=False)
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark, special in marks])
    THINKERS[kind] = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def exempt_chars(written):
    """Characters of a text in which no stop string counts: a thought, or what may become one."""
    if re.match(r"\s*<think>(?!.*</think>)", written, re.DOTALL):
        return len(written)
    ends = [r"\s*(?:<think>.*?)?</think>\s*", r"\s*</?(?:t(?:h(?:i(?:nk?)?)?)?)?", r"\s*"]
    return next(found.end() for end in ends if (found := re.match(end, written, re.DOTALL)))


@settings(max_examples=examples(40, 600), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", THINKERS)
def test_stop_strings_count_after_the_thought_that_begins_an_output(kind, data):
    tokenizer, marks = THINKERS[kind], ("<think>", "</think>")
    pieces = st.sampled_from([*marks, *marks, "a", "a\n", "é", " ", "\n\n", "<", "</", "<t", "b<b"])
    said = "".join(data.draw(st.lists(pieces, min_size=1, max_size=12)))
    opened, included = data.draw(st.booleans()), data.draw(st.booleans())
    stops = data.draw(st.lists(st.sampled_from(["a", "\n\n", "<", "é", " a", "\n", "</think>", "b<"]), max_size=2))
    rounds = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    ids, begun = tokenizer(said)["input_ids"], marks[0] * opened
    params = SamplingParams(
        max_new_tokens=len(ids),
        stop=stops,
        include_stop_str_in_output=included,
        thought_marks=("" if opened else marks[0], marks[1]),
    )
    request, deltas = run(tokenizer, ids, params, rounds)
    out, special = request.output(), [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    def shown(written):
        return re.sub("|".join(special) or "(?!)", "", written)

    for end in range(1, len(ids) + 1):
        written = begun + tokenizer.decode(ids[:end], skip_special_tokens=False)
        exempt = exempt_chars(written)
        texts = [shown(written)]
        if at := find_first(texts[0], stops, len(shown(written[:exempt]))):
            texts.append(texts[0][: at.end if included else at.begin])
        if at := find_first(written, stops, exempt):
            texts.append(shown(written[: at.begin]) + written[at.begin : at.end] * included)
        if len(texts) > 1:
            break
    text = min(texts[1:] or texts, key=len).removeprefix(shown(begun))
    assert "".join(deltas) == out.text == text
    assert len(out.token_ids) == end


class Shouting:
    """A tokenizer that later changes its earlier text, unpredictably."""

    def decode(self, ids, skip_special_tokens):
        text = "".join(chr(97 + i) for i in ids)
        return text.upper() if len(ids) > 5 else text


def test_a_tokenizer_that_rewrites_its_text_cannot_break_a_stream():
    ids = list(range(9))
    for rounds in ([1], [2, 3], [9]):
        request, deltas = run(Shouting(), ids, SamplingParams(max_new_tokens=9), rounds)
        assert "".join(deltas) == request.output().text
        assert "".join(deltas).lower() == "abcdefghi"


def test_a_read_that_was_dropped_leaves_no_text_to_the_next():
    """`Handle.read` works on a copy, which an interruption drops; copies share the pieces that were handed out."""
    reader, (first, *others) = Detokenizer(TOKENIZERS["byte-level"]), [65, 66, 67]
    pieces = [reader.stream([first], [], finished=False)]
    copy.copy(reader).stream([first, others[0]], [], finished=False)
    for finished in (False, True):
        pieces.append(reader.stream([first, *others], [], finished=finished))
    assert "".join(pieces) == TOKENIZERS["byte-level"].decode([first, *others])


def test_no_token_begins_before_the_one_before_it_where_spaces_are_cleaned_up():
    tokenizer = TOKENIZERS["words-clean"]
    texts = TokenTexts(tokenizer)
    assert texts.read(ids_of(tokenizer, "'", "'s", "'", "<s>", "'s"), finished=True) == "''s''s"
    assert texts.begins == [0, 1, 3, 5, 5]


def test_special_tokens_of_a_tokenizer_that_only_names_their_ids_can_end_an_output():
    known = TOKENIZERS["byte-level"]
    ids = [65, known.convert_tokens_to_ids("<|im_end|>"), 66]
    bare = type("Bare", (), {"all_special_ids": ids[1:2], "decode": staticmethod(known.decode)})()
    request, _ = run(bare, ids, SamplingParams(max_new_tokens=3, stop="<|im_end|>"), [1])
    assert (request.output().text, request.num_output) == (known.decode(65), 2)


def test_end_tokens_that_only_the_config_of_the_text_model_names():
    text = SimpleNamespace(eos_token_id=[3, 4])
    whole = SimpleNamespace(eos_token_id=None, get_text_config=lambda: text)
    assert end_tokens(SimpleNamespace(config=whole), None) == {3, 4}


@pytest.mark.parametrize("char", "é€🙂")
def test_a_character_is_handed_out_whole_with_its_last_byte(char):
    reader, ids = Detokenizer(THINKERS["bytes"]), THINKERS["bytes"](f"a{char}")["input_ids"]
    pieces = [reader.stream(ids[:end], [], finished=False) for end in range(1, len(ids) + 1)]
    assert pieces == ["a", *[""] * (len(ids) - 2), char]


def test_a_thought_ends_at_a_mark_of_many_tokens():
    tokenizer, marks = THINKERS["bytes"], ("<t>", "[THE THOUGHT ENDS HERE]")
    ids = tokenizer(f"{marks[0]}a b{marks[1]}c b d")["input_ids"]
    params = SamplingParams(max_new_tokens=len(ids), stop="b", thought_marks=marks)
    for rounds in ([1], [5]):
        request, _ = run(tokenizer, ids, params, rounds)
        assert request.output().text == f"{marks[0]}a b{marks[1]}c "


def test_the_mark_after_a_thought_may_begin_with_white_space():
    assert thought_end("\n</think>a", ("", "\n</think>")) == len("\n</think>")


def test_readers_of_one_output_decode_its_newest_tokens_once(monkeypatch):
    """A stop string's search, the stream and the parser of calls each read the same tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs())
    calls, decode = [], type(tokenizer).decode
    counting = lambda self, ids, **how: calls.append(ids) or decode(self, ids, **how)  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "decode", counting)
    ids, first, second = [65, 66, 67, 68], Detokenizer(tokenizer), Detokenizer(tokenizer)
    for end in range(1, 5):
        first.find_stop(ids[:end], ["never there"])
        counted = len(calls)
        assert second.stream(ids[:end], [], finished=False) == decode(tokenizer, ids[end - 1 : end])
        assert len(calls) == counted > 0


def test_a_token_that_is_added_later_has_its_text():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs())
    new = len(tokenizer)
    assert Detokenizer(tokenizer).stream([new], [], finished=False) == ""
    tokenizer.add_tokens(["<added>"])
    assert Detokenizer(tokenizer).stream([new], [], finished=False) == "<added>"


@pytest.mark.parametrize("stops", [[], ["never there"], "after a thought"])
@pytest.mark.parametrize("name", ["byte-level", "llama", "word-piece-clean"])
def test_reading_costs_the_same_for_every_token(name, stops, monkeypatch):
    """Tokens decoded per token read: bounded, however long the output. Bytes that never make a character included."""
    tokenizer = TOKENIZERS[name]
    # pieces of characters alone; bytes and words; the patterns of the clean-up and words
    pieces = [i for i in range(256) if TOKENIZERS["byte-level"].decode([i]) == "\ufffd"]
    assert len(pieces) == 128
    common = {"byte-level": pieces, "llama": [200, 201, 202, *range(256, 264)], "word-piece-clean": range(18)}
    decoded = []
    decode = type(tokenizer).decode

    def counting(self, token_ids, **kwargs):
        decoded.append(len(token_ids))
        return decode(self, token_ids, **kwargs)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    rng = random.Random(0)
    detokenizer, ids = Detokenizer(tokenizer), []
    in_thought = stops == "after a thought"  # it is opened by two tokens, and does not end
    if in_thought:
        stops = StopStrings(["never there"], thought_marks=(tokenizer.decode([0, 0]), "never there"))
    for at in range(2000):
        ids.append(0 if in_thought and at < 2 else rng.choice(common[name]))
        if stops:
            detokenizer.find_stop(ids, stops)
        detokenizer.stream(ids, stops, finished=False)
    assert sum(decoded) < 40 * len(ids)
