"""Settings of an HTTP server, validated; those of an engine are `EngineConfig`.

How many connections it has by default depends on the system: on the limit of open files.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.config import require_int, require_number
from specdec.errors import ConfigError, require_one_of, shown
from specdec.serving.http_options import HttpOptions
from specdec.serving.tools.reasoning import reasoning_format
from specdec.serving.tools.tool_parsers import require_parser
from specdec.text.content_tokens import require_handling

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters for which a model's generation config may state a default."""
HANDLING = ("refuse", "warn", "ignore")
"""Ways to handle a field of a body that is unknown."""
RESERVED_FILES = 32
"""File descriptors that are left for everything that is no connection."""
DEFAULT_MAX_CONNECTIONS = 16_384
"""Connections at a time by default, where the limit of open files allows so many."""


@dataclass(frozen=True, slots=True)
class ServeSettings(HttpOptions):
    """Options of the command line, and settings from elsewhere. Answers call the model by the first model name."""

    model_names: Sequence[str]  # names by which requests may ask for the model
    api_keys: Sequence[str] = ()  # bearer tokens, each of which lets a request in; none: no key is needed
    cors_origins: Sequence[str] = ()  # whose pages may ask from a browser; "*": all
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling parameters of requests that do not say
    show_cached_tokens: bool = True  # usage says how much of a prompt was cached
    named_keys: Mapping[str, str] = field(default_factory=dict)  # further keys, by the name that the log has for them

    def __post_init__(self) -> None:
        require_int("max_body_bytes", self.max_body_bytes, 1, 1 << 40)
        for name in ("client_requests_per_minute", "client_concurrency", "max_connections"):
            require_int(name, getattr(self, name), 0, 1 << 30)
        for name in ("timeout_headers", "timeout_body", "timeout_keep_alive", "liveness_seconds"):
            require_number(name, getattr(self, name), 0.0, open_low=True)
        for name in ("stats_seconds", "stop_seconds"):
            require_number(name, getattr(self, name), 0.0)
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
        reasoning_format(self.reasoning_parser)
        require_one_of("unknown_fields", self.unknown_fields, HANDLING)
        require_handling(self.special_tokens_in_content)

    def resolved_connections(self) -> int:
        """`max_connections`, or what the limit of open files allows. Raises ConfigError if the limit allows fewer."""
        allowed = allowed_connections()
        if self.max_connections > allowed:
            raise ConfigError(
                f"max_connections={self.max_connections} is more than the {allowed} that the limit of open files "
                "allows; raise that limit (ulimit -n, LimitNOFILE=) or ask for fewer"
            )
        return self.max_connections or min(allowed, DEFAULT_MAX_CONNECTIONS)


def sampling_defaults(generation_config: object) -> dict[str, float]:
    """Sampling defaults of a model's generation config; temperature 1 if it has none, as OpenAI."""
    said = {name: getattr(generation_config, name, None) for name in DEFAULTS}
    return {"temperature": 1.0} | {name: value for name, value in said.items() if value is not None}


def allowed_connections() -> int:
    """How many connections the limit of open files leaves room for, besides the files that are open now."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return DEFAULT_MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:
        in_use = 64
    return max(1, soft - in_use - RESERVED_FILES)
