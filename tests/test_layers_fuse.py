"""Fused decoders and embeddings against the Hugging Face modules they replace, on random weights and rows."""

import copy
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from packed_weights import random_weight
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

from specdec.attention.bridge import AttentionCall
from specdec.attention.dense import bias_of, dense_attention
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.kvcache.layout import PrimaryLoc, layout_from_config
from specdec.layers.decoder import FusedDecoder
from specdec.layers.description.decoder_parts import Unfusable
from specdec.layers.description.families import FAMILIES
from specdec.layers.description.merge import are_alike, is_merged, merge
from specdec.layers.fuse import FusedEmbedding, fuse, fuse_embedding
from specdec.layers.packed.packed_modules import PackedLinear
from specdec.layers.rope_store import Destination
from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import family_name

from dense_oracle import OneText
from marks import deep, usual_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE = [
    *("gemma4-e2b", "gemma4-31b", "gemma4-multimodal", "gemma4-unified", "gemma3", "gemma2"),
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "glm", "glm4", "smollm3", "granite", "cohere", "cohere2"),
    *("exaone4", "qwen3_5"),
]
MIXED = [
    *("gemma4-moe", "gpt_oss", "qwen3_moe", "mixtral"),
    *("deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "mellum", "mimo_v2_flash"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_next", "step3p7"),
]

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty", "seeded")


