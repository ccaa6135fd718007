"""A request's messages reach the chat template unchanged."""

import json
from contextlib import ExitStack
from functools import cache

import pytest
from reciting_server import HARMONY, TEMPLATE, reciting, tokenizer_for
from transformers import PreTrainedTokenizerBase

from specdec.serving.openai.chat_template import thought_field
from specdec.text.prompts import asks_for_none, chat_ids

SHOWN = """\
{%- for m in messages %}<{{ m.role }}>
{%- if m.tool_calls and m.content is none %}[calls]{% endif %}{{ m.content if m.content is not none else '' }}
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}<assistant>{{ tools | tojson if tools else '' }}"""
ADDING = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"""
TEXTUAL = """\
{%- for m in messages %}{{ '<' + m.role + '>' }}
{%- for call in m.tool_calls or [] %}{{ '[' + call['function']['name'] + '|' + call['function']['arguments'] + ']' }}
{%- else %}{{ m.content }}{% endfor %}{% endfor %}"""
DESCRIBED = """\
{%- for tool in tools %}{% set tool = tool.function %}
{{- "// " + tool.description + "\\n" }}{{ tool.name }}{% endfor %}"""
STRICT = """\
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('No second system message.') }}
{%- endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "8"}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def prompt_of():
    """prompt_of(template, path, parser="hermes", **body): the prompt of a request. A template has one server."""
    with ExitStack() as servers:

        @cache
        def reciter_of(template, parser):
            return servers.enter_context(reciting(template=template, tool_parser=parser))

        def ask(template, path, parser="hermes", **body):
            reciter = reciter_of(template, parser)
            reciter.answer_next("x")
            answer = reciter.post(path, **body)
            assert answer.status_code == 200, answer.text
            return reciter.prompts[-1]

        yield ask


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SHOWN, '<user>Hi<assistant>[calls]{"name": "f", "arguments": {}}<tool>8'),
        (ADDING, "<user>Hi<assistant>f<tool>8"),
    ],
)
def test_a_content_that_is_null_is_none_to_a_template_that_asks(template, expected, prompt_of, monkeypatch):
    """It was "": a template that asks `content is none` wrote no calls. Others add it to text. transformers leaves what
    is None out of messages from 5.24 on."""
    usual = PreTrainedTokenizerBase.apply_chat_template

    def newest(tokenizer, chat, **options):
        said = [{key: value for key, value in message.items() if value is not None} for message in chat]
        return usual(tokenizer, said, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", newest)
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    assert prompt_of(template, "chat/completions", messages=messages).startswith(expected)


@pytest.mark.parametrize("path", ["chat/completions", "engine"])
def test_a_template_that_joins_arguments_with_text_gets_them_as_json(path, prompt_of):
    """DeepSeek's: every request whose messages had a call was a 400."""
    call = CALL | {"function": {"name": "f", "arguments": '{"a": "é <eos>", "b": {"c": [1]}}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call, CALL]}
    if path == "engine":
        read = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
        tokenizer, messages = (
            tokenizer_for(TEXTUAL),
            [USER, answer | {"tool_calls": [{**call, "function": read}, CALL]}],
        )
        prompt = tokenizer.decode(chat_ids(tokenizer, messages, special_tokens_in_content="escape"))
        assert messages[1]["tool_calls"][0]["function"] is read, "the messages of the caller stay as they are"
    else:
        prompt = prompt_of(TEXTUAL, path, messages=[USER, answer, RESULT])
    assert prompt.startswith('<user>Hi<assistant>[f|{"a": "é <eos>", "b": {"c": [1]}}][f|{}]')


def test_a_tool_without_a_description_reaches_a_template_that_joins_it_with_text(prompt_of):
    """GPT-OSS's: "'dict object' has no attribute 'description'" was a 400."""
    described = TOOL | {"function": TOOL["function"] | {"name": "g", "description": "Adds."}}
    prompt = prompt_of(DESCRIBED, "chat/completions", messages=[USER], tools=[TOOL, described])
    assert prompt == "// \nf// Adds.\ng"
    assert '"description": ""' not in prompt_of(SHOWN, "chat/completions", messages=[USER], tools=[TOOL])


@pytest.mark.parametrize(
    ("template", "asks"),
    [
        ("{% if message['content'] is none %}", True),
        ("{% if message.content is not none %}", True),
        ("{% set content = m.content %}{% if content == None %}", True),
        ("{{ message.content }}{% if tools is none %}", False),
        ("{{ message['content'] | trim }}", False),
    ],
)
def test_whether_a_template_asks_for_none(template, asks):
    assert asks_for_none(template) == asks


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{{ message.reasoning_content }}{{ message.thinking }}", "reasoning_content"),
        ("{{ message['thinking'] }}", "thinking"),
        ("{% if 'reasoning' in message %}", "reasoning"),
        ("{% if enable_thinking %}{{ thinking_budget }}", "reasoning_content"),
    ],
)
def test_thoughts_go_where_the_template_reads_them(template, field):
    assert thought_field(template) == field


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_sent_back_under_either_name_reach_the_template(field, prompt_of):
    answer = {"role": "assistant", "content": "8"}
    for sent in ({field: "Hm."}, {"reasoning_content": "", "reasoning": "", field: "Hm."}):
        assert prompt_of(SHOWN, "chat/completions", messages=[USER, answer | sent, USER]).count("8(Hm.)") == 1


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_thoughts_sent_back_reach_gpt_oss(content, prompt_of):
    answer = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [CALL]}
    prompt = prompt_of(HARMONY, "chat/completions", "harmony", messages=[USER, answer, RESULT], tools=[TOOL])
    thought = "Hm." if not content else "Hm.\nI look."
    assert f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.f" in prompt


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"days": [1, {"of": "May"', {"days": [1, {"of": "May"}]}),
        ('{"say": "Say "no" twice"}', {"say": "Say "}),
        ("{", {}),
        (" ", {}),
    ],
)
def test_a_call_that_broke_off_or_went_wrong_can_be_sent_back(arguments, expected, prompt_of):
    """It was a 400, with each later message of the conversation."""
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]
    written = json.dumps({"name": "f", "arguments": expected})
    assert written in prompt_of(SHOWN, "chat/completions", messages=messages)
    items = [FUNCTION_CALL | {"arguments": arguments}, {"type": "function_call_output", "call_id": "c1", "output": "8"}]
    assert written in prompt_of(SHOWN, "responses", input=[USER, *items])


