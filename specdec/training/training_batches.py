"""Batches of packed rows with the target's states over them, in an order that depends on the step alone.

States are kept in memory up to `cache_gb`; those of the other rows are computed again each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from specdec.training.draft_loss import TargetStates, TrainableDrafter
from specdec.training.packed_rows import Document, PackedRows, pack_rows
from specdec.training.train_settings import TrainSettings
from specdec.training.training_optimizer import Processes


class TrainingBatches:
    def __init__(
        self, drafter: TrainableDrafter, documents: list[Document], settings: TrainSettings, processes: Processes
    ) -> None:
        self.drafter, self.processes, self.seed = drafter, processes, settings.seed
        self.device = drafter.target.device
        self.data = pack_rows(documents, settings.length)
        self.count = len(self.data.ids)
        self.rows = min(settings.rows, max(1, self.count // processes.size))
        self.max_bytes = settings.cache_gb * 1e9 / processes.size
        self.kept: dict[int, TargetStates] = {}
        self.kept_bytes = 0

    def from_step(self, step: int) -> Iterator[tuple[PackedRows, TargetStates]]:
        """Endless; each process takes its own rows of every batch, in an order that only the step decides."""
        width = self.rows * self.processes.size
        for number in itertools.count(step):
            epoch, at = divmod(number, max(1, self.count // width))
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch))
            index = order[at * width + self.processes.rank : (at + 1) * width : self.processes.size]
            parts = [self._states(int(i)) for i in index]
            yield self._batch(index), {name: torch.cat([x[name] for x in parts]).to(self.device) for name in parts[0]}

    def _batch(self, index: torch.Tensor) -> PackedRows:
        return PackedRows(*(x[index].to(self.device).long() for x in self.data))

    def _states(self, row: int) -> TargetStates:
        if row in self.kept:
            return self.kept[row]
        states = self.drafter.target_states(self._batch(torch.tensor([row])))
        states = {name: x.bfloat16() for name, x in states.items()}
        size = sum(x.numel() * x.element_size() for x in states.values())
        if self.kept_bytes + size <= self.max_bytes:
            self.kept[row] = states
            self.kept_bytes += size
        return states
