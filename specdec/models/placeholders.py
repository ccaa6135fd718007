"""Token ids for images, video and sound, and the ids that a multimodal model embeds instead of them.

They are measured once, from the inputs that the model's own forward passes to the embedding and the text decoder; no
layer runs. Invariant: an id is replaced only if the decoder then gets bitwise equal input. Drafters embed ids
unchanged, as in transformers' assisted generation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.errors import ConfigError, UnsupportedModelError
from specdec.models.probe import refusing
from specdec.modules.private_copy import private_copy


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Replacements of token ids before the embedding.

    table [V]: the id to embed for each id; None: no replacement. unread: id -> why it cannot be embedded.
    """

    table: torch.Tensor | None = None
    unread: Mapping[int, str] = field(default_factory=dict)

    def replaced_in(self, tokens: torch.Tensor) -> torch.Tensor:
        """Apply the replacements to tokens of any shape."""
        return tokens if self.table is None else self.table[tokens]

    def require_readable(self, what: str, tokens: Sequence[int]) -> None:
        """Raise ConfigError for an id that means nothing without an image or a sound."""
        for token in tokens if self.unread else ():
            if token in self.unread:
                raise ConfigError(f"{what} token id {token}, {self.unread[token]}; specdec serves text alone")


class ReadTokens(NamedTuple):
    """How a forward read its tokens [1, T]. ids: those that it embedded, and `embedded` the result; None: it embedded
    none. given: the tensors that reached the decoder."""

    ids: torch.Tensor | None
    embedded: torch.Tensor | None
    given: Mapping[str, torch.Tensor]

    def is_plain(self, tokens: torch.Tensor) -> bool:
        """Does the decoder get the embeddings of these ids, or look them up itself?"""
        embeds = self.given.get("inputs_embeds")
        return _equal(self.ids, tokens) and (embeds is None or _equal(embeds, self.embedded))

    def equals(self, other: "ReadTokens") -> bool:
        """Does the decoder get equal input?"""
        names = self.given.keys() | other.given.keys()
        return all(_equal(self.given.get(name), other.given.get(name)) for name in names)


class _ReachedError(Exception):
    """Stops a forward at its decoder."""


@torch.inference_mode()
def find_placeholders(
    model: PreTrainedModel, decoder: nn.Module, ordinary: torch.Tensor, device: torch.device
) -> Placeholders:
    """Find the placeholders of a model with the text `decoder`. ordinary []: an id that is embedded as itself, on the
    model's device. device: where tokens are replaced.

    A text-only model is not run. Ids without a per-layer embedding (Gemma 3n has 256) are in no text; a draft or an
    output that has one is embedded as id 0."""
    replaced, unread = _measured(model, decoder, ordinary)
    config: Any = model.config.get_text_config()
    if getattr(config, "hidden_size_per_layer_input", 0):
        for token in range(config.vocab_size_per_layer_input, config.vocab_size):
            replaced[token] = 0
            unread.setdefault(token, f"of which {type(model).__name__} has no per-layer embedding")
    if not replaced:
        return Placeholders(unread=unread)
    embedding: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    table = torch.arange(max(getattr(embedding, "num_embeddings", 0), config.vocab_size), device=device)
    table[list(replaced)] = torch.tensor(list(replaced.values()), device=device)
    return Placeholders(table, unread)


def _measured(
    model: PreTrainedModel, decoder: nn.Module, ordinary: torch.Tensor
) -> tuple[dict[int, int], dict[int, str]]:
    """Replacements of the ids that the config names, and why others cannot be embedded."""
    replaced: dict[int, int] = {}
    unread: dict[int, str] = {}
    names = named_ids(model.config)
    path = next((path for path, module in model.named_modules() if module is decoder), None)
    if not names or path is None:
        return replaced, unread
    own: Any = private_copy(model, "eager")
    inner: Any = own.get_submodule(path)

    def text(token: int) -> torch.Tensor:
        return torch.stack([ordinary, torch.full_like(ordinary, token)])[None]

    def read(token: int) -> ReadTokens:
        who = f"{names.get(token, 'an id')} of {type(model).__name__}"
        with refusing(who, "its forward does not run without what that stands for"):
            return _read_tokens(own, inner, text(token))

    try:
        found = read(int(ordinary))
    except UnsupportedModelError:
        return replaced, unread
    if not found.is_plain(text(int(ordinary))):
        return replaced, unread  # it embeds in its own way, which cannot be determined here
    for token, name in names.items():
        try:
            found = read(token)
            other = token if found.ids is None else int(found.ids[0, -1])
            as_other = found if other == token else read(other)
            if not as_other.is_plain(text(other)) or not as_other.equals(found):
                reader = type(model).__name__
                raise UnsupportedModelError(f"{name} of {reader}, which it reads as no token of the vocabulary")
            if other != token:
                replaced[token] = other
        except UnsupportedModelError as error:
            unread[token] = str(error)
    return replaced, unread


def named_ids(config: Any) -> dict[int, str]:
    """Token ids that the parts of a config name, and their names; none if it has no part besides the text's."""
    parts, size = list(_parts(config)), config.get_text_config().vocab_size
    named = {
        value: key
        for part in reversed(parts)
        for key, value in vars(part).items()
        if "token" in key and type(value) is int and 0 <= value < size
    }
    return named if len(parts) > 1 else {}


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _read_tokens(model: Any, decoder: Any, tokens: torch.Tensor) -> ReadTokens:
    looked_up: list[tuple[torch.Tensor, torch.Tensor]] = []
    given: dict[str, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        looked_up.append((args[0] if args else next(iter(kwargs.values())), output))

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.update({"input_ids": args[0]} if args else {}, **kwargs)
        raise _ReachedError

    looking = decoder.get_input_embeddings().register_forward_hook(note, with_kwargs=True)
    stopping = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    with looking, stopping, suppress(_ReachedError):
        model(input_ids=tokens, use_cache=False)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    ids, embedded = looked_up[0] if looked_up else (tensors.get("input_ids"), None)
    return ReadTokens(ids, embedded, tensors)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other.to(one.dtype)))
