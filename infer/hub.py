"""From what a user calls a model to a folder of files: bundled, local, or fetched from the hub."""

import importlib.resources
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from infer.kernels.errors import (
    CheckpointError,
    InferError,
    ModelAccessError,
    ModelError,
    ModelNotFoundError,
    UnsupportedError,
)
from infer.models.checkpoint import ADAPTER_CONFIG, ADAPTER_TENSORS, INDEX, SINGLE, listed

DEMO = "demo"

# All that a model is loaded from except for its weights.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    INDEX,
)
UNSUPPORTED_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model's files are.

    Attributes:
        path: a folder that holds config.json and the weights, or a GGUF file, which is all.
        name: for people: `demo`, the folder's or the file's name, or the hub id.
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
    progress: bool = True,
) -> ResolvedModel:
    """Find a model's files, fetching from the hub what is not in its cache.

    Args:
        model: `demo`, a local folder or GGUF file, or a hub id `org/name`.
        revision: branch, tag or commit of a hub id.
        offline: use the cache alone.
        token: for gated and private repositories; by default the one that `hf auth login` stored,
            or the environment's HF_TOKEN.
        progress: whether huggingface_hub may show its progress bars.

    Raises:
        ModelNotFoundError: no name, no such folder, repository, revision or cached snapshot.
        ModelAccessError: a gated or private repository.
        UnsupportedError: no safetensors, but weights in another format.
        CheckpointError: weights that are missing in part or altogether.
        ModelError: the hub did not serve the files.
    """
    if not model:
        raise ModelNotFoundError(
            f"The name of the model is empty. Give {DEMO!r}, a local folder (. is this one), a "
            ".gguf file, or a hub id such as org/name."
        )
    path = _demo_folder() if model == DEMO else Path(os.path.expanduser(model))
    if path.is_dir():
        if revision is not None:
            raise ModelNotFoundError(
                f"{model} is a local folder, which has no revisions. Give the revision of a hub "
                "id, or none."
            )
        return ResolvedModel(_check_folder(path), path.resolve().name)
    if path.is_file() and _is_gguf(path.name):
        if revision is not None:
            raise ModelNotFoundError(f"{model} is a local file, which has no revisions.")
        return ResolvedModel(path, path.stem)
    if path.is_file():
        raise UnsupportedError(
            f"{model} is a file. Give the folder that holds config.json and *.safetensors, or a "
            ".gguf file."
        )
    if not HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"There is no folder or file {model}. A model is a local folder, a .gguf file, a hub "
            f"id such as org/name, or {DEMO!r}."
        )
    return _resolve_hub_id(model, revision, offline, token, progress)


def resolve_adapter(
    adapter: str, *, offline: bool = False, token: str | None = None, progress: bool = True
) -> ResolvedModel:
    """Find the files of a LoRA adapter: `adapter` is a local folder or a hub id. For the rest and
    the errors see `resolve`."""
    if not adapter:
        raise ModelNotFoundError(
            "The name of the adapter is empty. Give a local folder (. is this one) or a hub id "
            "such as org/name, or leave the adapter out."
        )
    path = Path(os.path.expanduser(adapter))
    if path.is_dir():
        return ResolvedModel(_check_adapter(path), path.resolve().name)
    if path.exists() or not HUB_ID.fullmatch(adapter):
        raise ModelNotFoundError(
            f"There is no folder {adapter}. An adapter is a local folder that holds "
            f"{ADAPTER_CONFIG} and {ADAPTER_TENSORS}, or a hub id such as org/name."
        )
    from huggingface_hub import constants, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    with _progress_bars(progress), _hub_errors(adapter, None, offline):
        folder = snapshot_download(
            adapter,
            token=token,
            local_files_only=offline,
            allow_patterns=[ADAPTER_CONFIG, ADAPTER_TENSORS],
        )
        return ResolvedModel(_check_adapter(Path(folder)), adapter, Path(folder).name)


def _check_adapter(folder: Path) -> Path:
    """`folder`, if it holds an adapter."""
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
    """`folder`, if it looks like a model's; whether its weights are whole, the loader finds out."""
    names = [path.name for path in folder.iterdir()]
    lacks_weights = not _has_weights(folder)
    if not (folder / "config.json").is_file() and not (lacks_weights and any(map(_is_gguf, names))):
        raise ModelNotFoundError(
            f"{folder} has no config.json, so it is not a model. Give the folder of a model in "
            "the Hugging Face layout: config.json, tokenizer.json and *.safetensors."
        )
    if lacks_weights:
        raise _no_weights(str(folder), names)
    return folder


