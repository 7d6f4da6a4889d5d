"""Files of a repository of the hub, in the cache that huggingface_hub and its other users keep.

A hub, or what lies between, may be slow, broken or hostile. So every wait has an end; nothing that
it says becomes a part of a path before it was checked; and what was received is compared with the
digest that the hub states before it is in the cache. The downloads of huggingface_hub do none of
this. Its settings, tokens, HTTP client, requests for a file's metadata and Xet are made use of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from infer.kernels.errors import InferError, ModelAccessError, ModelError, ModelNotFoundError
from infer.models.loading.files import open_file, read_text
from infer.progress import size

T = TypeVar("T")
Progress = Callable[[int, int], None]

ASK_SECONDS = 10.0  # to ask whether there is a newer revision than the cached one
ANSWER_SECONDS = 60.0  # to ask for files if nothing is cached
STALL_SECONDS = 120.0  # for downloads without progress, which so many bytes of all files are:
STALL_BYTES = 1 << 14
_GRACE_SECONDS = 1.0  # for threads to end, and to remove partial files
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)  # before a file is asked for again, where it got no further
_WORKERS = 8
_LISTING_BYTES = 1 << 26

COMMIT = re.compile("[0-9a-f]{40}")
# A file's digest (SHA-256, or git's SHA-1 of small files), or what mirrors give instead.
_ETAG = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def is_path(name: str) -> bool:
    """Whether a name from elsewhere, of a file or a revision, leads nowhere but below a folder, on
    every system, and can be printed."""
    parts = name.split("/") if name.isprintable() and not {"\\", ":"} & {*name} else [""]
    return all(part not in ("", ".", "..") and len(part.encode()) < 256 for part in parts)


def settings() -> Any:
    """The settings of huggingface_hub. Raises ModelError if a variable has a value that
    huggingface_hub cannot read."""
    try:
        from huggingface_hub import constants
    except ValueError as error:
        raise ModelError(
            f"huggingface_hub cannot read one of the variables HF_* ({error}). Mend or unset it."
        ) from None
    return constants


def cache_folder() -> Path:
    """The folder in which models are cached: HF_HUB_CACHE, or a folder in HF_HOME. Raises
    ModelError if there is neither."""
    cache = Path(settings().HF_HUB_CACHE)
    if str(cache).startswith("~"):
        raise ModelError(
            f"There is no home folder for the cache of models ({cache}). Set HF_HOME to a folder "
            "for it."
        )
    return cache.absolute()


@dataclass(frozen=True)
class Listing:
    """A repository at a revision: its commit, and the names of its files.

    blobs: of a file, as far as the hub says, its name among the blobs of the cache and its bytes.
    """

    commit: str
    names: list[str]
    blobs: Mapping[str, tuple[str, int]]


class RefusedError(Exception):
    """An answer with a status of 400 or more."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.code, self.message = (headers.get(f"X-Error-{x}") for x in ("Code", "Message"))


