"""Problems and answers: data files are read, or a faulty line is an error of one sentence with its number; answers are
read and counted, in tables that a reader can check by eye."""

import gzip
import json
import os
import threading
from decimal import Decimal
from pathlib import Path

import pytest

from specdec import SpecDecError
from specdec.evaluation.accuracy_report import final_number, is_correct, last_number, mcnemar_p, wilson_interval
from specdec.text.prompt_files import json_lines, read_prompts

GOOD = b'{"question": "a"}\n'


def written(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return path


def test_turns_answers_and_categories_are_read(tmp_path):
    rows = [
        {"question": "a", "answer": "#### 1", "category": None},
        {"prompt": "b", "question": None},
        {"turns": ["c", "d"], "category": "writing", "reference": [1, 2]},
    ]
    problems = read_prompts(written(tmp_path, "\n\n".join(map(json.dumps, rows)).encode()))
    assert [(p.turns, p.answer, p.category) for p in problems] == [
        (("a",), "#### 1", None),
        (("b",), None, None),
        (("c", "d"), None, "writing"),
    ]
    assert problems[2].text == "c"


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    """str.splitlines cut there; JSON allows these characters in strings."""
    text = "a\u2028b\u2029c\x85d"
    path = written(tmp_path, json.dumps({"question": text}, ensure_ascii=False).encode() + b"\r\n" + GOOD)
    assert [p.text for p in read_prompts(path)] == [text, "a"]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    assert [p.text for p in read_prompts(written(tmp_path, b"\xef\xbb\xbf" + GOOD))] == ["a"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GOOD + '{"question": "caf\xe9"}'.encode("latin-1"), r":2: not UTF-8 \(byte 18 is 0xe9\)"),
        ('{"question": "a"}\n'.encode("utf-16"), r":1: not UTF-8 \(byte 1 is 0xff\)"),
        (gzip.compress(GOOD, mtime=0), r"data.jsonl' is compressed by gzip; convert it to a JSONL file"),
        (b"\x28\xb5\x2f\xfd\x04", r"data.jsonl' is compressed by zstd; convert it to a JSONL file"),
        (b"PAR1\x15\x00", r"data.jsonl' is a Parquet file; convert it to a JSONL file"),
        (GOOD + b'{"question": 5}', r":2: 'question' is 5; text is expected"),
        (GOOD + b'{"question": ["a"]}', r""":2: 'question' is \["a"\]; text is expected"""),
        (GOOD + b'{"question": ""}', r""":2: 'question' is ""; text is expected"""),
        (GOOD + b'{"question": null}', r":2: no 'question', 'prompt' or 'turns'; keys are \"question\""),
        (GOOD + b'{"question": "a", "answer": 18}', ":2: 'answer' is 18; text is expected"),
        (GOOD + b'{"question": "a", "category": ["x"]}', ":2: 'category' is"),
        (GOOD + b'{"turns": "abc"}', r""":2: 'turns' is "abc"; a list of texts"""),
        (GOOD + b'{"turns": []}', r":2: 'turns' is \[\]; a list of texts"),
        (GOOD + b'{"turns": [["a", "b"]]}', r":2: 'turns\[0\]' is \[\"a\", \"b\"\]; text is expected"),
        (GOOD + b'{"turns": ["a", {"role": "user"}]}', r":2: 'turns\[1\]' is \{"),
        (GOOD + b'{"turns": ["a", null]}', r":2: 'turns\[1\]' is null"),
        (GOOD + b'{"question": "\\ud83d"}', ":2: 'question' holds half a surrogate pair at character 1"),
        (GOOD + b"[" * 100_000, ":2: brackets are nested too deep"),
        (GOOD + b'{"question": ' + b"7" * 5000 + b"}", ":2: not a line of JSON"),
        (GOOD + b"null", ":2: an object is expected, not null"),
        (GOOD + b'{"text": "x"' + b', "y": 1' * 3 + b"}", ':2: no .* keys are "text", "y"'),
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_line_without_a_prompt_is_one_sentence_with_file_and_line(content, says, tmp_path):
    path = written(tmp_path, content)
    with pytest.raises(SpecDecError, match=says) as caught:
        read_prompts(path)
    assert "data.jsonl" in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))
    assert "\n" not in str(caught.value)


def test_a_huge_line_is_read_and_a_huge_fault_is_short(tmp_path):
    many = {f"key {i}": "x" * 1000 for i in range(1000)}
    path = written(tmp_path, json.dumps({"question": "a" * 10**7}).encode() + b"\n" + json.dumps(many).encode())
    with pytest.raises(SpecDecError, match=r":2: no 'question'.*, \.\.\.$"):
        read_prompts(path)
    assert len(read_prompts(path, limit=1)[0].text) == 10**7


