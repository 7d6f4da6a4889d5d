"""Writes the tables of docs/benchmarks.md from the reports in scripts/results/ (one sequence) and
scripts/results/batch/ (many sequences, many clients).

    python scripts/bench_table.py                             print the tables
    python scripts/bench_table.py --write docs/benchmarks.md  put them between the file's markers

If there are several reports of one model with the same dtypes on one adapter, the newest counts.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
RESULTS = SCRIPTS / "results"
sys.path.insert(0, str(SCRIPTS.parent))

from infer.bench.report import BenchReport, markdown_table  # noqa: E402

BEGIN, END = "<!-- benchmarks: scripts/bench_table.py -->", "<!-- end of benchmarks -->"
BATCHES = "<!-- batches: scripts/bench_table.py -->", "<!-- end of batches -->"
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)  # at once, a column each
_BATCH = re.compile(r"tg\d+ x (\d+) @ d(\d+)")  # the name of a test


def newest(reports: Iterable[BenchReport]) -> list[BenchReport]:
    """The newest report for each adapter, model, dtype of weights and cache, and precision,
    sorted."""
    last: dict[tuple[str, ...], BenchReport] = {}
    for report in sorted(reports, key=lambda report: report.date):
        kind = bool(report.loads)  # many clients are measured apart
        dtypes = report.dtype, report.kv_dtype, report.precision
        key = report.adapter, report.model, *dtypes, report.lora or "", kind
        last[key] = report
    return [last[key] for key in sorted(last)]


def table(reports: Sequence[BenchReport]) -> str:
    """A table for each adapter, a model in a row, and above it what it ran on."""
    return _by_adapter(reports, adapter_table)


def batches(reports: Sequence[BenchReport]) -> str:
    """The tables of many sequences at once, and of many clients if there are reports of them."""
    return _by_adapter(reports, batch_tables)


def _library(versions: Mapping[str, str]) -> str:
    """The Python package of the WebGPU library, and its version."""
    name = "wgpudawn" if "wgpudawn" in versions else "wgpu"
    return f"{name} {versions[name]}"


def _by_adapter(
    reports: Sequence[BenchReport], tables: Callable[[Sequence[BenchReport]], str]
) -> str:
    parts = []
    for adapter in dict.fromkeys(report.adapter for report in reports):
        own = [report for report in reports if report.adapter == adapter]
        dates = sorted({report.date[:10] for report in own})
        r = max(own, key=lambda report: report.date)
        parts.append(
            f"{r.adapter}, {r.backend}, driver {r.driver}, {_library(r.versions)}, "
            f"{' to '.join(sorted({dates[0], dates[-1]}))}; "
            f"copies {max(report.copy_bandwidth for report in own) / 1e9:,.0f} GB/s\n\n"
            + tables(own)
        )
    return "\n\n".join(parts)


def batch_tables(reports: Sequence[BenchReport]) -> str:
    """Tokens/s of all sequences together, by how many they are; a row for each depth."""
    rows = []
    for report in reports:
        speeds: dict[int, dict[int, float]] = {}  # by depth and sequences
        for row in report.rows:
            if found := _BATCH.fullmatch(row.test):
                speeds.setdefault(int(found[2]), {})[int(found[1])] = row.tps
        for depth, of in sorted(speeds.items()):
            cells = [f"{of[n]:,.0f}" if n in of else "" for n in SEQUENCES]
            rows.append([report.model_and_dtypes, f"{depth:,}", *cells])
    parts = [markdown_table(["model", "depth", *map(str, SEQUENCES)], rows, left=1)]
    loads = [
        [
            report.model_and_dtypes,
            f"{load.clients}",
            f"{load.tps:,.0f}",
            *(f"{1e3 * seconds:,.0f} ms" for seconds in load.ttft_seconds),
            *(f"{1e3 * seconds:,.1f} ms" for seconds in load.itl_seconds),
        ]
        for report in reports
        for load in report.loads
    ]
    if loads:
        header = ["model", "clients", "t/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"]
        parts.append(markdown_table(header, loads, left=1))
    return "\n\n".join(parts)


def adapter_table(reports: Sequence[BenchReport]) -> str:
    """A table of the speed of prefill and decode in tokens/s, with columns for decode at depth if
    that was measured."""
    tests = {row.test for report in reports for row in report.rows}
    tests = {test for test in tests if not _BATCH.fullmatch(test)}
    (prefill,) = {test for test in tests if re.fullmatch(r"pp\d+", test)}
    (decode,) = {test for test in tests if test.startswith("tg") and " " not in test}
    deep = {int(test.split("@ d")[1]): test for test in tests if "@ d" in test}
    others = [f"{decode} sampled", *(deep[d] for d in sorted(deep))]
    header = ["model", "size", prefill, "TFLOP/s", decode, "GB/s", "share"]
    header += [test.removeprefix(f"{decode} ") for test in others]
    rows = []
    for report in reports:
        of = {row.test: row for row in report.rows}
        first, greedy = of[prefill], of[decode]
        flops, bandwidth = first.flops_per_second or 0.0, greedy.bandwidth or 0.0
        rows.append(
            [
                report.model_and_dtypes,
                f"{report.weight_bytes / 2**30:.2f} GiB",
                f"{first.tps:,.0f}" if first.tps >= 100 else f"{first.tps:.1f}",
                f"{flops / 1e12:.3g}",
                f"{greedy.tps:,.1f}",
                f"{bandwidth / 1e9:,.{0 if bandwidth >= 1e11 else 1}f}",
                f"{100 * (greedy.share or 0.0):.1f} %",
                *(f"{of[test].tps:,.1f}" if test in of else "" for test in others),
            ]
        )
    return markdown_table(header, rows, left=1)


def write(path: Path, text: str, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Put text between the markers of a file. Raises ValueError where there are none."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (begin and end):
        raise ValueError(f"{path} has no lines {markers[0]!r} and {markers[1]!r}.")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def read(folder: Path) -> list[BenchReport]:
    """The newest reports of a folder."""
    files = sorted(folder.glob("*.json"))
    return newest(BenchReport.from_json(file.read_text(encoding="utf-8")) for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables of benchmarks.")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put them between FILE's markers"
    )
    options = parser.parse_args()
    one, many = table(read(RESULTS)), batches(read(RESULTS / "batch"))
    if options.write is None:
        print(f"{one}\n\n{many}")
    else:
        write(options.write, one)
        write(options.write, many, BATCHES)


if __name__ == "__main__":
    main()
