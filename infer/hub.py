"""From what a user calls a model to a folder of files: bundled, local, or fetched from the hub."""

import importlib.resources
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
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
from infer.models.config import RawConfig
from infer.models.formats import OLD_GPTQ
from infer.models.formats.gguf import gguf_parts

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
    OLD_GPTQ,
    ADAPTER_CONFIG,  # which a model has not: to say what it is
    INDEX,
)
UNSUPPORTED_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A hub id, or one of the GGUF models there: org/name:Q4_K_M, org/name/folder/file.gguf.
HUB_MODEL = re.compile(
    rf"(?P<repo>{HUB_ID.pattern})(?::(?P<quantisation>[\w.-]+)|/(?P<file>[^\\]+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
# Such as Q4_K_M, IQ4_XS, BF16 and MXFP4, where they stand in the name of a file.
QUANTISATION = re.compile(r"(?:^|[-.])([A-Z]*[QFP]\d\w*)(?=[-.]|$)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model's files are.

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
    progress: bool = True,
) -> ResolvedModel:
    """Find a model's files, fetching from the hub what is not in its cache.

    Args:
        model: `demo`, a local folder or GGUF file, or a hub id `org/name`. Of a repository of
            several GGUF models, `org/name:Q4_K_M` or `org/name/file.gguf` is one: by what stands in
            its file's name, in either case, or by its path.
        revision: branch, tag or commit of a hub id.
        offline: use the cache alone.
        token: for gated and private repositories; by default the one that `hf auth login` stored,
            or the environment's HF_TOKEN.
        progress: whether huggingface_hub may show its progress bars.

    Raises:
        ModelNotFoundError: no name, no such folder, file, repository, revision or cached snapshot,
            or several models that could be meant.
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
    of_hub = HUB_MODEL.fullmatch(model)
    if of_hub is None or (of_hub["file"] and Path(of_hub["repo"]).is_dir()):
        raise ModelNotFoundError(
            f"There is no folder or file {model}. A model is a local folder, a .gguf file, a hub "
            f"id such as org/name, a GGUF model there such as org/name:Q4_K_M, or {DEMO!r}."
        )
    return _resolve_hub_id(of_hub, revision, offline, token, progress)


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
    with _progress_bars(progress), _hub_errors(adapter, adapter, None, offline):
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
    if ADAPTER_CONFIG in names and "config.json" not in names:
        base = RawConfig.open(folder, ADAPTER_CONFIG).get("base_model_name_or_path", None, str)
        raise ModelNotFoundError(
            f"{folder} is a LoRA adapter. Give the model that it was made for, "
            f"{base or 'which it does not name'}, and the adapter beside it (--adapter {folder})."
        )
    if not (folder / "config.json").is_file() and not (lacks_weights and any(map(_is_gguf, names))):
        raise ModelNotFoundError(
            f"{folder} has no config.json, so it is not a model. Give the folder of a model in "
            "the Hugging Face layout: config.json, tokenizer.json and *.safetensors."
        )
    if lacks_weights:
        raise _no_weights(str(folder), names)
    return folder


def _resolve_hub_id(
    model: re.Match[str], revision: str | None, offline: bool, token: str | None, progress: bool
) -> ResolvedModel:
    from huggingface_hub import HfApi, constants, errors

    repo = model["repo"]
    offline = offline or constants.HF_HUB_OFFLINE
    with _progress_bars(progress), _hub_errors(repo, model[0], revision, offline):
        if offline:
            return _find_in_cache(model, revision)
        try:
            # list_repo_files repeats what fails for half a minute, before the cache is looked into
            files = HfApi(token=token).model_info(repo, revision=revision).siblings or []
        except errors.RevisionNotFoundError:
            raise
        except Exception as error:  # no network, no access, or a hub that is down
            with suppress(InferError, errors.LocalEntryNotFoundError):
                return _find_in_cache(model, revision)
            if isinstance(error, errors.HfHubHTTPError):
                raise
            raise _unreachable(repo, error) from error
        return _fetch(model, [file.rfilename for file in files], revision, token)


def _find_in_cache(model: re.Match[str], revision: str | None) -> ResolvedModel:
    """A model of the hub as an earlier run has fetched it."""
    from huggingface_hub import snapshot_download

    repo = model["repo"]
    folder = Path(  # no patterns: it is only to be found, since optional files may be absent
        snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
    )
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    file = _choose_gguf(model, names, f"The cached snapshot of {repo}, all that --offline uses,")
    lacking = sorted({*gguf_parts(file)} - {*names}) if file else _lacking(folder)
    if lacking:
        raise ModelNotFoundError(
            f"The cached snapshot of {repo} is incomplete: it lacks {listed(lacking)}. Run it once "
            "without --offline."
        )
    return ResolvedModel(folder / file, model[0], folder.name)


def _fetch(
    model: re.Match[str], names: list[str], revision: str | None, token: str | None
) -> ResolvedModel:
    """What a model needs of the files of its repository."""
    from huggingface_hub import snapshot_download

    repo = model["repo"]

    def fetch(patterns: Iterable[str], at: str | None) -> Path:
        return Path(
            snapshot_download(repo, revision=at, token=token, allow_patterns=list(patterns))
        )

    if file := _choose_gguf(model, names, repo):
        folder = fetch(map(escape, gguf_parts(file)), revision)
        return ResolvedModel(folder / file, model[0], folder.name)
    folder = fetch(SMALL_FILES, revision)
    commit = folder.name
    weights = [SINGLE] if SINGLE in names else list(filter(_is_weights, names))
    if not (needed := _shards(folder) or weights):
        raise _no_weights(repo, names)
    fetch(map(escape, needed), commit)
    return ResolvedModel(_check_folder(folder), repo, commit)


def _choose_gguf(model: re.Match[str], names: list[str], where: str) -> str:
    """The GGUF file that is meant, or the first of several that are one model; "" if safetensors
    are. `names` are the files that there are `where`."""
    repo, wanted = model["repo"], model["file"] or model["quantisation"]
    if not wanted and (any(map(_is_weights, names)) or not any(map(_is_gguf, names))):
        return ""
    models = sorted(filter(_is_gguf_model, names))
    found = _find_gguf(wanted, models)
    if len(found) == 1:
        return found[0]
    choices = listed((_gguf_id(repo, name, models) for name in found or models), limit=100)
    if found:
        called = f" called {wanted}" if wanted else ""
        raise ModelNotFoundError(f"{where} has several GGUF models{called}. Give one: {choices}.")
    called = f"GGUF model {wanted}" if wanted else "GGUF model"
    raise ModelNotFoundError(f"{where} has no {called}. Those that it has: {choices or 'none'}.")


def _find_gguf(wanted: str | None, models: list[str]) -> list[str]:
    """Those of the models that are meant by a path, by a quantisation, or by nothing at all."""
    if wanted is None:
        return models
    word = re.compile(rf"(?:^|[-.]){re.escape(wanted)}(?=[-.]|$)", re.IGNORECASE)
    return [m for m in models if m == wanted or word.search(PurePosixPath(m).stem)]


def _gguf_id(repo: str, model: str, models: list[str]) -> str:
    """What means this one of a repository's models: its quantisation, if no other has it."""
    for quantisation in QUANTISATION.findall(PurePosixPath(model).stem):
        if _find_gguf(quantisation, models) == [model]:
            return f"{repo}:{quantisation}"
    return f"{repo}/{model}"


def _is_gguf_model(name: str) -> bool:
    """Whether a file is a GGUF model, or the first of the several that one is: no encoder of images
    (mmproj), and no statistics for quantising (imatrix)."""
    helps = re.search("mmproj|imatrix", PurePosixPath(name).name, re.IGNORECASE)
    return _is_gguf(name) and not helps and gguf_parts(name)[:1] == [name]


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
def _hub_errors(repo: str, given: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Turn the errors of huggingface_hub into ours. `given` is what the user called the model."""
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
                f"There is no repository {repo} on {hub}, nor a local file or folder {given}. "
                "Check the spelling."
            ) from error
        raise ModelAccessError(  # without a valid token, the hub does not say which
            f"{repo} is private, or does not exist, and there is no local file or folder {given}. "
            f"Check the spelling; if it is private, {log_in}."
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
        raise _unreachable(repo, cause) from error
    except errors.HfHubHTTPError as error:
        raise _refused(repo, hub, error) from error
    except Exception as error:  # the HTTP client's own, and it differs between releases
        raise ModelError(f"Fetching {repo} failed: {error!r}. Try again.") from error


def _unreachable(repo: str, error: BaseException) -> ModelError:
    from huggingface_hub import constants

    return ModelNotFoundError(
        f"{constants.ENDPOINT} cannot be reached ({error!r}), and {repo} is not in the cache. "
        "Check the network, or give a local folder."
    )


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
