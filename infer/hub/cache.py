"""The models in the hub's cache, which other programs share: fetching one beforehand, what is
there, and deleting it again.

huggingface_hub's scan of the cache leaves out a repository of which one link leads nowhere, and
fails at a damaged ref, so that is done here, and so is finding what belongs to one GGUF model. Its
deletion is made use of, which knows what repositories share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from infer.hub.download import COMMIT, Progress, cache_folder
from infer.hub.resolving import (
    DEMO,
    DEMO_DRAFT,
    find_gguf,
    gguf_id,
    is_gguf_model,
    lacking_files,
    local_path,
    model_files,
    model_of_hub,
    resolve,
)
from infer.kernels.errors import InferError, ModelError, ModelNotFoundError
from infer.models import ARCHITECTURES, MULTIMODAL
from infer.models.loading.checkpoint import listed
from infer.models.loading.files import read_text
from infer.models.loading.formats import FORMATS, OLD_GPTQ, QUANTIZATION_KEYS
from infer.models.loading.formats.gguf import gguf_parts

INCOMPLETE = "incomplete"
_KINDS = ("models--", "datasets--", "spaces--", "kernels--")
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


# Fetching


@dataclass(frozen=True)
class Pulled:
    """A model of the hub that is now in the cache. path: its folder or GGUF file, as in
    `ResolvedModel`. nbytes: the size of the files that it is loaded from. fetched: whether any of
    them had to be downloaded.

    path: a folder, or a GGUF file, as of `ResolvedModel`. nbytes: of the files that it is loaded
    from. fetched: whether some of them were not there before.
    """

    name: str
    path: Path
    revision: str | None
    nbytes: int
    fetched: bool


def pull(
    model: str, *, revision: str | None = None, progress: Progress = lambda done, total: None
) -> Pulled:
    """Download the files that loading a model needs. Arguments and errors are those of `resolve`;
    besides, a local model raises ModelNotFoundError."""
    if _is_local(model):
        raise ModelNotFoundError(
            f"{model} is already here, so there is nothing to download. Give a hub id such as "
            "org/name."
        )
    fetched = False

    def note_it(done: int, total: int) -> None:
        nonlocal fetched
        fetched = True
        progress(done, total)

    found = resolve(model, revision=revision, progress=note_it)
    nbytes = _nbytes(model_files(found.path))
    return Pulled(found.name, found.path, found.revision, nbytes, fetched)


def _is_local(model: str) -> bool:
    path = local_path(model)
    return model in (DEMO, DEMO_DRAFT) or (
        bool(model) and path is not None and os.path.exists(path)
    )


# Models in the cache


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache that can be loaded.

    Attributes:
        name: what it is called: `org/name`, or of a GGUF model `org/name:Q4_K_M`.
        repository: org/name.
        revision: the commit.
        refs: the branches and tags that are known to mean it.
        format: such as `bf16`, `GPTQ, 4 bits` or `GGUF`; `incomplete` where files are missing.
        path: the folder, or the GGUF file.
        nbytes: of the files that it is loaded from, which it may share with other revisions.
        used: when its weights were last read, in seconds since 1970, as far as the system says.
    """

    name: str
    repository: str
    revision: str
    refs: tuple[str, ...]
    format: str
    path: Path
    nbytes: int
    used: float


@dataclass(frozen=True)
class CachedModels:
    """The models of the cache, those used last first; others: how many repositories in it are none,
    or are damaged. nbytes: of all models together."""

    folder: Path
    models: list[CachedModel]
    others: int
    nbytes: int


def list_models() -> CachedModels:
    """Returns the models in the cache that can be loaded. Raises ModelError for a cache that cannot
    be read."""
    cache = cache_folder()
    models: list[CachedModel] = []
    files: set[Path] = set()
    others = 0
    for folder in _repositories(cache):
        found = []
        with suppress(OSError):  # one of another user, or one that is being deleted
            found = list(_models(folder))
        others += not found
        for model, loaded in found:
            models.append(model)
            files.update(loaded)
    models.sort(key=lambda model: (-model.used, model.name, model.revision))
    return CachedModels(cache, models, others, _nbytes(files))


