"""Tokens that may follow a text under a grammar: compiled grammars, and states in them.

    Grammars        of one engine: the tokenizer in the library's form, and the compiled grammars
    GrammarState    after some text. It is immutable: `after(token)` returns another

A state belongs to the tokens that led to it, so a step that fails or is repeated never leaves a wrong one.
Bits of a mask are tokens, bit v % 32 of word v // 32. Tokens that end the text are allowed exactly where the grammar
may end, other special tokens never. The library (llguidance) is an extra, imported when the first grammar is asked for.
"""

import contextlib
import copy
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from specdec.config import MAX_FORCED_TOKENS, SamplingParams
from specdec.errors import ConfigError, is_fault
from specdec.sampling.grammars.grammar_bounds import compiles_in_linear_time, require_bounded
from specdec.sampling.grammars.grammar_trial import GrammarTrial, call_later, with_large_stack
from specdec.sampling.grammars.mask_bits import Words, only_bit, token_bit

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"\x20|\x0A(\x20{0,32}|\x09{0,8})"}
"""Between the parts of JSON: nothing, a space, or a new line with its indent. A model that has lost its way would write
white space for ever."""

COMPILED_BYTES = 16 << 20
"""Upper bound on the memory of the compiled grammars that are kept for later requests."""
LARGE_BYTES = 1 << 20
"""Bytes of a compiled grammar above which it is large: it is not kept for long."""
LARGE_SECONDS = 10.0
"""Seconds that a large grammar is kept after it was last asked for."""
BYTES_PER_CHAR = 256
"""Estimated memory of a compiled grammar per character of its source, as a lower bound; 30 to 250 were measured."""


class CompiledGrammar(NamedTuple):
    """A grammar at its beginning. bytes: what it takes in memory, estimated."""

    matcher: Any
    bytes: int


class Grammars:
    """Compiles grammars, and keeps the compiled ones within COMPILED_BYTES, least recently used first out, large ones
    while they are in use.

    vocab_size: of the model; a tokenizer may have fewer tokens, or more.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._library: GrammarLibrary | None = None
        self._kept: OrderedDict[tuple[str, Any], CompiledGrammar] = OrderedDict()  # least recently used first
        self._used: dict[tuple[str, Any], float] = {}  # when each large one was asked for last
        self._timer = threading.Timer
        self._looking = False  # a timer runs
        self._lock = threading.Lock()  # of what is kept

    def start(self, params: SamplingParams, ends: Collection[int], own_ends: Collection[int]) -> "GrammarState | None":
        """The first state of a text that follows `params`; None: the text is free.

        ends: tokens that end the text; own_ends: those of them that the model ends it with, whatever they look like.
        Raises ConfigError for a grammar that cannot be followed, with the library's reason.
        """
        name = params.grammar
        if name is None:
            return None
        if self._tokenizer is None:
            raise ConfigError(f"{name} needs a tokenizer; pass tokenizer=...")
        if self._library is None:
            self._library = GrammarLibrary(self._tokenizer, self._vocab_size)
        there = [token for token in ends if 0 <= token < self._vocab_size]
        special = frozenset(token for token in there if token in own_ends or self._library.is_special(token))
        if not special:
            raise ConfigError(f"{name} needs a token that ends the text, and the model names none; give stop_token_ids")
        value = tuple(params.choice) if name == "choice" and params.choice else getattr(params, name)
        state = GrammarState(self._compile(name, value), self._library, special)
        if state.is_dead:
            raise ConfigError(f"{name} cannot be followed (no text does); change it, or leave it out")
        return state

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(one.bytes for one in self._kept.values())

    def _compile(self, name: str, value: Any) -> Any:
        """The library's matcher at the beginning of a grammar; kept as long as there is room."""
        assert self._library is not None
        with self._lock:
            if (name, value) in self._kept:
                self._kept.move_to_end((name, value))
                self._note_use((name, value))
                return self._kept[name, value].matcher
        require_bounded(name, value)
        found, reason = self._library.compile(name, value)
        if found is None:
            raise ConfigError(f"{name} cannot be followed ({reason}); change it, or leave it out")
        with self._lock:
            self._kept[name, value] = found
            room = COMPILED_BYTES - sum(one.bytes for one in self._kept.values())
            while room < 0:
                key, one = self._kept.popitem(last=False)
                self._used.pop(key, None)
                room += one.bytes
            self._note_use((name, value))
        return found.matcher

    def forget_idle(self, now: float) -> None:
        """Forget large grammars that were not asked for lately; look again as long as there are others."""
        with self._lock:
            self._looking = False
            for key in [key for key, used in self._used.items() if now - used >= LARGE_SECONDS]:
                del self._used[key], self._kept[key]
            self._schedule_look()

    def _note_use(self, key: tuple[str, Any]) -> None:
        if key in self._kept and self._kept[key].bytes > LARGE_BYTES:
            self._used[key] = time.monotonic()
            self._schedule_look()

    def _schedule_look(self) -> None:
        if self._looking or not self._used:
            return
        self._looking = True
        call_later(self._timer, LARGE_SECONDS, self, lambda grammars: grammars.forget_idle(time.monotonic()))


