"""Computes the recipes of published pairs, without their files: `python tools/code_lists.py` writes them to
`specdec/bundled/recipes.json` and docs/recipes.md, as `make api` does.

    pair -> its shape on `meta` -> `CacheNeeds.slots_within`     the pools that an engine allocates
                                -> `step_bytes`                 the memory floor of a plain step, as of `specdec bench`

A step's time is its memory floor times a multiple, which is measured for the pair on that GPU or assumed.
"""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.heads.head_modules import HeadSpec
from specdec.draft_models.native_mtp.mtp_checkpoint import family_of
from specdec.draft_models.native_mtp.mtp_drafter import layout_of_modules
from specdec.kvcache.layout import PRIMARY
from specdec.measurement.memory_floor import step_bytes
from specdec.measurement.memory_plan import PlannedDrafter, memory_by_group, model_needs, own_needs, planned_needs
from specdec.measurement.model_shapes import SHAPES, MtpSpec, Shrink
from specdec.measurement.random_weights import FORMS, build_model, count_drafter, target_on_meta
from specdec.measurement.recipes import CARDS, CONTEXT, READ_BANDWIDTHS, REQUESTS, TOKENS, CardMemory, Recipe, StepTime
from specdec.models.described_model import META, ModelOnMeta
from specdec.models.published import RECIPES, PublishedPair, family_part
from specdec.models.weight_storage import stored_weights
from specdec.runtime.sizing import KV_SHARE, CacheNeeds

FILE = Path(__file__).resolve().parent.parent / "specdec" / "bundled" / "recipes.json"
REST_BYTES, HEAD_BYTES = 25 * 10**8, 20 * 10**8
"""Memory besides weights and pools (captures, activations, libraries), and the addition for a head that reads states of
several layers at every prompt token. Measured on an H100: 2.4 to 2.6 GB, and 4.2 to 4.9 GB with an EAGLE-3 head."""
MIN_TOKENS = 1024
"""A GPU with room for fewer tokens is listed as too small."""
SMALLER = 0.8
"""A pair is smaller than another if its weights take at most this share."""
DTYPE = torch.bfloat16
WHOLE = Shrink()
"""The published shape, unchanged."""


def recipe(
    pair: PublishedPair, shrink: Shrink = WHOLE, dtype: torch.dtype = DTYPE, device_type: str = "cuda"
) -> Recipe:
    """The recipe of a pair. shrink, dtype: for a comparison with an engine of a smaller shape or on a CPU."""
    shape = SHAPES[pair.shape]
    model = ModelOnMeta(pair.target, target_on_meta(shape, shrink, dtype, FORMS.get(pair.form)))
    spec = SpecConfig(pair.num_steps, adaptive=True)
    described = None if pair.drafter == "suffix" else shape.drafter(model.config, shrink)
    planned = PlannedDrafter() if described is None else plan_shape_drafter(described, model, spec)
    config = EngineConfig(max_batch_size=REQUESTS, max_model_len=TOKENS)
    needs = planned_needs(model, planned, spec, config, TOKENS, device_type)
    weights = {"target": stored_weights(model.model).bytes, "drafter": planned.weights or 0}
    floor = step_bytes(model, 1, 1, CONTEXT).total
    return Recipe(
        pair,
        serve_command(pair),
        weights,
        memory_by_group(needs, needs.slots),
        REST_BYTES + HEAD_BYTES * isinstance(described, HeadSpec),
        [card_memory(gigabytes, pair.gpus, needs, config, sum(weights.values())) for gigabytes in CARDS],
        [step_time(pair, gpu, floor) for gpu in READ_BANDWIDTHS],
        on_less(pair),
    )


