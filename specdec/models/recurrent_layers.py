"""Replaces transformers' recurrent layers: projections and norms are the module's own; the forward's `RecurrentContext`
runs convolution and recurrence.

Each class of module has a row of `MIXERS`, which derives inputs of convolution and recurrence from the projections.
They replace the modules of a private copy of a decoder. As for attention, the probe checks the result when a target is
made.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from specdec.errors import UnsupportedModelError
from specdec.kvcache.layer_context import Recurrence, RecurrentContext
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.recurrent_state import FOLD
from specdec.layers.gated_delta import unit_length
from specdec.modules.transformers_names import cache_argument, cache_name


class Mixer(nn.Module):
    """Replaces a recurrent module and reads its weights."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source: Any = source

    def forward(
        self, hidden_states: torch.Tensor, *_args: Any, specdec_ctx: RecurrentContext | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """[1, T, H] -> [1, T, H]. The context arrives as the cache if a layer passes on nothing else."""
        context = kwargs[cache_name(type(self.source).forward)] if specdec_ctx is None else specdec_ctx
        return self.mixed(hidden_states[0], context)[None]

    def mixed(self, x: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        raise NotImplementedError

    def convolved(self, inputs: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        """inputs [T, C] -> [T, C] after the convolution and, if there is one, its activation."""
        source, conv = self.source, self.convolution
        out = context.convolve(source.layer_idx, inputs, conv.weight[:, 0], conv.bias)
        activation = getattr(source, "activation", None)
        return out if activation is None else ACT2FN[activation](out)

    @property
    def convolution(self) -> nn.Conv1d:
        conv: nn.Conv1d = self.source.conv1d if hasattr(self.source, "conv1d") else self.source.conv
        return conv


class GatedDeltaNet(Mixer):
    """Qwen3-Next, and Qwen3.5 and later."""

    def mixed(self, x: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        source = self.source
        inputs, z, b, a = self._projected(x)
        q, k, v = self.convolved(inputs, context).split([source.key_dim, source.key_dim, source.value_dim], dim=-1)
        q, k = (y.unflatten(-1, (source.num_k_heads, -1)).float() for y in (q, k))
        g = -source.A_log.float().exp() * F.softplus(a.float() + source.dt_bias)
        rows = Recurrence(
            unit_length(q) * source.head_k_dim**-0.5,
            unit_length(k),
            v.unflatten(-1, (source.num_v_heads, -1)),
            g,
            b.sigmoid(),
        )
        out = context.recur(source.layer_idx, rows).to(x.dtype)  # [T, HV, DV]
        gated = source.norm(out.flatten(0, 1), z.reshape(-1, source.head_v_dim)).view(len(x), -1)
        projected: torch.Tensor = source.out_proj(gated)
        return projected

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the convolution [T, C], the output gate z, and b and a [T, HV]."""
        source = self.source
        if hasattr(source, "in_proj_qkvz"):
            parts = source.fix_query_key_value_ordering(source.in_proj_qkvz(x)[None], source.in_proj_ba(x)[None])
            q, k, v, z, b, a = (part[0] for part in parts)
            return torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1), z, b, a
        return source.in_proj_qkv(x), source.in_proj_z(x), source.in_proj_b(x), source.in_proj_a(x)


class Mamba2(Mixer):
    """Granite 4, Nemotron-H and Bamba: v is the input times its step, groups of heads share keys and queries, and there
    is no delta rule."""

    def mixed(self, x: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        source = self.source
        groups = source.n_groups * source.ssm_state_size
        gate, inputs, dt = source.in_proj(x).split(
            [source.intermediate_size, source.conv_dim, source.num_heads], dim=-1
        )
        v, k, q = self.convolved(inputs, context).split([source.intermediate_size, groups, groups], dim=-1)
        k, q = (y.unflatten(-1, (source.n_groups, -1)).float() for y in (k, q))
        v = v.unflatten(-1, (source.num_heads, -1)).float()
        step = F.softplus(dt.float() + source.dt_bias.float()).clamp(*source.time_step_limit)  # [T, HV]
        g = -source.A_log.float().exp() * step
        out = context.recur(source.layer_idx, Recurrence(q, k, v * step[:, :, None], g, None))
        out = (out + v * source.D.float()[:, None]).flatten(1)
        projected: torch.Tensor = source.out_proj(source.norm(out, gate).to(x.dtype))
        return projected


class ShortConvolution(Mixer):
    """LFM2: a convolution between two gates, without a recurrence."""

    def mixed(self, x: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        before, after, inputs = self.source.in_proj(x).chunk(3, dim=-1)
        projected: torch.Tensor = self.source.out_proj(after * self.convolved(before * inputs, context))
        return projected


MIXERS: dict[str, Callable[[nn.Module], Mixer]] = {
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}


def replace_recurrent_modules(name: str, decoder: nn.Module, layout: KVLayout) -> None:
    """Replace the recurrent modules of a private copy by mixers. Raises UnsupportedModelError for a recurrent layer
    that is not in `MIXERS`, and for a convolution that a state cannot hold."""
    found = set()
    for parent in list(decoder.modules()):
        for key, module in parent._modules.items():
            if (make := MIXERS.get(type(module).__name__)) is not None and module is not None:
                parent._modules[key] = mixer = make(module)
                if isinstance(mixer, ShortConvolution):
                    parent.register_forward_pre_hook(_context_as_cache, with_kwargs=True)
                [taps] = mixer.convolution.kernel_size
                if not 2 <= taps <= FOLD + 1:
                    raise UnsupportedModelError(
                        f"{name}: layer {module.layer_idx} convolves {taps} tokens; 2 to {FOLD + 1} are supported, "
                        "since a state keeps up to a block of the inputs before a token"
                    )
                found.add(int(module.layer_idx))  # type: ignore[arg-type]
    missing = [spec for spec in layout.layers if spec.recurrent and spec.layer not in found]
    if missing:
        layer: nn.Module = decoder.layers[missing[0].layer]  # type: ignore[index, assignment]
        has = ", ".join(type(child).__name__ for child in layer.children() if hasattr(child, "layer_idx"))
        raise UnsupportedModelError(
            f"{name}: layer {missing[0].layer} is of type {missing[0].layer_type!r}, and its module ({has}) is none of "
            f"{', '.join(MIXERS)}, so its state cannot be kept"
        )


def _context_as_cache(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the context as the cache: before transformers 5.24, a layer passes a short convolution only a cache, not our
    keyword."""
    return args, {**kwargs, **cache_argument(layer, kwargs.get("specdec_ctx"))}
