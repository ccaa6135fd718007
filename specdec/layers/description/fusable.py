"""Checks that a text model can run fused: it may contain only unmodified classes of its own file and of torch, over
plain tensors."""

import torch
from torch import nn

from specdec.errors import UnsupportedModelError
from specdec.layers.description.moe_families import holds_router
from specdec.layers.packed.packed_modules import PackedLinear, packed_of
from specdec.layers.packed.packed_tile import runs_in_tiles
from specdec.modules.module_watch import RECORDING_HOOKS
from specdec.modules.private_copy import OWN_FORWARDS

PLAIN_MODULES = frozenset(
    {"torch.nn.modules.linear", "torch.nn.modules.container", "torch.nn.modules.sparse", "torch.nn.modules.activation"}
    | {"torch.nn.modules.dropout", "transformers.activations"}  # private copies do not train, so dropout does nothing
    | {PackedLinear.__module__}  # and of `PackedExperts`
    | {"torch.nn.modules.conv", "specdec.models.recurrent_layers"}  # stand-ins read recurrent modules' weights
)
"""Modules, besides the model's own file, that may define classes inside a text model."""

FLOAT_PARAMETERS = (".A_log", ".dt_bias")
"""Parameters of recurrent layers that may be float32 in a model of any dtype."""


class Unfusable(UnsupportedModelError):
    """This model does something that its fused form would not do."""


def check_tree(model: nn.Module) -> None:
    """Refuse everything that the family's file does not contain (adapters, quantised layers, hooks) and mixed
    dtypes."""
    allowed = {type(model).__module__, *PLAIN_MODULES}
    for name, module in model.named_modules():
        if type(module).__module__ not in allowed:
            raise Unfusable(f"its module {name} is a {type(module).__module__}.{type(module).__name__}")
        if not is_untouched(module):
            raise Unfusable(f"the forward of its module {name} is hooked or replaced")
        for weight in packed_of(module):
            if not runs_in_tiles(weight):
                raise Unfusable(f"its module {name} has {weight.code} weights in groups of {weight.group} columns")
    for name, param in model.named_parameters():
        if not is_dense(param):
            raise Unfusable(f"its parameter {name} is no plain tensor of floats ({type(param.data).__name__})")
        if param.device.type == "cpu" and param.is_shared():
            raise Unfusable(f"its parameter {name} is in memory that other processes share")
    of_routers = {id(param) for module in model.modules() if holds_router(module) for param in module.parameters()}
    own = {id(param) for name, param in model.named_parameters() if name.endswith(FLOAT_PARAMETERS)}
    kinds = {(param.dtype, param.device) for param in model.parameters() if id(param) not in of_routers | own}
    if len(kinds) > 1:
        raise Unfusable(f"its parameters are of more than one dtype or device: {sorted(map(str, kinds))}")


def is_untouched(module: nn.Module) -> bool:
    """Does it run the forward of its class, without hooks other than transformers' own recorders?"""
    forward = vars(module).get("forward")  # norms and experts of a private copy have an equal one
    replaced = forward is not None and getattr(forward, "__func__", None) not in OWN_FORWARDS
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not replaced and all(getattr(hook, "__module__", None) == RECORDING_HOOKS for hook in hooks)


def is_dense(param: torch.Tensor) -> bool:
    """Is it a dense floating tensor, neither quantised nor sharded?"""
    return type(param.data) is torch.Tensor and param.layout == torch.strided and param.is_floating_point()
