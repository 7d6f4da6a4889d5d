"""`infer run --file`: a file of prompts, answered many at once."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import infer
import infer.loading
from infer import LLM
from infer.cli.app import app
from infer.engine.answers import Answer
from infer.engine.engine import Engine
from infer.engine.token_engine import Step
from infer.hub import DEMO

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("same_kernels")]

PROMPTS = ["Once upon a time", "What is 4 plus 7?", "What colour is a banana?"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with infer.load(DEMO) as llm:
        yield llm


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def write(path: Path, *lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    given = ["run", DEMO, *map(str, arguments)]
    return CliRunner().invoke(app, given, input=stdin, catch_exceptions=False)


@pytest.mark.full
def test_each_answer_is_that_of_its_prompt_alone(llm: LLM, prompts: Path) -> None:
    chat = [{"role": "user", "content": PROMPTS[2]}]
    sampled = {"temperature": 0.9, "seed": 5, "max_tokens": 8, "logit_bias": {"7": 1.0}}
    lines = [PROMPTS[0], {"id": "sum", "prompt": PROMPTS[1], "stop": ["11"], "max_tokens": 20}]
    # The first of two that run at once is the last to end.
    lines += [{"id": 2.5, "messages": chat} | sampled, {"prompt": PROMPTS[1], "max_tokens": 1}]
    content = "\ufeff" + "\r\n\r\n".join(json.dumps(line) for line in lines)
    result = run("--file", "-", "-n", 24, "--max-batch", 1, "-q", stdin=content.encode())
    assert (result.exit_code, result.stderr) == (0, "")
    got = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["id"] for answer in got] == [1, "sum", 2.5, 7]
    expected = [
        llm.chat(PROMPTS[0], max_tokens=24),
        llm.chat(PROMPTS[1], max_tokens=20, stop=["11"]),
        llm.chat(chat, temperature=0.9, seed=5, max_tokens=8, logit_bias={7: 1.0}),
        llm.chat(PROMPTS[1], max_tokens=1),
    ]
    for answer, alone in zip(got, expected, strict=True):
        for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens"):
            assert answer[name] == getattr(alone, name)
    assert got[1]["finish_reason"] == "stop"
    assert got[2]["seed"] == 5


def test_messages_of_both_forms_by_a_template_of_ones_own(
    llm: LLM, prompts: Path, tmp_path: Path
) -> None:
    template = tmp_path / "{own}.jinja"
    template.write_text(
        "{% for m in messages if m.role == 'user' %}{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{% endfor %}"
    )
    contents = (PROMPTS[0], [{"type": "text", "text": PROMPTS[0]}])
    chats = [[{"role": "user", "content": content}] for content in contents]
    system = {"role": "system", "content": "Be brief."}
    write(prompts, *({"messages": [*before, *chat]} for chat in chats for before in ([], [system])))
    result = run("--file", prompts, "-n", 1, "--chat-template", template)
    assert result.exit_code == 0
    got = [json.loads(line) for line in result.stdout.splitlines()]
    count = len(llm.tokenizer.encode(PROMPTS[0], False))
    assert [answer["prompt_tokens"] for answer in got] == [count] * 4
    told = "note: The chat template leaves messages of the role 'system' out of the prompt.\n"
    assert result.stderr.count(told) == 1


def test_after_an_interrupt_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, prompts: Path, out: Path
) -> None:
    counts = [12, 2, 2, 2, 2]
    write(prompts, *({"prompt": PROMPTS[i % 3], "max_tokens": n} for i, n in enumerate(counts)))
    command = ("--file", prompts, "--out", out, "--max-batch", 2, "--context", 128)
    next_step, opened = Engine.next_step, set()

    def interrupted(self: Engine, answer: Answer) -> Step | None:
        opened.add(answer)
        assert len([answer for answer in opened if not answer.ended]) <= 4
        if answer.count > 8:
            raise KeyboardInterrupt
        return next_step(self, answer)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "next_step", interrupted)
        result = run(*command, "-q")
    assert result.exit_code == 130
    # The first is not done; what others have come to is kept.
    done = [answer["id"] for answer in read(out)]
    assert done
    assert set(done) <= {2, 3, 4, 5}
    told = f"interrupted: {len(done)} of 5 answers are in {out}; the same command continues"
    assert result.stderr.startswith(told)

    before = {answer["id"]: answer for answer in read(out)}
    with open(out, "a") as file:
        file.write('{"id": 1, "text": "cut o')
    result = run(*command)
    assert result.exit_code == 0
    assert f"note: {len(done)} of 5 answers are in {out} already" in result.stderr
    got = read(out)
    assert [answer["id"] for answer in got] == [1, 2, 3, 4, 5]
    assert all(got[key - 1] == answer for key, answer in before.items())  # seeds and all
    assert got[0]["text"] == llm.chat(PROMPTS[0], max_tokens=12).text

    monkeypatch.setattr(infer.loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert run(*command).exit_code == 0
    assert read(out) == got


def test_others_go_on_when_one_fails(prompts: Path, out: Path) -> None:
    wrong: dict[str, Any] = {"id": "b", "messages": [{"content": "no role"}]}
    lines = [{"id": "a", "prompt": "dog " * 300}, wrong, {"id": "c", "prompt": PROMPTS[1]}]
    write(prompts, *lines)
    command = ("--file", prompts, "--out", out, "-n", 2, "--context", 128, "-q", "--max-batch", 2)
    result = run(*command)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 2 of 3 prompts failed. ")
    a, b, c = read(out)
    assert list(a) == list(b) == ["id", "error"]
    assert "the context holds 128" in a["error"]
    assert "role" in b["error"]
    assert c["completion_tokens"] == 2
    # They are tried again, and no others.
    write(prompts, lines[0], wrong | {"messages": [{"role": "user", "content": "x"}]}, lines[2])
    assert run(*command).exit_code == 1
    got = read(out)
    assert [answer["id"] for answer in got] == ["a", "b", "c"]
    assert ["error" in answer for answer in got] == [True, False, False]
    assert got[2] == c


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "A line must be an object or a string, not [1]"),
        ('{"prompt": "a",}', "A line must be a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"promt": "a"}', "promt is not an option. Did you mean prompt?"),
        ('{"prompt": "a", "max_new_tokens": 3}', "Did you mean max_tokens?"),
        ('{"prompt": "a", "top_p": 2}', "top_p must be a number from 0 to 1 (off), not 2"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias must map token ids"),
        ('{"prompt": ""}', "prompt must be text that is not empty"),
        ('{"prompt": "a", "messages": []}', "Give either prompt or messages."),
        ('{"messages": "a"}', "messages must be a list such as"),
        ('{"prompt": "a", "id": true}', "id must be a string or a number, not True"),
        ('{"prompt": "a", "n": 0}', "n must be an integer from 1 to 256, not 0"),
        ('{"prompt": "a", "id": NaN}', "NaN is not a JSON number"),
        ('{"prompt": "a", "id": 1}', "The id 1 is that of line 1 too"),
        (b'"\xff"', "it is not UTF-8: byte 0xff at 1"),
    ],
)
def test_wrong_lines_are_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, line: str | bytes, message: str
) -> None:
    monkeypatch.setattr(infer.loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    wrong = line if isinstance(line, bytes) else line.encode()
    prompts.write_bytes(b'"right"\n\n' + wrong + b'\n"right"\n')
    result = run("--file", prompts)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {prompts}, line 3: ")
    assert message in result.stderr


def test_all_wrong_lines_are_told_at_once(monkeypatch: pytest.MonkeyPatch, prompts: Path) -> None:
    monkeypatch.setattr(infer.loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    write(prompts, "right", {"promt": "a"}, "right", {"prompt": "a", "top_p": 2}, *[1] * 30)
    result = run("--file", prompts)
    assert (result.exit_code, result.stdout) == (2, "")
    first, *told, rest = result.stderr.splitlines()
    assert first == f"error: 32 lines of {prompts} are wrong:"
    assert told[0] == "  line 2: promt is not an option. Did you mean prompt?"
    assert told[1] == "  line 4: top_p must be a number from 0 to 1 (off), not 2."
    assert len(told) == 20
    assert rest == f"  and lines {', '.join(map(str, range(23, 35)))}"


def test_a_prompt_is_answered_n_times(llm: LLM, prompts: Path, out: Path) -> None:
    lines = [
        {"prompt": PROMPTS[0], "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6},
        {"prompt": PROMPTS[1]},
        {"prompt": "dog " * 1500, "n": 2},
    ]
    write(prompts, *lines)
    command = ("--file", prompts, "--out", out, "-n", 9, "-q", "--max-batch", 2)
    assert run(*command).exit_code == 1
    several, one, failed = read(out)
    options = {"temperature": 1.0, "max_tokens": 6}
    expected = [llm.chat(PROMPTS[0], seed=seed, **options) for seed in (5, 6, 7)]  # type: ignore[arg-type]
    assert [(x["text"], x["seed"]) for x in several["choices"]] == [
        (result.text, 5 + i) for i, result in enumerate(expected)
    ]
    assert one["text"] == llm.chat(PROMPTS[1], max_tokens=9).text
    assert list(failed) == ["id", "error"]
    assert run(*command).exit_code == 1  # what is there is kept
    assert read(out) == [several, one, failed]


# Lines of OpenAI's Batch API


def batch_line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gpt-5"} | body}


def test_openais_batch_lines(llm: LLM, prompts: Path, out: Path) -> None:
    pytest.importorskip("starlette")
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    lines = [
        batch_line("chat", messages=chats[0], max_tokens=6, logprobs=True),
        batch_line("twice", messages=chats[1], n=2, temperature=0, shape="round"),
        batch_line("text", "/v1/completions", prompt=PROMPTS[0], max_completion_tokens=None),
        batch_line("long", messages=[{"role": "user", "content": "dog " * 1500}]),
        batch_line("response", "/v1/responses", input=PROMPTS[2]),
    ]
    write(prompts, *lines)
    command = ("--file", prompts, "--out", out, "-n", 12, "--max-batch", 2)
    result = run(*command)
    assert result.exit_code == 1, result.stderr
    assert result.stderr.count("note: demo answers what was asked of gpt-5\n") == 1
    assert "note: There is no parameter 'shape' here. It was ignored.\n" in result.stderr
    got = read(out)
    assert [answer["custom_id"] for answer in got] == [line["custom_id"] for line in lines]
    assert all(answer["error"] is None and answer["id"] for answer in got)
    codes = [answer["response"]["status_code"] for answer in got]
    assert codes == [200, 200, 200, 400, 200]
    chat, twice, text, long, response = (answer["response"]["body"] for answer in got)
    expected = llm.chat(PROMPTS[0], max_tokens=6)
    assert chat["choices"][0]["message"]["content"] == expected.text
    assert chat["usage"]["completion_tokens"] == len(chat["choices"][0]["logprobs"]["content"]) == 6
    answer = llm.chat(PROMPTS[1], max_tokens=12).text
    assert [choice["message"]["content"] for choice in twice["choices"]] == [answer] * 2
    assert text["choices"][0]["text"] == llm.generate(PROMPTS[0], max_tokens=12).text
    assert long["error"]["code"] == "context_length_exceeded"
    assert response["output"][0]["content"][0]["text"] == "A banana is yellow."
    types = pytest.importorskip("openai.types")
    types.chat.ChatCompletion.model_validate(twice, strict=True)
    types.Completion.model_validate(text, strict=True)


def test_openais_batch_lines_go_on_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, out: Path
) -> None:
    pytest.importorskip("starlette")
    if sys.platform == "win32":
        pytest.skip("Windows sends no SIGINT to one process")
    import infer.cli.openai_batch

    post, asked = infer.cli.openai_batch._post, []

    async def interrupted(app: Any, url: str, body: dict[str, Any]) -> Any:
        asked.append(body)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return await post(app, url, body)

    chat = [{"role": "user", "content": PROMPTS[1]}]
    write(prompts, *(batch_line(name, messages=chat, max_tokens=3) for name in "abcdef"))
    command = ("--file", prompts, "--out", out, "--max-batch", 1, "-q")
    with monkeypatch.context() as patch:
        patch.setattr(infer.cli.openai_batch, "_post", interrupted)
        result = run(*command)
    assert result.exit_code == 130
    assert f"answers are in {out}; the same command continues" in result.stderr
    before = read(out)
    assert len(before) < 6
    assert run(*command).exit_code == 0
    got = read(out)
    assert [answer["custom_id"] for answer in got] == [*"abcdef"]
    assert [answer for answer in got if answer in before] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": 1}, "custom_id must be text that is not empty, not 1."),
        ({"custom_id": "right"}, "The id 'right' is that of line 1 too"),
        ({"method": "GET"}, "method must be POST, not 'GET'."),
        ({"url": "/v1/moderations"}, "url must be one of /v1/chat/completions, "),
        ({"body": None}, "body must be an object, not None."),
        ({"body": {}}, "missing required field messages"),
        ({"body": {"messages": [{}], "top_p": 2}}, "top_p must be a number from 0 to 1"),
        ({"body": {"messages": [{}], "stream": True}}, "stream must be false"),
        (
            {"url": "/v1/embeddings", "body": {"input": "a"}},
            "max_tokens is not an option of /v1/embeddings",
        ),
        ({"prompt": "a"}, "prompt is not an option. There are: body, custom_id"),
    ],
)
def test_wrong_batch_lines_are_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, change: dict[str, Any], message: str
) -> None:
    pytest.importorskip("starlette")
    monkeypatch.setattr(infer.loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    chat = [{"role": "user", "content": "Why?"}]
    write(prompts, batch_line("right", messages=chat), batch_line("x", messages=chat) | change)
    result = run("--file", prompts, "-n", 3)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {prompts}, line 2: ")
    assert message in result.stderr
    write(prompts, batch_line("right", messages=chat), "another form")
    assert "line 2: Either all lines have a custom_id" in run("--file", prompts).stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes", "line 1 is not an answer"),
        ('{"id": 1}\n', "line 1 is not an answer"),
        ('{"id": 1, "text": ""}\n{"id": 9, "text": ""}\n', "line 2 has the id 9, which no prompt"),
        ('{"id": 1, "text": ""}\n{"id": 1, "text": ""}\n', "the id 1 for the second time"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(
    prompts: Path, out: Path, content: str, message: str
) -> None:
    write(prompts, "a", "b")
    out.write_text(content)
    result = run("--file", prompts, "--out", out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--file", "p", "words"), "Give either a prompt or --file, not both."),
        (("--file", "p", "--json"), "each answer is a JSON object anyway"),
        (("--out", "o", "words"), "--out needs --file"),
        (("--max-batch", "2", "words"), "--max-batch needs --file"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], message: str) -> None:
    result = run(*flags)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_file_of_the_prompts_is_not_written(prompts: Path) -> None:
    write(prompts, "a")
    result = run("--file", prompts, "--out", prompts.parent / "." / prompts.name)
    assert result.exit_code == 2
    assert read(prompts) == ["a"]
