"""What every client script shares: features by name, each run and reported as one line of JSON.

python tools/clients/use_litellm.py http://127.0.0.1:8000/v1 tiny-gemma4
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
NUMBER = {
    "type": "object",
    "properties": {"number": {"enum": [7, 8]}, "unit": {"enum": ["apples", "pens"]}},
    "required": ["number", "unit"],
    "additionalProperties": False,
}

Check = Callable[[str, str], Any]


class Answer(BaseModel):
    """How many there are."""

    model_config = ConfigDict(extra="forbid")  # or a small model adds fields until it is cut off
    number: Literal[7, 8]


def run(**features: Check) -> None:
    """Each feature is called with the URL (with /v1) and the model; what it raises is why it does not work."""
    url, model = sys.argv[1:3]
    for name, check in features.items():
        try:
            done = check(url, model)
            if inspect.iscoroutine(done):
                asyncio.run(done)
            reason = None
        except Exception as error:  # whatever a client raises is the result
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(json.dumps({"feature": name, "works": reason is None, "reason": reason}), flush=True)
