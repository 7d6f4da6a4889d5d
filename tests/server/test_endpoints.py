"""The server's smaller endpoints, and what stands before all of them."""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import invoke

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from serving import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    JSON,
    MESSAGES,
    STORY,
    FakeEngine,
    answer,
    ask,
    connect,
    fake_service,
    serving,
    streamed,
    wait_for,
)

from infer import LLM, DeviceError
from infer.server.engine import LLMClient
from infer.server.service import ServerOptions, Service
from infer.text.infill import Infill, find_infill
from infer.text.pieces import PIECE

pytestmark = pytest.mark.demo

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def service(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = tmp_path_factory.mktemp("caches")
    return Service(LLMClient(llm), ServerOptions(cache_folder=folder))


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


# Embeddings


def test_embeddings_are_those_of_the_model(address: str, llm: LLM) -> None:
    texts = ["A cat", "A small dog"]
    expected = llm.embed(texts)
    for given in (texts, [llm.encode(text) for text in texts]):
        reply = answer(address, EMBEDDINGS, input=given)
        assert [each["index"] for each in reply["data"]] == [0, 1]
        vectors = np.array([each["embedding"] for each in reply["data"]])
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
    tokens = sum(len(llm.encode(text)) for text in texts)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    (one,) = answer(address, EMBEDDINGS, input=texts[0], encoding_format="base64")["data"]
    raw = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    np.testing.assert_allclose(raw, expected[0], atol=1e-5)


def test_openais_client_embeds(address: str, llm: LLM) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        made = client.embeddings.create(model="demo", input="A cat")  # as base64, unless asked
        np.testing.assert_allclose(made.data[0].embedding, llm.embed("A cat"), atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="256 dimensions, and no others"):
            client.embeddings.create(model="demo", input="A cat", dimensions=64)


def test_who_embeds_by_a_model_that_is_not_made_for_it_is_told(address: str) -> None:
    response, _ = ask(address, EMBEDDINGS, {"input": "a"})
    assert "say nothing of embeddings" in (response.getheader("X-Infer-Warning") or "")
    with serving(fake_service(FakeEngine())) as made_for_it:
        response, _ = ask(made_for_it, EMBEDDINGS, {"input": "a"})
    assert response.getheader("X-Infer-Warning") is None


def test_many_texts_are_embedded_in_parts() -> None:
    engine = FakeEngine()
    with serving(fake_service(engine)) as address:
        reply = answer(address, EMBEDDINGS, input=["a"] * 40, model="sql")
    assert len(reply["data"]) == 40
    parts = [asked for asked in engine.asked if asked[1] == "sql"]
    assert [len(texts) for texts, _ in parts] == [16, 16, 8]


# Tokens


def test_tokens_of_texts_and_chats(address: str, llm: LLM) -> None:
    ids = llm.encode(STORY)
    reply = answer(address, "/tokenize", prompt=STORY, return_token_strs=True)
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (ids, len(ids), 1024)
    assert "".join(reply["token_strs"][1:]) == STORY
    bare = answer(address, "/tokenize", prompt=STORY, add_special_tokens=False)["tokens"]
    assert [llm.tokenizer.bos_token_id, *bare] == ids
    chat = answer(address, "/tokenize", messages=MESSAGES)["tokens"]
    assert chat == llm.encode(MESSAGES)
    begun = answer(address, "/tokenize", messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert begun == chat[: len(begun)] != chat
    text = answer(address, "/detokenize", tokens=bare)["prompt"]
    assert text == STORY
    assert "|>" in answer(address, "/detokenize", tokens=chat)["prompt"]


# Behaviour that all APIs share

MESSAGES_PATH, RESPONSES = "/v1/messages", "/v1/responses"
ANTHROPIC = {"max_tokens": 9}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, {"messages": [user({"type": "image_url", "image_url": {}})]}, "image_url"),
        ("/tokenize", {"messages": [user({"type": "input_audio"})]}, "input_audio"),
        (MESSAGES_PATH, {"messages": [user({"type": "document"})]}, "document"),
        (MESSAGES_PATH, {"messages": [user({"type": "image"}), *MESSAGES]}, "image"),
        (MESSAGES_PATH, {"messages": MESSAGES, "system": [{"type": "image"}]}, "image"),
        (
            f"{MESSAGES_PATH}/count_tokens",
            {"messages": [user({"type": "server_tool_use", "id": "s", "name": "x"})]},
            "server_tool_use",
        ),
        (RESPONSES, {"input": [user({"type": "input_file"})]}, "input_file"),
        (RESPONSES, {"input": [*MESSAGES, {"type": "shell_call_output"}]}, "shell_call_output"),
        (RESPONSES, {"input": [{"type": "compaction"}, *MESSAGES]}, "compaction"),
        ("/api/chat", {"messages": [{**MESSAGES[0], "images": ["aGk="]}]}, "image"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "image"),
    ],
)
def test_content_that_is_no_text(address: str, path: str, body: dict[str, Any], kind: str) -> None:
    if path == MESSAGES_PATH:
        body = ANTHROPIC | body
    response, data = ask(address, path, body)
    error = json.loads(data)["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert response.status == 400
    assert message == f"Content of the type '{kind}' is not supported: only text is."


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_refusal_is_text(path: str) -> None:
    engine = FakeEngine()
    part = {"type": "refusal", "refusal": "No."}
    given = [{"content": [part]}, {"content": None, "refusal": "No."}, {"content": "Yes."}]
    messages = [{"role": "assistant", **each} for each in given]
    with serving(fake_service(engine)) as address:
        assert ask(address, path, {"messages": [*messages, *MESSAGES]})[0].status == 200
    told = [each["content"] for each in engine.asked[0][0]]
    assert told[:3] == [[{"type": "text", "text": "No."}], "No.", "Yes."]


def test_what_servers_of_others_did_in_old_turns_is_left_out() -> None:
    engine = FakeEngine()
    reference = {"type": "tool_reference", "tool_name": "f"}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [reference]}
    searched = [{"type": "server_tool_use"}, {"type": "web_search_tool_result"}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [*searched, {"type": "text", "text": "a"}, *searched]},
        user(found),
        *MESSAGES,
    ]
    with serving(fake_service(engine)) as address:
        response, _ = ask(address, MESSAGES_PATH, {**ANTHROPIC, "messages": messages})
        assert response.status == 200
        assert (response.getheader("X-Infer-Warning") or "").split(". ") == [
            "Content of the type 'server_tool_use' was left out",
            "Content of the type 'web_search_tool_result' was left out",
            "A tool_reference names 'f', which is not among the tools",
            "It was left out.",
        ]
    assert engine.asked[0][0] == [
        *MESSAGES,
        {"role": "assistant", "content": "a"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        *MESSAGES,
    ]


def test_the_priority_of_a_request_reaches_the_engine() -> None:
    """In APIs whose requests have one in vLLM; it is 0 in others, and without it."""
    engine = FakeEngine()
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "a", "n": 2}),
        (RESPONSES, {"input": "a"}),
    ]
    with serving(fake_service(engine)) as address:
        for path, body in bodies:
            for own in ({"priority": -3}, {"priority": None}, {}):
                assert ask(address, path, body | own)[0].status == 200
        assert ask(address, MESSAGES_PATH, {**ANTHROPIC, "messages": MESSAGES})[0].status == 200
        response, data = ask(address, RESPONSES, {"input": "a", "priority": "1"})
        assert (response.status, json.loads(data)["error"]["param"]) == (400, "priority")
    assert engine.priorities == [-3, 0, 0, -3, -3, 0, 0, 0, 0, -3, 0, 0, 0]


