"""Turns token ids into text as they arrive: no half characters, no parts of stop strings, and no text is taken back.

New text is the difference between two decodes that start a few tokens back. It is handed on only once it is settled,
when no later token can change it. The streamed pieces, joined, are one decode of the whole output, cut before the first
stop string.

    tokens  0 ........ prefix ....... read ............. seen
            | handed on  | decode context  | not settled yet |
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.text.stop_strings import ThoughtMarks, cut_at_stop, find_first, thought_end

REPLACEMENT = "\ufffd"

SHORT = 4
"""Texts of up to this many tokens are cached: the readers of one output decode the same tokens, each a few times."""
CLEANED = frozenset(" .?!,'ntmsver")
"""Characters in the patterns that `clean_up_tokenization_spaces` rewrites: no match spans any other character."""


class TokenView(Sequence[int]):
    """A view of tokens[start:stop] without a copy, so reading an output in pieces takes linear time."""

    __slots__ = ("_start", "_stop", "_tokens")

    def __init__(self, tokens: list[int], start: int, stop: int) -> None:
        assert 0 <= start <= stop <= len(tokens), f"{start=} {stop=} {len(tokens)=}"
        self._tokens, self._start, self._stop = tokens, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, at: Any) -> Any:
        """One token, or a list of those of a slice of step 1."""
        place = range(self._start, self._stop)[at]
        return self._tokens[place] if isinstance(place, int) else self._tokens[place.start : place.stop]


class TokenKinds(NamedTuple):
    """Properties of a tokenizer: ids that decoding skips, ids of single bytes, and whether it cleans up spaces.

    A run of byte tokens is decoded as a whole: another byte can turn its characters into U+FFFD.
    """

    special: frozenset[int]
    byte: frozenset[int]
    cleans_up: bool


@dataclass(slots=True, eq=False)
class Detokenizer:
    """The text of one request's output; empty without a tokenizer.

    written: special tokens that are kept as text, such as those of tool calls.
    """

    tokenizer: Any | None
    written: frozenset[int] = frozenset()
    _size: int = field(init=False)  # tokens of the vocabulary, counted once: that takes as long as decoding a token
    _prefix: int = field(default=0, init=False)  # first token of the decode context
    _read: int = field(default=0, init=False)  # tokens whose text is settled
    _seen: int = field(default=0, init=False)  # tokens looked at
    _known_len: int = field(default=0, init=False)  # characters of the context
    _shown: str = field(default="", init=False)  # context and unsettled text, as if the output ended at `seen`
    _context: str = field(default="", init=False)  # end of the settled text, as far as a stop string can reach back
    pending: str = field(default="", init=False)  # settled text not handed out yet
    _sent: list[str] = field(default_factory=list, init=False)  # pieces that `stream` handed out; copies share it
    _num_sent: int = field(default=0, init=False)  # number of pieces that this copy handed out
    _final: str | None = field(default=None, init=False)  # the whole text, once computed
    _thinks: bool | None = field(default=None, init=False)  # does it end in a thought? None: not known yet
    _answer_token: int = field(default=-1, init=False)  # token in which the text after the thought begins; -1: unknown

    def __post_init__(self) -> None:
        self._size = num_tokens(self.tokenizer)

    def __copy__(self) -> "Detokenizer":
        """Does the same as `copy.copy`, whose pickling takes four times as long: it runs per request and round."""
        twin = Detokenizer.__new__(type(self))
        for name in Detokenizer.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def find_stop(self, output_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Read the newest tokens of the output; do they complete a stop string?

        It searches the text, and the text with special tokens written out, so "<end_of_turn>" can be a stop string.
        """
        if self.tokenizer is None:
            return False
        reach, seen = max(map(len, stops), default=0), self._seen
        text = self._context + self.update(output_ids, reach)
        self.pending = ""  # nothing is handed out here: growing text would be copied for each token
        if not self._past_thought(output_ids, stops, seen) or len(output_ids) <= getattr(stops, "min_tokens", 0):
            return False
        if any(stop in text for stop in stops) and self._ends_late_enough(output_ids, stops, skip_special_tokens=True):
            return True
        # one before them too: words after a special token may begin with a space that is no text otherwise
        if self._kinds().special.isdisjoint(output_ids[max(0, len(output_ids) - reach - 1) :]):
            return False
        # more tokens than the string has characters, since some decode right only after others
        written = self._decode(output_ids[max(0, len(output_ids) - reach - 8) :], skip_special_tokens=False)
        return any(stop in written for stop in stops) and self._ends_late_enough(
            output_ids, stops, skip_special_tokens=False
        )

    def _past_thought(self, output_ids: Sequence[int], stops: Sequence[str], seen: int) -> bool:
        """Is there text after the thought, or without one? It reads the tokens from `seen` on, and a few before them
        for marks; the whole output only once they say so."""
        marks = getattr(stops, "thought_marks", None)
        if marks is None or self._answer_token >= 0:
            return True
        opens, closes = marks
        seen = min(seen, len(output_ids) - 1)
        before = max(len(opens), len(closes)) + 8 if self._thinks is not False else 0
        text = self._decode(output_ids[max(0, seen - before) :], skip_special_tokens=False)
        if self._thinks is None:
            begins = text.lstrip().startswith(opens)
            self._thinks = begins if begins or thought_end(text, marks) < len(text) else None
        if self._thinks and closes in text:
            self._thinks, text = False, text.partition(closes)[2]
        if self._thinks is False and text.strip():
            self._find_answer(output_ids, marks, seen)
        return self._answer_token >= 0

    def _ends_late_enough(self, output_ids: Sequence[int], stops: Sequence[str], *, skip_special_tokens: bool) -> bool:
        """Does one of the stop strings, at least one of which is there, end where it counts?"""
        since = self._exempt_chars(output_ids, stops, skip_special_tokens=skip_special_tokens)
        if not since:
            return True
        whole = self._decode(output_ids[:], skip_special_tokens=skip_special_tokens)
        return find_first(whole, stops, since) is not None

    def stream(self, output_ids: Sequence[int], stops: Sequence[str], *, finished: bool) -> str:
        """Text not handed out before; a possible start of a stop string waits until it is ruled out."""
        if self.tokenizer is None:
            return ""
        if finished:
            self._final = self.final_text(output_ids, stops)
            new = self._final[sum(map(len, self._sent[: self._num_sent])) :]
        else:
            reach = max(map(len, stops), default=0)
            self.update(output_ids, reach)
            ready = len(self.pending) - max(0, reach - 1)
            new, self.pending = self.pending[: max(0, ready)], self.pending[max(0, ready) :]
        del self._sent[self._num_sent :]  # pieces of a dropped copy
        self._sent.append(new)
        self._num_sent += 1
        return new

    def final_text(self, output_ids: Sequence[int], stops: Sequence[str]) -> str:
        """The whole text, cut before the first stop string."""
        if self.tokenizer is None or self._final is not None:
            return self._final or ""
        whole = self._decode(output_ids)
        exempt = self._exempt_chars(output_ids, stops)
        text = cut_at_stop(whole, stops, exempt)
        if stops and not self._kinds().special.isdisjoint(output_ids):
            written = self._to_written_stop(output_ids, stops)
            text = written if text == whole else min(text, written, key=len)
        sent = "".join(self._sent[: self._num_sent])
        if text.startswith(sent):
            return text
        # the tokenizer took text back in an unforeseen way: text handed out stays
        self.update(output_ids, 0)
        return sent + cut_at_stop(self.pending + self._shown[self._known_len :], stops, max(0, exempt - len(sent)))

    def _exempt_chars(
        self, output_ids: Sequence[int], stops: Sequence[str], *, skip_special_tokens: bool = True
    ) -> int:
        """Number of leading characters within which no stop string counts: see the settings of `StopStrings`."""
        least, marks = getattr(stops, "min_tokens", 0), getattr(stops, "thought_marks", None)
        exempt = len(self._decode(output_ids[:least], skip_special_tokens=skip_special_tokens)) if least else 0
        if marks is None or not stops:
            return exempt
        num = self._find_answer(output_ids, marks)
        before, until = (self._decode(output_ids[:end], skip_special_tokens=False) for end in (num, num + 1))
        thought = self._decode(output_ids[:num], skip_special_tokens=skip_special_tokens)
        return max(exempt, len(thought) + max(0, thought_end(until, marks) - len(before)))

    def _find_answer(self, output_ids: Sequence[int], marks: ThoughtMarks, start: int = 0) -> int:
        """Index of the token in which the text after the thought begins, `start` or later; the number of tokens if
        there is none yet."""

        def answers(num: int) -> bool:
            written = self._decode(output_ids[:num], skip_special_tokens=False)
            return thought_end(written, marks) < len(written)

        if self._answer_token < 0:
            found = start + bisect_left(range(start + 1, len(output_ids) + 1), True, key=answers)
            if found == len(output_ids):
                return found
            self._answer_token = found
        return self._answer_token

    def update(self, tokens: Sequence[int], reach: int) -> str:
        """Read the output; returns the text after the text settled before, if the output ended here.

        reach: characters that a stop string can reach back; 0 without stop strings: then a run of bytes is not decoded
        before it ends.
        """
        unsettled = self._shown[self._known_len :]
        now, kinds = len(tokens), self._kinds()
        if self._seen == now or (not reach and self._in_byte_run(tokens, now, kinds)):
            return unsettled
        if kinds.special.issuperset(tokens[self._seen :]):
            self._seen = now  # decoding skips them: an output of only such tokens would be decoded whole each time
            return unsettled
        before, shown_before, self._seen = self._seen, self._shown, now
        self._shown = self._decode(tokens[self._prefix :])
        unsettled = self._shown[self._known_len :]
        # a replacement character followed by other text is no unfinished character
        followed = self._shown.startswith(shown_before) and len(self._shown) > len(shown_before)
        if not self._shown.endswith(REPLACEMENT) and self._settles(tokens, now, self._shown, kinds):
            self._settle(now, self._shown, tokens, reach)
        elif followed and self._settles(tokens, before, shown_before, kinds):
            self._settle(before, shown_before, tokens, reach)
        return unsettled

    def _settles(self, tokens: Sequence[int], end: int, shown: str, kinds: TokenKinds) -> bool:
        """Is `shown`, the text up to token `end`, new and final, except for an unfinished last character?"""
        if len(shown) <= self._known_len or self._in_byte_run(tokens, end, kinds):
            return False
        return not (kinds.cleans_up and shown[-1] in CLEANED)

    def _settle(self, end: int, shown: str, tokens: Sequence[int], reach: int) -> None:
        """Settle the text up to token `end`; the tokens read last become the context of later decodes."""
        text = shown[self._known_len :]
        self.pending += text
        self._context = (self._context + text)[-reach:] if reach else ""
        self._prefix, self._read = self._read, end
        known = self._decode(tokens[self._prefix : end])
        self._known_len = len(known)
        self._shown = known if end == self._seen else self._decode(tokens[self._prefix : self._seen])

    def _in_byte_run(self, tokens: Sequence[int], end: int, kinds: TokenKinds) -> bool:
        """Is the last token before `end`, skipped ones aside, a byte?"""
        for at in range(end - 1, self._read - 1, -1) if kinds.byte else ():
            if tokens[at] not in kinds.special:
                return tokens[at] in kinds.byte
        return False

    def _to_written_stop(self, output_ids: Sequence[int], stops: Sequence[str]) -> str:
        """The text, without special tokens, up to the first stop string in the text that writes them out."""
        written = self._decode(output_ids, skip_special_tokens=False)
        found = find_first(written, stops, self._exempt_chars(output_ids, stops, skip_special_tokens=False))
        at = len(written) if found is None else found.begin
        head, end = written, len(output_ids)
        while len(head) > at:  # few steps: the stop string lies at the end of the output
            end -= 1
            head = self._decode(output_ids[:end], skip_special_tokens=False)
        text = self._decode(output_ids[:end])
        if end < len(output_ids) and output_ids[end] not in self._kinds().special:
            new = written[len(head) : at]
            text += new if self._decode(output_ids[: end + 1]).startswith(text + new) else new.lstrip()
        if found is None or not getattr(stops, "included", False):
            return text
        return text + written[found.begin : found.end]

    def _kinds(self) -> TokenKinds:
        return _kinds(self.tokenizer, self._size, self.written)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert self.tokenizer is not None
        if self.written and skip_special_tokens:
            special, skip_special_tokens = self._kinds().special, False
            ids = [token for token in ids if token not in special]
        if len(ids) <= SHORT:
            return _short_text(self.tokenizer, self._size, tuple(ids), skip_special_tokens)
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def num_tokens(tokenizer: Any) -> int:
    """Number of tokens: part of cache keys, since tokens may be added later."""
    return len(tokenizer) if hasattr(tokenizer, "__len__") else 0


