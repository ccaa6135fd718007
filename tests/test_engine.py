"""The engine around the rounds: queueing, streams, stop conditions, statistics, capacity, and leaks."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec import SamplingParams, progress
from specdec.errors import CapacityError

from engine_internals import Request, assert_idle
from marks import deep, deep_cases, each_value, examples, slow, usual_cases
from scripted_drafter import following

NEW = 16


@pytest.fixture
def perfect(greedy_oracle, scripted):
    """perfect(model, prompts, n): a drafter whose drafts are all right for n tokens after each prompt."""

    def make(model, prompts, n):
        return scripted(following([[*p, *greedy_oracle(model, p, n + 8)] for p in prompts]))

    return make


# generate


def test_kinds_of_prompts(make_target, make_engine, greedy_oracle, pair_tokenizer):
    model = make_target("llama")
    engine = make_engine(model, tokenizer=pair_tokenizer)
    assert engine.generate([]) == []
    params, ids = SamplingParams(max_new_tokens=4), [1, 0, 35, 17, 94]
    want = greedy_oracle(model, ids, 4)
    boxed = [torch.tensor(1), 0, np.int32(35), torch.tensor(17), 94]
    for prompt in ("a1a0d5b7j4", ids, tuple(ids), torch.tensor(ids), np.array(ids), boxed):
        [out] = engine.generate(prompt, params)
        assert out.token_ids == want and out.prompt_token_ids == ids
    texts = np.array(["a1a0d5b7j4"] * 2)
    for prompts in ([ids, texts[0]], texts, torch.tensor([ids, ids]), [tuple(ids), ids], [np.array(ids), boxed]):
        outputs = engine.generate(prompts, params)
        assert [out.token_ids for out in outputs] == [want, want]
    assert {out.text for out in outputs} == {pair_tokenizer.decode(want)}


def test_requests_that_have_ended_are_counted_a_few_times_a_second(make_target, make_engine, monkeypatch):
    """They were counted after every step: of 50,000 prompts, 3.5 ms each time."""
    engine, counted = make_engine(make_target("llama"), max_batch_size=1), []
    monkeypatch.setattr(progress, "COUNT_SECONDS", math.inf)
    finished = Request.finished
    monkeypatch.setattr(
        Request, "finished", property(lambda request: counted.append(request) or finished.fget(request))
    )
    outputs = engine.generate([[1, 2, 3]] * 30, SamplingParams(max_new_tokens=2))
    assert len(outputs) == 30 and len(counted) < 20 * 30


@pytest.mark.parametrize("stage", ["propose", "target"])
def test_an_exception_ends_only_the_call_in_which_it_happened(
    stage, make_target, make_engine, greedy_oracle, random_prompt, monkeypatch
):
    model, prompts = make_target("gemma4-e2b"), [random_prompt(n) for n in (5, 20, 30)]
    engine = make_engine(model, "ngram", max_batch_size=2)
    stream = engine.stream(prompts[0], SamplingParams(max_new_tokens=NEW))
    got = list(next(stream).token_ids)
    owner, name = (engine.state.worker, "propose") if stage == "propose" else (engine.target, "logits")
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompts[1:], SamplingParams(max_new_tokens=NEW))
    assert len(engine.scheduler.waiting) == 1  # the stream, to begin again from its tokens
    engine.table.check()
    [out] = engine.generate(prompts[1], SamplingParams(max_new_tokens=NEW))
    assert out.token_ids == greedy_oracle(model, prompts[1], NEW)
    got += [token for delta in stream for token in delta.token_ids]
    assert got == greedy_oracle(model, prompts[0], NEW)
    assert_idle(engine)


def test_one_new_token_needs_no_round(make_target, make_engine, greedy_oracle, random_prompt):
    model, prompt = make_target("gemma4-e2b"), random_prompt(20)
    [out] = make_engine(model, "ngram").generate(prompt, SamplingParams(max_new_tokens=1))
    assert out.token_ids == greedy_oracle(model, prompt, 1)
    assert (out.stats.rounds, out.stats.acceptance_length, out.finish_reason) == (0, 0.0, "length")
    assert out.drafted == [False]


# streams


@usual_cases("False-perfect", "True-ngram")
@pytest.mark.parametrize("drafter", [None, "ngram", "perfect"])
@pytest.mark.parametrize("stop", [False, True])
def test_deltas_add_up_to_the_output(
    drafter, stop, make_target, make_engine, greedy_oracle, random_prompt, pair_tokenizer, perfect
):
    model, prompt = make_target("gemma4-e2b"), random_prompt(9)
    text = pair_tokenizer.decode(greedy_oracle(model, prompt, NEW))
    params = SamplingParams(max_new_tokens=NEW, stop=[text[17:21], "zz"] if stop else ())
    if drafter == "perfect":
        drafter = perfect(model, [prompt], NEW)
    engine = make_engine(model, drafter, tokenizer=pair_tokenizer)
    deltas = list(engine.stream(prompt, params))
    out = deltas[-1].output
    assert all(delta.output is None and delta.token_ids for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == out.text == (text[: text.find(text[17:21])] if stop else text)
    assert [token for delta in deltas for token in delta.token_ids] == out.token_ids
    assert [flag for delta in deltas for flag in delta.drafted] == out.drafted
    assert out.finish_reason == ("stop" if stop else "length")
    assert_idle(engine)


@usual_cases("2", "3", "5", "8", "12")
@pytest.mark.parametrize("end", range(2, 13))
def test_no_piece_of_a_stop_string_is_streamed(
    end, make_target, make_engine, greedy_oracle, random_prompt, pair_tokenizer
):
    """The output begins with the stop string, so nothing may ever be handed out."""
    model, prompt = make_target("gemma4-e2b"), random_prompt(9)
    text = pair_tokenizer.decode(greedy_oracle(model, prompt, NEW))
    engine = make_engine(model, tokenizer=pair_tokenizer)
    deltas = list(engine.stream(prompt, SamplingParams(max_new_tokens=NEW, stop=text[:end])))
    assert deltas[-1].output.text == "" and deltas[-1].finish_reason == "stop"
    assert [delta.text for delta in deltas] == [""] * len(deltas)


@pytest.mark.parametrize("how", ["close", "drop", "unstarted", "unstarted-close"])
def test_an_abandoned_stream_frees_all_slots(how, make_target, make_engine, random_prompt):
    engine = make_engine(make_target("gemma4-e2b"), "ngram")
    stream = engine.stream(random_prompt(20), SamplingParams(max_new_tokens=NEW))
    if not how.startswith("unstarted"):
        next(stream)
        next(stream)
        assert engine.table.allocator.primary.held_pages > 20
    if how.endswith("close"):
        stream.close()
    del stream
    assert_idle(engine)


# stop conditions


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "drafter"), [(1, "perfect"), deep(4, "perfect"), deep(1, None), (4, None)])
def test_end_tokens_cut_an_accepted_path(
    page_size, drafter, make_target, make_engine, greedy_oracle, random_prompt, perfect
):
    """Wherever in the path it stands: the prefill's token, a draft, the bonus; then the engine goes on as ever."""
    model, prompt = make_target("gemma4-e2b"), random_prompt(9)
    ids = greedy_oracle(model, prompt, NEW)
    other = random_prompt(20)
    engine = make_engine(
        model, perfect(model, [prompt, other], NEW) if drafter else None, page_size=page_size, max_batch_size=4
    )
    whole = SamplingParams(max_new_tokens=NEW)
    ending = [replace(whole, stop_token_ids=[end]) for end in ids[:10]]
    long, *outs = engine.generate([other, *[prompt] * 10], [whole, *ending])
    for end, out in zip(ids[:10], outs, strict=True):
        first = ids.index(end)
        assert out.token_ids == ids[: first + 1] and out.finish_reason == "stop"
        assert len(out.drafted) == first + 1
    assert long.token_ids == greedy_oracle(model, other, NEW)
    assert_idle(engine)
    assert engine.generate(prompt, SamplingParams(max_new_tokens=NEW))[0].token_ids == ids


