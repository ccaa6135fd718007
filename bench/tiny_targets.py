"""Small random targets of several families in float32, drafters for them, and what transformers generates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch
import transformers
from transformers import PreTrainedModel

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.lookup import NgramDrafter
from specdec.engine import Engine
from specdec.models.target import TargetModel
from specdec.training.assistant_training import new_assistant

VOCAB, WINDOW = 24, 16
SLIDING, FULL = "sliding_attention", "full_attention"
CHAIN, TREE = SpecConfig(4, adaptive=False), SpecConfig(6, 3, 16, adaptive=False)
ALTERNATING = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": WINDOW}
SHARED_KV = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
SLIDES = {"num_hidden_layers": 4, "sliding_window": WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma4Text": {**ALTERNATING, **SHARED_KV},
    "Gemma2": {**ALTERNATING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1},
    "GptOss": {**ALTERNATING, **EXPERTS},
    "Llama": {"num_hidden_layers": 3},
    **dict.fromkeys(("Cohere2", "Gemma3Text"), SLIDES),
    **{name: {"num_hidden_layers": 4} for name in ("Cohere", "Glm", "Glm4", "Granite", "Olmo2", "Phi3", "SmolLM3")},
}
"""Fields of a config by family, as its class is named in transformers."""
LINEAR = "linear_attention"
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 48,
    },
    "Lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
}
"""Families with recurrent layers."""


class Setting(NamedTuple):
    """One engine to try."""

    drafter: str
    spec: SpecConfig
    page_size: int

    @property
    def words(self) -> str:
        shape = {"MTP": " tree", "EAGLE-3": " tree"}.get(self.drafter, "") if self.spec is TREE else ""
        shape = shape or (" chain" if self.drafter in ("MTP", "EAGLE-3") else "")
        return f"{self.drafter}{shape}, pages of {self.page_size}"

    def fits(self, family: str) -> bool:
        return self.drafter != "MTP" or family == "Gemma4Text"


def spread(model: Any) -> Any:
    """Weights wide enough that greedy text wanders and random drafts are right now and then; on the device."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02 if "embed_tokens." in name else 2.5 * weight.shape[-1] ** -0.5)
            elif name.endswith("sinks"):
                weight.normal_()
            elif "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.to(DEVICE).eval()


def tiny_target(family: str, head_dim: int) -> PreTrainedModel:
    """A random target; `head_dim` of its layers, twice that on Gemma 4's full ones."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **({"global_head_dim": 2 * head_dim} if family == "Gemma4Text" else {}),
    }
    config = getattr(transformers, f"{family}Config")(**sizes, **{**FAMILIES, **RECURRENT}[family])
    made: PreTrainedModel = spread(getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config))
    made.set_attn_implementation("eager")
    return made


def tiny_drafter(name: str, bound: TargetModel) -> Any:
    """A drafter of that kind with random weights; None for "none"."""
    torch.manual_seed(1)
    layers = bound.layout.layers
    if name == "EAGLE-3":
        spec = Eagle3Spec(
            hidden_size=bound.hidden_size,
            target_hidden_size=bound.hidden_size,
            vocab_size=VOCAB,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=layers[0].k.dim,
            aux_layers=(1, 2, len(layers)),
            windows=(None, 6),
            draft_vocab_size=VOCAB - 6,
        )
        head = spread(Eagle3Head(spec)).place(bound.device, bound.dtype)
        head.target_ids = torch.randperm(VOCAB)[: VOCAB - 6].sort().values
        return Eagle3Drafter(head, bound)
    if name == "MTP":
        assistant = new_assistant(bound, hidden=24, intermediate=32, layers=2, heads=4)
        return Gemma4MTPDrafter(spread(assistant).to(bound.dtype), bound)
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
