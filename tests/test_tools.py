"""Tool calls out of text, in the ways in which models write them: the same however a text is cut, and nothing lost."""

import copy
import json
from types import SimpleNamespace

import pytest
from answer_formats import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from specdec import SpecDecError
from specdec.runtime.request_output import GenerationOutput, RequestStats, StreamDelta
from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Text
from specdec.serving.tools.answer_parser import AnswerReader
from specdec.serving.tools.tool_parsers import PARSERS, tool_parser_for
from specdec.text.detokenize import Detokenizer

from marks import examples


def gathered(events):
    """(content, [(name, arguments), ...]), with the order in which events may come checked."""
    content, calls, ids, last = "", [], [], None
    for event in events:
        match event:
            case Text():
                assert event.text and (event.begins or (isinstance(last, Text) and last.kind == event.kind))
                content += event.text * (event.kind == "content")
            case CallBegin():
                assert event.index == len(calls) and event.id not in ids
                calls.append([event.name, ""])
                ids.append(event.id)
            case CallArguments():
                assert event.index == len(calls) - 1 and event.text and isinstance(last, CallBegin | CallArguments)
                calls[-1][1] += event.text
            case CallEnd():
                assert event.index == len(calls) - 1 and isinstance(last, CallBegin | CallArguments)
        last = event
    return content, [tuple(call) for call in calls]


def parsed(name, pieces, **options):
    parser = PARSERS[name](**options)
    found = [piece for text in pieces for piece in parser.feed(text)]
    return gathered(piece.event for piece in found + parser.finish())


