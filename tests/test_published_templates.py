"""DeepSeek, Kimi and MiniMax: chat templates that write what the publishers' do, and calls that go to them and back."""

import json
from itertools import groupby
from types import SimpleNamespace

import pytest
from answer_formats import FORMATS
from reciting_server import reciting
from test_tools import gathered

from specdec.serving.openai.chat_template import arguments_of
from specdec.serving.tools.answer_events import CallEnd, Text
from specdec.serving.tools.reasoning_formats import REASONING
from specdec.serving.tools.tool_parsers import PARSERS, tool_parser_for
from specdec.text.call_ids import with_naming_ids

DEEPSEEK = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] + '<｜Assistant｜>' }}{% endif %}
{%- if m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- if m['role'] == 'assistant' %}{{ '' if m['content'] is none else m['content'] }}
{%- for tool in m['tool_calls'] or [] %}{{ ('' if not loop.first else '<｜tool▁calls▁begin｜>') + HEAD }}
{%- if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}"""
V3_HEAD = """\
'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' +
tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>'"""
V31_HEAD = """\
'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] +
'<｜tool▁call▁end｜>'"""
V31_END = "{% if messages[-1]['role'] == 'user' %}{{ '<think>' if thinking else '</think>' }}{% endif %}"
KIMI = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}{{ m.role }}<|im_middle|>
{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}{{ m.content or '' }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call['id'] }}
{{- '<|tool_call_argument_begin|>' }}{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}
{{- '<|tool_calls_section_end|>' }}{% endif %}<|im_end|>
{%- endfor %}<|im_assistant|>assistant<|im_middle|>"""
MINIMAX = """\
{%- set toolcall_begin_token = '<minimax:tool_call>' %}{% set toolcall_end_token = '</minimax:tool_call>' %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ ']~b]' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- if m.tool_calls %}{{ toolcall_begin_token + '\\n' }}
{%- for call in m.tool_calls %}{{ '<invoke name="' + call.function.name + '">\\n' }}
{%- for k, v in call.function.arguments | items %}{{ '<parameter name="' + k + '">' }}
{{- v | tojson if v is not string else v }}{{ '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}
{{- toolcall_end_token }}{% endif %}{{ '[e~[\\n' }}{% endfor %}{{ ']~b]ai\\n<think>\\n' }}"""
TEMPLATES = {
    "deepseek": DEEPSEEK.replace("HEAD", V3_HEAD),
    "deepseek3.1": DEEPSEEK.replace("HEAD", V31_HEAD) + V31_END,
    "kimi": KIMI,
    "minimax": MINIMAX,
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
ARGUMENTS = {"a": 'é "x"\n', "n": 3}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
INVOKED = f'<parameter name="a">{ARGUMENTS["a"]}</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n'
PIECES = {
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{WRITTEN}\n```<｜tool▁call▁end｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{WRITTEN}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek3.1": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>",
        f"<｜tool▁call▁begin｜>g<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|>",
        f"<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "minimax": (
        "<minimax:tool_call>\n",
        f'<invoke name="f">\n{INVOKED}',
        f'<invoke name="g">\n{INVOKED}',
        "</minimax:tool_call>",
    ),
}
CALLS = {name: "".join(pieces) for name, pieces in PIECES.items()}
"""Calls of f and g with these arguments as each template writes them."""


def parser_of(name):
    return PARSERS[FORMATS[name][0]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_published_template_is_found(name):
    assert tool_parser_for(SimpleNamespace(chat_template=TEMPLATES[name])) is parser_of(name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_go_back_through_a_template_as_the_model_wrote_them(name):
    user = {"role": "user", "content": "Hi"}
    with reciting(template=TEMPLATES[name], tool_parser="auto", reasoning_parser="qwen3") as reciter:
        thought = "Hm.\n</think>\n\n" * (name == "minimax")
        reciter.answer_next(f"{thought}I look.{CALLS[name]}")
        message = reciter.post("chat/completions", messages=[user], tools=TOOLS).json()["choices"][0]["message"]
        assert message["content"] == "I look."
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [ARGUMENTS] * 2
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "8"} for call in message["tool_calls"]]
        reciter.answer_next("Eight.")
        more = reciter.post("chat/completions", messages=[user, message, *results], tools=TOOLS)
    assert more.status_code == 200, more.text
    assert f"I look.{CALLS[name]}" in reciter.prompts[-1]
    assert ("<think>\nHm.\n</think>\n\nI look." in reciter.prompts[-1]) == (name == "minimax")


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_kimi_reads_the_tools_and_numbers_of_all_calls_of_a_chat_from_their_ids(path):
    """Forced calls too, and those that a client had from elsewhere. The template writes no names."""
    elsewhere = {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [elsewhere]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        {"role": "user", "content": "Hi"},
    ]
    tools, items = TOOLS, [{"type": "function_call", "call_id": "call_1", "name": "g", "arguments": "{}"}]
    if path == "responses":
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        messages = [*items, {"type": "function_call_output", "call_id": "call_1", "output": "7"}, messages[-1]]
    with reciting(template=KIMI, tool_parser="auto") as reciter:
        reciter.answer_next(json.dumps({"name": "f", "arguments": {}}), CALLS["kimi"], "Eight.")
        for more in ({"tool_choice": "required"}, {}, {}):
            field = "messages" if path == "chat/completions" else "input"
            answer = reciter.post(path, **{field: messages}, tools=tools, **more).json()
            if path == "responses":
                ids = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
                said = answer["output"]
                results = [{"type": "function_call_output", "call_id": each, "output": "8"} for each in ids]
            else:
                said = [answer["choices"][0]["message"]]
                ids = [call["id"] for call in said[0].get("tool_calls") or ()]
                results = [{"role": "tool", "tool_call_id": each, "content": "8"} for each in ids]
            messages = [*messages, *said, *results]
        prompt = reciter.prompts[-1]
    for number, name in enumerate("gffg"):
        called = f"functions.{name}:{number}"
        assert f"<|tool_call_begin|>{called}<|tool_call_argument_begin|>" in prompt
        assert f"## Return of {called}\n" in prompt


def test_ids_of_kimi_stay_as_they_are_and_calls_without_ids_get_some():
    ids = [{"id": "functions.f:7", "function": {"name": "f"}}, {"function": {"name": "f"}}, {"function": {"name": "g"}}]
    [message] = with_naming_ids([{"role": "assistant", "tool_calls": ids}])
    assert [call["id"] for call in message["tool_calls"]] == ["functions.f:7", "functions.f:1", "functions.g:2"]
    assert "id" not in ids[1], "the messages of the caller stay as they are"


@pytest.mark.parametrize(("name", "end"), [(name, "</invoke>" if name == "minimax" else "}") for name in TEMPLATES])
def test_arguments_of_calls_that_are_cut_anywhere_can_be_sent_back(name, end):
    text = CALLS[name]
    for at in range(len(text)):
        parser = parser_of(name)({"f": PARAMETERS, "g": PARAMETERS})
        events = [piece.event for piece in parser.feed(text[:at]) + parser.finish(cut=True)]
        content, calls = gathered(events)
        assert sum(isinstance(event, CallEnd) and event.whole for event in events) == text[:at].count(end)
        assert not calls or text[:at].endswith(content)
        for _, arguments in calls:
            assert arguments_of(arguments, "arguments").keys() <= {"a", "n"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_within_a_thought_is_a_quotation_if_the_thought_is_closed(name):
    call = FORMATS[name][2]("f", {"a": "x"})
    for text, expected in (
        (f"<think>I write {call} here.</think>Yes.", [("thought", f"I write {call} here."), ("content", "Yes.")]),
        (f"<think>I look.{call}", [("thought", "I look."), "call"]),
    ):
        for pieces in ([text], text):
            parser = parser_of(name)({"f": PARAMETERS}, REASONING["qwen3"])
            found = [piece.event for part in pieces for piece in parser.feed(part)]
            found += [piece.event for piece in parser.finish()]
            read = [event for event in found if isinstance(event, Text | CallEnd)]
            read = [
                "call" if kind is None else (kind, "".join(event.text for event in same))
                for kind, same in groupby(read, lambda event: getattr(event, "kind", None))
            ]
            assert read == expected


@pytest.mark.parametrize(("thinking", "text"), [(True, "Hm.</think>Eight."), (False, "Eight.")])
def test_deepseek_thinks_if_its_template_says_so(thinking, text):
    with reciting([text], template=TEMPLATES["deepseek3.1"], reasoning_parser="qwen3") as reciter:
        asked = {"messages": [{"role": "user", "content": "recite 0"}], "chat_template_kwargs": {"thinking": thinking}}
        message = reciter.post("chat/completions", **asked).json()["choices"][0]["message"]
    assert reciter.prompts[-1].endswith("<think>" if thinking else "</think>")
    assert (message.get("reasoning_content"), message["content"]) == ("Hm." if thinking else None, "Eight.")
