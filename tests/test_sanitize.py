"""SPECDEC_SANITIZE=1: what is poisoned and what is not, what is found and how it is named, and that off is off."""

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kv_rig import PRIMARY, SWA, DraftTree, GroupId, KVLayout, KVPlan, KVRig, PrimaryLoc, ints, layer_spec, replaced

from specdec import SamplingParams
from specdec.attention.checked_backend import CheckedBackend, sanitized
from specdec.errors import LocationError
from specdec.kvcache.layer_context import Destination

NODES = 3
WIDE = GroupId(2)
GROUPS = (PRIMARY, SWA, WIDE)  # layer n is that of group n
PAIRS = list(itertools.permutations(GROUPS, 2))


@pytest.fixture(params=[1, 4], ids=["pages of 1", "pages of 4"])
def rig(request, monkeypatch) -> KVRig:
    """A watched cache of three groups whose numbers differ."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    layout = KVLayout(tuple(layer_spec(i, window, head_dim=2) for i, window in enumerate((None, 4, 12))))
    rig = KVRig(layout, pages=80, page_size=request.param, max_requests=3, max_len=48, lookahead=NODES)
    rig.backend, _ = sanitized(rig, rig.backend, None)
    rig.sanitizer.poison_store(rig.store)
    wide = rig.allocator.pools[WIDE]
    wide._stack = wide._stack[::-1].copy()  # its last pages come first, so that no number is one of another group
    return rig


def opened(rig: KVRig, length: int) -> int:
    """A row of `length` committed tokens, and a lookahead."""
    row = rig.open_row()
    rig.ensure_slots(row, length + NODES)
    plan = rig.chunk(ints(row), ints(length))
    k = torch.ones((length, 1, 2))
    for layer in GROUPS:
        rig.write(layer, plan.write, k, k)
    rig.commit(ints(row), ints(length))
    return row


def evicted_before(rig: KVRig) -> int:
    """A row of 13 tokens that comes after one was evicted in both windows, so that no two groups have one number."""
    rig.evict_unseen(ints(opened(rig, 35)))
    row = opened(rig, 13)
    rig.evict_unseen(ints(row))
    return row


def planned(rig: KVRig, kind: str, *rows: int) -> KVPlan:
    rig.flush()
    if kind == "chunk":
        return rig.chunk(ints(*rows), ints(*[NODES] * len(rows)))
    if kind == "frozen":
        return rig.frozen(ints(*rows), position_offset=0, window_shift=2)
    chain = DraftTree.chain(torch.zeros((len(rows), NODES), dtype=torch.int64))
    parents = torch.tensor([[-1, 0, 0]] * len(rows))
    return rig.verify(ints(*rows), chain if kind == "chain" else DraftTree.from_parents(chain.tokens, parents))


def chain(rig: KVRig, *rows: int) -> KVPlan:
    return planned(rig, "chain", *rows)


def attend(rig: KVRig, plan: KVPlan, group: GroupId) -> torch.Tensor:
    kept = rig.store.layers[group]
    call = plan.backend.attention(plan, group, rig.allocator.groups[group].window)
    if plan.write is not None:
        k = torch.ones((plan.positions.numel(), 1, 2))
        plan.backend.store(Destination(kept.k, kept.v, plan.write_slots(group)), k, k)
    query = torch.ones((len(plan.rows), 1, plan.positions.shape[1], 2))
    return call(query, kept.k, kept.v, scaling=1.0)


def poisoned(rig: KVRig, layer: int) -> list[int]:
    """Slots that hold NaN throughout."""
    kept = rig.store.layers[layer]
    assert torch.isnan(kept.k).flatten(1).any(1).tolist() == torch.isnan(kept.v).flatten(1).all(1).tolist()
    return torch.isnan(kept.k).flatten(1).all(1).nonzero()[:, 0].tolist()


# poison


def test_all_but_the_sink_is_poison_until_it_is_written(rig) -> None:
    page_size = rig.allocator.page_size
    everything = list(range(page_size, rig.allocator.num_slots(PRIMARY)))
    assert poisoned(rig, PRIMARY) == everything
    row = opened(rig, 6)
    written = rig.slots.host[row, :6].tolist()
    assert poisoned(rig, PRIMARY) == [slot for slot in everything if slot not in written]


def test_freed_slots_are_poisoned_again_in_every_group(rig) -> None:
    row = opened(rig, 13)
    slots = rig.slots.host[row, :13].copy()
    peers = rig.allocator.maps.host[SWA][slots]
    rig.evict_unseen(ints(row))
    gone = int(rig.evicted_len[SWA, row])
    assert gone > 0
    assert set(peers[:gone].tolist()) <= set(poisoned(rig, SWA))
    assert not set(peers[gone:].tolist()) & set(poisoned(rig, SWA))
    assert not set(slots.tolist()) & set(poisoned(rig, PRIMARY))
    rig.close_rows(row)
    assert set(slots.tolist()) <= set(poisoned(rig, PRIMARY))
    assert set(peers.tolist()) <= set(poisoned(rig, SWA))


def test_a_store_on_another_device_is_poisoned_there(rig, monkeypatch) -> None:
    """SPECDEC_SANITIZE=1 raised on two GPUs: slots of the first indexed the store of the second."""
    elsewhere = SimpleNamespace(tensors=lambda group: [torch.zeros((99, 1, 2), device="meta")])
    monkeypatch.setattr(rig.sanitizer, "stores", [*rig.sanitizer.stores, elsewhere])
    row = opened(rig, 5)
    slots = set(rig.slots.host[row, :5].tolist())
    rig.close_rows(row)
    assert slots <= set(poisoned(rig, PRIMARY))


def test_a_page_that_others_hold_is_not_poisoned(rig) -> None:
    row, page_size = opened(rig, 8), rig.allocator.page_size
    other = rig.open_row()
    rig.table.adopt_pages(other, rig.table.pages(row, 8 // page_size))
    shared = set(rig.slots.host[other, :8].tolist())
    rig.close_rows(row)
    assert not shared & set(poisoned(rig, PRIMARY))
    rig.close_rows(other)
    assert shared <= set(poisoned(rig, PRIMARY))


def test_beginning_again_poisons_everything(rig) -> None:
    opened(rig, 8)
    rig.table.reset()
    assert len(poisoned(rig, PRIMARY)) == rig.allocator.primary.capacity * rig.allocator.page_size


# plans that are right


def test_right_plans_pass_and_nothing_that_they_read_is_poison(rig) -> None:
    rows = [opened(rig, length) for length in (1, 13, 30)]
    rig.evict_unseen(ints(*rows))
    for _ in range(2):
        for group, kind in itertools.product(GROUPS, ("chunk", "chain", "tree", "frozen")):
            assert attend(rig, planned(rig, kind, *rows, rig.padding_row), group)[:3].isfinite().all()
        rig.commit(ints(*rows), ints(2, 1, 3), np.array([[0, 1, 2]] * 3))
        for row in rows:
            rig.ensure_slots(row, int(rig.committed_len.host[row]) + NODES)


# plans that are not


def slots_of_another_row(plan: KVPlan) -> KVPlan:
    swap = torch.arange(len(plan.rows)).flip(0)
    return dataclasses.replace(
        plan, write=replaced(plan.write, SWA, plan.write[SWA].view(len(swap), -1)[swap].reshape(-1))
    )


def nowhere(plan: KVPlan) -> KVPlan:
    return dataclasses.replace(plan, write=replaced(plan.write, SWA, torch.zeros_like(plan.write[SWA])))


@pytest.mark.parametrize("kind", ["chunk", "chain", "tree"])
@pytest.mark.parametrize(("source", "group"), PAIRS)
def test_slots_of_another_group_are_not_written(kind: str, source: GroupId, group: GroupId, rig) -> None:
    plan = planned(rig, kind, evicted_before(rig))
    wrong = dataclasses.replace(plan, write=replaced(plan.write, group, plan.write[source]))
    name = rig.allocator.pools[group].name
    with pytest.raises(LocationError, match=rf"^row 1, position 13: would write to {name} slot \d+ "):
        attend(rig, wrong, group)


@pytest.mark.parametrize("kind", ["chunk", "chain", "frozen"])
@pytest.mark.parametrize(("source", "group"), PAIRS)
def test_pages_of_another_group_are_not_read(kind: str, source: GroupId, group: GroupId, rig) -> None:
    plan, page_size = planned(rig, kind, evicted_before(rig)), rig.allocator.page_size
    table = plan.prefix.table(group)
    positions = table.begin[:, None] + torch.arange(table.pages.shape[1]) * page_size
    positions = positions.clamp(max=rig.slots.host.shape[1] - 1)
    of_source = rig.allocator.translate(source, PrimaryLoc(rig.slots.tensor[plan.rows].gather(1, positions)))
    tables = plan.prefix._replace(tables=replaced(plan.prefix.tables, group, of_source // page_size))
    name = rig.allocator.pools[group].name
    with pytest.raises(LocationError, match=rf"^row 1, position \d+: would read {name} slot \d+ "):
        attend(rig, dataclasses.replace(plan, prefix=tables), group)


@pytest.mark.parametrize("change", [slots_of_another_row, nowhere])
def test_a_wrong_write_is_named_before_it_happens(change: Callable[[KVPlan], KVPlan], rig) -> None:
    first = opened(rig, 13)
    rig.evict_unseen(ints(first))
    second = opened(rig, 6)  # in SWA slots that the first had
    plan = chain(rig, first, second)
    before = {layer: kept.k.clone() for layer, kept in rig.store.layers.items()}
    slot = r"window 4 slot \d+ "
    wanted = rf"^row \d, position (13|6): would write to {slot}\(.*\), where .* has {slot}\(of row \d\)"
    with pytest.raises(LocationError, match=wanted):
        attend(rig, change(plan), SWA)
    for layer, kept in rig.store.layers.items():
        torch.testing.assert_close(kept.k, before[layer], equal_nan=True, rtol=0, atol=0)


def test_a_stale_plan_is_named(rig) -> None:
    row = opened(rig, 6)
    plan = chain(rig, row)
    rig.commit(ints(row), ints(1), np.array([[0]]))
    with pytest.raises(LocationError, match=f"^row {row}, position 6: is planned after a prefix of 6 tokens, while 7"):
        attend(rig, plan, PRIMARY)


def test_tables_of_another_round_are_named(rig) -> None:
    first, second = opened(rig, 6), opened(rig, 6)
    other, plan = chain(rig, second), chain(rig, first)
    with pytest.raises(LocationError, match=rf"^row {first}, position 0: would read full slot \d+ \(of row {second}\)"):
        attend(rig, dataclasses.replace(plan, prefix=other.prefix), PRIMARY)


def test_a_table_that_is_too_short_is_named(rig) -> None:
    row = opened(rig, 9)
    rig.flush()
    rows = dataclasses.replace(rig.table.rows(ints(row)), max_committed_len=4)
    tree = DraftTree.chain(torch.zeros((1, NODES), dtype=torch.int64))
    located = rig.backend.locate(rig.table, rows, rig.committed_len.tensor[rows.index], NODES)
    plan = dataclasses.replace(rig.verify(ints(row), tree), prefix=located)
    with pytest.raises(LocationError, match=f"^row {row}, position 4: would not see full slot .*does not cover"):
        attend(rig, plan, PRIMARY)


def test_a_write_to_a_shared_page_is_named(rig) -> None:
    row = opened(rig, 8)
    lookahead = rig.slots.host[row, 8:9] // rig.allocator.page_size
    rig.allocator.primary.cache_pages(lookahead)  # no cache may hold it: its tokens are not final
    with pytest.raises(LocationError, match=rf"^row {row}, position \d+: would write to full slot .*several owners"):
        attend(rig, chain(rig, row), PRIMARY)


def test_a_read_of_poison_is_named(rig) -> None:
    row = opened(rig, 6)
    plan = chain(rig, row)
    rig.store.layers[SWA].k[rig.allocator.maps.host[SWA][rig.slots.host[row, 5]]] = torch.nan
    with pytest.raises(LocationError, match=f"^row {row}, position 6: attends to a window 4 slot that holds no key"):
        attend(rig, plan, SWA)


# a table that is wrong is found before anything is planned; what `check` finds is in `test_request_table.py`


@pytest.mark.parametrize("wrong", ["slot", "peer"])
def test_a_wrong_table_is_named_before_the_launch(wrong: str, rig) -> None:
    row = opened(rig, 6)
    rig.flush()
    slot, maps = rig.slots.host[row, 5], rig.allocator.maps
    if wrong == "slot":
        message = r"rows \[0\], positions \[[02].*\].* (not whole pages|do not exist)"
        rig.slots[row, 2] = 10_000
    else:
        message = "window 12: "
        maps[WIDE, slot] = int(maps.host[SWA, slot])  # it has that of another group
    with pytest.raises(LocationError, match=f"^{message}"):
        rig.flush()


# engines


@pytest.mark.parametrize("value", ["", "0", None])
def test_without_its_variable_the_sanitizer_is_off(value, make_target, make_engine, monkeypatch) -> None:
    monkeypatch.delenv("SPECDEC_SANITIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("SPECDEC_SANITIZE", value)
    engine = make_engine(make_target("llama"))
    assert engine.cache.sanitizer is None and not isinstance(engine.state.backend, CheckedBackend)
    assert engine.table.allocator.primary.on_free is None
    assert not any(kept.k.isnan().any() for kept in engine.state.view._store.layers.values())


def test_an_engine_asks_once_when_it_is_made(
    make_target, make_engine, random_prompt, greedy_oracle, monkeypatch
) -> None:
    model, prompt = make_target("gemma4-e2b"), random_prompt(20)
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    engine = make_engine(model, "ngram")
    monkeypatch.setenv("SPECDEC_SANITIZE", "0")
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=8))
    assert out.token_ids == greedy_oracle(model, prompt, 8)
    assert isinstance(engine.state.backend, CheckedBackend)
    kept = engine.state.view.layer(0).k[engine.config.page_size :]
    assert not kept.isnan().all()  # the prefix cache's
    engine.clear_prefix_cache()
    assert kept.isnan().all()  # all was given back
    engine.close()


def test_after_a_finding_the_engine_goes_on(
    make_target, make_engine, random_prompt, greedy_oracle, monkeypatch
) -> None:
    model, prompt = make_target("gemma4-e2b"), random_prompt(20)
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    engine = make_engine(model, "ngram")
    with monkeypatch.context() as patch:
        patch.setattr(KVPlan, "write_slots", lambda plan, group: plan.write[PRIMARY] * 0 + 1)
        with pytest.raises(LocationError):
            engine.generate(prompt, SamplingParams(max_new_tokens=8))
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=8))
    assert out.token_ids == greedy_oracle(model, prompt, 8)
