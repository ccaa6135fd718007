"""The training loop: batches of packed rows, the optimiser, its schedule, and averaging over processes.

The order of the batches depends only on the step. The target's states over their rows are cached in memory up to
`cache_gb`; those of other rows are recomputed each time. The drafter's weights have the dtype in which they are saved,
so training measures the weights that are shipped; the optimiser keeps a float32 master of each.
"""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, reduce
from torch import nn

from specdec.errors import ConfigError
from specdec.progress import Stage, interruptions_wait
from specdec.training.draft_loss import TargetStates, TrainableDrafter, draft_loss
from specdec.training.packed_rows import Document, PackedRows, pack_rows
from specdec.training.train_settings import TrainSettings

SAVE_EVERY = 60.0  # seconds


class TrainingBatches:
    """Batches of packed rows. count: rows to learn from. width: rows of one batch, over all processes."""

    def __init__(self, drafter: TrainableDrafter, documents: list[Document], settings: TrainSettings) -> None:
        state = PartialState()
        self.drafter, self.device, self.seed = drafter, drafter.target.device, settings.seed
        self.rank, self.processes = state.process_index, state.num_processes
        self.data = pack_rows(documents, settings.length)
        self.count = len(self.data.ids)
        self.width = self.processes * min(settings.rows, max(1, self.count // self.processes))
        self.max_bytes = settings.cache_gb * 1e9 / self.processes
        self.kept: dict[int, TargetStates] = {}
        self.kept_bytes = 0

    def from_step(self, step: int) -> Iterator[tuple[PackedRows, TargetStates]]:
        """Endless batches; each process takes its own rows of every batch, in an order that depends only on the
        step."""
        for number in itertools.count(step):
            epoch, at = divmod(number, max(1, self.count // self.width))
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch), device="cpu")
            order = order.repeat(-(-self.width // self.count))  # of fewer rows than processes, some have the same
            index = order[at * self.width + self.rank : (at + 1) * self.width : self.processes]
            parts = self._states(index.tolist())
            yield self._batch(index), {name: torch.cat([x[name] for x in parts]).to(self.device) for name in parts[0]}

    def _batch(self, index: torch.Tensor) -> PackedRows:
        return PackedRows(*(x[index].to(self.device).long() for x in self.data))

    def _states(self, rows: list[int]) -> list[TargetStates]:
        """States [1, T, ...] of each row; uncached ones are computed in one forward of the target."""
        parts = {row: self.kept[row] for row in rows if row in self.kept}
        unknown = [row for row in rows if row not in parts]
        if unknown:
            found = self.drafter.target_states(self._batch(torch.tensor(unknown, device="cpu")))
            found = {name: x.bfloat16() for name, x in found.items()}
            size = sum(x.nbytes for x in found.values())
            parts |= {row: {name: x[i, None] for name, x in found.items()} for i, row in enumerate(unknown)}
            if self.kept_bytes + size <= self.max_bytes:  # rows are views of a forward's states: all or none
                self.kept |= {row: parts[row] for row in unknown}
                self.kept_bytes += size
        return [parts[row] for row in rows]


class MixedOptimizer:
    """Muon on the matrices of layers; AdamW on tables, heads and norms; masters in float32."""

    def __init__(self, model: nn.Module, lr: float, muon_lr: float, muon: bool = True) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            is_matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(weight)
        self.parameters = [*matrices, *others]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.parameters]
        inner, outer = self.masters[: len(matrices)], self.masters[len(matrices) :]
        self.clipped = outer if muon else self.masters
        groups = [{"params": inner, "weight_decay": 0.1}] if inner and not muon else []
        groups.append({"params": outer, "weight_decay": 0.0})
        fused = self.parameters[0].is_cuda
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [  # with their peak rates
            (torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused), lr)
        ]
        if inner and muon:
            self.optimizers.append((torch.optim.Muon(inner, lr=muon_lr, weight_decay=0.05), muon_lr))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak rates; clears the gradients. A weight without one is kept: a single
        draft step passes no state on, so its projection is not read."""
        for weight, master in zip(self.parameters, self.masters, strict=True):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.clipped, 1.0)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
        self._write_weights()

    @torch.no_grad()
    def _write_weights(self) -> None:
        torch._foreach_copy_(list[torch.Tensor](self.parameters), list[torch.Tensor](self.masters))

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "optimizers": [each.state_dict() for each, _ in self.optimizers]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which holds the weights too."""
        for mine, saved in zip(self.masters, state["masters"], strict=True):
            mine.copy_(saved)
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._write_weights()


def schedule(fraction: float) -> float:
    """Warm-up over the first 2 %, then half a cosine down to 0."""
    if fraction < 0.02:
        return 0.05 + 0.95 * fraction / 0.02
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - 0.02) / 0.98)))


