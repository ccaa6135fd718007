"""Models whose layers keep different things, two windows or V narrower than K: their tokens, and their memory."""

import itertools

import pytest
import torch
from kv_rig import layer_spec, make_pools
from refusal_checks import one_sentence
from transformers import PhimoeConfig, PhimoeForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from specdec import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import fit_layers
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layout import KVLayout, attention_fields
from specdec.kvcache.table import RequestTable
from specdec.models.target import TargetModel
from specdec.runtime import sizing
from specdec.runtime.scheduler import slots_needed
from specdec.training.assistant_training import new_assistant
from specdec.training.draft_loss import run_target
from specdec.training.packed_rows import PackedRows

from marks import deep, each_value, examples
from tiny_families import build_target

FAMILIES = ["two_windows", "deepseek_v3", "mimo_v2_flash"]
NEW = 12
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.mark.parametrize(("family", "page_size"), each_value(itertools.product(FAMILIES, [1, 4])))
def test_tokens_are_the_models_own(
    family, page_size, make_target, make_engine, greedy_oracle, random_prompt, scripted, tree_script, monkeypatch
) -> None:
    """Random trees, pools for little more than one request, and prompts that begin alike, all under the sanitizer."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    model, base = make_target(family), random_prompt(30)
    prompts = [base, [*base, 5], [*base[:20], 7, 9], random_prompt(41, seed=1), base[:3], [*base, 5]]
    truths = [list(greedy_oracle(model, prompt, NEW)) for prompt in prompts]
    drafter = scripted(tree_script([prompt + truth for prompt, truth in zip(prompts, truths, strict=True)]))
    options = {"spec": SpecConfig(3, 2, 6), "page_size": page_size, "max_batch_size": 3}
    full, *windowed = slots_needed(make_engine(model, drafter, **options).table, 41, NEW)
    sizes = {"full_slots": full + 4, **({"swa_slots": 2 * max(windowed)} if windowed else {})}
    engine = make_engine(model, drafter, **options, **sizes)
    outputs = engine.generate(prompts, PARAMS)
    assert [out.token_ids for out in outputs] == truths
    again = engine.generate([*base, 5, 8], PARAMS)[0]
    assert again.token_ids == greedy_oracle(model, [*base, 5, 8], NEW) and again.stats.cached_tokens > 0
    assert engine.stats().preemptions > 0
    engine.table.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("family", ["two_windows", deep("deepseek_v3"), deep("mimo_v2_flash")])
def test_kernels_read_the_group_of_each_layer(
    family, make_target, make_engine, greedy_oracle, random_prompt, monkeypatch
) -> None:
    """Interpreted, under the sanitizer."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    model, prompt, new = make_target(family), random_prompt(13), examples(2, 3)
    engine = make_engine(model, "ngram", attention="triton", page_size=4, max_batch_size=1, num_steps=2)
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True))
    assert out.token_ids == greedy_oracle(model, prompt, new)


