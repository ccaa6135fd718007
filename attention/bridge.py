"""The bridge into Hugging Face models: one attention function, and the context of a forward that answers its calls.

`transformers` calls the function registered as "specdec" from every attention layer, with post-RoPE queries and the new
tokens' keys and values, and passes on our keyword `specdec_ctx`. The function hands the call to that context. No mask
function is registered under this name, so transformers builds no masks. Only the engine's private copy of a model uses
the function (`private_copy.py`); the user's model is not changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Unpack

import torch
from torch import nn
from transformers import AttentionInterface

from specdec.attention.plan import Attend, KVPlan
from specdec.errors import SpecDecError
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import (
    AttentionCall,
    Destination,
    LayerContext,
    Recurrence,
    RecurrentContext,
    ScoreOptions,
)
from specdec.kvcache.layout import GroupId
from specdec.modules.own_attention import ATTENTION_NAME

IGNORED_KWARGS = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "is_causal"}
    | {"cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_embeddings"}
    | {"logits_to_keep", "num_items_in_batch", "return_shared_kv_states", "return_dict"}
)
"""Keywords of an attention call that are ignored, since they do not change its result. Any other tensor is refused."""


def specdec_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | LayerContext | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    specdec_ctx: LayerContext | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: queries [1, Hq, B*N, D] -> [1, B*N, Hq, D], or [B*N, Hq, 1, D] -> [B*N, 1, Hq,
    D]. The context is a keyword or, in layers that pass none, the mask."""
    context = attention_mask if specdec_ctx is None else specdec_ctx
    if context is None or isinstance(context, torch.Tensor):
        raise SpecDecError(
            "the attention implementation 'specdec' works inside a specdec engine only; "
            "restore the model with model.set_attn_implementation('sdpa') to call it yourself"
        )
    layer = int(getattr(module, "layer_idx", -1))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(layer, query, key, value, scaling, sliding_window, s_aux, softcap, extra)
    return context.attend(call).contiguous(), None  # some models call `view` on it


AttentionInterface.register(ATTENTION_NAME, specdec_attention)


