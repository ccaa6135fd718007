"""`specdec serve`: an OpenAI-compatible HTTP server over one engine."""

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specdec.errors import ConfigError

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"specdec serve needs {error.name}, which is not installed; pip install 'specdec-runtime[serve]'"
    ) from error

from specdec.cli.options import PairOptions
from specdec.cli.serve_options import ServerOptions
from specdec.cli.settings import engine_config, load_engine, quiet_libraries
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.client_limits import ClientRates
from specdec.serving.http.connections import ConnectionLimits
from specdec.serving.http.key_file import read_key_file
from specdec.serving.logs import set_up
from specdec.serving.server import address, listen, require_certificate, run_app
from specdec.serving.server_settings import ServeSettings, sampling_defaults
from specdec.serving.tracing import send_traces_to

logger = logging.getLogger("specdec.serving")

KEY_VARIABLE = "SPECDEC_API_KEY"


def serve(
    *,
    pair: PairOptions,
    server: ServerOptions,
    host: str,
    port: int,
    served_model_name: Sequence[str],
    api_key: Sequence[str],
    batch_size: int,
    max_waiting: int,
    max_model_len: int | None,
    max_prefill_tokens: int,
    page_size: int,
    deterministic: bool,
    chat_template: Path | None,
    tool_parser: str,
    reasoning_parser: str,
    unknown_fields: str,
    special_tokens_in_content: str,
    max_body_bytes: int,
    stop_seconds: float,
    cors_origin: Sequence[str],
    share_prefix_cache: bool,
    cached_tokens: bool,
    allow_priority: bool,
) -> None:
    quiet_libraries()
    set_up(server.log_format, logging.WARNING)
    logging.getLogger("specdec").setLevel((pair.log_level or "info").upper())
    keys, named = _keys(api_key, server.api_key_file)
    sizes = {"max_model_len": max_model_len, "max_prefill_tokens": max_prefill_tokens, "page_size": page_size}
    config = engine_config(pair, batch_size, **sizes, deterministic=deterministic)
    template = None if chat_template is None else chat_template.read_text("utf-8")
    settings = ServeSettings(
        model_names=served_model_name or [pair.target],
        api_keys=keys,
        cors_origins=cors_origin,
        max_body_bytes=max_body_bytes,
        stop_seconds=stop_seconds,
        tool_parser=tool_parser,
        allow_priority=allow_priority,
        share_prefix_cache=share_prefix_cache,
        show_cached_tokens=cached_tokens,
        named_keys=named,
        rates=ClientRates(server.client_requests_per_minute, server.client_concurrency),
        connections=ConnectionLimits(
            server.max_connections, server.timeout_headers, server.timeout_body, server.timeout_keep_alive
        ),
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        root_path=server.root_path,
        liveness_seconds=server.liveness_seconds,
        stats_seconds=server.stats_seconds,
        reasoning_parser=reasoning_parser,
        unknown_fields=unknown_fields,
        special_tokens_in_content=special_tokens_in_content,
    )
    settings.connections.resolved_most()
    require_certificate(settings)
    if server.otlp_traces_endpoint is not None:
        send_traces_to(server.otlp_traces_endpoint)
    with listen(host, port) as bound:
        _warn_of_open_doors(settings, bound)
        engine = load_engine(pair, config)
        if engine.tokenizer is None:
            raise ConfigError(f"{pair.target!r} has no tokenizer, but a server reads and writes text; name one")
        if template is not None:
            engine.tokenizer.chat_template = template
        settings = replace(settings, defaults=sampling_defaults(engine.target.model.generation_config))
        url = address(bound, "http" if settings.ssl_certfile is None else "https")
        with engine:
            served = AsyncEngine(
                engine,
                max_waiting=max_waiting,
                intake_seconds=server.timeout_intake,
                per_client=server.client_concurrency,
            )
            died = run_app(served, settings, bound, lambda: print(f"specdec serve: {url}", flush=True))
    if died is not None:
        print(f"specdec: the server ended: {died}", file=sys.stderr)
        logging.shutdown()
        raise SystemExit(1)


def _keys(given: Sequence[str], file: Path | None) -> tuple[list[str], dict[str, str]]:
    """Keys without and with a name. Raises ConfigError for one that is given and empty: it would let everybody in."""
    variable = os.environ.get(KEY_VARIABLE)
    if variable is not None and not variable.strip():
        raise ConfigError(f"the variable {KEY_VARIABLE} is set, but empty; put a key into it, or unset it")
    named = {} if file is None else read_key_file(file)
    return [*given, *([] if variable is None else [variable])], named


def _warn_of_open_doors(settings: ServeSettings, bound: socket.socket) -> None:
    """Servers are often meant to be open behind a proxy, so this is said, and not refused."""
    if settings.api_keys or settings.named_keys:
        return
    host = bound.getsockname()[0]
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        logger.warning(
            "%s can be reached from other machines, and no API key is set: anybody may use this server", host
        )
    if "*" in settings.cors_origins:
        logger.warning(
            "any page in a browser on this machine may use this server: --cors-origin '*' without an API key"
        )