class Repository:
    """A model's repository at a revision.

    Attributes:
        id: org/name.
        given: what the user called it.
        revision: a branch, a tag or a commit; None is `main`.
        folder: where the cache has its files.

    Raises ModelNotFoundError for names that no repository, or no revision of one, can have, and
    ModelError where there is no place for a cache.
    """

    def __init__(self, id: str, given: str, revision: str | None, token: str | None) -> None:
        constants = settings()
        from huggingface_hub import errors
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(id)
        except errors.HFValidationError:
            raise ModelNotFoundError(
                f"{id[:200]} is neither a local folder nor a valid hub id, which has 96 characters "
                "at most, and neither -- nor .. in it."
            ) from None
        if revision is not None and not (isinstance(revision, str) and is_path(revision)):
            raise ModelNotFoundError(
                f"{revision!r} is not a revision. Give a branch, a tag or a commit of {id}, such "
                "as main, or leave it out."
            )
        self.id, self.given, self.revision = id, given, revision
        self.folder = cache_folder() / f"models--{id.replace('/', '--')}"
        self._token, self._stop = token, threading.Event()
        self._hub = _without_password(constants.ENDPOINT) or "HF_ENDPOINT, which is empty,"

    # The cache

    def cached(self) -> Path | None:
        """The folder of the cached files, which may not be all of the model's files; None if
        nothing is cached."""
        commit = self.revision
        if commit is None or not COMMIT.fullmatch(commit):
            try:
                commit = read_text(self._ref()).strip()
            except (OSError, ValueError):
                return None
        folder = self.folder / "snapshots" / commit
        return folder if COMMIT.fullmatch(commit) and os.path.isdir(folder) else None

    def not_cached(self) -> ModelNotFoundError:
        at = f" at revision {self.revision!r}" if self.revision else ""
        return ModelNotFoundError(
            f"{self.id} is not in the cache{at} ({self.folder.parent}). Run it once without "
            "`offline=True`, and without HF_HUB_OFFLINE."
        )

    def remember(self, commit: str) -> None:
        """Writes down which commit the revision is, for when no hub can be asked."""
        ref = self._ref()
        if self.revision == commit:
            return
        with suppress(OSError, ValueError):
            if read_text(ref) == commit:
                return
        with suppress(OSError):  # a cache that is read-only may hold all that is needed
            ref.parent.mkdir(parents=True, exist_ok=True)
            part = ref.with_name(_part_name())
            part.write_text(commit)
            os.replace(part, ref)

    def _ref(self) -> Path:
        return self.folder / "refs" / (self.revision or "main")

    # Files of the repository

    def ask(self, *, cached: bool) -> Listing:
        """Asks the hub for the files of the repository. cached: the hub is not waited for long.

        Raises RefusedError, TimeoutError, and any error of the HTTP client: `error` translates all
        of them.
        """
        seconds = ASK_SECONDS if cached else ANSWER_SECONDS
        late = threading.Event()
        job = _start(lambda: self._listing(late))
        try:
            return job.result(seconds)
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {seconds:g} s") from None
        finally:
            late.set()

    def _listing(self, late: threading.Event) -> Listing:
        from huggingface_hub import constants

        url = f"{constants.ENDPOINT}/api/models/{self.id}"
        if self.revision is not None:
            url += f"/revision/{quote(self.revision, safe='')}"
        url += "?blobs=true"  # sizes too
        body = bytearray()
        with _answer(url, self._headers()) as (_, pieces):
            for piece in pieces:
                body += piece
                if len(body) > _LISTING_BYTES or late.is_set():
                    raise self._no_hub(f"more than {len(body)} bytes")
        try:
            found = json.loads(body)
            commit, files = found["sha"], {file["rfilename"]: file for file in found["siblings"]}
            sound = COMMIT.fullmatch(commit) and all(isinstance(name, str) for name in files)
        except (ValueError, TypeError, LookupError, RecursionError):
            sound = None
        if not sound:
            raise self._no_hub("no JSON with a commit and files")
        names = [*filter(is_path, files)]
        blobs = {name: blob for name in names if (blob := _blob(files[name]))}
        return Listing(commit, names, blobs)

    def _no_hub(self, what: str) -> ModelError:
        return ModelError(
            f"{self._hub} does not answer as a hub does: for {self.id} it gave {what}. Check "
            "HF_ENDPOINT, and whether a proxy or a login page answers in its place."
        )

    # Fetching

    def fetch(self, listing: Listing, names: Iterable[str], progress: Progress) -> Path:
        """Download these files and return the folder of the commit that holds them. listing: the
        result of `ask`. progress: called with the bytes that came, and the bytes of all files that
        were begun.

        Raises ModelError, before anything is fetched where the disk has no room for it.
        """
        commit = listing.commit
        folder = self.folder / "snapshots" / commit
        todo = deque(name for name in names if not os.path.isfile(folder / name))
        if not todo:
            return folder
        self._check_room(listing, todo)
        self._stop = stop = threading.Event()
        bar = _bar()
        parts: set[Path] = set()

        def work() -> None:
            while todo and not stop.is_set():
                with suppress(IndexError):  # another thread had the last one
                    self._fetch_file(commit, todo.popleft(), bar, parts)

        jobs: list[Future[None]] = []

        def steps() -> Iterator[None]:
            try:
                jobs.extend(_start(work) for _ in range(min(_WORKERS, len(todo))))
                yield from _until_done(jobs, lambda: bar.moved)
            except Exception as error:
                raise self.error(error) from None

        try:
            progress(0, 0)
            for _ in steps():
                progress(bar.done, bar.total)
        finally:
            stop.set()
            wait(jobs, _GRACE_SECONDS)
            for part in [*parts]:
                with suppress(OSError):
                    part.unlink()
        return folder

    def _check_room(self, listing: Listing, names: Iterable[str]) -> None:
        """Raises ModelError where the disk has no room for these files."""
        new = dict(listing.blobs[name] for name in names if name in listing.blobs)
        blobs = self.folder / "blobs"
        needed = sum(nbytes for blob, nbytes in new.items() if not os.path.isfile(blobs / blob))
        there = next((path for path in self.folder.parents if os.path.isdir(path)), None)
        try:
            free = needed if there is None else shutil.disk_usage(there).free
        except OSError:  # some file systems do not tell
            return
        if needed > free:
            raise ModelError(
                f"{self.id} does not fit on the disk of {self.folder.parent}: {size(needed)} are "
                f"to be fetched and {size(free)} are free, so {size(needed - free)} are missing. "
                "Make room, for example with `infer rm`, or set HF_HOME to another disk's folder."
            )

    def _fetch_file(self, commit: str, name: str, bar: Any, parts: set[Path]) -> None:
        part = self.folder / "blobs" / _part_name()
        parts.add(part)
        waits, size = iter(_RETRY_SECONDS), 0
        while True:
            try:
                return self._try_file(commit, name, part, bar)
            except Exception as error:
                if _size(part) > size:  # some of it has come
                    waits, size = iter(_RETRY_SECONDS), _size(part)
                seconds = next(waits, None) if _may_pass(error) else None
                if seconds is None or self._stop.wait(seconds):
                    raise

    def _try_file(self, commit: str, name: str, part: Path, bar: Any) -> None:
        """Fetch a file, or the rest of it, check it, and link it into the snapshot."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        headers, url = self._headers(), hf_hub_url(self.id, name, revision=commit)
        token = headers["authorization"].split()[1] if "authorization" in headers else False
        about = get_hf_file_metadata(url, token=token, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        if not _ETAG.fullmatch(about.etag or ""):
            raise self._no_hub(f"an ETag that is none for {name}")
        blob = part.with_name(about.etag)
        new = not os.path.isfile(blob)
        if new:
            with _writing(blob.parent):
                blob.parent.mkdir(parents=True, exist_ok=True)
            self._receive(url, headers, about, name, part, bar)
            if about.size is not None and _size(part) != about.size:
                raise ConnectionError(f"{_size(part)} of {about.size} bytes came")
            if not _has_digest(part, about.etag, bar):
                part.unlink()
                raise ModelError(
                    f"{name} of {self.id} arrived damaged: it has not the digest that {self._hub} "
                    "states. Run it again; if it stays so, something on the way changes files."
                )
            with _writing(blob.parent):
                os.replace(part, blob)
        pointer = self.folder / "snapshots" / commit / name
        with _writing(pointer.parent):
            _link(blob, pointer, part, new=new)

    def _receive(
        self, url: str, headers: dict[str, str], about: Any, name: str, part: Path, bar: Any
    ) -> None:
        """Append to `part` the bytes of the file that it lacks."""
        from huggingface_hub import file_download

        xet = getattr(about, "xet_file_data", None)
        # No public part of the library: where it has another place some day, HTTP serves as well.
        is_there = getattr(file_download, "is_xet_available", bool)
        if xet is not None and about.size is not None and is_there():
            bar.expect(about.size)
            with _writing(part):
                part.write_bytes(b"")
            file_download.xet_get(
                incomplete_path=part,
                xet_file_data=xet,
                headers=headers,
                expected_size=about.size,
                displayed_filename=name,
                _tqdm_bar=bar,
            )
            return
        size = _size(part)
        if size == 0:
            bar.expect(about.size)
        elif size == about.size:
            return
        more = headers | {"accept-encoding": "identity", "range": f"bytes={size}-"}
        with _answer(url, more) as (status, pieces):
            if status != 206:  # all of it comes
                bar.update(-size)
                size = 0
            with _writing(part):
                file = part.open("ab" if size else "wb", buffering=0)
            with file:
                for piece in pieces:
                    if self._stop.is_set():
                        return
                    size += len(piece)
                    if about.size is not None and size > about.size:
                        raise ModelError(f"{name} of {self.id} is longer than {self._hub} states.")
                    with _writing(part):
                        file.write(piece)
                    bar.update(len(piece))

    # Tokens and errors

    def _headers(self) -> dict[str, str]:
        """The headers of requests, with the token if there is one. Raises ModelAccessError for a
        token that cannot be valid."""
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils import build_hf_headers

        token = self._token
        if token is None and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            try:
                token = get_token()
            except UnicodeDecodeError:  # the error would contain all of the file
                token = "not ASCII"
            except OSError as error:
                if not error.filename:
                    raise
                raise ModelAccessError(
                    f"{error.filename}, for the token of a login, cannot be read "
                    f"({error.strerror}). Change its permissions, or set HF_HOME to another folder."
                ) from None
        self._token = token = (token or "").strip()
        if token and not _TOKEN.fullmatch(token):
            raise ModelAccessError(
                "The token for the hub holds a space, or a character that is not ASCII, as no "
                f"token does. Copy it once more: {_LOG_IN}."
            )
        return dict(build_hf_headers(token=token or False, library_name="infer"))

    def error(self, error: BaseException, *, cached: bool = True) -> ModelError:
        """Translate an error of asking or fetching into a ModelError. cached: False: the model is
        not in the cache either."""
        if isinstance(error, ModelError):
            return error
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(error, RefusedError):
            return self._refused(error)
        if response is not None and isinstance(status, int):
            return self._refused(RefusedError(status, response.headers))
        if not cached:
            return ModelNotFoundError(
                f"{self._hub} cannot be reached ({self._quoted(error)}), and {self.id} is not in "
                "the cache. Check the network, or give a local folder."
            )
        return ModelError(
            f"Fetching {self.id} from {self._hub} failed ({self._quoted(error)}). Check the "
            f"network and run it again: what is whole stays in {self.folder}."
        )

    def _refused(self, error: RefusedError) -> ModelError:
        if error.code == "RevisionNotFound":
            return ModelNotFoundError(
                f"{self.id} has no revision {self.revision!r}. Its branches and tags are on "
                f"{self._hub}/{self.id}."
            )
        if error.code == "GatedRepo":
            return ModelAccessError(
                f"{self.id} is gated: accept its conditions on {self._hub}/{self.id}, then "
                f"{_LOG_IN}."
            )
        if error.code == "RepoNotFound" and error.status == 404:
            return ModelNotFoundError(
                f"There is no repository {self.id} on {self._hub}, nor a local file or folder "
                f"{self.given}. Check the spelling."
            )
        wrong_token = error.message == "Invalid credentials in Authorization header"
        if error.code == "RepoNotFound" or (error.status == 401 and not wrong_token):
            return ModelAccessError(  # without a valid token, the hub does not say which
                f"{self.id} is private, or does not exist, and there is no local file or folder "
                f"{self.given}. Check the spelling; if it is private, {_LOG_IN}."
            )
        if error.status in (401, 403):
            return ModelAccessError(
                f"{self._hub} refused the token for {self.id} ({error.status}). Log in again with "
                "`hf auth login`, or set HF_TOKEN to a token that may read it."
            )
        return ModelError(f"{self._hub} answered {error.status} for {self.id}. Run it again later.")

    def _quoted(self, error: BaseException) -> str:
        """Returns an error's text in one line, without the token or a password."""
        text = f"{type(error).__name__}: {error}"
        if self._token:
            text = text.replace(self._token, "***")
        text = "".join(c if c.isprintable() else " " for c in _without_password(text))
        return text if len(text) < 300 else f"{text[:300]} ..."


