"""Options by their names: what type checkers see, and what a wrong name is answered with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import places
import pytest

import infer
from infer import boundaries, calls, keywords
from infer.calls import check_names
from infer.keywords import LOAD_NAMES, AnswerOptions, LoadOptions, Options
from infer.sampling import OF_CALLS, SamplingOptions, SamplingParams

ROOT = places.ROOT


def test_sampling_options_are_the_fields_of_the_parameters() -> None:
    assert get_type_hints(SamplingOptions) == {
        field.name: get_type_hints(SamplingParams)[field.name] for field in fields(SamplingParams)
    }


def keyword_types(function: Any) -> dict[str, Any]:
    """The types of what a function takes by name alone."""
    parameters = signature(function).parameters.values()
    hints = get_type_hints(function)
    named = (p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return {name: hints[name] for name in named if name in hints}  # else it is one of the options


def test_options_of_answers_are_those_of_stream() -> None:
    named = keyword_types(infer.LLM.stream)
    assert get_type_hints(AnswerOptions) == named | get_type_hints(SamplingOptions)


def test_options_of_calls_are_all_others() -> None:
    others = AnswerOptions.__optional_keys__ - SamplingOptions.__optional_keys__
    assert {*OF_CALLS} == others | {"n"}


def test_options_of_both_are_those_of_load_and_stream() -> None:
    loading, both = keyword_types(infer.load), get_type_hints(Options)
    assert get_type_hints(LoadOptions).items() <= loading.items()
    assert set(keywords.LOAD_NAMES) == set(loading)
    answers = get_type_hints(AnswerOptions) | {"adapter": loading["adapter"]}
    assert both == answers | get_type_hints(LoadOptions)


def test_an_engine_in_a_process_of_its_own_gets_all_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: dict[str, Any] = {}

    def isolated(resolved: object, options: dict[str, Any], *others: object) -> None:
        passed.update(options)

    monkeypatch.setattr("infer.loading._isolated", isolated)
    infer.load("demo", draft="demo-draft", isolate=True)
    # Not in the options of the engine.
    here = {"chat_template", "revision", "offline", "isolate", "host_memory", "progress"}
    assert passed.keys() | here == {*LOAD_NAMES}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (infer.LLM.generate, AnswerOptions),
        (infer.LLM.chat, AnswerOptions),
        (infer.LLM.stream, AnswerOptions),
        (infer.LLM.agenerate, AnswerOptions),
        (infer.LLM.achat, AnswerOptions),
        (infer.LLM.astream, AnswerOptions),
        (infer.generate, Options),
        (infer.chat, Options),
        (infer.stream, Options),
    ],
)
def test_signatures_name_all_options_for_completion(function: Any, options: Any) -> None:
    parameters = signature(function).parameters
    assert options.__optional_keys__ <= parameters.keys()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    assert parameters["temperature"].annotation == "float | None"


def test_the_module_lists_its_public_names_alone() -> None:
    import infer.kernels.gpu.device  # which becomes an attribute of the module

    assert set(dir(infer)) == {*infer.__all__, "__version__"}


PROGRAM = """
from collections.abc import Sequence
from pathlib import Path

import infer

def mine(ids: Sequence[int]) -> None: ...

with infer.load("demo", context=64, device=0, progress=print, engine={"fuse": False}) as llm:
    llm.generate("a", temperature=0.5, top_k=3, stop="b", logit_bias={1: 2.0}, max_tokens=3)
    llm.chat([{"role": "user", "content": "a"}], template_args={"enable_thinking": False})
    llm.generate([1, 2], params=infer.SamplingParams(seed=1), adapter=None)
    for chunk in llm.stream("a", seed=1, stop=["b", "c"], logits_processor=lambda ids, x: x):
        mine([1] if chunk.token_id is None else [chunk.token_id])
    mine(llm.encode("a"))
    text: str = llm.decode([1, 2]) + str(llm.chat("a"))
    infer.generate(llm, "a", max_tokens=3)
infer.generate("demo", "a", temperature=1, context=64, adapter=Path("b"), quantize="q4")
infer.stream(Path("demo"), "a", top_p=0.9, offline=True, progress=False)
one: str = infer.chat("demo", "a", infer.SamplingParams(), context=64).text
several: list[infer.Result] = infer.generate("demo", ["a"], [infer.SamplingParams()])
several = llm.generate(prompts=["a", "b"], params=infer.SamplingParams(), max_batch=3)  # refused
several = llm.generate((text for text in "ab"), seed=3)
infer.embed("demo", ["a", "b"], pooling="mean", context=64).sum()
infer.load("demo", cache_memory="1GiB")

