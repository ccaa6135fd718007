"""Reads and writes the files of a checkpoint in any format (config.json, tensors), and reports damaged ones.

transformers checks types when it makes a config, but not numbers, which fail later as a division by zero or a wrong
shape. Those in `CHECKED_KEYS` are checked here, for target and drafter, and refused by name. Drafter families check the
rest of their keys. Tensors are loaded into a head, with the target tokens that the head drafts (`d2t`, `t2d`).
"""

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.draft_models.base import TargetInfo
from specdec.errors import CheckpointError, first_line, naming_file, shown
from specdec.layers.packed.packed_modules import packed_of

logger = logging.getLogger("specdec")

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_ALONE = (
    "holds a peft adapter and no model; load it with peft onto its base and give the loaded model, or give a folder in "
    "which peft has merged them"
)


class ValueKind(NamedTuple):
    """The kind of value that a key must have."""

    allowed: str
    holds: Callable[[Any], bool]


FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
COUNT = ValueKind("a whole number above 0", lambda value: type(value) is int and value > 0)
INDEX = ValueKind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)
POSITIVE = ValueKind("a number above 0", lambda value: type(value) in (int, float) and isfinite(value) and value > 0)
NUMBER = ValueKind(
    "a number of 0 or more", lambda value: type(value) in (int, float) and isfinite(value) and value >= 0
)
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
LIST = ValueKind("a list", lambda value: isinstance(value, list))
TEXT = ValueKind("a string", lambda value: isinstance(value, str))
ANY = ValueKind("anything", lambda value: True)
NAMES = ValueKind(
    "a list of names", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)
TOKENS = ValueKind(
    "a token id or a list of ids",
    lambda value: all(type(each) is int for each in (value if isinstance(value, list) else [value])),
)
JUDGES = ("Classification", "QuestionAnswering", "RewardModel")
"""Ends of the names of classes whose head is not a language model's."""

CHECKED_KEYS: dict[str, ValueKind] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"), COUNT),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), COUNT),
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "n_positions"), COUNT),  # of GPT-2
    **dict.fromkeys(("intermediate_size",), INDEX),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), NUMBER),
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings"), POSITIVE),
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling", "quantization_config"), OBJECT),
    "architectures": NAMES,
}
"""The kind of value of each key that is checked here: at the top level, in parts that describe a text decoder, and in
RoPE. The family checks lists, such as one number per layer."""
PARTS = ("text_config", "transformer_layer_config", "rope_parameters", "rope_scaling")


def read_config_json(file: Path) -> dict[str, Any]:
    """Read the file. Raises CheckpointError if it is no JSON object, or if a value cannot belong to any model."""
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"there is no config.json that can be read ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json holds {type(config).__name__}, expected an object")
    for place, part in _parts("", config):
        for key, value in part.items():
            kind = CHECKED_KEYS.get(key)
            if key == "head_dim" and "qk_nope_head_dim" in part:  # the part of a head that rotates, which may be none
                kind = INDEX
            if kind is None or value is None or (isinstance(value, list) and kind is not NAMES):
                continue
            if not kind.holds(value):
                raise CheckpointError(f"{place}{key}={shown(value)}, expected {kind.allowed}")
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise CheckpointError(f"{place}num_attention_heads={heads} do not group over num_key_value_heads={groups}")
    return config


def loading_reason(error: Exception, config: Mapping[str, Any]) -> str:
    """The reason of transformers' error in one sentence. If it looked up a name in vain, such as an activation, a type
    of RoPE or a dtype, the sentence is about the setting that has this value."""
    name = error.args[0] if isinstance(error, KeyError) else getattr(error, "name", None)
    for place, part in _parts("", config) if isinstance(name, str) else ():
        for key, value in part.items():
            if value == name:
                return f"{place}{key}={shown(name)}, which transformers does not know; give a value that it has"
    trust = " If you trust it, give trust_remote_code=True (--trust-remote-code)"
    return first_line(error) + (trust if "trust_remote_code" in str(error) else "")


