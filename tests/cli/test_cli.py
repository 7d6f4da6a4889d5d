"""The command line: in this process where that shows the same, in one of its own for signals,
pipes, imports and exit codes."""

import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import places
import pytest
import reference_models
import typer
from commands import invoke, refused
from engines import Compiled, sharing
from marks import others_full
from safetensors import safe_open

import infer
import infer.cli.report
import infer.inspection
import infer.llm
import infer.loading
import infer.memory
from infer import LLM, SamplingParams
from infer.cli.app import generate
from infer.cli.options import parse_bias, parse_template_arg
from infer.cli.terminal import note, tell, wrapped, write
from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.engine.token_engine import Step
from infer.hub import DEMO, resolve
from infer.kernels.checks import check
from infer.kernels.checks.bench import CheckResult
from infer.kernels.errors import DeviceError
from infer.kernels.gpu.adapters import AdapterInfo, MemoryInfo
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.state.kv_cache import PAGE
from infer.models.loading.tensors import TensorInfo
from infer.progress import ProgressLine, size
from infer.text.folder_tokenizer import open_tokenizer

ROOT = places.ROOT
DEMO_FOLDER = resolve(DEMO).path
PROMPT = "Once upon a time"

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("same_kernels")]


@pytest.fixture(scope="module")
def llm(compiled: Compiled) -> Iterator[LLM]:
    """The demo model as `infer run` loads it, with the same kernels."""
    with sharing(compiled):
        llm = infer.load(DEMO, max_batch=1)
    with llm:
        yield llm


@pytest.fixture
def environment() -> dict[str, str]:
    """For a process of its own."""
    mine = ("INFER_DEVICE", "XDG_RUNTIME_DIR")
    own = {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return {name: os.environ[name] for name in os.environ if name not in mine} | own


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "infer", *map(str, arguments)]


def run_process(
    *arguments: object, env: dict[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "text": True, "timeout": 600} | options
    return subprocess.run(command(*arguments), env=env, capture_output=True, **options)


def demo_with(folder: Path, **changes: Callable[[Path], None] | None) -> Path:
    """A copy of the demo model; each file named (its dots as two underscores) is changed, or left
    out with None."""
    shutil.copytree(DEMO_FOLDER, folder)
    for name, change in changes.items():
        path = folder / name.replace("__", ".")
        path.unlink() if change is None else change(path)
    return folder


def json_with(**values: Any) -> Callable[[Path], None]:
    """Sets keys of a JSON file, or takes out those that are given as None."""

    def change(path: Path) -> None:
        merged = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))

    return change


