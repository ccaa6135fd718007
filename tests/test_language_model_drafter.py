"""A language model drafts for another: the output is the target's, and one that drafts for itself is believed whole."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.heads.draft_context import DraftContext
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.errors import UnsupportedModelError
from specdec.models.target import TargetModel

from marks import deep, deep_cases, examples
from tiny_models import FAMILIES, fast_ones

NEW = examples(12, 21)
GREEDY, FEW = SamplingParams(max_new_tokens=NEW), SamplingParams(max_new_tokens=8)
CHAIN, TREE = SpecConfig(num_steps=4), SpecConfig(num_steps=3, topk=3, num_draft_tokens=10)


def engine_of(model, drafter, spec=CHAIN, **config):
    target = TargetModel(model)
    settings = EngineConfig(**{"max_model_len": 256, "prefill_chunk": 16, **config})
    return Engine(target, LanguageModelDrafter(TargetModel(drafter), target), spec=spec, config=settings)


@deep_cases("gemma4-e2b-False-1", "gemma2-False-4")
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tree", "page_size"), fast_ones(FAMILIES, [False, True], [1, 4]))
def test_a_model_that_drafts_for_itself(family, tree, page_size, make_target, greedy_oracle, random_prompt):
    model = make_target(family)
    prompts = [random_prompt(n, seed=n) for n in (2, 17, 40)]
    engine = engine_of(model, model, (CHAIN, TREE)[tree], page_size=page_size, max_batch_size=2)
    outputs = engine.generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == [greedy_oracle(model, p, NEW) for p in prompts]
    for out in outputs:
        assert out.stats.accepted_per_position[0] == 1.0


@pytest.mark.parametrize("temperature", [deep(0.0), 1.0])
def test_its_own_cache_follows_the_prefix_cache_and_preemption(temperature, make_target, random_prompt):
    """A model that drafts for itself is believed whole for as long as its K/V are those of the text."""
    model = make_target("gpt_oss")
    shared = random_prompt(30)
    prompts = [[*shared, *random_prompt(n, seed=n)] for n in (3, 11, 20, 1)]
    params = SamplingParams(max_new_tokens=examples(24, 31), temperature=temperature, seed=4)
    engine = engine_of(model, model, max_batch_size=3, full_slots=120, swa_slots=120)
    for _ in range(2):
        outputs = engine.generate(prompts, params)
        assert all(set(out.stats.accepted_per_position) == {1.0} for out in outputs)
    assert engine.stats().preemptions > 0 and all(out.stats.cached_tokens > 0 for out in outputs)


# positions that it was not trained on, and those that it cannot compute

SHORT = 40
"""Positions that the drafters below state; the texts are longer."""
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_drafter_drafts_beyond_its_stated_length_if_its_rope_can(spec, make_target, greedy_oracle, random_prompt):
    """All those positions were computed as its last one: it was believed before it, and hardly ever beyond."""
    model, short = make_target("llama"), make_target("llama", max_position_embeddings=SHORT)
    prompts = [random_prompt(n, seed=n) for n in (SHORT - 9, SHORT + 30)]
    outputs = engine_of(model, short, spec).generate(prompts, GREEDY)
    assert [out.token_ids for out in outputs] == [greedy_oracle(model, p, NEW) for p in prompts]
    assert all(out.stats.accepted_per_position[0] == 1.0 for out in outputs)


def positions_asked(drafter, monkeypatch):
    """(is it a level of a draft, largest position) of every forward of a drafter from now on."""
    asked, run = [], drafter.model.run

    def noting(tokens, positions, context, *rest):
        asked.append((isinstance(context, DraftContext), int(positions.max())))
        return run(tokens, positions, context, *rest)

    monkeypatch.setattr(drafter.model, "run", noting)
    return asked


@deep_cases("longrope, tree", "dynamic, adaptive", "dynamic")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rope", "spec"),
    [
        (DYNAMIC, CHAIN),
        (DYNAMIC, replace(CHAIN, adaptive=True)),
        (LONGROPE, TREE),
        (None, CHAIN),
    ],
    ids=["dynamic", "dynamic, adaptive", "longrope, tree", "a table"],
)
def test_no_draft_is_made_beyond_a_drafters_last_position(
    rope, spec, make_target, greedy_oracle, random_prompt, monkeypatch, caplog
):
    """Its positions change there for a whole batch, or are rows of a table that ends. Until there it is believed; from
    there on it is not asked, and the target's rounds are plain."""
    model = make_target("llama")
    if rope is None:
        table = {"max_position_embeddings": SHORT, "ffn_dim": 48, "hidden_size": 32, "num_hidden_layers": 1}
        short = OPTForCausalLM(OPTConfig(vocab_size=96, num_attention_heads=4, word_embed_proj_dim=32, **table)).eval()
    else:
        short = make_target("llama", max_position_embeddings=SHORT, rope_parameters=rope)
    engine = engine_of(model, short, spec, max_batch_size=2)
    assert f"does not draft from position {SHORT} on" in caplog.text
    asked = positions_asked(engine.drafter, monkeypatch)
    [out] = engine.generate([random_prompt(24)], SamplingParams(max_new_tokens=40))
    assert out.token_ids == greedy_oracle(model, random_prompt(24), 40)
    assert 24 < max(position for drafts, position in asked if drafts) < SHORT
    assert max(position for _, position in asked) < SHORT
    if rope is not None and not spec.adaptive:
        assert out.stats.accepted_per_position[0] == 1.0
    asked.clear()
    [out] = engine.generate([random_prompt(SHORT + 60, seed=1)], GREEDY)
    assert out.stats.drafted_rounds == 0
    assert len(asked) == -(-SHORT // 16)  # chunks of the prompt, for others that begin with them
    prompts = [random_prompt(n, seed=n) for n in (5, SHORT - 9, SHORT + 30)]
    for _ in range(2):  # side by side, and out of the prefix cache
        outputs = engine.generate(prompts, GREEDY)
        assert [out.token_ids for out in outputs] == [greedy_oracle(model, p, NEW) for p in prompts]
        assert outputs[-1].stats.drafted_rounds == 0
    engine.table.check()


# as users give it


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
def test_a_drafter_is_loaded_by_name_or_by_module(random_prompt):
    """The bundled target drafts for itself; as a module it needs no tokenizer where the sizes are equal."""
    plain = Engine.from_pretrained("tiny-gemma4")
    prompt = plain.chat_prompt("Tom has 3 boxes of 12 pencils. He gives away 7. How many are left?")
    [want] = plain.generate([prompt], FEW)
    for drafter in ("tiny-gemma4", plain.target.model):
        engine = Engine.from_pretrained("tiny-gemma4", drafter)
        [out] = engine.generate([prompt], FEW)
        assert out.token_ids == want.token_ids
        assert set(out.stats.accepted_per_position) == {1.0}
        assert isinstance(engine.drafter, LanguageModelDrafter)


def test_a_config_may_name_no_class(make_target, random_prompt, tmp_path):
    """A config that was saved before its model names none. A target loads so, and a drafter was refused."""
    model = make_target("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    [out] = Engine.from_pretrained(model, str(tmp_path)).generate([random_prompt(5)], FEW)
    assert set(out.stats.accepted_per_position) == {1.0}


def test_other_vocabularies_are_refused_with_the_reason(make_target, tmp_path):
    model = make_target("llama")
    with pytest.raises(UnsupportedModelError, match="has 90 tokens and the target 96"):
        Engine.from_pretrained(model, make_target("llama", vocab_size=90))
    make_target("llama", seed=5).save_pretrained(tmp_path)
    for token, says in (("b", "token 1 is 'b' there and 'a' in the target"), ("a", None)):
        Tokenizer(WordLevel({"<s>": 0, token: 1, "c": 2}, unk_token="<s>")).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<s>": 0, "a": 1, "c": 2})))
        if says is None:
            assert Engine.from_pretrained(model, str(tmp_path), tokenizer=tokenizer).drafter.name == "language_model"
            return
        with pytest.raises(UnsupportedModelError, match=says):
            Engine.from_pretrained(model, str(tmp_path), tokenizer=tokenizer)


def test_a_few_tokens_more_on_one_side_are_the_same_vocabulary(make_target, tmp_path):
    """One added token of 200 is accepted, since the other side never writes it. Three more make another vocabulary."""
    model, words = make_target("llama"), {f"w{number}": number for number in range(200)}
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))
    for count in (199, 197):
        few = dict(list(words.items())[:count])
        Tokenizer(WordLevel(few, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
        if count == 199:
            assert Engine.from_pretrained(model, str(tmp_path), tokenizer=tokenizer).drafter.name == "language_model"
            continue
        with pytest.raises(UnsupportedModelError, match="has 197 tokens and the target 200"):
            Engine.from_pretrained(model, str(tmp_path), tokenizer=tokenizer)


def test_a_larger_padding_of_the_same_vocabulary(make_target, make_engine, random_prompt):
    """Tokens that the target has not are never drafted, and a smaller vocabulary is filled up."""
    model = make_target("llama")
    [want] = make_engine(model, None).generate([random_prompt(9)], FEW)
    for size in (90, 120):
        engine = engine_of(model, make_target("llama", seed=5, vocab_size=size), TREE)
        [out] = engine.generate([random_prompt(9)], FEW)
        assert out.token_ids == want.token_ids
