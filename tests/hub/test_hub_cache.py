"""`infer pull`, `infer list` and `infer rm`, on caches that `resolve` or huggingface_hub's own
layout has made. huggingface_hub's scan says whether what is left is sound."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, refused
from huggingface_hub import constants, scan_cache_dir
from test_hub import MAIN, Q4, Q8, TAG, WANTED, Hub, content, copies, run_at, serve

import infer.cli.cached
from infer.cli.cached import CachedReport
from infer.cli.options import names_in_cache
from infer.hub import resolve
from infer.hub.cache import list_models

__all__ = ["copies"]  # a fixture

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in place of the user's."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def put(
    cache: Path,
    repo: str,
    files: dict[str, Any],
    *,
    commit: str = MAIN,
    ref: str | None = "main",
    used: int = 10**9,
    links: bool = True,
) -> Path:
    """A revision of a repository as huggingface_hub keeps it; links: False as where a system has no
    symbolic links. Of files the content, or an object for JSON. Returns its folder."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    for name, value in files.items():
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        pointer = folder / "snapshots" / commit / name
        pointer.parent.mkdir(parents=True, exist_ok=True)
        blob = folder / "blobs" / f"{hash(body) & 0xFFFFFFFF:08x}" if links else pointer
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(body)
        os.utime(blob, (used, used))
        if links:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    if ref is not None:
        path = folder / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return folder


def put_model(cache: Path, repo: str, nbytes: int = 1000, **more: Any) -> Path:
    weights = repo.encode().ljust(nbytes, b"x")
    return put(cache, repo, {"config.json": CONFIG, "model.safetensors": weights}, **more)


def put_gguf(cache: Path, repo: str = "org/gguf", **more: Any) -> Path:
    files = {"a-Q4_K_M.gguf": b"4" * 400, "b/a-Q8_0-00001-of-00002.gguf": b"8" * 800}
    return put(cache, repo, files | {"b/a-Q8_0-00002-of-00002.gguf": b"9" * 200}, **more)


def day(used: int) -> str:
    """A time in 10**8 seconds, where the tests run."""
    return f"{datetime.fromtimestamp(used * 10**8):%Y-%m-%d}"


def names() -> list[str]:
    return [model.name for model in list_models().models]


def sound(cache: Path) -> dict[str, int]:
    """The sizes of repositories, as huggingface_hub counts them; none is damaged."""
    found = scan_cache_dir(cache)
    assert not found.warnings
    return {repo.repo_id: repo.size_on_disk for repo in found.repos}


# infer list


def test_an_empty_cache(cache: Path) -> None:
    assert invoke("list").stdout == f"There are no models in {cache}\n"
    cache.mkdir()
    (cache / "datasets--org--data").mkdir()
    told = f"There are no models in {cache}; 1 other repository\n"
    assert invoke("list").stdout == told
    assert json.loads(invoke("list", "--json").stdout) == {
        "cache": str(cache),
        "models": [],
        "size_bytes": 0,
        "other_repositories": 1,
    }


@pytest.mark.parametrize("links", [True, False])
def test_what_can_be_run_is_listed(cache: Path, links: bool) -> None:
    put_model(cache, "org/old", used=10**9, links=links)
    put_gguf(cache, used=16 * 10**8, links=links)
    packed = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    files = {"config.json": packed, "model.safetensors": b"x" * 5000}
    put(cache, "organisation-of-a-name/that-is-long-" + "x" * 30, files, used=15 * 10**8)
    put(cache, "org/unknown", {"config.json": {"model_type": "bert"}, "model.safetensors": b"x"})
    put(cache, "org/lora", {"adapter_config.json": {}, "adapter_model.safetensors": b"x"})
    put_model(cache, "gpt2")  # has no organisation
    (cache / "datasets--org--data/snapshots").mkdir(parents=True)
    (cache / "CACHEDIR.TAG").write_text("")
    (cache / ".locks").mkdir()
    text = invoke("list").stdout
    assert all(len(line) <= 80 for line in text.splitlines()[:-1])
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "model size format revision last used",
        f"org/gguf:Q4_K_M 400 bytes GGUF aaaaaaa {day(16)}",
        f"org/gguf:Q8_0 1000 bytes GGUF aaaaaaa {day(16)}",
        "organisation-of-a-name/that-is-long-" + "x" * 30,
        f"5.0 KiB GPTQ, 4 bits aaaaaaa {day(15)}",
        f"org/old 1.0 KiB bf16 aaaaaaa {day(10)}",
        "",
        f"4 models, 7.4 KiB in {cache}; 4 other repositories",
    ]
    found = json.loads(invoke("list", "--json").stdout)
    counted = sound(cache)
    assert found["models"][3] == {
        "name": "org/old",
        "repository": "org/old",
        "revision": MAIN,
        "refs": ["main"],
        "format": "bf16",
        "path": str(cache / "models--org--old/snapshots" / MAIN),
        "size_bytes": counted["org/old"],
        "last_used": found["models"][3]["last_used"],
    }
    assert sum(model["size_bytes"] for model in found["models"][:2]) == counted["org/gguf"]


