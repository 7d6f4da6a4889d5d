"""The output of the commands: adapters, a model and what it needs, statistics of an answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

from infer.cli.terminal import in_options, quiet, table
from infer.inspection import Inspection
from infer.kernels.errors import InferError
from infer.kernels.gpu.adapters import (
    AdapterInfo,
    choose_adapter,
    list_adapters,
    memory_info,
    not_accepted,
)
from infer.kernels.gpu.device import Device, Limits
from infer.kernels.gpu.native import DEFAULT, installed
from infer.llm import LLM
from infer.models.loading.checkpoint import listed
from infer.progress import size
from infer.results import Result, TopLogprob
from infer.sampling import SamplingParams
from infer.versions import versions

if TYPE_CHECKING:
    from infer.kernels.checks.bench import CheckResult

# The features that kernels make use of where they are there.
_FEATURES = ("subgroups", "shader-f16", "timestamp-query")


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


# infer devices


@dataclass(frozen=True)
class Adapters:
    """The adapters of this machine, the one that is used, and what chose it: "--device",
    "INFER_DEVICE" or "best".

    adapters: of the library that is used, then of the other WebGPU libraries that are installed.
    notes: a line for each library that does not offer all of these adapters.
    """

    adapters: list[AdapterInfo]
    used: AdapterInfo
    chosen_by: str
    notes: tuple[str, ...] = ()

    @classmethod
    def find(cls, device: str | None = None, webgpu: str | None = None) -> Adapters:
        """Find the adapters of this machine. webgpu: ask this library only; None asks all. Raises
        DeviceError if there is no adapter, or none that `device` names."""
        used = choose_adapter(device, webgpu)
        variable = "INFER_DEVICE" if os.environ.get("INFER_DEVICE", "").strip() else "best"
        own, listed, notes = list_adapters(webgpu), [], []
        for name in installed():
            if webgpu is not None or name == used.webgpu:
                continue
            try:
                with quiet():
                    found = list_adapters(name)
            except (InferError, RuntimeError) as error:
                notes.append(str(error))
                continue
            listed += found
            missing, names = [], [adapter.name for adapter in found]
            for adapter in own:
                if adapter.name in names:
                    names.remove(adapter.name)  # another of this name is another card
                else:
                    missing.append(adapter)
            if missing and name != DEFAULT:
                notes.append(not_accepted(name, missing))
        chosen_by = variable if device is None else "--device"
        return cls([*own, *listed], used, chosen_by, tuple(notes))

    def _is_used(self, adapter: AdapterInfo) -> bool:
        return (adapter.index, adapter.webgpu) == (self.used.index, self.used.webgpu)

    def json(self) -> dict[str, Any]:
        entries = []
        for adapter in self.adapters:
            memory = memory_info(adapter)
            entries.append(
                {
                    "index": adapter.index,
                    **adapter_json(adapter),
                    "uuid": adapter.uuid,
                    "used": self._is_used(adapter),
                    "memory_bytes": memory.total,
                    "free_memory_bytes": memory.free,
                    "features": sorted(adapter.features),
                    "matrices": [shape._asdict() for shape in adapter.matrices],
                    "limits": adapter.limits,
                }
            )
        return {
            "adapters": entries,
            "chosen_by": self.chosen_by,
            "webgpu": self.used.webgpu,
            "versions": versions(self.used.webgpu),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        why = {
            "--device": "chosen by --device",
            "INFER_DEVICE": "chosen by INFER_DEVICE",
            "best": "the best; --device or INFER_DEVICE choose another",
        }
        blocks, before = [], self.used.webgpu
        for adapter in self.adapters:
            if adapter.webgpu != before:
                blocks += ["", f"With --webgpu {adapter.webgpu}:"]
                before = adapter.webgpu
            mark = "*" if self._is_used(adapter) else " "
            blocks.append(f"{mark} {adapter.index}: {adapter.name}\n{_adapter_table(adapter)}")
        notes = [line for note in self.notes for line in ("", note)]
        return "\n".join([*blocks, *notes, "", f"* is in use: {why[self.chosen_by]}."])


def adapter_json(adapter: AdapterInfo) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "type": adapter.kind,
        "backend": adapter.backend,
        "driver": adapter.driver,
        "webgpu": adapter.webgpu,
    }


def _adapter_table(adapter: AdapterInfo) -> str:
    has = {name: "yes" if name in adapter.features else "no" for name in _FEATURES}
    limits, memory = Limits.of(adapter.limits), memory_info(adapter)
    return table(
        {
            "type": adapter.kind,
            "backend": adapter.backend,
            "driver": adapter.driver,
            **({} if adapter.uuid is None else {"UUID": adapter.uuid}),
            "WebGPU": adapter.webgpu,
            "features": ", ".join(f"{name} {value}" for name, value in has.items()),
            "matrices": ", ".join(f"{m}x{n}x{k}" for m, n, k in adapter.matrices) or "none",
            "limits": f"binding {size(limits.max_binding)}, buffer {size(limits.max_buffer)}, "
            f"workgroup memory {size(limits.workgroup_storage)}, "
            f"{limits.max_invocations} invocations",
            "memory": "unknown"
            if memory.total is None or memory.free is None
            else f"{size(memory.free)} free of {size(memory.total)}",
        },
        indent="     ",
    )


# infer devices --check


@dataclass(frozen=True)
class Checks:
    """The results of `infer devices --check`: the kernels of an adapter, compared with their
    references."""

    adapter: AdapterInfo
    results: list[CheckResult]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def json(self) -> dict[str, Any]:
        results = [
            # JSON has no NaN, the error of a kernel that did not run
            asdict(r) | {"ok": r.ok, "error": None if isnan(r.error) else r.error}
            for r in self.results
        ]
        return {"adapter": adapter_json(self.adapter), "ok": self.ok, "results": results}

    def text(self) -> str:
        """A line for each kernel, with its largest error, and one for each case that failed."""
        kernels: dict[str, list[CheckResult]] = {}
        for result in self.results:
            kernels.setdefault(result.kernel, []).append(result)
        width, lines = max(map(len, kernels)), []
        for kernel, results in kernels.items():
            failed = [result for result in results if not result.ok]
            if failed:
                verdict = f"FAIL  {len(failed)} of {_count(results, 'case')}"
            else:
                largest = max(result.error for result in results)
                verdict = (
                    f"ok    {_count(results, 'case')}, largest mean square error {largest:.1e}"
                )
            lines.append(f"{kernel:{width}}  {verdict}")
            for result in failed:
                detail = (
                    result.message
                    or f"mean square error {result.error:.1e} above {result.limit:.1e}"
                )
                lines.append(f"    {result.case}: {detail}")
        agree = "all kernels agree with their references"
        fail = "some kernels fail, so its results cannot be trusted"
        return "\n".join([*lines, "", f"{self.adapter}: {agree if self.ok else fail}."])


def check_kernels(adapter: AdapterInfo, progress: Callable[[str], None]) -> Checks:
    """Run every kernel on an adapter; `progress` is told which."""
    from infer.kernels.checks.check import check_device

    with Device(adapter) as device:
        return Checks(
            adapter,
            check_device(device, lambda result: progress(f"{result.kernel}, {result.case}")),
        )


# infer info


@dataclass(frozen=True)
class ModelReport:
    """The output of `infer info`: a model and the memory that it needs."""

    model: Inspection

    def json(self) -> dict[str, Any]:
        adapter = self.model.adapter
        return vars(self.model) | {
            "adapter": None if adapter is None else adapter_json(adapter),
            "verdict": in_options(self.model.verdict),
        }

    def text(self) -> str:
        m = self.model
        chat = "with a chat template" if m.chat_template else "without a chat template"
        bits = 8 * m.disk_bytes / m.parameters
        widened = f", {m.widened} widened" if m.widened else ""
        parts = f"; only the text model of {m.part_of}" if m.part_of else ""
        unused = f"how the files quantise {listed(m.ignored)}"
        missing = "missing: the model cannot be run without tokenizer.json"
        fits = {True: "yes", False: "no", None: "unknown"}[m.fits]
        return table(
            {
                "model": f"{m.name}, {m.architecture}{parts}",
                **({} if m.license is None else {"licence": m.license}),
                "files": m.path,
                "parameters": f"{m.parameters:,}",
                "tokenizer": chat if m.tokenizer else missing,
                "format": f"{m.format or 'floats'}, {bits:.2f} bits per weight",
                **({"not used": unused} if m.ignored else {}),
                **({"note": " ".join(m.notes)} if m.notes else {}),
                **({} if m.lora is None else {"LoRA": m.lora}),
                **({} if m.draft is None else {"draft": f"{m.draft}, counted below"}),
                "weights": f"{size(m.weight_bytes)} in {', '.join(m.dtypes)}{widened} "
                f"({size(m.disk_bytes)}{f' of {m.name}' if m.draft else ''} on disk)",
                "KV cache": f"{size(m.kv_cache_bytes)} for {m.context:,} tokens "
                f"({_kv_cache(m)} in {m.kv_dtype})",
                "other": size(m.other_bytes),
                "total": size(m.total_bytes),
                "context": f"{m.context:,} tokens; the model's maximum is {m.max_context:,}",
                "adapter": m.adapter.name if m.adapter else "none",
                **({} if m.products is None else {"products": _products(m.products)}),
                "fits": f"{fits}: {in_options(m.verdict)}",
            }
        )


def _kv_cache(m: Inspection) -> str:
    """What makes up the KV cache."""
    each = f"{m.kv_bytes_per_token:,} bytes per token"
    if not m.kv_window:
        return each
    if not m.kv_bytes_per_token:
        return f"all layers see the last {m.kv_window:,} alone,"
    windows = f"{size(m.kv_window_bytes)} for layers that see the last {m.kv_window:,}"
    return f"{each}, and {windows},"


def _products(products: str) -> str:
    """The precision of products in words."""
    return "f16, by matrices, with sums in f32" if products == "f16" else products


# infer run


@dataclass(frozen=True)
class Loading:
    """Seconds until a model was ready. compiling: the last of them, in which only kernels were
    waited for."""

    seconds: float
    compiling: float

    def __str__(self) -> str:
        kernels = f", of which {self.compiling:.1f} s for compiling kernels"
        return f"{self.seconds:.1f} s" + (kernels if self.compiling >= 0.05 else "")


def statistics_text(llm: LLM, result: Result, loading: Loading) -> str:
    """Tokens and tokens per second, time to the first token, memory, time to load."""
    timings, memory = result.timings, llm.stats().memory
    prompt = f"{result.prompt_tokens} tokens"
    if timings.prefill_seconds:
        prompt += f", {result.prompt_tps:,.1f} tokens/s"
        prompt += f", first token after {timings.prefill_seconds:.2f} s"
    generation = f"{result.completion_tokens} tokens"
    if timings.decoded_tokens:
        generation += f", {result.generation_tps:,.1f} tokens/s"
    drafts = f"{timings.accepted_tokens} of {timings.drafted_tokens} drafted tokens accepted, "
    drafts += f"{result.step_tokens:.2f} tokens per step"
    return table(
        {
            "prompt": prompt,
            "generation": f"{generation}, finish reason {result.finish_reason}",
            **({"drafts": drafts} if timings.drafted_tokens else {}),
            "memory": f"{size(memory.allocated)} on {llm.device.adapter.name} "
            f"({size(memory.peak)} peak)",
            "loading": str(loading),
        }
    )


def answer_json(result: Result) -> dict[str, Any]:
    """Returns a result as the JSON object that the commands print."""
    return {
        "text": result.text,
        "reasoning": result.reasoning,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "logprobs": None
        if result.logprobs is None
        else [
            _logprob_json(entry) | {"top": [*map(_logprob_json, entry.top)], "start": entry.start}
            for entry in result.logprobs
        ],
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
    }


def _logprob_json(entry: TopLogprob) -> dict[str, Any]:
    """A token's log probability; its bytes as numbers, as OpenAI's API has them."""
    known = {"token_id": entry.token_id, "logprob": entry.logprob, "text": entry.text}
    return known | {"bytes": list(entry.raw)}


def result_json(
    llm: LLM, result: Result, params: SamplingParams, loading: Loading
) -> dict[str, Any]:
    """All about a generation, as a JSON object. params: the sampling parameters that were used."""
    memory = llm.stats().memory
    return answer_json(result) | {
        "prompt_tps": result.prompt_tps,
        "generation_tps": result.generation_tps,
        "drafted_tokens": result.timings.drafted_tokens,
        "accepted_tokens": result.timings.accepted_tokens,
        "ttft_s": result.timings.prefill_seconds,
        "load_s": loading.seconds,
        "compile_s": loading.compiling,
        "memory": {"allocated_bytes": memory.allocated, "peak_bytes": memory.peak},
        "model": llm.name,
        "context": llm.context,
        "seed": params.seed,
        "adapter": adapter_json(llm.device.adapter),
        "products": llm.engine.runner.products,
        "versions": versions(llm.device.adapter.webgpu),
    }


def load_details(llm: LLM, params: SamplingParams, loading: Loading) -> str:
    """The details that --verbose shows after loading: model, adapter, weights, engine options,
    sampling."""
    device, engine = llm.device, llm.engine
    dtypes = sorted({tensor.dtype for tensor in engine.weights.values() if len(tensor.shape) > 1})
    nbytes = sum(tensor.nbytes for tensor in engine.weights.values())
    given = {name: value for name, value in asdict(params).items() if value not in (None, ())}
    return table(
        {
            "model": f"{llm.name}, {llm.config.model_type}, {llm.config.num_hidden_layers} layers",
            "adapter": f"{device.adapter}, driver {device.adapter.driver}",
            "features": _used_features(device),
            "products": _products(engine.runner.products),
            "weights": f"{size(nbytes)} in {', '.join(dtypes)}",
            **({} if not engine.runner.drafter.steps else {"draft": str(engine.runner.drafter)}),
            "engine": ", ".join(f"{k} {v}" for k, v in asdict(engine.options).items()),
            "sampling": ", ".join(f"{name} {value}" for name, value in given.items()),
            "loading": f"{loading}; {device.n_pipelines} kernels",
            "versions": ", ".join(
                f"{name} {value}" for name, value in versions(device.adapter.webgpu).items()
            ),
        }
    )


def _used_features(device: Device) -> str:
    used = {"subgroups": device.subgroups, "shader-f16": device.f16}
    return ", ".join(f"{name} {'yes' if use else 'no'}" for name, use in used.items())
