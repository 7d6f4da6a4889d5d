"""Text to token ids and back, as the files of a model folder say."""

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import tokenizers

from infer.chat import choose_template, read_templates, render
from infer.foreign import foreign, reason, shown
from infer.kernels.errors import RequestError, TokenizerError

_DAMAGED = "Fetch the model again."
# No stop id lies beyond what the GPU holds.
_MAX_ID = 2**32 - 1


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
        decoder = backend.decoder.__getstate__() if backend.decoder is not None else b""
        byte_ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_token_ids = frozenset(
            i for i in byte_ids if i is not None and b'"ByteFallback"' in decoder
        )

    @classmethod
    def open(cls, path: Path) -> "Tokenizer":
        """That of a model folder or a GGUF file. Raises TokenizerError."""
        if not path.is_file():
            return cls.from_folder(path)
        from infer.gguf_tokenizer import gguf_tokenizer
        from infer.models.formats.gguf import Gguf

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
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json, and a tokenizer.model or vocab.json alone is not "
                "supported. transformers writes one: AutoTokenizer.from_pretrained(folder)"
                ".save_pretrained(folder)."
            )
        with foreign(f"{path} cannot be read as a tokenizer", hint=_DAMAGED):
            backend = tokenizers.Tokenizer.from_file(str(path))
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
        """
        if not isinstance(text, str):
            raise RequestError(f"A prompt must be text, not {type(text).__name__}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"The prompt is not valid Unicode: {error}.") from error
        with foreign("The tokenizer failed"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: something else than a list of ids.
        """
        try:
            given = [index(i) for i in ids]
        except TypeError:
            given = [-1]
        if not all(0 <= i <= _MAX_ID for i in given):
            raise RequestError(f"Only token ids can be decoded, not {shown(ids)}.")
        with foreign("The tokenizer failed"):
            return self._backend.decode(given, skip_special_tokens=skip_special_tokens)

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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
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
