"""What fused layers do to single rows besides products and norms: embeddings and the softcap, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

from specdec.gpu.operations import KERNELS, REFERENCE
from specdec.layers.embedding import embed, reference_embed
from specdec.layers.fuse import FusedEmbedding, fuse_embedding
from specdec.sampling.softcap import _cheap_tanh, reference_softcap, softcap

from marks import deep_cases, usual_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter cuts off where a GPU rounds

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty", "seeded")


def every(dtype: torch.dtype) -> torch.Tensor:
    """All numbers that 16 bits can say, and one that is none."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.cat([x[~x.isnan()], torch.tensor([torch.nan], dtype=dtype)]).to(DEVICE)


# softcap


@deep_cases("30.0-torch.bfloat16", "50.0-torch.float16", "1.0-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, ON_GPU], ids=str)
@pytest.mark.parametrize("cap", [30.0, 50.0, 1.0])
def test_softcap_has_the_bits_of_torchs_operators(cap: float, dtype: torch.dtype):
    x = every(dtype)
    # of a subnormal float16 a product with the reciprocal, which is what a GPU makes, is another number now and then
    divided = x / cap if DEVICE.type == "cuda" else (x.float() * (1 / torch.tensor(cap))).to(dtype)
    want = torch.tanh(divided) * cap
    got = softcap(x.clone(), cap)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if DEVICE.type == "cuda":
        assert got[:-1].view(torch.int16).equal(want[:-1].view(torch.int16)), "the sign of a zero"


def test_softcap_is_done_in_place_on_any_number_of_logits():
    x = torch.randn(3, 7, 211, device=DEVICE) * 40  # 4431: two programs and a rest
    want = reference_softcap(x, 30.0)
    assert softcap(x, 30.0) is x
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-6)
    assert softcap(x[:0], 30.0).shape == (0, 7, 211)


@triton.jit
def _tanh_kernel(p_x: tl.tensor, p_y: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    o_x = tl.arange(0, BLOCK)
    tl.store(p_y + o_x, _cheap_tanh(tl.load(p_x + o_x, mask=o_x < numel, other=0.0)), mask=o_x < numel)


def test_a_cheap_tangent_of_a_bfloat16_rounds_as_the_exact_one_does():
    """Its error is below 2e-6, and no tangent lies closer than 8e-6 to where rounding changes."""
    x = every(torch.bfloat16).float()
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, len(x), BLOCK=1 << 16)
    assert y[-1].isnan() and y[x == 0].eq(0).all() and y[x == torch.inf].eq(1).all()
    x, y = x[(x != 0) & ~x.isnan()], y[(x != 0) & ~x.isnan()]
    exact = torch.tanh(x.double())
    assert ((y - exact) / exact).abs().max() < 2e-6
    exact = exact[(exact.abs() < 1) & (x.abs() > 1e-30)]  # where a bfloat16 has all of its 8 bits
    digits = torch.frexp(exact).mantissa.abs() * 2**8
    to_halfway = (digits % 1 - 0.5).abs() / digits
    assert 8e-6 < to_halfway.min() < 9e-6


# embeddings


@usual_cases(
    "0-3-None-plain-torch.float32",
    *("1-3-None-plain-torch.float32", "1-3-None-scaled-torch.bfloat16", "5-512-512-scaled-torch.float16"),
    *("4-700-5-plain-torch.bfloat16", "4-700-5-scaled-torch.float32", "2-33-1030-plain-torch.float16"),
    "2-33-1030-scaled-torch.float32",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, ON_GPU], ids=str)
@pytest.mark.parametrize("scale", [None, 50.5964], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("rows", "width", "beside"), [(0, 3, None), (1, 3, None), (5, 512, 512), (4, 700, 5), (2, 33, 1030)]
)
def test_embed_is_the_reference(rows: int, width: int, beside: int | None, scale: float | None, dtype: torch.dtype):
    table = torch.randn(11, width, device=DEVICE).to(dtype)
    tokens = torch.randint(0, 11, (rows, 3), device=DEVICE)[:, 1]
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    right = None if beside is None else torch.randn(rows, 2, beside, device=DEVICE).to(dtype)[:, 1]
    want = table[tokens] if factor is None else table[tokens] * factor.to(dtype)
    want = want if right is None else torch.cat([want, right], dim=1)
    for function in (embed, reference_embed):
        got = function(tokens, table, factor, right)
        assert got.dtype == dtype and got.equal(want), function.__name__


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
    for module in (hooked, Shifted(5, 8), nn.Embedding(5, 8, max_norm=1.0), nn.Linear(5, 8)):
        assert fuse_embedding(module, REFERENCE) is module
