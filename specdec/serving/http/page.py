"""GET /: a page for trying the model. `page.html`, with `markdown.js` inserted, uses this server's API.

The content security policy allows only the file's own script and style, by their digests, and requests to this server.
"""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")
PAGE = PAGE.replace("{{markdown.js}}", Path(__file__).with_name("markdown.js").read_text("utf-8"))


def _digests(tag: str) -> str:
    """Digests of the text between these tags, in the policy's form."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


HEADERS = {
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


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers=HEADERS)
