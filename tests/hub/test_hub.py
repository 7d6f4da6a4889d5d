"""`resolve` finds models, and has a message for each failure, with a small hub on localhost.

huggingface_hub reads HF_ENDPOINT and HF_HOME when it is imported, so it runs in other processes.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from commands import Copies

import infer
from infer.hub import resolve, resolve_adapter
from infer.kernels.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from infer.models.loading.checkpoint import ADAPTER_CONFIG, ADAPTER_TENSORS

MAIN, TAG = "a" * 40, "b" * 40
INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
COMMON = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
UNWANTED = [
    "consolidated.safetensors",
    "original/model.safetensors",
    "onnx/model.onnx",
    "pytorch_model.bin",
    "model.gguf",
    "tokenizer.model",
    "2_Dense/config.json",
]
Q4, Q8 = "tiny-Q4_K_M.gguf", "Q8_0/tiny-Q8_0-00001-of-00002.gguf"
# Repositories of a hub that is broken or hostile: of files that are not what they should be,
ODD = [
    "etag",
    "etag-2",
    "commit",
    "gone",
    "stalled",
    "flipped",
    "flipped-small",
    "long",
    "cut",
    "xet",
]
HEADERS = {
    "org/etag": {"ETag": '"../../../../escaped"', "X_Linked_Etag": '"../../../../escaped"'},
    "org/etag-2": {"ETag": '"/tmp/escaped-of-infer"', "X_Linked_Etag": '"/tmp/escaped-of-infer"'},
    "org/commit": {"X_Repo_Commit": "../../../../escaped"},
    "org/gone": {"X_Repo_Commit": "../../../../escaped"},
}
BAD_NAMES = [
    "../../../../escaped.safetensors",
    "additional_chat_templates/../../../../escaped.jinja",
    "/tmp/escaped-of-infer.safetensors",
    "a\\b.safetensors",
    "C:escaped.safetensors",
    "x\x1b[31m.safetensors",
    "x" * 300 + ".safetensors",
    "\ud800.safetensors",
    "",
]
# and of answers that are none.
ANSWERS: dict[str, Any] = {
    "org/down": (500, b'["not an object"]'),
    "org/list": (200, b"[]"),
    "org/null": (200, b"null"),
    "org/empty": (200, b"{}"),
    "org/page": (200, b"<html>Log in</html>"),
    "org/deep": (200, b"[" * 100_000),
    "org/bytes": (200, b"\xff"),
    "org/no-files": (200, json.dumps({"sha": MAIN}).encode()),
    "org/kinds": (200, json.dumps({"sha": MAIN, "siblings": [{"rfilename": 1}]}).encode()),
    "org/sha": (200, json.dumps({"sha": "../../escaped", "siblings": []}).encode()),
    "org/teapot": (418, b""),
}
WANTED = {
    "org/sharded": [
        *[*COMMON, INDEX, *SHARDS, "additional_chat_templates/rag.jinja"],
        *["modules.json", "1_Pooling/config.json", "README.md"],
    ],
    "org/single": ["config.json", "tokenizer.json", "model.safetensors"],
    "org/gated": ["config.json", "model.safetensors"],
    "org/private": ["config.json", "model.safetensors"],
    "org/bin": ["config.json"],
    "org/gguf": [Q4, Q8, Q8.replace("00001-", "00002-")],
    "org/one-gguf": ["tiny.gguf"],
    "org/none": ["config.json"],
    "org/bare": ["model.safetensors"],
    **{f"org/{name}": ["config.json", "model.safetensors"] for name in [*ODD, "huge"]},
    **{repo: ["config.json"] for repo in ANSWERS},
    "org/names": ["config.json", "model.safetensors", *BAD_NAMES],
    "org/lora-as-model": ["adapter_config.json", "adapter_model.safetensors"],
    "org/lora": ["adapter_config.json", "adapter_model.safetensors"],
}
EXTRA = {
    "org/sharded": UNWANTED,
    "org/single": ["extra/model.safetensors", "README.md"],  # which is too large
    "org/bin": ["pytorch_model-00001-of-00002.bin"],
    "org/gguf": [
        *["README.md", "config.json", "mmproj-F16.gguf", "tiny.imatrix.gguf"],
        *["tiny-Q6_K.gguf", "UD/tiny-UD-Q6_K.gguf", "sub/tiny-mxfp4.gguf"],
    ],
    "org/one-gguf": ["README.md", "config.json", "pytorch_model.bin", "mmproj-tiny.gguf"],
    "org/gated": ["tiny-Q4_K_M.gguf"],
    "org/lora": ["README.md", "tokenizer.json", "adapter_model.bin", "optimizer.pt"],
}


def content(repo: str, commit: str, name: str) -> bytes:
    if name == INDEX:
        weight_map = {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}
        return json.dumps({"weight_map": weight_map}).encode()
    return json.dumps({"repo": repo, "commit": commit, "name": name}).encode()


def sizes(repo: str, commit: str, name: str) -> dict[str, Any]:
    """Returns the sizes and digests of a file in the hub's listing with ?blobs=true."""
    body = content(repo, commit, name)
    is_large = repo == "org/huge" and name.endswith((".safetensors", ".gguf"))
    is_large |= (repo, name) == ("org/single", "README.md")
    nbytes = 1 << 60 if is_large else len(body)
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": nbytes, "pointerSize": 134}
    large = {"lfs": lfs} if name.endswith((".safetensors", ".gguf")) else {}
    return {"size": nbytes, "blobId": blob} | large