# Help and imports


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        # An import that catches any exception, as some packages do in case an extra is missing.
        ("import", (130, "", "interrupted\n")),
        ("exit", (-signal.SIGINT, f"infer {infer.__version__}\n", "")),
    ],
)
def test_ctrl_c_before_and_after_the_command(
    environment: dict[str, str], moment: str, expected: tuple[int, str, str]
) -> None:
    code = (
        "import atexit, os, signal, sys\n"
        "def interrupt(): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'infer.cli.app':\n"
        "            try:\n"
        "                interrupt()\n"
        "            except BaseException:\n"
        "                pass\n"
        "if sys.argv.pop() == 'import':\n"
        "    sys.meta_path.insert(0, Interrupt())\n"
        "else:\n"
        "    atexit.register(interrupt)\n"
        "sys.argv[1:] = ['--version']\n"
        "from infer.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, moment], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("run", "--help"), ("info",)])
def test_nothing_heavy_is_imported_before_a_command_runs(
    environment: dict[str, str], arguments: Sequence[str]
) -> None:
    code = (
        "import sys, infer.cli.app\n"
        f"sys.argv = ['infer', *{arguments!r}]\n"
        "try:\n    infer.cli.app.main()\n"
        "finally:\n"
        "    heavy = 'numpy wgpu tokenizers huggingface_hub jinja2 safetensors'.split()\n"
        "    print('imported', *(name for name in heavy if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1] == "imported"
    assert done.returncode == (2 if arguments == ("info",) else 0)


def test_version() -> None:
    assert invoke("--version").stdout == f"infer {infer.__version__}\n"


def test_help_shows_an_example_and_values_in_capitals() -> None:
    for name in ("run", "chat", "serve", "pull", "list", "rm", "info", "devices", "bench"):
        shown = " ".join(invoke(name, "--help").stdout.split())
        assert re.search(rf"Examples?: infer {name}\b", shown)
        assert not re.search(r"<bool>|<str>|\[str\]|…", shown)  # nor is a word cut off
    assert "run [OPTIONS] MODEL [PROMPT]..." in invoke("run", "--help").stdout


@pytest.mark.parametrize(
    ("name", "message"), [("rnu", "Did you mean 'run'?"), ("llama3", "infer run MODEL")]
)
def test_an_unknown_command_gets_a_hint(name: str, message: str) -> None:
    told = refused(name, code=2)
    assert message in told
    assert "run, chat, serve, ps, connect, pull, list, rm, info, devices, bench" in told


@pytest.mark.full
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(environment: dict[str, str], shell: str) -> None:
    # Not the shell that the tests were started from, if any.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = run_process("--show-completion", shell, env=environment | named)
    assert "_INFER_COMPLETE" in script.stdout
    for words, found in (
        ("infer bench --shape llama-3.2-1", "llama-3.2-1b"),
        ("infer serve de", "demo"),
    ):
        asked = {"COMP_WORDS": words, "COMP_CWORD": f"{len(words.split()) - 1}"}
        asked |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        done = run_process(env=environment | asked | {"_INFER_COMPLETE": f"complete_{shell}"})
        assert found in done.stdout
        assert "smollm2" not in done.stdout


def test_every_sampling_parameter_has_an_option() -> None:
    shown = invoke("run", "--help").stdout
    for field in fields(SamplingParams):
        assert f"--{field.name.replace('_', '-')} " in shown


def test_what_ends_an_answer_and_what_is_in_it() -> None:
    def run(*options: object) -> str:
        result = invoke("run", "demo", "Count from 1 to 9.", *options, "-q")
        assert result.exit_code == 0, result.stderr
        return str(result.stdout).strip()

    five = open_tokenizer(resolve(DEMO).path).encode("5", add_special_tokens=False)[-1]
    assert run("--stop-token-ids", five) == "1, 2, 3, 4,"
    assert run("--stop", "5", "--include-stop-str-in-output") == "1, 2, 3, 4, 5"
    without = run("--bad-words", "5", "--bad-words", "6", "-n", 15)
    assert without.startswith("1, 2, 3, 4, ")
    assert not {*without} & {*"56"}
    assert len(run("--min-tokens", 40, "-n", 44)) > len("1, 2, 3, 4, 5, 6, 7, 8, 9.")
    assert set(run("--allowed-token-ids", five, "-n", 5)) == {"5"}
    assert run("--choices", "a b", "--choices", "c") in ("a b", "c")


# infer run


def test_run_prints_the_answer_and_statistics(llm: LLM) -> None:
    expected = llm.chat(PROMPT, max_tokens=12)
    result = invoke("run", "demo", "--prompt", PROMPT, "--max-tokens", 12)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    note, prompt, generation, memory, loading = result.stderr.splitlines()
    assert llm.device.software == note.startswith(f"note: {llm.device.adapter.name} is a software")
    assert prompt.split()[:3] == ["prompt", str(expected.prompt_tokens), "tokens,"]
    assert "tokens/s, first token after" in prompt
    assert generation.split()[:3] == ["generation", "12", "tokens,"]
    assert generation.endswith("tokens/s, finish reason length")
    assert llm.device.adapter.name in memory
    assert "MiB" in memory
    assert re.fullmatch(
        r"loading     [\d.]+ s(, of which [\d.]+ s for compiling kernels)?", loading
    )


def test_quiet_leaves_the_answer_alone(llm: LLM) -> None:
    result = invoke("run", "demo", "-p", PROMPT, "-n", 3, "--quiet")
    assert result.stdout == llm.chat(PROMPT, max_tokens=3).text + "\n"
    assert result.stderr == ""


def test_verbose_tells_what_runs(llm: LLM) -> None:
    told = invoke("run", "demo", "-p", PROMPT, "-n", 1, "-v", "--no-fuse", "--context", 256).stderr
    for part in (llm.device.adapter.driver, "context 256", "fuse False", " kernels\n"):
        assert part in told
    for version in infer.cli.report.versions().values():
        assert version in told


def test_json(llm: LLM) -> None:
    options = {"temperature": 0.9, "logprobs": 2, "max_tokens": 8}
    flags = [x for name, v in options.items() for x in (f"--{name.replace('_', '-')}", v)]
    result = invoke("run", "demo", "-p", PROMPT, "--json", *flags)
    assert result.exit_code == 0
    got = json.loads(result.stdout)
    expected = llm.chat(PROMPT, seed=got["seed"], **options)
    assert expected.logprobs is not None
    assert got["text"] == expected.text
    assert got["token_ids"] == expected.token_ids
    assert got["finish_reason"] == expected.finish_reason
    assert got["prompt_tokens"] == expected.prompt_tokens
    assert got["completion_tokens"] == len(got["token_ids"])
    assert [entry["token_id"] for entry in got["logprobs"]] == expected.token_ids
    for entry, theirs in zip(got["logprobs"], expected.logprobs, strict=True):
        assert len(entry["top"]) == 2
        assert entry["logprob"] == pytest.approx(theirs.logprob, abs=1e-3)
        assert [bytes(each["bytes"]) for each in (entry, *entry["top"])] == [
            each.raw for each in (theirs, *theirs.top)
        ]
    assert got["model"] == "demo"
    assert got["adapter"]["name"] == llm.device.adapter.name
    assert got["adapter"]["webgpu"] == llm.device.adapter.webgpu
    assert got["versions"]["numpy"] == np.__version__
    assert 0 < got["memory"]["allocated_bytes"] <= got["memory"]["peak_bytes"]
    assert min(got["prompt_tps"], got["generation_tps"], got["ttft_s"]) > 0
    assert 0 <= got["compile_s"] < got["load_s"]


def test_the_prompt_goes_through_the_chat_template_unless_raw(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *chat(PROMPT)]
    flags = ("-p", PROMPT, "-n", 1, "--json")
    asked = json.loads(invoke("run", "demo", *flags, "--system", "Be brief.").stdout)
    raw = json.loads(invoke("run", "demo", *flags, "--raw").stdout)
    assert asked["prompt_tokens"] == len(llm.encode(messages))
    assert asked["token_ids"] == llm.generate(messages, max_tokens=1).token_ids
    assert raw["prompt_tokens"] == len(llm.encode(PROMPT))
    assert raw["token_ids"] == llm.generate(PROMPT, max_tokens=1).token_ids


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{{ messages[0].content * (times | default(1)) }}{% if loud is sameas true %}!{% endif %}"
    )
    folder = demo_with(tmp_path / "model", tokenizer_config__json=json_with(chat_template=template))
    given = ("times=3", "loud=true", "prompt=1")  # the last means nothing there
    flags = [flag for arg in given for flag in ("--template-arg", arg)]
    got = json.loads(invoke("run", folder, "-p", "dog", "-n", 1, "--json", *flags).stdout)
    with infer.load(folder) as llm:
        assert got["prompt_tokens"] == len(llm.tokenizer.encode("dogdogdog!", False))
    given = ("-q", "-p", "dog", "--template-arg", "messages=2")
    assert "no template argument" in refused("run", folder, *given, code=2)


def test_what_a_model_asks_in_vain_is_noted(tmp_path: Path) -> None:
    folder = demo_with(tmp_path / "m", generation_config__json=json_with(typical_p=0.5))
    flags = ("run", folder, "-p", PROMPT, "-n", 1)
    assert invoke(*flags).stderr.count("note: generation_config.json asks for what is not") == 1
    assert invoke(*flags, "-q").stderr == ""


def test_a_model_without_a_template_continues_the_prompt(llm: LLM, tmp_path: Path) -> None:
    folder = demo_with(tmp_path / "base", tokenizer_config__json=json_with(chat_template=None))
    result = invoke("run", folder, "-p", PROMPT, "-n", 5, "-q")
    assert result.stdout == llm.generate(PROMPT, max_tokens=5).text + "\n"
    result = invoke("run", folder, "-p", PROMPT, "--system", "Be brief.", "-q")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: base has no chat template")


@pytest.mark.parametrize("flags", [(), ("--prompt", "-"), ("-",)])
def test_the_prompt_comes_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    seen = captured_stream(monkeypatch)
    invoke("run", "demo", *flags, stdin="Grüße,\r\nWelt\r\n".encode())
    assert seen["prompt"] == chat("Grüße,\r\nWelt")


@pytest.mark.parametrize(
    "words", [("Why is it blue?",), ("Why", "is", "it", "blue?"), ("--", "Why is it blue?")]
)
def test_the_prompt_follows_the_model(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    seen = captured_stream(monkeypatch)
    invoke("run", "-n", 1, "demo", *words)
    assert seen["prompt"] == chat("Why is it blue?")
    message = refused("run", "--prompt", "x", "demo", *words, code=2)
    assert "either after the model or by --prompt, not both" in message


def captured_stream(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns a dictionary that gets what `run` asks the LLM for. Nothing is generated."""
    seen: dict[str, Any] = {}

    def stream(self: LLM, prompt: Any, **options: Any) -> Any:
        seen.update(options, prompt=prompt, context=self.context, engine=self.engine.options)
        raise infer.RequestError("seen enough")

    monkeypatch.setattr(LLM, "stream", stream)
    return seen


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = captured_stream(monkeypatch)
    invoke(
        *("run", "demo", "-p", PROMPT, "--context", 300, "--kv-dtype", "f32", "--no-fuse"),
        *("--invariant", "--speculate", "lookup"),
        *("--temperature", 0.7, "--top-k", 9, "--top-p", 0.8, "--min-p", 0.05, "--seed", 2**64 - 1),
        *("--repetition-penalty", 1.1, "--presence-penalty", 0.2, "--frequency-penalty", -0.3),
        *("--logit-bias", "5=-2.5", "--logit-bias", "7=1", "--stop", "a", "--stop", "b c"),
        *("--max-tokens", 17, "--logprobs", 4, "--json"),
    )
    assert seen["params"] == SamplingParams(
        temperature=0.7,
        top_k=9,
        top_p=0.8,
        min_p=0.05,
        seed=2**64 - 1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={5: -2.5, 7: 1.0},
        stop=("a", "b c"),
        max_tokens=17,
        logprobs=4,
    )
    assert seen["context"] == 300
    assert (seen["engine"].kv_dtype, seen["engine"].fuse) == ("f32", False)
    assert (seen["engine"].invariant, seen["engine"].speculate) == (True, "lookup")


def test_load_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(model: str, **options: Any) -> LLM:
        seen.update(options, model=model)
        raise DeviceError("seen enough")

    monkeypatch.setattr(infer.loading, "load", load)
    flags = ("--device", "1", "--dtype", "f16", "--revision", "v2", "--offline")
    assert refused("run", "org/name", "-p", "x", *flags) == "error: seen enough"
    given = {"model": "org/name", "device": "1", "dtype": "f16", "revision": "v2", "offline": True}
    assert seen.items() >= given.items()
    refused("run", "demo", "-p", "x", "--quantize", "q4", "--precision", "f32")
    assert (seen["dtype"], seen["quantize"], seen["precision"]) == (None, "q4", "f32")
    for command in (("run", "demo", "-p", "x"), ("chat", "demo")):
        refused(*command, "--chat-template", "{own}.jinja")
        assert seen.pop("chat_template") == Path("{own}.jinja")
    assert seen["progress"].__self__.shown is False  # standard error is no terminal


def test_a_chat_template_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for %}")
    for command in (("run", "demo", "-p", "x"), ("chat", "demo"), ("serve", "demo")):
        message = refused(*command, "--chat-template", path, code=2)
        assert message.startswith(f"error: {path}: The chat template does not compile: line 1")
    for command, wrong in (
        (("run", "demo", "-p", "x", "--raw"), "--raw uses no chat template"),
        (("chat", "--url", "http://127.0.0.1:1"), "--chat-template has no effect with --url"),
        (("serve", "demo", "other"), "can only be given with a single model"),
    ):
        assert wrong in " ".join(refused(*command, "--chat-template", path, code=2).split())


# Ctrl-C, pipes and encodings

ENDLESS = ("--logit-bias", "2=-100", "--logit-bias", "3=-100")  # no end of turn
LONG = 100_000  # positions: an answer that fills them takes longer than any test


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_keeps_what_was_generated(environment: dict[str, str], tmp_path: Path) -> None:
    folder = demo_with(tmp_path / "long", config__json=json_with(max_position_embeddings=LONG))
    with subprocess.Popen(
        command("run", folder, PROMPT, "--context", LONG, *ENDLESS),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # communicate() passes over what is buffered
    ) as process:
        assert process.stdout is not None
        begin = process.stdout.read(1)  # generating: it is streamed, not kept to the end
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=600)
    text, errors = (begin + rest).decode(), stderr.decode()
    assert process.returncode == 130
    assert text.endswith("\n")
    with (
        infer.load(folder, context=LONG, max_batch=1) as llm,
        llm.stream(chat(PROMPT), logit_bias={2: -100, 3: -100}) as stream,
    ):
        while len(stream.so_far.text) < len(text) - 1:
            next(stream)
        assert stream.so_far.text == text[:-1]
    assert "finish reason cancelled" in errors
    assert "Traceback" not in errors


def test_ctrl_c_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    next_step, left = Engine.next_step, iter(range(3))

    def interrupted(self: Engine, answer: Answer) -> Step | None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return next_step(self, answer)

    monkeypatch.setattr(Engine, "next_step", interrupted)
    result = invoke("run", "demo", "-p", PROMPT, "--json")
    got = json.loads(result.stdout)
    assert result.exit_code == 130
    assert got["finish_reason"] == "cancelled"
    assert got["completion_tokens"] == len(got["token_ids"]) == 3


def test_ctrl_c_while_loading_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_into(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorInfo, "read_into", read_into)
    result = invoke("run", "demo", "-p", PROMPT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGPIPE")
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "demo", "-p", PROMPT, *ENDLESS),
        pytest.param(("info", "demo"), marks=pytest.mark.full),
    ],
)
def test_a_reader_that_goes_away_ends_it_quietly(
    environment: dict[str, str], arguments: tuple[object, ...]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(
        command(*arguments), env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(write)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 141
    assert [line for line in errors.splitlines() if not line.startswith("note: ")] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(("run", "demo", "-p", PROMPT), marks=pytest.mark.full), ("info", "demo")],
)
def test_a_full_disk_is_one_line(
    environment: dict[str, str], arguments: tuple[object, ...]
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments), env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")] == [
        "error: The output cannot be written: No space left on device."
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@others_full("arguments", [("--version",), ("--help",), ("run", "--help")], [("run", "--help")])
def test_help_on_a_full_disk_is_one_line(
    environment: dict[str, str], arguments: tuple[object, ...]
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments), env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: The output cannot be written: No space left on device.\n"


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
def test_an_answer_is_not_lost_for_its_statistics(llm: LLM, environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("run", "demo", PROMPT, "-n", 3),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
        )
    assert done.returncode == 1
    assert done.stdout == llm.chat(PROMPT, max_tokens=3).text + "\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGPIPE")
@pytest.mark.parametrize(("option", "code"), [("--help", -signal.SIGPIPE), ("--version", 141)])
def test_help_that_nobody_reads_ends_quietly(
    environment: dict[str, str], option: str, code: int
) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command(option), env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_control_characters_are_shown_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text, shown = "a\tb\x1b[2J\x9b0m\r\x07é🙂\n", "a\tb\\x1b[2J\\x9b0m\\x0d\\x07é🙂\n"
    for stream, expected in ((Terminal(), shown), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        write(text)
        assert stream.getvalue() == expected
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    note(text[:-1])
    assert stream.getvalue() == shown


LINES = """\
error: The model demo has no revisions: it is included in the package, and changes with that alone.
generation  212 tokens, 141.5 tokens/s, finish reason stop
     limits    binding 128.0 MiB, buffer 2.0 GiB, workgroup memory 32.0 KiB, 1024 invocations
a name that is longer than half of forty columns  and its value"""


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("infer.cli.terminal.columns", lambda stream: width)
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    tell(LINES)
    note(LINES)
    assert out.getvalue() == err.getvalue()
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert out.getvalue().split() == LINES.split()
    if width == 200:
        assert out.getvalue() == LINES + "\n"
    if width == 40:  # values stay in their column, where it leaves them room
        assert f"tokens/s,\n{' ' * 12}finish reason stop\n" in out.getvalue()
        assert out.getvalue().endswith("longer than half of forty\n  columns  and its value\n")
    wide = "a/path/" + "x" * 300
    assert wrapped(wide, out) == wide  # so that it can be copied
    assert wrapped(LINES, io.StringIO()) == LINES


def test_what_is_copied_from_a_terminal_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    with llm.stream(chat(PROMPT), max_tokens=60) as answer:
        text = generate(answer, streamed=True, quiet=True).text
    assert len(text) > 80
    assert stream.getvalue() == text + "\n"


def test_names_out_of_files_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = demo_with(tmp_path / "a\x1b[2J\nb")
    assert invoke("info", folder).stdout.startswith("model       a\\x1b[2J\\nb, llama\n")
    assert "\x1b" not in refused("run", folder / "none", "-p", "x", code=2)


def test_an_error_of_the_system_names_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: object, **__: object) -> None:
        (tmp_path / "none").read_text()

    monkeypatch.setattr(infer.loading, "load", load)
    expected = f"error: {tmp_path}/none: No such file or directory."
    assert refused("run", "demo", "x") == expected
    assert "Traceback" in invoke("run", "demo", "x", "--verbose").stderr


@pytest.mark.full
def test_output_that_the_terminal_cannot_show_is_replaced(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = demo_with(tmp_path / "mödel", tokenizer__json=None)
    done = run_process("info", folder, env=environment | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.startswith("model       m?del, llama\n")
    done = run_process("run", folder, "-p", "x", env=environment | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert "m?del has no tokenizer.json" in done.stderr


@pytest.mark.full
def test_closed_streams(environment: dict[str, str]) -> None:
    shell = f"{sys.executable} -m infer run demo -p hi -n 2 <&- >&- 2>&-"
    assert subprocess.run(shell, shell=True, env=environment, timeout=600).returncode == 0
    shell = f"{sys.executable} -m infer run demo <&-"
    done = subprocess.run(shell, shell=True, env=environment, capture_output=True, timeout=600)
    assert done.returncode == 2
    assert b"pipe one in" in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((io.StringIO(), None), (Terminal(), False), (None, None)):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressLine(shown) as progress:
            progress.loading("weights", 1, 2)
        assert stream is None or stream.getvalue() == ""


def test_progress_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("infer.progress.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(sys, "stderr", stream := Terminal())

    def shown() -> str:
        """The line that is there, wiped of what was longer."""
        return stream.getvalue().rsplit("\r", 1)[1].rstrip()

    with ProgressLine() as progress:
        now += 5
        progress.loading("download", 0, 0)
        now += 2
        progress.loading("download", 1 << 20, 8 << 20)
        assert shown() == "downloading: 12%, 1.0 MiB of 8.0 MiB, 512.0 KiB/s"
        now += 10
        progress.loading("download", 8 << 20, 8 << 20)
        now += 1
        progress.loading("weights", 3 << 20, 4 << 20)
        assert shown() == "reading weights: 75%, 3.0 MiB of 4.0 MiB, 3.0 MiB/s"
        progress.loading("weights", (4 << 20) - 1, 4 << 20)  # too soon to be shown
        now += 1
        progress.loading("kernels", 1, 8)  # nobody waits for them yet
        assert shown().startswith("reading weights: 75%")
        assert progress.waiting == 0.0
        progress.loading("weights", 4 << 20, 4 << 20)
        assert shown() == "compiling kernels"
        now += 2.5
        progress.loading("kernels", 3, 8)
        assert shown() == "compiling kernels: 3 of 8, 2.5 s"
        progress.show("x" * 200, now=True)
        assert shown() == "x" * 79
        assert progress.waiting == 2.5
    assert shown() == ""


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (5 << 40, "5,120.0 GiB"),
    ],
)
def test_size(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


# Bad input


def tensors_with(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Rewrites the header of a safetensors file, and keeps its data."""

    def rewrite(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return rewrite


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def damage(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def lying_range(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"][0] -= 2


def lying_shape(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [2, 128]


def foreign_dtype(header: dict[str, Any]) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["dtype"] = "I16"


def renamed(header: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    header[name.replace("q_proj", "other")] = header.pop(name)


def sharded(path: Path) -> None:
    """The first of two shards is there, the second is not."""
    shards = [path.with_name(f"model-0000{i}-of-00002.safetensors") for i in (1, 2)]
    index = {"weight_map": {f"tensor {shard.name}": shard.name for shard in shards}}
    path.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    path.rename(shards[0])


WEIGHTS = "model__safetensors"
BAD_MODELS = {
    "config missing": ({"config__json": None}, "has no config.json"),
    "truncated": ({WEIGHTS: truncate}, "is damaged or incomplete"),
    "damaged header": ({WEIGHTS: damage}, "is damaged or incomplete"),
    "lying range": ({WEIGHTS: tensors_with(lying_range)}, "is damaged or incomplete"),
    "lying shape": ({WEIGHTS: tensors_with(lying_shape)}, "model.norm.weight is (2, 128), not"),
    "tensor missing": ({WEIGHTS: tensors_with(renamed)}, "lacks tensors that config.json asks for"),
    "tensors' dtype": ({WEIGHTS: tensors_with(foreign_dtype)}, "dtypes that are not implemented"),
    "shard missing": ({WEIGHTS: sharded}, "lacks model-00002-of-00002.safetensors"),
    "no weights": ({WEIGHTS: None}, "has no weights"),
    "architecture": (
        {"config__json": json_with(model_type="qwen4")},
        "the architecture 'qwen4' is not implemented. The nearest that are: qwen3, qwen2, qwen3_5.",
    ),
    "no tokenizer": ({"tokenizer__json": None}, "has no tokenizer.json"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(case: str, tmp_path: Path) -> None:
    changes, message = BAD_MODELS[case]
    folder = demo_with(tmp_path / "model", **changes)
    code = 2 if case == "config missing" else 1  # then the folder is none of a model
    assert message in refused("run", folder, "-p", PROMPT, code=code)
    if case != "no tokenizer":
        assert message in refused("info", folder, code=code)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-p", ""), "The prompt is empty"),
        (("-p", "x", "--device", "no such"), "No adapter matches 'no such'"),
        (("-p", "x", "--device", "99"), "No adapter matches '99'"),
        (("-p", "x", "--context", "1"), "at least 2 positions, not 1"),
        (("-p", "x", "--context", "5000"), "A context of 5000 was asked for; demo has"),
        (("-p", "x", "--revision", "v2"), "has no revisions"),
        (("-p", "x", "--dtype", "f16", "--quantize", "q4"), "Give one of the two"),
        (
            ("-p", "x", "--temperature", "-1"),
            "--temperature must be a number from 0 (greedy) to 100, not -1.",
        ),
        (("-p", "x", "--temperature", "nan"), "--temperature must be a number from 0"),
        (("-p", "x", "--top-k", "-1"), "--top-k must be an integer from 0"),
        (("-p", "x", "--top-p", "1.5"), "--top-p must be a number from 0 to 1"),
        (("-p", "x", "--min-p", "2"), "--min-p must be a number from 0"),
        (("-p", "x", "--repetition-penalty", "0"), "--repetition-penalty must be"),
        (("-p", "x", "--presence-penalty", "3"), "--presence-penalty must be"),
        (("-p", "x", "--frequency-penalty", "-3"), "--frequency-penalty must be"),
        (
            ("-p", "x", "--logit-bias", "5=101"),
            "numbers up to 100, or -inf to forbid one, not 5 to 101.0",
        ),
        (("-p", "x", "--seed", "-1"), "--seed must be an integer"),
        (("-p", "x", "--max-tokens", "0"), "--max-tokens must be an integer from 1 up"),
        (("-p", "x", "--stop", ""), "--stop must be a string or a list of strings, none empty"),
        (("-p", "x", "--json", "--logprobs", "21"), "--logprobs must be an integer from 0 to 20"),
        (("-p", "x", "--schema", "/none"), "/none cannot be read: No such file"),
        (("-p", "x", "--adapter", "/none"), "There is no folder /none"),
        (("--file", "/none"), "/none cannot be read: No such file"),
    ],
)
def test_bad_values(flags: tuple[str, ...], message: str) -> None:
    told = refused("run", "demo", *flags, code=2)
    assert told.startswith("error: ")
    assert message in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperature", "warm"), "'--temperature': must be a valid number, not 'warm'"),
        (("--seed", "1.5"), "'--seed': must be a valid integer, not '1.5'"),
        (("--dtype", "q4"), "'--dtype': 'q4' is not one of"),
        (("--quantize", "q5"), "'q5' is not one of"),
        (("--kv-dtype", "bf16"), "'bf16' is not one of"),
        (("--raw", "--system", "x"), "no chat template"),
        (("--raw", "--template-arg", "a=1"), "no chat template"),
        (("--logprobs", "3"), "--json"),
        (("--logit-bias", "5"), "'5' is not a token id"),
        (("--template-arg", "a=b"), "JSON value"),
        (("--template-arg", "a=" + "[" * 100_000), "[ ... is not a name, = and a JSON value"),
        (("--template-arg", "=1"), "JSON value"),
        (("--no-such-option",), "No such option"),
        (("--temprature", "1"), "--temperature"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], message: str) -> None:
    assert message in refused("run", "demo", "-p", "x", *flags, code=2)


def test_bad_paths(tmp_path: Path) -> None:
    nothing = "/no/such/folder"
    assert f"There is no folder or file {nothing}" in refused("run", nothing, "-p", "x", code=2)
    assert "has no config.json" in refused("run", tmp_path, "-p", "x", code=2)
    assert "is a file" in refused("info", DEMO_FOLDER / "config.json")


def test_bad_standard_input() -> None:
    message = refused("run", "demo", os.fsdecode("naïve".encode("latin-1")), code=2)
    assert message.startswith("error: The prompt is not UTF-8: byte 0xef at 2.")
    message = refused("run", "demo", stdin="naïve".encode("latin-1"), code=2)
    assert message.startswith("error: Standard input is not UTF-8: byte 0xef at 2.")
    assert "The prompt is empty" in refused("run", "demo", "--prompt", "-", stdin=b"\n", code=2)


def test_no_prompt_at_a_terminal(environment: dict[str, str]) -> None:
    pty = pytest.importorskip("pty")  # not on Windows
    main_end, terminal = pty.openpty()
    done = run_process("run", "demo", env=environment, stdin=terminal)
    os.close(main_end)
    os.close(terminal)
    assert done.returncode == 2
    assert "pipe one in" in done.stderr


def test_a_prompt_longer_than_the_context_names_both_numbers(llm: LLM) -> None:
    tokens = len(llm.encode(chat("dog " * 300)))
    result = invoke("run", "demo", "-p", "dog " * 300, "--context", 128, "-q")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"The prompt has {tokens} tokens, and the context holds 128" in result.stderr


def test_verbose_adds_the_traceback() -> None:
    result = invoke("run", "/no/such/folder", "-p", "x", "--verbose")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert "\nerror: There is no folder" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="hides Vulkan drivers")
@others_full("arguments", [("run", "demo", "-p", "x"), ("devices",)], [("devices",)])
def test_no_adapter(environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    hidden = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
    done = run_process(*arguments, env=environment | hidden)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: No GPU adapter was found. Install ")


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_into(*_: object) -> None:
        pytest.fail("a tensor was read")

    monkeypatch.setattr(TensorInfo, "read_into", read_into)
    free_memory(monkeypatch, 10_000_000)
    needed = json.loads(invoke("info", "demo", "--context", 1024, "--json").stdout)
    message = refused("run", "demo", "-p", "x", "--context", "1024")
    assert f"The model needs {needed['total_bytes']:,} bytes" in message
    assert "10,000,000 free" in message
    assert "--context" in message


def free_memory(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    for module in (infer.memory, infer.inspection):
        monkeypatch.setattr(module, "memory_info", lambda adapter: MemoryInfo(free, free))


def test_parsing() -> None:
    assert parse_bias("12=-0.5") == (12, -0.5)
    assert parse_template_arg('tools=[{"a": "b=c"}]') == ("tools", [{"a": "b=c"}])
    assert parse_template_arg('name="text"') == ("name", "text")
    with pytest.raises(typer.BadParameter):
        parse_bias("twelve=1")
    with pytest.raises(typer.BadParameter):
        parse_template_arg("name=text")


# infer info


def test_info_counts_what_is_there(llm: LLM) -> None:
    got = json.loads(invoke("info", "demo", "--json").stdout)
    with safe_open(DEMO_FOLDER / "model.safetensors", framework="numpy") as file:
        parameters = sum(int(np.prod(file.get_slice(k).get_shape())) for k in file.keys())  # noqa: SIM118
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    assert got["parameters"] == parameters
    assert got["disk_bytes"] == 2 * parameters
    assert got["dtypes"] == ["bf16"]
    assert got["kv_bytes_per_token"] == 2 * config["num_hidden_layers"] * heads * 2
    assert got["max_context"] == got["context"] == config["max_position_embeddings"]
    pages = got["context"] // PAGE + 1  # one that what is reused is copied from
    assert got["kv_cache_bytes"] == pages * PAGE * got["kv_bytes_per_token"]
    assert got["weight_bytes"] == sum(w.nbytes for w in llm.engine.weights.values())
    with infer.load("demo", max_batch=1) as alone:  # as `infer run` does
        assert got["total_bytes"] == pytest.approx(alone.stats().memory.allocated, rel=0.01)
    assert (got["chat_template"], got["tokenizer"], got["fits"]) == (True, True, True)
    assert got["adapter"]["name"] == llm.device.adapter.name


@pytest.mark.parametrize(("dtype", "dtypes"), [("q8", ["q8"]), ("q4", ["q4", "q8"])])
def test_info_counts_quantised_weights(dtype: str, dtypes: list[str]) -> None:
    whole = json.loads(invoke("info", "demo", "--json").stdout)
    got = json.loads(invoke("info", "demo", "--quantize", dtype, "--json").stdout)
    assert got["dtypes"] == dtypes
    assert got["parameters"] == whole["parameters"]
    bits = {"q8": 8 + 16 / 32, "q4": 4 + 16 / 32}
    assert got["weight_bytes"] < whole["weight_bytes"] * bits["q8"] / 16 * 1.1
    assert got["weight_bytes"] > whole["weight_bytes"] * bits[dtype] / 16
    # The rows that are quantised at a time, in f32, are counted too.
    assert got["other_bytes"] - whole["other_bytes"] > 1 << 20


def test_info_says_what_is_left_out(tmp_path: Path) -> None:
    folder = reference_models.load("qwen3_vl").write_checkpoint(tmp_path / "model")
    assert "qwen3; only the text model of qwen3_vl" in invoke("info", folder).stdout


def test_show_is_info(monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, None)  # which changes between the two
    assert invoke("show", "demo", "--json").stdout == invoke("info", "demo", "--json").stdout
    assert not re.search(r"\bshow\b", invoke("--help").stdout.replace("--show", ""))


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# A\n", "apache-2.0"),
        ("---\r\nlicense: other\r\nlicense_name: 'qwen-research'\r\n---\r\n", "qwen-research"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("# A\nlicense: mit\n", None),
        ("---\nlicense: mit\xff", None),
    ],
    ids=range(5),
)
def test_info_names_the_licence(tmp_path: Path, card: str, license: str | None) -> None:
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_bytes(card.encode("latin-1"))
    assert json.loads(invoke("info", tmp_path / "model", "--json").stdout)["license"] == license


def test_info_text(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("info", "demo", "--context", 512, "--dtype", "f32", "--kv-dtype", "f32")
    free_memory(monkeypatch, 1 << 30)
    lines = dict(line.split(maxsplit=1) for line in invoke(*flags).stdout.splitlines())
    assert lines["parameters"] == "3,575,040"
    assert lines["weights"].startswith("13.6 MiB in f32 (6.8 MiB on disk)")
    assert lines["KV"] == "cache    1.7 MiB for 512 tokens (3,072 bytes per token in f32)"
    assert lines["context"] == "512 tokens; the model's maximum is 1,024"
    assert lines["fits"] == "yes: 1.0 GiB are free"
    free_memory(monkeypatch, None)
    assert "fits        unknown: " in invoke(*flags).stdout
    free_memory(monkeypatch, 1 << 20)
    result = invoke(*flags)
    assert result.exit_code == 0
    assert "fits        no: The model needs " in result.stdout


def test_info_tells_what_products_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    (adapter, *_) = infer.list_adapters()
    own = replace(adapter, matrices=(MatrixShape(16, 16, 16),))
    monkeypatch.setattr("infer.kernels.gpu.adapters.list_adapters", lambda _: [own])
    assert "products    f16, by matrices, with sums in f32\n" in invoke("info", "demo").stdout
    text = invoke("info", "demo", "--precision", "f32").stdout
    assert "products    f32\n" in text
    for options, products in (((), "f16"), (("--precision", "f32"), "f32")):
        assert json.loads(invoke("info", "demo", *options, "--json").stdout)["products"] == products
    with pytest.raises(infer.UnsupportedError, match="precision must be one of auto, f32"):
        infer.load("demo", precision="f16")


def test_info_opens_nothing_and_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        pytest.fail("a device was opened, or a tensor read")

    monkeypatch.setattr(Device, "__init__", forbidden)
    monkeypatch.setattr(TensorInfo, "read_into", forbidden)
    monkeypatch.setattr(infer.inspection, "list_adapters", lambda _: [])
    folder = reference_models.load(reference_models.cases()[0]).write_checkpoint(tmp_path / "model")
    got = json.loads(invoke("info", folder, "--json").stdout)
    assert got["adapter"] is None
    assert got["fits"] is None
    assert got["verdict"].startswith("no adapter was found")
    assert (got["chat_template"], got["tokenizer"]) == (False, False)
    assert "tokenizer   missing" in invoke("info", folder).stdout


# infer devices


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_DEVICE", raising=False)
    adapters = infer.list_adapters()
    monkeypatch.setattr(infer.cli.report, "installed", lambda: ["wgpu-native"])
    got = json.loads(invoke("devices", "--json").stdout)
    assert [entry["name"] for entry in got["adapters"]] == [a.name for a in adapters]
    assert [entry["type"] for entry in got["adapters"]] == [a.kind for a in adapters]
    assert [entry["used"] for entry in got["adapters"]] == [a.index == 0 for a in adapters]
    assert got["adapters"][0]["features"] == sorted(adapters[0].features)
    assert got["adapters"][0]["limits"] == adapters[0].limits
    assert got["adapters"][0]["matrices"] == [m._asdict() for m in adapters[0].matrices]
    assert (got["chosen_by"], got["webgpu"]) == ("best", adapters[0].webgpu)
    assert got["versions"] == infer.cli.report.versions()
    text = invoke("devices").stdout
    assert text.startswith(f"* 0: {adapters[0].name}\n")
    assert text.endswith("* is in use: the best; --device or INFER_DEVICE choose another.\n")
    for part in (adapters[0].driver, adapters[0].backend, "shader-f16", "binding", "memory"):
        assert part in text


def test_the_library_of_webgpu_is_chosen() -> None:
    text = refused("devices", "--webgpu", "metal", code=2)
    assert "No WebGPU library is called 'metal'. Give wgpu-native or dawn" in text
    assert "'metal'" in refused("run", "demo", PROMPT, "--webgpu", "metal", code=2)
    assert "WebGPU    wgpu-native" in invoke("devices", "--webgpu", "wgpu-native").stdout


def test_run_starts_the_drivers_of_the_library_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(webgpu: str | None = None) -> None:
        raise DeviceError(f"{webgpu} starts")

    monkeypatch.setattr("infer.kernels.gpu.adapters.start_drivers", start)
    assert "dawn starts" in refused("run", "demo", PROMPT, "--webgpu", "dawn")


def test_devices_says_what_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset({"shader-f16"})
    limits = infer.list_adapters()[0].limits
    adapters = [
        AdapterInfo(0, "Card A", "discrete", "Vulkan", "1.0", features, limits),
        AdapterInfo(1, "Chip B", "integrated", "Vulkan", "2.0", frozenset(), limits),
    ]
    for module in ("infer.kernels.gpu.adapters", "infer.cli.report"):
        monkeypatch.setattr(f"{module}.list_adapters", lambda *_: adapters)
    monkeypatch.setattr(infer.cli.report, "installed", lambda: ["wgpu-native"])
    monkeypatch.setenv("INFER_DEVICE", "chip")
    text = invoke("devices").stdout
    assert "\n* 1: Chip B\n" in text
    assert text.startswith("  0: Card A\n")
    assert "subgroups no, shader-f16 yes, timestamp-query no" in text
    assert text.endswith("* is in use: chosen by INFER_DEVICE.\n")
    text = invoke("devices", "--device", "0").stdout
    assert text.startswith("* 0: Card A\n")
    assert text.endswith("* is in use: chosen by --device.\n")
    assert "No adapter matches 'Card C'" in refused("devices", "--device", "Card C", code=2)


def test_devices_shows_what_each_library_offers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dawn accepts one of two equal cards, in the place of both, then none, and then it does not
    start. What it writes to standard error itself does not show."""
    limits = infer.list_adapters()[0].limits

    def card(index: int, webgpu: str, **more: Any) -> AdapterInfo:
        kind = ("T4", "discrete", "Vulkan", "535.1", frozenset[str](), limits)
        return AdapterInfo(index, *kind, webgpu=webgpu, **more)

    matrices = (MatrixShape(16, 16, 16), MatrixShape(16, 8, 16))
    own = [card(0, "wgpu-native"), card(1, "wgpu-native")]
    theirs = [card(0, "dawn", uuid="an-id", matrices=matrices), card(1, "dawn")]

    def listed(webgpu: str | None = None) -> list[AdapterInfo]:
        if webgpu != "dawn":
            return own
        os.write(2, b"Warning: a driver\n")
        if not theirs:
            raise RuntimeError("Dawn does not start")
        return [adapter for adapter in theirs if adapter.name]

    for module in ("infer.kernels.gpu.adapters", "infer.cli.report"):
        monkeypatch.setattr(f"{module}.list_adapters", listed)
    monkeypatch.setattr(infer.cli.report, "installed", lambda: ["wgpu-native", "dawn"])
    monkeypatch.delenv("INFER_DEVICE", raising=False)
    text = invoke("devices").stdout
    before, _, after = text.partition("\n\nWith --webgpu dawn:\n")
    assert before.startswith("* 0: T4\n")
    assert "\n  1: T4\n" in before
    assert after.startswith("  0: T4\n")
    assert "\n  1: T4\n" in after
    assert "UUID      an-id" in after
    assert "matrices  16x16x16, 16x8x16\n" in after
    assert "accept" not in text
    assert "--webgpu dawn" not in invoke("devices", "--webgpu", "wgpu-native").stdout
    got = json.loads(invoke("devices", "--json").stdout)
    assert [(each["webgpu"], each["index"], each["used"]) for each in got["adapters"]] == [
        ("wgpu-native", 0, True),
        ("wgpu-native", 1, False),
        ("dawn", 0, False),
        ("dawn", 1, False),
    ]
    assert got["adapters"][2]["matrices"][1] == {"m": 16, "n": 8, "k": 16}
    assert (got["adapters"][2]["uuid"], got["notes"]) == ("an-id", [])
    theirs[1] = replace(theirs[1], name="")
    assert "\n\ndawn does not accept T4 (driver 535.1): it wants" in invoke("devices").stdout
    theirs[0] = theirs[1]
    got = json.loads(invoke("devices", "--json").stdout)
    assert len(got["adapters"]) == 2
    assert got["notes"][0].startswith("dawn does not accept T4 (driver 535.1), T4 (driver 535.1): ")
    theirs.clear()
    text = invoke("devices").stdout
    assert text.startswith("* 0: T4\n")
    assert "\n\nDawn does not start\n\n* is in use" in text
    assert capfd.readouterr().err == ""


def test_check_reports_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        CheckResult("rmsnorm", "f32", 1e-14, 1e-10),
        CheckResult("rmsnorm", "f16", 3e-14, 1e-10),
        CheckResult("matmul", "f32", 1e-3, 1e-10),
        CheckResult("rope", "half", float("nan"), 1e-10, "rope.wgsl:3:1: unknown identifier"),
    ]

    def check_device(device: Device, progress: Callable[[CheckResult], None]) -> list[CheckResult]:
        for result in results:
            progress(result)
        return results

    monkeypatch.setattr(check, "check_device", check_device)
    result = invoke("devices", "--check")
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[:-2] == [
        ["rmsnorm", "ok", "2", "cases,", "largest", "mean", "square", "error", "3.0e-14"],
        ["matmul", "FAIL", "1", "of", "1", "case"],
        ["f32:", "mean", "square", "error", "1.0e-03", "above", "1.0e-10"],
        ["rope", "FAIL", "1", "of", "1", "case"],
        ["half:", "rope.wgsl:3:1:", "unknown", "identifier"],
    ]
    got = json.loads(invoke("devices", "--check", "--json").stdout)
    assert [entry["ok"] for entry in got["results"]] == [True, True, False, False]
    assert got["ok"] is False
    assert got["results"][3]["error"] is None
    del results[2:]
    result = invoke("devices", "--check")
    assert result.exit_code == 0
    assert "all kernels agree" in result.stdout
