"""One request's fault ends one request: tokenizers and grammars that raise, wrong ids, engines that are closed."""

import threading
from unittest.mock import Mock

import pytest
from run_in_threads import in_threads

from specdec import SamplingParams
from specdec.errors import ConfigError, RequestFailedError, SpecDecError
from specdec.runtime.request import Request
from specdec.sampling.grammars import grammar
from specdec.sampling.log_probs import TokenLogprob
from specdec.text.detokenize import Detokenizer

from engine_internals import assert_idle

NEW = 10
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
STOPPING = SamplingParams(max_new_tokens=NEW, ignore_eos=True, stop=["nowhere"])


class Breaks:
    """A tokenizer that raises where one token is decoded."""

    def __init__(self, tokenizer, token):
        self.tokenizer, self.token = tokenizer, token

    def decode(self, ids, **options):
        if self.token in ids:
            raise ValueError("cannot decode that")
        return self.tokenizer.decode(ids, **options)


@pytest.fixture
def scene(make_target, make_engine, greedy_oracle, random_prompt, pair_tokenizer):
    """(engine, prompts, their outputs): its tokenizer raises in the first output."""
    model, prompts = make_target("llama"), [random_prompt(n) for n in (5, 9, 13, 17, 21)]
    truths = [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    only = next(token for token in truths[0][1:] if all(token not in truth for truth in truths[1:]))
    engine = make_engine(model, "ngram", tokenizer=pair_tokenizer, max_batch_size=8)
    engine.tokenizer = engine.request_builder._tokenizer = Breaks(pair_tokenizer, only)
    return engine, prompts, truths


def test_a_tokenizer_that_raises_in_one_request_ends_that_one_alone(scene):
    engine, prompts, truths = scene
    handles = engine.submit_many(prompts, STOPPING)
    while engine.step():  # and none raises
        pass
    assert [handle.finish_reason for handle in handles] == ["error", *["length"] * 4]
    for ask in (handles[0].read, handles[0].output, lambda: list(handles[0])):
        with pytest.raises(RequestFailedError, match=r"the tokenizer raised .*ValueError: cannot decode that"):
            ask()
    assert [handle.output().token_ids for handle in handles[1:]] == truths[1:]
    assert_idle(engine)


def test_a_tokenizer_that_raises_while_a_handle_is_read_ends_that_request_alone(scene):
    engine, prompts, truths = scene
    handles = engine.submit_many(prompts, PLAIN)
    with pytest.raises(RequestFailedError, match="the tokenizer raised"):
        list(handles[0])
    assert [[t for delta in handle for t in delta.token_ids] for handle in handles[1:]] == truths[1:]
    with pytest.raises(RequestFailedError, match="the tokenizer raised"):
        engine.generate(prompts[0], STOPPING)


@pytest.mark.parametrize("part", ["after", "masks", "start"])
def test_a_grammar_that_raises_in_one_request_ends_that_one_alone(
    part, make_target, make_engine, greedy_oracle, random_prompt, byte_tokenizer, monkeypatch
):
    pytest.importorskip("llguidance")
    model = make_target("llama", vocab_size=257)
    prompts = [random_prompt(n, vocab=256) for n in (5, 9, 13, 17, 21)]
    engine = make_engine(model, "ngram", tokenizer=byte_tokenizer, max_batch_size=8)
    engine.request_builder.end_tokens = engine.end_tokens = frozenset({256})
    truths = [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    others = engine.submit_many(prompts[1:], PLAIN)
    engine.step()
    guided = engine.submit(prompts[0], SamplingParams(max_new_tokens=40, regex="[a-z]{60}", stop_token_ids=[256]))
    calls = [0]

    def breaking(whole, first):
        def broken(*arguments):
            calls[0] += 1
            if calls[0] >= first:
                raise RuntimeError("the library broke")
            return whole(*arguments)

        return broken

    if part == "after":
        monkeypatch.setattr(grammar.GrammarState, "after", breaking(grammar.GrammarState.after, 4))
    else:
        first = 1 if part == "start" else 4
        monkeypatch.setattr(grammar.GrammarLibrary, "masks", breaking(grammar.GrammarLibrary.masks, first))
    while engine.step():
        pass
    assert [handle.output().token_ids for handle in others] == truths[1:]
    assert guided.finish_reason == "error"
    with pytest.raises(RequestFailedError, match=r"the grammar raised .*the library broke"):
        guided.read()
    assert_idle(engine)


@pytest.mark.parametrize("id", [[0], None, "0", 1.0, True], ids=repr)
def test_an_abort_of_what_is_no_id_is_refused_and_nothing_is_queued(id, make_target, make_engine, random_prompt):
    engine = make_engine(make_target("llama"))
    with pytest.raises(ConfigError, match=r"^id=.*the id of one request is expected"):
        engine.abort(id)
    assert len(engine.generate(random_prompt(5), PLAIN)) == 1
    engine.close()


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_an_engine_that_is_closed_while_another_thread_generates_raises_there(
    how, make_target, make_engine, random_prompt
):
    engine = make_engine(make_target("llama"), max_model_len=4096)
    begun, run = threading.Event(), engine.steps.run
    engine.steps.run = lambda: (begun.set(), run())[1]

    def ask():
        params = SamplingParams(max_new_tokens=4000, ignore_eos=True)
        with pytest.raises(SpecDecError, match="closed"):
            list(getattr(engine, how)(random_prompt(5), params))

    def close():
        assert begun.wait(20)
        engine.close()

    in_threads([ask, close])


def test_a_round_that_was_interrupted_leaves_nothing_of_its_tokens(monkeypatch):
    """Its tokens, their log-probabilities and what was drafted are of the round that is settled next."""
    request = Request([0], SamplingParams(max_new_tokens=9, logprobs=0), 0, Detokenizer(None), frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(Request, "_stats_after", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            request.settle([1, 2, 3], [TokenLogprob(token, -1.0, {}) for token in (1, 2, 3)])
    assert request.output_ids == []
    request.settle([4], [TokenLogprob(4, -2.0, {})])
    output = request.output()
    assert (output.token_ids, output.drafted, output.logprobs) == ([4], [False], [TokenLogprob(4, -2.0, {})])
