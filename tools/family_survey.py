"""Which of transformers' causal language models are served, and are they served right?

    python tools/family_survey.py                 # every class; about ten minutes on one core
    python tools/family_survey.py opt phi3        # these model types

Builds a tiny random model of every class in transformers' auto mappings for causal language models and for text with
images, and runs it against its own full eager forward for every token: plain and with random trees, pages of 1 and 4,
two prompts in a batch, longer than the window; by fused layers as well, where it has them. Prints one line a class:

    equal      served, and every token is the model's own; fused, or unfused
    refused    the sentence that a user sees
    WRONG      served, and a token differs: a defect of specdec
    crashed    anything else raised: a defect of specdec
    unbuilt    no tiny configuration was found, or the model does not run on its own
"""

import argparse
import gc
import itertools
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.errors import SpecDecError, error_summary
from specdec.gpu.operations import REFERENCE
from specdec.models.target import TargetModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from scripted_drafter import ScriptedDrafter, random_trees

VOCAB, NEW = 96, 10
MAX_PARAMETERS = 30_000_000
SECONDS = 120
SIZES = {
    1: "depth first_k_dense_replace max_window_layers n_group num_expert_groups topk_group",
    2: (
        "index_n_heads linear_num_key_heads moe_k n_groups moe_top_k moe_topk num_experts_per_tok "
        "num_key_value_heads num_kv_shared_layers top_k_experts"
    ),
    3: "num_channels",
    4: (
        "decoder_attention_heads decoder_layers encoder_attention_heads encoder_layers index_topk "
        "linear_num_value_heads mamba_n_heads mamba_num_heads moe_num_experts n_head n_heads n_layer n_layers "
        "n_routed_experts num_attention_heads num_experts num_heads num_hidden_layers num_layers "
        "num_local_experts rotary_dim"
    ),
    8: (
        "attention_head_dim attention_window_size d_kv head_dim hidden_size_per_layer_input "
        "linear_key_head_dim linear_value_head_dim local_attention mamba_d_state qk_nope_head_dim "
        "qk_rope_dim qk_rope_head_dim sliding_window ssm_state_size state_size v_head_dim window_size"
    ),
    16: (
        "global_head_dim index_head_dim kv_lora_rank mamba_d_head mamba_head_dim moe_intermediate_size patch_size "
        "q_lora_rank shared_expert_intermediate_size moe_shared_expert_intermediate_size"
    ),
    32: (
        "d_model dim embed_dim embedding_size hidden_size image_size lru_width n_embd out_hidden_size "
        "word_embed_proj_dim"
    ),
    48: (
        "d_ff decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size intermediate_size "
        "intermediate_size_mlp n_inner shared_intermediate_size"
    ),
    VOCAB: "vocab_size vocab_size_per_layer_input",
    256: (
        "max_position_embeddings max_source_positions max_target_positions n_positions original_max_position_embeddings"
    ),
}
"""What a tiny configuration has in place of a published one, and the names of the attributes that have it."""
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
DERIVED = {"layer_types", "mlp_layer_types", "architectures", "transformers_version", "dtype", "torch_dtype"}
"""Left to the class: it derives them from the small numbers."""
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
BLT_PART = {"hidden_size_global": 64, "num_hidden_layers": 2}
BY_HAND: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4]},
    "blt_global_transformer": {"hidden_size": 64},
    "blt_local_decoder": BLT_PART,
    "blt_local_encoder": BLT_PART,
    "chameleon": {
        "vocabulary_map": {"<image>": 90, "IMGIMGAZ": 80, "IMGIMGBZ": 81},
        "vq_config": {"num_embeddings": 4, "base_channels": 32, "channel_multiplier": [1, 1], "resolution": 16},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": MROPE, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_ocr2_sam_vision_model": {
        "num_hidden_layers": 1,
        "global_attn_indexes": [0],
        "downsample_channels": [8, 8],
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": MROPE | {"mrope_section": [1, 1, 2]},
    },
    "gemma4_unified_vision": {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 2, "num_key_value_heads": 4},
    "janus_vqgan": {"num_embeddings": 8, "base_channels": 32, "projection_dim": 32, "image_token_embed_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "minimax_m3_vl": {"projector_hidden_size": 32},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "qwen4_exp_text": {**INDEXER, "indexer_compress_ratio": 2, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Fields of model types that small numbers alone do not give a model that runs."""


class Result(NamedTuple):
    verdict: str
    why: str = ""


class Variant(NamedTuple):
    """Ways to shrink a configuration, for classes that do not take the first.

    windows: set one also where the default has none. lists: keep per-layer lists, cut to the first entries.
    fill: small numbers also for what is None by default. mrope: three rotary sections.
    """

    windows: bool
    lists: bool
    fill: bool
    mrope: bool


def tiny_config(kind: type[PreTrainedConfig], variant: Variant) -> PreTrainedConfig:
    """The class's default configuration with small numbers."""
    full = kind().to_dict()
    for name, part in kind.sub_configs.items():  # those that are None by default
        if full.get(name) is None and hasattr(part, "model_type"):
            full[name] = part().to_dict()
    return kind(**_small(full, variant))


def _small(full: dict[str, Any], variant: Variant) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in full.items():
        if isinstance(value, dict):
            if key.endswith(("config", "encoder", "decoder", "generator")) and "quantization" not in key:
                small[key] = _small(value, variant)
        elif key == "model_type" and value is not None:
            small[key] = value
        elif key in DERIVED:
            continue
        elif key in SMALL and isinstance(value, int | float):
            heads = key == "num_key_value_heads" and value == full.get("num_attention_heads")
            small[key] = SMALL["num_attention_heads"] if heads else SMALL[key]
            if not value and key == "num_kv_shared_layers":
                small[key] = 0
        elif key in SMALL and value is None and (variant.windows if "window" in key else variant.fill):
            small[key] = SMALL[key]
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCAB:
            # ids of images and sounds: beyond what the head can write
            small[key] = VOCAB - 1 if key.startswith(("pad", "bos", "eos")) else VOCAB + len(small)
        elif isinstance(value, list):
            if variant.lists:
                small[key] = value[: SMALL["num_hidden_layers"]] if len(value) > 4 else value
        else:
            small[key] = value
    if variant.mrope and "num_hidden_layers" in small and "vocab_size" in small:
        small["rope_parameters"] = dict(MROPE)
    return small | BY_HAND.get(str(full.get("model_type")), {})


def build(kind: type[PreTrainedConfig], model_class: type[PreTrainedModel], *, windows: bool) -> PreTrainedModel:
    """A tiny random model that runs; raises the last reason when no configuration gives one."""
    reason: Exception = ValueError("no configuration")
    built: PreTrainedModel | None = None
    for lists, fill, mrope in itertools.product((False, True), repeat=3):
        variant = Variant(windows, lists, fill, mrope)
        for part in (lambda config: config, lambda config: config.get_text_config(decoder=True)):
            try:
                config = part(tiny_config(kind, variant))
                with torch.device("meta"):
                    size = sum(weight.numel() for weight in model_class(config).parameters())
                if size > MAX_PARAMETERS:
                    raise ValueError(f"{size / 1e6:.0f}M parameters")
                torch.manual_seed(0)
                built = spread(model_class(part(tiny_config(kind, variant))))
                own_tokens(built, [9, 10], new=1)
                return built
            except Exception as error:
                reason = error if built is None else reason
    if built is not None:
        return built
    raise reason


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Weights wide enough that greedy output wanders and that positions matter; no end token."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.05 if "embed" in name and "pos" not in name else 0.45)
            elif name.endswith("sinks"):
                weight.normal_()
            elif "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.float().eval()


@torch.no_grad()
def own_tokens(model: PreTrainedModel, prompt: list[int], new: int = NEW) -> tuple[list[int], float]:
    """Greedy decoding by one full forward a token, and the narrowest lead of a chosen token."""
    tokens, lead = list(prompt), float("inf")
    for _ in range(new):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        best = logits.topk(2).values
        lead = min(lead, float(best[0] - best[1]) / max(float(logits.std()), 1e-9))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], lead


def survey(model: PreTrainedModel) -> Result:
    """Serve the model every way, or hear why not."""
    rng = random.Random(1)
    prompts = [[rng.randrange(8, VOCAB - 16) for _ in range(length)] for length in (11, 19)]
    model.set_attn_implementation("eager")
    try:
        truths = [own_tokens(model, prompt) for prompt in prompts]
    except Exception as error:
        truths, own_fault = [], error_summary(error)
    try:
        target = TargetModel(model)
    except SpecDecError as error:
        return Result("refused", str(error)) if "\n" not in str(error) else Result("crashed", "several lines")
    if not truths:
        return Result("WRONG", f"served, but does not run on its own: {own_fault}")
    wanted, lead = [tokens for tokens, _ in truths], min(lead for _, lead in truths)
    trees = ScriptedDrafter(random_trees([p + w for p, w in zip(prompts, wanted, strict=True)], VOCAB))
    fused = TargetModel(model, REFERENCE)
    targets = {"unfused": target} | ({} if fused.unfused else {"fused": fused})
    for (form, one), page_size, drafter in itertools.product(targets.items(), (1, 4), (None, trees)):
        config = EngineConfig(max_batch_size=2, max_model_len=64, page_size=page_size, prefill_chunk=7)
        engine = Engine(one, drafter, spec=SpecConfig(num_steps=6, adaptive=False), config=config)
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
        found = [output.token_ids for output in outputs]
        if found != wanted:
            way = f"{form}, pages of {page_size}, {drafter.name if drafter else 'plain'}"
            return Result("WRONG", f"{way}: {found} for {wanted}, narrowest lead {lead:.1e}")
    distinct = len({token for tokens in wanted for token in tokens})
    return Result("equal", f"{[*targets][-1]}, {distinct} distinct tokens, {target.logit_rule}")


def attempt(kind: type[PreTrainedConfig], model_class: type[PreTrainedModel], *, windows: bool) -> Result:
    try:
        with time_limit(SECONDS):
            try:
                model = build(kind, model_class, windows=windows)
            except Exception as error:
                return Result("unbuilt", error_summary(error))
            return survey(model)
    except Exception as error:
        return Result("crashed", error_summary(error))


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def classes(mapping: _LazyAutoMapping, wanted: Sequence[str]) -> Iterator[tuple[type[PreTrainedConfig], type]]:
    for name in mapping._model_mapping:
        if wanted and name not in wanted:
            continue
        kind: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
        if kind in mapping.keys():  # noqa: SIM118  (a lazy mapping, whose keys are built)
            found = mapping[kind]
            for one in found if isinstance(found, tuple) else (found,):
                yield kind, one


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="config model types; default: all")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=240, soft_wrap=True, highlight=False, markup=False)
    counts: dict[str, int] = {}
    done: set[nn.Module | type] = set()
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for kind, model_class in classes(mapping, args.model_types):
            if model_class in done:
                continue
            done.add(model_class)
            first = attempt(kind, model_class, windows=True)
            # a window in the config of a model that ignores it is refused; published configs have none
            again = attempt(kind, model_class, windows=False) if first.verdict in ("refused", "unbuilt") else first
            for result in dict.fromkeys((first, again)):
                counts[result.verdict] = counts.get(result.verdict, 0) + 1
                console.print(f"{result.verdict:8} {kind.model_type:24} {model_class.__name__:44} {result.why}")
            gc.collect()
    console.print(", ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items())))
    return 1 if counts.get("WRONG") or counts.get("crashed") else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
