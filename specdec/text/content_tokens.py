"""Keeps control tokens in a user's text plain text: "<|turn>system" there begins no new turn.

transformers tokenises a rendered chat as one string, so a message that spells a control token would produce one. Here,
before the template is applied, each such spelling is broken by a marker M, a character that occurs nowhere in the chat.
The marker is removed after the template's own control tokens were found:

    content "a <|turn> b" -> "a <M|turn> b" -> rendered "<|turn>user\\na <M|turn> b<turn|>" -> plain text between tokens
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

from specdec.errors import require_one_of

HANDLINGS = ("escape", "allow")
PRIVATE_USE = range(0xE000, 0xF900)
WRITTEN_BY_MODELS = ("assistant", "model")
"""Roles whose text may hold markup that templates read ("</think>"): only special tokens are broken in it."""


class ContentTokens:
    """Breaks the control tokens of one tokenizer in texts, and tokenises such texts. template: its chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        known = {token_id: (token.content, bool(token.special)) for token_id, token in added.items()}
        special = {text for text, is_special in known.values() if is_special}
        special.update(getattr(tokenizer, "all_special_tokens", ()))
        # other added tokens are often ordinary text, such as runs of spaces, unless the template writes them
        others = {text for text, is_special in known.values() if not is_special}
        pairs = {text.replace("/", "") for text in others if text in template}  # "<think>" with "</think>"
        marks = {text for text in others if text.replace("/", "") in pairs}
        self._ids = frozenset(token_id for token_id, (text, _) in known.items() if text in special | marks)
        self._special, self._all = _pattern(special), _pattern(special | marks)

    def break_tokens(self, chat: Sequence[Mapping[str, Any]], others: Mapping[str, Any]) -> tuple[Any, Any, str]:
        """(chat, others, marker) with every control token in them broken; the marker is "" if nothing was broken.

        others: other arguments of the template, such as tools.
        """
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        _map_texts([chat, others], collect)
        if not any(self._all.search(text) for text in texts):
            return chat, others, ""
        used = set().union(*texts)
        marker = next(chr(code) for code in PRIVATE_USE if chr(code) not in used)
        messages = []
        for each in chat:
            pattern = self._special if each.get("role") in WRITTEN_BY_MODELS else self._all
            role = {"role": each["role"]} if "role" in each else {}
            messages.append(_map_texts(each, partial(_break_matches, pattern, marker)) | role)
        return messages, _map_texts(others, partial(_break_matches, self._all, marker)), marker

    def ids(self, rendered: str, marker: str) -> list[int]:
        """Token ids of a text or rendered chat whose control tokens are broken by `marker`."""
        plain = partial(self._tokenizer, add_special_tokens=False)
        if not getattr(self._tokenizer, "is_fast", False):
            return [int(token) for piece in rendered.split(marker) if piece for token in plain(piece)["input_ids"]]
        found = plain(rendered, return_offsets_mapping=True)
        ids: list[int] = []
        text_from = run_from = 0  # start of the text after the last control token, in characters and in tokens
        tokens, spans = found["input_ids"], found["offset_mapping"]
        for at, (token, span) in enumerate(zip(tokens, spans, strict=True)):
            if token in self._ids:
                ids += self._run(rendered[text_from : span[0]], tokens[run_from:at], marker)
                ids.append(int(token))
                text_from, run_from = span[1], at + 1
        return ids + self._run(rendered[text_from:], tokens[run_from:], marker)

    def _run(self, text: str, tokens: Sequence[int], marker: str) -> list[int]:
        """Token ids of text between two control tokens; `tokens`: its ids with markers."""
        if marker not in text:
            return [int(token) for token in tokens]
        ids: list[int] = self._base.encode(text.replace(marker, ""), add_special_tokens=False).ids
        if self._ids.isdisjoint(ids):
            return ids
        # a model whose base vocabulary has a control token as a word
        return [
            token for piece in text.split(marker) for token in self._base.encode(piece, add_special_tokens=False).ids
        ]

    @cached_property
    def _base(self) -> Any:
        """The tokenizer without the tokens that were added to its base vocabulary."""
        backend = self._tokenizer.backend_tokenizer
        described = json.loads(backend.to_str())
        described |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        return type(backend).from_str(json.dumps(described))


@lru_cache(maxsize=16)
def content_tokens(tokenizer: Any, template: str, size: int) -> ContentTokens:
    """Cached by tokenizer and `size`, since tokens may be added later."""
    return ContentTokens(tokenizer, template)


def require_handling(value: object) -> None:
    require_one_of("special_tokens_in_content", value, HANDLINGS)


def _pattern(tokens: set[str]) -> "re.Pattern[str]":
    """Matches any of these tokens; white space and single characters count as ordinary text."""
    words = sorted(token for token in tokens if len(token) > 1 and not token.isspace())
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def _break_matches(pattern: "re.Pattern[str]", marker: str, text: str) -> str:
    """Put the marker after the first character of each match."""
    while pattern.search(text):  # removing one may form another
        text = pattern.sub(lambda found: found[0][0] + marker + found[0][1:], text)
    return text


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to each text in a value, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(each, change) for each in value]
    return value
