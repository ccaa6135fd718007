"""Weights of every published format that is read: what they are repacked into stands for the same numbers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import reference_weights
import torch
from packed_checkpoints import compressed
from packed_weights import random_weight
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config

from specdec.draft_models.checkpoints.checkpoint_files import equals_weight, require_float_weights
from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.layers.packed.packed_modules import PackedLinear
from specdec.layers.packed.packed_weight import dequantised, numbers_of
from specdec.models.quantised.formats import (
    AWQ,
    COMPRESSED_INT4,
    GPTQ_V1,
    GPTQ_V2,
    Fp8,
    Int4,
    Mxfp4,
    WeightFormat,
    nibbles,
)
from specdec.models.quantised.packed_quantizer import without_quantization
from specdec.models.quantised.quantization_config import quantization_of
from specdec.models.weight_storage import NONE, grid_of, rounded_to

from marks import deep_cases, slow

REFERENCE = Path(__file__).parent / "data" / "reference_weights.safetensors"


def reference_cases() -> dict[str, dict]:
    with safe_open(REFERENCE, framework="pt") as file:
        return {name: json.loads(about) for name, about in sorted(file.metadata().items())}


def read_as(format: WeightFormat, tensors: dict[str, torch.Tensor], shape: list[int]):
    size = torch.Size(shape)
    format.compare("model.linear", tensors, size)
    return format.repack(tensors, size)


# what the packages wrote, and dequantise themselves


@pytest.mark.parametrize("name", reference_cases())
def test_a_weight_stands_for_what_its_own_package_says(name):
    """Bit for bit, in the package's own dtype. How the file was made: `reference_weights.py`."""
    about = reference_cases()[name]
    with safe_open(REFERENCE, framework="pt") as file:
        keys = [key for key in list(file.keys()) if key.startswith(f"{name}/")]
        tensors = {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}
    want = tensors.pop("dequantised")
    weight = read_as(quantization_of(about["config"]).format_of("linear"), tensors, about["shape"])
    assert weight.shape == want.shape
    assert torch.equal(dequantised(weight, want.dtype), want)


