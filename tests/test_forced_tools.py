"""Tools that must be called: what their schemas may say, and that a call which they allow is read back as it is.

The model recites a call; where the grammar of the request does not allow it, the text ends there.
"""

import json

import pytest
from reciting_server import reciting

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBER = {"type": "integer"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}


@pytest.fixture(scope="module")
def reciter():
    with reciting(tool_parser="none") as reciter:
        yield reciter


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def of(definition, where="$defs", **more):
    """Parameters with one property x, which is defined elsewhere in them."""
    properties = {"x": {"$ref": f"#/{where}/X", "description": "It."}}
    return {"type": "object", "properties": properties, "required": ["x"], where: {"X": definition}} | more


def asked(reciter, path, recited, **more):
    """The model writes this text."""
    reciter.texts.append(recited)
    said = f"recite {len(reciter.texts) - 1}"
    body = {"input": said} if path == "responses" else {"messages": [{"role": "user", "content": said}]}
    if path == "responses" and "tools" in more:
        more["tools"] = [{"type": "function", **each["function"]} for each in more["tools"]]
    return reciter.post(path, **body | {"temperature": 0} | more)


def called(reciter, path, name, arguments, *tools):
    """(name, arguments) that a client reads where the model writes this call; None where the grammar forbids it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    answer = asked(reciter, path, text, tools=list(tools), tool_choice="required")
    if "cannot be followed any further" in answer.text:
        return None
    assert answer.status_code == 200, answer.text
    if path == "responses":
        [call] = answer.json()["output"]
    else:
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        [call] = [call["function"] for call in choice["message"]["tool_calls"]]
    return call["name"], json.loads(call["arguments"])


TREE = {
    "type": "object",
    "properties": {"value": NUMBER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
ALLOWED = {
    "defs": (of(NUMBER), {"x": 1}, {"x": "1"}),
    "definitions": (of(NUMBER, "definitions", **DRAFT_7), {"x": 1}, {"x": "1"}),
    "draft 4": (of(NUMBER, "definitions", **DRAFT_4), {"x": 1}, {"x": "1"}),
    "nested defs": (of({"$ref": "#/$defs/X/$defs/Y", "$defs": {"Y": PLACE}}), {"x": {"city": "Ulm"}}, {"x": 1}),
    "escaped": ({"type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": NUMBER}},
                {"x": 1}, {"x": ""}),
    "the arguments": (TREE, {"value": 1, "next": {"value": 2, "next": None}},
                      {"value": 1, "next": {"name": "f", "arguments": {"value": 2, "next": None}}}),
    "a property": ({"type": "object", "properties": {"a": NUMBER, "x": {"$ref": "#/properties/a"}}}, {"x": 1},
                   {"x": "1"}),
    "an anchor": ({"type": "object", "properties": {"x": {"$ref": "#n"}}, "$defs": {"N": {"$anchor": "n"} | NUMBER}},
                  {"x": 1}, {"x": "1"}),
    "the root": ({"$ref": "#/$defs/A", "$defs": {"A": PLACE}}, {"city": "Ulm"}, {"city": 1}),
    "the root, draft 7": ({"$ref": "#/definitions/A", "definitions": {"A": PLACE}} | DRAFT_7, {"city": "Ulm"},
                          {"city": 1}),
    "its own address": ({"$id": "T", "type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "T"}}}},
                        {"x": [{"x": []}]}, {"x": [1]}),
    "an address within": ({"type": "object", "properties": {"x": {"$ref": "T"}}, "$defs": {"T": {"$id": "T"} | NUMBER}},
                          {"x": 1}, {"x": "1"}),
    "a value that looks like a reference": (of({"enum": [{"$ref": "#/$defs/X"}]}), {"x": {"$ref": "#/$defs/X"}},
                                            {"x": 1}),
    "a property called $ref": ({"type": "object", "properties": {"$ref": NUMBER}}, {"$ref": 1}, {"$ref": "1"}),
    "no type": ({"properties": {"x": NUMBER}}, {"x": 1}, 5),
    "no others": ({"type": "object", "properties": {"x": NUMBER}}, {"x": 1}, {"x": 1, "y": 2}),
    "null too": ({"type": ["object", "null"], "properties": {"x": NUMBER}}, {"x": 1}, None),
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "fits", "does_not"), ALLOWED.values(), ids=ALLOWED)
def test_references_mean_the_arguments_of_a_tool_that_must_be_called(parameters, fits, does_not, reciter):
    assert called(reciter, "chat/completions", "f", fits, tool("f", parameters)) == ("f", fits)
    assert called(reciter, "chat/completions", "f", does_not, tool("f", parameters)) is None


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_two_tools_may_define_the_same_name(path, reciter):
    tools = tool("f", of(NUMBER)), tool("g", of(PLACE)), tool("h", of(NUMBER, "definitions") | {"$id": "T"})
    for name, fits in (("f", {"x": 1}), ("g", {"x": {"city": "Ulm"}}), ("h", {"x": 2})):
        assert called(reciter, path, name, fits, *tools) == (name, fits)
    assert called(reciter, path, "f", {"x": {"city": "Ulm"}}, *tools) is None
    assert called(reciter, path, "g", {"x": 1}, *tools) is None


@pytest.mark.parametrize("form", ["schema", "object"])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_format_of_texts_leaves_room_for_calls(path, form, reciter):
    """Agents with an output type ask for both; no call was possible, though every model's own calls are no JSON."""
    asks = {"type": "json_object"}
    if form == "schema":
        answer = {"name": "answer", "schema": of(PLACE, **DRAFT_7) | {"x-guidance": {"key_separator": ": "}}}
        asks = {"type": "json_schema"} | (answer if path == "responses" else {"json_schema": answer})
    more = {"text": {"format": asks}} if path == "responses" else {"response_format": asks}

    def read(text):
        other = {"not": {"required": ["x"]}}  # which no grammar can follow
        said = asked(reciter, path, text, tools=[tool("f", other), tool("g", of(NUMBER))], **more)
        if said.status_code != 200:
            return "refused"
        if path == "responses":
            [item] = said.json()["output"]
            return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        [choice] = said.json()["choices"]
        calls = choice["message"].get("tool_calls")
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        return calls[0]["function"]["arguments"] if calls else choice["message"]["content"]

    assert read('{"name": "g", "arguments": {"x": 1}}') == '{"x": 1}'
    assert read('{"x": {"city": "Ulm"}}') == '{"x": {"city": "Ulm"}}'
    assert read('{"x": 1}') == ("refused" if form == "schema" else '{"x": 1}')


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_tool_must_be_called_whatever_the_format_of_texts(path, reciter):
    """instructor's RESPONSES_TOOLS and agents with an output type ask for both, and were refused."""
    form = {"name": "place", "schema": PLACE}
    if path == "responses":
        more = {"text": {"format": {"type": "json_schema"} | form}}
    else:
        more = {"response_format": {"type": "json_schema", "json_schema": form}}
    text = json.dumps({"name": "f", "arguments": {"x": 1}})
    answer = asked(reciter, path, text, tools=[tool("f", of(NUMBER))], tool_choice="required", **more).json()
    said = answer["output"][0] if path == "responses" else answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (said["name"], said["arguments"]) == ("f", '{"x": 1}')


