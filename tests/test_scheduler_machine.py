"""Random histories of the scheduler and its table under a fake model: nothing is lost, doubled, mixed up or forgotten.

The fake model writes, for every token, a number that identifies the whole text up to it. So a test fails if a request
reads another request's slot, or a page of another text. Requests arrive with any priority, some with common prefixes;
they are aborted, preempted and restarted. Rounds accept paths of any length from trees of any shape. At any time

    conservation   the table is consistent; a running request has a row of its own, a waiting one has none
    content        committed slots hold the text of their request, in both pools
    order          both lists are by rank; requests are admitted lowest rank first and preempted highest rank first
    patience       a request that arrives after a waiting one was overtaken OVERTAKEN_PER_LEVEL times for each level
                   between the two is not admitted before it
    progress       the first running request advances in every step
    the end        all requests end with their own tokens, and every slot is free
"""

import itertools
import random
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_rig import SWA, DraftTree, KVLayout, KVPlan, KVRig, layer_spec

from specdec import SamplingParams
from specdec.errors import CapacityError
from specdec.runtime import scheduler

from engine_internals import (
    IDLE_STEPS,
    WORTH_WAITING,
    Detokenizer,
    PrefixPolicy,
    PromptBudget,
    PromptGap,
    Request,
    RequestState,
    Scheduler,
    rank,
)
from marks import deep

WINDOW, NODES, ROWS, CHUNK, GROUP, MAX_LEN, VOCAB = 4, 4, 4, 8, 18, 60, 50
SLIDING_LAYER, FULL_LAYER = 0, 1
SEED = st.integers(0, 2**32 - 1)
MAX_STEPS = 2000


