"""The page at /, to chat with the model in a browser: the files of page/, sent as one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from html.entities import html5
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_IMPORT = re.compile(r'^import (?:[^;"]* from )?"\./(.*)";\n', re.M)
_EXPORT = re.compile(r"^export ", re.M)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """Its text, and its headers. The policy has a browser run the page's own scripts and no others,
    and ask this server alone."""
    parts = {
        "style": _read("page.css"),
        "entities": _entities(),
        "script": '"use strict";\n' + "\n".join(_modules("main.js", set())),
    }
    text = _read("page.html")
    for name, part in parts.items():
        text = text.replace(f"{{{{ {name} }}}}", part)
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(text, "script"),
        "style-src": _hashes(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # a browser asks whether it has the newest
        "ETag": f'"{hashlib.sha256(text.encode()).hexdigest()}"',
    }
    return text, headers


def _read(name: str) -> str:
    return files("infer.server").joinpath("page", name).read_text(encoding="utf-8")


def _modules(name: str, seen: set[str]) -> Iterator[str]:
    """The modules that one imports, in the order in which a browser would run them, and then
    itself. They share a scope, so that no name may be in two of them, and none needs to be
    imported."""
    seen.add(name)
    text = _read(name)
    for imported in _IMPORT.findall(text):
        if imported not in seen:
            yield from _modules(imported, seen)
    # What would end the script's element, or have it end later, is neither in a string nor a regex.
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    yield re.sub(r"<(?=!--|/?script)", r"\\x3c", text, flags=re.I)


def _entities() -> str:
    """The characters that markdown has names for, as JSON."""
    named = {name[:-1]: text for name, text in html5.items() if name.endswith(";")}
    return json.dumps(named, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")


def _hashes(text: str, tag: str) -> str:
    """By which a policy knows the page's own elements."""
    contents = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
    digests = [hashlib.sha256(content.encode()).digest() for content in contents]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


async def page(request: Request) -> Response:
    text, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(text, headers=headers, media_type="text/html")
