"""/v1/responses, /tokenize and /detokenize, asked by the official client: shapes, events, what is stored."""

import json
import tracemalloc
from itertools import groupby

import httpx
import openai
import pytest

from specdec.serving import state
from specdec.serving.state import ResponseStore, StoredResponse

from served_engine import bundled_engine, served_url

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


engine, url = bundled_engine(), served_url()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **options):
    return client.responses.create(
        **{"model": "tiny-gemma4", "input": QUESTION, "temperature": 0, "max_output_tokens": 8} | options
    )


def chat_text(client, messages, **options):
    answer = client.chat.completions.create(
        **{"model": "tiny-gemma4", "messages": messages, "temperature": 0, "max_tokens": 8} | options
    )
    return answer.choices[0].message.content


def test_a_response_is_the_answer_of_a_chat(client):
    unread = {"client_metadata": {"installation": "x"}}  # of Codex
    response = ask(client, instructions="Be brief.", metadata={"a": "b"}, extra_body=unread)
    assert response.output_text == chat_text(client, [{"role": "system", "content": "Be brief."}, *CHAT])
    assert response.object == "response" and response.status in ("completed", "incomplete")
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", response.status)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    short = ask(client, max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"


CALLED = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 100}
TEXT_EVENTS = "content_part.added output_text.delta output_text.done content_part.done"
CALL_EVENTS = "function_call_arguments.delta function_call_arguments.done"


@pytest.mark.parametrize(("options", "kinds"), [({}, TEXT_EVENTS), (CALLED, CALL_EVENTS)], ids=["text", "call"])
def test_a_streamed_response_has_openais_events_in_order(options, kinds, client):
    whole, events = ask(client, **options), list(ask(client, stream=True, **options))
    order = f"created in_progress output_item.added {kinds} output_item.done {whole.status}".split()
    assert [kind for kind, _ in groupby(event.type for event in events)] == [f"response.{kind}" for kind in order]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    [item], [expected] = events[-1].response.output, whole.output
    assert len(deltas) > 1 and "".join(deltas) == written(item) == written(expected) == written(events[-2].item)
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert written(events[2].item) == "" and events[-1].response.usage.output_tokens == whole.usage.output_tokens


def written(item):
    """The text of a message, or the arguments of a call."""
    return item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)


def test_a_stream_whose_first_tokens_have_no_text_yet_is_answered(client):
    """They are held back for a stop string, or are a part of a character: the response once ended as failed."""
    whole = ask(client)
    held = {"stop": [whole.output_text[:8] + "~"]}
    events = list(ask(client, stream=True, extra_body=held))
    assert [event.type for event in events][-1] == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text


def test_the_official_clients_stream_helper_follows_the_events(client):
    with client.responses.stream(model="tiny-gemma4", input=QUESTION, temperature=0, max_output_tokens=200) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text


def test_events_carry_their_names_on_the_wire(url):
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 4, "temperature": 0}
    text = httpx.post(f"{url}/v1/responses", json=body, timeout=60).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    assert all(block[0] == "event: " + json.loads(block[1].removeprefix("data: "))["type"] for block in blocks)
    assert "[DONE]" not in text


def test_a_conversation_goes_on_with_its_id_and_is_read_and_deleted(client):
    first = ask(client)
    second = ask(client, previous_response_id=first.id, input="And 2 more?")
    chat = [*CHAT, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And 2 more?"}]
    assert second.output_text == chat_text(client, chat)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(first.id).data[0].content == QUESTION
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ask(client, previous_response_id=first.id)
    for gone in (first, ask(client, store=False)):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)


