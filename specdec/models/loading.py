"""Checkpoints from disk or the hub into modules, with nothing silently random.

`from_pretrained` fills tensors that a checkpoint lacks with random numbers and only logs it; here that is an error.
Everything else (formats, sharding, key mapping, the hub) is transformers' work.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from specdec.draft_models.base import Drafter, TargetInfo
from specdec.draft_models.eagle3 import eagle3_drafter
from specdec.draft_models.eagle3_config import is_eagle3_config
from specdec.draft_models.eagle3_format import read_config
from specdec.draft_models.registry import (
    MODEL_FREE_DRAFTERS,
    constructible_assistants,
    drafter_from_module,
    require_known_drafter,
)
from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.models.bundled import BUNDLED_NAMES, resolve_name

logger = logging.getLogger("specdec")


def find_config(name: str) -> Path:
    """The config.json behind a bundled name, a local path or a hub id. Raises CheckpointError in one sentence."""
    path = resolve_name(name)
    known = f"give a checkpoint folder, a hub id, or one of {', '.join(BUNDLED_NAMES)}"
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise CheckpointError(f"{name!r} holds no config.json, so it is not a Hugging Face checkpoint")
        return Path(path) / "config.json"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{name!r} is not a folder; {known}")
    try:
        return Path(str(cached_file(path, "config.json")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no checkpoint {name!r} here or on the hub; {known} ({_first_line(error)})") from error


def load_config(name: str) -> Any:
    """The HF config behind a bundled name, a local path or a hub id. Raises CheckpointError in one sentence."""
    find_config(name)
    try:
        return AutoConfig.from_pretrained(resolve_name(name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the config.json of {name!r} cannot be used: {_first_line(error)}") from error


def _first_line(error: Exception, most: int = 200) -> str:
    """The first sentence of another library's message, at a readable length."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= most else line[:most] + "..."


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, config: Any = None) -> PreTrainedModel:
    """A target or a drafter, in the causal-LM class of its config, with every tensor from the checkpoint.

    `config`: what `load_config(name)` gave, if it was read before.
    """
    config = load_config(name) if config is None else config
    try:
        with constructible_assistants():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                resolve_name(name), config=config, dtype=dtype, output_loading_info=True
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        kind = UnsupportedModelError if isinstance(error, ValueError) else CheckpointError
        raise kind(f"{name!r} ({config.model_type}) cannot be loaded: {_first_line(error)}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{name!r}: the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, {missing[0]} first; "
            "they would be random numbers"
        )
    if info["unexpected_keys"]:
        logger.info("%s: %d tensors of the checkpoint are not used", name, len(info["unexpected_keys"]))
    ready: PreTrainedModel = model.to(device=device).eval()
    return ready


def load_drafter(name: str, target: TargetInfo) -> Drafter:
    """A drafter by word ("ngram"), bundled name, folder or hub id, bound to the target."""
    if name in MODEL_FREE_DRAFTERS:
        return MODEL_FREE_DRAFTERS[name]()
    try:
        folder = find_config(name).parent
        if is_eagle3_config(read_config(folder)):  # in formats that AutoConfig cannot read
            if not Path(resolve_name(name)).is_dir():
                folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "pytorch_model*.bin"]))
            return eagle3_drafter(folder, target)
        config = load_config(name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; drafters by name: {', '.join(MODEL_FREE_DRAFTERS)}") from error
    require_known_drafter(str(config.model_type), name)
    return drafter_from_module(load_model(name, dtype=target.dtype, device=target.device, config=config), target)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, or None when it ships none (prompts are then token ids)."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_name(name))
    except (OSError, ValueError, KeyError):
        return None
    # for some model types transformers makes up a tokenizer of special tokens alone where there are no files
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_ids)) else None


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, else the first GPU, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(dtype: torch.dtype | None, device: torch.device, config: Any) -> torch.dtype:
    """The dtype asked for, else float32 on the CPU (bf16 is slower there), else the checkpoint's."""
    if dtype is not None:
        return dtype
    if device.type == "cpu":
        return torch.float32
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(stored, str):
        stored = getattr(torch, stored.removeprefix("torch."), None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16
