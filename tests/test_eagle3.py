"""The EAGLE-3 drafter against an independent dense head in float64, over prefill, drafting and partial acceptance."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from block_reference import rms_norm, rotate
from dense_drafts import assert_best
from samplers import sampler_of

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.kvcache.layout import PRIMARY
from specdec.models.target import TargetModel

from marks import deep, deep_cases, examples, usual
from tiny_families import FULL, SLIDING, random_eagle3
from tiny_models import eager
from watched_drafts import watch_proposals

V = 12  # so few that a random head is right now and then
H = 32
FOUR_LAYERS = {"gpt_oss": [SLIDING, FULL] * 2, "gemma4-31b": [SLIDING] * 3 + [FULL]}


@pytest.fixture
def make_target(make_target: Callable[..., Any]) -> Callable[..., Any]:
    """Targets of four layers, or as they are: heads read what enters the last of four."""

    def make(family: str) -> Any:
        kinds = FOUR_LAYERS.get(family)
        return make_target(family, **({"num_hidden_layers": 4, "layer_types": kinds, "vocab_size": V} if kinds else {}))

    return make


def head(aux_layers: tuple[int, ...], **fields: Any) -> Eagle3Spec:
    sizes = {"hidden_size": H, "target_hidden_size": H, "vocab_size": V, "intermediate_size": 24, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 10, "draft_vocab_size": 6, "rms_norm_eps": 1e-5}
    return Eagle3Spec(aux_layers=aux_layers, **sizes | fields)


SPECS = {  # by the tool that writes such heads; test_eagle3_formats.py reads their files
    "safeailab": head((2, 2, 1)),
    "specforge": head(
        (2, 3, 4),
        biases=frozenset(f"layers.0.self_attn.{part}_proj" for part in "qkvo"),
        rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    ),
    "specforge-3.1": head((2, 0, 3), qk_norm=True, fc_norm=True, norm_output=True, windows=(5,)),
    "modelopt": head((2, 1, 4), hidden_size=24, owns_embed=True, norm_before_fc=True, windows=(None, 6)),
    "modelopt-final": head((), has_fc=False, draft_vocab_size=None, final_norm=False),
    "speculators": head((2, 1, 3, 4), norm_before_residual=True, qk_norm=True, owns_embed=True, windows=(None, None)),
}


def tensors_of(spec: Eagle3Spec) -> dict[str, torch.Tensor]:
    """Random weights under speculators' names."""
    rng = torch.Generator().manual_seed(1)
    out = {}
    for name, shape in ((name, tensor.shape) for name, tensor in Eagle3Head(spec).state_dict().items()):
        random = torch.randn(shape, generator=rng)
        scale = {"lm_head.weight": 4.5, "embed_tokens.weight": math.sqrt(spec.hidden_size)}.get(name, 1.5)
        if name.endswith("bias"):
            out[name] = random
        else:
            out[name] = 1 + 0.2 * random if len(shape) == 1 else random * (scale / math.sqrt(shape[1]))
    if spec.draft_vocab_size is not None:
        ids = torch.randperm(V, generator=rng)[: spec.draft_vocab_size].sort().values
        out["d2t"] = ids - torch.arange(len(ids))
        out["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return out


def loaded(spec: Eagle3Spec, tensors: dict[str, torch.Tensor], target: TargetModel) -> Eagle3Drafter:
    made = Eagle3Head(spec)
    made.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
    made.target_ids = tensors["t2d"].nonzero()[:, 0] if "t2d" in tensors else None
    return Eagle3Drafter(made.place(target.device, target.dtype).eval(), target)


class Dense:
    """The head by its equations in float64. Row i has the token after position i and the hidden state there; it sees
    the rows up to itself."""

    def __init__(self, spec: Eagle3Spec, tensors: dict[str, torch.Tensor], model: Any) -> None:
        self.spec, self.model = spec, model
        self.w = {key: tensor.double() for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
        raw = model.get_input_embeddings().weight
        self.table = self.w.get("embed_tokens.weight", raw.detach().double())
        self.head = self.w.get("lm_head.weight", model.get_output_embeddings().weight.detach().double())
        self.ids = torch.arange(V) if "d2t" not in tensors else torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def logits(self, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """Over the target's vocabulary, -inf outside the draft's."""
        tokens, hidden = torch.tensor([*text[1:], *path]), self.features(tuple(text[:-1]))
        for _ in range(len(path) + 1):
            out = self.layers(self.table[tokens[: len(hidden)]], hidden)
            hidden = torch.cat([hidden, self.norm(out[-1:], "norm") if self.spec.norm_output else out[-1:]])
        last = self.norm(out[-1], "norm") if self.spec.final_norm else out[-1]
        return torch.full((V,), -torch.inf, dtype=torch.float64).index_copy(0, self.ids, self.head @ last)

    def features(self, ids: tuple[int, ...]) -> torch.Tensor:
        """[S, H] of the target's states, by hooks of our own on an eager forward."""
        if ids not in self.known:
            decoder, seen = TargetModel(self.model).user_decoder, dict[int, torch.Tensor]()
            with ExitStack() as stack:
                for i, module in enumerate([*decoder.layers, decoder.norm]):
                    hook = module.register_forward_pre_hook(
                        lambda m, args, kwargs, i=i: seen.__setitem__(i, args[0] if args else kwargs["hidden_states"]),
                        with_kwargs=True,
                    )
                    stack.callback(hook.remove)
                final = decoder.norm.register_forward_hook(lambda m, args, out: seen.__setitem__(-1, out))
                stack.callback(final.remove)
                with eager(self.model):
                    self.model(torch.tensor([ids]), use_cache=False)
            states = [seen[i][0].double() for i in self.spec.aux_layers or (-1,)]
            if self.spec.fc_norm:
                states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
            x = torch.cat(states, dim=-1)
            x = self.norm(x, "input_norm") if self.spec.norm_before_fc else x
            self.known[ids] = x @ self.w["fc.weight"].T if self.spec.has_fc else x
        return self.known[ids]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.w[f"{name}.weight"], self.spec.rms_norm_eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def layers(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] of rows at positions 0, 1, ..."""
        spec, positions = self.spec, torch.arange(len(hidden), dtype=torch.float64)
        pairs = torch.arange(spec.head_dim // 2, dtype=torch.float64)
        turns = spec.rope["rope_theta"] ** (-2 * pairs / spec.head_dim) / spec.rope.get("factor", 1.0)
        distance = positions[:, None] - positions
        for i in range(spec.num_layers):
            at = f"layers.{i}"
            if i == 0:
                u = self.norm(hidden, f"{at}.hidden_norm")
                residual = u if spec.norm_before_residual else hidden
                x = torch.cat([self.norm(embedded, f"{at}.input_layernorm"), u], dim=-1)
            else:
                residual, x = hidden, self.norm(hidden, f"{at}.input_layernorm")
            q, k, v = (
                self.linear(x, f"{at}.self_attn.{part}_proj").unflatten(-1, (-1, spec.head_dim)) for part in "qkv"
            )
            if spec.qk_norm:
                q, k = self.norm(q, f"{at}.self_attn.q_norm"), self.norm(k, f"{at}.self_attn.k_norm")
            q, k = rotate(q, positions, turns), rotate(k, positions, turns)
            seen = (distance >= 0) & (distance < (spec.windows[i] or len(hidden)))
            k, v = (rows.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for rows in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            y = residual + self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{at}.self_attn.o_proj")
            x = self.norm(y, f"{at}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(x, f"{at}.mlp.gate_proj"))
            hidden = y + self.linear(gate * self.linear(x, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        return hidden


@deep_cases("specforge-1-2", "specforge-4-2", "modelopt-1-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "page_size", "topk"),
    [
        *usual(itertools.product(SPECS, [1], [1, 2]), lambda kind, _, topk: topk == 1 + list(SPECS).index(kind) % 2),
        *(("specforge", 4, 2), deep("modelopt", 4, 1), deep("specforge", 4, 1), deep("modelopt", 4, 2)),
    ],
)
def test_logits_and_kv_equal_a_dense_head(
    kind: str, topk: int, page_size: int, make_target, greedy_oracle, random_prompt
) -> None:
    """Drafts after prompts in chunks and after rounds that accepted a part of a draft. The dense head keeps no K/V."""
    spec = SPECS[kind]
    model = make_target("gemma4-31b" if kind in ("specforge", "modelopt-final") else "gpt_oss")
    prompts = [random_prompt(19, seed=1, vocab=V), random_prompt(5, seed=2, vocab=V)]
    tensors, target = tensors_of(spec), TargetModel(model)
    engine = Engine(
        target,
        loaded(spec, tensors, target),
        spec=SpecConfig(num_steps=4, topk=topk, num_draft_tokens=7 if topk > 1 else None, adaptive=False),
        config=EngineConfig(max_model_len=64, prefill_chunk=8, page_size=page_size, max_batch_size=2),
    )
    seen = watch_proposals(engine)
    new = examples(14, 20)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True))
    assert [out.token_ids for out in outputs] == [greedy_oracle(model, prompt, new) for prompt in prompts]
    assert any(0 < sum(out.stats.accepted_counts) < 4 * out.stats.rounds for out in outputs)
    assert_best(Dense(spec, tensors, model), seen[:: 1 + len(seen) // examples(8, 100)], topk, 2e-3)


def test_drafts_draw_with_the_noise_of_the_request(make_target, random_prompt) -> None:
    """A head drafts what the target would draw from the head's logits: same seed, same position."""
    model = make_target("qwen3")
    engine = Engine(TargetModel(model), random_eagle3(model), config=EngineConfig(max_model_len=64, max_batch_size=1))
    seen = watch_proposals(engine)
    engine.generate(random_prompt(8), SamplingParams(max_new_tokens=8, temperature=1.0, seed=3))
    batch = sampler_of([SamplingParams(temperature=1.0, seed=3)], [3])
    drafts = 0
    for text, tokens, _, levels in seen:
        for level, logits in enumerate(levels):
            want = int(batch.sample(logits[None, None], torch.tensor([[len(text) + level]]))[0, 0])
            assert tokens[level + 1] == want
            assert bool(torch.isfinite(logits[want])), "outside the draft vocabulary"
            drafts += want != int(logits.argmax())
    assert drafts, "nothing was drawn but the likeliest"


def test_two_engines_over_one_drafter_take_turns(
    make_target, make_engine, greedy_oracle, random_prompt, monkeypatch
) -> None:
    """A drafter is weights: the second engine gets state of its own, and the first goes on with its own."""
    monkeypatch.delenv("SPECDEC_SANITIZE", raising=False)  # the test reads unowned slots
    model = make_target("qwen3")
    drafter = random_eagle3(model, windows=(None,))
    prompts = [random_prompt(10), random_prompt(7)]
    sizes = {"max_batch_size": 1, "max_model_len": 64}
    engines = [make_engine(model, drafter, full_slots=slots, **sizes) for slots in (80, 300)]
    streams = [engine.stream(p, SamplingParams(max_new_tokens=8)) for engine, p in zip(engines, prompts, strict=True)]
    got: list[list[int]] = [[], []]
    for deltas in itertools.zip_longest(*streams):
        for tokens, delta in zip(got, deltas, strict=True):
            tokens += delta.token_ids if delta is not None else []
    assert got == [greedy_oracle(model, prompt, 8) for prompt in prompts]
    for engine in engines:
        [kept] = engine.state.worker.store.layers.values()
        assert len(kept.k) == engine.table.allocator.num_slots(PRIMARY)
        assert np.isfinite(kept.k.numpy()).all()
