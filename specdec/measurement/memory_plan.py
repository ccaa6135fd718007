"""Memory of a pair, from its config.json only: K/V by cache group, and weights.

    config.json  ->  models on `meta`  ->  layouts  ->  the slots that `runtime/sizing.py` gives an engine

For quantised weights and drafter heads, whose form the config does not tell, the sizes of the files count.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.checkpoints.checkpoint_files import is_unquantised, size_of_weights, tensor_files
from specdec.draft_models.checkpoints.drafter_formats import layout_of_config
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, is_assistant_config
from specdec.draft_models.language_model import require_stateless
from specdec.draft_models.native_mtp.mtp_checkpoint import conventions_of, module_tensors, no_modules
from specdec.draft_models.native_mtp.mtp_drafter import default_steps, layout_of_modules
from specdec.draft_models.registry import AUTO, MTP, building, drafter_parts, is_drafter_config, require_target
from specdec.errors import CheckpointError, ConfigError, UnsupportedModelError, about, first_line
from specdec.kvcache.layout import CacheField, KVLayout
from specdec.kvcache.recurrent_state import StateShape
from specdec.loading.drafter_loading import drafts_by_modules, meant_by_auto, require_drafter
from specdec.loading.model_loading import SHARED_OPTIONS, Checkpoint, pick_device, pick_dtype
from specdec.models.described_model import ModelOnMeta, model_on_meta
from specdec.models.quantised.packed_quantizer import stored_tensors, without_quantization
from specdec.models.weight_storage import stored_weights
from specdec.runtime.calls.arguments import fitted_spec, require_kv_dtype
from specdec.runtime.sizing import CacheNeeds, DraftNeeds, longest_sequence, lookahead_slots, unread_bound

MODULE_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names by which configs count their MTP modules."""


class PlannedDrafter(NamedTuple):
    """A drafter that is not loaded. weights: bytes; None: unknown. default_steps: drafts per round, if its config says
    so."""

    needs: DraftNeeds = DraftNeeds()
    weights: int | None = 0
    default_steps: int | None = None
    max_steps: int | None = None


def memory_plan(
    target: str,
    drafter: str | None,
    *,
    spec: SpecConfig,
    config: EngineConfig,
    drafter_options: Mapping[str, Any],
    **target_options: Any,
) -> dict[str, Any]:
    """The report as plain values. groups: see `memory_by_group`; weights: bytes by role, None: unknown; notes:
    sentences about uncertain figures. Arguments are those of `Engine.from_pretrained`; the device need not exist here.
    Reads no weights.

    Raises CheckpointError, ConfigError, UnsupportedModelError.
    """
    if config.tensor_parallel > 1:
        raise ConfigError(f"tensor_parallel={config.tensor_parallel}: memory is planned for one device; leave it out")
    checkpoint = Checkpoint.from_name(target, target_options)
    require_target(f"target={target!r}", checkpoint.config)
    device = pick_device(None) if config.device is None else torch.device(config.device)
    dtype = pick_dtype(config.dtype, device, checkpoint.hf_config())
    model = ModelOnMeta(target, on_meta(checkpoint, dtype))
    require_kv_dtype(model, config)
    shared = {name: value for name, value in target_options.items() if name in SHARED_OPTIONS}
    planned = plan_drafter(drafter, checkpoint, model, spec, {**shared, **drafter_options})
    max_len = longest_sequence(config, model.context_length, target)
    drafts = None if drafter is None else fitted_spec(spec, planned)
    needs = planned_needs(model, planned, drafts, config, max_len, device.type)
    weights = {"target": _weight_bytes(checkpoint, model.model), "drafter": planned.weights}
    unmeasured = f"K/V are those that the config names, since a forward cannot be measured ({model.unmeasured})"
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "batch_size": config.max_batch_size,
        "max_model_len": max_len,
        "page_size": config.page_size,
        "groups": memory_by_group(needs, needs.slots_within(config, sys.maxsize)),
        "weights": {role: size for role, size in weights.items() if size != 0},
        "notes": [] if model.unmeasured is None else [unmeasured],
    }


def planned_needs(
    model: ModelOnMeta,
    drafter: PlannedDrafter,
    drafts: SpecConfig | None,
    config: EngineConfig,
    max_len: int,
    device_type: str,
) -> CacheNeeds:
    """Needs of a full batch of requests of `max_len` tokens. drafts: None: there is no drafter."""
    lookahead = lookahead_slots(drafts or SpecConfig(), drafts=drafts is not None, captured=device_type == "cuda")
    sizes = {"max_len": max_len, "lookahead": lookahead}
    return CacheNeeds(model.layout, drafter.needs, model.dtype, config, **sizes, device_type=device_type)


