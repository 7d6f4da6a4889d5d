"""The results of a benchmark: as data, as JSON, and as tables like llama-bench's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from infer.kernels.gpu.native import DEFAULT

SCHEMA = 1  # of the JSON; goes up when a field changes its meaning


@dataclass(frozen=True)
class Row:
    """One test. Times are in seconds, of every run after the warm-up.

    tokens: of one run. tps: tokens per second, mean of the runs, and its standard deviation.
    Decode has bytes_per_token, bandwidth (bytes per second) and share, the bandwidth over the copy
    bandwidth. Prefill has flops, of one run, and flops_per_second. Decode of many sequences at
    once has both, and says how many; tokens and tps are of all together. step_tokens: of a sequence
    in a step, where tokens are drafted.
    """

    test: str
    tokens: int
    seconds: tuple[float, ...]
    tps: float
    tps_deviation: float
    bytes_per_token: float | None = None
    bandwidth: float | None = None
    share: float | None = None
    flops: int | None = None
    flops_per_second: float | None = None
    sequences: int | None = None
    step_tokens: float | None = None


@dataclass(frozen=True)
class Load:
    """The results of a load: `clients` clients at once, each of which sends its next request when
    it has read the answer to the one before.

    prompt_tokens and tokens: of all prompts and of all answers. seconds: from the first request to
    the last token. tps: tokens of answers per second. ttft_seconds: time to first token, from when
    a request is sent, and itl_seconds: from one token of an answer to its next (inter-token
    latency), each the median and the 99th percentile. reused_tokens: of prompts, that the cache
    had. preemptions: of answers that had to give their pages of the cache back.
    """

    clients: int
    requests: int
    prompt_tokens: int
    tokens: int
    seconds: float
    tps: float
    ttft_seconds: tuple[float, float]
    itl_seconds: tuple[float, float]
    reused_tokens: int
    preemptions: int


@dataclass(frozen=True)
class KernelTime:
    """Dispatches of one kernel and shape in a step: how many, and their seconds (in a pass of their
    own, one after another), bytes of memory and operations together."""

    kernel: str
    calls: int
    seconds: float
    nbytes: int
    flops: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the kernel reads and writes."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """The kernels of one step, slowest first.

    gpu_seconds: of the whole step in one pass. step_seconds: what the step took in the benchmark,
    None where no test had just this step. host_seconds: of BenchReport, None where no step is ahead
    of another.
    """

    step: str
    rows: int
    kv_len: int
    kernels: tuple[KernelTime, ...]
    gpu_seconds: float
    step_seconds: float | None = None
    host_seconds: float | None = None

    @property
    def kernel_seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


@dataclass(frozen=True)
class BenchReport:
    """A benchmark of one model on one adapter.

    dtype: of the matrices. lora: the model's adapter, by its name. draft: the model that drafts,
    and what it is quantised to. copy_bandwidth: bytes read and written per second. ttft_seconds:
    time to the first token of the prefill test's prompt, mean and deviation. sampled_share: speed
    with the full sampler chain over greedy speed. host_seconds: of one greedy token, to record and
    submit its step and to read its id, while the GPU runs the step before; submit_seconds: the part
    of it to record and submit; dispatches: of the step; gpu_seconds: of the step on the GPU, None
    without timestamps. peak_bytes: of GPU memory. load_seconds: until the model was ready.
    precision: as for `load`. products: what many rows were multiplied in, "f16" with sums in f32,
    or "f32". webgpu: the library that ran the kernels.
    """

    model: str
    random_weights: bool
    architecture: str
    dtype: str
    kv_dtype: str
    parameters: int
    weight_bytes: int
    context: int
    adapter: str
    adapter_kind: str
    backend: str
    driver: str
    versions: dict[str, str]
    commit: str | None
    date: str
    copy_bandwidth: float
    rows: tuple[Row, ...]
    ttft_seconds: tuple[float, float]
    sampled_share: float
    host_seconds: float
    peak_bytes: int
    load_seconds: float
    dispatches: int | None = None  # this and the next are None in reports before they were measured
    submit_seconds: float | None = None
    gpu_seconds: float | None = None
    profiles: tuple[Profile, ...] = ()
    lora: str | None = None
    draft: str | None = None
    loads: tuple[Load, ...] = ()
    invariant: bool = False
    precision: str = "auto"
    products: str | None = None  # reports of older versions lack it: None
    webgpu: str = DEFAULT

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BenchReport:
        """Returns the report that `to_json` wrote. Raises ValueError for another schema."""
        values: dict[str, Any] = json.loads(text)
        if values.pop("schema", None) != SCHEMA:
            raise ValueError(f"This is not a benchmark report of schema {SCHEMA}.")
        values["rows"] = tuple(
            Row(**row | {"seconds": tuple(row["seconds"])}) for row in values["rows"]
        )
        values["profiles"] = tuple(
            Profile(**profile | {"kernels": tuple(KernelTime(**k) for k in profile["kernels"])})
            for profile in values["profiles"]
        )
        values["ttft_seconds"] = tuple(values["ttft_seconds"])
        if "Dawn" in values["versions"]:  # older reports do not name the library
            values.setdefault("webgpu", "dawn")
        values["loads"] = tuple(
            Load(**load | {name: tuple(load[name]) for name in ("ttft_seconds", "itl_seconds")})
            for load in values.get("loads", ())  # reports from before these have none
        )
        return cls(**values)

    @property
    def model_and_dtypes(self) -> str:
        """The model with the dtype of its weights, and each setting that is not the default: the
        KV cache's dtype, precision, LoRA adapter, draft model, invariant."""
        cache = "" if self.kv_dtype == "f16" else f", KV {self.kv_dtype}"
        lora = "" if self.lora is None else f", adapter {self.lora}"
        draft = "" if self.draft is None else f", drafts by {self.draft}"
        precision = "" if self.precision == "auto" else f", precision {self.precision}"
        invariant = ", invariant" if self.invariant else ""
        return f"{self.model} {self.dtype}{cache}{precision}{lora}{draft}{invariant}"

    @property
    def file_name(self) -> str:
        """<date>-<adapter>-<model>-<dtype>.json, of letters, digits, points and dashes; a KV cache
        that is not in f16 is named too, a precision that is not auto, an adapter, a draft model, an
        invariant engine, and another library than wgpu-native."""
        words = f"{self.date[:10]}-{self.adapter}-{Path(self.model).name}-{self.dtype}".lower()
        words += "" if self.kv_dtype == "f16" else f"-kv-{self.kv_dtype}"
        words += "" if self.precision == "auto" else f"-precision-{self.precision}"
        words += "" if self.lora is None else f"-adapter-{Path(self.lora).name.lower()}"
        if self.draft is not None:
            words += f"-draft-{Path(self.draft.replace(' ', '-')).name.lower()}"
        words += "-invariant" if self.invariant else ""
        words += "" if self.webgpu == DEFAULT else f"-{self.webgpu}"
        kept = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in words)
        return "-".join(part for part in kept.split("-") if part) + ".json"


