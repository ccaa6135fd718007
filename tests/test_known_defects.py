"""Five defects that engines of this kind have had, each kept out by a check that is known to be able to fail.

For every defect, the check passes, and fails once the defect is seeded: tokens or drafts differ from the request alone,
or the sanitizer names the place. Only load reveals them: several rows, SWA slots that evictions moved far from the full
ones, and pools so short that slots change owners.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from kv_rig import PRIMARY, SWA, GroupId, GroupLoc, KVPlan, replaced

import specdec.attention.plan
from specdec import DraftTree, Engine, SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend
from specdec.attention.dense import VisibleKeys
from specdec.attention.kernels.page_table import PageTables
from specdec.attention.plan import Pack, PackTables
from specdec.draft_models.base import DraftBatch
from specdec.errors import LocationError

from engine_internals import capture_on_cpu
from marks import deep_cases, examples, usual

NEW = examples(5, 12)
LENGTHS = (1, 33, 7, 21, 2, 40, 13, 26, 18, 5)[: examples(8, 10)]
TREE, CHAIN = SpecConfig(3, 2, 6), SpecConfig(3)
LOAD = {"max_batch_size": 6, "full_slots": 150, "swa_slots": 150, "prefill_chunk": 16, "prefix_cache": False}
NEARLY_FULL = {"max_batch_size": 4, "prefill_chunk": 64, "full_slots": 300, "swa_slots": 66}
Seed = Callable[[pytest.MonkeyPatch], None]


PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def requests(make_target, greedy_oracle, random_prompt) -> Callable[[str], list[tuple[list[int], list[int]]]]:
    """requests(family): prompts, and what the target alone says to each."""
    prompts = [random_prompt(length) for length in LENGTHS]
    return lambda family: [(prompt, greedy_oracle(make_target(family), prompt, NEW + 4)) for prompt in prompts]


@pytest.fixture(scope="module")
def drafter_of(requests, make_target, make_drafter) -> Callable[[str | None, str], Any]:
    return lambda name, family: make_drafter(name, make_target(family), *zip(*requests(family), strict=True))


@pytest.fixture(scope="module")
def drafts_alone(requests, drafter_of, make_target, make_engine) -> Callable[..., dict[tuple[int, ...], list[int]]]:
    """drafts_alone(drafter, spec, family): of every request by itself in a roomy engine, where nothing is seeded."""

    @functools.cache
    def run(drafter: str | None, spec: SpecConfig, family: str) -> dict[tuple[int, ...], list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECDEC_SANITIZE", "0")
            lone = make_engine(make_target(family), drafter_of(drafter, family), spec=spec)
            drafts = recorded_drafts(lone)
            for prompt, _ in requests(family):
                lone.generate(prompt, PARAMS)
        return drafts

    return run


@pytest.fixture
def load(requests, drafter_of, drafts_alone, make_target, make_engine, monkeypatch) -> Callable[..., None]:
    """load(seed=None, sanitize=False, drafter=..., family=..., spec=..., captured=False, fullest=None, **config): the
    check of all.

    Serves all requests at once. Each must have the tokens of the target alone, and after any of its tokens the drafts
    of its lone run in a roomy engine: what a drafter reads shows in nothing else. fullest: the share of the SWA pool
    that must be in use at some time.
    """

    def check(
        seed: Seed | None = None,
        *,
        sanitize: bool,
        drafter: str | None,
        family: str = "gemma4-e2b",
        spec: SpecConfig = CHAIN,
        captured: bool = False,
        fullest: float = 0.0,
        **config: Any,
    ) -> None:
        alone = {} if captured else drafts_alone(drafter, spec, family)
        with monkeypatch.context() as patch:
            patch.setenv("SPECDEC_SANITIZE", str(int(sanitize)))
            capture_on_cpu(patch, captured)
            if seed is not None:
                seed(patch)
            crowded = make_engine(make_target(family), drafter_of(drafter, family), spec=spec, **{**LOAD, **config})
            drafts = {} if captured else recorded_drafts(crowded)  # which needs values on the host
            held = []
            forward = crowded.target.forward
            crowded.target.forward = lambda *args: held.append(pool.held_pages) or forward(*args)
            pool = crowded.table.allocator.pools[SWA]
            outputs = crowded.generate([prompt for prompt, _ in requests(family)], PARAMS)
            assert [out.token_ids for out in outputs] == [truth[:NEW] for _, truth in requests(family)]
            both = drafts.keys() & alone.keys()
            assert bool(both) == (drafter is not None and not captured)
            assert {known: drafts[known] for known in both} == {known: alone[known] for known in both}
            assert fullest * pool.capacity <= max(held)
            crowded.table.check()

    return check


def recorded_drafts(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    """Tokens so far -> the tokens of the tree after them, filled while the engine runs."""
    drafts: dict[tuple[int, ...], list[int]] = {}
    worker = engine.state.worker
    if worker is None:
        return drafts
    propose = worker.propose

    def recorded(batch: DraftBatch) -> DraftTree:
        tree = propose(batch)
        for known, length, tokens in zip(
            batch.history.tolist(), batch.history_len.tolist(), tree.tokens.tolist(), strict=True
        ):
            if batch.num_steps == 3:  # requests next to it shorten later ones
                drafts[tuple(known[:length])] = tokens
        return tree

    worker.propose = recorded
    return drafts


@contextmanager
def seen(sanitize: bool, *others: type[Exception]) -> Iterator[None]:
    """What is seeded shows: as other tokens or drafts, or to the sanitizer, which names the place."""
    if sanitize:
        with pytest.raises((LocationError, *others), match=r"^row \d+, position \d+: .* slot|index out of range"):
            yield
    else:
        with pytest.raises((AssertionError, *others), match=r"assert .* == |index out of range"):
            yield


def read_own_keys_by_full_slots(patch: pytest.MonkeyPatch, source: GroupId = PRIMARY, to: GroupId = SWA) -> None:
    """A tree's own nodes are read with primary slots where sliding layers wrote those of their group."""
    right = VisibleKeys.from_plan

    def wrong(plan: KVPlan, group: GroupId, window: int | None) -> VisibleKeys:
        keys = right(plan, group, window)
        if group == to and plan.tree is not None and not plan.tree.is_chain:
            own = plan.positions.shape[1]
            untranslated = plan.write[source].view(plan.positions.shape)
            return VisibleKeys(torch.cat([keys.slots[:, :-own], untranslated], dim=1), keys.seen)
        return keys

    patch.setattr(VisibleKeys, "from_plan", staticmethod(wrong))