WEATHER = ("weather", '{"city": "Paris"}')
CASES = {
    "hermes": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [WEATHER]),
        ('{"name": "weather", "arguments": {"city": "Paris"}}', None, []),
        ('A.\n<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>\nB', "A.\n\nB", [WEATHER]),
        ('<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "f", "arguments": null}</tool_call>\n', "",
         [("now", "{}"), ("f", "{}")]),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>', "",
         [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        # a brace, or the end, was forgotten
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}</tool_call>', "", [WEATHER]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}<tool_call>{"name": "now"}', "",
         [WEATHER, ("now", "{}")]),
        # what JSON wants escaped is; a lone backslash was meant as one
        ('<tool_call>{"name": "f", "arguments": {"re": "\\d\n"}}</tool_call>', "", [("f", '{"re": "\\\\d\\n"}')]),
        # no calls
        ("a <tool_call>b</tool_call> <tool_cal", None, []),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "two words", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": 5}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}}</tool_call>', None, []),
        (" \n", None, []),
        ("", "", []),
        ('<tool_call>{"<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"', [("now", "{}")]),
        # malformed, or cut off, from some character on
        ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "oops}}</tool_call>", [("f", '{"a": ')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, tr', "", [("f", '{"a": [1, tr')]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_', "", [("f", "{}")]),
        ('Well. <tool_call>{"name": "f", "argu', None, []),
        # of Qwen3-Coder
        ("<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
         "\n</tool_call>", "", [("f", '{"city": "Paris", "n": 3}')]),
        ("<tool_call><function=now></function></tool_call>", "", [("now", "{}")]),
        ("<tool_call><function=f><parameter=a>x <b> </parameter>oops", "oops", [("f", '{"a": "x <b> "')]),
        # of GLM
        ("<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3"
         "</arg_value>\n</tool_call>", "", [("f", '{"city": "Paris", "n": 3}')]),
        ("A<tool_call>f<arg_key>a</arg_key>x</arg_value></tool_call>\nB", "A\nB", [("f", '{"a": "x"}')]),
    ],
    "llama": [
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [WEATHER]),
        ('\n<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', "", [WEATHER]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
        ('I look. <|python_tag|>{"name": "f", "parameters": {}}', "I look. ", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; and more', "; and more", [("f", "{}")]),
        ('{"name": "Bob", "age": 5}', None, []),
        ('{"name": "Bob"}', None, []),
        ("[1, 2]; {", None, []),
        ('As JSON: {"name": "f", "parameters": {}}', None, []),
        ("<|python_tag|>print(1)", None, []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]', "", [WEATHER]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]', "", [("f", "{}"), ("g", "{}")]),
        ('Ok[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{}', "Ok", [WEATHER, ("g", "{}")]),
        ('[TOOL_CALLS]weather{"city": "Paris"}', "", [WEATHER]),
        ("[1] [TOOL_CALLS]f[ARG", None, []),
        ("[TOOL_CALLS][]", None, []),
    ],
    "gemma4": [
        ('<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', "", [WEATHER]),
        ('<|tool_call>call:f{s:<|"|>a "b" <|c\\\n<|"|>,n:-3,x:1.5,on:true}<tool_call|>', "",
         [("f", '{"s": "a \\"b\\" <|c\\\\\\n", "n": -3, "x": 1.5, "on": true}')]),
        ('<|tool_call>call:f{no:null,xs:[1,<|"|>b<|"|>,[]],o:{k:{}}}<tool_call|>', "",
         [("f", '{"no": null, "xs": [1, "b", []], "o": {"k": {}}}')]),
        ("Sure.<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>", "Sure.", [("f", "{}"), ("g", "{}")]),
        ('<|tool_call>call:f{"a":"b\\n",<|"|>c<|"|>:2,d:Paris}<tool_call|>', "",
         [("f", '{"a": "b\\n", "c": 2, "d": "Paris"}')]),
        ("<|tool_call>call f{}<tool_call|>", None, []),
        ("<|tool_call>call:f{a:}<tool_call|>", "}<tool_call|>", [("f", '{"a": ')]),
        ('<|tool_call>call:f{a:<|"|>Par', "", [("f", '{"a": "Par')]),
        # of a text: without the first quote, with quotes within, with quotes of other languages
        ('<|tool_call>call:f{a:Rome, Italy<|"|>,n:5}<tool_call|>', "", [("f", '{"a": "Rome, Italy", "n": 5}')]),
        ("<|tool_call>call:f{a:Rome, Italy}<tool_call|>", "Italy}<tool_call|>", [("f", '{"a": "Rome", ')]),
        ('<|tool_call>call:f{xs:[Rome,b c],s:<|"|>x<|"|>}<tool_call|>', "",
         [("f", '{"xs": ["Rome", "b c"], "s": "x"}')]),
        ('<|tool_call>call:f{a:<|"|>d = {<|"|>k<|"|>: g(<|"|>v<|"|>, x)}<|"|>,n:5}<tool_call|>', "",
         [("f", '{"a": "d = {\\"k\\": g(\\"v\\", x)}", "n": 5}')]),
        ('<|tool_call>call:f{<|"|>a<|"|>:<|"|>x<|"|>,<|"|>b<|"|>:<|"|>y<|"|>}<tool_call|>', "",
         [("f", '{"a": "x", "b": "y"}')]),
        ("<|tool_call>call:f{xs:['it's', 'b, c'],o:{'k':'v'}}<tool_call|>", "",
         [("f", '{"xs": ["it\'s", "b, c"], "o": {"k": "v"}}')]),
        ('<|tool_call>call:f{a:<|"|>x<|"|> y}<tool_call|> z', "<tool_call|> z", [("f", '{"a": "x\\" y}')]),
    ],
    "functiongemma": [
        ("<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", [WEATHER]),
    ],
    "harmony": [
        ('<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary to=functions.weather '
         '<|constrain|>json<|message|>{"city": "Paris"}<|call|>', "", [WEATHER]),
        ('<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": "Paris"}', "", [WEATHER]),
        ("<|channel|>final<|message|>Hello <|x|> <|<|return|>", "Hello <|x|> <|", []),
        ("<|channel|>commentary to=functions.f<|message|>no JSON", "no JSON", []),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1, oops}<|call|>', "oops}",
         [("f", '{"a": 1, ')]),
        ('<|channel|>commentary to=functions.f<|message|>{"a": [1', "", [("f", '{"a": [1')]),
        ("<|channel|>commentary to=functions.f<|message|> <|call|>", "", [("f", "{}")]),
        ("<|channel|>analysis to=python<|message|>print(1)<|end|>", "", []),
        ("no header<|end|> <|channel|>final<|message|> a\n", "no header  a\n", []),
        ("<|channel|>final<|message|>Yes.<|end|><|start|>assis", "Yes.", []),
        ("<|channel|>" + "x" * 300, None, []),
    ],
    "deepseek_v3": [
        ("A<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\nB", "A\nB",
         [WEATHER, ("g", "{}")]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
         [("f", "{}"), ("g", "{}")]),
        # marks that are missing
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁calls▁end｜> B", " B",
         [("f", "{}"), ("g", "{}")]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{} ```B", " ```B", [("f", "{}")]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>type<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
         None, []),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>", None, []),
        ("<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> ```json\n{}\n```", None, []),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>x",
         "<｜tool▁call▁begin｜>g<｜tool▁sep｜>x", [("f", "{}")]),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>```json\n{\"a\": [1\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>",
         [("f", '{"a": [1\n')]),
    ],
    "kimi_k2": [
        ("A <|tool_calls_section_begin|> <|tool_call_begin|>\nfunctions.weather:0 <|tool_call_argument_begin|> "
         '{"city": "Paris"} <|tool_call_end|><|tool_call_begin|>a.b:c:12<|tool_call_argument_begin|>{}<|tool_call_end|>'
         " <|tool_calls_section_end|> B", "A  B", [WEATHER, ("a.b:c", "{}")]),
        ("<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_calls_section_end|>", "", [("f", "{}")]),
        ("<|tool_call_begin|>call_59ad<|tool_call_argument_begin|>{}<|tool_call_end|>", None, []),
        ("<|tool_call_begin|>functions.two words:0<|tool_call_argument_begin|>{}<|tool_call_end|>", None, []),
        ("<|tool_calls_section_begin|><|tool_calls_section_end|>", None, []),
        ('<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": oops}<|tool_call_end|>', "oops}<|tool_call_end|>",
         [("f", '{"a": ')]),
    ],
    "minimax_m2": [
        ('A\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
         '<invoke name="f">\n<parameter name="n" type="number">3</parameter>\n</invoke>\n</minimax:tool_call>\nB',
         "A\n\nB", [WEATHER, ("f", '{"n": 3}')]),
        ('<minimax:tool_call><invoke name="f" description="Run (e.g. ls)"></invoke></minimax:tool_call>', "",
         [("f", "{}")]),
        ('<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></minimax:tool_call>', "",
         [("f", '{"a": "x"}')]),
        ('<minimax:tool_call><invoke name="f"></invoke> B', " B", [("f", "{}")]),
        ('<minimax:tool_call><invoke name="f"></invoke><invoke name=f></invoke>', "<invoke name=f></invoke>",
         [("f", "{}")]),
        ('<minimax:tool_call><invoke name="f"></invoke><invoke name="g', '<invoke name="g', [("f", "{}")]),
        ('<minimax:tool_call><tool_name>f</tool_name></minimax:tool_call>', None, []),
        ('So: <invoke name="f"></invoke>', None, []),
    ],
    "granite": [('<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [WEATHER])],
    "cohere": [
        ('<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}\n]'
         "<|END_ACTION|>", "", [WEATHER]),
    ],
}  # fmt: skip
EACH_CASE = [
    pytest.param(name, *case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), EACH_CASE)
def test_content_and_calls_of_a_text(name, text, content, calls):
    want = (text if content is None else content, calls)  # None: all of it
    assert parsed(name, [text]) == want
    assert parsed(name, text) == want  # a character at a time
    for at in range(0, len(text), examples(3, 1)):
        assert parsed(name, [text[:at], "", text[at:]]) == want


def test_arguments_come_as_they_are_written():
    parser = PARSERS["hermes"]()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    first, second = (piece.event for piece in parser.feed('{"a": "one'))
    assert (first.index, first.name) == (0, "f") and first.id
    assert second == CallArguments(0, '{"a": "one')
    assert [piece.event for piece in parser.feed(' two"')] == [CallArguments(0, ' two"')]
    more = [piece.event for piece in parser.feed("}}</tool_call> Then")]
    assert more == [CallArguments(0, "}"), CallEnd(0, whole=True), Text("content", " Then", begins=True)]
    assert parser.num_calls == 1 and parser.finish() == []


def test_ids_are_of_the_length_that_mistral_templates_insist_on():
    call = PARSERS["mistral"]().feed("[TOOL_CALLS]f[ARGS]{}")[0].event
    assert len(call.id) == 9 and call.id.isalnum()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:f{a:1,b:[2, ],}<tool_call|>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "b": [2,], }}</tool_call>'),
    ],
)
def test_a_trailing_comma_is_not_handed_out(name, text):
    content, [(_, arguments)] = parsed(name, text)
    assert content == "" and json.loads(arguments) == {"a": 1, "b": [2]}


def test_nested_arguments_have_a_limit_and_lose_nothing():
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 500
    content, [(_, arguments)] = parsed("hermes", [text])
    assert text.endswith(arguments + content) and content.startswith("[")


# properties

FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '"parameters": ', "{}", '{"a": [1, "x"]}', "}",
     "]", "[", ",", '"', "\\", "\n", " ", "<", "<|", "|>", "call:f", "{a:", '<|"|>', "<|tool_call>", "<tool_call|>",
     "tru", "-1e", "[TOOL_CALLS]", "[ARGS]", "f", ";", "<|python_tag|>", "<|channel|>", "<|message|>", "<|end|>",
     "to=functions.f", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>a</arg_key>",
     "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json",
     "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f:0",
     "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<minimax:tool_call>",
     '<invoke name="f">', '<parameter name="a">', "</invoke>", "</minimax:tool_call>"]
)  # fmt: skip
NAMES = st.sampled_from(sorted(PARSERS))


@given(name=NAMES, pieces=st.lists(FRAGMENTS, max_size=14), data=st.data())
@settings(max_examples=examples(100, 400), deadline=None)
def test_no_cut_changes_anything_and_no_character_is_lost(name, pieces, data):
    text = "".join(pieces)
    content, calls = parsed(name, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(name, cut) == parsed(name, text) == (content, calls)
    if not calls and name != "harmony":  # whose markup is no content
        assert content == text
    left = iter(text)
    assert all(char in left for char in content)  # in order


KEYS = st.text("abcdefgh_0", min_size=1, max_size=6)  # Gemma 4 has no quotes around them
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(st.from_regex(r"\A[a-zA-Z0-9_-]{1,20}\Z"), st.dictionaries(KEYS, VALUES, max_size=3))


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name not in ("coder", "glm", "minimax")]
)  # whose values have no quotes
@given(calls=st.lists(CALLS, min_size=1))
@settings(max_examples=examples(4, 60), deadline=None)
def test_calls_that_a_template_writes_are_read_back(name, calls):
    parser, _, write, _ = FORMATS[name]
    content, found = parsed(parser, "".join(write(*call) for call in calls))
    assert content == ""
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls


# which format, and the special tokens that it is written with


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<tool_call>\\n{\"name\": ...", "hermes"),
        ("{{ tools }}<|start_header_id|>ipython {\"name\": function, \"parameters\": ...}", "llama"),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|tool_call>call:{{ name }}<tool_call|>", "gemma4"),
        ("{{ tools }}<|channel|>commentary to=functions.{{ name }}", "harmony"),
        ("{{ tools }}<|tool_call|>", "granite"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, None),
    ],
)  # fmt: skip
def test_the_template_tells_the_format(template, name, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    assert tool_parser_for(tokenizer) is PARSERS.get(name)
    tokenizer.chat_template = template and {"default": "{{ messages }}", "tool_use": template}
    assert tool_parser_for(tokenizer) is PARSERS.get(name)


def test_the_format_can_be_named(byte_tokenizer):
    assert tool_parser_for(byte_tokenizer, name="mistral") is PARSERS["mistral"]
    assert tool_parser_for(SimpleNamespace(chat_template="{{ tools }}<tool_call>"), "none") is None
    with pytest.raises(SpecDecError, match=r"tool_parser='hermès' is unknown; choose one of auto, none, gemma4, "):
        tool_parser_for(byte_tokenizer, name="hermès")


def deltas(ids, sizes):
    at = 0
    for size in sizes:
        yield StreamDelta("", ids[at : at + size], [])
        at += size
    yield StreamDelta("", ids[at:], [], GenerationOutput([], ids, "", "stop", RequestStats(), []))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Eight, I think.", "Eight, I think."),
        ("Eight. " * 60, "Eight. " * 60),
        ("Eight.<|return|>", "Eight."),
        ("Eight.<|end|><|start|>assistant<|channel|>final<|message|> Yes.", "Eight. Yes."),
        ("final<|message|>Eight.<|return|>", "Eight."),
        ("<|channel|>fin", ""),
        (" to=functions.f<|chan", ""),
        ("", ""),
    ],
    ids=["short", "long", "ended", "more", "mark missing", "channel cut", "recipient cut", "nothing"],
)
def test_an_answer_without_a_header_is_content(text, content):
    """Models trained on without channels write none. It was lost, or began with the end of the prompt."""
    for pieces in ([text], text):
        parser = PARSERS["harmony"]()
        parser.prime(parser.begun_by("Hi<|end|><|start|>assistant"))
        found = [piece.event for part in pieces for piece in parser.feed(part)]
        found += [piece.event for piece in parser.finish()]
        assert gathered(found) == (content, [])


@pytest.mark.parametrize("sizes", [[], [1], [2, 0, 3], [1] * 40], ids=["one", "two", "some", "tokens"])
def test_special_tokens_of_the_format_reach_the_parser_and_others_do_not(sizes, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    special = [*PARSERS["gemma4"].special, "<turn|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in special]})
    ids = tokenizer('Yés.<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><turn|>')["input_ids"]
    assert "tool_call" not in Detokenizer(tokenizer).final_text(ids, ()).replace("call:", "")
    reader = AnswerReader(tokenizer, PARSERS["gemma4"]())
    said = [event for delta in deltas(ids, sizes) for event, _ in reader.read(delta)]
    assert gathered(said) == ("Yés.", [WEATHER])
    written = frozenset(tokenizer.convert_tokens_to_ids(special[:3]))
    assert Detokenizer(tokenizer, written).final_text(ids, ("Paris",)) == 'Yés.<|tool_call>call:weather{city:<|"|>'
