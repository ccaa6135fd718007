"""The head with fused layers: the same weights in few launches.

    x = cat[norm(embed), norm(g)]    embed_and_norm, which looks the token up and ends the sum of fc
    layers                           `FusedLayer`: merged QKV, rotary and store in one launch, gated MLP, residual norms
    a, norm(a)                       from the last layer's one launch

A head that fused layers cannot express (biases in the MLP, other activations) raises `Unfusable`: it runs as a
`PlainHead`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specdec.draft_models.eagle3.head import Eagle3Head, HeadOutput, PlainHead
from specdec.draft_models.fused_form import Echo, proved_form
from specdec.draft_models.head_spec import HeadContext, HeadSpec
from specdec.gpu.operations import Operations
from specdec.layers.decoder import FusedLayer, LayerParts, Shared
from specdec.layers.embedding import embed_and_norm
from specdec.layers.families import ACTIVATIONS, Unfusable
from specdec.layers.fuse import Weights, fuse_linear
from specdec.layers.linear import Mlp, linear
from specdec.layers.merge import MERGING, merge_rows
from specdec.layers.norm import Gain, norm
from specdec.layers.product import Product
from specdec.layers.rope_store import Heads, rotary
from specdec.modules.weights_lock import holds_weights_lock


class FusedHead(PlainHead):
    """The fused form of a head. Raises Unfusable, with the reason as a clause."""

    def __init__(
        self, head: Eagle3Head, table: nn.Module, lm_head: nn.Module, weights: Weights, ops: Operations
    ) -> None:
        super().__init__(head, table, lm_head)
        self.ops, self.weights = ops, weights
        self.lm_head = fuse_linear(self.lm_head, ops)
        first: Any = head.layers[0]
        self.token_gain, self.state_gain = gain_of(first.input_layernorm), gain_of(first.hidden_norm)
        self.final_gain = gain_of(head.norm) if head.spec.final_norm else None
        self._describe()

    def extend(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        return self._run(tokens, self._features(states.flatten(0, 1)), positions, context)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        return self._run(tokens, Product.of(hidden.flatten(0, 1)), positions, context)

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        return self.ops(norm)(Product.of(state.flatten(0, -2)), pre=self.final_gain)[1].view_as(state)

    def _features(self, states: torch.Tensor) -> Product:
        """g [T, H] of states [T, A * Ht], before its last sum."""
        head, ops = self.head, self.ops
        if self.fc_norm is not None:
            rows = states.view(-1, head.spec.target_hidden_size)  # each state is normed on its own
            _, normed = ops(norm)(Product.of(rows), pre=Gain(None, head.spec.rms_norm_eps))
            states = self.fc_norm * normed.view_as(states)
        if head.input_norm is not None:
            _, states = ops(norm)(Product.of(states), pre=gain_of(head.input_norm))
        return Product.of(states) if head.fc is None else ops(linear)(states, head.fc.weight, head.fc.bias)

    def _run(self, tokens: torch.Tensor, hidden: Product, positions: torch.Tensor, context: HeadContext) -> HeadOutput:
        if self.weights.generation() != self.generation:
            self._describe()
        ops, spec, rope = self.ops, self.head.spec, self.head.rotary_emb
        table: torch.Tensor = self.table.weight  # type: ignore[assignment]
        frequencies: torch.Tensor = rope.inv_freq
        angles = ops(rotary)(positions.reshape(-1), frequencies, float(rope.attention_scaling), hidden.dtype)
        inputs = tokens.reshape(-1), table, hidden, self.token_gain, self.state_gain
        state, x = ops(embed_and_norm)(*inputs)  # [T, H], [T, 2H]
        if spec.norm_before_residual:
            state = x[:, spec.hidden_size :]
        for layer in self.layers:
            state, x = layer(state, x, Shared({"": angles}, None), specdec_ctx=context)
        return HeadOutput(state.view(*tokens.shape, -1), x.view(*tokens.shape, -1))

    @holds_weights_lock()
    def _describe(self) -> None:
        """Merge the weights and note their addresses, which may have changed."""
        head: Any = self.head
        # outside inference mode, where a parameter cannot be given other data
        with MERGING, torch.inference_mode(False), torch.no_grad():
            parts = [layer_parts(head.spec, layer) for layer in head.layers]
            self.fc_norm = None if head.fc_norm is None else merge_rows([norm.weight for norm in head.fc_norm])
        self.layers = fused_layers(parts, self.final_gain, self.ops)
        self.generation = self.weights.generation()  # after the merge, which moves weights


def choose_form(plain: PlainHead, weights: Weights, ops: Operations) -> tuple[PlainHead, str | None]:
    """The fused form if it computes what the plain one does; else the plain one, and the reason."""
    return proved_form(
        "eagle3", plain, lambda: FusedHead(plain.head, plain.table, plain.lm_head, weights, ops), _probed
    )


@torch.inference_mode()
def _probed(form: PlainHead) -> torch.Tensor:
    """States and logits of six rows of random features, then of the feedback: [12, H + draft V] float32."""
    spec, weight = form.head.spec, next(form.head.parameters())
    random = torch.Generator().manual_seed(0)
    states = torch.randn((2, 3, spec.feature_size), generator=random).to(weight.device, weight.dtype)
    tokens = torch.arange(6, device=weight.device).view(2, 3) % spec.vocab_size
    with torch.autocast(weight.device.type, enabled=False):
        first = form.extend(tokens, states, tokens * 100, Echo())
        second = form.step(tokens, first.state, tokens * 100, Echo())
        rows = [torch.cat([out.state, form.logits(out.normed)], dim=-1) for out in (first, second)]
    return torch.cat(rows).flatten(0, 1).float()


def gain_of(norm: Any) -> Gain:
    """The gain of a Llama norm."""
    return Gain(norm.weight, norm.variance_epsilon, round_first=True)


def fused_layers(parts: Sequence[LayerParts], final: Gain | None, ops: Operations) -> list[FusedLayer]:
    """These layers one behind the other, each with the norm that the next one begins with; behind the last, `final`."""
    following = [*(part.input_norm for part in parts[1:]), final]
    layers = enumerate(zip(parts, following, strict=True))
    return [FusedLayer(i, part, next_norm, ops) for i, (part, next_norm) in layers]


def layer_parts(spec: HeadSpec, module: Any) -> LayerParts:
    """A Llama- or Qwen3-type layer, its matrices merged. Raises Unfusable for one that fused layers cannot express."""
    attention, mlp = module.self_attn, module.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [p.bias for p in projections if p.bias is not None]
    if len(biases) not in (0, len(projections)):
        raise Unfusable("some of its attention projections have biases and others none")
    if any(linear.bias is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        raise Unfusable("its MLP has biases")
    if spec.hidden_act not in ACTIVATIONS:
        raise Unfusable(f"its MLP is gated by {spec.hidden_act!r}; known: {sorted(ACTIVATIONS)}")
    heads = Heads(
        num_q=spec.num_heads,
        num_kv=spec.num_kv_heads,
        head_dim=spec.head_dim,
        q_norm=gain_of(attention.q_norm) if spec.qk_norm else None,
        k_norm=gain_of(attention.k_norm) if spec.qk_norm else None,
    )
    return LayerParts(
        kind="",
        heads=heads,
        scaling=spec.scaling,
        qkv=merge_rows([p.weight for p in projections]),
        qkv_bias=merge_rows(biases) if biases else None,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        input_norm=gain_of(module.input_layernorm),
        attention_norm=None,
        mlp_input_norm=gain_of(module.post_attention_layernorm),
        mlp=Mlp(
            gate_up=merge_rows([mlp.gate_proj.weight, mlp.up_proj.weight]),
            activation=ACTIVATIONS[spec.hidden_act],
            down=mlp.down_proj.weight,
        ),
        mlp_norm=None,
    )
