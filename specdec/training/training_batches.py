"""Batches of packed rows with the target's states over them, in an order that depends only on the step.

States are cached in memory up to `cache_gb`; those of other rows are recomputed each time.
"""

import itertools
from collections.abc import Iterator

import torch
from accelerate import PartialState

from specdec.training.draft_loss import TargetStates, TrainableDrafter
from specdec.training.packed_rows import Document, PackedRows, pack_rows
from specdec.training.train_settings import TrainSettings


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
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch))
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
            found = self.drafter.target_states(self._batch(torch.tensor(unknown)))
            found = {name: x.bfloat16() for name, x in found.items()}
            size = sum(x.nbytes for x in found.values())
            parts |= {row: {name: x[i, None] for name, x in found.items()} for i, row in enumerate(unknown)}
            if self.kept_bytes + size <= self.max_bytes:  # rows are views of a forward's states: all or none
                self.kept |= {row: parts[row] for row in unknown}
                self.kept_bytes += size
        return [parts[row] for row in rows]