@pytest.mark.parametrize("source", ["generation_config", "list", "config", "tokenizer", "both"])
def test_end_tokens_come_from_the_model(source, make_target, make_engine, greedy_oracle, random_prompt, pair_tokenizer):
    """A chat's end that only the tokenizer names counts, too; such answers ran to their limit."""
    model, prompt = make_target("llama", fresh=True), random_prompt(9)
    ids = greedy_oracle(model, prompt, NEW)
    end, tokenizer = ids[5], None
    if source == "both":
        model.generation_config.eos_token_id = model.config.eos_token_id = ids[9]
    if source == "generation_config":
        model.generation_config.eos_token_id = end
    elif source == "list":
        model.generation_config.eos_token_id = [end, ids[9]]
    elif source == "config":
        model.config.eos_token_id = end
    else:
        tokenizer = copy.deepcopy(pair_tokenizer)
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(end)})
    engine = make_engine(model, "ngram", tokenizer=tokenizer)
    cut, whole = engine.generate(
        [prompt, prompt],
        [SamplingParams(max_new_tokens=NEW), SamplingParams(max_new_tokens=NEW, ignore_eos=True)],
    )
    assert cut.token_ids == ids[: ids.index(end) + 1] and cut.finish_reason == "stop"
    assert whole.token_ids == ids and whole.finish_reason == "length"
    if tokenizer is not None:
        assert cut.text == pair_tokenizer.decode(cut.token_ids[:-1])  # special tokens are no text


