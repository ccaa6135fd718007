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


CHANGES = {
    "write_tensor": lambda x: x.inner.rows["k"][1, 2:].fill_(1),
    "write_array": lambda x: x.inner._held[1:2].fill(True),
    "rebind": lambda x: setattr(x, "size", 5),
    "append": lambda x: x.inner.names.append("b"),
    "add_key": lambda x: x.inner.rows.update(v=torch.zeros(1)),
    "add_attribute": lambda x: setattr(x.inner, "new", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_contents_sees(change):
    x = Slotted(4, Inner())
    before = contents(x)
    assert contents(x) == before
    CHANGES[change](x)
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
