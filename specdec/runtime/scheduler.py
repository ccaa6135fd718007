"""The scheduler: admission, prompt chunks, slots for the next round, preemption. It touches no tensor of the model.

    submit -> WAITING -- a row and pages are free --> PREFILL -- all K/V made --> DECODE -- stop --> released
                 ^                                       |                          |
                 '-- preempted, or a step was interrupted: all slots freed, tokens kept'

A request's rank is its priority number, then its arrival. Requests are admitted and prompts are read in order of rank,
the lowest first. If a page is needed and none is free, windows give up their slack pages; if that frees none, the
running request with the highest rank is preempted. So the request with the lowest rank always advances. A request that
would not fit the empty pools is refused at `submit`, so preemption always ends. While a request waits, its priority
number falls by one each time OVERTAKEN_PER_LEVEL later requests were admitted before it.
"""

from bisect import bisect, insort
from collections import deque
from collections.abc import Sequence

import numpy as np

from specdec.errors import CapacityError, counted
from specdec.gpu.captures import next_power_of_two
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.layout import PRIMARY
from specdec.kvcache.table import RequestTable, window_slots_held
from specdec.runtime.prompts.prefixes import PrefixPolicy
from specdec.runtime.prompts.prompt_budget import PromptGap, UnreadPrompt, share_tokens
from specdec.runtime.request import Request, RequestState, restricted, table_rows

OVERTAKEN_PER_LEVEL = 64
"""Later requests that are admitted before a waiting request until its priority number falls by one."""

MAX_BATCHES = 3
"""Number of batches kept: one of all running requests, one of those that decode, one of those in the next round."""


class RequestBatch:
    """A snapshot of some requests: their epochs, rows [B] and parameters. max_total_len [B]: their lengths if only
    max_new_tokens ends them. constrained: those with a grammar or rules about tokens. fixed [B]: do they fix their
    draft?"""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.epochs = [request.row_epoch for request in requests]
        self.rows: IntArray = table_rows(requests)
        self.params = [request.params for request in requests]
        self.logprobs = [each.logprobs for each in self.params]
        self.max_total_len: IntArray = np.array([request.max_total_len for request in requests], dtype=np.int64)
        self.constrained = restricted(requests)
        self.fixed = np.array([request.has_fixed_draft for request in requests], dtype=np.bool_)

    def present(self) -> list[int]:
        """Indices of the requests that still have their row."""
        epochs = [request.row_epoch for request in self.requests]
        if epochs == self.epochs:
            return list(range(len(epochs)))
        return [i for i, (now, then) in enumerate(zip(epochs, self.epochs, strict=True)) if now == then]


