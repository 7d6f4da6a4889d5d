"""Prompts in files: saved from the cache of an engine, and loaded into it."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from infer.engine.answers import Jobs
from infer.engine.cache_file import CacheFiles
from infer.engine.host_tier import HostTier
from infer.engine.prompts import Prompt
from infer.engine.runner import Runner
from infer.engine.token_engine import Request, TokenAnswer
from infer.kernels.errors import RequestError
from infer.sampling import SamplingParams
from infer.version import VERSION


class CachingEngine(Protocol):
    """The methods that are called of the engine whose cache it is."""

    def answer(self, request: Request) -> TokenAnswer:
        """Begin an answer."""

    def changing(self) -> AbstractContextManager[None]:
        """A block in which this thread has the turn and changes what is cached."""

    def check_prompt(self, prompt_ids: Sequence[int], room: int = 1) -> None:
        """Raises RequestError for a prompt that the engine cannot have."""


class PromptFiles:
    """Saves prompts to files and loads them."""

    def __init__(self, runner: Runner, tier: HostTier, jobs: Jobs) -> None:
        self._tier, self._jobs = tier, jobs
        own, has_windows = runner.own, runner.caches.windows is not None
        of = runner.device, own.weights, own.adapters, runner.options.kv_dtype, has_windows
        self._files, self._runner = CacheFiles(*of), runner

    @property
    def about_all(self) -> Hashable:
        """All that keys, values and states of prompts depend on besides their tokens and key."""
        runner = self._runner
        gpu = runner.device.adapter.name if runner.options.invariant else ""
        has_windows = runner.caches.windows is not None
        own = runner.options.kv_dtype, has_windows, runner.own.adapters.names
        return VERSION, self._files.fingerprint, own, runner.products, gpu

    def save(
        self,
        engine: CachingEngine,
        path: str,
        ids: Sequence[int],
        adapter: str | None,
        cache_salt: str | None,
    ) -> Generator[int, None, None]:
        """Save a prompt in a file, as `TokenEngine.save_cache` says."""
        once = SamplingParams(max_tokens=1).resolved({})
        for _ in engine.answer(
            Request(Prompt.of(ids), once, adapter=adapter, cache_salt=cache_salt)
        ):
            pass
        with engine.changing():
            saved = self._tier.copy_out(ids, self._jobs.key(ids, adapter, cache_salt))
        self._files.write(Path(path), saved, adapter)
        yield len(saved.tokens)

    def load(
        self, engine: CachingEngine, path: str, adapter: str | None, cache_salt: str | None
    ) -> Generator[int, None, None]:
        """Load a prompt from a file, as `TokenEngine.load_cache` says."""
        prompt = self._files.read(Path(path), adapter)
        ids: list[int] = prompt.tokens.tolist()
        if not self._tier.takes(prompt):
            raise RequestError(f"{path} is damaged. Save the cache again.")
        engine.check_prompt(ids, room=0)
        with engine.changing():
            has_room = self._tier.copy_in(prompt, self._jobs.key(ids, adapter, cache_salt))
        if not has_room:
            raise RequestError(
                f"The cache has no room for the {len(ids):,} positions of {path} beside the "
                "answers that are generated. Ask again later, or give it more memory."
            )
        yield len(ids)