# Tables


def format_report(report: BenchReport, width: int | None = None) -> str:
    """The whole report as text: adapter, model, table of tests, clients, host and profile. width:
    the width of a line; tables leave out spare columns rather than be wider."""
    r = report
    commit = f" ({r.commit})" if r.commit else ""
    versions = ", ".join(f"{name} {version}" for name, version in r.versions.items())
    ttft, deviation = r.ttft_seconds
    size = _scaled(r.weight_bytes, (2**30, "GiB"), (2**20, "MiB"))
    parameters = _scaled(r.parameters, (10**9, "B"), (10**6, "M"))
    lines = [
        f"{r.adapter} ({r.adapter_kind}, {r.backend} by {r.webgpu}), driver {r.driver}",
        f"{r.date}, {versions}{commit}",
        f"{r.model_and_dtypes}: {size}, {parameters} parameters; context {r.context}, "
        f"KV cache {r.kv_dtype}" + (f"; products in {r.products}" if r.products else ""),
        "",
        results_table(r, width),
        "",
        f"runs                 {len(r.rows[0].seconds)} of each test, after a warm-up",
        f"copy bandwidth       {r.copy_bandwidth / 1e9:,.1f} GB/s (read + written)",
        f"time to first token  {1e3 * ttft:,.2f} ± {1e3 * deviation:,.2f} ms ({r.rows[0].test})",
        *(
            f"{'':21}{1e3 * fmean(row.seconds):,.2f} ms ({row.test})"
            for row in r.rows
            if row.test.endswith(" cached")
        ),
        f"sampler chain        {100 * r.sampled_share:.1f} % of greedy speed",
        f"host                 {_host(r)}",
        f"GPU                  {_gpu(r)}",
        f"peak GPU memory      {r.peak_bytes / 2**30:.2f} GiB",
        f"load                 {r.load_seconds:.2f} s",
    ]
    if r.loads:
        lines += ["", loads_table(r, width)]
    for profile in r.profiles:
        lines += ["", profile_table(profile, r.copy_bandwidth, width)]
    return "\n".join(lines)


def results_table(report: BenchReport, width: int | None = None) -> str:
    """The tests of a report, a row each; "each": tokens per second of one of several sequences; "a
    step": tokens of one in a step, where some are drafted."""
    header = ["test", "t/s", "each", "a step", "GB/s", "share", "TFLOP/s"]
    rows = [
        [
            row.test,
            f"{row.tps:,.2f} ± {row.tps_deviation:,.2f}",
            f"{row.tps / row.sequences:,.1f}" if row.sequences else "",
            f"{row.step_tokens:.2f}" if row.step_tokens else "",
            *_rates(row.bandwidth, row.share, row.flops_per_second),
        ]
        for row in report.rows
    ]
    for name in ("each", "a step"):
        column = header.index(name)
        if not any(row[column] for row in rows):
            del header[column]
            rows = [[*row[:column], *row[column + 1 :]] for row in rows]
    return _fitting(header, rows, ("GB/s", "TFLOP/s"), width)


