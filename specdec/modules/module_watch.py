"""Detects changes of the user's module tree after the engine has copied it (`private_copy.py`).

    changed()      cheap, before each forward      sub-modules replaced, hooks or attributes added or removed; every
                                                   attribute of modules from outside torch and transformers
    may_differ()   thorough, when the user asks    every attribute of every module, configs included; true too if
                                                   hooks or foreign modules can change without a visible change

Parameters and buffers are not compared: `weight_watch.py` watches those. It cannot see changes inside a closure that a
hook calls, or of global variables.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from specdec.modules.private_copy import OFFLOADING

RECORDING_HOOKS = "transformers.utils.output_capturing"
"""Module of hooks that a model keeps after a request for hidden states. They only record."""

PLAIN_PACKAGES = ("torch", "transformers", "specdec")
"""Modules of these packages (specdec's: packed weights) do not change their own attributes; only `may_differ` compares
them."""

NOT_COMPARED = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_attn_implementation_internal",
    "_output_capturing_hooks_installed",
}
"""Attributes that are compared in another way, replaced by a private copy, or used by transformers for its own
notes."""

PLAIN_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class ModuleWatch:
    """Watches the modules under `parts` of a model and their parent modules, from its creation on."""

    def __init__(self, model: nn.Module, *parts: nn.Module) -> None:
        watched = [*_modules_above(model, parts), *chain.from_iterable(part.modules() for part in parts)]
        modules = list({id(module): module for module in watched}.values())
        self._states = [vars(module) for module in modules]
        self._children = [module._modules for module in modules if module._modules]
        self._childless = [module._modules for module in modules if not module._modules]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        foreign = [vars(m) for m in modules if type(m).__module__.partition(".")[0] not in PLAIN_PACKAGES]
        self._foreign = [(itemgetter(*names), state) for state in foreign if (names := _compared_names(state))]
        self._noted = self._children_now(), self._own_hooks()
        self._noted_count = self._count()
        self._noted_attributes = [_with_copied_containers(values) for values in self._foreign_attributes()]
        self._noted_details = self._details()

    def changed(self) -> bool:
        """Costs the host about 0.1 us per module, and 1 us per module from outside torch and transformers."""
        if any(self._childless) or (self._children_now(), self._own_hooks()) != self._noted:
            return True
        if (count := self._count()) != self._noted_count:
            if [set(_compared_names(state)) for state in self._states] != [set(noted) for noted in self._noted_details]:
                return True
            self._noted_count = count
        try:
            return bool(self._foreign_attributes() != self._noted_attributes)
        except (KeyError, RuntimeError, ValueError):  # a module is gone, or tensors were compared
            return True

    def may_differ(self) -> bool:
        """Costs the host about 20 us per module."""
        is_untraceable = bool(self._foreign or self._own_hooks())
        return is_untraceable or self.changed() or self._details() != self._noted_details

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))

    def _count(self) -> int:
        """Number of attributes of all modules."""
        return sum(map(len, self._states))

    def _own_hooks(self) -> list[Any]:
        if not any(self._hooks):  # the usual case, and several times cheaper to check
            return []
        present = chain.from_iterable(hooks.items() for hooks in self._hooks if hooks)
        return [item for item in present if getattr(item[1], "__module__", None) != RECORDING_HOOKS]

    def _foreign_attributes(self) -> list[Any]:
        return [read(state) for read, state in self._foreign]

    def _details(self) -> list[Any]:
        known: dict[int, Any] = {}
        return [{name: _described(state[name], known) for name in _compared_names(state)} for state in self._states]


def _modules_above(model: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of `model` that contain one of `parts`, including the parts themselves."""
    names = [name for name, module in model.named_modules() if any(module is part for part in parts)]
    above = {".".join(name.split(".")[:depth]) for name in names for depth in range(name.count(".") + 1)}
    return [model.get_submodule(name) for name in sorted(above)]


def _compared_names(state: Mapping[str, Any]) -> list[str]:
    skipped = NOT_COMPARED | set(OFFLOADING) if "_hf_hook" in state else NOT_COMPARED
    return [name for name in state if name not in skipped]


def _with_copied_containers(values: Any) -> Any:
    """Copies of containers, so that a container changed in place differs from its copy."""
    if type(values) is tuple:
        return tuple(map(_with_copied_containers, values))
    return copy.copy(values) if type(values) in (list, dict, set) else values


def _described(value: Any, known: dict[int, Any]) -> Any:
    """A description that stays equal as long as `value` holds the same. known: descriptions of containers, by id.

    Objects are kept alive next to their id: tuples of equal ids hold one object, which compares equal to itself.
    """
    if isinstance(value, PLAIN_VALUES):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), value, value.data_ptr(), None if value.is_inference() else value._version
    if not isinstance(value, Mapping | list | tuple | set | frozenset | PreTrainedConfig):
        return id(value), value
    if id(value) not in known:
        known[id(value)] = "a circle"  # until its description is complete
        known[id(value)] = _described_container(value, known)
    return known[id(value)]


def _described_container(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, PreTrainedConfig):
        value = {name: part for name, part in vars(value).items() if name not in NOT_COMPARED}
    if isinstance(value, Mapping):
        return [(_described(name, known), _described(part, known)) for name, part in value.items()]
    if isinstance(value, set | frozenset):
        return frozenset(map(repr, value))
    return [_described(part, known) for part in value]
