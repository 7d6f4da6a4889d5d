"""Text to token ids and back, within limits of size and time."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from operator import index
from typing import Any, TypeVar

import tokenizers

from infer.boundaries import foreign, shown, within
from infer.kernels.errors import RequestError, TokenizerError
from infer.text import pieces
from infer.text.chat import begins_answer, choose_template, left_out, render
from infer.text.infill import find_infill

T = TypeVar("T")

MAX_ID = 2**32 - 1  # ids are u32 on the GPU

# The library cannot be interrupted, and needs some 30 bytes for each character on the way.
# The most time to encode a text, and as much again for each 600,000 characters of it.
SECONDS = 60.0
# The most characters that a text may become before it is split into tokens.
_MOST_CHARACTERS = 1 << 27
# The most that a decoder may lengthen a token's text; nearly all decoders leave it.
_MOST_GROWTH = 64
# The most characters of a token's text, on average; known models have up to 500.
_TOKEN_CHARACTERS = 4096


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens and chat templates of its checkpoint.

    tokenizer.json alone says which special tokens an encoded text gets: as in transformers 5, its
    post-processor stands above `add_bos_token` and `add_eos_token` of tokenizer_config.json.

    Attributes:
        special_tokens: text by name (`bos_token`, `eos_token`, ...), as chat templates see it.
        bos_token_id: the id of `bos_token`, None where there is none.
        eos_token_ids: every id that ends a turn.
        byte_token_ids: ids of the tokens <0x00> to <0xFF>, if the decoder joins them into UTF-8.
        special_names: the ids of all special tokens by their own texts.
        added_text_ids: the ids of added tokens that are not special, but text, by that text.
        templates: the sources of the chat templates by name.
        bos_before_chats: whether a chat begins with BOS even if its template does not write it.
        infill: how the model fills in the middle, None where its vocabulary has no tokens for that.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
        bos_before_chats: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.templates = dict(templates or {})
        self.bos_before_chats = bos_before_chats
        self.bos_token_id = self._token_id("bos_token")
        eos_token_id = self._token_id("eos_token")
        own = () if eos_token_id is None else (eos_token_id,)
        self.eos_token_ids = frozenset((*eos_token_ids, *own))
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._skipped = frozenset(i for i, token in added.items() if token.special)
        self.special_names = {added[i].content: i for i in self._skipped}
        self.added_text_ids = {each.content: i for i, each in added.items() if not each.special}
        self._named: dict[tuple[str, ...], frozenset[int]] = {}
        self._growth = prod(
            map(_growth, (backend.normalizer, backend.pre_tokenizer, backend.post_processor))
        )
        if _growth(backend.decoder) > _MOST_GROWTH:
            raise TokenizerError("The tokenizer's decoder makes too much of each token.")
        self.infill = find_infill(lambda text: backend.token_to_id(text) is not None)
        decoder = backend.decoder.__getstate__() if backend.decoder is not None else b""
        self._slow_decoder = b'"Regex"' in decoder
        self._is_byte_level = b'"ByteLevel"' in decoder
        byte_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self._joins_in_words = _joins_in_words(backend, None not in byte_ids)
        self.byte_token_ids = frozenset(
            i for i in byte_ids if i is not None and b'"ByteFallback"' in decoder
        )

    def __repr__(self) -> str:
        templates = len(self.templates)
        chats = "no chat template" if not templates else f"chat templates: {templates}"
        return f"<Tokenizer: {self._backend.get_vocab_size():,} tokens, {chats}>"

    def difference(self, other: "Tokenizer") -> tuple[int, str, str] | None:
        """Returns the first token id that has different texts in the two tokenizers, with both
        texts; None if they agree."""
        own, theirs = (
            {i: text for text, i in each._backend.get_vocab(with_added_tokens=True).items()}
            for each in (self, other)
        )
        differ = (i for i in sorted(own.keys() & theirs.keys()) if own[i] != theirs[i])
        return next(((i, own[i], theirs[i]) for i in differ), None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. A text that begins with BOS itself does not get a second
        one.

        Raises RequestError for anything but text, and for text with halves of surrogate pairs;
        TokenizerError if the tokenizer fails, takes too long or makes too much of it.
        """
        return [*chain.from_iterable(self.encode_pieces(text, add_special_tokens))]

    def encode_pieces(self, text: str, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Yields the ids of a text, a piece of a long one at a time, when the next is asked for.
        Some pieces are empty. Raises as `encode` does."""
        if not isinstance(text, str):
            raise RequestError(f"A prompt must be text, not {type(text).__name__}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"The prompt is not valid Unicode: {error}.") from error
        if len(text) * self._growth > _MOST_CHARACTERS:
            raise TokenizerError(
                f"The tokenizer may make {self._growth:,} times as much of a text before it splits "
                f"it: the {len(text):,} characters of this one are too many for that."
            )
        encode = partial(self._encoding, add_special_tokens)
        found: Iterable[list[int]]
        if len(text) <= pieces.PIECE:
            found = [encode(text).ids]
        else:
            found = pieces.encode_pieces(encode, text, self._joins_in_words)
        begins = add_special_tokens
        for piece in found:
            doubled = begins and piece[:2] == [self.bos_token_id] * 2
            yield piece[1:] if doubled else piece
            begins = begins and not piece

    def _encoding(self, add_special_tokens: bool, text: str) -> tokenizers.Encoding:
        # Unlike the library's `encode`, `encode_batch` lets other threads run.
        encode = partial(self._backend.encode_batch, [text], add_special_tokens=add_special_tokens)
        return _limited(encode, len(text))[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; bytes that are not UTF-8 become U+FFFD. Raises
        RequestError for anything but a list of ids."""
        try:
            given = list(ids)
            if self._slow_decoder:
                decode = partial(self._backend.decode_batch, [given], skip_special_tokens)
                text: str = _limited(decode, len(given))[0]
            else:
                text = self._backend.decode(given, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _are_ids(ids):
                raise RequestError(f"Only token ids can be decoded, not {shown(ids)}.") from error
            with foreign("The tokenizer failed"):
                raise
        if len(text) > _TOKEN_CHARACTERS * (len(given) + 2):
            raise TokenizerError(
                f"The tokenizer makes {len(text):,} characters of {len(given)} tokens."
            )
        return text

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token in the middle of a text. At the beginning a token may lose
        its space, so this is the text that the token adds when it comes second. A special token's
        text is its name."""
        first, both = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return both[len(first) :]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns `token_text` in UTF-8; for a token that is a part of a character, its own
        bytes."""
        name = self._backend.id_to_token(token_id) or ""
        if token_id in self.byte_token_ids:  # <0xE2>
            return bytes([int(name[3:5], 16)])
        is_bytes = self._is_byte_level and token_id not in self._added
        if is_bytes and all(char in _BYTES for char in name):
            return bytes(_BYTES[char] for char in name)
        return self.token_text(token_id).encode()

    @property
    def size(self) -> int:
        """The largest id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def to_json(self) -> str:
        """Returns the tokenizer as the content of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def is_shown(self, token_id: int) -> bool:
        """Whether `decode` keeps the id: it is no special token, and the vocabulary has it."""
        known = self._backend.id_to_token(token_id) is not None
        return known and token_id not in self._skipped

    def is_added(self, token_id: int) -> bool:
        """Whether the id is an added token, special or not."""
        return token_id in self._added

    def named_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Returns the ids of the added tokens whose text is part of one of these texts. The result
        is kept for each tuple of texts, so there should be few."""
        if texts not in self._named:
            names = (self.special_names | self.added_text_ids).items()
            self._named[texts] = frozenset(i for name, i in names if any(name in t for t in texts))
        return self._named[texts]

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self.templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        template: str | None = None,
        **template_args: Any,
    ) -> str:
        """Returns the prompt of a chat, as text.

        Args:
            messages: {"role", "content"} each, oldest first.
            add_generation_prompt: end with the header of the answer; None: unless the final message
                is continued.
            continue_final_message: end after the text of the final message, an answer that is begun
                and goes on.
            template: a template's name, or the source of one.
            template_args: what the template may read, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: malformed messages, arguments, or no template of that name.
            TokenizerError: no chat template, or one that failed.
        """
        with_tools = template_args.get("tools") is not None
        source = choose_template(self.templates, template, with_tools=with_tools)
        begins = begins_answer(add_generation_prompt, continue_final_message)
        variables = self.special_tokens | template_args | {"add_generation_prompt": begins}
        return render(source, messages, variables, continues=bool(continue_final_message))

    def left_out(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        template: str | None = None,
        **template_args: Any,
    ) -> list[str]:
        """Returns a sentence for each kind of message that the chat template leaves out of the
        prompt, and for each argument that it does not read. The arguments must be such as
        `render_chat` has accepted."""
        return left_out(self.templates, messages, self.special_tokens, template_args, template)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        template: str | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Returns the token ids of a chat. The rendered text gets no special tokens, since the
        template itself writes them; but with `bos_before_chats` it gets BOS, if the template has
        not written it.

        `render_chat` explains the arguments and the errors.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            **template_args,
        )
        return self.encode(text, add_special_tokens=self.bos_before_chats)

    def _token_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _joins_in_words(backend: tokenizers.Tokenizer, has_bytes: bool) -> bool:
    """Whether pieces of a text may be joined within a word. They may if the tokenizer is BPE and
    leaves no character out: behind a character that was left out, the library gives wrong places.
    has_bytes: whether each byte has a token."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.unk_token is not None or (model.byte_fallback and has_bytes):
        return True
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return all(backend.token_to_id(letter) is not None for letter in alphabet)


def _limited(call: Callable[[], T], length: int) -> T:
    """Calls a function of the library and returns its result. Raises TokenizerError if it takes too
    long. Other threads run meanwhile. length: the length of the function's text, in characters."""
    seconds = SECONDS * (1 + length / 600_000)
    with foreign("The tokenizer failed"):
        try:
            return within(seconds, call)
        except TimeoutError:
            raise TokenizerError(
                f"The tokenizer was given up after {seconds:,.0f} seconds: it does not end."
            ) from None


def _byte_characters() -> dict[str, int]:
    """Returns the characters that stand for bytes in the vocabularies of byte-level tokenizers,
    with their bytes. As in GPT-2, printable characters stand for themselves, and characters from
    U+0100 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _are_ids(values: Any) -> bool:
    try:
        return all(0 <= index(value) <= MAX_ID for value in values)
    except TypeError:
        return False


def _growth(step: Any) -> int:
    """Returns the factor by which a step of a tokenizer may lengthen a text."""
    return 1 if step is None else _growth_of(json.loads(step.__getstate__()))


def _growth_of(step: Mapping[str, Any]) -> int:
    kind = step["type"]
    if kind == "Sequence":
        (steps,) = (value for value in step.values() if isinstance(value, list))
        return prod(map(_growth_of, steps))
    if kind == "Replace":
        content, pattern = len(step["content"]), len(step["pattern"].get("String", ""))
        # The pattern may match the empty text, everywhere.
        return max(-(-content // pattern), 1) if pattern else content + 1
    if kind == "Prepend":
        return len(step["prepend"]) + 1
    if kind == "ByteLevel":
        return 2
    if kind == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
        return max(map(len, replacements.split(b"\0")))
    if kind == "TemplateProcessing":
        special = step["special_tokens"]
        return sum(
            len(special[piece["SpecialToken"]["id"]]["ids"]) if "SpecialToken" in piece else 1
            for piece in step["single"]
        )
    return 1