class Scheduler:
    """Decides which requests run. Every decoding request must own `lookahead` slots after its committed ones.

    context_len: upper bound on `max_model_len`, in tokens; None: no bound.
    """

    def __init__(
        self,
        table: RequestTable,
        *,
        max_model_len: int,
        prompt_gap: PromptGap,
        prefixes: PrefixPolicy | None = None,
        context_len: int | None = None,
    ) -> None:
        self.table = table
        self.context_len = context_len
        self.prefixes = PrefixPolicy(None, object) if prefixes is None else prefixes
        self.max_model_len = max_model_len
        self.prompt_gap = prompt_gap
        self.waiting: list[Request] = []  # sorted by rank
        self.running: list[Request] = []  # sorted by rank
        self._batches: deque[RequestBatch] = deque(maxlen=MAX_BATCHES)  # the newest ones
        self.rounds_held = False  # while True, no request decodes
        self.max_running = table.max_requests  # most rows in use at a time; lowered after steps raised errors

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def reads_prompts(self) -> bool:
        """Does a request with a row have unread prompt tokens?"""
        return RequestState.PREFILL in [request.state for request in self.running]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their first token, or for their next token after a preemption."""
        return len(_in_state(self.running, RequestState.PREFILL)) + len(self.waiting)

    def batch_of(self, requests: Sequence[Request]) -> RequestBatch:
        """The batch of these requests, each of which has a row. Returns a recent batch of the same requests, if there
        is one."""
        for batch in self._batches:
            same = requests is batch.requests or requests == batch.requests
            if same and len(batch.present()) == len(requests):
                return batch
        self._batches.append(RequestBatch(requests))
        return self._batches[-1]

    def submit(self, request: Request) -> None:
        """Queue a request. Raises CapacityError, with the numbers, if it can never run."""
        self.require_fits(len(request.prompt), request.params.max_new_tokens)
        insort(self.waiting, request, key=rank)

    def restart(self, requests: Sequence[Request]) -> None:
        """Start again from any state: these requests wait, and no slot is held.

        Tokens are kept; their K/V are recomputed, as after a preemption.
        """
        self.table.reset()
        self.prefixes.restart()
        self.running = []
        self._batches.clear()
        for request in requests:
            request.lose_row()
        self.waiting = sorted(requests, key=rank)

    def require_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise CapacityError unless a request of this size fits the empty pools and the model length."""
        prompt = f"a prompt of {counted(prompt_len, 'token')}"
        asked = f"{prompt} with {max_new_tokens=}"
        over, least = prompt_len + max_new_tokens - self.max_model_len, min(max_new_tokens, 1)
        if over > 0:
            limit = f"max_model_len={self.max_model_len}"
            advice = [f"shorten the prompt by {over}"] * (over < prompt_len)
            advice += [f"ask for at most {counted(max_new_tokens - over, 'new token')}"] * (over < max_new_tokens)
            message = f"{asked} makes {prompt_len + max_new_tokens} tokens, more than {limit}"
            if over >= max_new_tokens:  # no value of max_new_tokens would fit
                message = f"{prompt} leaves no room for an answer" if least else prompt
                message += f", with {limit}"
                advice = [f"shorten the prompt by {prompt_len + least - self.max_model_len}"]
            if self.context_len is None or self.max_model_len < self.context_len:
                most = "" if self.context_len is None else f" (at most {self.context_len})"
                advice.append(f"or make the engine with a larger max_model_len{most}")
            raise CapacityError(f"{message}; {', '.join(advice)}")
        allocator = self.table.allocator
        needed, least_needed = (slots_needed(self.table, prompt_len, new) for new in (max_new_tokens, least))
        for group, pool in allocator.pools.items():
            need, available = needed[group], pool.capacity * allocator.page_size
            if need > available:
                message = asked if least_needed[group] <= available else prompt
                option = "full_slots" if group == PRIMARY else "swa_slots"
                raise CapacityError(
                    f"{message} needs {need} {pool.name} KV slots (with {self.table.lookahead} lookahead slots and "
                    f"page size {allocator.page_size}), but the {pool.name} pool has {available}; raise {option} "
                    "or ask for less"
                )

    def admit_requests(self) -> list[Request]:
        """Give rows to waiting requests while there are pages for their prompts and for the next round of running
        requests.

        Returns the admitted requests.
        """
        admitted: list[Request] = []
        if not self.waiting or len(self.running) >= self.max_running:
            return admitted
        self.table.evict_unseen(self.table.active_rows)
        due = self._pages_to_come(self.running)
        available = np.array([pool.available_pages for pool in self.table.allocator.pools])
        admitted_ids: list[int] = []  # sorted, so in order of arrival
        put_off: list[Request] = []
        for request in self.waiting:
            if len(self.running) + len(put_off) >= self.max_running:
                break
            if self.running and (due > available).any():
                break
            if self.prefixes.should_wait_for_prefix(request, rank(request)):
                put_off.append(request)  # reserve a row for it
                continue
            due = due + self._pages_to_begin(request)
            if self.running and (due > available).any():
                break  # adopt no pages yet: every step would adopt and release them
            request.row = self.table.open_row()
            request.times_overtaken += _num_later(admitted_ids, request)
            self.prefixes.adopt_prefix(request, rank(request))
            request.assign_row(request.row)
            insort(self.running, request, key=rank)
            admitted.append(request)
            insort(admitted_ids, request.id)
        if admitted:
            self.waiting[: len(admitted) + len(put_off)] = put_off
            overtaken = [request for request in self.waiting if request.id < admitted_ids[-1]]
            before = [*map(rank, overtaken)]
            for request in overtaken:
                request.times_overtaken += _num_later(admitted_ids, request)
            if before != [*map(rank, overtaken)]:  # some have gained a level
                self.waiting.sort(key=rank)
        return admitted

    def next_prefill(self) -> tuple[list[Request], IntArray]:
        """Requests with unread prompt tokens, and the length of each one's next chunk. Slots are allocated.

        `share_tokens` decides the requests and lengths; a chunk shrinks to the available pages.
        """
        table = self.table
        chosen: list[tuple[Request, int]] = []
        for request, wanted in self._prompt_shares():
            while request.state is RequestState.PREFILL:  # until it has a chunk or is preempted
                row = request.row
                done = int(table.committed_len.host[row])
                room = int(table.capacity[row]) - done + table.allocator.available_pages * table.allocator.page_size
                if room > 0:
                    chunk = min(wanted, room)
                    table.ensure_slots(row, done + chunk)
                    chosen.append((request, chunk))
                    break
                self._make_room()
        chosen = [(request, chunk) for request, chunk in chosen if request.state is RequestState.PREFILL]
        return [request for request, _ in chosen], np.array([chunk for _, chunk in chosen], dtype=np.int64)

    def commit_chunks(self, requests: Sequence[Request], chunk_len: IntArray) -> None:
        """Commit the next `chunk_len` [B] prompt tokens on the host after their chunks are launched.

        A request whose prompt is complete may then join a round that is launched after the chunks.
        """
        rows = table_rows(requests)
        self.table.commit_chunk_on_host(rows, chunk_len)
        self.prefixes.keep_committed(requests)  # before SWA eviction: another prompt may diverge anywhere
        self.table.evict_unseen(rows)
        for request in requests:
            if self.table.committed_len.host[request.row] == request.prefill_target:
                request.state = RequestState.DECODE

    def next_decode(self) -> list[Request]:
        """Requests of the next round. Each owns its lookahead after its committed slots.

        If grammars force tokens, each request also gets extra slots for the longest run of forced tokens, while there
        are free pages. If one of them gets none, the round forces fewer tokens for all.
        """
        if self.rounds_held:
            return []
        while True:
            batch = self.batch_of(self._decoding())
            rows, wanted = batch.rows, self._lookahead(batch.rows)
            if self.table.pages_needed(rows, wanted).sum() <= self.table.allocator.available_pages:
                break
            self._make_room()
        self.table.ensure_slots(rows, wanted, ahead=True)
        forced = max((len(request.forced) for request in restricted(batch.constrained)), default=0)
        if forced:
            last = self.table.slots.host.shape[1] - 1
            more = np.minimum(self.table.committed_len.host[rows] + next_power_of_two(1 + forced), last)
            for row, wanted in zip(rows[:, None], more[:, None], strict=True):  # row by row
                if self.table.pages_needed(row, wanted).sum() <= self.table.allocator.available_pages:
                    self.table.ensure_slots(row, wanted)
        return batch.requests

    def release_requests(self, *requests: Request) -> None:
        """Forget requests, running or waiting, and free their rows and slots."""
        gone = set(requests)
        leaving = [request for request in self.running if request in gone]
        if len(leaving) < len(gone):
            self.waiting = [request for request in self.waiting if request not in gone]
        if leaving:
            self.running = [request for request in self.running if request not in gone]
            self.prefixes.release_rows(leaving)
            self.table.close_rows(table_rows(leaving))
        for request in leaving:
            request.lose_row()
        if not self.running:
            self._batches.clear()  # they hold requests

    def _decoding(self) -> list[Request]:
        """Requests that can take part in another round. One that ends with its first token waits until that token is
        settled."""
        decodes = RequestState.DECODE
        return [each for each in self.running if each.state is decodes and each.params.max_new_tokens > 1]

    def _lookahead(self, rows: IntArray) -> IntArray:
        """The slots [B] that each of these rows must own for a round."""
        return self.table.committed_len.host[rows] + self.table.lookahead

    def _pages_to_come(self, requests: Sequence[Request]) -> IntArray:
        """Pages [groups] that requests with a row will take up to and including their next round."""
        table = self.table
        rows = table_rows(_in_state(requests, RequestState.DECODE))
        due = np.full_like(table.retain, table.pages_needed(rows, self._lookahead(rows)).sum())
        for request in requests:
            if request.state is not RequestState.DECODE:
                owned, evicted = int(table.capacity[request.row]), table.evicted_len[:, request.row]
                due += self._pages_missing(request, owned, evicted)
        return due

    def _pages_to_begin(self, request: Request) -> IntArray:
        """Pages [groups] that a waiting request will take up to its first round. Includes cached pages that no row
        holds."""
        allocator = self.table.allocator
        pages = self.prefixes.cached_pages(request)
        num_evicted = self.table.num_evicted(len(pages))
        due = self._pages_missing(request, len(pages) * allocator.page_size, num_evicted * allocator.page_size)
        for group, _ in allocator.pools.items():
            due[group] += np.count_nonzero(allocator.is_idle(group, pages[num_evicted[group] :]))
        return due

    def _pages_missing(self, request: Request, owned: int, evicted: IntArray) -> IntArray:
        """Pages [groups] that a request needs up to its first round in addition to its `owned` slots.

        evicted [groups]: how many of the owned slots have no peer slot. Computed for two more tokens, the fewest with
        which a request enters a round.
        """
        missing = np.array(slots_needed(self.table, request.prefill_target, 2)) - owned + evicted
        return np.maximum(0, missing) // self.table.allocator.page_size

    def _prompt_shares(self) -> list[tuple[Request, int]]:
        """Requests that read prompt tokens in this step, by rank, with their number of tokens if there are enough
        pages."""
        reading = _in_state(self.running, RequestState.PREFILL)
        if not reading:
            return []
        done = [int(self.table.committed_len.host[request.row]) for request in reading]
        prompts = [UnreadPrompt(rank(r)[0], r.prefill_target - n) for r, n in zip(reading, done, strict=True)]
        to_come = sum(each.remaining for each in prompts)
        gap = self.prompt_gap
        budget = gap.tokens(self.num_waiting, max(done)) if self._decoding() else gap.budget.idle_tokens(to_come)
        given = zip(reading, share_tokens(prompts, budget, gap.budget.chunk), strict=True)
        return [(request, share) for request, share in given if share > 0]

    def _make_room(self) -> None:
        """Evict the slack pages before windows. If that frees nothing, preempt the request with the highest rank."""
        if self.table.evict_unseen(self.table.active_rows, slack_pages=0):
            return
        victim = self.running[-1]
        self.release_requests(victim)
        victim.stats.preemptions += 1
        insort(self.waiting, victim, key=rank)


