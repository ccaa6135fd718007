"""How answers are read and counted: tables that a reader can check by eye."""

from decimal import Decimal

import pytest

from specdec.evaluation.gsm8k_report import final_number, is_correct, last_number, mcnemar_p, wilson_interval

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
