"""`infer connect`: what it shows and writes, read as the programs read it."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import FakeEngine, fake_service, serving
from typer.testing import CliRunner

from infer.cli.app import app
from infer.cli.connect import Program


class Engine(FakeEngine):
    name, context, adapters = 'org/a "model"', 65_536, ()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake_service(Engine(), names=[Engine.name, "other", "*"])) as address:
        yield address


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("INFER_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def connect(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["connect", *arguments], catch_exceptions=False)


def shown(program: str, *arguments: str) -> tuple[str, list[str]]:
    """What belongs into the file, and the words of the command."""
    done = connect(program, *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    own, _, command = done.stdout.rpartition("\nThen start it with:\n\n")
    return own.partition(":\n\n")[2], shlex.split(command.partition("\n\n")[0])


def test_what_claude_code_needs(address: str) -> None:
    own, command = shown("claude-code", "--url", address)
    env = json.loads(own)["env"]
    assert command == ["claude"]
    assert env["ANTHROPIC_BASE_URL"] == address
    models = {name: value for name, value in env.items() if name.endswith("_MODEL")}
    assert set(models) == {
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    }
    assert set(models.values()) == {Engine.name}
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert all(isinstance(value, str) for value in env.values())


def test_what_others_need(address: str) -> None:
    url = f"{address}/v1"
    own, command = shown("codex", "--url", address)
    assert command == ["codex", "--profile", "infer"]
    assert tomllib.loads(own) == {
        "model": Engine.name,
        "model_provider": "infer",
        "model_context_window": 65_536,
        "model_providers": {"infer": {"name": "infer", "base_url": url, "wire_api": "responses"}},
    }
    own, command = shown("opencode", "--url", address)
    assert command == ["opencode", "-m", f"infer/{Engine.name}"]
    provider = json.loads(own)["provider"]["infer"]
    assert provider["options"] == {"baseURL": url}
    limit = {"context": 65_536, "output": 16_384}
    assert provider["models"] == {Engine.name: {"name": Engine.name, "limit": limit}}
    own, command = shown("qwen-code", "--url", address)
    assert command[0] == "INFER_API_KEY=none"
    assert command[-1] == Engine.name
    (model,) = json.loads(own)["modelProviders"]["openai"]
    assert (model["id"], model["baseUrl"]) == (Engine.name, url)
    assert model["generationConfig"] == {"contextWindowSize": 65_536}
    own, command = shown("aider", "--url", address)
    assert command[:4] == ["aider", "--model", f"openai/{Engine.name}", "--openai-api-base"]
    (about,) = json.loads(own).values()
    assert about["max_input_tokens"] == about["max_output_tokens"] == 65_536
    _, command = shown("cline", "--url", address)
    assert {url, Engine.name, "none"} < {*command}
    _, command = shown("open-webui", "--url", address)
    assert command[0] == f"OPENAI_API_BASE_URL={url}"


def test_remarks_come_with_what_is_written(address: str) -> None:
    yaml = pytest.importorskip("yaml")
    for arguments in ((), ("--write",)):
        told = connect("aider", "--url", address, *arguments).stdout
        (settings,) = yaml.safe_load(told.partition("settings.yml:\n\n")[2])
        assert settings == {"name": f"openai/{Engine.name}", "use_temperature": False}
    assert "keeps the address of its first start" in connect("open-webui", "--url", address).stdout


def test_what_continue_needs(address: str, home: Path) -> None:
    yaml = pytest.importorskip("yaml")
    own, command = shown("continue", "--url", address)
    assert command == ["cn", "--config", str(home / ".continue" / "infer.yaml")]
    (model,) = yaml.safe_load(own)["models"]
    assert (model["model"], model["apiBase"]) == (Engine.name, f"{address}/v1")
    assert model["defaultCompletionOptions"] == {"contextLength": 65_536}


@pytest.mark.parametrize("program", Program)
def test_a_key_is_in_no_file_and_on_no_screen(program: str) -> None:
    with serving(fake_service(Engine(), api_keys=["se-cret"])) as address:
        assert connect(program, "--url", address).exit_code == 1
        done = connect(program, "--url", address, "--api-key", "se-cret")
    assert done.exit_code == 0
    assert "se-cret" not in done.stdout
    assert "INFER_API_KEY" in done.stdout
    assert "none" not in done.stdout


FILES = {
    "claude-code": ".claude/settings.local.json",
    "opencode": ".config/opencode/opencode.json",
    "qwen-code": ".qwen/settings.json",
    "aider": ".aider.model.metadata.json",
}
TEXTS = {"codex": ".codex/infer.config.toml", "continue": ".continue/infer.yaml"}


@pytest.mark.parametrize("program", FILES)
def test_settings_are_written_among_others(address: str, home: Path, program: str) -> None:
    path = home / FILES[program]
    own = json.loads(shown(program, "--url", address)[0])
    done = connect(program, "--url", address, "--write")
    assert (done.exit_code, json.loads(path.read_text())) == (0, own)
    assert done.stdout.startswith(f"{path.relative_to(home) if program == 'claude-code' else path}")
    (name,) = own
    before = {"theme": "dark", name: {"theirs": {"a": [1, "ü"]}}}
    path.write_text(json.dumps(before))
    for _ in range(2):
        assert connect(program, "--url", address, "--write").exit_code == 0
        after = json.loads(path.read_text())
        assert after["theme"] == "dark"
        assert after[name].pop("theirs") == before[name]["theirs"]  # type: ignore[index]
        assert after[name] == own[name]


@pytest.mark.parametrize("program", FILES)
def test_what_is_no_plain_json_stays(address: str, home: Path, program: str) -> None:
    path = home / FILES[program]
    path.parent.mkdir(parents=True, exist_ok=True)
    (name,) = json.loads(shown(program, "--url", address)[0])
    for text, told in (
        ('{} // "mine"', "no plain JSON object"),
        ("[]", "no plain JSON object"),
        (json.dumps({name: "mine"}), "already, as 'mine'"),
    ):
        path.write_text(text)
        done = connect(program, "--url", address, "--write")
        assert (done.exit_code, path.read_text()) == (1, text)
        assert told in done.stderr
        assert "without --write" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("program", TEXTS)
def test_a_file_of_somebody_else_stays(address: str, home: Path, program: str) -> None:
    path = home / TEXTS[program]
    own, _ = shown(program, "--url", address)
    for _ in range(2):
        assert connect(program, "--url", address, "--write").exit_code == 0
        comment, _, text = path.read_text().partition("\n")
        assert (comment[0], text) == ("#", own)
    path.write_text("mine = 1\n")
    done = connect(program, "--url", address, "--write")
    assert (done.exit_code, path.read_text()) == (1, "mine = 1\n")
    assert "Move it away" in done.stderr


def test_another_servers_settings_stay(address: str, home: Path) -> None:
    path = home / FILES["claude-code"]
    path.parent.mkdir()
    for url, code in (("https://example.org", 1), (address, 0)):
        env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_MODEL": "mine", "OTHER": "x"}
        path.write_text(json.dumps({"env": env}))
        assert connect("claude-code", "--url", address, "--write").exit_code == code
        after = json.loads(path.read_text())["env"]
        assert after["OTHER"] == "x"
        assert after["ANTHROPIC_MODEL"] == ("mine" if code else Engine.name)


def test_entries_of_a_list_are_replaced_by_address(address: str, home: Path) -> None:
    path = home / FILES["qwen-code"]
    path.parent.mkdir()
    old = {"id": Engine.name, "baseUrl": f"{address}/v1", "generationConfig": {}}
    others = [old | {"baseUrl": "https://example.org"}, {"id": "x"}]
    path.write_text(json.dumps({"modelProviders": {"openai": [others[0], old, others[1]]}}))
    assert connect("qwen-code", "--url", address, "--write").exit_code == 0
    first, *rest = json.loads(path.read_text())["modelProviders"]["openai"]
    assert rest == others
    assert first["generationConfig"] == {"contextWindowSize": 65_536}


def test_what_cannot_be_connected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("cline", "open-webui"):
        done = connect(program, "--url", address, "--write")
        assert (done.exit_code, "without --write" in done.stderr.replace("\n", " ")) == (2, True)
    done = connect("codex", "--url", address, "--model", "none")
    assert done.exit_code == 2
    assert f"There are: {Engine.name}." in done.stderr.replace("\n", " ")
    assert connect("emacs", "--url", address).exit_code == 2
    monkeypatch.setattr(Engine, "context", 8_192)
    done = connect("claude-code", "--url", address)
    assert done.exit_code == 0
    assert "larger --context" in done.stderr.replace("\n", " ")


def test_a_model_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.cli.ps import Served, ServerReport

    report = ServerReport("http://a", "ok", [Served("m")])
    monkeypatch.setattr("infer.cli.connect.find", lambda *_: report)
    done = connect("codex")
    assert done.exit_code == 1
    assert "its context is not known" in done.stderr
    monkeypatch.setattr(
        "infer.cli.connect.find", lambda *_: ServerReport("http://a", "loading", [])
    )
    assert "has no model yet" in connect("codex").stderr
