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
    """Trailing comments say what a field means; the first model name is what answers call the model."""

    model_names: Sequence[str]  # what requests may call the model
    api_keys: Sequence[str] = ()  # bearer tokens, each of which lets a request in; none: no key is needed
    cors_origins: Sequence[str] = ()  # whose pages may ask from a browser; "*": all
    max_body_bytes: int = 4 << 20  # of one request
    stop_seconds: float = 30.0  # for streams to end when the server stops
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling parameters of requests that do not say
    tool_parser: str = "auto"  # how the model writes tool calls; "auto": as its chat template teaches
    allow_priority: bool = False  # requests may have a priority other than 0
    share_prefix_cache: bool = False  # clients share cached prompts, and so one can find out what another sent
    show_cached_tokens: bool = True  # usage says how much of a prompt was cached
    named_keys: Mapping[str, str] = field(default_factory=dict)  # further keys, by the name that the log has for them
    rates: ClientRates = field(default_factory=ClientRates)  # of one key
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)  # of all clients together
    ssl_certfile: Path | None = None  # PEM files, for HTTPS
    ssl_keyfile: Path | None = None
    root_path: str = ""  # under which a proxy shows this server
    liveness_seconds: float = 120.0  # a step of the engine that takes longer counts as one that hangs
    stats_seconds: float = 10.0  # between two lines of throughput in the log; 0: none
    reasoning_parser: str = "none"  # how the model writes what it thinks
    unknown_fields: str = "refuse"  # or "warn", "ignore": those of a body that no part of it knows
    special_tokens_in_content: str = "escape"  # control tokens in messages are plain text; "allow": control tokens

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
        for name, seconds in (("stats_seconds", self.stats_seconds), ("stop_seconds", self.stop_seconds)):
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"{name}={shown(seconds)}: seconds from 0 are required")
        reasoning_format(self.reasoning_parser)
        require_handling(self.unknown_fields)
        require_content_handling(self.special_tokens_in_content)


def sampling_defaults(generation_config: object) -> dict[str, float]:
    """What a model's generation config says of sampling; temperature 1 where it says nothing, as OpenAI."""
    said = {name: getattr(generation_config, name, None) for name in DEFAULTS}
    return {"temperature": 1.0} | {name: value for name, value in said.items() if value is not None}