def memory_by_group(needs: CacheNeeds, pools: Sequence[int]) -> list[dict[str, Any]]:
    """Memory of each cache group, and of recurrent states in the same form, if there are some.

    kept: numbers of layers that keep the same fields, with (heads, head size) of each field; layers without attention,
    or that read another layer's K/V, keep none. token_bytes: of one token in all layers. request_bytes: of one request,
    with its share of the slots for prompt chunks. batch_bytes: of the slots in `pools` (of a full batch, unless the
    user set others) and of page 0, which holds no tokens.
    """
    owners = [spec for layout in needs.layouts for spec in layout.owners]
    entries = []
    for group, size, slots, pool in zip(needs.groups, needs.slot_bytes, needs.slots, pools, strict=True):
        layers = [spec.fields for spec in owners if spec.retention == group]
        whole = (pool // needs.page_size + 1) * needs.page_size
        sizes = {"token_bytes": size, "request_bytes": slots * size // needs.batch, "batch_bytes": whole * size}
        entries.append({"name": group.name, "kept": _kept(layers), **sizes})
    if states := [_state_fields(spec.state) for spec in owners if spec.state is not None]:
        sizes = {"token_bytes": 0, "request_bytes": needs.state_bytes, "batch_bytes": needs.all_state_bytes}
        entries.append({"name": "states", "kept": _kept(states), **sizes})
    return entries


def _kept(layers: Sequence[tuple[CacheField, ...]]) -> list[dict[str, Any]]:
    counts = Counter(filter(None, layers)).items()
    return [{"layers": n, "fields": {each.name: (each.heads, each.dim) for each in fields}} for fields, n in counts]


def _state_fields(state: StateShape) -> tuple[CacheField, ...]:
    inputs = CacheField("inputs", state.taps, state.channels)
    return (CacheField("state", state.heads, state.k_dim * state.v_dim), inputs) if state.heads else (inputs,)


def plan_drafter(
    drafter: str | None, target: Checkpoint, model: ModelOnMeta, spec: SpecConfig, options: Mapping[str, Any]
) -> PlannedDrafter:
    """Plan the model of a drafter argument; a lookup keeps nothing. model: the target's."""
    name, _ = drafter_parts(drafter)
    if name == AUTO:  # as an engine, which takes the first that it can use
        for found in meant_by_auto(target, len(model.layout.layers), {**options, "local_files_only": True}):
            with suppress(CheckpointError, ConfigError, UnsupportedModelError):
                return _plan_named(found, target, model, spec, options)
        return PlannedDrafter()
    return PlannedDrafter() if name is None else _plan_named(name, target, model, spec, options)


def _plan_named(
    name: str, target: Checkpoint, model: ModelOnMeta, spec: SpecConfig, options: Mapping[str, Any]
) -> PlannedDrafter:
    checkpoint = Checkpoint.from_name(target.name if name == MTP else name, options)
    described, folder = checkpoint.config, checkpoint.config_file.parent
    with about(f"drafter {name!r}"):
        if name == MTP or drafts_by_modules(described, model, lambda: folder):
            return plan_modules(folder, model, spec)
        if is_drafter_config(described) and not is_assistant_config(described):  # a head
            return PlannedDrafter(own_needs(layout_of_config(described), model, spec), _weight_bytes(checkpoint, None))
    require_drafter(f"drafter {name!r}", described)
    planned = on_meta(checkpoint, model.dtype)
    return PlannedDrafter(model_needs(name, planned, model, spec), _weight_bytes(checkpoint, planned))


def own_needs(layout: KVLayout, target: ModelOnMeta, spec: SpecConfig, reread: int = 0) -> DraftNeeds:
    """Needs of a drafter with K/V of its own, which may read tokens rounds after their commit."""
    return DraftNeeds(layout, reread=reread, max_lag=unread_bound(lags=spec.adaptive, recurrent=target.recurrent))


def model_needs(name: str, model: PreTrainedModel, target: ModelOnMeta, spec: SpecConfig) -> DraftNeeds:
    """Needs of an assistant or a language model on `meta`."""
    if is_assistant_config(model.config.to_dict()):
        return DraftNeeds.from_drafter(Gemma4MTPDrafter(model, target), spec)
    layout = ModelOnMeta(name, model).layout
    require_stateless(name, layout)
    return own_needs(layout, target, spec)


def plan_modules(folder: Path, target: ModelOnMeta, spec: SpecConfig) -> PlannedDrafter:
    """MTP modules in a folder, counted by the headers of its files; without files, by the target's config."""
    files, weights = tensor_files(folder), None
    modules = module_tensors(files, len(target.layout.layers))
    count = len(modules)
    if not files:
        count = max(int(getattr(target.config, name, None) or 0) for name in MODULE_COUNTS)
    if not count:
        raise no_modules()
    if modules:
        names = {name for of_module in modules.values() for name in of_module.values()}
        stored = stored_tensors({str(files[name]) for name in names})
        tensors = [stored[name].to("meta") for name in names]
        weights = sum((each.to(target.dtype) if is_unquantised(each) else each).nbytes for each in tensors)
    layout = layout_of_modules(target.layout, conventions_of(folder, target).like, count)
    return PlannedDrafter(own_needs(layout, target, spec, reread=count - 1), weights, default_steps(count))


def on_meta(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config.json on `meta`, with unquantised weights."""
    config = without_quantization(checkpoint.hf_config())
    options = {name: value for name, value in checkpoint.options.items() if name == "trust_remote_code"}
    try:
        with building(checkpoint.config):
            return model_on_meta(config, dtype, **options)
    except Exception as error:  # transformers raises many types for a config
        reason = first_line(error)
        raise UnsupportedModelError(
            f"{checkpoint.name!r} ({config.model_type}) cannot be built on its config: {reason}"
        ) from error


def _weight_bytes(checkpoint: Checkpoint, model: PreTrainedModel | None) -> int | None:
    """Bytes of the weights of a model on `meta`; bytes of the files if the model is None or quantised."""
    if model is not None and checkpoint.quantization is None and "quantization_config" not in checkpoint.options:
        return stored_weights(model).bytes
    return size_of_weights(checkpoint.config_file.parent) or None
