"""Prompt lookup and suffix decoding propose what their definitions say, and the output is the target's."""

import math
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from specdec import SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend
from specdec.attention.trees.tree_builder import LOWEST
from specdec.draft_models import lookup
from specdec.draft_models.finished_texts import MATCH
from specdec.draft_models.lookup import (
    MATCHES,
    NgramDrafter,
    SuffixWorker,
    children,
    find_matches,
    match_weights,
    newest_tokens,
)

from marks import usual_cases
from scripted_drafter import history_batch
from watched_drafts import Made


def looked_up(*histories, steps=4, max_ngram=3):
    """The drafts of each history."""
    tree = NgramDrafter(max_ngram).propose(history_batch(histories, steps))
    tree.check()
    assert tree.tokens[:, 0].tolist() == [h[-1] for h in histories]
    return tree.tokens[:, 1:].tolist()


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # runs into the end: goes on with period 3
        ([5, 7, 7], [7, 7, 7, 7]),  # period 1
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4, 5, 6], [6, 6, 6, 6]),  # no match: the newest token again
        ([4], [4, 4, 4, 4]),
        ([4, 4], [4, 4, 4, 4]),
        ([4, 5], [5, 5, 5, 5]),
        ([4, 5, 4], [5, 4, 5, 4]),
        ([1, 2, 3, 1], [2, 3, 1, 2]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([3, 8, 3, 9, 0, 3], [9, 0, 3, 9]),  # the latest occurrence of 3
        ([1, 2, 5, 0, 9, 2, 6, 0, 1, 2], [5, 0, 9, 2]),  # the longer match before the later one
        ([7, 1, 2, 3, 5, 8, 1, 2, 3, 6, 7, 1, 2, 3], [6, 7, 1, 2]),  # three tokens are enough: the later of the two
    ],
    ids=str,
)
def test_lookup(history, drafts):
    assert looked_up(history) == [drafts]


@usual_cases("2", "5")
@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5, 8])
def test_lookup_is_the_same_alone_and_in_a_batch(max_ngram):
    """Also against a slow implementation of the definition, for every length from 1."""

    def slow(tokens, steps=4):
        for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tokens[-size:]:
                    copy = list(tokens)
                    for _ in range(steps):
                        copy.append(copy[start + size + len(copy) - len(tokens)])
                    return copy[len(tokens) :]
        return [tokens[-1]] * steps

    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 3, length).tolist() for length in (1, 2, 3, 4, 5, 6, 7, 9, 14, 30) for _ in range(4)]
    together = looked_up(*histories, max_ngram=max_ngram)
    assert together == [slow(h) for h in histories]
    assert together == [looked_up(h, max_ngram=max_ngram)[0] for h in histories]


# suffix decoding


def proposed(*histories, steps=3, topk=1, num_nodes=None):
    tree = SuffixWorker(TorchBackend()).propose(history_batch(histories, steps, topk, num_nodes))
    tree.check()
    return tree


def drafts(history, **shape):
    return proposed(history, **shape).tokens[0, 1:].tolist()


@pytest.mark.parametrize(
    ("history", "want"),
    [
        ([1, 2, 7, 8, 9, 1, 2], [7, 8, 9]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3]),  # runs into the end: goes on with period 3
        ([5, 7, 7], [7, 7, 7]),
        ([2, 9, 2, 5, 6, 2, 5, 6, 2], [5, 6, 2]),  # 2 went on with 5 twice, with 9 once
        ([2, 5, 3, 2, 9, 4, 2], [9, 4, 2]),  # once each: the later one
        ([1, 2, 5, 0, 2, 6, 0, 2, 6, 0, 1, 2], [5, 0, 2]),  # [1 2] once outweighs [2] twice: 4 to 1 + 1
        ([4], [0, 0, 0]),  # no match: tokens that nothing speaks for
        ([4, 5], [0, 0, 0]),
    ],
    ids=str,
)
def test_a_chain_by_eye(history, want):
    assert drafts(history) == want


def test_a_tree_by_eye():
    """After [1]: 2 twice, then 3 and 4; 5 once, then 6."""
    tree = proposed([1, 2, 3, 1, 2, 4, 1, 5, 6, 1], steps=2, topk=2, num_nodes=6)
    paths = defaultdict(list)
    for node in range(1, 6):
        parent = int(tree.parents[0, node])
        paths[node] = [*paths[parent], int(tree.tokens[0, node])]
    # 2 and 5 follow with 8/21 and 5/21 or so: longer matches weigh more. The last place is a child's.
    assert sorted(paths.values())[1:] == [[2], [2, 3], [2, 4], [5], [5, 6]]


