"""`deterministic=True`: the logits of a token are a function of its request alone, to the bit.

`Logits` writes down what the target says after every path of tokens, also of drafts that are rejected, and requires
the same bits whenever the same path comes again: in any batch, chunk, tree, after any preemption.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.backend import choose_backend
from specdec.attention.dense import VisibleKeys, attend_alone, bias_of, dense_attention
from specdec.draft_models.lookup import NgramDrafter
from specdec.errors import ConfigError, SpecDecError, UnsupportedModelError
from specdec.gpu.operations import FAST, KERNELS, REFERENCE
from specdec.models.batch_invariance import ROWS, ROWWISE, VectorwiseMode
from specdec.models.target import TargetModel
from specdec.sampling.log_probs import LogProbs
from specdec.sampling.reference_sampler import ReferenceSampler

from engine_internals import capture_on_cpu
from marks import deep, deep_cases, examples, is_deep, slow
from proved_models import SHARED
from tiny_families import VOCAB, random_eagle3
from tiny_models import FAMILIES

NEW = examples(6, 12)
BF16 = torch.bfloat16
DTYPES = torch.float32, BF16
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: python -m bench bits")


class Logits:
    """The one row of logits that each path of tokens may have. `again`: how often a row came again."""

    draw = staticmethod(ReferenceSampler.draw)

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.again = 0

    def note(self, path: tuple[int, ...], row: torch.Tensor) -> None:
        if path not in self.rows:
            self.rows[path] = row.clone()
            return
        assert torch.equal(self.rows[path], row), f"other bits after {len(path)} tokens"
        self.again += 1

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = self.draw

        def noting(
            batch: ReferenceSampler, logits: torch.Tensor, positions: torch.Tensor, inputs: Any, softcap: None
        ) -> torch.Tensor:
            for b, length in enumerate(inputs.length.tolist()):
                history = inputs.read_history()[b, :length].tolist()
                paths = [tuple(history)]
                if inputs.tree is not None:
                    tokens, parents = inputs.tree.tokens[b].tolist(), inputs.tree.parents[b].tolist()
                    for token, parent in zip(tokens[1:], parents[1:], strict=True):
                        paths.append((*paths[parent], token))
                for path, row in zip(paths, logits[b], strict=True):
                    self.note(path, row)
            return draw(batch, logits, positions, inputs, softcap)

        monkeypatch.setattr(ReferenceSampler, "draw", noting)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    logits = Logits()
    logits.watch(monkeypatch)
    return logits


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """engine(model, drafter=None, **config): a deterministic one, in the model's dtype."""

    def make(model: Any, drafter: Any = None, **config: Any) -> Engine:
        return make_engine(model, drafter, deterministic=True, dtype=model.dtype, **config)

    return make