@deep_cases("transformers")
@pytest.mark.parametrize("package", [slow(package) for package in reference_weights.PACKAGES])
def test_the_file_is_what_the_package_writes(package, tmp_path):
    """In a process of its own, where the package is installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"without {package}")
    fresh = tmp_path / "fresh.safetensors"
    command = [sys.executable, "-W", "ignore", reference_weights.__file__, str(fresh), package]
    subprocess.run(command, check=True, capture_output=True)
    written = load_file(fresh)
    assert written
    with safe_open(REFERENCE, framework="pt") as file:
        for name, tensor in written.items():
            kept, tensor = (t.float() if t.is_floating_point() else t for t in (file.get_tensor(name), tensor))
            assert torch.equal(kept, tensor), name


# literal cases: one row of a weight that a reader can check


def test_a_word_of_compressed_tensors_by_eye():
    """0x76543210 holds 0, 1, ... 7 in ascending order, each 8 more than it means."""
    tensors = {
        "weight_packed": torch.tensor([[0x76543210, 0x76543210, 0x76543210, 0x76543210]], dtype=torch.int32),
        "weight_scale": torch.tensor([[0.5]]),
    }
    row = dequantised(read_as(Int4(COMPRESSED_INT4, 32, symmetric=True), tensors, [1, 32]), torch.float32)[0]
    assert row[:8].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    assert torch.equal(row.view(4, 8), row[:8].expand(4, 8))


@pytest.mark.parametrize(("layout", "stored"), [(GPTQ_V1, 0x22222222), (GPTQ_V2, 0x33333333)])
def test_a_column_of_gptq_by_eye(layout, stored):
    """Numbers ascend along K, one column of words for each row of the weight; the zero is 3."""
    tensors = {
        "qweight": torch.full((4, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.full((1, 1), stored, dtype=torch.int32),
        "scales": torch.full((1, 8), 2.0, dtype=torch.float16),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    weight = dequantised(read_as(Int4(layout, 32, symmetric=False), tensors, [8, 32]), torch.float32)
    assert weight[0, :8].tolist() == [-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0]
    assert torch.equal(weight, weight[:1, :8].repeat(8, 4))


def test_a_word_of_zeros_may_have_more_than_the_weight_has_rows():
    tensors = {
        "weight_packed": torch.zeros((4, 4), dtype=torch.int32),
        "weight_scale": torch.ones((4, 1)),
        "weight_zero_point": torch.tensor([[0x3210]], dtype=torch.int32),
    }
    weight = read_as(Int4(COMPRESSED_INT4, 32, symmetric=False), tensors, [4, 32])
    assert weight.zeros.tolist() == [[0.0, 1.0, 2.0, 3.0]] and weight.zeros.is_contiguous()


def test_a_row_of_gptq_may_be_one_group():
    """A group_size of -1: all columns are in group 0."""
    tensors = {
        "qweight": torch.full((8, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.full((1, 1), 0x77777777, dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
        "g_idx": torch.zeros(64, dtype=torch.int32),
    }
    weight = read_as(Int4(GPTQ_V1, None, symmetric=True), tensors, [8, 64])
    assert weight.group == 64 and dequantised(weight, torch.float32)[7, 56:].tolist() == [x / 2 for x in range(-8, 0)]


def test_a_word_of_awq_by_eye():
    """The nibbles 0, 1, ... 7 of a word are the numbers of rows 0, 2, 4, 6, 1, 3, 5, 7."""
    words = torch.full((1, 1), 0x76543210, dtype=torch.int32)
    assert nibbles(words, (0, 4, 1, 5, 2, 6, 3, 7))[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    tensors = {
        "qweight": words.expand(32, 1),
        "qzeros": torch.zeros((1, 1), dtype=torch.int32),
        "scales": torch.ones((1, 8), dtype=torch.float16),
    }
    weight = numbers_of(read_as(Int4(AWQ, 32, symmetric=False), tensors, [8, 32]))
    assert weight[:, 0].tolist() == [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]


def test_a_block_of_mxfp4_by_eye():
    """Bytes 0x10 0x32 0x54 0x76 0x98 ...: low nibble first, 2^(126 - 127) each."""
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)[None, None]
    tensors = {"blocks": blocks, "scales": torch.tensor([[126]], dtype=torch.uint8)}
    weight = read_as(Mxfp4(of_experts=True), tensors, [1, 32])
    assert weight.scales.dtype == torch.bfloat16
    row = dequantised(weight, torch.float32)[0, :16].tolist()
    assert row == [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.5, -2.0, -3.0]


@pytest.mark.parametrize("exponent", [0, 1, 254])
def test_the_smallest_and_largest_scales_of_mxfp4_are_powers_of_two(exponent):
    tensors = {
        "blocks": torch.full((1, 1, 16), 0x22, dtype=torch.uint8),  # ones
        "scales": torch.tensor([[exponent]], dtype=torch.uint8),
    }
    assert dequantised(read_as(Mxfp4(of_experts=True), tensors, [1, 32]), torch.float32)[0, 0].item() == 2.0 ** (
        exponent - 127
    )


def test_blocks_of_fp8_that_do_not_divide_the_weight():
    """Blocks of 16 x 32 over 24 x 48: the last ones are cut, and a group of 16 columns divides both."""
    numbers = torch.randn(24, 48, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    weight = read_as(Fp8(((16, 32),)), {"weight": numbers, "weight_scale": scales}, [24, 48])
    assert weight.group == 16
    each = scales.repeat_interleave(16, 0)[:24].repeat_interleave(32, 1)[:, :48]
    assert torch.equal(dequantised(weight, torch.float32), numbers.float() * each)
    scales = torch.rand(24, 2, generator=torch.Generator().manual_seed(1))
    weight = read_as(Fp8(((1, 32),)), {"weight": numbers, "weight_scale": scales}, [24, 48])
    each = scales.repeat_interleave(32, 1)[:, :48]
    assert torch.equal(dequantised(weight, torch.float32), numbers.float() * each), "groups of one row, too"


def test_zeros_of_symmetric_gptq_are_not_kept():
    """It stores them; a product need not read them. Elsewhere a layer's zeros may be 8, and its neighbours' not."""
    tensors = {
        "qweight": torch.zeros((4, 8), dtype=torch.int32),
        "qzeros": torch.full((1, 1), 0x77777777, dtype=torch.int32),
        "scales": torch.ones((1, 8), dtype=torch.float16),
    }
    assert read_as(Int4(GPTQ_V1, 32, symmetric=True), tensors, [8, 32]).zeros is None
    assert read_as(Int4(GPTQ_V1, 32, symmetric=False), tensors, [8, 32]).zeros.unique().tolist() == [8.0]


# configs

AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes", "hqq"])
def test_formats_that_only_transformers_reads_are_left_to_it(method):
    assert quantization_of({"quant_method": method, "load_in_8bit": True}) is None


def test_activations_rounded_as_they_come_do_not_matter():
    dynamic = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    config = compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", dynamic)
    assert quantization_of(config).format_of("linear").title == "FP8 by channel"


def test_a_group_of_a_config_may_name_its_own_format():
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    config = compressed(weights, "mixed-precision")
    config["config_groups"]["group_0"]["format"] = "mxfp4-pack-quantized"
    assert quantization_of(config).format_of("linear") == Mxfp4(of_experts=False)


def test_targets_are_names_then_patterns_then_classes():
    """In any order of the config and of their letters."""
    sizes = {"Linear": 32, "re:.*proj$": 64, "transformer.proj": 128}
    groups = {
        target: {"targets": [target], "weights": {"num_bits": 4, "strategy": "group", "group_size": size}}
        for target, size in sizes.items()
    }
    read = quantization_of({**compressed({}, "pack-quantized"), "config_groups": groups})
    assert [read.format_of(name).group_size for name in ("head", "a.proj", "transformer.proj")] == [32, 64, 128]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 64),  # AWQ's older names
        ({**AUTO_ROUND, "extra_config": {r"mlp\.u": {"group_size": 64}}}, 64),  # a pattern anywhere in the name
        ({**AUTO_ROUND, "extra_config": {"mlp.up": {"group_size": 64}}}, 32),  # a name
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:up": {"group_size": 64}}}, 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"+:mlp\.": {"group_size": 64}}}, 64),
    ],
)
def test_names_of_settings_and_of_modules_mean_what_their_tool_means(config, size):
    """GPTQ's patterns are of the beginnings of names."""
    assert quantization_of(config).format_of("mlp.up_proj").group_size == size


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "packed in int8"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits 8"),
    ],
)
def test_settings_that_change_values_are_refused_by_the_config(config, said):
    with pytest.raises(UnsupportedModelError, match=said):
        quantization_of(config)