def test_each_name_is_that_of_what_would_be_run(cache: Path) -> None:
    put_model(cache, "org/old")
    put_gguf(cache)
    for model in list_models().models:
        found = resolve(model.name, offline=True)
        assert (found.path, found.revision) == (model.path, model.revision)


def test_a_damaged_repository_does_not_keep_the_others_from_being_listed(cache: Path) -> None:
    put_model(cache, "org/good")
    put_model(cache, "org/no-such-ref", ref=None)
    put(cache, "org/no-such-ref", {}, commit=TAG)  # refs/main is what was never fetched
    refs = cache / "models--org--no-such-ref/refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_bytes(b"\xff\xfe")
    (refs / "v1").write_text(TAG)
    lost = put_model(cache, "org/lost")
    (lost / "snapshots" / MAIN / "model.safetensors").resolve().unlink()
    put(cache, "org/config", {"config.json": b"{", "model.safetensors": b"x"})
    index = {"weight_map": {"a": "../escaped.safetensors"}}
    put(cache, "org/index", {"config.json": CONFIG, "model.safetensors.index.json": index})
    put(cache, "org/odd", {"config.json": {"model_type": ["x"]}, "model.safetensors": b"x"})
    odd = CONFIG | {"quantization_config": {"quant_method": []}, "dtype": {}}
    put(cache, "org/odd-format", {"config.json": odd, "model.safetensors": b"x"})
    (cache / "models--org--empty").mkdir()
    (cache / "models--org--file").write_text("")
    (cache / "models--org--snapshot/snapshots").mkdir(parents=True)
    (cache / "models--org--snapshot/snapshots" / MAIN).write_text("")
    (cache / "models--org--nowhere").symlink_to(cache / "nowhere")
    found = list_models()
    assert {model.name: model.format for model in found.models} == {
        "org/good": "bf16",
        "org/no-such-ref": "bf16",
        "org/lost": "incomplete",
        "org/index": "incomplete",
        "org/odd-format": "quantised",
    }
    assert found.others == 4
    for name in ("no-such-ref", "lost", "index", "empty", "snapshot", "config"):
        assert invoke("rm", f"org/{name}", "--yes").exit_code == 0
        assert not (cache / f"models--org--{name}").exists()
    assert sorted(names()) == ["org/good", "org/odd-format"]


def test_names_obey_no_terminal(cache: Path) -> None:
    put_gguf(cache)
    put(cache, "org/x", {"y\x1b[31m\n.gguf": b"x"})
    text = CachedReport(list_models()).text()
    assert "\x1b" not in text
    assert "org/x/y\\x1b[31m\\n.gguf" in text


def test_a_cache_that_cannot_be_read(cache: Path) -> None:
    cache.write_text("")
    assert f"The cache {cache} cannot be read" in refused("list")
    assert names_in_cache("") == []


# infer rm


