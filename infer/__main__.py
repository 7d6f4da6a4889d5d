"""The program `infer`, and `python -m infer`. Nothing is imported before Ctrl-C has its answer."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        import signal  # takes a while, too

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and is not ignored
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
    try:
        from infer.cli.app import main as run

        run()
    finally:  # what is left is to end, in which an exception would be shown
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave(*_: object) -> None:
    """At Ctrl-C while modules are imported, where an exception may come in code that only shows it,
    or takes it for another. Commands have answers of their own."""
    if sys.stderr is not None:
        os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
