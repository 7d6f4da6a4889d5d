"""The page at /, to chat with the model in a browser: one file, which asks the endpoints here."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html.entities import html5
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


@cache
def _page() -> tuple[str, str]:
    """Its text, with the characters that markdown has names for, and the policy by which a browser
    runs the page's own script and no other, and asks this server alone."""
    text = files("infer.server").joinpath("page.html").read_text(encoding="utf-8")
    named = {name[:-1]: text for name, text in html5.items() if name.endswith(";")}
    entities = json.dumps(named, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")
    text = text.replace('id="entities">', f'id="entities">{entities}')
    policy = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(text: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


async def page(request: Request) -> Response:
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")