@pytest.mark.parametrize("links", [True, False])
def test_a_model_is_deleted_alone(cache: Path, links: bool) -> None:
    put_model(cache, "org/a", links=links)
    put_model(cache, "org/a", commit=TAG, ref="v1", links=links)
    put_model(cache, "org/b", links=links)
    before = sound(cache)
    done = invoke("rm", "org/a", "--yes")
    assert done.stdout == f"org/a: deleted, {infer.progress.size(before['org/a'])} freed\n"
    assert sound(cache) == {"org/b": before["org/b"]}


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("revision", ["v1", TAG, TAG[:7]])
def test_a_revision_is_deleted_alone(cache: Path, links: bool, revision: str) -> None:
    shared = {"config.json": CONFIG, "tokenizer.json": b"t" * 90}
    put(cache, "org/a", shared | {"model.safetensors": b"1" * 500}, links=links)
    more = shared | {"model.safetensors": b"2" * 700}
    put(cache, "org/a", more, commit=TAG, ref="v1", links=links)
    rest = {p: p.read_bytes() for p in (cache / "models--org--a/snapshots" / MAIN).iterdir()}
    done = invoke("rm", "org/a", "--revision", revision, "--yes")
    copies = 0 if links else 90 + len(json.dumps(CONFIG))
    assert f"deleted, {700 + copies} bytes freed" in done.stdout
    (repo,) = scan_cache_dir(cache).repos
    assert [found.commit_hash for found in repo.revisions] == [MAIN]
    assert {p: p.read_bytes() for p in rest} == rest
    assert sound(cache) == {"org/a": sum(map(len, rest.values()))}


@pytest.mark.parametrize("links", [True, False])
def test_one_gguf_model_is_deleted_alone(cache: Path, links: bool) -> None:
    folder = put_gguf(cache, links=links)
    put(cache, "org/gguf", {"README.md": b"readme"}, links=links)
    put_model(cache, "org/other")
    before = sound(cache)
    assert "1000 bytes freed" in invoke("rm", "org/gguf:q8_0", "-y").stdout
    assert sorted(names()) == ["org/gguf:Q4_K_M", "org/other"]
    assert sound(cache) == before | {"org/gguf": 406}
    assert "400 bytes freed" in invoke("rm", "hf.co/org/gguf/blob/main/a-Q4_K_M.gguf", "-y").stdout
    assert sound(cache) == before | {"org/gguf": 6}
    assert "6 bytes freed" in invoke("rm", "org/gguf", "-y").stdout
    assert not folder.exists()


def test_the_last_gguf_model_takes_the_repository_with_it(cache: Path) -> None:
    folder = put_gguf(cache)
    put_gguf(cache, commit=TAG, ref="v1")
    invoke("rm", "org/gguf:Q4_K_M", "--revision", "v1", "--yes")
    assert (folder / "snapshots" / MAIN / "a-Q4_K_M.gguf").read_bytes() == b"4" * 400
    assert names() == ["org/gguf:Q4_K_M", "org/gguf:Q8_0", "org/gguf:Q8_0"]
    for name in ("Q4_K_M", "Q8_0"):
        invoke("rm", f"org/gguf:{name}", "--yes")
    assert not folder.exists()


def test_a_revision_whose_content_is_lost_can_be_deleted(cache: Path) -> None:
    put_model(cache, "org/a")
    put_gguf(cache, "org/a", commit=TAG, ref="v1")
    pointer = cache / "models--org--a/snapshots" / TAG / "a-Q4_K_M.gguf"
    pointer.resolve().unlink()
    assert names() == ["org/a", "org/a:Q8_0"]
    done = invoke("rm", "org/a:Q4_K_M", "--yes")
    assert (done.stdout, done.stderr) == ("org/a:Q4_K_M: deleted, 0 bytes freed\n", "")
    assert not pointer.is_symlink()
    assert "1000 bytes freed" in invoke("rm", "org/a", "--revision", "v1", "--yes").stdout
    assert names() == ["org/a"]
    sound(cache)