# figures


@deep_cases("1-1.0", "5-0.0")
@pytest.mark.parametrize(("asked", "temperature"), each_value(itertools.product([0, 1, 5, 200], [0.0, 1.0])))
def test_logprobs_are_those_of_transformers(
    asked, temperature, make_target, make_engine, random_prompt, hf_forward, scripted, tree_script, greedy_oracle
):
    """Log-probabilities of the unmodified logits, whatever the temperature; neighbours that ask for none get none."""
    model, prompt = make_target("gemma4-e2b"), random_prompt(9)
    trees = scripted(tree_script([prompt + greedy_oracle(model, prompt, NEW)]))
    engine = make_engine(model, trees, num_steps=6, page_size=4)
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, top_k=20, seed=2, logprobs=asked)
    out, silent = engine.generate([prompt, random_prompt(20)], [params, SamplingParams(max_new_tokens=9)])
    assert silent.logprobs is None
    assert [item.token_id for item in out.logprobs] == out.token_ids
    log_p = hf_forward(model, prompt + out.token_ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for item, row in zip(out.logprobs, log_p, strict=True):
        assert item.logprob == pytest.approx(float(row[item.token_id]), abs=1e-4)
        best = row.topk(min(asked, 96))
        assert list(item.top) == best.indices.tolist()
        assert list(item.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_statistics_add_up(make_target, make_engine, greedy_oracle, random_prompt, scripted, tree_script):
    model = make_target("gemma4-e2b")
    prompts = [random_prompt(n) for n in (3, 21, 40, 8)]
    trees = scripted(tree_script([p + greedy_oracle(model, p, NEW) for p in prompts]))
    engine = make_engine(model, trees, num_steps=6, max_batch_size=3)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
    for out, prompt in zip(outputs, prompts, strict=True):
        stats = out.stats
        assert stats.prompt_tokens == len(prompt) and stats.output_tokens == len(out.token_ids) == NEW
        assert stats.round_tokens == NEW - 1  # the first comes from the prefill
        assert stats.acceptance_length == stats.drafted_round_tokens / stats.drafted_rounds
        # a round with one token left to ask for drafts nothing, and brings one
        assert stats.round_tokens - stats.drafted_round_tokens == stats.rounds - stats.drafted_rounds <= 1
        assert sum(stats.accepted_counts) == sum(out.drafted)
        # a round emits its accepted drafts and a bonus; the last one may be cut before the bonus
        assert sum(stats.accepted_counts) - (stats.round_tokens - stats.rounds) in (0, 1)
        assert sorted(stats.accepted_counts, reverse=True) == stats.accepted_counts
        assert min(stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.other_seconds) > 0
    total = engine.stats()
    for name in ("rounds", "round_tokens", "output_tokens", "prompt_tokens", "verify_seconds"):
        assert getattr(total, name) == pytest.approx(sum(getattr(out.stats, name) for out in outputs))
    counts = [sum(column) for column in zip(*(out.stats.accepted_counts for out in outputs), strict=True)]
    assert total.accepted_counts == counts
    total.rounds = 0
    assert engine.stats().rounds > 0  # a copy


@usual_cases("2", "5", "9")
@pytest.mark.parametrize("new", [2, *map(slow, range(3, 11)), 11])
def test_drafted_flags_are_the_accepted_drafts(new, make_target, make_engine, random_prompt, perfect):
    """Also when the last path is cut by an end token or by max_new_tokens while a neighbour drafts on."""
    model, prompts = make_target("gemma4-e2b"), [random_prompt(9), random_prompt(20)]
    engine = make_engine(model, perfect(model, prompts, 32))
    params = [SamplingParams(max_new_tokens=new), SamplingParams(max_new_tokens=24)]
    for out in engine.generate(prompts, params):
        assert sum(out.stats.accepted_counts) == sum(out.drafted)


# capacity


@pytest.mark.parametrize(
    ("config", "prompt_len", "new", "numbers"),
    [
        ({"max_model_len": 20}, 14, 17, ["14", "31", "20", "6 new tokens"]),
        ({"max_model_len": 20}, 30, 1, ["30", "max_model_len=20", "no room", "shorten the prompt by 11"]),
        ({"max_model_len": 20}, 10, 995_953, ["995963", "max_model_len=20; ask for at most 10 new tokens, or make"]),
        ({"max_model_len": 20}, 19, 2, ["a prompt of 19 tokens", "ask for at most 1 new token,"]),
        ({"max_model_len": 20}, 1, 20, ["a prompt of 1 token with max_new_tokens=20", "at most 19 new tokens"]),
        ({"full_slots": 40}, 30, 20, ["30", "52 full", "40", "full_slots"]),
        ({"swa_slots": 10}, 30, 20, ["30", "11 window 8", "10", "swa_slots"]),
        ({"full_slots": 40, "page_size": 16}, 30, 20, ["64 full", "32", "page size 16"]),
    ],
    ids=["length", "prompt", "output", "one-new", "one-old", "full", "swa", "pages"],
)
def test_requests_that_can_never_fit_are_refused_with_the_numbers(
    config, prompt_len, new, numbers, make_target, make_engine, greedy_oracle, random_prompt
):
    model = make_target("gemma4-e2b")
    engine = make_engine(model, "ngram", **config)
    prompts = [random_prompt(6), random_prompt(prompt_len)]
    for ask in (
        lambda: engine.generate(prompts, [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=new)]),
        lambda: engine.stream(prompts[1], SamplingParams(max_new_tokens=new)),
    ):
        with pytest.raises(CapacityError) as error:
            ask()
        assert all(number in str(error.value) for number in numbers), str(error.value)
        assert_idle(engine)
    assert engine.stats().output_tokens == 0  # not even the one that fits
    most = config.get("max_model_len", 8) - 6  # of the length, all that there is
    [out] = engine.generate(prompts[0], SamplingParams(max_new_tokens=most))
    assert out.token_ids == greedy_oracle(model, prompts[0], most)


def test_a_pool_of_just_the_slots_of_a_request_serves_it_and_a_smaller_one_refuses_it(
    make_target, make_engine, greedy_oracle, random_prompt
):
    """5 + 6 tokens: the last round begins after 9 committed ones and writes one more."""
    model, prompt, params = make_target("llama"), random_prompt(5), SamplingParams(max_new_tokens=6)
    [out] = make_engine(model, full_slots=10).generate(prompt, params)
    assert out.token_ids == greedy_oracle(model, prompt, 6)
    with pytest.raises(CapacityError, match=r"needs 10 full KV slots .* but the full pool has 9"):
        make_engine(model, full_slots=9).generate(prompt, params)


@pytest.mark.parametrize("pools", [deep({"full_slots": 40}), {"swa_slots": 10}, {"full_slots": 40, "page_size": 16}])
def test_the_most_new_tokens_are_as_many_as_every_pool_holds(pools, make_target, make_engine, random_prompt):
    """A server asks for them where a client asks for no number. It looked at the primary pool alone."""
    engine, prompt = make_engine(make_target("gemma4-e2b"), "ngram", **pools), random_prompt(5)
    most = engine.most_new_tokens(5)
    assert len(engine.generate(prompt, SamplingParams(max_new_tokens=most))[0].token_ids) == most > 1
    with pytest.raises(CapacityError):
        engine.submit(prompt, SamplingParams(max_new_tokens=most + 1))


# leaks


@usual_cases("eager-gemma4-e2b", "sdpa-llama")
@pytest.mark.parametrize("name", ["gemma4-e2b", slow("gemma4-multimodal"), slow("gpt_oss"), "llama"])
@pytest.mark.parametrize("implementation", [slow("eager"), "sdpa"])
def test_the_model_is_as_it_was(name, implementation, make_target, make_assistant, make_engine, random_prompt):
    if (name, implementation) == ("gpt_oss", "sdpa"):
        pytest.skip("transformers has no sdpa attention with sinks")
    model = make_target(name, fresh=True)
    towers_keep_theirs = {"": implementation, "text_config": implementation}
    model.set_attn_implementation(towers_keep_theirs if name == "gemma4-multimodal" else implementation)
    prompt = torch.tensor([random_prompt(20)])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = model.generate(prompt, **settings)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    configs = [model.config._attn_implementation, model.config.get_text_config()._attn_implementation]

    drafter = make_assistant(model) if name == "gemma4-e2b" else "ngram"
    with make_engine(model, drafter) as engine:
        out = engine.generate(prompt[0].tolist(), SamplingParams(max_new_tokens=8))[0]
        between = model.generate(prompt, **settings)
        stream = engine.stream(prompt[0].tolist(), SamplingParams(max_new_tokens=8))
        next(stream)
        assert torch.equal(model.generate(prompt, **settings), before)
    assert torch.equal(between, before) and torch.equal(model.generate(prompt, **settings), before)
    assert out.token_ids == before[0, 20:].tolist()
    assert [model.config._attn_implementation, model.config.get_text_config()._attn_implementation] == configs
    assert not model.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[key]), key