infer.load("demo", contxt=64)  # refused
infer.load("demo", context="64")  # refused
infer.load("demo", temperature=1)  # refused
infer.embed("demo", "a", temperature=1)  # refused
llm.generate("a", "b")  # refused
llm.embed("a", pool="mean")  # refused
llm.generate("a", temperatur=1)  # refused
llm.generate("a", temperature="hot")  # refused
llm.chat("a", max_new_tokens=3)  # refused
llm.stream("a", context=64)  # refused
llm.stream("a", adapter=Path("b"))  # refused
infer.generate("demo", "a", temperatur=1)  # refused
infer.stream("demo", "a", top_k="many")  # refused
infer.genrate("demo", "a")  # refused
"""


@pytest.mark.full
def test_mypy_refuses_wrong_options_and_no_others(tmp_path: Path) -> None:
    """With the project's settings: what mypy remembers of checking the project serves it too."""
    file, root = tmp_path / "program.py", ROOT
    file.write_text(PROGRAM)
    if not (ROOT / "infer" / "kernels").is_dir():  # mypy needs the links: as it is installed, then
        root = tmp_path / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "tests"))
        for package in ("kernels", "models"):
            (root / "infer" / package).unlink(missing_ok=True)
            (root / package).rename(root / "infer" / package)
    examples = (ROOT / "examples").glob("*.py")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", file, *examples]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert "examples" not in done.stdout
    refused = {int(number) for number in re.findall(r":(\d+): error: ", done.stdout)}
    lines = enumerate(PROGRAM.splitlines(), 1)
    expected = {number for number, line in lines if line.endswith("# refused")}
    assert refused == expected, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("temperatur", "temperature"),
        ("top_kk", "top_k"),
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_sequences", "stop"),
        ("temp", "temperature"),
        ("guided_json", "schema"),
        ("guided_choice", "choices"),
        ("max_length", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("bad_words_ids", "bad_words"),
        ("request_timeout", "timeout"),
        ("structured_outputs", "schema"),
        ("logits_processors", "logits_processor"),
        ("n_ctx", "context, of load()"),
        ("quantise", "quantize, of load()"),
    ],
)
def test_a_wrong_name_gets_its_likely_right_one(name: str, likely: str) -> None:
    known, loading = AnswerOptions.__optional_keys__, LoadOptions.__optional_keys__
    with pytest.raises(infer.RequestError) as raised:
        check_names(["seed", name], known, loading, "load()")
    assert str(raised.value) == f"{name} is not an option. Did you mean {likely}?"


def test_a_name_like_no_other_gets_all() -> None:
    with pytest.raises(infer.RequestError, match=r"^num_beams is not an option. There are: a, b.$"):
        check_names(["num_beams"], ["b", "a"], ["c"], "load()")


def test_names_of_other_engines_lead_to_ours() -> None:
    ours = {*Options.__optional_keys__, *keyword_types(infer.load)}
    arguments = {"model", "prompt", "messages", "texts", "params"}
    assert set(calls.ELSEWHERE.values()) <= ours | arguments | {"n"}
    assert not (calls.ELSEWHERE.keys() | calls.INSTEAD.keys() - {"n"}) & (ours | arguments)
    assert not calls.ELSEWHERE.keys() & calls.INSTEAD.keys()


@pytest.mark.parametrize("name", sorted(calls.INSTEAD))
def test_what_has_no_name_here_gets_what_to_do_instead(name: str) -> None:
    for known, others in ((AnswerOptions.__optional_keys__, LOAD_NAMES), (LOAD_NAMES, ())):
        with pytest.raises(infer.RequestError) as raised:
            check_names([name], known, others, "load()")
        text = str(raised.value)
        assert text.startswith(f"{name} is not an option. ")
        assert text.endswith((".", "]."))
        assert "Did you mean" not in text
        assert "{" not in text.replace('{"role"', "")


def both(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
    return a, b, c


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, "both() needs a: both(a)."),
        ((1, 2, 3), {}, "both() takes a, b without a name: give everything else as name=value."),
        ((1,), {"a": 2}, "a was given twice: by its place, and by its name."),
        ((1,), {"cc": 2}, "cc is not an option. Did you mean c?"),
        ((), {"d": 2}, "d is an option of others()."),
    ],
)
def test_a_call_that_does_not_fit_is_an_error_of_ours(
    args: tuple[int, ...], options: dict[str, int], message: str
) -> None:
    function = boundaries.checked((), ("d",), "others()", renamed={"second": "b"})(both)
    assert function(1, c=4) == (1, 2, 4)
    assert function(1, **{"second": 5}) == (1, 5, 3)  # type: ignore[arg-type]
    with pytest.raises(infer.RequestError) as raised:
        function(*args, **options)
    assert str(raised.value) == message


def test_a_type_error_of_a_function_itself_stays_one() -> None:
    @boundaries.checked()
    def wrong(a: Any) -> Any:
        return a + "b"

    with pytest.raises(TypeError, match="unsupported operand"):
        wrong(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 5}, r"max_new_tokens is not an option. Did you mean max_tokens\?"),
        ({"n": 4}, r"n is an option of generate\(\)"),
        ({"tools": []}, r"tools is an option of generate\(\)"),
        ({"tensor_parallel_size": 2}, "runs on one GPU"),
    ],
)
def test_names_of_sampling_params(options: dict[str, Any], message: str) -> None:
    with pytest.raises(infer.RequestError, match=message):
        SamplingParams(**options)
    with pytest.raises(infer.RequestError, match="takes nothing without its name"):
        SamplingParams(0.7)  # type: ignore[misc]
