"""The README's table of benchmarks, from the reports in scripts/results/.

    python scripts/bench_table.py                     print it
    python scripts/bench_table.py --write README.md   put it between the file's markers

Of several reports of one model, dtypes and adapter the newest counts.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from infer.bench_report import BenchReport, results_table  # noqa: E402

BEGIN, END = "<!-- benchmarks: scripts/bench_table.py -->", "<!-- end of benchmarks -->"


def newest(reports: Iterable[BenchReport]) -> list[BenchReport]:
    """One report for each adapter, model and dtype of weights and cache, sorted by them."""
    last: dict[tuple[str, str, str, str], BenchReport] = {}
    for report in sorted(reports, key=lambda report: report.date):
        last[report.adapter, report.model, report.dtype, report.kv_dtype] = report
    return [last[key] for key in sorted(last)]


def table(reports: list[BenchReport]) -> str:
    """The tests of all reports, and below it what they ran on."""
    grounds: dict[str, float] = {}
    for r in sorted(reports, key=lambda report: report.date):
        ground = f"{r.adapter}: driver {r.driver}, wgpu {r.versions['wgpu']}, {r.date[:10]}"
        grounds[ground] = max(grounds.get(ground, 0.0), r.copy_bandwidth)
    notes = [f"* {ground}, copies {best / 1e9:,.0f} GB/s" for ground, best in grounds.items()]
    return "\n".join([results_table(reports, adapters=True), "", *notes])


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
