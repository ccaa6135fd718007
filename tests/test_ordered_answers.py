"""The one stream from tokens to messages, through HTTP. For any text of the model, cut into any deltas, chats and
responses, streamed and whole, have the same items in the same order, with the same arguments and scores.

A model recites texts of all formats, whole, nested, broken and quoted, and its drafts are right, so that a delta holds
any number of tokens. Of a text that is well written it is known what is to be read of it.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import httpx
import pytest
from answer_formats import FORMATS, HARMONY_TEXT
from reciting_server import ADDED, SPECIAL, reciting

from specdec.serving.openai import chat_message
from specdec.serving.responses import response_events

from marks import deep, examples, usual_cases

NUM_TEXTS = examples(2, 250)
"""An answer of each format."""
PLAIN = "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson if tools else '' }}"
TOOLS = {
    "f": {"properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
    "weather": {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"type": "string"}}},
}  # fmt: skip
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": tool} for name, tool in TOOLS.items()]
WORDS = ("Eight, < 9", "née", "😀", "a > b", "{x}", "[1]", "the end.", "42", '"quoted"', "line\nline", "to=f", "|>")


def well_written(name, rng):
    """(text, its items): thoughts first where only there they may stand, then texts and calls."""
    _, thoughts, call, thought = FORMATS[name]
    text, items = "", []

    def words():
        return " ".join(rng.sample(WORDS, rng.randint(1, 4)))

    def thinks():
        nonlocal text
        items.append(("thought", words()))
        text += thought % items[-1][1]

    if thought is not None and (thoughts == "deepseek_r1" or rng.random() < 0.7):
        thinks()
    for _ in range(rng.randint(1, 4)):
        kinds = ["text", "call", "call"] + ["thought"] * (thoughts == "gemma4" or name == "harmony")
        kind = rng.choice(kinds)
        if kind == "thought":
            thinks()
        elif kind == "text" and (name == "harmony" or not items or items[-1][0] != "content"):
            items.append(("content", words()))
            text += HARMONY_TEXT % items[-1][1] if name == "harmony" else items[-1][1]
        elif kind == "call":
            arguments = {"a": words()} | ({"b": rng.choice([3, None])} if rng.random() < 0.5 else {})
            items.append(("call", "f", arguments))
            text += call("f", arguments)
    return text, items


def broken(name, rng):
    """Pieces of a well written text and of marks, in any order; or one within another, as if it were quoted."""
    text, _ = well_written(name, rng)
    other, _ = well_written(name, rng)
    marks = [*SPECIAL[1:], *ADDED, "</parameter>"]
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        match rng.randrange(4):
            case 0:
                text = text[:at] + rng.choice(marks) + text[at:]
            case 1:
                text = text[:at] + other + text[at:]
            case 2:
                text = text[:at] + text[at + rng.randint(1, 20) :]
            case 3:
                text = text[: max(1, at)]
    return text


def texts_of(name):
    """(text, its items, or None where it is broken)."""
    rng = random.Random(name)
    found = [well_written(name, rng) if i % 2 else (broken(name, rng), None) for i in range(NUM_TEXTS)]
    return [(text or "x", items) for text, items in found]


class Score(float):
    """A log-probability: forwards of other shapes round it otherwise."""

    def __eq__(self, other):
        return abs(self - other) < 1e-3

    __hash__ = None


def scored(entries):
    return [(one["token"], Score(one["logprob"])) for one in entries or ()]


def post(url, path, body):
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def of_response(response):
    """Items, the scores of each message, and how the response and each item ended."""
    items, scores = [], []
    for item in response["output"]:
        match item["type"]:
            case "function_call":
                items.append(("call", item["name"], item["arguments"], item["status"]))
            case "reasoning":
                items.append(("thought", item["content"][0]["text"], item["status"]))
            case "message":
                items.append(("content", item["content"][0]["text"], item["status"]))
                scores.append(scored(item["content"][0]["logprobs"]))
    return items, scores, response["status"], response["usage"]["output_tokens_details"]


def of_events(sent):
    """Checks each event of a stream against those before it."""
    assert sent[-1]["type"].startswith("response."), sent[-1]
    items, scores, ends = [], [], []
    for one in sent:
        match one["type"]:
            case "response.output_item.added":
                kind = {"function_call": "call", "reasoning": "thought", "message": "content"}[one["item"]["type"]]
                items.append([kind, *([one["item"]["name"]] if kind == "call" else []), ""])
                scores += [[]] if kind == "content" else []
                assert one["output_index"] == len(items) - 1
            case "response.output_item.done":
                ends.append(one["item"]["status"])
            case kind if kind.endswith(".delta"):
                items[-1][-1] += one["delta"]
                if "logprobs" in one:
                    scores[-1] += scored(one["logprobs"])
    last = sent[-1]["response"]
    found = [(*item, end) for item, end in zip(items, ends, strict=True)]
    return found, scores, last["status"], last["usage"]["output_tokens_details"]


def of_chat(message, reason):
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message.get("reasoning_content") or "", message.get("content") or "", calls, reason


def of_chunks(chunks):
    """The message of a stream's deltas, and the order of its fields."""
    message, calls, order, scores, reason = {}, [], [], [], None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta, reason = choice["delta"], choice["finish_reason"] or reason
        scores += scored((choice.get("logprobs") or {}).get("content"))
        for field in ("reasoning_content", "content"):
            if delta.get(field):
                message[field] = message.get(field, "") + delta[field]
                order.append(field)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
                order.append(f"call {call['index']}")
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return of_chat(message | {"tool_calls": calls}, reason), [name for name, _ in groupby(order)], scores