def test_folders_missing_files_and_negative_limits_are_refused(tmp_path):
    with pytest.raises(SpecDecError, match="is a folder"):
        read_prompts(tmp_path)
    with pytest.raises(SpecDecError, match="no such file"):
        read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(SpecDecError, match="limit=-1"):
        read_prompts(written(tmp_path, GOOD), -1)


def test_a_pipe_can_be_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(GOOD,))
    writer.start()
    assert [record for _, record in json_lines(path)] == [{"question": "a"}]
    writer.join()


@pytest.mark.parametrize(
    ("name", "count", "turns"),
    [("mt_bench/question.jsonl", 80, 2), ("spec_bench/question.jsonl", 480, 2), ("humaneval/HumanEval.jsonl", 164, 1)],
)
def test_published_files_are_read(name, count, turns, shared_data: Path):
    problems = read_prompts(shared_data / name)
    assert len(problems) == count
    assert max(len(problem.turns) for problem in problems) == turns


# answers


TRANSCRIPTS = [  # text, strict, last number
    ("6*7 = 42\n#### 42", 42, 42),
    ("The answer is 42", None, 42),
    ("The answer is 42.", None, 42),
    ("I do not know.", None, None),
    ("", None, None),
    ("####", None, None),
    ("#### none, but 7 before", None, 7),
    # thousands
    ("#### 1,234", 1234, 1234),
    ("#### 1,450,000", 1450000, 1450000),
    ("She has 1, 2, or 3", None, 3),
    ("the pair 1,2", None, 2),
    ("1,2345", None, 2345),
    # currency and units
    ("#### $1,234.50", "1234.5", "1234.5"),
    ("#### 18 dollars", 18, 18),
    ("#### €18 a day for 5 days", 18, 5),
    ("#### 25%", 25, 25),
    ("#### 12km", 12, 12),
    # decimals
    ("#### 18.00", 18, 18),
    ("#### 3.5", "3.5", "3.5"),
    ("#### .5", "0.5", "0.5"),
    ("#### 18.", 18, 18),
    # negative numbers, and minus signs that subtract
    ("#### -5", -5, -5),
    ("#### −5", -5, -5),
    ("#### -$5", -5, -5),
    ("#### $-5", -5, -5),
    ("2-7 = <<2-7=-5>>-5", None, -5),
    ("10-3", None, 3),
    ("10 - 3", None, 3),
    ("(4+6)-3", None, 3),
    ("20%-3", None, 3),
    # several markers: the first that has a number
    ("#### 1\nno, wait\n#### 2", 1, 2),
    ("#### ?\n#### 2", 2, 2),
    ("####2 and ####3", 2, 3),
    # a number on the next line is not after the marker
    ("####\n9", None, 9),
]


@pytest.mark.parametrize(("text", "strict", "last"), TRANSCRIPTS)
def test_numbers_of_a_transcript(text, strict, last):
    assert final_number(text) == (None if strict is None else Decimal(strict))
    assert last_number(text) == (None if last is None else Decimal(last))


@pytest.mark.parametrize(
    ("text", "answer", "strict", "last"),
    [
        ("#### 18", "9*2 = 18\n#### 18", True, True),
        ("#### 17", "#### 18", False, False),
        ("so it is $18.00.", "#### 18", False, True),
        ("#### 18, in 2 days", "#### 18", True, False),
        ("no idea", "#### 18", False, False),
        ("#### 70000", "#### 70,000", True, True),
        ("no idea", "no marker either", False, False),  # nothing equals nothing, and still is no answer
    ],
)
def test_correct_means_the_same_value(text, answer, strict, last):
    assert (is_correct(text, answer), is_correct(text, answer, "last_number")) == (strict, last)


@pytest.mark.parametrize(
    ("correct", "problems", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval(correct, problems, low, high):
    """The last row is the example of Newcombe (1998), method 3."""
    assert wilson_interval(correct, problems) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [(0, 0, 1.0), (1, 0, 1.0), (1, 1, 1.0), (0, 5, 2 / 32), (5, 1, 2 * (1 + 6) / 64), (3, 3, 1.0)],
)
def test_mcnemar_is_the_two_sided_sign_test_of_the_disagreements(only_first, only_second, p_value):
    assert mcnemar_p(only_first, only_second) == p_value
