"""Text to token ids and back, as the files of a model folder say."""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from infer.foreign import foreign, reason, shown, within
from infer.kernels.errors import RequestError, TokenizerError
from infer.models.loading.files import open_file, read_text
from infer.text.chat import choose_template, read_templates, render

T = TypeVar("T")

_DAMAGED = "Fetch the model again."
# No stop id lies beyond what the GPU holds.
_MAX_ID = 2**32 - 1

# The library cannot be interrupted, and needs some 30 bytes for each character on the way.
SECONDS = 60.0  # to encode a text, and as many for each 600,000 characters of it
_MOST_CHARACTERS = 1 << 27  # that a text may become before it is split into tokens
_MOST_GROWTH = 64  # of a token's text in the decoder, which nearly all leave as it is
_TOKEN_CHARACTERS = 4096  # of a token's text, on average; the longest of known models have 500


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens and chat templates of its checkpoint.

    tokenizer.json alone says which special tokens an encoded text gets: as in transformers 5, its
    post-processor stands above `add_bos_token` and `add_eos_token` of tokenizer_config.json.

    Attributes:
        special_tokens: text by name (`bos_token`, `eos_token`, ...), as chat templates see it.
        bos_token_id: the id of `bos_token`, None where there is none.
        eos_token_ids: every id that ends a turn.
        byte_token_ids: ids of the tokens <0x00> to <0xFF>, if the decoder joins them into UTF-8.
        templates: the sources of the chat templates by name.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.templates = dict(templates or {})
        self.bos_token_id = self._token_id("bos_token")
        eos_token_id = self._token_id("eos_token")
        own = () if eos_token_id is None else (eos_token_id,)
        self.eos_token_ids = frozenset((*eos_token_ids, *own))
        added = backend.get_added_tokens_decoder()
        self._skipped_ids = frozenset(i for i, token in added.items() if token.special)
        self._growth = prod(
            map(_growth, (backend.normalizer, backend.pre_tokenizer, backend.post_processor))
        )
        if _growth(backend.decoder) > _MOST_GROWTH:
            raise TokenizerError("The tokenizer's decoder makes too much of each token.")
        decoder = backend.decoder.__getstate__() if backend.decoder is not None else b""
        self._slow_decoder = b'"Regex"' in decoder
        byte_ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_token_ids = frozenset(
            i for i in byte_ids if i is not None and b'"ByteFallback"' in decoder
        )

    @classmethod
    def open(cls, path: Path) -> "Tokenizer":
        """That of a model folder or a GGUF file. Raises TokenizerError."""
        if not path.is_file():
            return cls.from_folder(path)
        from infer.models.loading.formats.gguf import Gguf
        from infer.text.gguf_tokenizer import gguf_tokenizer

        gguf = Gguf.open(path)
        with foreign(f"The tokenizer of {path} cannot be read", hint=_DAMAGED):
            return gguf_tokenizer(gguf)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, and what lies beside it about special tokens, ends and templates.

        Raises:
            TokenizerError: no tokenizer.json, or a file that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(
                f"{folder} has no tokenizer.json, and a tokenizer.model or vocab.json alone is not "
                "supported. transformers writes one: AutoTokenizer.from_pretrained(folder)"
                ".save_pretrained(folder)."
            )
        with foreign(f"{path} cannot be read as a tokenizer", hint=_DAMAGED), open_file(path):
            backend = tokenizers.Tokenizer.from_file(str(path))  # which would wait for a pipe
        config = read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # else it tells all that the older file does
            config |= read_json(folder / "special_tokens_map.json")
        model_config = read_json(folder / "config.json")
        with foreign(f"The tokenizer of {folder} cannot be read", hint=_DAMAGED):
            special_tokens = _special_tokens(config)
            _add_tokens(backend, config, special_tokens)
            return cls(
                backend,
                special_tokens=special_tokens,
                eos_token_ids=[
                    *_eos_ids(read_json(folder / "generation_config.json")),
                    *_eos_ids(model_config),
                    *_eos_ids(model_config.get("text_config")),
                ],
                templates=read_templates(folder, config),
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A text that begins with BOS itself does not get a second one.

        Raises:
            RequestError: not text, or text with halves of surrogate pairs.
            TokenizerError: the tokenizer fails, takes too long or makes too much of it.
        """
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

        def encode() -> list[int]:
            # Unlike `encode`, this lets other threads run.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids

        ids = _limited(encode, len(text))
        if add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: something else than a list of ids.
        """
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
        """The text of a token within a text: the first of one may lose the space that it begins
        with, so it is what a second one adds. A special token's is its name."""
        first, both = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return both[len(first) :]

    def is_shown(self, token_id: int) -> bool:
        """Whether `decode` keeps the id: not a special token, nor outside of the vocabulary."""
        known = self._backend.id_to_token(token_id) is not None
        return known and token_id not in self._skipped_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self.templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **template_args: Any,
    ) -> str:
        """The prompt text of a chat.

        Args:
            messages: {"role", "content"} each, oldest first.
            add_generation_prompt: end with the header of the answer.
            template: a template's name, or the source of one.
            template_args: what the template may read, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: malformed messages, arguments, or no template of that name.
            TokenizerError: no chat template, or one that failed.
        """
        with_tools = template_args.get("tools") is not None
        source = choose_template(self.templates, template, with_tools=with_tools)
        variables = self.special_tokens | template_args
        return render(
            source, messages, variables | {"add_generation_prompt": add_generation_prompt}
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Token ids of a chat: as rendered, since the template itself writes the special tokens.

        Arguments and errors as for `render_chat`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template=template,
            **template_args,
        )
        return self.encode(text, add_special_tokens=False)

    def _token_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _limited(call: Callable[[], T], length: int) -> T:
    """What a function of the library returns, which lets other threads run meanwhile."""
    seconds = SECONDS * (1 + length / 600_000)
    with foreign("The tokenizer failed"):
        try:
            return within(seconds, call)
        except TimeoutError:
            raise TokenizerError(
                f"The tokenizer was given up after {seconds:,.0f} seconds: it does not end."
            ) from None


