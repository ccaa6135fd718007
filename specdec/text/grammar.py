"""What a text may go on with: a grammar, and where in it a text is.

    Grammars    of one engine: the tokenizer as the library wants it, and what has been compiled
    Place       in a grammar, behind some text: never changed, `after(token)` is another one

A place belongs to the tokens that led to it, so whatever happens to a step, the place of what is settled is right.
Bits of a mask are tokens, bit v % 32 of word v // 32. Tokens that end the text are allowed exactly where the grammar
may end, other special tokens never. The library (llguidance) is an extra, imported when the first grammar is asked for.
"""

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.attention.graft import MOST_FORCED
from specdec.config import SamplingParams
from specdec.errors import ConfigError

Words = npt.NDArray[np.int32]

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"\x20|\x0A(\x20{0,32}|\x09{0,8})"}
"""Between the parts of JSON: nothing, a space, or a new line with its indent. A model that is lost would write more for
ever."""

COMPILED = 256
"""Grammars that are kept."""


class Grammars:
    """vocab_size: of the model; a tokenizer may have fewer tokens, or more."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._library: Library | None = None
        self._compile = lru_cache(COMPILED)(self._compiled)

    def start(self, params: SamplingParams, ends: Collection[int], own_ends: Collection[int]) -> "Place | None":
        """Where a text that follows `params` begins, None: it is free.

        ends: tokens that end the text; own_ends: those of them that the model ends it with, whatever they look like.
        Raises ConfigError for a grammar that cannot be followed, with the library's reason.
        """
        name = params.grammar
        if name is None:
            return None
        if self._tokenizer is None:
            raise ConfigError(f"{name} needs a tokenizer; pass tokenizer=...")
        if self._library is None:
            self._library = Library(self._tokenizer, self._vocab_size)
        there = [token for token in ends if 0 <= token < self._vocab_size]
        special = frozenset(token for token in there if token in own_ends or self._library.is_special(token))
        if not special:
            raise ConfigError(f"{name} needs a token that ends the text, and the model names none; give stop_token_ids")
        value = tuple(params.choice) if name == "choice" and params.choice else getattr(params, name)
        return Place(self._compile(name, value), self._library, special)

    def _compiled(self, name: str, value: Any) -> Any:
        assert self._library is not None
        matcher, reason = self._library.matcher(name, value)
        if reason:
            raise ConfigError(f"{name} cannot be followed ({reason}); change it, or leave it out")
        return matcher


class Library:
    """llguidance with one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        if find_spec("llguidance") is None:
            raise ConfigError('grammars need llguidance: pip install "specdec-runtime[grammar]", or leave them out')
        # slow to import, and wanted by few
        import llguidance.hf
        import llguidance.numpy

        self._llguidance: Any = llguidance
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        try:
            known = max(max(tokenizer.get_vocab().values()) + 1, vocab_size)
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=known)
        except Exception as error:  # of many kinds, a panic of its own among them
            raise ConfigError(f"grammars cannot be followed with this tokenizer ({reason_of(str(error))})") from None
        self._executor = self._llguidance.LLExecutor()
        self._width = -(-self._tokenizer.vocab_size // 32)

    def is_special(self, token: int) -> bool:
        return bool(self._tokenizer.is_special_token(token))

    def matcher(self, name: str, value: Any) -> tuple[Any, str]:
        """At the beginning of a grammar, and why it cannot be: one of them empty."""
        make = self._llguidance.LLMatcher
        try:
            if name == "regex":
                grammar = make.grammar_from_regex(value)
            elif name == "choice":
                grammar = make.grammar_from_regex("|".join(map(_literal, value)))
            else:
                schema = json.loads(value) if name == "json_schema" else {"type": "object"}
                schema = {} if schema is True else schema
                grammar = make.grammar_from_json_schema(
                    json.dumps(schema), JSON_OPTIONS if isinstance(schema, dict) else None
                )
            matcher = make(self._tokenizer, grammar, log_level=0)
            reason = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            return None, reason_of(str(error))
        return matcher, reason_of(reason) if reason else ""

    def masks(self, places: "Sequence[Place]") -> Words:
        """[M, words] of all places, on several threads."""
        bits = np.zeros((len(places), self._width), dtype=np.int32)
        going_on = [(place.matcher, i) for i, place in enumerate(places)]
        self._llguidance.numpy.fill_next_token_bitmask_par(self._executor, going_on, bits)
        for end in (*self._tokenizer.eos_tokens, *range(self.vocab_size, min(32 * self._width, 32 * self.num_words))):
            bits[:, end // 32] &= ~_bit(end)  # those of the library, and what is behind the model's own tokens
        for mask, place in zip(bits, places, strict=True):
            may_end = place.may_end
            for end in place.ends:
                mask[end // 32] = mask[end // 32] | _bit(end) if may_end else mask[end // 32] & ~_bit(end)
            if not mask[: self.num_words].any():
                mask[:] = -1  # something has to be drawn there; whatever it is, `after` refuses it
        return np.ascontiguousarray(bits[:, : self.num_words])


class Place:
    """Behind some text that the grammar allows. ends: tokens that end the text, where it may end; over: one did."""

    __slots__ = ("_forced", "_mask", "ends", "library", "matcher", "over")

    def __init__(self, matcher: Any, library: Library, ends: frozenset[int], *, over: bool = False) -> None:
        self.over = over
        self.matcher = matcher
        self.library = library
        self.ends = ends
        self._mask: Words | None = None
        self._forced: tuple[int, ...] | None = None

    @property
    def may_end(self) -> bool:
        return not self.over and bool(self.matcher.is_accepting()) and not self.matcher.is_error()

    def after(self, token: int) -> "Place | None":
        """Behind one token more; None: the grammar does not allow it."""
        if token in self.ends:
            return Place(self.matcher, self.library, self.ends, over=True) if self.may_end else None
        if self.over:
            return None
        matcher = self.matcher.deep_copy()
        return Place(matcher, self.library, self.ends) if matcher.consume_token(token) else None

    @property
    def mask(self) -> Words:
        """[words] tokens that may come next."""
        if self._mask is None:
            [self._mask] = self.library.masks([self])
        return self._mask

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, as long as each is the only one that may."""
        if self._forced is None:
            tokens: list[int] = []
            place: Place | None = self
            while place is not None and not place.over and len(tokens) < MOST_FORCED:
                only = _only(place.mask)
                if only is None:
                    break
                tokens.append(only)
                place = place.after(only)
            self._forced = tuple(tokens)
        return self._forced


def make_masks(places: Sequence[Place | None]) -> None:
    """The masks of these places, all at once where they would be made one by one."""
    missing = {id(place.matcher): place for place in places if place is not None and place._mask is None}
    if missing:
        chosen = list(missing.values())
        for place, mask in zip(chosen, chosen[0].library.masks(chosen), strict=True):
            place._mask = mask


def tree_masks(trees: Sequence[tuple[Place, Sequence[int], Sequence[int]]]) -> Words:
    """[T, N, words], the masks of every node of T trees: of each the place behind its root, tokens [N] and parents [N].

    A node that cannot be reached, since the grammar forbids it or one above it, has all bits set.
    """
    num_nodes = max(len(tokens) for _, tokens, _ in trees)
    masks = np.full((len(trees), num_nodes, trees[0][0].library.num_words), -1, dtype=np.int32)
    reached: list[tuple[int, int, Place]] = []
    for number, (root, tokens, parents) in enumerate(trees):
        masks[number, 0] = root.mask
        places: list[Place | None] = [root]
        for node in range(1, len(tokens)):
            above = places[parents[node]]
            place = None if above is None or tokens[node] < 0 else above.after(tokens[node])
            places.append(place)
            if place is not None and not place.over:
                reached.append((number, node, place))
    if reached:
        found = reached[0][2].library.masks([place for _, _, place in reached])
        masks[[number for number, _, _ in reached], [node for _, node, _ in reached]] = found
    return masks


def reason_of(message: str) -> str:
    """The library's reason, without the text that it shows around it."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (named or lines or ["it gives no reason"])[0]
    return reason if len(reason) <= 200 else reason[:200] + "..."


def _literal(text: str) -> str:
    """A regular expression for a text and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _bit(token: int) -> np.int32:
    return np.int32(np.uint32(1 << token % 32).astype(np.int32))


def _only(mask: Words) -> int | None:
    """The only bit that is set; None: there are more, or none."""
    [words] = np.nonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1
