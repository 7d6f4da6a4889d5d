"""Messages name what users choose by keywords in Python, and by options on the command line."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import places
import pytest
from typer.testing import CliRunner

import infer
from infer.cli.app import app
from infer.kernels.errors import named

ROOT = places.ROOT
OPTIONS = {"context": "--context", "kv_dtype": "--kv-dtype", "offline": "--offline"}


@pytest.mark.parametrize(
    ("marked", "python", "option"),
    [
        ("Take a larger `context`.", "Take a larger context.", "Take a larger --context."),
        ('Load it with `kv_dtype="f32"`.', 'Load it with kv_dtype="f32".', "Load it with --kv-dt"),
        ("Not with `offline=True`.", "Not with offline=True.", "Not with --offline."),
        ("`params` and `n`", "params and n", "params and n"),  # no command has them
        ("Run `infer pull a`", "Run `infer pull a`", "Run `infer pull a`"),
    ],
)
def test_names_in_messages(marked: str, python: str, option: str) -> None:
    assert str(infer.InferError(marked)) == str(infer.InferWarning(marked)) == python
    assert named(marked, OPTIONS).startswith(option)
    error = pickle.loads(pickle.dumps(infer.RequestError(marked)))  # as workers send them
    assert (str(error), error.marked) == (python, marked)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "demo", "a", "--temperature", "200"], "error: --temperature must be a number fro"),
        (["run", "demo", "a", "--context", "1"], "error: --context must be a count of at least 2"),
        (["run", "demo", "a", "--max-tokens", "0"], "error: --max-tokens must be an integer from"),
        (["run", "demo", "a", "--stop", ""], "error: --stop must be a string or a list"),
        (
            ["run", "demo", "a", "--kv-dtype", "q8", "--context", "20", "--max-batch", "65"],
            "-batch",
        ),
        (["run", "demo", "a", "--speculate", "draft"], "error: --speculate draft is given, and"),
        (["run", "demo", "a", "--webgpu", "cuda"], "Give wgpu-native or dawn (--webgpu, or"),
        (["info", "demo", "--dtype", "f16", "--quantize", "q8"], "converted (--dtype f16) or quan"),
        (["info", "demo", "--draft-quantize", "q8"], "error: --draft-quantize q8 is given, and"),
    ],
)
def test_the_command_line_names_options(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_python_names_keywords() -> None:
    with pytest.raises(infer.RequestError, match=r"^temperature must be a number"):
        infer.SamplingParams(temperature=200)
    with pytest.raises(infer.RequestError, match=r"^context must be a count of at least 2"):
        infer.load("demo", context=1)
    with pytest.raises(infer.RequestError, match=r'^speculate="draft" is given, and there is no'):
        infer.load("demo", speculate="draft")
    with pytest.raises(infer.DeviceError, match=r"\(webgpu, or the variable INFER_WEBGPU\)"):
        infer.load("demo", webgpu="cuda")


def texts(path: Path) -> Iterator[str]:
    """The strings of a module that are no docstrings, whole where they are put together."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documents:
            yield str(node.value)


# The files whose messages may name options: they belong to the command line and the server.
OF_COMMANDS = ("infer/cli", "infer/server", "infer/bench", "infer/versions.py")


def test_no_message_of_the_library_names_an_option_itself() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for folder in ("infer", "models", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(OF_COMMANDS)
        for text in texts(path)
        if re.search(r"(?<![\w-])--[a-z][a-z-]+(?!\S*=)", text)
    ]
    assert found == []
