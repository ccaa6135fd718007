"""Reads the MTP modules of a checkpoint: only the MTP tensors, which transformers drops when it loads a model.

The tensors show whether a module has its own head, norms and embedding; no tensor shows its conventions (`MtpFamily`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.draft_models.base import TargetInfo
from specdec.draft_models.checkpoints.checkpoint_files import (
    equals_weight,
    is_unquantised,
    read_config_json,
    stored_tensor,
    tensor_files,
    write_folder,
)
from specdec.draft_models.native_mtp.mtp_drafter import (
    MTP_FAMILIES,
    SPECULATORS,
    MtpFamily,
    MtpTarget,
    NativeMtpDrafter,
)
from specdec.draft_models.native_mtp.mtp_module import (
    LoadPacked,
    MtpModule,
    decoder_on_device,
    read_parts,
    require_known_parts,
)
from specdec.errors import CheckpointError, UnsupportedModelError, about, first_line, naming_file, shown

CONVENTIONS = "mtp_conventions.json"
"""A file next to the modules with fields of `MtpFamily`. It replaces the family's row."""
NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "proj": "fc",
    "norm": "norm",
    "layer": "layers.0",
    "head": "layers.0.shared_head.head",
    "embed": "layers.0.embed_tokens",
}
"""Names, after "mtp.", of the parts of a module that `write_module` writes."""

PLACES = (
    r"layers\.(?P<layer>\d+)\.(?:transformer(?:_block)?\.)?(?P<name>.+)",  # beyond the target's last layer
    r"mtp_layers\.(?P<module>\d+)\.(?P<name>.+)",
    r"mtp_block\.(?P<module>\d+)\.(?P<name>.+)",
    r"(?P<name>mtp_(?:emb_norm|hidden_norm|linear_proj))\.(?P<module>\d+)(?P<end>\..+)",
    r"mtp\.layers\.(?P<module>\d+)\.(?P<name>.+)",
    r"mtp\.(?P<name>(?:fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm|embed_tokens|lm_head)\..+)",  # of a single one
)
"""Places of a module's tensors, after any prefix. `module` is the module's number; `layer` continues the target's
numbering."""
OF_ANY_MODULE = r"(?:.+\.)?mtp(?:_\w+)?\..+"
NOT_READ = r"vis(?:ion|ual)|audio|\.rotary_emb\."
"""Parts of names: of other towers, and of tables that are computed."""

PARTS = {
    "enorm": ("enorm", "token_layernorm", "pre_fc_norm_embedding", "mtp_emb_norm"),
    "hnorm": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden", "mtp_hidden_norm"),
    "proj": ("eh_proj", "input_proj", "fc", "mtp_linear_proj"),
    "norm": ("shared_head.norm", "final_layernorm", "norm"),
    "head": ("shared_head.head", "shared_head.output", "lm_head"),
    "embed": ("embed_tokens",),
}
"""Parts of a module by the names in checkpoints; all other tensors belong to its block."""

PART_OF = {name: part for part, names in PARTS.items() for name in names}
REQUIRED = ("enorm", "hnorm", "proj")


def module_tensors(names: Iterable[str], num_layers: int) -> dict[int, dict[str, str]]:
    """File names of each module's tensors, by its number and by place, such as "enorm.weight" or
    "block.mlp.up_proj.weight".

    num_layers: layers of the target; modules that are named like layers are counted after these.
    """
    modules: dict[int, dict[str, str]] = {}
    for key in names:
        for place in PLACES:
            found = re.fullmatch(rf"(?:.+\.)??{place}", key)
            if found is None or re.search(NOT_READ, key):
                continue
            groups = found.groupdict()
            number = int(groups["layer"]) - num_layers if groups.get("layer") else int(groups.get("module") or 0)
            if number >= 0 and (place is not PLACES[0] or ".mtp" not in f".{key}"):
                modules.setdefault(number, {})[_place(groups["name"] + (groups.get("end") or ""))] = key
                break
    return {number: modules[number] for number in sorted(modules) if _is_module(modules[number])}


def _require_whole(keys: Iterable[str], modules: Mapping[int, Mapping[str, str]]) -> None:
    """Raise if a module is missing between others, or if a tensor of modules would not be read: without it, they would
    draft as other modules than these."""
    numbers = list(modules)
    if missing := [str(number) for number in range(numbers[0], numbers[-1]) if number not in modules]:
        raise CheckpointError(
            f"of its MTP modules up to {numbers[-1]} there is no {', '.join(missing)}; give a checkpoint that has all"
        )
    read = {key for names in modules.values() for key in names.values()}
    for key in keys:
        if key not in read and re.fullmatch(OF_ANY_MODULE, key) and not re.search(NOT_READ, key):
            raise UnsupportedModelError(f"its MTP tensor {key} belongs to no part of a module that specdec knows")


def _is_module(names: Mapping[str, str]) -> bool:
    """Are these the tensors of a module, by their names or a module's norms? Otherwise they are a layer of a longer
    model or of another tower."""
    norms = tuple(f"{part}." for part in REQUIRED)
    return any(place.startswith(norms) or ".mtp" in f".{key}" for place, key in names.items())