def _blob(file: dict[str, Any]) -> tuple[str, int] | None:
    """Returns the digest of a file's content, which is its ETag, and its size in bytes; None where
    the hub does not give both."""
    lfs, nbytes = file.get("lfs"), file.get("size")
    digest = lfs.get("sha256") if isinstance(lfs, dict) else file.get("blobId")
    if not isinstance(digest, str) or not _ETAG.fullmatch(digest):
        return None
    return (digest, nbytes) if isinstance(nbytes, int) and nbytes >= 0 else None


def _without_password(text: str) -> str:
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _part_name() -> str:
    return f"{uuid.uuid4().hex}.incomplete"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _start(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # a panic of Xet's library
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, daemon=True, name="infer download").start()
    return future


def _until_done(jobs: list[Future[None]], moved: Callable[[], int]) -> Iterator[None]:
    """Yield every quarter of a second until all jobs have ended. Raises the error of a job that
    failed, and TimeoutError if hardly any bytes come."""
    tick = min(0.25, STALL_SECONDS / 10)
    before, idle = moved(), 0.0
    while True:
        done, running = wait(jobs, tick, return_when=FIRST_EXCEPTION)
        for job in done:
            job.result()
        yield
        if not running:
            return
        idle += tick  # no clock, which runs on while a computer sleeps
        if moved() - before >= STALL_BYTES:
            before, idle = moved(), 0.0
        if idle >= STALL_SECONDS:
            raise TimeoutError(f"hardly a byte came for {STALL_SECONDS:g} s")


