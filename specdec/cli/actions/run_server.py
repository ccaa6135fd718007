"""`specdec serve`: an OpenAI-compatible HTTP server over one engine.

A file of API keys has one per line, optionally after a name for the log; blank lines are ignored, and text after a # at
the beginning or after white space. Messages never contain keys.

    research      sk-4f1c...
    sk-7d20...                    a key without a name is named after its line, such as line-2
"""

import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
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

from specdec.cli.actions.settings import load_engine, quiet_libraries, shared_fields
from specdec.cli.commands import ServeOptions
from specdec.cli.options import read_text_file
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.middleware import send_traces_to
from specdec.serving.logs import set_up
from specdec.serving.server import address, listen, require_certificate, run_app
from specdec.serving.server_settings import ServeSettings, sampling_defaults

logger = logging.getLogger("specdec.serving")

KEY_VARIABLE = "SPECDEC_API_KEY"


def run_server(options: ServeOptions) -> None:
    prepare_process(options)
    settings = serve_settings(options)
    require_certificate(settings)
    read_template(options)
    with listen(options.host, options.port) as bound:
        _warn_of_open_doors(settings, bound)
        served, settings = load_served(options, settings)
        url = address(bound, "http" if settings.ssl_certfile is None else "https")
        with served.engine:
            died = run_app(served, settings, bound, lambda: print(f"specdec serve: {url}", flush=True))
    if died is not None:
        print(f"specdec: the server ended: {died}", file=sys.stderr)
        logging.shutdown()
        raise SystemExit(1)


def prepare_process(options: ServeOptions) -> None:
    """Set up log and traces of a process that serves."""
    quiet_libraries()
    set_up(options.log_format, logging.WARNING)
    logging.getLogger("specdec").setLevel((options.log_level or "info").upper())
    if options.otlp_traces_endpoint is not None:
        send_traces_to(options.otlp_traces_endpoint)


def serve_settings(options: ServeOptions) -> ServeSettings:
    """Settings of the application that need no model. Raises ConfigError."""
    return ServeSettings(
        model_names=options.served_model_name or [options.target],
        api_keys=_keys(options.api_key, options.api_key_file),
        cors_origins=options.cors_origin,
        show_cached_tokens=options.cached_tokens,
        **shared_fields(options, ServeSettings),
    )


def read_template(options: ServeOptions) -> str | None:
    """The text of the file of --chat-template. Raises ConfigError."""
    file = options.chat_template
    return None if file is None else read_text_file(file, "the file of --chat-template")


def load_served(options: ServeOptions, settings: ServeSettings) -> tuple[AsyncEngine, ServeSettings]:
    """The engine to serve, and the settings with its model's sampling defaults. The caller closes the engine."""
    template = read_template(options)
    engine = load_engine(options, options.batch_size)
    if engine.tokenizer is None:
        raise ConfigError(f"{options.target!r} has no tokenizer, but a server reads and writes text; name one")
    if template is not None:
        engine.tokenizer.chat_template = template
    served = AsyncEngine(
        engine,
        max_waiting=options.max_waiting,
        intake_seconds=options.timeout_intake,
        per_client=options.client_concurrency,
    )
    return served, replace(settings, defaults=sampling_defaults(engine.target.model.generation_config))


def _keys(given: Sequence[str], file: Path | None) -> dict[str, str]:
    """API keys by name. Raises ConfigError for an empty variable: it would admit anyone."""
    variable = os.environ.get(KEY_VARIABLE)
    if variable is not None and not variable.strip():
        raise ConfigError(f"the variable {KEY_VARIABLE} is set, but empty; put a key into it, or unset it")
    return by_name([*given, *([] if variable is None else [variable])], {} if file is None else read_key_file(file))


def by_name(keys: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """All keys by unique names: the named keys, then the others as key-1, key-2, ..., skipping taken names."""
    free = (name for number in count(1) if (name := f"key-{number}") not in named)
    return {**named, **dict(zip(free, [key for key in keys if key not in named.values()], strict=False))}


def read_key_file(path: Path) -> dict[str, str]:
    """Read a file: name -> key. Raises ConfigError, with the line's number, for an invalid or repeated key, or if there
    is no file."""
    keys: dict[str, str] = {}
    for number, line in enumerate(read_text_file(path, "the file of API keys").splitlines(), 1):
        place = f"line {number} of {str(path)!r}"
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if not words:
            continue
        if len(words) > 2:
            raise ConfigError(f"{place} has {len(words)} words; a name and a key, or a key alone, are expected")
        name, key = words if len(words) == 2 else (f"line-{number}", words[0])
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{place}: the key holds characters that no HTTP header does; give printable ASCII")
        if name in keys:
            raise ConfigError(f"{place}: the name {name!r} is there already; give each key its own")
        if key in keys.values():
            raise ConfigError(f"{place}: this key is there already, under another name; take one out")
        keys[name] = key
    if not keys:
        raise ConfigError(f"the file of API keys {str(path)!r} holds no key; a server without keys accepts everyone")
    return keys


def _warn_of_open_doors(settings: ServeSettings, bound: socket.socket) -> None:
    """Warn if requests need no key. A server behind a proxy may be open on purpose, so this is not an error."""
    if settings.api_keys:
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
