"""One MTP module: norms, a projection, and a block, which is a decoder layer of the target's class.

The block runs as a text model of one layer: a copy of the target's text model around this layer. So it uses the
target's rotary tables, layer kinds and fused forms.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from specdec.draft_models.checkpoints.checkpoint_files import is_unquantised
from specdec.draft_models.heads.fused_layers import EchoContext, Parts, fuse_in_place
from specdec.errors import CheckpointError, UnsupportedModelError, first_line
from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import LayerContext
from specdec.layers.fuse import FusedNorm, fuse, fuse_linear
from specdec.modules.private_copy import private_copy

State = Mapping[str, torch.Tensor]
LoadPacked = Callable[[PreTrainedModel, State, Mapping[str, str], list[Any]], Any]
"""Loads a model whose tensors may be packed: (model, tensors by the model's names, their keys in the checkpoint,
conversions) -> transformers' loading report."""


class MtpModule(nn.Module):
    """A module made of its parts (`read_parts`). decoder: the target's text model. like: its layer that the block
    copies. number: the module's number, which indexes its K/V. embed, head: the module's own; None: the target's."""

    def __init__(self, parts: Mapping[str, nn.Module], decoder: Any, like: int, number: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.proj, self.layer = (parts[name] for name in ("enorm", "hnorm", "proj", "layer"))
        self.norm = parts.get("norm", nn.Identity())
        self.embed, self.head = parts.get("embed"), parts.get("head")
        self.number, self.width = number, len(decoder.norm.weight)
        self._decoder = [decoder]  # in a list, so that it is no sub-module
        self.block: Any = one_layer_decoder(decoder, like, self.layer, number)

    def like_layer(self, like: int) -> "MtpModule":
        """A module of these weights (packed ones stay packed), unfused, with a block like another layer. Raises
        CheckpointError if they do not fit."""
        decoder, parts = self._decoder[0], self.parts()
        return MtpModule(parts | {"layer": layer_like(decoder, like, parts["layer"])}, decoder, like, self.number)

    def parts(self) -> dict[str, nn.Module]:
        """The module's own parts by name. "layer" has the weights; `self.block` is the decoder that runs it."""
        names = ("enorm", "hnorm", "proj", "norm", "head", "embed", "layer")
        found = {name: getattr(self, name) for name in names}
        return {name: getattr(part, "source", part) for name, part in found.items() if part is not None}  # or fused

    def fuse(self, name: str, ops: Operations) -> str | None:
        """Run the block by fused layers if they compute the same. Returns the reason if they do not, else None."""

        def fused() -> Parts:
            block: Any = fuse(self.block, ops)
            block.layers[0].index = self.number
            names = [name for name in ("enorm", "hnorm", "norm") if not isinstance(getattr(self, name), nn.Identity)]
            norms = [(self, name, FusedNorm(getattr(self, name), self._decoder[0], ops)) for name in names]
            return [(self, "block", block), (self, "proj", fuse_linear(self.proj, ops)), *norms]

        return fuse_in_place(name, self, 1, self.probed, fused)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: LayerContext, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows: embedded, hidden [B, N, H], positions [B, N] -> y and z [B, N, H]. first: the hidden half comes
        first."""
        halves = self.enorm(embedded), self.hnorm(hidden)
        x = self.proj(torch.cat(halves[::-1] if first else halves, -1)).flatten(0, 1)[None]
        out = self.block(inputs_embeds=x, position_ids=positions.reshape(1, -1), use_cache=False, specdec_ctx=context)
        y: torch.Tensor = out.last_hidden_state.view_as(hidden)
        return y, self.norm(y)

    def probed(self) -> torch.Tensor:
        """y and z of six random rows, [12, H] float32."""
        weight, random = self.enorm.weight, torch.Generator().manual_seed(0)
        rows = torch.randn((2, 2, 3, self.width), generator=random, dtype=torch.float32, device="cpu")
        rows = rows.to(weight.device, weight.dtype)  # type: ignore[arg-type]
        positions = torch.arange(6, device=rows.device).view(2, 3) * 100
        return torch.cat(self.forward(rows[0], rows[1], positions, EchoContext(), False)).flatten(0, 1).float()


STACK_FIELDS = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""Config fields that make layers of Gemma 3n and 4 read tensors of the whole stack. A module's block does not read
them."""


def own_config(decoder: Any) -> Any:
    """A copy of a text model's config for a single layer."""
    config = copy.deepcopy(decoder.config)
    for name in STACK_FIELDS:
        if getattr(config, name, 0):
            setattr(config, name, 0)
    return config


def empty_layer(decoder: Any, like: int, mlp: int | None = None) -> Any:
    """A layer like layer `like` of a text model, without weights. mlp: the layer that its MLP copies; None: `like`
    too."""
    config, count = own_config(decoder), len(decoder.layers)
    with torch.device("meta"):
        made = type(decoder.layers[like])(config, like % count)
        if mlp is not None and mlp != like % count:
            made.mlp = type(decoder.layers[mlp])(config, mlp).mlp
    return made


def layer_like(decoder: Any, like: int, layer: nn.Module) -> Any:
    """A layer like layer `like` of a text model, with the weights of `layer`. Raises CheckpointError if they do not
    fit."""
    made = empty_layer(decoder, like, nearest_mlp(decoder, like, _has_experts(layer.state_dict())))
    try:
        for name, part in layer.named_modules():
            place = made.get_submodule(name)
            if isinstance(place, nn.Linear) and (place.in_features, place.out_features) == (
                getattr(part, "in_features", None),
                getattr(part, "out_features", None),
            ):
                made.set_submodule(name, part)  # the part may be packed
        made.load_state_dict(layer.state_dict(), assign=True)
    except (AttributeError, RuntimeError) as error:
        reason = first_line(error)
        raise CheckpointError(f"its block's tensors do not fit the target's layer {like}: {reason}") from error
    return made.requires_grad_(False).eval()


def nearest_mlp(decoder: Any, like: int, routed: bool) -> int:
    """The layer nearest to `like` with experts (routed) or without; `like` itself if there is no such layer."""
    layers = list(decoder.layers)
    like %= len(layers)
    alike = [number for number, layer in enumerate(layers) if _has_experts(layer.state_dict()) == routed]
    return min(alike, key=lambda number: abs(number - like), default=like)


def require_known_parts(decoder: Any) -> None:
    """Raise UnsupportedModelError unless a text model has the parts that modules are made like, under their names."""
    for path in ("layers", "norm", "norm.weight", "layers.0.mlp"):
        part: Any = decoder
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is None:
            raise UnsupportedModelError(
                f"an MTP module is made like parts of the target, and {type(decoder).__name__} has no `{path}`; choose "
                "another kind of drafter"
            )


def decoder_on_device(decoder: Any, device: torch.device) -> Any:
    """A text model whose norm and rotary tables are on `device`, where modules run. Its layers and embedding are not
    moved; they may be in host memory if several devices share the target."""
    if decoder.norm.weight.device == device:
        return decoder
    made = copy.copy(decoder)
    made._buffers = {name: None if buffer is None else buffer.to(device) for name, buffer in decoder._buffers.items()}
    made._modules = {
        name: part if isinstance(part, (nn.ModuleList, nn.Embedding)) else copy.deepcopy(part).to(device)
        for name, part in decoder._modules.items()
    }
    return made


def one_layer_decoder(decoder: Any, like: int, layer: nn.Module, number: int) -> nn.Module:
    """A private copy of a text model with only this layer, which is like its layer `like`, and no final norm. The layer
    keeps K/V under `number`."""
    parts: list[Any] = list(layer.modules())
    for part in parts:
        if hasattr(part, "layer_idx"):
            part.layer_idx = number
    single = object.__new__(type(decoder))
    single.__dict__ = dict(decoder.__dict__)
    single.config = own_config(decoder)
    for name in STACK_FIELDS:
        if hasattr(single, name):
            setattr(single, name, 0)
    for name, value in list(vars(single.config).items()):
        if isinstance(value, (list, tuple)) and len(value) == len(decoder.layers):
            setattr(single.config, name, [value[like]])
    single.config.num_hidden_layers = 1
    single._modules = {**decoder._modules, "layers": nn.ModuleList([layer]), "norm": nn.Identity()}
    return private_copy(single)


def read_parts(
    state: State, decoder: Any, like: int, keys: Mapping[str, str] | None = None, load_packed: LoadPacked | None = None
) -> dict[str, nn.Module]:
    """Make a module's parts from its tensors `state`, by place (`PARTS`), in the dtypes of the target's
    layers. The layer is of the target's class: its attention is like layer `like`, its MLP like the nearest layer with
    experts if the tensors have experts, else like the nearest without. keys: of the tensors in the checkpoint;
    load_packed: loads packed tensors. Raises CheckpointError if tensors do not fit."""
    layers, mlp = decoder.layers, nearest_mlp(decoder, like, _has_experts(state))
    theirs = layers[like].state_dict() | layers[mlp].mlp.state_dict(prefix="mlp.")
    dtypes = {f"layers.0.{name}": tensor.dtype for name, tensor in theirs.items() if is_unquantised(tensor)}
    with torch.device("meta"):
        holder: Any = _Holder(decoder, empty_layer(decoder, like, mlp), state)
    mapping: Any = get_model_conversion_mapping(decoder, add_legacy=False)
    tensors = {_in_holder(place): tensor for place, tensor in state.items()}
    params = dict(holder.named_parameters())
    if (proj := tensors.get("proj.weight")) is not None and proj.shape == holder.proj.weight.shape[::-1]:
        tensors["proj.weight"] = proj.t().contiguous()  # ERNIE-4.5-300B stores it transposed
    plain = (name for name in params.keys() & tensors.keys() if is_unquantised(tensors[name]))
    misfits = {(name, tensors[name].shape, params[name].shape) for name in plain}  # with packed ones, none are checked
    try:
        if load_packed is not None and not all(map(is_unquantised, tensors.values())):
            info = load_packed(
                holder, tensors, {_in_holder(place): key for place, key in (keys or {}).items()}, mapping
            )
        else:
            config = LoadStateDictConfig(weight_mapping=mapping)
            info, _ = convert_and_load_state_dict_in_model(model=holder, state_dict=tensors, load_config=config)
    except RuntimeError as error:
        raise CheckpointError(f"its tensors cannot be read: {first_line(error)}") from error
    faults = [f"{name.removeprefix('layers.0.')} is missing" for name in sorted(info.missing_keys)]
    faults += [f"{name.removeprefix('layers.0.')} is not known" for name in sorted(info.unexpected_keys)]
    faults += [
        f"{name.removeprefix('layers.0.')} is {list(has)}, not {list(says)}"
        for name, has, says in sorted(misfits | set(info.mismatched_keys))
        if has != says
    ]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(
            f"it is no MTP module with a block like the target's layer {like}: tensor {faults[0]}{more}; it has "
            f"{', '.join(sorted(state))}"
        )
    for name, param in holder.named_parameters():
        param.data = param.data.to(decoder.norm.weight.device, dtypes.get(name, decoder.norm.weight.dtype))
        param.requires_grad_(False)
    parts = dict(holder.to(decoder.norm.weight.device).eval().named_children())
    [parts["layer"]] = parts.pop("layers")
    return parts


def _in_holder(place: str) -> str:
    return f"layers.0.{place.removeprefix('block.')}" if place.startswith("block.") else place


def _has_experts(names: Iterable[str]) -> bool:
    return any(re.search(r"(?:^|\.)(?:experts|moe)\.", name) for name in names)


class _Holder(PreTrainedModel):
    """Holds the parts that a module's tensors `state` name, so that transformers can load them."""

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    base_model_prefix = "module"  # with "", transformers reads enorm and hnorm as norm

    def __init__(self, decoder: Any, layer: nn.Module, state: State) -> None:
        config = decoder.config
        super().__init__(config)
        self.all_tied_weights_keys: dict[str, str] = {}
        width = config.hidden_size
        self.enorm, self.hnorm = copy.deepcopy(decoder.norm), copy.deepcopy(decoder.norm)
        self.proj = nn.Linear(2 * width, width, bias="proj.bias" in state)
        self.layers = nn.ModuleList([layer])
        if "norm.weight" in state:
            self.norm = copy.deepcopy(decoder.norm)
        if "embed.weight" in state:  # the table may be padded
            self.embed = nn.Embedding(max(config.vocab_size, len(state["embed.weight"])), width)
        if any(place.startswith("head.") for place in state):
            self.head = nn.Linear(width, config.vocab_size, bias="head.bias" in state)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Accept any implementation: nothing runs here."""
        return requested_experts or "eager"
