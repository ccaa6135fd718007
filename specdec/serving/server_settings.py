"""Validated settings of an HTTP server. Those of an engine are in `EngineConfig`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.errors import ConfigError, require_one_of, shown
from specdec.serving.http_options import HttpOptions
from specdec.serving.tools.reasoning_formats import reasoning_format
from specdec.serving.tools.tool_parsers import require_parser
from specdec.settings.declared_fields import require, require_fields
from specdec.text.content_tokens import require_handling

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters for which a model's generation config may state a default."""

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")
"""An origin as browsers write it."""


@dataclass(frozen=True, slots=True)
class ServeSettings(HttpOptions):
    """Options of the command line, and other settings. Answers use the first model name."""

    model_names: Sequence[str]  # names by which requests may ask for the model
    api_keys: Mapping[str, str] = field(default_factory=dict)  # accepted bearer tokens by name; empty: none is needed
    cors_origins: Sequence[str] = ()  # origins whose pages may send requests from a browser; "*": all
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling parameters that a request leaves out
    show_cached_tokens: bool = True  # report cached prompt tokens in usage

    def __post_init__(self) -> None:
        require_fields(self)
        if not self.model_names or not all(self.model_names):
            raise ConfigError(
                f"served model names {shown(list(self.model_names))}: at least one is expected, none empty"
            )
        keys = isinstance(self.api_keys, Mapping)
        require("api_keys", "...", keys, 'a mapping of names to keys is expected, such as {"alice": "..."}')
        for key in self.api_keys.values():
            if not (key and key.isascii() and key.isprintable()):
                raise ConfigError(
                    "an API key is empty or holds characters that no HTTP header does; give printable ASCII"
                )
            if key != key.strip():
                raise ConfigError("an API key begins or ends with a space, which no header keeps; give it without")
        for origin in self.cors_origins:
            if not (origin in ("*", "null") or ORIGIN.fullmatch(origin)):
                raise ConfigError(
                    f"cors_origin={shown(origin)}: no browser sends this; a scheme and a host in lower case are "
                    "expected, with no slash at the end, such as https://chat.example:8443"
                )
        require_parser(self.tool_parser)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile goes with ssl_certfile; give both")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"root_path={shown(self.root_path)}: it begins with a slash and ends with none, such as /llm"
            )
        reasoning_format(self.reasoning_parser)
        require_one_of("unknown_fields", self.unknown_fields, ("refuse", "warn", "ignore"))
        require_one_of("draft_figures", self.draft_figures, ("none", "vllm", "all"))
        require_handling(self.special_tokens_in_content)


def sampling_defaults(generation_config: object) -> dict[str, float]:
    """Sampling defaults from a model's generation config; temperature 1, as in OpenAI's API, if it has none."""
    defaults = {name: getattr(generation_config, name, None) for name in DEFAULTS}
    return {"temperature": 1.0} | {name: value for name, value in defaults.items() if value is not None}
