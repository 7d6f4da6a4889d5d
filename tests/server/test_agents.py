"""What coding agents send, set up by `infer connect`: a question, and what came of a tool's call.

The requests of `tests/data/agents` were recorded from Claude Code 2.1.332, Codex 0.169.0, opencode
1.18.33, Qwen Code 0.24.4, Continue 1.5.47 and Cline 3.0.65. Long texts in them are replaced."""

from __future__ import annotations

import json
from typing import Any

import places
import pytest
from serving import CHAT, Chunk, Scripted, ask, fake_service, serving

RECORDED = places.DATA / "agents"
PATHS = {"claude-code": "/v1/messages?beta=true", "codex": "/v1/responses"}
WARNED = {
    "claude-code": "There is no parameter 'context_management' here. It was ignored.",
    "codex": "Tools of the type 'web_search' are not here. It was left out.",
}
# The two requests of which the second has what the first has, and more.
GROWS = {"claude-code": (0, 1), "codex": (0, 1), "opencode": (1, 2)}


def told(agent: str) -> Scripted:
    """The engine that has been asked what the agent asked for."""
    engine = Scripted(Chunk("ok", 1))
    with serving(fake_service(engine, names=["tiny"])) as address:
        for body in json.loads((RECORDED / f"{agent}.json").read_text()):
            response, data = ask(address, PATHS.get(agent, CHAT), body)
            assert response.status == 200, data
            assert response.getheader("X-Infer-Warning") == WARNED.get(agent)
            assert b'"type":"error"' not in data
    return engine


def names(tools: Any) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def test_all_agents_are_here() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == {*GROWS, "qwen-code", "continue", "cline"}


@pytest.mark.parametrize("agent", ["qwen-code", "continue", "cline"])
def test_requests_are_understood(agent: str) -> None:
    prompts = [prompt for prompt, *_ in told(agent).asked if isinstance(prompt[0], dict)]
    assert len(prompts) == (2 if agent == "qwen-code" else 1)


@pytest.mark.parametrize("agent", GROWS)
def test_the_prompt_of_a_conversation_grows_at_its_end(agent: str) -> None:
    engine = told(agent)
    asked: list[Any] = [each for each in engine.asked if isinstance(each[0][0], dict)]
    (first, before), (then, after) = (asked[i] for i in GROWS[agent])
    assert after == before  # the functions that the template shows, too
    assert then[: len(first)] == first
    call, result = then[len(first) :]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == "call_1"
    assert not [each for each in then if "billing" in json.dumps(each)]
    called = call["tool_calls"][0]["function"]["name"]
    assert called in names(after["tools"])
    tools: Any = engine.tools[GROWS[agent][1]]
    unlisted = names(tools["tools"]) - names(after["tools"])
    assert unlisted == ({"WebFetch", "NotebookEdit"} if agent == "claude-code" else set())
