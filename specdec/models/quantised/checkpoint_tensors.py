"""The tensors of a checkpoint by name, shape and dtype, read from the headers of its files, and those among them that
together make a quantised weight."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.models.quantised.formats import Format

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""As safetensors names them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.key)
        return tensor

    def on_meta(self, *leading: int) -> torch.Tensor:
        return torch.empty((*leading, *self.shape), dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight: what precedes the names of its tensors, and these by name."""

    stem: str
    format: Format
    tensors: Mapping[str, StoredTensor]


def stored_tensors(files: Iterable[str]) -> dict[str, StoredTensor]:
    """By key, in the order of the files. Raises CheckpointError for files that are no safetensors."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise CheckpointError(f"{Path(file).name} is no safetensors file; packed weights are read from no other")
        with Path(file).open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for key, entry in header.items():
            if key != "__metadata__" and entry["dtype"] in DTYPES:
                stored[key] = StoredTensor(key, file, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    return stored


def stored_weights(stored: Mapping[str, StoredTensor], formats: Iterable[Format]) -> list[StoredWeight]:
    """The quantised weights. Raises UnsupportedModelError where one has a tensor that its format does not know, and
    CheckpointError where one lacks a tensor."""
    found = []
    for format in formats:
        by_stem: dict[str, dict[str, StoredTensor]] = {}
        for key, tensor in stored.items():
            stem, _, name = key.rpartition(format.joint)
            by_stem.setdefault(stem, {})[name] = tensor
        marker = format.tensors[0]
        for stem, tensors in by_stem.items():
            if marker not in tensors or tensors[marker].dtype != format.dtype:
                continue
            tensors.pop("bias", None)
            unknown = sorted(set(tensors) - {*format.tensors, *format.optional})
            if unknown:
                raise UnsupportedModelError(
                    f"{stem} has {unknown[0]}, which is not read: a weight in {format.title} has "
                    f"{', '.join((*format.tensors, *format.optional))}"
                )
            if lacking := [name for name in format.tensors if name not in tensors]:
                raise CheckpointError(f"the checkpoint lacks {stem}{format.joint}{lacking[0]}")
            found.append(StoredWeight(stem, format, tensors))
    return found