class DenseContext(OneText):
    """One sequence, causal; K/V are read back from the pools, where a layer stored them at the slots of its rows."""

    def __init__(self, decoder: Any, num_rows: int, dtype: torch.dtype) -> None:
        layout = layout_from_config(decoder.config)  # layers, owners and windows; sizes are those of the products
        self.layout = layout
        self.slots = PrimaryLoc(torch.arange(num_rows, 0, -1, device=DEVICE))
        self.pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for spec, layer in zip(layout.layers, decoder.layers, strict=True):
            if spec.owner == spec.layer and not spec.recurrent:
                heads = layer.parts.heads
                shapes = [(num_rows + 1, heads.num_kv, dim) for dim in (heads.head_dim, heads.v_dim)]
                k, v = (torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes)
                self.pools[spec.layer] = k, v

    def destination(self, layer: int) -> Destination | None:
        return Destination(*self.pools[layer], self.slots) if layer in self.pools else None

    def attend_tokens(
        self,
        layer: int,
        q: torch.Tensor,
        own_k: torch.Tensor | None,
        own_v: torch.Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec = self.layout.layers[layer]
        k, v = (pool[self.slots] for pool in self.pools[spec.owner])
        if own_k is not None and own_v is not None:
            torch.testing.assert_close((own_k, own_v), (k, v), rtol=0, atol=0)
        distance = torch.arange(len(k))[:, None] - torch.arange(len(k))
        seen = (distance >= 0) & (distance < (spec.window or len(k)))
        rows = (x.transpose(0, 1)[None].float() for x in (q, k, v))
        bias = bias_of(seen[None].to(DEVICE))
        return dense_attention(*rows, bias, scaling=scaling, softcap=softcap, sinks=sinks)[0].to(q.dtype)


def text_model(model: Any) -> Any:
    decoder = model.get_decoder()
    return getattr(decoder, "language_model", decoder)


def run_fused(decoder: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    context = DenseContext(decoder, ids.shape[1], dtype)
    positions = torch.arange(ids.shape[1], device=DEVICE)[None]
    return decoder(input_ids=ids, position_ids=positions, use_cache=False, specdec_ctx=context).last_hidden_state


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0} | {
    "original_max_position_embeddings": 64
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention biases": ("llama", {"attention_bias": True}),
    "yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE | {"rope_theta": 1e4}}),
    "glm biases": ("glm4", {}),
    "queries without a latent": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    "latent biases": ("deepseek_v3", {"attention_bias": True}),
}


@pytest.fixture
def make_text_model(make_target: Callable[..., Any]) -> Callable[[str], Any]:
    """A fresh text model of a family or of a variant."""

    def make(name: str) -> Any:
        if name not in VARIANTS:
            return text_model(make_target(name, fresh=True)).to(DEVICE)
        family, changes = VARIANTS[name]
        model = text_model(make_target(family, fresh=True, **changes)).to(DEVICE)
        with torch.no_grad():
            for param_name, param in model.named_parameters():
                if param_name.endswith("bias"):
                    param.normal_()
        return model

    return make


def tokens(num_rows: int) -> torch.Tensor:
    return torch.randint(1, 96, (1, num_rows), generator=torch.Generator().manual_seed(num_rows)).to(DEVICE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("ops", "name"),
    [(REFERENCE, name) for name in [*DENSE, *MIXED, *VARIANTS]]
    + [
        # gpt_oss: test_fused_engine.py; recurrent layers: test_recurrent_blocks.py; every kernel is compared with its
        # reference in test_kernel_references.py, too
        (KERNELS, name) if name in ("gemma4-e2b", "qwen3") else deep(KERNELS, name)
        for name in [*DENSE, *MIXED, *VARIANTS]
    ],
    ids=lambda x: x if isinstance(x, str) else "kernels" if x is KERNELS else "reference",
)
def test_fused_is_the_module_it_replaces(
    ops: Operations, name: str, make_text_model: Callable[[str], Any], hf_forward: Callable[..., Any]
):
    source = make_text_model(name)
    ids = tokens(13)
    want = hf_forward(source, ids[0].tolist()).last_hidden_state
    decoder = fuse(private_copy(source), ops)
    assert isinstance(decoder, FusedDecoder)
    torch.testing.assert_close(run_fused(decoder, ids, torch.float32), want, rtol=1e-4, atol=1e-4)


@usual_cases(
    *("gemma4-e2b", "gemma2", "llama", "phi3", "granite", "qwen3_5", "gemma4-moe", "gpt_oss", "deepseek_v3"),
    "step3p7",
)
@torch.no_grad()
@pytest.mark.parametrize("family", [*DENSE, *MIXED])
def test_fused_rounds_as_the_module_does(family: str, make_target: Callable[..., Any], hf_forward: Callable[..., Any]):
    """In bfloat16 the fused decoder is no further from float32 than Hugging Face's own bfloat16 is.

    A mixture's row that rounding sends to another expert is far off in either; so its rows are judged by their median.
    """
    model = make_target(family, fresh=True).to(DEVICE)
    source = text_model(model)
    ids = tokens(13 if family in DENSE else 60)
    exact = hf_forward(source, ids[0].tolist()).last_hidden_state
    model.to(torch.bfloat16)
    rounded = hf_forward(source, ids[0].tolist()).last_hidden_state.float()
    decoder = fuse(private_copy(source), REFERENCE if DEVICE.type == "cpu" else KERNELS)
    fused = run_fused(decoder, ids, torch.bfloat16).float()
    if family in MIXED:
        ours, theirs = ((x - exact).norm(dim=-1).median() for x in (fused, rounded))
        assert ours <= 1.5 * theirs
    else:
        assert (fused - exact).norm() <= 1.25 * (rounded - exact).norm()
    assert (rounded - exact).norm() > 1e-3 * exact.norm()


@torch.no_grad()
def test_a_router_in_float32_keeps_its_model_fused(make_target: Callable[..., Any], hf_forward: Callable[..., Any]):
    """ERNIE loads it so, in a model of another dtype."""
    source = text_model(make_target("ernie4_5_moe", fresh=True)).to(DEVICE).to(torch.bfloat16)
    for layer in source.layers[1:]:
        layer.mlp.gate.float()
    ids = tokens(40)
    want = hf_forward(source, ids[0].tolist()).last_hidden_state.float()
    fused = run_fused(fuse(private_copy(source), REFERENCE), ids, torch.bfloat16).float()
    assert ((fused - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.03


class FrozenContext:
    """Every layer reads one prefix of 11 keys, of which it owns nothing, as an MTP assistant does."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.kv = [torch.randn(2, 1, 11, layer.self_attn.head_dim, device=DEVICE) for layer in layers]

    def destination(self, layer: int) -> None:
        return None

    def attend_tokens(self, layer: int, q: torch.Tensor, k: None, v: None, *, scaling: float, **options: None):
        assert k is None and v is None and not any(options.values())
        k, v = self.kv[layer].expand(2, q.shape[1], -1, -1)
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, scale=scaling).transpose(0, 1).contiguous()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.attend_tokens(call.layer, call.query[:, :, 0], None, None, scaling=call.scaling)[:, None]


@torch.no_grad()
@pytest.mark.parametrize("ops", [REFERENCE, KERNELS], ids=["reference", "kernels"])
@pytest.mark.parametrize("ordered", [False, True], ids=["dense", "centroids"])
def test_fused_assistant_is_the_module_it_replaces(
    ordered: bool, ops: Operations, make_target: Callable[..., Any], make_assistant: Callable[..., Any]
):
    """The decoder of an MTP assistant: queries only, called with embeddings, as a batch of single rows."""
    model = copy.deepcopy(make_assistant(make_target("gemma4-31b"), ordered=ordered)).to(DEVICE).model
    context = FrozenContext(model.layers)
    x = torch.randn(5, 1, 24, device=DEVICE)
    unused = torch.zeros(1, 1, 1, 1, device=DEVICE)
    options = {
        "inputs_embeds": x,
        "position_ids": torch.tensor([[3], [900], [0], [7], [7]], device=DEVICE),
        "attention_mask": dict.fromkeys(model.config.layer_types),
        "shared_kv_states": dict.fromkeys(model.config.layer_types, (unused, unused)),
        "use_cache": False,
        "specdec_ctx": context,
    }
    want = private_copy(model)(**options).last_hidden_state
    decoder = fuse(private_copy(model), ops)
    torch.testing.assert_close(decoder(**options).last_hidden_state, want, rtol=1e-4, atol=1e-4)


def test_every_entry_of_the_table_is_tested(make_target: Callable[..., Any]):
    assert {family_name(text_model(make_target(name))) for name in [*DENSE, *MIXED]} == set(FAMILIES)


def test_weights_stay_the_users(make_target: Callable[..., Any], tmp_path: Any):
    """Same names, same objects, same values, same bytes; a change in place is seen."""
    model = make_target("gemma4-e2b", fresh=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    params = dict(model.named_parameters())
    decoder = fuse(private_copy(model.model), REFERENCE)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0)
    assert all(param is params[name] for name, param in model.named_parameters())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.numel() * p.element_size() for p in model.parameters())

    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.fill_(7.0)
    merged = decoder.parts.layers[0].qkv
    assert (merged[len(attention.q_proj.weight) :][: len(attention.k_proj.weight)] == 7.0).all()

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)

    again = fuse(private_copy(model.model), REFERENCE)
    assert again.parts.layers[0].qkv.data_ptr() == merged.data_ptr()
    assert is_merged([attention.q_proj.weight, attention.k_proj.weight])


@pytest.mark.parametrize("kept", ["storages of their own", "one transposed", "both transposed"])
def test_weights_that_only_lie_next_to_each_other_are_merged_like_others(kept: str):
    """Weights of a file that is mapped into memory are no rows of the first one's storage, nor in its order."""
    file = bytearray(struct.pack("8f", *range(8)))
    whole = torch.frombuffer(file, dtype=torch.float32)
    if kept == "both transposed":
        first, second = whole.view(2, 4).t().chunk(2)
    elif kept == "one transposed":
        first, second = whole[:4].view(2, 2), whole[4:].view(2, 2).t()
    else:
        first, second = (torch.frombuffer(file, dtype=torch.float32, count=4, offset=at).view(2, 2) for at in (0, 16))
    values = torch.cat([first, second])
    assert not is_merged([first, second])
    merged = merge([first, second])
    assert merged.equal(values) and merged.is_contiguous() and is_merged([first, second])


def test_products_with_zeros_and_without_are_not_alike():
    """A checkpoint of several formats may have both. Joined, the zeros would be fewer than the scales."""
    plain, other = (PackedLinear(random_weight("int4", 16, 32)) for _ in range(2))
    with_zeros = PackedLinear(random_weight("int4-zeros", 16, 32))
    assert are_alike([plain, other]) and not are_alike([plain, with_zeros]) and not are_alike([with_zeros, plain])


class Adapter(nn.Linear):
    """Another class than the layers' own."""


def change(model: Any, what: str) -> None:
    first, second = model.layers[:2]
    match what:
        case "adapter":
            second.mlp.up_proj = Adapter(32, 48, bias=False)
        case "hooked":
            first.self_attn.register_forward_hook(lambda *_: None)
        case "activation":
            first.mlp.act_fn = nn.ReLU()
        case "rope":
            model.rotary_emb.rope_type = "spiral"
        case "dtype":
            second.half()
        case "bias of down":
            second.mlp.down_proj.bias = nn.Parameter(torch.zeros(32))
        case "bias of k":
            first.self_attn.k_proj.bias = None
        case "gates":
            first.self_attn.gate_per_head = False
        case "class":
            model.__class__ = type("Other", (type(model),), {})


@pytest.mark.parametrize(
    ("family", "settings", "changed", "reason"),
    [
        ("llama", {}, "adapter", "layers.1.mlp.up_proj is a"),
        ("llama", {}, "hooked", "layers.0.self_attn is hooked"),
        ("llama", {}, "activation", "gated by ReLU"),
        ("llama", {}, "rope", "type 'spiral'"),
        ("llama", {}, "dtype", "more than one dtype"),
        ("llama", {}, "class", "Other has no fused form"),
        ("llama", {}, "bias of down", "MLP has biases"),
        ("qwen2", {}, "bias of k", "some of its attention projections have biases"),
        ("step3p7", {}, "gates", "gated by channel"),
        ("cohere", {"use_qk_norm": True}, "", "norms of queries and keys have weights [[4, 8], [2, 8]]"),
        ("granite", {"mlp_bias": True}, "", "MLP has biases"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_instance_that_is_not_as_its_class_is_refused(
    family: str, settings: dict[str, Any], changed: str, reason: str, make_target: Callable[..., Any]
):
    model = text_model(make_target(family, fresh=True, **settings))
    change(model, changed)
    with pytest.raises(Unfusable, match=re.escape(reason)):
        fuse(private_copy(model), REFERENCE)


# embeddings


@pytest.mark.parametrize("ops", [REFERENCE, KERNELS], ids=["reference", "kernels"])
def test_an_embedding_stands_for_the_one_it_replaces(ops):
    tokens = torch.tensor([[4, 0, 2], [1, 1, 4]], device=DEVICE)
    state = torch.randn(2, 3, 6, device=DEVICE)
    for source in (nn.Embedding(5, 8), Gemma4TextScaledWordEmbedding(5, 8, 0, embed_scale=3.7)):
        source = source.to(DEVICE, torch.float16)
        fused = fuse_embedding(source, ops)
        assert isinstance(fused, FusedEmbedding) and fused.weight is source.weight
        with torch.inference_mode():
            assert fused(tokens).equal(source(tokens))
            got = fused(tokens, right=state.half())
            assert got.equal(torch.cat([source(tokens), state.half()], dim=-1))


class Shifted(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + 1


def test_an_embedding_that_does_more_is_left_alone():
    hooked = nn.Embedding(5, 8)
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    turned = nn.Embedding(5, 8, _weight=torch.randn(8, 5).t())
    for module in (hooked, turned, Shifted(5, 8), nn.Embedding(5, 8, max_norm=1.0), nn.Linear(5, 8)):
        assert fuse_embedding(module, REFERENCE) is module
