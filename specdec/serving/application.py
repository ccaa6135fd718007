"""The HTTP application: routes, errors and middleware, over one engine.

Each route has its own file. The application does not own the engine: the caller that made the engine closes it.
"""

from fastapi import FastAPI, Response

from specdec import __version__
from specdec.serving import metrics
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http import faults, middleware, page, probes
from specdec.serving.http.events import CLIENT_GONE, ClientGoneError
from specdec.serving.openai import chat_completions as chat
from specdec.serving.openai import completions, openapi, responses, token_routes
from specdec.serving.openai import models_route as models
from specdec.serving.server_settings import ServeSettings
from specdec.serving.state import ServeState
from specdec.serving.tools.tool_parsers import tool_parser_for


def create_app(engine: AsyncEngine, settings: ServeSettings) -> FastAPI:
    """An OpenAI-compatible application."""
    app = FastAPI(
        title="specdec",
        version=__version__,
        redirect_slashes=False,
        openapi_url=None,  # openapi.py has its own route
        docs_url=None,  # pages that load scripts from elsewhere; the description itself is at /openapi.json
        redoc_url=None,
    )
    parser = tool_parser_for(engine.tokenizer, name=settings.tool_parser)
    app.state.serve = ServeState(engine, settings, parser)
    app.state.metrics = metrics.MetricsCollector(engine, settings.model_names[0])
    faults.install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, lambda request, error: Response(status_code=CLIENT_GONE))
    middleware.install_middleware(app, settings)
    for route in (chat, completions, metrics, models, page, probes, responses, token_routes):
        app.include_router(route.router)
    openapi.install_openapi(app, settings)
    return app
