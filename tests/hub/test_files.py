"""A file of a model that is no regular file is an error: a read of it may never end."""

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import infer
from infer.hub import resolve
from infer.kernels.errors import InferError
from infer.models import open_model
from infer.models.loading.checkpoint import INDEX, SINGLE
from infer.models.loading.files import open_file, read_text
from infer.models.loading.formats.gguf import Gguf
from infer.models.loading.tensors import TensorInfo
from infer.text.folder_tokenizer import open_tokenizer

DEMO = Path(infer.__file__).parent / "demo"
WHY = r"regular|No such device"  # which is a socket's
KINDS = ["pipe", "socket", "folder", "device"]
NAMES = [
    "config.json",
    "model.safetensors",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
]


@contextmanager
def odd_file(path: Path, kind: str) -> Iterator[None]:
    """Something else than a file. A read of the pipe ends, so that a test fails and does not
    hang."""
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end, pytest.MonkeyPatch.context() as patch:
            patch.chdir(path.parent)  # names of sockets are short
            end.bind(path.name)
    else:
        os.mkfifo(path)
        writer = threading.Thread(target=lambda: os.close(os.open(path, os.O_WRONLY)), daemon=True)
        writer.start()
    try:
        yield
    finally:
        if kind == "pipe":
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # lets the writer go
            writer.join()
            os.close(reader)


def read_model(folder: Path) -> None:
    path = resolve(str(folder)).path
    open_model(path)
    open_tokenizer(path)


@pytest.mark.skipif(os.name == "nt", reason="no such files there")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / name).unlink(missing_ok=True)
    if name == INDEX:
        (folder / SINGLE).rename(folder / "other.safetensors")
    with odd_file(folder / name, kind), pytest.raises(InferError, match=WHY):
        read_model(folder)


@pytest.mark.skipif(os.name == "nt", reason="no such files there")
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_is_a_gguf_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    with odd_file(path, kind):
        with pytest.raises(InferError, match=WHY):
            Gguf.open(path)
        if kind != "folder":
            with pytest.raises(InferError, match=r"model\.gguf is neither a folder nor a regular"):
                resolve(str(path))


@pytest.mark.skipif(os.name == "nt", reason="no such files there")
def test_a_tensor_is_read_from_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor = TensorInfo("a", "f32", (1,), path, 0, 4)
    with odd_file(path, "pipe"), pytest.raises(InferError, match="could not be read"):
        tensor.held()


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("ä\r\nb".encode())
    assert read_text(path) == path.read_text(encoding="utf-8") == "ä\nb"
    with open_file(path) as file:
        assert file.read() == path.read_bytes()
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "missing"])
def test_names_of_no_file_are_os_errors(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"name|No such file"):
        open_file(tmp_path / name)
