"""The drafter of a checkpoint's MTP modules: one module or several draft chains and trees.

Publications give row p of module k the token t_{p+1+k}, so the last k rows of module k depend on drafts. Here a row is
numbered by its token instead, in the same way for every module:

    row (k, q)   token t_{q+1}, at position q and slot q        exists for q >= k
    state        k = 0: the target's, h_q
                 form C: the carry of row (k - 1, q - 1)        form T: h_{q-k}, the state that row (k - 1, q - 1) read

So K/V of slot q depend only on tokens up to q + 1, as the prefix cache requires. After a commit of m + 1 tokens all
modules run the same rows. The first new row of module k reads the last old row of module k - 1, so that row is kept for
each request. Depth 0 is the committed row S - 1, whose token is the root. The draft at depth l + 1 is
drawn from module l (form R: the only module) at the nodes of depth l.

For training and measurement, `chained_rows` drafts from every place of texts in a few dense forwards without pages.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Unpack

import torch
from torch import nn

from specdec.attention.bridge import ForwardContext
from specdec.attention.draft_attention import ChainAttention
from specdec.attention.kernels.draft_block import DraftPlan
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Fit, Observation, PromptObservation, TargetInfo
from specdec.draft_models.heads.draft_context import DraftContext, DraftTreeBuilder, StoreWorker, continued
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.draft_models.native_mtp.mtp_module import MtpModule
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.layer_context import LayerContext, OwnRows, ScoreOptions
from specdec.kvcache.layout import KVLayout
from specdec.modules.weight_watch import Weights


class DescribedTarget(Protocol):
    """A target with the text model after which its modules' blocks are built. model_types: of its text config and of
    the whole config."""

    name: str
    user_decoder: nn.Module
    model_types: tuple[str, str]
    layout: KVLayout


class MtpTarget(DescribedTarget, TargetInfo, Protocol):
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


class ModuleRows(NamedTuple):
    """Rows of a module [B, N, H]: the states that it read, and its y and z."""

    read: torch.Tensor
    y: torch.Tensor
    z: torch.Tensor


class NativeMtpDrafter(Drafter):
    """Modules fitted to a target; `native_mtp_drafter` makes one. source: the folder that they were read from."""

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
        self.max_steps = None if self.form == "R" else count
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

    def bind(self, binding: Binding) -> "NativeMtpWorker":
        return NativeMtpWorker(self, binding)

    def run(
        self, k: int, tokens: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, context: LayerContext
    ) -> ModuleRows:
        """Run rows of module k: tokens, positions [B, N], state [B, N, H]."""
        module = self.modules[k]
        embedded = (self.embed if module.embed is None else module.embed)(tokens)
        return ModuleRows(state, *module(embedded, state, positions, context, self.family.hidden_first))

    def carried_state(self, out: ModuleRows) -> torch.Tensor:
        """The carry: the state that a row passes to the next row, of the next module or of its own."""
        if self.family.form == "T":
            return out.read
        return out.z if self.family.normed_carry else out.y

    def logits(self, k: int, out: ModuleRows) -> torch.Tensor:
        head = self.modules[k].head
        return self.rule((self.head if head is None else head)(out.z))


class NativeMtpWorker(StoreWorker):
    """Modules in one engine. Keeps their K/V and, for each row and module, the last committed `ModuleRows`."""

    drafter: NativeMtpDrafter

    def __init__(self, drafter: NativeMtpDrafter, binding: Binding) -> None:
        super().__init__(drafter, binding)
        table = binding.cache.table
        shape = (len(drafter.modules), 3, table.max_requests + 1, drafter.width)
        self._last = torch.zeros(shape, dtype=drafter.dtype, device=binding.cache.allocator.device)

    @torch.inference_mode()
    def observe(self, seen: Observation | PromptObservation) -> None:
        """Run every module over the observed tokens [B, N]."""
        last: tuple[torch.Tensor | int, torch.Tensor]  # index of the last token of each of `rows` [R]
        if isinstance(seen, PromptObservation):
            pack, rows = seen.pack, seen.pack.rows
            first = (pack.positions == pack.start[pack.run_of])[None]  # [B, N]: is it its request's first token?
            before, last = rows[pack.run_of][None], (0, pack.last)  # before [B, N]: each token's row
        else:
            rows = seen.rows.index
            last = torch.arange(len(rows), device=rows.device), (seen.length - 1).clamp(min=0)
            first = (torch.arange(seen.path.shape[1], device=rows.device) == 0).expand_as(seen.path)
            before = rows[:, None].expand_as(seen.path)
        drafter, plan, made = self.drafter, self.plan_of(seen), list[ModuleRows]()
        state, tokens = self.rows_of(seen)
        for k in range(len(drafter.modules)):
            if k:
                above = drafter.carried_state(made[-1]).roll(1, dims=1)
                carried = drafter.carried_state(ModuleRows(*self._last[k - 1]))[before]
                state = torch.where(first[:, :, None], carried, above)
                state = state.masked_fill((plan.positions < k)[:, :, None], 0)  # this row does not exist
            context = ForwardContext.from_plan(replace(plan, first_key=k), self.own_view, drafter.windows)
            made.append(drafter.run(k, tokens, state, plan.positions, context))
        for kept, out in zip(self._last, made, strict=True):
            for part, rows_of in zip(kept, out, strict=True):
                part[rows] = rows_of[last]

    observe_prompts = observe

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Draft. Form R runs one forward per level; other forms run one for each module that still drafts."""
        drafter, backend, topk, levels = self.drafter, self.binding.backend, batch.topk, batch.num_steps
        pos = batch.positions()  # [levels + 1, B], S first
        count = len(drafter.modules)
        node_pos = pos[:, :, None].expand(-1, -1, topk).contiguous()  # [levels + 1, B, K]
        draft = DraftPlan(
            self.binding.cache.table, batch.rows, pos[: levels - 1], topk, drafter.windows, first_keys=range(count)
        )
        block = backend.draft_block(self.store, draft) if levels > 1 else None
        outs = {k: ModuleRows(*kept[:, batch.rows.index, None]) for k, kept in enumerate(self._last)}  # [B, 1, H] each
        builder = DraftTreeBuilder(batch, backend)
        for level in range(levels):
            logits = drafter.logits(min(level, count - 1), outs[min(level, count - 1)])
            beam, origin = builder.add_level(logits, node_pos[level + 1, :, : logits.shape[1]])  # [B, K]
            if block is None or level + 1 == levels:
                break
            block.enter_level(origin if level else None)
            context = DraftContext(block, backend, topk, range(count))
            new = {}
            for k in [0] if drafter.form == "R" else range(level + 1, count):
                above = outs[k if drafter.form == "R" else k - 1]
                state = continued(drafter.carried_state(above), origin)
                new[k] = drafter.run(k, beam, state, node_pos[level], context)
            outs = new
        return builder.select()