def test_what_is_null_is_absent(address: str) -> None:
    """At every depth, but in schemas."""
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    schema = {"enum": [None]}
    form = {"name": "x", "schema": schema, "strict": None}
    text = {"type": "text", "text": "a", "cache_control": None}
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": None}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": None, "content": None}
    ollama = {"role": "user", "content": "a", "images": None, "tool_calls": None, "thinking": None}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (
            CHAT,
            {
                "messages": [{**MESSAGES[0], "name": None}],
                "tools": [{"type": "function", "function": function}],
                "response_format": {"type": "json_schema", "json_schema": form},
                "stream": None,
                "structured_outputs": {"json_object": None},
            },
        ),
        (
            MESSAGES_PATH,
            {
                **ANTHROPIC,
                "messages": [
                    user(text),
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "a", "signature": None},
                            used,
                        ],
                    },
                    user(result),
                ],
                "system": [text],
                "tools": [{"name": "f", "description": None, "input_schema": {}, "type": None}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
        ),
        (
            RESPONSES,
            {
                "input": [{"role": "user", "content": "a", "summary": None, "type": None}],
                "tools": [{"type": "function", **function}],
                "text": {"format": {"type": "json_schema", "schema": schema, "strict": None}},
                "include": None,
            },
        ),
        ("/api/chat", {"messages": [ollama], "format": schema, "stream": False, "tools": None}),
        ("/api/generate", {"prompt": "a", "system": None, "images": None, "suffix": None}),
    ]
    for path, body in bodies:
        response, data = ask(address, path, body)
        assert response.status == 200, data
        if "generate" not in path:
            assert b"null" in data  # the only answer that is valid


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch="


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (f"{BILLING}36ee5;", ""),
        (f"{BILLING}36ee5;\n\nBe brief.", "Be brief."),
        (f"{BILLING}36ee5; Be brief; a=b; or not.\nBe kind.", "Be brief; a=b; or not.\nBe kind."),
        (f"Be brief.\n{BILLING.upper()}0;\nBe kind.", "Be brief.\nBe kind."),
        (f"Be brief, not {BILLING}0;", f"Be brief, not {BILLING}0;"),
        ("X-Anthropic-Billing-Header: what is that?", "X-Anthropic-Billing-Header: what is that?"),
    ],
)
def test_the_fields_of_a_line_for_bills_are_no_prompt(given: str, left: str) -> None:
    engine = FakeEngine()
    asked = {"role": "user", "content": given}  # which is another's own text
    system = {"role": "system", "content": given}
    parts = {"role": "system", "content": [{"type": "text", "text": given}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [system, asked]}),
        (CHAT, {"messages": [parts, asked]}),
        ("/tokenize", {"messages": [system, asked]}),
        (MESSAGES_PATH, {**ANTHROPIC, "system": given, "messages": [asked]}),
        (MESSAGES_PATH, {**ANTHROPIC, "system": parts["content"], "messages": [asked]}),
        (f"{MESSAGES_PATH}/count_tokens", {"system": given, "messages": [asked]}),
        (RESPONSES, {"instructions": given, "input": given}),
        (RESPONSES, {"input": [system, asked]}),
        ("/api/chat", {"messages": [system, asked]}),
    ]
    with serving(fake_service(engine)) as address:
        for path, body in bodies:
            assert ask(address, path, body)[0].status == 200
    prompts = [prompt for prompt, *_ in engine.asked if isinstance(prompt[0], dict)]
    own = [{**parts, "content": [{"type": "text", "text": left}]}] if left else []
    assert prompts.pop(1) == [*own, asked]
    expected = [{"role": "system", "content": left}, asked] if left else [asked]
    assert prompts == [expected] * (len(bodies) - 1)


