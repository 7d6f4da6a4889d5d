"""The command line, in this process, and code in processes that import nothing anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner, Result

from infer.cli.app import app


def invoke(*arguments: object, stdin: bytes | None = None) -> Result:
    """The command in this process. Anything but a clean exit is raised."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, catch_exceptions=False)


def refused(*arguments: object, code: int = 1, stdin: bytes | None = None) -> str:
    """The message of a command that must fail with it, and must say nothing else."""
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    if code == 1:
        assert result.stderr.startswith("error: ")
    return " ".join(result.stderr.replace("│", " ").split())


_COPIES = """
import json, os, sys
import httpx, infer.cli.app, infer.hub
for line in sys.stdin:
    # Where a process cannot be copied, this one runs the code, and ends.
    if not hasattr(os, "fork") or os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
code, arguments, environment, files = json.loads(line)
sys.argv[1:] = arguments
os.environ.clear()
os.environ.update(environment)
for number, (path, mode) in enumerate(zip(files, ("rb", "wb", "wb"))):
    with open(path, mode) as file:
        os.dup2(file.fileno(), number)
exec(code)
"""


class Copies:
    """Copies of a process that has imported what `infer` needs to ask a hub, but not
    huggingface_hub, which reads its variables when it is imported: code that reads them takes a
    process of its own, and the imports nearly a second."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, code: str, arguments: list[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python -W error -c code arguments` and returns what the process gave."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            paths = os.pathsep.join(path for path in sys.path if path)
            kept = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}  # no threads
            command, pipe = [sys.executable, "-W", "error", "-c", _COPIES], subprocess.PIPE
            self._process = subprocess.Popen(command, env=kept, stdin=pipe, stdout=pipe, text=True)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            files = [os.devnull, str(out), str(err)]
            process.stdin.write(json.dumps([code, arguments, {**environment}, files]) + "\n")
            process.stdin.flush()
            told = process.stdout.readline()
            status = int(told) if told else process.wait()
            texts = [path.read_text(encoding="utf-8") for path in (out, err)]
        return subprocess.CompletedProcess([code, *arguments], status, *texts)

    def close(self) -> None:
        if self._process is not None:
            with self._process:
                pass  # its standard input ends, and so does it
