"""Ray Serve: an ingress and two replicas in a cluster of this machine, on the software adapter."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from serving import wait_for

import infer
from infer import LLM, RequestError
from infer.hub import DEMO
from infer.server.prefixes import ANSWER, BLOCK, MOST, Prefixes

# The choice of the engine


def test_the_engine_that_has_most_of_a_prompt_comes_first() -> None:
    prefixes, prompt = Prefixes(), [*range(5 * BLOCK)]
    idle = {"a": 0, "b": 0, "c": 0}
    assert prefixes.best_first(prompt, None, idle) == ["a", "b", "c"]
    prefixes.sent(prompt[: 2 * BLOCK], None, "b")
    prefixes.sent([*prompt[: 4 * BLOCK], 0], None, "c")
    assert prefixes.best_first(prompt, None, idle) == ["c", "b", "a"]
    assert prefixes.best_first([1, *prompt], None, idle) == ["a", "b", "c"]  # from its start
    assert prefixes.best_first(prompt, "adapter", idle) == ["a", "b", "c"]
    prefixes.keep(["a", "b"])
    assert prefixes.best_first(prompt, None, idle) == ["b", "a", "c"]


def test_an_engine_that_is_busy_comes_last() -> None:
    prefixes, prompt = Prefixes(), [*range(4 * BLOCK)]
    prefixes.sent(prompt, None, "a")
    assert len(prompt) == ANSWER
    assert prefixes.best_first(prompt, None, {"b": 0, "a": 0}) == ["a", "b"]
    assert prefixes.best_first(prompt, None, {"b": 0, "a": 2}) == ["b", "a"]
    assert prefixes.best_first(prompt, None, {"b": 2, "a": 2}) == ["a", "b"]


def test_what_was_sent_long_ago_is_forgotten() -> None:
    prefixes, idle = Prefixes(), {"b": 0, "a": 0}
    for first in range(3):
        prefixes.sent([first, *range(BLOCK * (MOST // 2))], None, "a")
    assert prefixes.best_first([0, *range(BLOCK)], None, idle) == ["b", "a"]
    assert prefixes.best_first([2, *range(BLOCK)], None, idle) == ["a", "b"]
    assert sum(map(len, prefixes._sent.values())) <= MOST


# The application

STORY = "Once upon a time"
ENDLESS = {"2": -100, "3": -100}  # no end of turn
# As `serve run` has them, but for the names.
OPTIONS: dict[str, Any] = {"model": DEMO, "replicas": "2", "gpus": "0", "max_batch": "4"}
OPTIONS |= {"served_name": ["fox", "red", "*"]}
DRAFT = {"draft": "demo-draft", "speculate": "draft"}

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from infer.server.ray import application

    ray.init(num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        serve.start(http_options={"port": 8412})
        serve.run(application(OPTIONS | DRAFT))
        yield "http://127.0.0.1:8412"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with infer.load(DEMO, max_batch=1) as llm:
        yield llm


def ask(address: str, path: str, **body: Any) -> Iterator[bytes]:
    """The lines of the answer."""
    data = json.dumps(body).encode() if body else None
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, data, headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        yield from response


def answer(address: str, path: str, **body: Any) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(b"".join(ask(address, path, **body)))
    return whole


def pieces(lines: Iterator[bytes]) -> Iterator[str]:
    for line in lines:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event
            yield event["choices"][0]["text"]


def drafts(lines: Iterator[bytes]) -> Iterator[float]:
    for line in lines:
        if line.startswith(b"vllm:spec_decode_num_drafts_total{"):
            yield float(line.split()[1])


@pytest.mark.full
def test_answers_are_those_of_the_model(address: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": "My cat is called Milo. What is my cat called?"}]
    whole = answer(address, "/v1/chat/completions", messages=messages)
    assert whole["choices"][0]["message"]["content"] == llm.chat(messages).text
    asked: dict[str, Any] = {"prompt": STORY, "max_tokens": 20}
    lines = ask(address, "/v1/completions", **asked, stream=True)
    assert "".join(pieces(lines)) == llm.generate(STORY, max_tokens=20).text
    asked |= {"temperature": 1.5, "seed": 3, "n": 2}
    expected = llm.generate(STORY, max_tokens=20, temperature=1.5, seed=3, n=2)
    choices = answer(address, "/v1/completions", **asked)["choices"]
    assert [choice["text"] for choice in choices] == [sample.text for sample in expected]
    assert answer(address, "/health") == {"status": "ok", "webgpu": "wgpu-native"}
    wait_for(lambda: any(drafts(ask(address, "/metrics"))))  # of the replica that answered
    models = answer(address, "/v1/models")["data"]
    assert [each["id"] for each in models] == ["fox", "red"]
    assert models[0]["max_model_len"] == llm.context
    for name in ("red", "another"):
        whole = answer(address, "/v1/completions", model=name, prompt=STORY, max_tokens=1)
        assert whole["model"] == ("red" if name == "red" else "fox")


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [5000]}, "vocabulary of 2048 tokens"),
        ({"prompt": [5] * 2000}, "maximum context length is 1024"),
        ({"messages": [{"role": "user"}]}, "content"),
    ],
)
def test_errors_are_those_of_the_model(address: str, body: Any, message: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with pytest.raises(urllib.error.HTTPError) as caught:
        answer(address, path, **body)
    assert caught.value.code == 400
    assert message in json.loads(caught.value.read())["error"]["message"]


@pytest.mark.full
def test_a_prompt_goes_where_it_is_cached(address: str) -> None:
    begin = [i % 500 + 10 for i in range(300)]
    cached = []
    for last in range(4):
        usage = answer(address, "/v1/completions", prompt=[*begin, last + 20], max_tokens=1)[
            "usage"
        ]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 300, 300, 300]


@pytest.mark.full
def test_answers_of_a_replica_that_is_killed_go_on(address: str, llm: LLM) -> None:
    import ray

    prompts = [STORY, "The cat sat", "One day a fox", "Rosa"]
    options: dict[str, Any] = {"max_tokens": 150, "logit_bias": ENDLESS}
    bias = {int(token): value for token, value in ENDLESS.items()}
    expected = [llm.generate(p, max_tokens=150, logit_bias=bias).text for p in prompts]
    streams = [
        pieces(ask(address, "/v1/completions", prompt=p, stream=True, **options)) for p in prompts
    ]
    first = [next(stream) for stream in streams]
    name = next(
        each
        for each in ray.util.list_named_actors(all_namespaces=True)
        if "#engine#" in each["name"]
    )
    ray.kill(ray.get_actor(**name))
    assert [one + "".join(rest) for one, rest in zip(first, streams, strict=True)] == expected
    answer(address, "/v1/completions", prompt=STORY, max_tokens=1)


@pytest.mark.full
def test_an_update_cuts_nothing_off(address: str) -> None:
    from ray import serve

    from infer.server.ray import application

    over, failed, count = threading.Event(), list[Exception](), 0

    def keep_asking() -> None:
        nonlocal count
        while not over.is_set():
            try:
                lines = ask(address, "/v1/completions", prompt=STORY, max_tokens=20, stream=True)
                assert "".join(pieces(lines))
                count += 1
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        serve.run(application(OPTIONS | {"context": "512"}))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert count > 3
    wait_for(lambda: answer(address, "/v1/models")["data"][0]["max_model_len"] == 512)


def test_options_that_there_are_not() -> None:
    pytest.importorskip("ray")
    from infer.server.ray import application

    for wrong in ({}, {"model": "demo", "replica": 2}, {"model": "demo", "replicas": "two"}):
        with pytest.raises(RequestError, match="no options of the application"):
            application(wrong)
    with pytest.raises(RequestError, match=r"none\.jinja cannot be read"):
        application({"model": DEMO, "chat_template": "none.jinja"})
    with pytest.raises(RequestError, match="there is no model to draft with"):
        application({"model": DEMO, "speculate": "draft"})
    with pytest.raises(RequestError, match="max_batch must be at most 64"):
        application({"model": DEMO, "max_batch": 65})
    for names in ("", ["a", ""]):
        with pytest.raises(RequestError, match="served_name must not be empty"):
            application({"model": DEMO, "served_name": names})


def test_one_name_or_several() -> None:
    pytest.importorskip("ray")
    import msgspec

    from infer.server.ray import Options

    for given, expected in ((None, ()), ("a", ("a",)), (["a", "b", "*"], ("a", "b", "*"))):
        own = {} if given is None else {"served_name": given}
        options = msgspec.convert({"model": DEMO, **own}, Options, strict=False)
        assert options.of_server().names == expected