def loads_table(report: BenchReport, width: int | None = None) -> str:
    """Clients, a row for each number of them; the times to first token (TTFT) and between tokens
    (ITL) in milliseconds. hits: of the prompts' tokens, those that the cache had."""
    header = ["clients", "requests", "t/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "hits"]
    rows = [
        [
            f"{load.clients}",
            f"{load.requests:,}",
            f"{load.tps:,.1f}",
            *(f"{1e3 * seconds:,.1f}" for seconds in (*load.ttft_seconds, *load.itl_seconds)),
            f"{100 * load.reused_tokens / load.prompt_tokens:.0f} %",
        ]
        for load in report.loads
    ]
    title = "clients at once; ms to the first token (TTFT) and between tokens (ITL)"
    return f"{title}\n\n{_fitting(header, rows, ('requests', 'hits'), width)}"


def profile_table(profile: Profile, copy_bandwidth: float, width: int | None = None) -> str:
    """The kernels of a step with their times, and the time of the step that is in no kernel."""
    whole = profile.step_seconds or profile.gpu_seconds
    header = ["kernel", "calls", "µs each", "µs", "of step", "GB/s", "share", "TFLOP/s"]
    rows = [
        [
            kernel.kernel,
            f"{kernel.calls}",
            f"{1e6 * kernel.seconds / kernel.calls:,.2f}",
            *_time(kernel.seconds, whole),
            *_rates(kernel.bandwidth, kernel.bandwidth / copy_bandwidth, kernel.flops_per_second),
        ]
        for kernel in profile.kernels
    ]
    calls = sum(kernel.calls for kernel in profile.kernels)
    sums = [("all kernels", f"{calls}", profile.kernel_seconds)]
    sums.append(("order of kernels, caches", "", profile.gpu_seconds - profile.kernel_seconds))
    sums.append(("step on the GPU", "", profile.gpu_seconds))
    if profile.step_seconds is not None:
        slow = profile.host_seconds is not None and profile.host_seconds > profile.gpu_seconds
        rest = "waiting for the host" if slow else "submitting, reading back"
        sums.append((rest, "", profile.step_seconds - profile.gpu_seconds))
        sums.append(("step", "", profile.step_seconds))
    rows += [[name, count, "", *_time(t, whole), "", "", ""] for name, count, t in sums]
    title = f"{profile.step}: rows {profile.rows}, positions {profile.kv_len}"
    if profile.host_seconds is not None:
        title += f"; meanwhile the host takes {1e6 * profile.host_seconds:,.0f} µs"
    table = _fitting(header, rows, ("µs each", "calls", "TFLOP/s", "GB/s", "share"), width)
    return f"{title}\n\n{table}"


def _host(r: BenchReport) -> str:
    text = f"{1e6 * r.host_seconds:,.0f} µs per token"
    if r.dispatches is None or r.submit_seconds is None:
        return text
    submit, each = 1e6 * r.submit_seconds, 1e6 * r.submit_seconds / r.dispatches
    read = 1e6 * (r.host_seconds - r.submit_seconds)
    text += f": {submit:,.0f} to record and submit {r.dispatches} dispatches ({each:.2f} each)"
    return f"{text}, {read:,.0f} to read the id"


def _gpu(r: BenchReport) -> str:
    if r.gpu_seconds is None:
        return "not measured: no timestamps"
    hidden = "hides the host's part" if r.gpu_seconds > r.host_seconds else "waits for the host"
    return f"{1e6 * r.gpu_seconds:,.0f} µs per token: {hidden}"


def _time(seconds: float, whole: float) -> list[str]:
    return [f"{1e6 * seconds:,.1f}", f"{100 * seconds / whole:.1f} %"]


def _rates(bandwidth: float | None, share: float | None, flops: float | None) -> list[str]:
    """GB/s, share and TFLOP/s, each where there is one."""
    return [
        f"{bandwidth / 1e9:,.1f}" if bandwidth else "",
        f"{100 * share:.1f} %" if share else "",
        f"{flops / 1e12:.{2 if flops >= 1e12 else 4}f}" if flops else "",
    ]


def _scaled(value: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    unit, name = large if value >= large[0] else small
    return f"{value / unit:.2f} {name}"


def _fitting(
    header: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int | None
) -> str:
    """A table that leaves out as many of the spare columns, in their order, as needed to fit the
    width."""
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    for name in (*spare, None):
        table = markdown_table(list(columns), list(zip(*columns.values(), strict=True)), left=1)
        if name is None or width is None or table.index("\n") <= width:
            break
        del columns[name]
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A markdown table whose columns also line up as text; the first `left` are left-aligned."""
    columns = zip(header, *rows, strict=True)
    widths = [max(2, *map(len, column)) for column in columns]  # the rule has a dash and a colon

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])
