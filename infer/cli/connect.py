"""`infer connect`: what coding agents and other programs need to use a running server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.boundaries import shown
from infer.cli.options import ApiKeyOption, VerboseOption, server_option
from infer.cli.ps import DEFAULT_URL, find
from infer.cli.terminal import exit_codes, note, write
from infer.kernels.errors import InferError, RequestError

_KEY = "INFER_API_KEY"  # the variable that has the server's key: no file gets the key itself
_OURS = "# Written by infer connect, which may overwrite it.\n"


class Program(StrEnum):
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    OPENCODE = "opencode"
    QWEN_CODE = "qwen-code"
    CONTINUE = "continue"
    CLINE = "cline"
    AIDER = "aider"
    OPEN_WEBUI = "open-webui"


# About how many tokens each sends before anybody has asked it for much.
_FIRST_TOKENS = {
    Program.CLAUDE_CODE: 25_000,
    Program.CODEX: 14_000,
    Program.OPENCODE: 16_000,
    Program.QWEN_CODE: 31_000,
    Program.CONTINUE: 3_000,
    Program.CLINE: 12_000,
    Program.AIDER: 5_000,
    Program.OPEN_WEBUI: 5_000,
}


def connect(
    program: Annotated[
        Program,
        typer.Argument(
            metavar="PROGRAM",
            show_default=False,
            help=f"The program that is to use the server: {', '.join(Program)}.",
        ),
    ],
    url: Annotated[
        str, server_option("--url", metavar="URL", help="The address of the server.")
    ] = DEFAULT_URL,
    model: Annotated[
        str | None,
        server_option(
            "--model", metavar="NAME", help="One of its models. Default: the first of them."
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    writes: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Write the settings into the program's file. What else is there stays; a setting "
            "that has another value there is an error, and nothing is written.",
        ),
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what a program needs to use a running server, or write it into the program's settings.

    The model's name and its context come from the server. An API key is written nowhere: programs
    read it from the variable INFER_API_KEY.
    """
    with exit_codes(verbose):
        server = _ask(url, model, api_key)
        first = _FIRST_TOKENS.get(program, 0)
        if server.context < 2 * first:
            note(
                f"note: {program} begins with about {first:,} tokens, and the context of "
                f"{server.model} has {server.context:,}: start the server with a larger --context."
            )
        setup = _SETUPS[program](server)
        if writes:
            write(f"{setup.write(program)}\n\nStart it with:\n\n{setup.start}")
        else:
            write(setup.text())


@dataclass(frozen=True)
class Server:
    """A running server. url: without /v1. context: the context of its model, in tokens."""

    url: str
    model: str
    context: int
    has_key: bool

    @property
    def key(self) -> str:
        """The API key as a word in a shell command."""
        return f'"${_KEY}"' if self.has_key else "none"


def _ask(url: str, model: str | None, api_key: str | None) -> Server:
    """Ask a running server for its model and context. Raises InferError."""
    report = find(url, api_key)
    models = {each.name: each for each in report.models}
    if not models:
        raise InferError(f"The server at {report.url} has no model yet. Try again when it has.")
    name = next(iter(models)) if model is None else model
    if name not in models:
        raise RequestError(
            f"There is no model {shown(name)} at {report.url}. There are: {', '.join(models)}."
        )
    context = models[name].context
    if context is None:
        raise InferError(
            f"{name} is not loaded, so its context is not known. Ask it something first, as by "
            f"infer chat --url {report.url}."
        )
    return Server(report.url, name, context, api_key is not None)


# Settings