def test_children_by_eye():
    """Weights 4, 1, 1 and 2 for tokens 7, 7, 0 and 9, in a node that has all, and one that has only the third."""
    next_token = torch.tensor([[7, 7, 0, 9]])
    followed = torch.tensor([[[4.0, 1.0, 1.0, 2.0], [0.0, 0.0, 1.0, 0.0]]])
    tokens, log_probs = children(next_token, followed, 3)
    assert tokens.tolist() == [[[7, 9, 0], [0, 1, 2]]]  # 1 and 2 are the lowest ids that are left
    assert log_probs[0, 0].exp().tolist() == pytest.approx([5 / 8, 2 / 8, 1 / 8])
    assert log_probs[0, 1].tolist() == [0.0, LOWEST, LOWEST]
    tokens, _ = children(next_token, followed, 6)  # more branches than matches
    assert tokens.tolist() == [[[7, 9, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]]


def slow_matches(text):
    found = []
    for end in range(len(text) - 1):
        size = 0
        while size < min(MATCH, end + 1) and text[end - size] == text[-1 - size]:
            size += 1
        if size:
            found.append((size, end))
    return sorted(found, reverse=True)[:MATCHES]


def slow_children(text, path):
    """token -> its share among the weights of the matches that go on with `path`."""
    found, shares = slow_matches(text), defaultdict(float)
    for size, end in found:
        period = len(text) - 1 - end
        going_on = [text[end + 1 + step % period] for step in range(len(path) + 1)]
        if going_on[:-1] == path:
            shares[going_on[-1]] += 4.0 ** (size - found[0][0])
    total = sum(shares.values())
    return {token: share / total for token, share in shares.items()}


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_the_definition(seed, monkeypatch):
    """Also where matches are found in blocks, of a few tokens or of one."""
    monkeypatch.setattr(lookup, "COMPARED", (1, 100, 3000, 1 << 23)[seed % 4])
    rng = random.Random(seed)
    texts = [[rng.randrange(rng.choice((2, 3, 9))) for _ in range(rng.choice((1, 2, 30, 90)))] for _ in range(3)]
    topk, length = rng.choice((1, 2, 4)), max(map(len, texts))
    padded = torch.tensor([[*text, *[1] * (length - len(text))] for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    matches = find_matches(padded, lengths, newest_tokens(padded, lengths))
    followed, paths = match_weights(matches.matched)[:, None], [[[]] for _ in texts]
    for level in range(4):
        next_token = matches.tokens_at(level)
        tokens, log_probs = children(next_token, followed, topk)
        for b, text in enumerate(texts):
            want = slow_children(text, paths[b][0])
            got = {t: math.exp(p) for t, p in zip(tokens[b, 0].tolist(), log_probs[b, 0].tolist(), strict=True)}
            assert len(got) == topk, "siblings are distinct"
            real = {token: share for token, share in got.items() if share > 0}
            assert real == pytest.approx({token: want[token] for token in real})
            assert sorted(real.values()) == pytest.approx(sorted(want.values())[-topk:])
            paths[b] = [[*paths[b][0], int(tokens[b, 0, 0])]]
        followed = followed * (next_token == tokens[:, 0, :1])[:, None]


def test_a_long_history_takes_no_multiple_of_its_memory(monkeypatch):
    """[B, L, 16] numbers of 12 bytes were made: 3.2 GB for 64 rows, one of them past 32,768 tokens."""
    monkeypatch.setattr(lookup, "COMPARED", 1 << 14)
    history = torch.randint(0, 3, (4, 5000), generator=torch.Generator().manual_seed(0))
    length = torch.tensor([5000, 4000, 17, 1])
    with Made() as made:
        find_matches(history, length, newest_tokens(history, length))
    largest = max(tensor.untyped_storage().nbytes() for tensor in made.seen.values())
    assert 0 < largest <= (history.shape[1] + MATCH) * len(history) * 8  # numbers of its own shape


SHAPES = [SpecConfig(num_steps=4), SpecConfig(num_steps=3, topk=3, num_draft_tokens=12)]


@pytest.mark.parametrize("spec", SHAPES, ids=["chain", "tree"])
def test_text_that_repeats_is_accepted_whole(spec, make_target, make_engine, random_prompt):
    engine = make_engine(make_target("gemma4-e2b"), "suffix", spec=spec)
    [out] = engine.generate([random_prompt(9)], SamplingParams(max_new_tokens=81, logit_bias={7: 100.0}))
    assert set(out.token_ids) == {7}
    assert out.stats.accepted_per_position[-1] > 0.75  # of all rounds but the first ones, before 7 was seen
