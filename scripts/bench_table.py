"""The README's table of benchmarks, from the reports in scripts/results/.

    python scripts/bench_table.py                     print it
    python scripts/bench_table.py --write README.md   put it between the file's markers

Of several reports of one model, dtypes and adapter the newest counts.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from infer.bench.report import BenchReport, markdown_table  # noqa: E402

BEGIN, END = "<!-- benchmarks: scripts/bench_table.py -->", "<!-- end of benchmarks -->"


def newest(reports: Iterable[BenchReport]) -> list[BenchReport]:
    """One report for each adapter, model and dtype of weights and cache, sorted by them."""
    last: dict[tuple[str, ...], BenchReport] = {}
    for report in sorted(reports, key=lambda report: report.date):
        key = report.adapter, report.model, report.dtype, report.kv_dtype, report.lora or ""
        last[key] = report
    return [last[key] for key in sorted(last)]


def table(reports: Sequence[BenchReport]) -> str:
    """A table for each adapter, a model in a row, and above it what it ran on."""
    parts = []
    for adapter in dict.fromkeys(report.adapter for report in reports):
        own = [report for report in reports if report.adapter == adapter]
        dates = sorted({report.date[:10] for report in own})
        r = max(own, key=lambda report: report.date)
        parts.append(
            f"{r.adapter}, {r.backend}, driver {r.driver}, wgpu {r.versions['wgpu']}, "
            f"{' to '.join(sorted({dates[0], dates[-1]}))}; "
            f"copies {max(report.copy_bandwidth for report in own) / 1e9:,.0f} GB/s\n\n"
            + adapter_table(own)
        )
    return "\n\n".join(parts)


def adapter_table(reports: Sequence[BenchReport]) -> str:
    """Tokens/s of prefill and decode, and of the latter at depth, where that was measured."""
    tests = {row.test for report in reports for row in report.rows}
    (prefill,) = {test for test in tests if test.startswith("pp")}
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


def write(path: Path, text: str) -> None:
    """Put text between the markers of a file. Raises ValueError where there are none."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}.")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of benchmarks.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it between FILE's markers")
    options = parser.parse_args()
    files = sorted((SCRIPTS / "results").glob("*.json"))
    text = table(newest(BenchReport.from_json(file.read_text(encoding="utf-8")) for file in files))
    if options.write is None:
        print(text)
    else:
        write(options.write, text)


if __name__ == "__main__":
    main()
