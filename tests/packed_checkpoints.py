"""Writes quantised checkpoints in their published layouts, bit by bit in numpy, without code of the product.

`quantise(folder, form, out)` rounds the linear layers and experts of a plain checkpoint and writes two folders: the
quantised checkpoint, and a plain float32 one of the same values, which transformers loads as the oracle.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LINEAR = re.compile(r"(.*\.layers\..*\.(?:(?:[qkvo]|in|out|gate|up|down)_proj(?:_\w+)?|w[123g]|per_layer\w*))\.weight")
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
STEP = re.compile(r"(.*)\.moe\.(gate_proj|up_proj|down_proj)\.weight")
LATENT = re.compile(r"(.*\.layers\..*\.(?:q|kv)_[ab]_proj(?:_with_mqa)?)\.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A layout. config: its quantization_config. write: weight [N, K] -> (its tensors by name, their values [N, K])."""

    config: dict[str, Any]
    write: Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
    stacks: bool = False  # the tensors of all experts are one


def words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack numbers 0..15 [A, 8 B] into int32 [A, B]: nibble i of a word is its number order[i]."""
    out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for nibble, place in enumerate(order):
        out |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(out.view(np.int32))


def rounded(weight: np.ndarray, group: int, asymmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round a weight to numbers 0..15 [N, K], with scales float16 [N, K / G] and zeros 0..15 [N, K / G]."""
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.min(-1), groups.max(-1)
    if asymmetric:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, 15)
    else:
        scales = (np.maximum(-low, high) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8.0)
    numbers = np.clip(np.round(groups / scales.astype(np.float32)[..., None]) + zeros[..., None], 0, 15)
    return numbers.reshape(weight.shape).astype(np.uint8), scales, zeros.astype(np.uint8)


