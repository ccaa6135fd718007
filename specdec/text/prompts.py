"""Converts users' prompts and chats to token ids or strings, and refuses ambiguous ones.

It knows no engine and no vocabulary. Every error is one sentence that shows the value, but never a printed tensor.
"""

import inspect
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import ConfigError, first_line, require_text, shown
from specdec.text.call_ids import CALLED_BY_ID, with_naming_ids
from specdec.text.content_tokens import content_tokens, require_handling

Prompt = str | Sequence[int]

FOR_TEMPLATES = {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "kwargs"}
FIXED_BY_THE_ENGINE = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - FOR_TEMPLATES
"""Arguments that this version of transformers does not pass to a template, since they control tokenisation."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that may be given to any template; a template raises for roles that it does not support."""
A_LIST = 'a list of messages {"role": ..., "content": ...} is expected'
NONE_CONTENT = re.compile(r"""\bcontent["']?\]? +(is +(not +)?|[=!]= *)[nN]one\b""")
TRIAL_TEXT = "qzxw"
"""The text of a trial message: a word that no template contains."""
TRIAL_KEY = "xqzj"
"""A key of the trial message's part: no template reads it."""
INSTEAD_OF_CONTENT = ("tool", "function", "reasoning", "thinking")
"""Prefixes of keys with which a message needs no content."""


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt (a string, or a flat sequence, array or tensor of ids) or many of them, as a list.

    Raises ConfigError, with the value, for anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items_of(prompts, "prompts=", "a string, a list of token ids, or a list of such prompts")
    if items and all(not isinstance(item, str) and _as_list(item) is None for item in items):
        return [_token_ids(items)]
    expected = "a string or a list of token ids"
    return [item if isinstance(item, str) else _token_ids(_items_of(item, "prompt ", expected)) for item in items]


def as_token_ids(value: Any, vocab_size: int) -> list[int]:
    """Ids to decode. Raises ConfigError, with the value, for anything else."""
    ids = _token_ids(_items_of(value, "token_ids=", "a list of token ids"))
    for token in ids:
        if not 0 <= token < vocab_size:
            padding = "; take padding out before decoding" if token < 0 else ""
            raise ConfigError(f"token_ids holds token id {token}, outside the vocabulary of {vocab_size}{padding}")
    return ids


