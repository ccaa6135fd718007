"""The HTTP application: routes, errors and middleware, over one engine; and GET /, a page for trying the model.

Each other route has its own file. The application does not own the engine: the caller that made the engine closes it.
The page is `http/page.html`, with `markdown.js` inserted. Its content security policy allows only the file's own script
and style, by their digests, and requests to this server.
"""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import HTMLResponse

from specdec import __version__
from specdec.serving import metrics
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http import faults, middleware, probes
from specdec.serving.http.events import CLIENT_GONE, ClientGoneError
from specdec.serving.openai import chat_completions as chat
from specdec.serving.openai import completions, model_routes, openapi
from specdec.serving.responses import responses
from specdec.serving.server_settings import ServeSettings
from specdec.serving.state import ServeState
from specdec.serving.tools.tool_parsers import tool_parser_for

page_router = APIRouter()
PAGE_FOLDER = Path(__file__).parent / "http"
PAGE = (PAGE_FOLDER / "page.html").read_text("utf-8")
PAGE = PAGE.replace("{{markdown.js}}", (PAGE_FOLDER / "markdown.js").read_text("utf-8"))


def _digests(tag: str) -> str:
    """Digests of the text between these tags, in the policy's form."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


PAGE_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digests('script')}",
            f"style-src {_digests('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@page_router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


def create_app(engine: AsyncEngine, settings: ServeSettings) -> FastAPI:
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
    for route in (chat, completions, metrics, model_routes, probes, responses):
        app.include_router(route.router)
    app.include_router(page_router)
    openapi.install_openapi(app, settings)
    return app
