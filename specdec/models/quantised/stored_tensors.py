"""Lists the tensors of a checkpoint by the headers of its safetensors files. Values are read only on demand."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specdec.errors import CheckpointError, UnsupportedModelError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
"""torch's dtypes by their names in safetensors."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint. read: returns its values."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def stored_tensors(files: Iterable[str]) -> dict[str, StoredTensor]:
    """Tensors by key, in the order of the files. Raises CheckpointError for a file that is not safetensors, and
    UnsupportedModelError for a dtype that torch lacks."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise CheckpointError(f"{Path(file).name} is no safetensors file; packed weights are read from no other")
        with Path(file).open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        open_once = cache(partial(safe_open, file, framework="pt"))  # opening parses the whole header
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise UnsupportedModelError(f"{key} is stored in {entry['dtype']}, which is not read")
            read = partial(_read, open_once, key)
            stored[key] = StoredTensor(key, tuple(entry["shape"]), DTYPES[entry["dtype"]], read)
    return stored


def _read(open_file: Callable[[], Any], key: str) -> torch.Tensor:
    tensor: torch.Tensor = open_file().get_tensor(key)
    return tensor
