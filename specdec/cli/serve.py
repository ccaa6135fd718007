"""What `specdec serve` takes, by shell, environment or file; bodies/run_server.py is what it does."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.command import command
from specdec.cli.config_file import PREFIX, read_config
from specdec.cli.options import PairOptions
from specdec.lazy import load
from specdec.serving.http_options import HttpOptions, client_option, http_option, operation_option


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """A field that `EngineConfig` has too is handed to it by its name."""

    pair: PairOptions
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=read_config, help="A YAML or TOML file of any of these options.", metavar="FILE"
        ),
    ] = None
    http: HttpOptions
    api_key_file: Annotated[
        Path | None, client_option(help="More keys: lines of a name and a key; # begins a comment.")
    ] = None
    timeout_intake: Annotated[float, http_option(help="Seconds to read a prompt or compile a grammar.")] = 30.0
    log_format: Annotated[Literal["text", "json"], operation_option(help="Lines of the log.")] = "text"
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
    cors_origin: Annotated[
        list[str], typer.Option(help="Whose pages may ask from a browser, again for each; '*': everybody's.")
    ] = field(default_factory=list)
    cached_tokens: Annotated[
        bool, typer.Option("--cached-tokens/--no-cached-tokens", help="Say in usage how much of a prompt was cached.")
    ] = True


@command(context_settings={"auto_envvar_prefix": PREFIX})
def serve(options: ServeOptions) -> None:
    load("specdec.cli.bodies.run_server", "run_server")(options)
