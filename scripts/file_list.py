"""Writes docs/files.md: every module of the project with the first sentence of its docstring.

python scripts/file_list.py            write the list
python scripts/file_list.py --check    exit with 1 if the list is not what the modules say
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = "docs/files.md"
FOLDERS = ("infer", "models", "kernels", "scripts")
# Links to the other packages, for mypy and editors.
LINKS = {"infer/kernels", "infer/models"}
TITLES = {"scripts": "Programs for those who work on the project."}  # folders without __init__.py

HEAD = """# Files

Every module, with the first sentence of its docstring. `scripts/file_list.py` writes this page; to
change a line, change the docstring and run the script. [ARCHITECTURE.md](../ARCHITECTURE.md) says
how the parts work together.
"""


def folders(root: Path) -> Iterator[Path]:
    """The folders below root that hold modules, each before its subfolders."""
    for top in FOLDERS:
        for folder in (root / top, *sorted((root / top).rglob("*"))):
            name = folder.relative_to(root).as_posix()
            linked = any(name == link or name.startswith(f"{link}/") for link in LINKS)
            if folder.is_dir() and not linked and any(folder.glob("*.py")):
                yield folder


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring. Raises ValueError if it has no docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence, *_ = re.split(r"(?<=[.?!]) (?=[A-Z])", paragraph)
    return sentence.rstrip(".:")


def file_list(root: Path = ROOT) -> str:
    """The text of docs/files.md."""
    parts = [HEAD]
    for folder in folders(root):
        name = folder.relative_to(root).as_posix()
        package = folder / "__init__.py"
        title = TITLES.get(name) or f"{first_sentence(package)}."
        files = sorted(path for path in folder.glob("*.py") if path != package)
        rows = "".join(f"* `{path.name}`: {first_sentence(path)}\n" for path in files)
        parts.append(f"## {name}/\n\n{title}\n" + (f"\n{rows}" if rows else ""))
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="The list of files.")
    parser.add_argument("--check", action="store_true", help="write nothing, say if it would")
    check = parser.parse_args().check
    path, new = ROOT / DOCUMENT, file_list()
    stale = not path.exists() or path.read_text(encoding="utf-8") != new
    if stale and check:
        print(f"{DOCUMENT}: run scripts/file_list.py", file=sys.stderr)
    elif stale:
        path.write_text(new, encoding="utf-8")
    return int(stale and check)


if __name__ == "__main__":
    sys.exit(main())
