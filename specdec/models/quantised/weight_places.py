"""Where the quantised weights of a checkpoint belong in a model, and how transformers gets their tensors there.

A weight is placed by the name that transformers would give its plain `weight`, so renamed and prefixed checkpoints,
and those of older layouts, need nothing of their own. Experts may be stored one by one, or as tensors of all of them.
"""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from specdec.errors import UnsupportedModelError
from specdec.layers.moe.moe_families import EXPERT_CLASSES
from specdec.models.quantised.checkpoint_tensors import StoredWeight

OF_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class WeightPlaces:
    """linears and experts: by the path of the module, which is in `modules`."""

    def __init__(self, model: PreTrainedModel, conversions: list[WeightTransform]) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.linears: dict[str, StoredWeight] = {}
        self.experts: dict[str, dict[str, StoredWeight]] = {}  # one for all experts, the first that was found
        self.stacked: set[str] = set()  # of these the checkpoint has tensors of all experts
        self._names = _renaming(model, conversions)
        self._known = set(model.state_dict())
        self._stacks: dict[tuple[str, str], set[str]] = {}  # (in the checkpoint, in the model) -> names of tensors
        self._joints: dict[str, set[str]] = {}

    def find(self, weight: StoredWeight) -> None:
        one = OF_ONE_EXPERT.fullmatch(weight.stem)
        plain = [weight.stem if weight.format.joint == "_" else f"{weight.stem}.weight"]
        if one:  # stacked in the model, or modules as in the checkpoint
            plain.insert(0, f"{one['experts']}.gate_up_proj")
        name = next((name for name in map(self._names, plain) if name in self._known), None)
        if name is None:
            return  # a part that this class does not have; transformers lists it as unused
        path, _, last = name.rpartition(".")
        module = self.modules[path]
        if isinstance(module, EXPERT_CLASSES):
            self._find_experts(path, last, weight, one)
        elif type(module) is nn.Linear and last == "weight":
            self.linears[path] = weight
        else:
            raise UnsupportedModelError(
                f"{weight.stem} is quantised, and it is the {last} of a {type(module).__name__}; quantised weights are "
                f"read of nn.Linear and of {', '.join(known.__name__ for known in EXPERT_CLASSES)}"
            )

    def _find_experts(self, path: str, last: str, weight: StoredWeight, one: re.Match[str] | None) -> None:
        if one is None:
            self.stacked.add(path)
            self._joints.setdefault(last, set()).update(weight.tensors)
        else:
            last = PROJECTIONS.get(one["name"], one["name"])
            self._stacks.setdefault((one["name"], last), set()).update(weight.tensors)
        self.experts.setdefault(path, {}).setdefault(last, weight)

    def require_apart(self) -> None:
        """Raise UnsupportedModelError where experts that are quantised and others that are not have tensors of the same
        names, since one rule stacks either."""
        plain = [path for path, module in self.modules.items() if isinstance(module, EXPERT_CLASSES)]
        plain = [path for path in plain if path not in self.experts]
        if plain and any("weight" in names for names in self._stacks.values()):
            raise UnsupportedModelError(
                f"{plain[0]} is not quantised, and {next(iter(self.experts))} is; experts in FP8 are read where all are"
            )

    def conversions(self) -> Iterable[WeightTransform]:
        """How the tensors of experts get into their raw modules."""
        for (stored, last), names in self._stacks.items():
            for name in sorted(names):
                yield WeightConverter(
                    rf"\.experts\.\d+\.{stored}\.{name}$", f".experts.{last}.{name}", operations=[MergeModulelist()]
                )
        for last, names in self._joints.items():
            for name in sorted(names):
                yield WeightRenaming(rf"\.experts\.{last}_{name}$", f".experts.{last}.{name}")


def _renaming(model: PreTrainedModel, conversions: list[WeightTransform]) -> Callable[[str], str]:
    """The name in the model of a key of the checkpoint, as transformers finds it."""
    conversions = copy.deepcopy(conversions)  # they note whether they were used
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    known = model.state_dict()

    def name(key: str) -> str:
        renamed, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        return str(key if renamed not in known and key in known else renamed)

    return name
