"""`infer ps`, of servers and of what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import FakeEngine, fake_service, serving
from test_load import LOAD
from typer.testing import CliRunner

from infer.cli.app import app
from infer.engine.pages import PoolStats
from infer.engine.token_engine import EngineStats
from infer.kernels.gpu.device import MemoryStats


class Engine(FakeEngine):
    name = 'a "model"\\'

    async def stats(self) -> EngineStats:
        memory, cache = MemoryStats(3 << 20, 4 << 20, 0, 0, 0), PoolStats(1, 2, 1, 0, 0)
        return EngineStats(memory, cache, running=2, waiting=5, preemptions=0)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["ps", *arguments], catch_exceptions=False)


def test_what_a_server_does() -> None:
    with serving(fake_service(Engine())) as address:
        whole = json.loads(invoke("--url", address, "--json").stdout)
        lines = invoke("--url", f"{address}/v1/").stdout.splitlines()
    assert whole == {
        "url": address,
        "status": "ok",
        "models": [
            {
                "name": 'a "model"\\',
                "parent": None,
                "gpu": "a GPU",
                "context": 100,
                "memory_bytes": 3 << 20,
                "cache": 0.25,
                "running": 2,
                "waiting": 5,
            },
            {
                "name": "sql",
                "parent": 'a "model"\\',
                "gpu": "a GPU",
                "context": 100,
                "memory_bytes": None,
                "cache": None,
                "running": None,
                "waiting": None,
            },
        ],
    }
    assert lines[0].split() == ["model", "GPU", "memory", "context", "cache", "running", "waiting"]
    assert lines[1].split() == [
        "a",
        '"model"\\',
        "a",
        "GPU",
        "3.0",
        "MiB",
        "100",
        "25",
        "%",
        "2",
        "5",
    ]
    assert lines[2].split() == ["sql", "(adapter)", "a", "GPU", "100"]
    assert lines[-1] == f"{address}: ok"


def test_other_names_of_a_model_are_no_models() -> None:
    with serving(fake_service(Engine(), names=["mine", "other"])) as address:
        whole = json.loads(invoke("--url", address, "--json").stdout)
    assert [each["name"] for each in whole["models"]] == ["mine", "sql"]


def test_a_server_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_API_KEY", raising=False)
    with serving(fake_service(Engine(), api_keys=("secret",))) as address:
        refused = invoke("--url", address)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "needs an API key: give --api-key" in refused.stderr
        refused = invoke("--url", address, "--api-key", "other")
        assert "refuses this API key: give another by --api-key" in refused.stderr
        assert invoke("--url", address, "--api-key", "secret").exit_code == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "No server answers at http://127.0.0.1:1: Connection refused."),
        ("127.0.0.1:1", "No server answers at http://127.0.0.1:1"),
        ("http://", "'http://' is not the address of a server, such as http://127.0.0.1:8000."),
        ("http://a b", "No server answers at http://a b"),
    ],
)
def test_no_server(url: str, message: str) -> None:
    done = invoke("--url", url)
    assert (done.exit_code, done.stdout) == (2 if "is not the address" in message else 1, "")
    assert message in done.stderr
    assert "Start one with infer serve MODEL" in done.stderr or "is not the address" in message


def test_another_server() -> None:
    with LOAD["stub"]() as url:
        done = invoke("--url", url)
    assert done.exit_code == 1
    assert "is not infer" in done.stderr or "No server answers" in done.stderr
