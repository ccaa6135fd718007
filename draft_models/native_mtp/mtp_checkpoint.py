"""The modules of a checkpoint: its MTP tensors, which transformers drops when it loads a model, and nothing else."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.draft_models.checkpoints.checkpoint_files import naming_folder, stored_tensor, tensor_files, write_folder
from specdec.draft_models.native_mtp.mtp_drafter import MtpTarget, NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import (
    FAMILIES,
    LOOKED_FOR,
    REQUIRED,
    MtpFamily,
    module_tensors,
)
from specdec.draft_models.native_mtp.mtp_module import MtpModule
from specdec.errors import CheckpointError, UnsupportedModelError, first_line, naming_file

CONVENTIONS = "mtp_conventions.json"
"""A file beside the modules with fields of `MtpFamily`, in the place of the family's row."""
NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "proj": "fc",
    "norm": "norm",
    "layer": "layers.0",
    "head": "layers.0.shared_head.head",
    "embed": "layers.0.embed_tokens",
}
"""Where the parts of a module that is written here lie, after "mtp."."""


def module_count(folder: Path, num_layers: int) -> int:
    """The number of MTP modules that a folder holds for a target of so many layers."""
    return len(module_tensors(tensor_files(folder), num_layers))


def native_mtp_drafter(folder: Path, target: MtpTarget, family: MtpFamily | None = None) -> NativeMtpDrafter:
    """The drafter that the modules in `folder` are, fitted to `target`. family: None: that of CONVENTIONS there, else
    the target's. Raises CheckpointError where there are none, or where they are damaged or incomplete, and
    UnsupportedModelError where they cannot run."""
    made = list[MtpModule]()
    with naming_folder(folder):
        files = tensor_files(folder)
        modules = module_tensors(files, len(target.layout.layers))
        if not modules:
            raise CheckpointError(
                f"no MTP modules there (looked for {LOOKED_FOR}); give drafter=DIR of a checkpoint that has them, such "
                "as the base of a finetuned or quantised one"
            )
        family = family or (
            stated_family(folder / CONVENTIONS) if (folder / CONVENTIONS).is_file() else family_of(target)
        )
        for number, names in enumerate(modules):
            state = {_renamed(place, family): _read(files[name], name) for place, name in names.items()}
            _require_parts(number, state)
            for part, own in (("embed", target.embed), ("head", target.head)):
                if (tensor := state.get(f"{part}.weight")) is not None and _equal(tensor, own):
                    del state[f"{part}.weight"]  # a copy of the target's
            made.append(MtpModule(state, target.user_decoder, family.like, number))
    drafter = NativeMtpDrafter(made, family, target)
    drafter.source = str(folder)
    return drafter


def family_of(target: MtpTarget) -> MtpFamily:
    """The row of the target's model type. Raises UnsupportedModelError for a type that has none."""
    for kind in target.model_types:
        if kind in FAMILIES:
            return FAMILIES[kind]
    raise UnsupportedModelError(
        f"{target.name} is a {target.model_types[0]}, whose MTP conventions are not known; known are "
        f"{', '.join(sorted(FAMILIES))}"
    )


def stated_family(file: Path) -> MtpFamily:
    """The conventions that a file states. Raises CheckpointError."""
    try:
        family = MtpFamily(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {first_line(error)}") from error
    if family.form not in ("C", "T"):
        raise CheckpointError(f"{file.name}: form={family.form!r}; the form of several modules is 'C' or 'T'")
    return family


def write_conventions(folder: Path, family: MtpFamily) -> None:
    """Write CONVENTIONS, where `native_mtp_drafter` reads it. Raises CheckpointError."""
    with naming_file(folder / CONVENTIONS):
        (folder / CONVENTIONS).write_text(json.dumps(asdict(family), indent=2) + "\n", "utf-8")


def write_module(folder: Path, drafter: NativeMtpDrafter, model: PreTrainedModel) -> None:
    """Write a drafter of one module under the names of Qwen's, with the config.json of its target and its
    conventions."""
    [module] = drafter.modules
    named = {f"mtp.{NAMES[part]}": weights for part, weights in module.parts().items()}
    state = {f"{name}.{key}": tensor for name, weights in named.items() for key, tensor in weights.state_dict().items()}
    write_folder(folder, {**model.config.to_dict(), "architectures": [type(model).__name__]}, state)
    write_conventions(folder, replace(drafter.family, renamed={}))


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
