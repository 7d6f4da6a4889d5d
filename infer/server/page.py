"""The page at /, to chat with the model in a browser: the files of page/, sent as one."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from html.entities import html5
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

_IMPORT = re.compile(r'^import (?:[^;"]* from )?"\./(.*)";\n', re.M)
_HTML = "text/html; charset=utf-8"
_LIBRARIES = "temml", "prism"  # maths and colours of code, each with its licence beside it
_EXPORT = re.compile(r"^export ", re.M)


@cache
def _page() -> tuple[bytes, bytes, dict[str, str]]:
    """Its text, the same in gzip, and its headers. The policy has a browser run the page's own
    scripts and no others, and ask this server alone."""
    font = base64.b64encode(_file("vendor/temml.woff2").read_bytes()).decode()
    parts = {
        "style": _read("vendor/temml.css").replace("Temml.woff2", f"data:font/woff2;base64,{font}")
        + _read("page.css"),
        "entities": _entities(),
        "libraries": "\n".join(_inline(_read(f"vendor/{name}.min.js")) for name in _LIBRARIES),
        "script": '"use strict";\n' + _inline("\n".join(_modules("main.js", set()))),
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
        "font-src": "data:",
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
        "ETag": f'W/"{hashlib.sha256(text.encode()).hexdigest()}"',  # weak: of both forms
        "Vary": "Accept-Encoding",
    }
    return text.encode(), gzip.compress(text.encode(), mtime=0), headers


def _file(name: str) -> Traversable:
    return files("infer.server").joinpath("page", name)


def _read(name: str) -> str:
    return _file(name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script without what would end its element, or have that end later: in strings and regular
    expressions \\x3c means the same."""
    return re.sub(r"<(?=!--|/?script)", r"\\x3c", script, flags=re.I)


def _modules(name: str, seen: set[str]) -> Iterator[str]:
    """The modules that one imports, in the order in which a browser would run them, and then
    itself. They share a scope, so that no name may be in two of them, and none needs to be
    imported."""
    seen.add(name)
    text = _read(name)
    for imported in _IMPORT.findall(text):
        if imported not in seen:
            yield from _modules(imported, seen)
    yield _EXPORT.sub("", _IMPORT.sub("", text))


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
    text, packed, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers=headers | {"Content-Encoding": "gzip"}, media_type=_HTML)
    return Response(text, headers=headers, media_type=_HTML)