def _repositories(cache: Path) -> list[Path]:
    try:
        return sorted(p for p in cache.iterdir() if p.name.startswith(_KINDS) and p.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ModelError(
            f"The cache {cache} cannot be read ({error.strerror}). Change its permissions, or set "
            "HF_HOME to another folder."
        ) from None


def _models(folder: Path) -> Iterator[tuple[CachedModel, list[Path]]]:
    """The models of a repository, each with its files."""
    kind, *names = folder.name.split("--")
    if kind != "models" or len(names) != 2:  # one without an organisation is not loaded by its name
        return
    repo, refs = "/".join(names), _refs(folder)
    for snapshot in _snapshots(folder):
        files = {p.relative_to(snapshot).as_posix(): p for p in _files(snapshot) if p.is_file()}
        ggufs = sorted(filter(is_gguf_model, files))
        for name in ggufs:
            parts = gguf_parts(name)
            there = [files[part] for part in parts if part in files]
            format_ = "GGUF" if len(there) == len(parts) else INCOMPLETE
            called = gguf_id(repo, name, ggufs)
            yield _model(called, repo, snapshot.name, refs, format_, files[name], there), there
        config = _config(snapshot)
        if config.get("model_type") not in {*ARCHITECTURES, *MULTIMODAL}:
            continue
        try:
            whole, there = not lacking_files(snapshot), model_files(snapshot)
        except InferError:  # a broken index
            whole, there = False, [*files.values()]
        if whole or not ggufs:
            there = [path for path in there if path.is_file()]
            format_ = _format(config, snapshot) if whole else INCOMPLETE
            yield _model(repo, repo, snapshot.name, refs, format_, snapshot, there), there


def _model(
    name: str,
    repo: str,
    commit: str,
    refs: Mapping[str, str],
    format: str,
    path: Path,
    files: list[Path],
) -> CachedModel:
    # The small files do not count: listing models reads them.
    weights = [file for file in files if file.suffix.lower() in (".safetensors", ".gguf")]
    used = max((file.stat().st_atime for file in weights), default=path.stat().st_mtime)
    known = tuple(sorted(ref for ref, meant in refs.items() if meant == commit))
    return CachedModel(name, repo, commit, known, format, path, _nbytes(files), used)


def _snapshots(folder: Path) -> list[Path]:
    """The revisions of a repository."""
    try:
        found = sorted((folder / "snapshots").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [p for p in found if COMMIT.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def _refs(folder: Path) -> dict[str, str]:
    """The commits of branches and tags, by their names."""
    refs, found = folder / "refs", {}
    for path in refs.rglob("*"):
        with suppress(OSError, ValueError):
            found[path.relative_to(refs).as_posix()] = read_text(path).strip()
    return found


def _files(folder: Path) -> list[Path]:
    """All files below a folder, including links that lead nowhere."""
    return [p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()]


def _contents(folder: Path) -> list[Path]:
    """The files of a repository in the cache, without its refs."""
    return _files(folder / "blobs") + _files(folder / "snapshots")


def _nbytes(files: Iterable[Path]) -> int:
    """The size of files on the disk in bytes. A file that several links lead to counts once."""
    return sum(_sizes(files).values())


def _sizes(files: Iterable[Path]) -> dict[str, int]:
    sizes = {}
    for file in {os.path.realpath(file) for file in files}:
        with suppress(OSError):
            sizes[file] = os.stat(file).st_size
    return sizes


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json, or {} if it cannot be read."""
    try:
        found = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("model_type"), str) else {}


def _format(config: Mapping[str, Any], folder: Path) -> str:
    """How the weights are stored, as far as the small files of a model tell."""
    text = config.get("text_config")
    places = [config, text if isinstance(text, dict) else {}]
    for key in QUANTIZATION_KEYS:
        for place in places:
            if isinstance(found := place.get(key), dict) and found:
                method = "mlx" if key == "quantization" else str(found.get("quant_method"))
                name = FORMATS[method].name if method in FORMATS else "quantised"
                bits = found.get("bits")
                return f"{name}, {bits} bits" if isinstance(bits, int) else name
    if (folder / OLD_GPTQ).exists():
        return FORMATS["gptq"].name
    dtypes = [str(place.get(key)) for place in places for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), "floats")


# Deleting


@dataclass(frozen=True)
class Deletion:
    """Files of the cache that were found and would be deleted.

    Attributes:
        name: of the model.
        revisions: the commits whose files these are.
        nbytes: that deleting it frees, but for what huggingface_hub shares between repositories.
        repositories: the folder of all, where nothing else is in it; else there is none, and:
        snapshots, refs, blobs: of the revisions, branches, tags and contents that nothing else has.
        files: of other snapshots.
    """

    name: str
    revisions: list[str]
    nbytes: int
    repositories: frozenset[Path] = frozenset()
    snapshots: frozenset[Path] = frozenset()
    refs: frozenset[Path] = frozenset()
    blobs: frozenset[Path] = frozenset()
    files: frozenset[Path] = frozenset()

    def execute(self) -> int:
        """Delete it. Returns the bytes that were freed.

        Raises ModelError; of a cache that cannot be written, nothing is deleted.
        """
        from huggingface_hub import DeleteCacheStrategy

        gone = self.repositories | self.snapshots | self.refs | self.blobs | self.files
        folders = {path.parent for path in gone}
        for root in self.repositories | self.snapshots:
            folders.update(Path(folder) for folder, *_ in os.walk(root))
        for folder in sorted(folders):
            if not os.access(folder, os.W_OK):
                raise ModelError(
                    f"{self.name} cannot be deleted: {folder} cannot be written. Change its "
                    "permissions, or ask whose cache it is."
                )
        below = [p for path in self.repositories for p in _contents(path)]
        below += [p for path in self.snapshots for p in _files(path)]
        sizes = _sizes([*below, *self.blobs, *self.files])
        try:
            for file in self.files:
                file.unlink(missing_ok=True)
            # Since huggingface_hub 2 what repositories share lies in a place that it must know.
            shares = "cache_dir" in {field.name for field in fields(DeleteCacheStrategy)}
            DeleteCacheStrategy(
                expected_freed_size=self.nbytes,
                blobs=self.blobs,
                refs=self.refs,
                repos=self.repositories,
                snapshots=self.snapshots,
                **({"cache_dir": cache_folder()} if shares else {}),
            ).execute()
        except OSError as error:
            raise ModelError(f"{self.name} cannot be deleted whole: {error}.") from None
        if left := sorted(str(path) for path in gone if os.path.lexists(path)):
            raise ModelError(
                f"{self.name} was not deleted whole: {listed(left)} cannot be. Something may have "
                "it open: end that, and run it again."
            )
        return sum(nbytes for file, nbytes in sizes.items() if not os.path.exists(file))


def find_deletion(model: str, revision: str | None = None) -> Deletion:
    """Finds the files of a model in the cache: a repository with all its revisions, or one of them,
    or a GGUF model there; no files of other models. `revision` may be the beginning of a commit.

    Raises ModelNotFoundError for what is not in the cache.
    """
    if model in (DEMO, DEMO_DRAFT):
        raise ModelNotFoundError(f"{model} is included in the package and cannot be deleted.")
    if _is_local(model):
        raise ModelNotFoundError(
            f"{model} is a local file or folder, which infer does not delete. Give a model that "
            "`infer list` shows, with hf.co/ before it if a folder here has the same name."
        )
    of_hub, repository = model_of_hub(model, revision)
    folder, revision = repository.folder, repository.revision
    if folder.is_symlink():
        raise ModelError(f"{folder} is a link to {os.path.realpath(folder)}. Delete that by hand.")
    if not folder.is_dir():
        raise _not_there(of_hub[0], folder.parent)
    refs, snapshots = _refs(folder), _snapshots(folder)
    if revision is not None:
        meant = refs.get(revision, revision)
        chosen = [p for p in snapshots if p.name == meant]
        if not chosen and len(meant) >= 7:  # as `infer list` shows it
            chosen = [p for p in snapshots if p.name.startswith(meant)]
        if len(chosen) != 1:
            known = [*refs, *(p.name for p in snapshots)]
            raise ModelNotFoundError(
                f"{of_hub['repo']} is not in the cache at revision {revision!r}, but at "
                f"{listed(known) or 'none'}."
            )
    files = {snapshot: _files(snapshot) for snapshot in snapshots}
    victims = {p: files[p] for p in (snapshots if revision is None else chosen)}
    if wanted := of_hub["file"] or of_hub["quantisation"]:
        victims = {p: _of_gguf(of_hub["repo"], wanted, p, files[p]) for p in victims}
        if not any(victims.values()):
            raise _not_there(of_hub[0], folder.parent)
    revisions = [snapshot.name for snapshot, gone in victims.items() if gone]
    emptied = {snapshot for snapshot, gone in victims.items() if len(gone) == len(files[snapshot])}
    if len(emptied) == len(snapshots):
        return Deletion(of_hub[0], revisions, _nbytes(_contents(folder)), frozenset({folder}))
    gone = {file for every in victims.values() for file in every}
    kept = {_blob(file) for every in files.values() for file in every if file not in gone}
    # A link may lead elsewhere: its target does not belong to the cache.
    place = Path(os.path.realpath(folder / "blobs"))
    blobs = {blob for file in gone if (blob := _blob(file)).parent == place} - kept
    blobs = {blob for blob in blobs if os.path.lexists(blob)}
    copies = {file for file in gone if not file.is_symlink()}
    commits = {snapshot.name for snapshot in emptied}
    return Deletion(
        of_hub[0],
        revisions,
        _nbytes(blobs | copies),
        snapshots=frozenset(emptied),
        refs=frozenset(folder / "refs" / ref for ref, meant in refs.items() if meant in commits),
        blobs=frozenset(blobs),
        files=frozenset(file for file in gone if not any(s in emptied for s in file.parents)),
    )


def _of_gguf(repo: str, wanted: str, snapshot: Path, files: list[Path]) -> list[Path]:
    """The files of one GGUF model in a snapshot."""
    by_name = {file.relative_to(snapshot).as_posix(): file for file in files}
    ggufs = sorted(filter(is_gguf_model, by_name))
    found = find_gguf(wanted, ggufs)
    if len(found) > 1:
        choices = [gguf_id(repo, name, ggufs) for name in found]
        raise ModelNotFoundError(
            f"{repo} has several GGUF models called {wanted} in the cache. Give one: "
            f"{listed(choices)}."
        )
    return [by_name[part] for name in found for part in gguf_parts(name) if part in by_name]


def _blob(file: Path) -> Path:
    """Returns the target of a snapshot's file, which may be a link itself; the file where it is
    none."""
    if not file.is_symlink():
        return file
    target = file.parent / os.readlink(file)
    return Path(os.path.realpath(target.parent)) / target.name


def _not_there(name: str, cache: Path) -> ModelNotFoundError:
    near = get_close_matches(name, cached_names(), 3)
    meant = f"Did you mean {' or '.join(near)}?" if near else "`infer list` shows what is."
    return ModelNotFoundError(f"{name} is not in the cache ({cache}). {meant}")


def cached_names() -> list[str]:
    """Returns the names of the models in the cache and of their repositories, sorted."""
    models = list_models().models
    return sorted({name for model in models for name in (model.name, model.repository)})
