"""/v1/cache/save and /v1/cache/load: the cache of a prompt as a file with a name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TypeVar

from infer.server.endpoint import Call
from infer.server.errors import ApiError
from infer.server.protocol import CachedTokens, LoadCacheRequest, SaveCacheRequest
from infer.server.tokens import token_ids

RequestT = TypeVar("RequestT", SaveCacheRequest, LoadCacheRequest)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


async def save(call: Call[SaveCacheRequest]) -> None:
    """Computes a prompt, unless the cache has it, and saves its cache in a file."""
    path, engine = _file(call), call.service.engine
    model, adapter = call.service.model(call.request.model)
    ids = await token_ids(call)
    with call.service.admission.admitted(1):
        tokens = await engine.save_cache(path, ids, adapter, call.cache_salt)
    await call.reply(CachedTokens(model, call.request.name, tokens))


async def load(call: Call[LoadCacheRequest]) -> None:
    """Loads a saved cache, from which prompts of this sender can go on."""
    path, engine = _file(call), call.service.engine
    model, adapter = call.service.model(call.request.model)
    if not path.exists():
        raise ApiError(404, f"No cache is saved as {call.request.name}.", param="name")
    tokens = await engine.load_cache(path, adapter, call.cache_salt)
    await call.reply(CachedTokens(model, call.request.name, tokens))


def _file(call: Call[RequestT]) -> Path:
    """Returns the path of the file with the request's name. Each API key has files of its own.
    Raises ApiError (400) for a wrong name, and if the server keeps no files."""
    folder, name = call.service.options.cache_folder, call.request.name
    if folder is None:
        raise ApiError(
            400,
            "This server keeps no files of its cache. Start it with --cache-folder for that.",
        )
    if not _NAME.fullmatch(name):
        raise ApiError(
            400,
            "A name has up to 100 letters, digits, dots, dashes and underscores, the first of them "
            "a letter or a digit.",
            param="name",
        )
    salt = call.cache_salt
    own = "" if salt is None else hashlib.sha256(salt.encode()).hexdigest()[:32] + "-"
    return folder / f"{own}{name}.cache"
