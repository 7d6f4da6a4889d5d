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
# Libraries for maths and for colouring code; each has its licence file beside it.
_LIBRARIES = "temml", "prism"
_EXPORT = re.compile(r"^export ", re.M)


@cache
def _page() -> tuple[bytes, bytes, dict[str, str]]:
    """Returns the text of the page, the text compressed with gzip, and the headers of the response.
    The headers' policy lets a browser run the page's own scripts alone, and send requests to this
    server alone."""
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
        # A browser asks each time whether its copy is still the newest.
        "Cache-Control": "no-cache",
        # The tag is weak: the plain and the compressed form share it.
        "ETag": f'W/"{hashlib.sha256(text.encode()).hexdigest()}"',
        "Vary": "Accept-Encoding",
    }
    return text.encode(), gzip.compress(text.encode(), mtime=0), headers


def _file(name: str) -> Traversable:
    return files("infer.server").joinpath("page", name)


def _read(name: str) -> str:
    return _file(name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """Makes a script safe to stand within a script element: text that would end the element, or
    move its end, is escaped. In strings and regular expressions \\x3c means the same as <."""
    return re.sub(r"<(?=!--|/?script)", r"\\x3c", script, flags=re.I)


def _modules(name: str, seen: set[str]) -> Iterator[str]:
    """Yields the modules that the module `name` imports, in the order in which a browser would run
    them, and then that module itself. All modules share one scope: a name may be defined in only
    one of them, and none needs to be imported."""
    seen.add(name)
    text = _read(name)
    for imported in _IMPORT.findall(text):
        if imported not in seen:
            yield from _modules(imported, seen)
    yield _EXPORT.sub("", _IMPORT.sub("", text))


def _entities() -> str:
    """Returns a JSON object with the characters that have names in markdown, by name."""
    named = {name[:-1]: text for name, text in html5.items() if name.endswith(";")}
    return json.dumps(named, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")


def _hashes(text: str, tag: str) -> str:
    """Returns the hashes by which a Content-Security-Policy recognises the page's own elements with
    this tag."""
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
