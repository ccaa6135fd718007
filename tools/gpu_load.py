"""Memory while a quantised checkpoint is loaded: `python tools/gpu_load.py --folder /tmp/made --shape gemma4-31b`.

Writes a checkpoint of the published layout (int4 of compressed-tensors in groups of 32; GPT-OSS: MXFP4 experts), one
file a layer, of random words, and loads it as a user does. The peak may be the packed bytes, one layer in bfloat16 and
2 GB; more exits with 1. On a GPU it is what the allocator took; on the CPU, what the process grew by (files that are
mapped are not counted).
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from result_table import table_head, table_row
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.loading import load_model

GB = 1e9
ALLOWED = 2 * GB
GROUP = 32
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": ["lm_head"],
}
Tensors = dict[str, torch.Tensor]


def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    bits = torch.iinfo(dtype)
    return torch.randint(bits.min, bits.max, shape, dtype=dtype)


def stored(name: str, weight: torch.Tensor, is_linear: bool) -> Tensors:
    """What the checkpoint has in the place of a parameter on the meta device."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # GPT-OSS: [E, K, N]
        experts, columns, rows = weight.shape
        sizes = experts, rows, columns // GROUP
        scales = torch.full(sizes, 121, dtype=torch.uint8)
        return {f"{name}_blocks": words(*sizes, 16, dtype=torch.uint8), f"{name}_scales": scales}
    if not is_linear:
        return {name: torch.empty(weight.shape, dtype=torch.bfloat16).normal_(std=0.02)}
    rows, columns = weight.shape
    scales = torch.full((rows, columns // GROUP), 0.01, dtype=torch.bfloat16)
    parts = {"packed": words(rows, columns // 8), "scale": scales, "shape": torch.tensor(weight.shape)}
    return {f"{name}_{part}": tensor for part, tensor in parts.items()}


def write(folder: Path, config: object) -> tuple[int, int]:
    """Bytes of the files, and of the largest layer in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
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


class Growth:
    """The most memory of its own, `peak`, that the process got in the block."""

    def __enter__(self) -> "Growth":
        self.peak, self._before, self._done = 0, self._now(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024


def held(model: nn.Module) -> Iterator[int]:
    """Bytes of each tensor of the model, tied ones once."""
    for tensor in {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values():
        yield tensor.nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, parents=[device_option])
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder, for the checkpoint")
    parser.add_argument("--shape", default="gemma4-31b", help="of `specdec bench --shape`")
    parser.add_argument("--layers", type=int, help="of the target; default: all")
    arguments = parser.parse_args()
    require_device()
    began = time.perf_counter()
    size, largest = write(arguments.folder, find_shape(arguments.shape).target(Shrink(arguments.layers, multiple=32)))
    written = time.perf_counter() - began
    began = time.perf_counter()
    with Growth() as growth:
        model = load_model(str(arguments.folder), dtype=torch.bfloat16, device=DEVICE)
    peak = growth.peak if ON_CPU else torch.cuda.max_memory_reserved()
    seconds = time.perf_counter() - began
    packed = sum(held(model))
    ok = peak <= packed + largest + ALLOWED
    heads = ("shape", "GB of files", "GB held", "peak GB", "allowed GB", "seconds", "")
    print(f"{machine()}; files were written in {written:.0f} s\n")
    print(table_head(*heads, numbers=heads[1:-1]))
    figures = [f"{value / GB:.2f}" for value in (size, packed, peak, packed + largest + ALLOWED)]
    print(table_row((arguments.shape, *figures, f"{seconds:.1f}", "" if ok else "above what is allowed")))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
