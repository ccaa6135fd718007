"""Conditions of a measurement: names of the pair, the device, and library versions."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import torch
import transformers

from specdec import __version__
from specdec.errors import ConfigError

VERSIONS = f"torch {torch.__version__}, transformers {transformers.__version__}"


def pair_names(target: str | Path, drafter: str | Path | None) -> tuple[str, str | None]:
    """Target and drafter as the engine takes them; "none" becomes None."""
    return _name("target", target), None if drafter in (None, "none") else _name("drafter", drafter)


def hardware(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def conditions(device: torch.device, command: str) -> dict[str, str]:
    """Everything that a figure may depend on, in words; unknown values are empty."""
    return {
        "device": hardware(device),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "triton": next((found.version for found in distributions(name="triton")), ""),
        "specdec": __version__,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
    }


def _commit() -> str:
    """Commit of the checkout that the package runs from, with `+` if it has changes; empty without a checkout."""
    described = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _name(what: str, value: object) -> str:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ConfigError(f"{what} is a {type(value).__name__}; a hub id, a folder or a bundled name is expected here")
    return str(value)
