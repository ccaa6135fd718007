"""What the benchmark reads, grades, and refuses to print."""

import json

import pytest

from specdec import SpecDecError
from specdec.evaluation.contest import Contestant, require_parity
from specdec.text.prompt_files import read_prompts


def test_prompts_come_from_the_three_usual_keys(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": "a", "answer": "#### 1"}, {"prompt": "b"}, {"turns": ["c", "d"]}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(p.text, p.answer) for p in read_prompts(path)] == [("a", "#### 1"), ("b", None), ("c", None)]
    assert len(read_prompts(path, limit=2)) == 2


def test_a_line_without_a_prompt_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a"}\n{"text": "b"}\n')
    with pytest.raises(SpecDecError, match=r"data.jsonl:2.*text"):
        read_prompts(path)


def test_no_figures_when_an_output_differs():
    def contestant(name, outputs):
        made = Contestant(name, lambda prompts: prompts)
        made.outputs = outputs
        return made

    plain = contestant("specdec, no drafter", [[1, 2], [3, 4]])
    require_parity([plain, contestant("specdec, x", [[1, 2], [3, 4]])])
    with pytest.raises(SpecDecError, match="prompt 1 differs from plain decoding at token 1"):
        require_parity([plain, contestant("specdec, x", [[1, 2], [3, 5]])])


@pytest.mark.parametrize(
    ("line", "says"), [("{'question': 1}", "not a line of JSON"), ("[1, 2]", "an object is expected")]
)
def test_a_line_that_is_no_record_is_named(line, says, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a"}\n' + line + "\n")
    with pytest.raises(SpecDecError, match=f"data.jsonl:2: {says}"):
        read_prompts(path)
