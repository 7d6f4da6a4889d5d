"""/tokenize and /detokenize: texts and chats as the token ids that the model sees, and back."""

from __future__ import annotations

from typing import TypeVar

from infer.server.chat import read_messages, template_args
from infer.server.endpoint import Call
from infer.server.errors import ApiError
from infer.server.generation import note_left_out, without_billing
from infer.server.protocol import (
    DetokenizeRequest,
    Text,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
)
from infer.server.service import Served
from infer.text.tools import check_tools

RequestT = TypeVar("RequestT", bound=TokenizeRequest)


async def tokenize(call: Call[TokenizeRequest]) -> None:
    request, service = call.request, call.service
    service.model(request.model)
    engine, ids = service.engine, await token_ids(call)
    texts = None
    if request.return_token_strs:
        known = {i: await engine.decode([i]) for i in dict.fromkeys(ids)}
        texts = [known[i] for i in ids]
    await call.reply(Tokens(len(ids), engine.context, ids, texts))


async def token_ids(call: Call[RequestT]) -> list[int]:
    """Returns the token ids of a request's text or chat. Raises ApiError (400) unless the request
    has one of the two."""
    request, engine = call.request, call.service.engine
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "Give either a prompt or messages.", param="prompt")
    if request.messages is None:
        assert request.prompt is not None  # as above
        return await engine.encode(request.prompt, {}, request.add_special_tokens)
    own = template_args(request)
    if (offered := check_tools(request.tools).offered) is not None:
        own["tools"] = offered
    messages = without_billing(read_messages(request.messages, engine.template))
    ids = await engine.encode(messages, own)
    await note_left_out(call, messages, own)
    return ids


async def about(served: Served) -> TokenizerInfo:
    """Returns the special tokens and the chat template, as vLLM does. A client that counts by ids
    needs no tokenizer of its own."""
    async with served.using(None) as service:
        own = service.engine.special_tokens
        return TokenizerInfo(
            own.get("bos_token"), own.get("eos_token"), service.engine.template or None
        )


async def detokenize(call: Call[DetokenizeRequest]) -> None:
    call.service.model(call.request.model)
    await call.reply(Text(await call.service.engine.decode(call.request.tokens)))