@dataclass
class Hub:
    """The endpoints of the hub that are asked for the repositories above."""

    url: str = ""
    fetched: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)

    def handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 (self is the handler)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def drip(self, length: int) -> None:
                """Never a whole answer: a byte now and then."""
                self.send_response(200)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.close_connection = True
                with suppress(OSError):
                    while not hub.closing.wait(0.02):
                        self.wfile.write(b" ")

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
                file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                match = api or file
                if match is None:
                    return self.reply(404)
                repo = match[1]
                token = self.headers.get("Authorization")
                if repo == "org/echo":
                    echo = f"There is no token {token}"
                    return self.reply(400, echo.encode(), X_Error_Message=echo)
                if token not in (None, "Bearer good"):
                    message = "Invalid credentials in Authorization header"
                    return self.reply(401, X_Error_Message=message)
                if repo not in WANTED or (repo == "org/private" and token is None):
                    # The hub answers so: nobody learns which private repositories there are.
                    return self.reply(404 if token else 401, X_Error_Code="RepoNotFound")
                if repo in ANSWERS:
                    return self.reply(*ANSWERS[repo])
                revision = (match[3] if api else match[2]) or "main"
                commit = {"main": MAIN, "v1": TAG, MAIN: MAIN, TAG: TAG}.get(revision)
                if commit is None:
                    return self.reply(404, X_Error_Code="RevisionNotFound")
                names = [*WANTED[repo], *EXTRA.get(repo, [])]
                if api:
                    return self.list_files(repo, commit, names, tree=match[2] == "tree")
                if repo == "org/gated" and token is None:
                    return self.reply(403, X_Error_Code="GatedRepo")
                if match[3] not in names:
                    return self.reply(404, X_Error_Code="EntryNotFound")
                self.serve_file(repo, commit, match[3], urlsplit(self.path).query == "cdn")

            def serve_file(self, repo: str, commit: str, name: str, is_cdn: bool) -> None:
                body = content(repo, commit, name)
                large = name.endswith((".safetensors", ".gguf"))
                headers = {"X_Repo_Commit": commit}
                if large:
                    headers["X_Linked_Etag"] = f'"{hashlib.sha256(body).hexdigest()}"'
                    headers["X_Linked_Size"] = str(len(body))
                    if repo == "org/xet":
                        headers |= {"X_Xet_Hash": "a" * 64, "X_Xet_Refresh_Route": "/token"}
                else:
                    blob = b"blob %d\0" % len(body) + body
                    headers["ETag"] = f'"{hashlib.sha1(blob).hexdigest()}"'
                headers |= HEADERS.get(repo, {})
                if large and not is_cdn:  # as the hub does: what is large is elsewhere
                    return self.reply(302, Location=f"{hub.url}{self.path}?cdn", **headers)
                if self.command == "HEAD":
                    return self.reply(200, body, **headers)
                hub.fetched.append(f"{repo}/{name}")
                if repo == "org/gone":
                    return self.reply(404, X_Error_Code="EntryNotFound", **headers)
                if repo == "org/stalled" and large:
                    return self.drip(len(body))
                if (repo == "org/flipped" and large) or repo == "org/flipped-small":
                    body = bytes([body[0] ^ 1]) + body[1:]
                if repo == "org/long":
                    body += b" "
                start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                if repo == "org/cut" and large and name not in hub.cut:
                    hub.cut.add(name)  # the first time, a part of it comes
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body[:9])
                    self.close_connection = True
                    return None
                if start and repo == "org/cut":
                    return self.reply(206, body[int(start[1]) :])
                return self.reply(200, body, **headers)

            do_HEAD = do_GET  # noqa: N815

            def list_files(self, repo: str, commit: str, names: list[str], tree: bool) -> None:
                info: Any = {
                    "id": repo,
                    "sha": commit,
                    "siblings": [{"rfilename": name} | sizes(repo, commit, name) for name in names],
                }
                if tree:
                    bodies = {name: content(repo, commit, name) for name in names}
                    info = [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(body),
                            "oid": hashlib.sha1(body).hexdigest(),
                        }
                        for name, body in bodies.items()
                    ]
                self.reply(200, json.dumps(info).encode(), Content_Type="application/json")

        return Handler


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub.handler())
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


