"""A server whose model recites: the test gives the text of each answer, which arrives in deltas of several tokens.

    with reciting(["<think>Hm.</think>Yes.", "No."], reasoning_parser="qwen3") as reciter:
        httpx.post(f"{reciter.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "recite 1"}]})
        reciter.answer_next("First.", "Second.")        # to requests whose prompt names no text: in turn
        reciter.prompts                                 # what the template made of the requests so far

The target is tiny and random. It recites because its grammar (a `Recital`) allows one token at a time. A `Recital` also
follows the request's own grammar, and ends a text that this forbids. Log-probabilities are the model's own, so they
differ from token to token. The drafter knows the texts, and drafts 0 to MAX_DRAFTS right tokens; the number depends on
`reciter.seed` and the place in the text, so another seed cuts a text into other deltas.
"""

import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import Engine, EngineConfig, SpecConfig
from specdec.errors import ConfigError
from specdec.runtime.request import Request
from specdec.sampling.grammars.grammar import GrammarState
from specdec.sampling.grammars.token_rules import Words, token_bits

from scripted_drafter import ScriptedDrafter
from served_engine import served
from tiny_families import build_target, spread
from tiny_tokenizers import byte_level

MAX_DRAFTS = 16
CONTEXT = 1 << 14
NAMED = re.compile(r"recite (\d+)")
EOS = "<eos>"
SPECIAL = tuple(
    f"""
    {EOS} <|im_start|> <|im_end|> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK]
    <|tool_call> <tool_call|> <|"|> <|channel> <channel|> <|turn> <turn|> <|think|>
    <start_function_call> <end_function_call> <escape> <|tool_call|> <|/tool_call|>
    <|channel|> <|message|> <|start|> <|end|> <|call|> <|return|> <|constrain|>
    <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
    <|tool_calls_section_begin|> <|tool_calls_section_end|>
    <|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|>
    <|START_ACTION|> <|END_ACTION|> <|START_THINKING|> <|END_THINKING|>
    """.split()
)
"""Tokens that a detokenizer leaves out."""
ADDED = ("<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
"""Added tokens that are text, as in Qwen3 and MiniMax-M2."""
WORDS = (
    *("\n\n", "}\n", "}}", '"}', '":', '", "', ">\n", ">\n\n", "</", "><", "},"),
    *("<function", "<parameter", "parameter>"),
    *("assistant", "commentary", "analysis", "final", "functions", " to=", "json", "thought", "call", "é", "😀"),
)
"""Tokens of several bytes: some of them cross the borders of calls and thoughts."""
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
HARMONY = (Path(__file__).parent / "data" / "harmony.jinja").read_text("utf-8").removesuffix("\n")
"""A template as strict as GPT-OSS's: thoughts stand before calls that no final message follows, and nowhere else."""


class Recital(GrammarState):
    """The place in a text before token number `at` of it. inner: in the request's own grammar, or None."""

    def __init__(
        self, ids: list[int], words: int, inner: GrammarState | None, at: int = 0, *, over: bool = False
    ) -> None:
        super().__init__(None, None, frozenset(ids[-1:]), over=over)
        self.ids, self.words, self.inner, self.at = ids, words, inner, at

    @property
    def mask(self) -> Words:
        return token_bits(self.ids[min(self.at, len(self.ids) - 1) :][:1], self.words)

    @property
    def forced(self) -> tuple[int, ...]:
        return ()  # the drafter drafts them

    def after(self, token: int) -> GrammarState | None:
        if self.over or token != self.ids[self.at]:
            return None
        inner = None if self.inner is None else self.inner.after(token)
        if self.inner is not None and inner is None:
            return None
        at = self.at + 1
        return Recital(self.ids, self.words, inner, at, over=at == len(self.ids))


class Reciter:
    """The test's side of the server. texts: answers that prompts name by number. prompts: those of all requests."""

    def __init__(self, texts: Sequence[str], engine_of: Callable[[ScriptedDrafter], Engine]) -> None:
        self.texts = list(texts)
        self.seed = 0
        self.prompts: list[str] = []
        self.url = ""
        self._in_turn: deque[str] = deque()
        self._running: dict[int, dict[tuple[int, ...], list[int]]] = {}  # texts by prompt, by its length
        self.engine = engine_of(ScriptedDrafter(self._draft))
        self._requests = self.engine.request_builder.build_requests
        self.engine.request_builder.build_requests = self._recited  # type: ignore[method-assign]

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """The server's answer to these fields."""
        return httpx.post(f"{self.url}/v1/{path}", json=fields, timeout=120)

    def answer_next(self, *texts: str) -> None:
        """Set the answers to the next requests whose prompts name no text. Unused earlier answers are dropped."""
        self._in_turn = deque(texts)

    def ids_of(self, text: str, *, by_bytes: bool = False) -> list[int]:
        """Tokenise a text, with an end token unless its last one ends it. by_bytes: without marks among them."""
        parts = list(text) if by_bytes else [text]
        ids = [i for part in parts for i in self.engine.tokenizer(part, add_special_tokens=False)["input_ids"]]
        if not ids or ids[-1] not in self.engine.end_tokens:
            ids.append(self.engine.tokenizer.eos_token_id)
        return ids

    def _recited(self, prompts: Any, params: Any) -> list[Request]:
        requests = self._requests(prompts, params)
        chosen: dict[int, list[int]] = {}  # samples of one prompt have one text
        for request in requests:
            if id(request.prompt) not in chosen:
                prompt = self.engine.tokenizer.decode(request.prompt, skip_special_tokens=False)
                self.prompts.append(prompt)
                guided = request.params.grammar is not None  # which allows no marks
                chosen[id(request.prompt)] = self.ids_of(self._text_for(prompt), by_bytes=guided)
            ids = chosen[id(request.prompt)]
            self._running.setdefault(len(request.prompt), {})[tuple(request.prompt)] = ids
            words = -(-self.engine.target.vocab_size // 32)
            request.settled = request.settled._replace(grammar_state=Recital(ids, words, request.settled.grammar_state))
        return requests

    def _text_for(self, prompt: str) -> str:
        if named := NAMED.findall(prompt):
            return self.texts[int(named[-1])]
        if not self._in_turn:
            raise ConfigError("the prompt names no text to recite, and none is given in turn")
        return self._in_turn.popleft()

    def _draft(self, tokens: list[int], num_steps: int) -> tuple[list[int], None]:
        """Right drafts, as many as the seed says, then wrong ones."""
        for length, by_prompt in list(self._running.items()):
            ids = by_prompt.get(tuple(tokens[:length]), [])
            at = len(tokens) - length
            if at > 0 and tokens[length:] == ids[:at]:
                right = random.Random(f"{self.seed} {at} {len(ids)}").randint(0, num_steps)
                rest = (ids[at:] + [0] * num_steps)[:num_steps]
                return [token if i < right else (token + 1) % 2 for i, token in enumerate(rest)], None
        return [0] * num_steps, None


def tokenizer_for(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each byte, some of several bytes, and the marks of all formats."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = (split.pre_tokenize_str(word)[0][0] for word in WORDS)
    pairs = ((word[:end], word[end]) for word in words for end in range(1, len(word)))
    tokenizer = byte_level(dict.fromkeys(pairs), use_regex=False)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, chat_template=template, clean_up_tokenization_spaces=False
    )


def reciter_of(texts: Sequence[str] = (), *, template: str = TEMPLATE, ends: Sequence[str] = ()) -> Reciter:
    """Build a reciter with its own engine, which the caller closes. ends: marks that end an answer, as `<eos>` does."""
    tokenizer = tokenizer_for(template)
    torch.manual_seed(0)
    model = spread(
        build_target("llama", vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=CONTEXT)
    )
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([EOS, *ends])
    config = EngineConfig(max_batch_size=8, full_slots=4 * CONTEXT)

    def engine_of(drafter: ScriptedDrafter) -> Engine:
        return Engine.from_pretrained(model, drafter, tokenizer=tokenizer, spec=SpecConfig(MAX_DRAFTS), config=config)

    return Reciter(texts, engine_of)


@contextmanager
def reciting(
    texts: Sequence[str] = (), *, template: str = TEMPLATE, ends: Sequence[str] = (), **settings: Any
) -> Iterator[Reciter]:
    """Run a reciter with a server on a thread. settings: of the server, such as tool_parser and reasoning_parser."""
    reciter = reciter_of(texts, template=template, ends=ends)
    with reciter.engine, served(reciter.engine, **{"tool_parser": "hermes"} | settings) as (reciter.url, _, _):
        yield reciter
