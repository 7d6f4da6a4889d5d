"""The documents: their examples run, their commands parse, what they name is there."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import places
import pytest
import test_lora
import typer.main
from typer.testing import CliRunner

import infer
import infer.shortcuts
from infer import LLM
from infer.cli.app import app
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.hub import DEMO, resolve
from infer.kernels import errors
from infer.kernels.gpu.device import DryDevice, Limits
from infer.kernels.gpu.tensor import allocate
from infer.models import build_model
from infer.models.loading.config import RawConfig
from infer.text.folder_tokenizer import open_tokenizer

pytestmark = pytest.mark.demo

ROOT = places.ROOT
# For users, then for contributors.
GUIDES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("models", "benchmarks", "python", "server", "agents")),
)
DOCUMENTS = (*GUIDES, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/decisions.md")
# With modules, but for the packages themselves.
FOLDERS = {
    path.parent.relative_to(ROOT).as_posix()
    for top in ("infer", "models", "kernels")
    for path in (ROOT / top).rglob("[!_]*.py")
    if not path.parent.relative_to(ROOT).as_posix().startswith(("infer/kernels", "infer/models"))
} - {"kernels", "models"}
demo_adapter = test_lora.demo_adapter  # a fixture
FENCE = re.compile(r"^( *)```(\S+) ?(\S*)\n(.*?)^ *```$", re.M | re.S)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[tuple[str, str]]:
    """(what follows the language, text) of each fenced block of a language."""
    return [
        (after, "".join(line[len(indent) :] or "\n" for line in text.splitlines(keepends=True)))
        for indent, name, after, text in FENCE.findall(read(document))
        if name == language
    ]


def examples(language: str, *documents: str) -> list[Any]:
    """Blocks of Python, named by where they stand. Those that run are "python"; "py" need a model
    or a server that is not here. Those that have the name of a file are run as one below."""
    return [
        pytest.param(code, id=f"{document}-{number}")
        for document in documents
        for number, (name, code) in enumerate(blocks(document, language))
        if not name
    ]


# Examples


@pytest.fixture
def no_kept_model() -> Iterator[None]:
    """An example may leave the model that module-level generate keeps."""
    yield
    if infer.shortcuts._last is not None:
        infer.shortcuts._last.llm.close()
        infer.shortcuts._last = None


@pytest.mark.usefixtures("no_kept_model", "same_kernels")
@pytest.mark.parametrize("code", examples("python", *GUIDES))
def test_an_example_runs_and_prints_what_it_says(
    code: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write files
    stream = LLM.stream

    def briefly(self: LLM, *given: Any, **own: Any) -> Any:
        """Where the example sets no end, an answer may be a whole story."""
        brief = {} if own.get("params") else {"max_tokens": 24}
        return stream(self, *given, **(brief | own))

    monkeypatch.setattr(LLM, "stream", briefly)
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip()
    for said in re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M):
        assert said in printed


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    """The address of a server with the demo model."""
    from serving import serving

    from infer.server.engine import LLMClient
    from infer.server.service import ServerOptions, Service

    with serving(Service(LLMClient(llm), ServerOptions())) as address:
        yield address


@pytest.mark.parametrize("code", examples("py", "README.md", "docs/server.md"))
def test_an_example_of_a_client_runs(
    code: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the model that is here."""
    code = code.replace("Qwen/Qwen3-0.6B", "demo").replace("http://127.0.0.1:8000", address)
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
@pytest.mark.parametrize("code", examples("py", "docs/python.md"))
def test_an_example_for_other_models_runs(
    code: str, capsys: pytest.CaptureFixture[str], demo_adapter: Path
) -> None:
    """With the model and the adapter that are here."""
    code = code.replace("Qwen/Qwen3-0.6B", "demo")
    for adapter in ("org/sql-lora", "./legal-lora"):
        code = code.replace(adapter, demo_adapter.as_posix())
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.full
@pytest.mark.usefixtures("same_kernels")
def test_the_forbidden_word_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (code for _, code in blocks("docs/python.md", "python") if "without_rosa" in code)
    plain = code.replace(", logits_processor=without_rosa", "")
    exec(compile(plain, "example", "exec"), {})
    assert "Rosa" in capsys.readouterr().out
    exec(compile(code, "example", "exec"), {})
    assert "Rosa" not in capsys.readouterr().out


