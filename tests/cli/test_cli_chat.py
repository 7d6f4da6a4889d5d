"""infer chat: what is typed, what is answered, by a model and by a server."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import infer
from infer import LLM
from infer.cli.answers import Model, Piece, Server
from infer.cli.app import app
from infer.cli.chat import Conversation
from infer.cli.lines import TypedLines
from infer.cli.terminal import MarkdownWriter
from infer.kernels.errors import InferError, RequestError
from infer.results import Chunk

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("same_kernels")]

CAT = "My cat is called Milo. What is my cat called?"
MILO = "Your cat is called Milo."


def chat(*arguments: str, typed: str = "") -> Result:
    """With standard input that is no terminal."""
    return CliRunner().invoke(app, ["chat", *arguments], input=typed)


class Scripted:
    """Gives the pieces of a list, and notes what it was asked; an error is raised."""

    name, finish_reason = "scripted", "stop"
    has_switch = True

    def __init__(self, *answers: Sequence[Piece | BaseException]) -> None:
        self.answers = [*answers]
        self.asked: list[tuple[list[Mapping[str, str]], Mapping[str, Any]]] = []
        self.tokens: int | None = None
        self.template_args: dict[str, Any] = {}

    def count(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, int]:
        return 10 * len(messages), 1000

    def check_thinking(self) -> None:
        if not self.has_switch:
            raise RequestError("There is no switch.")

    def save_cache(self, path: Path, messages: Sequence[Mapping[str, str]]) -> int | None:
        return None

    def load_cache(self, path: Path) -> int | None:
        return None

    def answer(
        self, messages: Sequence[Mapping[str, str]], params: Mapping[str, Any]
    ) -> Iterator[Piece]:
        self.asked.append(([*messages], dict(params)))
        pieces = self.answers.pop(0) if self.answers else [Piece("Yes.")]
        self.tokens = len(pieces)
        for piece in pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


class Given:
    """Lines of a list; Ctrl-C where there is a KeyboardInterrupt. Edited, a text ends with !."""

    def __init__(self, *lines: str | type[KeyboardInterrupt]) -> None:
        self.lines = iter(lines)

    def read(self) -> str | None:
        line = next(self.lines, None)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line  # type: ignore[return-value]

    def edit(self, text: str) -> str | None:
        return text + "!" if text != "Stay" else text


def talk(answerer: Scripted, *lines: str | type[KeyboardInterrupt], **options: Any) -> Conversation:
    given: dict[str, Any] = {"params": {}, "system": None, "typed": True, "verbose": False}
    conversation = Conversation(answerer, **(given | options))  # type: ignore[arg-type]
    conversation.run(Given(*lines))
    return conversation


def users(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# Without a terminal


def test_lines_of_standard_input_are_messages() -> None:
    done = chat("demo", typed=f"{CAT}\n\nWhat colour is a banana?\n/reset\n{CAT}\n")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{MILO}\nA banana is yellow.\n{MILO}\n"


@pytest.mark.parametrize(
    ("arguments", "typed", "message"),
    [
        ([], "", "Give a model, or the --url of a server"),
        (["demo", "--temperature", "-1"], "", "temperature must be"),
        (["--url", "ftp://x"], "", "is not the address of a server"),
        (["--url", "127.0.0.1", "--quantize", "q4"], "", "--quantize has no effect with --url"),
        (["--url", "http://127.0.0.1:1"], "", "at http://127.0.0.1:1: Connection refused"),
        (["demo"], "/params x\n", "'x' is not NAME=X"),
        (["demo"], "word " * 2000, "context"),
    ],
)
def test_mistakes_are_told(arguments: list[str], typed: str, message: str) -> None:
    done = chat(*arguments, typed=typed)
    assert done.exit_code in (1, 2)
    assert "Traceback" not in done.stderr
    assert message in re.sub(r"[\s│]+", " ", done.stderr)


def test_run_without_a_prompt_is_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.cli.app.is_terminal", lambda stream: True)
    monkeypatch.setattr("infer.cli.app.TypedLines", lambda path: Given(CAT, "/params"))
    flags = ("--temperature", "0", "--seed", "0", "--logit-bias", "7=0.5", "-n", "20")
    done = CliRunner().invoke(app, ["run", "demo", *flags])
    assert (done.exit_code, done.stdout) == (0, f"{MILO}\n"), done.stderr
    assert 'temperature=0.0 logit_bias={"7": 0.5} seed=0 max_tokens=20\n' in done.stderr


# Commands


def test_the_conversation_is_what_was_said() -> None:
    scripted = Scripted([Piece("Hel"), Piece("lo.")])
    conversation = talk(scripted, "Hi", "/system Be brief.", "And?\nWell?", system="Be kind.")
    kind, brief = ({"role": "system", "content": text} for text in ("Be kind.", "Be brief."))
    assert [messages for messages, _ in scripted.asked] == [
        [kind, *users("Hi")],
        [brief, *users("Hi", "Hello.", "And?\nWell?")],
    ]
    assert conversation.messages == users("Hi", "Hello.", "And?\nWell?", "Yes.")
    assert talk(Scripted(), "/system none", "Hi", system="x").system is None


def test_an_answer_can_be_tried_again() -> None:
    scripted = Scripted([Piece("One.")], [Piece("Two.")], [InferError("lost")])
    conversation = talk(scripted, "/retry", "Hi", "/retry", "/retry")
    assert [messages for messages, _ in scripted.asked] == [users("Hi")] * 3
    assert conversation.messages == users("Hi", "Two.")  # of what failed nothing is left


def test_the_last_message_can_be_edited(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted([Piece("One.")], [Piece("Two.")], [InferError("lost")], [Piece("Three.")])
    lines = ["/edit", "Hi", "/edit", "/edit", "Stay", "/edit"]
    kept = [*users("Hi!", "Two."), *users("Stay", "Three.")]
    assert talk(scripted, *lines).messages == kept
    asked = [users("Hi"), users("Hi!"), users("Hi!!"), kept[:3]]
    assert [messages for messages, _ in scripted.asked] == asked
    said = capsys.readouterr().err
    assert "error: There is no message to edit." in said
    assert said.endswith("The message was not changed.\n")
    done = chat("demo", typed=f"{CAT}\n/edit\n")
    assert (done.exit_code, done.stdout) == (2, f"{MILO}\n")
    assert "/edit needs a terminal" in done.stderr


def test_the_context_that_is_used(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    talk(Scripted(), "/tokens", "Hi", "/tokens", system="Be kind.")
    assert capsys.readouterr().err.splitlines() == [
        "The conversation is empty.",
        "30 of 1,000 tokens of the context are used (3%)",
    ]
    model, asked = Model(llm, {}), users(CAT)
    assert model.count(asked) == (len(llm.encode(asked, add_generation_prompt=False)), llm.context)


def test_thinking_is_turned_on_and_off(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    scripted = Scripted()
    talk(scripted, "/think off")
    assert scripted.template_args == {"enable_thinking": False, "thinking": False}
    talk(scripted, "/think on", "/think", "/think maybe")
    assert scripted.template_args == {"enable_thinking": True, "thinking": True}
    scripted.has_switch = False
    talk(scripted, "/think off")
    assert scripted.template_args["thinking"] is True
    said = capsys.readouterr().err
    assert said.startswith("thinking is off\nthinking is on\nerror: Give on or off")
    assert "There is no switch." in said
    with pytest.raises(RequestError, match="demo's chat template has no such option"):
        Model(llm, {}).check_thinking()


def test_the_speed_is_shown_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Scripted(), "Hi", "/verbose", "Hi", "/verbose", "Hi")
    said = capsys.readouterr().err
    assert said.count("1 token, first token after ") == 1
    assert said.startswith("the speed is shown after each answer\n1 token")


@pytest.mark.parametrize(
    ("environment", "program"),
    [
        ({"TMUX": "/tmp/tmux,1,0", "DISPLAY": ":0"}, "tmux load-buffer -w -"),
        ({"DISPLAY": ":0"}, "xclip -selection clipboard"),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "1.2.3.4 1 5.6.7.8 22"}, None),
        ({}, None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have programs of their own")
def test_an_answer_is_copied(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    environment: dict[str, str],
    program: str | None,
) -> None:
    for name in ("TMUX", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("tmux", "xclip"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" > {tmp_path}/got\ncat >> {tmp_path}/got\n')
        script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    talk(Scripted([Piece("Grüße.")]), "/copy", "Hi", "/copy")
    shown, said = capsys.readouterr()
    assert said == "error: There is no answer to copy.\ncopied 6 characters\n"
    if program is None:  # the terminal does it
        encoded = base64.b64encode("Grüße.".encode()).decode()
        assert shown == f"Grüße.\n\x1b]52;c;{encoded}\x07"
    else:
        assert (tmp_path / "got").read_text() == f"{program}\nGrüße."


def test_a_message_that_failed_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted([InferError("The GPU was lost.")])
    assert talk(scripted, "Hi", "Hello").messages == users("Hello", "Yes.")
    assert "error: The GPU was lost." in capsys.readouterr().err
    with pytest.raises(InferError):
        talk(Scripted([InferError("lost")]), "Hi", typed=False)


def test_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted()
    lines = ["/params temperature=0.5 seed=7", "Hi", "/params seed= stop=END", "Hi"]
    wrong = [
        "/params temprature=1",
        "/params top_p=2",
        "/params x",
        "/params logit_bias=1",
        "/params",
    ]
    conversation = talk(scripted, *lines, *wrong, params={"max_tokens": 9})
    first, second = (params for _, params in scripted.asked)
    assert first == {"max_tokens": 9, "temperature": 0.5, "seed": 7}
    assert second == conversation.params == {"max_tokens": 9, "temperature": 0.5, "stop": "END"}
    said = capsys.readouterr().err
    assert "Did you mean temperature?" in said
    assert said.count("error: ") == 4
    assert 'max_tokens=9 temperature=0.5 stop="END"\n1 token, first token after ' in said


def test_a_conversation_is_saved_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a chat.json"
    talk(Scripted(), "Grüße", f"/save {path}", f"/save {path}", system="Be kind.")
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "messages": [{"role": "system", "content": "Be kind."}, *users("Grüße", "Yes.")]
    }
    (tmp_path / "other").write_text('{"messages": [{"role": "user", "content": 1}]}')
    (tmp_path / "deep").write_text("[" * 100_000)
    wrong = [f"/load {tmp_path / name}" for name in ("other", "deep", "none")]
    scripted = Scripted()
    conversation = talk(scripted, f"/load {path}", *wrong, "Next")
    assert conversation.system == "Be kind."
    assert scripted.asked[0][0][1:] == users("Grüße", "Yes.", "Next")
    said = capsys.readouterr().err
    assert f"{path} exists already" in said
    assert said.count("is not a conversation that /save wrote") == 2
    assert "none: No such file" in said


@pytest.mark.parametrize("model", ["demo", "other"])
def test_a_conversation_goes_on_from_what_was_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """In an engine whose cache is empty; not from another model's file, nor from a damaged one."""
    path = tmp_path / "talk.json"
    kv_dtype = "f16" if model == "demo" else "f32"
    with infer.load("demo") as llm:
        talk(Model(llm, {}), CAT, f"/save {path}", f"/save {path}")
        messages = [*users(CAT, MILO, "What colour is a banana?")]
        expected = llm.chat(messages)
        begun = len(llm.encode(messages[:2], add_generation_prompt=False))
    saved = capsys.readouterr().err
    assert re.search(rf"wrote 2 messages to {path}\nwrote \d+ computed tokens, .* to {path}", saved)
    assert f"{path} exists already" in saved
    with infer.load("demo", kv_dtype=kv_dtype) as llm:
        conversation = talk(Model(llm, {}), f"/load {path}", messages[-1]["content"])
        found = llm.stats().cache.hits
    assert conversation.messages[-1]["content"] == expected.text
    told = capsys.readouterr().err
    if model == "demo":
        assert found >= begun - 1
        assert re.search(r"read 2 messages from .*\nread \d+ computed tokens from ", told)
    else:
        assert found == 0
        again = "note: the messages will be computed again: "
        assert f"{again}{path}.cache was saved with another kv_dtype (f16; here it is f32)" in told
        (tmp_path / "talk.json.cache").write_bytes(b"damaged")
        with infer.load("demo") as llm:
            talk(Model(llm, {}), f"/load {path}")
        assert f"{again}The cache cannot be read from {path}.cache" in capsys.readouterr().err