def _are_ids(values: Any) -> bool:
    try:
        return all(0 <= index(value) <= _MAX_ID for value in values)
    except TypeError:
        return False


def _growth(step: Any) -> int:
    """How many times as long a step of a tokenizer may make a text."""
    return 1 if step is None else _growth_of(json.loads(step.__getstate__()))


def _growth_of(step: Mapping[str, Any]) -> int:
    kind = step["type"]
    if kind == "Sequence":
        (steps,) = (value for value in step.values() if isinstance(value, list))
        return prod(map(_growth_of, steps))
    if kind == "Replace":
        content, pattern = len(step["content"]), len(step["pattern"].get("String", ""))
        return max(-(-content // pattern), 1) if pattern else content + 1  # may match nothing
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {reason(error)} {_DAMAGED}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object. Fetch the model again.")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens: the `..._token` entries, each text or an object with `content`."""
    extra = config.get("extra_special_tokens")
    named = {**config, **extra} if isinstance(extra, dict) else config
    tokens = {}
    for name, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens that tokenizer.json lacks, or has with other flags, as transformers does."""
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    try:
        entries = {int(i): entry for i, entry in config.get("added_tokens_decoder", {}).items()}
        listed = [tokenizers.AddedToken(**entries[i]) for i in sorted(entries)]
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"added_tokens_decoder of tokenizer_config.json is malformed: {error}."
        ) from error
    backend.add_tokens([token for token in listed if repr(token) not in present])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in special_tokens.values() if token not in known]
    backend.add_tokens([tokenizers.AddedToken(token, special=True) for token in missing])


def _eos_ids(config: Any) -> list[int]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i <= _MAX_ID for i in ids):
        raise TokenizerError(f"eos_token_id must be an id or a list of ids, not {shown(value)}.")
    return ids
