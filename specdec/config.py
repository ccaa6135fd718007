"""The user's settings, validated on construction. Configs are frozen: "auto" is resolved by making a new config.

Arguments may be of related types (numpy scalars, the name of a dtype); a config holds Python's types and `torch.dtype`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from specdec.errors import ConfigError, counted, require_one_of, shown
from specdec.settings.declared_fields import require, require_fields, require_int, require_number
from specdec.settings.plain_arguments import DTYPE_ALIASES, plain_arguments
from specdec.settings.sampling_numbers import SamplingNumbers
from specdec.text.stop_strings import StopStrings

MAX_TREE_NODES = 512
"""Most nodes of a tree, root included."""

DEFAULT_TREE_NODES = 64
"""Upper bound on the verify width of a tree whose num_draft_tokens is None."""

MAX_TOPK = 63
"""Most branches of a node: they fit the 64 tokens per row that a kernel can return (`kernel_sampler.MAX_BEST`)."""

MAX_RANKS = 8
"""Most devices that one model is split over."""

MAX_PRIORITY = 100
"""Priorities range from -100 to 100; lower values are served first. A waiting request's value falls by 1 for every 64
later requests that are admitted before it, so at most 12,800 can overtake it."""

MAX_FINISHED_TOKENS = 1 << 20
"""Most tokens of finished requests that are kept for drafts: 24 bytes each on the host, 16 on the device."""

MAX_SALT = 1024
"""Most characters of a cache salt."""

GRAMMARS = ("json_schema", "json_object", "regex", "choice")
"""Kinds of grammar; a request may have one."""

MAX_FORCED_TOKENS = 15
"""Most forced tokens that a round verifies in place of drafts."""

MAX_STOPS = 256
"""Most stop strings of a request: each is searched for after every token."""
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 4096


@plain_arguments
@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Shape of a draft: `num_steps` levels, `topk` branches per node, `num_draft_tokens` verified nodes, root included.

    topk = 1 is a chain. Otherwise the best `topk` nodes of each level are expanded, and the best nodes of all levels
    are verified. num_draft_tokens None: 1 + topk * num_steps nodes, for a tree at most 64. adaptive: each round has the
    draft (or none) with the most expected tokens per second, and this is the largest. It changes no token. False: every
    round has this draft.
    """

    num_steps: int = 4
    topk: int = 1
    num_draft_tokens: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        spans = {"num_steps": (1, MAX_TREE_NODES - 1), "topk": (1, MAX_TOPK), "num_draft_tokens": (2, MAX_TREE_NODES)}
        require_fields(self, spans)
        max_nodes = 1 + self._candidates(self.num_steps)
        if self.num_draft_tokens is not None and self.num_draft_tokens > max_nodes:
            raise ConfigError(
                f"num_draft_tokens={self.num_draft_tokens}: {counted(self.num_steps, 'step')} of topk={self.topk} make "
                f"at most {max_nodes} nodes, the root included; raise num_steps or topk, or lower num_draft_tokens"
            )

    @property
    def num_nodes(self) -> int:
        """Number of verified nodes, root included."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        return min(1 + self.topk * self.num_steps, DEFAULT_TREE_NODES if self.topk > 1 else MAX_TREE_NODES)

    @property
    def depth(self) -> int:
        """Most drafts that a round can accept."""
        return min(self.num_steps, self.num_nodes - 1)

    def shortened(self, depth: int) -> tuple[int, int]:
        """(steps, nodes with the root) of this draft for requests that can use at most `depth` levels."""
        steps = min(self.depth, depth)
        return steps, min(self.num_nodes, 1 + self._candidates(steps))

    def _candidates(self, num_steps: int) -> int:
        """Nodes that `num_steps` levels propose: topk children of the root, then topk children of topk nodes per
        level."""
        return self.topk + (num_steps - 1) * self.topk**2 if num_steps else 0


class BoundedDepth(SpecConfig):
    """A draft of `num_steps` levels, or fewer if its drafter's maximum is lower."""

    __slots__ = ()


class OpenDepth(BoundedDepth):
    """A draft with its drafter's default number of levels; if the drafter has no default, a `BoundedDepth`."""

    __slots__ = ()


