"""What an EAGLE-3 head's config.json says, in any of the three published formats.

    specforge    SafeAILab / SpecForge / lmsys: llama fields at the top level, `eagle_config`
    modelopt     NVIDIA: the same with more flags in `eagle_config`
    speculators  RedHatAI: `transformer_layer_config` nested, flags at the top level

Which keys there are is in `eagle3_keys`. What cannot be told from the file at all follows a rule and is said aloud: is
an id the layer that a state enters or leaves (`resolve_aux_ids`), what does `norm_output` mean (`read_norm_output`).
"""

import logging
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.draft_models.eagle3.checkpoint_keys import AUX_IDS, EAGLE_CONFIG, Settings, is_speculators
from specdec.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger("specdec")

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""RoPE types with what each needs."""
ROPE_NUMBERS = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale"}
    | {"mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta"}
)
ROPE_KEYS = ROPE_NUMBERS | {"rope_type", "truncate", "mrope_section", "mrope_interleaved"}
"""Honoured, or (mrope: the three positions of a text token are the same one) harmless for text."""
KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """What a head computes.

    aux_layers: target states it reads, each named by the layer it enters; empty: the final state, after the norm.
    windows: sliding window of each draft layer, None: full. draft_vocab_size None: the target's head and vocabulary.
    has_fc False: features pass as they are. biases: names of linear layers with one. owns_embed: it has a table.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    aux_layers: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)
    draft_vocab_size: int | None = None
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qk_norm: bool = False
    biases: frozenset[str] = frozenset()
    has_fc: bool = True
    owns_embed: bool = False
    final_norm: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def feature_size(self) -> int:
        """Width of what the target hands over."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a reader must know of the target."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int


def is_eagle3_config(config: Mapping[str, Any]) -> bool:
    """Is this config.json one of an EAGLE-3 head? (A plain Llama with `draft_vocab_size` is: yuhuili's heads.)"""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    names = [str(name).lower() for name in config.get("architectures") or ()]
    return any("eagle3" in name for name in names) or config.get("draft_vocab_size") is not None


def resolve_aux_ids(config: Mapping[str, Any], num_layers: int, override: Sequence[int] | None) -> tuple[int, ...]:
    """Boundaries (layers that the states enter; num_layers: what leaves the last) from a config of n layers.

    The user's word, then the top level (boundaries), then `eagle_config`: boundaries if n or a leading 2 is among them,
    else outputs of the layers named, so one more. The default 2, n // 2, n - 3 is what [1, n // 2 - 1, n - 4] says.
    """
    nested = (config.get("eagle_config") or {}).get(AUX_IDS)
    ids: list[Any]
    if override is not None:
        ids, where = list(override), "aux_layers"
    elif config.get(AUX_IDS):
        ids, where = list(config[AUX_IDS]), AUX_IDS
    elif nested:
        ids, where = list(nested), f"eagle_config.{AUX_IDS}"
        if num_layers not in ids and ids[0] != 2:
            if ids[0] != 1:
                logger.warning(
                    "%s=%s is read as layers' outputs; if acceptance is near zero, try eagle3_drafter(aux_layers=%s)",
                    where,
                    ids,
                    ids,
                )
            ids = [layer + 1 for layer in ids]
    else:
        ids, where = [2, num_layers // 2, num_layers - 3], "the default"
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= num_layers for i in ids):
        raise UnsupportedModelError(
            f"EAGLE-3 auxiliary layers {ids} (from {where}): the target has states 0..{num_layers}, "
            f"{num_layers} being what leaves its last layer; eagle3_drafter(..., aux_layers=[...]) says which"
        )
    return tuple(ids)


def read_norm_output(config: Mapping[str, Any], name: str) -> tuple[bool, bool]:
    """(does lm_head read norm(a), does the next draft step): `norm_output` means one or the other.

    In `eagle_config` and in speculators' format it is the second, as for vLLM and SGLang. At the top level of the
    SpecForge format it is the first, as SpecForge trains up to 0.2: its heads feed a back un-normed, always.
    """
    nested, top = (config.get(EAGLE_CONFIG) or {}).get("norm_output"), config.get("norm_output")
    if nested is not None:
        return True, bool(nested)
    if top is None or is_speculators(config):
        return True, bool(top)
    logger.warning(
        "%s: norm_output=%s is read as SpecForge means it (lm_head reads %s, the next draft step a); if it says "
        "whether norm(a) is fed back, as for vLLM and SGLang, put it into eagle_config",
        name,
        top,
        "norm(a)" if top else "a",
    )
    return bool(top), False


def read_windows(settings: Settings, num_layers: int, name: str) -> tuple[int | None, ...]:
    """Sliding window of each draft layer, by `layer_types`. Without them a `sliding_window` means nothing, as in both
    reference packages, except where Qwen3's config makes them: behind `max_window_layers`, when it is to be used."""
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    is_qwen3 = settings["model_type"] == "qwen3"
    use = settings.get("use_sliding_window", kinds is not None)  # a list says it; Qwen3's config makes none unasked
    says = f"sliding_window={window} with layer_types={reprlib.repr(kinds)} on {num_layers} layers"
    if kinds is None:
        first = int(settings.get("max_window_layers", 28)) if is_qwen3 and use and window else num_layers
        kinds = [KINDS[i >= first] for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(k not in KINDS for k in kinds[:num_layers]):
        raise UnsupportedModelError(f"{name}: {says}; one of {', '.join(KINDS)} is wanted for each")
    kinds = kinds[:num_layers]  # some heads carry the list of their target
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise UnsupportedModelError(f"{name}: {says}; a sliding layer needs a whole number of 1 or more")
    if not use:
        raise CheckpointError(f"{name}: {says}, but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_rope(settings: Settings, name: str, speculators: bool = False) -> dict[str, Any]:
    """`rope_parameters` of transformers 5 from whichever spelling the config has; for `rope_theta` the newer one wins.
    speculators gives a head whose parameters are told apart by layer type those of sliding layers."""
    newer, older = (_rope_object(settings.get(key)) for key in ("rope_parameters", "rope_scaling"))
    if speculators and isinstance(newer.get("sliding_attention"), dict):
        newer = _rope_object(newer["sliding_attention"])
    stated = [{key: value for key, value in rope.items() if key != "rope_theta"} for rope in (newer, older) if rope]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise CheckpointError(f"{name}: rope_parameters={newer} contradict rope_scaling={older}")
    rope = {"rope_type": "default"} | (newer or older)
    rope["rope_theta"] = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    kind, partial = rope["rope_type"], rope.get("partial_rotary_factor", 1.0)
    if kind not in ROPE_TYPES or partial != 1.0:
        raise UnsupportedModelError(
            f"{name}: rope_type={kind!r} with partial_rotary_factor={partial}; supported are "
            f"{', '.join(ROPE_TYPES)} over whole heads"
        )
    for key, value in rope.items():
        if key not in ROPE_KEYS:
            raise UnsupportedModelError(f"{name}: {key}={reprlib.repr(value)} of its RoPE is not known")
        if key in ROPE_NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise CheckpointError(f"{name}: {key}={reprlib.repr(value)} of its RoPE, a number is wanted")
    if missing := [key for key in ("rope_theta", *ROPE_TYPES[kind]) if not rope.get(key)]:
        raise CheckpointError(f"{name}: rope_type={kind!r} without {', '.join(missing)}")
    rope["rope_theta"] = float(rope["rope_theta"])
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if (not mscale) if all_dim else mscale not in (None, 1):
        raise UnsupportedModelError(
            f"{name}: RoPE with mscale={mscale} and mscale_all_dim={all_dim}, which SpecForge and transformers read "
            "differently; supported are both above 0, or neither"
        )
    return rope


def _rope_object(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Without what is not set, and `type` under its newer name."""
    rope = {key: v for key, v in (value or {}).items() if v is not None}
    kind = rope.pop("type", None)
    return rope if kind is None else {"rope_type": kind} | rope
