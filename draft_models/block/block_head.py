"""The head of a block drafter: its computation (`BlockSpec`), its modules, and its two forms (`PlainBlock`,
`FusedBlock`).

    c_i  = hidden_norm( fc( cat(states_i) ) )        states: outputs of the target's layers `target_layer_ids` at i
    K/V of a committed position i                    k_norm(W_k c_i) and W_v c_i of each layer, RoPE at i
    block                                            embed([last token, MASK, MASK, ..]) at positions S, S + 1, ..
    each layer                                       a Qwen3 layer; the block's queries see the keys of committed
                                                     positions and the block's own keys (same W_k, W_v)
    logits                                           lm_head( norm( block ) )

    family     rows of a block see       row j drafts                 table and lm_head     logits also have
    DFlash     each other, both ways     token S + j, j > 0           the target's          -
    JetSpec    those up to their own     token S + j, j > 0           the target's          -
    DSpark     each other, both ways     token S + j + 1              copies in the file    a successor head's bias

Like an EAGLE-3 head, it may draft only some of the target's tokens: `lm_head` and the bias have a row for each of
these.

DSpark's layers for Gemma 4 (`Gemma4BlockLayer`) differ from `head_modules.py`:

    v          normed per head, without a gain; if keys are values, v is the k before its norm
    scores     q . k, unscaled; RoPE as in the target's full-attention layers, with later frequencies 0
    residual   h = h + norm(attention(norm(h))),   h = scalar (h + norm(mlp(norm(h))))

K/V of a position depend on the target's states at that position, never on drafts. One forward drafts a whole block. A
head holds no K/V and knows no requests: a `LayerContext` tells it where K/V are. If fused layers cannot express a head,
it runs as a `PlainBlock`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.attention.bridge import ForwardContext
from specdec.attention.draft_attention import BlocksAttention
from specdec.draft_models.heads.fused_layers import LLAMA, EchoContext, FusedLayers
from specdec.draft_models.heads.head_modules import CosSin, HeadForm, HeadLayer, HeadModule, HeadSpec, llama_config
from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import LayerContext
from specdec.layers.description.decoder_parts import Unfusable
from specdec.layers.fuse import fuse_linear
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product
from specdec.layers.norm import norm
from specdec.layers.rope_store import rope_store


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(HeadSpec):
    """A block drafter's head as data: every choice in its computation.

    aux_layers: each is one more than in `target_layer_ids`.
    block_size: rows of a block, including that of the newest token.
    shifted: row j drafts the token at S + j + 1; False: the token at S + j.
    anchored: windows of all rows count from the block's first row.
    skips_embed_norm: it reads the target's table without the norm that the target applies.
    successor: kind of its successor head, with rank `successor_rank`, or None.
    is_gemma4: layers, norms and embedding are Gemma 4's.
    """

    block_size: int
    mask_token: int
    causal: bool = False
    shifted: bool = False
    anchored: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1000000.0})
    max_position_embeddings: int = 40960
    qk_norm: bool = True
    skips_embed_norm: bool = False
    successor: str | None = None
    successor_rank: int = 0
    is_gemma4: bool = False

    @property
    def first_row(self) -> int:
        """The row that drafts the first token."""
        return 0 if self.shifted else 1

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.first_row


def spread_layers(count: int, num_layers: int) -> tuple[int, ...]:
    """Target states for a new block drafter, spread evenly from layer 1's output to layer n - 3's, each named by the
    layer it enters; of one or two layers, those that enter them."""
    first, last = min(2, num_layers - 1), max(0, num_layers - 2)
    return tuple(first + round(i * (last - first) / (count - 1)) for i in range(count))


class Gemma4BlockLayer(HeadLayer):
    """A decoder layer of Gemma 4."""

    norm = Gemma4RMSNorm
    layer_scalar: torch.Tensor

    def __init__(self, spec: BlockSpec, layer: int, config: LlamaConfig) -> None:
        super().__init__(spec, layer, config)
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.self_attn.scaling = 1.0
        self.self_attn.v_norm = Gemma4RMSNorm(spec.head_dim, eps, with_scale=False)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(hidden, eps)
        self.register_buffer("layer_scalar", self.post_feedforward_layernorm.weight.new_ones(1))

    def add_layer_output(
        self, residual: torch.Tensor, x: torch.Tensor, rotary: CosSin, context: LayerContext
    ) -> torch.Tensor:
        y = residual + self.post_attention_layernorm(self.self_attn(x, rotary, context))
        out = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        scaled: torch.Tensor = out * self.layer_scalar.to(out.dtype)
        return scaled


KINDS = ("vanilla", "gated", "rnn")


class SuccessorHead(nn.Module):
    """The successor head of a `BlockSpec`. Its modules have the names of the checkpoints."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.kind, rank = spec.successor, spec.successor_rank
        assert self.kind in KINDS, self.kind
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size or spec.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(spec.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)

    def forward(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Previous tokens before [B, M], hidden [B, H] of the row, state [B, M, r] or None -> bias [B, M, V], next
        state."""
        token: torch.Tensor = self.markov_w1(before)  # [B, M, r]
        if self.kind == "vanilla":
            return self.markov_w2(token), None
        hidden = hidden[:, None].expand(-1, token.shape[1], -1)
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, token], dim=-1)).sigmoid()
            return self.markov_w2(gate * token), None
        state = torch.zeros_like(token) if state is None else state
        keep, candidate, out = self.joint_proj(torch.cat([state, token, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return self.markov_w2(out.tanh()), keep * state + (1 - keep) * candidate.tanh()


class BlockHead(HeadModule):
    """A head of this spec, randomly initialised. `read_block` loads one from a checkpoint."""

    spec: BlockSpec

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(spec)
        hidden = spec.hidden_size
        self.fc = nn.Linear(len(spec.aux_layers) * hidden, hidden, bias=False)
        layer = Gemma4BlockLayer if spec.is_gemma4 else HeadLayer
        self.config = config = llama_config(spec)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.hidden_norm, self.norm = (layer.norm(hidden, spec.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList([layer(spec, i, config) for i in range(spec.num_layers)])
        if spec.owns_embed and spec.is_gemma4:
            self.embed_tokens = Gemma4TextScaledWordEmbedding(spec.vocab_size, hidden, 0, embed_scale=hidden**0.5)
        self.markov_head = None if spec.successor is None else SuccessorHead(spec)

    def taps(self, states: torch.Tensor) -> torch.Tensor:
        """Concatenated target states [..., A * H] -> c [..., H], from which keys and values are computed."""
        normed: torch.Tensor = self.hidden_norm(self.fc(states))
        return normed

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """A block's embeddings [B, K, H] at positions [B, K] -> states after the final norm [B, K, H]."""
        rotary = self.rotary_emb(embeds, positions)
        hidden = embeds
        for layer in self.layers:
            hidden = layer(hidden, rotary, context)
        normed: torch.Tensor = self.norm(hidden)
        return normed


def block_states(
    head: BlockHead,
    table: nn.Module,
    ids: torch.Tensor,
    pos: torch.Tensor,
    states: torch.Tensor,
    places: torch.Tensor,
    *,
    in_float32: bool = False,
) -> torch.Tensor:
    """Run a block at each of `places` [B, A] of texts [B, T], given the target's states [B, T, L * H] -> [B, A, K,
    H]."""
    spec, taps = head.spec, head.taps(states)
    rotary = head.rotary_emb(taps, pos)
    steps = torch.arange(spec.block_size, device=places.device)
    tokens = torch.where(steps == 0, ids.gather(1, places)[:, :, None], spec.mask_token)  # [B, A, K]
    block_pos = pos.gather(1, places)[:, :, None] + steps
    embeds = table(tokens.flatten(1)).to(head.fc.weight.dtype)

    def keys_values(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        attention: Any = head.layers[layer].self_attn
        k, v = attention.keys_values(taps, rotary)
        return k, v

    attention = BlocksAttention(
        spec.windows,
        pos,
        places,
        size=spec.block_size,
        causal=spec.causal,
        anchored=spec.anchored,
        in_float32=in_float32,
        keys_values=keys_values,
    )
    out: torch.Tensor = head(embeds, block_pos.flatten(1), attention).unflatten(1, (-1, spec.block_size))
    return out


class PlainBlock(HeadForm):
    """A head that runs its own modules. `FusedBlock` is the other form."""

    def __init__(self, head: BlockHead, table: nn.Module, lm_head: nn.Module) -> None:
        super().__init__(head, table, lm_head)
        if head.spec.skips_embed_norm and isinstance(table, nn.Embedding) and hasattr(table, "embed_norm"):
            self.table = lambda tokens: F.embedding(tokens, table.weight)

    def observe(self, states: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> None:
        """Store K/V of committed positions [B, N], from states [B, N, A * H] of the target."""
        taps = self.read_taps(states, positions)
        for layer in range(self.head.spec.num_layers):
            self.keys_values(layer, *taps, context)

    def read_taps(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Compute c of these positions, and their rotary tables."""
        taps = self.head.taps(states)
        return taps, self.head.rotary_emb(taps, positions)

    def keys_values(self, layer: int, taps: torch.Tensor, rotary: Any, context: Any) -> tuple[torch.Tensor, ...]:
        """Compute a layer's K and V [T, Hkv, D], and store them if the context has a destination."""
        attention = self.head.layers[layer].self_attn
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in attention.keys_values(taps, rotary))
        if (destination := context.destination(layer)) is not None:
            context.store(destination, k, v)
        return k, v

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """A block's tokens and positions [B, K] -> states after the final norm [B, K, H]."""
        states: torch.Tensor = self.head(self.table(tokens), positions, context)
        return states

    def probed(self) -> torch.Tensor:
        """For six random rows: their K/V, and the states and logits of a block."""
        states, tokens = self.random_rows(self.head.fc.in_features)
        taps = self.read_taps(states, tokens * 100)
        kept = [x for layer in range(self.head.spec.num_layers) for x in self.keys_values(layer, *taps, EchoContext())]
        block = self.run(tokens, tokens * 100, EchoContext())
        out = torch.cat([block, self.logits(block)], dim=-1).flatten(0, 1)
        parts = [x.float() for x in (torch.cat(kept, dim=1).flatten(1), out)]
        # normalised so that each part counts equally; a padding token's row may be 0
        return torch.cat([x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in parts], dim=-1)


class FusedBlock(PlainBlock):
    """The head's weights in few launches. Raises Unfusable, with the reason as a clause.

    committed positions    fc, hidden_norm; then for each layer the K and V rows of its merged QKV weight, and one
                           launch that norms, rotates and stores
    a block                `FusedLayer`: merged QKV, rotary and store in one launch, gated MLP, residual norms
    """

    def __init__(self, plain: PlainBlock, ops: Operations) -> None:
        super().__init__(plain.head, plain.table, plain.lm_head)
        if self.head.spec.is_gemma4:
            raise Unfusable("its layers are of Gemma 4's kind")
        self.ops = ops
        self.lm_head = fuse_linear(self.lm_head, ops)
        self.layers = FusedLayers(self.head, ops)

    def read_taps(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
        product = self.ops(linear)(states.flatten(0, 1), self.head.fc.weight)
        _, taps = self.ops(norm)(product, pre=LLAMA.gain_of(self.head.hidden_norm))
        return taps, self.layers.angles(positions, taps.dtype)

    def keys_values(self, layer: int, taps: torch.Tensor, rotary: Any, context: Any) -> tuple[torch.Tensor, ...]:
        parts = self.layers.layers[layer].parts
        weight = cast(torch.Tensor, parts.qkv)
        first = parts.heads.num_q * parts.heads.head_dim  # the last rows of the merged weight are those of K and V
        bias = None if parts.qkv_bias is None else parts.qkv_bias[first:]
        product = self.ops(linear)(taps, weight[first:], bias)
        _, k, v = self.ops(rope_store)(product, parts.heads._replace(num_q=0), rotary, context.destination(layer))
        assert k is not None and v is not None, "a block's layers have K/V of their own"
        return k, v

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, context: LayerContext) -> torch.Tensor:
        embeds = self.table(tokens).flatten(0, 1)
        first: Any = self.head.layers[0]
        state, x = self.ops(norm)(Product.from_value(embeds), pre=LLAMA.gain_of(first.input_layernorm))
        _, x = self.layers.run(state, x, positions, context)
        return x.view(*tokens.shape, -1)
