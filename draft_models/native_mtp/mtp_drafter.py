"""Native MTP modules as drafter, and, one row per family, the conventions under which they were trained.

Module k reads a token and a state and has its own K/V:

    x = proj [enorm(embed(token)); hnorm(state)]      y = block(x)      z = norm(y)      logits = head(z)

    form  modules                 state that module k reads                       drafts a round
    R     one, applied again      the target's; while drafting, its own carry     any number
    C     several, chained        the carry of module k - 1, one row earlier      one per module
    T     several                 the target's, k rows earlier                    one per module

The carry is z or y. A single module always has form R. Publications give row p of module k the token t_{p+1+k}, so the
last k rows of module k depend on drafts. Here a row is numbered by its token instead, in the same way for every module:
`feedback_drafts.py`. In form T, row q of module k reads the target's state at q - k, as row q - 1 of
module k - 1 did.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from specdec.draft_models.base import Binding, Drafter, Fit, TargetInfo
from specdec.draft_models.heads.feedback_drafts import FeedbackWorker, ModuleRows
from specdec.draft_models.native_mtp.mtp_module import MtpModule
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.layer_context import LayerContext
from specdec.kvcache.layout import KVLayout
from specdec.modules.weight_watch import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFamily:
    """The conventions of a family's modules, which no tensor states.

    form: form of several modules.
    normed_state: the target's state is read after its final norm.
    normed_carry: the carry is z.
    hidden_first: the projection reads the hidden half first.
    like: the target layer whose attention a module's block copies, if the target's config has no `mtp_layer_types`;
        tensors show whether its MLP has experts.
    """

    form: str = "C"
    normed_state: bool = True
    normed_carry: bool = True
    hidden_first: bool = False
    like: int = -1


DEEPSEEK = MtpFamily()
"""transformers 5.17 (`modeling_layers.MtpModel`) and SGLang: the state and the carry after their norms, embedding
first. The card of DeepSeek-V3 chains its modules."""

SPECULATORS = MtpFamily()
"""speculators 0.5 (`models/mtp`), for any target: MiMo's names at the top level, the embedding first, the carry after
`final_layernorm`."""

MTP_FAMILIES: dict[str, MtpFamily] = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25"), DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), DEEPSEEK),
    "hy_v3": DEEPSEEK,  # tensors like GLM's; its final norm is `final_layernorm`
    # transformers 5.24 runs it by `MtpModel`: the block slides like layer 1 (the last layer does not slide)
    "mellum": MtpFamily(like=1),
    "ernie4_5_moe": DEEPSEEK,  # no final norm, so the carry is y
    # vLLM's qwen3_next_mtp and qwen3_5_mtp: state and carry after their norms; the block has full attention
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), DEEPSEEK),
    # vLLM's exaone_moe_mtp: the block is built like layer 0, sliding and with RoPE
    **dict.fromkeys(("exaone4", "exaone4_5", "exaone_moe"), MtpFamily(like=0)),
    # XiaomiMiMo's modeling_mimo.py: cat([hidden, embedding])
    **dict.fromkeys(("mimo", "qwen2"), MtpFamily(hidden_first=True)),
    # stepfun's publication and vLLM's step3p5_mtp: state before the final norm, carry before the module's norm
    # (transformers 5.17 differs, and shares one head). The block slides like layer 1
    **dict.fromkeys(("step3p5", "step3p7"), MtpFamily(normed_state=False, normed_carry=False, like=1)),
    # SGLang's mimo_v2 MTP: every module reads the target's states; a sliding block with a dense MLP
    "mimo_v2_flash": MtpFamily(form="T", like=1),
}
"""Keys are the `model_type` of the text config or of the whole config."""


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
