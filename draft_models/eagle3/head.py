"""The EAGLE-3 head: its computation (`Eagle3Spec`), its modules, and its two forms (`PlainHead`, `FusedHead`).

    g_i = fc( cat(states_i) )            states: the inputs of the target layers `aux_layers` at position i
                                         norm_before_fc: norm(cat); fc_norm: each state's norm; never for feedback
    e_i = input_layernorm(embed(x_{i+1}))
    u_i = hidden_norm(h_i)               h_i = g_i after a target forward, the feedback of row i - 1 while drafting
    r_i = h_i                            norm_before_residual: u_i
    y_i = r_i + attention(cat[e_i, u_i]) RoPE at i, causal, own K/V; Qwen3-type heads norm q and k of each head
    a_i = y_i + mlp(post_attention_layernorm(y_i))                      layers after the first are ordinary, H wide
    logits of x_{i+2} = lm_head(norm(a_i));   feedback_i = a_i          norm_output: norm(a_i)

Row i combines the feature of position i with the next token, so K/V of position i can be computed once token i + 1 is
known. A head holds no K/V and knows no requests: the caller decides where K/V are (`LayerContext`). If
fused layers cannot express a head (biases in the MLP, other activations), it runs as a `PlainHead`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specdec.draft_models.heads.feedback_drafts import ModuleRows
from specdec.draft_models.heads.fused_layers import LLAMA, EchoContext, FusedLayers
from specdec.draft_models.heads.head_modules import CosSin, HeadForm, HeadLayer, HeadModule, HeadSpec, llama_config
from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import LayerContext
from specdec.layers.embedding import embed_and_norm
from specdec.layers.fuse import fuse_linear
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product
from specdec.layers.norm import Norm, norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(HeadSpec):
    """An EAGLE-3 head as data: every choice in its computation.

    aux_layers: if empty, it reads the final state after the norm. has_fc: if False, features pass unchanged.
    """

    target_hidden_size: int
    has_fc: bool = True
    final_norm: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target states that it reads."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size


class FirstLayer(HeadLayer):
    """The first layer, which reads concatenated embeddings and states."""

    def __init__(self, spec: Eagle3Spec, config: LlamaConfig) -> None:
        super().__init__(spec, 0, config, 2 * spec.hidden_size)
        self.norm_before_residual = spec.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def run_with_embeddings(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: CosSin, context: LayerContext
    ) -> torch.Tensor:
        """Run the layer: embeds and hidden [B, N, H] -> [B, N, H]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.add_layer_output(normed if self.norm_before_residual else hidden, x, rotary, context)