@pytest.mark.parametrize("rest", ["", "Be brief."])
def test_the_line_for_bills_is_no_prompt_in_later_system_messages(rest: str) -> None:
    engine = FakeEngine()
    first, last = ({"role": "user", "content": text} for text in "ab")
    text = f"{BILLING.title()}1; {rest}"
    parts = [{"type": "text", "text": f"{BILLING}1;"}, {"type": "text", "text": rest}]
    parts = parts if rest else parts[:1]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [first, {"role": "developer", "content": text}, last]}),
        (
            MESSAGES_PATH,
            ANTHROPIC | {"messages": [first, {"role": "system", "content": text}, last]},
        ),
        (
            MESSAGES_PATH,
            ANTHROPIC | {"messages": [first, {"role": "system", "content": parts}, last]},
        ),
        (RESPONSES, {"input": [first, {"role": "developer", "content": text}, last]}),
    ]
    with serving(fake_service(engine)) as address:
        for path, body in bodies:
            assert ask(address, path, body)[0].status == 200
    prompts = [prompt for prompt, *_ in engine.asked if isinstance(prompt[0], dict)]
    for prompt in prompts:
        assert prompt[:1] + prompt[-1:] == [first, last]
        assert [each["content"] for each in prompt[1:-1]] == [rest] * bool(rest)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": []}),
        ("/tokenize", {"messages": []}),
        (MESSAGES_PATH, {**ANTHROPIC, "messages": [], "system": "Be brief."}),
        (f"{MESSAGES_PATH}/count_tokens", {"messages": []}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": [], "instructions": ""}),
    ],
)
def test_nothing_to_answer(address: str, path: str, body: dict[str, Any]) -> None:
    response, data = ask(address, path, body)
    assert response.status == 400, data


# Completions


