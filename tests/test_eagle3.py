"""The EAGLE-3 drafter against an independent dense head in float64, over prefill, drafting and partial acceptance."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from samplers import sampler_of

from specdec import DraftTree, Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Binding, DraftBatch, Observation, PromptObservation
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter, eagle3_drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.kvcache.index_spaces import PRIMARY
from specdec.models.target import TargetModel

from marks import deep, deep_cases, usual
from stand_ins import watch_proposals
from tiny_models import FULL, SLIDING, random_eagle3

V = 96
H = 32
FOUR_LAYERS = {"gpt_oss": [SLIDING, FULL] * 2, "gemma4-31b": [SLIDING] * 3 + [FULL]}


@pytest.fixture
def make_target(make_target: Callable[..., Any]) -> Callable[..., Any]:
    """Targets of four layers, or as they are: heads read what enters the last of four."""

    def make(family: str) -> Any:
        kinds = FOUR_LAYERS.get(family)
        return make_target(family, **({"num_hidden_layers": 4, "layer_types": kinds} if kinds else {}))

    return make


class Case(NamedTuple):
    """One published head: how it is written, and what its equations are."""

    format: str
    spec: Eagle3Spec
    written: dict[str, Any] | None = None  # top level of config.json
    nested: dict[str, Any] | None = None  # eagle_config
    binary: bool = False


def head(aux_layers: tuple[int, ...], **fields: Any) -> Eagle3Spec:
    sizes = {"hidden_size": H, "target_hidden_size": H, "vocab_size": V, "intermediate_size": 24, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 10, "draft_vocab_size": 40, "rms_norm_eps": 1e-5}
    return Eagle3Spec(aux_layers=aux_layers, **sizes | fields)


CASES = {
    # yuhuili: nothing but llama fields; the default layers 2, n // 2, n - 3
    "safeailab": Case("specforge", head((2, 2, 1)), {"architectures": ["LlamaForCausalLM"]}, binary=True),
    "specforge": Case(
        "specforge",
        head(
            (2, 3, 4),
            biases=frozenset(f"layers.0.self_attn.{part}_proj" for part in "qkvo"),
            rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        ),
        nested={"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
        written={"attention_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    ),
    "specforge-3.1": Case(
        "specforge",
        head((2, 0, 3), qk_norm=True, fc_norm=True, norm_output=True, windows=(5,)),
        nested={"eagle_aux_hidden_state_layer_ids": [1, -1, 2], "norm_output": True},
        written={"fc_norm": True, "sliding_window": 5, "layer_types": ["sliding_attention"]},
    ),
    "modelopt": Case(
        "modelopt",
        head((2, 1, 4), hidden_size=24, owns_embed=True, norm_before_fc=True, windows=(None, 6)),
        nested={
            "eagle_aux_hidden_state_layer_ids": [2, 1, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
            "norm_before_fc": True,
        },
        written={"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "modelopt-final": Case(
        "modelopt",
        head((), has_fc=False, draft_vocab_size=None, final_norm=False),
        nested={"use_aux_hidden_state": False, "use_last_layernorm": False, "has_lm_head": False},
    ),
    "speculators": Case(
        "speculators",
        head((2, 1, 3, 4), norm_before_residual=True, qk_norm=True, owns_embed=True, windows=(None, None)),
        written={
            "eagle_aux_hidden_state_layer_ids": [2, 1, 3, 4],
            "norm_before_residual": True,
            "norm_before_fc": False,
        },
    ),
}


def tensors_of(spec: Eagle3Spec) -> dict[str, torch.Tensor]:
    """Random weights under speculators' names."""
    rng = torch.Generator().manual_seed(0)
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


def write(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """The head on disk as its makers write it; returns the tensors under speculators' names."""
    spec, tensors = case.spec, tensors_of(case.spec)
    layer = {
        "model_type": "qwen3" if spec.qk_norm else "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": V,
        "hidden_act": "silu",
    }
    if case.format == "speculators":
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
            "draft_vocab_size": spec.draft_vocab_size,
        }
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "draft_vocab_size": spec.draft_vocab_size or V}
        if case.nested:
            config["eagle_config"] = case.nested
    config |= case.written or {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = tensors
    if case.format != "speculators" and spec.num_layers == 1:
        stored = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in tensors.items()}
    if case.binary:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    return tensors


