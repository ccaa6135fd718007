"""Loads checkpoints from disk or the hub into modules, with no silently random weights.

transformers' `from_pretrained` fills missing tensors with random numbers and only logs it; here that is an error.
transformers does everything else (formats, sharding, key mapping, quantisation, the hub), and its loading arguments are
passed on: revision, token, trust_remote_code, quantization_config, ...
"""

import difflib
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from huggingface_hub import constants, snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.hub import cached_file

from specdec.draft_models.checkpoints import checkpoint_files
from specdec.draft_models.registry import WORDS, building, require_target
from specdec.errors import CheckpointError, ConfigError, SpecDecError, UnsupportedModelError, about, first_line, shown
from specdec.loading.read_tokenizer import read_tokenizer
from specdec.models.described_model import META, model_on_meta, supported_layout
from specdec.models.probe import refusing
from specdec.models.published import BUNDLED_NAMES, resolve_name
from specdec.models.quantised.packed_quantizer import PackedConfig, without_quantization
from specdec.models.quantised.quantised_weights import require_values_read
from specdec.models.quantised.quantization_config import Quantization, quantization_of, stored_config
from specdec.models.weight_storage import stored_weights, weights_in_words
from specdec.modules.transformers_names import auto_class, config_read_as
from specdec.settings.plain_arguments import as_dtype

logger = logging.getLogger("specdec")

NO_GGUF = "GGUF files are not read; give a checkpoint of safetensors"
NO_NAMES = ("", "none", "null", "nan")
"""Strings that mean a missing value."""