@dataclass(frozen=True)
class Setup:
    """The settings that a program needs. command: starts the program. path: its settings file, or
    None if it keeps settings elsewhere. own: the text that the file must contain. change: turns the
    present text of the file (None: there is no file) into the new one; raises InferError rather
    than lose anything. remark: what else a person has to know."""

    command: str
    path: Path | None = None
    own: str = ""
    change: Callable[[str | None], str] | None = None
    remark: str = ""

    def text(self) -> str:
        if self.path is None:
            return self.start
        return f"In {self.path}:\n\n{self.own}\nThen start it with:\n\n{self.start}"

    @property
    def start(self) -> str:
        """How it is started."""
        return f"{self.command}\n" + (f"\n{self.remark}\n" if self.remark else "")

    def write(self, program: str) -> str:
        """Returns what was done. Raises InferError and OSError."""
        if self.path is None or self.change is None:
            raise RequestError(
                f"{program} has no file of settings that could be written. Do what infer connect "
                f"{program} says without --write."
            )
        before = self.path.read_text("utf-8") if self.path.exists() else None
        text = self.change(before)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, "utf-8")
        return f"{self.path} is written."


def _text_file(command: str, path: Path, text: str) -> Setup:
    """A setup that writes a settings file which belongs to infer alone."""

    def change(before: str | None) -> str:
        if before is not None and not before.startswith(_OURS):
            raise InferError(
                f"{path} is there, and not from infer connect. Move it away, or put there what "
                "infer connect shows without --write."
            )
        return _OURS + text

    return Setup(command, path, text, change)


def _json_file(
    command: str,
    path: Path,
    own: Mapping[str, Any],
    is_ours: Callable[[Mapping[str, Any]], bool] = lambda before: True,
) -> Setup:
    """A setup that adds settings to a JSON file. is_ours: whether settings of these names come from
    an earlier call, so that they may be overwritten."""

    def change(before: str | None) -> str:
        try:
            settings = json.loads(before or "{}")
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise InferError(
                f"{path} is no plain JSON object, perhaps because of comments. Add what infer "
                "connect shows without --write by hand."
            )
        _check(settings, own, path, values=not is_ours(settings))
        return _json(_merged(settings, own))

    return Setup(command, path, _json(own), change)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _merged(before: Any, own: Any) -> Any:
    """The settings in `before` with those of `own` added. Objects are joined. In a list, new
    entries come first and replace entries with the same id and address."""
    if isinstance(before, dict):
        return before | {key: _merged(before.get(key), value) for key, value in own.items()}
    if isinstance(before, list):
        names = [(entry["id"], entry["baseUrl"]) for entry in own]
        others = [
            entry
            for entry in before
            if not isinstance(entry, dict) or (entry.get("id"), entry.get("baseUrl")) not in names
        ]
        return own + others
    return own


def _check(before: Mapping[str, Any], own: Mapping[str, Any], path: Path, *, values: bool) -> None:
    """Raises InferError if a setting has another type there, or, if `values`, another value."""
    for key, value in own.items():
        there = before.get(key, value)
        if isinstance(there, dict) and isinstance(value, dict):
            _check(there, value, path, values=values)
        elif type(there) is not type(value) or (values and there != value):
            raise InferError(
                f"{path} has {key} already, as {shown(there)}. Remove it there, or start the "
                "program with what infer connect shows without --write."
            )


# Programs


def _claude_code(server: Server) -> Setup:
    env = {
        "ANTHROPIC_BASE_URL": server.url,
        **({} if server.has_key else {"ANTHROPIC_AUTH_TOKEN": "none"}),
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }

    def is_ours(before: Mapping[str, Any]) -> bool:
        there = before.get("env")
        return isinstance(there, dict) and there.get("ANTHROPIC_BASE_URL") == server.url

    command = f"ANTHROPIC_AUTH_TOKEN={server.key} claude" if server.has_key else "claude"
    return _json_file(command, Path(".claude/settings.local.json"), {"env": env}, is_ours)


def _codex(server: Server) -> Setup:
    lines = [
        f"model = {_quoted(server.model)}",
        'model_provider = "infer"',
        f"model_context_window = {server.context}",
        "",
        "[model_providers.infer]",
        'name = "infer"',
        f"base_url = {_quoted(server.url + '/v1')}",
        'wire_api = "responses"',
        *([f'env_key = "{_KEY}"'] if server.has_key else []),
    ]
    path = Path.home() / ".codex" / "infer.config.toml"
    return _text_file("codex --profile infer", path, "\n".join(lines) + "\n")


