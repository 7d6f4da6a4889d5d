"""/metrics, in Prometheus' format and under vLLM's names, which dashboards and routers know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from infer.engine.token_engine import EngineStats
from infer.results import Chunk, Result
from infer.server.engine import Answer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)
_SECONDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2.5, 5))
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))


class Metrics:
    """The metrics of one server. Only one thread may use them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*_LABELS, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, registry=registry, buckets=buckets)

        self._prompt = counter("prompt_tokens", "Tokens of prompts, those too that were cached.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._ended = counter("request_success", "Answers that have ended.", "finished_reason")
        self._first = histogram("time_to_first_token_seconds", "From an answer's begin.")
        self._next = histogram("inter_token_latency_seconds", "From a token to the next.")
        self._queue = histogram(
            "request_queue_time_seconds", "From an answer's begin to its prompt's."
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From a prompt's begin to its answer's first token."
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From an answer's first token to its last."
        )
        self._whole = histogram("e2e_request_latency_seconds", "From an answer's begin to its end.")
        self._prompts = histogram("request_prompt_tokens", "Of each answer's prompt.", _TOKENS)
        self._answers = histogram("request_generation_tokens", "Of each answer.", _TOKENS)

    def watched(self, model: str, answer: Answer) -> Answer:
        """Returns an answer that passes this one on and counts its tokens. model: the model's name
        for clients."""
        return _Watched(self, model, answer)

    def text(self, stats: Mapping[str, EngineStats]) -> bytes:
        """Returns all metrics in Prometheus' text format. stats: the present statistics of each
        engine, by the model's name."""
        now = CollectorRegistry()
        now.register(_Now(stats))
        return generate_latest(self._registry) + generate_latest(now)


def _usage(stats: EngineStats) -> float:
    cache = stats.cache
    return cache.in_use / (cache.in_use + cache.cached + cache.free)


_Value = Callable[[EngineStats], float]


def _host(name: str) -> _Value:
    """Returns a function that reads a value of the cache in host memory; it gives 0 if there is no
    such cache."""
    return lambda stats: 0 if stats.host_cache is None else getattr(stats.host_cache, name)


_GAUGES: dict[str, tuple[str, _Value]] = {
    "num_requests_running": ("Answers that are generated.", lambda s: s.running),
    "num_requests_waiting": ("Answers that wait for their turn.", lambda s: s.waiting),
    "gpu_memory_bytes": ("Of the GPU, that the model takes.", lambda s: s.memory.allocated),
    "kv_cache_usage_perc": ("The part of the KV cache that is in use, from 0 to 1.", _usage),
    "state_places": ("Places for states of layers that are kept.", lambda s: s.cache.state_places),
    "state_places_used": ("States of layers that are kept.", lambda s: s.cache.states),
    "window_pages": (
        "Pages of layers with a window, if they have pages of their own.",
        lambda s: s.cache.window_pages,
    ),
    "window_pages_used": (
        "Pages of layers with a window that are in use or kept.",
        lambda s: s.cache.window_pages_used,
    ),
    "host_cache_bytes": ("Host memory for the cache that is in use.", _host("nbytes")),
    "host_cache_capacity_bytes": (
        "Host memory for the caches of all models, at most.",
        _host("capacity"),
    ),
}
_COUNTERS: dict[str, tuple[str, _Value]] = {
    "num_preemptions": ("Answers that had to wait again.", lambda s: s.preemptions),
    "prefix_cache_queries": ("Tokens looked up in the cache.", lambda s: s.cache.lookups),
    "prefix_cache_hits": ("Tokens found in the cache.", lambda s: s.cache.hits),
    "host_cache_hits": ("Tokens that came back from host memory.", _host("restored")),
    "spec_decode_num_drafts": ("Drafts that were verified.", lambda s: s.drafts),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", lambda s: s.drafted),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that were right.", lambda s: s.accepted),
}


def _config(stats: EngineStats) -> dict[str, str]:
    """Returns the properties of the KV cache that never change, as labels."""
    cache = stats.cache
    pages = cache.in_use + cache.cached + cache.free
    return {
        "block_size": f"{cache.page_size}",
        "num_gpu_blocks": f"{pages}",
        "kv_cache_size_tokens": f"{cache.tokens}",
        "cache_dtype": stats.kv_dtype,
    }


class _Now(Collector):
    """Collects the metrics that engines count themselves."""

    def __init__(self, stats: Mapping[str, EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        kinds = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
        for kind, families in kinds:
            for name, (text, value) in families.items():
                family = kind(f"vllm:{name}", text, labels=_LABELS)
                for model, stats in self._stats.items():
                    family.add_metric((model,), value(stats))
                yield family
        config = InfoMetricFamily("vllm:cache_config", "The KV cache.", labels=_LABELS)
        for model, stats in self._stats.items():
            config.add_metric((model,), _config(stats))
        yield config


class _Watched:
    def __init__(self, metrics: Metrics, model: str, answer: Answer) -> None:
        self._metrics, self._model, self._answer = metrics, model, answer
        # These are looked up once, and not at every token.
        self._generated = metrics._generated.labels(model)
        self._next = metrics._next.labels(model)
        self._begun = self._last = 0.0
        self._count, self._ended = 0, False

    @property
    def result(self) -> Result:
        return self._answer.result

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Chunk:
        if not self._begun:
            self._begin()
        try:
            chunk = await self._answer.__anext__()
        except StopAsyncIteration:
            self._end(self.result.finish_reason)
            raise
        except Exception:
            self._end("error")
            raise
        if chunk.token_id is not None:
            now = time.monotonic()
            if self._count:
                self._next.observe(now - self._last)
            else:
                self._metrics._first.labels(self._model).observe(now - self._begun)
                times = self.result.timings
                self._metrics._queue.labels(self._model).observe(times.queue_seconds)
                computing = times.prefill_seconds - times.queue_seconds
                self._metrics._prefill.labels(self._model).observe(computing)
            self._generated.inc()
            self._last = now
            self._count += 1
        return chunk

    def _begin(self) -> None:
        self._begun = time.monotonic()
        metrics, model = self._metrics, self._model
        metrics._prompt.labels(model).inc(self.result.prompt_tokens)
        metrics._prompts.labels(model).observe(self.result.prompt_tokens)

    def _end(self, reason: str) -> None:
        if self._ended or not self._begun:
            return
        self._ended = True
        metrics, model = self._metrics, self._model
        metrics._ended.labels(model, reason).inc()
        metrics._whole.labels(model).observe(time.monotonic() - self._begun)
        metrics._answers.labels(model).observe(self._count)
        if self._count:
            metrics._decode.labels(model).observe(self.result.timings.decode_seconds)

    async def aclose(self) -> None:
        await self._answer.aclose()
        self._end("abort")
