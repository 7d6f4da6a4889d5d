"""Opening the files of a model. They are regular files: a read of anything else, a pipe or a device
under such a name, may never end."""

import errno
import io
import os
import stat
from pathlib import Path


def open_file(path: Path) -> io.BufferedReader:
    """A regular file, to read its bytes from. Raises OSError for any other kind of file, and for a
    name that no file can have."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"its name is none: {error}", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """The text of a regular file. Raises OSError as `open_file` does, and UnicodeDecodeError."""
    with io.TextIOWrapper(open_file(path), encoding="utf-8") as file:
        return file.read()
