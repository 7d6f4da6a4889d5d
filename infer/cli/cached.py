"""The output of `infer pull`, `infer list` and `infer rm`, about the models in the hub's cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infer.cli.terminal import wrapped
from infer.hub.cache import CachedModel, CachedModels, Deletion, Pulled
from infer.kernels.errors import RequestError
from infer.progress import columns, is_terminal, size, visible, write_note

_WIDTH = 80  # where the output is no terminal
_HEADER = ("size", "format", "revision", "last used")
_SHORT = 7  # characters of a commit, as git shows them


def pulled_text(found: Pulled) -> str:
    state = "downloaded" if found.fetched else "already downloaded"
    return f"{found.name}: {state}, {size(found.nbytes)} in {found.path}"


@dataclass(frozen=True)
class CachedReport:
    """The models of the cache."""

    cached: CachedModels

    def json(self) -> dict[str, Any]:
        return {
            "cache": str(self.cached.folder),
            "models": [
                {
                    "name": model.name,
                    "repository": model.repository,
                    "revision": model.revision,
                    "refs": list(model.refs),
                    "format": model.format,
                    "path": str(model.path),
                    "size_bytes": model.nbytes,
                    "last_used": _when(model).isoformat(timespec="seconds"),
                }
                for model in self.cached.models
            ],
            "size_bytes": self.cached.nbytes,
            "other_repositories": self.cached.others,
        }

    def text(self) -> str:
        """A line for each model, or two where its name leaves the rest no room in the terminal's
        columns, or in 80."""
        models, others = self.cached.models, self.cached.others
        rest = [_HEADER, *map(_row, models)]
        widths = [max(map(len, column)) for column in zip(*rest, strict=True)]
        width = columns(sys.stdout) if is_terminal(sys.stdout) else _WIDTH
        room = max(width - sum(widths) - 2 * len(widths), 0)
        names = [visible(model.name).replace("\n", "\\n") for model in models]
        room = max((len(name) for name in ("model", *names) if len(name) <= room), default=room)
        lines = []
        for name, row in zip(("model", *names), rest, strict=True):
            cells = "".join(f"  {x:{width}}" for x, width in zip(row, widths, strict=True))
            lines += (
                [name, f"{'':{room}}{cells}"] if len(name) > room else [f"{name:{room}}{cells}"]
            )
        count = f"{len(models)} model{'s' * (len(models) != 1)}, {size(self.cached.nbytes)}"
        if not models:
            lines, count = [], "There are no models"
        of_others = f"; {others} other repositor{'y' if others == 1 else 'ies'}" if others else ""
        last = f"{count} in {self.cached.folder}{of_others}"
        return "\n".join([*(line.rstrip() for line in lines), *[""] * bool(lines), last])


def _row(model: CachedModel) -> tuple[str, ...]:
    used = _when(model).strftime("%Y-%m-%d")
    return size(model.nbytes), model.format, model.revision[:_SHORT], used


def _when(model: CachedModel) -> datetime:
    return datetime.fromtimestamp(model.used).astimezone()


def deletion_text(deletion: Deletion) -> str:
    commits = ", ".join(commit[:_SHORT] for commit in deletion.revisions) or "damaged"
    return f"{deletion.name} ({commits}), {size(deletion.nbytes)}"


def is_wanted(deletion: Deletion) -> bool:
    """Ask on the terminal whether to delete. Raises RequestError if there is no terminal."""
    if not is_terminal(sys.stdin):
        raise RequestError(
            f"{deletion_text(deletion)}, was not deleted: without a terminal to confirm on, give "
            "--yes."
        )
    question = visible(f"Delete {deletion_text(deletion)}? [y/N]")
    write_note(wrapped(question, sys.stderr) + " ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
