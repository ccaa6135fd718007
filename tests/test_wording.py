"""Errors say what is wrong in this server's words, never in pydantic's; docstrings begin with a subject or a verb, and
those of classes with what the class is."""

import ast
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from specdec.errors import counted
from specdec.serving.http.faults import invalid_body
from specdec.serving.openai.protocol import ChatRequest, CompletionRequest, ResponsesRequest

from package_files import parse_file

MESSAGES = [{"role": "user", "content": "x"}]
CASES = {
    "text": ({"temperature": "hot"}, "temperature='hot': a number is expected"),
    "bool": ({"max_tokens": True}, "max_tokens=True: an integer is expected"),
    "half": ({"seed": 1.5}, "seed=1.5: an integer is expected"),
    "switch": ({"stream": "yes"}, "stream='yes': true or false is expected"),
    "union": ({"stop": 3}, "stop=3: a string or a list is expected"),
    "word": ({"tool_choice": "all"}, "tool_choice='all': 'none', 'auto' or 'required' or an object is expected"),
    "one value": ({"use_beam_search": True}, "use_beam_search=True: false is expected"),
    "own reason": ({"length_penalty": 2}, "length_penalty=2: 1 is expected: other values belong to beam search"),
    "list": ({"messages": []}, "messages=[]: at least 1 item is expected"),
    "object": ({"messages": [3]}, "messages[0]=3: an object is expected"),
    "nothing": ({"logits_processors": []}, "logits_processors=[]: null is expected"),
    "other tool": ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type='custom': 'function' is expected"),
    "other choice": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type='allowed_tools': 'function' is expected",
    ),
    "half a choice": ({"tool_choice": {"type": "function"}}, "tool_choice.function is missing; it is required"),
    "switch or object": ({"speculation": {"topk": "2"}}, "speculation.topk='2': an integer is expected"),
    "deep": ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage=1: true or false is expected"),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_of_bodies_are_in_plain_words(case):
    change, said = CASES[case]
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"messages": MESSAGES} | change)
    assert str(invalid_body(raised.value.errors())).startswith(said)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest])
@pytest.mark.parametrize("value", [None, 3, 2.5, "x", True, [], [3], {}, {"x": 1}, float("nan")], ids=str)
def test_no_value_of_any_field_is_refused_in_pydantics_words(model, value):
    for name, field in model.model_fields.items():
        try:
            model.model_validate({field.alias or name: value})
        except ValidationError as error:
            places = [each for each in error.errors() if each["loc"][:1] == (name,)]
            message = str(invalid_body(places)).lower() if places else ""
        assert "input should" not in message and "valid " not in message and "value error" not in message, message


ROOT = Path(__file__).resolve().parent.parent
READ_FOLDERS = ("specdec", "attention", "kvcache", "draft_models", "examples", "tools", "bench", "tests")
NO_BEGINNING = r"\s*(Of|As|By|Where|Likewise|The same)\b"
"""Without a subject and a verb, a sentence has to be read twice."""


FIELD = r"`?[a-z_]+`?( \[[^\]]*\])?(, (and )?`?[a-z_]+`?( \[[^\]]*\])?)*:"
"""A field and a colon: a docstring of a class that begins so never says what the class is."""


def begun_wrongly(text: str) -> list[str]:
    """Docstrings of modules, classes, functions and attributes, and any other string that is a statement."""
    if not re.search(rf"[\"']{NO_BEGINNING}", text):
        return []  # most files: parsing them takes a second
    statements = (node.value for node in ast.walk(parse_file(text)) if isinstance(node, ast.Expr))
    strings = (node.value for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [string for string in strings if re.match(NO_BEGINNING, string)]


def classes_begun_with_a_field(text: str) -> list[str]:
    if not re.search(rf':\n\s+"""{FIELD}', text):
        return []  # most files, again
    classes = (node for node in ast.walk(parse_file(text)) if isinstance(node, ast.ClassDef))
    return [node.name for node in classes if re.match(FIELD, ast.get_docstring(node) or "")]


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout")
def test_no_docstring_begins_without_a_subject_or_a_verb():
    seeded = '"""Rows."""\nSIZE = 3\n"""Of rows."""\ndef f():\n    """The same."""\n'
    assert begun_wrongly(seeded) == ["Of rows.", "The same."]
    texts = [path.read_text("utf-8") for folder in READ_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(texts) > 300
    assert [string for text in texts for string in begun_wrongly(text)] == []


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout")
def test_no_docstring_of_a_class_begins_with_a_field():
    seeded = 'class A:\n    """rows [B]: those seated. size: bytes."""\nclass B:\n    """Rows. size: bytes."""\n'
    assert classes_begun_with_a_field(seeded) == ["A"]
    texts = [path.read_text("utf-8") for folder in READ_FOLDERS[:-1] for path in (ROOT / folder).rglob("*.py")]
    assert [name for text in texts for name in classes_begun_with_a_field(text)] == []


OF_OTHERS = {"MtpModel", "modeling_layers", "threading", "Condition", "traceparent", "x_to_y", "_len"}
OF_OTHERS |= {"use_ordered_embeddings"}
"""Names in backticks of another library, a standard, or a pattern."""


def test_names_in_backticks_are_in_the_code():
    """A renamed class kept its old name in other files' docstrings: `LayerCache`."""
    texts = [path.read_text("utf-8") for folder in READ_FOLDERS[:4] for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in texts for found in re.findall(r"`([A-Za-z_][\w.]*)`", text) for name in found.split(".")}
    files = {part for folder in READ_FOLDERS[:4] for path in (ROOT / folder).rglob("*.py") for part in path.parts}
    code = {word for text in texts for word in re.findall(r"\w+", re.sub(r"`[^`\n]*`", "", text))}
    known = code | {Path(file).stem for file in files} | OF_OTHERS
    assert len(named) > 500 and sorted(name for name in named if name and name not in known) == []


def test_a_count_of_one_has_a_singular_noun():
    assert [counted(count, "prompt") for count in (0, 1, 2)] == ["0 prompts", "1 prompt", "2 prompts"]
    assert [counted(count, "process", "processes") for count in (1, 2)] == ["1 process", "2 processes"]
