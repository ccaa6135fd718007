"""A hostile grammar fails its own request and nothing else: it costs no process, no minute and no gigabyte."""

import copy
import gc
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.errors import ConfigError
from specdec.sampling.grammars import grammar, grammar_trial, grammar_worker
from specdec.sampling.grammars.grammar import Grammars
from specdec.sampling.grammars.grammar_bounds import compiles_in_linear_time, require_bounded

from marks import deep_cases, examples

EOS = 256  # of byte_tokenizer
STEPS = 6


def nested(key: str, depth: int, wrap: Callable[[str], str] = "[{}]".format) -> str:
    """JSON text of a schema in a schema in a schema: never built as an object, which would overflow Python's stack."""
    before, after = wrap("|").split("|")
    return ('{"' + key + '": ' + before) * depth + '{"type": "string"}' + (after + "}") * depth


def chained(count: int, link: Callable[[dict[str, Any]], dict[str, Any]] = lambda ref: ref) -> str:
    """References to references."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "string"}}})


def doubled(levels: int, key: str) -> str:
    """Two references to a schema of two references to ...: 2 ** levels, were they written out."""
    return chained(levels, lambda ref: {key: [ref, ref]})


def inside(depth: int, value: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        value = {"allOf": [value]}
    return value


def far_patterns(count: int) -> str:
    return json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(2, count)]})


PLAIN = "{}".format
SCHEMAS = {
    "4000 chained refs": chained(4000),
    "1999 chained refs": chained(1999),
    "1999 refs in allOf 40 deep": chained(1999, lambda ref: inside(40, ref)),
    "1999 refs in anyOf": chained(1999, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "a ref to itself": '{"$ref": "#"}',
    "refs in a circle": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    "10000 nested allOf": nested("allOf", 10000),
    "10000 nested anyOf": nested("anyOf", 10000),
    "10000 nested items": nested("items", 10000, PLAIN),
    "10000 nested not": nested("not", 10000, PLAIN),
    "10000 nested properties": nested("properties", 10000, lambda inner: '{"a": ' + inner + "}"),
    "100000 nested arrays": "[" * 100000 + "]" * 100000,
    "a const 900 deep": '{"const": ' + "[" * 900 + "]" * 900 + "}",
    "allOf of allOf of ...": doubled(26, "allOf"),
    "anyOf of anyOf of ...": doubled(26, "anyOf"),
    "products of anyOf": json.dumps({"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(40)]}),
    "200 patterns at once": far_patterns(200),
    "a pattern of 5000 groups": json.dumps({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}),
    "20000 properties": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(20000)}}),
    "a long enum": json.dumps({"enum": ["v" * 900_000]}),
    "a schema of 2 MB": json.dumps({"description": "x" * 2_000_000}),
    "divisors": json.dumps({"type": "integer", "allOf": [{"multipleOf": p} for p in (99991, 99989, 99971)]}),
    "a number of 4000 digits": '{"type": "integer", "minimum": ' + "9" * 4000 + "}",
    "a file": '{"$ref": "file:///etc/passwd"}',
}
REGEXES = {
    "10000 groups": "(" * 10000 + "a" + ")" * 10000,
    "3000 stars": "(?:" * 3000 + "a" + ")*" * 3000,
    "repeats of repeats": "(a{1000}){1000}",
    "a million times": "a{1000000}",
    "3 MB": "a" * 3_000_000,
    "a literal": "a" * 60000,
    "alternatives": "|".join(f"w{i}" for i in range(9000)),
    "states": "(a|b)*a(a|b){30}",
    "brackets": "[" * 10000,
    "sets of sets": "[" * 2000 + "a" + "]" * 2000,
    "half a pair": "\ud800",
    "flags": "(?i)" * 5000 + "a",
    "nothing or nothing": "|" * 60000,
    "backslashes": "\\" * 50001,
}
HOSTILE = {name: ("json_schema", text) for name, text in SCHEMAS.items()}
HOSTILE |= {f"regex: {name}": ("regex", text) for name, text in REGEXES.items()}
"""Schemas and regular expressions: (setting of SamplingParams, value)."""


@pytest.fixture(scope="module")
def grammars(byte_tokenizer):
    return Grammars(byte_tokenizer, 300)


def start(grammars, **params):
    return grammars.start(SamplingParams(**params), {EOS}, {EOS})


def walk(state):
    """A few tokens of a text, with every mask."""
    for _ in range(STEPS):
        allowed = [token for token in range(EOS) if state.mask[token // 32] >> token % 32 & 1]
        if not allowed:
            return
        state = state.after(allowed[len(allowed) // 2])
        if state is None:  # the text cannot go on: an error of this request
            return


@deep_cases("regex: repeats of repeats")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_followed_and_the_process_lives(name, grammars, monkeypatch):
    """On the code before, a chain of 4,000 references ended the process with SIGSEGV."""
    monkeypatch.setattr(grammar_trial, "SECONDS", examples(10, 50) / 100)
    kind, text = HOSTILE[name]
    try:
        walk(start(grammars, **{kind: text}))
    except ConfigError as error:
        said = str(error)
        assert said.startswith((kind, "a grammar")) and "\n" not in said and len(said) < 400


def test_a_grammar_after_hostile_ones_is_followed(grammars, monkeypatch):
    monkeypatch.setattr(grammar_trial, "SECONDS", 0.3)  # what hangs is ended sooner than in service
    with pytest.raises(ConfigError, match="more than"):
        start(grammars, json_schema=far_patterns(60))
    assert start(grammars, regex="[ab]c").forced == ()
    state = start(grammars, json_schema={"type": "string", "pattern": "^x{3}$"})
    assert state.forced[:4] == start(grammars, choice=['"xxx"']).forced[:4]


def test_bounds_are_looked_at_before_the_library_sees_a_grammar(byte_tokenizer, monkeypatch):
    def never(*_):
        raise AssertionError("the library was asked")

    grammars = Grammars(byte_tokenizer, 300)
    start(grammars, choice=["a"])
    monkeypatch.setattr(grammars._library, "compile", never)
    for params, figure in (
        ({"json_schema": chained(2001)}, "2000 references"),
        ({"json_schema": nested("allOf", 60)}, "100 is allowed"),
        ({"json_schema": json.dumps({"title": "x" * (1 << 20)})}, "1048576 are allowed"),
        ({"regex": "(" * 101 + "a" + ")" * 101}, "100 is allowed"),
        ({"regex": "a" * ((1 << 16) + 1)}, "65536 are allowed"),
        ({"choice": ["a" * 200_000, "b" * 100_000]}, "262144 are allowed"),
        ({"choice": [str(i) for i in range(20000)]}, "16384 are allowed"),
        ({"choice": ["a", "\udfff"]}, "half a surrogate pair"),
    ):
        with pytest.raises(ConfigError, match=figure):
            start(grammars, **params)


def test_brackets_in_strings_and_classes_are_no_depth():
    require_bounded("json_schema", json.dumps({"const": "[" * 1000 + '"' + "{" * 1000}))
    require_bounded("regex", "[(]" * 200 + "\\(" * 200 + "[]((((]" * 100)


def test_a_reference_to_another_place_is_refused_and_never_fetched(grammars):
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"//127.0.0.1:{server.getsockname()[1]}"
        for schema in (
            {"$ref": f"http:{here}/a.json"},
            {"$ref": f"{here}/b.json"},
            {"properties": {"x": {"items": {"$ref": f"http:{here}/c.json#/d"}}}},
            {"$id": f"http:{here}/", "$ref": "d.json"},
            {"$dynamicRef": f"http:{here}/f.json"},
            {"$ref": "file:///etc/hostname"},
            {"$ref": "file:/etc/hostname"},
        ):
            with pytest.raises(ConfigError, match="json_schema cannot be followed"):
                start(grammars, json_schema=schema)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()


def test_a_killed_worker_fails_one_request_and_starts_again(byte_tokenizer):
    grammars = Grammars(byte_tokenizer, 300)
    start(grammars, regex="a+")
    trial = grammars._library._trial
    first = trial._worker
    first.kill()
    first.wait()
    assert start(grammars, regex="b+") is not None and trial._worker is not first
    trial._worker.stdin.close()
    with pytest.raises((ConfigError, ValueError)):
        start(grammars, regex="c+")
    assert start(grammars, regex="d+") is not None
    worker = trial._worker
    del grammars, trial
    gc.collect()
    assert worker.poll() is not None, "it ends with those that it served"


def test_a_worker_gives_back_the_memory_of_a_large_grammar(byte_tokenizer, monkeypatch):
    grammars = Grammars(byte_tokenizer, 300)
    start(grammars, regex="a+")
    trial = grammars._library._trial
    worker = trial._worker
    assert start(grammars, regex="b+") is not None and trial._worker is worker, "a small one keeps it"
    monkeypatch.setattr(grammar_trial, "MAX_WORKER_BYTES", -1)
    assert start(grammars, regex="c+") is not None
    assert worker.poll() is not None and trial._worker is None, "it has ended"
    assert start(grammars, regex="d+") is not None, "in another worker"


def test_grammars_that_are_not_plain_are_compiled_one_at_a_time(byte_tokenizer, monkeypatch):
    """Four at once took the processors from the engine, here and in the worker, and their memory came at once."""
    grammars, alone = Grammars(byte_tokenizer, 300), []
    start(grammars, json_object=True)
    library = grammars._library
    here, there = grammar.with_large_stack, library._trial.run
    monkeypatch.setattr(
        grammar, "with_large_stack", lambda work: alone.append(library._one_at_a_time.locked()) or here(work)
    )
    monkeypatch.setattr(
        library._trial, "run", lambda text: alone.append(library._one_at_a_time.locked()) or there(text)
    )
    start(grammars, regex="a+")
    start(grammars, choice=["yes", "no"])
    assert alone == [True, True, False] and not library._one_at_a_time.locked()
    ours, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, library._trial._worker.pid))
    assert its == min(19, ours + grammar_worker.NICE)


def test_plain_grammars_need_no_worker(byte_tokenizer):
    grammars = Grammars(byte_tokenizer, 300)
    start(grammars, choice=["yes", "no"])
    start(grammars, json_object=True)
    start(grammars, json_schema={"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1]}}}})
    assert grammars._library._trial._worker is None
    inner = {"format": "date"}
    held = ({"items": inner}, {"additionalProperties": inner}, {"properties": {"a": inner}})
    for schema in ({"pattern": "a"}, {"$ref": "#"}, {"allOf": []}, *held):
        assert not compiles_in_linear_time("json_schema", json.dumps(schema))
    nested = '{"items": ' * 20 + "{}" + "}" * 20  # of plain keys alone, but deep
    assert not compiles_in_linear_time("json_schema", nested)
    assert not compiles_in_linear_time("choice", ("a" * 9000,))


def test_brackets_that_close_nothing_hide_no_depth():
    with pytest.raises(ConfigError, match="it is nested 150 deep"):
        require_bounded("regex", ")" * 150 + "(" * 150)


def test_a_grammar_that_no_text_follows_is_refused_at_once(grammars):
    """It was accepted, and its request ended as aborted, which the server answered with 503 "stopping"."""
    with pytest.raises(ConfigError, match="json_schema cannot be followed"):
        start(grammars, json_schema={"$ref": "#"})


def test_kept_grammars_are_bounded_in_bytes(byte_tokenizer, monkeypatch):
    """It was bounded in entries: 256 schemas of 4 MiB stayed."""
    monkeypatch.setattr(grammar, "BYTES_PER_GRAMMAR", 0)
    monkeypatch.setattr(grammar, "COMPILED_BYTES", 40 * grammar.BYTES_PER_CHAR)
    grammars, compiled, compile = Grammars(byte_tokenizer, 300), [], grammar.GrammarLibrary.compile
    monkeypatch.setattr(grammar.GrammarLibrary, "compile", lambda *args: compiled.append(args[2]) or compile(*args))
    for _ in range(2):
        start(grammars, choice=["abc"])
    assert compiled == [("abc",)]
    for text in ("abd", "abe", "abf", "abg", "abh", "abi", "abj", "abk", "abl", "abm", "abn", "abo", "abp", "abq"):
        start(grammars, choice=[text])
        assert 0 < grammars.kept_bytes <= 40 * grammar.BYTES_PER_CHAR
    for text in [*"abcdefghijklmnop"]:
        start(grammars, choice=["abc"])  # used again and again
        start(grammars, choice=["ac" + text])
    assert compiled.count(("abc",)) == 2
    start(grammars, choice=["a" * 100])  # larger than all the room: served, and not kept
    assert grammars.kept_bytes == 0


def test_short_grammars_count_with_what_each_takes_whatever_its_length(byte_tokenizer):
    """Only characters counted: 12,000 short patterns, 500 MB of memory, were kept where 16 MiB are meant."""
    grammars = Grammars(byte_tokenizer, 300)
    for number in range(3):
        start(grammars, choice=[f"{number}"])
    assert len(grammars._kept) == 3 and grammars.kept_bytes > 3 * 44_000


def test_a_grammar_leaves_the_tokenizer_as_it_is(byte_tokenizer):
    own = copy.deepcopy(byte_tokenizer)
    own.backend_tokenizer.enable_padding()
    own.backend_tokenizer.enable_truncation(2)
    start(Grammars(own, 300), choice=["abc"])
    assert own.backend_tokenizer.padding is not None and own.backend_tokenizer.truncation is not None
