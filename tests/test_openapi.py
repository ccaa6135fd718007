"""/openapi.json says all that may be asked and answered, and answers are what it says; found with schemathesis, which
`test_schemathesis.py` runs where it is installed."""

import json
import threading

import jsonschema
import pytest
from fastapi.testclient import TestClient

from specdec import Engine, EngineConfig
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.openai import openapi
from specdec.serving.openai.openapi import BOUNDS
from specdec.serving.openai.protocol import MAX_MESSAGES
from specdec.serving.server_settings import ServeSettings

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
KEY = {"Authorization": "Bearer k"}
MESSAGES = [{"role": "user", "content": "Tom has 3 apples. How many?"}]
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
COMPLETION = {"prompt": "Tom has", "max_tokens": 4, "temperature": 0}
RESPONSE = {"input": "Tom has 3 apples. How many?", "max_output_tokens": 4, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def client():
    config = EngineConfig(max_batch_size=2, max_model_len=512)
    settings = ServeSettings(model_names=["tiny"], api_keys={"a": "k"}, max_body_bytes=2 << 20)
    with (
        Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", config=config) as engine,
        TestClient(create_app(AsyncEngine(engine), settings), headers=KEY) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def test_the_document_is_made_off_the_loop(client, monkeypatch):
    """It takes most of a second, in which all streams stood still."""
    threads, made = [], openapi.get_openapi
    monkeypatch.setattr(
        openapi, "get_openapi", lambda **given: (threads.append(threading.current_thread().name), made(**given))[1]
    )
    served = client.app.state.serve
    other = TestClient(create_app(served.engine, served.settings))
    assert [other.get("/openapi.json").status_code for _ in range(2)] == [200, 200]
    [name] = threads
    assert name.startswith("asyncio_"), "a thread of the loop's executor, not the loop's own"


def require_said(document, answer, method, path):
    """The status, the type, the headers and the body of an answer are said of its operation."""
    said = document["paths"][path][method]["responses"]
    assert str(answer.status_code) in said, f"{answer.status_code} is not said of {method} {path}"
    said = said[str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in said["content"]
    assert all(name in answer.headers for name, header in said.get("headers", {}).items() if header["required"])
    if kind == "application/json":
        schema = said["content"][kind]["schema"] | {"components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


def test_every_operation_says_its_answers_and_none_that_it_never_gives(document):
    """All said 422 and nothing else but 200, as any JSON; `/metrics` too."""
    jsonschema.Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})
    found = [(method, path) for path, methods in document["paths"].items() for method in methods]
    assert len(found) == 16
    for method, path in found:
        entry = document["paths"][path][method]
        assert "422" not in entry["responses"] and all(said["content"] for said in entry["responses"].values())
        guarded = path.startswith(("/v1/", "/tokenize", "/detokenize"))
        assert ("401" in entry["responses"]) == guarded == ("security" in entry)
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    metrics = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert list(metrics) == ["text/plain"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert list(chat) == ["application/json", "text/event-stream"]
    text = json.dumps(document)
    assert all(f"{name}" not in text for name in ("HTTPValidationError", '"ValidationError"'))


def test_without_a_key_there_is_no_security_scheme_and_a_root_path_is_where_the_server_is(client):
    settings = ServeSettings(model_names=["a", "b"], root_path="/llm", allow_priority=True)
    bare = TestClient(create_app(client.app.state.serve.engine, settings)).get("/openapi.json").json()
    assert "securitySchemes" not in bare["components"] and bare["servers"] == [{"url": "/llm"}]
    post = bare["paths"]["/v1/completions"]["post"]
    assert "security" not in post and "401" not in post["responses"]
    fields = bare["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"]["enum"] == ["a", "b", None] and fields["priority"]["minimum"] < 0
    assert {"type": "string"} in fields["prompt"]["anyOf"]


ASKED = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with all": (
        "/v1/chat/completions",
        CHAT
        | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "n": 2}
        | {"speculation": {"show_drafts": True}},
    ),
    "chat with a call": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    "chat streamed": ("/v1/chat/completions", CHAT | {"stream": True}),
    "chat without JSON": ("/v1/chat/completions", b"{"),
    "chat of no model": ("/v1/chat/completions", CHAT | {"model": "other"}),
    "chat that is too long": ("/v1/chat/completions", CHAT | {"max_tokens": 5000}),
    "chat that is too large": ("/v1/chat/completions", b"[" * (3 << 20)),
    "completion": ("/v1/completions", COMPLETION),
    "completion with all": (
        "/v1/completions",
        COMPLETION
        | {"prompt": ["a", "Tom has"], "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True}
        | {"speculation": {"show_drafts": True}},
    ),
    "completion streamed": ("/v1/completions", COMPLETION | {"stream": True}),
    "response": ("/v1/responses", RESPONSE),
    "response with all": (
        "/v1/responses",
        RESPONSE
        | {"top_logprobs": 2, "instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
    ),
    "response with a call": (
        "/v1/responses",
        RESPONSE
        | {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required", "max_output_tokens": 60},
    ),
    "response streamed": ("/v1/responses", RESPONSE | {"stream": True}),
    "response to none": ("/v1/responses", RESPONSE | {"previous_response_id": "resp_0"}),
    # these were a 500
    "response to too many items": ("/v1/responses", {"input": MESSAGES * (MAX_MESSAGES + 1)}),
    "response to a thought in figures": ("/v1/responses", {"input": [*MESSAGES, {"type": "reasoning", "content": 5}]}),
    "tokens of too many messages": ("/tokenize", {"messages": MESSAGES * (MAX_MESSAGES + 1)}),
    "tokens": ("/tokenize", {"prompt": "Tom has", "return_token_strs": True}),
    "tokens of a chat": ("/tokenize", {"messages": MESSAGES}),
    "tokens of nothing": ("/tokenize", {}),
    "text": ("/detokenize", {"tokens": [5, 6]}),
    "text of no tokens": ("/detokenize", {"tokens": [-1]}),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_and_refusals_are_what_the_document_says(name, client, document):
    path, body = ASKED[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    refused = any(word in name for word in (" no ", "none", "nothing", "without", " too "))
    assert (answer.status_code == 200) != refused, answer.text
    require_said(document, answer, "post", path)


@pytest.mark.parametrize("path", sorted({path for path, _ in ASKED.values()}))
def test_refusals_of_a_type_and_of_no_key_are_what_the_document_says(path, client, document):
    require_said(document, client.post(path, content=b"{}", headers={"Content-Type": "text/plain"}), "post", path)
    none = client.post(path, content=b"{}", headers={"Authorization": ""})
    assert none.status_code == 401
    require_said(document, none, "post", path)


def test_answers_to_get_and_delete_are_as_documented(client, document):
    for path, methods in document["paths"].items():
        if "get" in methods and "{" not in path:
            answer = client.get(path)
            assert answer.status_code == 200
            require_said(document, answer, "get", path)
    for name, status in (("tiny", 200), ("other", 404)):
        answer = client.get(f"/v1/models/{name}")
        assert answer.status_code == status
        require_said(document, answer, "get", "/v1/models/{name}")
    made = client.post("/v1/responses", json=RESPONSE).json()["id"]
    for status in (200, 404):
        for method, suffix in (("get", "/input_items"), ("get", ""), ("delete", "")):
            answer = client.request(method, f"/v1/responses/{made}{suffix}")
            assert answer.status_code == status
            require_said(document, answer, method, f"/v1/responses/{{response_id}}{suffix}")


def outside():
    """(field, a value that its bound does not allow)"""
    for name, bound in BOUNDS.items():
        for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
            if key in bound:
                yield name, bound[key] + step
    yield from [("truncate_prompt_tokens", 0), ("stop", ""), ("stop", ["a"] * 257), ("stop", ["x" * 1025])]
    yield from [("stop_token_ids", [5] * 4097), ("stop_token_ids", [-1]), ("allowed_token_ids", [])]
    yield from [("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}), ("cache_salt", ""), ("length_penalty", 2)]
    yield from [("cache_salt", "x" * 1025), ("priority", 1), ("logit_bias", {str(i): 0 for i in range(4097)})]
    yield from [("use_beam_search", True), ("skip_special_tokens", False), ("reasoning_effort", "enormous")]
    # to Python 0 is False, so it was taken
    yield from [(name, 0) for name in ("use_beam_search", "early_stopping", "add_special_tokens", "background")]
    yield from [("return_tokens_as_token_ids", 0), ("skip_special_tokens", 1)]
    yield from [("verbosity", "loud"), ("prediction", {"type": "song", "content": "la"}), ("functions", [{}])]


HOME = {"best_of": "/v1/completions", "max_output_tokens": "/v1/responses", "background": "/v1/responses"}
BODIES = {"/v1/completions": COMPLETION, "/v1/responses": RESPONSE, "/v1/chat/completions": CHAT}


@pytest.mark.parametrize(("name", "value"), list(outside()), ids=lambda part: part if isinstance(part, str) else "")
def test_values_outside_of_bounds_are_refused(name, value, client, document):
    path = HOME.get(name, "/v1/chat/completions")
    body = BODIES[path] | {"logprobs": True, name: value}
    if name in ("max_completion_tokens",):
        del body["max_tokens"]
    if path != "/v1/chat/completions":
        del body["logprobs"]
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    checked = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    assert not checked.is_valid(body)
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    checked.validate({key: each for key, each in body.items() if key != name})


WITHIN = {"top_p": 1, "min_p": 1, "top_k": -1, "presence_penalty": -2, "frequency_penalty": 2, "n": 1, "temperature": 0}
WITHIN |= {
    "repetition_penalty": 1e-6,
    "top_n_sigma": -1e6,
    "seed": (1 << 63) - 1,
    "truncate_prompt_tokens": -1,
    "top_logprobs": 20,
}
WITHIN |= {"prompt_logprobs": 0, "min_tokens": 0, "cache_salt": "x" * 1024, "stop": ["x" * 1024] * 256, "priority": 0}
WITHIN |= {"logit_bias": {"5": -100}, "allowed_token_ids": [5], "stop_token_ids": [5] * 4096, "length_penalty": 1}


@pytest.mark.parametrize("name", WITHIN)
def test_values_within_bounds_are_accepted(name, client):
    answer = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, name: WITHIN[name]})
    assert answer.status_code == 200, answer.text


def test_allow_names_all_methods_of_a_path(client):
    """Those of its first route only; HEAD nowhere."""
    for path, allowed in (
        ("/v1/responses/x", "DELETE, GET, HEAD"),
        ("/v1/responses", "POST"),
        ("/health", "GET, HEAD"),
        ("/v1/models/x", "GET, HEAD"),
    ):
        answer = client.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert client.head(path).status_code == (405 if allowed == "POST" else client.get(path).status_code)
    for path in ("/health", "/version", "/v1/models", "/"):
        head, get = client.head(path), client.get(path)
        assert head.status_code == get.status_code == 200 and head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"


def test_no_page_loads_scripts_from_elsewhere(client):
    """FastAPI's own pages of documentation do."""
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert client.get(path).status_code == 404
    assert "https://" not in client.get("/").text.replace("https://www.w3.org", "")


def test_under_a_root_path_both_paths_lead_to_the_routes_without_a_warning(client):
    """FastAPI warns of its own parameter for it, and a warning is an error here."""
    settings = ServeSettings(model_names=["a"], root_path="/llm", api_keys={"a": "k"})
    under = TestClient(create_app(client.app.state.serve.engine, settings))
    for path in ("/llm/v1/models", "/v1/models"):
        assert under.get(path).status_code == 401
        assert under.get(path, headers=KEY).json()["data"][0]["id"] == "a"
    assert under.get("/llm/health").status_code == 200
    assert under.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert under.put("/llm/v1/models", headers=KEY).headers["allow"] == "GET, HEAD"