def test_two_engines_share_a_model(make_target, make_assistant, make_engine, greedy_oracle, random_prompt):
    model, prompts = make_target("gemma4-e2b"), [random_prompt(20), random_prompt(7)]
    engines = [make_engine(model, make_assistant(model)), make_engine(model, "ngram", page_size=4)]
    streams = [e.stream(p, SamplingParams(max_new_tokens=NEW)) for e, p in zip(engines, prompts, strict=True)]
    got = [[], []]
    for _ in range(NEW):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += [token for delta in (next(stream, None),) if delta for token in delta.token_ids]
    assert got == [greedy_oracle(model, p, NEW) for p in prompts]


@usual_cases("1-8-gemma4-e2b")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4-e2b", "mistral", "llama"])
@pytest.mark.parametrize("page_size", [1, 8, 32])
@pytest.mark.parametrize("num_steps", [1, 9])
def test_pools_sized_by_the_engine_serve_the_longest_request(family, page_size, num_steps, make_target, make_engine):
    """A one-request engine with small windows and large pages once made an SWA pool that no request fitted."""
    length = examples(40, 100)
    settings = {"max_batch_size": 1, "page_size": page_size, "prefill_chunk": 1, "max_model_len": length}
    engine = make_engine(make_target(family), "ngram", num_steps=num_steps, **settings)
    [out] = engine.generate([[7] * (length - 10)], SamplingParams(max_new_tokens=10))
    assert len(out.token_ids) == 10 and out.stats.preemptions == 0
