"""What tests rely on when they say that nothing was changed: `contents` sees every kind of change."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from snapshots import contents


class Inner:
    def __init__(self) -> None:
        self.rows = {"k": torch.zeros(2, 3, dtype=torch.bfloat16)}
        self._held = np.zeros(3, dtype=np.bool_)
        self.names = ["a"]


@dataclass(slots=True)
class Slotted:
    size: int
    inner: Inner


def write_tensor(x: Slotted) -> None:
    x.inner.rows["k"][1, 2] = 1


def write_array(x: Slotted) -> None:
    x.inner._held[1] = True


def rebind(x: Slotted) -> None:
    x.size = 5


def append(x: Slotted) -> None:
    x.inner.names.append("b")


def add_key(x: Slotted) -> None:
    x.inner.rows["v"] = torch.zeros(1)


def add_attribute(x: Slotted) -> None:
    x.inner.new = None


@pytest.mark.parametrize("change", [write_tensor, write_array, rebind, append, add_key, add_attribute])
def test_contents_sees(change):
    x = Slotted(4, Inner())
    before = contents(x)
    assert contents(x) == before
    change(x)
    assert contents(x) != before


def test_contents_names_what_it_found():
    x = Slotted(4, Inner())
    assert contents(x, x.inner) == {
        "0.inner._held": ((3,), bytes(3)),
        "0.inner.names[0]": "a",
        "0.inner.names.len": 1,
        "0.inner.rows[k]": ((2, 6), bytes(12)),
        "0.inner.rows.keys": ["k"],
        "0.size": 4,
        "1": "is 0.inner",
    }
