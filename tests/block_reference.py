"""An oracle for block drafters: dense, in plain torch, from a checkpoint's files alone.

It shares no code with specdec. It follows z-lab's `dflash_generate`, JetSpec's draft head, DeepSpec's evaluator,
transformers' `DFlashTokenCandidateGenerator` and the training masks of speculators. It keeps no K/V: each round reads
all target states again.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file


class Checkpoint(NamedTuple):
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def at(cls, folder: Path) -> "Checkpoint":
        tensors = {key: tensor.double() for key, tensor in load_file(folder / "model.safetensors").items()}
        for name, key in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
            if f"{key}.weight" in tensors:
                tensors[f"{name}.weight"] = tensors.pop(f"{key}.weight")
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return cls({**config.get("transformer_layer_config", {}), **config}, tensors)

    def setting(self, key: str, default: Any = None) -> Any:
        return self.config.get("dflash_config", {}).get(key, self.config.get(key, default))

    @property
    def first_row(self) -> int:
        """The row that drafts the first token."""
        like_dspark = "DSpark" in self.config["architectures"][0] and not self.is_of_speculators
        return int(not self.setting("sample_from_anchor", like_dspark))

    @property
    def is_of_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def is_gemma4(self) -> bool:
        return "Gemma4" in self.config["architectures"][0]

    def frequencies(self, dim: int) -> torch.Tensor:
        """Angle of each pair of channels at position 1."""
        half = dim // 2
        pairs = torch.arange(half, dtype=torch.float64)
        if not self.is_gemma4:
            theta = self.config.get("rope_parameters", self.config)["rope_theta"]
            return torch.as_tensor(theta ** (-pairs / half))
        rope = self.config["rope_parameters"]["full_attention"]
        turning = pairs < rope["partial_rotary_factor"] * half
        return torch.where(turning, rope["rope_theta"] ** (-pairs / half), 0.0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] at positions [T]: pair (j, j + D / 2) turns by position * frequency j."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def block_states(checkpoint: Checkpoint, states: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Run the layers: states [S, A * H] of all committed positions, embedded block [K, H] -> [K, H] after the final
    norm."""
    config, w = checkpoint.config, checkpoint.tensors
    eps, dim = config["rms_norm_eps"], len(w["layers.0.self_attn.q_norm.weight"])
    group = config["num_attention_heads"] * dim // len(w["layers.0.self_attn.k_proj.weight"])
    turns, gemma = checkpoint.frequencies(dim), checkpoint.is_gemma4
    length, rows = len(states), len(block)
    key_pos = torch.arange(length + rows, dtype=torch.float64)
    query_pos = key_pos[length:]
    seen = torch.ones(rows, length + rows, dtype=torch.bool)
    if checkpoint.setting("causal_head", False):
        seen &= key_pos <= query_pos[:, None]
    taps = rms_norm(states @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    for layer in range(config["num_hidden_layers"]):
        part = {key.removeprefix(f"layers.{layer}."): w[key] for key in w if key.startswith(f"layers.{layer}.")}
        window = config["sliding_window"] if config["layer_types"][layer] == "sliding_attention" else math.inf
        x = rms_norm(block, part["input_layernorm.weight"], eps)
        both = torch.cat([taps, x])
        part.setdefault("self_attn.v_proj.weight", part["self_attn.k_proj.weight"])
        q, k, v = (
            (rows_of @ part[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim))
            for name, rows_of in (("q", x), ("k", both), ("v", both))
        )
        q = rotate(rms_norm(q, part["self_attn.q_norm.weight"], eps), query_pos, turns)
        k = rotate(rms_norm(k, part["self_attn.k_norm.weight"], eps), key_pos, turns)
        v = rms_norm(v, torch.ones(dim, dtype=torch.float64), eps) if gemma else v
        visible = seen & (query_pos[:, None] - key_pos < window)
        if checkpoint.is_of_speculators:
            visible = key_pos >= length - window
            if window < math.inf and not checkpoint.setting("sliding_window_non_causal", False):
                visible = visible & (key_pos <= query_pos[:, None])
            visible = visible.expand(rows, -1)
        if config["model_type"] == "muse_glimmer_assistant":
            visible = (query_pos[:, None] - key_pos).abs() <= window
        heads = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / (1.0 if gemma else math.sqrt(dim))
            heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, head // group])
        added = torch.cat(heads, dim=-1) @ part["self_attn.o_proj.weight"].T
        if gemma:
            added = rms_norm(added, part["post_attention_layernorm.weight"], eps)
        block = block + added
        before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        x = rms_norm(block, part[f"{before_mlp}.weight"], eps)
        gate, up = x @ part["mlp.gate_proj.weight"].T, x @ part["mlp.up_proj.weight"].T
        active = torch.nn.functional.gelu(gate, approximate="tanh") if gemma else gate * gate.sigmoid()
        added = (active * up) @ part["mlp.down_proj.weight"].T
        if gemma:
            added = rms_norm(added, part["post_feedforward_layernorm.weight"], eps)
        block = (block + added) * part.get("layer_scalar", 1.0)
    return rms_norm(block, w["norm.weight"], eps)


class Drafted(NamedTuple):
    """The logits [D, draft V] of each draft, and the greedy chain."""

    logits: torch.Tensor
    tokens: list[int]


@torch.no_grad()
def draft(checkpoint: Checkpoint, model: Any, tokens: list[int]) -> Drafted:
    """Draft after `tokens`, of which the last one has no K/V yet."""
    w, size = checkpoint.tensors, checkpoint.setting("block_size")
    seen = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    entered = checkpoint.setting("aux_hidden_state_layer_ids")
    entered = [i + 1 for i in checkpoint.setting("target_layer_ids")] if entered is None else entered
    states = torch.cat([seen[i][0] for i in entered], dim=-1).double()
    block = torch.tensor([tokens[-1]] + [checkpoint.setting("mask_token_id")] * (size - 1))
    table, lm_head = w.get("embed_tokens.weight"), w.get("lm_head.weight")
    embedded = model.get_input_embeddings()(block).double() if table is None else table[block]
    if checkpoint.is_gemma4:
        embedded = embedded * math.sqrt(embedded.shape[-1])
    out = block_states(checkpoint, states, embedded)
    logits = out @ (model.lm_head.weight.double() if lm_head is None else lm_head).T
    if cap := checkpoint.setting("final_logit_softcapping"):
        logits = (logits / cap).tanh() * cap
    d2t = w.get("d2t", torch.zeros(logits.shape[-1])).long()
    chain, drawn_from, before = [], [], tokens[-1]
    rank = checkpoint.setting("markov_rank", 0)
    carried = torch.zeros(rank, dtype=torch.float64)
    for row in range(checkpoint.first_row, size):
        scores = logits[row]
        if rank:
            bias, carried = _successor(checkpoint, before, out[row], carried)
            scores = scores + bias
        drawn_from.append(scores)
        best = int(scores.argmax())
        before = best + int(d2t[best])
        chain.append(before)
    return Drafted(torch.stack(drawn_from), chain)


def _successor(
    checkpoint: Checkpoint, before: int, hidden: torch.Tensor, carried: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    w, kind = checkpoint.tensors, checkpoint.setting("markov_head_type")
    first, second = w["markov_head.markov_w1.weight"][before], w["markov_head.markov_w2.weight"]
    if kind == "vanilla":
        return second @ first, carried
    if kind == "gated":
        gate = w["markov_head.gate_proj.weight"] @ torch.cat([hidden, first]) + w["markov_head.gate_proj.bias"]
        return second @ (gate.sigmoid() * first), carried
    joint = torch.cat([carried, first, hidden])
    keep, candidate, out = (w["markov_head.joint_proj.weight"] @ joint + w["markov_head.joint_proj.bias"]).chunk(3)
    return second @ out.tanh(), keep.sigmoid() * carried + (1 - keep.sigmoid()) * candidate.tanh()


@torch.no_grad()
def accepted_lengths(checkpoint: Checkpoint, model: Any, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """Decode greedily. Returns at least `count` tokens after the prompt, and the number of tokens of each round, the
    target's own included."""
    tokens = [*prompt, int(model(torch.tensor([prompt])).logits[0, -1].argmax())]
    lengths: list[int] = []
    while len(tokens) - len(prompt) < count:
        chain = draft(checkpoint, model, tokens).tokens
        best = model(torch.tensor([tokens + chain])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        right = next((i for i, token in enumerate(chain) if token != best[i]), len(chain))
        tokens += [*chain[:right], best[right]]
        lengths.append(right + 1)
    return tokens[len(prompt) :], lengths
