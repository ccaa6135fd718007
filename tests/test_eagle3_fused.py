"""A head of fused layers against its own modules, for every setting of a head; and the kernel that it begins with."""

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capturable import capturable

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec, FusedHead, PlainHead
from specdec.draft_models.heads.feedback_drafts import ModuleRows
from specdec.draft_models.heads.fused_layers import EchoContext, fuse_in_place
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.layers.accepted_path import keep_last, path_rows
from specdec.layers.description.decoder_parts import Unfusable
from specdec.layers.description.merge import is_merged
from specdec.layers.embedding import embed_and_norm
from specdec.layers.gemm.linear import gated_linear
from specdec.layers.gemm.product import Product
from specdec.layers.norm import Norm
from specdec.modules.weight_watch import Weights

from marks import deep_cases, usual

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, H = 24, 32
OPERATIONS = {"torch": REFERENCE, "kernels": KERNELS}

pytestmark = pytest.mark.usefixtures("kernels_run", "poison_empty", "seeded")


def biases(*names: str, layers: int = 1) -> frozenset[str]:
    return frozenset(f"layers.{i}.{name}" for i in range(layers) for name in names)


ATTENTION_BIASES = tuple(f"self_attn.{part}_proj" for part in "qkvo")
SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"windows": (None, 4), "qk_norm": True},
    "biases": {"biases": biases(*ATTENTION_BIASES) | {"fc", "lm_head"}},
    "normed residual": {"norm_before_residual": True, "norm_before_fc": True},
    "normed states": {"fc_norm": True, "norm_output": True, "hidden_act": "gelu_pytorch_tanh"},
    "final state": {"aux_layers": (), "has_fc": False, "final_norm": False, "draft_vocab_size": None},
    "own embeddings": {"hidden_size": 40, "owns_embed": True, "rope": {"rope_type": "linear", "factor": 4.0}},
}


