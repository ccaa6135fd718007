"""A model described by its config and modules: everything that is known of a target before weights are read. A model on
the `meta` device (shapes without numbers), made from a config alone, is one too: drafters can be fitted to it and its
memory measured, but it cannot run."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModelError, first_line
from specdec.gpu.operations import Operations
from specdec.kvcache.layout import KVLayout, layout_from_config
from specdec.models.cache_geometry import GeometryContext, measured_layout
from specdec.models.context_length import ContextLength, context_length
from specdec.models.probe import TEXT_LEN, refusing
from specdec.models.recurrent_layers import replace_recurrent_modules
from specdec.models.unsupported import find_decoder, require_placed, require_supported
from specdec.modules.module_watch import ModuleWatch
from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import auto_class

META = torch.device("meta")


def model_on_meta(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Make a model on `meta`. options: for transformers' `from_config`. Experts run as one product, whose shapes do not
    depend on a router."""
    with META:
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, experts_implementation="batched_mm", **options
        )
    model.eval()
    return model


class DescribedModel:
    """A causal LM before any forward. Raises UnsupportedModelError if it cannot be served.

    layout: from the config; a forward may correct it. user_decoder, user_head: the user's modules; decoder, head:
    private copies. original: notices changes of the user's modules after the copy. placed: its weights are on a device.
    """

    def __init__(self, name: str, model: PreTrainedModel, *, placed: bool) -> None:
        self.name, self.model = name, model
        with refusing(name, f"{type(model).__name__} is not built as a decoder-only causal language model"):
            self.config: Any = model.config.get_text_config()
            self.model_types: tuple[str, str] = self.config.model_type, model.config.model_type
            require_supported(name, model, self.config)
            if placed:
                require_placed(name, model)
            self.vocab_size = int(self.config.vocab_size)  # a copy: the user's config may change later
            self.context_length: ContextLength = context_length(self.config)
            head = model.get_output_embeddings()
            if not isinstance(head, nn.Module):
                raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no language-model head")
            self.layout: KVLayout = layout_from_config(self.config)
            self.user_head: nn.Module = head
            self.user_decoder: nn.Module = find_decoder(name, model, len(self.layout.layers))
            self.original = ModuleWatch(model, self.user_decoder, head)  # made before the copy: no change is missed
            self.head: nn.Module = private_copy(head)
            self.decoder: nn.Module = private_copy(self.user_decoder)
            replace_recurrent_modules(name, self.decoder, self.layout)
            self.embed: nn.Module = self.decoder.get_input_embeddings()  # type: ignore[operator]
            self.home: torch.device = self.embed.weight.device  # device of the user's weights

    @property
    def recurrent(self) -> bool:
        """Does some layer keep a state per request?"""
        return self.layout.recurrent

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)


class ModelOnMeta(DescribedModel):
    """A target made from its config only.

    layout: measured in a forward's attention calls; from the config if the forward does not run on `meta` (`unmeasured`
    has the reason).
    """

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        super().__init__(name, model, placed=False)
        self.dtype, self.device = model.dtype, self.home
        self.ops: Operations | None = None
        self.unmeasured: str | None = None
        try:
            self.layout = measured_layout(self.layout, self._calls())
        except Exception as error:  # on `meta`, a forward that reads a number may raise any error
            self.unmeasured = first_line(error)

    @torch.inference_mode()
    def _calls(self) -> GeometryContext:
        """Record the attention calls of a forward over one short text."""
        calls = GeometryContext()
        tokens = torch.zeros((1, TEXT_LEN), dtype=torch.int64, device=META)
        places = torch.arange(TEXT_LEN, device=META)[None]
        self.decoder(input_ids=tokens, position_ids=places, use_cache=False, specdec_ctx=calls)
        return calls