class Eagle3Head(HeadModule):
    """A head of this spec, randomly initialised. `checkpoint.read_head` loads one from a checkpoint."""

    spec: Eagle3Spec

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__(spec)
        self.config = config = llama_config(spec)
        hidden, eps, states = spec.hidden_size, spec.rms_norm_eps, max(1, len(spec.aux_layers))
        self.input_norm = LlamaRMSNorm(spec.feature_size, eps) if spec.norm_before_fc else None
        norms = [LlamaRMSNorm(spec.target_hidden_size, eps) for _ in range(states)]
        self.fc_norm = nn.ModuleList(norms) if spec.fc_norm else None
        self.fc = nn.Linear(spec.feature_size, hidden, bias="fc" in spec.biases) if spec.has_fc else None
        self.layers = nn.ModuleList(
            [FirstLayer(spec, config), *(HeadLayer(spec, i, config) for i in range(1, spec.num_layers))]
        )
        self.norm: nn.Module = LlamaRMSNorm(hidden, eps) if spec.final_norm else nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Compute g [..., H] from concatenated target states [..., A * Ht]."""
        if self.fc_norm is not None:
            chunks = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return states if self.fc is None else self.fc(states)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: LayerContext
    ) -> torch.Tensor:
        """Run all layers: embeds and hidden [B, N, H], positions [B, N] -> a [B, N, H]."""
        rotary = self.rotary_emb(hidden, positions)
        first: Any = self.layers[0]
        hidden = first.run_with_embeddings(embeds, hidden, rotary, context)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rotary, context)
        return hidden


class PlainHead(HeadForm):
    """A head that runs its own modules, as a `FeedbackModel`. `FusedHead` is the other form."""

    num_modules, applied_again = 1, True

    def __init__(self, head: Eagle3Head, table: nn.Module, lm_head: nn.Module) -> None:
        super().__init__(head, table, lm_head)
        self.windows, self.width = head.spec.windows, head.spec.hidden_size

    def first_state(self, states: torch.Tensor) -> Any:
        """Compute g from target states [B, N, A * Ht]."""
        return self.head.features(states)

    def run(
        self, k: int, tokens: torch.Tensor, hidden: Any, positions: torch.Tensor, context: LayerContext
    ) -> ModuleRows:
        """Run rows of g, or a level of a draft: hidden [B, N, H] is the head's feedback."""
        embeds = F.embedding(tokens, self.table.weight)  # heads are trained without the module's scaling or norm
        state = self.head(embeds.to(hidden.dtype), hidden, positions, context)
        return self.rows(state, self.head.norm(state))

    def rows(self, state: torch.Tensor, normed: torch.Tensor) -> ModuleRows:
        """What rows pass on, a or (`norm_output`) norm(a), and what lm_head reads, norm(a): [B, N, H]."""
        return ModuleRows(normed if self.head.spec.norm_output else state, normed)

    def probed(self) -> torch.Tensor:
        """States and logits of six rows of random features, then of the feedback: [12, H + draft V]."""
        states, tokens = self.random_rows(self.head.spec.feature_size)
        first = self.run(0, tokens, self.first_state(states), tokens * 100, EchoContext())
        second = self.run(0, tokens, first.carried, tokens * 100, EchoContext())
        rows = [torch.cat([out.carried, self.logits(out.z)], dim=-1) for out in (first, second)]
        return torch.cat(rows).flatten(0, 1).float()


class FusedHead(PlainHead):
    """The head's weights in few launches. Raises Unfusable, with the reason as a clause.

    x = cat[norm(embed), norm(g)]    embed_and_norm, which looks the token up and finishes fc's split sum
    layers                           `FusedLayer`: merged QKV, rotary and store in one launch, gated MLP, residual norms
    a, norm(a)                       one launch of the last layer
    """

    def __init__(self, plain: PlainHead, ops: Operations) -> None:
        super().__init__(plain.head, plain.table, plain.lm_head)
        self.ops = ops
        self.lm_head = fuse_linear(self.lm_head, ops)
        self.layers = FusedLayers(self.head, ops, extra_norms=list(self.head.fc_norm or ()))

    def first_state(self, states: torch.Tensor) -> Product:
        """Compute g [T, H], except the last step of fc's split sum."""
        head, ops, states = self.head, self.ops, states.flatten(0, 1)
        if self.layers.gain is not None:
            rows = states.view(-1, head.spec.target_hidden_size)  # each state is normed separately
            _, normed = ops(norm)(Product.from_value(rows), pre=Norm(None, head.spec.rms_norm_eps))
            states = self.layers.gain * normed.view_as(states)
        if head.input_norm is not None:
            _, states = ops(norm)(Product.from_value(states), pre=LLAMA.gain_of(head.input_norm))
        return Product.from_value(states) if head.fc is None else ops(linear)(states, head.fc.weight, head.fc.bias)

    def run(
        self, k: int, tokens: torch.Tensor, hidden: Any, positions: torch.Tensor, context: LayerContext
    ) -> ModuleRows:
        if not isinstance(hidden, Product):
            hidden = Product.from_value(hidden.flatten(0, 1))
        spec, first = self.head.spec, self.head.layers[0]
        gains = LLAMA.gain_of(first.input_layernorm), LLAMA.gain_of(first.hidden_norm)
        state, x = self.ops(embed_and_norm)(tokens.reshape(-1), self.table.weight, hidden, *gains)  # [T, H], [T, 2H]
        if spec.norm_before_residual:
            state = x[:, spec.hidden_size :]
        state, x = self.layers.run(state, x, positions, context)
        return self.rows(state.view(*tokens.shape, -1), x.view(*tokens.shape, -1))
