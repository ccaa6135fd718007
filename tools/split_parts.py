"""What a checkpoint takes of several GPUs, packed weights on them, and whether memory stays level over many rounds.

For `gpu_tensor_parallel.py`, which prints each row as soon as it is known.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU  # isort: skip - before triton
import torch
from gpu_bits import answers, prompts_of
from result_table import Row

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import find_form, make_drafter, make_target
from specdec.gpu.operations import FAST, REFERENCE
from specdec.gpu.ranks import Ranks, make_ranks
from specdec.loading import load_target
from specdec.models.target import TargetModel

CHAIN = SpecConfig(3, adaptive=False)
PACKED = {"llama-8b:fp8": 2, "llama-8b:int4-g128": 2, "gpt-oss-20b:mxfp4": 3}
LENGTHS = (5, 9) if ON_CPU else (700, 33, 1, 260, 512)
OPERATIONS = REFERENCE if ON_CPU else FAST  # the interpreter would take hours
DTYPE = torch.float32 if ON_CPU else torch.bfloat16
GB = 1e9


def engine_of(target: TargetModel, drafter: Any, count: int, **config: Any) -> Engine:
    settings: dict[str, Any] = {
        "fused": True,
        "max_model_len": 64 if ON_CPU else 2048,
        "attention": "auto",
        "deterministic": True,
        **config,
    }
    return Engine(target, drafter, spec=CHAIN, config=EngineConfig(tensor_parallel=count, **settings))


def params_of(count: int) -> list[SamplingParams]:
    new = 2 if ON_CPU else 20
    return [
        SamplingParams(max_new_tokens=new, logprobs=8, temperature=(i % 2) * 0.8, seed=i, ignore_eos=True)
        for i in range(count)
    ]


class Gauge:
    """Bytes of each device since it was made: held, and at most."""

    def __init__(self, ranks: Ranks) -> None:
        self.devices = [] if ON_CPU else list(ranks.devices)
        for device in self.devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.before = [torch.cuda.memory_allocated(device) for device in self.devices]

    def held(self) -> list[int]:
        return [torch.cuda.memory_allocated(d) - b for d, b in zip(self.devices, self.before, strict=True)]

    def peak(self) -> list[int]:
        return [torch.cuda.max_memory_allocated(d) - b for d, b in zip(self.devices, self.before, strict=True)]


def load_rows(name: str = "llama-8b", layers: int = 8) -> Iterator[Row]:
    """A checkpoint on two devices: what each holds, at most while it is loaded, and the bits of one."""
    shape, shrink = find_shape(name), Shrink(2 if ON_CPU else layers, 16 if ON_CPU else 1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_target(shape, shrink, DEVICE, DTYPE, 0)
        by_layer = sum(p.nbytes for path, p in model.named_parameters() if ".layers." in path)
        table = model.get_input_embeddings().weight.nbytes
        head = model.get_output_embeddings().weight.nbytes
        largest = max(p.nbytes for path, p in model.named_parameters() if ".layers." in path)
        model.save_pretrained(folder)
        del model
        if not ON_CPU:
            torch.cuda.empty_cache()
        ranks = make_ranks(DEVICE, 2)
        gauge, begin = Gauge(ranks), time.perf_counter()
        loaded = load_target(Path(folder), dtype=DTYPE, device=DEVICE, options={}, on_host=True)
        shared = TargetModel(loaded, OPERATIONS, deterministic=True, ranks=ranks)
        yield Row(f"{name}, {layers} layers, onto two devices", f"{time.perf_counter() - begin:.1f} s")
        exchanged = 2 * 4 * ranks.room
        for rank, (held, peak) in enumerate(zip(gauge.held(), gauge.peak(), strict=True)):
            share = by_layer // 2 + head // 2 + (table if rank == 0 else 0) + exchanged
            cells = f"{held / GB:.2f} GB held of {share / GB:.2f} computed, {exchanged / GB:.2f} of them to exchange"
            ok = held <= share + 0.05 * by_layer and peak <= held + 2 * largest + 0.1 * GB
            yield Row(f"device {rank}", cells, f"at most {peak / GB:.2f} GB", ok=ok)
        prompts = prompts_of(LENGTHS, shared.vocab_size, 0)
        found = answers(engine_of(shared, NgramDrafter(), 2), prompts, params_of(len(prompts)))
        whole = TargetModel(
            load_target(Path(folder), dtype=DTYPE, device=DEVICE, options={}), OPERATIONS, deterministic=True
        )
        want = answers(engine_of(whole, None, 1, max_batch_size=1), prompts, params_of(len(prompts)))
        equal = sum(a == b for a, b in zip(found, want, strict=True))
        yield Row("its answers next to those of one device", f"{equal} of {len(want)} equal", ok=equal == len(want))


def packed_rows(pair: str) -> Iterator[Row]:
    """Packed weights, shared by rows, with the bits of one device."""
    name, _, weights = pair.partition(":")
    shape, shrink = find_shape(name), Shrink(2 if ON_CPU else PACKED[pair], 16 if ON_CPU else 1)
    model = make_target(shape, shrink, DEVICE, DTYPE, 0, find_form(weights))
    target = TargetModel(model, OPERATIONS, deterministic=True)
    prompts = prompts_of(LENGTHS, target.vocab_size, 0)
    params = params_of(len(prompts))
    want = answers(engine_of(target, None, 1, max_batch_size=1), prompts, params)
    for what, drafter in (("alone", None), ("drafts, together", make_drafter(shape, shrink, target, 1))):
        begin = time.perf_counter()
        config = {"max_batch_size": 1} if drafter is None else {}
        found = answers(engine_of(target, drafter, 2, **config), prompts, params)
        equal = sum(a == b for a, b in zip(found, want, strict=True))
        cells = f"{equal} of {len(want)} equal", f"{time.perf_counter() - begin:.0f} s"
        yield Row(f"{pair}, TP=2: {what}", *cells, ok=equal == len(want))


def long_rows(rounds: int, name: str = "llama-8b") -> Iterator[Row]:
    """Many rounds on two devices: the memory of each stays level, and a request is answered as at the beginning."""
    shape, shrink = find_shape(name), Shrink(2, 16 if ON_CPU else 1)
    target = TargetModel(make_target(shape, shrink, DEVICE, DTYPE, 0), OPERATIONS, deterministic=True)
    engine = engine_of(target, NgramDrafter(), 2, max_batch_size=4)
    ranks = engine.target.ranks
    assert ranks is not None
    new = 3 if ON_CPU else 200
    prompts = prompts_of([3, 40, 7, 20], target.vocab_size, 0)
    params = [SamplingParams(max_new_tokens=new, temperature=0.8, seed=i, ignore_eos=True) for i in range(4)]

    def work() -> list[list[int]]:
        return [out.token_ids for out in engine.generate(prompts, params, progress=False)]

    first, gauge, begin = work(), Gauge(ranks), time.perf_counter()
    levels: list[list[int]] = []
    same = True
    while engine.stats().batches < rounds:
        same &= work() == first
        levels.append(gauge.held())
        if len(levels) % 50 == 0:
            yield Row(f"after {engine.stats().batches} rounds", f"{[f'{x / 1e6:+.1f} MB' for x in levels[-1]]}")
    half = levels[len(levels) // 2 :] or [gauge.held()]
    grown = [last - middle for last, middle in zip(half[-1], half[0], strict=True)]
    yield Row(
        f"{engine.stats().batches} rounds on two devices",
        f"{grown} bytes more in the second half; answers {'as at first' if same else 'CHANGED'}",
        f"{time.perf_counter() - begin:.0f} s",
        ok=same and all(more <= 0 for more in grown),
    )
    engine.close()
