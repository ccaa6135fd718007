"""`specdec serve` as a process, asked by the official client: a test per feature."""

import json
import re

import httpx
import openai
import pytest
from server_process import ServerProcess, running_server

from specdec import Engine, SamplingParams, SpecConfig, __version__

from served_engine import bundled_engine, until

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT = [{"role": "user", "content": QUESTION}]
NEW = 8
PROMPTS = ["Tom has 3 apples and", "Ann buys 12"]

pytestmark = pytest.mark.usefixtures("shallow_pair")


@pytest.fixture(scope="module")
def server():
    names = ("--served-model-name", "tiny", "--served-model-name", "small")
    with running_server(*names) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


engine = bundled_engine()


def ask(client, **options):
    return client.chat.completions.create(**({"model": "tiny", "messages": CHAT, "temperature": 0} | options))


def answer_of(engine: Engine, max_new_tokens: int = NEW, **params):
    return engine.generate(engine.chat_prompt(QUESTION), SamplingParams(max_new_tokens, **params))


def figures(server: ServerProcess) -> dict[str, float]:
    """Every figure of /metrics: by name, and by name and label where it has one next to the model's."""
    text = httpx.get(server.url + "/metrics").text
    lines = [re.match(r'([\w:]+)(?:\{(?:(\w+="[^"]*"),)?model_name="\w+"(?:,(\w+="[^"]*"))?\})? (\S+)$', line)
             for line in text.splitlines() if not line.startswith("#")]  # fmt: skip
    return {m[1] + (f"[{m[2] or m[3]}]" if m[2] or m[3] else ""): float(m[4]) for m in lines if m}


def test_a_chat_is_answered_as_the_python_api_does(client, engine):
    answer = ask(client, max_tokens=NEW)
    [out] = answer_of(engine)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (out.text, out.finish_reason)
    assert choice.message.role == "assistant" and choice.logprobs is None
    assert answer.model == "tiny" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(out.prompt_token_ids), len(out.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert ask(client, max_completion_tokens=NEW).choices[0].message.content == out.text
    cached = ask(client, max_tokens=NEW).usage.prompt_tokens_details.cached_tokens
    assert cached == (usage.prompt_tokens - 1) // 16 * 16 > 0


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": CHAT}), ("completions", {"prompt": PROMPTS, "echo": True})],
    ids=["chat", "completion"],
)
def test_chunks_say_the_figures_so_far_and_the_first_comes_with_the_first_token(path, asked, server):
    """A client that times chunks would take the reading of the prompt for decoding."""
    body = asked | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body |= {"speculation": {"show_drafts": True}, "max_tokens": 12, "temperature": 0}
    events = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    *chunks, last = (json.loads(event.removeprefix("data: ")) for event in events[:-2])
    by_choice = {}
    for chunk in chunks:
        by_choice.setdefault(chunk["choices"][0]["index"], []).append(chunk)
    figures = [[(one["usage"]["completion_tokens"], one["speculation"]["rounds"]) for one in each]
               for each in by_choice.values()]  # fmt: skip
    assert len(figures) == len(asked.get("prompt", "1"))
    assert all(each[0][0] > 0 and each == sorted(each) and each[0] < each[-1] for each in figures)
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(each[-1][0] for each in figures)
    assert last["speculation"]["rounds"] == sum(each[-1][1] for each in figures)