@pytest.fixture(scope="module", params=FORMATS)
def recited(request):
    parser, thoughts, _, _ = FORMATS[request.param]
    texts = texts_of(request.param)
    template = PLAIN + "<|start|>assistant" * (parser == "harmony")
    said = [text.removeprefix("<|start|>assistant") if parser == "harmony" else text for text, _ in texts]
    with reciting(said, template=template, tool_parser=parser, reasoning_parser=thoughts) as reciter:
        yield reciter, texts, request.param


def ask(reciter, number, seed):
    """A text in four shapes: (response whole, response streamed, chat whole, chat streamed)."""
    reciter.seed = seed
    common = {"temperature": 0, "model": "tiny-gemma4"}
    response = common | {"input": f"recite {number}", "include": ["message.output_text.logprobs"], "top_logprobs": 0}
    response["tools"] = RESPONSE_TOOLS
    chat = common | {"messages": [{"role": "user", "content": f"recite {number}"}], "logprobs": True}
    chat["tools"] = [{"type": "function", "function": {"name": n, "parameters": tool}} for n, tool in TOOLS.items()]
    whole = post(reciter.url, "responses", response).json()
    streamed = events(post(reciter.url, "responses", response | {"stream": True}))
    answer = post(reciter.url, "chat/completions", chat).json()["choices"][0]
    chunks = events(post(reciter.url, "chat/completions", chat | {"stream": True}))
    return whole, streamed, answer, chunks


