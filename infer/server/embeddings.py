"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.llm import Prompt
from infer.server.completions import read_prompts
from infer.server.endpoint import Call
from infer.server.errors import ApiError
from infer.server.generation import encode_prompt
from infer.server.protocol import (
    MAX_INPUTS,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    EmbeddingUsage,
)

# Texts in one call of the engine; a client that has gone away is noticed between calls.
_AT_ONCE = 16


async def embed(call: Call[EmbeddingRequest]) -> None:
    request = call.request
    model, _ = call.service.model(request.model)
    inputs = read_prompts(request.input, "input")
    vectors, tokens = await vectors_of(call, inputs, request.dimensions)
    as_base64 = request.encoding_format == "base64"
    data = [
        Embedding(i, _base64(vector) if as_base64 else vector.tolist())
        for i, vector in enumerate(vectors)
    ]
    await call.reply(Embeddings(data, model, EmbeddingUsage(tokens, tokens)))


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def vectors_of(
    call: Call[Any], inputs: Sequence[Prompt], dimensions: int | None
) -> tuple[list[NDArray[np.float32]], int]:
    """Returns the embedding of each text, and how many tokens the texts have together. Raises
    ApiError (400) for texts or dimensions that the model cannot serve."""
    service = call.service
    engine = service.engine
    _, adapter = service.model(call.request.model)
    if len(inputs) > MAX_INPUTS:
        raise ApiError(400, f"input has {MAX_INPUTS} texts at most.", param="input")
    if dimensions not in (None, engine.embedding_size):
        raise ApiError(
            400,
            f"This model's embeddings have {engine.embedding_size} dimensions, and no others.",
            param="dimensions",
            code="unsupported_parameter",
        )
    if not engine.is_embedder:
        call.warnings.append(
            "This model's files say nothing of embeddings: these are means of its last hidden "
            "states, of length 1."
        )
    vectors: list[NDArray[np.float32]] = []
    with service.admission.admitted(1):
        texts = [await encode_prompt(engine, each, {}, "input", room=0) for each in inputs]
        call.is_encoded()
        for i in range(0, len(texts), _AT_ONCE):
            vectors += [*await engine.embed(texts[i : i + _AT_ONCE], adapter)]
    return vectors, sum(map(len, texts))
