"""Make tests/data/functions/expected.json: what transformers says of functions as tools.

    python scripts/make_function_references.py

Needs the extra `reference`.
"""

import json
import runpy
from pathlib import Path

from transformers.utils import get_json_schema

DATA = Path(__file__).parent.parent / "tests" / "data" / "functions"


def main() -> None:
    """Write expected.json beside the functions."""
    functions = runpy.run_path(str(DATA / "functions.py"))["FUNCTIONS"]
    described = [get_json_schema(each) for each in functions]
    text = json.dumps(described, indent=1)
    (DATA / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