DRIVER = """
import json, os, sys
from pathlib import Path
import traceback
from infer.hub import download
from infer.hub import resolve, resolve_adapter
from infer.kernels.errors import InferError
if arrives := os.environ.get("XET"):
    import inspect
    from huggingface_hub import file_download
    signature = inspect.signature(file_download.xet_get)
    def xet_get(**given):
        signature.bind(**given)
        given["_tqdm_bar"].update(len(arrives))
        given["_tqdm_bar"].set_postfix_str("1 MB/s", refresh=False)
        Path(given["incomplete_path"]).write_text(arrives)
    file_download.xet_get = xet_get
for name, value in json.loads(os.environ.get("LIMITS", "{}")).items():
    setattr(download, name, value)
outcomes = []
reports = []
for kwargs in json.loads(sys.argv[1]):
    fails = kwargs.pop("fails", False)
    kwargs["progress"] = lambda *report: reports.append(report) or (fails and 1 / 0)
    os.environ.update(kwargs.pop("env", {}))
    if login := kwargs.pop("login", ""):
        Path(os.environ["HF_HOME"], "token").write_bytes(login.encode("latin-1"))
    try:
        found = (resolve_adapter if "adapter" in kwargs else resolve)(**kwargs)
    except (InferError, ZeroDivisionError) as error:
        outcomes.append({"error": type(error).__name__, "message": str(error)})
        outcomes[-1]["trace"] = traceback.format_exc()
    else:
        folder = next(p for p in (found.path, *found.path.parents) if p.name == found.revision)
        files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
        outcomes.append({"name": found.name, "revision": found.revision})
        outcomes[-1]["path"] = found.path.relative_to(folder).as_posix()
        outcomes[-1]["files"] = {name: path.read_text() for name, path in files.items()}
    if os.environ.get("REPORTS"):
        outcomes[-1]["reports"] = reports[:]
        reports.clear()
print(json.dumps(outcomes))
"""


COPIES = Copies()


@pytest.fixture(scope="module", autouse=True)
def copies() -> Iterator[None]:
    yield
    COPIES.close()


def run_at(
    url: str, home: Path, code: str, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Code in a process of its own, under this hub and cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    kept |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "*"} | env
    return COPIES.run(code, [*arguments], kept)


def run(
    url: str, home: Path, calls: list[dict[str, Any]], **env: str
) -> subprocess.CompletedProcess[str]:
    """Several calls of `resolve`, or `resolve_adapter`, in one process under this hub and cache."""
    done = run_at(url, home, DRIVER, json.dumps(calls), **env)
    assert done.returncode == 0, done.stderr
    return done


def resolve_all(
    url: str, home: Path, calls: list[dict[str, Any]], **env: str
) -> list[dict[str, Any]]:
    """The outcome of each call."""
    outcomes: list[dict[str, Any]] = json.loads(run(url, home, calls, **env).stdout)
    return outcomes