def read_extend_tokens_by_full_slots(patch: pytest.MonkeyPatch, source: GroupId = PRIMARY, to: GroupId = SWA) -> None:
    """In a prefill, where its own tokens lie is not translated."""
    right = specdec.attention.plan.locate_pack

    def wrong(table: Any, pack: Pack, longest: int) -> PackTables:
        tables = right(table, pack, longest)
        lines = tables.lines[to]
        columns = lines.begin[:, None] + torch.arange(lines.slots.shape[1])
        slots = table.slots.tensor[pack.rows[:, None], columns.clamp(max=table.slots.tensor.shape[1] - 1)]
        slots = table.allocator.translate(source, slots)
        mixed = torch.where(columns >= pack.start[:, None], slots, lines.slots)
        return tables._replace(lines=replaced(tables.lines, to, lines._replace(slots=mixed)))

    patch.setattr(specdec.attention.plan, "locate_pack", wrong)


def write_extend_tokens_by_full_slots(patch: pytest.MonkeyPatch, source: GroupId = PRIMARY, to: GroupId = SWA) -> None:
    """The other way round: written with full slots, read with SWA slots."""
    right = KVPlan.write_slots

    def wrong(plan: KVPlan, group: GroupId) -> GroupLoc:
        return right(plan, source if plan.pack is not None and group in (source, to) else group)

    patch.setattr(KVPlan, "write_slots", wrong)