@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_a_constraint_of_all_output_and_a_tool_that_must_be_called_are_refused(field, reciter):
    more = {field: "a" if field == "guided_regex" else {"regex": "a"}}
    answer = asked(reciter, "chat/completions", "a", tools=[tool("f", PLACE)], tool_choice="required", **more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
    assert f"tool_choice and {field}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_format_of_the_text_may_define_names_too(path, reciter):
    """It is the whole schema, so its references are as they stand."""
    schema = of(NUMBER) | {"additionalProperties": False}
    form = {"type": "json_schema", "name": "it", "schema": schema}
    if path == "responses":
        more = {"text": {"format": form}}
    else:
        more = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}
    assert asked(reciter, path, '{"x": 1}', **more).status_code == 200
    assert asked(reciter, path, '{"x": "1"}', **more).status_code == 400


REFUSED = {
    "dangling": (of(NUMBER) | {"$defs": {}}, "a tool that must be called (f) cannot be followed (Pointer '/$defs/X' "),
    "elsewhere": (of(NUMBER) | {"properties": {"x": {"$ref": "https://example.com/x.json"}}},
                  "(f) cannot be followed ($ref='https://example.com/x.json' is elsewhere, and nothing is fetched)"),
    "another file": (of(NUMBER) | {"properties": {"x": {"$ref": "x.json"}}}, "x.json' is not present in a registry"),
    "no address": (of(NUMBER) | {"$id": "a b"}, "(f) cannot be followed (Invalid URI reference"),
    "no string": (of(NUMBER) | {"$id": 5}, "(f) cannot be followed ("),
    "no object": ({"type": "string"}, 'the parameters of tool f accept string; the arguments of a call are of "type": '
                  '"object"'),
    "no object, defined": ({"$ref": "#/$defs/X", "$defs": {"X": {"enum": [1, None]}}},
                           "the parameters of tool f accept integer or null; "),
    "nothing": ({"type": "object", "allOf": [{"type": "string"}]}, "the parameters of tool f accept nothing; "),
    "not known": (of({"not": NUMBER}), "(f) cannot be followed (Unimplemented keys"),
}  # fmt: skip


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize(("parameters", "said"), REFUSED.values(), ids=REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_tool(parameters, said, path, reciter):
    answer = asked(reciter, path, "", tools=[tool("f", parameters)], tool_choice="required")
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["param"] == "tools", error


def test_two_schemas_with_one_address_are_refused(reciter):
    place = {"$id": "https://example.com/place"} | PLACE
    tools = [tool("f", of(place)), tool("g", of(place | {"required": []}))]
    answer = asked(reciter, "chat/completions", "", tools=tools, tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["message"] == (
        "tools f and g both have a schema with $id='https://example.com/place'; give each its own, or leave them out"
    )


@pytest.mark.parametrize("name", ["f", "a.b/c:d-e_f", "größe_測試", "x" * 128])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_call_of_any_name_that_is_accepted_is_read_back(name, path, reciter):
    assert called(reciter, path, name, {}, tool(name, {})) == (name, {})


@pytest.mark.parametrize("name", ["", "two words", 'a"b', "a\nb", "wave👋", "x" * 129, "a{b}"])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_name_that_no_call_could_be_read_back_with_is_refused(name, choice, path, reciter):
    answer = asked(reciter, path, "", tools=[tool("f", {}), tool(name, {})], tool_choice=choice)
    error = answer.json()["error"]
    place = "tools[1].name" if path == "responses" else "tools[1].function.name"
    assert answer.status_code == 400 and error["param"] == place
    assert error["message"].endswith("1 to 128 letters, digits and any of _ . : / - are expected")