def test_an_answer_with_a_broken_call_can_be_sent_back():
    asked = [{"role": "user", "content": f"recite {number}"} for number in range(2)]
    with reciting(['<tool_call>{"name": "f", "arguments": {"a": 1, "b": x}}</tool_call>', "Yes."]) as reciter:
        first = reciter.post("chat/completions", messages=asked[:1], tools=[TOOL])
        message = first.json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"].startswith('{"a": 1')
        more = reciter.post("chat/completions", messages=[asked[0], message, asked[1]])
    assert more.status_code == 200, more.text


NINE = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{% endfor %}{% endfor %}{{ tools | tojson if tools }}"""


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_can_be_sent_back_to_a_template_that_insists_on_ids_of_nine_characters(choice):
    """Mistral's: those of forced calls were of another kind, and the next request a 400."""
    call = {"name": "f", "arguments": {}}
    with reciting(template=NINE, tool_parser="mistral") as reciter:
        reciter.answer_next(json.dumps(call) if choice == "required" else f"[TOOL_CALLS][{json.dumps(call)}]", "x")
        asked = {"messages": [USER], "tools": [TOOL], "tool_choice": choice}
        message = reciter.post("chat/completions", **asked).json()["choices"][0]["message"]
        result = RESULT | {"tool_call_id": message["tool_calls"][0]["id"]}
        more = reciter.post("chat/completions", messages=[USER, message, result], tools=[TOOL])
    assert more.status_code == 200 and result["tool_call_id"].isalnum(), more.text


def system(text, role="system"):
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("template", "path", "body"),
    [
        (STRICT, "chat/completions", {"messages": [system("A"), system("B", "developer"), USER]}),
        (STRICT, "responses", {"instructions": "A", "input": [system("B", "developer"), USER]}),
        (SHOWN, "chat/completions", {"messages": [system("A"), system("B"), USER]}),
    ],
)
def test_system_messages_at_the_beginning_are_one_where_a_template_takes_one(template, path, body, prompt_of):
    """Instructions of a response and its developer messages, as agents send them, were refused by such templates."""
    expected = "<system>A\n\nB<user>Hi" if template == STRICT else "<system>A<system>B<user>Hi"
    assert prompt_of(template, path, **body).startswith(expected)


