"""Random interleavings on targets with recurrent layers: each state that is kept is that of its tokens, computed again.

A vocabulary of six tokens has random trees of drafts accepted often, without a model that proposes them, and texts that
share prefixes. What an interleaving leaves is recomputed at its end, in one forward over the whole texts.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.kvcache.recurrent_state import RecurrentState
from specdec.models.target import TargetModel

from engine_internals import assert_idle, state_cache_of
from marks import deep, is_deep

VOCAB = 6
FAMILIES = {"qwen3_5": "linear_attention", "granitemoehybrid": "linear_attention", "lfm2": "conv"}
SEATS, DRAFTS = 4, 5
LONGEST, NEW = 48, 16  # tokens of a prompt, but for three, and of an answer
IN_A_ROW = 10  # interleavings of one engine, whose cache goes on from one to the next

Text = list[int]


def copies(cache: PrefixCache) -> Iterator[tuple[Text, int]]:
    """Tokens and slot of every copy."""

    def visit(node: Any, before: Text) -> Iterator[tuple[Text, int]]:
        text = before + node.key.tolist()
        for number, page in enumerate(node.pages.tolist()):
            if page in slots:
                yield text[: len(before) + (number + 1) * cache.page_size], slots[page]
        for child in node.children.values():
            yield from visit(child, text)

    assert cache.states is not None
    slots = cache.states.pages
    yield from visit(cache._root, [])


def states_of(engine: Engine) -> list[RecurrentState]:
    """States of each recurrent layer, the heads of all ranks side by side."""
    found = []
    for layer, kept in engine.cache.stores[0].layers.items():
        if kept.state is not None:
            states = [store.layers[layer].state for store in engine.cache.stores]
            found.append(kept.state if len(states) == 1 else joined(states, kept.fields))
    return found


def joined(states: Sequence[RecurrentState], fields: Sequence[torch.Tensor]) -> RecurrentState:
    """The state of all ranks. fields: the records of one of them: inputs, which are queries, keys and values; keys;
    corrected values."""
    _, keys, values = (field[0].numel() for field in fields[:3])
    inputs = zip(*(state.inputs.split([keys, keys, values], dim=2) for state in states), strict=True)
    whole = torch.cat([torch.cat(kind, dim=2) for kind in inputs], dim=2)
    return RecurrentState(torch.cat([state.matrices for state in states], dim=1), whole, states[0].folded_len)


def interleave(engine: Engine, draw: random.Random, texts: Sequence[Text]) -> list[tuple[Text, Any]]:
    """Requests that come, hit, are aborted and preempted while drafts go on and off -> prompts and handles."""
    asked: list[tuple[Text, Any]] = []
    count = draw.randrange(2, 6)
    while len(asked) < count or not engine.scheduler.idle:
        if len(asked) < count and draw.random() < 0.5:
            done = [prompt + handle.output().token_ids for prompt, handle in asked if handle.finished]
            base = draw.choice([*texts, *done])[: draw.randrange(1, LONGEST)]
            prompt = base + [draw.randrange(VOCAB) for _ in range(draw.randrange(3))]
            params = SamplingParams(max_new_tokens=draw.randrange(1, NEW), ignore_eos=True, logprobs=1)
            asked.append((prompt, engine.submit(prompt, params, priority=draw.choice((0, 0, -1)))))
        if asked and draw.random() < 0.04:
            asked[draw.randrange(len(asked))][1].abort()
        engine.state.max_drafts[:SEATS] = draw.choice((0, 1, DRAFTS))
        engine.step()
    return asked


class Recomputed:
    """What texts leave in an engine that reads them as prompts, all at once."""

    def __init__(self, engine: Engine, exact: bool) -> None:
        self.engine = engine
        self.exact = exact

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Bit by bit, or up to what float32 rounds off the largest element."""
        if self.exact or one.numel() == 0:
            return torch.equal(one, other)
        return float((one - other).abs().max()) <= 2e-4 + 1e-5 * float(other.abs().max())

    def wrong(self, engine: Engine, asked: Sequence[tuple[Text, Any]]) -> list[str]:
        """Requests and copies of `engine` that are not what their tokens give."""
        answers = [(prompt, handle.output()) for prompt, handle in asked]
        answers = [(prompt, out) for prompt, out in answers if out.token_ids]
        kept = list(copies(state_cache_of(engine)))
        texts = [prompt + out.token_ids for prompt, out in answers] + [[*text, 0] for text, _ in kept]
        scored = SamplingParams(max_new_tokens=1, ignore_eos=True, prompt_logprobs=1)
        unscored = SamplingParams(max_new_tokens=1, ignore_eos=True)
        outs = self.engine.generate(texts, [scored] * len(answers) + [unscored] * len(kept)) if texts else []
        found = []
        for (prompt, out), again in zip(answers, outs, strict=False):
            steps = again.prompt_logprobs[len(prompt) :]
            lp = torch.tensor([[step.logprob, max(step.top.values())] for step in steps])
            got = torch.tensor([step.logprob for step in out.logprobs])
            if not (self.same(lp[:, 0], lp[:, 1]) and self.same(lp[:, 0], got)):
                found.append(f"an answer after {len(prompt)} tokens")
        for row, (text, slot) in enumerate(kept, len(answers)):
            pairs = zip(states_of(engine), states_of(self.engine), strict=True)
            if not all(self.same(x[slot], y[row]) for one, other in pairs for x, y in zip(one, other, strict=True)):
                found.append(f"a copy after {len(text)} tokens")
        return found


