"""Random requests and engine settings, for which any drafter must give the tokens of plain decoding."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig

Prompts = list[list[int]]


def random_requests(rng: random.Random, random_prompt: Callable[..., Any]) -> tuple[Prompts, list[SamplingParams]]:
    """Draw six requests: most share a prefix, some are sampled, a few limit or forbid drafts."""
    shared = random_prompt(rng.randint(0, 20)) if rng.random() < 0.7 else []
    prompts = [[*shared, *random_prompt(rng.randint(1, 30), seed=i)] for i in range(6)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randint(1, 30),
            temperature=rng.choice((0.0, 0.9)),
            seed=i,
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            speculation=rng.choice((None, None, None, False, SpecConfig(1))),
        )
        for i in range(len(prompts))
    ]
    return prompts, params


def random_config(rng: random.Random, slots: int | None, **settings: Any) -> EngineConfig:
    """Draw batch size, page size, chunk and prefix cache. slots: size of each pool."""
    return EngineConfig(
        max_model_len=128,
        max_batch_size=rng.choice((1, 3, 8)),
        page_size=rng.choice((1, 4)),
        prefill_chunk=rng.choice((4, 16, 64)),
        prefix_cache=rng.random() < 0.7,
        full_slots=slots,
        swa_slots=slots,
        **settings,
    )


def check_tokens(engine: Engine, prompts: Prompts, params: list[SamplingParams], want: Prompts) -> None:
    """Check the tokens of all requests at once, then from three threads, with hits in the prefix cache."""
    assert [out.token_ids for out in engine.generate(prompts, params)] == want
    with ThreadPoolExecutor(3) as threads:
        again = list(
            threads.map(lambda i: engine.generate([prompts[i]], [params[i]])[0].token_ids, range(len(prompts)))
        )
    assert again == want
    engine.table.check()
