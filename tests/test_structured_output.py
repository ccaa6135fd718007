"""Structured output in an engine: text that follows its grammar and token rules, the same with speculation.

The oracle is a loop of full forwards with masks of its own; for choices they are made without any library. Validity is
promised for what ends with "stop", so schemas are bounded and texts are given room.
"""

import itertools
import json
import os
import random
import re

import jsonschema
import pytest

from specdec import SamplingParams
from specdec.runtime.rounds.decode_round import DecodeRound
from specdec.sampling.grammars import grammar
from specdec.sampling.reference_sampler import RootMaskedSampler

from engine_internals import assert_idle, capture_on_cpu, captured_rounds
from marks import deep, deep_cases, each_value, examples, quick, slow, usual_cases
from tiny_models import few_layers

EOS, VOCAB = 256, 300  # byte_tokenizer, under a head that is wider
MANY = int(os.environ.get("SPECDEC_SCHEMAS", examples(4, 24)))
"""Random schemas; SPECDEC_SCHEMAS=200 takes two minutes."""

MOST = 120

NAME = {"type": "string", "maxLength": 4}
PERSON = {
    "type": "object",
    "properties": {"name": NAME, "kind": {"enum": ["x", "long-one"]}, "on": {"type": "boolean"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
KINDS = [None, "ngram", "mtp", "tree", "eagle3", "scripted"]
CHOICES = ["yes", "no", "not at all", "yesterday"]
GRAMMARS = {
    "choice": {"choice": CHOICES},
    "regex": {"regex": "(ab|ba){2,5}(xyz)?"},
    "schema": {"json_schema": PERSON},
    "sampled schema": {"json_schema": PERSON, "temperature": 1.0, "seed": 4},
    "sampled regex": {"regex": "[a-f]{3,9}-end of it", "temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 9},
    "edited": {
        "json_schema": {"type": "array", "items": {"enum": [1, 2, 33]}, "maxItems": 6},
        "temperature": 0.8,
        "seed": 2,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.1,
        "logit_bias": {ord("3") - 33: 3.0},
    },
}
LETTERS = tuple(range(60, 90))
EAGER = {EOS: 30.0, 7: 6.0}
"""A bias with which every output would end at once."""
RULES = {
    "least": {"min_tokens": 9, "logit_bias": EAGER},
    "least, sampled": {"min_tokens": 11, "temperature": 1.1, "seed": 3, "logit_bias": {EOS: 8.0}},
    "least, own stop": {"min_tokens": 6, "stop_token_ids": [7], "ignore_eos": True, "logit_bias": EAGER},
    "allowed": {"allowed_token_ids": LETTERS},
    "allowed, sampled": {"allowed_token_ids": [*LETTERS, EOS], "temperature": 1.4, "seed": 8, "top_k": 9},
    "both": {"allowed_token_ids": [5, 6, 7, EOS], "min_tokens": 5, "logit_bias": {EOS: 4.0}, "frequency_penalty": 0.5},
}

NO_RULES = slice(examples(3, 0), len(GRAMMARS) + 1)


@pytest.fixture(scope="module")
def model(make_target):
    return make_target("gemma4-e2b", vocab_size=VOCAB, **few_layers())


@pytest.fixture(scope="module")
def prompts(random_prompt):
    return [random_prompt(n, vocab=VOCAB) for n in (5, 13, 9, 4, 21, 8, 6, 5, 13, 9, 4, 21, 8)]


@pytest.fixture(scope="module")
def params():
    """One of each grammar, one that is free, and one of each kind of token rules."""
    grammars = [SamplingParams(max_new_tokens=MOST, **asked) for asked in GRAMMARS.values()]
    return grammars + [SamplingParams(max_new_tokens=examples(13, 20), **asked) for asked in ({}, *RULES.values())]


@pytest.fixture(scope="module")
def alone(model, make_engine, byte_tokenizer, prompts, params):
    """Each by itself, without speculation."""
    engine = make_engine(model, tokenizer=byte_tokenizer, max_batch_size=1)
    return [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]


def test_outputs_follow_their_grammar(alone):
    choice, regex, schema, sampled, sampled_regex, edited, free, *_ = alone
    assert choice.text in CHOICES and re.fullmatch("(ab|ba){2,5}(xyz)?", regex.text)
    assert re.fullmatch("[a-f]{3,9}-end of it", sampled_regex.text)
    for out in (schema, sampled):
        jsonschema.validate(json.loads(out.text), PERSON)
    assert set(json.loads(edited.text)) <= {1, 2, 33}
    for out in alone[: len(GRAMMARS)]:
        assert out.finish_reason == "stop" and out.token_ids[-1] == EOS
    assert EOS not in free.token_ids[:-1]


def test_min_tokens_and_allowed_token_ids_are_kept(alone):
    least, sampled, own, allowed, allowed_sampled, both = alone[-len(RULES) :]
    for out, number in ((least, 9), (sampled, 11), (both, 5)):
        assert EOS not in out.token_ids[:number]
    assert least.token_ids[9] == EOS and least.finish_reason == "stop"  # as soon as it may
    assert own.token_ids[:6].count(7) == 0 and own.token_ids[6] in (7, EOS)
    assert set(allowed.token_ids) <= set(LETTERS) and allowed.finish_reason == "length"
    assert set(allowed_sampled.token_ids) <= {*LETTERS, EOS}
    assert set(both.token_ids) <= {5, 6, 7, EOS}


@usual_cases("tree-4")
@pytest.mark.parametrize(
    ("kind", "batch"),
    each_value(
        quick(
            itertools.product(KINDS, (1, 4)),
            lambda kind, batch: (kind, batch) in {(None, 4), ("tree", 4), ("ngram", 4)},
        )
    ),
    ids=str,
)
def test_the_same_tokens_with_every_drafter(kind, batch, engine_of, prompts, params, alone):
    """In batches in which some have grammars, some have rules or have had them, and one is free."""
    truths = [p + out.token_ids for p, out in zip(prompts, alone, strict=True)]
    engine = engine_of(kind, truths, max_batch_size=batch, page_size=1 if batch == 1 else 4)
    outs = engine.generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert [out.finish_reason for out in outs] == [out.finish_reason for out in alone]
    engine.table.check()
    if kind == "scripted":
        assert sum(sum(out.stats.accepted_counts) for out in outs) > 10  # drafts of the drafter's own were accepted


def test_greedy_choices_are_those_of_a_loop_without_a_library(engine_of, model, prompts, hf_forward, byte_tokenizer):
    written = [byte_tokenizer.encode(choice) for choice in CHOICES]
    for prompt in prompts[:3]:
        output: list[int] = []
        while not output or output[-1] != EOS:
            logits = hf_forward(model, prompt + output).logits[0, -1]
            going_on = [ids for ids in written if ids[: len(output)] == output]
            may_follow = {ids[len(output)] if len(ids) > len(output) else EOS for ids in going_on}
            output.append(max(may_follow, key=lambda token: (float(logits[token]), -token)))
        [out] = engine_of("ngram").generate([prompt], SamplingParams(choice=CHOICES))
        assert out.token_ids == output and out.text in CHOICES


@deep_cases("eagle3")
@pytest.mark.parametrize("kind", ["mtp", slow("eagle3")])
def test_the_drafter_knows_what_may_follow_the_root(kind, engine_of, prompts, params, alone, monkeypatch):
    """The best child of every root is a token that the grammar allows; without that, hardly ever one is."""
    few = slice(examples(2, 0), examples(3, 4))

    def noting(trees, num_words):
        for root, tokens, parents in trees:
            best = parents.index(0, 1) if 0 in parents[1:] else None
            if best is not None and not root.forced:
                seen.append(bool(root.mask[tokens[best] // 32] >> tokens[best] % 32 & 1))
        return whole(trees, num_words)

    seen, whole = [], grammar.tree_masks
    monkeypatch.setattr("specdec.runtime.grammar_masks.tree_masks", noting)
    knowing = engine_of(kind, max_batch_size=4).generate(prompts[few], params[few])
    assert len(seen) > 15 and all(seen)
    seen.clear()
    monkeypatch.setattr(RootMaskedSampler, "_masked", lambda self, logits, positions: logits)
    outs = engine_of(kind, max_batch_size=4).generate(prompts[few], params[few])
    assert sum(seen) < len(seen) / 2
    assert (
        [out.token_ids for out in outs] == [out.token_ids for out in knowing] == [out.token_ids for out in alone[few]]
    )


# forced tokens


def test_forced_tokens_cost_no_forward(engine_of, prompts):
    """24 tokens of which the first is a choice: one forward of the prompt, two rounds where plain decoding has 24."""
    one = SamplingParams(choice=["abcdefghijklmnopqrstuvw", "xyz"], logit_bias={65: -50, 87: -100, 64: 100})
    for kind in (None, "ngram", "mtp", "tree"):
        [out] = engine_of(kind).generate([prompts[0]], one)
        assert out.text == "abcdefghijklmnopqrstuvw" and out.finish_reason == "stop"
        assert out.stats.rounds == out.stats.forced_rounds == 2
        assert out.stats.forced_tokens == 22 and out.stats.round_tokens == 23
        assert not any(out.drafted) and not any(out.stats.accepted_counts)  # nothing that a drafter did
        assert out.stats.accepted_per_position == [] or not any(out.stats.accepted_per_position)


def test_forced_tokens_with_other_rows_and_without_slots(engine_of, prompts):
    """Pools that have not a slot to spare: forced tokens then wait for rounds of their own."""
    wanted = [SamplingParams(max_new_tokens=60, regex="abcdefgh[0-9]{9,12}"), SamplingParams(max_new_tokens=20)] * 3
    engine = engine_of(None, max_batch_size=6, full_slots=84, swa_slots=84, prefix_cache=False)
    outs = engine.generate(prompts[:6], wanted)
    roomy = engine_of(None, max_batch_size=6).generate(prompts[:6], wanted)
    assert [out.token_ids for out in outs] == [out.token_ids for out in roomy]
    assert engine.stats().preemptions
    assert engine.stats().forced_tokens == sum(out.stats.forced_tokens for out in outs) > 0
    engine.table.check()


def test_rounds_as_wide_as_what_is_forced_write_where_they_may(engine_of, prompts, monkeypatch):
    """Rows without forced tokens have blank nodes, and nothing is written outside of a row's own slots."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    asked = [SamplingParams(regex="[ab]{2}defghijklm"), SamplingParams(max_new_tokens=9)]
    for kind, page_size in ((None, 1), (None, 4), ("mtp", 4)):
        engine = engine_of(kind, page_size=page_size)
        outs = engine.generate(prompts[:2], asked)
        assert outs[0].stats.forced_tokens >= 9 and outs[1].stats.output_tokens == 9
        engine.table.check()


def test_speculation_is_off_for_the_drafter_only(engine_of, prompts, params, alone):
    """A request that does not speculate still gains what its grammar forces."""
    off = [SamplingParams(max_new_tokens=MOST, speculation=False, **asked) for asked in GRAMMARS.values()]
    few = slice(examples(2, 0), examples(4, len(off)))
    outs = engine_of("tree").generate(prompts[few], off[few])
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone[few]]
    assert sum(out.stats.forced_tokens for out in outs) > 10
    assert not any(any(out.stats.accepted_counts) for out in outs)


def test_log_probabilities_are_of_the_model(engine_of, prompts):
    one = SamplingParams(regex="abcd[x-z]", logprobs=2)
    plain, tree = (engine_of(kind).generate([prompts[0]], one)[0] for kind in (None, "tree"))
    assert len(plain.logprobs) == len(plain.token_ids)
    for a, b in zip(plain.logprobs, tree.logprobs, strict=True):
        assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert list(a.top) == list(b.top)
    assert any(lp.token_id not in lp.top for lp in plain.logprobs)  # the model would have said something else


# what goes on around it


def test_samples_and_aborts(engine_of, prompts, alone):
    engine = engine_of("tree", max_batch_size=4)
    one = SamplingParams(max_new_tokens=MOST, json_schema=PERSON, temperature=1.0, seed=4, n=3)
    outs = engine.generate([prompts[3]], one)
    assert outs[0].token_ids == alone[3].token_ids and len({tuple(out.token_ids) for out in outs}) > 1
    for out in outs:
        jsonschema.validate(json.loads(out.text), PERSON)
    leaving = engine.stream(prompts[2], SamplingParams(max_new_tokens=MOST, json_schema=PERSON))
    next(leaving)
    leaving.close()
    assert_idle(engine)


@deep_cases("verify")
@pytest.mark.parametrize(
    ("owner", "part", "breaks"),
    [
        pytest.param(DecodeRound, "verify", {2, 3, 7}, id="verify"),
        pytest.param(grammar.GrammarLibrary, "masks", set(range(2, 20, 3)), id="masks"),
    ],
)
def test_a_failed_step_leaves_no_trace_in_any_request(
    owner, part, breaks, engine_of, prompts, params, alone, monkeypatch
):
    """Its tokens are those of the lone run, wherever within the round, or while masks are made, it broke."""
    engine, whole, calls = engine_of("tree", max_batch_size=4), getattr(owner, part), [0]

    def breaking(self, *args):
        calls[0] += 1
        if calls[0] in breaks:
            raise KeyboardInterrupt  # an error would end a request when it is raised again
        return whole(self, *args)

    monkeypatch.setattr(owner, part, breaking)
    handles = engine.submit_many(prompts[NO_RULES], params[NO_RULES])
    while not all(handle.finished for handle in handles):
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert calls[0] > max(breaks)
    assert [handle.output().token_ids for handle in handles] == [out.token_ids for out in alone[NO_RULES]]


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(engine_of, prompts, alone, params, monkeypatch, caplog):
    """The library gives up in the middle of a text: that request ends as aborted, with what it had."""
    whole = grammar.GrammarState.after
    monkeypatch.setattr(
        grammar.GrammarState, "after", lambda self, token: None if token == ord("x") - 33 else whole(self, token)
    )
    engine = engine_of("ngram", max_batch_size=4)
    with caplog.at_level("WARNING", "specdec"):
        outs = engine.generate(prompts[1:4], [SamplingParams(regex="ababxyz"), *params[2:4]])
    assert outs[0].text == "abab" and outs[0].finish_reason == "abort"
    assert outs[2].finish_reason in ("stop", "abort") and engine.scheduler.idle
    assert "its grammar allows no next token" in caplog.text
    engine.table.check()


@pytest.mark.parametrize(
    ("kind", "stops", "text"),
    [("tree", {"stop": ";"}, "abc"), ("mtp", {"stop_token_ids": [ord(";") - 33]}, "abc;")],
    ids=["string", "token"],
)
def test_a_stop_ends_a_text_within_its_grammar(kind, stops, text, engine_of, prompts):
    """A stop token that is text: as the model's own end it could stand only where the grammar ends."""
    [out] = engine_of(kind).generate([prompts[0]], SamplingParams(regex="abc;[a-z]{5}", **stops))
    assert out.text == text and out.finish_reason == "stop"


# captured rounds


@pytest.mark.slow
@pytest.mark.parametrize("kind", [deep(None), "tree", deep("eagle3")], ids=str)
def test_captured_rounds_give_the_same_tokens(kind, engine_of, prompts, params, alone, monkeypatch):
    """Draft, verify and draw are captured, each with the next one's inputs; masks are data."""
    capture_on_cpu(monkeypatch)
    engine = engine_of(kind, max_batch_size=2, device="cpu")
    for _ in range(examples(1, 2)):
        outs = engine.generate(prompts[NO_RULES], params[NO_RULES])
        assert [out.token_ids for out in outs] == [out.token_ids for out in alone[NO_RULES]]
    replayed = {(shape.features.masked, shape.forced > 0) for shape in captured_rounds(engine)}
    assert replayed >= {(False, False), (True, False), (True, True)}
    assert sum(out.stats.forced_tokens for out in outs) > 0
    engine.table.check()


def test_free_requests_keep_their_rounds(engine_of, prompts, monkeypatch):
    """One program, of the same shape as without grammars; and nothing is settled before its time."""
    capture_on_cpu(monkeypatch)
    engine = engine_of("ngram", max_batch_size=2, device="cpu")
    engine.generate(prompts[:2], SamplingParams(max_new_tokens=12))
    captured = captured_rounds(engine)
    assert captured and all(len(one.replays) == 1 for one in captured.values())
    assert not any(shape.features.edits or shape.forced for shape in captured)
    assert engine.state.masks._words is None


# many schemas


def random_schema(draw, depth=0):
    """Bounded in every direction."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "anyOf"]
    kind = draw.choice(kinds if depth == 2 else [*kinds, "object", "object", "array"])
    if kind == "string":
        low = draw.randrange(3)
        return draw.choice(
            [
                {"type": "string", "minLength": low, "maxLength": low + draw.randrange(5)},
                {"type": "string", "pattern": draw.choice(["^[A-Z]{2}[0-9]{1,3}$", "^(a|bc){1,3}$"])},
                {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])},
            ]
        )
    if kind == "integer":
        low = draw.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1, 2000)}
    if kind == "number":
        return {"type": "number", "enum": [draw.randrange(100) / 8 for _ in range(3)]}
    if kind == "enum":
        return {"enum": draw.sample(["red", "größer", 7, None, True, 2.5, 'a"b', "two words"], 3)}
    if kind == "const":
        return {"const": draw.choice([{"a": [1, None]}, "only", -3, []])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, 2), random_schema(draw, 2)]}
    if kind == "array":
        low = draw.randrange(3)
        items = random_schema(draw, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randrange(3)}
    if kind == "object":
        names = draw.sample(["a", "name", "größe", "x y", "id_2", "B"], draw.randrange(1, 4))
        required = [name for name in names if draw.random() < 0.6]
        properties = {name: random_schema(draw, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def test_random_schemas(engine_of, prompts):
    """Each gives valid JSON, the same with drafts as without."""
    drawn = [random.Random(seed) for seed in range(MANY)]
    schemas = [random_schema(draw) for draw in drawn]
    params = [
        SamplingParams(max_new_tokens=900, json_schema=schema, temperature=draw.choice([0, 0, 1.0]), seed=seed)
        for seed, (schema, draw) in enumerate(zip(schemas, drawn, strict=True))
    ]
    asked = [prompts[seed % len(prompts)] for seed in range(MANY)]
    engines = [engine_of(kind, max_batch_size=12, max_model_len=1024) for kind in (None, "tree")]
    plain, drafted = (engine.generate(asked, params) for engine in engines)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    for schema, out in zip(schemas, plain, strict=True):
        assert out.finish_reason == "stop", f"{schema}: {out.text!r}"
        jsonschema.validate(json.loads(out.text), schema)
    assert sum(out.stats.forced_tokens for out in plain) > 0
