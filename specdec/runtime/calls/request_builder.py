"""Makes requests from prompts and parameters. All are checked before any of them runs.

It knows the limits of an engine (vocabulary, lengths, drafts, tokenizer), not its state. A request that cannot be
served is refused here in one sentence, never in the middle of a text.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from specdec.config import SamplingParams, SpecConfig
from specdec.errors import ConfigError
from specdec.models.target import TargetModel
from specdec.runtime.calls.arguments import params_for, spec_for
from specdec.runtime.prompts.prompt_scores import PromptLogProbs
from specdec.runtime.request import Request
from specdec.runtime.scheduler import Scheduler
from specdec.sampling.grammars.grammar import Grammars
from specdec.text.detokenize import Detokenizer, end_tokens
from specdec.text.prompts import Prompt, as_prompt_list, text_ids


class RequestBuilder:
    """Makes the requests of one engine. spec: the engine's draft settings; None: it does not speculate."""

    def __init__(
        self, target: TargetModel, tokenizer: Any | None, spec: SpecConfig | None, scheduler: Scheduler
    ) -> None:
        self.end_tokens = end_tokens(target.model, tokenizer)
        self._target = target
        self._vocab_size = target.vocab_size
        self._tokenizer = tokenizer
        self._spec = spec
        self._grammars = Grammars(tokenizer, target.vocab_size)
        self._scheduler = scheduler

    def build_requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """All samples of every prompt. Raises ConfigError and CapacityError."""
        many = as_prompt_list(prompts)
        requests: list[Request] = []
        for index, (prompt, one) in enumerate(zip(many, params_for(params, len(many)), strict=True)):
            ids = text_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
            if not prompt or not ids:
                raise ConfigError(f"prompt {index} is empty; at least one token is needed to continue from")
            self._require_tokens(f"prompt {index} holds", ids)
            self._target.placeholders.require_readable(f"prompt {index} holds", ids)
            self._require_tokens("stop_token_ids holds", one.stop_token_ids)
            self._require_tokens("logit_bias holds", list(one.logit_bias or ()))
            self._require_tokens("allowed_token_ids holds", one.allowed_token_ids or ())
            if one.stop_strings and self._tokenizer is None:
                raise ConfigError("stop strings need a tokenizer; pass tokenizer=..., or use stop_token_ids")
            self._scheduler.require_fits(len(ids), one.max_new_tokens)
            ends = frozenset(one.stop_token_ids) | (frozenset() if one.ignore_eos else self.end_tokens)
            spec = spec_for(one, self._spec)
            grammar = self._grammars.start(one, ends, self.end_tokens)
            seed = secrets.randbits(62) if one.seed is None else one.seed
            scores = None if one.prompt_logprobs is None else PromptLogProbs(len(ids), one.prompt_logprobs)
            for sample in range(one.n):
                text = Detokenizer(self._tokenizer)
                requests.append(Request(ids, one, seed + sample, text, ends, spec, grammar, scores))
        return requests

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ConfigError if there is none."""
        if self._tokenizer is None:
            raise ConfigError("text prompts need a tokenizer; pass tokenizer=..., or give token ids")
        return self._tokenizer

    def _require_tokens(self, what: str, tokens: Sequence[int]) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):  # faster than a Python loop
            outside = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise ConfigError(f"{what} token id {outside}, outside the vocabulary of {self._vocab_size}")
