"""The tokenizer of a GGUF file, made from its metadata (`tokenizer.ggml.*`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from infer.boundaries import shown
from infer.kernels.errors import TokenizerError
from infer.models.loading.formats.gguf import Gguf
from infer.text.infill import find_infill
from infer.text.tokenizer import Tokenizer

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Types of tokens. Unused ones only fill the vocabulary up.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (  # combining marks count as parts of words
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _CASED_REST
_GPT4O = "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED) + r"|\p{N}{1,3}" + _CASED_REST
_SEED = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The code points of letters with cases, as the first DeepSeek lists them. They are numbers, because
# normalising this file would turn some of the letters into others.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# The most characters of a token that is made by merges, since each way to split it is tried.
# Vocabularies have tokens of hundreds.
_LONGEST = 1 << 12
# tokenizer.ggml.pre -> the patterns that split a text, one after the other, before bytes are
# merged.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("lfm2", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}",)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), ()),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "seed-coder": (_SEED,),
}
# Pre-tokenizers that split by their own patterns first, and then as GPT-2 does.
_BY_GPT2 = ("smollm", "starcoder", "refact", "command-r", "gpt-2", "phi-2", "olmo", "exaone4")
# Pre-tokenizers with which words of the vocabulary are not merged from bytes.
_WHOLE = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")
_NFC = ("qwen2", "qwen35", "deepseek-r1-qwen", "hunyuan", "command-r", "olmo")

# The tokens that end a turn in gpt-oss and Solar Open, where <|end|> only ends a message.
_ENDS_WITH_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
# Tokens that end a turn, whether or not a file says so: many files name only one, and some give
# them a type of tokens that stand for text. The list is llama.cpp's (llama-vocab.cpp), without the
# tokens that end answers which fill in the middle.
_ENDS_BY_TEXT = {
    "<|eot_id|>",
    "<|eom_id|>",  # Llama 3
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "▁<EOT>",  # CodeLlama
    "[EOT]",
    "[EOS]",  # Kimi-K2
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    "[e~[",  # MiniMax-M2
    "<eos>",
    "<turn|>",
    "<|tool_response>",  # Gemma 4
    *_ENDS_WITH_MESSAGES[0],
    *_ENDS_WITH_MESSAGES[1],
}
# Tokens of Phi-3 that leave the space behind them in place.
_PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def gguf_tokenizer(gguf: Gguf) -> Tokenizer:
    """Returns the tokenizer of a GGUF file, with its special tokens and chat templates.

    Raises TokenizerError for a kind of tokenizer that is not implemented, and for metadata that is
    incomplete.
    """
    found = _Metadata(gguf)
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}
    kind = found.get("model", str)
    if kind not in kinds:
        raise TokenizerError(
            f"{gguf.file} has a tokenizer of the kind {shown(kind)}, which is not implemented "
            f"(only {', '.join(kinds)}). Take a version of the model with a tokenizer.json."
        )
    tokens = found.texts("tokens")
    types = _types(found, tokens)
    backend, adds_bos = kinds[kind](found, tokens, types)
    phi3 = _is_phi3(gguf.metadata, kind)
    added = [
        AddedToken(
            token,
            normalized=False,
            special=of != _USER_DEFINED,
            rstrip=phi3 and token not in _PHI3_UNSTRIPPED,
        )
        for token, of in zip(tokens, types, strict=True)
        if of in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    ids = {name: found.token_id(key, len(tokens)) for name, key in _SPECIAL.items()}
    before = ids["bos_token"] if found.get("add_bos_token", bool, adds_bos) else None
    after = ids["eos_token"] if found.get("add_eos_token", bool, False) else None
    if before is not None or after is not None:
        ends = [("BOS", before), ("EOS", after)]
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(
                (["BOS"] if before is not None else [])
                + ["$A"]
                + (["EOS"] if after is not None else [])
            ),
            special_tokens=[(name, number) for name, number in ends if number is not None],
        )
    control = {
        token: i for i, (token, of) in enumerate(zip(tokens, types, strict=True)) if of == _CONTROL
    }
    eos_ids = {found.token_id(key, len(tokens)) for key in _ENDS}
    # In some vocabularies </s> is a tag of HTML, with another type.
    eos_ids |= {control.get(token) for token in (*_ENDS_BY_TEXT, "</s>")}
    if any(ends <= control.keys() for ends in _ENDS_WITH_MESSAGES):
        eos_ids.discard(control.get("<|end|>"))
    return Tokenizer(
        backend,
        special_tokens={name: tokens[number] for name, number in ids.items() if number is not None},
        eos_token_ids=[number for number in eos_ids if number is not None],
        templates=_templates(gguf.metadata),
        # BOS begins chats as in llama.cpp, but EOS is not to end a chat that goes on.
        bos_before_chats=before is not None and after is None,
    )


def _types(found: "_Metadata", tokens: Sequence[str]) -> list[float]:
    """Returns the type of each token. Tokens that control models are control tokens, whatever the
    file says: some files have them as plain words, which would be merged from pieces."""
    infill = find_infill(frozenset(tokens).__contains__)
    parts = () if infill is None else (infill.prefix, infill.suffix, infill.middle)
    types = found.numbers("token_type", len(tokens), _NORMAL)
    control = {*_ENDS_BY_TEXT, *parts}
    return [_CONTROL if token in control else of for token, of in zip(tokens, types, strict=True)]


def _is_phi3(metadata: Mapping[str, Any], kind: str) -> bool:
    """Whether special tokens take the space behind them, which no file says. They do in Phi-3 and
    Phi-3.5, but not in Phi-4, which has the same architecture and another kind of tokenizer. As in
    llama.cpp, the model's name decides, because files may have been converted to Llama's
    architecture."""
    name = str(metadata.get("general.name")).lower()
    of_phi3 = metadata.get("general.architecture") == "phi3" and kind == "llama"
    return of_phi3 or "phi-3" in name or "phi3" in name


class _Metadata:
    """Reads metadata of the tokenizer and checks its types. Its methods raise TokenizerError."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.gguf.metadata.get(_KEY + key, default)
        if value is not None and type(value) is not kind:
            raise self.error(f"{_KEY}{key} is no {kind.__name__}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.gguf.metadata.get(_KEY + key)
        if not isinstance(value, list) or not value:
            raise self.error(f"it has no {_KEY}{key}")
        return value

    def numbers(self, key: str, count: int, default: float | None = None) -> Sequence[float]:
        """Returns a list of numbers, one for each token."""
        value = self.gguf.metadata.get(_KEY + key)
        if value is None and default is not None:
            return [default] * count
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(f"{_KEY}{key} are not {count} numbers")
        numbers: list[float] = value.tolist()
        return numbers

    def token_id(self, key: str, count: int) -> int | None:
        number: int | None = self.get(key, int)
        if number is not None and not 0 <= number < count:
            raise self.error(f"{_KEY}{key} = {number} is not one of the {count} tokens")
        return number

    def error(self, what: str) -> TokenizerError:
        return TokenizerError(f"The tokenizer of {self.gguf.file} cannot be read: {what}.")


def _byte_level(
    found: _Metadata, tokens: Sequence[str], types: Sequence[float]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the tokenizer that merges bytes, as GPT-2's does, and whether it adds BOS if the file
    does not say."""
    pre = found.get("pre", str, "")
    if pre not in _SPLITS:
        raise TokenizerError(
            f"{found.gguf.file} splits text in the way {shown(pre)} before it is tokenised, which "
            f"is not implemented (only {', '.join(_SPLITS)})."
        )
    merges = _pairs(found)
    backend = tokenizers.Tokenizer(_bpe(found, tokens, types, merges, ignore_merges=pre in _WHOLE))
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in _BY_GPT2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _WHOLE


def _sentencepiece(
    found: _Metadata, tokens: Sequence[str], types: Sequence[float]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the BPE tokenizer of SentencePiece, which merges characters and has bytes for unknown
    ones; and whether it adds BOS if the file does not say. Files of Gemma 4 always list the
    merges."""
    gemma4 = found.get("model", str) == "gemma4"
    if found.get("remove_extra_whitespaces", bool, False):
        raise found.error("removing extra whitespace is not implemented")
    if gemma4 or f"{_KEY}merges" in found.gguf.metadata:
        merges = _pairs(found)
    else:
        scores = found.numbers("scores", len(tokens))
        if str(found.gguf.metadata.get("general.architecture")).startswith("gemma"):
            # Gemma's own scores are not in the order of its merges; its ids are.
            scores = [-float(i) for i in range(len(tokens))]
        normal = {
            token: score
            for token, score, of in zip(tokens, scores, types, strict=True)
            if of == _NORMAL
        }
        longest = max(map(len, normal), default=0)
        if longest > _LONGEST:
            raise found.error(f"a token of {longest:,} characters is damage")
        merges = _merges_of(normal)
    unknown = found.token_id("unknown_token_id", len(tokens))
    backend = tokenizers.Tokenizer(
        _bpe(
            found,
            tokens,
            types,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = found.get("add_space_prefix", bool, not gemma4)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that are merged, the pair with the highest score first:
    SentencePiece merges the neighbours whose union scores highest."""
    pairs = [
        (-score, -cut, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _pairs(found: _Metadata) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in found.texts("merges")]
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges):
        raise found.error(f"{_KEY}merges are not all pairs")
    return pairs


def _bpe(
    found: _Metadata,
    tokens: Sequence[str],
    types: Sequence[float],
    merges: list[tuple[str, str]],
    **options: Any,
) -> models.BPE:
    vocab = {
        token: i for i, (token, of) in enumerate(zip(tokens, types, strict=True)) if of != _UNUSED
    }
    for left, right in merges:  # the library would panic
        if not (left in vocab and right in vocab and left + right in vocab):
            raise found.error(
                f"{shown(left)} and {shown(right)} are merged, but not all are tokens"
            )
    return models.BPE(vocab, merges, **options)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name; the only or plain one is called `default`."""
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    return {name: source for name, source in templates.items() if isinstance(source, str)}