@plain_arguments
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and devices of an engine.

    max_batch_size: most requests that run at a time; others wait.
    max_model_len: most tokens of prompt and output together. None: the model's own limit, or less if memory is short.
    page_size: K/V slots per page. With recurrent layers, fewer prefixes are cached unless it divides 16.
    full_slots, swa_slots: usable KV slots (tokens) of each pool. None: enough for `max_batch_size` requests of
        `max_model_len`, within `memory_share`.
    attention: "torch" runs anywhere. "triton" uses the Triton kernels, which need a CUDA device (or, to try them on a
        CPU, TRITON_INTERPRET=1). "auto": "triton" on a GPU that can run them, else "torch".
    cuda_graphs: "auto": on a GPU, if the model allows it, capture rounds and prompts of up to 2,048 tokens (longer if
        memory allows) once per shape and replay them. True: an error if that is impossible. False: never.
    deterministic: a token's logits depend only on its request, to the bit: not on the batch, prompt chunks, preemption,
        drafts or captures. A model that cannot guarantee this is refused.
    dtype: a torch.dtype or its name ("bfloat16", "bf16"). None: float32 on a CPU, else the checkpoint's.
    device: a torch.device or its name. None: the first GPU, else the CPU.
    prefill_chunk: most prompt tokens of one request per step. If set, no chunk is divided among steps. None: 8192, 2048
        with recurrent layers, 512 on a CPU.
    max_prefill_tokens: most prompt tokens per step over all requests, whether or not others decode. None: measured
        times decide (docs/life_of_a_request.md; `EngineStats.prompt_gap_ms`).
    fused: replace transformers' modules by decoder layers of few large kernels. Parameters become views of larger
        tensors, with the same values and names. True: everywhere (in plain torch without "triton"), and a model or
        drafter without them is refused. False: never. "auto": with "triton" on a GPU, if the family has them.
    prefix_cache: keep K/V of prompts and outputs for requests that begin with the same tokens, until slots are needed.
    finished_tokens: the drafter "suffix" also proposes from the newest output tokens (this many) of finished requests
        with the same cache_salt. It changes only speed, no token. 0: only from a request's own text.
    max_capture_bytes: most memory of captures on each device; the least recently used are dropped. None: a tenth of a
        device's memory, or half of the memory that the pools leave, if less.
    memory_share: share of the memory that is free after the weights are loaded, for the pools. None: 0.8 on a GPU, 0.25
        on a CPU.
    tensor_parallel: number of GPUs of this host, from `device` on, that share the target's layers and head. They must
        reach each other's memory; the first also holds the embeddings and the drafter. For fused families, quantised or
        not. With deterministic=True the logits are those of one GPU, to the bit.
    kv_dtype: "fp8" stores K/V in 8 bits (e4m3 with a scale per token and head), the drafter's too. It takes about half
        the memory, and tokens equal those of plain decoding with such K/V. None: the model's dtype.
    """

    max_batch_size: int = 8
    max_model_len: int | None = None
    page_size: int = 1
    full_slots: int | None = None
    swa_slots: int | None = None
    attention: str = "auto"
    cuda_graphs: str | bool = "auto"
    deterministic: bool = False
    dtype: torch.dtype | None = None  # a name is converted
    device: str | torch.device | None = None
    prefill_chunk: int | None = None
    max_prefill_tokens: int | None = None
    fused: str | bool = "auto"
    prefix_cache: bool = True
    finished_tokens: int = 0
    max_capture_bytes: int | None = None
    memory_share: float | None = None
    tensor_parallel: int = 1
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        spans = {"max_batch_size": (1, 4096), "page_size": (1, 1024), "tensor_parallel": (1, MAX_RANKS)}
        spans |= {"prefill_chunk": (1, 1 << 20), "max_prefill_tokens": (1, 1 << 30)}
        spans |= {"finished_tokens": (0, MAX_FINISHED_TOKENS)}
        spans |= dict.fromkeys(("max_model_len", "full_slots", "swa_slots", "max_capture_bytes"), (1, 1 << 40))
        require_fields(self, spans)
        if self.memory_share is not None:
            require_number("memory_share", self.memory_share, 0.0, 1.0, open_low=True)
        require_one_of("attention", self.attention, ("auto", "torch", "triton"))
        for name, words in (("cuda_graphs", "True, 'auto' or False"), ("fused", "'auto', True or False")):
            value = getattr(self, name)
            require(name, value, isinstance(value, bool) or value == "auto", f"{words} is expected")
        if self.kv_dtype is not None:
            require_one_of("kv_dtype", self.kv_dtype, ("fp8",))
        if self.device is not None:
            _require_device(self.device)
        dtype: object = self.dtype
        names = ", ".join(f"{name} ({alias})" for alias, name in DTYPE_ALIASES.items())
        fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        require("dtype", dtype, fits, f"a floating torch.dtype or its name is expected, such as {names}")


@plain_arguments
@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingNumbers):
    """Sampling and limits of one request.

    Logits change in this order, on every path: logit_bias, repetition, frequency and presence penalty, the grammar's
    mask, top_n_sigma, temperature, top_k, top_p, min_p.

    max_new_tokens: most tokens of the output.
    temperature: 0 is greedy.
    top_k: keep the k most likely tokens. 0: all.
    top_p: keep the smallest set of tokens of this mass. 1: all.
    min_p: drop tokens below this share of the most likely one. 0: none.
    seed: the output depends only on model, prompt, parameters and seed, not on drafter and batch. None: a random seed.
    top_n_sigma: keeps tokens whose logit, before temperature, is at least the best logit minus n standard deviations of
        the position's finite logits (population: divided by their number). 0 or less: all.
    repetition_penalty: above 1 makes tokens of prompt and output less likely.
    presence_penalty: subtracted from the logit of each token that occurs in the output.
    frequency_penalty: subtracted from a token's logit for each occurrence in the output.
    stop: strings that end the text; the text ends before them.
    stop_token_ids: further tokens that end the output.
    ignore_eos: the model's own end tokens do not end the output.
    logprobs: the number of alternatives to report per token. None: no log-probabilities.
    n: number of samples. Sample i equals that of n=1 with the seed `seed` + i.
    speculation: None: like the engine. False: no drafts. A SpecConfig within the engine's: the request accepts at most
        its depth; with adaptive=False it has this draft in every round, even in an adaptive engine. It changes no
        token.
    logit_bias: added to the logits of these token ids.
    json_schema: grammar of the output, a dict or JSON text. At most one of these four grammars is allowed. The text can
        end only where the grammar can; max_new_tokens cuts it.
    json_object: the output is any JSON object.
    regex: the whole output matches this pattern.
    choice: the output is one of these strings.
    cache_salt: a secret text. Only requests with the same salt (None is a salt too) share cached K/V. It changes no
        token.
    prompt_logprobs: like logprobs, for prompt tokens. max_new_tokens=0 then only scores the prompt.
    min_tokens: until the output has this many tokens, no end token is drawn and no stop string counts.
    allowed_token_ids: only these tokens are drawn, so include an end token or set a length. None: all.
    include_stop_str_in_output: keep the stop string at the end of the text.
    thought_marks: marks around a thought at the beginning of the output, such as ("<think>", "</think>"), or ("",
        "</think>") if the prompt has opened it. Stop strings in it do not count. None: they count everywhere.
    """

    # hash=False: a list or a dict has no hash
    stop: str | Sequence[str] = field(default=(), hash=False)
    stop_token_ids: Sequence[int] = field(default=(), hash=False)
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    speculation: SpecConfig | bool | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    json_schema: str | Mapping[str, Any] | None = None  # JSON text after validation
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = field(default=None, hash=False)
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    allowed_token_ids: Sequence[int] | None = field(default=None, hash=False)
    include_stop_str_in_output: bool = False
    thought_marks: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, 1 if self.prompt_logprobs is None else 0, 1 << 30)
        spans = {"n": (1, 1 << 16), "min_tokens": (0, 1 << 30)}
        require_fields(self, spans | dict.fromkeys(("logprobs", "prompt_logprobs"), (0, 1024)))
        if self.seed is not None:
            require_int("seed", self.seed, 0, (1 << 63) - self.n)  # sample i has the seed `seed` + i
        own = self.speculation is None or self.speculation is False or isinstance(self.speculation, SpecConfig)
        require("speculation", self.speculation, own, "None (as the engine), False (none) or a SpecConfig is expected")
        salt: object = self.cache_salt
        short = salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT)
        require("cache_salt", salt, short, f"a text of 1 to {MAX_SALT} characters is expected; None for none")
        self._require_stops()
        self._require_bias()
        self._require_grammar()
        self._require_rules()

    def _require_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        require(
            "stop", self.stop, _are_texts(stops), "a non-empty string, or a sequence of them, is expected; () for none"
        )
        longest = max(map(len, self.stop_strings), default=0)
        if len(self.stop_strings) > MAX_STOPS or longest > MAX_STOP_CHARS:
            raise ConfigError(
                f"stop={shown(self.stop)} has {len(self.stop_strings)} strings, the longest of {longest} characters; "
                f"at most {MAX_STOPS} of {MAX_STOP_CHARS} characters are looked for"
            )
        marks: object = self.thought_marks
        pair = isinstance(marks, tuple) and len(marks) == 2 and _are_texts((marks[0] or "-", marks[1]))
        require("thought_marks", marks, marks is None or pair, "a pair such as ('<think>', '</think>') is expected")
        ids = self.stop_token_ids
        require("stop_token_ids", ids, _is_collection(ids), "a sequence of token ids is expected; () for none")
        if len(ids) > MAX_STOP_TOKENS:
            raise ConfigError(f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKENS} are allowed")
        for token in ids:
            require_int("stop_token_ids", token, 0, 1 << 40)

    def _require_bias(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        is_mapping = isinstance(bias, Mapping)
        require("logit_bias", bias, is_mapping, "a mapping of token ids to numbers is expected; None for none")
        for token, value in bias.items():
            require_int("a token id in logit_bias", token, 0, 1 << 40)
            require_number(f"logit_bias of token {token}", value, -100.0, 100.0)

    def _require_rules(self) -> None:
        if self.min_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens}: at most max_new_tokens={self.max_new_tokens} is expected; lower it, or "
                "raise max_new_tokens"
            )
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        some = _is_collection(allowed) and len(allowed) > 0
        require("allowed_token_ids", allowed, some, "some token ids are expected; None for all of them")
        for token in allowed:
            require_int("allowed_token_ids", token, 0, 1 << 40)
        if self.grammar is not None:
            raise ConfigError(
                f"allowed_token_ids with {self.grammar}: a grammar says which tokens may come; leave one out"
            )

    def _require_grammar(self) -> None:
        asked = [name for name in GRAMMARS if self._asks(name)]
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join(asked)} are both set; one grammar a request is allowed, so leave one out")
        for name, expected, fits in (
            ("json_schema", "a dict or JSON text", isinstance(self.json_schema, str)),
            ("regex", "a non-empty string", isinstance(self.regex, str) and self.regex != ""),
            ("choice", "a sequence of non-empty strings", _are_texts(self.choice) and self.choice),
        ):
            value = getattr(self, name)
            require(name, value, value is None or bool(fits), f"{expected} is expected; None for none")
        if self.ignore_eos and asked:
            raise ConfigError(f"ignore_eos=True with {asked[0]}: the text is over where the grammar is; leave one out")

    @property
    def grammar(self) -> str | None:
        """The output's kind of grammar, a name in `GRAMMARS`; None: no grammar."""
        return next((name for name in GRAMMARS if self._asks(name)), None)

    def _asks(self, name: str) -> bool:
        return getattr(self, name) is not None and getattr(self, name) is not False

    @property
    def restricted(self) -> bool:
        """Are some tokens forbidden at some places?"""
        return self.grammar is not None or self.allowed_token_ids is not None or self.min_tokens > 0

    @property
    def stop_strings(self) -> StopStrings:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        return StopStrings(
            stops,
            included=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            thought_marks=self.thought_marks,
        )


def _is_collection(value: object) -> TypeGuard[Collection[object]]:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _are_texts(value: object) -> bool:
    """Non-empty strings, or none."""
    return _is_collection(value) and all(isinstance(text, str) and text for text in value)


def _require_device(device: object) -> None:
    try:
        if not isinstance(device, torch.device):
            torch.device(device if isinstance(device, str) else "")
    except RuntimeError:
        require("device", device, False, "a torch device is expected, such as 'cpu', 'cuda' or 'cuda:1'")
