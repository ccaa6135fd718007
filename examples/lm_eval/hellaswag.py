"""What lm-evaluation-harness reads of a line of HellaSwag: the text so far, and the four endings."""

import re
from typing import Any


def process_docs(dataset: Any) -> Any:
    """Adds `query` and `choices` to each line, without WikiHow's marks in brackets."""
    return dataset.map(_question)


def _question(line: dict[str, Any]) -> dict[str, Any]:
    context = f"{line['ctx_a']} {line['ctx_b'].capitalize()}"
    return {
        "query": _cleaned(f"{line['activity_label']}: {context}"),
        "choices": [_cleaned(ending) for ending in line["endings"]],
        "label": int(line["label"]),
    }


def _cleaned(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
