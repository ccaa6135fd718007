"""The store of finished outputs finds what a search through all its texts finds, and holds no more than it may."""

import random
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from specdec import EngineConfig, SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend
from specdec.draft_models import finished_texts
from specdec.draft_models.finished_texts import BEFORE, MATCH, NOTHING, FinishedTexts
from specdec.draft_models.lookup import SuffixWorker, newest_tokens
from specdec.errors import ConfigError
from specdec.gpu.mirrored_array import upload

from engine_internals import capture_on_cpu
from marks import deep, deep_cases, examples, usual_cases
from scripted_drafter import history_batch

CPU = torch.device("cpu")
SALTS = (b"", b"one", b"other")
NEW = examples(24, 40)


def store_of(*texts, size=1000, num_rows=4):
    """texts: (tokens, where the output begins, salt) each."""
    store = FinishedTexts(size, num_rows, CPU)
    for text in texts:
        store.add(*text)
    store.flush()
    return store


def looked_up(store, text, row=0):
    """(matched, continuation of up to three tokens) at each place that matches."""
    history = torch.tensor([text])
    found = store.matches(newest_tokens(history, torch.tensor([len(text)])), torch.tensor([row]))
    following = torch.stack([found.tokens_at(level)[0] for level in range(3)], dim=1).tolist()
    following = [list(takewhile(NOTHING.__ne__, tokens)) for tokens in following]
    return [(n, tokens) for n, tokens in zip(found.matched[0].tolist(), following, strict=True) if n]


class EveryText:
    """The index by brute force: texts in a list, dropped from its beginning."""

    def __init__(self, size):
        self.size, self.texts = size, []

    def add(self, tokens, begin, salt):
        if begin == len(tokens):
            return
        first = max(0, begin - MATCH, len(tokens) - self.size + 1)
        self.texts.append((tokens[first:], max(0, begin - first), salt))
        while self.num_tokens > self.size:
            del self.texts[0]

    @property
    def num_tokens(self):
        return sum(len(text) + 1 for text, _, _ in self.texts)

    def matches(self, wanted, salt):
        """(matched, continuation) at every place of an output that matches."""
        found = []
        for text, begin, other in self.texts:
            for place in range(begin, len(text)) if other == salt else ():
                size = 0
                while size < min(MATCH, place, len(wanted)) and text[place - 1 - size] == wanted[-1 - size]:
                    size += 1
                if size:
                    found.append((size, text[place : place + 3]))
        return found


def test_by_eye():
    store = store_of(([5, 1, 2, 3, 4], 1, b""), ([1, 2, 9], 2, b""))
    assert sorted(looked_up(store, [1, 2])) == [(2, [3, 4]), (2, [9])]
    assert looked_up(store, [7, 5])[0][1] == [1, 2, 3], "the end of the prompt is context"
    assert looked_up(store, [9]) == [] == looked_up(store, [2, 7])
    assert sorted(looked_up(store, [5, 1, 2]))[-1] == (3, [3, 4]), "longer than the other by one"


def test_a_prompt_is_context_and_no_continuation():
    store = store_of(([1, 2, 3, 4, 5, 6], 4, b""))
    assert looked_up(store, [1, 2]) == []
    assert looked_up(store, [3, 4])[0][1] == [5, 6]


