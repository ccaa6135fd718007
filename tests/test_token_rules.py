"""min_tokens and allowed_token_ids: rules about tokens that hold on every draft path; stop strings that are kept.

The oracle is a loop of full forwards with masks of its own. A target that ends early and often is made by a bias, so
that the rules have something to forbid. test_structured_output.py has the same tokens with every drafter.
"""

import json

import numpy as np
import pytest
import torch

from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.sampling.grammars.grammar import Grammars, tree_masks
from specdec.sampling.grammars.grammar_bounds import ONE_LINE, compiles_in_linear_time
from specdec.sampling.grammars.token_rules import only_bit, token_bits
from specdec.text.detokenize import Detokenizer
from specdec.text.stop_strings import StopStrings, cut_at_stop, find_first

from marks import deep_cases

EOS, VOCAB = 256, 300  # byte_tokenizer, under a head that is wider
EAGER = {EOS: 30.0, 7: 6.0}
"""A bias with which every output would end at once."""
ASKED = {
    "least": {"min_tokens": 9, "logit_bias": EAGER},
    "least, own stop": {"min_tokens": 6, "stop_token_ids": [7], "ignore_eos": True, "logit_bias": EAGER},
    "allowed": {"allowed_token_ids": tuple(range(60, 90))},
}


@pytest.fixture(scope="module")
def model(make_target):
    return make_target("gemma4-e2b", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def prompts(random_prompt):
    return [random_prompt(n, vocab=VOCAB) for n in (5, 13, 8)]


@pytest.mark.parametrize("asked", ASKED)
def test_greedy_rules_are_those_of_a_loop_of_forwards(asked, model, engine_of, prompts, hf_forward):
    one = SamplingParams(max_new_tokens=12, **ASKED[asked])
    ends = set(one.stop_token_ids) if one.ignore_eos else {EOS}
    output: list[int] = []
    while len(output) < 12 and not (output and output[-1] in ends):
        logits = hf_forward(model, prompts[1] + output).logits[0, -1].float().clone()
        for token, bias in (one.logit_bias or {}).items():
            logits[token] += bias
        if one.allowed_token_ids is not None:
            outside = torch.ones(VOCAB, dtype=torch.bool)
            outside[list(one.allowed_token_ids)] = False
            logits[outside] = -torch.inf
        if len(output) < one.min_tokens:
            logits[list(ends)] = -torch.inf
        output.append(int(logits.argmax()))
    [out] = engine_of("tree").generate([prompts[1]], one)
    assert out.token_ids == output


def test_after_min_tokens_a_request_waits_for_no_masks(engine_of, prompts, monkeypatch):
    """The rule is over, the request goes on: its rounds are those of any other."""
    seen = []

    def spied(trees, num_words):
        seen.append(len(trees))
        return tree_masks(trees, num_words)

    monkeypatch.setattr("specdec.runtime.grammar_masks.tree_masks", spied)
    engine = engine_of("mtp")
    [out] = engine.generate([prompts[0]], SamplingParams(max_new_tokens=40, min_tokens=4, logit_bias={EOS: -100.0}))
    assert len(out.token_ids) == 40
    assert 1 <= len(seen) <= 4 < out.stats.rounds


def test_masks_of_a_tree_by_hand():
    """Two tokens to go; the root 1 has the children 2 and the end, 2 has the end: allowed only at the third token."""
    params = SamplingParams(min_tokens=2, max_new_tokens=8)
    root = Grammars(None, 40).start(params, frozenset({5}), set())
    masks = tree_masks([(root, [1, 2, 5, 5, 3], [-1, 0, 0, 1, 1])], 2)[0]
    closed, open = np.array([~(1 << 5), -1], dtype=np.int32), np.array([-1, -1], dtype=np.int32)
    assert masks.tolist() == [each.tolist() for each in (closed, closed, open, open, open)]  # 2 and 3: never reached
    state = root.after(2).after(3)
    assert state.free and state.after(5).over
    assert root.after(5) is None
    assert Grammars(None, 40).start(SamplingParams(), frozenset({5}), set()) is None


def test_min_tokens_with_a_grammar(engine_of, prompts):
    """No end before, where the grammar has another way on; where it can only end it ends."""
    asked = {"max_new_tokens": 60, "logit_bias": {EOS: 60.0}}
    for kind in (None, "tree"):
        engine = engine_of(kind)
        [short] = engine.generate([prompts[0]], SamplingParams(regex="[ab]{2,30}", **asked))
        [long] = engine.generate([prompts[0]], SamplingParams(regex="[ab]{2,30}", min_tokens=12, **asked))
        [only] = engine.generate([prompts[0]], SamplingParams(choice=["yes"], min_tokens=50, **asked))
        assert len(short.text) == 2 and len(long.text) == 12 and only.text == "yes"
        assert {out.finish_reason for out in (short, long, only)} == {"stop"}
    [schema] = engine.generate([prompts[2]], SamplingParams(json_object=True, min_tokens=3, **asked))
    json.loads(schema.text)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_tokens": 9, "max_new_tokens": 8}, r"^min_tokens=9: at most max_new_tokens=8"),
        ({"allowed_token_ids": [VOCAB]}, r"^allowed_token_ids holds token id 300, outside the vocabulary of 300"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, r"all tokens that end the output, and min_tokens=2"),
        ({"allowed_token_ids": [4], "regex": "a"}, r"^allowed_token_ids with regex"),
        (
            {"stop": "a", "thought_marks": ("<think>", "")},
            r"^thought_marks=.*: a pair such as \('<think>', '</think>'\)",
        ),
        # it was aborted without a token, which the server reported as its own stop
        (
            {"stop_token_ids": range(VOCAB), "min_tokens": 2},
            "those of the vocabulary are all tokens that end the output",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused(asked, said, engine_of):
    engine: Engine = engine_of()
    with pytest.raises(ConfigError, match=said):
        engine.generate([[1, 2, 3]], SamplingParams(**asked))


def test_stop_strings_by_hand():
    assert cut_at_stop("one END two END", ["END"]) == "one "
    assert cut_at_stop("one END two END", StopStrings(["END"], included=True)) == "one END"
    assert find_first("abcabc", ["bc"], since=2).begin == 1  # it ends after character 2
    assert find_first("abcabc", ["bc"], since=3).begin == 4


@deep_cases("False-1", "False-2", "True-5")
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_kept_and_counted_late_in_a_stream(step, included, byte_tokenizer):
    """Output 'a#b#c#d' with the stop string '#': within 4 tokens it does not count."""
    ids, stops = byte_tokenizer("a#b#c#d")["input_ids"], StopStrings(["#"], included=included, min_tokens=4)
    reader, looking, said = Detokenizer(byte_tokenizer), Detokenizer(byte_tokenizer), []
    end = next(n for n in range(1, len(ids) + 1) if looking.find_stop(ids[:n], stops))
    assert byte_tokenizer.decode(ids[:end]) == "a#b#c#"
    for at in range(step, end + step, step):
        said.append(reader.stream(ids[: min(at, end)], stops, finished=at >= end))
    assert "".join(said) == ("a#b#c#" if included else "a#b#c")
    assert Detokenizer(byte_tokenizer).final_text(ids[:end], stops) == "".join(said)


def test_a_stop_string_in_special_tokens_is_kept_too(byte_tokenizer):
    special = byte_tokenizer.decode([EOS], skip_special_tokens=False)
    ids = [*byte_tokenizer("ab")["input_ids"], EOS]
    for included, text in ((False, "ab"), (True, "ab" + special)):
        stops = StopStrings([special], included=included)
        assert Detokenizer(byte_tokenizer).find_stop(ids, stops)
        assert Detokenizer(byte_tokenizer).final_text(ids, stops) == text


def test_a_schema_says_itself_how_white_space_is_written(engine_of, prompts, byte_tokenizer):
    """ "x-guidance" had no effect: the engine's own pattern for white space went over it."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    eager = dict.fromkeys(byte_tokenizer(" \n")["input_ids"], 40.0)
    asked = SamplingParams(max_new_tokens=60, json_schema=schema | {"x-guidance": ONE_LINE}, logit_bias=eager)
    for kind in (None, "tree"):
        [out] = engine_of(kind).generate([prompts[0]], asked)
        assert out.text in ('{"a": 1}', '{"a": 2}')
    assert compiles_in_linear_time("json_schema", asked.json_schema)


@pytest.mark.parametrize("token", [0, 31, 32, 63])
def test_the_only_token_of_a_mask_is_found_at_the_ends_of_its_words(token):
    assert only_bit(token_bits([token], 2)) == token
    assert only_bit(token_bits([token, 5], 2)) is None and only_bit(token_bits([], 2)) is None