def check(reciter, number, expected, name):
    whole, streamed, answer, chunks = ask(reciter, number, seed=number % 7)
    items, scores, status, details = of_response(whole)
    assert of_events(streamed) == (items, scores, status, details), "a streamed response is that of the whole"
    assert of_response(streamed[-1]["response"]) == (items, scores, status, details)
    message = of_chat(answer["message"], answer["finish_reason"])
    said, order, chat_scores = of_chunks(chunks)
    assert said == message, "a streamed chat is that of the whole"
    assert chat_scores == scored(answer["logprobs"]["content"])
    # a chat has what the response has
    assert message[2] == [item[1:3] for item in items if item[0] == "call"]
    for field, kind in ((message[0], "thought"), (message[1], "content")):
        assert field.replace("\n", "") == "".join(item[1] for item in items if item[0] == kind).replace("\n", "")
    fields = {"thought": "reasoning_content", "content": "content"}
    numbered = iter(range(len(items)))
    wanted = [
        f"call {next(numbered)}" if item[0] == "call" else fields[item[0]] for item in items if item[1] or item[2:]
    ]
    assert [field for field, _ in groupby(wanted)] == order or (not order and items == [("content", "", items[0][-1])])
    # scores are of the tokens of the texts, each of one
    assert all(one in chat_scores for each in scores for one in each)
    assert sum(map(len, scores)) <= len(chat_scores)
    if expected is not None:
        assert status == "completed" and all(item[-1] == "completed" for item in items)
        read = [(kind, rest[0], json.loads(rest[1])) if kind == "call" else (kind, rest[0]) for kind, *rest in items]
        assert read == expected, name
        texts = [item[1] for item in items if item[0] == "content"]
        for text, one in zip(texts, scores, strict=True):
            ascii_only = "".join(token for token, _ in one if token.isascii() and token != "<eos>")
            assert ascii_only == "".join(char for char in text if char.isascii())


@usual_cases("qwen", "gemma", "mistral", "harmony")
def test_the_same_items_arguments_and_scores_streamed_and_whole(recited):
    reciter, texts, name = recited
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(check, reciter, i, items, name) for i, (_, items) in enumerate(texts)]
        for each, (text, _) in zip(waiting, texts, strict=True):
            try:
                each.result()
            except AssertionError as error:
                raise AssertionError(f"{name}: {text!r}") from error


def recite(text, *, name="qwen", template=PLAIN, **more):
    """The items of a response, streamed and whole, in deltas cut in several ways, which all agree."""
    parser, thoughts, _, _ = FORMATS[name]
    ends = ["<|call|>", "<|return|>"] if parser == "harmony" else []
    with reciting([text], template=template, ends=ends, tool_parser=parser, reasoning_parser=thoughts) as reciter:
        found = []
        for reciter.seed in range(examples(2, 6)):
            body = {"model": "tiny-gemma4", "input": "recite 0", "temperature": 0} | more
            found.append(of_response(post(reciter.url, "responses", body).json())[0])
            sent = events(post(reciter.url, "responses", body | {"stream": True}))
            found.append(of_events(sent)[0])
        assert all(items == found[0] for items in found)
        return [item[:-1] for item in found[0]], [item[-1] for item in found[0]]


F = '<tool_call>{"name": "f"}</tool_call>'


def test_a_call_and_text_after_it_in_one_delta_are_two_items():
    """It broke a streamed response off (KeyError 'arguments'); a whole one had the text before the call."""
    items, ends = recite(f"A{F}B{F}", tools=RESPONSE_TOOLS)
    assert items == [("content", "A"), ("call", "f", "{}"), ("content", "B"), ("call", "f", "{}")]
    assert set(ends) == {"completed"}


def test_a_call_that_is_closed_is_complete_in_an_answer_that_is_cut():
    with reciting([F + "and so on, and on"]) as reciter:
        for more, ends in ((0, ["completed"]), (2, ["completed", "incomplete"])):
            most = len(reciter.ids_of(F)) - 1 + more  # less the token that ends it
            body = {"input": "recite 0", "tools": RESPONSE_TOOLS, "max_output_tokens": most}
            response = post(reciter.url, "responses", body).json()
            assert response["status"] == "incomplete"
            assert [item["status"] for item in response["output"]] == ends


