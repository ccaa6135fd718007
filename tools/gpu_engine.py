"""Run the engine on a GPU with attention "torch" and "triton" against the eager forward of transformers.

Small random targets of several families in float32, every drafter, greedy: the text must be that of the target alone,
token for token. Where two tokens' logits are closer than `TIE`, the order of a sum may decide, and the rest is skipped.
"""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpu_setup import DEVICE, ON_CPU  # isort: skip - before triton
import torch
import transformers
from result_table import Row
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, constructible_assistants
from specdec.draft_models.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.gpu.operations import Operations, choose_operations
from specdec.models.target import TargetModel
from specdec.modules.private_copy import text_configs

VOCAB, WINDOW, TIE = 24, 16, 1e-3
SLIDING, FULL = "sliding_attention", "full_attention"
CHAIN, TREE = SpecConfig(4, adaptive=False), SpecConfig(6, 3, 16, adaptive=False)


class Setting(NamedTuple):
    """One engine to try."""

    drafter: str
    spec: SpecConfig
    page_size: int


SETTINGS = [
    *(Setting("none", CHAIN, page_size) for page_size in (1, 16)),
    *(Setting("n-gram", CHAIN, page_size) for page_size in (1, 16)),
    *(Setting(drafter, spec, page) for drafter in ("MTP", "EAGLE-3") for spec in (CHAIN, TREE) for page in (1, 16)),
]


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


def target(family: str, head_dim: int) -> PreTrainedModel:
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
    }
    alternating = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": WINDOW}
    if family == "gemma4-e2b":
        shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
        config = Gemma4TextConfig(**sizes, **alternating, **shared, global_head_dim=2 * head_dim)
        return spread(Gemma4ForCausalLM(config))
    if family == "gemma2":
        softcap = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1}
        return spread(Gemma2ForCausalLM(Gemma2Config(**sizes, **alternating, **softcap)))
    if family == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        return spread(GptOssForCausalLM(GptOssConfig(**sizes, **alternating, **experts)))
    if family in FUSED_TOO:
        name = family.removesuffix("Text")
        more = {"sliding_window": WINDOW} if family in ("Cohere2", "Gemma3Text") else {}
        config = getattr(transformers, f"{family}Config")(**sizes, **more, num_hidden_layers=4)
        return spread(getattr(transformers, f"{name}ForCausalLM")(config))
    return spread(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3)))


FAMILIES = ("gemma4-e2b", "gemma2", "gpt_oss", "llama")
FUSED_TOO = ("Cohere", "Cohere2", "Gemma3Text", "Glm", "Glm4", "Granite", "Olmo2", "Phi3", "SmolLM3")
"""Families by the names that their classes have in transformers."""


def drafter(name: str, bound: TargetModel) -> Any:
    """A drafter of that kind for the target; random weights. None where it has none."""
    torch.manual_seed(1)
    layers = bound.layout.layers
    if name == "n-gram":
        return NgramDrafter()
    if name == "EAGLE-3":
        spec = Eagle3Spec(
            hidden_size=bound.hidden_size,
            target_hidden_size=bound.hidden_size,
            vocab_size=VOCAB,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=layers[0].head_dim,
            aux_layers=(1, 2, len(layers)),
            windows=(None, 6),
            draft_vocab_size=VOCAB - 6,
        )
        head = spread(Eagle3Head(spec)).place(bound.device, bound.dtype)
        return Eagle3Drafter(head, torch.randperm(VOCAB)[: VOCAB - 6].sort().values, bound)
    if name == "MTP":
        sliding, full = bound.layout.last_owner(SLIDING), bound.layout.last_owner(FULL)
        assert sliding is not None and full is not None
        text = Gemma4TextConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            layer_types=[SLIDING, FULL],
            num_attention_heads=4,
            num_key_value_heads=sliding.num_kv_heads,
            head_dim=sliding.head_dim,
            global_head_dim=full.head_dim,
            num_global_key_value_heads=full.num_kv_heads,
            attention_k_eq_v=True,
            sliding_window=sliding.window,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
            pad_token_id=None,
        )
        with constructible_assistants():
            assistant = Gemma4AssistantForCausalLM(
                Gemma4AssistantConfig(
                    text_config=text, backbone_hidden_size=bound.hidden_size, use_ordered_embeddings=False
                )
            )
        return Gemma4MTPDrafter(spread(assistant).to(bound.dtype), bound)
    return None


