"""What the doctor looks at: a target, a drafter and the prompts, and the engines that it makes of them.

A change of a pair is another `PairInQuestion`; the target is never changed. The doctor stands below the engine, whose
`diagnose` hands in itself: `EngineLike` is what it uses of one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.kvcache.cache import KVCache
from specdec.models.target import TargetModel
from specdec.runtime.adaptive.draft_choice import DraftUse
from specdec.runtime.engine_stats import EngineStats
from specdec.runtime.request import GenerationOutput


class EngineLike(Protocol):
    """An engine, as `specdec.Engine` is."""

    target: TargetModel
    drafter: Drafter | None
    tokenizer: Any | None
    spec: SpecConfig
    config: EngineConfig
    cache: KVCache

    @property
    def max_model_len(self) -> int: ...
    def chat_prompt(self, chat: str, /, **template_kwargs: Any) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def stats(self) -> EngineStats: ...
    def most_new_tokens(self, prompt_len: int) -> int: ...
    def generate(self, prompts: Any, params: Any = None, *, progress: bool | None = None) -> list[GenerationOutput]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInQuestion:
    """A pair and how it is asked.

    questions: texts, or ids of prompts, which no template is applied to. chat: texts are turns of a chat; False: they
    are tokenised as they stand. template: arguments of the chat template, such as enable_thinking.
    """

    engine: EngineLike
    make: Callable[..., EngineLike]
    drafter: Drafter
    questions: Sequence[str | list[int]]
    chat: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> TargetModel:
        return self.engine.target

    @property
    def tokenizer(self) -> Any | None:
        return self.engine.tokenizer

    @property
    def has_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    def prompts(self) -> list[list[int]]:
        """Token ids of each question."""
        return [self._ids(question) for question in self.questions]

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationOutput]:
        """Outputs of an engine of this pair's own, so that no prefix cache and no figure is shared.

        It captures nothing: a drafter that notes its logits waits for the device.
        """
        # not adaptive: every depth is looked at, whether it pays or not
        made = self._engine(prompts, params, adaptive=False, prefix_cache=False, cuda_graphs=False)
        with closing(made):
            return made.generate(list(prompts), params, progress=False)

    def draft_use(self, prompt: list[int], params: SamplingParams) -> DraftUse:
        """What drafts take here, from an engine of one request that chooses among them."""
        with closing(self._engine([prompt], params, adaptive=True)) as made:
            made.generate([prompt], params, progress=False)
            return made.stats().drafts

    def _ids(self, question: str | list[int]) -> list[int]:
        if not isinstance(question, str):
            return list(question)
        if self.chat and self.has_template:
            return self.engine.chat_prompt(question, **self.template)
        return self.engine.encode(question)

    def _engine(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, adaptive: bool, **settings: Any
    ) -> EngineLike:
        """With K/V for these prompts alone: the engine in question holds its own pools meanwhile."""
        longest = min(max(map(len, prompts)) + params.max_new_tokens, self.engine.max_model_len)
        config = replace(
            self.engine.config,
            max_batch_size=len(prompts),
            max_model_len=longest,
            full_slots=None,
            swa_slots=None,
            **settings,
        )
        spec = replace(self.engine.spec, adaptive=adaptive)
        return self.make(self.target, self.drafter, tokenizer=self.tokenizer, spec=spec, config=config)
