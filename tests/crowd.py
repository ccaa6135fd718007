"""Serves many random requests of every kind on one engine, and checks the outputs and that nothing is left over.

The tests use it, and on a GPU `python -m bench crowd`. It knows no model: prompts are ids below `vocab`.
"""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specdec import Engine, GenerationOutput, SamplingParams, SpecConfig

from engine_internals import assert_idle


class Asked(NamedTuple):
    """One request. aborted_at: number of output tokens at which it is aborted; None: never."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    aborted_at: int | None


def make_crowd(count: int, longest: int, vocab: int, *, seed: int = 0, aborts: float = 0.1) -> list[Asked]:
    """Draw requests with prompts and outputs of 1 to `longest` tokens. Half of the prompts begin with one of three
    common texts."""
    draw, edit = random.Random(seed), random.Random(seed)
    shared = [[draw.randrange(vocab) for _ in range(longest)] for _ in range(3)]
    crowd = []
    for number in range(count):
        length = draw.randint(1, longest)
        common = draw.choice(shared)[: draw.randrange(length)] if draw.random() < 0.5 else []
        prompt = common + [draw.randrange(vocab) for _ in range(length - len(common))]
        params = SamplingParams(
            max_new_tokens=draw.randint(1, longest),
            temperature=draw.choice((0.0, 0.0, 0.7, 1.0)),
            top_k=draw.choice((0, 0, 8)),
            top_p=draw.choice((1.0, 0.9)),
            min_p=draw.choice((0.0, 0.0, 0.05)),
            top_n_sigma=draw.choice((0.0, 0.0, 1.5)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.2)),
            frequency_penalty=edit.choice((0.0, 0.0, 0.5)),
            logit_bias=edit.choice((None, None, {7: 4.0}, dict.fromkeys(range(20), 2.0))),
            logprobs=draw.choice((None, None, None, 2)),
            stop_token_ids=draw.choice(((), (), (draw.randrange(vocab),))),
            speculation=draw.choice((None, None, False, SpecConfig(1), SpecConfig(2))),
            seed=number,
            ignore_eos=True,
        )
        aborted_at = draw.randint(0, params.max_new_tokens) if draw.random() < aborts else None
        crowd.append(Asked(prompt, params, draw.choice((0, 0, 0, -1, 2)), aborted_at))
    return crowd


def each_alone(engine: Engine, crowd: Sequence[Asked]) -> list[list[int]]:
    """Return the tokens of every request when it runs alone."""
    return [engine.generate(asked.prompt, params_for(engine, asked))[0].token_ids for asked in crowd]


def params_for(engine: Engine, asked: Asked) -> SamplingParams:
    """Return the request's parameters, without a draft's shape if the engine has no drafter."""
    return asked.params if engine.drafter is not None else replace(asked.params, speculation=None)


def serve_crowd(engine: Engine, crowd: Sequence[Asked], *, seed: int = 0) -> list[GenerationOutput]:
    """Serve all requests: half are submitted at once, the others while those run. Every delta is read as it arrives."""
    draw = random.Random(seed)
    handles: list[Any] = []
    got: list[list[int]] = []
    pending = list(crowd)
    while pending or any(not handle.finished for handle in handles):
        arriving = len(crowd) // 2 if not handles else draw.randrange(4)
        for asked in pending[:arriving]:
            handles.append(engine.submit(asked.prompt, params_for(engine, asked), priority=asked.priority))
            got.append([])
        del pending[:arriving]
        engine.step()
        for asked, handle, tokens in zip(crowd, handles, got, strict=False):
            while (delta := handle.read()) is not None:
                tokens += delta.token_ids
            if asked.aborted_at is not None and not handle.finished and len(tokens) >= asked.aborted_at:
                draw.choice((handle.abort, lambda id=handle.id: engine.abort(id)))()
    outputs = [handle.output() for handle in handles]
    for output, tokens, handle in zip(outputs, got, handles, strict=True):
        while (delta := handle.read()) is not None:
            tokens += delta.token_ids
        assert tokens == output.token_ids, "deltas are not the output"
        scored = output.logprobs is None or [one.token_id for one in output.logprobs] == tokens
        assert scored, "log-probabilities are of other tokens"
    return outputs


def wrong_requests(
    crowd: Sequence[Asked], outputs: Sequence[GenerationOutput], alone: Sequence[list[int]]
) -> list[int]:
    """Return the numbers of requests whose tokens differ from their lone run's; an aborted one must have its first
    tokens."""
    wrong = []
    for number, (asked, output, truth) in enumerate(zip(crowd, outputs, alone, strict=True)):
        aborted = output.finish_reason == "abort"
        right = output.token_ids == (truth[: len(output.token_ids)] if aborted else truth)
        if not right or (aborted and asked.aborted_at is None):
            wrong.append(number)
    return wrong


def require_no_leak(make_and_use: Callable[[], Engine]) -> None:
    """Check that a used engine is idle, and that nothing of it stays alive once it is closed and dropped."""
    engine = make_and_use()
    assert_idle(engine)
    left = [weakref.ref(thing) for thing in (engine, engine.table, engine.state, engine.scheduler)]
    left += [
        weakref.ref(pool) for store in engine.cache.stores for layer in store.layers.values() for pool in layer.fields
    ]
    engine.close()
    gc.collect()
    assert [ref for ref in left[4:] if ref() is not None] == [], "a closed engine holds K/V"
    del engine
    gc.collect()
    assert [type(ref()).__name__ for ref in left if ref() is not None] == [], "a closed engine is held"