class Dense:
    """The head by its equations, row by row in float64. Row: (token after, hidden state, position, rows it sees)."""

    def __init__(self, spec: Eagle3Spec, tensors: dict[str, torch.Tensor], target: Any) -> None:
        self.spec = spec
        self.w = {key: tensor.double() for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
        raw = target.get_input_embeddings().weight
        self.table = self.w.get("embed_tokens.weight", raw.detach().double())
        self.head = self.w.get("lm_head.weight", target.get_output_embeddings().weight.detach().double())
        ids = torch.arange(V) if "d2t" not in tensors else torch.arange(spec.draft_vocab_size or 0) + tensors["d2t"]
        self.ids = ids
        self.k: list[list[torch.Tensor]] = [[] for _ in range(spec.num_layers)]
        self.v: list[list[torch.Tensor]] = [[] for _ in range(spec.num_layers)]
        self.positions: list[int] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.spec.rms_norm_eps) * self.w[name]

    def feature(self, states: torch.Tensor) -> torch.Tensor:
        """States [T, Ht] of one position -> g."""
        if self.spec.fc_norm:
            states = torch.stack([self.norm(s, f"fc_norm.{i}.weight") for i, s in enumerate(states)])
        x = states.flatten()
        if self.spec.norm_before_fc:
            x = self.norm(x, "input_norm.weight")
        return self.w["fc.weight"] @ x if self.spec.has_fc else x

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x [heads, D]: pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
        half = x.shape[1] // 2
        out = torch.empty_like(x)
        for i in range(half):
            rope = self.spec.rope
            angle = position / rope.get("factor", 1.0) * rope["rope_theta"] ** (-2 * i / x.shape[1])
            cos, sin = math.cos(angle), math.sin(angle)
            out[:, i] = x[:, i] * cos - x[:, i + half] * sin
            out[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
        return out

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = self.w[f"{name}.weight"] @ x
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def row(self, token: int, hidden: torch.Tensor, position: int, sees: Sequence[int]) -> torch.Tensor:
        """Append a row that sees the rows `sees` and itself; returns its a."""
        spec, me = self.spec, len(self.positions)
        self.positions.append(position)
        for i in range(spec.num_layers):
            at = f"layers.{i}"
            if i == 0:
                e = self.norm(self.table[token], f"{at}.input_layernorm.weight")
                u = self.norm(hidden, f"{at}.hidden_norm.weight")
                residual, x = (u if spec.norm_before_residual else hidden), torch.cat([e, u])
            else:
                residual, x = hidden, self.norm(hidden, f"{at}.input_layernorm.weight")
            q = self.linear(x, f"{at}.self_attn.q_proj").view(spec.num_heads, spec.head_dim)
            k = self.linear(x, f"{at}.self_attn.k_proj").view(spec.num_kv_heads, spec.head_dim)
            v = self.linear(x, f"{at}.self_attn.v_proj").view(spec.num_kv_heads, spec.head_dim)
            if spec.qk_norm:
                q = torch.stack([self.norm(head, f"{at}.self_attn.q_norm.weight") for head in q])
                k = torch.stack([self.norm(head, f"{at}.self_attn.k_norm.weight") for head in k])
            q, k = self.rotate(q, position), self.rotate(k, position)
            self.k[i].append(k)
            self.v[i].append(v)
            window = spec.windows[i]
            rows = [j for j in (*sees, me) if window is None or position - self.positions[j] < window]
            heads = []
            for h in range(spec.num_heads):
                g = h // (spec.num_heads // spec.num_kv_heads)
                scores = torch.stack([q[h] @ self.k[i][j][g] for j in rows]) * spec.head_dim**-0.5
                weights = scores.softmax(0)
                heads.append(sum(w * self.v[i][j][g] for w, j in zip(weights, rows, strict=True)))
            y = residual + self.linear(torch.cat(heads), f"{at}.self_attn.o_proj")
            x = self.norm(y, f"{at}.post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(self.linear(x, f"{at}.mlp.gate_proj"))
            hidden = y + self.linear(gate * self.linear(x, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        return hidden

    def logits(self, a: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary, -inf outside the draft's."""
        out = torch.full((V,), -torch.inf, dtype=torch.float64)
        out[self.ids] = self.head @ (self.norm(a, "norm.weight") if self.spec.final_norm else a)
        return out

    def feedback(self, a: torch.Tensor) -> torch.Tensor:
        return self.norm(a, "norm.weight") if self.spec.norm_output else a


class Spy:
    """An Eagle3Drafter that records what it proposes from; `script` replaces its tree, so that drafts get accepted."""

    name = "spy"
    view = None
    extra_keys = reread = 0

    def __init__(self, inner: Eagle3Drafter, script: Callable[..., Any] | None = None) -> None:
        self.inner, self.script = inner, script
        self.aux_layers, self.kv_layout = inner.aux_layers, inner.kv_layout
        self.records: list[tuple[list[int], list[torch.Tensor], DraftTree, list[torch.Tensor]]] = []
        self.accepted: list[int] = []

    def bind(self, binding: Binding) -> "Spy":
        self.binding, self.worker = binding, self.inner.bind(binding)
        return self

    def observe(self, seen: Observation) -> None:
        self.worker.observe(seen)
        self.accepted += seen.length.tolist()

    def observe_prompts(self, seen: PromptObservation) -> None:
        self.worker.observe_prompts(seen)
        self.accepted += seen.pack.length.tolist()

    def propose(self, batch: DraftBatch) -> DraftTree:
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []

        def spied(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def record(logits: torch.Tensor, positions: torch.Tensor, *count: int) -> torch.Tensor:
                drawn.append((logits.clone(), positions.clone()))
                return draw(logits, positions, *count)

            return record

        watched = replace(batch, sample=spied(batch.sample), best=spied(batch.best))
        tree = self.worker.propose(watched)
        assert len(drawn) == batch.num_steps and tree.num_nodes == batch.num_nodes
        kept = self.worker.store.layers.values()
        for i, (row, length) in enumerate(zip(batch.rows.index.tolist(), batch.history_len.tolist(), strict=True)):
            levels = [logits[i] for logits, _ in drawn]
            for level, (_, positions) in enumerate(drawn):
                assert positions[i].tolist() == [length + level] * levels[level].shape[0]
            allocator, table = self.binding.cache.allocator, self.binding.cache.table
            slots = [allocator.translate(layer.group, table.slots.tensor[row, : length - 1]) for layer in kept]
            kv = [layer.k[line] for layer, line in zip(kept, slots, strict=True)]
            kv += [layer.v[line] for layer, line in zip(kept, slots, strict=True)]
            for rows, line in zip(kv, slots * 2, strict=True):
                rows[line == 0] = torch.nan  # evicted from a windowed group
            one = DraftTree.from_parents(tree.tokens[i : i + 1], tree.parents[i : i + 1])
            self.records.append((batch.history[i, :length].tolist(), levels, one, kv))
        if self.script is None:
            return tree
        tokens, parents = [], []
        for history, length in zip(batch.history.tolist(), batch.history_len.tolist(), strict=True):
            drafts, above = self.script(history[:length], batch.num_nodes - 1, batch.num_steps)
            tokens.append([history[length - 1], *drafts])
            parents.append([-1, *above])
        return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents))


@torch.no_grad()
def states_of(model: Any, ids: list[int], boundaries: tuple[int, ...], hf_forward: Any) -> torch.Tensor:
    """Target states [S, T, Ht] in float64, from hooks of our own on an eager forward."""
    decoder = TargetModel(model).user_decoder
    seen: dict[int, torch.Tensor] = {}
    with ExitStack() as stack:
        modules = [*decoder.layers, decoder.norm]
        for i, module in enumerate(modules):
            hook = module.register_forward_pre_hook(
                lambda m, args, kwargs, i=i: seen.__setitem__(i, args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            stack.callback(hook.remove)
        final = decoder.norm.register_forward_hook(lambda m, args, out: seen.__setitem__(-1, out))
        stack.callback(final.remove)
        hf_forward(model, ids)
    return torch.stack([seen[i][0] for i in boundaries or (-1,)], dim=1).double()


def check_record(
    record: tuple[list[int], list[torch.Tensor], DraftTree, list[torch.Tensor]],
    spec: Eagle3Spec,
    tensors: dict[str, torch.Tensor],
    model: Any,
    hf_forward: Any,
    topk: int,
) -> None:
    """One proposal against the dense head, computed from nothing but the tokens so far."""
    tokens, levels, tree, kv = record
    length = len(tokens) - 1  # S
    states = states_of(model, tokens[:length], spec.aux_layers, hf_forward)
    dense = Dense(spec, tensors, model)
    for i in range(length):
        a = dense.row(tokens[i + 1], dense.feature(states[i]), i, range(i))
    for layer, window in enumerate(spec.windows):
        for stored, true in ((kv[layer], dense.k[layer]), (kv[spec.num_layers + layer], dense.v[layer])):
            there = stored.isfinite().all((1, 2))
            assert there[0 if window is None else -min(length, window - 1) :].all()
            torch.testing.assert_close(stored[there].double(), torch.stack(true)[there], atol=2e-3, rtol=1e-3)
    beam = [(a, 0.0, list(range(length)), tokens[length])]  # a, score, rows it sees, its token
    candidates = []  # (score, tokens on the path)
    paths: list[list[int]] = [[]]
    for level, logits in enumerate(levels):
        found = []
        for m, (a, score, sees, _) in enumerate(beam):
            expected = dense.logits(a)
            torch.testing.assert_close(logits[m].double(), expected, atol=2e-3, rtol=1e-3)
            best = expected.sort(descending=True, stable=True).indices[:topk].tolist()
            log_q = expected.log_softmax(0)
            found += [(score + float(log_q[token]), a, sees, token, [*paths[m], token]) for token in best]
        candidates += [(score, path) for score, *_, path in found]
        found.sort(key=lambda entry: -entry[0])
        if level + 1 == len(levels):
            break
        beam, paths = [], []
        for score, a, sees, token, path in found[:topk]:
            me = len(dense.positions)
            child = dense.row(token, dense.feedback(a), length + level, sees)
            beam.append((child, score, [*sees, me], token))
            paths.append(path)
    got = []
    for node in range(1, tree.num_nodes):
        on_path = tree.ancestors[0, node].nonzero()[:, 0].tolist()
        got.append([int(tree.tokens[0, j]) for j in on_path[1:]])
    if topk == 1:
        assert got == [candidates[i][1] for i in range(len(got))]
    else:
        worst = sorted((score for score, _ in candidates), reverse=True)[len(got) - 1]
        scores = {tuple(path): score for score, path in candidates}
        assert all(scores[tuple(path)] >= worst - 1e-3 for path in got) and len({tuple(p) for p in got}) == len(got)


@deep_cases("specforge-1-2", "specforge-4-2", "modelopt-1-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "page_size", "topk"),
    [
        *usual(itertools.product(CASES, [1], [1, 2]), lambda kind, _, topk: topk == 1 + list(CASES).index(kind) % 2),
        *(("specforge", 4, 2), deep("modelopt", 4, 1), deep("specforge", 4, 1), deep("modelopt", 4, 2)),
    ],
)
def test_logits_and_kv_equal_a_dense_head(
    kind: str, topk: int, page_size: int, tmp_path, make_target, greedy_oracle, hf_forward, random_prompt, tree_script
) -> None:
    case = CASES[kind]
    model = make_target("gemma4-31b" if kind in ("specforge", "modelopt-final") else "gpt_oss")
    prompts = [random_prompt(19, seed=1), random_prompt(5, seed=2)]
    truths = [prompt + greedy_oracle(model, prompt, 12) for prompt in prompts]
    tensors = write(case, tmp_path)
    asked = case.spec.aux_layers if kind == "specforge-3.1" else None  # they begin with the embeddings
    spy = Spy(eagle3_drafter(tmp_path, TargetModel(model), aux_layers=asked), tree_script(truths))
    assert spy.inner.spec == replace(case.spec, max_position_embeddings=spy.inner.spec.max_position_embeddings)
    engine = Engine(
        TargetModel(model),
        spy,
        spec=SpecConfig(num_steps=4, topk=topk, num_draft_tokens=7 if topk > 1 else None),
        config=EngineConfig(max_model_len=64, prefill_chunk=8, page_size=page_size, max_batch_size=2),
    )
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=10))
    for output, prompt, truth in zip(outputs, prompts, truths, strict=True):
        assert output.token_ids == truth[len(prompt) : len(prompt) + 10]
    assert any(1 < n < 4 for n in spy.accepted), "no round accepted a part of its tree"
    assert len(spy.records) >= 4
    for record in spy.records[:: max(1, len(spy.records) // 4)]:
        check_record(record, case.spec, tensors, model, hf_forward, topk)


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
    monkeypatch.delenv("SPECDEC_SANITIZE", raising=False)  # slots that nobody owns are looked into
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
