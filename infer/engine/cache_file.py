"""What the cache holds of a prompt, as a file that another process goes on from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import infer
from infer.engine.host_cache import Bytes
from infer.foreign import reason
from infer.kernels.errors import RequestError
from infer.sampling import SamplingParams

if TYPE_CHECKING:
    from infer.engine.engine import Engine

_FORM = "1"
_SAMPLE = 4096  # bytes of a weight's buffer, at its beginning and in its middle
_ARRAYS = "tokens", "pages", "windows", "state"


@dataclass(frozen=True)
class CachedPrompt:
    """tokens: uint32 [positions]. pages: uint8 [pages][bytes], keys and values of all layers, or of
    those without a window where these have pages of their own. windows: uint8 [pages][bytes], of
    layers with a window, beside the last of the pages. state: uint8 [bytes], of layers after all
    tokens; empty without such layers."""

    tokens: NDArray[np.uint32]
    pages: Bytes
    windows: Bytes
    state: Bytes


def write_cache(path: Path, prompt: CachedPrompt, about: Mapping[str, str]) -> None:
    """Write a file, which is there wholly or not at all. about: what has to be the same where it is
    read. Raises RequestError where it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            arrays = {name: getattr(prompt, name) for name in _ARRAYS}
            save_file(arrays, part, {"infer_cache": _FORM, **about})
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"The cache cannot be saved in {path}: {reason(error)}") from error


def read_cache(path: Path, about: Mapping[str, str]) -> CachedPrompt:
    """Read a file. Raises RequestError for one that cannot be read, that is none, and where
    something of `about` differs."""
    try:
        with safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            if told.get("infer_cache") != _FORM:
                raise RequestError(
                    f"{path} is no cache that this version of infer has saved. Save it again."
                )
            for name, value in about.items():
                if told.get(name) != value:
                    raise RequestError(
                        f"{path} was saved with another {name} ({told.get(name)}; here it is "
                        f"{value}). Load the model as it was then, or save the cache again."
                    )
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError) as error:
        raise RequestError(f"The cache cannot be read from {path}: {reason(error)}") from error
    return CachedPrompt(**arrays)


class CacheFiles:
    """Saves prompts of an engine's cache in files, and loads them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def save(
        self, path: Path, ids: Sequence[int], adapter: str | None, cache_salt: str | None
    ) -> int:
        """Computes what is not cached of a prompt, and saves it, up to the last position from which
        layers can go on. Returns how many positions that are. Raises RequestError."""
        engine, once = self._engine, SamplingParams(max_tokens=1).resolved({})
        for _ in engine.generate(ids, once, adapter=adapter, cache_salt=cache_salt):
            pass
        with engine.changing():
            prompt = engine.tier.copy_out(ids, engine.key_of(ids, adapter, cache_salt))
        if not len(prompt.tokens):
            raise RequestError(
                f"Nothing can be saved of a prompt of {len(ids):,} tokens: it is too short, or "
                "others have taken its place in the cache. Give a longer one, or ask again."
            )
        write_cache(path, prompt, self._about(adapter))
        return len(prompt.tokens)

    def load(self, path: Path, adapter: str | None, cache_salt: str | None) -> int:
        """Lets prompts go on from the one of a file. Returns how many positions that are. Raises
        RequestError."""
        engine = self._engine
        engine.check_adapter(adapter)
        prompt = read_cache(path, self._about(adapter))
        ids = prompt.tokens.tolist()
        if not engine.tier.takes(prompt):
            raise RequestError(f"{path} is damaged. Save the cache again.")
        engine.check_prompt(ids, room=0)
        with engine.changing():
            has_room = engine.tier.copy_in(prompt, engine.key_of(ids, adapter, cache_salt))
        if not has_room:
            raise RequestError(
                f"The cache has no room for the {len(ids):,} positions of {path} beside the "
                "answers that are generated. Ask again later, or give it more memory."
            )
        return len(ids)

    def _about(self, adapter: str | None) -> dict[str, str]:
        """What a file depends on besides its tokens."""
        return {
            "version of infer": infer.__version__,
            "model, or other dtypes of weights": self._fingerprint,
            "kv_dtype": self._engine.options.kv_dtype,
            "cache for layers with a window": "no" if self._engine.pool.windows is None else "yes",
            "adapter": adapter or "",
        }

    @cached_property
    def _fingerprint(self) -> str:
        """Of the weights as the GPU has them: their shapes, dtypes, and samples of their bytes."""
        engine, digest = self._engine, hashlib.blake2b(digest_size=16)
        changes = [*engine.adapters.always.values(), *engine.adapters.by_row.values()]
        beside = [(f"{i}", part) for i, own in enumerate(changes) for part in (own.a, own.b)]
        for name, weight in (*sorted(engine.weights.items()), *beside):
            digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
            for buffer in weight.buffers:
                for start in sorted({0, buffer.nbytes // 2 // 4 * 4}):
                    count = min(_SAMPLE, buffer.nbytes - start)
                    digest.update(engine.device.read(buffer, np.uint8, count, start).tobytes())
        return digest.hexdigest()