def test_prompts_are_echoed_with_log_probabilities(address: str, llm: LLM) -> None:
    logits = llm.logits(STORY).astype(np.float64)
    ids = llm.encode(STORY)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [logprobs[i, token] for i, token in enumerate(ids[1:])]
    asked: dict[str, Any] = {"prompt": [ids, ids], "echo": True, "logprobs": 1, "n": 2}
    alone = answer(address, COMPLETIONS, **asked, max_tokens=0)
    assert [choice["text"] for choice in alone["choices"][:2]] == ["<|bos|>" + STORY] * 2
    assert alone["usage"]["completion_tokens"] == 0
    made = llm.generate(STORY, max_tokens=3)
    whole = answer(address, COMPLETIONS, **asked, max_tokens=3)["choices"]
    assert whole[0]["text"] == "<|bos|>" + STORY + made.text
    text = answer(address, COMPLETIONS, prompt=STORY, echo=True, max_tokens=3)["choices"][0]
    assert text["text"] == STORY + made.text
    for choice, more in ((alone["choices"][3], 0), (whole[3], 3)):
        written = choice["logprobs"]
        assert len(written["tokens"]) == len(ids) + more
        assert written["token_logprobs"][0] is written["top_logprobs"][0] is None
        assert written["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        lengths = np.cumsum([len(token) for token in written["tokens"]])
        assert written["text_offset"] == [0, *lengths[:-1]]
    pieces = [e["choices"][0] for e in streamed(address, COMPLETIONS, **asked, max_tokens=3)]
    mine = [piece for piece in pieces if piece["index"] == 3]
    assert "".join(piece["text"] for piece in mine) == whole[3]["text"]
    offsets = [piece["logprobs"]["text_offset"] for piece in mine if piece["logprobs"]]
    assert [each for part in offsets for each in part] == whole[3]["logprobs"]["text_offset"]


def test_a_suffix_is_for_models_that_fill_in_the_middle() -> None:
    engine = FakeEngine()
    engine.infill = Infill("<P>", "<S>", "<M>")  # type: ignore[assignment]
    with serving(fake_service(engine)) as address:
        answer(address, COMPLETIONS, prompt="a", suffix="b")
    assert engine.asked[0][0] == "<P>a<S>b<M>"


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        ({"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}, "<|fim_prefix|>a<|fim_suffix|>b"),
        ({"[PREFIX]", "[SUFFIX]"}, "[SUFFIX]b[PREFIX]a"),
        ({"<fim_prefix>"}, None),
    ],
)
def test_how_models_fill_in_the_middle(tokens: set[str], prompt: str | None) -> None:
    found = find_infill(tokens.__contains__)
    assert (
        None if found is None else found.text("a", "b").removesuffix("<|fim_middle|>")
    ) == prompt


# Metrics


PARTS = ("queue", "prefill", "decode")


def test_metrics_count_what_was_done(llm: LLM) -> None:
    with serving(Service(LLMClient(llm), ServerOptions())) as address:
        whole = answer(address, CHAT, messages=MESSAGES)
        streamed(address, COMPLETIONS, prompt=STORY, max_tokens=4)
        _, data = ask(address, "/metrics")
    samples = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
        if "le" not in sample.labels
    }
    prompt, made = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
    expected = {
        "prompt_tokens_total": prompt + len(llm.encode(STORY)),
        "generation_tokens_total": made + 4,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": made - 1 + 3,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        "request_generation_tokens_sum": made + 4,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: samples[f"vllm:{name}", None] for name in expected} == expected
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:request_success_total", "length"] == 1
    # Each is a part of what a client has waited for.
    parts = [samples[f"vllm:request_{part}_time_seconds_sum", None] for part in PARTS]
    assert min(parts) > 0
    assert sum(parts) <= samples["vllm:e2e_request_latency_seconds_sum", None]
    assert sum(parts[:2]) <= samples["vllm:time_to_first_token_seconds_sum", None]
    cache = llm.stats().cache
    assert samples["vllm:prefix_cache_queries_total", None] == cache.lookups
    assert samples["vllm:prefix_cache_hits_total", None] == cache.hits


def test_metrics_tell_what_engines_say() -> None:
    with serving(fake_service(FakeEngine())) as address:
        _, data = ask(address, "/metrics")
    lines = data.decode().splitlines()
    assert 'vllm:num_requests_running{model_name="fake"} 1.0' in lines
    assert 'vllm:num_requests_waiting{model_name="fake"} 2.0' in lines
    assert 'vllm:kv_cache_usage_perc{model_name="fake"} 0.4' in lines
    assert 'vllm:state_places{model_name="fake"} 3.0' in lines
    assert 'vllm:state_places_used{model_name="fake"} 2.0' in lines
    assert 'vllm:window_pages{model_name="fake"} 9.0' in lines
    assert 'vllm:window_pages_used{model_name="fake"} 8.0' in lines
    config = (
        'vllm:cache_config_info{block_size="16",cache_dtype="q8",kv_cache_size_tokens="160",'
        'model_name="fake",num_gpu_blocks="10"} 1.0'
    )
    assert config in lines
    assert 'vllm:spec_decode_num_drafts_total{model_name="fake"} 4.0' in lines
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="fake"} 7.0' in lines
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="fake"} 3.0' in lines
    families = [line for line in lines if line.startswith("# TYPE ")]
    assert len(families) == len(set(families))  # who reads them refuses one that comes twice


def test_metrics_count_who_went_away() -> None:
    engine = FakeEngine(waits=True)
    service = fake_service(engine)
    with serving(service) as address:
        connection = connect(address)
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "x"}), JSON)
        wait_for(lambda: len(engine.asked) == 2)
        assert connection.sock is not None
        connection.sock.close()
        wait_for(lambda: service.admission.count == 0)
        _, data = ask(address, "/metrics")
    line = 'vllm:request_success_total{finished_reason="abort",model_name="fake"} 1.0'
    assert line in data.decode().splitlines()


# Parameters that are not known


def test_what_is_not_known_is_warned_of() -> None:
    engine = FakeEngine()
    body = {"prompt": "x", "mirostat": 1, "näme\n": 2, "user": "me", "service_tier": "flex"}
    for options, status in (({}, 200), ({"strict": True}, 400)):
        with serving(fake_service(engine, **options)) as address:
            response, data = ask(address, COMPLETIONS, body)
            assert response.status == status
            for stream in (False, True):
                told, _ = ask(address, COMPLETIONS, body | {"stream": stream})
                warning = told.getheader("X-Infer-Warning")
                expected = "There is no parameter 'mirostat' here. It was ignored. There is no"
                assert (warning or expected).startswith(expected)
                assert (warning is None) == (status == 400)
    assert json.loads(data)["error"]["code"] == "unknown_parameter"


def test_what_a_chat_template_leaves_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    user = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    engine.templates = {"default": user, "tool_use": "{{ tools }}{{ messages }}"}
    system = {"role": "system", "content": "Be brief."}
    tool = {"type": "function", "function": {"name": "f"}}
    told = "The chat template leaves messages of the role 'system' out of the prompt."
    with serving(fake_service(engine)) as address:
        for more in ({}, {"stream": True}):
            response, _ = ask(address, CHAT, {"messages": [system, *MESSAGES], **more})
            assert (response.status, response.getheader("X-Infer-Warning")) == (200, told)
        # The prompt does not have the line of bills in the first place.
        for text, noted in (("Be brief.", told), (BILLING + "1;", None)):
            body = {"system": text, "messages": MESSAGES, "max_tokens": 1}
            assert ask(address, "/v1/messages", body)[0].getheader("X-Infer-Warning") == noted
        for path, body in (
            ("/tokenize", {"messages": [system, *MESSAGES]}),
            ("/v1/messages/count_tokens", {"system": "Be brief.", "messages": MESSAGES}),
        ):
            assert ask(address, path, body)[0].getheader("X-Infer-Warning") == told
        for messages, tools in ((MESSAGES, []), ([system, *MESSAGES], [tool])):
            response, _ = ask(address, CHAT, {"messages": messages, "tools": tools})
            assert (response.status, response.getheader("X-Infer-Warning")) == (200, None)
    assert [text for text in caplog.messages if "template" in text] == [f"fake: {told}"]


