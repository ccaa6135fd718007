"""Reads drafters' folders: config.json by the table of its format, tensors by the names of the head's modules.

A format (`drafter_formats.py`) is a table of keys. A key that is set must be one of: read; compared with the tensors
and the target; set to a value that changes nothing; or harmless by name. Any other key is refused by name, so that no
head runs with half of its config.
"""

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.activations import ACT2FN

from specdec.draft_models.base import TargetInfo
from specdec.draft_models.checkpoints.checkpoint_files import (
    ANY,
    NUMBER,
    ValueKind,
    read_config_json,
    read_tensors,
)
from specdec.errors import CheckpointError, UnsupportedModelError, counted

Config = Mapping[str, Any]
HeadSettings = dict[str, Any]

LAYER_TYPES = ("full_attention", "sliding_attention")
QWEN3_HEAD_DIM, QWEN3_FULL_LAYERS = 128, 28
"""Defaults of Qwen3's config for head_dim and max_window_layers."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    # the numbers that each type needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROPE_KEYS: dict[str, ValueKind] = {
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor"), NUMBER),
    **dict.fromkeys(("low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"), NUMBER),
    **dict.fromkeys(("partial_rotary_factor", "rope_theta"), NUMBER),
    **dict.fromkeys(("rope_type", "truncate"), ANY),
    **dict.fromkeys(("mrope_section", "mrope_interleaved"), ANY),  # a text token's three positions are equal
}


class Key(NamedTuple):
    """A row of a format's table.

    kind: the kind of its values.
    field: the spec field that it sets; empty: code reads it.
    only: accepted values, the usual one first; empty: all of the kind.
    required: every config has it.
    places: objects of the config that may hold it ("": the top level); empty: any.
    merged: its value means the same in every place.
    """

    kind: ValueKind = ANY
    field: str = ""
    only: tuple[Any, ...] = ()
    required: bool = False
    places: tuple[str, ...] = ()
    merged: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: one way of writing a head to a folder.

    name: plural, for messages.
    matches: is this config.json in the format?
    places: objects of the config whose keys count like top-level keys.
    layers: accepted values of `model_type`, the default first.
    layer_words: the same for messages.
    keys: the table.
    harmless: further keys that change nothing.
    tensors: (pattern in a file, replacement that gives the head's module name), applied in order; None: the tensor is
        not read.
    why_refused: a sentence if the config belongs to a family that does not run here, or None.
    sees_edge: a key exactly one window away is visible too.
    """

    name: str
    matches: Callable[[Config], bool]
    places: tuple[str, ...]
    layers: tuple[str, ...]
    layer_words: str
    keys: Mapping[str, Key]
    harmless: re.Pattern[str]
    tensors: tuple[tuple[str, str | None], ...]
    why_refused: Callable[[Config], str | None] = lambda config: None
    sees_edge: bool = False

    def key_at(self, place: str, name: str) -> Key | None:
        """The table's row for a key in this object of the config."""
        key = self.keys.get(name)
        return None if key is None or (key.places and place not in key.places) else key

    def module_name(self, tensor: str) -> str | None:
        """The head's module name for a tensor in a file; None: the tensor is not read."""
        for pattern, name in self.tensors:
            if name is None and re.search(pattern, tensor):
                return None
            tensor = re.sub(pattern, name or "", tensor)
        return tensor