def test_a_later_system_message_stays_where_it_is_and_the_template_decides():
    with reciting(template=STRICT) as reciter:
        refusal = reciter.post("chat/completions", messages=[system("A"), USER, system("B"), USER])
    assert refusal.status_code == 400 and "No second system message." in refusal.json()["error"]["message"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_an_answer_of_thoughts_alone_can_be_sent_back(field, prompt_of):
    """Clients send back null as its content if it was cut off before it had any."""
    messages = [USER, {"role": "assistant", "content": None, field: "Hm"}, USER]
    assert prompt_of(SHOWN, "chat/completions", messages=messages).startswith("<user>Hi<assistant>(Hm)<user>Hi")


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([said("A."), said("B.")], "<assistant>A.<assistant>B."),  # they became one text
        ([said("A."), FUNCTION_CALL], '<assistant>A.{"name": "f", "arguments": {}}'),
        ([said("A."), FUNCTION_CALL, said("B.")], '<assistant>A.\nB.{"name": "f", "arguments": {}}'),
        (
            [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}, said("A.")],
            "<assistant>A.(Hm.)",
        ),
    ],
    ids=["two answers", "text and call", "text, call, text", "thought and text"],
)
def test_the_items_of_answers_are_messages_with_borders(items, expected, prompt_of):
    prompt = prompt_of(SHOWN, "responses", input=[{"role": "user", "content": "Hi"}, *items, USER])
    assert prompt.startswith(f"<user>Hi{expected}<user>Hi")


def test_an_answer_that_is_continued_is_one_message():
    """Whatever stands between its texts: many templates take turns."""
    text = "<|channel>thought\nA<channel|>B<|channel>thought\nC<channel|>D<|tool_call>call:f{}<tool_call|>E"
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    with reciting(template=SHOWN, tool_parser="gemma4", reasoning_parser="gemma4") as reciter:
        reciter.answer_next(text, "x")
        first = reciter.post("responses", input="Hi", tools=tools).json()
        [call] = [item for item in first["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "8"}
        assert reciter.post("responses", input=[result], previous_response_id=first["id"]).status_code == 200
        assert '<assistant>B\nD\nE(A\nC){"name": "f", "arguments": {}}<tool>8' in reciter.prompts[-1]
        assert json.dumps(first["output"]).count('"type": "message"') == 3


END = "<|end|><|start|>assistant<|channel|>final<|message|>"
THINKING = {
    # parsers of thoughts and calls, end of the prompt, the answer -> thought, content
    "qwen": ("qwen3", "hermes", "", "<think>Q: I count Q:\n</think>\n\n8 Q: no", "Q: I count Q:", "8 "),
    "no thought": ("qwen3", "hermes", "", "8 Q: <think>", None, "8 "),
    "never closed": ("qwen3", "hermes", "", "<think>Q: I count", "Q: I count", ""),
    "opened": ("deepseek_r1", "hermes", "<think>\n", "Q: I count</think>8 Q: no", "Q: I count", "8 "),
    "closed": ("deepseek_r1", "hermes", "<think>\n\n</think>\n\n", "8 Q: no</think>", None, "8 "),
    "gemma": ("gemma4", "gemma4", "", "<|channel>thought\nQ: I count<channel|>8 Q: no", "Q: I count", "8 "),
    "mistral": ("mistral", "mistral", "", "[THINK]Q: I count[/THINK]8 Q: no", "Q: I count", "8 "),
    "harmony": ("none", "harmony", "", f"<|channel|>analysis<|message|>Q: I count{END}8 Q: no", "Q: I count", "8 "),
    "none": ("none", "hermes", "", "<think>I count Q:</think>8 Q: no", None, "<think>I count "),
}


@pytest.mark.parametrize("case", THINKING)
def test_stop_strings_do_not_count_in_thoughts(case):
    """A question that a thought repeated ended the answer of lm-eval before its content."""
    thoughts, calls, begun, said, thought, content = THINKING[case]
    template = (HARMONY if calls == "harmony" else TEMPLATE) + begun
    with reciting([said], template=template, tool_parser=calls, reasoning_parser=thoughts) as reciter:
        answers = set()
        for seed, kept in ((0, False), (1, False), (2, True)):
            reciter.seed = seed
            body = {"messages": [{"role": "user", "content": "recite 0"}], "stop": ["Q:"], "n": 2}
            body["include_stop_str_in_output"] = kept
            whole = reciter.post("chat/completions", **body).json()
            message = whole["choices"][1]["message"]
            assert message.get("reasoning_content") == thought
            assert (message["content"] or "").removesuffix("Q:" * kept) == content
            sent = reciter.post("chat/completions", **body, stream=True).text.splitlines()
            choices = [json.loads(line[6:])["choices"][0] for line in sent if line.startswith("data: {")]
            parts = [each["delta"].get("content") or "" for each in choices if each["index"] == 1]
            assert "".join(parts) == message["content"]
            answers.add(whole["usage"]["completion_tokens"])
        assert len(answers) == 1