def card_memory(gigabytes: int, gpus: int, needs: CacheNeeds, config: EngineConfig, weights: int) -> CardMemory:
    """weights: bytes of the pair; `gpus` GPUs share weights and pools evenly."""
    budget = int((gpus * gigabytes * 1e9 - weights) * KV_SHARE["cuda"]) - needs.all_state_bytes
    slots = needs.slots_within(config, max(budget, 0))
    requests = min(there // held for there, held in zip(slots, needs.held, strict=True))
    tokens = min(slots[PRIMARY], REQUESTS * TOKENS)
    if tokens < MIN_TOKENS or any(there < held for there, held in zip(slots[1:], needs.held[1:], strict=True)):
        return CardMemory(gigabytes, {}, 0, 0)
    names = [kept.name for kept in needs.groups]
    whole = ((count // needs.page_size + 1) * needs.page_size for count in slots)  # with page 0, which holds no tokens
    pools = {name: count * size for name, count, size in zip(names, whole, needs.slot_bytes, strict=True)}
    if needs.state_bytes:
        pools["states"] = needs.all_state_bytes
    return CardMemory(gigabytes, pools, tokens, min(requests, REQUESTS))


def plan_shape_drafter(
    described: PreTrainedConfig | HeadSpec | MtpSpec, model: ModelOnMeta, spec: SpecConfig
) -> PlannedDrafter:
    """The drafter that a shape describes; its target is on `meta`."""
    if isinstance(described, MtpSpec):
        layout = layout_of_modules(model.layout, family_of(model).like, described.modules)
        needs = own_needs(layout, model, spec, reread=described.modules - 1)
        return PlannedDrafter(needs, count_drafter(described, model).bytes)
    drafter = build_model(described, META, model.dtype)
    if isinstance(described, HeadSpec):
        needs = own_needs(described.kv_layout, model, spec)
    else:
        needs = model_needs(described.model_type, drafter, model, spec)
    return PlannedDrafter(needs, stored_weights(drafter).bytes)


def step_time(pair: PublishedPair, gpu: str, floor: int) -> StepTime:
    """floor: bytes that the step reads, on all GPUs together."""
    own = pair.multiples.get(gpu)
    multiple = own or pair.assumed or next(iter(pair.multiples.values()))
    floor_ms = 1e3 * floor / pair.gpus / READ_BANDWIDTHS[gpu]
    return StepTime(gpu, floor_ms, multiple, own is not None, floor_ms * multiple)


def serve_command(pair: PublishedPair) -> str:
    words = ["specdec", "serve", "--target", pair.target, "--drafter", pair.drafter]
    if "/" in pair.drafter:
        words += ["--num-steps", str(pair.num_steps)]
    if pair.gpus > 1:
        words += ["--tensor-parallel", str(pair.gpus)]
    return shlex.join([*words, "--max-model-len", str(TOKENS)])


def on_less(pair: PublishedPair) -> str:
    """A smaller pair of the family, the nearest in kind, then in size; otherwise advice to make this pair smaller."""
    smaller = [
        other
        for other in RECIPES.values()
        if family_part(other.target) == family_part(pair.target) and gigabytes_of(other) < SMALLER * gigabytes_of(pair)
    ]
    if smaller:
        best = max(
            smaller,
            key=lambda other: (other.shape == pair.shape, bool(other.form) == bool(pair.form), gigabytes_of(other)),
        )
        return f"`specdec recipe {best.name}`: {best.memory} of weights"
    ways = ["fewer or shorter requests (`--batch-size`, `--max-model-len`)"]
    if not pair.form:
        ways.append("a checkpoint in int4 (a third of the weights)")
    return ", ".join(ways if pair.gpus == 1 else [*ways, f"more GPUs (`--tensor-parallel {2 * pair.gpus}`)"])


def gigabytes_of(pair: PublishedPair) -> float:
    """Gigabytes of weights that the pair states."""
    return float(pair.memory.partition(" ")[0])


def as_json(found: Recipe) -> dict[str, Any]:
    """The plain values of a recipe, without those of its pair."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(found)))
    del record["pair"]
    return record


def write() -> None:
    """Write the file, one recipe a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(as_json(recipe(pair)))}" for name, pair in RECIPES.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
