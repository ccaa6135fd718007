"""What a user passes as a prompt, as lists of token ids or strings. Refuses what it would have to guess about."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec.errors import ConfigError

Prompt = str | Sequence[int]


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt (a string, or a flat sequence, array or tensor of ids) or many of them, as a list.

    Raises ConfigError, with the value, for anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list(prompts)
    if items is None:
        raise ConfigError(f"prompts={prompts!r}: a string, a list of token ids, or a list of such prompts is wanted")
    if items and all(_is_scalar(item) for item in items):
        return [[_token_id(item) for item in items]]
    return [_as_prompt(item) for item in items]


def chat_ids(tokenizer: Any, messages: Iterable[Mapping[str, Any]]) -> list[int]:
    """Token ids of a chat under the tokenizer's template, up to where the answer begins."""
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
    return [int(token) for token in ids]


def _as_prompt(item: Any) -> Prompt:
    if isinstance(item, str):
        return item
    ids = _as_list(item)
    if ids is None:
        raise ConfigError(f"prompt {item!r}: a string or a list of token ids is wanted")
    return [_token_id(token) for token in ids]


def _as_list(value: Any) -> list[Any] | None:
    """The items of a sequence, array or tensor; None for what is none (a number, bytes, a mapping)."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return list(value.tolist()) if value.ndim else None
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    return None


def _is_scalar(item: Any) -> bool:
    return not isinstance(item, str) and _as_list(item) is None


def _token_id(token: Any) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)
    except TypeError:
        raise ConfigError(f"a prompt holds {token!r}; token ids are integers") from None