def _opencode(server: Server) -> Setup:
    options = {"baseURL": f"{server.url}/v1"}
    if server.has_key:
        options["apiKey"] = f"{{env:{_KEY}}}"
    limit = {"context": server.context, "output": min(server.context // 4, 32_000)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "infer",
        "options": options,
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    path = Path.home() / ".config" / "opencode" / "opencode.json"
    command = f"opencode -m {shlex.quote(f'infer/{server.model}')}"
    return _json_file(command, path, {"provider": {"infer": provider}})


def _qwen_code(server: Server) -> Setup:
    model = {
        "id": server.model,
        "name": server.model,
        "baseUrl": f"{server.url}/v1",
        "envKey": _KEY,
        "generationConfig": {"contextWindowSize": server.context},
    }
    path = Path.home() / ".qwen" / "settings.json"
    command = f"qwen --auth-type openai --model {shlex.quote(server.model)}"
    if not server.has_key:
        command = f"{_KEY}=none {command}"
    return _json_file(command, path, {"modelProviders": {"openai": [model]}})


def _continue(server: Server) -> Setup:
    key = f"${{{{ secrets.{_KEY} }}}}" if server.has_key else "none"
    lines = [
        "name: infer",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        f"  - name: {_quoted(server.model)}",
        "    provider: openai",
        f"    model: {_quoted(server.model)}",
        f"    apiBase: {_quoted(server.url + '/v1')}",
        f"    apiKey: {_quoted(key)}",
        "    capabilities: [tool_use]",
        "    defaultCompletionOptions:",
        f"      contextLength: {server.context}",
    ]
    path = Path.home() / ".continue" / "infer.yaml"
    return _text_file(f"cn --config {shlex.quote(str(path))}", path, "\n".join(lines) + "\n")


def _cline(server: Server) -> Setup:
    model, url = shlex.quote(server.model), shlex.quote(f"{server.url}/v1")
    return Setup(
        f"cline auth --provider openai-compatible --baseurl {url} --apikey {server.key} "
        f"--modelid {model}"
    )


def _aider(server: Server) -> Setup:
    name = f"openai/{server.model}"
    about = {
        "max_input_tokens": server.context,
        "max_output_tokens": server.context,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    url = shlex.quote(f"{server.url}/v1")
    setup = _json_file(
        f"aider --model {shlex.quote(name)} --openai-api-base {url} --openai-api-key {server.key}",
        Path.home() / ".aider.model.metadata.json",
        {name: about},
    )
    remark = (
        "It asks for a temperature of 0. For the model's own, as reasoning models need it, put\n"
        f"this into .aider.model.settings.yml:\n\n- name: {_quoted(name)}\n  use_temperature: false"
    )
    return replace(setup, remark=remark)


def _open_webui(server: Server) -> Setup:
    url = shlex.quote(f"{server.url}/v1")
    return Setup(
        f"OPENAI_API_BASE_URL={url} OPENAI_API_KEY={server.key} open-webui serve",
        remark="It keeps the address of its first start: if that was another one, change it on its "
        "page,\nin the admin settings under Connections.",
    )


def _quoted(text: str) -> str:
    """The text as a quoted string of TOML or YAML."""
    return json.dumps(text, ensure_ascii=False)


_SETUPS: Mapping[Program, Callable[[Server], Setup]] = {
    Program.CLAUDE_CODE: _claude_code,
    Program.CODEX: _codex,
    Program.OPENCODE: _opencode,
    Program.QWEN_CODE: _qwen_code,
    Program.CONTINUE: _continue,
    Program.CLINE: _cline,
    Program.AIDER: _aider,
    Program.OPEN_WEBUI: _open_webui,
}