ONLINE: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "org/gated"}, "ModelAccessError", r"org/gated is gated: accept.*/org/gated"),
    ({"model": "org/private"}, "ModelAccessError", "private, or does not exist.*hf auth login"),
    ({"model": "org/typo", "token": "good"}, "ModelNotFoundError", "no repository org/typo"),
    ({"model": "org/single", "token": "bad"}, "ModelAccessError", "refused the token"),
    ({"model": "org/single", "revision": "v9"}, "ModelNotFoundError", "no revision 'v9'"),
    ({"model": "org/bin"}, "UnsupportedError", r"weights in \.bin files only"),
    ({"model": "org/none"}, "CheckpointError", "has no weights"),
    ({"model": "org/bare"}, "ModelNotFoundError", r"no config\.json"),
    ({"model": "org/lora-as-model"}, "ModelNotFoundError", "is a LoRA adapter. Give the model"),
    ({"model": "org/down"}, "ModelError", "answered 500"),
    *(({"model": name}, "ModelError", "not answer as a hub does") for name in [*ANSWERS][1:-1]),
    ({"model": "org/teapot"}, "ModelError", "answered 418"),
    ({"model": "org/etag"}, "ModelError", "an ETag that is none"),
    ({"model": "org/etag-2"}, "ModelError", "an ETag that is none"),
    ({"model": "org/gone"}, "ModelError", "answered 404"),
    ({"model": "org/flipped"}, "ModelError", r"model\.safetensors of org/flipped arrived damaged"),
    ({"model": "org/flipped-small"}, "ModelError", r"config\.json of .* arrived damaged"),
    ({"model": "org/long"}, "ModelError", "longer than"),
    (
        {"model": "org/huge"},
        "ModelError",
        r"org/huge does not fit on the disk of .*hub: 1,073,741,824.0 GiB are to be fetched and "
        r".* are free, so .* GiB are missing\. Make room.*HF_HOME",
    ),
    ({"model": "org/a--b"}, "ModelNotFoundError", "nor a valid hub id"),
    ({"model": "org/" + "a" * 300}, "ModelNotFoundError", "nor a valid hub id"),
    ({"model": "org/other", "offline": True}, "ModelNotFoundError", "not in the cache"),
    (
        {"model": "org/gguf"},
        "ModelNotFoundError",
        r"several GGUF models\. Give one: org/gguf:Q8_0 \(240 bytes\), "  # both of its files
        r"org/gguf/UD/tiny-UD-Q6_K\.gguf \(106 bytes\), org/gguf:mxfp4 \(105 bytes\), "
        r"org/gguf:Q4_K_M \(102 bytes\), org/gguf/tiny-Q6_K\.gguf \(100 bytes\)\.$",
    ),
    ({"model": "org/gguf:Q4_K"}, "ModelNotFoundError", r"model Q4_K\. Those .*:Q8_0 .*_K_M "),
    ({"model": "org/gguf:F16"}, "ModelNotFoundError", "no GGUF model F16"),
    ({"model": "org/gguf:q6_k"}, "ModelNotFoundError", "models called q6_k.*UD.*, [^,]*-Q6_K.gguf"),
    ({"model": f"org/gguf/sub/{Q4}"}, "ModelNotFoundError", f"no GGUF model sub/{Q4}"),
    ({"model": "org/gguf/" + WANTED["org/gguf"][2]}, "ModelNotFoundError", "no GGUF model Q8_0/"),
    ({"model": "org/gguf/mmproj-F16.gguf"}, "ModelNotFoundError", "no GGUF model mmproj-F16.gguf"),
    ({"model": "org/single:Q4_K_M"}, "ModelNotFoundError", "Those that it has: none"),
    ({"model": "org/gguf:Q4_K_M", "revision": "v9"}, "ModelNotFoundError", "no revision 'v9'"),
    ({"model": "org/gated:Q4_K_M"}, "ModelAccessError", "org/gated is gated: accept"),
    ({"model": "org/private:Q4_K_M"}, "ModelAccessError", "private, or does not exist"),
    ({"model": "org/typo/x.gguf", "token": "good"}, "ModelNotFoundError", "file or .*typo/x.gguf"),
    ({"model": "org/other:Q4_K_M", "offline": True}, "ModelNotFoundError", "not in the cache"),
    ({"adapter": "org/typo", "token": "good"}, "ModelNotFoundError", "no repository org/typo"),
    ({"adapter": "org/none"}, "ModelNotFoundError", "it is not a LoRA adapter"),
]


GGUF: list[dict[str, Any]] = [
    {"model": "org/gguf:q4_k_m"},
    {"model": "org/gguf:Q8_0"},
    {"model": f"org/gguf/{Q8}", "revision": "v1"},
    {"model": f"org/gguf/{Q4}", "revision": "v1"},
    {"model": "org/one-gguf"},
]


