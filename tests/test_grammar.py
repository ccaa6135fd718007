"""Grammars by themselves: which tokens may come next, where a text may end, what is forced, what is refused."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from specdec import SamplingParams
from specdec.config import MAX_FORCED_TOKENS
from specdec.errors import ConfigError
from specdec.sampling.grammars import grammar
from specdec.sampling.grammars.grammar import Grammars, compute_masks, tree_masks

from tiny_tokenizers import byte_level

EOS = 256  # of byte_tokenizer
WIDE = 300  # a head wider than the tokenizer, and no multiple of 32


@pytest.fixture(scope="module")
def grammars(byte_tokenizer):
    return Grammars(byte_tokenizer, WIDE)


@pytest.fixture(scope="module")
def start(grammars, byte_tokenizer):
    """start(text, **params): the state after a text in a grammar, with <eos> for an end."""

    def make(text="", ends=(EOS,), **params):
        state = grammars.start(SamplingParams(**params), frozenset(ends), frozenset({EOS}))
        for token in byte_tokenizer.encode(text):
            state = state.after(token)
        return state

    return make


@pytest.fixture(scope="module")
def allowed(byte_tokenizer):
    """What a mask allows, as characters; <eos> is $."""

    def of(mask):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        assert max(bits, default=0) <= EOS, "a token that the tokenizer does not have"
        return "".join(sorted("$" if token == EOS else byte_tokenizer.decode([token]) for token in bits))

    return of


CHOICE = {"": "cr", "c": "a", "ca": "nt", "cat": "$", "can": "$", "ro": "w", "row": "$b", "rowb": "o"}
REGEX = {"": "ab", "a": "$ab", "ab": "$ab", "abbaab": "$"}


def test_tokens_that_may_follow_a_text_by_hand(start, allowed):
    """A text, and all that may come next; a regex is of the whole text."""
    asked = ({"choice": ["cat", "can", "row", "rowboat"]}, CHOICE), ({"regex": "[ab]{1,6}"}, REGEX)
    for params, expected in asked:
        for text, may_follow in expected.items():
            state = start(text, **params)
            assert (allowed(state.mask), state.may_end) == (may_follow, "$" in may_follow), text


def test_forced_tokens_end_where_there_is_a_choice(start, byte_tokenizer):
    def forced(text, **params):
        return "".join("$" if t == EOS else byte_tokenizer.decode([t]) for t in start(text, **params).forced)

    assert forced("", choice=["yes", "no"]) == ""
    assert forced("y", choice=["yes", "no"]) == "es$"
    assert forced("row", choice=["row", "rowboat"]) == ""
    assert forced("", regex="abc(d|e)") == "abc"
    assert forced("", regex="a{40}") == "a" * MAX_FORCED_TOKENS
    assert forced("yes", choice=["yes", "no"], ends=(EOS, 7)) == "$"  # 7 is text, and the grammar has none here
    assert forced("yes", choice=["yes", "no"], ends=(EOS, 299)) == ""  # 299 is none: it ends the text as well


def test_ends_are_allowed_where_the_grammar_may_end_and_nowhere_else(start):
    for text, may_end in (("", False), ("{", False), ('{"a": 1', False), ('{"a": 1}', True)):
        state = start(text, json_object=True)
        assert (state.mask[EOS // 32] >> EOS % 32 & 1) == may_end == state.may_end
        assert (state.after(EOS) is not None) == may_end
    over = start('{"a": 1}', json_object=True).after(EOS)
    assert over.over and not over.may_end and over.after(EOS) is None and over.after(65) is None


def test_a_place_never_changes(start, allowed, byte_tokenizer):
    state = start("r", choice=["row", "rat"])
    before = allowed(state.mask)
    o, a, x = (byte_tokenizer.encode(c)[0] for c in "oax")
    assert allowed(state.after(o).mask) == "w" and allowed(state.after(a).mask) == "t"
    assert state.after(x) is None
    del state.mask
    assert allowed(state.mask) == before == "ao"


def test_masks_of_a_tree_are_those_of_its_nodes(start, allowed, byte_tokenizer):
    """r - o - w     every node's own mask; x is forbidden, so its children are not checked: all bits are set.
    ` a   ` x - w"""
    r, o, w, a, x = (byte_tokenizer.encode(c)[0] for c in "rowax")
    root = start("r", choice=["row", "rowboat", "rat"])
    tokens, parents = [r, o, a, w, x, w], [-1, 0, 0, 1, 1, 4]
    other = start("", regex="[xy]")
    masks = tree_masks([(root, tokens, parents), (other, [0, x, x, -1, 0, 0], [-1, 0, 1, 0, 0, 0])], -(-WIDE // 32))
    assert masks.shape == (2, 6, -(-WIDE // 32)) and masks.dtype == np.int32
    assert [allowed(mask) for mask in masks[0, :4]] == ["ao", "w", "t", "$b"]
    assert (masks[0, 4:] == -1).all()
    assert [allowed(mask) for mask in masks[1, :2]] == ["xy", "$"] and (masks[1, 2:] == -1).all()


def test_masks_made_together_are_those_made_alone(start, allowed):
    texts = ["", "[", "[1", '["a"']
    together, alone = ([start(text, json_schema={"type": "array"}) for text in texts] for _ in range(2))
    compute_masks([*together, None, together[0]])
    assert all((vars(a)["mask"] == b.mask).all() for a, b in zip(together, alone, strict=True))


def test_special_tokens_are_never_text(start, allowed):
    """A dot is any character; <eos> is spelled with characters, and is none."""
    state = start("", regex="(.|\n)*")
    assert state.mask[EOS // 32] >> EOS % 32 & 1  # the text may end
    assert not start("", regex="(.|\n)+").mask[EOS // 32] >> EOS % 32 & 1


@pytest.mark.parametrize("schema", [{"type": "integer"}, '{"type": "integer"}', "true", {}], ids=str)
def test_schemas_as_mapping_and_text(schema, start, allowed):
    assert "1" in allowed(start("", json_schema=schema).mask)


def test_formats_that_json_schema_does_not_define_constrain_nothing(start, allowed):
    """Pydantic writes them ("path", "password", "binary"), and the library refuses them."""
    path = {"type": "string", "format": "path"}
    schema = {"properties": {"format": path, "const": {"anyOf": [path, {"type": "null"}]}}, "required": ["format"]}
    assert "x" in allowed(start('{"format": "', json_schema=schema).mask)
    assert "x" in allowed(start('{"format": "a", "const": "', json_schema=schema).mask)
    assert allowed(start('{"format": "', json_schema={"const": {"format": "path"}}).mask) == "p"
    assert "x" not in allowed(start('"', json_schema={"type": "string", "format": "date"}).mask)


def test_text_that_is_lost_does_not_fill_lines(start, allowed):
    """White space between the parts of JSON: a space, or a new line and its indent."""
    for text, more in (("{", True), ("{ ", False), ("{\n", True), ("{\n" + " " * 31, True), ("{\n" + " " * 32, False)):
        assert (" " in allowed(start(text, json_object=True).mask)) == more
    pretty = json.dumps({"a": [1, {"b": "c"}], "d": None}, indent=2)
    for written in (pretty, json.dumps(json.loads(pretty)), json.dumps(json.loads(pretty), separators=(",", ":"))):
        assert start(written, json_object=True).may_end


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # Zod writes a record so
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}}, '{"a": 1}'),
        ({"items": {"enum": [1]}, "uniqueItems": False, "not": False, "unevaluatedItems": {}}, "[1, 1]"),
        ({"properties": {"uniqueItems": False, "not": {"const": 2}}, "required": ["not"]}, '{"not": 2}'),
        ({"const": {"uniqueItems": False}}, '{"uniqueItems": false}'),
        ({"$defs": {"x": {"allOf": [{"const": 1, "dependencies": {}}]}}, "$ref": "#/$defs/x"}, "1"),
    ],
    ids=str,
)
def test_a_keyword_that_restricts_nothing_is_no_reason_to_refuse_a_schema(schema, text, start):
    before = json.dumps(schema)
    assert start(text, json_schema=schema).may_end and json.dumps(schema) == before


def test_a_property_that_is_called_like_a_keyword_is_kept(start, allowed):
    state = start('{"', json_schema={"properties": {"uniqueItems": False, "a": {}}, "additionalProperties": False})
    assert allowed(state.mask) == "a", "no object may have the other"


@pytest.mark.parametrize("reference", ["https://a.example/x", "https://a.example/s#/$defs/x", "x", "urn:of:x"])
def test_a_reference_to_a_schema_within_the_schema_is_followed_by_its_address(reference, start):
    x = {"$id": "urn:of:x" if reference == "urn:of:x" else "x", "const": 1}
    schema = {"$id": "https://a.example/s", "$defs": {"x": x}, "items": {"$ref": reference}}
    assert start("[1]", json_schema=schema | {"type": "array"}).may_end


REFUSED = [
    ({"regex": "(a"}, ["regex cannot be followed (unclosed group)"]),
    ({"regex": "a(?=b)"}, ["look-around", "not supported"]),
    ({"json_schema": {"type": "text"}}, ["json_schema cannot be followed (Invalid type: text)"]),
    ({"json_schema": {"not": {"type": "null"}}}, ["Unimplemented keys", "not"]),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, ["uniqueItems"]),
    ({"json_schema": {"propertyNames": {"pattern": "^a"}}}, ["propertyNames"]),
    ({"json_schema": {"type": "string", "format": "json-pointer"}}, ["Unknown format: json-pointer"]),
    ({"json_schema": {"$ref": "#/$defs/x"}}, ["/$defs/x"]),
    ({"json_schema": {"$ref": "#"}}, ["json_schema cannot be followed (no text does)"]),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, ["minimum (5) is greater than maximum (3)"]),
    ({"json_schema": "false"}, ["schema is false"]),
    ({"json_schema": "3"}, ["an object or boolean"]),
    ({"json_schema": {"type": "string", "pattern": "(a"}}, ["unclosed group"]),
]


@pytest.mark.parametrize(("params", "parts"), REFUSED, ids=str)
def test_unsupported_grammars_are_refused_with_the_reason(params, parts, grammars):
    with pytest.raises(ConfigError) as error:
        grammars.start(SamplingParams(**params), {EOS}, {EOS})
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message and message.endswith("; change it, or leave it out")


def test_grammars_name_the_part_that_is_missing(byte_tokenizer, pair_tokenizer, monkeypatch):
    params = SamplingParams(choice=["a"])
    with pytest.raises(ConfigError, match=r"^choice needs a tokenizer; pass tokenizer=\.\.\.$"):
        Grammars(None, 96).start(params, {1}, {1})
    with pytest.raises(ConfigError, match=r"^choice needs a token that ends the text.*stop_token_ids$"):
        Grammars(byte_tokenizer, 300).start(params, {7}, set())  # 7 is text
    with pytest.raises(ConfigError, match=r"^grammars cannot be followed with this tokenizer .*decoder type"):
        Grammars(pair_tokenizer, 96).start(params, {1}, {1})
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'^grammars need llguidance: pip install "specdec-runtime\[grammar\]"'):
        Grammars(byte_tokenizer, 300).start(params, {EOS}, {EOS})
    assert Grammars(None, 96).start(SamplingParams(), {1}, {1}) is None


def test_choices_are_taken_literally(start):
    odd = ["a.b*", "(x|y)", 'say "hi"', "back\\slash", "zwei\nZeilen", "grün", "\x7f\x01", "\U0001f600"]
    for one in odd:
        assert start(one, choice=odd).may_end, one
    with pytest.raises(AttributeError):  # the grammar went nowhere with the b
        start("aXb", choice=odd)


CONTROLS = ("<eos>", "<table>", "[PAD]")


@pytest.mark.parametrize(
    "text",
    ["cafe\u0301", "\u095c", "a <table>b", "<table>", "<eos>x", "[PAD] ABC"],
    ids=["decomposed", "recomposed", "within", "alone", "end", "normalised"],
)
@pytest.mark.parametrize("grammar", ["choice", "regex", "json_schema"])
def test_a_forced_text_is_written_as_it_is(grammar, text):
    """Regression: a text that the tokenizer's normalizer changes (Qwen's is NFC), or that names a control token (Gemma
    has one for "<table>"), was forced as tokens that the grammar then refused, which ended the request."""
    backend = byte_level([("a", "b"), ("e", "Ì")])
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.add_special_tokens(list(CONTROLS))
    tokenizer, ends = (
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"),
        {backend.token_to_id("<eos>")},
    )
    params = {"choice": {"choice": [text]}, "json_schema": {"json_schema": {"const": text}}}
    params["regex"] = {"regex": f"{re.escape(text)}(x{{2}}|y)"}
    state = Grammars(tokenizer, 300).start(SamplingParams(**params[grammar]), frozenset(ends), ends)
    written = []
    while not state.may_end:
        [token, *_] = np.unpackbits(state.mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        written.append(token)
        state = state.after(token)
    said = tokenizer.decode(written, skip_special_tokens=True)
    assert said.startswith(text) if grammar == "regex" else text == (said if grammar == "choice" else json.loads(said))


def test_a_grammar_is_compiled_once(byte_tokenizer, monkeypatch):
    grammars, compiled, compile = Grammars(byte_tokenizer, 300), [], grammar.GrammarLibrary.compile
    monkeypatch.setattr(grammar.GrammarLibrary, "compile", lambda *args: compiled.append(args[2]) or compile(*args))
    for one in (["a", "b"], ("a", "b"), ["a", "c"]):
        grammars.start(SamplingParams(choice=one), {EOS}, {EOS})
    assert compiled == [("a", "b"), ("a", "c")]


def test_a_request_begins_while_a_step_reads_another_with_its_grammar(start):
    """Regression: both had one matcher, which the library refuses to two threads: "Already borrowed"."""
    running, over = start(json_object=True), threading.Event()

    def step():
        while not over.is_set():
            running.library.masks([running])

    with ThreadPoolExecutor(1) as threads:
        stepping = threads.submit(step)
        try:
            for _ in range(100):
                assert start(json_object=True).mask.any()
        finally:
            over.set()
        stepping.result()