@pytest.fixture
def play(make_target, make_engine, scripted, tree_script) -> Callable[..., Counter[str]]:
    """play(number, count=IN_A_ROW): that many interleavings on one engine -> what happened in them, by name.

    Every tenth engine is deterministic, and equal means bit by bit. Every fifth of Qwen3.5 has two ranks, and what is
    recomputed has one.
    """
    script = tree_script([], VOCAB, hit=0.0)
    fresh: dict[Any, Recomputed] = {}

    def run(number: int, count: int = IN_A_ROW) -> Counter[str]:
        draw, seen = random.Random(number), Counter[str]()
        family, exact = list(FAMILIES)[number % 3], number // 3 % 10 == 0
        layers = {"num_hidden_layers": 2, "layer_types": [FAMILIES[family], "full_attention"]}
        model = make_target(family, vocab_size=VOCAB, **layers)
        ranks = 2 if number % 15 == 0 else 1
        kind = family, exact, ranks
        options = {"deterministic": exact, "max_model_len": LONGEST + NEW + 4, "fused": ranks > 1 or "auto"}
        if kind not in fresh:
            whole = {"max_batch_size": 64, "prefill_chunk": 80, "max_prefill_tokens": 8192, "prefix_cache": False}
            fresh[kind] = Recomputed(make_engine(model, **whole, **options), exact)
        sizes = {"page_size": (1, 4)[number // 30 % 2], "full_slots": draw.choice((80, 100))}
        sizes |= {"prefill_chunk": draw.choice((11, 32)), "max_batch_size": SEATS, "tensor_parallel": ranks}
        spec = SpecConfig(DRAFTS, 2, 10, adaptive=False)
        target = TargetModel(model, REFERENCE if ranks > 1 else None)
        engine = Engine(target, scripted(script), spec=spec, config=EngineConfig(**sizes, **options))
        texts = [[draw.randrange(VOCAB) for _ in range(LONGEST)] for _ in range(3)]
        for _ in range(count):
            asked = interleave(engine, draw, texts)
            assert fresh[kind].wrong(engine, asked) == [], (number, seen)
            assert_idle(engine)
            state_cache_of(engine).check()
            outs = [handle.output() for _, handle in asked]
            texts = [*texts, *(prompt + out.token_ids for (prompt, _), out in zip(asked, outs, strict=True))][-8:]
            seen["interleavings"] += 1
            seen["requests"] += len(outs)
            seen["aborts"] += sum(out.finish_reason == "abort" for out in outs)
            seen["hits"] += sum(out.stats.cached_tokens > 0 for out in outs)
            seen["preemptions"] += sum(out.stats.preemptions for out in outs)
            seen["copies"] += len(state_cache_of(engine).states.pages)
            seen["accepted drafts"] += sum(len(out.token_ids) - out.stats.rounds for out in outs)
        return seen

    return run


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *map(deep, range(1, 10))])
def test_states_equal_recomputation_after_random_interleavings(part, play) -> None:
    """10,000 of them in depth."""
    if is_deep():
        games = [(number, IN_A_ROW) for number in range(100 * part, 100 * part + 100)]
    else:
        games = [(2, 2), (3, 3), (64, 3), (15, 1)]  # the first is deterministic, the last has two ranks
    seen = sum((play(*game) for game in games), Counter[str]())
    print(dict(seen))
    assert all(seen[event] for event in ("aborts", "hits", "preemptions", "copies", "accepted drafts")), seen
