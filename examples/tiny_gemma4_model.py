"""Configurations of the bundled pair, the mixed-precision optimiser, and saving.

The weights in use are always bfloat16, as they will be saved; the optimiser keeps a float32 master of each, so that
what is measured during training is what is shipped. It knows nothing of data or losses.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from tiny_gemma4_data import BOS, EOS, PAD, TURN_END, VOCAB
from torch import nn
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

WINDOW = 48
PATTERN = ["sliding_attention"] * 4 + ["full_attention"]


def target_config(tiny: bool = False) -> Gemma4TextConfig:
    """About 10.2 million parameters: 30 layers, 4 sliding to 1 full, the last 10 sharing K/V, per-layer embeddings."""
    layers = 10 if tiny else 30
    config = Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=64 if tiny else 160,
        intermediate_size=128 if tiny else 480,
        num_hidden_layers=layers,
        layer_types=PATTERN * (layers // 5),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=WINDOW,
        num_kv_shared_layers=5 if tiny else 10,
        hidden_size_per_layer_input=8 if tiny else 16,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=[EOS, TURN_END],
    )
    config._attn_implementation = "sdpa"
    return config


def drafter_config(target: Gemma4TextConfig) -> Gemma4AssistantConfig:
    """Two layers that own no K/V: one reads the target's last sliding K/V, the other its last full K/V."""
    text = Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=target.sliding_window,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=[EOS, TURN_END],
    )
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target.hidden_size)
    config._attn_implementation = "sdpa"
    return config


def initialise(model: nn.Module) -> None:
    """Attention scaling is 1.0, so q_norm carries 1/sqrt(d); small post-norms keep a deep narrow residual stable."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.fill_(weight.numel() ** -0.5)
            elif "post_" in name and name.endswith("norm.weight"):
                weight.fill_(0.2)


def new_target(tiny: bool, device: torch.device) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM(target_config(tiny))
    initialise(model)
    model.generation_config = generation_config()
    return model.to(device, torch.bfloat16)


def new_drafter(target: Gemma4ForCausalLM) -> Gemma4AssistantForCausalLM:
    model = Gemma4AssistantForCausalLM(drafter_config(target.config))
    initialise(model)
    model.generation_config = generation_config(num_assistant_tokens=4, num_assistant_tokens_schedule="constant")
    return model.to(target.device, torch.bfloat16)


def generation_config(**extra: object) -> GenerationConfig:
    return GenerationConfig(bos_token_id=BOS, pad_token_id=PAD, eos_token_id=[EOS, TURN_END], do_sample=False, **extra)


def compile_layers(model: nn.Module) -> None:
    """Layers of one kind share one graph (six kinds in the target), which compiles far faster than the whole model."""
    torch._dynamo.config.recompile_limit = 64
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, folder: Path, shard_size: str) -> None:
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def merge_shards(folder: Path) -> None:
    """Rewrite a sharded checkpoint as one model.safetensors, tensor for tensor."""
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {name: t for file in files for name, t in load_file(folder / file).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in [*files, index.name]:
        (folder / file).unlink()


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon on a stack of matrices [N, R, C]: all singular values towards 1."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class MixedOptimizer:
    """Muon on the matrices of the layers, stacked by shape, and AdamW on embeddings and norms; masters in float32."""

    def __init__(self, model: nn.Module, lr: float, muon_lr: float, muon: bool = True, betas=(0.9, 0.95)) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and muon:
                by_shape[weight.shape].append(weight)
            elif weight.ndim == 2 and "embed" not in name:
                decayed.append(weight)
            else:
                plain.append(weight)
        self.lr, self.muon_lr = lr, muon_lr
        self.stacks = [(ws, torch.stack([w.detach().float() for w in ws])) for ws in by_shape.values()]
        self.momenta = [torch.zeros_like(master) for _, master in self.stacks]
        self.weights = [*decayed, *plain]
        self.masters = [nn.Parameter(w.detach().float()) for w in self.weights]
        cuda = self.weights[0].is_cuda
        groups = [
            {"params": self.masters[: len(decayed)], "weight_decay": 0.1},
            {"params": self.masters[len(decayed) :], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-10, fused=cuda)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak rates; clears the gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        self.adam.step()
        torch._foreach_copy_(self.weights, self.masters)
        for (weights, master), momentum in zip(self.stacks, self.momenta, strict=True):
            grad = torch.stack([w.grad for w in weights]).float()
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95))
            rate = self.muon_lr * scale
            master.mul_(1 - 0.05 * rate).add_(update, alpha=-rate * max(1.0, master.shape[1] / master.shape[2]) ** 0.5)
            torch._foreach_copy_(weights, list(master.unbind(0)))
        for weight in [*self.weights, *(w for ws, _ in self.stacks for w in ws)]:
            weight.grad = None


def schedule(fraction: float) -> float:
    """Warm-up over the first 2 % of the time, then half a cosine down to 0; driven by time, whatever the speed."""
    if fraction < 0.02:
        return 0.05 + 0.95 * fraction / 0.02
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - 0.02) / 0.98)))