def _num_later(ids: Sequence[int], request: Request) -> int:
    """How many of the requests with these sorted ids arrived after this one."""
    return len(ids) - bisect(ids, request.id)


def rank(request: Request) -> tuple[int, int]:
    """(priority level, number). Lower ranks are served first. The rank of a running request does not change."""
    return request.priority - request.times_overtaken // OVERTAKEN_PER_LEVEL, request.id


def _in_state(requests: Sequence[Request], state: RequestState) -> list[Request]:
    return [request for request in requests if request.state is state]


def slots_needed(table: RequestTable, prompt_len: int, max_new_tokens: int) -> list[int]:
    """Upper bound on the slots that one request owns at a time in each group, in whole pages.

    The last verify starts with at least one token to go: committed <= prompt + new - 2, plus the lookahead.
    """
    page_size, num_nodes = table.allocator.page_size, table.lookahead
    max_len = prompt_len if max_new_tokens < 2 else prompt_len + max_new_tokens - 2 + num_nodes
    kept = [int(keys) + lag for keys, lag in zip(table.retain, table.max_lag, strict=True)]
    held = [max_len] + [window_slots_held(keys, num_nodes, page_size) for keys in kept[1:]]
    return [-(-min(max_len, slots) // page_size) * page_size for slots in held]
