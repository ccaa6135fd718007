"""Which text came out of accepted drafts."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from specdec.text.detokenize import Detokenizer


class DraftColours:
    """The text of one sample in pieces, each with whether it came out of accepted drafts; joined they are the text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._reader = Detokenizer(tokenizer)
        self._stops = stops
        self._ids: list[int] = []

    def read(self, delta: Any) -> list[tuple[str, bool]]:
        """(text, drafted) of the tokens of this `StreamDelta`, as far as their text is settled."""
        texts: list[tuple[str, bool]] = []
        last = len(delta.token_ids) - 1
        for place, (token, drafted) in enumerate(zip(delta.token_ids, delta.drafted, strict=True)):
            self._ids.append(token)
            finished = delta.output is not None and place == last
            texts.append((self._reader.stream(self._ids, self._stops, finished=finished), drafted))
        if delta.output is not None and last < 0:  # it ended without a token more, as by an abort
            texts.append((self._reader.stream(self._ids, self._stops, finished=True), False))
        runs = groupby((each for each in texts if each[0]), key=itemgetter(1))
        return [("".join(text for text, _ in run), drafted) for drafted, run in runs]