def run_fraction(settings: TrainSettings, step: int, seconds: float) -> float:
    """Fraction of a run that is done: of --minutes, or of --steps if that is more.

    Next to --steps, the first twentieth of the time does not count: else the rates of the first updates, and so the
    weights, followed the clock.
    """
    timed = seconds / (60 * settings.minutes)
    return max(step / settings.steps, (timed - 0.05) / 0.95) if settings.steps else timed


def average_gradients(weights: list[nn.Parameter]) -> None:
    """Average over the processes of `accelerate launch`."""
    if PartialState().num_processes > 1:
        for grad in (weight.grad for weight in weights if weight.grad is not None):
            grad.copy_(reduce(grad.float(), "mean"))


@dataclass(frozen=True, slots=True)
class SavedState:
    """The drafter in the folder `out`, and next to it the file from which a killed training continues."""

    drafter: TrainableDrafter
    optimizer: MixedOptimizer
    out: Path

    @property
    def file(self) -> Path:
        return self.out / "training" / "state.pt"

    def load(self) -> tuple[int, float, float]:
        """Load an earlier run's optimiser and vocabulary. Returns its steps, seconds and loss: 0, 0 and NaN if none."""
        if not self.file.exists():
            return 0, 0.0, float("nan")
        state = torch.load(self.file, map_location=self.drafter.target.device, weights_only=True)
        if "optimizers" not in state["optimizer"]:
            raise ConfigError(
                f"{self.file} holds the optimiser of an earlier specdec, which this version cannot continue; "
                "delete it to train again on the same answers, or train into another --out"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if state["target_ids"] is not None:
            self.drafter.module.target_ids = state["target_ids"]  # today's answers may give other ids
        print(f"continuing from step {state['step']}, {state['seconds']:.0f} s of training", flush=True)
        return state["step"], state["seconds"], state["loss"]

    def save(self, step: int, seconds: float, loss: float) -> None:
        """Save both, in the main process."""
        if PartialState().is_main_process:
            self.drafter.save(self.out)
            part = self.file.with_suffix(".part")
            record = {"step": step, "seconds": seconds, "loss": loss, "target_ids": self.drafter.target_ids}
            torch.save(record | {"optimizer": self.optimizer.state_dict()}, part)
            part.replace(self.file)  # atomic


def train_steps(
    drafter: TrainableDrafter, batches: TrainingBatches, settings: TrainSettings, stage: Stage
) -> dict[str, Any]:
    """Train for --minutes or --steps, whichever ends first; the learning rate follows the limit that is nearer.

    What a step draws follows from the seed and the step, also in a run that goes on.
    """
    optimizer = MixedOptimizer(
        torch.nn.ModuleDict(drafter.trained), settings.lr, settings.muon_lr, settings.optimizer == "muon"
    )
    saved_state = SavedState(drafter, optimizer, settings.out)
    step, spent, value = saved_state.load()

    def fraction() -> float:
        """The maximum over all processes, so that all make the same decision."""
        ours = run_fraction(settings, step, time.perf_counter() - start)
        return float(gather(torch.tensor([ours], dtype=torch.float64, device=PartialState().device)).max())

    drafter.module.train()
    start = time.perf_counter() - spent
    saved = time.perf_counter()
    done = fraction()
    stage.update(done)
    upcoming = batches.from_step(step)
    try:
        while done < 1 or not step:  # at least one, so that there is a drafter
            batch, known = next(upcoming)
            torch.manual_seed(settings.seed + step)
            loss = draft_loss(drafter, batch, known, settings.draft_steps)
            loss.backward()
            average_gradients(optimizer.parameters)
            mean = float(reduce(loss.detach(), "mean"))
            with interruptions_wait():  # what is saved is a whole number of updates, all of them counted
                optimizer.step(schedule(done))
                step, value, now = step + 1, mean, time.perf_counter()
            done = fraction()
            stage.update(done, f"step {step}, loss {value:.4f}, epoch {step * batches.width / batches.count:.2f}")
            if done >= 1 or now - saved > SAVE_EVERY:
                saved_state.save(step, now - start, value)
                saved = now
    except KeyboardInterrupt:
        saved_state.save(step, time.perf_counter() - start, value)
        raise
    drafter.module.eval()
    PartialState().wait_for_everyone()
    return {"steps": step, "loss": round(value, 4), "rows": batches.count}