def values(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    group = numbers.shape[1] // scales.shape[1]
    whole = numbers.astype(np.float32) - np.repeat(zeros.astype(np.float32), group, 1)
    return whole * np.repeat(scales.astype(np.float32), group, 1)


def compressed_int4(group: int | None = 32, asymmetric: bool = False) -> Form:
    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        numbers, scales, zeros = rounded(weight, group or weight.shape[1], asymmetric)
        tensors = {
            "weight_packed": words(numbers),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if asymmetric:
            padded = np.pad(zeros, ((0, -len(zeros) % 8), (0, 0)))
            tensors["weight_zero_point"] = words(padded.T).T.contiguous()
        return tensors, values(numbers, scales, zeros)

    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": not asymmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
    }
    return Form(compressed(weights, "pack-quantized"), write)


def compressed(weights: dict[str, Any], layout: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def gptq(version: int = 1, asymmetric: bool = False, group: int = 32) -> Form:
    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        numbers, scales, zeros = rounded(weight, group, asymmetric)
        stored = zeros.T - 1 if version == 1 else zeros.T
        return {
            "qweight": words(numbers).T.contiguous(),
            "qzeros": words(stored),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
        }, values(numbers, scales, zeros)

    layout = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": not asymmetric}
    return Form({**config, "checkpoint_format": layout}, write)


def awq(group: int = 32) -> Form:
    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        numbers, scales, zeros = rounded(weight, group, asymmetric=True)
        return {
            "qweight": words(numbers.T, AWQ_ORDER),
            "qzeros": words(zeros.T, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }, values(numbers, scales, zeros)

    return Form({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, write)


def to_fp8(weight: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Round to FP8 with scales [N, K], one for each number. Returns the numbers and their values."""
    numbers = torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)
    return numbers, numbers.float().numpy() * scales


def fp8_channel(per_tensor: bool = False) -> Form:
    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        most = np.abs(weight).max(axis=None if per_tensor else 1, keepdims=not per_tensor) / 448
        scales = torch.tensor(most, dtype=torch.bfloat16).reshape(-1) if per_tensor else torch.tensor(most).bfloat16()
        numbers, meant = to_fp8(weight, np.broadcast_to(scales.float().numpy(), weight.shape))
        return {"weight": numbers, "weight_scale": scales}, meant

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor" if per_tensor else "channel"}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return Form(compressed(weights, "float-quantized", None if per_tensor else inputs), write)


def fp8_block(block: int = 16) -> Form:
    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        num_rows, num_columns = weight.shape
        scales = np.zeros((-(-num_rows // block), -(-num_columns // block)), np.float32)
        for n in range(scales.shape[0]):
            for k in range(scales.shape[1]):
                tile = weight[n * block : (n + 1) * block, k * block : (k + 1) * block]
                scales[n, k] = np.abs(tile).max() / 448
        of_each = np.repeat(np.repeat(scales, block, 0), block, 1)[:num_rows, :num_columns]
        numbers, meant = to_fp8(weight, of_each)
        return {"weight": numbers, "weight_scale_inv": torch.from_numpy(scales)}, meant

    block_size = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [block, block]}
    return Form({"quant_method": "fp8", **block_size}, write)


def mxfp4() -> Form:
    """The layout of MXFP4 experts: a weight [N, K] is blocks [N, K / 32, 16] and scales [N, K / 32]."""

    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int32) - 2
        scaled = groups / np.exp2(exponents.astype(np.float32))[..., None]
        codes = np.abs(scaled[..., None] - E2M1).argmin(-1)
        blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
        meant = E2M1[codes] * np.exp2(exponents.astype(np.float32))[..., None]
        scales = (exponents + 127).astype(np.uint8)
        return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales)}, meant.reshape(weight.shape)

    return Form(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, write, stacks=True
    )


FORMS: dict[str, Form] = {
    "int4-g32": compressed_int4(32),
    "int4-zeros": compressed_int4(16, asymmetric=True),
    "int4-channel": compressed_int4(None),
    "gptq": gptq(1),
    "gptq-zeros": gptq(1, asymmetric=True),
    "gptq-v2": gptq(2, asymmetric=True),
    "awq": awq(),
    "fp8-channel": fp8_channel(),
    "fp8-tensor": fp8_channel(per_tensor=True),
    "fp8-block": fp8_block(),
    "mxfp4": mxfp4(),
}


def quantise(folder: Path, form: Form, out: Path, *, ignore: str | None = None) -> tuple[Path, Path]:
    """Write (the quantised checkpoint, the plain one of the same values). ignore: pattern of weights to leave plain."""
    stored: Tensors = {}
    plain: Tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        plain[key] = tensor.clone()
        weights = {} if ignore and re.search(ignore, key) else parts(key, plain[key], form)
        if not weights:
            stored[key] = plain[key]
        for name, weight in weights.items():
            written, meant = zip(*(form.write(one.float().numpy()) for one in weight), strict=True)
            for one, values_of_one in zip(weight, meant, strict=True):
                one.copy_(torch.from_numpy(values_of_one))
            for tensor_name in written[0]:
                of_each = [tensors[tensor_name] for tensors in written]
                stored[name + tensor_name] = torch.stack(of_each) if form.stacks else of_each[0]
    places = out / "quantised", out / "plain"
    for place, content in zip(places, (stored, plain), strict=True):
        shutil.copytree(folder, place)
        save_file({k: t.contiguous() for k, t in content.items()}, place / "model.safetensors", {"format": "pt"})
    set_config(places[0], quantization_config=form.config)
    return places


def parts(key: str, tensor: torch.Tensor, form: Form) -> dict[str, list[torch.Tensor]]:
    """Find the weights in a tensor that the form packs: views [N, K], by the prefix of their tensors' names."""
    linear, stacked = LINEAR.fullmatch(key) or LATENT.fullmatch(key), STACKED.fullmatch(key)
    if step := STEP.fullmatch(key):
        return {f"{step[1]}.mlp.experts.{expert}.{step[2]}.": [one] for expert, one in enumerate(tensor)}
    if form.stacks:
        return {f"{key}_": [one.T for one in tensor]} if stacked else {}  # GPT-OSS: [E, K, N]
    if linear and tensor.shape[1] % 32 == 0:
        return {f"{linear[1]}.": [tensor]}
    if not stacked:
        return {}
    names = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
    return {
        f"{stacked[1]}.{expert}.{name}.": [part]
        for expert, one in enumerate(tensor)
        for name, part in zip(names, one.chunk(len(names)), strict=True)
    }


def set_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
