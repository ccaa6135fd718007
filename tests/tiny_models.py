"""Tiny random targets of every family, with drafters, engines, and the tokens that transformers generates.

A plugin of conftest.py. A model is cached for the session, so a test that changes one asks for a fresh one.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from block_heads import random_block
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from specdec import Engine, EngineConfig, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.kvcache.layout import layout_from_config
from specdec.loading import Checkpoint
from specdec.models import published
from specdec.models.target import TargetModel
from specdec.modules.private_copy import text_configs

from greedy_truth import Truth
from marks import deep, each_value, is_deep, pairs, slow
from proved_models import SHARED

VOCAB = 96
WINDOW = 8
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
FAMILIES = [
    *("gemma4-e2b", "gemma4-31b", "gemma4-moe", "gemma4-multimodal", "gemma3", "gemma2"),
    *("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe", "mistral"),
]
GEMMA4_FAMILIES = [family for family in FAMILIES if family.startswith("gemma4")]
FAST_FAMILIES = ("gemma4-e2b", "gemma2", "gpt_oss", "llama")  # shared K/V, softcaps, sinks, full attention alone


def fast_ones(families: Sequence[str], *choices: Sequence[Any]) -> list[Any]:
    """Combine families and choices, for a test that depends little on the family.

    `make test` runs every value of the choices on the fast families; test_greedy_exact.py decodes on every family.
    """
    others = [case for case in pairs(families, *choices) if case[0] not in FAST_FAMILIES]
    fast = each_value(pairs([family for family in families if family in FAST_FAMILIES], *choices))
    return [*fast, *(deep(*case) for case in others)]


@pytest.fixture(params=[family if family in FAST_FAMILIES else slow(family) for family in FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    """Every family of target, one test each."""
    return str(request.param)


BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDES = {"sliding_window": WINDOW}
ALTERNATING = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **SLIDES}
EXPERTS = {"num_experts_per_tok": 2}
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
SPARSE = {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
GROUPS = {**SPARSE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SLIDES_TWICE = {"layer_types": [SLIDING, FULL, SLIDING], **SLIDES}
BY_KIND = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: {"rope_type": "default", "rope_theta": 1e5}}
TWO_ROPES = {"rope_parameters": BY_KIND}
PARTLY_BY_KIND = {"rope_parameters": {**BY_KIND, FULL: {**BY_KIND[FULL], "partial_rotary_factor": 0.5}}}
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    **SLIDES,
}
K_IS_V = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
SHARED_KV = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
TWO_OWNERS = {  # of a kind: sharers read the last
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 6.0}
LATENT = {  # multi-head latent attention, with V narrower than K
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
RECURRENT = {
    **PARTLY,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED_EXPERT = {**SPARSE, "num_experts": 6, "shared_expert_intermediate_size": 24}
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "shared_intermediate_size": 24,
}
NEMOTRON = {
    "num_hidden_layers": 6,
    "layer_types": [LINEAR, "mlp", FULL, "moe", LINEAR, "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}
CONVOLVES = {"layer_types": ["conv", "conv", FULL, "conv"], "block_auto_adjust_ff_dim": False}
QWEN2 = {**SLIDES, "use_sliding_window": True, "max_window_layers": 1}
LOW = {"query_pre_attn_scalar": 1}  # so that softcaps and sinks matter
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-e2b": ("Gemma4", {**GEMMA4, **SHARED_KV}),
    "gemma4-31b": ("Gemma4", {**GEMMA4, **K_IS_V}),
    "gemma4-moe": ("Gemma4", {**GEMMA4, **K_IS_V, **GEMMA4_EXPERTS}),
    "gemma4-unified": ("Gemma4Unified", {**GEMMA4, **K_IS_V}),  # a 12B, which transformers has in a file of its own
    "gemma3": ("Gemma3", {**SLIDES, **LOW, "num_hidden_layers": 4, "layer_types": [SLIDING] * 3 + [FULL]}),
    "gemma2": ("Gemma2", {**ALTERNATING, **LOW, "attn_logit_softcapping": 2.0}),
    "gpt_oss": ("GptOss", {**ALTERNATING, **EXPERTS, "num_local_experts": 4}),
    "llama": ("Llama", {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2", QWEN2),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "mistral": ("Mistral", SLIDES),
    # built by tests of fused layers only
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**SLIDES, "layer_types": [SLIDING, SLIDING, FULL], "logit_scale": 0.25}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_k": 3, "moe_num_experts": 7, "moe_intermediate_size": 16}),
    "exaone4": ("Exaone4", SLIDES_TWICE),
    "exaone_moe": ("ExaoneMoe", {**GROUPS, **SLIDES_TWICE, "num_experts": 8}),
    "glm": ("Glm", PARTLY),
    "glm4": ("Glm4", {**PARTLY, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", {**GROUPS, **PARTLY, "n_routed_experts": 12, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **GROUPS, **DENSE_FIRST, "n_routed_experts": 8, "v_head_dim": 12}),
    "granite": ("Granite", GRANITE),
    "hy_v3": ("HYV3", {**SPARSE, "num_experts": 6}),
    "mellum": ("Mellum", {**SPARSE, **SLIDES_TWICE, **TWO_ROPES, **DENSE_FIRST, "num_experts": 6}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {**PARTLY, **SLIDES}),
    "qwen2_moe": ("Qwen2Moe", SHARED_EXPERT),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0]}),
    "starcoder2": ("Starcoder2", {}),  # without fused layers
    "step3p7": (
        "Step3p7",
        {
            **SPARSE,
            **SLIDES_TWICE,
            **PARTLY_BY_KIND,
            **DENSE_FIRST,
            "n_routed_experts": 6,
            "share_expert_dim": 24,
            "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0, 0, 0.5],
            "swiglu_limits_shared": [2, 0, 0.5],
        },
    ),
    # built by tests of cache groups only
    "deepseek_v3": ("DeepseekV3", {**LATENT, **ROUTED, "first_k_dense_replace": 1}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {**ROUTED, **SLIDES, "head_dim": 12, "v_head_dim": 8, "layer_types": [FULL, SLIDING, SLIDING]},
    ),
    # with recurrent layers
    "qwen3_next": ("Qwen3Next", {**RECURRENT, **SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5", RECURRENT),
    "qwen3_5_moe": ("Qwen3_5Moe", {**RECURRENT, **SHARED_EXPERT}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**GRANITE, **MAMBA, **EXPERTS, "num_local_experts": 4}),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "lfm2": ("Lfm2", {**CONVOLVES, "num_hidden_layers": 4, "conv_L_cache": 3}),
    "two_windows": ("Qwen2", {**QWEN2, "num_hidden_layers": 4}),
}
"""Family -> beginning of its classes in transformers, and the fields of its config besides `BASE`."""


def build_target(family: str, **overrides: Any) -> PreTrainedModel:
    """Build an untrained model of the family; `overrides` go to its text config."""
    if family == "gemma4-multimodal":
        return transformers.Gemma4ForConditionalGeneration(multimodal_config(**overrides))
    name, fields = TARGETS[family]
    text = text_fields(fields, overrides)
    if name in ("Qwen2", "Qwen2Moe", "Ernie4_5_Moe"):
        del text["head_dim"]
    if family == "step3p7":
        tower = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
        config = transformers.Step3p7Config(text_config=transformers.Step3p7TextConfig(**text), vision_config=tower)
        return transformers.Step3p7ForConditionalGeneration(config)
    kind = "TextConfig" if name in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe") else "Config"
    config = getattr(transformers, name + kind)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config(**text))
    if family == "two_windows":
        narrower = model.model.layers[2].self_attn
        narrower.__class__, narrower.sliding_window = NarrowerAttention, text["sliding_window"] // 2 - 1
    return model


class NarrowerAttention(Qwen2Attention):
    """Attention with a narrower window than the config's, which it cuts out of the mask of all layers."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention_mask, torch.Tensor):  # [1, 1, T, T], without a cache
            steps = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
            unseen = steps[:, None] - steps >= self.sliding_window
            attention_mask = attention_mask.masked_fill(unseen, torch.finfo(hidden_states.dtype).min)
        return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)


