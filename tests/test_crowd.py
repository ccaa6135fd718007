"""Many requests at once, in pools for a tenth of them: each gets its lone run's tokens, and nothing is left over.

`python -m bench crowd` is a larger one, on a GPU.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from crowd import Asked, each_alone, make_crowd, require_no_leak, serve_crowd, wrong_requests

from specdec import Engine, SpecConfig
from specdec.runtime.scheduler import slots_needed

from marks import examples, usual

VOCAB = 24  # so few that random drafts are right now and then
CHAIN, TREE = SpecConfig(3), SpecConfig(3, 2, 6)
CASES = {
    "plain": (None, CHAIN, 1),
    "ngram": ("ngram", CHAIN, 4),
    "mtp-chain": ("mtp", CHAIN, 4),
    "mtp-tree": ("mtp", TREE, 1),
    "eagle3-tree": ("eagle3", TREE, 4),
}


COUNT, LONGEST = examples(8, 60), 24


class Crowd:
    """The requests, and their lone runs, made once."""

    def __init__(self, make: Callable[..., Engine]) -> None:
        self.make = make
        self.asked: list[Asked] = make_crowd(COUNT, LONGEST, VOCAB)
        self.alone = each_alone(make(None, max_batch_size=1), self.asked)

    def engine(self, drafter: str | None, spec: SpecConfig, page_size: int) -> Engine:
        """Rows for two thirds of the crowd; slots for a tenth of it, of windows for three: they bound who is let in."""
        shape = {"spec": spec, "page_size": page_size}
        roomy = self.make(drafter, **shape, max_batch_size=1)
        sizes = [slots_needed(roomy.table, len(a.prompt), a.params.max_new_tokens) for a in self.asked]
        full, *windows = (max(sum(some) // 10, max(some)) for some in zip(*sizes, strict=True))
        slots = {"full_slots": full, "swa_slots": 3 * max(windows)}
        return self.make(drafter, **shape, **slots, max_batch_size=COUNT * 16 // 25)


@pytest.fixture(scope="module")
def crowd(make_target, make_drafter, make_engine) -> Crowd:
    model = make_target("gemma4-e2b", vocab_size=VOCAB)

    def make(drafter: str | None, **settings: Any) -> Engine:
        return make_engine(model, make_drafter(drafter, model), max_model_len=2 * LONGEST, **settings)

    return Crowd(make)


@pytest.mark.parametrize(
    ("name", "checks"),
    usual(itertools.product(CASES, ("", "sanitized")), lambda *case: case == ("eagle3-tree", "")),
)
def test_each_of_a_crowd_gets_what_it_gets_alone(name, checks, crowd, monkeypatch) -> None:
    """What others do in a crowd, trees of a head do, too."""
    monkeypatch.setenv("SPECDEC_SANITIZE", str(int(bool(checks))))

    def served() -> Engine:
        engine = crowd.engine(*CASES[name])
        outputs = serve_crowd(engine, crowd.asked)
        assert wrong_requests(crowd.asked, outputs, crowd.alone) == []
        assert {out.finish_reason for out in outputs} == {"stop", "length", "abort"}
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.cached_tokens > 0
        assert name == "plain" or sum(stats.accepted_counts) > 0
        return engine

    require_no_leak(served)
