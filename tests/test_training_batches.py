"""Batches of packed rows: the target's states are those of the rows, kept or computed again, in few forwards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.training.packed_rows import PackedRows
from specdec.training.train_settings import TrainSettings
from specdec.training.training_loop import TrainingBatches

LENGTH, ROWS = 12, 4


class Reader:
    """Stands for a drafter: its states [B, T, 2] say which tokens they are of. forwards: rows of each."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.target = self
        self.device = torch.device("cpu")

    def target_states(self, batch: PackedRows) -> dict[str, torch.Tensor]:
        self.forwards.append(len(batch.ids))
        return {"hidden": torch.stack([batch.ids, batch.pos], dim=-1).float()}


@pytest.mark.parametrize("kept", [3, 1, 0])
def test_states_are_those_of_the_rows(tmp_path: Path, kept: int):
    """Twelve rows, three epochs of three batches, of which so many are kept: at most one forward for each batch."""
    documents = [(np.arange(1 + i, 13 + i, dtype=np.int32), 4) for i in range(12)]
    a_batch = ROWS * LENGTH * 2 * 2  # bytes, in bfloat16
    settings = TrainSettings(
        target="", prompts=[], out=tmp_path, length=LENGTH, rows=ROWS, cache_gb=kept * 1.01e-9 * a_batch
    )
    reader: Any = Reader()
    batches = TrainingBatches(reader, documents, settings)
    upcoming = batches.from_step(0)
    seen: set[int] = set()
    for number in range(9):
        batch, known = next(upcoming)
        torch.testing.assert_close(known["hidden"], torch.stack([batch.ids, batch.pos], dim=-1).bfloat16())
        if number < 3:
            seen |= set(batch.ids[:, 0].tolist())
    assert seen == set(range(1, 13))
    assert batches.kept_bytes <= batches.max_bytes and batches.kept_bytes == a_batch * len(batches.kept) / ROWS
    assert sum(reader.forwards) == 12 * 3 - 2 * len(batches.kept), "a row is computed once, or each time"
    assert len(batches.kept) == kept * ROWS and len(reader.forwards) <= 9
