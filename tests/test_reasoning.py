"""What a model thought and what it says, out of pieces of any size."""

import random
from functools import partial

import pytest
from test_reply import deltas_of

from specdec.errors import ConfigError
from specdec.serving.openai.reply import Reply
from specdec.serving.tools.reasoning import REASONING, ReasoningReader, opened_by, reasoning_format
from specdec.serving.tools.tool_parsers import PARSERS

CASES = {
    # format, opened by the prompt, text -> thought, answer
    "qwen": ("qwen3", False, "<think>\nI count.\n\n</think>\n\nEight.", "I count.", "Eight."),
    "opened": ("qwen3", True, "\nI count.\n</think>\n\nEight. <think>", "I count.", "Eight. <think>"),
    "no thought": ("qwen3", False, "  Eight, < 9 <think>x</think>", "", "  Eight, < 9 <think>x</think>"),
    "empty": ("qwen3", False, "<think>\n\n</think>\n\nEight.", "", "Eight."),
    "cut": ("qwen3", False, "<think>I count </thi", "I count </thi", ""),
    "silent": ("deepseek_r1", False, "I count.</think>Eight.\n", "I count.", "Eight.\n"),
    "said": ("deepseek_r1", False, "<think>\nI count.\n</think>\nEight.", "I count.", "Eight."),
    "gemma": ("gemma4", False, "<|channel>thought\nI count.\n<channel|>Eight.", "I count.", "Eight."),
    "gemma twice": ("gemma4", False, "<|channel>thought\nA<channel|>B<|channel>thought\nC<channel|>D", "AC", "BD"),
    "gemma none": ("gemma4", False, "Eight, <b>.", "", "Eight, <b>."),
    "space": ("qwen3", False, "   ", "", "   "),
}


@pytest.mark.parametrize("case", CASES)
def test_thought_and_answer_of_pieces_of_any_size(case):
    name, opened, text, thought, answer = CASES[case]
    for seed in range(40):
        rng, reader, got, at = random.Random(seed), ReasoningReader(REASONING[name], opened=opened), ["", ""], 0
        while at < len(text):
            size = len(text) if seed == 0 else rng.randint(1, 1 + seed % 7)
            split = reader.feed(text[at : at + size])
            got = [before + new for before, new in zip(got, split, strict=True)]
            at += size
        got = [before + new for before, new in zip(got, reader.feed("", finished=True), strict=True)]
        assert got == [thought, answer], seed


def test_whether_the_prompt_has_opened_a_thought():
    qwen = REASONING["qwen3"]
    assert opened_by("<|im_start|>assistant\n<think>\n", qwen)
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n", qwen)
    assert not opened_by("<|im_start|>assistant\n", qwen)
    assert reasoning_format("none") is None
    with pytest.raises(ConfigError, match=r"^reasoning_parser='deep' is unknown; choose one of none, deepseek_r1"):
        reasoning_format("deep")


@pytest.mark.parametrize("seed", range(3))
def test_thoughts_calls_and_text_of_one_answer(seed, byte_tokenizer):
    text = '<think>Which? {"name": "f"}</think>I look. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    wanted = partial(Reply, byte_tokenizer, (), False, PARSERS["hermes"], reasoning=REASONING["qwen3"])
    reply, deltas = wanted(), deltas_of(byte_tokenizer, text, random.Random(seed))
    said = [reply.read(delta) for delta in deltas]
    assert "".join(one.reasoning for one in said) == 'Which? {"name": "f"}'
    assert "".join(one.content for one in said).strip() == "I look."
    assert reply.num_calls == 1


@pytest.mark.parametrize("seed", range(3))
def test_no_second_call_where_one_is_allowed(seed, byte_tokenizer):
    """parallel_tool_calls=false: what follows the first call is left out, in pieces of any size."""
    one = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    wanted = partial(Reply, byte_tokenizer, (), False, PARSERS["hermes"], max_calls=1)
    reply, deltas = wanted(), deltas_of(byte_tokenizer, f"So: {one}{one} and more", random.Random(seed))
    said = [reply.read(delta) for delta in deltas]
    assert reply.num_calls == 1 and {call["index"] for each in said for call in each.tool_calls} == {0}
    assert "".join(each.content for each in said).strip() == "So:"