class GrammarLibrary:
    """llguidance with one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        if find_spec("llguidance") is None:
            raise ConfigError('grammars need llguidance: pip install "specdec-runtime[grammar]", or leave them out')
        # slow to import, and few engines need it
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
        self._trial = GrammarTrial(*_portable(tokenizer), n_vocab=known)
        self._one_at_a_time = threading.Lock()
        self._executor = self._llguidance.LLExecutor()
        self._width = -(-self._tokenizer.vocab_size // 32)

    def is_special(self, token: int) -> bool:
        return bool(self._tokenizer.is_special_token(token))

    def compile(self, name: str, value: Any) -> tuple[CompiledGrammar | None, str]:
        """A grammar within `require_bounded`, or None and why it cannot be followed.

        One that is not plain is compiled in another process first: see `grammar_trial`. Of these, one is compiled at a
        time, there or here: four took the processors from the engine, and their memory came at once.
        """
        make = self._llguidance.LLMatcher
        try:
            if name == "regex":
                text, grammar = value, make.grammar_from_regex(value)
            elif name == "choice":
                text = "|".join(map(_literal, value))
                grammar = make.grammar_from_regex(text)
            else:
                schema = json.loads(value) if name == "json_schema" else {"type": "object"}
                schema = {} if schema is True else schema
                text = json.dumps(schema)
                grammar = make.grammar_from_json_schema(text, _options(schema))
                del schema  # ten times its text, and it may wait
            size = BYTES_PER_CHAR * len(text)
            plain = compiles_in_linear_time(name, value)
            with contextlib.nullcontext() if plain else self._one_at_a_time:
                if not plain:
                    size = max(size, self._trial.run(grammar))
                matcher = with_large_stack(lambda: make(self._tokenizer, grammar, log_level=0))
        except ValueError as error:  # ConfigError among them
            return None, reason_of(str(error))
        if matcher.is_error():
            return None, reason_of(matcher.get_error())
        return CompiledGrammar(matcher, size), ""

    def goes_on(self, matcher: Any) -> bool:
        """May any token of the model come next?"""
        twin = matcher.deep_copy()
        bits = np.frombuffer(twin.compute_bitmask(), dtype=np.int32).copy()
        for token in (*self._tokenizer.eos_tokens, *range(self.vocab_size, 32 * len(bits))):
            bits[token // 32] &= ~token_bit(token)
        return bool(bits.any()) and not twin.is_error()

    def masks(self, states: "Sequence[GrammarState]") -> Words:
        """[M, words] of all states, on several threads."""
        bits = np.zeros((len(states), self._width), dtype=np.int32)
        going_on = [(state.matcher, i) for i, state in enumerate(states)]
        self._llguidance.numpy.fill_next_token_bitmask_par(self._executor, going_on, bits)
        for end in (*self._tokenizer.eos_tokens, *range(self.vocab_size, min(32 * self._width, 32 * self.num_words))):
            bits[:, end // 32] &= ~token_bit(end)  # the library's own ends, and ids after the model's last token
        for mask, state in zip(bits, states, strict=True):
            may_end = state.may_end
            for end in state.ends:
                mask[end // 32] = mask[end // 32] | token_bit(end) if may_end else mask[end // 32] & ~token_bit(end)
            if not mask[: self.num_words].any():
                mask[:] = -1  # some token has to be drawn here, and `after` will refuse it
        return np.ascontiguousarray(bits[:, : self.num_words])


class GrammarState:
    """The state of a grammar after some text that it allows.

    ends: tokens that end the text, where it may end; over: one of them did. fault: what the library raised for tokens
    of a round after this state; the tokens that the round draws are then not valid.
    """

    __slots__ = ("_forced", "_mask", "ends", "fault", "library", "matcher", "over")

    def __init__(self, matcher: Any, library: Any, ends: frozenset[int], *, over: bool = False) -> None:
        self.over = over
        self.fault: BaseException | None = None
        self.matcher = matcher
        self.library = library
        self.ends = ends
        self._mask: Words | None = None
        self._forced: tuple[int, ...] | None = None

    @property
    def free(self) -> bool:
        """Nothing is restricted here, or after it."""
        return False

    @property
    def is_dead(self) -> bool:
        """Neither may the text end here, nor may any token come next."""
        if self.over or self.may_end:
            return False
        dead = self.matcher.is_error() or not self.library.goes_on(self.matcher)
        return bool(dead)

    @property
    def grammar(self) -> "GrammarState | None":
        """The state whose mask the library makes; None: there is no grammar."""
        return self

    @property
    def num_words(self) -> int:
        num_words: int = self.library.num_words
        return num_words

    @property
    def may_end(self) -> bool:
        return not self.over and bool(self.matcher.is_accepting()) and not self.matcher.is_error()

    def after(self, token: int) -> "GrammarState | None":
        """The state after one more token; None: the grammar does not allow the token."""
        if token in self.ends:
            return GrammarState(self.matcher, self.library, self.ends, over=True) if self.may_end else None
        if self.over:
            return None
        matcher = self.matcher.deep_copy()
        return GrammarState(matcher, self.library, self.ends) if matcher.consume_token(token) else None

    @property
    def mask(self) -> Words:
        """[words] tokens that may come next."""
        if self._mask is None:
            [self._mask] = self.library.masks([self])
        return self._mask

    @property
    def forced(self) -> tuple[int, ...]:
        """The next tokens, as long as the grammar allows exactly one."""
        if self._forced is None:
            tokens: list[int] = []
            state: GrammarState | None = self
            while state is not None and not state.over and len(tokens) < MAX_FORCED_TOKENS:
                only = only_bit(state.mask)
                if only is None:
                    break
                tokens.append(only)
                state = state.after(only)
            self._forced = tuple(tokens)
        return self._forced


def compute_masks(states: Sequence[GrammarState | None]) -> None:
    """Make the masks of these states in one call of the library; `mask` then returns them. A fault of the library makes
    none: `mask` raises it at the state that is at fault."""
    grammars = [state.grammar for state in states if state is not None]
    missing = {id(state.matcher): state for state in grammars if state is not None and state._mask is None}
    if not missing:
        return
    chosen = list(missing.values())
    try:
        for state, mask in zip(chosen, chosen[0].library.masks(chosen), strict=True):
            state._mask = mask
    except BaseException as error:
        if not is_fault(error):
            raise


def tree_masks(trees: Sequence[tuple[GrammarState, Sequence[int], Sequence[int]]]) -> Words:
    """[T, N, words], masks of every node of T trees, each given by the state after its root, tokens and parents [N].

    A node that cannot be reached, because the grammar forbids it or one of its ancestors, has all bits set. What the
    library raises for one tree becomes the `fault` of its root, and its bits are all set; other trees are not affected.
    """
    num_nodes = max(len(tokens) for _, tokens, _ in trees)
    masks = np.full((len(trees), num_nodes, trees[0][0].num_words), -1, dtype=np.int32)
    reached: list[tuple[int, int, GrammarState]] = []
    for number, (root, tokens, parents) in enumerate(trees):
        try:
            masks[number, 0] = root.mask
            states: list[GrammarState | None] = [root]
            for node in range(1, len(tokens)):
                above = states[parents[node]]
                state = None if above is None or tokens[node] < 0 else above.after(tokens[node])
                states.append(state)
                if state is not None and not state.over:
                    reached.append((number, node, state))
        except BaseException as error:
            if not is_fault(error):
                raise
            root.fault = error
            reached = [each for each in reached if each[0] != number]
    compute_masks([state for _, _, state in reached])
    for number, node, state in reached:
        try:
            masks[number, node] = state.mask
        except BaseException as error:
            if not is_fault(error):
                raise
            trees[number][0].fault = error
    return masks


def reason_of(message: str) -> str:
    """The library's reason, without the text that it shows around it."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (named or lines or ["it gives no reason"])[0]
    return reason if len(reason) <= 200 else reason[:200] + "..."


def _portable(tokenizer: Any) -> tuple[str, Any]:
    """The tokenizer for another process, as the library reads it: JSON, and the ids that end a text."""
    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str(), tokenizer.eos_token_id


def _options(schema: Any) -> dict[str, Any] | None:
    """Options for white space; none if the schema has its own, which they would override."""
    if not isinstance(schema, dict):
        return None
    own = schema.get("x-guidance")
    return (
        None if isinstance(own, dict) and own.keys() & {"whitespace_flexible", "whitespace_pattern"} else JSON_OPTIONS
    )


def _literal(text: str) -> str:
    """A regular expression for a text and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
