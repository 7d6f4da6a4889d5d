"""What the cache holds of a prompt, as a file that another process goes on from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from infer.boundaries import reason
from infer.engine.host_memory import Bytes
from infer.kernels.errors import RequestError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.tensor import GpuTensor
from infer.models.loading.lora import Adapters
from infer.version import VERSION

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
    """Files of the cache of one model, as its weights are on the GPU."""

    def __init__(
        self,
        device: Device,
        weights: Mapping[str, GpuTensor],
        adapters: Adapters,
        kv_dtype: str,
        has_windows: bool,
    ) -> None:
        """has_windows: layers with a window have pages of their own."""
        self._device, self._weights, self._adapters = device, weights, adapters
        self._kv_dtype, self._has_windows = kv_dtype, has_windows

    def write(self, path: Path, prompt: CachedPrompt, adapter: str | None) -> None:
        """Raises RequestError where there is nothing to save, and where it cannot be saved."""
        if not len(prompt.tokens):
            raise RequestError(
                "Nothing can be saved of this prompt: it is too short, or others have taken its "
                "place in the cache. Give a longer one, or ask again."
            )
        write_cache(path, prompt, self._about(adapter))

    def read(self, path: Path, adapter: str | None) -> CachedPrompt:
        """Raises RequestError for a file that cannot be read, that is none, or of another model."""
        return read_cache(path, self._about(adapter))

    def _about(self, adapter: str | None) -> dict[str, str]:
        """What a file depends on besides its tokens."""
        return {
            "version of infer": VERSION,
            "model, or other dtypes of weights": self.fingerprint,
            "kv_dtype": self._kv_dtype,
            "cache for layers with a window": "yes" if self._has_windows else "no",
            "adapter": adapter or "",
        }

    @cached_property
    def fingerprint(self) -> str:
        """Stands for the weights as the GPU has them: their shapes, dtypes, and samples of their
        bytes."""
        digest = hashlib.blake2b(digest_size=16)
        changes = [*self._adapters.always.values(), *self._adapters.by_row.values()]
        beside = [(f"{i}", part) for i, own in enumerate(changes) for part in (own.a, own.b)]
        for name, weight in (*sorted(self._weights.items()), *beside):
            digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
            for buffer in weight.buffers:
                for start in sorted({0, buffer.nbytes // 2 // 4 * 4}):
                    count = min(_SAMPLE, buffer.nbytes - start)
                    digest.update(self._device.read(buffer, np.uint8, count, start).tobytes())
        return digest.hexdigest()
