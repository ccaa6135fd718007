"""From transcripts to figures: two ways to read an answer, and the statistics of two runs on the same problems.

    strict       the number after the first `####` that has one: what the model marked as its answer
    last_number  the last number in the text, marked or not

The first marker counts, as in GSM8K's own scorer and lm-eval's strict-match: what a model writes after its answer is
no second try. Numbers are compared by value: "$1,234.50" is 1234.5, "18.00" and "18 dollars" are 18, "25%" is 25.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal

# a minus after a digit, a word or a bracket subtracts: "10-3" ends in 3, "= -3" in -3
NUMBER = r"[$€£]?((?<![\w)%])[-−])?[$€£]?(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
ANY_NUMBER = re.compile(NUMBER)
MARKED_NUMBER = re.compile("#### *" + NUMBER)
Z_95 = 1.959963984540054


def final_number(text: str) -> Decimal | None:
    """The number after the first `####` that has one."""
    found = MARKED_NUMBER.search(text)
    return _value(*found.groups(default="")) if found else None


def last_number(text: str) -> Decimal | None:
    """The last number anywhere in the text."""
    found = ANY_NUMBER.findall(text)
    return _value(*found[-1]) if found else None


SCORES: dict[str, Callable[[str], Decimal | None]] = {"strict": final_number, "last_number": last_number}


def is_correct(text: str, answer: str, score: str = "strict") -> bool:
    """Whether the number read from `text` is the one that the reference `answer` marks; no number is wrong."""
    number = SCORES[score](text)
    return number is not None and number == final_number(answer)


def wilson_interval(correct: int, problems: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share."""
    share, z2 = correct / problems, Z_95**2
    middle = share + z2 / (2 * problems)
    half = Z_95 * math.sqrt(share * (1 - share) / problems + z2 / (4 * problems**2))
    scale = 1 + z2 / problems
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """How likely chance splits the problems that only one of two runs solved so unevenly: exact, two-sided."""
    changed = only_first + only_second
    tail = sum(math.comb(changed, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def _value(sign: str, digits: str) -> Decimal:
    value = Decimal(digits.replace(",", ""))
    return -value if sign else value