def test_a_conversation_is_saved_where_its_cache_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(Scripted):
        def save_cache(self, path: Path, messages: Sequence[Mapping[str, str]]) -> int | None:
            raise RequestError("The disk is full.")

    talk(Full(), f"/save {tmp_path / 'empty'}", "Hi", f"/save {tmp_path / 'talk'}")
    assert json.loads((tmp_path / "talk").read_text())["messages"] == users("Hi", "Yes.")
    told = capsys.readouterr().err
    assert told.count("was not saved") == 1
    assert "note: what is computed of them was not saved: The disk is full.\n" in told


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Scripted(), "/help", "/exit", "not asked")
    named = set(re.findall(r"^/(\w+)", capsys.readouterr().out, re.M))
    there = {name.removeprefix("_do_") for name in vars(Conversation) if name.startswith("_do_")}
    assert named == there - {"help"} | {"exit"}


def test_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal's user can correct it; piped lines are all answered."""
    lines = ["/etc/hosts: what is it?", " /reset does what?", "/usr is what?"]
    assert talk(Scripted(), *lines).messages == users(lines[0], "Yes.", lines[1], "Yes.")
    assert "error: There is no command /usr;" in capsys.readouterr().err
    assert talk(Scripted(), *lines, typed=False).messages[4:] == users(lines[2], "Yes.")
    assert "note: /usr is not a command, so the line is sent" in capsys.readouterr().err


