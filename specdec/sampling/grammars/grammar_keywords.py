"""Keywords of a JSON schema whose value restricts nothing, such as Zod's "propertyNames": {"type": "string"}.

The library refuses each keyword that it does not implement, whatever its value. This file knows where a schema has
schemas, and where it has data.
"""

from typing import Any

ANYTHING: tuple[Any, ...] = (True, {})
IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (*ANYTHING, {"type": "string"}),
    "unevaluatedItems": ANYTHING,
    "unevaluatedProperties": ANYTHING,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
"""Values with which a keyword restricts nothing."""
DATA = frozenset({"const", "enum"})
SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def drop_idle_keywords(schema: Any) -> None:
    """Remove, in place, keywords that restrict nothing from a schema and all schemas in it."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, dict):
            continue
        for key in [key for key, value in one.items() if value in IDLE.get(key, ())]:
            del one[key]
        for key, value in one.items():
            if key in SCHEMAS_BY_NAME and isinstance(value, dict):
                left += value.values()
            elif key not in DATA:
                left.append(value)
