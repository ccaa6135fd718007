"""From the shell's words to the runtime's settings; what the commands share."""

import sys
from typing import Any

import torch
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.models.devices import require_device
from specdec.progress import working


def quiet_libraries() -> None:
    """No warnings and no bars of transformers; a download shows its own on a terminal, as it may take long."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if sys.stderr.isatty():
        enable_progress_bars()
    else:
        disable_progress_bars()


def engine_config(batch_size: int, dtype: str | None, device: str | None, **sizes: Any) -> EngineConfig:
    """dtype: a name of torch's; sizes: other settings. Raises ConfigError where the device is not there."""
    of_torch = getattr(torch, dtype) if dtype else None
    config = EngineConfig(max_batch_size=batch_size, dtype=of_torch, device=device, **sizes)
    require_device(config.device)
    return config


def load_engine(target: str, drafter: str, spec: SpecConfig, config: EngineConfig) -> Engine:
    """drafter: as `drafter_name` takes it."""
    with working(f"loading {target}"):
        return Engine.from_pretrained(target, drafter_name(target, drafter), spec=spec, config=config)


def drafter_name(target: str, drafter: str) -> str | None:
    """'auto' is the bundled target's own drafter, and none for any other target."""
    if drafter == "auto":
        return "tiny-gemma4-mtp" if target == "tiny-gemma4" else None
    return None if drafter == "none" else drafter
