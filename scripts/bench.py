"""`infer bench` from a checkout: python scripts/bench.py MODEL, or --shape llama-3.2-1b.

--json writes the report under scripts/results/, where scripts/bench_table.py finds it.
"""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from infer.cli.app import main  # noqa: E402


def arguments(given: list[str]) -> list[str]:
    """Returns the arguments for `infer`, from those of this script."""
    save = f"--save={SCRIPTS / 'results'}"
    return ["bench", *(save if word == "--json" else word for word in given)]


if __name__ == "__main__":
    sys.argv[1:] = arguments(sys.argv[1:])
    main()
