"""Five defects that engines of this kind have had: each shows here as other tokens or drafts, or to the sanitizer.

Only load reveals them: several rows, SWA slots that evictions moved far from the full ones, and pools so short that
slots change owners. `tools/mutants/field.toml` seeds every one of them and names the case that must fail.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from kv_rig import SWA

from specdec import DraftTree, Engine, SamplingParams, SpecConfig
from specdec.draft_models.base import DraftBatch

from inside import capture_on_tape
from marks import deep_cases, examples

NEW = examples(9, 12)
LENGTHS = (1, 33, 7, 21, 2, 40, 13, 26, 18, 5)
TREE, CHAIN = SpecConfig(3, 2, 6), SpecConfig(3)
LOAD = {"max_batch_size": 6, "full_slots": 150, "swa_slots": 150, "prefill_chunk": 16, "prefix_cache": False}
NEARLY_FULL = {"max_batch_size": 4, "prefill_chunk": 64, "full_slots": 300, "swa_slots": 66}
LOADS: dict[str, dict[str, Any]] = {
    "extend": {"drafter": "trees"},  # extend tokens are read in the wrong group under load (SGLang #24395)
    # the pool of a backend's start is not the one that a drafter is lent (#26966, #27491)
    "lent-pool": {"drafter": "mtp", "fullest": 0.9, "config": NEARLY_FULL},
    # a translation is remembered, and outlives its step across a graph replay (#26152)
    "replay": {"drafter": "mtp", "spec": TREE, "captured": True},
    "prefill": {},  # a precomputed location of a prefill is stale, or ignored (#24138)
    "two-windows": {"family": "two_windows", "drafter": "trees"},  # slots of the wider window for the narrower
    "two-windows-replay": {"family": "two_windows", "captured": True},
}
"""The draft part of a page table that is not translated, with more than one branch (#24617), shows under "extend"."""
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def requests(make_target, greedy_oracle, random_prompt) -> Callable[[str], list[tuple[list[int], list[int]]]]:
    """requests(family): prompts, and what the target alone says to each."""
    prompts = [random_prompt(length) for length in LENGTHS]
    return lambda family: [(prompt, greedy_oracle(make_target(family), prompt, NEW + 4)) for prompt in prompts]


@pytest.fixture(scope="module")
def drafter_of(requests, make_target, make_assistant, scripted, tree_script) -> Callable[[str, str | None], Any]:
    def make(family: str, name: str | None) -> Any:
        if name == "trees":  # often right, often deep
            return scripted(tree_script([prompt + truth for prompt, truth in requests(family)]))
        return make_assistant(make_target(family)) if name == "mtp" else name

    return make


@pytest.fixture(scope="module")
def drafts_alone(requests, drafter_of, make_target, make_engine) -> Callable[..., dict[tuple[int, ...], list[int]]]:
    """drafts_alone(family, drafter, spec): the drafts of every request by itself in a roomy engine, made once."""

    @functools.cache
    def run(family: str, drafter: str | None, spec: SpecConfig) -> dict[tuple[int, ...], list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECDEC_SANITIZE", "0")
            lone = make_engine(make_target(family), drafter_of(family, drafter), spec=spec)
            drafts = recorded_drafts(lone)
            for prompt, _ in requests(family):
                lone.generate(prompt, PARAMS)
        return drafts

    return run


def recorded_drafts(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    """Tokens so far -> the tokens of the tree after them, filled while the engine runs."""
    drafts: dict[tuple[int, ...], list[int]] = {}
    worker = engine.round.worker
    if worker is None:
        return drafts
    propose = worker.propose

    def recorded(batch: DraftBatch) -> DraftTree:
        tree = propose(batch)
        for known, length, tokens in zip(
            batch.history.tolist(), batch.history_len.tolist(), tree.tokens.tolist(), strict=True
        ):
            if batch.num_steps == 3:  # later ones are shortened by whoever is beside it
                drafts[tuple(known[:length])] = tokens
        return tree

    worker.propose = recorded
    return drafts


@deep_cases("lent-pool-False", "replay-False", "prefill-False", "two-windows-False", "two-windows-replay-False")
@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("name", LOADS)
def test_all_tokens_and_drafts_are_right_under_load(
    name, sanitize, requests, drafter_of, drafts_alone, make_target, make_engine, monkeypatch
) -> None:
    """Each request has the tokens of the target alone, and after any of its tokens the drafts of its lone run: what a
    drafter reads shows in nothing else."""
    load = {"family": "gemma4-e2b", "drafter": None, "spec": CHAIN, "captured": False, "fullest": 0.0, "config": {}}
    load |= LOADS[name]
    family, drafter, spec, captured = (load[key] for key in ("family", "drafter", "spec", "captured"))
    alone = {} if captured else drafts_alone(family, drafter, spec)
    monkeypatch.setenv("SPECDEC_SANITIZE", str(int(sanitize)))
    capture_on_tape(monkeypatch, captured)
    crowded = make_engine(make_target(family), drafter_of(family, drafter), spec=spec, **{**LOAD, **load["config"]})
    drafts = {} if captured else recorded_drafts(crowded)  # which needs values on the host
    held = []
    forward, pool = crowded.target.forward, crowded.table.allocator.pools[SWA]
    crowded.target.forward = lambda *args: held.append(pool.held_pages) or forward(*args)
    outputs = crowded.generate([prompt for prompt, _ in requests(family)], PARAMS)
    assert [out.token_ids for out in outputs] == [truth[:NEW] for _, truth in requests(family)]
    both = drafts.keys() & alone.keys()
    assert bool(both) == (drafter is not None and not captured)
    assert {known: drafts[known] for known in both} == {known: alone[known] for known in both}
    assert load["fullest"] * pool.capacity <= max(held)
    crowded.table.check()