def test_what_a_link_leads_to_elsewhere_stays(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_text("mine")
    folder = put_gguf(cache)
    (folder / "snapshots" / MAIN / "mine-Q6_K.gguf").symlink_to(mine)
    assert "0 bytes freed" in invoke("rm", "org/gguf:Q6_K", "--yes").stdout
    put_model(cache, "org/moved")
    os.rename(cache / "models--org--moved", tmp_path / "moved")
    (cache / "models--org--moved").symlink_to(tmp_path / "moved")
    assert "Delete that by hand" in refused("rm", "org/moved", "--yes")
    assert mine.read_text() == "mine"
    assert (tmp_path / "moved/refs/main").exists()
    assert sorted(names()) == ["org/gguf:Q4_K_M", "org/gguf:Q8_0", "org/moved"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("org/qwen3-0.6",),
            r"org/qwen3-0.6 is not in the cache \(.*Did you mean org/qwen3-0.6b\?",
        ),
        (("org/gguf:Q4_K_S",), r"Did you mean org/gguf:Q4_K_M"),
        (("zzz/yyy",), "`infer list` shows what is"),
        (("org/gguf", "--revision", "v9"), "not in the cache at revision 'v9', but at main, aaaa"),
        (("org/gguf", "--revision", "../../x"), "is not a revision"),
        (("org/several:Q4",), r"several GGUF models called Q4 .*: org/several/a-Q4.gguf, org/sev"),
        (("demo",), "demo is included in the package and cannot be deleted"),
        (("folder",), "folder is a local file or folder"),
        (("",), "There is no folder or file"),
        (("../x",), "There is no folder or file"),
        (("org/a--b",), "nor a valid hub id"),
    ],
)
def test_what_is_not_there_is_not_deleted(
    cache: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "folder").mkdir()
    put_gguf(cache)
    put_model(cache, "org/qwen3-0.6b")
    put(cache, "org/several", {"a-Q4.gguf": b"a", "b-Q4.gguf": b"b"})
    before = sound(cache)
    assert re.search(message, refused("rm", *arguments, "--yes", code=2))
    assert sound(cache) == before


def test_it_asks_on_a_terminal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_model(cache, "org/a", nbytes=2048)
    assert "give --yes" in refused("rm", "org/a", code=2)
    monkeypatch.setattr(infer.cli.cached, "is_terminal", lambda stream: True)
    for answer in (b"n\n", b"\n", b"", b"x\n"):
        done = invoke("rm", "org/a", stdin=answer)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == "Delete org/a (aaaaaaa), 2.0 KiB? [y/N] Nothing was deleted.\n"
        assert names() == ["org/a"]
    assert "deleted, 2.0 KiB freed" in invoke("rm", "org/a", stdin=b"Yes\n").stdout
    assert names() == []


def test_what_repositories_share_is_not_counted_as_freed(cache: Path) -> None:
    """Since huggingface_hub 2 a blob may be a link itself."""
    for repo in ("org/a", "org/b"):
        blob = put_gguf(cache, repo) / "blobs"
        shared = cache / "blobs/ab" / ("ab" * 32)
        shared.parent.mkdir(parents=True, exist_ok=True)
        (path,) = (p for p in blob.iterdir() if p.read_bytes() == b"4" * 400)
        os.replace(path, shared)
        path.symlink_to(os.path.relpath(shared, blob))
    assert list_models().nbytes == 400 + 2 * 1000
    assert "org/a: deleted, 1000 bytes freed" in invoke("rm", "org/a", "--yes").stdout
    assert shared.read_bytes() == b"4" * 400
    assert names() == ["org/b:Q4_K_M", "org/b:Q8_0"]


