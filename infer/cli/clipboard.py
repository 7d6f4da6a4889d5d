"""The clipboard of whoever sits at the terminal, which may be another machine's."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys

from infer.cli.terminal import write_as_is


def copy(text: str) -> None:
    """Put a text into the clipboard: with a program of this machine, or else through the terminal
    itself, which most terminals can do, over ssh too (OSC 52)."""
    command = _command()
    if command is not None:
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if done.returncode == 0:
            return
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
    write_as_is(f"\x1b]52;c;{encoded}\x07")


def _command() -> list[str] | None:
    """The command of a program that writes to the clipboard; None if there is none."""
    environment, commands = os.environ, []
    if environment.get("TMUX"):
        commands.append(["tmux", "load-buffer", "-w", "-"])  # tmux passes it on to its terminal
    elif not environment.get("SSH_CONNECTION"):
        if sys.platform == "darwin":
            commands.append(["pbcopy"])
        elif os.name == "nt":
            commands.append(["clip"])
        if environment.get("WAYLAND_DISPLAY"):
            commands.append(["wl-copy"])
        if environment.get("DISPLAY"):
            commands += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    return next((command for command in commands if shutil.which(command[0])), None)
