"""Engines on two devices: a full scene, what a checkpoint takes of each, level memory, a device that stalls; exchanges.

Bits and steps of two devices: the cases `bits` and `rounds` with `--devices 2`. On a CPU ranks share it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.device import DEVICE, DTYPE, ON_CPU, free_memory  # isort: skip - before triton
import torch

from bench.clock import synchronize, wall_seconds
from bench.report import Row
from bench.subjects import CHAIN, OPERATIONS, answers, engine_of, mixed_params, pair_of, prompts_of
from bench.verify import answers_row, level_row
from specdec.config import SamplingParams
from specdec.draft_models.lookup import NgramDrafter
from specdec.errors import DeviceLostError
from specdec.gpu.cuda_capture import CudaCapture
from specdec.gpu.ranks import Ranks, make_ranks
from specdec.loading import load_target
from specdec.models.target import TargetModel

LENGTHS = (5, 9) if ON_CPU else (700, 33, 1, 260, 512)
GB = 1e9
EXCHANGES = 84
WIDTH, PARTS = 4096, 2
EXPERT_WIDTH, TOP_K = 2816, 8
"""Hidden size of Gemma 4 26B-A4B, and experts a token of it."""


def scene_rows(requests: int, at_once: int) -> Iterator[Row]:
    """Gemma 4 26B-A4B at full depth with MTP drafts: each request equal to its lone run on one device."""
    pair = pair_of("gemma4-26b-a4b", deterministic=True)
    prompts = prompts_of([3 + 37 * i % 900 for i in range(requests)], pair.target.vocab_size, 2)
    params = [replace(each, logprobs=4, ignore_eos=True) for each in mixed_params(requests, 12)]
    begin = time.perf_counter()
    sizes = {"max_batch_size": at_once, "max_model_len": 1024}
    found = answers(engine_of(pair.target, pair.drafter("own"), CHAIN, tensor_parallel=2, **sizes), prompts, params)
    yield Row(f"{requests} requests, {at_once} at once", "all succeed", f"{time.perf_counter() - begin:.0f} s")
    want = answers(engine_of(pair.target, max_batch_size=1, max_model_len=1024), prompts, params)
    yield answers_row("each next to its lone run on one device", found, want)


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


def load_rows(layers: int) -> Iterator[Row]:
    """A checkpoint on two devices: what each holds, never more than one tensor beyond it, and the bits of one."""
    with tempfile.TemporaryDirectory() as folder:
        model = pair_of("llama-8b", layers).target.model
        by_layer = sum(p.nbytes for path, p in model.named_parameters() if ".layers." in path)
        largest = max(p.nbytes for path, p in model.named_parameters() if ".layers." in path)
        table, head = (part.weight.nbytes for part in (model.get_input_embeddings(), model.get_output_embeddings()))
        model.save_pretrained(folder)
        del model
        free_memory()
        ranks = make_ranks(DEVICE, 2)
        gauge, begin = Gauge(ranks), time.perf_counter()
        options = {"dtype": DTYPE, "device": DEVICE, "options": {}}
        loaded = load_target(Path(folder), **options, on_host=True)  # type: ignore[arg-type]
        shared = TargetModel(loaded, OPERATIONS, deterministic=True, ranks=ranks)
        yield Row(f"llama-8b, {layers} layers, onto two devices", "", f"{time.perf_counter() - begin:.1f} s")
        exchanged = 2 * 4 * ranks.room
        for rank, (held, peak) in enumerate(zip(gauge.held(), gauge.peak(), strict=True)):
            share = by_layer // 2 + head // 2 + (table if rank == 0 else 0) + exchanged
            found = f"{held / GB:.2f} GB held of {share / GB:.2f} computed, {exchanged / GB:.2f} of them to exchange"
            ok = held <= share + 0.05 * by_layer and peak <= held + 2 * largest + 0.1 * GB
            yield Row(f"device {rank}", found, f"at most {peak / GB:.2f} GB", ok=ok)
        prompts, params = prompts_of(LENGTHS, shared.vocab_size, 0), mixed_params(len(LENGTHS), 2 if ON_CPU else 20)
        found_ids = answers(engine_of(shared, NgramDrafter(), tensor_parallel=2), prompts, params)
        whole = load_target(Path(folder), **options)  # type: ignore[arg-type]
        alone = TargetModel(whole, OPERATIONS, deterministic=True)
        yield answers_row("its answers", found_ids, answers(engine_of(alone, max_batch_size=1), prompts, params))


def long_rows(rounds: int) -> Iterator[Row]:
    """Many rounds of four requests: the memory of each device stays level, and a request is answered as at first."""
    pair = pair_of("llama-8b", 2, deterministic=True, operations=OPERATIONS)
    with engine_of(pair.target, NgramDrafter(), tensor_parallel=2, max_batch_size=4) as engine:
        ranks = engine.target.ranks
        assert ranks is not None
        prompts = prompts_of([3, 40, 7, 20], pair.target.vocab_size, 0)
        params = [replace(each, ignore_eos=True) for each in mixed_params(4, 3 if ON_CPU else 200)]

        def work() -> list[list[int]]:
            return [out.token_ids for out in engine.generate(prompts, params, progress=False)]

        yield level_row(engine, work, rounds, Gauge(ranks).held)


def stalled_rows() -> Iterator[Row]:
    """A device that is busy for longer than a wait lasts: DeviceLostError in less than 10 s, and another engine of the
    process goes on."""
    target = pair_of("llama-8b", 2, deterministic=True).target
    other = engine_of(target, max_batch_size=1)
    prompt, params = prompts_of([64], target.vocab_size, 0)[0], SamplingParams(max_new_tokens=200, ignore_eos=True)
    for busy in (1, 0):
        engine = engine_of(target, tensor_parallel=2, max_batch_size=1)
        [handle] = engine.submit_many([prompt], params)
        while handle.num_output < 20:
            engine.step()
        with torch.cuda.device(busy):
            torch.cuda._sleep(int(30e9))  # cycles: 15 to 20 s
        begin, error = time.perf_counter(), ""
        try:
            while engine.step():
                pass
        except DeviceLostError as lost:
            error = str(lost)
        seconds = time.perf_counter() - begin
        ok = bool(error) and seconds < 10
        yield Row(f"device {busy} busy", error or "no error", f"after {seconds:.2f} s", ok=ok)
        synchronize([torch.device("cuda", 0), torch.device("cuda", 1)])
        begin = time.perf_counter()
        engine.close()
        yield Row("closing it", "done", f"{time.perf_counter() - begin:.2f} s")
        [out] = other.generate([prompt], params, progress=False)
        yield Row("another engine", f"{len(out.token_ids)} tokens", ok=len(out.token_ids) == 200)


def exchange_rows(rows: Sequence[int], expert_rows: Sequence[int]) -> Iterator[Row]:
    """The parts of a row-parallel product, and of experts, of which each rank has about half."""
    ranks = make_ranks(torch.device("cuda:0"), 2)
    ranks.reserve(max(*(2 * PARTS * size * WIDTH for size in rows), *(TOP_K * s * EXPERT_WIDTH for s in expert_rows)))
    for size in rows:
        parts = [torch.randn(PARTS, size, WIDTH, device=device) for device in ranks.devices]
        want = torch.cat([part.cpu() for part in parts])
        name = f"{size} rows, {PARTS * size * WIDTH * 4 / 1024:.0f} KiB a rank"
        yield from _exchanges(name, ranks, parts, partial(ranks.gather, parts), want)
    for size in expert_rows:
        parts = [torch.randn(TOP_K, size, EXPERT_WIDTH, device=device) for device in ranks.devices]
        first = torch.randint(-1, 1, (size, TOP_K), dtype=torch.int32)
        owners = [own.to(device) for own, device in zip((first, -1 - first), ranks.devices, strict=True)]
        want = torch.where((first.t() >= 0)[..., None], *(part.cpu() for part in parts))
        name = f"experts of {size} rows, {TOP_K * size * EXPERT_WIDTH * 4 / 1024:.0f} KiB in all"
        yield from _exchanges(name, ranks, parts, partial(ranks.select, parts, owners), want)


def _exchanges(
    name: str, ranks: Ranks, parts: Sequence[torch.Tensor], meet: Callable[[], list[torch.Tensor]], want: torch.Tensor
) -> Iterator[Row]:
    """Many in a captured graph of each device: whether all devices hold the right bits, and the time of one."""
    found: list[torch.Tensor] = []

    def exchanged() -> torch.Tensor:
        ranks.begin()
        for _ in range(EXCHANGES):
            found[:] = meet()
        ranks.end()
        return parts[0]

    def copied() -> torch.Tensor:
        for rank, part in enumerate(parts):
            with ranks.on(rank):
                for _ in range(EXCHANGES):
                    part.clone()
        return parts[0]

    def is_right() -> bool:
        synchronize(ranks.devices)
        ranks.check()
        return all(torch.equal(out.cpu(), want) for out in found)

    exchanged()
    equal = is_right()
    yield Row(f"{name}, not captured", "right" if equal else "WRONG", ok=equal)
    times = []
    for body in (exchanged, copied):
        replay, _ = CudaCapture(*ranks.devices)(body)
        replay()
        times.append(wall_seconds(replay, ranks.devices) / EXCHANGES * 1e6)
    equal &= is_right()
    yield Row(name, "right" if equal else "WRONG", f"{times[0]:.2f} us, a copy alone {times[1]:.2f}", equal)
