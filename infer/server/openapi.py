"""/openapi.json and /docs: what the server takes and gives, made from the types of its messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec
from starlette.types import ASGIApp

import infer

_REF = "#/components/schemas/"


@dataclass(frozen=True)
class Operation:
    """An endpoint, as the OpenAPI document describes it. takes: the type of the request's body.
    gives: the type of the response, None for plain text. stream: the response's content type if the
    request asks for a stream."""

    method: str
    path: str
    summary: str
    endpoint: ASGIApp
    gives: Any
    takes: Any = None
    stream: str | None = None


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Returns the OpenAPI document of these operations, by path and method."""
    types = [each for op in operations for each in (op.takes, op.gives) if each is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    of = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for op in operations:
        content: dict[str, Any] = {"text/plain": {}}
        if op.gives is not None:
            content = {"application/json": {"schema": of[id(op.gives)]}}
        if op.stream is not None:
            content[op.stream] = {}
        described: dict[str, Any] = {
            "summary": op.summary,
            "responses": {
                "200": {"description": "The answer.", "content": content},
                "default": {"description": "What was wrong.", "content": {"application/json": {}}},
            },
        }
        if op.takes is not None:
            body = {"application/json": {"schema": of[id(op.takes)]}}
            described["requestBody"] = {"required": True, "content": body}
        if (names := _parameters(op.path)) != []:
            described["parameters"] = names
        path = op.path.replace(":path}", "}")
        paths.setdefault(path, {})[op.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer serve", "version": infer.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _parameters(path: str) -> list[dict[str, Any]]:
    """Returns the OpenAPI parameters of a path: one for each name in braces."""
    names = [part[1:].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    string = {"type": "string"}
    return [{"name": n, "in": "path", "required": True, "schema": string} for n in names]


def page(document: Mapping[str, Any]) -> str:
    """Returns the OpenAPI document as a page of HTML for people. The page loads nothing from
    elsewhere."""
    parts = [
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>{_operation(op)}"
        for path, methods in document["paths"].items()
        for method, op in methods.items()
    ]
    schemas = document["components"]["schemas"]
    parts += [_schema(name, schema) for name, schema in sorted(schemas.items())]
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>For programs: <a href=openapi.json>openapi.json</a>.</p>"
        + "".join(parts)
    )


_STYLE = (
    ":root{color-scheme:light dark;font:16px/1.5 system-ui}"
    "body{max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font-size:1rem;margin:2rem 0 0;border-top:1px solid #8884;padding-top:1rem}"
    "p{margin:.25rem 0}table{border-collapse:collapse}"
    "td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
)


def _operation(op: Mapping[str, Any]) -> str:
    text = f"<p>{escape(op['summary'])}</p>"
    body = op.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        text += f"<p>takes {_type(body['schema'])}</p>"
    contents = op["responses"]["200"]["content"].items()
    kinds = [_type(each["schema"]) if "schema" in each else escape(kind) for kind, each in contents]
    return f"{text}<p>gives {' or '.join(kinds)}</p>"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code><td>{_type(value)}<td>{note}"
        for key, value, note in _properties(schema)
    )
    text = escape(schema.get("description", ""))
    return f"<h2 id='{escape(name)}'>{escape(name)}</h2><p>{text}</p><table>{rows}</table>"


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    for key, value in schema.get("properties", {}).items():
        default = value.get("default")
        note = "" if default in (None, [], {}, "") else f"{escape(json.dumps(default))} if left out"
        yield key, value, "required" if key in schema.get("required", ()) else note


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REF))
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))