class ChainContext(LayerContext):
    """A forward context for modules over positions [B, T], whose layers run packed rows."""

    def __init__(self, windows: Sequence[int | None], pos: torch.Tensor) -> None:
        self.batch = len(pos)
        self.chains = ChainAttention(windows, 1.0, pos)

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """q [B * T, Hq, D], k and v [B * T, Hkv, D] -> [B * T, Hq, D]."""
        assert k is not None and v is not None, "a module has K/V of its own"
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        out = self.chains(layer, q * options["scaling"], k, v, options.get("softcap"), options.get("sinks"))
        return out.flatten(0, 1).contiguous()


def chained_rows(
    drafter: NativeMtpDrafter,
    tokens: torch.Tensor,
    states: torch.Tensor,
    pos: torch.Tensor,
    num_steps: int,
    places: torch.Tensor | None = None,
) -> Iterator[ModuleRows]:
    """States [B, T, H] from which draft 1, 2, ... is drawn, at each place of tokens and pos [B, T]:

    place p, draft j + 1     token t_{p+1+j}, the text's own; predicts t_{p+2+j}
    state                    j = 0: the target's at row p           j > 0: the state that row (p, j - 1) passes on

    One module (form R) runs again for each draft; a place's rows see keys of true states up to p and their own keys, as
    in the draft block. Several modules run over the whole text one after another, since their rows depend only on the
    tokens. Several texts may be packed into a row; position 0 begins a text. states: of the target, [B, T, H], as the
    drafter's conventions require. places [P]: only these places are used.
    """
    recurrent = drafter.form == "R"
    context = ChainContext(drafter.windows, pos)
    at: slice | torch.Tensor = slice(None) if places is None else places
    here: slice | torch.Tensor = slice(None) if recurrent else at
    for step in range(num_steps):
        context.chains.step = step if recurrent else 0
        row_tokens, row_pos = tokens.roll(-1 - step, 1), pos + step
        if recurrent and step:
            row_tokens, row_pos = row_tokens[:, at], row_pos[:, at]
        out = drafter.run(0 if recurrent else step, row_tokens, states, row_pos, context)
        if recurrent and not step:
            context.chains.rows = places
            out = ModuleRows(*(part[:, at] for part in out))
        yield ModuleRows(*(part[:, here] for part in out))
        states = drafter.carried_state(out)
