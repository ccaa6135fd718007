"""The engine on the Triton kernels, run by their interpreter: the text is that of the target alone.

The kernels have tests of their own; here each serves real forwards: chunks of a prompt longer than the window (8),
verification, frozen drafting, EAGLE-3's own pool. On a GPU `make gpu-test` does the same.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
import triton

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention import dense as reference
from specdec.attention.backend import choose_backend
from specdec.attention.kernels import page_table, ragged_attention
from specdec.attention.trees import tree_builder as tree_build
from specdec.errors import ConfigError
from specdec.gpu import triton_shim
from specdec.kvcache import store as kv_store
from specdec.models.target import TargetModel

from marks import deep, examples
from processes import run
from watched_drafts import watch_proposals

ROOT = Path(__file__).resolve().parent.parent
VOCAB, LENGTHS = 12, (examples(9, 13), 1, 6)
SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = {"vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 1}
TARGETS = {
    # two layers that own K/V and one of each type that shares; heads of 8 and 16
    "gemma4-e2b": {**SMALL, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2},
    "llama": {**SMALL, "num_hidden_layers": 2},
    "gpt_oss": {**SMALL, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
    "gemma2": {**SMALL, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
}
KERNELS = {
    "attention": (ragged_attention, "ragged_kernel"),
    "tables": (page_table, "_page_tables_kernel"),
    "store": (kv_store, "_store_kv_kernel"),
    "move": (kv_store, "_copy_rows_kernel"),
    "select": (tree_build, "_select_nodes_kernel"),
}
CHAIN, TREE = SpecConfig(2), SpecConfig(3, 3, 8)
SIZES = {"max_batch_size": 2, "max_model_len": 64, "prefill_chunk": 7, "fused": False}
ASKED = [
    SamplingParams(max_new_tokens=examples(5, 7), ignore_eos=True),
    SamplingParams(max_new_tokens=examples(4, 6), temperature=0.9, seed=3, top_k=6, ignore_eos=True),
    SamplingParams(
        max_new_tokens=examples(4, 5), repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2, ignore_eos=True
    ),
]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; see make gpu-test")


def chosen(attention, device, dtype, head_dim):
    """Whether that setting means the kernels."""
    return choose_backend(attention, device, dtype, head_dim).name == "triton"


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches[self.name] += 1
        return self.kernel[grid]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """How often each kernel ran."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    counter = Counter()
    for name, (module, attribute) in KERNELS.items():
        monkeypatch.setattr(module, attribute, Counted(getattr(module, attribute), name, counter))
    return counter


@pytest.mark.parametrize(
    ("name", "drafter", "spec", "page_size"),
    [
        deep("gemma4-e2b", "mtp", CHAIN, 1),
        deep("gemma4-e2b", "mtp", TREE, 4),
        deep("gemma4-e2b", "eagle3", TREE, 1),
        ("llama", "ngram", CHAIN, 1),
        deep("llama", "eagle3", TREE, 4),
        deep("gpt_oss", "eagle3", TREE, 1),
        deep("gemma2", "eagle3", TREE, 4),
    ],
)
def test_text_and_drafts_are_those_of_torch(
    name,
    drafter,
    spec,
    page_size,
    launches,
    monkeypatch,
    make_target,
    make_drafter,
    make_engine,
    greedy_oracle,
    random_prompt,
):
    """Rounds on kernels too: greedy, sampled, penalised and with log-probabilities, more requests than rows."""
    model = make_target(name, **TARGETS[name])
    prompts = [random_prompt(n, vocab=VOCAB) for n in LENGTHS]
    runs_on = "specdec.runtime.rounds.device_state.runs_on_kernels"
    monkeypatch.setattr(runs_on, lambda backend, device: backend.name == "triton")
    runs = []
    for attention in ("torch", "triton"):
        engine = make_engine(
            model, make_drafter(drafter, model), spec=spec, attention=attention, page_size=page_size, **SIZES
        )
        assert engine.state.on_kernels == (attention == "triton")
        seen = watch_proposals(engine) if drafter in ("mtp", "eagle3") else []
        if attention == "triton":
            launched = Counter(launches)
            monkeypatch.setattr(reference, "dense_attention", lambda *_, **__: pytest.fail("torch attended"))
        outputs = engine.generate(prompts, ASKED)
        engine.table.check()
        assert outputs[0].token_ids == greedy_oracle(model, prompts[0], ASKED[0].max_new_tokens)
        scores = [[(one.token_id, one.logprob) for one in out.logprobs or ()] for out in outputs]
        runs.append(([out.token_ids for out in outputs], [each[:3] for each in seen], scores))
    (*want, wanted), (*got, found) = runs
    assert got == want
    for one, other in zip(found, wanted, strict=True):
        assert one == [(token, pytest.approx(p, rel=1e-4, abs=1e-4)) for token, p in other]
    assert not launched, "torch launched kernels"
    assert {"attention", "tables", "store"} <= set(launches)
    assert ("select" in launches) == (drafter is not None and spec is TREE)
    assert page_size == 1 or drafter != "eagle3" or spec is CHAIN or launches["move"], "nothing accepted had to move"


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "kernels"),
    [
        ((9, 0), torch.float32, 512, True),
        ((8, 0), torch.float16, 64, True),
        ((7, 5), torch.float16, 64, False),
        ((9, 0), torch.float64, 64, False),
        ((9, 0), torch.float16, 640, False),
    ],
)
def test_auto_is_triton_on_a_gpu_that_can(monkeypatch, capability, dtype, head_dim, kernels):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu = torch.device("cuda", 1)
    assert chosen("auto", gpu, dtype, head_dim) == kernels
    if not kernels:
        with pytest.raises(ConfigError, match=r"attention='triton' .*; use attention='torch'"):
            chosen("triton", gpu, dtype, head_dim)
    monkeypatch.setattr(torch.version, "cuda", None)  # another maker's GPU goes by the name of "cuda" too
    assert not chosen("auto", gpu, dtype, head_dim)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