@pytest.fixture
def read_only(cache: Path) -> Iterator[Path]:
    put_model(cache, "org/a")
    put_gguf(cache)
    folders = [cache, *(p for p in cache.rglob("*") if p.is_dir() and not p.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    yield cache
    for folder in folders:
        folder.chmod(0o755)


def test_a_cache_that_is_read_only_is_listed(read_only: Path) -> None:
    assert len(names()) == 3


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="may write anywhere")
def test_of_a_cache_that_is_read_only_nothing_is_deleted(read_only: Path) -> None:
    before = sound(read_only)
    for model in ("org/a", "org/gguf:Q4_K_M"):
        assert re.search("cannot be deleted: .* cannot be written", refused("rm", model, "--yes"))
    assert sound(read_only) == before


def test_shells_complete_names_of_the_cache(cache: Path) -> None:
    put_gguf(cache)
    put_model(cache, "org/a")
    assert names_in_cache("org/g") == ["org/gguf", "org/gguf:Q4_K_M", "org/gguf:Q8_0"]
    assert names_in_cache("x") == []


def test_a_folder_here_comes_before_the_model_in_the_cache(cache: Path, tmp_path: Path) -> None:
    put_model(cache, "org/a")
    (tmp_path / "org/a").mkdir(parents=True)
    assert "with hf.co/ before it" in refused("rm", "org/a", "--yes", code=2)
    assert invoke("rm", "hf.co/org/a", "--yes").stdout.startswith("org/a: deleted")
    assert (tmp_path / "org/a").is_dir()


# infer pull, in processes of their own: huggingface_hub reads its variables when it is imported


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


def pull(hub: str, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_at(hub, home, "import infer.__main__; infer.__main__.main()", *arguments, **env)


def test_pull_fetches_once_what_running_needs(hub: Hub, tmp_path: Path) -> None:
    home, before = tmp_path / "home", len(hub.fetched)
    nbytes = sum(len(content("org/sharded", MAIN, name)) for name in WANTED["org/sharded"])
    where = f"{infer.progress.size(nbytes)} in {home}/hub/models--org--sharded/snapshots/{MAIN}\n"
    done = pull(hub.url, home, "pull", "org/sharded")
    assert (done.stdout, done.stderr) == (f"org/sharded: downloaded, {where}", "")
    assert {*hub.fetched[before:]} == {f"org/sharded/{name}" for name in WANTED["org/sharded"]}
    before = len(hub.fetched)
    again = pull(hub.url, home, "pull", f"{hub.url}/org/sharded", "--revision", "main")
    assert (again.stdout, again.returncode) == (f"org/sharded: already downloaded, {where}", 0)
    assert len(hub.fetched) == before
    offline = pull("http://127.0.0.1:9", home, "pull", "org/sharded", HF_HUB_OFFLINE="1")
    assert offline.stdout == again.stdout


def test_pull_fetches_one_gguf_model(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    several = pull(hub.url, tmp_path, "pull", "org/gguf", HF_HUB_CACHE=str(cache))
    assert several.returncode == 2
    assert re.search(r"several GGUF models\. Give one: org/gguf:Q8_0 .*Q4_K_M", several.stderr)
    done = pull(hub.url, tmp_path, "pull", "hf.co/org/gguf:q8_0", HF_HUB_CACHE=str(cache))
    nbytes = sum(len(content("org/gguf", MAIN, n)) for n in WANTED["org/gguf"] if n != Q4)
    path = cache / "models--org--gguf/snapshots" / MAIN / Q8
    assert done.stdout == f"org/gguf:q8_0: downloaded, {nbytes} bytes in {path}\n"
    assert not (tmp_path / "hub").exists()
    shown = pull("", tmp_path, "list", "--json", HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1")
    (model,) = json.loads(shown.stdout)["models"]
    assert (model["name"], model["size_bytes"]) == ("org/gguf:Q8_0", nbytes)


def test_pull_without_room_or_a_network(hub: Hub, tmp_path: Path) -> None:
    before = len(hub.fetched)
    done = pull(hub.url, tmp_path, "pull", "org/huge")
    assert re.match(r"error: org/huge does not fit on the disk .* are missing", done.stderr)
    assert done.returncode == 1
    assert hub.fetched[before:] == ["org/huge/config.json"]
    done = pull("http://127.0.0.1:9", tmp_path, "pull", "org/single", HF_HUB_OFFLINE="1")
    assert re.match("error: org/single is not in the cache", done.stderr)


@pytest.mark.parametrize("model", ["demo", "folder", "./folder"])
def test_of_a_local_model_there_is_nothing_to_fetch(
    cache: Path, tmp_path: Path, model: str
) -> None:
    (tmp_path / "folder").mkdir()
    assert f"{model} is already here, so there is nothing to download" in refused(
        "pull", model, code=2
    )
