"""`specdec serve`: an OpenAI-compatible HTTP server over one engine."""

import logging
import os
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

from specdec.commands.settings import engine_config, load_engine, quiet_libraries
from specdec.config import SpecConfig
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server import address, listen, run_app
from specdec.serving.settings import ServeSettings, sampling_defaults

KEY_VARIABLE = "SPECDEC_API_KEY"


def serve(
    *,
    target: str,
    drafter: str,
    host: str,
    port: int,
    served_model_name: Sequence[str],
    api_key: Sequence[str],
    batch_size: int,
    max_waiting: int,
    max_model_len: int | None,
    page_size: int,
    deterministic: bool,
    num_steps: int,
    draft_topk: int,
    num_draft_tokens: int | None,
    dtype: str | None,
    device: str | None,
    chat_template: Path | None,
    tool_parser: str,
    max_body_bytes: int,
    stop_seconds: float,
    cors_origin: Sequence[str],
) -> None:
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    keys = [*api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    spec = SpecConfig(num_steps, draft_topk, num_draft_tokens)
    sizes = {"max_model_len": max_model_len, "page_size": page_size, "deterministic": deterministic}
    config = engine_config(batch_size, dtype, device, **sizes)
    template = None if chat_template is None else chat_template.read_text("utf-8")
    settings = ServeSettings(
        model_names=served_model_name or [target],
        api_keys=keys,
        cors_origins=cors_origin,
        max_body_bytes=max_body_bytes,
        stop_seconds=stop_seconds,
        tool_parser=tool_parser,
    )
    with listen(host, port) as bound:
        engine = load_engine(target, drafter, spec, config)
        if engine.tokenizer is None:
            raise ConfigError(f"{target!r} has no tokenizer, and a server reads and writes text; give one that has")
        if template is not None:
            engine.tokenizer.chat_template = template
        settings = replace(settings, defaults=sampling_defaults(engine.target.model.generation_config))
        with engine:
            served = AsyncEngine(engine, max_waiting=max_waiting)
            run_app(served, settings, bound, lambda: print(f"specdec serve: {address(bound)}", flush=True))