# Ctrl-C


def test_ctrl_c_stops_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted([Piece("Half an "), KeyboardInterrupt()])
    assert talk(scripted, "Hi", "Go on").messages == users("Hi", "Half an ", "Go on", "Yes.")
    assert capsys.readouterr().out == "Half an \nYes.\n"
    with pytest.raises(KeyboardInterrupt):
        talk(Scripted([KeyboardInterrupt()]), "Hi", typed=False)


def test_ctrl_c_twice_at_the_prompt_ends() -> None:
    once, scripted = KeyboardInterrupt, Scripted()
    talk(scripted, once, "Hi", once, "Hi", once, once, "not asked")
    assert len(scripted.asked) == 2


# Lines that are typed

Type = Callable[..., list[str | None]]


@pytest.fixture
def type_keys(tmp_path: Path) -> Type:
    """Returns a function that types keys into a new prompt and returns the lines that it reads. All
    prompts have the same history."""
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    def read(keys: str, count: int = 1, edited: str | None = None) -> list[str | None]:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            lines = TypedLines(tmp_path / "state" / "history")
            pipe.send_text(keys)
            if edited is not None:
                return [lines.edit(edited)]
            return [lines.read() for _ in range(count)]

    return read


def test_lines_are_typed(type_keys: Type) -> None:
    assert type_keys("one\rtwo\r", 2) == ["one", "two"]
    assert type_keys("a\x1b\rb\r") == ["a\nb"]  # Alt-Enter
    assert type_keys("a\\\rb\r") == ["a\nb"]
    assert type_keys("\x1b[200~a\r\nb\nc\x1b[201~\r") == ["a\nb\nc"]  # pasted
    assert type_keys("\x04") == [None]
    with pytest.raises(KeyboardInterrupt):
        type_keys("abc\x03")


