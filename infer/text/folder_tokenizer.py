"""The tokenizer of a model folder, as transformers reads its files; or of a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from infer.boundaries import foreign, reason, shown
from infer.kernels.errors import TokenizerError
from infer.models.loading.files import open_file, read_text
from infer.text.chat import read_templates
from infer.text.tokenizer import MAX_ID, Tokenizer

_DAMAGED = "Fetch the model again."
# The names of the special tokens that are added before all others.
_FIRST = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def open_tokenizer(path: Path, template: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a model folder or a GGUF file. template: the source of a chat
    template that replaces the model's own. Raises TokenizerError if the files cannot be read."""
    tokenizer = folder_tokenizer(path) if not path.is_file() else _of_gguf(path)
    if template is not None:
        tokenizer.templates = {"default": template}
    return tokenizer


def _of_gguf(path: Path) -> Tokenizer:
    # Imported here, because most models need no GGUF.
    from infer.models.loading.formats.gguf import Gguf
    from infer.text.gguf_tokenizer import gguf_tokenizer

    gguf = Gguf.open(path)
    with foreign(f"The tokenizer of {path} cannot be read", hint=_DAMAGED):
        return gguf_tokenizer(gguf)


def folder_tokenizer(folder: Path) -> Tokenizer:
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
        # The library would wait for ever for a named pipe.
        backend = tokenizers.Tokenizer.from_file(str(path))
    config = read_json(folder / "tokenizer_config.json")
    added: dict[str, Any] = {}
    if "added_tokens_decoder" not in config:  # with this key, the older files add nothing
        config |= read_json(folder / "special_tokens_map.json")
        added = read_json(folder / "added_tokens.json")
    model_config = read_json(folder / "config.json")
    with foreign(f"The tokenizer of {folder} cannot be read", hint=_DAMAGED):
        special_tokens = _special_tokens(config)
        _add_tokens(backend, config, added, special_tokens)
        return Tokenizer(
            backend,
            special_tokens={name: token.content for name, token in special_tokens.items()},
            eos_token_ids=[
                *_eos_ids(read_json(folder / "generation_config.json")),
                *_eos_ids(model_config),
                *_eos_ids(model_config.get("text_config")),
            ],
            templates=read_templates(folder, config),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if there is no such file. Raises TokenizerError if the
    file holds anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {reason(error)} {_DAMAGED}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object. Fetch the model again.")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """Returns the special tokens by name, in the order in which they are added: the `..._token`
    entries, then the tokens that extra_special_tokens names."""
    extra = config.get("extra_special_tokens")
    values = dict.fromkeys(_FIRST) | {k: v for k, v in config.items() if k.endswith("_token")}
    values |= extra if isinstance(extra, dict) else {}
    tokens = {}
    for name, value in values.items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = _token(value)
            tokens[name].special = True
    return tokens


def _add_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    added: Mapping[str, Any],
    named: Mapping[str, tokenizers.AddedToken],
) -> None:
    """Adds the tokens that tokenizer.json lacks or has with other flags, as transformers does.
    added: the contents of added_tokens.json, ids by texts."""
    present = backend.get_added_tokens_decoder()
    special = {token.content: token for token in (*named.values(), *_unnamed(config))}
    try:
        entries = {int(i): entry for i, entry in config.get("added_tokens_decoder", {}).items()}
        for text, i in added.items():
            if i not in present:
                entries[int(i)] = {
                    "content": text,
                    "normalized": text not in special,
                    "special": text in special,
                }
        listed = [tokenizers.AddedToken(**entries[i]) for i in sorted(entries)]
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"The tokens in added_tokens_decoder of tokenizer_config.json, or in "
            f"added_tokens.json, are malformed: {error}."
        ) from error
    same = {repr(token) for token in present.values()}
    backend.add_tokens([token for token in listed if repr(token) not in same])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for text, token in special.items() if text not in known])


def _unnamed(config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Returns the special tokens without names, which stand under a key of transformers 5 or under
    an older one."""
    found = config.get("extra_special_tokens")
    if not found or isinstance(found, dict):
        found = config.get("additional_special_tokens") or []
    if not isinstance(found, list):
        raise TokenizerError(
            f"extra_special_tokens of tokenizer_config.json must be a list, not {shown(found)}."
        )
    return [_token(value) for value in found]


def _token(value: Any) -> tokenizers.AddedToken:
    """Returns a token of the config: a text, which is a special token, or an object with the
    token's text and flags."""
    try:
        if isinstance(value, dict):
            flags = {name: flag for name, flag in value.items() if name != "__type"}
            return tokenizers.AddedToken(**flags)
        return tokenizers.AddedToken(value, special=True)
    except TypeError as error:
        raise TokenizerError(
            f"{shown(value)} in tokenizer_config.json is not a token: {error}."
        ) from error


def _eos_ids(config: Any) -> list[int]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
        raise TokenizerError(f"eos_token_id must be an id or a list of ids, not {shown(value)}.")
    return ids