class HeadFiles(NamedTuple):
    """Contents of a folder: its config.json, the settings that its format reads, and tensors by module name."""

    format: Format
    config: Config
    settings: HeadSettings
    state: dict[str, torch.Tensor]

    @property
    def num_layers(self) -> int:
        """Number of draft layers that have tensors."""
        return 1 + max((int(key.split(".")[1]) for key in self.state if re.match(r"layers\.\d+\.", key)), default=-1)

    def fields(self) -> dict[str, Any]:
        """Spec fields that the config states directly, and the biases. Raises CheckpointError or UnsupportedModelError
        if heads do not group, if RoPE cannot rotate them, or if the activation is unknown."""
        rows, settings = self.format.keys.items(), self.settings
        fields = {key.field: settings[name] for name, key in rows if key.field and name in settings}
        heads, kv_heads, head_dim = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
        if not kv_heads or heads % kv_heads:
            raise CheckpointError(f"num_attention_heads={heads} do not group over num_key_value_heads={kv_heads}")
        if head_dim % 2 or not head_dim:
            raise UnsupportedModelError(f"head_dim={head_dim}; RoPE turns pairs of numbers, so it must be even")
        if fields.get("hidden_act", "silu") not in ACT2FN:
            raise UnsupportedModelError(f"hidden_act={fields['hidden_act']!r} is not an activation of transformers")
        return {**fields, "biases": self.biases}

    @property
    def biases(self) -> frozenset[str]:
        """Names of the linear layers that have a bias."""
        return frozenset(name.removesuffix(".bias") for name in self.state if name.endswith(".bias"))

    def require_same(self, stated: Mapping[tuple[str, str], Any], target: TargetInfo) -> None:
        """Raise CheckpointError if a key contradicts another source. stated: (key, the other source) -> the value that
        a set key must have; None: any value."""
        everywhere: Mapping[tuple[str, str], Any] = {
            ("num_hidden_layers", "the file"): self.num_layers,
            ("target_hidden_size", f"target {target.name}"): target.hidden_size,
            ("attention_bias", "the file, by its self_attn.q_proj.bias,"): "layers.0.self_attn.q_proj" in self.biases,
            ("mlp_bias", "the file, by its mlp.gate_proj.bias,"): "layers.0.mlp.gate_proj" in self.biases,
        }
        for (key, where), expected in {**everywhere, **stated}.items():
            if expected is not None and self.settings.get(key, expected) != expected:
                raise CheckpointError(
                    f"{key}={self.settings[key]}, but {where} says {expected}; give a config.json, weights and a "
                    "target that belong together"
                )


def read_files(folder: Path, formats: Sequence[Format]) -> HeadFiles:
    """Read a folder in the first format that matches, else in the last.

    Raises CheckpointError and UnsupportedModelError, see `read_settings`.
    """
    config = read_config_json(folder / "config.json")
    form = next((each for each in formats if each.matches(config)), formats[-1])
    settings = read_settings(config, form)
    tensors = read_tensors(folder)
    return HeadFiles(form, config, settings, {name: tensors[key] for key in tensors if (name := form.module_name(key))})


def read_settings(config: Config, form: Format) -> HeadSettings:
    """The table's keys that are set, in any place, with defaults for three keys that every head has.

    Raises UnsupportedModelError for an unknown kind of layers, an unknown key or a value that is not accepted;
    CheckpointError for a key that has two values, has the wrong kind or is missing.
    """
    if reason := form.why_refused(config):
        raise UnsupportedModelError(reason)
    entries = list(_entries(config, form))
    for place, name, value in entries:  # checked first: other kinds of layers have other keys
        if name == "model_type" and form.key_at(place, name) and value not in (None, *form.layers):
            made_of = ", ".join(map(str, config.get("architectures") or ["?"]))
            raise UnsupportedModelError(f"{form.name} of {value} layers ({made_of}); specdec runs {form.layer_words}")
    settings: HeadSettings = {}
    for place, name, value in entries:
        key, where = form.key_at(place, name), f"{place and place + '.'}{name}={reprlib.repr(value)}"
        if value is None or (key is None and form.harmless.search(name)):
            continue
        if name == "quantization_config":
            raise UnsupportedModelError("the head is quantised; specdec loads fp32, fp16 and bf16 heads")
        if key is None:
            raise UnsupportedModelError(
                f"flag {where} is not known and may change what the head computes; remove it from config.json if it "
                f"does not; known are {', '.join(sorted(form.keys))}"
            )
        if key.only and value not in key.only:
            raise UnsupportedModelError(f"{where}; specdec runs {form.name} with {key.only[0]} only")
        if not key.kind.holds(value):
            raise CheckpointError(f"{where}, expected {key.kind.allowed}")
        if key.merged and settings.setdefault(name, value) != value:
            raise CheckpointError(f"{name} is {settings[name]} in one place of its config and {value} in another")
    if missing := [name for name, key in form.keys.items() if key.required and name not in settings]:
        raise CheckpointError(f"config.json has no {missing[0]}")
    kind, heads = settings.get("model_type", form.layers[0]), settings["num_attention_heads"]
    head_dim = QWEN3_HEAD_DIM if kind == "qwen3" else settings["hidden_size"] // heads
    return {"num_key_value_heads": heads, "head_dim": head_dim, "model_type": kind, **settings}