def test_logprobs_are_those_of_the_python_api(client, engine):
    [out] = answer_of(engine, logprobs=3)
    content = ask(client, max_tokens=NEW, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [one.token for one in content] == [engine.tokenizer.decode([one.token_id]) for one in out.logprobs]
    assert all(bytes(one.bytes).decode() == one.token for one in content)
    for one, ours in zip(content, out.logprobs, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(list(ours.top.values()), abs=1e-4)
    assert ask(client, max_tokens=4, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_without_a_limit_an_answer_ends_by_itself_and_a_completion_has_sixteen_tokens(client):
    answer = ask(client)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 16
    unlimited = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert unlimited.usage.completion_tokens == 16


def test_content_in_parts_is_the_same_as_joined(client):
    parts = [{"type": "text", "text": "Tom has 3"}, {"type": "text", "text": "apples."}]
    asked = [[{"role": "user", "content": content}] for content in (parts, "Tom has 3\napples.")]
    in_parts, joined_text = (ask(client, messages=messages, max_tokens=NEW).choices for messages in asked)
    assert in_parts == joined_text


def test_an_answers_message_can_be_sent_back(client):
    """The client's own message object, whole."""
    message = ask(client, max_tokens=NEW).choices[0].message
    assert ask(client, messages=[*CHAT, message, *CHAT], max_tokens=4).usage.prompt_tokens > 50
    dumped = message.model_dump()
    assert ask(client, messages=[*CHAT, dumped, *CHAT], max_tokens=4).usage.prompt_tokens > 50


def test_drafts_are_shown_on_request(client, engine):
    [out] = answer_of(engine)
    body = {"speculation": {"show_drafts": True}}
    chunks = list(ask(client, max_tokens=NEW, stream=True, extra_body=body))
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    shown = [
        (choice.delta.content or "", getattr(choice, "drafted", [])) for chunk in chunks for choice in chunk.choices
    ]
    assert all("".join(text for text, _ in pieces) == content for content, pieces in shown)
    assert {drafted for _, pieces in shown for _, drafted in pieces} == {True, False}
    assert chunks[-1].speculation["rounds"] == out.stats.rounds
    assert chunks[-1].speculation["acceptance_length"] == out.stats.acceptance_length
    assert chunks[-1].usage.completion_tokens == len(out.token_ids)
    whole = ask(client, max_tokens=NEW, extra_body=body)
    assert whole.speculation["accepted_per_position"] == out.stats.accepted_per_position
    assert whole.speculation["drafted_counts"] == out.stats.drafted_counts
    assert (whole.speculation["drafted_rounds"], whole.speculation["drafts_off"]) == (out.stats.drafted_rounds, "")
    plain = ask(client, max_tokens=NEW, extra_body={"speculation": False})
    assert not hasattr(plain, "speculation") and not hasattr(plain.choices[0], "drafted")


def test_speculation_of_a_request_is_that_of_the_python_api(client, engine):
    """The rounds that it took tell how deep its drafts were."""
    shallow = SpecConfig(num_steps=1, topk=1)
    [out] = answer_of(engine, speculation=shallow)
    answer = ask(client, max_tokens=NEW, extra_body={"speculation": {"num_steps": 1, "show_drafts": True}})
    assert answer.speculation["rounds"] == out.stats.rounds > answer_of(engine)[0].stats.rounds


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [3, 7]}}}}, "3|7"),
        ({"response_format": {"type": "json_object", "value": {"enum": [3, 7]}}}, "3|7"),  # of huggingface_hub
        ({"response_format": {"type": "json_object", "schema": {"enum": [3, 7]}}}, "3|7"),  # of llama.cpp
        ({"response_format": {"type": "json_object", "schema": {}}}, r"\{.*"),
        ({"structured_outputs": {"regex": "[a-c]{3,5}"}}, "[a-c]{3,5}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"json": {"enum": [3, 7]}}}, "3|7"),
        ({"structured_outputs": {"json": '{"enum": [3, 7]}'}}, "3|7"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"enum": [3, 7]}}, "3|7"),
    ],
    ids=[
        "object",
        "schema",
        "value",
        "plain-schema",
        "empty-schema",
        "regex",
        "choice",
        "json",
        "json-text",
        "guided-regex",
        "guided-choice",
        "guided-json",
    ],
)
def test_the_ways_in_which_a_form_is_asked_for(body, pattern, client):
    """One function reads the fields of both routes, so chats are asked for half of the forms, and completions for the
    others."""
    if "response_format" in body or "guided_json" in body:
        text = ask(client, max_tokens=NEW, extra_body=body).choices[0].message.content
    else:
        text = client.completions.create(model="tiny", prompt="a", max_tokens=NEW, extra_body=body).choices[0].text
    assert re.fullmatch(pattern, text, re.DOTALL)


def test_a_server_answers_health_checks_and_lists_its_models(server, client):
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/version").json() == {"version": __version__}
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("small").owned_by == "specdec"
    assert ask(client, model="small", max_tokens=2).model == "small"


def test_request_ids_are_taken_or_made_and_logged(server):
    body = {"messages": CHAT, "max_tokens": 2}
    given = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "two words"})
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    until(lambda: "id mine-1" in server.log() and made.headers["x-request-id"] in server.log())
    assert re.search(r"POST /v1/chat/completions 200 in \d+\.\d+ s, id mine-1", server.log())


def test_metrics_count_what_a_request_did(server, client, engine):
    before = figures(server)
    answer = ask(client, max_tokens=NEW, messages=[{"role": "user", "content": "Ann has 7 pens and loses 2."}])
    after = figures(server)
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["vllm:generation_tokens_total"] == answer.usage.completion_tokens
    assert gained["vllm:prompt_tokens_total"] == answer.usage.prompt_tokens
    assert gained["vllm:prefix_cache_queries_total"] == answer.usage.prompt_tokens
    assert gained["vllm:prefix_cache_hits_total"] == answer.usage.prompt_tokens_details.cached_tokens
    reason = answer.choices[0].finish_reason
    assert gained[f'vllm:request_success_total[finished_reason="{reason}"]'] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert gained[f"vllm:{name}_count"] == 1
    [out] = engine.generate(engine.chat_prompt("Ann has 7 pens and loses 2."), SamplingParams(NEW))
    assert gained["vllm:inter_token_latency_seconds_count"] == out.stats.rounds
    assert gained["vllm:spec_decode_num_drafts_total"] == out.stats.drafted_rounds <= out.stats.rounds
    assert gained["vllm:spec_decode_num_draft_tokens_total"] == out.stats.draft_tokens
    assert gained["vllm:spec_decode_num_accepted_tokens_total"] == sum(out.drafted)
    by_position = [
        gained[f'vllm:spec_decode_num_accepted_tokens_per_pos_total[position="{position}"]'] for position in range(4)
    ]
    assert by_position == out.stats.accepted_counts
    assert after["specdec:acceptance_length"] > 1
    assert after["vllm:num_requests_running"] == after["vllm:num_preemptions_total"] == 0