@pytest.mark.parametrize("last", [8, 3])
def test_an_assistant_reads_the_last_sliding_layer_through_the_window_of_that(
    last, make_assistant, make_engine, greedy_oracle, random_prompt, monkeypatch
) -> None:
    """A target has two windows, and either is last; an assistant of the other is refused. Under the sanitizer."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    model, other = build_target("two_windows"), 11 - last
    if last == 3:
        narrower, wider = (model.model.layers[i].self_attn for i in (2, 3))
        narrower.sliding_window = 8
        wider.__class__, wider.sliding_window = type(narrower), 3
    target, prompt = TargetModel(model), random_prompt(30)
    assistant = make_assistant(model, sliding_window=last)
    assert fit_layers(assistant, target) == ((3, 0), (last, None))
    engine = make_engine(model, assistant, spec=SpecConfig(3, 2, 6), page_size=4)
    assert engine.generate(prompt, PARAMS)[0].token_ids == list(greedy_oracle(model, prompt, NEW))
    assert engine.stats().draft_tokens > 0
    trained = new_assistant(target, hidden=16, intermediate=16, layers=2, heads=4)
    assert trained.config.get_text_config().sliding_window == last
    said = rf"window is {other}, but target layer 3, whose K/V it reads, keeps {last} keys \(windows .*: \[3, 8\]\)"
    with pytest.raises(UnsupportedModelError, match=said):
        fit_layers(make_assistant(model, sliding_window=other), target)


def test_a_drafter_learns_from_states_of_layers_that_see_their_own_windows(
    make_target, hf_forward, random_prompt
) -> None:
    """Training gave every sliding layer the mask of the widest window. Two documents in one packed row."""
    model, documents = make_target("two_windows", fresh=True), (random_prompt(20), random_prompt(15, seed=1))
    target = TargetModel(model)
    truths = [hf_forward(model, ids, output_hidden_states=True).hidden_states[-1] for ids in documents]
    model.model.layers[2].self_attn.__class__ = Qwen2Attention  # which sees what the mask says, and no less
    ids = torch.tensor([[*documents[0], *documents[1]]])
    pos = torch.cat([torch.arange(len(ids)) for ids in documents])[None]
    hidden, _, _ = run_target(target, PackedRows(ids, pos, torch.ones_like(ids)))
    torch.testing.assert_close(hidden, torch.cat(truths, dim=1))


def test_each_window_takes_the_memory_of_its_own_layers(make_target, monkeypatch) -> None:
    """Windows of 128 and 4,096: pools by group are those of the formula of docs/memory.md, not of the widest window."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    target = TargetModel(make_target("llama", max_position_embeddings=16384))
    target.layout = KVLayout(tuple(layer_spec(i, window) for i, window in enumerate((None, 128, 128, 4096))))
    config, nodes = EngineConfig(max_batch_size=8, max_model_len=16384), 5
    cache, _ = sizing.make_cache(target, None, SpecConfig(), config, nodes, None)
    cache.add_store(target.stored_layout, torch.float32)
    room = sizing.PromptBudget.from_config(config, "cpu")
    in_flight = max(room.while_idle, 8 * min(room.chunk, sizing.WINDOW_SPARE))
    need = {
        f"window {window}": layers * 2 * 4 * (8 * (window - 1 + nodes) + in_flight)
        for window, layers in ((128, 2), (4096, 1))
    }
    kept = cache.bytes_by_group()
    assert all(need[name] <= kept[name] <= 1.05 * need[name] for name in need), (kept, need)


def test_a_narrow_v_is_stored_at_its_own_width(make_target, make_engine) -> None:
    engine = make_engine(make_target("mimo_v2_flash"), None, full_slots=40, swa_slots=40)
    full, sliding = engine.cache.bytes_by_group().values()
    assert (full, sliding) == (41 * 4 * 2 * (12 + 8), 41 * 4 * 2 * 4 * (12 + 8))


def test_groups_of_a_model_are_its_windows(make_target) -> None:
    """What layers call attention with counts: the config of this model names one window, and a layer has another."""
    layout = TargetModel(make_target("two_windows")).layout
    assert [layer.window for layer in layout.layers] == [None, 8, 3, 8]
    allocator = make_pools([layout], 4)
    table = RequestTable(allocator, max_requests=1, max_len=9, lookahead=1)
    assert table.retain[1:].tolist() == [2, 7]
    fields = TargetModel(make_target("deepseek_v3")).layout.layers[0].fields
    assert fields == attention_fields(4, 12, 8)


def test_a_window_that_attention_is_not_told_matters_only_if_sequences_exceed_it(make_engine, greedy_oracle) -> None:
    """PhiMoE masks by its window and does not pass it on; that of Phi-3.5-MoE is all its positions. It was refused."""
    fields = {"num_local_experts": 2, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "vocab_size": 64}
    config = PhimoeConfig(**fields, **heads, sliding_window=32, bos_token_id=None, eos_token_id=None)
    model = PhimoeForCausalLM(config).eval()
    [out] = make_engine(model, None, max_model_len=32).generate([7, 8, 9] * 7, SamplingParams(max_new_tokens=11))
    assert out.token_ids == greedy_oracle(model, [7, 8, 9] * 7, 11)
    model.config.sliding_window = 31
    with one_sentence(UnsupportedModelError, "layer 0 uses sliding_window=None, but the config says 31"):
        TargetModel(model)
