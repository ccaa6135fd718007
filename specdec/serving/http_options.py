"""Options of `specdec serve` for the HTTP server; `ServeSettings` inherits them. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

from specdec.serving.tools.reasoning_formats import REASONING
from specdec.settings.declared_fields import (
    ABOVE_ZERO,
    FROM_ZERO,
    Number,
    client_option,
    http_option,
    operation_option,
    option,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Times are seconds; the help of each option says what it means."""

    client_requests_per_minute: int = client_option(
        0, "Requests per minute of one key or address; 0: no limit.", number=Number(int, 0, 1 << 30)
    )
    client_concurrency: int = client_option(
        0, "Open samples of one key or address; 0: no limit.", number=Number(int, 0, 1 << 30)
    )
    timeout_body: float = http_option(120.0, "Seconds for the body of a request to arrive.", number=ABOVE_ZERO)
    timeout_keep_alive: float = http_option(30.0, "Seconds that an idle connection stays open.", number=ABOVE_ZERO)
    root_path: str = http_option("", "Path prefix that a proxy adds for this server, such as /llm.")
    ssl_certfile: Path | None = http_option(None, "Certificate as a PEM file; turns HTTPS on.")
    ssl_keyfile: Path | None = http_option(None, "The certificate's key.")
    liveness_seconds: float = operation_option(
        120.0, "Seconds after which a step counts as hung: /live and /health answer 503.", number=ABOVE_ZERO
    )
    stats_seconds: float = operation_option(
        10.0, "Seconds between throughput lines in the log, if there is traffic; 0: none.", number=FROM_ZERO
    )
    tool_parser: str = option(
        "auto", "Format of the model's tool calls: hermes, llama, ...; auto: the chat template decides."
    )
    reasoning_parser: str = option("none", f"Format of the model's thoughts: none, {', '.join(REASONING)}.")
    unknown_fields: str = option("refuse", "Unknown fields of requests: refuse, warn (a line in the log) or ignore.")
    draft_figures: str = option(
        "vllm",
        "Draft figures in answers: none, vllm (metrics.speculative_decoding), or all (llama.cpp's timings too).",
    )
    special_tokens_in_content: str = option(
        "escape", "Control tokens in messages: escape (read them as text) or allow (as in transformers)."
    )
    max_body_bytes: int = option(
        4 << 20, "Largest body of a request; larger ones get 413.", number=Number(int, 1, 1 << 40)
    )
    stop_seconds: float = option(
        30.0, "Seconds for streams to finish after SIGTERM or Ctrl-C; a second signal ends at once.", number=FROM_ZERO
    )
    share_prefix_cache: bool = option(
        False,
        "Also share cached prompts between API keys: a client can then find out what others sent.",
        "--share-prefix-cache",
    )
    allow_priority: bool = option(
        False, "Let requests set their priority; otherwise only 0 is allowed.", "--allow-priority"
    )