def _place(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if part in PART_OF:
        return f"{PART_OF[part]}.{kind}"
    return f"block.{name.replace('pre_mlp_layernorm', 'post_attention_layernorm')}"  # MiMo-V2 has the former


def module_count(folder: Path, num_layers: int) -> int:
    """The number of MTP modules in a folder for a target of `num_layers` layers."""
    return len(module_tensors(tensor_files(folder), num_layers))


def is_mtp_speculator(config: Mapping[str, Any]) -> bool:
    """Does this config.json belong to a finetuned module in speculators' format?"""
    return config.get("speculators_model_type") == "mtp"


def native_mtp_drafter(
    folder: Path, target: MtpTarget, load_packed: LoadPacked | None = None, family: MtpFamily | None = None
) -> NativeMtpDrafter:
    """Make a drafter of the modules in `folder`, fitted to `target`. load_packed: reads weights that the folder's
    config.json declares as packed; None: it declares none. family: None: `conventions_of`. Raises CheckpointError if
    modules are missing, damaged or incomplete, and UnsupportedModelError if they cannot run."""
    made = list[MtpModule]()
    with about(str(folder)):
        files = tensor_files(folder)
        modules = module_tensors(files, len(target.layout.layers))
        if not modules:
            raise no_modules()
        _require_whole(files, modules)
        family = family or conventions_of(folder, target)
        require_known_parts(target.user_decoder)
        decoder = decoder_on_device(target.user_decoder, target.device)
        for number, names in enumerate(modules.values()):
            state = {place: stored_tensor(files[name], name) for place, name in names.items()}
            for place, stored in state.items():
                if load_packed is None and not is_unquantised(stored):
                    raise UnsupportedModelError(
                        f"its MTP tensor {names[place]} is packed ({stored.dtype}), and its config.json has no "
                        "supported quantization_config; give drafter=DIR of the unquantised checkpoint"
                    )
            for part, own in (("embed", target.embed), ("head", target.user_head)):
                if (tensor := state.get(f"{part}.weight")) is not None and equals_weight(tensor, own):
                    del state[f"{part}.weight"]  # a copy of the target's weight
            with about(f"its MTP module {number}"):
                parts = read_parts(state, decoder, family.like, names, load_packed)
                made.append(MtpModule(parts, decoder, family.like, number))
    drafter = NativeMtpDrafter(made, family, target)
    drafter.source = str(folder)
    return drafter


def no_modules() -> CheckpointError:
    return CheckpointError(
        "no MTP modules there (looked for mtp.*, model.mtp.layers.*, model.mtp_layers.*, model.mtp_block.*, and "
        "model.layers.* beyond the last layer); give drafter=DIR of a checkpoint that has them, such as the "
        "base of a finetuned or quantised one"
    )


def conventions_of(folder: Path, target: TargetInfo) -> MtpFamily:
    """The conventions in the file next to the modules, else those of their publisher. Raises like
    `native_mtp_drafter`."""
    if (folder / CONVENTIONS).is_file():
        return stated_family(folder / CONVENTIONS, len(target.layout.layers))
    file = folder / "config.json"
    is_speculator = file.is_file() and is_mtp_speculator(read_config_json(file))
    return by_config(SPECULATORS if is_speculator else family_of(target), target)


def family_of(target: TargetInfo) -> MtpFamily:
    """The row of the target's model type. Raises UnsupportedModelError if the type has none."""
    for kind in target.model_types:
        if kind in MTP_FAMILIES:
            return MTP_FAMILIES[kind]
    raise UnsupportedModelError(
        f"{target.name} is a {target.model_types[0]}, whose MTP conventions are not known; known are "
        f"{', '.join(sorted(MTP_FAMILIES))}"
    )


def by_config(family: MtpFamily, target: TargetInfo) -> MtpFamily:
    """The row, with `like` set to a layer whose attention the modules share: a layer of the type in the config's
    `mtp_layer_types`; without that key, the row's own layer; if the target lacks that layer or it is recurrent, the
    last attention layer."""
    config: Any = target.user_decoder.config
    kinds = getattr(config, "mtp_layer_types", None)
    if kinds and kinds[0] in config.layer_types:
        return replace(family, like=config.layer_types.index(kinds[0]))
    layers = target.layout.layers
    if family.like < len(layers) and not layers[family.like].recurrent:
        return family
    return replace(family, like=max((spec.layer for spec in layers if not spec.recurrent), default=-1))


def stated_family(file: Path, num_layers: int) -> MtpFamily:
    """Read the conventions in a file, for a target of `num_layers` layers. Raises CheckpointError."""
    known = asdict(MtpFamily())
    try:
        family = MtpFamily(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        fields = f"an object with some of the fields {', '.join(known)} is expected"
        raise CheckpointError(f"{file.name} cannot be read: {first_line(error)}; {fields}") from error
    for name, value in asdict(family).items():
        if type(value) is not type(known[name]):
            raise CheckpointError(f"{file.name}: {name}={shown(value)}; a value like {known[name]!r} is expected")
    if family.form not in ("C", "T"):
        raise CheckpointError(f"{file.name}: form={family.form!r}; the form of several modules is 'C' or 'T'")
    if not -num_layers <= family.like < num_layers:
        raise CheckpointError(
            f"{file.name}: like={family.like}; a layer of the target from 0 to {num_layers - 1} is expected, or "
            f"-{num_layers} to -1, counted from the last"
        )
    return family


def write_conventions(folder: Path, family: MtpFamily) -> None:
    """Write the file CONVENTIONS, which `native_mtp_drafter` reads. Raises CheckpointError."""
    with naming_file(folder / CONVENTIONS):
        (folder / CONVENTIONS).write_text(json.dumps(asdict(family), indent=2) + "\n", "utf-8")


def write_module(folder: Path, drafter: NativeMtpDrafter, model: PreTrainedModel) -> None:
    """Write a drafter of one module under Qwen's tensor names, with its target's config.json and its conventions."""
    [module] = drafter.modules
    named = {f"mtp.{NAMES[part]}": weights for part, weights in module.parts().items()}
    state = {f"{name}.{key}": tensor for name, weights in named.items() for key, tensor in weights.state_dict().items()}
    write_folder(folder, {**model.config.to_dict(), "architectures": [type(model).__name__]}, state)
    write_conventions(folder, drafter.family)