def test_a_response_with_a_broken_call_can_be_continued():
    """Its arguments, which are no JSON, were refused as a field of chats, by id and as items that are sent back."""
    asked = {"role": "user", "content": "recite 1"}
    with reciting(['Hm.<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>', "Yes."]) as reciter:
        first = post(reciter.url, "responses", {"input": "recite 0", "tools": RESPONSE_TOOLS}).json()
        assert [item["status"] for item in first["output"]] == ["completed", "incomplete", "completed"]
        for more in ({"input": "recite 1", "previous_response_id": first["id"]}, {"input": [*first["output"], asked]}):
            assert of_response(post(reciter.url, "responses", more).json())[0][0][1] == "Yes."
            assert "Hm." in reciter.prompts[-1] and "x}}</tool_call><|im_end|>" in reciter.prompts[-1]


@pytest.mark.parametrize("arguments", ["{a", "[1]", '"{}"'])
def test_arguments_that_are_no_object_are_refused_by_name(arguments):
    function = {"name": "f", "arguments": arguments}
    sent = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    item = {"type": "function_call", "call_id": "c", **function}
    with reciting(["Yes."]) as reciter:
        for path, body, param in (
            ("chat/completions", {"messages": [sent]}, "messages[0].tool_calls[0].function.arguments"),
            ("responses", {"input": [item]}, "input[0].arguments"),
        ):
            error = reciter.post(path, **body).json()["error"]
            assert error["param"] == param and "an object is expected" in error["message"]


def test_a_streamed_completion_shows_all_its_drafts_where_deltas_cut_characters():
    """Colours are read token by token, so they may come before the text: such a delta was left out."""
    text = "ab日本語c日d日e日f語語x"
    with reciting([text]) as reciter:
        body = {"prompt": "recite 0", "max_tokens": 99, "stream": True, "speculation": {"show_drafts": True}}
        for reciter.seed in range(examples(2, 6)):
            choices = [choice for sent in events(post(reciter.url, "completions", body)) for choice in sent["choices"]]
            assert "".join(choice["text"] for choice in choices) == text
            assert "".join(part for choice in choices for part, _ in choice["drafted"]) == text


@pytest.mark.parametrize("seed", [0, deep(1)])
def test_an_exception_in_a_stream_ends_it_with_an_event(seed, monkeypatch):
    def failing(*arguments):
        raise ZeroDivisionError("seeded")

    with reciting([f"A{F}B"]) as reciter:
        reciter.seed = seed
        monkeypatch.setattr(response_events.ResponseBuilder, "_close_item", failing)  # the end of a response fails, too
        body = {"input": "recite 0", "tools": RESPONSE_TOOLS, "stream": True}
        last = events(post(reciter.url, "responses", body))[-1]
        assert last["type"] == "error" and "its log says why" in last["message"]
        monkeypatch.undo()
        monkeypatch.setattr(response_events.ResponseBuilder, "_add_text", failing)
        last = events(post(reciter.url, "responses", body))[-1]
        assert last["type"] == "response.failed" and "its log says why" in last["response"]["error"]["message"]
        monkeypatch.setattr(chat_message.MessageBuilder, "deltas", failing)
        chat = {"messages": [{"role": "user", "content": "recite 0"}], "stream": True}
        answer = httpx.post(f"{reciter.url}/v1/chat/completions", json=chat, timeout=60).text
        assert "its log says why" in answer.strip().splitlines()[-1]


def test_scores_of_a_streamed_response_are_those_of_its_text_alone():
    """Those of tokens without text of their own were lost; those of thoughts and calls were the message's."""
    said = {"include": ["message.output_text.logprobs"], "tools": RESPONSE_TOOLS, "input": "recite 0"}
    with reciting([f"<think>no</think>née 😀{F}"], reasoning_parser="qwen3") as reciter:
        whole = of_response(post(reciter.url, "responses", said).json())
        streamed = of_events(events(post(reciter.url, "responses", said | {"stream": True})))
        assert streamed == whole
        [scores] = whole[1]
        assert len(scores) == len(reciter.ids_of("née 😀")) - 1
        assert whole[3] == {"reasoning_tokens": len("no")}
