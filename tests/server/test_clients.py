"""Clients of others, as people use them: a chat, a stream, a tool, an answer by a schema."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import places
import pytest

import infer
from infer import LLM
from infer.hub import DEMO

pytest.importorskip("pydantic")

import pydantic
from serving import ANSWER, MESSAGES, serving
from test_tool_calls import TEMPLATE, ForcedEngine

from infer.server.engine import Answer, LLMClient
from infer.server.service import ServerOptions, Service

pytestmark = [
    pytest.mark.full,
    pytest.mark.demo,
    pytest.mark.filterwarnings("default"),  # clients' own
]

QUESTION = MESSAGES[0]["content"]
ASKED = "How is the weather in Oslo?"
PET = '{"kind": "cat", "legs": 4}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Engine(ForcedEngine):
    """Answers with the texts that are still to come, then as the model does."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.texts: list[str] = []

    async def open(self, ids: Sequence[int], *others: Any) -> Answer:
        if self.texts:
            self.text = self.texts.pop(0)
            return await super().open(ids, *others)
        return await LLMClient.open(self, ids, *others)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with infer.load(DEMO, max_batch=4) as llm:
        yield Engine(llm)


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(Service(engine, ServerOptions(["demo"], keepalive=600))) as address:
        yield address


@pytest.fixture
def with_tools(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose template knows tools, which calls one and then answers."""
    monkeypatch.setitem(engine._llm.tokenizer.templates, "default", TEMPLATE)
    monkeypatch.setattr(engine, "texts", [CALL, "It rains."])


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


# litellm


@pytest.fixture
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network
    return pytest.importorskip("litellm")


def test_litellm(address: str, litellm: Any) -> None:
    options = {"model": "openai/demo", "api_base": f"{address}/v1", "api_key": "any"}
    whole = litellm.completion(messages=MESSAGES, **options)
    assert whole.choices[0].message.content == ANSWER
    assert whole.usage.completion_tokens > 0
    pieces = list(litellm.completion(messages=MESSAGES, stream=True, **options))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER
    hosted = {**options, "model": "hosted_vllm/demo"}
    assert litellm.completion(messages=MESSAGES, **hosted).choices[0].message.content == ANSWER
    embedded = litellm.embedding(input=["a cat", "a dog"], **options)
    assert len(embedded.data) == 2
    answer = litellm.responses(input=QUESTION, **options)
    assert answer.output[0].content[0].text == ANSWER


def test_litellm_as_anthropic_and_ollama(address: str, litellm: Any) -> None:
    for model in ("anthropic/demo", "ollama_chat/demo", "ollama/demo"):
        options = {"model": model, "api_base": address, "api_key": "any", "max_tokens": 40}
        assert litellm.completion(messages=MESSAGES, **options).choices[0].message.content == ANSWER
        pieces = list(litellm.completion(messages=MESSAGES, stream=True, **options))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER


# LangChain


def langchain_models(address: str) -> Iterator[Any]:
    openai = pytest.importorskip("langchain_openai")
    anthropic = pytest.importorskip("langchain_anthropic")
    ollama = pytest.importorskip("langchain_ollama")
    options = {"base_url": f"{address}/v1", "api_key": "any", "model": "demo"}
    yield openai.ChatOpenAI(**options)
    yield openai.ChatOpenAI(use_responses_api=True, **options)
    yield anthropic.ChatAnthropic(base_url=address, api_key="any", model="demo", max_tokens=100)
    yield ollama.ChatOllama(base_url=address, model="demo")


@pytest.mark.parametrize("which", range(4))
def test_langchain(address: str, which: int) -> None:
    model = [*langchain_models(address)][which]
    whole = model.invoke(QUESTION)
    assert whole.text == ANSWER
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(piece.text for piece in model.stream(QUESTION)) == ANSWER


@pytest.mark.usefixtures("with_tools")
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("stream", [False, True])
def test_langchain_calls(address: str, which: int, stream: bool) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    model = [*langchain_models(address)][which].bind_tools([get_weather])

    def ask(chat: list[Any]) -> Any:
        if not stream:
            return model.invoke(chat)
        first, *rest = model.stream(chat)
        return sum(rest, first)

    called = ask([messages.HumanMessage(ASKED)])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    result = messages.ToolMessage("Rain.", tool_call_id=call["id"])
    assert ask([messages.HumanMessage(ASKED), called, result]).text == "It rains."


@pytest.mark.parametrize("which", range(4))
def test_langchain_reads_a_schema(
    address: str, which: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "texts", [PET])
    model = [*langchain_models(address)][which]
    for method in ("json_schema", "function_calling"):
        if (which, method) != (3, "function_calling"):  # Ollama's API forces no call
            pet = model.with_structured_output(Pet, method=method).invoke("A pet.")
            assert isinstance(pet, Pet), method


def test_langchain_embeds(address: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    options = {"base_url": f"{address}/v1", "api_key": "any", "model": "demo"}
    own = openai.OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    assert len(own.embed_documents(["a cat", "a dog"])) == 2
    ollama = pytest.importorskip("langchain_ollama").OllamaEmbeddings(
        base_url=address, model="demo"
    )
    assert len(ollama.embed_query("a cat")) == len(own.embed_query("a cat"))


# Others


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(
    address: str, mode: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "texts", [PET] if mode == "JSON_SCHEMA" else [])
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as own:
        client = instructor.from_openai(own, mode=instructor.Mode[mode])
        pet = client.chat.completions.create(
            model="demo",
            response_model=Pet,
            messages=[{"role": "user", "content": "A pet."}],
            max_retries=0,
        )
    assert isinstance(pet, Pet)


@pytest.mark.usefixtures("with_tools")
def test_pydantic_ai(address: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{address}/v1", api_key="any")
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        model = kind("demo", provider=provider)
        monkeypatch.setattr(engine, "texts", [CALL, "It rains."])
        agent = ai.Agent(model, tools=[get_weather])
        assert agent.run_sync(ASKED).output == "It rains."
        for output in (Pet, ai.NativeOutput(Pet)):
            agent = ai.Agent(model, output_type=output)
            assert isinstance(agent.run_sync("A pet.").output, Pet)


@pytest.mark.usefixtures("with_tools")
@pytest.mark.parametrize("api", ["Responses", "ChatCompletions"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents(address: str, api: str, stream: bool) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any") as client:
            model = getattr(agents, f"OpenAI{api}Model")("demo", client)
            agent = agents.Agent("Bot", model=model, tools=[agents.function_tool(get_weather)])
            if not stream:
                return (await agents.Runner.run(agent, ASKED)).final_output
            result = agents.Runner.run_streamed(agent, ASKED)
            async for _ in result.stream_events():
                pass
            return result.final_output

    assert asyncio.run(run()) == "It rains."


def test_lm_eval(address: str, engine: Engine) -> None:
    """Its loglikelihoods are those of `LLM.score`, with no tokenizer but the server's."""
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    model = models.LocalCompletionsAPI(
        base_url=f"{address}/v1/completions", model="demo", max_length=1024, batch_size=2
    )
    assert model.tokenizer_backend == "remote"
    pairs = [("Once upon a time", " there was a little girl."), ("The cat", " sat"), ("", "A dog")]
    asked = [instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    llm = engine._llm
    found = model.loglikelihood(asked)
    for (context, text), (total, is_greedy) in zip(pairs, found, strict=True):
        before = model.tok_encode(context)
        own = model.tok_encode(context + text)[len(before) :]
        (score,) = llm.score(before or [model.prefix_token_id], [own])
        assert (total, is_greedy) == (pytest.approx(score.logprob, abs=1e-4), score.is_greedy)
    until = {"until": ["."], "max_gen_toks": 20, "temperature": 0}
    (text,) = model.generate_until([instance("generate_until", {}, ("Once upon a time", until), 0)])
    ids = model.tok_encode("Once upon a time")
    assert text == llm.generate(ids, max_tokens=20, stop=["."]).text


# In Node


def run_in_node(script: str, *given: str) -> list[str]:
    """Runs a script in Node and returns the lines that it prints."""
    node, folder = shutil.which("node"), os.environ.get("INFER_TEST_NODE")
    if node is None or folder is None:
        pytest.skip("no node, or no INFER_TEST_NODE, a folder with the packages")
    text = (places.TESTS / script).read_text()
    command = [node, "--input-type=module", "--eval", text, "--", *given]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.usefixtures("with_tools")
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_in_node(
    address: str, api: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "texts", [ANSWER, ANSWER, CALL, "It rains.", PET])
    *texts, pet = run_in_node("openai_node.mjs", address, api)
    assert texts == [ANSWER, ANSWER, "It rains."]
    Pet.model_validate_json(pet)


@pytest.mark.usefixtures("with_tools")
@pytest.mark.parametrize("provider", ["openai", "openai.chat", "openai-compatible", "anthropic"])
def test_ai_sdk(
    address: str, provider: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = [] if provider == "anthropic" else [PET]  # a call, which is forced
    monkeypatch.setattr(engine, "texts", [ANSWER, ANSWER, CALL, "It rains.", *last])
    *texts, pet = run_in_node("ai_sdk.mjs", address, provider)
    assert texts == [ANSWER, ANSWER, "It rains."]
    Pet.model_validate_json(pet)