def _parts(place: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config and those of `PARTS` that it has; RoPE may have one part per layer type."""
    yield place, part
    for key, value in part.items():
        if isinstance(value, dict) and (key in PARTS or place.endswith(("rope_parameters.", "rope_scaling."))):
            yield from _parts(f"{place}{key}.", value)


StateDict = Mapping[str, torch.Tensor]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def is_unquantised(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a drafter's folder. Raises CheckpointError."""
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        with _reading(file):
            tensors |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read: the whole checkpoint, or its index's files; without both, any that are no
    adapter. So nothing that lies next to the weights is read as a part of them."""
    for name, others in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return sorted(set(_weight_map(index).values()))
        if found := [file for file in sorted(folder.glob(others)) if not is_adapter(file)]:
            return found
    raise CheckpointError("there is no *.safetensors and no pytorch_model*.bin")


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint, by tensor name: as its index says, and in files that the index does not
    list, as where MTP modules were copied next to a model. Reads no tensor. Empty without safetensors. Raises
    CheckpointError."""
    index, named = folder / "model.safetensors.index.json", dict[str, Path]()
    listed = _weight_map(index) if index.is_file() else {}
    for path in sorted({*folder.glob("*.safetensors")} - {*listed.values()}):
        if not is_adapter(path):
            with _reading(path), safe_open(path, "pt") as opened:
                named |= dict.fromkeys(opened.keys(), path)
    return named | listed


def is_adapter(file: Path) -> bool:
    """Is this an adapter of peft, by its name?"""
    return file.name.startswith("adapter_")


def is_adapter_alone(folder: Path) -> bool:
    """Does this folder hold an adapter of peft and no weights of a model?"""
    weights = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return (folder / ADAPTER_CONFIG).is_file() and all(map(is_adapter, weights))


def require_no_adapter(folder: Path, applied: bool) -> None:
    """Raise CheckpointError if transformers applied the adapter beside a model: its report is then the adapter's, and
    tensors that the model lacks would be random numbers. Without peft it applies none, which is logged."""
    if applied:
        raise CheckpointError(
            "it holds a peft adapter beside its model, and with both transformers does not report what the model "
            f"lacks; load it with transformers and give the loaded model, or move {ADAPTER_CONFIG} away"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        logger.warning("%s: the peft adapter beside the model is not applied; give a model that has it merged", folder)


def stored_tensor(file: Path, name: str) -> torch.Tensor:
    with _reading(file), safe_open(file, "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def require_language_model(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a config.json names a class that judges texts. With its embedding as head it would be
    loaded as a language model.

    A class without a head (`LlamaModel`) is read as in transformers: its head is the embedding if the config ties them,
    else it is missing, which is an error. Embedding models that name a language model's class cannot be told apart."""
    for name in config.get("architectures") or ():
        if str(name).endswith(JUDGES):
            raise CheckpointError(
                f"its class is {name}, which continues no text; give the checkpoint of a language model"
            )


def require_float_weights(folder: Path, model: nn.Module, unused: Iterable[str]) -> None:
    """Raise CheckpointError if a weight is stored in whole numbers, which mean nothing without a scale. unused: tensors
    that the model does not read, besides those that its class ignores."""
    ignored, unread = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (), set(unused)
    for path in sorted(folder.glob("*.safetensors")):
        with _reading(path), safe_open(path, "pt") as opened:
            stored = {name: opened.get_slice(name).get_dtype() for name in opened.keys() if name.endswith(".weight")}  # noqa: SIM118
        for name, dtype in stored.items():
            if name in unread or any(re.search(pattern, name) for pattern in ignored):
                continue
            if dtype.startswith(("I", "U")):
                raise CheckpointError(
                    f"{name} is stored in whole numbers ({dtype}), so it is quantised, and no quantization_config in "
                    "config.json says how; give a checkpoint that has one"
                )


def require_every_tensor(name: str, model: nn.Module, info: Mapping[str, Any]) -> list[str]:
    """Raise CheckpointError if tensors of a model, by transformers' info, are missing in the checkpoint `name` or
    have another shape there: they are random numbers. Returns the checkpoint's tensors that are not used."""
    for key, stored, made in sorted(info["mismatched_keys"])[:1]:
        raise CheckpointError(
            f"{name!r}: tensor {key} is {list(stored)}, and by the config.json it would be {list(made)}; give a "
            "config.json and weights that belong together"
        )
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        near = difflib.get_close_matches(missing[-1], unused, n=1, cutoff=0)
        others = f" (and has {len(unused)} others, such as {near[0]})" if near else ""
        raise CheckpointError(
            f"{name!r}: the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, {missing[0]} first"
            f"{others}; they would be random numbers"
        )
    return unused


def size_of_weights(folder: Path) -> int:
    """Bytes of the files of a checkpoint's weights; 0: there are none."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return sum(file.stat().st_size for file in files)


def damaged_file(folder: Path) -> str | None:
    """A sentence about the first fault in a checkpoint's files: they are an adapter's, one that an index names is
    missing, one is cut off or damaged, or an index lacks metadata; None: there is no fault."""
    if is_adapter_alone(folder):
        return f"it {ADAPTER_ALONE}"
    try:
        for index in sorted(folder.glob("*.index.json")):
            for file in sorted(set(_weight_map(index).values())):
                if not file.is_file():
                    return f"the checkpoint lacks {file.name}, which {index.name} names"
            if "metadata" not in json.loads(index.read_text("utf-8")):
                return f'{index.name} has no "metadata", which transformers reads; add "metadata": {{}} to it'
        for file in sorted(folder.glob("*.safetensors")):
            with _reading(file), safe_open(file, "pt"):
                pass
    except CheckpointError as error:
        return str(error)
    return None


def require_generation_config(folder: Path) -> None:
    """Raise CheckpointError for a damaged generation_config.json, or one whose end tokens are not ids. transformers
    would ignore such a file, and with it the tokens that end an answer."""
    file = folder / "generation_config.json"
    if file.is_file():
        with _reading(file):
            ends = dict(json.loads(file.read_text("utf-8"))).get("eos_token_id")
        if ends is not None and not TOKENS.holds(ends):
            raise CheckpointError(f"{file.name}: eos_token_id={shown(ends)}, expected {TOKENS.allowed}")


def _weight_map(index: Path) -> dict[str, Path]:
    """The file of each tensor according to an index."""
    with _reading(index):
        found = json.loads(index.read_text("utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in found.items()}


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Convert any exception that a broken or hostile file raises in the block into a CheckpointError about the file."""
    try:
        yield
    except Exception as error:
        fault = "is not there, though an index names it"
        if file.exists():
            size = file.stat().st_size if file.is_file() else 0
            fault = f"cannot be read ({first_line(error)}); it has {size:,} bytes and is cut off or damaged"
        raise CheckpointError(f"{file.name} {fault}; download or copy it again") from error


def write_folder(folder: str | Path, config: Mapping[str, Any], state: StateDict) -> None:
    """Write config.json and model.safetensors. Raises CheckpointError if tensors cannot be written."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    with naming_file(out / "config.json"):
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    weights = out / "model.safetensors"
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{str(weights)!r} cannot be written: {first_line(error)}") from error


def fill_head(make: Callable[[], AnyModule], state: StateDict) -> AnyModule:
    """Make a head and load these tensors. Raises CheckpointError unless names and shapes match and all types are
    floating with 16 bits or more."""
    with torch.device("meta"):
        expected = make().state_dict()
    shapes = {key: (list(state[key].shape), list(t.shape)) for key, t in expected.items() if key in state}
    faults = [f"{key} is {has}, the config says {says}" for key, (has, says) in shapes.items() if has != says]
    faults += [f"{key} is missing" for key in expected if key not in state]
    faults += [f"{key} is not known" for key in sorted(state.keys() - expected.keys())]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(f"tensor {faults[0]}{more}")
    for key, tensor in state.items():
        if not is_unquantised(tensor):
            raise CheckpointError(f"tensor {key} is {tensor.dtype}, expected a floating type of 16 bits or more")
    head = make()
    head.load_state_dict(state)
    return head


def equals_weight(tensor: Any, module: nn.Module | None) -> bool:
    """Is this tensor a copy of the module's weight? False for a packed module, which has no plain weight."""
    weight: Any = None if module is None or packed_of(module) else getattr(module, "weight", None)
    same_kind = weight is not None and tensor.shape == weight.shape and is_unquantised(tensor)
    return same_kind and torch.equal(tensor.to(weight), weight)


def take_target_ids(state: dict[str, torch.Tensor], target: TargetInfo) -> torch.Tensor | None:
    """Target token of each draft token (row of `lm_head.weight`); None: the full vocabulary. Removes d2t and t2d from
    `state`. d2t holds offsets: draft token j is target token j + d2t[j]."""
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    size = len(state["lm_head.weight"]) if "lm_head.weight" in state else None
    if d2t is None:
        if size not in (None, target.vocab_size):
            raise CheckpointError(
                f"lm_head has {size} rows, the target {target.vocab_size} tokens, and there is no d2t"
            )
        return None
    if size != len(d2t):
        raise CheckpointError(f"d2t maps {len(d2t)} draft tokens, lm_head has {size or 'no'} rows")
    ids = torch.arange(len(d2t), device=d2t.device) + d2t.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise CheckpointError(
            f"d2t leads to tokens {low}..{high}, target {target.name} has {target.vocab_size}; the drafter is another "
            "target's, or its d2t holds ids, where offsets are expected"
        )
    if len(ids.unique()) != len(ids):
        raise CheckpointError("d2t leads two draft tokens to one target token")
    if t2d is not None and (int(t2d.sum()) != len(ids) or high >= len(t2d) or not bool(t2d[ids].all())):
        raise CheckpointError("d2t and t2d disagree about which target tokens are in the draft vocabulary")
    return ids
