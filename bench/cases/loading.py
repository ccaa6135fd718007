"""Memory while a quantised checkpoint is loaded.

Writes a checkpoint of the published layout (int4 of compressed-tensors in groups of 32; GPT-OSS: MXFP4 experts), one
file a layer, of random words, and loads it as a user does. The peak may be the packed bytes, one layer in bfloat16 and
2 GB: what the allocator of a GPU took.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.device import DEVICE, DIVISOR, ON_CPU  # isort: skip - before triton
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from bench.report import Row
from specdec.loading import Checkpoint
from specdec.measurement.model_shapes import Shrink, find_shape

GB = 1e9
ALLOWED = 2 * GB
GROUP = 32
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}
Tensors = dict[str, torch.Tensor]


def random_words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    bits = torch.iinfo(dtype)
    return torch.randint(bits.min, bits.max, shape, dtype=dtype)


def stored(name: str, weight: torch.Tensor, is_linear: bool) -> Tensors:
    """What the checkpoint has in the place of a parameter on the meta device."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # GPT-OSS: [E, K, N]
        experts, columns, rows = weight.shape
        sizes = experts, rows, columns // GROUP
        scales = torch.full(sizes, 121, dtype=torch.uint8)
        return {f"{name}_blocks": random_words(*sizes, 16, dtype=torch.uint8), f"{name}_scales": scales}
    if not is_linear:
        return {name: torch.empty(weight.shape, dtype=torch.bfloat16).normal_(std=0.02)}
    rows, columns = weight.shape
    scales = torch.full((rows, columns // GROUP), 0.01, dtype=torch.bfloat16)
    parts = {"packed": random_words(rows, columns // 8), "scale": scales, "shape": torch.tensor(weight.shape)}
    return {f"{name}_{part}": tensor for part, tensor in parts.items()}


def write_checkpoint(folder: Path, config: object) -> tuple[int, int]:
    """Bytes of the files, and of the largest layer in bfloat16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    is_mxfp4 = model.config.model_type == "gpt_oss"
    layers: dict[str, list[tuple[str, torch.Tensor, bool]]] = {}
    once = {id(weight): (name, weight) for name, weight in reversed(model.state_dict(keep_vars=True).items())}
    for name, weight in once.values():  # of tied ones the first
        layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest"
        owner = model.get_submodule(name.rpartition(".")[0])
        packed = type(owner) is nn.Linear and name.endswith(".weight") and layer != "rest" and not is_mxfp4
        layers.setdefault(layer, []).append((name, weight, packed))
    index: dict[str, str] = {}
    for layer, weights in layers.items():
        file = f"model-{layer}.safetensors"
        tensors = {key: tensor for weight in weights for key, tensor in stored(*weight).items()}
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model.config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"} if is_mxfp4 else INT4
    (folder / "config.json").write_text(json.dumps(described))
    largest = max(sum(weight.numel() for _, weight, _ in weights) for name, weights in layers.items() if name != "rest")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")), largest * 2


def memory_rows(shapes: Sequence[str], layers: int, folder: str) -> Iterator[Row]:
    """folder: an empty one, for the checkpoints; None: a temporary one."""
    for shape in shapes:
        with tempfile.TemporaryDirectory(dir=folder or None) as made:
            yield _memory_row(shape, layers, Path(made))


def _memory_row(shape: str, layers: int, folder: Path) -> Row:
    shrink = Shrink(2 if ON_CPU else layers or None, DIVISOR, multiple=32)
    size, largest = write_checkpoint(folder, find_shape(shape).target(shrink))
    before, began = 0 if ON_CPU else torch.cuda.memory_reserved(), time.perf_counter()
    model = Checkpoint.from_name(str(folder)).load(torch.bfloat16, DEVICE)
    peak = 0 if ON_CPU else torch.cuda.max_memory_reserved() - before
    seconds = time.perf_counter() - began
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # tied ones once
    packed = sum(tensor.nbytes for tensor in tensors.values())
    allowed = packed + largest + ALLOWED
    sizes = {"GB of files": size, "GB held": packed, "peak GB": peak, "allowed GB": allowed}
    figures: dict[str, object] = {head: f"{value / GB:.2f}" for head, value in sizes.items()}
    return Row(shape, ok=peak <= allowed, figures=figures | {"seconds": f"{seconds:.1f}"})
