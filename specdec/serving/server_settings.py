"""What an HTTP server is told once, validated; what an engine is told is `EngineConfig`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.config import require_int
from specdec.errors import ConfigError, shown
from specdec.serving.http.client_limits import ClientRates
from specdec.serving.http.connection_limits import ConnectionLimits
from specdec.serving.http.unknown_fields import require_handling
from specdec.serving.tools.reasoning import reasoning_format
from specdec.serving.tools.tool_parsers import require_parser
from specdec.text.content_tokens import require_handling as require_content_handling

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters for which a model's generation config may state a default."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """model_names: what requests may call the model; the first is what answers call it.

    api_keys: any of these as a bearer token lets a request in; none: everybody. cors_origins: whose pages may ask from
    a browser; "*" is everybody's. max_body_bytes: of one request. stop_seconds: for streams to end when the server
    stops. defaults: sampling parameters of requests that do not say. tool_parser: how the model writes tool calls;
    "auto": as its chat template teaches. allow_priority: requests may have a priority other than 0. share_prefix_cache:
    clients with different API keys share cached prompts, which lets one find out what another sent.
    show_cached_tokens: usage says how much of a prompt was cached.
    named_keys: further keys, by the name that the log has for them. rates: of one
    key. connections: bounds of all. ssl_certfile, ssl_keyfile: PEM files, for HTTPS. root_path: under which a proxy
    shows this server. liveness_seconds: a step of the engine that takes longer is taken for one that hangs.
    stats_seconds: between two lines of throughput in the log, 0: none.
    reasoning_parser: how the model writes what it thinks. unknown_fields: "refuse", "warn" or "ignore" those of a body
    that no part of it knows. special_tokens_in_content: "escape" makes control tokens in messages plain text,
    "allow" lets them be control tokens.
    """

    model_names: Sequence[str]
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_body_bytes: int = 4 << 20
    stop_seconds: float = 30.0
    defaults: Mapping[str, float] = field(default_factory=dict)
    tool_parser: str = "auto"
    allow_priority: bool = False
    share_prefix_cache: bool = False
    show_cached_tokens: bool = True
    named_keys: Mapping[str, str] = field(default_factory=dict)
    rates: ClientRates = field(default_factory=ClientRates)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""
    liveness_seconds: float = 120.0
    stats_seconds: float = 10.0
    reasoning_parser: str = "none"
    unknown_fields: str = "refuse"
    special_tokens_in_content: str = "escape"

    def __post_init__(self) -> None:
        require_int("max_body_bytes", self.max_body_bytes, 1, 1 << 40)
        if not self.model_names or not all(self.model_names):
            raise ConfigError(
                f"served model names {shown(list(self.model_names))}: at least one is expected, none empty"
            )
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or holds characters that no HTTP header does; give printable ASCII")
        for key in (*self.api_keys, *self.named_keys.values()):
            if key != key.strip():
                raise ConfigError("an API key begins or ends with a space, which no header keeps; give it without")
        require_parser(self.tool_parser)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile goes with ssl_certfile; give both")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"root_path={shown(self.root_path)}: it begins with a slash and ends with none, such as /llm"
            )
        if not 0 < self.liveness_seconds < float("inf"):
            raise ConfigError(f"liveness_seconds={shown(self.liveness_seconds)}: seconds above 0 are required")
        if not 0 <= self.stats_seconds < float("inf"):
            raise ConfigError(f"stats_seconds={shown(self.stats_seconds)}: seconds from 0 are required")
        reasoning_format(self.reasoning_parser)
        require_handling(self.unknown_fields)
        require_content_handling(self.special_tokens_in_content)
        if not 0 <= self.stop_seconds < float("inf"):
            raise ConfigError(f"stop_seconds={shown(self.stop_seconds)}: seconds from 0 are expected")


def sampling_defaults(generation_config: object) -> dict[str, float]:
    """What a model's generation config says of sampling; temperature 1 where it says nothing, as OpenAI."""
    said = {name: getattr(generation_config, name, None) for name in DEFAULTS}
    return {"temperature": 1.0} | {name: value for name, value in said.items() if value is not None}