def text_fields(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    text = copy.deepcopy({**BASE, **fields, **overrides})  # configs write into what they are given
    if text.get("hidden_size_per_layer_input"):
        text.setdefault("vocab_size_per_layer_input", text["vocab_size"])
    return text


def multimodal_config(**overrides: Any) -> transformers.Gemma4Config:
    """Gemma 4 E2B with towers for images and sound."""
    text = text_fields({**GEMMA4, **SHARED_KV, **TWO_OWNERS}, overrides)
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4}
    audio = {"subsampling_conv_channels": [8, 8], "output_proj_dims": 8}
    return transformers.Gemma4Config(
        text_config=Gemma4TextConfig(**text),
        vision_config=transformers.Gemma4VisionConfig(**tower, **vision),
        audio_config=transformers.Gemma4AudioConfig(**tower, **audio),
    )


def few_layers() -> dict[str, Any]:
    """Fields of a gemma4-e2b of 3 layers, the last of which shares K/V, for engines on interpreted kernels. With `make
    test-deep` it has 4."""
    few = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1}
    return {} if is_deep() else few


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Widen the weights, sinks and norms included, so that greedy output varies; remove the end token.

    Embeddings stay small next to the layers' outputs: with a tied head they would predict their own token for ever.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02 if "embed_tokens." in name else 0.45)
            elif name.endswith("sinks"):
                weight.normal_()
            elif name.endswith("A_log"):  # a state that remembers hundreds of tokens
                weight.uniform_(-7.0, -2.0)
            elif "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