@lru_cache(maxsize=1 << 14)
def _short_text(tokenizer: Any, size: int, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return text


@lru_cache(maxsize=16)
def _kinds(tokenizer: Any, size: int, written: frozenset[int]) -> TokenKinds:
    """Reads the kinds of tokens from any object that decodes; kinds that it does not list are empty. `size`: part of
    the cache key, since tokens may be added later. written: special tokens that count as text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id for token_id, token in added.items() if token.special}
    special.update(getattr(tokenizer, "all_special_ids", ()))
    vocab = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    names = (f"<0x{value:02{case}}>" for value in range(256) for case in "Xx")
    byte = {vocab[name] for name in names if name in vocab}
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    # transformers does not clean up after BPE unless told twice
    if type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE":
        told_twice = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        cleans_up = cleans_up and getattr(tokenizer, told_twice, False)
    return TokenKinds(frozenset(special) - written, frozenset(byte), bool(cleans_up))


class DraftColours:
    """The text of one sample in pieces, each marked as drafted or not; joined, they are the text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._reader = Detokenizer(tokenizer)
        self._stops = stops
        self._ids: list[int] = []

    def read(self, delta: Any) -> list[tuple[str, bool]]:
        """(text, drafted) of the tokens of this `StreamDelta`, up to the end of the settled text."""
        texts: list[tuple[str, bool]] = []
        last = len(delta.token_ids) - 1
        for place, (token, drafted) in enumerate(zip(delta.token_ids, delta.drafted, strict=True)):
            self._ids.append(token)
            finished = delta.output is not None and place == last
            texts.append((self._reader.stream(self._ids, self._stops, finished=finished), drafted))
        if delta.output is not None and last < 0:  # it ended without another token, for example by an abort
            texts.append((self._reader.stream(self._ids, self._stops, finished=True), False))
        runs = groupby((each for each in texts if each[0]), key=itemgetter(1))
        return [("".join(text for text, _ in run), drafted) for drafted, run in runs]


_BYTE = re.compile(r"<0[xX]([0-9a-fA-F]{2})>")  # of byte fallback; byte-level BPE has an alphabet
_ALPHABET: dict[str, int] = {char: byte for byte, char in bytes_to_unicode().items()}


@lru_cache(maxsize=64)
def ids_of(tokenizer: Any, size: int, tokens: tuple[str, ...]) -> frozenset[int]:
    """Ids of those of these tokens that the tokenizer has. Listing a large vocabulary takes 0.3 s. size: see
    `num_tokens`."""
    vocab = tokenizer.get_vocab() if tokens else {}
    return frozenset(vocab[token] for token in tokens if token in vocab)


@lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself, special ones written out."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


@lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Bytes that this token adds to the UTF-8 text; the bytes of all tokens, joined, are the text."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return text.encode(errors="replace")
    piece = getattr(tokenizer, "convert_ids_to_tokens", lambda _: None)(token)
    if not isinstance(piece, str):
        return text.encode()
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    if all(char in _ALPHABET for char in piece):
        return bytes(_ALPHABET[char] for char in piece)
    return text.encode()


def end_tokens(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """Ids that end a text: those of the generation config, else of the config, and the tokenizer's, as in vLLM. Of many
    fine-tunes only the tokenizer names the token with which their chat template ends a turn."""
    configs = (getattr(model, "generation_config", None), model.config, model.config.get_text_config())
    named = next((ids for each in configs if (ids := _end_ids(each))), frozenset())
    return named | _end_ids(tokenizer)


def _end_ids(source: Any) -> frozenset[int]:
    ids = getattr(source, "eos_token_id", None)
    return frozenset(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
