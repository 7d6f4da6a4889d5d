"""Reads the lines of `infer chat`: from a terminal with prompt-toolkit, which only this module
imports, or from standard input."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from infer.cli.terminal import note, of_system, uninterrupted
from infer.kernels.errors import InferError, RequestError

_HISTORY = 1 << 20  # bytes of the history; a larger file loses its older half


class Lines(Protocol):
    """A source of lines. Methods raise KeyboardInterrupt for Ctrl-C."""

    def read(self) -> str | None:
        """The next message or command; None at the end."""

    def edit(self, text: str) -> str | None:
        """The message after the user has changed it; None at the end. Raises RequestError without a
        terminal."""


class PipedLines:
    """Lines of standard input, each of which is a message."""

    def __init__(self) -> None:
        self._lines = self._decoded()

    def read(self) -> str | None:
        return next(self._lines, None)

    def edit(self, text: str) -> str | None:
        raise RequestError("/edit needs a terminal.")

    @staticmethod
    def _decoded() -> Iterator[str]:
        for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise RequestError(f"Line {number} of standard input is not UTF-8.") from error


def history_path() -> Path:
    """The file that keeps the lines typed in `infer chat`."""
    if os.name == "nt":
        state = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "infer" / "chat-history"


class TypedLines:
    """Lines typed in a terminal: they can be edited, and lines of earlier conversations come
    back."""

    def __init__(self, history: Path) -> None:
        """Raises InferError without prompt-toolkit."""
        try:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        except ModuleNotFoundError as error:
            raise InferError(
                "A chat in a terminal needs the package prompt-toolkit. Install it: "
                "pip install 'infer-wgpu[chat]', or in a checkout pip install '.[chat]'. Without "
                'it, infer run MODEL "PROMPT" answers a prompt.'
            ) from error
        kept: History
        try:
            _prepare(history)
            kept = FileHistory(str(history))
        except OSError as error:
            note(f"note: the history of messages is not saved: {of_system(error)}")
            kept = InMemoryHistory()
        self._session: PromptSession[str] = PromptSession(
            history=kept,
            key_bindings=_keys(),
            multiline=True,  # or pasted line ends would send
            prompt_continuation="  ",
            enable_history_search=False,
        )

    def read(self) -> str | None:
        return self._prompt("")

    def edit(self, text: str) -> str | None:
        """Let the user edit a text in the editor that VISUAL or EDITOR names, or else at the
        prompt."""
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not editor:
            return self._prompt(text)
        text = _edited(text, editor)
        note(f"> {text}")
        return text

    def _prompt(self, text: str) -> str | None:
        try:
            return self._session.prompt("> ", default=text)
        except EOFError:
            return None


def _edited(text: str, editor: str) -> str:
    """The text after it was edited in an editor. Raises RequestError if the editor fails."""
    with tempfile.TemporaryDirectory(prefix="infer-") as folder:
        path = Path(folder, "message.md")
        path.write_text(text + "\n", encoding="utf-8")
        with suppress(KeyboardInterrupt), uninterrupted():  # the editor's own affair
            code = subprocess.run([*shlex.split(editor), str(path)]).returncode
        if code != 0:
            raise RequestError(f"{editor} ended with the exit code {code}.")
        return path.read_text(encoding="utf-8").removesuffix("\n")


def _keys() -> Any:
    """The keys of the prompt: Enter sends; after a backslash, or with Alt, it begins a line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _prepare(path: Path) -> None:
    """Create the history file, readable by its owner only, and shorten it if it is long. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    data = path.read_bytes()
    if len(data) > _HISTORY:
        # Entries begin with an empty line and a comment with their time.
        path.write_bytes(data[data.find(b"\n\n#", len(data) // 2) + 1 :])