def _entries(config: Config, form: Format) -> Iterable[tuple[str, str, Any]]:
    """(place, key, value) of the top level and of the format's objects."""
    for place in ("", *form.places):
        part = config.get(place) if place else config
        if isinstance(part, dict):
            yield from ((place, name, value) for name, value in part.items())


def read_windows(form: Format, settings: HeadSettings, num_layers: int) -> tuple[int | None, ...]:
    """Window of each draft layer, by `layer_types`. Without `layer_types` a `sliding_window` is ignored, as in both
    reference packages, except in Qwen3's config: there, layers from `max_window_layers` on slide if
    `use_sliding_window` is set."""
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    use = settings.get("use_sliding_window", kinds is not None)
    says = f"sliding_window={window} with layer_types={reprlib.repr(kinds)} on {counted(num_layers, 'layer')}"
    if kinds is None:
        is_qwen3 = settings["model_type"] == "qwen3"
        num_full = int(settings.get("max_window_layers", QWEN3_FULL_LAYERS))
        first = num_full if is_qwen3 and use and window else num_layers
        kinds = [LAYER_TYPES[i >= first] for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(k not in LAYER_TYPES for k in kinds[:num_layers]):
        raise UnsupportedModelError(f"{says}; expected one of {', '.join(LAYER_TYPES)} for each")
    kinds = kinds[:num_layers]  # some heads have their target's whole list
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    if type(window) is not int or window < 1:
        raise UnsupportedModelError(f"{says}; a sliding layer needs a whole number of 1 or more")
    if not use:
        raise CheckpointError(f"{says}, but use_sliding_window is not true")
    return tuple(window + form.sees_edge if kind == "sliding_attention" else None for kind in kinds)


def read_rope(settings: HeadSettings, *, by_layer_type: bool) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, from either spelling; the newer spelling of `rope_theta` wins.
    by_layer_type: if there is one per layer type, a head takes that of sliding layers."""
    newer, older = (_rope_object(settings.get(key)) for key in ("rope_parameters", "rope_scaling"))
    if by_layer_type and isinstance(newer.get("sliding_attention"), dict):
        newer = _rope_object(newer["sliding_attention"])
    stated = [{key: value for key, value in rope.items() if key != "rope_theta"} for rope in (newer, older) if rope]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise CheckpointError(f"rope_parameters={newer} contradict rope_scaling={older}")
    rope = {"rope_type": "default"} | (newer or older)
    rope["rope_theta"] = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    kind, partial = rope["rope_type"], rope.get("partial_rotary_factor", 1.0)
    if kind not in ROPE_TYPES or partial != 1.0:
        raise UnsupportedModelError(
            f"rope_type={kind!r} with partial_rotary_factor={partial}; supported over whole heads are "
            f"{', '.join(ROPE_TYPES)}"
        )
    for key, value in rope.items():
        if key not in ROPE_KEYS:
            raise UnsupportedModelError(f"{key}={reprlib.repr(value)} of its RoPE is not known")
        if not ROPE_KEYS[key].holds(value):
            raise CheckpointError(f"{key}={reprlib.repr(value)} of its RoPE, expected {ROPE_KEYS[key].allowed}")
    if missing := [key for key in ("rope_theta", *ROPE_TYPES[kind]) if not rope.get(key)]:
        raise CheckpointError(f"rope_type={kind!r} without {', '.join(missing)}")
    rope["rope_theta"] = float(rope["rope_theta"])
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if (not mscale) if all_dim else mscale not in (None, 1):
        raise UnsupportedModelError(
            f"RoPE with mscale={mscale} and mscale_all_dim={all_dim}, which SpecForge and transformers read "
            "differently; supported are both above 0, or neither"
        )
    return rope


def _rope_object(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries that are set; `type` gets its newer name, and "mrope" transformers' name of it."""
    rope = {"rope_type" if key == "type" else key: v for key, v in (value or {}).items() if v is not None}
    return rope | {"rope_type": "default"} if rope.get("rope_type") == "mrope" else rope
