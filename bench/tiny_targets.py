"""Small engines over random targets of the tests, in float32, with drafters, and what transformers generates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch
from transformers import PreTrainedModel

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.lookup import NgramDrafter
from specdec.engine import Engine
from specdec.models.target import TargetModel
from specdec.training.assistant_training import new_assistant

from tiny_models import build_target, random_eagle3, spread

VOCAB = 24
CHAIN, TREE = SpecConfig(4, adaptive=False), SpecConfig(6, 3, 16, adaptive=False)
FAMILIES = [
    *("gemma4-e2b", "gemma2", "gpt_oss", "llama", "cohere2", "gemma3", "cohere", "glm", "glm4", "granite", "olmo2"),
    *("phi3", "smollm3"),
]
"""Families without recurrent layers, as the tests name them."""
RECURRENT_HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 48}


class Setting(NamedTuple):
    """One engine to try."""

    drafter: str
    spec: SpecConfig
    page_size: int

    @property
    def summary(self) -> str:
        shape = (" tree" if self.spec is TREE else " chain") if self.drafter in ("MTP", "EAGLE-3") else ""
        return f"{self.drafter}{shape}, pages of {self.page_size}"

    def fits(self, family: str) -> bool:
        return self.drafter != "MTP" or family == "gemma4-e2b"


def tiny_target(family: str, head_dim: int) -> PreTrainedModel:
    """A random target; `head_dim` of its layers, twice that on Gemma 4's full ones."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "head_dim": head_dim}
    if family == "gemma4-e2b":
        sizes["global_head_dim"] = 2 * head_dim
    made = spread(build_target(family, **sizes, **(RECURRENT_HEADS if family == "qwen3_5" else {}))).to(DEVICE)
    made.set_attn_implementation("eager")
    return made


def tiny_drafter(name: str, bound: TargetModel) -> Any:
    """A drafter of that kind with random weights; None for "none"."""
    if name == "EAGLE-3":
        return random_eagle3(bound)
    if name == "MTP":
        torch.manual_seed(1)
        assistant = new_assistant(bound, hidden=24, intermediate=32, layers=2, heads=4)
        return Gemma4MTPDrafter(spread(assistant).to(bound.device, bound.dtype), bound)
    return NgramDrafter() if name == "n-gram" else None


def tiny_engine(bound: TargetModel, setting: Setting, **config: Any) -> Engine:
    usual = {"max_batch_size": 4, "max_model_len": 256, "prefill_chunk": 64, "page_size": setting.page_size}
    usual |= {"attention": "torch" if ON_CPU else "triton"}
    sizes = EngineConfig(**{**usual, **config})
    return Engine(bound, tiny_drafter(setting.drafter, bound), spec=setting.spec, config=sizes)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
    """The tokens of greedy decoding by transformers' eager attention without a cache, and by how much each led."""
    out: list[int] = []
    margins: list[float] = []
    for _ in range(new):
        logits = model(torch.tensor([[*prompt, *out]], device=DEVICE), use_cache=False).logits[0, -1]
        best = logits.float().topk(2)
        out.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return out, margins