@pytest.fixture
def file_of_an_example(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a block of docs/python.md that has the name of a file, alone in a folder."""

    def write(name: str) -> Path:
        (code,) = (code for own, code in blocks("docs/python.md", "python") if own == name)
        (tmp_path / name).write_text(code, encoding="utf-8")
        return tmp_path / name

    return write


def run_python(*arguments: str | Path) -> str:
    """Returns the output of a new Python process, which must exit with code 0."""
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    # An InferWarning, which says that the adapter is software, is a UserWarning.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "default::UserWarning", *map(str, arguments)],
        env=own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.full
def test_a_model_is_loaded_in_a_spawned_process(
    file_of_an_example: Callable[[str], Path],
) -> None:
    first, second = run_python(file_of_an_example("stories.py")).splitlines()
    assert first.startswith("Once upon a time,")
    assert second.startswith("The cat ")


def test_a_fixture_loads_a_model_once(file_of_an_example: Callable[[str], Path]) -> None:
    tests = file_of_an_example("test_story.py")
    tests.with_name("conftest.py").write_text(
        "import atexit, infer\n"
        "load, calls = infer.load, []\n"
        "infer.load = lambda *given, **own: calls.append(given) or load(*given, **own)\n"
        "atexit.register(lambda: print(f'loaded {len(calls)}'))\n"
    )
    root = ["--rootdir", tests.parent, "-c", os.devnull, "-p", "no:cacheprovider"]
    printed = run_python("-m", "pytest", *root, tests)
    assert "2 passed" in printed
    assert "loaded 1" in printed


def test_an_app_of_fastapi_answers(
    file_of_an_example: Callable[[str], Path], same_kernels: None
) -> None:
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    app = runpy.run_path(str(file_of_an_example("app.py")))["app"]
    with TestClient(app) as client:
        asked = {"prompt": "Once upon a time", "max_tokens": 8}
        answer = client.get("/answer", params=asked).json()
        assert answer["finish_reason"] == "length"
        assert client.get("/story", params=asked).text.startswith(answer["text"])
        for path, wrong in (("answer", {"max_tokens": 0}), ("story", {"prompt": "word " * 2000})):
            refused = client.get(f"/{path}", params={**asked, **wrong})
            assert refused.status_code == 400
            assert refused.json()["detail"]


def test_an_answer_of_fastapi_ends_when_the_client_goes_away(
    file_of_an_example: Callable[[str], Path], same_kernels: None
) -> None:
    """Without a server between: the app is told so after the first piece."""
    pytest.importorskip("fastapi")
    app = runpy.run_path(str(file_of_an_example("app.py")))["app"]
    scope = {
        **{"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "GET"},
        **{"path": "/story", "raw_path": b"/story", "query_string": b"prompt=Once upon a time"},
        **{"headers": [], "scheme": "http", "http_version": "1.1", "root_path": ""},
    }

    async def ask() -> None:
        first, streams = asyncio.Event(), []

        async def receive() -> dict[str, Any]:
            await first.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                first.set()

        async with app.router.lifespan_context(app):
            llm = app.state.llm
            astream = llm.astream

            def long(prompt: str, **own: Any) -> Any:
                streams.append(astream(prompt, **{**own, "max_tokens": 900, "ignore_eos": True}))
                return streams[-1]

            llm.astream = long
            await app(scope, receive, send)
            await llm.agenerate("Once", max_tokens=2)  # whose steps the other has no part in
            assert 0 < streams[0].result.completion_tokens < 900

    asyncio.run(ask())


def test_the_table_of_errors_is_complete() -> None:
    """With what is a kind of what."""
    table = read("docs/python.md").partition("| error | when |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    kinds: dict[str, str] = {}
    for first, when, *advice in rows:
        (name,) = re.findall(r"`(\w+)`", first)
        if "—" not in first:
            kinds[name] = above = name
        else:
            kinds[name] = above
        assert when
        assert advice
    own = [each for each in vars(errors).values() if isinstance(each, type)]
    tree = {each.__name__: each for each in own if issubclass(each, infer.InferError)}
    assert sorted(kinds) == sorted(tree)
    for name, above in kinds.items():
        parent = tree[above] if above != name else infer.InferError
        assert name == "InferError" or parent in tree[name].__bases__
        assert getattr(infer, name) is tree[name]


RunExample = Callable[..., dict[str, Any]]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, same_kernels: None) -> RunExample:
    """Runs a file of examples/ as a program. Returns what is defined in it."""

    def run(name: str, *arguments: object, stdin: str = "") -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")

    return run


def test_every_example_is_in_the_readme() -> None:
    linked = set(re.findall(r"\(examples/(\w+\.py)\)", read("README.md")))
    assert linked == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", ["facts.py", "summaries.py", "tools.py"])
def test_an_example_without_arguments_says_what_it_takes(
    run_example: RunExample, name: str
) -> None:
    with pytest.raises(SystemExit, match=rf"python examples/{name} MODEL"):
        run_example(name)


def test_the_chat_remembers(run_example: RunExample, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("chat.py", stdin="My cat is called Milo.\nWhat is my cat called?\n")
    assert "\n> Your cat is called Milo.\n" in capsys.readouterr().out


@pytest.mark.full
def test_the_chat_forgets_what_has_no_room(
    run_example: RunExample,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infer, "load", partial(infer.load, context=64))
    run_example("chat.py", stdin="What is 4 plus 7?\n" * 6)
    assert capsys.readouterr().out.count("4 plus 7 is 11.\n") == 6


@pytest.mark.full
def test_summaries_compute_their_instructions_once(
    run_example: RunExample,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    texts = {"a": "Rosa has a blue hat.", "long": "Rosa sings. " * 500, "b": "Theo sleeps."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    instructions = run_example("summaries.py", "demo", *(tmp_path / name for name in texts))
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(tmp_path / name) for name in "ab"]
    refused, last = printed.err.splitlines()
    assert refused.startswith(f"{tmp_path / 'long'}: The prompt has ")
    tokens = len(open_tokenizer(resolve(DEMO).path).encode(instructions["INSTRUCTIONS"]))
    reused, prompts = map(int, re.findall(r"\d+", last))
    assert tokens - 5 < reused < prompts - tokens


@pytest.mark.full
def test_an_answer_calls_functions(
    run_example: RunExample, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example runs with a model that was not trained to call: its first call is forced."""
    chat, choices = LLM.chat, ["none", {"type": "function", "function": {"name": "today"}}]

    def asked(self: LLM, messages: Any, **own: Any) -> Any:
        return chat(self, messages, tool_choice=choices.pop(), parallel_tool_calls=False, **own)

    monkeypatch.setattr(LLM, "chat", asked)
    names = run_example("tools.py", "demo", "What day is it?")
    printed = capsys.readouterr()
    _, call, result, answer = names["messages"]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert printed.err.endswith(f"): {result['content']}\n")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["content"])
    assert printed.out == f"{answer['content']}\n"


