"""Which tokens may follow an output by its grammar and its token rules: compiled grammars, and immutable states.

The state of each prefix is kept with that prefix, so a step that fails or is repeated cannot leave a wrong state. End
tokens are allowed exactly where the grammar may end, other special tokens never. The library (llguidance) is an extra,
imported with the first grammar.
"""

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from tokenizers import normalizers

from specdec.config import MAX_FORCED_TOKENS, SamplingParams
from specdec.errors import ConfigError, clipped, faults_go_to
from specdec.sampling.grammars.grammar_bounds import cannot_follow, compiles_in_linear_time, require_bounded
from specdec.sampling.grammars.grammar_keywords import drop_idle_keywords
from specdec.sampling.grammars.grammar_trial import GrammarTrial, with_large_stack
from specdec.sampling.grammars.token_rules import TokenRules, Words, only_bit, token_bits

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"\x20|\x0A(\x20{0,32}|\x09{0,8})"}
"""White space between the parts of JSON: nothing, one space, or a new line with its indent. Otherwise a small model may
write white space until max_new_tokens."""

COMPILED_BYTES = 16 << 20
"""Most memory of the compiled grammars that are kept for later requests, by their estimates."""
BYTES_PER_GRAMMAR = 128 << 10
"""Estimate for the compiled grammar of an empty source; 40,000 to 140,000 were measured."""
BYTES_PER_CHAR = 256
"""Smallest estimate for each character of its source; 30 to 250 were measured."""


class CompiledGrammar(NamedTuple):
    """The library's matcher at the beginning of a grammar. bytes: estimate of its memory."""

    matcher: Any
    bytes: int


class Grammars:
    """Compiles the grammars of one engine, and keeps the most recently used ones within COMPILED_BYTES.

    vocab_size: the model's; the tokenizer may have fewer or more tokens.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[tuple[str, Any], CompiledGrammar] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # guards `_kept`

    def start(self, params: SamplingParams, ends: frozenset[int], own_ends: Collection[int]) -> "GrammarState | None":
        """The state before the first token; None: `params` restricts nothing.

        ends: tokens that end the text. own_ends: the model's own end tokens among them, special or not. Raises
        ConfigError, with the library's reason, for a grammar that cannot be followed, and for rules under which no
        token could be drawn.
        """
        name, rules = params.grammar, TokenRules.from_params(params, ends, self._vocab_size)
        remaining = 0 if rules is None else rules.min_tokens
        if name is None:
            return None if rules is None else GrammarState(None, None, ends, rules, remaining)
        if self._tokenizer is None:
            raise ConfigError(f"{name} needs a tokenizer; pass tokenizer=...")
        library = self._library
        special = frozenset(
            token
            for token in ends
            if 0 <= token < self._vocab_size and (token in own_ends or library.is_special(token))
        )
        if not special:
            raise ConfigError(f"{name} needs a token that ends the text, and the model names none; give stop_token_ids")
        value = tuple(params.choice) if name == "choice" and params.choice else getattr(params, name)
        # the library refuses two threads at one matcher: a step may read those of other requests with this grammar
        matcher = self._compile(name, value).deep_copy()
        state = GrammarState(matcher, library, special, rules, remaining)
        if not state.may_end and not library.goes_on(state.matcher):
            raise cannot_follow(name, "no text does")
        return state

    @cached_property
    def _library(self) -> "GrammarLibrary":
        return GrammarLibrary(self._tokenizer, self._vocab_size)

    @property
    def kept_bytes(self) -> int:
        """Memory of the kept grammars, by their estimates."""
        return sum(one.bytes for one in self._kept.values())

    def _compile(self, name: str, value: Any) -> Any:
        """The library's matcher at the beginning of a grammar: a kept one, or a new one."""
        with self._lock:
            if (name, value) in self._kept:
                self._kept.move_to_end((name, value))
                return self._kept[name, value].matcher
        require_bounded(name, value)
        try:
            found = self._library.compile(name, value)
        except ValueError as error:  # such as ConfigError
            raise cannot_follow(name, reason_of(str(error))) from None
        with self._lock:
            self._kept[name, value] = found
            while self.kept_bytes > COMPILED_BYTES:
                self._kept.popitem(last=False)
        return found.matcher