BUNDLED: dict[tuple[Any, ...], PreTrainedModel] = {}


@pytest.fixture(scope="module")
def bundled_once() -> Iterator[None]:
    """Load and check the bundled models once per process, not once per engine. For tests that change none."""
    load = Checkpoint.load

    def once(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, config: Any = None) -> PreTrainedModel:
        path = Path(checkpoint.path)
        if path.parent != published.BUNDLED_DIR or set(checkpoint.options) - {"dtype"}:
            return load(checkpoint, dtype, device, config)
        key = path, dtype, device
        if key not in BUNDLED:
            BUNDLED[key] = load(checkpoint, dtype, device, config)
            SHARED[id(BUNDLED[key])] = BUNDLED[key]
        return BUNDLED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", once)
        yield


TARGETS_BUILT: dict[str, PreTrainedModel] = {}


def shared_target(family: str, seed: int = 0, *, fresh: bool = False, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random target, window 8, no end token. It is cached, so not to be changed unless `fresh`.

    overrides: fields of the text config.
    """
    key = f"{family} {seed} {sorted(overrides.items())}"
    if fresh:
        torch.manual_seed(seed)
        return spread(build_target(family, **overrides))
    if key not in TARGETS_BUILT:
        with torch.inference_mode(False):  # later tests get it too, and inference tensors share no K/V
            torch.manual_seed(seed)
            TARGETS_BUILT[key] = spread(build_target(family, **overrides))
        SHARED[id(TARGETS_BUILT[key])] = TARGETS_BUILT[key]
    return TARGETS_BUILT[key]


@pytest.fixture(scope="session")
def make_target() -> Callable[..., PreTrainedModel]:
    """make_target(family, seed=0, fresh=False, **overrides): the function `shared_target`."""
    return shared_target


@pytest.fixture(scope="session")
def make_assistant() -> Callable[..., Gemma4AssistantForCausalLM]:
    """make_assistant(target, ordered=False, seed=1, **overrides): a random MTP assistant that fits a Gemma 4 target.

    `ordered`: a centroid head over a random token order. `overrides` go to its text config, `backbone_hidden_size` to
    the outer one. Cached: do not change it.
    """
    built: dict[str, Gemma4AssistantForCausalLM] = {}

    @torch.inference_mode(False)
    def make(
        target: PreTrainedModel, ordered: bool = False, seed: int = 1, **overrides: Any
    ) -> Gemma4AssistantForCausalLM:
        key = f"{id(target)} {ordered} {seed} {sorted(overrides.items())}"
        if key in built:
            return built[key]
        config = target.config.get_text_config()
        layout = layout_from_config(config)
        sliding, full = layout.last_owner(SLIDING), layout.last_owner(FULL)
        text: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 4 if ordered else 2,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] if ordered else [SLIDING, FULL],
            "num_attention_heads": 4,
            "num_key_value_heads": sliding.k.heads,
            "head_dim": sliding.k.dim,
            "global_head_dim": full.k.dim,
            "num_global_key_value_heads": full.k.heads,
            "attention_k_eq_v": True,
            "sliding_window": sliding.window,
            "max_position_embeddings": config.max_position_embeddings,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "pad_token_id": None,
        }
        outer = {
            "backbone_hidden_size": overrides.pop("backbone_hidden_size", config.hidden_size),
            "use_ordered_embeddings": ordered,
            "num_centroids": 12,
            "centroid_intermediate_top_k": 3,
        }
        torch.manual_seed(seed)
        with constructible_assistants():
            assistant = Gemma4AssistantForCausalLM(
                Gemma4AssistantConfig(text_config=Gemma4TextConfig(**{**text, **overrides}), **outer)
            )
        spread(assistant)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
        built[key] = assistant
        return assistant

    return make


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with its eager attention in the block."""
    configs = text_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


@pytest.fixture(scope="session")
def hf_forward() -> Callable[..., Any]:
    """hf_forward(model, ids, **kwargs): the HF output of one eager forward over [ids] without a cache."""

    @torch.no_grad()
    def forward(model: PreTrainedModel, ids: Sequence[int], **kwargs: Any) -> Any:
        device = next(model.parameters()).device
        with eager(model):
            return model(torch.tensor([list(ids)], device=device), use_cache=False, **kwargs)

    return forward


@pytest.fixture(scope="session")
def greedy_oracle(hf_forward: Callable[..., Any]) -> Callable[..., Sequence[int]]:
    """greedy_oracle(model, ids, n, guess=()): the n tokens of greedy decoding, by full HF forwards without a cache.

    The tokens are the same for any guess (such as an engine's output). One forward over `ids` and the guess proves all
    its right tokens; each further token takes a forward. Without a guess, for a model that no test changes, the result
    is a `Truth`: the first list that it is compared with is the guess.
    """
    known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    alive: list[PreTrainedModel] = []  # an id is only a key while its model lives

    def tokens(model: PreTrainedModel, ids: Sequence[int], n: int, guess: Sequence[int]) -> list[int]:
        if (key := (id(model), tuple(ids))) not in known:
            known[key] = []
            alive.append(model)
        out = known[key]
        if len(out) < len(guess):
            best = hf_forward(model, [*ids, *guess]).logits[0, len(ids) - 1 : -1].argmax(-1).tolist()
            wrong = (i for i, (token, guessed) in enumerate(zip(best, guess, strict=True)) if token != guessed)
            right = best[: next(wrong, len(best)) + 1]  # the first wrong guess shows the right token, none after it
            out += right[len(out) :]
        while len(out) < n:
            out.append(int(hf_forward(model, [*ids, *out]).logits[0, -1].argmax()))
        return out[:n]

    def oracle(model: PreTrainedModel, ids: Sequence[int], n: int, guess: Sequence[int] = ()) -> Sequence[int]:
        if guess or id(model) not in SHARED:
            return tokens(model, ids, n, guess)
        return Truth(functools.partial(tokens, model, list(ids), n))

    return oracle


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """make_engine(model, drafter=None, *, num_steps=3, spec=None, tokenizer=None, **engine_config).

    `drafter`: a module, a name, or any drafter.
    """

    def make(
        model: PreTrainedModel,
        drafter: Any = None,
        *,
        num_steps: int = 3,
        spec: SpecConfig | None = None,
        tokenizer: Any = None,
        **config: Any,
    ) -> Engine:
        spec = spec or SpecConfig(num_steps=num_steps)
        settings = EngineConfig(**{"max_model_len": 256, "prefill_chunk": 16, **config})
        if hasattr(drafter, "bind"):
            return Engine(TargetModel(model), drafter, tokenizer=tokenizer, spec=spec, config=settings)
        return Engine.from_pretrained(model, drafter, tokenizer=tokenizer, spec=spec, config=settings)

    return make


def random_eagle3(
    model: PreTrainedModel | TargetModel, windows: tuple[int | None, ...] = (None, 6), **fields: Any
) -> Eagle3Drafter:
    """Build an EAGLE-3 drafter with a random head that drafts nine of the model's tokens. fields: of its spec. By
    default it reads the inputs of the first two layers and the output of the last."""
    target = model if isinstance(model, TargetModel) else TargetModel(model)
    torch.manual_seed(3)
    sizes = {"intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "draft_vocab_size": 9}
    taps = {"aux_layers": (0, 1, len(target.layout.layers))}
    spec = Eagle3Spec(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        windows=windows,
        **sizes | taps | fields,
    )
    head = Eagle3Head(spec)
    for weight in head.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4)
    head.target_ids = torch.randperm(target.vocab_size)[:9].sort().values
    return Eagle3Drafter(head.place(target.device, target.dtype).eval(), target)


@pytest.fixture(scope="session")
def make_drafter(
    make_assistant: Callable[..., Gemma4AssistantForCausalLM],
    scripted: Any,
    tree_script: Callable[..., Any],
) -> Callable[..., Any]:
    """make_drafter(kind, model, prompts=(), answers=()): a drafter for the model. Other kinds are returned as they are.

    "trees": random trees with many right paths; without answers the prompts are whole texts. "mtp" and "ordered": an
    assistant of Gemma 4. "eagle3" and "block": a random head. "lm": a tiny Llama.
    """

    def make(kind: str | None, model: Any, prompts: Sequence[Any] = (), answers: Sequence[Any] = ()) -> Any:
        match kind:
            case "trees":
                if answers:
                    prompts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
                return scripted(tree_script(prompts, model.get_input_embeddings().num_embeddings))
            case "mtp" if type(model).__name__.startswith("Gemma4"):
                return make_assistant(model)
            case "ordered":
                return make_assistant(model, ordered=True)
            case "eagle3":
                return random_eagle3(model)
            case "block":
                return random_block(model)
            case "lm":
                return shared_target("llama")
        return kind

    return make


@pytest.fixture
def engine_of(
    model: PreTrainedModel,
    make_engine: Callable[..., Engine],
    make_drafter: Callable[..., Any],
    byte_tokenizer: Any,
) -> Callable[..., Engine]:
    """engine_of(kind, truths, **config): an engine over the `model` fixture of a test's file, with any drafter."""
    specs = {"tree": SpecConfig(3, 3, 12), "eagle3": SpecConfig(3, 2, 6), "scripted": SpecConfig(5)}
    kinds = {"tree": "mtp", "scripted": "trees"}

    def make(kind: str | None = None, truths: Sequence[Sequence[int]] = (), **config: Any) -> Engine:
        drafter, spec = make_drafter(kinds.get(kind, kind), model, truths), specs.get(kind)
        return make_engine(model, drafter, spec=spec, tokenizer=byte_tokenizer, **{"max_model_len": 320, **config})

    return make
