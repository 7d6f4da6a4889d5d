"""From what a user calls a model to a folder of files: bundled, local, or fetched from the hub."""

import importlib.resources
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from urllib.parse import unquote

from infer.embedding import MODULES, POOLING
from infer.hub.download import Listing, Progress, Repository, settings
from infer.kernels.errors import (
    CheckpointError,
    InferError,
    ModelError,
    ModelNotFoundError,
    UnsupportedError,
)
from infer.models.loading.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    INDEX,
    SINGLE,
    listed,
    read_index,
)
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import OLD_GPTQ
from infer.models.loading.formats.gguf import gguf_parts
from infer.progress import size

DEMO = "demo"
DEMO_DRAFT = "demo-draft"  # drafts for it

# All that a model is loaded from except for its weights.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    OLD_GPTQ,
    MODULES,
    POOLING,
    ADAPTER_CONFIG,  # no model has this file: it tells that a repository is an adapter
    INDEX,
)
CARD, CARD_BYTES = "README.md", 1 << 20  # says the licence; of one that is larger nothing is read
UNSUPPORTED_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A hub id, or one of the GGUF models there: org/name:Q4_K_M, org/name/folder/file.gguf.
HUB_MODEL = re.compile(
    rf"(?P<repo>{HUB_ID.pattern})(?::(?P<quantisation>[\w.-]+)|/(?P<file>[^\\]+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
# URLs of the hub's pages, with the model, the revision and the path in them.
HUB_SITE = re.compile(r"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
HUB_PAGE = re.compile(
    rf"(?P<model>{HUB_ID.pattern}(?::[\w.-]+)?)"
    r"(?:/(?:tree|blob|resolve|raw)/(?P<revision>refs/\w+/[^/]+|[^/]+)(?:/(?P<path>.+))?)?",
    re.ASCII,
)
# Such as Q4_K_M, IQ4_XS, BF16 and MXFP4, where they stand in the name of a file.
QUANTISATION = re.compile(r"(?:^|[-.])([A-Z]*[QFP]\d\w*)(?=[-.]|$)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class ResolvedModel:
    """The place of a model's files.

    Attributes:
        path: a folder that holds config.json and the weights, or a GGUF file, which is all.
        name: for people: `demo`, the folder's or the file's name, or what was given of the hub.
        revision: the commit of a model from the hub, else None.
    """

    path: Path
    name: str
    revision: str | None = None


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    token: str | None = None,
    progress: Progress = lambda done, total: None,
) -> ResolvedModel:
    """Find a model's files, fetching from the hub what is not in its cache.

    Args:
        model: `demo`, a local folder or GGUF file, or a hub id `org/name`. Of a repository of
            several GGUF models, `org/name:Q4_K_M` or `org/name/file.gguf` is one: by what stands in
            its file's name, in either case, or by its path. Or the hub's page of any of these, such
            as `https://huggingface.co/org/name/tree/main` or `hf.co/org/name:Q4_K_M`.
        revision: branch, tag or commit of a hub id.
        offline: use the cache alone.
        token: for gated and private repositories; by default the one that `hf auth login` stored,
            or the environment's HF_TOKEN.
        progress: called with bytes that came and bytes of all files that were begun.

    Raises:
        ModelNotFoundError: no name, no such folder, file, repository, revision or cached snapshot,
            or several models that could be meant.
        ModelAccessError: a gated or private repository, or a token that cannot be one.
        UnsupportedError: no safetensors, but weights in another format.
        CheckpointError: weights that are missing in part or altogether.
        ModelError: the hub did not serve the files, or others than it states; the cache cannot be
            written, or its disk has no room.
    """
    if not model:
        raise ModelNotFoundError(
            f"The name of the model is empty. Give {DEMO!r}, a local folder (. is this one), a "
            ".gguf file, or a hub id such as org/name."
        )
    path = local_path(model)
    if path is not None and os.path.isdir(path):
        if revision is not None:
            raise ModelNotFoundError(
                f"{model} is a local folder, which has no revisions. Give the revision of a hub "
                "id, or none."
            )
        name = model if model == DEMO_DRAFT else path.resolve().name
        return ResolvedModel(_check_folder(path), name)
    if path is not None and os.path.isfile(path) and _is_gguf(path.name):
        if revision is not None:
            raise ModelNotFoundError(f"{model} is a local file, which has no revisions.")
        return ResolvedModel(path, path.stem)
    if path is not None and os.path.isfile(path):
        raise UnsupportedError(
            f"{model} is a file. Give the folder that holds config.json and *.safetensors, or a "
            ".gguf file."
        )
    if path is not None and os.path.exists(path):
        raise UnsupportedError(f"{model} is neither a folder nor a regular file. Give one of them.")
    of_hub, repository = model_of_hub(model, revision, token)
    return _from_hub(
        repository,
        offline,
        find=lambda: _find_in_cache(repository, of_hub),
        fetch=lambda listing: _fetch(repository, of_hub, listing, progress),
    )


def resolve_adapter(
    adapter: str,
    *,
    offline: bool = False,
    token: str | None = None,
    progress: Progress = lambda done, total: None,
) -> ResolvedModel:
    """Find the files of a LoRA adapter: `adapter` is a local folder, a hub id or its URL. For the
    rest and the errors see `resolve`."""
    if not adapter:
        raise ModelNotFoundError(
            "The name of the adapter is empty. Give a local folder (. is this one) or a hub id "
            "such as org/name, or leave the adapter out."
        )
    path = _local(adapter)
    if path is not None and os.path.isdir(path):
        return ResolvedModel(_check_adapter(path), path.resolve().name)
    called, revision = _of_page(adapter, None)
    if (path is not None and os.path.exists(path)) or not HUB_ID.fullmatch(called):
        raise ModelNotFoundError(
            f"There is no folder {_short(adapter)}. An adapter is a local folder that holds "
            f"{ADAPTER_CONFIG} and {ADAPTER_TENSORS}, or a hub id such as org/name."
        )
    repository = Repository(called, called, revision, token)

    def find() -> ResolvedModel:
        if (folder := repository.cached()) is None:
            raise repository.not_cached()
        return ResolvedModel(_check_adapter(folder), called, folder.name)

    def fetch(listing: Listing) -> ResolvedModel:
        names = [name for name in listing.names if name in (ADAPTER_CONFIG, ADAPTER_TENSORS)]
        folder = repository.fetch(listing, names, progress)
        return ResolvedModel(_check_adapter(folder), called, listing.commit)

    return _from_hub(repository, offline, find, fetch)


def model_of_hub(
    model: str, revision: str | None = None, token: str | None = None
) -> tuple[re.Match[str], Repository]:
    """Returns the name on the hub of a model that is not local, as a match of `HUB_MODEL`, and its
    repository. `resolve` describes the arguments. Raises ModelNotFoundError for an impossible
    name."""
    called, revision = _of_page(model, revision)
    of_hub = HUB_MODEL.fullmatch(called)
    if of_hub is None or (of_hub["file"] and os.path.isdir(of_hub["repo"])):
        raise ModelNotFoundError(
            f"There is no folder or file {_short(model)}. A model is a local folder, a .gguf file, "
            "a hub id such as org/name or its URL, a GGUF model there such as org/name:Q4_K_M, or "
            f"{DEMO!r}."
        )
    return of_hub, Repository(of_hub["repo"], of_hub[0], revision, token)


def model_files(path: Path) -> list[Path]:
    """Returns the files that are loaded of a local model, and its card. path: the folder or GGUF
    file that `resolve` finds. Raises CheckpointError for a broken index."""
    if path.is_file():
        return [path.with_name(part) for part in gguf_parts(path.name)]
    names = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
    wanted = {CARD, *_small(names), *(_shards(path) or _weights(names))}
    return [path / name for name in names if name in wanted]


def local_path(model: str) -> Path | None:
    """The path of the bundled model, or the path that a name means, if it can be one. If there is
    nothing at the path, the name may be a model of the hub."""
    if model in (DEMO, DEMO_DRAFT):
        return _demo_folder() / ("" if model == DEMO else "draft")
    return _local(model)


def _local(name: str) -> Path | None:
    """The path that a name is, if it can be one."""
    return None if "\0" in name else Path(os.path.expanduser(name))


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}..."


def _of_page(model: str, revision: str | None) -> tuple[str, str | None]:
    """The hub id and the revision that a page of the hub shows, such as
    https://huggingface.co/org/name/tree/main; anything else is returned as it is, with
    `revision`."""
    rest = None
    if site := HUB_SITE.match(model):
        rest = model[site.end() :]
    elif "://" in model:
        endpoint = settings().ENDPOINT
        if not model.startswith(f"{endpoint}/"):
            raise ModelNotFoundError(
                "The URL of a model begins with https://huggingface.co/, or with the address in "
                "HF_ENDPOINT, and holds no token. Give it as https://huggingface.co/org/name, or "
                "as org/name."
            )
        rest = model[len(endpoint) + 1 :]
    if rest is None:
        return model, revision
    page = HUB_PAGE.fullmatch(unquote(re.split(r"[?#]", rest)[0]).strip("/"))
    path = page and page["path"]
    if page is None or (path and not _is_gguf(path)):
        raise ModelNotFoundError(
            f"{_short(model)!r} is not the page of a model. Give that of a repository, such as "
            "https://huggingface.co/org/name, or of a .gguf file in one."
        )
    if revision not in (None, page["revision"]) and page["revision"]:
        raise ModelNotFoundError(
            f"{_short(model)} is of the revision {page['revision']!r}, but {revision!r} is asked "
            "for. Give one of them."
        )
    return f"{page['model']}/{path}" if path else page["model"], revision or page["revision"]


def _from_hub(
    repository: Repository,
    offline: bool,
    find: Callable[[], ResolvedModel],
    fetch: Callable[[Listing], ResolvedModel],
) -> ResolvedModel:
    """Returns the model in the cache, or fetches it where the hub has something newer."""
    if offline or settings().HF_HUB_OFFLINE:
        return find()
    cached = None
    with suppress(InferError):
        cached = find()
    try:
        listing = repository.ask(cached=cached is not None)
    except Exception as error:  # no network, no access, or a hub that is down
        if cached is None or getattr(error, "code", None) == "RevisionNotFound":
            raise repository.error(error, cached=False) from None
        return cached
    found = fetch(listing)
    repository.remember(listing.commit)
    return found


def _check_adapter(folder: Path) -> Path:
    """Return `folder` if it holds an adapter. Raises ModelError otherwise."""
    lacking = [name for name in (ADAPTER_CONFIG, ADAPTER_TENSORS) if not (folder / name).is_file()]
    if lacking == [ADAPTER_TENSORS] and (folder / "adapter_model.bin").is_file():
        raise UnsupportedError(
            f"{folder} has its adapter in adapter_model.bin, which is not read. Save it as "
            f"{ADAPTER_TENSORS}, as PEFT does by default."
        )
    if lacking:
        raise ModelNotFoundError(
            f"{folder} has no {listed(lacking)}, so it is not a LoRA adapter. Give the folder that "
            "PEFT's save_pretrained has written."
        )
    return folder


def _demo_folder() -> Path:
    return Path(str(importlib.resources.files("infer"))) / DEMO


def _check_folder(folder: Path) -> Path:
    """Return `folder` if it looks like a model's. Whether its weights are complete is checked by
    the loader."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise ModelNotFoundError(
            f"{folder} cannot be read ({error.strerror}). Change its permissions, or give another "
            "folder."
        ) from None
    lacks_weights = not _has_weights(folder)
    if ADAPTER_CONFIG in names and "config.json" not in names:
        base = RawConfig.open(folder, ADAPTER_CONFIG).get("base_model_name_or_path", None, str)
        raise ModelNotFoundError(
            f"{folder} is a LoRA adapter. Give the model that it was made for, "
            f'{base or "which it does not name"}, and beside it `adapter="{folder}"`.'
        )
    if "config.json" not in names and not (lacks_weights and any(map(_is_gguf, names))):
        raise ModelNotFoundError(
            f"{folder} has no config.json, so it is not a model. Give the folder of a model in "
            "the Hugging Face layout: config.json, tokenizer.json and *.safetensors."
        )
    if lacks_weights:
        raise _no_weights(str(folder), names)
    return folder


def _find_in_cache(repository: Repository, model: re.Match[str]) -> ResolvedModel:
    """The files of a model of the hub that an earlier run has downloaded."""
    repo = repository.id
    if (folder := repository.cached()) is None:
        raise repository.not_cached()
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    file = _choose_gguf(
        model, names, f"The cached snapshot of {repo}, all that `offline=True` uses,"
    )
    lacking = sorted({*gguf_parts(file)} - {*names}) if file else lacking_files(folder)
    if lacking:
        raise ModelNotFoundError(
            f"The cached snapshot of {repo} is incomplete: it lacks {listed(lacking)}. Run it once "
            "without `offline=True`."
        )
    return ResolvedModel(folder / file, model[0], folder.name)


def _fetch(
    repository: Repository, model: re.Match[str], listing: Listing, progress: Progress
) -> ResolvedModel:
    """Fetches the files that a model needs from its repository."""
    repo, commit, names = repository.id, listing.commit, listing.names

    def fetch(wanted: Iterable[str]) -> Path:
        return repository.fetch(listing, sorted({*wanted} & {*names}), progress)

    if file := _choose_gguf(model, names, repo, listing.blobs):
        return ResolvedModel(fetch(gguf_parts(file)) / file, model[0], commit)
    _, card_bytes = listing.blobs.get(CARD, ("", CARD_BYTES + 1))
    folder = fetch([*_small(names), *([CARD] if card_bytes <= CARD_BYTES else [])])
    if not (needed := _shards(folder) or _weights(names)):
        raise _no_weights(repo, names)
    fetch(needed)
    return ResolvedModel(_check_folder(folder), repo, commit)


def _choose_gguf(
    model: re.Match[str],
    names: list[str],
    where: str,
    blobs: Mapping[str, tuple[str, int]] = MappingProxyType({}),
) -> str:
    """The GGUF file that is meant, or the first of several that are one model; "" if safetensors
    are. `names` are the files that there are `where`; for blobs see `Listing`."""
    repo, wanted = model["repo"], model["file"] or model["quantisation"]
    if not wanted and (any(map(_is_weights, names)) or not any(map(_is_gguf, names))):
        return ""
    models = sorted(filter(is_gguf_model, names))
    found = find_gguf(wanted, models)
    if len(found) == 1:
        return found[0]
    some = found or models

    def choice(name: str) -> str:
        parts = gguf_parts(name)
        known = [blobs[part][1] for part in parts if part in blobs]
        of = f" ({size(sum(known))})" if len(known) == len(parts) else ""
        return f"{gguf_id(repo, name, models)}{of}"

    choices = listed([*map(choice, some[:100]), *some[100:]], limit=100)
    if found:
        called = f" called {wanted}" if wanted else ""
        raise ModelNotFoundError(f"{where} has several GGUF models{called}. Give one: {choices}.")
    called = f"GGUF model {wanted}" if wanted else "GGUF model"
    raise ModelNotFoundError(f"{where} has no {called}. Those that it has: {choices or 'none'}.")


def find_gguf(wanted: str | None, models: list[str]) -> list[str]:
    """Returns the models that a path or a quantisation means; all of them without either."""
    if wanted is None:
        return models
    word = re.compile(rf"(?:^|[-.]){re.escape(wanted)}(?=[-.]|$)", re.IGNORECASE)
    return [m for m in models if m == wanted or word.search(PurePosixPath(m).stem)]


def gguf_id(repo: str, model: str, models: list[str]) -> str:
    """Returns the id of one of a repository's models: with its quantisation if no other has that,
    otherwise with its path."""
    for quantisation in QUANTISATION.findall(PurePosixPath(model).stem):
        if find_gguf(quantisation, models) == [model]:
            return f"{repo}:{quantisation}"
    return f"{repo}/{model}"


def is_gguf_model(name: str) -> bool:
    """Whether a file is a GGUF model, or the first of the several that one is: no encoder of images
    (mmproj), and no statistics for quantising (imatrix)."""
    helps = re.search("mmproj|imatrix", PurePosixPath(name).name, re.IGNORECASE)
    later = re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", name)
    return _is_gguf(name) and not helps and not later


def _small(names: list[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, small) for small in SMALL_FILES)]


def _weights(names: list[str]) -> list[str]:
    """The weight files of a model that has no index."""
    return [SINGLE] if SINGLE in names else list(filter(_is_weights, names))


def _shards(folder: Path) -> list[str]:
    """The weight files that the index names, [] where there is no index."""
    path = folder / INDEX
    return sorted({*read_index(path).values()}) if os.path.exists(path) else []


def lacking_files(folder: Path) -> list[str]:
    """Returns the names of files that are not in `folder` and that loading needs."""
    names = ["config.json", *_shards(folder)]
    lacking = [name for name in names if not (folder / name).is_file()]
    return lacking if lacking or _has_weights(folder) else ["its weights"]


def _has_weights(folder: Path) -> bool:
    return any(_is_weights(path.name) and path.is_file() for path in folder.glob("*"))


def _is_weights(name: str) -> bool:
    """Whether a file of a repository is weights as transformers names them: `consolidated*` are
    Mistral's own, and folders (`original/`, `onnx/`) hold other formats."""
    return name.endswith(".safetensors") and not name.startswith("consolidated") and "/" not in name


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _no_weights(where: str, names: list[str]) -> ModelError:
    """The error for a model without safetensors, whose files are `names`."""
    if files := sorted(filter(_is_gguf, names)):
        return UnsupportedError(
            f"{where} holds GGUF files, each of which is a model: {listed(files)}. Give the path "
            "of one."
        )
    others = sorted({Path(name).suffix for name in names} & set(UNSUPPORTED_WEIGHTS))
    if others:
        return UnsupportedError(
            f"{where} has its weights in {listed(others)} files only, which are not read. Look for "
            "a repository with *.safetensors, or convert them."
        )
    return CheckpointError(
        f"{where} has no weights: model.safetensors, or {INDEX} and its shards. Fetch the model "
        "again."
    )
