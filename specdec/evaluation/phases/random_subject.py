"""A published shape with random weights, ready to be measured: what `specdec bench --shape` and tools/ time."""

import random
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.errors import ConfigError
from specdec.evaluation.model_shapes import Shape, Shrink
from specdec.evaluation.phases.phase_run import Subject
from specdec.evaluation.phases.random_packed import COLUMNS, UNPACKED, find_form
from specdec.evaluation.phases.random_weights import make_drafter, make_target, require_room
from specdec.gpu.operations import choose_operations
from specdec.loading import pick_device, pick_dtype
from specdec.models.target import TargetModel
from specdec.progress import working


def random_subject(
    shape: Shape,
    drafts: Mapping[str, SpecConfig | None],
    *,
    weights: str | None = None,
    layers: int | None = None,
    divisor: int = 1,
    config: EngineConfig,
    assumed: Sequence[float] = (),
    seed: int = 0,
) -> Subject:
    """weights: a name of `FORMS`, "bf16", or None: all in the dtype. layers, divisor: of `Shrink`. config: the device,
    the dtype, and whether layers are fused. Prompts are random tokens.
    """
    form = None if weights is None else find_form(weights)
    shrink = Shrink(layers, divisor) if form is None else Shrink(layers, divisor, COLUMNS)
    where = pick_device(config.device)
    dtype = pick_dtype(config.dtype, where, shape.target(shrink))
    if weights == UNPACKED:
        if config.dtype not in (None, torch.bfloat16):
            raise ConfigError(f"weights={UNPACKED!r} and dtype={config.dtype} contradict each other; give one of them")
        dtype = torch.bfloat16
    require_room(shape, shrink, where, dtype, form)
    with working(f"making {shape.name}"):
        operations = choose_operations(config.fused, config.attention, where, dtype)  # as Engine.from_pretrained does
        model = make_target(shape, shrink, where, dtype, seed, form)
        begin = perf_counter()
        target = TargetModel(model, operations)
        drafter = make_drafter(shape, shrink, target, seed + 1) if any(drafts.values()) else None
        prepared = perf_counter() - begin

    def prompts(batch: int, context: int) -> list[list[int]]:
        draw = random.Random(f"{seed} {batch} {context}")
        return [[draw.randrange(target.vocab_size) for _ in range(context)] for _ in range(batch)]

    return Subject(
        name=f"random weights{f' ({form.name})' if form else ''} at the shape of {shape.published}"
        + (f", on {config.tensor_parallel} devices" if config.tensor_parallel > 1 else ""),
        shrunk=shrink.words,
        target=target,
        drafter=drafter,
        drafts=drafts,
        prompts=prompts,
        assumed=assumed,
        dtype=dtype,
        prepared=prepared,
        tensor_parallel=config.tensor_parallel,
    )
