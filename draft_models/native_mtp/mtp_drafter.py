"""The drafter of a checkpoint's MTP modules: one module or several draft chains and trees.

Publications give row p of module k the token t_{p+1+k}, so the last k rows of module k depend on drafts. Here a row is
numbered by its token instead, in the same way for every module: `feedback_drafts.py`. In form C a row carries its own y
or z, in form T the target's state that it read, so row (k, q) reads h_{q-k}.

Form R is a single module, which is applied again for each draft.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from specdec.draft_models.base import Binding, Drafter, Fit, TargetInfo
from specdec.draft_models.heads.feedback_drafts import FeedbackWorker, ModuleRows
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.draft_models.native_mtp.mtp_module import MtpModule
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.layer_context import LayerContext
from specdec.kvcache.layout import KVLayout
from specdec.modules.weight_watch import Weights


class MtpTarget(TargetInfo, Protocol):
    """A target that modules are fitted to. user_head: its head as in the checkpoint (`head` may be split). logit_rule:
    turns the head's product into logits."""

    user_head: nn.Module

    @property
    def logit_rule(self) -> Callable[[torch.Tensor], torch.Tensor]: ...


def layout_of_modules(target: KVLayout, like: int, count: int) -> KVLayout:
    """The layout of `count` modules: each has the fields and retention of the target's layer `like`."""
    layer = target.layers[like]
    return KVLayout(tuple(replace(layer, layer=number, owner=number) for number in range(count)))


def default_steps(count: int) -> int:
    """Default drafts per round of `count` modules: one per module, or 3 from a single module that is applied
    repeatedly."""
    return count if count > 1 else 3


class NativeMtpDrafter(Drafter):
    """Modules fitted to a target, and their `FeedbackModel`; `native_mtp_drafter` makes one. source: the folder that
    they were read from."""

    name = "mtp"
    may_lag = True
    source: str | None = None

    def __init__(self, modules: Sequence[MtpModule], family: MtpFamily, target: MtpTarget) -> None:
        self.modules, self.layout = tuple(modules), target.layout
        self._apply_family(family)
        self.embed, self.head, self.rule = target.embed, target.head, target.logit_rule
        self.fit, self.dtype, self.width = Fit.of(target), target.dtype, target.hidden_size
        self.ops = target.ops or REFERENCE
        if target.ops is not None:
            reasons = [module.fuse(self.name, target.ops) for module in modules]
            self.unfused = next((reason for reason in reasons if reason is not None), None)
        self.weights: Weights | None = Weights(self.name, *modules)

    def _apply_family(self, family: MtpFamily) -> None:
        self.family, count = family, len(self.modules)
        self.form = family.form if count > 1 else "R"
        self.num_modules, self.applied_again = count, self.form == "R"
        self.max_steps = None if self.applied_again else count
        self.default_steps = default_steps(count)
        self.reread = count - 1
        self.aux_layers: tuple[int, ...] = () if family.normed_state else (len(self.layout.layers),)
        self.reads_every_state = family.normed_state
        self.windows = (self.layout.layers[family.like].window,) * count
        self.kv_layout: KVLayout | None = layout_of_modules(self.layout, family.like, count)

    def with_family(self, family: MtpFamily) -> "NativeMtpDrafter":
        """The drafter of these modules under other conventions. If their blocks are then like another layer, it is
        unfused; raises CheckpointError if the tensors do not fit that layer."""
        changed = copy.copy(self)
        if family.like != self.family.like:
            changed.modules = tuple(module.like_layer(family.like) for module in self.modules)
            changed.weights = Weights(self.name, *changed.modules)
        changed._apply_family(family)
        return changed

    def bind(self, binding: Binding) -> FeedbackWorker:
        return FeedbackWorker(self, self, binding)

    def first_state(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def run(
        self, k: int, tokens: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, context: LayerContext
    ) -> ModuleRows:
        """Run rows of module k: tokens, positions [B, N], state [B, N, H]."""
        module = self.modules[k]
        embedded = (self.embed if module.embed is None else module.embed)(tokens)
        y, z = module(embedded, state, positions, context, self.family.hidden_first)
        carry = z if self.family.normed_carry else y
        return ModuleRows(state if self.family.form == "T" else carry, z)

    def logits(self, k: int, out: ModuleRows) -> torch.Tensor:
        head = self.modules[k].head
        return self.rule((self.head if head is None else head)(out.z))
