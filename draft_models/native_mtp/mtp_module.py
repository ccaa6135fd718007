"""One MTP module: norms, a projection, and a block that is one decoder layer of the target's own class.

The block runs as a text model of one layer, a copy of the target's around another layer: rotary tables, kinds of layers
and fused forms are the target's, and nothing is written twice.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from specdec.draft_models.heads.fused_form import Echo, why_unfused
from specdec.draft_models.heads.head_spec import HeadContext
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import CheckpointError, first_line
from specdec.gpu.operations import Operations
from specdec.layers.decoder import FusedDecoder
from specdec.layers.fuse import FusedNorm, fuse, fuse_linear
from specdec.modules.private_copy import private_copy

State = Mapping[str, torch.Tensor]


class MtpModule(nn.Module):
    """A module by its tensors, `state` by place (`mtp_families.py`). decoder: the target's text model. family: says
    which of its layers the block is like. number: of the module, by which it keeps K/V. layer: the block, where it is
    not in `state`.

    embed, head: its own; None: the target's. Raises CheckpointError for tensors that are not those of such a module.
    """

    def __init__(
        self, state: State, decoder: Any, family: MtpFamily, number: int, layer: nn.Module | None = None
    ) -> None:
        super().__init__()
        rest = dict(state)
        weight: torch.Tensor = decoder.norm.weight
        self.width = width = len(weight)

        def norm(part: str) -> nn.Module:
            made: nn.Module = copy.deepcopy(decoder.norm)
            made.weight = _parameter(rest.pop(f"{part}.weight"), weight, (width,), part)
            return made

        def linear(part: str, inputs: int, outputs: int | None = None) -> nn.Linear:
            stored = rest.pop(f"{part}.weight")
            if stored.shape == (inputs, outputs):  # ERNIE-4.5-300B holds the transposed one
                stored = stored.t()
            bias = rest.pop(f"{part}.bias", None)
            made = nn.Linear(inputs, len(stored), bias=bias is not None, device="meta")
            made.weight = _parameter(stored, weight, (outputs or len(stored), inputs), part)
            if bias is not None:
                made.bias = _parameter(bias, weight, (len(stored),), part)
            return made

        self.enorm, self.hnorm = norm("enorm"), norm("hnorm")
        self.proj: nn.Module = linear("proj", 2 * width, width)
        self.norm = norm("norm") if "norm.weight" in rest else nn.Identity()
        self.head = linear("head", width) if "head.weight" in rest else None
        self.embed: nn.Module | None = None
        if "embed.weight" in rest:
            table = rest.pop("embed.weight")
            self.embed = nn.Embedding(len(table), table.shape[1], device="meta")
            self.embed.weight = _parameter(table, weight, tuple(table.shape), "embed")
        block = {name.removeprefix("block."): tensor for name, tensor in rest.items()}
        config, like = block_like(decoder, family)
        self.layer = filled_layer(block, decoder, config, like) if layer is None else layer
        for part in self.layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number  # type: ignore[assignment]
        self.number = number
        self._source = decoder, config, like, self.layer
        self.block: Any = one_layer_decoder(*self._source, nn.Identity())

    def fuse(self, name: str, ops: Operations) -> str | None:
        """Run by fused layers if they compute what its own do; else the reason why not."""
        plain = self.block, self.proj, self.enorm, self.hnorm

        def fused() -> torch.Tensor:
            self.block = fuse(one_layer_decoder(*self._source, self.norm), ops)
            self.block.layers[0].index = self.number
            self.proj = fuse_linear(plain[1], ops)
            self.enorm, self.hnorm = (FusedNorm(norm, self._source[0], ops) for norm in plain[2:])
            return self.probed()

        reason = why_unfused(name, self, 1, self.probed, fused)
        if reason is not None:
            self.block, self.proj, self.enorm, self.hnorm = plain
        return reason

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: HeadContext, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded, hidden [B, N, H], positions [B, N] -> y and z [B, N, H]. first: the hidden half is the
        first."""
        halves = self.enorm(embedded), self.hnorm(hidden)
        x = self.proj(torch.cat(halves[::-1] if first else halves, -1)).flatten(0, 1)[None]
        places = positions.reshape(1, -1)
        if isinstance(self.block, FusedDecoder):
            walk = self.block.walk(None, places, context, None, x)
            walk.advance(1)
            normed = walk.finish()
            assert normed is not None
            return walk.hidden.view_as(hidden), normed.view_as(hidden)
        out = self.block(inputs_embeds=x, position_ids=places, use_cache=False, specdec_ctx=context)
        y: torch.Tensor = out.last_hidden_state.view_as(hidden)
        return y, self.norm(y)

    @torch.inference_mode()
    def probed(self) -> torch.Tensor:
        """y and z of six random rows, [12, H] float32."""
        weight, random = self.enorm.weight, torch.Generator().manual_seed(0)
        rows = torch.randn((2, 2, 3, self.width), generator=random).to(weight.device, weight.dtype)  # type: ignore[arg-type]
        positions = torch.arange(6, device=rows.device).view(2, 3) * 100
        with torch.autocast(rows.device.type, enabled=False):
            return torch.cat(self.forward(rows[0], rows[1], positions, Echo(), False)).flatten(0, 1).float()