def test_a_message_is_edited(
    type_keys: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    assert type_keys(" end\r", edited="a\nb") == ["a\nb end"]
    monkeypatch.setenv("EDITOR", "sed -i s/sky/moon/")
    assert type_keys("", edited="the sky\n") == ["the moon\n"]
    monkeypatch.setenv("VISUAL", "false")
    with pytest.raises(RequestError, match="false ended with the exit code 1"):
        type_keys("", edited="the sky")


def test_earlier_lines_come_back(type_keys: Type, tmp_path: Path) -> None:
    type_keys("first\rsecond\\\rline\r", 2)
    assert type_keys("\x1b[A\r") == ["second\nline"]
    assert type_keys("\x1b[A\x1b[A\x1b[A\r") == ["first"]
    path = tmp_path / "state" / "history"
    if os.name == "posix":
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    entry = "\n# 2026-01-01 00:00:00.000000\n+" + "x" * 1000 + "\n"
    path.write_text(entry * 2000)
    assert type_keys("\x1b[A\r") == ["x" * 1000]
    assert path.stat().st_size < 1_100_000
    assert path.read_text().startswith(entry)


def test_a_history_that_cannot_be_kept(
    type_keys: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file")
    assert type_keys("one\rtwo\r", 2) == ["one", "two"]
    assert "the history of messages is not saved" in capsys.readouterr().err


def test_without_prompt_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(InferError, match=r"pip install 'infer-wgpu\[chat\]'"):
        TypedLines(tmp_path / "history")


# Text that is written

MARKDOWN = (
    "# A title\n\nSome **bold words** and `code **x**` here.\n\n```python\n# no title\n```\n2 ** 3"
)


def test_styles_leave_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(size: int, text: str = MARKDOWN, **environment: str) -> str:
        monkeypatch.setattr("infer.cli.terminal.is_terminal", lambda stream: True)
        for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
            monkeypatch.setenv(name, value)
        writer = MarkdownWriter()
        for i in range(0, len(text), size):
            writer.write(text[i : i + size])
        writer.end()
        return capsys.readouterr().out

    def of(style: str, text: str) -> str:
        """All that has the style."""
        return "".join(re.findall(rf"\x1b\[{style}m(.*?)\x1b\[0m", text))

    for size in (1, 3, len(MARKDOWN)):
        styled = written(size)
        assert re.sub(r"\x1b\[\d+m", "", styled) == f"{MARKDOWN}\n"
        assert of("1", styled) == "# A title**bold words**"
        assert of("36", styled) == "`code **x**````python# no title```"
    hostile = "**\x1b]0;title\x07\x1b[31m**"  # is shown, not obeyed
    assert of("1", written(3, hostile)) == r"**\x1b]0;title\x07\x1b[31m**"
    assert written(1, NO_COLOR="1") == written(1, TERM="dumb") == f"{MARKDOWN}\n"


def test_reasoning_stands_apart(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [Piece("Let me ", True), Piece("see.", True), Piece("Done.")]
    assert talk(Scripted(pieces), "Hi").messages == users("Hi", "Done.")
    assert capsys.readouterr().out == "Let me see.\n\nDone.\n"
    assert talk(Scripted(pieces), "Hi", typed=False).messages == users("Hi", "Done.")
    assert capsys.readouterr() == ("Done.\n", "Let me see.\n\n")
    assert talk(Scripted(pieces[:2]), "Hi", "Hello").messages == users("Hello", "Yes.")
    assert "the answer is empty" in capsys.readouterr().err


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"


def test_a_model_thinks() -> None:
    """Where the prompt ends with what opens thoughts."""
    import infer

    with infer.load("demo") as llm:
        model = Model(llm, {"template": THINKS})
        pieces = [*model.answer(users(CAT), {"max_tokens": 5})]
    assert pieces
    assert all(piece.reasoning for piece in pieces)


def test_a_server_thinks(capsys: pytest.CaptureFixture[str]) -> None:
    from serving import Scripted, fake_service, serving

    chunks = [Chunk("", 1, reasoning="Let me see."), Chunk("Done.", 2)]

    engine = Scripted(*chunks)
    with serving(fake_service(engine)) as address:
        conversation = Conversation(Server(address, None), {}, None, typed=True, verbose=False)
        conversation.run(Given("Hi", "Go on"))
    assert conversation.messages == users("Hi", "Done.", "Go on", "Done.")
    assert capsys.readouterr().out == "Let me see.\n\nDone.\n" * 2
    assert engine.asked[2][0] == users("Hi", "Done.", "Go on")


def test_what_a_server_warns_of_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    from serving import Scripted, fake_service, serving

    engine = Scripted(Chunk("Yes.", 1))
    said = "{% for m in messages %}{{ m.content if m.role != 'system' }}{% endfor %}"
    engine.templates = {"default": said}
    with serving(fake_service(engine)) as address:
        server = Server(address, None)
        Conversation(server, {}, "Be brief.", typed=True, verbose=False).run(Given("Hi", "And?"))
    told = "note: The chat template leaves messages of the role 'system' out of the prompt.\n"
    assert capsys.readouterr().err == told


# A server


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    """The address of a server with the demo model that asks for a key."""
    from serving import serving

    from infer.server.engine import LLMClient
    from infer.server.service import ServerOptions, Service

    with serving(Service(LLMClient(llm), ServerOptions(api_keys=["secret"]))) as address:
        yield address


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_server_answers(address: str, suffix: str) -> None:
    server = Server(address + suffix, None, "secret")
    assert server.name == "demo"
    pieces = [*server.answer(users(CAT), {"max_tokens": 50})]
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == MILO
    count, context = server.count(users(CAT))
    assert 0 < count < context == 1024
    assert (server.tokens, server.finish_reason) == (6, "stop")


def test_the_command_talks_to_a_server(address: str) -> None:
    done = chat("--url", address, "--api-key", "secret", typed=f"{CAT}\n")
    assert (done.exit_code, done.stdout) == (0, f"{MILO}\n"), done.stderr
    for arguments, message in (
        (["--url", address], "needs an API key: give --api-key, or set INFER_API_KEY"),
        (["gpt-4", "--url", address, "--api-key", "secret"], "There is no model 'gpt-4' here"),
    ):
        done = chat(*arguments, typed="Hi\n")
        assert done.exit_code == 1
        assert message in done.stderr


def test_a_server_of_something_else() -> None:
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = chat("--url", url, typed="Hi\n")
        thread.join()
    assert done.exit_code == 1
    assert f"The server at {url} does not have OpenAI's API (status 404" in done.stderr


# In a terminal


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudoterminal")
@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_session_in_a_terminal(tmp_path: Path, command: str) -> None:
    import pty

    pytest.importorskip("prompt_toolkit")
    prompt = "\x1b[?2004h"  # from now on, what is pasted is told apart
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
        os.execv(sys.executable, [sys.executable, "-m", "infer", command, "demo"])
    shown = ""

    def wait_for(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            ready, _, _ = select.select([terminal], [], [], end - time.monotonic())
            assert ready, f"{text!r} does not come after {shown!r}"
            part = os.read(terminal, 65536).decode("utf-8", "replace")
            if "\x1b[6n" in part:  # where is the cursor?
                os.write(terminal, b"\x1b[1;1R")
            shown += part
        shown = shown.partition(text)[2]

    def send(text: str) -> None:
        os.write(terminal, text.encode())

    try:
        wait_for(prompt)
        send(f"{CAT}\r")
        wait_for(MILO)
        wait_for(prompt)
        send("/params frequency_penalty=2 max_tokens=1000\r")
        wait_for(prompt)
        send("Tell me a story.\r")
        wait_for(" was ")
        send("\x03")
        wait_for(prompt)
        send("\x03")
        wait_for("Ctrl-C again")
        send("\x1b[A\r")
        wait_for(" was ")
        send("\x03")
        wait_for(prompt)
        send("\x04")
        _, status = os.waitpid(process, 0)
        process = 0
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(terminal)
        if process:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    assert "+Tell me a story." in (tmp_path / "infer" / "chat-history").read_text()