def test_the_log_has_each_warning_once_and_not_without_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.server.service._MOST_NOTED", 3)
    tools = [{"type": "web_search"}, {"type": "tool_search"}]
    names = ["web_search", "tool_search"]
    left = [f"fake: Tools of the type '{name}' are not here. It was left out." for name in names]
    with serving(fake_service(FakeEngine())) as address:
        for more in ({}, {"stream": True}, {"a\nb": 1}, {"c": 1}):
            assert ask(address, RESPONSES, {"input": "x", "tools": tools, **more})[0].status == 200
    told = [text for text in caplog.messages if text.startswith("fake")]
    assert told == [*left, r"fake: There is no parameter 'a\nb' here. It was ignored."]


def test_an_argument_that_the_chat_template_does_not_read_is_told() -> None:
    engine = FakeEngine()
    engine.templates = {"default": "{{ messages }}{{ date }}"}
    with serving(fake_service(engine)) as address:

        def told(**more: Any) -> str | None:
            response, _ = ask(address, CHAT, {"messages": MESSAGES, **more})
            return response.getheader("X-Infer-Warning")

        for name, more in (
            ("reasoning_effort", {"reasoning_effort": "low"}),
            ("enable_thinking", {"chat_template_kwargs": {"enable_thinking": False}}),
        ):
            assert told(**more) == (
                f"The chat template does not read {name}, which therefore changes nothing. Other "
                "arguments that it reads: date."
            )
        assert told(reasoning_effort="none") is None  # as this model does
        assert told(chat_template_kwargs={"date": "today"}) is None


# Long prompts

CHATS = ("/v1/messages", "/v1/messages/count_tokens", CHAT, "/api/chat")


def asking(path: str, text: str) -> dict[str, Any]:
    """A request for that endpoint, with that text."""
    if path in CHATS:
        return {"messages": [{"role": "user", "content": text}], "model": "demo", "max_tokens": 1}
    if path in (EMBEDDINGS, "/api/embed", "/v1/responses"):
        return {"input": text, "model": "demo"}
    return {"prompt": text, "model": "demo"}


