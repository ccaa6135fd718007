"""Options of `specdec serve` that an HTTP server is made with, as `ServeSettings` has them. Imports nothing heavy."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

http_option, client_option, operation_option = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("HTTP", "Clients", "Operation")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Times are seconds; the help of each option says what it means."""

    client_requests_per_minute: Annotated[
        int, client_option(min=0, help="Of one API key, or address where there are none; 0: any.")
    ] = 0
    client_concurrency: Annotated[int, client_option(min=0, help="Open samples of one key or address; 0: any.")] = 0
    max_connections: Annotated[
        int, http_option(min=0, help="Open connections; 0: what the limit of open files allows.")
    ] = 0
    timeout_headers: Annotated[float, http_option(help="Seconds for the head of a request to come.")] = 10.0
    timeout_body: Annotated[float, http_option(help="Seconds for all of a request to come.")] = 120.0
    timeout_keep_alive: Annotated[float, http_option(help="Seconds that an idle connection stays open.")] = 30.0
    root_path: Annotated[str, http_option(help="Prefix under which a proxy shows this server, such as /llm.")] = ""
    ssl_certfile: Annotated[Path | None, http_option(help="Certificate as a PEM file; makes it HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, http_option(help="The certificate's key.")] = None
    liveness_seconds: Annotated[
        float, operation_option(help="A step that takes longer hangs: /live and /health say 503.")
    ] = 120.0
    stats_seconds: Annotated[
        float, operation_option(min=0, help="Between two lines of throughput in the log, while there is any; 0: none.")
    ] = 10.0
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls: hermes, llama, ...; auto: as its template teaches.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, typer.Option(help="How the model writes what it thinks: none, deepseek_r1, qwen3 or gemma4.")
    ] = "none"
    unknown_fields: Annotated[
        str, typer.Option(help="Fields that no request has: refuse, warn (a line in the log) or ignore.")
    ] = "refuse"
    special_tokens_in_content: Annotated[
        str, typer.Option(help="Control tokens in messages: escape (they are text) or allow, as transformers.")
    ] = "escape"
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request; larger ones get 413.")] = 4 << 20
    stop_seconds: Annotated[
        float, typer.Option(min=0, help="For streams to end after SIGTERM or Ctrl-C; a second one ends at once.")
    ] = 30.0
    share_prefix_cache: Annotated[
        bool,
        typer.Option("--share-prefix-cache", help="Between API keys too: one can then find out what another sent."),
    ] = False
    allow_priority: Annotated[
        bool, typer.Option("--allow-priority", help="Let requests ask to be served first; else only 0 is taken.")
    ] = False
