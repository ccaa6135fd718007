"""Gemma 4 assistants under other conventions of the frozen cache: `changes` of the table of causes."""

from collections.abc import Iterator

from specdec.doctor.changes.change import Change
from specdec.doctor.changes.changed_drafters import changed_assistant
from specdec.doctor.pair_in_question import PairInQuestion
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter

DO = "make it by Gemma4MTPDrafter(assistant, target, {how}) and give that as drafter=..."


def positions(pair: PairInQuestion) -> Iterator[Change]:
    """Queries at the last committed position, as SGLang and vLLM have them, or at the bonus token's own, over the same
    keys."""
    drafter = _assistant(pair)
    offset = -1 if drafter.query_offset == 0 else 0
    shift = drafter.window_shift + offset - drafter.query_offset
    names = {0: "S, the bonus token's own", -1: "S - 1, the last committed one"}
    yield Change(
        what=f"queries at position {names[offset]}",
        do=DO.format(how=f"query_offset={offset}, window_shift={shift}"),
        pair=pair.changed(drafter=changed_assistant(drafter, pair.target, query_offset=offset, window_shift=shift)),
    )


def windows(pair: PairInQuestion) -> Iterator[Change]:
    """One key more or less on sliding layers."""
    drafter = _assistant(pair)
    if set(drafter.windows) == {None}:
        return
    for step in (-1, 1):
        shift = drafter.window_shift + step
        yield Change(
            what=f"one key {'more' if step > 0 else 'less'} on sliding layers",
            do=DO.format(how=f"window_shift={shift}"),
            pair=pair.changed(drafter=changed_assistant(drafter, pair.target, window_shift=shift)),
        )


def _assistant(pair: PairInQuestion) -> Gemma4MTPDrafter:
    assert isinstance(pair.drafter, Gemma4MTPDrafter)
    return pair.drafter
