"""Writes small quantised weights with the package of each format, and their dequantised values, to one file.

tests/data/reference_weights.safetensors was written by

    python tests/reference_weights.py tests/data/reference_weights.safetensors  # and names of PACKAGES; none: all

with compressed-tensors 0.20.0, gptqmodel 7.7.0, autoawq 0.2.9 and transformers 5.17.0 installed. A case is named
`package/format/shape`: its tensors have that prefix, its values are `dequantised`, and the metadata has its
`quantization_config` and shape. Cases of a package that is not installed are left out.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

SHAPES = ((24, 64), (16, 192))


@dataclass
class Case:
    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    dequantised: torch.Tensor  # [N, K]


def random_weight(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[1])
    return torch.randn(shape, generator=generator) * 0.1


def of_compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    int4 = {"num_bits": 4, "type": "int"}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    forms: dict[str, dict[str, Any]] = {
        "int4-g32": {**int4, "symmetric": True, "strategy": "group", "group_size": 32},
        "int4-g64-zeros": {**int4, "symmetric": False, "strategy": "group", "group_size": 64},
        "int4-g128": {**int4, "symmetric": True, "strategy": "group", "group_size": 128},
        "int4-channel": {**int4, "symmetric": True, "strategy": "channel"},
        "int4-channel-zeros": {**int4, "symmetric": False, "strategy": "channel"},
        "fp8-channel": {**fp8, "strategy": "channel"},
        "fp8-tensor": {**fp8, "strategy": "tensor"},
        "fp8-block": {**fp8, "strategy": "block", "block_structure": [16, 32]},
        "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    }
    for form, settings in forms.items():
        for shape in SHAPES if form != "int4-g128" else ((8, 128), (16, 256)):
            arguments = QuantizationArgs(**settings)
            scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
            weight = random_weight(shape).bfloat16()
            low, high = (reduce(weight, settings) for reduce in (_low, _high))
            scale, zero = calculate_qparams(low, high, arguments)
            layout, compressor = "float-quantized", FloatQuantizationCompressor
            if settings["num_bits"] == 4:
                layout, compressor = "pack-quantized", PackedQuantizationCompressor
            if form == "mxfp4":
                layout, compressor = "mxfp4-pack-quantized", MXFP4PackedCompressor
            parts = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero}
            written = compressor.compress(parts, scheme)
            meant = compressor.decompress(written, scheme)["weight"]
            config = {
                "quant_method": "compressed-tensors",
                "format": layout,
                "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
            }
            yield Case(f"compressed-tensors/{form}/{shape[0]}x{shape[1]}", config, written, meant)


def _low(weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    return -_high(-weight, settings)


def _high(weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Maximum of the elements that share a scale."""
    if settings["strategy"] == "tensor":
        return weight.amax().reshape(1)
    if settings["strategy"] == "block":
        rows, columns = settings["block_structure"]
        padded = nn.functional.pad(
            weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows), value=-1e3
        ).to(weight.dtype)
        return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
    group = settings.get("group_size") or weight.shape[1]
    return weight.unflatten(1, (-1, group)).amax(-1)


def _affine(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose scales and zeros [N, K / group]."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        scales = (torch.maximum(-low, high) / 7.5).half().float()
        return scales, torch.full_like(scales, 8)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(0, 15)


def of_gptqmodel() -> Iterator[Case]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for version, symmetric in ((1, True), (1, False), (2, False)):
        for shape in SHAPES:
            weight = random_weight(shape) + (0.0 if symmetric else torch.linspace(-0.4, 0.4, shape[0])[:, None])
            linear = nn.Linear(shape[1], shape[0], bias=False)
            linear.weight.data = weight
            scales, zeros = _affine(weight, 32, symmetric)
            options = {"bits": 4, "group_size": 32, "desc_act": False, "sym": symmetric}
            packed = TorchLinear(**options, in_features=shape[1], out_features=shape[0])
            g_idx = torch.arange(shape[1], dtype=torch.int32) // 32
            packed.pack_original(linear, scales, zeros, g_idx)
            packed.post_init()
            meant = packed.dequantize_weight().T.contiguous()
            if version == 1:
                convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(**options))
            written = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
            config = {"quant_method": "gptq", **options, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
            form = f"v{version}{'' if symmetric else '-zeros'}"
            yield Case(f"gptqmodel/{form}/{shape[0]}x{shape[1]}", config, written, meant)


def of_autoawq() -> Iterator[Case]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for shape in ((32, 64), (32, 192)):  # it takes rows in multiples of 32 alone
        weight = random_weight(shape)
        linear = nn.Linear(shape[1], shape[0], bias=False)
        linear.weight.data = weight.half()
        scales, zeros = _affine(weight, 32, symmetric=False)
        packed = WQLinear_GEMM.from_linear(linear, 4, 32, False, scales.T.half(), zeros.T)
        written = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
        meant = dequantize_gemm(written["qweight"], written["qzeros"], written["scales"], 4, 32)
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
        yield Case(f"autoawq/gemm/{shape[0]}x{shape[1]}", config, written, meant.T)


def of_transformers() -> Iterator[Case]:
    """Yield FP8 in blocks, which transformers writes, and OpenAI's MXFP4 layout, which it only reads."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for shape, block in (((32, 64), (16, 32)), ((16, 192), (8, 64))):
        quantiser = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block))
        quantised = Fp8Quantize(quantiser)._quantize_one("linear.weight", random_weight(shape))
        written = {name.removeprefix("linear."): tensor for name, tensor in quantised.items()}
        meant = Fp8Dequantize(quantiser)._dequantize_one(*written.values(), output_dtype=torch.bfloat16)
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
        yield Case(f"transformers/fp8/{shape[0]}x{shape[1]}", config, written, meant)
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(shape[1])
        sizes = shape[0], shape[1] // 32
        blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 131, sizes, dtype=torch.uint8, generator=generator)
        meant = convert_moe_packed_tensors(blocks[None], scales[None])[0].T
        written = {"blocks": blocks, "scales": scales}
        yield Case(f"transformers/mxfp4/{shape[0]}x{shape[1]}", {"quant_method": "mxfp4"}, written, meant)


PACKAGES: dict[str, Callable[[], Iterator[Case]]] = {
    "compressed_tensors": of_compressed_tensors,
    "gptqmodel": of_gptqmodel,
    "awq": of_autoawq,
    "transformers": of_transformers,
}


def write(file: str, *packages: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for package in packages or PACKAGES:
        try:
            __import__(package)
        except ImportError as error:
            print(f"without {package}: {error}")
            continue
        for case in PACKAGES[package]():
            parts = {**case.tensors, "dequantised": case.dequantised}
            tensors |= {f"{case.name}/{name}": part.detach().contiguous() for name, part in parts.items()}
            metadata[case.name] = json.dumps({"config": case.config, "shape": list(case.dequantised.shape)})
    save_file(tensors, file, metadata)
    print(f"{len(metadata)} cases in {file}")


if __name__ == "__main__":
    write(*sys.argv[1:])
