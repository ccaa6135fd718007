"""Remembers the load-time checks of models that tests share, so that they run once and not once per engine.

A new target checks that the model can be served, that fused layers equal the model's own, and with
`deterministic=True` that no row depends on others. Under Triton's interpreter that takes ten times as long as a test.
A check that passed is remembered for the models of `SHARED`, which no test changes; a failed one is not, nor is one
with operations that a test made itself. tiny_models.py imports this module as a plugin.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import specdec.models.target
from specdec.gpu.operations import FAST, KERNELS, REFERENCE
from specdec.models.batch_invariance import ROWWISE
from specdec.models.probe import ProbeResult
from specdec.models.target import TargetModel

SHARED: dict[int, PreTrainedModel] = {}  # the cached models by id; no test changes them
OPERATIONS = (None, FAST, KERNELS, REFERENCE, ROWWISE)
REMEMBERED: set[int] = set()  # ids of the proofs of shared models, which live to the end


def case_of(target: Any) -> tuple[Any, ...] | None:
    """Return what a check of the target depends on, or None if it must not be remembered."""
    if not isinstance(target, TargetModel) or id(target.model) not in SHARED or target.ops not in OPERATIONS:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    defaults = torch.get_default_dtype(), threading.current_thread() is threading.main_thread()
    return id(target.model), target.device, target.dtype, *modes, *defaults


def with_layers(target: Any) -> tuple[Any, ...] | None:
    """Return the key of a check of fused or tiled layers."""
    case = case_of(target)
    if case is None or not hasattr(target, "unfused"):  # its own layers are proved in `_probe`, as a whole
        return None
    layers = type(target.decoder), target.unfused is None, getattr(target, "in_tiles", None)
    return *case, OPERATIONS.index(target.ops), os.environ.get("TRITON_INTERPRET"), *layers


def proved_once(prove: Callable[[TargetModel], Any]) -> Callable[[TargetModel], Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def proof(target: TargetModel) -> Any:
        case = case_of(target)
        if case is None:
            return prove(target)
        if case not in known:
            known[case] = prove(target), target.layout  # which the proof has measured
            REMEMBERED.add(id(known[case][0]))
        proof, target.layout = known[case]
        return proof

    return proof


def once(check: Callable[..., str | None], case_of_call: Callable[..., Any]) -> Callable[..., str | None]:
    """Wrap a check, which returns what is wrong or None: a case that passed is not checked again. Case None: always."""
    known: set[Any] = set()

    def found(*call: Any) -> str | None:
        case = case_of_call(*call)
        if case in known:
            return None
        what = check(*call)
        if what is None and case is not None:
            known.add(case)
        return what

    return found


def difference_case(proof: ProbeResult, run: Any, *bits: Any) -> tuple[Any, ...] | None:
    if id(proof) in REMEMBERED and getattr(run, "__qualname__", "") == "start_forward_of.<locals>.run":
        return (id(proof),)  # of the model's own layers, one after the other
    return None if bits else with_layers(getattr(run, "__self__", None))  # bits: remembered by `rows_case`


def ranks_case(proof: ProbeResult, run: Any, ranks: Any, *heads: Any) -> tuple[Any, ...] | None:
    case = with_layers(run.__self__)
    return None if case is None or id(proof) not in REMEMBERED else (*case, type(ranks), *ranks.devices)


def rows_case(name: str, layout: Any, texts: Any, run: Any, logits: Any) -> tuple[Any, ...] | None:
    return with_layers(getattr(logits, "__self__", None))


TargetModel._probe = proved_once(TargetModel._probe)  # type: ignore[method-assign]
ProbeResult.difference = once(ProbeResult.difference, difference_case)  # type: ignore[method-assign]
target = specdec.models.target
target.depends_on_others = once(target.depends_on_others, rows_case)
target.difference_on_ranks = once(target.difference_on_ranks, ranks_case)
