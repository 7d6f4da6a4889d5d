"""The command line, in this process."""

from __future__ import annotations

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
