"""Counts the project's files that run for one token, and for one chat request.

    python scripts/count_files.py [--show]

A token: of `infer run demo`, from one to the next. A request: of `infer serve demo`, from when it
arrives until it is sent to the process of the engine. How many files a newcomer has to read to
follow either of them should only go down.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

from infer.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 20
PROMPT = "Once upon a time"


class Files:
    """The project's files whose functions are called. last: the name of a function in a file at
    whose call they are complete, and begin anew."""

    def __init__(self, file: str, function: str) -> None:
        self._last = file, function
        self._names: dict[str, str | None] = {}
        self.used = set[str]()
        self.complete: list[set[str]] = []

    def __enter__(self) -> Files:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename not in self._names:
            self._names[code.co_filename] = self._name(code.co_filename)
        name = self._names[code.co_filename]
        if name is None:
            return
        self.used.add(name)
        if (name, code.co_name) == self._last:
            self.complete.append(self.used)
            self.used = set()

    @staticmethod
    def _name(path: str) -> str | None:
        """The path within the project; None for a file that is not part of it."""
        try:
            name = Path(path).resolve().relative_to(ROOT).as_posix()
        except (OSError, ValueError):
            return None
        return name if name.endswith(".py") and not name.startswith((".", "scripts/")) else None


def of_a_token() -> set[str]:
    with Files("infer/engine/token_engine.py", "next_step") as files:
        told = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(told):
            app(["run", "demo", PROMPT, "--max-tokens", str(TOKENS)])
    return files.complete[TOKENS // 2]


def of_a_request() -> set[str]:
    """Serves in the main thread; another asks, and ends the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    files = Files("infer/engine/isolated.py", "send")

    def ask() -> None:
        sys.setprofile(None)
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health").read()
                break
            time.sleep(0.2)
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        for _ in range(2):  # what is read once of a model is read by the first
            files.used, files.complete = set(), []
            urllib.request.urlopen(request).read()
        print(json.dumps(sorted(files.complete[0])), flush=True)
        os._exit(0)

    with files:
        threading.Thread(target=ask, daemon=True).start()
        app(["serve", "demo", "--port", address.rpartition(":")[2]])
    raise SystemExit("The server ended.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts files that run.")
    parser.add_argument("--show", action="store_true", help="name the files")
    parser.add_argument("--request", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.request:
        of_a_request()
    asked = [sys.executable, __file__, "--request"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    request = json.loads(subprocess.run(asked, check=True, **quiet).stdout.splitlines()[-1])
    for title, names in (("a token of infer run", of_a_token()), ("a chat request", request)):
        print(f"{title}: {len(names)} files")
        for name in sorted(names) if given.show else ():
            print(f"  {name}")


if __name__ == "__main__":
    main()
