"""Prompts and chats: what is understood, and one sentence for what is not."""

import copy

import numpy as np
import pytest
import torch
from refusals import one_sentence
from torch import nn

from specdec import SamplingParams, SpecDecError
from specdec.text.prompts import as_prompt_list, chat_ids

TEMPLATE = (
    "{% if tools is defined and tools %}[{{ tools | length }} tools]{% endif %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'wizard' %}{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}{{ m.tool_calls | length }} calls{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


@pytest.fixture
def tokenizer(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def engine(make_target, make_engine, tokenizer):
    return make_engine(make_target("llama", vocab_size=300), tokenizer=tokenizer)


SAY = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("chat", "parts"),
    [
        ([], ["empty", "role"]),
        (None, ["None", "list of messages"]),
        (SAY, ["'role': 'user'", "list of messages"]),
        (torch.zeros(30, 30), ["shape (30, 30)", "list of messages"]),
        (nn.Linear(2, 2), ["Linear", "list of messages"]),
        ([SAY, "Hi"], ["message 1", "'Hi'", "list of messages"]),
        ([[SAY]], ["message 0", "list of messages"]),
        ([{"content": "Hi"}], ["message 0", "no role", "'user'"]),
        ([{"role": 3, "content": "Hi"}], ["message 0", "role=3"]),
        ([{"role": "user"}], ["message 0", "no content"]),
        ([SAY, {"role": "assistant", "content": None}], ["message 1", "no content"]),
        ([{"role": "assistant", "tool_calls": []}], ["no content"]),
        ([{"role": "user", "content": torch.zeros(30, 30)}], ["content=<Tensor of shape (30, 30)>"]),
        ([{"role": "user", "content": ["Hi"]}], ["message 0", "'Hi'", '{"type": "text", "text": ...}']),
        ([{"role": "user", "content": [{"type": "text"}]}], ["message 0", "'type': 'text'"]),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], ["'image'", "only text"]),
        ([{"role": "wizard", "content": "Hi"}], ["chat template", "roles are user and assistant"]),
        ([{"role": "user", "content": "\ud800"}], ["message 0", "half a surrogate pair at character 1"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_malformed_chats(chat, parts, engine):
    with one_sentence(SpecDecError, *parts):
        engine.chat_prompt(chat)


@pytest.mark.parametrize("template", ["{{ nothing.here }}", "{% for %}", "{{ messages[9].role }}", "{{ 1 / 0 }}"])
def test_templates_that_fail(template, engine):
    with one_sentence(SpecDecError, "chat template"):
        engine.chat_prompt("Hi", chat_template=template)


def test_arguments_of_the_template_pass_through(engine):
    def text(*args, **kwargs):
        return engine.decode(engine.chat_prompt(*args, **kwargs))

    assert text("Hi") == "<user>Hi\n<model>"
    assert text("Hi", add_generation_prompt=False) == "<user>Hi\n"
    assert text("Hi", enable_thinking=True) == "<think><user>Hi\n<model>"
    assert text([SAY], tools=[{"type": "function", "function": {"name": "f"}}]) == "[1 tools]<user>Hi\n<model>"
    assert text("Hi", chat_template="{{ messages[0].content }}!") == "Hi!"
    partial = [SAY, {"role": "assistant", "content": "Well"}]
    assert text(partial, continue_final_message=True) == "<user>Hi\n<assistant>Well"


def test_contents_that_are_understood(engine):
    def text(chat):
        return engine.decode(engine.chat_prompt(chat))

    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert text([{"role": "user", "content": parts}]) == text([SAY]) == text((SAY,)) == text(iter([SAY]))
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert text([SAY, calls]) == "<user>Hi\n<assistant>1 calls\n<model>"


def test_chat_answers_one_conversation_or_many(engine):
    params = SamplingParams(max_new_tokens=5)
    messages = [SAY, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go"}]
    prompts = [engine.chat_prompt(chat, enable_thinking=True) for chat in ("Hi", messages)]
    want = engine.generate(prompts, params)
    assert want[0].token_ids != want[1].token_ids

    def told(chats):
        outs = engine.chat(chats, params, enable_thinking=True)
        return [(out.prompt_token_ids, out.token_ids, out.text) for out in outs]

    first, second = [(out.prompt_token_ids, out.token_ids, out.text) for out in want]
    assert told("Hi") == told([SAY]) == told((SAY,)) == told(iter([SAY])) == told([[SAY]]) == [first]
    assert told(messages) == [second]
    assert told(["Hi", messages]) == told(([SAY], tuple(messages))) == [first, second]
    each = [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=2, n=2)]
    assert [len(out.token_ids) for out in engine.chat(["Hi", messages], each)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("chats", "parts"),
    [
        ([], ["chat=[] is empty"]),
        (SAY, ["'role': 'user'", "list of messages"]),
        ([1, 2], ["chat=1", "list of messages"]),
        ([[SAY], []], ["chat=[] is empty"]),
        ([[SAY], SAY], ["'role': 'user'", "list of messages"]),
    ],
    ids=["empty", "message", "ids", "one-empty", "chat-then-message"],
)
def test_chat_refuses_what_is_no_conversation(chats, parts, engine):
    with one_sentence(SpecDecError, *parts):
        engine.chat(chats)
    with pytest.raises(SpecDecError, match="token ids"):
        engine.chat("Hi", tokenize=False)


@pytest.mark.parametrize("name", ["tokenize", "return_tensors", "padding", "tokenizer_kwargs", "conversation", "self"])
def test_what_the_engine_decides_is_no_argument_of_a_template(name, engine):
    with one_sentence(SpecDecError, name, "token ids"):
        engine.chat_prompt("Hi", **{name: True})


def test_without_a_template_its_arguments_have_no_reader(byte_tokenizer, make_target, make_engine):
    engine = make_engine(make_target("llama", vocab_size=300), tokenizer=byte_tokenizer)
    assert engine.decode(engine.chat_prompt("Hi")) == "Hi"
    with one_sentence(SpecDecError, "no chat template", "enable_thinking"):
        engine.chat_prompt("Hi", enable_thinking=False)
    assert engine.decode(engine.chat_prompt("Hi", chat_template="{{ messages[0].content }}?")) == "Hi?"


def test_chat_ids_are_plain_integers(tokenizer):
    assert all(type(token) is int for token in chat_ids(tokenizer, [SAY]))


def test_prompts_in_every_box():
    ids = [[1, 2], [3]]
    boxes = [
        ids,
        [np.array([1, 2]), torch.tensor([3])],
        ([np.int64(1), 2], (torch.tensor(3),)),
        [(1, 2), np.array([3])],
    ]
    for prompts in boxes:
        assert as_prompt_list(prompts) == ids
    assert as_prompt_list(np.array(["a", "b"])) == ["a", "b"]
    assert as_prompt_list(np.array([1, 2])) == as_prompt_list([np.int32(1), torch.tensor(2)]) == [[1, 2]]