SHARED_OPTIONS = ("token", "trust_remote_code", "cache_dir", "local_files_only", "force_download")
"""The target's loading arguments that its drafter inherits unless it has its own: access, not content."""
HUB_OPTIONS = (*SHARED_OPTIONS, "revision", "subfolder")
"""Loading arguments that locate a file; the others control loading."""
SNAPSHOT_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download", "revision")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a user named (bundled name, folder or hub id), with transformers' loading arguments. It is read
    only when a property or method needs it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_name(cls, name: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> "Checkpoint":
        return cls(os.fspath(name), _understood(options or {}))

    @property
    def path(self) -> str:
        """The name for transformers: the folder of a bundled name, else the name."""
        return resolve_name(os.path.expanduser(self.name))

    @property
    def hub_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in HUB_OPTIONS}

    @cached_property
    def config_file(self) -> Path:
        """Its config.json. Raises CheckpointError in one sentence."""
        known = f"give a checkpoint folder, a hub id, or one of {', '.join(BUNDLED_NAMES)}"
        if self.name.strip().lower() in NO_NAMES:
            raise CheckpointError(f"{self.name!r} names no checkpoint; {known}; for no drafter, pass None")
        if self.name.lower().endswith(".gguf"):
            raise CheckpointError(f"{self.name!r}: {NO_GGUF}")
        if Path(self.path).is_dir():
            file = Path(self.path, str(self.options.get("subfolder", "")), "config.json")
            if not file.is_file():
                if any(file.parent.glob("*.gguf")):
                    raise CheckpointError(f"{self.name!r} holds no config.json: {NO_GGUF}")
                if checkpoint_files.is_adapter_alone(file.parent):
                    raise CheckpointError(f"{self.name!r} {checkpoint_files.ADAPTER_ALONE}")
                raise CheckpointError(f"{self.name!r} holds no config.json, so it is not a Hugging Face checkpoint")
            return file
        if self.name.startswith((".", "/", "~")) or self.name.count("/") > 1:
            raise CheckpointError(f"{self.name!r} is not a folder; {known}")
        meant = difflib.get_close_matches(self.name, (*BUNDLED_NAMES, *WORDS), n=1, cutoff=0.8)
        if meant:
            bundled = ", ".join(BUNDLED_NAMES)
            raise CheckpointError(f"no checkpoint {self.name!r} here; did you mean {meant[0]!r}? Bundled are {bundled}")
        require_hub(self.name, self.hub_options)
        try:
            return Path(str(cached_file(self.path, "config.json", **self.hub_options)))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no checkpoint {self.name!r} here or on the hub; {known} ({first_line(error)})"
            ) from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of its config.json. Raises CheckpointError if they cannot belong to any model, see
        `read_config_json`."""
        file = self.config_file
        with about(f"the config.json of {self.name!r} cannot be used"):
            return checkpoint_files.read_config_json(file)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """Its stored `quantization_config`; None: it has none."""
        config = self.config
        with about(f"{self.name!r} cannot be loaded"):
            return stored_config(config)

    @property
    def promised(self) -> Quantization | None:
        """The weights' formats by that config, if specdec reads them as packed weights; None: transformers reads
        them."""
        stored = self.quantization
        with about(f"{self.name!r} cannot be loaded"):
            return None if stored is None else quantization_of(stored)

    def hf_config(self) -> Any:
        """Its config, read by transformers. Raises CheckpointError in one sentence."""
        _ = self.quantization
        try:
            read = config_read_as(self.config, self.path) or AutoConfig.from_pretrained(self.path, **self.hub_options)
            for part in (read, *(getattr(read, name, None) for name in read.sub_configs)):
                if part is not None:
                    part.return_dict = True  # otherwise modules return tuples without names
            return read
        except Exception as error:  # its checks raise their own errors, and unchecked values raise anything
            reason = checkpoint_files.loading_reason(error, self.config)
            raise CheckpointError(f"the config.json of {self.name!r} cannot be used: {reason}") from error

    def folder(self) -> Path:
        """The folder of all its files; downloads them from the hub if needed."""
        folder = self.config_file.parent
        if Path(self.path).is_dir():
            return folder
        options = {name: value for name, value in self.options.items() if name in SNAPSHOT_OPTIONS}
        patterns = ["*.json", "*.safetensors", "pytorch_model*.bin"]
        return Path(snapshot_download(self.name, allow_patterns=patterns, **options)) / str(
            self.options.get("subfolder", "")
        )

    @torch.inference_mode(False)  # ordinary tensors count their updates
    def load(self, dtype: torch.dtype, device: torch.device, config: Any = None) -> PreTrainedModel:
        """Load it in the causal-LM class of its config (`hf_config`), with every tensor from the checkpoint."""
        config = self.hf_config() if config is None else config
        with about(f"{self.name!r} cannot be loaded"):
            checkpoint_files.require_language_model(self.config)
            checkpoint_files.require_generation_config(self.config_file.parent)
        options = {"dtype": dtype, **self.options}
        options.pop("ignore_mismatched_sizes", None)  # mismatched tensors are reported below
        asked = options.get("quantization_config")
        promised = self.promised if asked is None else None
        if promised is not None:
            config = without_quantization(config)
            options["quantization_config"] = PackedConfig(promised)
            if device.type != "cpu":  # packed on the device, file by file
                options.setdefault("device_map", {"": device})
        with self._explaining(config):
            if isinstance(asked, dict) and self.quantization is not None:  # only objects override a stored config
                options["quantization_config"] = AutoQuantizationConfig.from_dict(asked)
            arguments = {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
            load = partial(auto_class(config).from_pretrained, self.path, **arguments)
            plain = self.quantization is None and asked is None
            described: Any = load(device_map={"": META}) if plain and self._holds_too_little(config, dtype) else None
        if described is not None:  # before minutes of random numbers
            checkpoint_files.require_every_tensor(self.name, *described)
        with self._explaining(config):
            loaded: Any = load()
        model, info = loaded
        with about(f"{self.name!r} cannot be loaded"):
            applied = getattr(model, "_hf_peft_config_loaded", False)
            checkpoint_files.require_no_adapter(self.config_file.parent, applied)
            require_values_read(model, info["unexpected_keys"])
            if self.quantization is None:
                checkpoint_files.require_float_weights(self.config_file.parent, model, info["unexpected_keys"])
        unused = checkpoint_files.require_every_tensor(self.name, model, info)
        if unused:
            logger.info("%s: %d tensors of the checkpoint are not used, %s first", self.name, len(unused), unused[0])
        placed = "device_map" in options or getattr(model, "is_quantized", False)  # quantisers place modules themselves
        ready: PreTrainedModel = (model if placed else model.to(device=device)).eval()
        return ready

    def _holds_too_little(self, config: Any, dtype: torch.dtype) -> bool:
        """Have its files fewer bytes than its config's model has numbers? Then tensors are missing or too small."""
        size = checkpoint_files.size_of_weights(self.config_file.parent)
        trusted = {name: value for name, value in self.options.items() if name == "trust_remote_code"}
        return size > 0 and size < stored_weights(model_on_meta(config, dtype, **trusted)).numbers

    @contextmanager
    def _explaining(self, config: Any) -> Iterator[None]:
        """Context in which transformers builds and loads the model; its errors become one sentence."""
        try:
            with building(self.config):
                yield
        except MemoryError:
            raise
        except Exception as error:  # transformers raises many kinds of errors for a checkpoint
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is not None and unknown[1] in self.options:
                raise ConfigError(f"{unknown[1]} is not a loading argument of transformers; leave it out") from error
            reason = checkpoint_files.damaged_file(self.config_file.parent)
            from_files = reason is not None or isinstance(error, (OSError, RuntimeError, SafetensorError))
            if isinstance(error, SpecDecError):  # such as broken promises about packed weights
                reason = str(error)
            raise (CheckpointError if from_files else UnsupportedModelError)(
                f"{self.name!r} ({config.model_type}) cannot be loaded: "
                f"{reason or checkpoint_files.loading_reason(error, self.config)}"
            ) from error


