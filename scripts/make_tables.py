"""Writes the tables of docs/models.md, from the registries in models/, and the table of functions
in docs/python.md, from their signatures.

python scripts/make_tables.py            write them between the documents' markers
python scripts/make_tables.py --check    exit with 1 where they are not what is written there
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from infer.kernels import functions  # noqa: E402
from infer.kernels.checks.forward import Options  # noqa: E402
from infer.models import ARCHITECTURES, MULTIMODAL  # noqa: E402
from infer.models.loading.formats import FORMATS  # noqa: E402


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models() -> dict[str, str]:
    """Each table of docs/models.md by the name in its markers."""
    published = {name: entry.published for name, entry in ARCHITECTURES.items()}
    published |= {name: f"{text}: text alone" for name, text in MULTIMODAL.items()}
    rows = ((f"`{name}`", text) for name, text in sorted(published.items()))
    formats = ((entry.name, entry.bits, entry.detail) for entry in FORMATS.values())
    return {
        "models": table(("`model_type`", "for example"), rows),
        "formats": table(("format", "bits", "which"), formats),
    }


def python() -> dict[str, str]:
    """The table of docs/python.md by the name in its markers."""
    public = {name: getattr(functions, name) for name in functions.__all__}
    rows = (called(name, each) for name, each in public.items() if hasattr(each, "__wrapped__"))
    return {"functions": table(("function", "takes", "options", "returns"), rows)}


def called(name: str, function: Callable[..., Any]) -> list[str]:
    """The row of a function of a device."""
    signature = inspect.signature(function)
    takes: list[str] = []
    options: list[str] = []
    for each in list(signature.parameters.values())[1:]:
        kind = str(each.annotation).removesuffix(" | None")
        if each.name not in Options.__optional_keys__:
            shape = f" {kind}" if "[" in kind and kind[0] in "[(" else ""
            (takes if each.default is each.empty else options).append(f"{each.name}{shape}")
    return [f"`{name}`", ", ".join(takes), ", ".join(options), str(signature.return_annotation)]


DOCUMENTS = {"docs/models.md": models, "docs/python.md": python}


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with the tables between their markers. Raises ValueError where there are none."""
    for name, rows in tables.items():
        begin, end = f"<!-- {name}: scripts/make_tables.py -->", f"<!-- end of {name} -->"
        between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        text, count = between.subn(lambda _, new=f"{begin}\n{rows}\n{end}": new, text)
        if count != 1:
            raise ValueError(f"there must be one {begin} and {end}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Tables of documents.")
    parser.add_argument("--check", action="store_true", help="write nothing, say if it would")
    check, stale = parser.parse_args().check, False
    for document, tables in DOCUMENTS.items():
        path = ROOT / document
        text = path.read_text(encoding="utf-8")
        new = filled(text, tables())
        if new != text and check:
            stale = True
            print(f"{document}: run scripts/make_tables.py", file=sys.stderr)
        elif new != text:
            path.write_text(new, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