def answers(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
    """Tokens, and all log-probabilities as they are."""
    outputs = engine.generate(list(prompts), list(params))
    engine.table.check()
    return [(out.token_ids, out.logprobs) for out in outputs]


def requests(
    random_prompt: Callable[..., list[int]], lengths: Sequence[int], new: int = NEW
) -> tuple[list[Any], list[Any]]:
    """Prompts, greedy and sampled in turn."""
    params = [
        SamplingParams(max_new_tokens=new, logprobs=VOCAB)
        if i % 2
        else SamplingParams(max_new_tokens=new - i % 3, temperature=0.9, top_p=0.9, seed=i, logprobs=2)
        for i in range(len(lengths))
    ]
    return [random_prompt(length, seed=i) for i, length in enumerate(lengths)], params


def typed(make_target: Callable[..., Any], family: str, dtype: torch.dtype) -> Any:
    """Return a model of this dtype that no test changes, so it is checked once for all engines."""
    model = make_target(family, fresh=dtype != torch.float32).to(dtype)
    return SHARED.setdefault(id(model), model)


# shared K/V and an embedding a layer; sinks; experts
USUAL = [("gemma4-e2b", BF16), ("gpt_oss", torch.float32), ("gemma4-moe", torch.float32)]


@deep_cases("gemma4-moe-torch.float32", "gpt_oss-torch.float32")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype) if (family, dtype) in USUAL else deep(family, dtype)
        for i, family in enumerate([*FAMILIES, "mixtral", "glm4_moe", "step3p7"])
        for dtype in ((torch.float32, BF16) if family in ("llama", "gemma4-e2b", "gpt_oss") else (DTYPES[i % 2],))
    ],
    ids=str,
)
def test_bits_are_those_of_a_request_alone(
    family, dtype, make_target, engine, random_prompt, scripted, tree_script, seen
):
    """Alone; with others that join and leave; in chunks of 16 and 256; preempted; chains and trees of any size."""
    model = typed(make_target, family, dtype)
    prompts, params = requests(random_prompt, (40, 5, 21, 1), new=examples(8, 12))
    alone = engine(model, prefill_chunk=256, max_batch_size=1)
    expected = answers(alone, prompts, params)
    truths = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    trees = scripted(tree_script(truths))

    assert answers(engine(model, "ngram", max_batch_size=3, page_size=4), prompts, params) == expected
    tight = engine(model, trees, num_steps=15, full_slots=80, swa_slots=80, max_batch_size=4)
    assert answers(tight, prompts, params) == expected
    assert tight.stats().preemptions > 0 and sum(tight.stats().accepted_counts) > 0
    if is_deep():
        large = engine(model, trees, num_steps=199, max_model_len=300, prefill_chunk=7)
        assert answers(large, prompts[:2], params[:2]) == expected[:2]
        assert sum(large.stats().accepted_counts) > 0
    assert seen.again > 50


@deep_cases("mtp-centroids-SpecConfig(num_steps=6, topk=5, num_draft_tokens=100, adaptive=False)")
@pytest.mark.parametrize(
    ("drafter", "spec"),
    [
        ("mtp", SpecConfig(4)),
        deep("mtp", SpecConfig(4, 4, 16)),
        slow("mtp-centroids", SpecConfig(6, 5, 100)),
        deep("eagle3", SpecConfig(4)),
        ("eagle3", SpecConfig(4, 4, 16)),
        deep("eagle3", SpecConfig(5, 8, 200)),
    ],
    ids=str,
)
def test_every_drafter(drafter, spec, make_target, make_assistant, engine, random_prompt, seen):
    model = make_target("gemma4-e2b", vocab_size=24)
    prompts = [random_prompt(length, vocab=24) for length in (9, 30)]
    params = [SamplingParams(max_new_tokens=NEW, logprobs=24)] * 2
    expected = answers(engine(model, max_batch_size=1), prompts, params)
    draft = random_eagle3(model) if drafter == "eagle3" else make_assistant(model, drafter == "mtp-centroids")
    speculating = engine(model, draft, spec=spec)
    assert answers(speculating, prompts, params) == expected


