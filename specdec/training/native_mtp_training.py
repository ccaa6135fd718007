"""Trains one-layer MTP modules that are applied repeatedly (form R), for any target: new ones or published ones.

A new module begins as a layer of the target, between its final norm and a projection that adds token and state. Tables
and heads are the target's, unless a published module has its own. Invariant: the parallel forward is the engine's own
drafts (`mtp_drafter.py`, tests/test_parallel_drafts.py).
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.draft_models.heads.feedback_drafts import ModuleRows, chained_rows
from specdec.draft_models.native_mtp.mtp_checkpoint import (
    by_config,
    module_count,
    native_mtp_drafter,
    stated_family,
    write_module,
)
from specdec.draft_models.native_mtp.mtp_drafter import MTP_FAMILIES, MtpFamily, NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_module import MtpModule, empty_layer, read_parts, require_known_parts
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.loading.model_loading import Checkpoint
from specdec.models.target import TargetModel
from specdec.training.draft_loss import TargetStates, TrainableDrafter
from specdec.training.packed_rows import PackedRows
from specdec.training.train_settings import TrainSettings


class TrainableNativeMtp(TrainableDrafter):
    """A module and its target. Row i reads token i + 1 and predicts token i + 2, so `ahead` is 2."""

    module: MtpModule
    ahead = 2

    def __init__(self, drafter: NativeMtpDrafter, target: TargetModel) -> None:
        super().__init__(drafter.modules[0], target)
        self.drafter = drafter
        for part in self.trained.values():
            part.requires_grad_(True)

    @property
    def trained(self) -> dict[str, nn.Module]:
        return {"lm_head" if name == "head" else name: part for name, part in self.module.parts().items()}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.drafter.aux_layers

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        states = known["states"].to(self.drafter.dtype)
        for out in chained_rows(self.drafter, batch.ids, states, batch.pos, steps):
            yield out.z

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return self.drafter.logits(0, ModuleRows(states, states))

    def save(self, folder: Path) -> None:
        write_module(folder, self.drafter, self.target.model)


def trainable_native_mtp(target: TargetModel, start: Path | None, conventions: Path | None) -> TrainableNativeMtp:
    """The module in `start`, or a new one. conventions: of a folder; None: of `start`, else of the target's family.

    Raises ConfigError for several modules, and CheckpointError or UnsupportedModelError if the module or the target's
    layers cannot be used.
    """
    stated = None if conventions is None else stated_family(conventions, len(target.layout.layers))
    if start is not None:
        drafter = native_mtp_drafter(start, target, family=stated)
        if len(drafter.modules) > 1:
            raise ConfigError(
                f"{start} holds {len(drafter.modules)} MTP modules; one module, applied again, is trained"
            )
        return TrainableNativeMtp(drafter, target)
    known = (MTP_FAMILIES[kind] for kind in target.model_types if kind in MTP_FAMILIES)
    family = stated or by_config(next(known, MtpFamily()), target)
    parts = read_parts(new_state(target, family), target.user_decoder, family.like)
    module = MtpModule(parts, target.user_decoder, family.like, 0)
    return TrainableNativeMtp(NativeMtpDrafter([module], family, target), target)


def trainable_module(target: TargetModel, settings: TrainSettings) -> TrainableNativeMtp:
    """The module that --finetune names, the module in the target's checkpoint, or a new one."""
    start = settings.finetune
    own = Checkpoint.from_name(settings.target).folder()
    if start is None and module_count(own, len(target.layout.layers)) == 1:
        start = own
    return trainable_native_mtp(target, start, settings.conventions)


def new_state(target: TargetModel, family: MtpFamily) -> dict[str, torch.Tensor]:
    """Tensors of a new module by place. Raises UnsupportedModelError if the layer that it is copied from is packed, or
    has unknown parts around it."""
    decoder: Any = target.user_decoder
    require_known_parts(decoder)
    owner = target.layout.layers[family.like].owner  # another layer if K/V are shared
    sources = [decoder.layers[layer].state_dict() for layer in (owner, family.like)]
    known = sources[0] | sources[1]
    gain: torch.Tensor = decoder.norm.weight
    state = {"enorm.weight": neutral(decoder.norm), "hnorm.weight": neutral(decoder.norm), "norm.weight": gain.clone()}
    state["proj.weight"] = torch.eye(len(gain), device=gain.device, dtype=gain.dtype).repeat(1, 2)
    for name, empty in empty_layer(decoder, family.like).state_dict().items():
        tensor = known.get(name)
        if tensor is None or tensor.shape != empty.shape or not tensor.is_floating_point():
            raise UnsupportedModelError(
                f"{target.name}: a new module begins as layer {family.like}, whose {name} is packed; train on the "
                "unquantised checkpoint, whose module drafts for this one"
            )
        state[f"block.{name}"] = tensor.detach().clone()
    return state


def neutral(norm: nn.Module) -> torch.Tensor:
    """The weight under which a norm scales nothing: ones, or zeros if it is stored as gain - 1."""
    probe: Any = copy.deepcopy(norm)
    weight: torch.Tensor = probe.weight.data
    offset = bool(probe(torch.ones_like(weight.zero_())).any())
    return torch.zeros_like(weight) if offset else torch.ones_like(weight)