def test_whole_numbers_are_a_fault_of_a_checkpoint_only_where_they_are_read(tmp_path):
    save_file({"linear.weight": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    with pytest.raises(CheckpointError, match=r"linear\.weight is stored in whole numbers"):
        require_float_weights(tmp_path, model, ["other.weight"])
    require_float_weights(tmp_path, model, ["linear.weight"])
    model._keys_to_ignore_on_load_unexpected = [r"^linear\."]
    require_float_weights(tmp_path, model, [])


def test_a_quantization_config_of_the_text_is_left_out_of_a_copy_too():
    config = Gemma3Config()
    config.quantization_config = config.text_config.quantization_config = {"quant_method": "fp8"}
    plain = without_quantization(config)
    assert not any(hasattr(part, "quantization_config") for part in (plain, plain.text_config))
    assert all(hasattr(part, "quantization_config") for part in (config, config.text_config))


def test_weights_are_judged_to_be_rounded_without_zeros_and_by_half_of_the_layers():
    plain = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert grid_of(plain * (plain > 0)) == NONE, "a sparse weight"
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(256, 64, bias=False) for _ in range(3))
    for weight, layer in zip((plain.to(torch.float8_e4m3fn), plain, plain), model.layers, strict=True):
        layer.weight.data.copy_(weight)
    assert rounded_to(model) is None
    model.layers = model.layers[:2]
    assert rounded_to(model) == "8 bits"


def test_a_packed_weight_equals_no_plain_one():
    """A drafter that stores a plain copy of it would otherwise share it. `PackedLinear.weight` made that so."""
    module = PackedLinear(random_weight("int4", 16, 32))
    copy = module.weight
    plain = torch.nn.Linear(32, 16, bias=False)
    plain.weight.data.copy_(copy)
    assert equals_weight(copy, plain) and not equals_weight(copy, module)
    assert equals_weight(copy.double(), plain), "in another type"