def block_like(decoder: Any, family: MtpFamily) -> tuple[Any, int]:
    """The config, and the number in it, of the layer that blocks of modules are like: one of the text model's, but for
    the family's `fields`, as far as the config has them."""
    assert isinstance(family.like, int), "a layer of this target"
    config = copy.deepcopy(decoder.config)
    for name, value in family.fields.items():
        if (values := getattr(config, name, None)) is not None:
            values = list(values)
            values[family.like] = value
            setattr(config, name, values)
    return config, family.like % len(decoder.layers)


def empty_block(decoder: Any, config: Any, like: int) -> nn.Module:
    """A layer of the text model's class on `meta`, as `block_like` describes it."""
    with torch.device("meta"):
        block: nn.Module = type(decoder.layers[like])(config, like)
    return block


def block_kinds(decoder: Any) -> dict[str, torch.Tensor]:
    """Tensors with the type and the device of a block's, by name: those that layers of the text model have."""
    return {name: tensor for layer in decoder.layers for name, tensor in layer.state_dict().items()}


def one_layer_decoder(decoder: Any, config: Any, like: int, layer: nn.Module, norm: nn.Module) -> nn.Module:
    """A private copy of a text model with this layer alone, which is like layer `like` of `config`, and this final
    norm."""
    single = object.__new__(type(decoder))
    single.__dict__ = dict(decoder.__dict__)
    single.config = copy.deepcopy(config)
    for name, value in list(vars(single.config).items()):
        if isinstance(value, (list, tuple)) and len(value) == len(decoder.layers):
            setattr(single.config, name, [value[like]])
    single.config.num_hidden_layers = 1
    single._modules = {**decoder._modules, "layers": nn.ModuleList([layer]), "norm": norm}
    return private_copy(single)


def filled_layer(block: State, decoder: Any, config: Any, like: int) -> nn.Module:
    """A layer of the target's class with these tensors, in the types of layers that have them: layer `like` of
    `config`. Raises CheckpointError unless they are its own."""
    kinds = block_kinds(decoder)
    holder = _Holder(config, empty_block(decoder, config, like))
    mapping: Any = get_model_conversion_mapping(decoder, add_legacy=False)
    try:
        info, _ = convert_and_load_state_dict_in_model(
            model=holder,
            state_dict={f"layers.0.{name}": tensor for name, tensor in block.items()},
            load_config=LoadStateDictConfig(weight_mapping=mapping),
        )
    except RuntimeError as error:
        raise CheckpointError(f"its block cannot be read: {first_line(error)}") from error
    faults = [f"{name.removeprefix('layers.0.')} is missing" for name in sorted(info.missing_keys)]
    faults += [f"{name.removeprefix('layers.0.')} is not known" for name in sorted(info.unexpected_keys)]
    faults += [
        f"{name.removeprefix('layers.0.')} is {list(has)}, not {list(says)}"
        for name, has, says in sorted(info.mismatched_keys)
    ]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(f"its block is no layer like the target's layer {like}: tensor {faults[0]}{more}")
    layer: nn.Module = holder.layers[0]
    for name, param in layer.named_parameters():
        param.data = param.data.to(kinds.get(name.removeprefix("layers.0."), decoder.norm.weight))
        param.requires_grad_(False)
    return layer.to(decoder.norm.weight.device).eval()


class _Holder(PreTrainedModel):
    """A layer as transformers loads it."""

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, config: Any, layer: nn.Module) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([layer])

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Nothing runs here."""
        return requested_experts or "eager"


def _parameter(stored: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...], part: str) -> nn.Parameter:
    if tuple(stored.shape) != shape:
        raise CheckpointError(f"its {part} is {list(stored.shape)}, expected {list(shape)}")
    return nn.Parameter(stored.to(like.device, like.dtype).contiguous(), requires_grad=False)
