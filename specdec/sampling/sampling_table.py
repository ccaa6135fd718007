"""Sampling parameters of the running requests: a table on the device with a row for each, and the views that a round
reads.

    SamplingParams  --load-->  SamplingTable [rows, columns]  --row_params-->  ParamVectors of a batch, biases

The columns are the seed and the numbers of `specdec.settings.sampling_numbers`; `ReferenceSampler` and `KernelSampler`
draw with them. Logit biases lie next to the table, also as int64 cells, so that one upload sends all changes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.config import SamplingParams
from specdec.gpu.captures import next_power_of_two
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.gpu.triton_shim import tl
from specdec.settings.sampling_numbers import NUMBERS

INT_COLUMNS = ("seed", *(name for name, number in NUMBERS.items() if number.kind is int))
"""Columns of whole numbers, which come first."""
FLOAT_COLUMNS = tuple(name for name, number in NUMBERS.items() if number.kind is float)
"""The other columns, each the bits of a float64."""
FILTERS = tuple(name for name, number in NUMBERS.items() if number.filters)
"""Parameters that remove tokens from the distribution."""
DEFAULTS = SamplingParams()


class ParamVectors(NamedTuple):
    """The parameters of B requests: whole [INT_COLUMNS, B] int64 and real [FLOAT_COLUMNS, B] float32, contiguous."""

    whole: torch.Tensor
    real: torch.Tensor

    def column(self, name: str) -> torch.Tensor:
        """Values of one parameter, [B]."""
        return self.whole[INT_COLUMNS.index(name)] if name in INT_COLUMNS else self.real[FLOAT_COLUMNS.index(name)]

    def over_logits(self, name: str) -> torch.Tensor:
        """Values of one parameter as [B, 1, 1], to combine with logits [B, N, V]."""
        return self.column(name)[:, None, None]


def index_of(name: str) -> tl.constexpr:
    """Index of a column, by which kernels find it: its row of `whole` or `real`."""
    return tl.constexpr(INT_COLUMNS.index(name) if name in INT_COLUMNS else FLOAT_COLUMNS.index(name))


def split_cells(cells: torch.Tensor) -> ParamVectors:
    """Split cells [B, columns] of a `SamplingTable` into vectors."""
    by_column = cells.t().contiguous()
    return ParamVectors(by_column[: len(INT_COLUMNS)], by_column[len(INT_COLUMNS) :].view(torch.float64).float())


class SamplerFeatures(NamedTuple):
    """Features that at least one request of a batch uses; its rounds must compute them.

    filters: names of FILTERS. The other fields are edits of logits. penalty: repetition penalty. counts: frequency or
    presence penalty. bias: room for that many bias entries per request. masked: a grammar, or rules about tokens.
    """

    sampled: bool
    filters: frozenset[str] = frozenset()
    penalty: bool = False
    counts: bool = False
    bias: int = 0
    masked: bool = False

    @property
    def edits(self) -> bool:
        """Are logits changed by more than the repetition penalty?"""
        return self.counts or self.bias > 0 or self.masked

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams]) -> "SamplerFeatures":
        sampled = [p for p in params if p.temperature > 0]
        return cls(
            sampled=len(sampled) > 0,
            filters=frozenset(f for f in FILTERS if any(getattr(p, f) != getattr(DEFAULTS, f) for p in sampled)),
            penalty=any(p.repetition_penalty != 1 for p in params),
            counts=any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params),
            bias=bias_room(max((len(p.logit_bias) for p in params if p.logit_bias), default=0)),
            masked=any(p.restricted for p in params),
        )


SAMPLED = SamplerFeatures(sampled=True, filters=frozenset(FILTERS))
"""Any temperature and all filters, on unedited logits."""


class SamplingTable:
    """The sampling parameters of every row of the request table, on host and device. A row is written once, when a
    request takes it; before, it is greedy.

    Biases lie in one array per room (`bias_room`) that any round used, and are written when their row takes part in a
    round (`load_biases`). Rounds without biases read none.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.cells = MirroredArray((num_rows, len(INT_COLUMNS) + len(FLOAT_COLUMNS)), device)
        self._biases: dict[int, MirroredArray] = {}  # by room, [rows, room]; never replaced: captured rounds read it
        # the last batch given to `features_of`
        self._last: tuple[list[SamplingParams], SamplerFeatures] = ([], SamplerFeatures.from_params([]))

    @property
    def arrays(self) -> list[MirroredArray]:
        return [self.cells, *self._biases.values()]

    def load(self, rows: IntArray, requests: Sequence[tuple[SamplingParams, int]]) -> None:
        """Rows [B] sample with these parameters and seeds from now on."""
        whole = np.array(
            [(seed, *(getattr(p, name) for name in INT_COLUMNS[1:])) for p, seed in requests], dtype=np.int64
        )
        real = np.array([[getattr(p, name) for name in FLOAT_COLUMNS] for p, _ in requests], dtype=np.float64)
        self.cells[rows] = np.concatenate([whole, real.view(np.int64)], axis=1)

    def features_of(self, params: Sequence[SamplingParams]) -> SamplerFeatures:
        """`SamplerFeatures.from_params`, cached while the batch is the same, since it looks at every parameter."""
        before, features = self._last
        if before != list(params):  # the same object is not compared field by field
            features = SamplerFeatures.from_params(params)
        self._last = list(params), features  # keep these objects: comparing them again is quick
        return features

    def load_biases(self, rows: IntArray, params: Sequence[SamplingParams], features: SamplerFeatures) -> None:
        """Write the biases of these rows, for a round with these uses."""
        if not features.bias:
            return
        if features.bias not in self._biases:
            self._biases[features.bias] = MirroredArray((len(self.cells.host), features.bias), self.cells.tensor.device)
        biases = self._biases[features.bias]
        for row, each in zip(rows.tolist(), params, strict=True):
            if not each.logit_bias and not biases.host[row].any():
                continue  # no biases, and the cells are clear
            packed = pack_bias(each.logit_bias or {}, features.bias)
            if (biases.host[row] != packed).any():
                biases[row] = packed

    def row_params(
        self, rows: torch.Tensor, features: SamplerFeatures, params: ParamVectors | None = None
    ) -> tuple[ParamVectors, SamplerFeatures, torch.Tensor | None]:
        """The inputs of a sampler of rows [B]: a copy of their parameters (or the copy given), the features that any of
        them uses, and their biases [B, K] as `pack_bias` makes them."""
        bias = self._biases[features.bias].tensor[rows] if features.bias else None
        return params or split_cells(self.cells.tensor[rows]), features, bias


def bias_room(entries: int) -> int:
    """Room for this many bias entries: 0, 16, 32, 64, ..., so that rounds have few different shapes."""
    return max(16, next_power_of_two(entries)) if entries else 0


def pack_bias(bias: Mapping[int, float], room: int) -> IntArray:
    """[room] cells: the token id in the low half, the bits of a float32 in the high one; unused cells are 0."""
    cells = np.zeros((room, 2), dtype=np.int32)
    cells[: len(bias), 0] = list(bias)
    cells[: len(bias), 1] = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
    return cells.view("<i8")[:, 0]


def unpack_bias(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cells [B, K] -> token ids int64 and values float32, [B, K] each."""
    halves = cells.view(torch.int32).unflatten(1, (-1, 2))
    return halves[..., 0].long(), halves[..., 1].contiguous().view(torch.float32)