def _understood(options: Mapping[str, Any]) -> dict[str, Any]:
    """Loading arguments with `torch_dtype` renamed to `dtype`. Raises ConfigError for those that cannot be honoured."""
    if options.get("gguf_file") is not None:
        raise ConfigError(f"gguf_file={shown(options['gguf_file'])}: {NO_GGUF}")
    understood = dict(options)
    old = as_dtype(understood.pop("torch_dtype", None))
    new = as_dtype(understood.pop("dtype", None))
    if old is not None and new is not None and old != new:
        raise ConfigError(f"torch_dtype={old} and dtype={new} disagree; leave one out")
    dtype = old if new is None else new
    return understood if dtype is None else {**understood, "dtype": dtype}


def load_target(
    target: Any,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    options: Mapping[str, Any],
    on_host: bool = False,
) -> PreTrainedModel:
    """A causal LM loaded by name, or the given model, with peft adapters in place.

    on_host: keep a loaded model in host memory, where safetensors are mapped and read on demand. Raises ConfigError for
    any other target, in one sentence that prints no model.
    """
    if isinstance(target, (str, os.PathLike)):
        checkpoint = Checkpoint.from_name(target, options)
        require_target(f"target={checkpoint.name!r}", checkpoint.config)
        asked = checkpoint.options.get("dtype")
        if asked is not None and dtype is not None and as_dtype(asked) != dtype:
            raise ConfigError(
                f"dtype={asked} among the loading arguments, but dtype={dtype} in the EngineConfig; leave one out"
            )
        config = checkpoint.hf_config()
        with refusing(checkpoint.name, "its config is not that of a decoder-only causal language model"):
            supported_layout(checkpoint.name, config.get_text_config())  # before weights are downloaded and read
        where = pick_device(device)
        place = torch.device("cpu") if on_host else where
        loaded = checkpoint.load(pick_dtype(dtype, where, config), place, config)
        logger.info("target %s: weights in %s", checkpoint.name, weights_in_words(loaded))
        return loaded
    if options:
        raise ConfigError(
            f"{', '.join(sorted(options))}: loading arguments are for names, and a loaded model was given"
        )
    model = unwrapped(target, "target")
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"target is {shown(target)}; expected a hub id, a folder, a bundled name or a transformers model"
        )
    require_target(f"target {shown(target)}", model.config.to_dict())
    _require_same("device", None if device is None else torch.device(device).type, model.device.type)
    _require_same("dtype", dtype, model.dtype)
    return model


