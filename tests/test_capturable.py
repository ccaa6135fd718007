"""The check for host work, case by case: what a CUDA graph cannot hold raises, what it can hold runs."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from capturable import HostWork, capturable

from specdec.kvcache.store import store_kv

X = torch.arange(6.0)
MASK = X > 2
ORDER = torch.tensor([2, 0, 1])

HOST_WORK: dict[str, Callable[[], Any]] = {
    "item": lambda: X[0].item(),
    "int": lambda: int(X[0]),
    "index": lambda: operator.index(ORDER[0]),
    "if": lambda: bool(MASK.any()),
    "min": lambda: min(X[0], X[1]),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "unique": lambda: X.unique(),
    "masked_select": lambda: X.masked_select(MASK),
    "mask": lambda: X[MASK],
    "set mask": lambda: operator.setitem(X.clone(), MASK, 0.0),
    "repeat_interleave": lambda: X[:3].repeat_interleave(ORDER),
    "tensor": lambda: torch.tensor([1, 2]),
    "lone tensor": lambda: torch.tensor(1),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "index by a list": lambda: X[[0, 1]],
    "arange without a device": lambda: torch.arange(3),
}

DEVICE_WORK: dict[str, Callable[[], Any]] = {
    "index": lambda: X[ORDER, None],
    "set": lambda: operator.setitem(X.clone(), ORDER, X[:3]),
    "set a number": lambda: operator.setitem(X.clone(), 0, 3.0),
    "where": lambda: torch.where(MASK, X, 0.0).masked_fill(MASK, 1.0),
    "arange": lambda: torch.arange(3, device=X.device) + X[:3, None],
    "new": lambda: X.new_zeros(3) + torch.zeros_like(X)[:3] + torch.full((3,), 2.0, device=X.device),
    "to": lambda: X.to(torch.int64),
    "sort": lambda: (X.sort(stable=True), X.topk(2), X.argmax(), ORDER.cumsum(0), X.gather(0, ORDER)),
    "shape": lambda: X.new_empty(len(X), X.shape[0]).numel() * 2,
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(*X.view(1, 1, 3, 2).expand(3, 1, 1, 3, 2)),
    "linear": lambda: torch.nn.functional.linear(X, X[None], X[:1]),
    "iterate": lambda: [row * 2 for row in X.view(2, 3)],
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", HOST_WORK)
def test_host_work_raises(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(HostWork), capturable():
        HOST_WORK[name]()


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", DEVICE_WORK)
def test_device_work_runs(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), capturable():
        DEVICE_WORK[name]()


def test_kernels_run_and_their_launchers_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slots, rows = torch.tensor([3, 1], device=device), torch.ones((2, 1, 4), device=device)
    pool = torch.zeros((5, 1, 4), device=device)
    with capturable():
        store_kv(rows, rows, slots, pool, pool)
        with pytest.raises(HostWork):
            pool.sum().item()
    assert pool[:, 0, 0].tolist() == [0, 1, 0, 1, 0]
    assert pool.sum().item() == 8