def make_head(**settings: Any) -> Eagle3Head:
    sizes = {"hidden_size": H, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    spec = Eagle3Spec(
        **{
            **sizes,
            "target_hidden_size": H,
            "vocab_size": VOCAB,
            "aux_layers": (0, 1, 2),
            "draft_vocab_size": 9,
            **settings,
            "rope": {"rope_theta": 100.0, **settings.get("rope", {"rope_type": "default"})},
        }
    )
    head = Eagle3Head(spec).place(DEVICE, torch.float32).eval()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else weight.data.add_(0.2 * torch.randn_like(weight))
    return head


def plain_form(head: Eagle3Head) -> PlainHead:
    table = torch.nn.Embedding(VOCAB, head.spec.hidden_size, device=DEVICE)
    target_head = torch.nn.Linear(head.spec.hidden_size, VOCAB, bias=False, device=DEVICE)
    return PlainHead(head, head.embed_tokens or table, target_head)


def fuse(plain: PlainHead, ops: Operations) -> FusedHead:
    return FusedHead(plain, ops)


def chosen(plain: PlainHead, ops: Operations) -> tuple[Any, str | None]:
    at = SimpleNamespace(form=plain)
    return at, fuse_in_place("head", plain.head, 1, lambda: at.form.probed(), lambda: [(at, "form", fuse(plain, ops))])


@torch.inference_mode()
def run(form: PlainHead | FusedHead) -> tuple[ModuleRows, ModuleRows, torch.Tensor]:
    spec, random = form.head.spec, torch.Generator().manual_seed(5)
    states = torch.randn((2, 3, spec.feature_size), generator=random).to(DEVICE)
    tokens = torch.randint(VOCAB, (2, 3), generator=random).to(DEVICE)
    positions = torch.arange(6, device=DEVICE).view(2, 3) * 7
    hidden = torch.randn((2, 1, spec.hidden_size), generator=random).to(DEVICE)
    with capturable():
        first = form.run(0, tokens, form.first_state(states), positions, EchoContext())
        second = form.run(0, tokens[:, :1], hidden.expand(-1, 1, -1), positions[:, :1], EchoContext())
        return first, second, form.logits(second.z)


@pytest.mark.parametrize(
    ("setting", "ops"),
    usual(
        itertools.product(SETTINGS, OPERATIONS),
        lambda setting, ops: ops == "torch" or setting in ("two layers", "final state"),
    ),
)
def test_a_fused_head_is_the_plain_one(setting: str, ops: str) -> None:
    plain = plain_form(make_head(**SETTINGS[setting]))
    want = run(plain)
    fused = fuse(plain, OPERATIONS[ops])
    torch.testing.assert_close(run(fused), want, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(run(plain), want, atol=2e-5, rtol=2e-5)  # over merged weights
    attention = plain.head.layers[0].self_attn
    assert is_merged([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])


@pytest.mark.parametrize("assign", [False, True], ids=["moved", "other parameters"])
def test_replaced_weights_are_read_where_they_are(assign: bool) -> None:
    """Regression: norms that became other parameters were read as they had been."""
    plain = plain_form(make_head())
    fused = fuse(plain, REFERENCE)
    weights = Weights("head", fused.layers)
    run(fused)
    new = {name: tensor.clone() * 1.5 for name, tensor in plain.head.state_dict().items()}
    if assign:
        plain.head.load_state_dict(new, assign=True)
    else:
        for name, param in plain.head.named_parameters():
            param.data = new[name]
    assert weights.generation() == 1
    torch.testing.assert_close(run(fused), run(plain), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hidden_act": "relu"}, "its MLP is gated by ReLU"),
        ({"biases": biases("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}, "its MLP has biases"),
        ({"biases": biases("self_attn.q_proj")}, "some of its attention projections have biases"),
    ],
    ids=["activation", "biases", "some biases"],
)
def test_heads_without_a_fused_form_run_by_their_modules(
    settings: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = plain_form(make_head(**settings))
    want = run(plain)
    with pytest.raises(Unfusable, match=why):
        fuse(plain, REFERENCE)
    with caplog.at_level(logging.INFO, logger="specdec"):
        at, reason = chosen(plain, REFERENCE)
    assert at.form is plain and reason is not None and why in reason and why in caplog.text
    torch.testing.assert_close(run(plain), want)


def test_a_form_that_computes_something_else_is_not_chosen() -> None:
    plain = plain_form(make_head())
    assert isinstance(chosen(plain, REFERENCE)[0].form, FusedHead)
    wrong = REFERENCE.replacing({gated_linear: lambda x, weight, activation, *_: x[:, : len(weight) // 2] * 0})
    at, reason = chosen(plain, wrong)
    assert at.form is plain and reason == "its fused layers do not compute the same as its modules"


def test_embed_and_norm_by_eye() -> None:
    """Rows (3, 4) and (0, 2) over their root mean squares, sqrt(12.5) and sqrt(2), times the gains."""
    table = torch.tensor([[9.0, 9.0], [3.0, 4.0]], device=DEVICE)
    product = Product(torch.tensor([[[0.0, 1.5]], [[0.0, 0.5]]], device=DEVICE), None, torch.float32)
    one, two = (Norm(torch.full((2,), value, device=DEVICE), 0.0) for value in (1.0, 2.0))
    hidden, x = embed_and_norm(torch.tensor([1], device=DEVICE), table, product, one, two)
    assert hidden.tolist() == [[0.0, 2.0]]
    want = [[3 / 12.5**0.5, 4 / 12.5**0.5, 0.0, 2 * 2 / 2**0.5]]
    torch.testing.assert_close(x, torch.tensor(want, device=DEVICE))


PATHS = {
    # tree of 5 nodes; path, length, the token after each step: tokens are 10, 11, .. and 20, 21, ..; 7 and 8 are next
    "partial": ([[0, 2, 4], [0, 0, 0]], [3, 1], [[12, 14, 7], [8, None, None]]),
    "one step": ([[3], [4]], [1, 1], [[7], [8]]),
    "none": ([[0, 0, 0], [1, 2, 0]], [0, 2], [[7, None, None], [22, 8, None]]),
}


@pytest.mark.parametrize("form", ["reference", "kernel"])
@pytest.mark.parametrize("case", PATHS)
def test_rows_of_a_path_and_the_last_of_them(case: str, form: str) -> None:
    path, length, following = PATHS[case]
    ops = KERNELS if form == "kernel" else REFERENCE
    x = torch.randn(2, 5, 70, device=DEVICE)[:, :, :66]
    tokens = torch.arange(10, 15, device=DEVICE) + torch.tensor([[0], [10]], device=DEVICE)
    wide = torch.tensor(path, device=DEVICE).repeat(1, 2)  # rows of a path at a distance
    lengths, next_token = torch.tensor(length, device=DEVICE), torch.tensor([7, 8], device=DEVICE)
    rows, got = ops(path_rows)(x, tokens, wide[:, : len(path[0])], lengths, next_token)
    for b in range(2):
        for step, token in enumerate(following[b]):
            torch.testing.assert_close(rows[b, step], x[b, path[b][step]], rtol=0, atol=0)
            assert token is None or int(got[b, step]) == token
    kept = torch.zeros(4, 66, device=DEVICE)
    ops(keep_last)(kept, torch.tensor([3, 1], device=DEVICE), rows, lengths)
    torch.testing.assert_close(kept[[3, 1]], torch.stack([rows[b, max(n, 1) - 1] for b, n in enumerate(length)]))
    assert not kept[[0, 2]].any()
    gathered = kept.clone()
    ops(keep_last)(kept.zero_(), torch.tensor([3, 1], device=DEVICE), x, lengths, wide[:, : len(path[0])])
    torch.testing.assert_close(kept, gathered, rtol=0, atol=0)


def test_padding_rows_may_keep_their_last_row_several_times() -> None:
    rows, length = torch.randn(3, 2, 8, device=DEVICE), torch.tensor([2, 1, 2], device=DEVICE)
    kept = torch.zeros(3, 8, device=DEVICE)
    KERNELS(keep_last)(kept, torch.tensor([2, 0, 2], device=DEVICE), rows, length)
    torch.testing.assert_close(kept[0], rows[1, 0])
    assert kept[2].tolist() in (rows[0, 1].tolist(), rows[2, 1].tolist())


@deep_cases("chain")
@pytest.mark.slow
@pytest.mark.usefixtures("shallow_pair")
@pytest.mark.parametrize("spec", [SpecConfig(num_steps=3), SpecConfig(3, 3, 8)], ids=["chain", "tree"])
def test_an_engine_with_a_fused_head_drafts_and_says_the_same(spec: SpecConfig) -> None:
    """The bundled pair: every round accepts as many drafts, so the head draws what its modules draw. In float32: the
    first prompt's two best beginnings are 0.3 apart, which is within rounding of bfloat16, a GPU's default."""
    outs = []
    for fused in (False, True):
        config = EngineConfig(fused=fused, max_batch_size=2, max_model_len=128, dtype=torch.float32)
        with Engine.from_pretrained("tiny-gemma4", drafter="tiny-gemma4-eagle3", spec=spec, config=config) as engine:
            drafter = engine.drafter
            assert isinstance(drafter, Eagle3Drafter) and isinstance(drafter.form, FusedHead) == fused
            prompts = [
                engine.chat_prompt(text) for text in ("Ann has 3 pens and buys 4. How many?", "What is 6 times 7?")
            ]
            outs.append(engine.generate(prompts, SamplingParams(max_new_tokens=16)))
    plain, fused_outs = outs
    for one, other in zip(plain, fused_outs, strict=True):
        assert other.token_ids == one.token_ids
        assert other.stats.rounds == one.stats.rounds < len(one.token_ids) - 1, "nothing was accepted"
        assert other.stats.accepted_per_position == one.stats.accepted_per_position
