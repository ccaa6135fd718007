"""What `specdec serve` takes, by shell, environment or file; bodies/run_server.py is what it does."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.command import command
from specdec.cli.config_file import PREFIX, read_config
from specdec.cli.options import PairOptions
from specdec.lazy import load

http_option, client_option, operation_option = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("HTTP", "Clients", "Operation")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """A field that `ServeSettings` or `EngineConfig` has too is handed to it by its name."""

    pair: PairOptions
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=read_config, help="A YAML or TOML file of any of these options.", metavar="FILE"
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, client_option(help="More keys: lines of a name and a key; # begins a comment.")
    ] = None
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
    timeout_intake: Annotated[float, http_option(help="Seconds to read a prompt or compile a grammar.")] = 30.0
    root_path: Annotated[str, http_option(help="Prefix under which a proxy shows this server, such as /llm.")] = ""
    ssl_certfile: Annotated[Path | None, http_option(help="Certificate as a PEM file; makes it HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, http_option(help="The certificate's key.")] = None
    log_format: Annotated[Literal["text", "json"], operation_option(help="Lines of the log.")] = "text"
    stats_seconds: Annotated[
        float, operation_option(min=0, help="Between two lines of throughput in the log, while there is any; 0: none.")
    ] = 10.0
    liveness_seconds: Annotated[
        float, operation_option(help="A step that takes longer hangs: /live and /health say 503.")
    ] = 120.0
    otlp_traces_endpoint: Annotated[
        str | None, operation_option(help="Where OpenTelemetry traces go, by OTLP over HTTP.")
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of IPv4.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and prints it.")] = 8000
    served_model_name: Annotated[
        list[str], typer.Option(help="What requests may call the model, again for each; default: the target.")
    ] = field(default_factory=list)
    api_key: Annotated[
        list[str], typer.Option(help="Let in who sends this as bearer token, again for each; also SPECDEC_API_KEY.")
    ] = field(default_factory=list)
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 8
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused with 429.")] = 256
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and output in tokens; default: the model's own.")
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompt tokens between two rounds of running requests; fewer: steadier. None: by what is measured.",
        ),
    ] = None
    page_size: Annotated[int, typer.Option(min=1, help="KV slots of a page.")] = 1
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever the batch and the drafts.")
    ] = False
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A Jinja file in place of the tokenizer's own.")
    ] = None
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
    cors_origin: Annotated[
        list[str], typer.Option(help="Whose pages may ask from a browser, again for each; '*': everybody's.")
    ] = field(default_factory=list)
    share_prefix_cache: Annotated[
        bool,
        typer.Option("--share-prefix-cache", help="Between API keys too: one can then find out what another sent."),
    ] = False
    cached_tokens: Annotated[
        bool, typer.Option("--cached-tokens/--no-cached-tokens", help="Say in usage how much of a prompt was cached.")
    ] = True
    allow_priority: Annotated[
        bool, typer.Option("--allow-priority", help="Let requests ask to be served first; else only 0 is taken.")
    ] = False


@command(context_settings={"auto_envvar_prefix": PREFIX})
def serve(options: ServeOptions) -> None:
    load("specdec.cli.bodies.run_server", "run_server")(options)