@dataclass(frozen=True, slots=True)
class ForwardContext(LayerContext):
    """One forward: its plan, the view through which it reads and writes KV, and the window of each layer.

    attention: the `Attend` of this forward for each (group, window, shares) of its layers.
    states: hidden states [1, B*N, H], keyed by the layer that they enter; filled while the layers run.
    other_ranks: this forward's contexts on the ranks after the first, each with its rank's heads; empty on one device.
    recurrent: computes the recurrent layers; None: the model has none.
    """

    plan: KVPlan
    view: KVView
    windows: Sequence[int | None]
    attention: dict[tuple[GroupId, int | None, int], Attend]
    states: dict[int, torch.Tensor | None]
    other_ranks: tuple["ForwardContext", ...] = ()
    recurrent: RecurrentContext | None = None

    @classmethod
    def from_plan(
        cls, plan: KVPlan, view: KVView, windows: Sequence[int | None], aux_layers: Sequence[int] = ()
    ) -> "ForwardContext":
        """`windows[i]` is the sliding window of worker layer i, None on full layers; empty: the forward only stores
        K/V. aux_layers: see `states`."""
        context = cls._of_rank(plan, view, windows, aux_layers)
        view.ranks.begin()
        other_ranks = []
        for rank, (own_plan, own) in enumerate(zip(view.ranks.send(plan)[1:], view.other_ranks, strict=True), start=1):
            with view.ranks.on(rank):
                other_ranks.append(cls._of_rank(own_plan, own, windows, ()))
        return replace(context, other_ranks=tuple(other_ranks))

    @classmethod
    def _of_rank(
        cls, plan: KVPlan, view: KVView, windows: Sequence[int | None], aux_layers: Sequence[int]
    ) -> "ForwardContext":
        attending = [layer for layer in range(len(windows)) if not view.spec(layer).recurrent]
        kinds = {(view.layer(layer).group, windows[layer], view.spec(layer).shares) for layer in attending}
        attention = {kind: plan.backend.attention(plan, *kind) for kind in kinds}
        recurrent = plan.backend.recurrence(plan, view) if len(attending) < len(windows) else None
        return cls(plan, view, windows, attention, dict.fromkeys(aux_layers), recurrent=recurrent)

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `RecurrentContext`."""
        assert self.recurrent is not None
        return self.recurrent.convolve(layer, inputs, weight, bias)

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """See `RecurrentContext`."""
        assert self.recurrent is not None
        return self.recurrent.recur(layer, rows)

    def destination(self, layer: int) -> Destination | None:
        if self.plan.write is None or not self.view.owns(layer):
            return None
        layer_kv = self.view.writable_layer(layer)
        return Destination(layer_kv.k, layer_kv.v, self.plan.write_slots(layer_kv.group))

    def store(self, destination: Destination, k: torch.Tensor, v: torch.Tensor) -> None:
        self.plan.backend.store(destination, k, v)

    def attend_tokens(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        **options: Unpack[ScoreOptions],
    ) -> torch.Tensor:
        """See `LayerContext`. Attention reads k and v from the pools."""
        if self.other_ranks and not self.view.writable:
            return self._attend_on_ranks(layer, q, **options)
        return self._attend_own(layer, q, **options)

    def _attend_own(self, layer: int, q: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """Attend with this rank's heads. Pools and page table always belong to one group: `layer_kv` holds the pools,
        and its group chooses the `Attend`, which the backend made from the plan's page table of that group."""
        layer_kv = self.view.layer(layer)
        attend = self.attention[layer_kv.group, self.windows[layer], self.view.spec(layer).shares]
        query = q.view(*self.plan.positions.shape, *q.shape[1:]).transpose(1, 2)  # [B, Hq, N, D]
        return attend(query, layer_kv.k, layer_kv.v, **options).flatten(0, 1)  # [B * N, Hq, D]

    def _attend_on_ranks(self, layer: int, q: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """`attend_tokens` for a frozen drafter, which runs on rank 0 and reads K/V heads of all ranks. Each rank
        attends with the queries of its heads, and rank 0 collects [T, Hq, D]. Ranks that hold copies of one K/V head
        get the same queries if there are too few to divide."""
        ranks = self.view.ranks
        assert options.get("sinks") is None, f"{options.keys()=}"
        count, attended = len(ranks), []
        parts = gcd(q.shape[1], count)
        for rank, (context, sent) in enumerate(zip((self, *self.other_ranks), ranks.send(q), strict=True)):
            with ranks.on(rank):
                heads = sent.chunk(parts, dim=1)[rank * parts // count].contiguous()
                attended.append(context._attend_own(layer, heads, **options))
        by_part = ranks.collect(attended)[:: count // parts]  # [parts, T, Hq / parts, D]
        return by_part.transpose(0, 1).flatten(1, 2)


def record_states(layers: Sequence[nn.Module]) -> None:
    """Hook the layers of a private copy. The hooks fill `states` of a forward's context, for the layers that it has as
    keys.

    The hooks stay; if a context asks for no state, they cost one look-up per layer.
    """

    def entering(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = _states_asked_for(kwargs)
            if layer in states:
                states[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def leaving(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        states = _states_asked_for(kwargs)
        if len(layers) in states:
            states[len(layers)] = out[0] if isinstance(out, tuple) else out

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(entering(number), with_kwargs=True)
    layers[-1].register_forward_hook(leaving, with_kwargs=True)


def _states_asked_for(kwargs: dict[str, Any]) -> dict[int, torch.Tensor | None]:
    """`states` of the context in a layer's keywords; empty if the context asks for none."""
    return getattr(kwargs.get("specdec_ctx"), "states", {})