def meaning(tokens: Sequence[int]) -> float:
    """A number for the text: float64 holds it."""
    return float(zlib.crc32(bytes(tokens)) + 1)


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after a text."""
    return zlib.crc32(bytes(tokens), 7) % VOCAB


class SchedulerMachine(RuleBasedStateMachine):
    page_size: int
    cached: bool
    hits = 0  # tokens that came out of the prefix cache, in all runs

    @initialize(full_tokens=st.integers(64, 200), swa_tokens=st.integers(40, 120), seed=SEED)
    def start(self, full_tokens: int, swa_tokens: int, seed: int) -> None:
        draw = random.Random(seed)
        self.rig = KVRig(
            KVLayout((layer_spec(SLIDING_LAYER, WINDOW), layer_spec(FULL_LAYER, None))),
            pages=full_tokens // self.page_size,
            window_pages=swa_tokens // self.page_size,
            page_size=self.page_size,
            max_requests=ROWS,
            max_len=MAX_LEN,
            lookahead=NODES,
            dtype=torch.float64,
        )
        self.table = self.rig.table
        prefixes = PrefixPolicy(self.rig if self.cached else None, lambda: 0)
        sizes = {"max_model_len": MAX_LEN, "prompt_gap": PromptGap(PromptBudget(GROUP, GROUP, CHUNK))}
        self.scheduler = Scheduler(self.table, prefixes=prefixes, **sizes)
        self.common = [[draw.randrange(VOCAB) for _ in range(MAX_LEN)] for _ in range(2)]
        self.live: list[Request] = []
        self.ended: list[Request] = []
        self.submitted = 0
        self.passes: dict[int, int] = {}  # of each that waits, and has not had a row
        self.met: dict[int, dict[int, int]] = {}  # by request: those of the ones that it found waiting

    # events

    @rule(seed=SEED)
    def submit(self, seed: int) -> None:
        draw = random.Random(seed)
        length = draw.randint(1, 40)
        shared = draw.choice((0, draw.randint(0, length)))
        prompt = draw.choice(self.common)[:shared] + [draw.randrange(VOCAB) for _ in range(length - shared)]
        params = SamplingParams(max_new_tokens=draw.randint(1, 20), ignore_eos=True)
        request = Request(prompt, params, 0, Detokenizer(None), frozenset(draw.choice(((), (3,)))))
        request.id, request.priority = self.submitted, draw.choice((0, 0, 0, -1, 1))
        try:
            self.scheduler.submit(request)
        except CapacityError:
            return
        self.submitted += 1
        self.live.append(request)
        self.met[request.id] = dict(self.passes)
        self.passes[request.id] = 0

    @precondition(lambda self: self.live)
    @rule(seed=SEED)
    def abort(self, seed: int) -> None:
        request = random.Random(seed).choice(self.live)
        request.end("abort")
        self.scheduler.release_requests(request)
        self.passes.pop(request.id, None)
        self.end(request)

    @precondition(lambda self: self.live)
    @rule(chance=st.integers(0, 9))
    def begin_again(self, chance: int) -> None:
        """A step was interrupted: all that counts is what had been settled."""
        if chance == 9:
            self.scheduler.restart(self.live)
            assert not self.scheduler.running and not self.table.active_rows.size

    @rule(chance=st.integers(0, 9))
    def forget_what_is_cached(self, chance: int) -> None:
        if chance == 9:
            self.scheduler.prefixes.clear()

    @rule(seed=SEED, count=st.integers(1, 6))
    def step(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            self.one_step(draw)

    # a step, as `Steps` takes one

    def one_step(self, draw: random.Random) -> None:
        first = self.scheduler.running[0] if self.scheduler.running else None
        before = None if first is None else self.progress(first)
        self.decode(draw, self.scheduler.next_decode())
        self.admit()
        requests, chunk_len = self.scheduler.next_prefill()
        self.prefill(requests, chunk_len)
        assert first is None or first.finished or self.progress(first) > before, "the first of all made no progress"

    def progress(self, request: Request) -> tuple[int, int]:
        made = int(self.table.committed_len.host[request.row]) if request.row >= 0 else 0
        return request.num_output, made

    def admit(self) -> None:
        waiting = list(self.scheduler.waiting)
        admitted = self.scheduler.admit_requests()
        self.count_passes(admitted)
        past = waiting[: max(map(waiting.index, admitted), default=-1) + 1]
        for request in set(past) - set(admitted):  # by a prompt of their own, that another is making just now
            makers = [r for r in self.scheduler.running if r.state is RequestState.PREFILL and rank(r) < rank(request)]
            shared = [r for r in makers if r.prompt[:WORTH_WAITING] == request.prompt[:WORTH_WAITING]]
            assert self.cached and shared, "a request was admitted before a waiting one"
        for request in admitted:
            type(self).hits += int(self.table.committed_len.host[request.row])
        assert self.scheduler.running or not waiting, "rows and pages are free, and no request is admitted"

    def count_passes(self, admitted: Sequence[Request]) -> None:
        priority = {request.id: request.priority for request in [*self.live, *self.ended]}
        for request in admitted:
            self.passes.pop(request.id, None)
            for number in self.passes:
                if number < request.id:
                    self.passes[number] += 1
                    levels = priority[number] - request.priority
                    met = self.met[request.id][number]
                    assert self.cached or met < max(levels, 0) * scheduler.OVERTAKEN_PER_LEVEL, (
                        "a waiting request is overtaken for ever"
                    )

    def prefill(self, requests: Sequence[Request], chunk_len: np.ndarray) -> None:
        if not requests:
            return
        rows = np.array([request.row for request in requests], dtype=np.int64)
        any_decodes = any(request.state is RequestState.DECODE for request in self.scheduler.running)
        most = GROUP if any_decodes else IDLE_STEPS * GROUP
        assert (chunk_len > 0).all() and (chunk_len <= CHUNK).all() and chunk_len.sum() <= most
        done = self.table.committed_len.host[rows]
        width = int(chunk_len.max())
        text = [request.tokens for request in requests]
        values = [
            [meaning(text[i][: done[i] + n + 1]) if n < chunk_len[i] else 0.0 for n in range(width)]
            for i in range(len(requests))
        ]
        self.write(self.rig.chunk(rows, chunk_len), values)
        self.scheduler.commit_chunks(requests, chunk_len)
        for request in requests:
            if request.state is RequestState.DECODE and request.num_output == 0:
                request.settle([next_token(request.tokens)])
        self.release_finished(requests)

    def decode(self, draw: random.Random, requests: Sequence[Request]) -> None:
        if not requests:
            return
        rows = np.array([request.row for request in requests], dtype=np.int64)
        parents = [[-1] + [draw.randrange(n) for n in range(1, NODES)] for _ in requests]
        path = np.zeros((len(requests), NODES), dtype=np.int64)
        length = np.ones(len(requests), dtype=np.int64)
        emitted, values = [], []
        for i, request in enumerate(requests):
            node, accepted = 0, [0]
            while children := [n for n in range(NODES) if parents[i][n] == node]:
                if draw.random() < 0.4:
                    break
                node = draw.choice(children)
                accepted.append(node)
            text = request.tokens  # its last one is the root
            made = [-float(draw.randrange(1, 1 << 30)) for _ in range(NODES)]  # no request may ever read these
            for node in accepted:
                made[node] = meaning(text)
                text = [*text, next_token(text)]
            path[i, : len(accepted)], length[i] = accepted, len(accepted)
            emitted.append(text[len(request.tokens) :])
            values.append(made)
        tree = DraftTree.from_parents(torch.zeros((len(requests), NODES), dtype=torch.int64), torch.tensor(parents))
        self.write(self.rig.verify(rows, tree), values)
        self.rig.commit(rows, length, path)
        for request, tokens in zip(requests, emitted, strict=True):
            request.settle(tokens)
        self.release_finished(requests)
        self.table.evict_unseen(np.array([r.row for r in requests if not r.finished], dtype=np.int64))

    def write(self, plan: KVPlan, values: list[list[float]]) -> None:
        k = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
        for layer in (SLIDING_LAYER, FULL_LAYER):
            self.rig.write(layer, plan.write, k, -k)

    def release_finished(self, requests: Sequence[Request]) -> None:
        """All at once, as after a round."""
        finished = [request for request in requests if request.finished]
        self.scheduler.release_requests(*finished)
        for request in finished:
            self.end(request)

    def end(self, request: Request) -> None:
        self.live.remove(request)
        self.ended.append(request)
        tokens = list(request.prompt)
        for token in request.output_ids:
            assert token == next_token(tokens), "a token was lost, doubled or another request's"
            tokens.append(token)
        if request.finish_reason != "abort":
            assert request.num_output == request.params.max_new_tokens or request.output_ids[-1] in request.end_tokens

    # what holds at any time

    @invariant()
    def conservation(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        self.scheduler.prefixes.check(self.scheduler.running)
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert sorted(r.id for r in [*running, *waiting]) == sorted(r.id for r in self.live)
        rows = [request.row for request in running]
        assert sorted(rows) == self.table.active_rows.tolist()
        assert all(request.row == -1 and request.state is RequestState.WAITING for request in waiting)
        assert running == sorted(running, key=rank) and waiting == sorted(waiting, key=rank)
        if not self.live:
            self.everything_is_free()

    @invariant()
    def content(self) -> None:
        for request in self.scheduler.running if hasattr(self, "table") else ():
            length = int(self.table.committed_len.host[request.row])
            assert length < len(request.tokens) + (request.num_output == 0)
            slots = self.table.slots.host[request.row, :length]
            wanted = [meaning(request.tokens[: p + 1]) for p in range(length)]
            assert self.rig.store.layers[FULL_LAYER].k[slots, 0, 0].tolist() == wanted
            kept = max(0, length - WINDOW)
            peers = self.rig.allocator.maps.host[SWA][slots[kept:]]
            assert self.rig.store.layers[SLIDING_LAYER].k[peers, 0, 0].tolist() == wanted[kept:]

    def everything_is_free(self) -> None:
        allocator = self.rig.allocator
        assert allocator.primary.held_pages == 0 and allocator.pools[SWA].held_pages == 0

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        draw, steps = random.Random(0), 0
        while self.live:
            steps += 1
            assert steps < MAX_STEPS, f"{len(self.live)} requests never end"
            self.one_step(draw)
            self.conservation()
        assert self.scheduler.idle
        assert len(self.ended) == self.submitted
        self.everything_is_free()


def run(page_size: int, cached: bool, examples: int) -> int:
    """-> tokens that came out of the cache."""
    machine = type(f"SchedulerMachine{page_size}", (SchedulerMachine,), {"page_size": page_size, "cached": cached})
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()
    return machine.hits


@pytest.mark.parametrize(
    ("page_size", "cached", "examples"),
    [(1, True, 10), (4, False, 4), deep(1, True, 60), deep(4, True, 60), deep(1, False, 60)],
)
def test_random_histories(page_size: int, cached: bool, examples: int) -> None:
    # how many depends on what else is imported: hypothesis draws constants of all modules there are
    assert (run(page_size, cached, examples) > 0) == cached


def test_random_histories_with_priorities_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priorities change all the time, and with them who is admitted, who has to go, and in what order."""
    monkeypatch.setattr(scheduler, "OVERTAKEN_PER_LEVEL", 2)
    run(1, False, 6)


