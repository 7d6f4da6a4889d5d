"""The README's tables of models and formats, from the registries in models/.

python scripts/make_tables.py            write them between the README's markers
python scripts/make_tables.py --check    exit with 1 where they are not what is written there
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from infer.models import ARCHITECTURES, MULTIMODAL  # noqa: E402
from infer.models.loading.formats import FORMATS  # noqa: E402


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> dict[str, str]:
    """Each table by the name in its markers."""
    models = {name: entry.published for name, entry in ARCHITECTURES.items()}
    models |= {name: f"{published}: text alone" for name, published in MULTIMODAL.items()}
    rows = ((f"`{name}`", published) for name, published in sorted(models.items()))
    formats = ((entry.name, entry.bits, entry.detail) for entry in FORMATS.values())
    return {
        "models": table(("`model_type`", "for example"), rows),
        "formats": table(("format", "bits", "which"), formats),
    }


def filled(text: str) -> str:
    """The text with the tables between their markers. Raises ValueError where there are none."""
    for name, rows in tables().items():
        begin, end = f"<!-- {name}: scripts/make_tables.py -->", f"<!-- end of {name} -->"
        between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        text, count = between.subn(lambda _, new=f"{begin}\n{rows}\n{end}": new, text)
        if count != 1:
            raise ValueError(f"there must be one {begin} and {end}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="The README's tables of models and formats.")
    parser.add_argument("--check", action="store_true", help="write nothing, say if it would")
    check, readme = parser.parse_args().check, ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = filled(text)
    if not check:
        readme.write_text(new, encoding="utf-8")
    elif new != text:
        print("README.md: run scripts/make_tables.py", file=sys.stderr)
    return int(check and new != text)


if __name__ == "__main__":
    sys.exit(main())
