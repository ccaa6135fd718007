"""What is wrong with a value, in this project's words: pydantic's own are for its users, not for a server's clients."""

from collections.abc import Mapping, Sequence
from typing import Any

EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "mapping_type": "an object",
    "string_unicode": "a string of whole characters",
    "dict_attributes_type": "an object",
}
"""By pydantic's type of error."""
LITERALS = {"True": "true", "False": "false", "None": "null"}


def expected(error: Mapping[str, Any]) -> str:
    """What one of pydantic's errors says was expected: "a number"."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in EXPECTED:
        return EXPECTED[kind]
    if kind in ("literal_error", "enum"):
        said = str(context.get("expected", ""))
        return LITERALS.get(said, said)
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        what = "characters" if kind.startswith("string") else "item"
        limit = f"at least {least}" if least is not None else f"at most {most}"
        return f"{limit} {what}" + ("s" if what == "item" and limit[-2:] != " 1" else "")
    return ""


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """Of all that one place might have been: "a number or null is expected"; else the reason of a check of ours."""
    wanted = list(dict.fromkeys(filter(None, map(expected, errors))))
    if wanted:
        return f"{' or '.join(wanted)} is expected"
    return str(errors[0].get("ctx", {}).get("error", "")) or "this value is not allowed"