NOT_HARMED = ["cut", "commit", "names"]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All calls to a hub that is up, in one process; then the cache that they leave."""
    home = tmp_path_factory.mktemp("hub")
    good = [
        {"model": "org/sharded"},
        {"model": "org/single"},
        {"model": "org/single", "revision": "v1"},
        {"model": "org/gated", "token": "good"},
        {"model": "org/private", "token": "good"},
        {"adapter": "org/lora"},
        *({"model": f"org/{name}"} for name in NOT_HARMED),
        *GGUF,
    ]
    with serve() as hub:
        calls = [call for call, *_ in ONLINE] + good
        limits = json.dumps({"_RETRY_SECONDS": [0]})
        outcomes = resolve_all(hub.url, home, calls, LIMITS=limits)
        yield {
            "failed": outcomes[: len(ONLINE)],
            "found": outcomes[len(ONLINE) :],
            "fetched": list(hub.fetched),
            "home": home,
            "url": hub.url,
            "hub": hub,
        }


@pytest.mark.parametrize(
    "index", range(len(ONLINE)), ids=[next(iter(c.values())) for c, *_ in ONLINE]
)
def test_failures_each_have_their_message(session: dict[str, Any], index: int) -> None:
    _, error, message = ONLINE[index]
    outcome = session["failed"][index]
    assert outcome["error"] == error, outcome
    assert re.search(message, outcome["message"]), outcome


def test_only_the_needed_files_are_fetched(session: dict[str, Any]) -> None:
    sharded, single, tagged, gated, private, lora = session["found"][:6]
    for outcome, repo, commit in [
        (sharded, "org/sharded", MAIN),
        (single, "org/single", MAIN),
        (tagged, "org/single", TAG),
        (gated, "org/gated", MAIN),
        (private, "org/private", MAIN),
        (lora, "org/lora", MAIN),
    ]:
        assert (outcome["name"], outcome["revision"]) == (repo, commit)
        assert outcome["files"] == {n: content(repo, commit, n).decode() for n in WANTED[repo]}
    wanted = {f"{repo}/{name}" for repo, names in WANTED.items() for name in names}
    assert set(session["fetched"]) <= wanted


@pytest.mark.parametrize("name", NOT_HARMED)
def test_what_a_hub_says_besides_does_no_harm(session: dict[str, Any], name: str) -> None:
    outcome = session["found"][6 + NOT_HARMED.index(name)]
    assert (outcome["name"], outcome["revision"]) == (repo := f"org/{name}", MAIN)
    names = ["config.json", "model.safetensors"]
    assert outcome["files"] == {n: content(repo, MAIN, n).decode() for n in names}


def test_nothing_is_written_beside_the_files_of_a_snapshot(session: dict[str, Any]) -> None:
    """Whatever names, commits and ETags a hub gives; and of damaged files nothing stays."""
    cache = session["home"] / "hub"
    assert not list(session["home"].parent.rglob("*escaped*"))
    assert not Path("/tmp/escaped-of-infer").exists()
    for name in ("etag", "etag-2", "gone", "flipped-small", "long"):
        files = [p for p in (cache / f"models--org--{name}").rglob("*") if p.is_file()]
        assert not files
    for path in cache.rglob("*"):
        folder = path.relative_to(cache).parts[1:2]
        assert not folder or folder[0] in ("refs", "blobs", "snapshots")
        if path.is_file() and folder == ("snapshots",):
            assert path.resolve().parent == cache / path.relative_to(cache).parts[0] / "blobs"
        assert not path.name.endswith(".incomplete")


def test_a_gguf_model_is_fetched_alone(session: dict[str, Any]) -> None:
    every = WANTED["org/gguf"]
    expected = [  # the file, and all that the snapshot then holds
        ("org/gguf", MAIN, Q4, [Q4]),
        ("org/gguf", MAIN, Q8, every),
        ("org/gguf", TAG, Q8, every[1:]),
        ("org/gguf", TAG, Q4, every),
        ("org/one-gguf", MAIN, "tiny.gguf", ["tiny.gguf"]),
    ]
    found = session["found"][-len(GGUF) :]
    for call, outcome, (repo, commit, file, files) in zip(GGUF, found, expected, strict=True):
        assert (outcome["name"], outcome["revision"]) == (call["model"], commit)
        assert outcome["path"] == file
        assert outcome["files"] == {n: content(repo, commit, n).decode() for n in files}


def test_gguf_models_in_the_cache(session: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    calls = [{"model": "org/gguf"}, {"model": "org/gguf:Q5_K_M"}]
    offline = [call | {"offline": True} for call in GGUF + calls]
    *found, several, missing = resolve_all("http://127.0.0.1:9", home, offline)
    for outcome, online in zip(found, session["found"][-len(GGUF) :], strict=True):
        assert outcome["path"] == online["path"]
        assert outcome["revision"] == online["revision"]
    assert several["message"].endswith("Give one: org/gguf:Q8_0, org/gguf:Q4_K_M.")
    assert re.search("offline=True uses, has no GGUF model Q5_K_M", missing["message"])
    (home / "hub/models--org--gguf/snapshots" / MAIN / WANTED["org/gguf"][2]).unlink()
    # Without a network, but not told so: what is there is taken, all else needs the hub.
    whole, cut, missing = resolve_all("http://127.0.0.1:9", home, [GGUF[0], GGUF[1], calls[1]])
    assert (whole["path"], whole["revision"]) == (Q4, MAIN)
    assert "cannot be reached" in cut["message"]
    assert "cannot be reached" in missing["message"]
    (cut,) = resolve_all("http://127.0.0.1:9", home, [GGUF[1]], HF_HUB_OFFLINE="1")
    assert re.search("incomplete: it lacks .*00002-of-00002", cut["message"])


def test_offline(session: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    calls = [
        {"model": "org/sharded", "offline": True},
        {"model": "org/single", "offline": True, "revision": "v1"},
        {"model": "org/single", "offline": True, "revision": "v2"},
        {"adapter": "org/lora", "offline": True},
    ]
    # HF_ENDPOINT leads nowhere: offline asks nobody.
    sharded, tagged, missing, lora = resolve_all("http://127.0.0.1:9", home, calls)
    assert [sharded, tagged, lora] == [session["found"][i] for i in (0, 2, 5)]
    assert "not in the cache at revision 'v2'" in missing["message"]
    snapshot = home / "hub" / "models--org--sharded" / "snapshots" / MAIN
    lost = [SHARDS[1], "config.json"]
    for name, args, env in [
        (lost[0], {"offline": True}, {}),
        (lost[1], {}, {"HF_HUB_OFFLINE": "1"}),
    ]:
        (snapshot / name).unlink()
        call = {"model": "org/sharded"} | args
        (outcome,) = resolve_all("http://127.0.0.1:9", home, [call], **env)
        assert outcome["error"] == "ModelNotFoundError"
        assert re.search(f"incomplete.*{re.escape(name)}", outcome["message"]), outcome


def test_no_network(session: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    with serve() as hub:
        pass  # now nobody listens there
    calls = [{"model": "org/sharded"}, {"model": "org/other"}]
    cached, missing = resolve_all(hub.url, home, calls)
    assert cached == session["found"][0]
    assert missing["error"] == "ModelNotFoundError"
    assert f"{hub.url} cannot be reached" in missing["message"]


def test_a_hub_that_is_down_is_not_needed(session: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    for name in ("down", "typo"):
        shutil.copytree(home / "hub/models--org--one-gguf", home / f"hub/models--org--{name}")
    calls = [{"model": "org/down"}, {"model": "org/down:Q4_K_M"}, {"model": "org/typo"}]
    down, missing, private = resolve_all(session["url"], home, calls)
    assert down["path"] == private["path"] == "tiny.gguf"
    assert "answered 500" in missing["message"]


def test_files_of_xet_come_through_its_library(session: dict[str, Any], tmp_path: Path) -> None:
    """Its service is none that runs here: what is called in its place has the same signature."""
    large = content("org/xet", MAIN, "model.safetensors").decode()
    calls = [{"model": "org/xet", "progress": True}]
    before = len(session["hub"].fetched)
    (found,) = resolve_all(session["url"], tmp_path / "a", calls, XET=large)
    assert found["files"]["model.safetensors"] == large
    (damaged,) = resolve_all(session["url"], tmp_path / "b", calls, XET="?" + large[1:])
    assert "arrived damaged" in damaged["message"]
    assert {*session["hub"].fetched[before:]} == {"org/xet/config.json"}


@contextmanager
def silent(answer: bytes) -> Iterator[str]:
    """A server that takes every connection and answers this and then nothing, or, of b" ", a byte
    now and then for ever."""
    closing = threading.Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.wfile.write(answer)
                while not closing.wait(0.02):
                    if answer:
                        self.wfile.write(b"x")

    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="silence"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX-", id="endless head", marks=pytest.mark.full),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n",
            id="endless body",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_hub_that_does_not_answer_is_not_waited_for(
    session: dict[str, Any], tmp_path: Path, answer: bytes
) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    calls = [{"model": "org/sharded"}, {"adapter": "org/lora"}, {"model": "org/other"}]
    limits = json.dumps({"ASK_SECONDS": 0.2, "ANSWER_SECONDS": 0.3})
    with silent(answer) as url:
        cached, lora, missing = resolve_all(url, home, calls, LIMITS=limits)
    assert [cached, lora] == [session["found"][0], session["found"][5]]
    assert missing["error"] == "ModelNotFoundError"
    assert re.search(r"cannot be reached \(.*no whole answer within 0.3 s", missing["message"])


def test_a_download_that_stalls_has_an_end(tmp_path: Path) -> None:
    limits = json.dumps({"STALL_SECONDS": 0.5, "_GRACE_SECONDS": 0.1})
    with serve() as hub:
        (outcome,) = resolve_all(hub.url, tmp_path, [{"model": "org/stalled"}], LIMITS=limits)
    assert outcome["error"] == "ModelError"
    assert re.search(r"hardly a byte came for 0.5 s.*run it again", outcome["message"])
    assert not list(tmp_path.rglob("*.incomplete"))


SECRET = "hf_ThisIsSecret"


def test_no_message_holds_a_token(session: dict[str, Any], tmp_path: Path) -> None:
    tokens = [f"{SECRET}é", f"{SECRET} x", f"{SECRET}\x7f", f"{SECRET}\r\nX-Other: y", SECRET]
    calls, messages = [], []
    for token in tokens:
        # A hub that refuses it, and one that says it.
        for repo, message in (("org/single", "refused the token"), ("org/echo", "answered 400")):
            call = {"model": repo}
            calls += [call | {"token": token}, call | {"env": {"HF_TOKEN": token}}]
            calls += [call | {"env": {"HF_TOKEN": ""}, "login": token}]
            bad = "holds a space, or a character that is not ASCII"
            messages += 3 * [message if token == SECRET else bad]
    done = run(session["url"], tmp_path, calls)
    for call, outcome, message in zip(calls, json.loads(done.stdout), messages, strict=True):
        assert message in outcome["message"], (call, outcome)
    assert SECRET not in done.stdout + done.stderr


def test_a_token_may_end_in_a_line_end(session: dict[str, Any], tmp_path: Path) -> None:
    (found,) = resolve_all(session["url"], tmp_path, [{"model": "org/private", "token": "good\n"}])
    assert found == session["found"][4]


def test_a_page_of_the_hub_is_a_model(session: dict[str, Any], tmp_path: Path) -> None:
    home, url = tmp_path / "home", session["url"]
    shutil.copytree(session["home"], home, symlinks=True)
    single, tagged = session["found"][1:3]
    q4, _, q8_tagged, *_ = session["found"][-len(GGUF) :]
    pages: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model": "https://huggingface.co/org/single"}, single),
        ({"model": "https://huggingface.co/org/single/tree/main/"}, single),
        ({"model": "HTTPS://HF.CO/org/single?library=transformers#usage"}, single),
        ({"model": "huggingface.co/org/single"}, single),
        ({"model": f"{url}/org/single"}, single),
        ({"model": f"{url}/org/single/tree/v1"}, tagged),
        ({"model": f"https://huggingface.co/org/single/tree/{TAG}", "revision": TAG}, tagged),
        ({"model": "https://huggingface.co/org/single", "revision": "v1"}, tagged),
        ({"model": "hf.co/org/gguf:Q4_K_M"}, q4),
        ({"model": f"https://huggingface.co/org/gguf/resolve/main/{Q4}?download=true"}, q4),
        ({"model": f"{url}/org/gguf/blob/v1/{Q8.replace('/', '%2F')}"}, q8_tagged),
        ({"adapter": "https://hf.co/org/lora/tree/main"}, session["found"][5]),
    ]
    outcomes = resolve_all(url, home, [call for call, _ in pages])
    for (call, expected), outcome in zip(pages, outcomes, strict=True):
        for key in ("revision", "path"):
            assert outcome.get(key) == expected[key], (call, outcome)
        assert outcome["name"].startswith("org/")


def test_an_index_reaches_nothing_but_shards(session: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    index = home / "hub/models--org--sharded/snapshots" / MAIN / INDEX
    index.unlink()
    index.write_text(json.dumps({"weight_map": {"a": "../../../../escaped.safetensors"}}))
    (outcome,) = resolve_all(session["url"], home, [{"model": "org/sharded"}])
    assert outcome["error"] == "CheckpointError"
    assert re.search("does not give the name of a .*file for a", outcome["message"])


@pytest.mark.parametrize(
    ("variable", "place", "error", "message"),
    [
        ("HF_HUB_CACHE", "file/x", "ModelError", "file/x.* cannot be written .*HF_HOME"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("HF_HUB_CACHE", "~no-such-user/x", "ModelError", "no home folder.*HF_HOME"),
                ("HF_HUB_DOWNLOAD_TIMEOUT", "~x", "ModelError", "one of the variables HF_"),
                ("HF_HOME", "file/x", "ModelAccessError", "token.* cannot be read .*HF_HOME"),
            )
        ),
    ],
)
def test_variables_that_lead_nowhere(
    session: dict[str, Any], tmp_path: Path, variable: str, place: str, error: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    env = {variable: place if place.startswith("~") else str(tmp_path / place)}
    (outcome,) = resolve_all(session["url"], tmp_path, [{"model": "org/single"}], **env)
    assert outcome["error"] == error
    assert re.search(message, outcome["message"]), outcome


def test_interrupted_download_is_completed(session: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(session["home"], home, symlinks=True)
    (home / "hub/models--org--sharded/snapshots" / MAIN / SHARDS[1]).unlink()
    (outcome,) = resolve_all(session["url"], home, [{"model": "org/sharded"}])
    assert outcome == session["found"][0]


def test_progress_counts_what_is_fetched(session: dict[str, Any], tmp_path: Path) -> None:
    done = run(session["url"], tmp_path, [{"model": "org/sharded"}] * 2, REPORTS="1")
    assert not done.stderr
    fetched, cached = json.loads(done.stdout)
    ends = [i for i, report in enumerate(fetched["reports"]) if report == [0, 0]]
    small, large = (fetched["reports"][a:b] for a, b in ((0, ends[1]), (ends[1], None)))
    sizes = {name: len(text.encode()) for name, text in fetched["files"].items()}
    weights = sum(size for name, size in sizes.items() if name in SHARDS)
    assert large[-1] == [weights, weights]
    assert small[-1] == [sum(sizes.values()) - weights] * 2
    assert cached["reports"] == []


def test_an_error_of_the_users_function_is_theirs(session: dict[str, Any], tmp_path: Path) -> None:
    call = {"model": "org/sharded", "fails": True}
    (outcome,) = resolve_all(session["url"], tmp_path, [call])
    assert outcome["error"] == "ZeroDivisionError"
    assert not list(tmp_path.rglob("*.incomplete"))


# Without the hub


def make_model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "org" / "tiny", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for model in (str(folder), "org/tiny", "./org/tiny/", "~/org/tiny"):
        found = resolve(model)
        assert (found.path.resolve(), found.name) == (folder.resolve(), "tiny")
        assert found.revision is None
    with pytest.raises(ModelNotFoundError, match="no revisions"):
        resolve("org/tiny", revision="main")


def test_demo_is_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "demo", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    found = resolve("demo")
    assert found.name == "demo"
    assert found.path.samefile(Path(infer.__file__).parent / "demo")
    assert resolve("./demo").path.samefile(tmp_path / "demo")
    assert resolve("demo-draft").path.samefile(found.path / "draft")
    assert resolve("demo-draft").name == "demo-draft"


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["model.safetensors"], ModelNotFoundError, r"no config\.json"),
        (["config.json"], CheckpointError, "has no weights"),
        (["config.json", "consolidated.safetensors"], CheckpointError, "has no weights"),
        (["config.json", "pytorch_model.bin"], UnsupportedError, r"\.bin files only"),
        (["config.json", "m.onnx", "m.pth"], UnsupportedError, r"\.onnx, \.pth files only"),
        (["config.json", "m.gguf", "m.pth"], UnsupportedError, r"is a model: m\.gguf\. Give"),
        (["b.gguf", "a.gguf"], UnsupportedError, r"is a model: a\.gguf, b\.gguf\. Give"),
    ],
)
def test_folders_that_are_no_models(
    tmp_path: Path, names: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(str(make_model(tmp_path / "model", *names)))


@pytest.mark.parametrize(
    "model",
    [
        "./no/such",
        "~/no-such-model",
        "~no-such-user/model",
        "no.gguf",
        "/no/such",
        "a/b/c",
        "C:\\no\\such",
        "C:/no/such.gguf",
        "no/such\\file.gguf",
        "./no/such:Q4_K_M",
        "org/name:",
        "org/name:Q4_K_M/file.gguf",
        "name",
        "a/",
        "a\0b",
        "~\0/model",
        "x" * 300,
        "x/" * 3000,
        "\udcff/x",
    ],
)
def test_names_that_are_neither_folder_nor_hub_id(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no folder or file"):
        resolve(model)


@pytest.mark.parametrize(
    "model",
    [
        "https://huggingface.co/",
        "https://huggingface.co/gpt2",
        "https://huggingface.co/datasets/org/name",
        "https://huggingface.co/org/name/tree/main/folder",
        "https://huggingface.co/org/name/blob/main/model.safetensors",
        "https://huggingface.co/org/name/blob/main/../../x.gguf/..",
        "https://example.com/org/name",
        "ftp://huggingface.co/org/name",
        f"https://user:{SECRET}@huggingface.co/org/name",
    ],
)
def test_urls_that_are_no_page_of_a_model(model: str) -> None:
    for find in (resolve, resolve_adapter):
        with pytest.raises(
            ModelNotFoundError, match=r"as https://huggingface\.co/org/name"
        ) as caught:
            find(model, offline=True)
        assert SECRET not in str(caught.value)


def test_a_page_and_an_option_do_not_contradict_each_other() -> None:
    with pytest.raises(ModelNotFoundError, match="of the revision 'v1', but 'v2' is asked for"):
        resolve("https://huggingface.co/org/name/tree/v1", revision="v2", offline=True)


@pytest.mark.parametrize(
    "revision",
    [
        *["", "../../x", "/etc/x", "a\\b", "a/../b", "a//b", "./a", "a/", "a\0b", "C:x", "a\nb"],
        *["x" * 256, "\udcff", "https://huggingface.co/org/name/tree/../../x"],
    ],
)
def test_a_revision_is_no_path(revision: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is not a revision"):
        resolve("org/name", revision=revision, offline=True)


def test_an_empty_name_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "config.json", "model.safetensors", ADAPTER_CONFIG, ADAPTER_TENSORS
    monkeypatch.chdir(make_model(tmp_path / "here", *names))
    assert resolve(".").name == resolve_adapter(".").name == "here"
    with pytest.raises(ModelNotFoundError, match="name of the model is empty"):
        resolve("")
    with pytest.raises(ModelNotFoundError, match="name of the adapter is empty"):
        resolve_adapter("")


def test_local_files_come_before_those_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "org" / "tiny", "a.gguf")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/tiny/a.gguf").name == "a"
    with pytest.raises(ModelNotFoundError, match=r"no folder or file org/tiny/b\.gguf"):
        resolve("org/tiny/b.gguf")


def test_a_file_is_a_model_if_it_is_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("GGUF")
    assert resolve(str(path)).path == path
    assert resolve(str(path)).name == "model"
    with pytest.raises(ModelNotFoundError, match="has no revisions"):
        resolve(str(path), revision="main")
    path = path.rename(tmp_path / "MODEL.GGUF")
    assert resolve(str(path)).name == "MODEL"
    with pytest.raises(UnsupportedError, match=r"is a file\. Give the folder"):
        resolve(str(path.rename(tmp_path / "model.bin")))
