"""Fields that clients send: some change nothing, others are refused or left out, and those of sampling give the
engine's answers in any mix, whole and streamed."""

import asyncio
import gzip
import json
import logging
import random
from dataclasses import replace

import httpx
import pytest
from reciting_server import reciting

from specdec import SamplingParams
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server_settings import ServeSettings

from served_engine import bundled_engine, served_url

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
TEXT_PART = {"type": "text", "text": QUESTION}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["eggs", "pens"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": ADD}}]


engine, url = bundled_engine(), served_url()


def chat(url, **fields):
    return httpx.post(f"{url}/v1/chat/completions", json=CHAT | fields, timeout=60)


@pytest.fixture(scope="module")
def usual_choices(url):
    return chat(url).json()["choices"]


def complete(url, **fields):
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": QUESTION, "max_tokens": 8, "temperature": 0} | fields, timeout=60
    )


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "skip_special_tokens": True},
        {"add_generation_prompt": True, "continue_final_message": False, "spaces_between_special_tokens": True},
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "safety_identifier": "s"},
        {"top_logprobs": None, "priority": None, "tools": None, "logit_bias": None, "stop": None},
        {"seed": 3, "priority": 0, "prompt_cache_key": "x", "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low", "verbosity": "low", "prediction": {"type": "content", "content": "It is 8."}},
        {"messages": [CHAT["messages"][0] | {"type": "text"}]},  # of lm-evaluation-harness
        {"top_logprobs": 0, "prompt_cache_options": {"mode": "explicit"}, "reasoning_effort": "max"},
        {"web_search_options": None, "audio": None, "guided_grammar": None},  # an unknown field that is not set
        {"messages": [{"role": "user", "content": [TEXT_PART | {"prompt_cache_breakpoint": {}, "mood": None}]}]},
        {"parallel_tool_calls": False, "min_tokens": 0, "return_token_ids": False, "bad_words": [], "functions": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_values_that_change_nothing_are_taken(url, usual_choices, fields):
    answer = chat(url, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == usual_choices


def test_null_is_as_good_as_nothing_within_options_of_a_stream_too(url):
    options = dict.fromkeys(("include_usage", "continuous_usage_stats", "include_obfuscation"))
    streamed = events(chat(url, stream=True, stream_options=options))
    assert streamed[-1]["choices"] and "usage" not in streamed[-1]


def test_an_empty_suffix_is_none(url):
    assert complete(url, suffix="").json()["choices"] == complete(url).json()["choices"]
    assert complete(url, suffix="It is 8.").status_code == 400


def test_negative_seeds_are_seeds_except_minus_one(url):
    """-1 is a random seed, as in llama.cpp and vLLM; OpenAI's interface allows all of 64 bits."""

    def answer(seed):
        return complete(url, seed=seed, temperature=2.0, max_tokens=24, n=2, ignore_eos=True).json()["choices"]

    assert answer(-7) == answer(-7) != answer(-8)
    assert answer(-1) != answer(-1)
    assert answer(-(1 << 63)) == answer(-(1 << 63))
    assert complete(url, seed=-(1 << 63) - 1).status_code == 400


def test_a_prompt_is_cut_to_its_last_tokens(url, engine):
    ids = engine.encode(QUESTION)
    cut = complete(url, truncate_prompt_tokens=7, return_token_ids=True, echo=True).json()["choices"][0]
    assert cut["prompt_token_ids"] == ids[-7:] and cut["text"].startswith(engine.decode(ids[-7:]))
    most = engine.max_model_len
    assert complete(url, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == len(ids)  # there is room
    assert complete(url, truncate_prompt_tokens=most + 1).status_code == 400
    assert complete(url, truncate_prompt_tokens=500).json()["usage"]["prompt_tokens"] == len(ids)
    whole = chat(url, return_token_ids=True).json()["prompt_token_ids"]
    assert chat(url, truncate_prompt_tokens=9, return_token_ids=True).json()["prompt_token_ids"] == whole[-9:]


def test_the_last_message_is_continued(url, engine):
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Tom has"}]
    answer = chat(
        url, messages=messages, continue_final_message=True, add_generation_prompt=False, return_token_ids=True
    )
    assert answer.json()["prompt_token_ids"] == engine.chat_prompt(messages, continue_final_message=True)
    both = chat(url, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


def test_with_tool_choice_none_a_call_is_text(url):
    written = r'Well\.<tool_call>\{"name": "f", "arguments": \{\}\}</tool_call>'
    [choice] = chat(url, tools=TOOLS, tool_choice="none", guided_regex=written, max_tokens=60).json()["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == 'Well.<tool_call>{"name": "f", "arguments": {}}</tool_call>'


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARSED = CALL["function"] | {"parsed_arguments": {"a": 1}}
TURNS = [
    *CHAT["messages"],
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "8"},
]


@pytest.mark.parametrize(
    ("at", "fields"),
    [
        (1, {"parsed": [{"a": 1}], "tool_calls": [CALL | {"index": 0, "function": PARSED}]}),
        (1, {"provider_specific_fields": {"refusal": None}, "annotations": [], "type": "text"}),
        (1, {"content": [{"type": "text", "text": "I look.", "role": "assistant", "tool_calls": [CALL]}]}),
        (1, {"content": [{"type": "text", "text": "I look.", "annotations": []}]}),
        (2, {"role": "tool_responses"}),
    ],
    ids=["openai", "litellm", "agents-js", "agents-js-streamed", "google-adk"],
)
def test_a_client_that_says_more_of_its_turns_has_the_same_prompt(at, fields, url):
    """OpenAI's client adds what `parse` and `stream` parsed, litellm its copy of fields; google-adk has another
    role for results if a model is called gemma-4 and reached as hosted_vllm/NAME."""

    def tokens(messages):
        return httpx.post(f"{url}/tokenize", json={"messages": messages}, timeout=60).json().get("tokens")

    sent = [message | fields if index == at else message for index, message in enumerate(TURNS)]
    assert tokens(sent) == tokens(TURNS) is not None
    assert chat(url, messages=sent).status_code == 200


def test_the_usage_of_a_chat_counts_the_tokens_of_thoughts():
    """Only that of a response did, so clients that read it of both said 0."""
    with reciting(["<think>no</think>Yes.", "Yes."], reasoning_parser="qwen3") as reciter:
        for number, thoughts in enumerate((len("no"), 0)):
            body = {"messages": [{"role": "user", "content": f"recite {number}"}], "n": 2}
            whole = reciter.post("chat/completions", **body).json()["usage"]
            assert whole["completion_tokens_details"] == {"reasoning_tokens": 2 * thoughts}
            sent = reciter.post("chat/completions", **body, stream=True, stream_options={"include_usage": True})
            assert events(sent)[-1]["usage"]["completion_tokens_details"] == whole["completion_tokens_details"]


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_choice_that_calls_no_tool_needs_none(choice, url, usual_choices):
    """Semantic Kernel and litellm send it without tools."""
    assert chat(url, tool_choice=choice).json()["choices"] == usual_choices


LONG = [{"role": "user", "content": "7 " * 4000}]
FAULTS = {
    "an id": (complete, {"prompt": [1, 99999]}, "prompt", "holds token id 99999"),
    "a stop id": (complete, {"stop_token_ids": [99999]}, "stop_token_ids", "holds token id 99999"),
    "a long prompt": (complete, {"prompt": [5] * 5000}, "prompt", "leaves no room"),
    "a long chat": (chat, {"messages": LONG}, "messages", "leaves no room"),
    "a seed": (complete, {"seed": -(1 << 63) - 1}, "seed", f"an integer from {-(1 << 63)} to {(1 << 63) - 1} is"),
    "no prompt": (complete, {"prompt": None}, "prompt", "prompt=None: a string, a list of token ids, or"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_its_field_once(fault, url):
    """It named none of ids and lengths, the prompt twice, and only seeds from 0."""
    ask, fields, param, said = FAULTS[fault]
    answer = ask(url, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"] and "prompts=" not in answer.text


def test_a_compressed_body_is_refused_as_such(url):
    """It was said to be no JSON."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = httpx.post(f"{url}/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers, timeout=60)
    assert answer.status_code == 415 and "Content-Encoding is 'gzip'" in answer.json()["error"]["message"]


def test_a_required_tool_needs_no_template_that_knows_tools(url, engine, monkeypatch):
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    required = chat(url, tools=TOOLS, tool_choice="required", max_tokens=60)
    assert required.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    refused = chat(url, tools=TOOLS)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "this model's chat template knows no tools; leave them out"


@pytest.mark.parametrize("handling", ["refuse", "warn", "ignore"])
def test_unknown_fields_are_refused_or_left_out_as_the_server_is_told(handling, engine, caplog):
    settings = ServeSettings(model_names=["tiny-gemma4"], unknown_fields=handling)

    async def ask():
        async with AsyncEngine(engine) as running:
            transport = httpx.ASGITransport(create_app(running, settings))
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                body = CHAT | {"num_ctx": 8, "stream_options": None}
                part = TEXT_PART | {"cache_control": {"type": "ephemeral"}}
                body["messages"] = [CHAT["messages"][0] | {"mood": "good"}, {"role": "user", "content": [part]}]
                return await client.post("/v1/chat/completions", json=body)

    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(ask())
    assert answer.status_code == (400 if handling == "refuse" else 200)
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == (3 if handling == "warn" else 0)
    assert all(name in " ".join(said) for name in (("num_ctx", "mood", "cache_control") if said else ()))


def test_an_unknown_field_of_a_text_part_is_refused_by_name(url):
    part = TEXT_PART | {"cache_control": {"type": "ephemeral"}}
    answer = chat(url, messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400 and "'cache_control'" in answer.json()["error"]["message"]


# any fields together

TEXTS = ("Tom has 3 apples and", "Ann buys 12", "hi", "née 😀")
TOLERANCE = 1e-3
"""Forwards of other shapes round log-probabilities otherwise."""
SAMPLING = {
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.3,
    "top_n_sigma": 0.5,
    "repetition_penalty": 3.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {18: 30.0, 303: 29.0},
    "stop": ["another text", "e"],
    "stop_token_ids": list(range(200, 350)),
    "allowed_token_ids": list(range(300, 400)),
    "min_tokens": 5,
    "ignore_eos": True,
    "n": 2,
}
"""Fields that requests and `SamplingParams` call the same, with values that change answers."""


def drawn_fields(rng, name, engine):
    """This field and some others, with so much noise that they matter."""
    others = {each: value for each, value in SAMPLING.items() if rng.random() < 0.15}
    hot = {"temperature": rng.choice([1.5, 2.0]), "seed": rng.randrange(99)}
    if name in ("min_tokens", "ignore_eos"):  # without them it would end at once
        others["logit_bias"] = dict.fromkeys(engine.end_tokens, 40.0)
    elif name.endswith("penalty"):  # few tokens, which come again
        others["allowed_token_ids"] = [18, 303, 449]
    return others | {name: SAMPLING[name]} | hot


def drawn_request(rng, name, engine):
    """(path, body, prompts as token ids, echoed texts, parameters of the engine)"""
    fields, count, logprobs = drawn_fields(rng, name, engine), rng.randint(6, 9), rng.choice([None, 0, 2])
    body = fields | {"return_token_ids": True}
    if "logit_bias" in fields:
        body["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    show = {"show_drafts": True}
    body["speculation"] = rng.choice([True, False, show, show, show | {"num_steps": 2}])
    if rng.random() < 0.5:
        path, echoes, messages = "chat/completions", [""], [{"role": "user", "content": rng.choice(TEXTS)}]
        body |= {"messages": messages, "logprobs": logprobs is not None, "top_logprobs": logprobs}
        prompts = [engine.chat_prompt(messages)]
    else:
        path, texts = "completions", rng.sample(TEXTS, rng.randint(1, 2))
        prompts, echo = [engine.encode(text) for text in texts], rng.random() < 0.5
        body |= {"prompt": rng.choice([texts, prompts]), "logprobs": logprobs, "echo": echo}
        count = 0 if echo and rng.random() < 0.3 and "min_tokens" not in fields else count
        echoes = [engine.decode(prompt) if echo else "" for prompt in prompts]
    scored = logprobs if body.get("echo") else None
    scored = 0 if scored is None and count == 0 else scored
    params = SamplingParams(count, **fields, logprobs=logprobs, prompt_logprobs=scored)
    return path, body | {"max_tokens": count}, prompts, echoes, params


def scores_of(choice):
    """Texts of a choice's scored tokens, where each begins, and log-probabilities: of the token, and of the best one
    that is named."""
    found = choice.get("logprobs") or {"content": []}
    if "content" in found:
        best = [max((top["logprob"] for top in one["top_logprobs"]), default=None) for one in found["content"]]
        return [[one["token"] for one in found["content"]], [], [one["logprob"] for one in found["content"]], best]
    best = [top and max(top.values()) for top in found["top_logprobs"]]
    return [found["tokens"], found["text_offset"], found["token_logprobs"], best]


def read(choices):
    """(text, end, tokens and drafted text; scores) of one choice, or of its chunks in order."""
    text, reason, tokens, drafted, scores = "", None, [], "", [[], [], [], []]
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        text += said.get("content") or ""
        reason = choice["finish_reason"] or reason
        tokens += choice.get("token_ids") or []
        drafted += "".join(piece for piece, _ in choice.get("drafted") or ())
        scores = [joined + more for joined, more in zip(scores, scores_of(choice), strict=True)]
    return (text, reason, tokens, drafted), scores


def near(values):
    return [value if value is None else pytest.approx(value, abs=TOLERANCE) for value in values]


@pytest.mark.parametrize("name", SAMPLING)
def test_an_answer_is_that_of_the_engine_whole_and_streamed(name, url, engine):
    rng = random.Random(name)
    for _ in range(9):  # until it is one that this field matters to
        path, body, prompts, echoes, params = drawn_request(rng, name, engine)
        plain = replace(params, **{name: getattr(SamplingParams(), name)})
        outs = engine.generate([*prompts, *prompts], [params] * len(prompts) + [plain] * len(prompts))
        outs, without = outs[: params.n * len(prompts)], outs[params.n * len(prompts) :]
        if [out.text for out in outs] != [out.text for out in without]:
            break
    else:
        raise AssertionError(f"{name} changes no answer")
    answers = [httpx.post(f"{url}/v1/{path}", json=body | more, timeout=60) for more in ({}, {"stream": True})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    whole = answers[0].json()
    chunks = events(answers[1])
    streamed = [each for chunk in chunks for each in chunk["choices"]]
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert whole["usage"]["completion_tokens"] == sum(len(out.token_ids) for out in outs)
    for parts in ([whole, *whole["choices"]], [*chunks, *streamed]):
        ids = {each.get("index", 0): each["prompt_token_ids"] for each in parts if "prompt_token_ids" in each}
        assert [ids[i] for i in sorted(ids)] == [prompts[i // params.n] for i in range(len(ids))] and ids
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(outs)))
    for index, (choice, out) in enumerate(zip(whole["choices"], outs, strict=True)):
        echo, drafted = echoes[index // params.n], out.text if isinstance(body["speculation"], dict) else ""
        scores = [*((out.prompt_logprobs or ()) if echo else ()), *(out.logprobs or ())]
        values = [one and one.logprob for one in scores]
        named = [one and [*one.top.values(), *[one.logprob] * (path == "completions")] for one in scores]
        for choices in ([choice], [each for each in streamed if each["index"] == index]):
            found, (tokens, offsets, said, best) = read(choices)
            assert found == (echo + out.text, out.finish_reason, out.token_ids, drafted), body
            if params.logprobs is not None:
                assert [tokens, offsets] == scores_of(choice)[:2]
                plain = [
                    (token, at)
                    for token, at in zip(tokens, offsets, strict=False)
                    if token[:1].isalpha() and "stop" not in body
                ]
                assert all(found[0].startswith(token, at) for token, at in plain)
                assert said == near(values) and best == near(max(each) if each else None for each in named)