def derive_the_pool_once(patch: pytest.MonkeyPatch) -> None:
    """A frozen drafter's backend knows one pool, the primary one, and reads sliding layers through its table."""
    right = TorchBackend.attention

    def wrong(backend: TorchBackend, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Any:
        if plan.write is None and group == SWA:
            assert isinstance(plan.prefix, PageTables)
            table = plan.prefix.table(group)
            columns = table.begin[:, None] // table.page_size + torch.arange(table.pages.shape[1])
            full = plan.prefix.tables[PRIMARY]
            stale_pages = full.gather(1, columns.clamp(max=full.shape[1] - 1))
            tables = plan.prefix._replace(tables=replaced(plan.prefix.tables, group, stale_pages))
            stale = object.__new__(KVPlan)
            for name in KVPlan.__slots__:
                object.__setattr__(stale, name, getattr(plan, name))
            object.__setattr__(stale, "prefix", tables)
            return right(backend, stale, group, window, shares)
        return right(backend, plan, group, window, shares)

    patch.setattr(TorchBackend, "attention", wrong)


def leave_the_draft_untranslated(patch: pytest.MonkeyPatch, source: GroupId = PRIMARY, to: GroupId = SWA) -> None:
    """A tree's part of the SWA table keeps full slots: its nodes are written and read there, into others' keys."""
    right = TorchBackend.locate

    def wrong(table: Any, rows: Any, committed_len: torch.Tensor, num_nodes: int) -> PageTables:
        located = right(table, rows, committed_len, num_nodes)
        untranslated = replaced(located.write, to, located.write[source])
        return located._replace(write=untranslated) if num_nodes == 4 else located

    patch.setattr(TorchBackend, "locate", staticmethod(wrong))


def keep_the_translation(patch: pytest.MonkeyPatch) -> None:
    """Tables and locations are remembered by shape: a captured round holds those of the round before its capture."""
    right, made = TorchBackend.locate, {}

    def wrong(table: Any, rows: Any, committed_len: torch.Tensor, num_nodes: int) -> PageTables:
        key = len(rows.index), rows.max_committed_len, num_nodes
        if key not in made or not torch.utils._python_dispatch._get_current_dispatch_mode():
            made[key] = right(table, rows, committed_len, num_nodes)
        return made[key]._replace(committed_len=committed_len)

    patch.setattr(TorchBackend, "locate", staticmethod(wrong))


def use_a_stale_location(patch: pytest.MonkeyPatch) -> None:
    """The SWA slots of a prefill are kept where the forward after it finds them instead of its own."""
    right, kept = KVPlan.write_slots, []

    def wrong(plan: KVPlan, group: GroupId) -> GroupLoc:
        slots = right(plan, group)
        if plan.pack is None or group == PRIMARY:
            return slots
        if not any(plan is other for other, _ in kept):
            kept.append((plan, slots))
        stale = kept[-2][1] if len(kept) > 1 else slots
        return GroupLoc(torch.cat([stale, slots[len(stale) :]])[: len(slots)])

    patch.setattr(KVPlan, "write_slots", wrong)


def ignore_the_location(patch: pytest.MonkeyPatch) -> None:
    """The precomputed SWA slots of a prefill are not used: keys go to the slots that come first in the pool."""
    right = KVPlan.write_slots

    def wrong(plan: KVPlan, group: GroupId) -> GroupLoc:
        slots = right(plan, group)
        if plan.pack is None or group == PRIMARY:
            return slots
        return GroupLoc(1 + torch.arange(len(slots)) % 90)

    patch.setattr(KVPlan, "write_slots", wrong)


NEARLY = {"drafter": "mtp", "fullest": 0.9, **NEARLY_FULL}
REPLAYED = {"drafter": "mtp", "spec": TREE, "captured": True}
LOADS = {
    "extend": {"drafter": "trees"},  # extend tokens are read in the wrong group under load (SGLang #24395)
    "lent-pool": NEARLY,  # the pool of a backend's start is not the one that a drafter is lent (#26966, #27491)
    "replay": REPLAYED,  # a translation is remembered, and outlives its step across a graph replay (#26152)
    "prefill": {"drafter": None},  # a precomputed location of a prefill is stale, or ignored (#24138)
    # windows of 3 and 8; of a frozen drafter it is `test_cache_groups.py` that shows it
    "windows": {"drafter": "trees", "family": "two_windows"},
    "windows-replay": {"drafter": None, "family": "two_windows", "captured": True},
}
"""The draft part of a page table that is not translated, with more than one branch (#24617), shows under "extend"."""

SEEDED = {
    "read-extend": (read_extend_tokens_by_full_slots, LOADS["extend"]),
    "write-extend": (write_extend_tokens_by_full_slots, LOADS["extend"]),
    "one-pool": (derive_the_pool_once, NEARLY),
    "untranslated": (leave_the_draft_untranslated, LOADS["extend"]),
    "own-keys": (read_own_keys_by_full_slots, LOADS["extend"]),
    "remembered": (keep_the_translation, REPLAYED),
    "stale": (use_a_stale_location, LOADS["prefill"]),
    "ignored": (ignore_the_location, LOADS["prefill"]),
}
BETWEEN = {"source": GroupId(1), "to": GroupId(2)}
SEEDED_BETWEEN_WINDOWS = {  # slots of the narrower window in the wider one
    "read-windows": (partial(read_extend_tokens_by_full_slots, **BETWEEN), LOADS["windows"]),
    "write-windows": (partial(write_extend_tokens_by_full_slots, **BETWEEN), LOADS["windows"]),
    "untranslated-windows": (partial(leave_the_draft_untranslated, **BETWEEN), LOADS["windows"]),
    "own-keys-windows": (partial(read_own_keys_by_full_slots, **BETWEEN), LOADS["windows"]),
    "remembered-windows": (keep_the_translation, LOADS["windows-replay"]),
    "stale-windows": (use_a_stale_location, LOADS["windows"]),
    "ignored-windows": (ignore_the_location, LOADS["windows"]),
}


@deep_cases(
    *(
        "lent-pool-False",
        "replay-False",
        "prefill-False",
        "windows-False",
        "windows-replay-False",
        "windows-replay-True",
    )
)
@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("name", LOADS)
def test_all_tokens_and_drafts_are_right_under_load(name, sanitize, load) -> None:
    load(**LOADS[name], sanitize=sanitize)


@deep_cases(
    *("write-extend-True", "own-keys-False", "ignored-True"),
    *("write-windows-True", "remembered-windows-True", "stale-windows-True", "ignored-windows-True"),
)
@pytest.mark.parametrize(
    ("name", "sanitize"),
    [
        *usual(
            itertools.product(SEEDED, [False, True]), lambda name, sanitize: list(SEEDED).index(name) % 2 == sanitize
        ),
        *itertools.product(SEEDED_BETWEEN_WINDOWS, [True]),
    ],
)
def test_a_seeded_defect_is_seen(name, sanitize, load) -> None:
    seed, loaded = (SEEDED | SEEDED_BETWEEN_WINDOWS)[name]
    others = [IndexError] if loaded is NEARLY else []  # slots of the larger pool may not be there
    with seen(sanitize, *others):
        load(seed, **loaded, sanitize=sanitize)
