"""The one table of what replaces what: Hugging Face text model -> how it is described to `FusedDecoder`.

    fuse(tree, KERNELS) -> the tree with its text models replaced, and why others in the table were not

`tree` is the caller's own: an engine fuses its private copy, never the user's modules. The classes are matched exactly,
since a subclass may compute something else. Families without an entry are left as they are.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from specdec.layers.decoder import DecoderParts, FusedDecoder
from specdec.layers.families import Unfusable, describe_gemma4, describe_llama
from specdec.layers.merge import unmerge_rows
from specdec.layers.operations import Operations

FUSED: dict[type[nn.Module], Callable[[nn.Module], DecoderParts]] = {
    Gemma4TextModel: describe_gemma4,
    Gemma4UnifiedTextModel: describe_gemma4,
    LlamaModel: describe_llama,
    MistralModel: describe_llama,
    Qwen2Model: describe_llama,
    Qwen3Model: describe_llama,
}


def fuse(tree: nn.Module, ops: Operations) -> tuple[nn.Module, dict[str, str]]:
    """-> the tree, of which the root may be another module now, and {module name: why it was left as it is}."""
    refused: dict[str, str] = {}
    # outside inference mode, where a parameter cannot be given other data
    with torch.inference_mode(False), torch.no_grad():
        tree = _fused(tree, "", ops, refused)
        for name, parent, attribute, module in list(_children(tree, "")):
            fused = _fused(module, name, ops, refused)
            if fused is not module:
                parent._modules[attribute] = fused
    return tree, refused


def unfuse(tree: nn.Module) -> nn.Module:
    """The tree with the Hugging Face modules back in their places, each weight in a storage of its own."""
    with torch.inference_mode(False), torch.no_grad():
        for _, parent, attribute, module in list(_children(tree, "")):
            if isinstance(module, FusedDecoder):
                parent._modules[attribute] = _unfused(module)
        return _unfused(tree) if isinstance(tree, FusedDecoder) else tree


def _fused(module: nn.Module, name: str, ops: Operations, refused: dict[str, str]) -> nn.Module:
    describe = FUSED.get(type(module))
    if describe is None:
        return module
    try:
        return FusedDecoder(module, describe(module), ops)
    except Unfusable as reason:
        refused[name] = str(reason)
        return module


def _unfused(decoder: FusedDecoder) -> nn.Module:
    for params in decoder.parts.merged:
        unmerge_rows(params)
    source: nn.Module = decoder.source
    return source


def _children(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, attribute, module) of everything under `parent`, but not inside what is fused."""
    if isinstance(parent, FusedDecoder):
        return
    for attribute, module in parent.named_children():
        name = f"{prefix}{attribute}"
        yield name, parent, attribute, module
        yield from _children(module, f"{name}.")
