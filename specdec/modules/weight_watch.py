"""Detects that the weights of a model or drafter changed: every change that makes noted addresses or results stale.

`Weights.generation` takes a lock, and the garbage collector may run a finalizer while this thread holds one. If that
finalizer released an abandoned request of another engine, it would take a second weights lock and could deadlock. So a
finalizer only queues the request while `weights_lock_held`; the engine releases it later.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from specdec.errors import UnsupportedModelError
from specdec.modules.module_watch import ModuleWatch

logger = logging.getLogger("specdec")

_VERSION = attrgetter("_version")

_HELD: ContextVar[tuple[threading.Lock, ...]] = ContextVar("weights locks that this thread takes", default=())


@contextmanager
def holding(lock: threading.Lock) -> Iterator[None]:
    """Take a weights lock."""
    before = _HELD.set((*_HELD.get(), lock))
    try:
        with lock:
            yield
    finally:
        _HELD.reset(before)


def weights_lock_held() -> bool:
    """Does this thread hold a weights lock? An interrupt may have left one in the list that it has released."""
    return any(lock.locked() for lock in _HELD.get())


class StorageWatch:
    """Notices if parameters or buffers of some modules become other tensors or move in memory.

    In-place updates move nothing. A check costs the host about 0.3 us per tensor, and the device nothing. A new tensor
    may have the address of freed memory, so storages are remembered too, by weak references.
    """

    def __init__(self, *roots: nn.Module) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}.values()
        self._holders: list[dict[str, Any]] = [
            tensors for m in modules for tensors in (m._parameters, m._buffers) if tensors
        ]
        self.note()

    def moved(self) -> bool:
        """Has any tensor moved since the last `note`?"""
        held, now = self._held, self._held_now()
        same = len(now) == len(held) and all(map(is_, now, held)) and self._addresses == _addresses(self._tensors)
        return not same or any(map(torch.UntypedStorage._expired, self._weak))

    def versions(self) -> int:
        """A number that grows with every in-place update of the tensors that the last `note` found, except updates
        through `.data` and of inference tensors."""
        return sum(map(_VERSION, self._counted))

    def counts_updates(self) -> bool:
        """Does each tensor have a version counter? Those made under `torch.inference_mode()` have none."""
        return len(self._counted) == len(self._tensors)

    def note(self) -> None:
        """Note where the tensors are now."""
        self._held = self._held_now()
        self._tensors = [tensor for tensor in self._held if tensor is not None]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._addresses = _addresses(self._tensors)
        storages = (StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors)
        self._storages = {storage.cdata: storage for storage in storages}  # some tensors share one
        self._weak = list(self._storages)

    def _held_now(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._holders)))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


class RepointableModule(nn.Module):
    """A module that has noted where the weights of another module are."""

    def describe_again(self) -> None:
        """Note where they are now. Raises UnsupportedModelError, with the reason as a clause, if it cannot run them."""
        raise NotImplementedError


class Weights:
    """The weights that one or more modules read. Other code may re-point them at any time.

    Ask for `generation` before each forward: if weights have moved, each `RepointableModule` is described again. A
    holder of addresses, such as a captured graph, remembers its generation.

    original: the user's modules, if the modules are a private copy. If these change (another active adapter, a hook, a
    replaced sub-module), `copy_again` replaces the copy and returns its weights.
    split: ranks have copies of the weights, so after any change every look raises UnsupportedModelError.
    """

    def __init__(
        self,
        name: str,
        *modules: nn.Module,
        original: ModuleWatch | None = None,
        copy_again: Callable[[], "Weights"] | None = None,
        split: bool = False,
    ) -> None:
        self.name = name
        self._original, self._copy_again = original, copy_again
        self._stale = False  # the private copy differs from the user's modules
        self._generation = 0
        self._lock = threading.Lock()
        self._modules = modules
        self.watch = StorageWatch(*modules)
        self._placement, self._sizes = self._where(), self._shapes()
        self._split_at = self.updates() if split else None
        if split:
            _split_weights.add(self)

    def generation(self) -> int:
        """A number that is incremented if weights have moved or modules were copied again. Raises UnsupportedModelError
        while the weights have another dtype or device, for which K/V would not fit, or if the modules cannot be served.
        """
        with holding(self._lock):
            if self._original is not None and self._original.changed():
                self._stale = True
            return self._sync()

    def find_hidden_changes(self) -> None:
        """Find changes that `generation` has no time to look for: see `ModuleWatch.may_differ`. Modules that may have
        changed without a trace are copied again. Raises like `generation`."""
        with holding(self._lock):
            if self._original is not None and self._original.may_differ():
                self._stale = True
            self._sync()

    def updates(self) -> object:
        """A value that changes whenever the weights that `generation` last found are changed in place: see
        `StorageWatch.versions`. If they have no version counters, each call returns another value."""
        return self.watch.versions() if self.watch.counts_updates() else object()

    def _sync(self) -> int:
        if moved := self.watch.moved():
            self._stale |= self._sizes != self._shapes()
        if self._split_at is not None:
            updated = self.watch.counts_updates() and self.updates() != self._split_at
            if updated or self._stale or moved:
                raise UnsupportedModelError(
                    f"weights, modules or hooks of {self.name} changed after they were split over several devices, "
                    "which have copies; make a new engine"
                )
        if self._stale and self._copy_again is not None:
            new = self._copy_again()
            self._original, self._modules = new._original, new._modules
            self.watch, self._placement, self._sizes = new.watch, new._placement, new._sizes
            self._stale = False
        elif moved:
            self._describe_again()
        else:
            return self._generation
        self._generation += 1
        return self._generation

    def _describe_again(self) -> None:
        now = self._where()
        if now != self._placement:
            raise UnsupportedModelError(
                f"the weights of {self.name} are {_shown(now)} now, and were {_shown(self._placement)} when its engine "
                "was made; make a new one, or move them back"
            )
        try:
            for module in chain.from_iterable(root.modules() for root in self._modules):
                if isinstance(module, RepointableModule):
                    module.describe_again()
        except UnsupportedModelError as reason:
            raise UnsupportedModelError(
                f"the weights of {self.name} were replaced by others that its fused layers cannot run ({reason}); "
                "make a new engine"
            ) from reason
        self.watch.note()  # after the merge, which moves them too

    def _shapes(self) -> list[torch.Size]:
        return [param.shape for module in self._modules for param in module.parameters()]

    def _where(self) -> set[tuple[torch.dtype, torch.device]]:
        return {(param.dtype, param.device) for module in self._modules for param in module.parameters()}


_split_weights: weakref.WeakSet[Weights] = weakref.WeakSet()


@contextmanager
def moving_split_weights() -> Iterator[None]:
    """Within the block weights may move in memory but keep their values, so the copies that ranks have stay valid."""
    with ExitStack() as locks:
        split = list(_split_weights)
        for weights in split:
            locks.enter_context(holding(weights._lock))
        unmoved = [weights.watch for weights in split if not weights.watch.moved()]
        try:
            yield
        finally:
            for watch in unmoved:
                watch.note()


def _shown(placement: set[tuple[torch.dtype, torch.device]]) -> str:
    return " and ".join(sorted(f"{dtype} on {device}" for dtype, device in placement))


def watched_weights(target: Any, drafter: Any) -> list[Weights]:
    """The weights of a target, and of a drafter if it has any."""
    drafts = getattr(drafter, "weights", None)
    return [target.weights] if drafts is None else [target.weights, drafts]


def updates_are_counted(target: Any, drafter: Any) -> bool:
    """Does every update of these weights change `Weights.updates`? Logs a warning if not."""
    blind = [weights.name for weights in watched_weights(target, drafter) if not weights.watch.counts_updates()]
    if blind:
        logger.warning(
            "%s: weights that were made under torch.inference_mode() do not count their updates, so no K/V are "
            "kept for later requests; load the model outside of it, or set prefix_cache=False",
            " and ".join(blind),
        )
    return not blind