@contextmanager
def _answer(url: str, headers: dict[str, str]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The status and the body of a response, which is read in pieces."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    client, seconds = get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
    if callable(client.stream):  # httpx; requests before huggingface_hub 1
        answer = client.stream("GET", url, headers=headers, timeout=seconds, follow_redirects=True)
    else:
        answer = client.get(url, headers=headers, timeout=seconds, stream=True)
    with answer as response:
        if response.status_code >= 400:
            raise RefusedError(response.status_code, response.headers)
        body = getattr(response, "iter_bytes", None)
        yield response.status_code, body() if body else response.iter_content(1 << 16)


def _may_pass(error: Exception) -> bool:
    """Whether asking again may help: after network errors, and errors of a busy or broken hub."""
    if isinstance(error, InferError | ValueError | TypeError | LookupError | AttributeError):
        return False
    own = getattr(error, "status", None)
    status = getattr(getattr(error, "response", None), "status_code", own)
    return not isinstance(status, int) or status in (408, 429) or status >= 500


def _has_digest(path: Path, digest: str, bar: Any) -> bool:
    """Whether a file has this digest. An ETag that is no digest fits every file."""
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", digest):
        return True
    found = [hashlib.sha256()]
    if len(digest) == 40:  # git's, or plain: mirrors may know nothing of git
        sha1 = partial(hashlib.sha1, usedforsecurity=False)
        found = [sha1(b"blob %d\0" % _size(path)), sha1()]
    with open_file(path) as file:
        while piece := file.read(1 << 20):
            for one in found:
                one.update(piece)
            bar.moved += len(piece)  # a large file takes minutes
    return digest in [one.hexdigest() for one in found]


def _link(blob: Path, pointer: Path, part: Path, *, new: bool) -> None:
    """Make a file of a snapshot a link to this blob, or the file itself where links are not
    possible."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)  # a link that leads nowhere
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:
        pass  # another process was faster
    except OSError:  # Windows lets not everyone make links
        if new:
            os.replace(blob, pointer)
        else:
            shutil.copyfile(blob, part)
            os.replace(part, pointer)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written ({error.strerror}). Make room or change its permissions; "
            "HF_HOME names another folder for the cache."
        ) from None


def _bar() -> Any:
    """Bytes that came (`done`), of those that are expected (`total`), counted by several threads.
    `moved` counts whatever does, and each file too. As Xet asks for, a bar of huggingface_hub's,
    which shows nothing."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        done, moved, total = 0, 0, 0
        own_lock = threading.Lock()

        def expect(self, size: int | None) -> None:
            with self.own_lock:
                self.moved += STALL_BYTES
                self.total = (self.total or 0) + (size or 0)

        def update(self, n: float | None = 1) -> None:
            with self.own_lock:
                self.moved += int(n or 0)
                self.done += int(n or 0)

        def update_transfer(self, n: float | None = 1) -> None:  # Xet: bytes not yet written
            self.moved += int(n or 0)

        def set_postfix_str(self, *_: Any, **__: Any) -> None:  # for a single file
            pass

        set_transfer_postfix_str = set_postfix_str

    return Bar(total=0, disable=True)