@pytest.mark.parametrize("level", [1, 3])
def test_a_low_priority_is_not_kept_waiting_by_a_steady_stream(level: int) -> None:
    """There are always more of priority 0 than there are rows, and yet its turn comes when the rule says so."""
    layout = KVLayout((layer_spec(SLIDING_LAYER, WINDOW), layer_spec(FULL_LAYER, None)))
    sizes = {"pages": 200, "page_size": 1, "max_len": MAX_LEN, "lookahead": NODES}
    table = KVRig(layout, **sizes, max_requests=ROWS).table
    made = Scheduler(table, max_model_len=MAX_LEN, prompt_gap=PromptGap(PromptBudget(GROUP, GROUP, CHUNK)))
    numbers = itertools.count()

    def submit(priority: int) -> Request:
        request = Request([5], SamplingParams(max_new_tokens=1), 0, Detokenizer(None), frozenset())
        request.id, request.priority = next(numbers), priority
        made.submit(request)
        return request

    patient, order = submit(level), list[int]()
    while 0 not in order and len(order) < 10 * scheduler.OVERTAKEN_PER_LEVEL:
        for _ in range(ROWS + 1):
            submit(0)
        order += [request.id for request in made.admit_requests()]
        for request in list(made.running):
            made.release_requests(request)
    assert order.index(patient.id) == level * scheduler.OVERTAKEN_PER_LEVEL
    assert [number for number in order if number] == list(range(1, len(order)))