class NoCompiler:
    """Triton's driver in a container without a C compiler or without Python's headers."""

    @property
    def active(self):
        raise RuntimeError("Failed to find C compiler.")


@pytest.mark.parametrize(
    ("device", "interpreted", "changes", "said"),
    [
        pytest.param(CPU, False, {}, r"needs a CUDA device, and this model is on cpu; use attention='torch'", id="cpu"),
        pytest.param(
            *(CPU, True, {(triton_shim, "INTERPRETED"): False}, "before Python starts"), id="interpreter set too late"
        ),
        pytest.param(
            *(GPU, False, {(triton_shim, "INTERPRETED"): False, (triton.runtime, "driver"): NoCompiler()}),
            r"does not start \(Failed to find C compiler.\); it needs .* attention='torch'",
            id="no compiler",
        ),
        pytest.param(
            *(CPU, True, {(triton_shim, "triton"): None}),
            r"Triton is not installed; install it, or use attention='torch'",
            id="not installed",
        ),
    ],
)
def test_triton_is_refused_where_it_does_not_run(device, interpreted, changes, said, monkeypatch):
    """And `auto` is torch there."""
    if not interpreted:
        monkeypatch.delenv("TRITON_INTERPRET")
    for (owner, name), value in changes.items():
        monkeypatch.setattr(owner, name, value)
    assert not chosen("auto", device, torch.float32, 64) and not chosen("torch", device, torch.float32, 64)
    with pytest.raises(ConfigError, match=said):
        chosen("triton", device, torch.float32, 64)


def test_dtypes_and_heads_that_the_kernels_cannot_do(make_target):
    assert chosen("triton", CPU, torch.float32, 512) and chosen("triton", CPU, torch.float16, 64)
    assert not chosen("auto", CPU, torch.float32, 64)
    for dtype in (torch.bfloat16, torch.float64):  # the interpreter multiplies bfloat16 as integers
        with pytest.raises(ConfigError, match=rf"works in torch.float32, torch.float16, not {dtype}"):
            chosen("triton", CPU, dtype, 64)
    wide = TargetModel(make_target("llama", head_dim=640))
    Engine(wide, config=EngineConfig(max_model_len=64))
    with pytest.raises(ConfigError, match=r"takes heads of at most 512, this model has 640; use attention='torch'"):
        Engine(wide, config=EngineConfig(attention="triton", max_model_len=64))


def test_deterministic_layers_that_are_not_fused_run_with_the_attention_of_kernels(make_target, random_prompt):
    """The engine was made, and its first step ended in an AttributeError."""
    target = TargetModel(make_target("llama"), deterministic=True)
    prompts, params = [random_prompt(9), random_prompt(3)], SamplingParams(max_new_tokens=3)
    with Engine(target, config=EngineConfig(attention="triton", max_model_len=64)) as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
        assert [out.token_ids for out in engine.generate(prompts, params)] == alone


@pytest.mark.slow
def test_a_benchmark_of_kernels_says_that_there_is_no_gpu():
    if not (ROOT / "bench").exists():
        pytest.skip("needs the checkout")
    done = run(["-m", "bench", "tables"], cwd=ROOT)
    said = "tables needs 1 CUDA devices, and 0 are there: nothing was checked"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)