@deep_cases("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cached_kv_of_other_requests_has_the_same_bits(dtype, make_target, engine, random_prompt, seen):
    """A prefix found in the cache, next to requests that do not speculate."""
    model = typed(make_target, "gemma4-e2b", dtype)
    common = random_prompt(37, seed=9)
    prompts = [common + random_prompt(length, seed=length) for length in (1, 9, 14)]
    params = [SamplingParams(max_new_tokens=NEW, logprobs=VOCAB, speculation=each) for each in (None, False, None)]
    expected = answers(engine(model, max_batch_size=1, prefill_chunk=256, prefix_cache=False), prompts, params)
    sharing = engine(model, "ngram", prefill_chunk=16, page_size=4)
    assert answers(sharing, prompts, params) == answers(sharing, prompts, params) == expected
    assert sharing.stats().cached_tokens >= 5 * 36
    assert seen.again > 20


@pytest.mark.deep
@interpreted
@pytest.mark.parametrize("family", [deep("gemma4-moe"), slow("gpt_oss")])
def test_kernels(family, make_target, random_prompt, scripted, tree_script, seen, monkeypatch):
    """Alone, in a batch, in chunks of a few tokens, chains and trees, in captured rounds and not."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("specdec.runtime.rounds.round_shapes.MIN_TABLE_WIDTH", 8)
    monkeypatch.setattr("specdec.runtime.rounds.prompt_sizes.MIN_TOKENS", 4)
    model = make_target(family, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    prompts = [random_prompt(11), random_prompt(3)]
    params = [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=3, temperature=0.9, seed=1)]
    target = TargetModel(model, FAST, deterministic=True)
    config = {"max_model_len": 64, "fused": True, "attention": "triton", "deterministic": True}

    def tokens(drafter: Any, num_steps: int, **settings: Any) -> list[list[int]]:
        made = Engine(target, drafter, spec=SpecConfig(num_steps), config=EngineConfig(**config, **settings))
        assert made.target.ops is KERNELS and not made.target.in_tiles
        outputs = [out.token_ids for out in made.generate(prompts, params)]
        if made.steps.store.captures:
            assert made.stats().captures.captured
        return outputs

    expected = tokens(None, 1, max_batch_size=1, prefill_chunk=64)
    trees = scripted(tree_script([p + t for p, t in zip(prompts, expected, strict=True)]))
    assert tokens(trees, 5, prefill_chunk=7) == expected
    monkeypatch.setattr(ReferenceSampler, "draw", seen.draw)  # nothing can be written down in a captured round
    capture_on_cpu(monkeypatch)
    assert tokens(NgramDrafter(), 2, prefill_chunk=64, max_batch_size=2) == expected
    assert seen.again > 5


def test_a_given_target_is_made_deterministic(make_target, random_prompt):
    model = make_target("llama")
    for ops, of_engine in ((None, None), (REFERENCE, ROWWISE)):
        target = TargetModel(model, ops)
        engine = Engine(target, config=EngineConfig(max_model_len=64, deterministic=True))
        assert engine.target.deterministic and engine.target.in_tiles and engine.target.ops is of_engine
        assert not target.deterministic and target.ops is ops
        again = Engine(engine.target, config=EngineConfig(max_model_len=64, deterministic=True))
        assert again.target is engine.target


# what is refused


def test_a_layer_that_looks_at_other_rows(make_target, make_engine):
    """Changes logits by less than anything but a comparison of bits would notice."""
    model = make_target("llama", fresh=True)
    mlp = model.model.layers[0].mlp

    def forward(x: torch.Tensor) -> torch.Tensor:
        return type(mlp).forward(mlp, x) * (1 + 1e-6 * x.sum().cos())

    mlp.forward = forward
    assert not make_engine(model).target.deterministic
    with pytest.raises(UnsupportedModelError, match=r"the queries of layer 1 of a token depend on the other rows"):
        make_engine(model, deterministic=True)


def test_a_gpu_without_the_kernels_is_refused(make_target, monkeypatch):
    model = make_target("starcoder2")
    monkeypatch.setattr(TargetModel, "device", torch.device("cuda", 0))
    monkeypatch.setattr(TargetModel, "_probe", lambda self: type("Proof", (), {"rule": None}))
    with pytest.raises(UnsupportedModelError, match=r"on cuda:0 needs fused layers on Triton .*; .* Starcoder2Model"):
        TargetModel(model, REFERENCE, deterministic=True)


def test_plain_torch_on_a_gpu_is_refused():
    cuda = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"deterministic=True on cuda:0 needs attention='triton'"):
        choose_backend("torch", cuda, BF16, 64, deterministic=True)
    assert choose_backend("torch", cuda, BF16, 64).name == "torch"


# the parts


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


FUNCTIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "method": lambda x: x.sigmoid(),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-3),
    "pow": lambda x: x.abs().pow(0.3),
    "product": lambda x: x @ torch.linspace(-1, 1, 40 * x.shape[1], dtype=x.dtype).view(x.shape[1], 40),
    "one column": lambda x: F.linear(x, torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[None]),
}


def places(compute: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> bool:
    """Is each of ROWS rows of `compute` the same wherever it stands, and among fewer?"""
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn(ROWS, width, generator=generator) * 3).to(dtype)
    order = torch.randperm(ROWS, generator=generator)
    return torch.equal(compute(x[order].contiguous()), compute(x)[order]) and torch.equal(
        compute(x[:3]), compute(x)[:3]
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_do_not_depend_on_the_place_of_a_row(name, threads):
    for width in (1, 7, 33, 48, 2560, 4096, 5003):
        for dtype in (torch.float32, BF16):
            with VectorwiseMode():
                assert places(FUNCTIONS[name], width, dtype), f"{width=} {dtype=}"
            x = torch.randn(3, width, generator=torch.Generator().manual_seed(width)).to(dtype)
            with VectorwiseMode():
                found = FUNCTIONS[name](x)
            torch.testing.assert_close(found, FUNCTIONS[name](x), rtol=1.6e-2 if dtype == BF16 else 1e-5, atol=1e-3)


def test_outside_of_the_mode_functions_depend_on_the_place_of_a_row():
    """Else the mode would be for nothing. Which function of which width shows it depends on the CPU."""
    cases = product(("silu", "gelu", "rsqrt"), (7, 31, 33, 5003, 9999), (torch.float32, BF16))
    assert not all(places(FUNCTIONS[name], width, dtype) for name, width, dtype in cases)


@pytest.mark.parametrize("size", [128, 6])
@pytest.mark.parametrize("case", ["plain", "softcap", "sinks"])
def test_a_head_has_the_same_bits_next_to_fewer_heads(case, size, threads):
    """A rank has the K/V heads of its own query heads, or a copy of one."""
    query, k, v = (torch.randn(*shape, size) for shape in ((1, 8, 3), (40, 4), (40, 4)))
    sinks = torch.randn(8)
    visible = VisibleKeys(torch.arange(40)[None], torch.arange(40) < torch.tensor([40, 33, 5])[:, None][None])

    def attend(heads: slice, groups: slice) -> torch.Tensor:
        options = {"sinks": sinks[heads]} if case == "sinks" else {"softcap": 5.0} if case == "softcap" else {}
        return attend_alone(visible)(query[:, heads], k[:, groups], v[:, groups], scaling=0.1, **options)

    whole = attend(slice(8), slice(4))
    want = dense_attention(
        *(query, k.transpose(0, 1)[None], v.transpose(0, 1)[None], bias_of(visible.seen)),
        scaling=0.1,
        softcap=5.0 if case == "softcap" else None,
        sinks=sinks if case == "sinks" else None,
    )
    torch.testing.assert_close(whole, want)
    for width in (1, 2, 4):
        shares = [slice(first, first + width) for first in range(0, 8, width)]
        parts = [attend(heads, slice(heads.start // 2, (heads.stop + 1) // 2)) for heads in shares]
        assert torch.equal(torch.cat(parts, 2), whole), f"{width=}"


def test_top_logprobs_do_not_depend_on_how_many_a_neighbour_asks_for():
    """`topk` returns any of equal log-probabilities, and others for another number of them."""
    logits = torch.randint(0, 4, (1, 3, 97), generator=torch.Generator().manual_seed(0)).to(BF16)
    logits[..., 5] = -torch.inf
    chosen = torch.zeros((1, 3), dtype=torch.int64)
    every = LogProbs.from_logits(logits, chosen, 97)
    order = logits[0].float().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(every.ids[0], order)
    for count in (1, 2, 20, 96):
        some = LogProbs.from_logits(logits, chosen, count)
        assert torch.equal(some.ids, every.ids[..., :count]) and torch.equal(some.values, every.values[..., :count])
    torch.testing.assert_close(every.chosen[0], logits[0].float().log_softmax(-1)[:, 0])


def test_under_the_sanitizer(make_target, engine, random_prompt, scripted, tree_script, monkeypatch):
    """It looks at what attention answers for each tile."""
    model = make_target("gemma4-e2b")
    prompts, params = requests(random_prompt, (20, 5), new=6)
    expected = answers(engine(model, max_batch_size=1), prompts, params)
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    trees = scripted(tree_script([p + t for p, (t, _) in zip(prompts, expected, strict=True)]))
    assert answers(engine(model, trees, num_steps=19), prompts, params) == expected
    monkeypatch.setattr("specdec.attention.dense.dense_attention", lambda *a, **k: dense_attention(*a, **k) * torch.nan)
    with pytest.raises(SpecDecError, match="position"):
        answers(engine(model, trees, num_steps=19), prompts, params)
