"""The devices that one model is split over, driven by one host thread, and their communication.

`Ranks` is the form for one device: every rank is the same device, memory is shared, and work runs in the order of the
calls. CPUs use it. `PeerRanks` are GPUs that reach each other's memory: the host launches phase by phase, so the work
that a kernel waits for was launched before it. In a capture, the graphs of all ranks are launched together. Invariant:
all ranks hold the same bits.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from specdec.errors import ConfigError, DeviceLostError
from specdec.gpu import exchange_kernels
from specdec.gpu.exchange_kernels import (
    EMPTY,
    MAX_POLLS,
    NUMBERS,
    PROGRAMS,
    STEPS,
    TAGGED_NUMBERS,
    exchange_kernel,
    exchange_tagged_kernel,
    next_round_kernel,
    programs_of,
    pull_kernel,
)
from specdec.gpu.triton_shim import pdl_options, triton

MAX_ROWS = 2048
"""Rows per gather, which size its buffers."""

POLL_SECONDS = 2e-5


class Ranks:
    """`count` ranks on one device, which run one after another."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.room = 0

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def turn(self) -> AbstractContextManager[object]:
        """Within the block no other thread that enters such a block launches on these ranks."""
        return nullcontext()

    def on(self, rank: int) -> AbstractContextManager[object]:
        """Launches within the block run on this rank."""
        return nullcontext()

    def put(self, rank: int, pieces: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """Concatenate tensors of one device, in new memory on this rank; a single tensor already there is returned
        itself."""
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
        return whole.to(self.devices[rank])

    def reserve(self, numbers: int) -> None:
        """Make `room` for gathers of up to this many float32 numbers, counted over all ranks."""
        self.room = numbers

    def send(self, value: Any) -> list[Any]:
        """A nested value of rank 0 (`map_tensors`) -> its copy for each rank. The first `send` of a forward is a
        `begin`."""
        return [value] * len(self)

    def begin(self) -> None:
        """Begin a forward. Raises DeviceLostError if a rank has failed to answer."""

    def end(self) -> None:
        """End the launches of a forward."""

    def gather(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[S, ...] float32 of each rank, contiguous -> [ranks * S, ...] for each rank, in the order of ranks, to be
        read before the next."""
        whole = torch.cat(list(parts))
        return [whole] * len(self)

    def select(self, parts: Sequence[torch.Tensor], owners: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[S, T, H] float32 of each rank, contiguous -> [S, T, H] for each rank, to be read before the next.

        owners [T, S] int32 of each rank: not negative if the rank owns the part. Each part has exactly one owner.
        """
        whole = torch.zeros_like(parts[0])
        for part, own in zip(parts, owners, strict=True):
            whole = torch.where((own.t() >= 0)[..., None], part, whole)
        return [whole] * len(self)

    def collect(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """A contiguous tensor of each rank, all of one shape and dtype -> [ranks, ...] on rank 0. Between two collects
        rank 0 sends something."""
        return torch.stack(list(values))

    def join(self) -> None:
        """Later launches of rank 0 begin when every rank has finished its launches."""

    def check(self) -> None:
        """Raise DeviceLostError if a rank has failed to answer."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event of rank 0. Raises DeviceLostError instead of waiting forever."""
        event.synchronize()


class PeerRanks(Ranks):
    """GPUs of one process with access to each other's memory; tests run it in the interpreter, with one CPU as all
    ranks.

    Gathers alternate between two half-buffers. Half A is rewritten only after a gather into half B, and by then all
    ranks have read A. So the number of gathers per forward must be even (`end` adds a `join` to an odd number of
    steps). In a `collect`, other ranks write to half A of rank 0. They may do so again only after rank 0 has sent
    something, because rank 0 sends after it has read.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        for device in devices:  # the first copy makes torch enable peer access
            for peer in devices:
                torch.ones(8, dtype=torch.float32, device=device).to(peer)
        ints: dict[str, Any] = {"dtype": torch.int32}
        self._flags = [torch.zeros((len(devices), PROGRAMS), device=device, **ints) for device in devices]
        self._round = [torch.zeros(1, device=device, **ints) for device in devices]
        self._error = [torch.zeros(1, device=device, **ints) for device in devices]
        pinned = devices[0].type == "cuda"
        self._host_error = [torch.zeros(1, device="cpu", pin_memory=pinned, **ints) for _ in devices]
        self._errors = [error.numpy() for error in self._host_error]
        self._flag_table = self._addresses(self._flags)
        self._lock = threading.RLock()  # the step and the order of launches are those of one engine at a time
        self._step = 0
        self._held: list[Any] = []  # values whose tensors peers may still read
        self.max_polls = MAX_POLLS
        self.reserve(0)

    @property
    def turn(self) -> AbstractContextManager[object]:
        return self._lock

    def on(self, rank: int) -> AbstractContextManager[object]:
        device = self.devices[rank]
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def reserve(self, numbers: int) -> None:
        super().reserve(numbers)
        self._buffers = [torch.zeros(2 * numbers, dtype=torch.float32, device=device) for device in self.devices]
        self._out_table = self._addresses(self._buffers)
        few = min(numbers, exchange_kernels.TAGGED)  # for tagged exchanges
        self._words = [torch.full((2 * few,), EMPTY, dtype=torch.int64, device=device) for device in self.devices]
        self._word_table = self._addresses(self._words)
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def begin(self) -> None:
        self.check()
        self._step = 0
        for rank in range(len(self)):
            with self.on(rank):
                next_round_kernel[(1,)](self._round[rank])

    def end(self) -> None:
        if self._step % 2:
            self.join()  # for an odd number of gathers
        assert self._step < STEPS, f"{self._step} steps of one forward"

    def send(self, value: Any) -> list[Any]:
        with self.on(0):
            whole = map_tensors(value, torch.Tensor.contiguous)
        self._held.append(whole)
        self._launch(0, 0, len(self), halves="push")
        values = [value]
        for rank in range(1, len(self)):
            self._launch(rank, 0, 1, halves="wait")
            with self.on(rank):
                values.append(map_tensors(whole, partial(_pull, device=self.devices[rank])))
        self._step += 1
        return values

    def gather(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        num = parts[0].numel()
        for part in parts:
            assert part.is_contiguous() and part.dtype == torch.float32 and part.numel() == num, f"{part.shape=}"
        whole = self._exchange(parts, [None] * len(self))
        return [out.view(len(self) * len(parts[0]), *parts[0].shape[1:]) for out in whole]

    def select(self, parts: Sequence[torch.Tensor], owners: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        num_parts, num_rows, _ = parts[0].shape
        for part, own in zip(parts, owners, strict=True):
            assert part.is_contiguous() and own.is_contiguous(), f"{part.stride()=} {own.stride()=}"
            assert part.shape == parts[0].shape and own.shape == (num_rows, num_parts), f"{part.shape=} {own.shape=}"
        whole = self._exchange(parts, owners)
        return [out.view(parts[0].shape) for out in whole]

    def _exchange(self, parts: Sequence[torch.Tensor], owners: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Every rank pushes its part, or the parts of the whole that it owns, and waits for the others -> the whole,
        flat, on each."""
        if self._step == STEPS - 2:  # a forward of very many rows continues in another round
            self.begin()
        num_whole = parts[0].numel() * (len(self) if owners[0] is None else 1)
        assert num_whole <= self.room, f"{num_whole=} {self.room=}"
        first = self._step % 2 * self.room
        tagged = owners[0] is None and 0 < 2 * num_whole <= len(self._words[0])  # without numbers only flags remain
        # only a captured launch may wait for later launches of the host: loading a kernel for the first time may have
        # to wait until every device is idle
        captured = self.devices[0].type == "cuda" and torch.cuda.is_current_stream_capturing()
        for halves in ("push and wait",) if captured else ("push", "wait"):
            for rank, (part, own) in enumerate(zip(parts, owners, strict=True)):
                offset = rank * part.numel() if own is None else 0
                if tagged:
                    self._launch_tagged(rank, part, self._buffers[rank][first:], halves=halves)
                else:
                    self._launch(rank, part.numel(), len(self), part, first + offset, own, halves=halves)
        self._step += 1
        self._held.clear()  # a rank that has pushed has read all data sent to it
        return [buffer[first : first + num_whole] for buffer in self._buffers]

    def collect(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, dtype = values[0].shape, values[0].dtype
        flat = [value.contiguous().view(-1).view(torch.float32) for value in values]  # bits only, of any dtype
        num = len(flat[0])
        at_once = self.room // len(self)
        out = torch.empty((len(self), num), dtype=torch.float32, device=self.devices[0])
        for first in range(0, num, at_once):
            if first:
                self.send(())
            blocks = [numbers[first : first + at_once] for numbers in flat]
            size = len(blocks[0])
            for rank, block in enumerate(blocks):
                self._launch(rank, size, 1, block, rank * size, halves="push")
            self._meet(size)
            out[:, first : first + size] = self._buffers[0][: len(self) * size].view(len(self), size)
        return out.view(dtype).view(len(self), *shape)

    def join(self) -> None:
        for rank in range(len(self)):
            self._launch(rank, 0, 1, halves="push")
        self._meet(0)

    def _meet(self, num: int) -> None:
        """Rank 0 waits until every rank has pushed `num` numbers to it."""
        self._launch(0, num, len(self), halves="wait")
        self._step += 1
        self._held.clear()

    def check(self) -> None:
        lost = [str(self.devices[rank]) for rank, error in enumerate(self._errors) if error[0]]
        if lost:
            raise DeviceLostError(
                f"{' and '.join(lost)} waited for another of {', '.join(map(str, self.devices))}, which did not "
                "answer within seconds: it is busy with other work, or lost; end this engine, free the devices of "
                "other programs, and make a new one"
            )

    def wait_for(self, event: torch.cuda.Event) -> None:
        while not event.query():
            self.check()
            time.sleep(POLL_SECONDS)
        self.check()

    def _launch(
        self,
        rank: int,
        num: int,
        ranks: int,
        x: torch.Tensor | None = None,
        offset: int = 0,
        owners: torch.Tensor | None = None,
        *,
        halves: str,
    ) -> None:
        """One rank exchanges `num` numbers with each of the first `ranks` ranks. halves: "push", "wait", or both."""
        device = self.devices[rank]
        shape = (1, 1, num) if x is None or owners is None else x.shape
        with self.on(rank):
            exchange_kernel[(programs_of(num), ranks)](
                *(x, owners, self._out_table[rank], self._flag_table[rank]),
                *(self._round[rank], self._error[rank], self._host_error[rank]),
                *(*shape, offset, self._step, rank, self.max_polls, "push" in halves, "wait" in halves),
                ASM=device.type == "cuda" and torch.version.cuda is not None,
                STEPS=STEPS,
                PROGRAMS=PROGRAMS,
                BLOCK=NUMBERS,
                num_warps=4,
                **pdl_options(device),
            )

    def _launch_tagged(self, rank: int, part: torch.Tensor, out: torch.Tensor, *, halves: str) -> None:
        """`_launch` for few numbers, to and from all ranks, in rank order."""
        with self.on(rank):
            exchange_tagged_kernel[(triton.cdiv(part.numel(), TAGGED_NUMBERS), len(self))](
                *(part, out, self._word_table[rank], self._round[rank], self._error[rank], self._host_error[rank]),
                *(part.numel(), self._step % 2 * (len(self._words[rank]) // 2), self._step, rank, self.max_polls),
                *("push" in halves, "wait" in halves),
                STEPS=STEPS,
                EMPTY=EMPTY,
                BLOCK=TAGGED_NUMBERS,
                num_warps=1,
                **pdl_options(self.devices[rank]),
            )

    def _addresses(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device="cpu")
        return [addresses.to(device) for device in self.devices]


def map_tensors(value: Any, change: Callable[..., Any], *kinds: type) -> Any:
    """Returns a nested value (frozen dataclasses, named tuples, tuples, lists and dicts) with `change` applied to each
    of its tensors and to each part of these `kinds`; a value without any is returned itself."""
    if isinstance(value, (torch.Tensor, *kinds)):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: map_tensors(part, change, *kinds) for name, part in old.items()}
        return value if all(new[name] is old[name] for name in old) else replace(value, **new)
    if isinstance(value, dict):
        return {name: map_tensors(part, change, *kinds) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change, *kinds) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _pull(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of a peer, copied by the current device."""
    out = torch.empty(source.shape, dtype=source.dtype, device=device)
    if out.numel():
        whole_words = source.nbytes % 4 == 0 and source.data_ptr() % 4 == 0
        x, y = (tensor.view(-1).view(torch.int32 if whole_words else torch.uint8) for tensor in (source, out))
        pull_kernel[(triton.cdiv(len(x), 1024),)](x, y, len(x), BLOCK=1024, num_warps=4)
    return out


def make_ranks(device: torch.device, count: int) -> Ranks:
    """`count` ranks from `device` on. Raises ConfigError: too few GPUs, or no access to each other's memory."""
    if device.type != "cuda":
        return Ranks([device] * count)
    index: int | None = device.index  # torch's stubs know no device without an index
    first = torch.cuda.current_device() if index is None else index
    devices = [torch.device("cuda", first + rank) for rank in range(count)]
    visible = torch.cuda.device_count()
    if first + count > visible:
        raise ConfigError(
            f"tensor_parallel={count} from {devices[0]} on needs {count} GPUs, and this process sees {visible} in all; "
            "lower it, or give another device"
        )
    access: Callable[[torch.device, torch.device], bool] = torch.cuda.can_device_access_peer
    blocked = [(a, b) for a in devices for b in devices if a != b and not access(a, b)]
    if blocked:
        a, b = blocked[0]
        raise ConfigError(
            f"tensor_parallel={count} needs GPUs that reach each other's memory, and {a} has no peer access to {b}; "
            "run replicas in its place, one a GPU"
        )
    return PeerRanks(devices)