def _resolve_hub_id(
    repo: str, revision: str | None, offline: bool, token: str | None, progress: bool
) -> ResolvedModel:
    from huggingface_hub import HfApi, constants, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE

    def fetch(patterns: Iterable[str], at: str | None) -> Path:
        folder = snapshot_download(
            repo,
            revision=at,
            token=token,
            local_files_only=offline,
            allow_patterns=list(patterns),
        )
        return Path(folder)

    with _progress_bars(progress), _hub_errors(repo, revision, offline):
        if offline:
            folder = fetch([], revision)  # only to find it: optional files may be absent
            if lacking := _lacking(folder):
                raise ModelNotFoundError(
                    f"The cached snapshot of {repo} is incomplete: it lacks {listed(lacking)}. Run "
                    "it once without --offline."
                )
            return ResolvedModel(folder, repo, folder.name)
        folder = fetch(SMALL_FILES, revision)
        commit = folder.name
        if shards := _shards(folder):
            fetch(map(escape, shards), commit)
        elif not _has_weights(folder):
            names = HfApi(token=token).list_repo_files(repo, revision=commit)
            weights = [SINGLE] if SINGLE in names else list(filter(_is_weights, names))
            if not weights:
                raise _no_weights(repo, names)
            fetch(map(escape, weights), commit)
        return ResolvedModel(_check_folder(folder), repo, commit)


def _shards(folder: Path) -> list[str]:
    """The weight files that the index names, [] where there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}). Fetch the model again.") from error


def _lacking(folder: Path) -> list[str]:
    """What a model cannot be loaded without, and is not in `folder`."""
    names = ["config.json", *_shards(folder)]
    lacking = [name for name in names if not (folder / name).is_file()]
    return lacking if lacking or _has_weights(folder) else ["its weights"]


def _has_weights(folder: Path) -> bool:
    return any(_is_weights(path.name) for path in folder.glob("*"))


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
            "of one; `hf download REPOSITORY FILE` fetches one from the hub, and prints its path."
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


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _hub_errors(repo: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Turn the errors of huggingface_hub into ours."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except InferError:
        raise
    except errors.HFValidationError as error:
        raise ModelNotFoundError(
            f"{repo} is neither a local folder nor a valid hub id. {error}"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelAccessError(
            f"{repo} is gated: accept its conditions on {hub}/{repo}, then {log_in}."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo} has no revision {revision!r}. Its branches and tags are on {hub}/{repo}."
        ) from error
    except errors.RepositoryNotFoundError as error:
        if _status(error) == 404:
            raise ModelNotFoundError(
                f"There is no repository {repo} on {hub}, nor a local folder of that name. "
                "Check the spelling."
            ) from error
        raise ModelAccessError(  # without a valid token, the hub does not say which
            f"{repo} is private, or does not exist. Check the spelling; if it is private, {log_in}."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if offline:
            at = f" at revision {revision!r}" if revision else ""
            raise ModelNotFoundError(
                f"{repo} is not in the cache{at} ({constants.HF_HUB_CACHE}). Run it once without "
                "--offline, and without HF_HUB_OFFLINE."
            ) from error
        cause = error.__cause__ or error
        if _status(cause) is not None:
            raise _refused(repo, hub, cause) from error
        raise ModelNotFoundError(
            f"{hub} cannot be reached, and {repo} is not in the cache. Check the network, or give "
            "a local folder."
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refused(repo, hub, error) from error
    except Exception as error:  # the HTTP client's own, and it differs between releases
        raise ModelError(f"Fetching {repo} failed: {error!r}. Try again.") from error


def _refused(repo: str, hub: str, error: BaseException) -> ModelError:
    status = _status(error)
    if status in (401, 403):
        return ModelAccessError(
            f"{hub} refused the token for {repo} ({status}). Log in again with `hf auth login`, or "
            "set HF_TOKEN to a token that may read it."
        )
    return ModelError(f"{hub} answered {status} for {repo}. Try again later.")


def _status(error: Any) -> int | None:
    """The HTTP status that an error carries, if any."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
