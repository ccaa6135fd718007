"""Checks that a device exists, before anything is loaded onto it."""

import torch

from specdec.errors import ConfigError


def require_device(device: str | torch.device | None) -> None:
    """Raises ConfigError in one sentence where `device` cannot be used on this machine; None asks for nothing."""
    if device is None:
        return
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # torch has no common base for them
        # the first sentence: torch's message continues over many lines
        reason = (str(error) or type(error).__name__).strip().splitlines()[0].partition(". ")[0]
        there = f"; CUDA devices here: {torch.cuda.device_count()}" if str(device).startswith("cuda") else ""
        raise ConfigError(
            f"device={str(device)!r} cannot be used with torch {torch.__version__} ({reason}){there}; "
            "give 'cpu', or leave it out"
        ) from error