@pytest.fixture
def lengths(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that the tokenizers library is given."""
    own, lengths = llm.tokenizer._backend, list[int]()

    class Noting:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            lengths.append(len(texts[0]))
            return own.encode_batch(texts, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

    monkeypatch.setattr(llm.tokenizer, "_backend", Noting())
    return lengths


@pytest.mark.parametrize(
    "path",
    [CHAT, "/api/chat", COMPLETIONS, EMBEDDINGS, "/api/embed", "/api/generate", "/v1/responses"],
)
def test_a_prompt_beyond_the_context_is_not_read_to_its_end(
    address: str, service: Service, lengths: list[int], path: str
) -> None:
    text = "one two three " * 50_000
    response, data = ask(address, path, asking(path, text))
    assert response.status == 400
    assert b"tokens, and this model's maximum context length is 1024 tokens" in data
    assert b"has at least" in data
    assert sum(lengths) < 4 * PIECE < len(text) / 2
    assert service.bodies.nbytes == 0
    data = ask(address, path, asking(path, "one two three " * 2000))[1]
    assert b"has at least" not in data  # it was counted
    assert b"context length is 1024" in data


def test_anthropics_endpoints_count_a_prompt_beyond_the_context(address: str, llm: LLM) -> None:
    for text in ("one two three " * 50_000, "one two three " * 2000):
        tokens = len(llm.encode([{"role": "user", "content": text}]))
        body = asking(MESSAGES_PATH, text)
        assert answer(address, f"{MESSAGES_PATH}/count_tokens", **body) == {"input_tokens": tokens}
        response, data = ask(address, MESSAGES_PATH, body)
        assert response.status == 400
        told = f"prompt is too long: {tokens} tokens > {llm.context - 1} maximum"
        error = {"type": "invalid_request_error", "message": told}
        assert json.loads(data) == {"type": "error", "error": error}


# The patterns by which clients tell that a context is full, so that they compact it: Claude Code's,
# opencode's (also Cline's and Roo's), and what Codex compares the code with.
ANTHROPIC_PATTERN = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
OPENAI_PATTERN = r"maximum context length is \d+ tokens"


def test_clients_understand_that_a_prompt_is_too_long(address: str) -> None:
    text = "one two three " * 2000
    for stream in (False, True):
        for path, pattern in ((MESSAGES_PATH, ANTHROPIC_PATTERN), (CHAT, OPENAI_PATTERN)):
            response, data = ask(address, path, {**asking(path, text), "stream": stream})
            assert response.status == 400
            assert re.search(pattern, json.loads(data)["error"]["message"])
    response, data = ask(address, RESPONSES, asking(RESPONSES, text))
    assert response.status == 400
    assert re.search(OPENAI_PATTERN, json.loads(data)["error"]["message"])
    response, data = ask(address, RESPONSES, {**asking(RESPONSES, text), "stream": True})
    assert response.status == 200
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line[:6] == "data: "]
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in events] == kinds
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert re.search(OPENAI_PATTERN, failed["error"]["message"])


def test_a_long_text_has_all_its_tokens(address: str, llm: LLM, lengths: list[int]) -> None:
    text = "one two three " * 20_000
    found = answer(address, "/tokenize", prompt=text)
    assert len(lengths) > 4
    assert found["tokens"] == llm.tokenizer._backend.encode_batch([text])[0].ids


@pytest.mark.parametrize("path", ["/tokenize", CHAT])
def test_the_text_of_one_who_left_is_left(
    service: Service, address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """After the piece that is in work."""
    begun, left = threading.Event(), threading.Event()

    def endless(*_: Any) -> Iterator[list[int]]:
        begun.set()
        try:
            while True:
                time.sleep(0.001)
                yield []
        finally:
            left.set()

    monkeypatch.setattr(llm, "encode_pieces", endless)
    connection = connect(address)
    connection.request("POST", path, json.dumps(asking(path, "x" * 300_000)), JSON)
    assert begun.wait(60)
    assert service.bodies.nbytes > 300_000
    connection.close()
    assert left.wait(60)
    wait_for(lambda: service.bodies.nbytes == 0 and service.admission.count == 0)


def peak_of_memory() -> int:
    """Bytes, since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def forget_peak() -> int:
    """Bytes that are in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of memory cannot be reset here")
    return peak_of_memory()


@pytest.mark.full
@pytest.mark.parametrize("context", [1024, 131_072])
def test_the_largest_requests(
    llm: LLM, lengths: list[int], monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """Six of 15 MB at once, whose clients do not wait, as 100,000 messages and as one text, which
    takes 2.7 GB if the library is given it whole."""
    service = Service(LLMClient(llm), ServerOptions())
    monkeypatch.setattr(service.engine, "context", context)
    text = ("one two three " * 1_100_000)[:15_000_000]
    messages = [{"role": "user", "content": "x" * 100} for _ in range(100_000)]
    bodies = [{"messages": messages}, {"messages": [{"role": "user", "content": text}]}]
    with serving(service) as address:
        for body in map(json.dumps, bodies):
            lengths.clear()
            before = forget_peak()
            clients = [connect(address) for _ in range(6)]
            for client in clients:
                client.request("POST", CHAT, body, JSON)
            wait_for(lambda: lengths)
            assert ask(address, "/health")[0].status == 200
            assert answer(address, "/tokenize", prompt="x")["count"] == 2
            for client in clients[1:]:
                client.close()
            assert clients[0].getresponse().status == 400
            clients[0].close()
            wait_for(lambda: service.bodies.nbytes == 0)
            # The characters of a context, and a window more, for each text that was begun.
            assert sum(lengths) < 6 * (8 * context + 4 * PIECE)
            assert peak_of_memory() - before < 800 << 20
        if context == 1024:
            before = forget_peak()
            assert answer(address, "/tokenize", prompt=text)["count"] > 3_000_000
            assert peak_of_memory() - before < 1 << 30


# Keys, pages and the log


def test_options_of_the_server_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, templates = [], []
    (tmp_path / "own.jinja").write_text("{{ messages }}\n")

    def host(sources: Any, options: ServerOptions, *rest: Any, memory: Any) -> None:
        seen.append(options)
        templates.append(sources[0]._options["chat_template"])
        raise DeviceError("seen enough")

    # Not by its path: a test has imported the package anew.
    monkeypatch.setattr(import_module("infer.server.service"), "Host", host)
    flags = "--port 0 --api-key a --api-key b --cors-origin https://example.org --strict "
    flags += "--allowed-host example.org"
    assert (
        invoke(
            "serve", "demo", *flags.split(), "--served-name", "mine", "--served-name", "*"
        ).exit_code
        == 1
    )
    monkeypatch.setenv("INFER_API_KEY", "c d")
    own = ("--chat-template", tmp_path / "own.jinja")
    assert invoke("serve", "demo", "--port", "0", "--log-level", "debug", *own).exit_code == 1
    assert templates == [None, "{{ messages }}\n"]
    hosts = ["example.org", "127.0.0.1"]
    assert seen == [
        ServerOptions(
            ["mine", "*"], ["a", "b"], True, ["https://example.org"], allowed_hosts=hosts
        ),
        ServerOptions(api_keys=["c", "d"], allowed_hosts=["127.0.0.1"]),
    ]
    monkeypatch.delenv("INFER_API_KEY")
    for more, allowed in (([], None), (["--allowed-host", "example.org"], ["example.org"])):
        assert invoke("serve", "demo", "--port", "0", "--host", "0.0.0.0", *more).exit_code == 1
        assert seen.pop() == ServerOptions(allowed_hosts=allowed)
    assert invoke("serve", "demo", "--allowed-host", "https://example.org").exit_code == 2
    for origin in ("localhost", "https://example.org/", "https://Example.org"):  # never sent so
        assert invoke("serve", "demo", "--cors-origin", origin).exit_code == 2
    assert invoke("serve", "demo", "--log-level", "chatty").exit_code == 2


def test_the_cache_of_a_prompt_is_saved_by_a_name(llm: LLM, tmp_path: Path) -> None:
    """Of each API key apart, in one folder."""
    options = ServerOptions(api_keys=["first", "second"], cache_folder=tmp_path)
    prompt = "Once upon a time, a bird saved what it knew in a box. " * 4

    def sent(key: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        headers = {**JSON, "Authorization": f"Bearer {key}"}
        response, data = ask(address, path, body, headers)
        return response.status, json.loads(data)

    with serving(Service(LLMClient(llm), options)) as address:
        body = {"name": "story-1.0", "prompt": prompt}
        status, saved = sent("first", "/v1/cache/save", body)
        count = len(llm.encode(prompt))
        assert (status, saved) == (200, {"model": llm.name, "name": "story-1.0", "tokens": count})
        assert sent("first", "/v1/cache/load", {"name": "story-1.0"}) == (200, saved)
        chat = {"name": "chat", "messages": MESSAGES, "cache_salt": "a"}
        assert sent("first", "/v1/cache/save", chat)[0] == 200
        for key, name, salt in (("second", "story-1.0", None), ("first", "chat", None)):
            own = {"name": name} | ({} if salt is None else {"cache_salt": salt})
            status, data = sent(key, "/v1/cache/load", own)
            assert (status, data["error"]["message"]) == (404, f"No cache is saved as {name}.")
        assert sent("first", "/v1/cache/load", {"name": "chat", "cache_salt": "a"})[0] == 200
        assert len(list(tmp_path.iterdir())) == 2
        for name in ("", "../story", "a/b", ".hidden", "a" * 101, "a\\b", "ä"):
            for path, more in (("save", {"prompt": prompt}), ("load", {})):
                status, data = sent("first", f"/v1/cache/{path}", {"name": name, **more})
                assert status == 400
                assert "A name has up to 100 letters" in data["error"]["message"]
        status, data = sent("first", "/v1/cache/save", {"name": "neither"})
        assert (status, data["error"]["message"]) == (400, "Give either a prompt or messages.")
        (tmp_path / "damaged.cache").write_text("no")
    with serving(Service(LLMClient(llm), ServerOptions(cache_folder=tmp_path))) as address:
        status, data = sent("", "/v1/cache/load", {"name": "damaged"})
        assert status == 400
        assert "cannot be read" in data["error"]["message"]
    with serving(Service(LLMClient(llm), ServerOptions())) as address:
        status, data = sent("", "/v1/cache/load", {"name": "story"})
        assert status == 400
        assert "--cache-folder" in data["error"]["message"]


def test_keys_have_caches_of_their_own(llm: LLM) -> None:
    options = ServerOptions(api_keys=["one", "two"])
    body = {"prompt": [*llm.encode("Keys open doors and not other keys.")], "max_tokens": 1}

    def cached(key: str, **more: Any) -> int:
        sent = {**JSON, "Authorization": f"Bearer {key}"}
        _, data = ask(address, COMPLETIONS, body | more, sent)
        found: int = json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    with serving(Service(LLMClient(llm), options)) as address:
        whole = len(body["prompt"]) - 1
        assert [cached(key) for key in ("one", "two", "one", "two")] == [0, 0, whole, whole]
        assert [cached("one", cache_salt="mine") for _ in range(2)] == [0, whole]
        for headers in ({"x-api-key": "one"}, {"Authorization": "bearer two"}):
            assert ask(address, "/v1/models", headers=headers)[0].status == 200
        for path in ("/metrics", "/api/tags", "/tokenize"):
            assert ask(address, path)[0].status == 401
        for path in ("/health", "/docs", "/openapi.json"):
            assert ask(address, path, headers={})[0].status == 200


def test_pages_of_others_ask_where_they_may() -> None:
    asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,content-type"}
    name = "access-control-allow-origin"
    for origins, allowed in (((), None), (("https://example.org",), asks["Origin"])):
        options = {"cors_origins": origins, "api_keys": ["secret"]}
        with serving(fake_service(FakeEngine(), **options)) as address:
            before, _ = ask(address, COMPLETIONS, headers=asks, method="OPTIONS")
            assert before.getheader(name) == allowed
            sent = {**JSON, "Authorization": "Bearer secret", "Origin": asks["Origin"]}
            response, _ = ask(address, COMPLETIONS, {"prompt": "x"}, sent)
            assert (response.status, response.getheader(name)) == (200, allowed)
            sent["Origin"] = "https://other.example"
            assert ask(address, COMPLETIONS, {"prompt": "x"}, sent)[0].getheader(name) is None


def test_the_log_has_a_line_for_a_request_without_its_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "infer"), serving(fake_service(FakeEngine())) as address:
        answer(address, COMPLETIONS, prompt="hidden")
        ask(address, "/v1/none%0Aforged")
        ask(address, "/health")
    first, second = caplog.messages
    assert first.startswith("127.0.0.1 POST /v1/completions 200 ")
    assert second.startswith("127.0.0.1 GET /v1/none?forged 404 ")
    assert "hidden" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_tells_of_tokens_and_times(
    llm: LLM, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    prompt = f"{stream}ly, the log has a line."
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "n": 2, "stream": stream}
    service = Service(LLMClient(llm), ServerOptions())
    with caplog.at_level(logging.INFO, "infer"), serving(service) as address:
        for _ in range(2):
            assert ask(address, COMPLETIONS, body)[0].status == 200
    tokens = len(llm.encode(prompt))
    pattern = (
        r"127\.0\.0\.1 POST /v1/completions 200 (\S+)s: (\d+) tokens in, (\d+) of them cached, "
        r"(\d+) out; queue (\S+)s, prefill (\S+)s, decode (\S+)s"
    )
    lines = [re.fullmatch(pattern, text) for text in caplog.messages]
    found = [line.groups() for line in lines if line is not None]
    # Others of this model's tests have left the token that begins all prompts.
    assert [(int(a), max(1, int(b)), int(c)) for _, a, b, c, *_ in found] == [
        (tokens, 1, 6),
        (tokens, tokens - 1, 6),
    ]
    for whole, _, _, _, queue, prefill, decode in found:
        # Each is the longest of two answers, of which the one may have waited for the other.
        assert float(whole) >= max(float(queue), float(prefill), float(decode)) - 0.002 > -0.002


def test_the_log_tells_no_times_of_what_was_not_generated(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(LLMClient(llm), ServerOptions())
    with caplog.at_level(logging.INFO, "infer"), serving(service) as address:
        body = {"prompt": STORY, "max_tokens": 0, "echo": True}
        assert ask(address, COMPLETIONS, body)[0].status == 200
    (line,) = caplog.messages
    assert line.endswith(" 0 of them cached, 0 out; no token was generated")


# The documents


def test_answers_are_as_the_document_says(address: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(ask(address, "/openapi.json")[1])

    def check(path: str, schema: dict[str, Any], value: Any) -> None:
        whole = schema | {"components": document["components"]}
        jsonschema.Draft202012Validator(whole).validate(value)

    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": MESSAGES, "logprobs": True},
        COMPLETIONS: {"prompt": STORY, "logprobs": 1, "max_tokens": 2},
        EMBEDDINGS: {"input": "a"},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/api/chat": {"messages": MESSAGES, "stream": False},
        "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 2}},
        "/api/embed": {"input": ["a"]},
        "/api/embeddings": {"prompt": "a"},
        "/api/show": {"model": "demo"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/cache/save": {"prompt": STORY, "name": "a"},
        "/v1/cache/load": {"name": "a"},
    }
    asked = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = bodies.get(path) if method == "post" else None
            response, data = ask(address, path.replace("{name}", "demo"), body)
            assert response.status == 200, (path, data)
            content = operation["responses"]["200"]["content"]
            if "application/json" in content:
                check(path, content["application/json"]["schema"], json.loads(data))
            if body is not None:
                kind = operation["requestBody"]["content"]["application/json"]["schema"]
                check(path, kind, body)
                asked.add(path)
    assert asked == bodies.keys()


def test_the_page_of_documents_loads_nothing(address: str) -> None:
    response, data = ask(address, "/docs")
    assert (response.getheader("Content-Security-Policy") or "").startswith("default-src 'none'")
    page = data.decode()
    assert "POST /v1/chat/completions" in page
    assert "<script" not in page
    assert "http" not in page.replace("HTTP", "")


SHORT: dict[str, dict[str, Any]] = {  # what is generated ends soon
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1, "n": 1},
    COMPLETIONS: {"max_tokens": 1, "n": 1, "best_of": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/api/chat": {"options": {"num_predict": 1}},
    "/api/generate": {"options": {"num_predict": 1}},
}


@pytest.mark.full
def test_no_request_makes_the_server_fail(address: str) -> None:
    """Requests that the server's own document allows get no error 500."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    statuses: dict[str, set[int]] = {}
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()

        @settings(
            max_examples=30,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def holds(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body |= {"model": "demo", **SHORT.get(case.path, {})}
            status = case.call(timeout=300).status_code
            assert status < 500, case.as_curl_command()
            statuses.setdefault(case.path, set()).add(status)

        holds()
    served = [path for path, seen in statuses.items() if 200 in seen]
    assert len(served) > len(statuses) / 2


def test_an_answer_by_all_formats_is_the_same(address: str) -> None:
    chat = answer(address, CHAT, messages=MESSAGES)["choices"][0]["message"]["content"]
    message = answer(address, "/v1/messages", messages=MESSAGES, max_tokens=50)["content"][0][
        "text"
    ]
    reply = answer(address, "/api/chat", messages=MESSAGES, stream=False)["message"]["content"]
    (item,) = answer(address, "/v1/responses", input=MESSAGES)["output"]
    assert chat == message == reply == item["content"][0]["text"] == ANSWER
