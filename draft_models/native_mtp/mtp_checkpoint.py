"""The modules of a checkpoint: its MTP tensors, which transformers drops when it loads a model, and nothing else."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.draft_models.checkpoints.checkpoint_files import naming_folder, stored_tensor, tensor_files
from specdec.draft_models.native_mtp.mtp_drafter import MtpTarget, NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import (
    FAMILIES,
    LOOKED_FOR,
    REQUIRED,
    MtpFamily,
    module_tensors,
)
from specdec.draft_models.native_mtp.mtp_module import MtpModule
from specdec.errors import CheckpointError, UnsupportedModelError, first_line

CONVENTIONS = "mtp_conventions.json"
"""A file beside the modules with fields of `MtpFamily`, in the place of the family's row."""


def has_modules(folder: Path, num_layers: int) -> bool:
    """Does this folder hold MTP modules for a target of so many layers?"""
    return bool(module_tensors(tensor_files(folder), num_layers))


def native_mtp_drafter(folder: Path, target: MtpTarget) -> NativeMtpDrafter:
    """The drafter that the modules in `folder` are, fitted to `target`. Raises CheckpointError where there are none, or
    where they are damaged or incomplete, and UnsupportedModelError where they cannot run."""
    made = list[MtpModule]()
    with naming_folder(folder):
        files = tensor_files(folder)
        modules = module_tensors(files, len(target.layout.layers))
        if not modules:
            raise CheckpointError(
                f"no MTP modules there (looked for {LOOKED_FOR}); give drafter=DIR of a checkpoint that has them, such "
                "as the base of a finetuned or quantised one"
            )
        family = (_stated(folder) or family_of(target.name, target.model_types)).at_layer(target.user_decoder)
        for number, names in enumerate(modules):
            state = {_renamed(place, family): _read(files[name], name) for place, name in names.items()}
            _require_parts(number, state)
            for part, own in (("embed", target.embed), ("head", target.head)):
                if (tensor := state.get(f"{part}.weight")) is not None and _equal(tensor, own):
                    del state[f"{part}.weight"]  # a copy of the target's
            made.append(MtpModule(state, target.user_decoder, family, number))
    drafter = NativeMtpDrafter(made, family, target)
    drafter.source = str(folder)
    return drafter


def family_of(name: str, model_types: Sequence[str]) -> MtpFamily:
    """The row of a target of these types. Raises UnsupportedModelError for types that have none."""
    for kind in model_types:
        if kind in FAMILIES:
            return FAMILIES[kind]
    raise UnsupportedModelError(
        f"{name} is a {model_types[0]}, whose MTP conventions are not known; known are {', '.join(sorted(FAMILIES))}"
    )


def _stated(folder: Path) -> MtpFamily | None:
    """The conventions that lie beside the modules; None: no such file. Raises CheckpointError."""
    file = folder / CONVENTIONS
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
        family = MtpFamily(**found)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{CONVENTIONS} cannot be read: {first_line(error)}") from error
    if family.form not in ("C", "T"):
        raise CheckpointError(f"{CONVENTIONS}: form={family.form!r}; the form of several modules is 'C' or 'T'")
    return family


def _read(file: Path, name: str) -> torch.Tensor:
    tensor = stored_tensor(file, name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise UnsupportedModelError(
            f"its MTP tensor {name} is packed ({tensor.dtype}); MTP modules are read in 16 bits or more, so give "
            "drafter=DIR of the unquantised checkpoint"
        )
    return tensor


def _require_parts(number: int, state: Mapping[str, torch.Tensor]) -> None:
    lacking = [part for part in REQUIRED if f"{part}.weight" not in state]
    if lacking:
        raise CheckpointError(f"MTP module {number} lacks {' and '.join(lacking)}; it has {', '.join(sorted(state))}")


def _renamed(place: str, family: MtpFamily) -> str:
    block, _, rest = place.partition(".")
    first, dot, more = rest.partition(".")
    return f"{block}.{family.renamed.get(first, first)}{dot}{more}" if block == "block" else place


def _equal(tensor: torch.Tensor, own: Any) -> bool:
    weight: torch.Tensor = own.weight
    return tensor.shape == weight.shape and bool(torch.equal(tensor.to(weight), weight))