@pytest.mark.full
def test_facts_are_valid(
    run_example: RunExample, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_text("Rosa has a blue hat.")
    names = run_example("facts.py", "demo", *files)
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each.pop("file") for each in facts] == list(map(str, files))
    for each in facts:
        jsonschema.validate(each, names["SCHEMA"])


@pytest.mark.full
def test_scores_are_those_of_what_is_generated(
    run_example: RunExample, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_example("scoring.py")
    best, *others = capsys.readouterr().out.splitlines()
    assert best.endswith("a clever witch")
    assert len(others) == 2
    with infer.load("demo") as llm:
        result = llm.generate(names["PROMPT"], max_tokens=6, logprobs=0)
        assert result.logprobs is not None
        score = llm.score(names["PROMPT"], [result.text])[0].logprob
    assert score == pytest.approx(sum(entry.logprob for entry in result.logprobs), abs=2e-2)


@pytest.mark.usefixtures("same_kernels")
def test_the_session_looks_like_a_session() -> None:
    """The README's session has the lines of a run, except for the story and the numbers."""
    ((_, session),) = blocks("README.md", "text")
    command, *lines = session.splitlines()
    arguments = shlex.split(command.removeprefix("$ infer "))
    done = CliRunner().invoke(app, [*arguments, "--max-tokens", "16"])
    assert done.exit_code == 0
    # Adapters round differently, so the story may go on differently; it begins the same.
    assert done.stdout[:40] in session
    printed = done.stderr.splitlines()[-4:]
    assert [re.split(r"\d", line)[0] for line in lines[-4:]] == [
        re.split(r"\d", line)[0] for line in printed
    ]


# Commands


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {name: each for name, each in group.commands.items() if not each.hidden}


def named_commands() -> Iterator[list[str]]:
    """The arguments of every `infer …` in shell blocks and in the text of the documents."""
    for document in DOCUMENTS:
        text = read(document)
        inline = re.findall(r"(?<!`)`(infer [^`]+)`", FENCE.sub("", text))
        shown = [line for _, block in blocks(document, "sh") for line in block.splitlines()]
        shown += [line[2:] for _, b in blocks(document, "text") for line in b.splitlines()[:1]]
        for line in [*inline, *shown]:
            words = shlex.split(line, comments=True)
            if "infer" in words:
                yield words[words.index("infer") + 1 :]


@pytest.mark.parametrize("words", list(named_commands()), ids=" ".join)
def test_a_command_parses(words: list[str]) -> None:
    name, *arguments = words
    if arguments == ["--help"]:
        assert name in {*commands(), "COMMAND"}
        return
    if name.startswith("--"):
        own: Any = typer.main.get_command(app)
        assert name in [option for parameter in own.params for option in parameter.opts]
        return
    command = commands()[name]
    if arguments:
        command.make_context(name, list(arguments))


def test_the_script_of_the_benchmark_takes_what_is_shown() -> None:
    arguments_of = runpy.run_path(str(ROOT / "scripts" / "bench.py"))["arguments"]
    lines = [line for _, block in blocks("CONTRIBUTING.md", "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if "scripts/bench.py" in line]
    assert len(words) == 3
    for _, _, *given in words:
        name, *arguments = arguments_of(given)
        params = commands()[name].make_context(name, arguments).params
        assert params["shape"] == "llama-3.2-1b"
        assert params["profile"] == ("--profile" in given)
        save = str(ROOT / "scripts" / "results") if "--json" in given else None
        assert params["save"] == save


def test_every_command_is_in_the_readme() -> None:
    named = set(re.findall(r"^\| `infer (\w+)", read("README.md"), re.M))
    assert named == set(commands())


def test_every_option_that_is_named_exists() -> None:
    known = set()
    for command in commands().values():
        known.update(name for parameter in command.params for name in parameter.opts)
    named = {name for each in GUIDES for name in re.findall(r"`(--[a-z][\w-]*)", read(each))}
    assert named
    assert named <= known


# Names in documents


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/files.md", "deploy/README.md"])
def test_links_and_paths_lead_somewhere(document: str) -> None:
    text = read(document)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    own = re.sub(r"https?://\S+", "", text)  # without pages of others
    paths = re.findall(r"(?:examples|scripts|tests|docs)/[\w/]+\.\w+", own)
    folder = (ROOT / document).parent
    missing = [path for path in paths if not (ROOT / path).exists()]
    for link in links:
        name, _, anchor = link.partition("#")
        path = folder / name if name else ROOT / document
        if "://" not in link and not (path.exists() and (not anchor or anchor in anchors(path))):
            missing.append(link)
    assert not missing


def test_the_index_of_decisions_is_complete() -> None:
    index, *entries = re.split(r"^### ", read("docs/decisions.md"), flags=re.M)
    linked = re.findall(r"\]\(#([\w-]+)\)", index)
    titles = [entry.partition("\n")[0] for entry in entries]
    assert linked == [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in titles]


def anchors(path: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("language", ["python", "wgsl"])
def test_what_contributing_quotes_is_in_the_file(language: str) -> None:
    quoted = blocks("CONTRIBUTING.md", language)
    assert quoted
    for name, text in quoted:
        assert text in read(name)


def test_the_list_of_files_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "file_list.py"))
    assert read("docs/files.md") == script["file_list"](), "run scripts/file_list.py"


def test_a_new_module_is_in_the_list_of_files(tmp_path: Path) -> None:
    """With the first sentence of its docstring, wherever that ends."""
    for name, text in {
        "infer/__init__.py": '"""The package."""',
        "infer/engine/__init__.py": '"""Engines (Smith et al. 2020). More of them."""',
        "infer/engine/new.py": '"""What is\nnew.\n\nMore."""',
        "infer/models/linked.py": '"""Another package."""',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "file_list.py"))
    _, *folders = script["file_list"](tmp_path).split("\n## ")
    assert folders == [
        "infer/\n\nThe package.\n",
        "infer/engine/\n\nEngines (Smith et al. 2020).\n\n* `new.py`: What is new\n",
    ]
    (tmp_path / "infer" / "engine" / "new.py").write_text("")
    with pytest.raises(ValueError, match=r"new\.py has no docstring"):
        script["file_list"](tmp_path)


def test_the_architecture_names_every_folder_of_modules() -> None:
    table = read("ARCHITECTURE.md").partition("| folder |")[2].partition("\n\n")[0]
    named = re.findall(
        r"`([\w/]+)/`", "".join(line.split("|")[1] for line in table.splitlines()[1:])
    )
    assert sorted(named) == sorted({*FOLDERS, "models", "kernels/wgsl"})


def test_the_kernels_of_a_layer_are_those_of_the_plans() -> None:
    text = read("ARCHITECTURE.md").partition("| decode | prefill |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    model = build_model(RawConfig.open(resolve(DEMO).path))
    device = DryDevice(Limits(workgroup_storage=32768))
    device.software = True  # a GPU joins contexts as short as the demo's in attention
    device.largest_subgroup = (
        64  # with one size of subgroups a CPU has a kernel for all projections
    )
    weights = {spec.name: allocate(device, spec.shape, "bf16") for spec in model.weights()}
    engine = Engine(device, Loaded(model, weights), EngineOptions(context=1024))
    layers = model.config.num_hidden_layers
    kinds = engine.runner.kinds
    for column, kind in enumerate((kinds.decode, kinds.alone[0])):
        layer = [name for row in rows for name in re.findall(r"`(\w+)`", row[column])]
        kernels = [k.spec.name for k in engine.runner.steps.lowered[kind].kernels if not k.head]
        assert kernels == ["embedding", *layer * layers]


def test_the_tables_of_models_and_formats_are_those_of_the_registries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = str(ROOT / "scripts" / "make_tables.py")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(script, run_name="__main__")
    assert done.value.code == 0


def test_quantised_checkpoints_are_refused_by_name() -> None:
    values = RawConfig.open(resolve(DEMO).path).values | {"quantization_config": {"bits": 4}}
    with pytest.raises(errors.UnsupportedError, match="quantization_config"):
        build_model(RawConfig(values))


def test_the_benchmarks_are_those_of_the_results() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "bench_table.py"))
    results = ROOT / "scripts" / "results"
    one: Any = script["table"](script["read"](results))
    many: Any = script["batches"](script["read"](results / "batch"))
    assert f"{script['BEGIN']}\n{one}\n{script['END']}" in read("docs/benchmarks.md")
    begin, end = script["BATCHES"]
    assert f"{begin}\n{many}\n{end}" in read("docs/benchmarks.md")