def test_a_conversation_goes_on_with_references_to_its_items(client):
    """Vercel's AI SDK sends them in the place of the answer."""
    first = ask(client)
    asked = [{"role": "user", "content": QUESTION}, {"role": "user", "content": "And 2 more?"}]
    whole, referred = ([asked[0], item, asked[1]] for item in (first.output[0], reference(first)))
    answer = ask(client, input=referred)
    assert answer.output_text == ask(client, input=whole).output_text
    assert answer.usage.input_tokens == ask(client, input=whole).usage.input_tokens > first.usage.input_tokens
    assert client.responses.input_items.list(answer.id).data[1].content[0].text == first.output_text
    for gone in (
        {"type": "item_reference", "id": "msg_"},
        {"type": "item_reference"},
        reference(ask(client, store=False)),
    ):
        with pytest.raises(openai.NotFoundError, match=r"input\[1\]: no item .* is stored"):
            ask(client, input=[asked[0], gone])


def reference(response):
    return {"type": "item_reference", "id": response.output[0].id}


def test_no_key_reads_what_another_key_has_stored(client, url):
    first = ask(client)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            ask(other, previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            ask(other, input=[reference(first)])


def stored(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse({"id": name}, [], [{"role": "user", "content": "x" * size}])


def num_bytes(store: ResponseStore) -> int:
    return sum(map(len, store._kept.values()))


def test_the_bytes_of_what_is_stored_are_bounded_for_each_key_and_in_all(monkeypatch):
    for name, most in {"MAX_KEY_BYTES": 1000, "MAX_BYTES": 2000}.items():
        monkeypatch.setattr(state, name, most)
    store = ResponseStore()
    for i in range(9):
        store.put("a", stored(f"a{i}", 250))
    assert len(store._kept) == 3 and store.get("a", "a8") and not store.get("a", "a5")
    for key in "bcdef":
        store.put(key, stored("x", 250))
    assert len(store._kept) == 6 and store.get("f", "x") and not store.get("a", "a6")
    store = ResponseStore()
    store.put("e", stored("large", 990))
    assert store.get("e", "large") is None and num_bytes(store) < 1000  # alone more than a key may have
    for i in range(3):
        store.put("f", stored(f"f{i}", 500))
    assert not store.get("f", "f0") and store.get("f", "f2") and num_bytes(store) <= 2000
    assert store.delete("f", "f2") and not store.delete("f", "f2") and not store.delete("z", "f1")
    for key, name in list(store._kept):
        store.delete(key, name)
    assert num_bytes(store) == 0


def test_stored_responses_take_no_more_memory_than_counted(monkeypatch):
    """Objects were kept and their JSON was counted: 64 MiB of many small items took 426 MB."""
    monkeypatch.setattr(state, "MAX_KEY_BYTES", 100_000)
    items = [{"role": "user", "content": [{"type": "input_text", "text": str(index)}]} for index in range(100)]
    store = ResponseStore()
    tracemalloc.start()
    try:
        for number in range(20):
            own = json.loads(json.dumps(items))  # as each request brings its own
            store.put("a", StoredResponse({"id": f"r{number}", "output": own[:5]}, own, own))
        del own
        assert 5 < len(store._kept) < 20
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 1.5 * num_bytes(store)
    assert store.get("a", "r19") == StoredResponse({"id": "r19", "output": items[:5]}, items, items)
    store.put("a", StoredResponse({"id": "half a surrogate pair"}, [], [{"role": "assistant", "content": "\ud800"}]))
    assert store.get("a", "half a surrogate pair").messages[0]["content"] == "\ud800"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"input": 5}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "fish"}}}}, "text.format"),
        ({"temperature": -1}, "temperature"),
        # these named a chat's fields, which a response does not have
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_responses_are_refused_in_openais_shape(change, param, url):
    answer = httpx.post(f"{url}/v1/responses", json={"input": QUESTION} | change, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_error_about_the_length_names_the_limit_that_was_given(url):
    def said(path, **fields):
        return httpx.post(f"{url}/v1/{path}", json=fields, timeout=60).json()["error"]["message"]

    for most in (0, 1 << 20):
        assert f"max_output_tokens={most}" in said("responses", input=QUESTION, max_output_tokens=most)
        chat = said("chat/completions", messages=CHAT, max_completion_tokens=most)
        assert f"max_completion_tokens={most}" in chat and "max_tokens" not in chat
        assert f" max_tokens={most}" in f" {said('chat/completions', messages=CHAT, max_tokens=most)}"


def test_input_items_are_in_the_order_that_is_asked_for(client):
    items = [{"role": "user", "content": text} for text in ("First.", "Second.")]
    answer = ask(client, input=items)
    for order, texts in (("asc", ["First.", "Second."]), ("desc", ["Second.", "First."])):
        assert [item.content for item in client.responses.input_items.list(answer.id, order=order)] == texts
    with pytest.raises(openai.BadRequestError, match="'asc' or 'desc' is expected"):
        client.responses.input_items.list(answer.id, order="up")


def test_input_items_come_in_pages(client):
    """limit and after were passed over."""
    texts = [f"Number {number}." for number in range(5)]
    answer = ask(client, input=[{"role": "user", "content": text} for text in texts])
    page = client.responses.input_items.list(answer.id, order="asc", limit=2)
    assert len(page.data) == 2 and page.has_more and [item.content for item in page] == texts
    last = client.responses.input_items.list(answer.id, order="asc", after=page.data[-1].id)
    assert [item.content for item in last.data] == texts[2:] and not last.has_more
    for wrong, said in (({"limit": 0}, "limit=0: 1 or more"), ({"after": "item_9"}, "'item_9' is the id of none")):
        with pytest.raises(openai.BadRequestError, match=said):
            client.responses.input_items.list(answer.id, **wrong)


def test_a_stored_response_is_no_stream(client):
    """It came as JSON, of which the client made no event and no error."""
    answer = ask(client)
    with pytest.raises(openai.BadRequestError, match="stream=true: a stored response is given whole"):
        client.responses.retrieve(answer.id, stream=True)


def test_a_refusal_is_a_text_of_an_assistant(client):
    """Histories of other servers hold them; they were refused as no text."""
    parts = [{"type": "refusal", "refusal": "No."}]
    plain, refusal = ([*CHAT, {"role": "assistant", "content": said}, *CHAT] for said in ("No.", parts))
    assert chat_text(client, refusal) == chat_text(client, plain)
    assert ask(client, input=refusal).output_text == ask(client, input=plain).output_text


def test_a_schema_that_allows_everything_is_a_schema(url):
    """It was said to be missing, as a field of chats."""
    form = {"type": "json_schema", "name": "any", "schema": {}}
    body = {"input": QUESTION, "text": {"format": form}, "max_output_tokens": 8}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["text"]["format"] == form


def test_a_response_has_every_field_that_the_official_client_declares(url):
    """Its usage lacked `cache_write_tokens`: reading that raised AttributeError."""
    answer = httpx.post(f"{url}/v1/responses", json={"input": QUESTION, "max_output_tokens": 2}, timeout=60)
    openai.types.responses.Response.model_validate(answer.json())


def test_tokens_of_texts_and_chats_and_back(url, engine):
    def post(path, **body):
        return httpx.post(f"{url}{path}", json=body, timeout=60)

    text, chat = engine.encode(QUESTION), engine.chat_prompt(QUESTION)
    got = post("/tokenize", model="tiny-gemma4", prompt=QUESTION, return_token_strs=True).json()
    assert got["tokens"] == text and got["count"] == len(text) == len(got["token_strs"])
    assert got["max_model_len"] == engine.max_model_len
    assert post("/tokenize", messages=CHAT).json()["tokens"] == chat
    unanswered = post("/tokenize", messages=CHAT, add_generation_prompt=False).json()["tokens"]
    assert unanswered == chat[: len(unanswered)] and len(unanswered) < len(chat)
    bare = post("/tokenize", prompt=QUESTION, add_special_tokens=False).json()["tokens"]
    assert post("/detokenize", tokens=bare).json() == {"prompt": QUESTION}
    assert post("/detokenize", tokens=[1 << 40]).status_code == 400
    assert post("/tokenize").status_code == 400 == post("/tokenize", prompt="a", messages=CHAT).status_code
    assert post("/tokenize", prompt="a", model="other").status_code == 404
