"""scripts/replay.py: the session, what an ideal cache computes of it, and what an engine does."""

from __future__ import annotations

import json
import runpy
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import places
import pytest

from infer.models.loading.shapes import SHAPES
from infer.versions import versions

SCRIPTS = places.ROOT / "scripts"
REPLAY = runpy.run_path(str(SCRIPTS / "replay.py"))
SIZES = {"system": 40, "turns": 3, "result": 16, "answer": 6, "message": 5}
TINY = {
    "model_type": "llama",
    "vocab_size": 2100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def played(**sizes: int) -> dict[str, list[Any]]:
    """The requests of a session by their loads; answers count up from 10,000."""
    requests: dict[str, list[Any]] = {}
    answers = iter(range(10_000, 20_000))

    def send(request: Any) -> list[list[int]]:
        requests.setdefault(request.load, []).append(request)
        if request.cancelled:
            return [[]]
        return [[next(answers) for _ in range(SIZES["answer"])] for _ in request.prompts]

    REPLAY["Session"](REPLAY["Sizes"](**SIZES | sizes), 1000, send).play()
    return requests


def only(requests: list[Any]) -> list[int]:
    (request,) = requests
    (prompt,) = request.prompts
    return list(prompt)


def shared(a: list[int], b: list[int]) -> int:
    """How many first ids are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_a_session_is_the_same_each_time() -> None:
    requests = played()
    assert requests == played()
    prompts = [p for own in requests.values() for request in own for p in request.prompts]
    drawn = {i for i in chain.from_iterable(prompts) if i < 10_000}
    assert REPLAY["BESIDE"] not in drawn  # the stream beside shares nothing with any prompt
    assert max(drawn) < 1000


def test_each_load_is_what_agents_send() -> None:
    requests = played()
    growth = [request.prompts[0] for request in requests["growth by tool results"]]
    assert len(growth) == SIZES["turns"] + 4 + 8
    begin, system = 40 + 5, growth[0][:40]
    for before, after in pairwise(growth[:3]):  # the main conversation
        assert after[: len(before)] == before
        answer = after[len(before) : len(before) + 6]
        assert answer == list(range(answer[0], answer[0] + 6))
        assert answer[0] >= 10_000
        assert 2 <= len(after) - len(before) - 6 <= 16
    asked = growth[2]
    assert only(requests["the same again"]) == asked
    last = only(requests["last message edited"])
    assert last[:-5] == asked[: len(last) - 5]
    assert last[-5:] != asked[-5:]
    edits = [
        only(requests[f"message in the middle edited, {count} time"])
        for count in ("first", "second")
    ]
    at = shared(edits[0], asked)
    assert begin < at < len(asked) - 16  # behind the edit the conversation goes on
    assert shared(edits[1], asked) == shared(*edits) == at
    assert edits[0][at + 5 :] == edits[1][at + 5 :] == asked[-len(edits[0]) + at + 5 :]
    for count in ("2nd", "3rd", "after 5 others"):
        prompt = only(requests[f"new conversation, same system prompt: {count}"])
        assert (len(prompt), shared(prompt, asked)) == (begin, 40)
    for steps, before in ((4, growth[6]), (8, growth[14])):
        prompt = only(requests[f"reasoning of {steps} steps dropped"])
        assert shared(prompt, before) == begin
        said = [i for i in prompt if i >= 10_000]
        assert len(said) == (steps + 1) * 3  # of each answer the second half
        assert [i for i in before if i in set(said)] == said[:-3]
        results = [i for i in before[begin:] if i < 10_000]
        assert [i for i in prompt[begin:-5] if i < 10_000] == results
    turns = [request.prompts[0] for request in requests["two agents by turns"]]
    assert [shared(turns[i], turns[i + 2]) for i in range(4)] == [len(each) for each in turns[:4]]
    assert shared(turns[0], turns[1]) == 0
    sides = [len(request.prompts[0]) for request in requests["side request"]]
    assert sides == [30] * 4 + [300] * 4
    for length in (30, 300):
        prompt = only(requests[f"agent after 4 side requests of {length} tokens"])
        assert prompt[: len(turns[4])] == turns[4]
    (at_once,) = requests["8 sub-agents at once"]
    assert [len(prompt) for prompt in at_once.prompts] == [10 + 5] * 8
    assert {shared(at_once.prompts[0], prompt) for prompt in at_once.prompts[1:]} == {10}
    cut, again = requests["cancelled, sent again"]
    assert (cut.prompts, cut.cancelled, again.cancelled) == (again.prompts, True, False)
    assert system not in (cut.prompts[0][:40], turns[1][:40])


def test_the_ideal_by_hand() -> None:
    ideal = REPLAY["Ideal"]()
    assert ideal.rows([1, 2, 3]) == 3
    ideal.add([1, 2, 3])
    assert ideal.rows([1, 2, 3]) == 1  # the last is always computed
    assert ideal.rows([1, 2]) == 1
    assert ideal.rows([1, 2, 4, 3]) == 2
    assert ideal.rows([2, 2, 3]) == 3
    ideal.add([1, 2, 4, 5, 6, 7])
    assert ideal.rows([1, 2, 4, 5, 6, 8, 9]) == 2
    assert ideal.rows([1, 2, 3, 4, 5]) == 2


def test_a_session_on_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache of keys and values has every position, and computes what the ideal does."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(REPLAY["main"].__globals__, "RESULTS", tmp_path / "replay")
    sizes = {**SIZES, "system": 600}
    options = {"shape": "tiny", "context": 2048, "kv-dtype": "f32", "json": "tiny", **sizes}
    given = chain.from_iterable((f"--{name}", str(value)) for name, value in options.items())
    monkeypatch.setattr(sys, "argv", ["replay.py", *given])
    REPLAY["main"]()
    (path,) = (tmp_path / "replay").iterdir()
    report = json.loads(path.read_text())
    assert report["versions"] == versions()
    assert report["adapter"]
    assert (
        report["options"] | {"kv_dtype": "f32", "system": 600, "context": 2048}
        == (report["options"])
    )
    loads = {load["load"]: load for load in report["loads"]}
    expected = played(system=600)
    printed = capsys.readouterr().out
    for name, load in loads.items():
        assert name in printed
        prompts = [p for r in expected[name] if not r.cancelled for p in r.prompts]
        assert load["requests"] == len(load["ttft_seconds"]) == len(prompts)
        # Where it is cut depends on the pace, and up to 8 positions are not copied from a page.
        more = 8 if name == "cancelled, sent again" else 0
        assert 0 <= load["computed_rows"] - load["ideal_rows"] <= more, name
        median, p99, most = load["pauses"]
        assert 0 < median <= p99 <= most
    assert set(loads) == set(expected)
    ideal = {name: load["ideal_rows"] for name, load in loads.items()}
    assert ideal["the same again"] == 1
    assert ideal["last message edited"] == 5
    assert ideal["new conversation, same system prompt: 3rd"] == 5
    assert ideal["8 sub-agents at once"] == 600 // 4 + 8 * 5
    assert 0 < ideal["cancelled, sent again"] <= 605 // 2
    results = [len(p) for r in expected["two agents by turns"] for p in r.prompts]
    assert ideal["two agents by turns"] == sum(
        length - before - 6 + 1
        for length, before in zip(results, [605, 605, *results[:4]], strict=True)
    )
