"""What a figure was measured with: the pair by name, the device, and the versions of the libraries below."""

import platform
from pathlib import Path

import torch
import transformers

from specdec.errors import ConfigError

VERSIONS = f"torch {torch.__version__}, transformers {transformers.__version__}"


def pair_names(target: str | Path, drafter: str | Path | None) -> tuple[str, str | None]:
    """Target and drafter as the engine takes them; the word "none" is None."""
    return _name("target", target), None if drafter in (None, "none") else _name("drafter", drafter)


def hardware(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _name(what: str, value: object) -> str:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ConfigError(f"{what} is a {type(value).__name__}; a hub id, a folder or a bundled name is wanted here")
    return str(value)
