"""Configuration, initialisation and saving of the bundled tiny Gemma 4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_gemma4_data import BOS, EOS, PAD, TURN_END, VOCAB
from torch import nn
from transformers import (
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