@usual_cases("0-2", "1-3", "2-512", "3-2", "4-3", "5-512")
@pytest.mark.parametrize("fan", [2, 3, 512])
@pytest.mark.parametrize("seed", [*range(6), *(deep(seed) for seed in range(6, 60))])
def test_against_a_search_through_all_texts(seed, fan, monkeypatch):
    monkeypatch.setattr(finished_texts, "FAN", fan)
    rng = random.Random(seed)
    size, vocab = rng.choice((5, 40, 90, 400)), rng.choice((2, 3, 20))
    store, oracle = FinishedTexts(size, 3, CPU), EveryText(size)
    for _ in range(30):
        tokens = [rng.randrange(vocab) for _ in range(rng.choice((1, 3, 20, 60)))]
        text = tokens, rng.randint(0, len(tokens)), rng.choice(SALTS)
        store.add(*text)
        oracle.add(*text)
        assert store.num_tokens == oracle.num_tokens <= size
        if rng.random() < 0.3:
            store.flush()
            salts = [rng.choice(SALTS) for _ in range(3)]
            for row, salt in enumerate(salts):
                store.set_salt(row, salt)
            for row, salt in enumerate(salts):
                wanted = [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 30)))]
                got, want = looked_up(store, wanted, row), oracle.matches(wanted, salt)
                ended = [(n, [token for token in follow if token != NOTHING]) for n, follow in got]
                left = list(want)
                for match in ended:
                    left.remove(match)  # each is there, and as often
                nearest = min(finished_texts.NEAREST // 2, len(want))
                best = sorted((n for n, _ in want), reverse=True)[:nearest]
                assert sorted((n for n, _ in got), reverse=True)[:nearest] == best


def test_among_equal_contexts_the_latest_are_nearest():
    """More places than are looked at, all with the same context of `MATCH` tokens."""
    context = list(range(10, 10 + MATCH))
    many = 2 * finished_texts.NEAREST
    equal = [([*context, 100 + i], MATCH, b"") for i in range(many)]
    others = [([end, 9], 1, b"") for end in (0, 99) for _ in range(many)]  # on both sides of them in the order
    store = store_of(*equal, *others, size=many * (MATCH + 8))
    found = [follow[0] - 100 for n, follow in looked_up(store, context) if n == MATCH]
    assert {many - 1, many - 2, many - finished_texts.NEAREST // 2} <= set(found)


def test_memory_does_not_grow_with_what_was_answered():
    """All arrays keep their size, and nothing is held of texts, or of salts, that have left."""
    store, rng = FinishedTexts(200, 2, CPU), random.Random(0)
    for i in range(100):
        store.set_salt(0, b"salt %d" % i)
        store.add([rng.randrange(50) for _ in range(30)], 10, b"salt %d" % i)
        store.flush()
        assert store.num_tokens <= 200 and len(store._order) <= 200 and len(store._texts) <= 8
        assert len(store._numbers) <= 12, "salts of texts and rows, and those seen since the last look"
    assert store._device.shape == (401,)


def assert_in_step(store):
    """The device holds what the host does."""
    cells, order, count = store._device.split([store._ring, store._ring, 1])
    assert cells.tolist() == store._cells.tolist()
    assert int(count) == len(store._order) and order[: len(store._order)].tolist() == store._order.tolist()


@deep_cases("3", "4", "5")
@pytest.mark.parametrize("seed", range(6))
def test_texts_uploaded_in_pieces_are_complete_on_the_device(seed):
    """Texts that join and leave between two uploads, more than once round the ring, and none at all."""
    rng = random.Random(seed)
    store = FinishedTexts(rng.choice((3, 17, 60, 300)), 3, CPU)
    assert_in_step(store)
    for _ in range(60):
        for _ in range(rng.choice((0, 1, 2, 9))):
            tokens = [rng.randrange(4) for _ in range(rng.choice((0, 1, 5, 40)))]
            store.add(tokens, rng.randint(0, len(tokens)), rng.choice(SALTS))
        if rng.random() < 0.05:
            store.clear()
        store.flush()
        assert_in_step(store)


def test_an_answer_costs_the_upload_of_an_answer(monkeypatch):
    """The whole ring was sent after each: 16 MB for a million tokens."""
    sent = []
    monkeypatch.setattr(
        finished_texts, "upload", lambda array, device: (sent.append(array.size), upload(array, device))[1]
    )
    store, rng = FinishedTexts(20_000, 2, CPU), random.Random(0)
    for _ in range(50):  # full in the middle: from then on as many leave
        store.add([rng.randrange(50) for _ in range(600)], 30, b"")
        store.flush()
        store.flush()  # nothing new
    assert store.num_tokens > 19_000 and len(sent) == 50
    assert max(sent) <= 7 * 2 * 600


def chain(texts, history, steps=3):
    tree = SuffixWorker(TorchBackend(), store_of(*texts)).propose(history_batch([history], steps))
    tree.check()
    return tree.tokens[0, 1:].tolist()


@pytest.mark.parametrize(
    ("texts", "history", "want"),
    [
        ([[7, 1, 2, 3, 4]], [5, 7, 1], [2, 3, 4]),
        ([[7, 1, 2]], [5, 7, 1], [2, 0, 0]),  # its end says nothing
        ([[7, 1, 2, 3]], [7, 1, 8, 9, 7, 1], [8, 9, 7]),  # as long a match: the request's own text
        ([[7, 1, 2, 3], [7, 1, 2, 4, 5]], [7, 1, 8, 9, 7, 1], [2, 4, 5]),  # as long and twice; then the latest
        ([[6, 7, 1, 2, 3]], [7, 1, 8, 9, 6, 7, 1], [2, 3, 0]),  # a longer match
    ],
    ids=str,
)
def test_drafts_of_both_texts_by_eye(texts, history, want):
    assert chain([(text, 0, b"") for text in texts], history) == want


def test_before_the_text_is_no_token():
    assert newest_tokens(torch.tensor([[4, 5, 9]]), torch.tensor([2])).tolist() == [[5, 4, *[BEFORE] * (MATCH - 2)]]


@pytest.fixture
def suffix_engine(make_target, make_engine):
    def make(kept=500, spec=None, **config):
        return make_engine(
            make_target("gemma4-e2b"), "suffix", spec=spec or SpecConfig(5), finished_tokens=kept, **config
        )

    return make


DRAWN = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=3)


@pytest.mark.parametrize("spec", [SpecConfig(5), deep(SpecConfig(4, 3, 12))], ids=["chain", "tree"])
def test_a_prompt_that_was_answered_is_drafted_from_its_answer(spec, suffix_engine, random_prompt):
    rounds = {}
    for kept in (0, 500):
        engine = suffix_engine(kept, spec)
        first, again = (engine.generate([random_prompt(12)], DRAWN)[0] for _ in range(2))
        assert first.token_ids == again.token_ids
        rounds[kept] = again.stats.rounds
    assert rounds[500] <= 1 + -(-NEW // 6) < rounds[0]


def test_captured_rounds_see_what_finished_after_they_were_captured(suffix_engine, random_prompt, monkeypatch):
    capture_on_cpu(monkeypatch)
    engine = suffix_engine(max_batch_size=2)
    outs = [engine.generate([random_prompt(12)], DRAWN)[0] for _ in range(2)]
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[1].stats.rounds < 10 < outs[0].stats.rounds
    assert engine.stats().captures.uncaptured_rounds <= 1  # the first that draws with a temperature


def test_a_salt_keeps_texts_from_others(suffix_engine, random_prompt):
    engine, rounds = suffix_engine(), []
    for salt in ("a", "b", "a"):
        rounds.append(engine.generate([random_prompt(12)], replace(DRAWN, cache_salt=salt))[0].stats.rounds)
    assert rounds[2] < 10 < rounds[0] == rounds[1]


def test_aborted_requests_are_not_kept(suffix_engine, random_prompt):
    engine = suffix_engine()
    handle = engine.submit(random_prompt(12), SamplingParams(max_new_tokens=40))
    engine.step()
    engine.step()
    engine.abort(handle.id)
    assert engine.state.finished.num_tokens == 0
    engine.generate([random_prompt(12)], SamplingParams(max_new_tokens=4))
    assert 0 < engine.state.finished.num_tokens <= 500


def test_after_a_fault_it_is_empty_and_in_step(suffix_engine, random_prompt, monkeypatch):
    engine, params = suffix_engine(), SamplingParams(max_new_tokens=12)
    want = engine.generate([random_prompt(12)], params)[0].token_ids
    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "release_requests", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([random_prompt(9)], params)
    assert engine.generate([random_prompt(12)], params)[0].token_ids == want
    store = engine.state.finished
    store.flush()
    assert_in_step(store)


def test_finished_tokens_need_a_drafter_that_reads_them(make_target, make_engine):
    with pytest.raises(ConfigError, match="finished_tokens=64, and drafter ngram proposes nothing of finished"):
        make_engine(make_target("gemma4-e2b"), "ngram", finished_tokens=64)
    make_engine(make_target("gemma4-e2b"), None, finished_tokens=64)  # a baseline with the same settings
    with pytest.raises(ConfigError, match="finished_tokens=-1"):
        EngineConfig(finished_tokens=-1)
