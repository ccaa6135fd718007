"""What an HTTP server is told once, validated; what an engine is told is `EngineConfig`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.config import require_int
from specdec.errors import ConfigError, shown
from specdec.serving.tools import require_parser

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters for which a model's generation config may state a default."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """model_names: what requests may call the model; the first is what answers call it.

    api_keys: any of these as a bearer token lets a request in; none: everybody. cors_origins: whose pages may ask from
    a browser; "*" is everybody's. max_body_bytes: of one request. stop_seconds: for streams to end when the server
    stops. defaults: sampling parameters of requests that do not say. tool_parser: how the model writes tool calls;
    "auto": as its chat template teaches.
    """

    model_names: Sequence[str]
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_body_bytes: int = 4 << 20
    stop_seconds: float = 30.0
    defaults: Mapping[str, float] = field(default_factory=dict)
    tool_parser: str = "auto"

    def __post_init__(self) -> None:
        require_int("max_body_bytes", self.max_body_bytes, 1, 1 << 40)
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"served model names {shown(list(self.model_names))}: at least one is wanted, none empty")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or holds characters that no HTTP header does; give printable ASCII")
        require_parser(self.tool_parser)
        if not 0 <= self.stop_seconds < float("inf"):
            raise ConfigError(f"stop_seconds={shown(self.stop_seconds)}: seconds from 0 are wanted")


def sampling_defaults(generation_config: object) -> dict[str, float]:
    """What a model's generation config says of sampling; temperature 1 where it says nothing, as OpenAI."""
    said = {name: getattr(generation_config, name, None) for name in DEFAULTS}
    return {"temperature": 1.0} | {name: value for name, value in said.items() if value is not None}
