"""Calls whose values have no quotes, of Qwen3-Coder, GLM and MiniMax: types, ends, and markers that are missing."""

import json

import pytest
from answer_formats import as_glm, invoked
from hypothesis import given
from hypothesis import strategies as st
from test_tools import gathered, parsed

from specdec.serving.openai.chat_template import arguments_of
from specdec.serving.tools.answer_events import CallEnd
from specdec.serving.tools.tool_parsers import PARSERS


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"allOf": [{"$ref": "#/$defs/Code"}]}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, "no JSON", "no JSON"),
        ({"type": "array"}, "['a', 1, None,]", ["a", 1, None]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, '{"a": "1\n2"}', {"a": "1\n2"}),
        ({"type": "array"}, "[1j]", "[1j]"),
        ({"type": ["array", "string"]}, "['a']", "['a']"),
        ({}, "3", 3),
    ],
    ids=str,
)
def test_a_value_without_quotes_is_what_the_schema_says(schema, written, value):
    """test_schema_types.py has the types that a schema accepts."""
    tools = {"f": {"properties": {"x": schema}, "$defs": {"Code": {"type": "string"}}}}
    [(_, arguments)] = parsed("hermes", [tagged(parameter("x", written))], tools=tools)[1]
    assert json.loads(arguments) == {"x": value}


def tagged(*parameters, name="f"):
    return f"<tool_call>\n<function={name}>\n" + "".join(parameters) + "</function>\n</tool_call>"


def parameter(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


GLM = """<tool_call>f
<arg_key>a</arg_key>
<arg_value>x</arg_value>
<arg_key>b</arg_key>
<arg_value>y</arg_value>
</tool_call>"""


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Well.\n{tagged(parameter('a', 'x'))}".replace("<tool_call>\n", ""), "Well.\n", [("f", '{"a": "x"}')]),
        (tagged().replace("tool_call", "x") * 2, "<x>\n\n</x><x>\n\n</x>", [("f", "{}")] * 2),
        ("Use <function=f> so: <function=g></function>", None, []),
        ("<tool_call>f</tool_call><tool_call>g</tool_call>", "<tool_call>g</tool_call>", [("f", "{}")]),
    ],
)
def test_markers_that_a_model_forgets_are_not_missed_where_a_tool_is_known(text, content, calls):
    """A call of Qwen3-Coder without its first marker; of GLM, one without arguments, which has no other marker."""
    for pieces in ([text], text):
        assert parsed("hermes", pieces, tools={"f": {}}) == (text if content is None else content, calls)


@pytest.mark.parametrize("text", [tagged(parameter("a", "x"), parameter("b", "y")), GLM], ids=["coder", "glm"])
def test_arguments_of_a_call_that_is_cut_anywhere_can_be_sent_back(text):
    for at in range(len(text)):
        parser = PARSERS["hermes"]({"f": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}})
        events = [piece.event for piece in parser.feed(text[:at]) + parser.finish(cut=True)]
        content, calls = gathered(events)
        whole = any(isinstance(event, CallEnd) and event.whole for event in events)
        assert whole == ("</function>" in text[:at])
        for _, arguments in calls:
            assert content == "" and arguments_of(arguments, "arguments").keys() <= {"a", "b"}


CODE = """if line.endswith("</parameter>"):
    return "<function=x>" if a < b else "</function>" """
QUOTED = tagged(parameter("b", "2"), name="g")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tagged(parameter("a", CODE), parameter("b", 1)), {"a": CODE, "b": 1}),  # marks within a value
        (tagged(parameter("a", "x </parameter> y")), {"a": "x </parameter> y"}),
        (tagged(parameter("a", QUOTED), parameter("b", 1)), {"a": QUOTED, "b": 1}),  # a whole call, quoted
        (tagged(parameter("a", 'find("<function=")'), parameter("b", 1)), {"a": 'find("<function=")', "b": 1}),
        (tagged("<parameter=a>\nParis\n", parameter("b", 1)), {"a": "Paris", "b": 1}),  # one that was not closed
        (tagged("<parameter=a>\nParis\n"), {"a": "Paris"}),
        (tagged(parameter("a", "one"), parameter("a", "two")), {"a": "one"}),  # one that is named twice
        (tagged(parameter("a", "one")).replace("</function>", ""), {"a": "one"}),  # the call was not closed
        (tagged(parameter("a", "one"))[: -len("</function>\n</tool_call>")], None),  # it was cut off
        (tagged("<parameter=a>\nPar")[: -len("</function>\n</tool_call>")], None),
    ],
)
def test_markers_that_end_a_value_without_quotes(text, expected):
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
    content, [(name, arguments)] = parsed("hermes", [text], tools=tools)
    assert name == "f" and content == ""
    assert parsed("hermes", text, tools=tools) == (content, [(name, arguments)])
    if expected is None:
        assert arguments.strip() in ('{"a": "one"', '{"a": "Par')
    else:
        assert json.loads(arguments) == expected


@given(text=st.text() | st.sampled_from(["\nline\n", " 3", "null", "a < b", "</", "<invoke", "</invoke>", CODE]))
def test_a_text_of_minimax_is_read_as_it_is_written(text):
    tools = {"f": {"properties": {"a": {"type": "string"}}}}
    content, [(_, arguments)] = parsed("minimax_m2", [invoked("f", {"a": text})], tools=tools)
    assert content == "" and json.loads(arguments) == {"a": text}


def test_a_value_of_minimax_that_is_not_closed_ends_where_another_parameter_begins():
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
    text = invoked("f", {"a": "<parameter>", "b": 1}).replace("</parameter>", "", 1)
    content, [(_, arguments)] = parsed("minimax_m2", text, tools=tools)
    assert content == "" and json.loads(arguments) == {"a": "<parameter>\n", "b": 1}


FORMATS = {  # parser, how it writes a call and the end of a value
    "coder": ("hermes", lambda name, values: tagged(*(parameter(*each) for each in values.items())), "</parameter>"),
    "glm": ("hermes", as_glm, "</arg_value>"),
    "minimax": ("minimax_m2", invoked, "</parameter>"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_values_of_all_formats_end_by_the_same_rules(form):
    """A value of GLM ended at any mark, and held the next parameter if it was not closed; one of MiniMax that was not
    closed held the next call."""
    parser, written, end = FORMATS[form]
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}

    def read(text):
        for pieces in ([text], text):
            content, calls = parsed(parser, pieces, tools=tools)
            assert content.strip() == ""
        found = [json.loads(arguments, object_pairs_hook=list) for _, arguments in calls]
        return [[(key, value.strip() if key == "a" else value) for key, value in pairs] for pairs in found]

    one, both = written("f", {"a": "x"}), written("f", {"a": "x", "b": 3})
    code = f"if a < '{end}' or b"
    assert read(written("f", {"a": code, "b": 3})) == [[("a", code), ("b", 3)]]
    assert read(written("f", {"a": one, "b": 3})) == [[("a", one), ("b", 3)]]  # a whole call, quoted
    assert read(both.replace(end, "", 1)) == [[("a", "x"), ("b", 3)]]
    assert read(one.replace(end, "", 1)) == [[("a", "x")]]
    assert read(one.replace(end, "", 1) + one) == [[("a", "x")], [("a", "x")]]
    assert read(one.replace(end, "", 1).rpartition("\n")[0] or one) == [[("a", "x")]]  # nor is the block around it
    assert read(written("f", {"a": "x", "zz": "y"}).replace("zz", "a")) == [[("a", "x")]]