def text_ids(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of plain text, with or without the special tokens that the tokenizer adds."""
    options = {} if special_tokens else {"add_special_tokens": False}
    ids: list[int] = tokenizer(require_text("text", text), **options)["input_ids"]
    return ids


def as_chat_list(chats: Any) -> list[Any]:
    """One or many conversations (each a user's turn as text, or messages), as a list; nothing is checked."""
    if isinstance(chats, str) or not isinstance(chats, Sequence) or not chats or isinstance(chats[0], Mapping):
        return [chats]
    return list(chats)


def chat_or_text_ids(
    tokenizer: Any, chat: Any, template_kwargs: Mapping[str, Any], special_tokens_in_content: str = "allow"
) -> list[int]:
    """`chat_ids` of messages or a user's turn; without a template a turn is plain text, and messages are refused."""
    if isinstance(chat, str) and not chat.strip():
        raise ConfigError(f"the prompt is {shown(chat)}, with nothing to answer; give some text")
    if template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
        return chat_ids(tokenizer, messages, special_tokens_in_content=special_tokens_in_content, **template_kwargs)
    require_handling(special_tokens_in_content)
    if not isinstance(chat, str):
        raise ConfigError("this tokenizer has no chat template, so it cannot put messages into words; give text")
    if template_kwargs:
        raise ConfigError(f"this tokenizer has no chat template that could read {', '.join(sorted(template_kwargs))}")
    if special_tokens_in_content == "escape":
        return _escaped_text_ids(tokenizer, require_text("text", chat))
    return text_ids(tokenizer, chat)


def _escaped_text_ids(tokenizer: Any, text: str) -> list[int]:
    """`text_ids` with control tokens in the text as plain text."""
    found = content_tokens(tokenizer, "", len(tokenizer))
    [message], _, marker = found.break_tokens([{"content": text}], {})
    if not marker:
        return text_ids(tokenizer, text)
    whole, plain = (tokenizer(message["content"], add_special_tokens=added)["input_ids"] for added in (True, False))
    begins = next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
    return [*whole[:begins], *found.ids(message["content"], marker), *whole[begins + len(plain) :]]


def template_text(template: Any) -> str:
    """Text of a chat template, or of several by name."""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template or "")


def asks_for_none(template: str) -> bool:
    """Does a chat template test whether a content is none?"""
    return NONE_CONTENT.search(template) is not None


def chat_ids(
    tokenizer: Any,
    messages: Iterable[Mapping[str, Any]],
    /,
    *,
    special_tokens_in_content: str = "allow",
    chat_template: Any = None,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a chat under the tokenizer's template, or this one, up to the beginning of the answer.

    `template_kwargs` go to the template: `tools`, `documents`, `enable_thinking`, `add_generation_prompt` and others
    that it reads. special_tokens_in_content: "escape" keeps control tokens in messages plain text; "allow" tokenises
    them as control tokens, like transformers. Raises ConfigError for malformed messages, and if the template refuses,
    also when several system messages at the beginning are joined to one.
    """
    require_handling(special_tokens_in_content)
    chat = as_messages(messages)
    if not chat_template:
        _require_roles(chat, getattr(tokenizer, "chat_template", None))
    fixed = sorted(FIXED_BY_THE_ENGINE & template_kwargs.keys())
    if fixed:
        raise ConfigError(f"{fixed[0]} is not an argument of a chat template here: the result is one list of token ids")
    # the last message is either continued or answered
    options = {"add_generation_prompt": not template_kwargs.get("continue_final_message"), **template_kwargs}
    own = {} if chat_template is None else {"chat_template": chat_template}

    def ids(chat: list[dict[str, Any]]) -> list[int]:
        if special_tokens_in_content == "escape":
            # chat_template may be the name of one of the tokenizer's
            template = template_text(chat_template) + template_text(getattr(tokenizer, "chat_template", None))
            found = content_tokens(tokenizer, template, len(tokenizer))
            broken, told, marker = found.break_tokens(chat, options)
            if marker:
                return found.ids(_templated(tokenizer, broken, tokenize=False, **told, **own), marker)
        return [int(token) for token in _templated(tokenizer, chat, tokenize=True, **options, **own)]

    try:
        return ids(chat)
    except Exception as error:  # a template is a program: it can raise anything
        if (joined := _with_one_system_message(chat)) is not chat:
            with suppress(Exception):
                return ids(joined)
        reason = shown(first_line(error))[1:-1]
        raise ConfigError(f"the chat template does not take these messages: {reason}") from error


def _with_one_system_message(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with its system messages at the beginning joined to one, for templates that take only one."""
    texts = [message["content"] for message in takewhile(_is_system_text, chat)]
    return [{"role": "system", "content": "\n\n".join(texts)}, *chat[len(texts) :]] if len(texts) > 1 else chat


def _is_system_text(message: Mapping[str, Any]) -> bool:
    return message["role"] == "system" and isinstance(message.get("content"), str)


def _templated(tokenizer: Any, chat: list[dict[str, Any]], /, *, tokenize: bool, **options: Any) -> Any:
    """Text or token ids of a chat from transformers' `apply_chat_template`.

    Contents are passed as the template reads them. From version 5.24 on transformers drops a content of None from its
    message, so that `content is none` is false. If a template tests for none, the content is passed here.
    """
    own = template_text(options.get("chat_template")) + template_text(getattr(tokenizer, "chat_template", None))
    if CALLED_BY_ID in own:
        chat = with_naming_ids(chat)
    if getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template:
        template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        chat = [_as_read(message, *contents_read(tokenizer, template)) for message in chat]
        if any(message.get("tool_calls") for message in chat) and reads_arguments_as_text(tokenizer, template):
            chat = [_with_text_arguments(message) for message in chat]
        if any(message.get("content", "") is None for message in chat) and asks_for_none(template):
            text = _rendered(tokenizer, template, chat, **options)
            return text_ids(tokenizer, text, special_tokens=False) if tokenize else text
    return tokenizer.apply_chat_template(chat, tokenize=tokenize, return_dict=False, **options)


def _rendered(tokenizer: Any, template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    told = {**tokenizer.special_tokens_map, **options, "chat_template": template}
    texts, _ = cast(Any, render_jinja_template(conversations=[chat], **told))
    text: str = texts[0]
    return text


@lru_cache(maxsize=16)
def contents_read(tokenizer: Any, template: str) -> tuple[bool, bool]:
    """Does a chat template write contents that are strings? Those that are lists of parts? A string in a loop over
    parts is lost, and a list that is written as it is shows Python's brackets and keys."""

    def writes(content: Any) -> bool:
        with suppress(Exception):  # a template is a program: it can raise anything
            text = _rendered(tokenizer, template, [{"role": "user", "content": content}])
            return TRIAL_TEXT in text and TRIAL_KEY not in text
        return False

    return writes(TRIAL_TEXT), writes([{"type": "text", "text": TRIAL_TEXT, TRIAL_KEY: TRIAL_KEY}])


@lru_cache(maxsize=16)
def reads_arguments_as_text(tokenizer: Any, template: str) -> bool:
    """Does a chat template write calls only if their arguments are JSON text? DeepSeek's fail with an object."""

    def takes(arguments: Any) -> bool:
        function = {"name": TRIAL_TEXT, "arguments": arguments}
        calls = [{"id": TRIAL_TEXT, "type": "function", "function": function}]
        content = None if asks_for_none(template) else ""
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        with suppress(Exception):  # a template is a program: it can raise anything
            return TRIAL_TEXT in _rendered(tokenizer, template, [{"role": "user", "content": ""}, answer])
        return False

    return takes("{}") and not takes({})


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""

    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(written, calls))} if isinstance(calls, (list, tuple)) else message


def _as_read(message: dict[str, Any], strings: bool, parts: bool) -> dict[str, Any]:
    """The message with its content as a template reads it: a string as one part, or parts joined by line ends."""
    content = message.get("content")
    if isinstance(content, str) and parts and not strings:
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, (list, tuple)) and strings and not parts:
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def as_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of one chat, each with a role and a content of text. Raises ConfigError for anything else."""
    if isinstance(messages, (str, bytes, Mapping, torch.Tensor, np.ndarray)) or not isinstance(messages, Iterable):
        raise ConfigError(f"chat={shown(messages)}: {A_LIST}")
    chat = list(messages)
    if not chat:
        raise ConfigError(f"chat=[] is empty; {A_LIST}")
    for index, message in enumerate(chat):
        if fault := _message_fault(message):
            raise ConfigError(f"message {index} of the chat {fault}")
        if isinstance(message.get("content"), str):
            require_text(f"message {index} of the chat", message["content"])
    return [dict(message) for message in chat]


def _message_fault(message: Any) -> str:
    """Says what is wrong with a message; empty for one with a role and a text, or an allowed substitute."""
    if not isinstance(message, Mapping):
        return f"is {shown(message)}; {A_LIST}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        missing = "has no role" if role is None else f"has role={shown(role)}"
        return f"{missing}; a string such as 'user' is expected"
    if content is None:
        instead = any(str(key).startswith(INSTEAD_OF_CONTENT) and value for key, value in message.items())
        return "" if instead else "has no content; text is expected"
    if isinstance(content, str):
        return ""
    if not isinstance(content, (list, tuple)):
        return f"has content={shown(content)}; text is expected"
    for part in content:  # other parts would become placeholders without data
        if not isinstance(part, Mapping) or (part.get("type") == "text" and not isinstance(part.get("text"), str)):
            return f'holds the part {shown(part)}; text or {{"type": "text", "text": ...}} is expected'
        if part.get("type") != "text":
            return f"holds a part of type {shown(part.get('type'))}; only text is read"
    return ""


def _require_roles(chat: Sequence[Mapping[str, Any]], template: Any) -> None:
    """Raise ConfigError for a role that is neither in `ROLES` nor named in the template: most templates write any role,
    but the model was not trained with it."""
    for index, message in enumerate(chat):
        role = message["role"]
        named = role and any(f"{quote}{role}{quote}" in str(template) for quote in "'\"")
        if role not in ROLES and not named:
            raise ConfigError(
                f"message {index} of the chat has role={shown(role)}, which the chat template does not know; give one "
                f"of {', '.join(ROLES)}, or a template that has it as chat_template=..."
            )


def _items_of(value: Any, name: str, expected: str) -> list[Any]:
    items = _as_list(value)
    if items is None:
        raise ConfigError(f"{name}{shown(value)}: {expected} is expected")
    return items


def _as_list(value: Any) -> list[Any] | None:
    """The items of a sequence, array or tensor; None for anything else (a number, bytes, a mapping)."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ConfigError(f"{shown(value)} is on the meta device, where a tensor has no values")
        return list(value.tolist()) if value.ndim else None
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    return None


def _token_ids(items: list[Any]) -> list[int]:
    """These items as ids; Python integers, the usual case, cost the host 20 ns each."""
    return items if set(map(type, items)) == {int} else [_token_id(item) for item in items]


def _token_id(token: Any) -> int:
    try:
        if isinstance(token, (bool, np.bool_)):
            raise TypeError
        return operator.index(token)
    except TypeError:
        hint = "; a chat goes through Engine.chat_prompt" if isinstance(token, Mapping) else ""
        raise ConfigError(f"a prompt holds {shown(token)}; token ids are integers{hint}") from None