@torch.no_grad()
def eager_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[V] behind the ids, by transformers' eager attention without a cache."""
    configs = text_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        logits: torch.Tensor = model(torch.tensor([list(ids)], device=DEVICE), use_cache=False).logits[0, -1]
        return logits.float().cpu()
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def greedy(model: PreTrainedModel, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """The tokens of greedy decoding, and by how much each led."""
    out: list[int] = []
    margins: list[float] = []
    for _ in range(new):
        best = eager_logits(model, prompt + out).topk(2)
        out.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return out, margins


def generate(
    model: PreTrainedModel,
    setting: Setting,
    attention: str,
    prompts: list[list[int]],
    new: int,
    ops: Operations | None = None,
) -> Any:
    """(outputs, milliseconds a token) of one engine, kernels compiled before."""
    bound = TargetModel(model, ops)
    config = EngineConfig(
        attention=attention,
        page_size=setting.page_size,
        max_batch_size=2,
        max_model_len=256,
        prefill_chunk=32,
        prefix_cache=False,
    )
    engine = Engine(bound, drafter(setting.drafter, bound), spec=setting.spec, config=config)
    for _ in range(1 if ON_CPU else 2):
        begin = time.perf_counter()
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new), progress=False)
        seconds = time.perf_counter() - begin
    engine.table.check()
    return outputs, 1e3 * seconds / sum(len(out.token_ids) for out in outputs)


def check_rows(quick: bool = False) -> Iterator[Row]:
    """One row a family, drafter and backend (both page sizes together), then bfloat16."""
    rng = random.Random(0)
    lengths, new = ((1, 19), 6) if quick else ((1, 9, 70), 20)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
    head_dim = 16 if quick else 64
    for family in FAMILIES[:1] + FAMILIES[-1:] + FUSED_TOO if quick else FAMILIES + FUSED_TOO:
        model = target(family, head_dim)
        wanted = [greedy(model, prompt, new) for prompt in prompts]
        for attention, fused in (("torch", False), ("triton", False), ("triton", True)):
            ops = choose_operations(fused, attention, DEVICE, torch.float32)
            if family in FUSED_TOO and not fused:
                continue
            if fused and (reason := TargetModel(model, ops).unfused) is not None:
                if family in FUSED_TOO:
                    yield Row(f"fused, {family}", reason, ok=False)
                continue  # a family without
            for setting in SETTINGS:
                if setting.drafter == "MTP" and not family.startswith("gemma4"):
                    continue
                name = f"{'fused' if fused else attention}, {family}, {setting.drafter}"
                name += "" if setting.drafter in ("none", "n-gram") else " tree" if setting.spec is TREE else " chain"
                name += f", pages of {setting.page_size}"
                try:
                    outputs, milliseconds = generate(model, setting, attention, prompts, new, ops)
                except Exception as exception:  # every setting, then the verdict
                    yield Row(name, f"{type(exception).__name__} {str(exception)[:200]}", ok=False)
                    continue
                wrong, ties = compare([out.token_ids for out in outputs], wanted)
                accepted = sum(sum(out.stats.accepted_counts) for out in outputs)
                error = f"{wrong} of {new * len(prompts)} tokens differ"
                if ties:
                    error += f", {ties} after a tie"
                if accepted:
                    error += f"; {accepted} drafts accepted"
                yield Row(name, error, f"{milliseconds:.1f} ms a token", ok=not wrong)
    if not ON_CPU:  # the interpreter has no bfloat16
        yield from half_rows(prompts, new)


def compare(got: list[list[int]], wanted: list[tuple[list[int], list[float]]]) -> tuple[int, int]:
    """(tokens that differ, those of them behind a token that had won by less than TIE)."""
    wrong = ties = 0
    for mine, (tokens, margins) in zip(got, wanted, strict=True):
        apart = [i for i, (a, b) in enumerate(zip(mine, tokens, strict=True)) if a != b]
        if apart and margins[apart[0]] < TIE:
            ties += len(apart)
        else:
            wrong += len(apart)
    return wrong, ties


def half_rows(prompts: list[list[int]], new: int) -> Iterator[Row]:
    """bfloat16 with heads of real size: everything runs; where the texts part is for information only."""
    for family, head_dim in (("gemma4-e2b", 256), ("gpt_oss", 64), ("llama", 128)):
        model = target(family, head_dim).to(torch.bfloat16)
        texts = []
        for attention in ("torch", "triton"):
            name = f"{attention}, {family}, bfloat16, EAGLE-3 tree, heads of {head_dim}"
            try:
                outputs, milliseconds = generate(model, Setting("EAGLE-3", TREE, 16), attention, prompts, new)
            except Exception as exception:
                yield Row(name, f"{type(exception).__name__} {str(exception)[:200]}", ok=False)
                continue
            texts.append([token for out in outputs for token in out.token_ids])
            same = sum(a == b for a, b in zip(texts[0], texts[-1], strict=True))
            ok = all(len(out.token_ids) == new for out in outputs)
            yield Row(name, f"{same} of {len(texts[-1])} tokens as with torch", f"{milliseconds:.1f} ms a token", ok=ok)