def load_tokenizer(name: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Any | None:
    """The checkpoint's tokenizer, or None if it has none that can be loaded (prompts must then be token ids)."""
    checkpoint = Checkpoint.from_name(name, options)
    if not os.path.isdir(checkpoint.path):
        require_hub(checkpoint.name, checkpoint.hub_options)
    try:
        tokenizer = read_tokenizer(checkpoint.path, **checkpoint.hub_options)
    except Exception as error:  # damaged files raise anything
        folder = Path(checkpoint.path)
        if not folder.is_dir() or any(folder.glob("tokenizer*")):
            logger.warning("the tokenizer of %r cannot be loaded: %s", checkpoint.name, first_line(error))
        return None
    # without files, transformers makes up a tokenizer of only special tokens for some model types
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_ids)) else None


def pick_tokenizer(asked: Any | None, target: Any, options: Mapping[str, Any]) -> Any | None:
    """The given tokenizer, or the one of the given name; else the target's, or None for a loaded module."""
    if isinstance(asked, (str, os.PathLike)):
        tokenizer = load_tokenizer(asked, options)
        if tokenizer is None:
            raise ConfigError(f"tokenizer={str(asked)!r}: no tokenizer there; give a folder, a hub id or a tokenizer")
        return tokenizer
    if asked is None:
        if not isinstance(target, (str, os.PathLike)):
            return None
        own = load_tokenizer(target, options)
        if own is None:
            logger.warning(
                "%s has no tokenizer: prompts must be token ids, and outputs have no text; give tokenizer=... for text",
                os.fspath(target),
            )
        return own
    if not callable(getattr(asked, "decode", None)):
        raise ConfigError(f"tokenizer is {shown(asked)}; expected a tokenizer or its name")
    return asked


def pick_device(device: str | torch.device | None) -> torch.device:
    """The given device, else the first GPU, else the CPU. Raises ConfigError if this machine cannot use it."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # torch's errors have no common base
        reason = first_line(error).partition(". ")[0]  # torch's message has many lines
        devices_here = f"; CUDA devices here: {torch.cuda.device_count()}" if str(device).startswith("cuda") else ""
        raise ConfigError(
            f"device={str(device)!r} cannot be used with torch {torch.__version__} ({reason}){devices_here}; "
            "give 'cpu', or leave it out"
        ) from error
    return torch.device(device)


def pick_dtype(dtype: torch.dtype | None, device: torch.device, config: Any) -> torch.dtype:
    """The given dtype, else float32 on a CPU (bf16 is slower there), else the checkpoint's."""
    if dtype is not None:
        return dtype
    if device.type == "cpu":
        return torch.float32
    stored = as_dtype(getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None))
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def unwrapped(model: Any, role: str) -> Any:
    """The base of a peft model, with its adapters in place. Raises ConfigError for compiled models and learned
    prompts."""
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"{role} is a torch.compile'd {type(model._orig_mod).__name__}; give the model itself, {role}._orig_mod"
        )
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    adapter = model.active_peft_config
    if getattr(adapter, "is_prompt_learning", False):
        raise ConfigError(
            f"{role} is a peft model with learned prompts ({adapter.peft_type}), which live outside the model; "
            "adapters in place (LoRA and its kin) are supported"
        )
    return model.get_base_model()


def _require_same(name: str, asked: object, actual: object) -> None:
    if asked is not None and asked != actual:
        raise ConfigError(
            f"{name}={asked} in the EngineConfig, but the loaded model has {actual}; convert it, or leave it None"
        )


HUB_SECONDS = 3.0
"""Seconds to wait for the first connection."""


def require_hub(name: str, options: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint is not cached and the hub (or its proxy) cannot be reached.

    options: loading arguments of transformers. Offline mode skips the check.
    """
    if options.get("local_files_only") or constants.HF_HUB_OFFLINE or _is_cached(name, options):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT", constants.ENDPOINT))
    proxies = {} if proxy_bypass(address.hostname or "") else getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy:
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=HUB_SECONDS).close()
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint {name!r} here, and {address.hostname} cannot be reached to look for it there "
            f"({error.strerror or error}); give a folder or a name that is in the cache, or connect to the network"
        ) from error


def _is_cached(name: str, options: Mapping[str, Any]) -> bool:
    try:
        return cached_file(name, "config.json", **{**options, "local_files_only": True}) is not None
    except (OSError, ValueError):
        return False
