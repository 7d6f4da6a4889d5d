"""`infer bench` from a checkout: python scripts/bench.py MODEL, or --shape llama-3.2-1b.

A bare --json writes the report under scripts/results/, where scripts/bench_table.py finds it.
"""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from infer.bench import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(prog="scripts/bench.py", results=str(SCRIPTS / "results")))
