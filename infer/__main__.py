"""The program `infer`, and `python -m infer`. Nothing is imported before Ctrl-C has its answer."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from infer.cli.app import main as run

        run()
    except KeyboardInterrupt:  # of the imports: commands tell theirs
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