class GrammarLibrary:
    """llguidance with one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        if find_spec("llguidance") is None:
            raise ConfigError('grammars need llguidance: pip install "specdec-runtime[grammar]", or leave them out')
        # imported here, since it is slow and few engines need it
        import llguidance.numpy

        self._llguidance: Any = llguidance
        self.num_words = -(-vocab_size // 32)
        try:
            known = max(max(tokenizer.get_vocab().values()) + 1, vocab_size)
            backend = _writing(tokenizer.backend_tokenizer).to_str()  # as JSON it can be sent to another process
            self._tokenizer = llguidance.LLTokenizer(backend, n_vocab=known, eos_token=tokenizer.eos_token_id)
        except Exception as error:  # of any kind, even a panic of the library
            raise ConfigError(f"grammars cannot be followed with this tokenizer ({reason_of(str(error))})") from None
        self._trial = GrammarTrial(backend, tokenizer.eos_token_id, n_vocab=known)
        self._one_at_a_time = threading.Lock()
        self._executor = self._llguidance.LLExecutor()
        self._width = -(-self._tokenizer.vocab_size // 32)
        # the library's own end tokens, and ids beyond the model's
        foreign = [*self._tokenizer.eos_tokens, *range(vocab_size, 32 * self.num_words)]
        self._own = ~token_bits([token for token in foreign if token < 32 * self.num_words], self.num_words)

    def is_special(self, token: int) -> bool:
        return bool(self._tokenizer.is_special_token(token))

    def compile(self, name: str, value: Any) -> CompiledGrammar:
        """Compile a grammar that has passed `require_bounded`. Raises ValueError, with the reason, if it cannot be
        followed.

        A grammar that is not plain is tried in the worker process first (`grammar_trial`). Such grammars are compiled
        one at a time, there and here: four at once would take processors from the engine, and add up their memory.
        """
        make = self._llguidance.LLMatcher
        if name == "regex":
            text, grammar = value, make.grammar_from_regex(value)
        elif name == "choice":
            text = "|".join(map(_literal, value))
            grammar = make.grammar_from_regex(text)
        else:
            schema = json.loads(value) if name == "json_schema" else {"type": "object"}
            schema = {} if schema is True else schema
            drop_idle_keywords(schema)
            text = json.dumps(schema)
            grammar = make.grammar_from_json_schema(text, _options(schema))
            del schema  # ten times as large as its text, and this may wait
        size = BYTES_PER_GRAMMAR + BYTES_PER_CHAR * len(text)
        if compiles_in_linear_time(name, value):
            return CompiledGrammar(self._matcher(grammar), size)
        with self._one_at_a_time:
            size = max(size, self._trial.run(grammar))
            return CompiledGrammar(self._matcher(grammar), size)

    def _matcher(self, grammar: str) -> Any:
        make = self._llguidance.LLMatcher
        matcher = with_large_stack(lambda: make(self._tokenizer, grammar, log_level=0))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def goes_on(self, matcher: Any) -> bool:
        """Is any token of the model allowed next?"""
        twin = matcher.deep_copy()
        return not twin.is_error() and bool(self._texts([twin]).any()) and not twin.is_error()

    def masks(self, states: "Sequence[GrammarState]") -> Words:
        """Masks of M states, [M, words], computed on several threads."""
        bits = self._texts([state.matcher for state in states])
        for mask, state in zip(bits, states, strict=True):
            ends = token_bits(state.ends, self.num_words)
            mask[:] = mask | ends if state.may_end else mask & ~ends
            if not mask.any():
                mask[:] = -1  # the round must draw some token here; `after` will refuse it
            if state.rules is not None and state.remaining and (mask & state.rules.closed).any():
                mask &= state.rules.closed
        return bits

    def _texts(self, matchers: Sequence[Any]) -> Words:
        """Tokens of the model that may follow these texts, [M, words], without the library's own end token.

        The library takes a text that a grammar forces for the control token that it names ("<table>"), and then refuses
        this token: ordinary tokens spell the text.
        """
        bits = np.zeros((len(matchers), self._width), dtype=np.int32)
        numbered = [(matcher, number) for number, matcher in enumerate(matchers)]
        self._llguidance.numpy.fill_next_token_bitmask_par(self._executor, numbered, bits)
        bits = bits[:, : self.num_words] & self._own
        for mask, matcher in zip(bits, matchers, strict=True):
            if np.count_nonzero(mask) > 1:
                continue
            only = only_bit(mask)
            is_followed = mask.any() if only is None else matcher.validate_tokens([only])
            if not is_followed:
                forced = matcher.compute_ff_bytes().decode(errors="ignore")
                spelt = [token for token in self._tokenizer.greedy_tokenize(forced)[:1] if token < 32 * self.num_words]
                mask[:] = self._own & token_bits(spelt, self.num_words)
        return bits


@dataclass(eq=False)
class GrammarState:
    """The state after an output that its grammar and its token rules allow.

    matcher: the library's; None: there is no grammar.
    ends: tokens that end the text where the grammar may end.
    rules: None: there are none.
    remaining: tokens before the output may end, unless the grammar can only end.
    over: has an end token ended it?
    fault: the library's error for a draft after this state; the tokens that the round then draws are not valid.
    """

    matcher: Any
    library: Any
    ends: frozenset[int]
    rules: TokenRules | None = None
    remaining: int = 0
    over: bool = False
    fault: BaseException | None = None

    @property
    def free(self) -> bool:
        """Are all tokens allowed from here on? The request then costs no more than one without rules."""
        return self.matcher is None and self.rules is not None and self.rules.anything and self.remaining == 0

    @property
    def may_end(self) -> bool:
        return not self.over and bool(self.matcher.is_accepting()) and not self.matcher.is_error()

    def after(self, token: int) -> "GrammarState | None":
        """The state after one more token; None: the token is not allowed."""
        matcher, rules, ends = self.matcher, self.rules, token in self.ends
        if self.over or (ends and matcher is not None and not self.may_end):
            return None
        ruled = rules is not None and (matcher is None or (self.remaining and token in rules.ends))
        if ruled and not self.mask[token // 32] >> token % 32 & 1:
            return None
        if matcher is not None and not ends:
            matcher = matcher.deep_copy()
            if not matcher.consume_token(token):
                return None
        return GrammarState(matcher, self.library, self.ends, rules, max(0, self.remaining - 1), ends)

    @cached_property
    def mask(self) -> Words:
        """Tokens that are allowed next, [words]."""
        if self.matcher is None:
            assert self.rules is not None
            return self.rules.closed if self.remaining else self.rules.open
        mask: Words = self.library.masks([self])[0]
        return mask

    @cached_property
    def forced(self) -> tuple[int, ...]:
        """The next tokens, up to the first place where the grammar allows several."""
        tokens: list[int] = []
        state: GrammarState | None = self
        while state is not None and state.matcher is not None and not state.over and len(tokens) < MAX_FORCED_TOKENS:
            only = only_bit(state.mask)
            if only is None:
                break
            tokens.append(only)
            state = state.after(only)
        return tuple(tokens)


def compute_masks(states: Sequence[GrammarState | None]) -> None:
    """Compute the masks of these states in one call of the library, so that `mask` only returns them. If the library
    fails, none is set, and `mask` of the faulty state raises the error."""
    guided = (state for state in states if state is not None and state.matcher is not None)
    chosen = list(dict.fromkeys(state for state in guided if "mask" not in vars(state)))
    if not chosen:
        return
    with faults_go_to(lambda _: None):
        for state, mask in zip(chosen, chosen[0].library.masks(chosen), strict=True):
            state.mask = mask


def tree_masks(trees: Sequence[tuple[GrammarState, Sequence[int], Sequence[int]]], num_words: int) -> Words:
    """Masks of every node of T trees, [T, N, num_words]. Each tree is given by the state after its root, its tokens [N]
    and its parents [N].

    All bits are set for a node that the grammar does not allow, or whose ancestor it does not allow. If the library
    fails for a tree, the error becomes the `fault` of its root; other trees are not affected.
    """
    num_nodes = max(len(tokens) for _, tokens, _ in trees)
    masks = np.full((len(trees), num_nodes, num_words), -1, dtype=np.int32)
    reached: list[tuple[int, int, GrammarState]] = []
    for number, (root, tokens, parents) in enumerate(trees):
        with faults_go_to(partial(setattr, root, "fault")):
            states: list[GrammarState | None] = [root]
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                above = states[parent]
                states.append(None if above is None or token < 0 else above.after(token))
            live = ((node, state) for node, state in enumerate(states) if state is not None and not state.over)
            reached += [(number, node, state) for node, state in live]
    compute_masks([state for _, _, state in reached])
    for number, node, state in reached:
        with faults_go_to(partial(setattr, trees[number][0], "fault")):
            masks[number, node] = state.mask
    return masks


def reason_of(message: str) -> str:
    """The library's reason, without the part of the grammar that it quotes."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (named or lines or ["it gives no reason"])[0]
    return "no text does" if reason == "NoExtensionBias" else clipped(reason, 200)


def _writing(backend: Any) -> Any:
    """The tokenizer of a grammar's own text, which is to be written as it is: without the normalizers that read another
    text, such as NFC."""
    backend = copy.copy(backend)
    backend.no_padding()
    backend.no_truncation()
    if backend.normalizer is not None:
        several = isinstance(backend.normalizer, normalizers.Sequence)
        parts: Any = backend.normalizer if several else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([part for part in parts if _is_undone(part)])
    return backend


def _is_undone(normalizer: Any) -> bool:
    """Does decoding undo what this normalizer does, such as to write "▁" for a space?"""
    described = json.loads(normalizer.__getstate__())
    return described["type"] in ("Prepend", "ByteLevel") or described.get("pattern") == {"String": " "}


def _options(schema: Any) -> dict[str, Any] | None:
    """Options for white space; None if the schema has its own, which these would override."""
    if not isinstance(schema, dict):
        return None
    own = schema.get("x-guidance")
    return None if isinstance(own, dict) and own.keys() & JSON_OPTIONS.keys() else JSON_OPTIONS


def _literal(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
