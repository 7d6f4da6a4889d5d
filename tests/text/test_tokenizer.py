"""Tokenizers against what transformers answered, and streaming against the full decode.

tests/data/text holds a small tokenizer of each kind; scripts/make_text_references.py made them.
"""

import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import places
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

import infer.text.pieces
import infer.text.tokenizer
from infer.boundaries import foreign
from infer.kernels.errors import RequestError, TokenizerError
from infer.text.detokenizer import CONTEXT, StopStrings, StreamingDetokenizer
from infer.text.folder_tokenizer import folder_tokenizer
from infer.text.tokenizer import Tokenizer

DATA = places.DATA / "text"
DEMO_FOLDER = Path(infer.__file__).parent / "demo"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
KINDS = ("llama3", "chatml", "mistral", "gemma", "metaspace", "wordpiece")
REPLACEMENT = "\ufffd"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def shared(a: str, b: str) -> int:
    return next((n for n in range(len(a), -1, -1) if b.startswith(a[:n])), 0)


def stream(tokenizer: Tokenizer, prompt: Sequence[int], output: Iterable[int]) -> list[str]:
    """Every piece, the last one from `finish`."""
    detokenizer = StreamingDetokenizer(tokenizer, prompt)
    pieces = [detokenizer.add(token_id) for token_id in output]
    return [*pieces, detokenizer.finish()]


def check_stream(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> None:
    before, after = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output])
    # A character shown too early would have changed in `after`.
    assert "".join(stream(tokenizer, prompt, output)) == after[shared(before, after) :]


# Encoding and decoding


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_are_those_of_transformers(kind: str) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    for case in EXPECTED[kind]["encode"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["bare_ids"]
        # The one difference: a text that brings its own BOS gets no second one.
        doubled = kind == "mistral" and case["text"].startswith("<s>")
        assert tokenizer.encode(case["text"]) == case["ids"][1 if doubled else 0 :]
    for case in EXPECTED[kind]["decode"]:
        assert tokenizer.decode(case["ids"]) == case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["full_text"]


@pytest.mark.live
@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_and_ids_live(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(DATA / kind)
    tokenizer = folder_tokenizer(DATA / kind)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices("aehou  ,.\n'düñßé日🙂<s>|", k=rng.randrange(40)))
        assert tokenizer.encode(text) == reference.encode(text)
        ids = rng.choices(range(len(reference)), k=rng.randrange(30))
        for skip in (False, True):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.special_tokens == reference.special_tokens_map


FLAGS = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
MARKED = {"__type": "AddedToken", "content": "<|a|>", "special": True, **FLAGS}
# The content of files beside tokenizer.json, and the ids of tokens that only these have: the first
# free one is 400.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "additional": ({"additional_special_tokens": ["<|x|>", "<|y|>"]}, {"<|x|>": 400, "<|y|>": 401}),
    "extra": ({"extra_special_tokens": ["<|x|>"]}, {"<|x|>": 400}),
    "extra before additional": (
        {"additional_special_tokens": ["<|y|>"], "extra_special_tokens": ["<|x|>"]},
        {"<|x|>": 400},
    ),
    "named before unnamed": (
        {"additional_special_tokens": ["<|y|>"], "extra_special_tokens": {"image": "<|x|>"}},
        {"<|x|>": 400, "<|y|>": 401},
    ),
    "in the order of names": (
        {"own_token": "<|o|>", "pad_token": "<|p|>", "unk_token": "<|u|>"},
        {"<|u|>": 400, "<|p|>": 401, "<|o|>": 402},
    ),
    "flags": ({"additional_special_tokens": [MARKED], "mask_token": "<|m|>"}, {"<|a|>": 401}),
    "flags of a named one": ({"mask_token": MARKED}, {"<|a|>": 400}),
    "a word": ({"additional_special_tokens": ["he"]}, {"he": 264}),
    "none": ({"additional_special_tokens": None, "extra_special_tokens": []}, {}),
    "added_tokens.json": (
        {"added_tokens.json": {"<|q|>": 500, "<|r|>": 450}, "additional_special_tokens": ["<|r|>"]},
        {"<|r|>": 400, "<|q|>": 401},
    ),
}


def with_beside(folder: Path, beside: dict[str, Any]) -> Path:
    shutil.copytree(DATA / "llama3", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    beside = dict(beside)
    if "added_tokens.json" in beside:
        (folder / "added_tokens.json").write_text(json.dumps(beside.pop("added_tokens.json")))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | beside))
    return folder


@pytest.mark.parametrize("case", BESIDE)
def test_special_tokens_that_tokenizer_json_lacks(tmp_path: Path, case: str) -> None:
    beside, ids = BESIDE[case]
    tokenizer = folder_tokenizer(with_beside(tmp_path / "m", beside))
    for text, token_id in ids.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [token_id]
        assert tokenizer.is_shown(token_id) == (text == "<|q|>")
    if MARKED in [*beside.values()]:
        bare = tokenizer.encode("x", add_special_tokens=False)
        assert tokenizer.encode("x  <|a|>", add_special_tokens=False) == [*bare, 400]


@pytest.mark.live
@pytest.mark.parametrize("case", BESIDE)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = with_beside(tmp_path / "m", BESIDE[case][0])
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = folder_tokenizer(folder)
    wanted, found = (
        {i: repr(token) for i, token in backend.get_added_tokens_decoder().items()}
        for backend in (reference._tokenizer, tokenizer._backend)
    )
    assert found == wanted
    assert tokenizer.special_tokens == reference.special_tokens_map


def test_bos_is_not_doubled() -> None:
    tokenizer = folder_tokenizer(DATA / "llama3")
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.encode("Hi") == [bos, *tokenizer.encode("Hi", add_special_tokens=False)]
    assert tokenizer.encode("<|begin_of_text|>Hi") == tokenizer.encode("Hi")
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat.count(bos) == 1
    assert chat == tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi"}]))


@pytest.mark.parametrize(
    ("kind", "bos", "eos"),
    [
        ("llama3", 0, {1, 2, 3}),  # a list in generation_config.json, an id in config.json
        ("chatml", None, {2}),  # tokenizer_config.json alone
        ("gemma", 0, {1, 5, 6}),  # a list in config.json, and its text_config
        ("wordpiece", None, set()),
    ],
)
def test_special_ids(kind: str, bos: int | None, eos: set[int]) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    assert tokenizer.bos_token_id == bos
    assert tokenizer.eos_token_ids == eos


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = Backend.from_file(str(DATA / "llama3" / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = folder_tokenizer(tmp_path).encode("one two three four")
    assert ids == folder_tokenizer(DATA / "llama3").encode("one two three four")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, r"no tokenizer\.json.*tokenizer\.model"),
        ("tokenizer.json", '{"version": "1.0"', r"tokenizer\.json cannot be read"),
        ("tokenizer.json", '{"model": 1}', r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json cannot be read"),
        ("generation_config.json", "[]", r"generation_config\.json must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id must be an id"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"0": 1}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"additional_special_tokens": [5]}', "5 in .* is not a token"),
        ("tokenizer_config.json", '{"extra_special_tokens": "<x>"}', "must be a list"),
        ("added_tokens.json", '{"a": "b"}', r"added_tokens\.json, are malformed"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat template"),
        ("chat_template.json", '{"chat_template": 1}', "chat template"),
        ("tokenizer.json", DEEP, r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", DEEP, r"tokenizer_config\.json cannot be read: nested too"),
        ("special_tokens_map.json", DEEP, r"special_tokens_map\.json cannot be read: nested too"),
        ("generation_config.json", DEEP, r"generation_config\.json cannot be read: nested too"),
        ("chat_template.json", DEEP, "chat template .* cannot be read: nested too"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id must be an id"),
        ("generation_config.json", '{"eos_token_id": [2, true]}', "eos_token_id must be an id"),
        ("config.json", '{"eos_token_id": 4294967296}', "eos_token_id must be an id"),
        ("config.json", f'{{"text_config": {{"eos_token_id": [{10**4000}]}}}}', "must be an id"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "surrogates not allowed"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": "\\ud800"}}}',
            "surr",
        ),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}}', "chat template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": 1, "template": ""}]}', "template"),
    ],
    ids=lambda value: value and value[:40],
)
def test_missing_and_damaged_files(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    shutil.copy(DATA / "mistral" / "tokenizer.json", tmp_path)
    folder_tokenizer(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        folder_tokenizer(tmp_path)


def test_a_text_config_that_is_none(tmp_path: Path) -> None:
    shutil.copy(DATA / "mistral" / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": [1], "eos_token_id": 4294967295}')
    assert folder_tokenizer(tmp_path).eos_token_ids == {2**32 - 1}


def spoilt(name: str) -> Backend:
    """Tokenizers of the library that only fail while they are used."""
    if name == "unknown":
        return Backend(models.WordLevel({"a": 0}, unk_token="b"))  # which there is not: Exception
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    if name == "regex":  # it gives up after ten million steps, by a panic
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    backend.decoder = decoders.Strip("a", 5, 5)  # of more than there is: a panic
    return backend


@pytest.mark.parametrize("name", ["unknown", "regex"])
def test_tokenizers_that_fail_while_they_encode(name: str) -> None:
    with pytest.raises(TokenizerError, match=r"The tokenizer failed: .*(UNK|retry-limit)"):
        Tokenizer(spoilt(name)).encode("x" * 40)


def test_tokenizers_that_fail_while_they_decode() -> None:
    tokenizer = Tokenizer(spoilt("decoder"))
    with pytest.raises(TokenizerError, match="The tokenizer failed: index out of bounds"):
        tokenizer.decode([0, 0])
    with pytest.raises(TokenizerError, match="The tokenizer failed: index out of bounds"):
        stream(tokenizer, [0], [0])


def words(*tokens: str) -> Backend:
    return Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, tokens[0]))


TEN = normalizers.Replace("a", "a" * 10)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "post_processor", "growth"),
    [
        (None, None, None, 1),
        (normalizers.Sequence([TEN] * 9), None, None, 10**9),
        (normalizers.Replace(Regex("x*"), "abc"), None, None, 4),  # which matches nothing as well
        (normalizers.Replace("", "abc"), None, None, 4),
        (normalizers.Replace("ab", "abc"), None, None, 2),
        (normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("ab")]), None, None, 3),
        (None, pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 5), None, 32),
        (TEN, pre_tokenizers.ByteLevel(), None, 20),
        (TEN, None, processors.TemplateProcessing("s $A $A", special_tokens=[("s", 0)]), 30),
    ],
)
def test_a_tokenizer_is_asked_how_much_it_makes_of_a_text(
    normalizer: Any, pre_tokenizer: Any, post_processor: Any, growth: int
) -> None:
    backend = words("a")
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if post_processor is not None:
        backend.post_processor = post_processor
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode("", False)) == 0
    with pytest.raises(TokenizerError, match=rf"may make {growth:,} times as much of a text"):
        tokenizer.encode("a" * ((1 << 27) // growth + 1))
    if growth < 100:
        tokenizer.encode("a" * 1000)


def test_decoders_that_make_too_much() -> None:
    backend = words("a", "b" * 100_000)
    with pytest.raises(TokenizerError, match="makes 100,000 characters of 1 tokens"):
        Tokenizer(backend).decode([1])
    backend.decoder = decoders.Sequence([decoders.Replace("a", "a" * 10)] * 9)
    with pytest.raises(TokenizerError, match="decoder makes too much"):
        Tokenizer(backend)


def test_tokenizers_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ended = words("a"), threading.Event()
    backend.decoder = decoders.Replace(Regex("(x+x+)+y"), "")
    tokenizer = Tokenizer(backend)
    assert (tokenizer.encode("a"), tokenizer.decode([0])) == ([0], "a")

    class Endless:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: ended.wait()

    monkeypatch.setattr(tokenizer, "_backend", Endless())
    monkeypatch.setattr(infer.text.tokenizer, "SECONDS", 0.01)
    try:
        for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([0])):
            with pytest.raises(TokenizerError, match=r"given up after .*: it does not end"):
                call()
    finally:
        ended.set()


def test_a_long_text_is_within_the_limits() -> None:
    tokenizer = folder_tokenizer(DATA / "llama3")
    line = "one two three four\n"
    part = tokenizer.encode(line, add_special_tokens=False)
    assert tokenizer.encode(line * 20_000, add_special_tokens=False) == part * 20_000
    assert tokenizer.decode(part * 20_000) == line * 20_000


def words_bpe(pattern: str | None, unknown: str | None = "?") -> Backend:
    """BPE of many overlapping tokens, within words or over the whole text."""
    rng = random.Random(1)
    vocab = {c: i for i, c in enumerate("?abcdefghij .\n0123")}
    merges: list[tuple[str, str]] = []
    while len(merges) < 300:
        pair = rng.choice(list(vocab)), rng.choice(list(vocab))
        if len("".join(pair)) < 9 and "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            merges.append(pair)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown))
    if pattern is not None:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return backend


def unigram() -> Backend:
    rng = random.Random(1)
    vocab = {c: -8.0 for c in "?abcdefghij .\n0123▁"}
    vocab |= {"".join(rng.choices("abcde ▁01", k=rng.randrange(2, 6))): -6.0 for _ in range(200)}
    backend = Backend(models.Unigram([*vocab.items()], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    **{kind: lambda kind=kind: folder_tokenizer(DATA / kind)._backend for kind in KINDS},
    "demo": lambda: folder_tokenizer(DEMO_FOLDER)._backend,
    "bpe": lambda: words_bpe(None),
    "bpe of words": lambda: words_bpe(r"\d{1,3}|\s*\n+|\s+(?!\S)|\s+|[^\s\d]+"),
    "bpe that drops characters": lambda: words_bpe(r"\s+|\S+", None),
    "unigram": unigram,
}


def mixed_text(rng: random.Random, length: int) -> str:
    """Words, runs of one character, and what tokenizers treat as special."""
    kinds = [
        "abcdefghij   .\n",
        "a",
        " ",
        "ab",
        " \n",
        "0123",
        "日本語",
        "🙂é\u0301",
        "'s't A",
        "\u0301",
    ]
    names = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "[MASK]", " the"]
    text = ""
    while len(text) < length:
        size = rng.choice((1, 3, 20, 100, 1000))
        kind = rng.choice(kinds)
        if rng.random() < 0.2:
            text += rng.choice(names) * rng.choice((1, 2, 40))
        elif rng.random() < 0.3:
            text += rng.choice(kind) * size
        else:
            text += "".join(rng.choices(kind, k=size))
    return text


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_text_in_pieces_has_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those that the library makes of the whole text at once."""
    backend = BACKENDS[kind]()
    tokenizer, rng = Tokenizer(backend), random.Random(0)
    for piece, overlap, after in ((700, 64, 16), (1500, 256, 32)):
        monkeypatch.setattr(infer.text.pieces, "PIECE", piece)
        monkeypatch.setattr(infer.text.pieces, "_OVERLAP", overlap)
        monkeypatch.setattr(infer.text.pieces, "_AFTER", after)
        text = mixed_text(rng, 10_000)
        for special in (False, True):
            (whole,) = backend.encode_batch([text], add_special_tokens=special)
            pieces = [*tokenizer.encode_pieces(text, special)]
            assert [token for each in pieces for token in each] == whole.ids
            assert len(pieces) > 2 or kind in ("wordpiece", "unigram")


@pytest.mark.parametrize("kind", ["llama3", "mistral"])
def test_a_long_text_never_is_in_the_library_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes 150 bytes for each character of a text."""
    tokenizer, lengths = folder_tokenizer(DATA / kind), list[int]()
    own = tokenizer._backend

    class Noting:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            lengths.append(len(texts[0]))
            return own.encode_batch(texts, **options)

    monkeypatch.setattr(tokenizer, "_backend", Noting())
    monkeypatch.setattr(infer.text.pieces, "PIECE", 16_384)
    text = "What does she say? He does not know 42 of them.\n" * 2000
    ids = [token for piece in tokenizer.encode_pieces(text) for token in piece]
    assert max(lengths) < 1.1 * 16_384
    assert sum(lengths) < 1.1 * len(text)
    assert ids == own.encode_batch([text])[0].ids
    bos = tokenizer.special_tokens["bos_token"]
    assert tokenizer.encode(bos + text) == tokenizer.encode(text)  # BOS is not doubled


@pytest.mark.parametrize("wrong", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_end_of_the_program_is_no_error_of_the_tokenizer(wrong: type[BaseException]) -> None:
    with pytest.raises(wrong), foreign("It failed"):
        raise wrong


def test_what_cannot_be_decoded() -> None:
    tokenizer = folder_tokenizer(DATA / "llama3")
    wrong: list[Any] = [None, 3, "ab", [-1], [2**32], [10**5000], ["a"], [None], [1.5]]
    for ids in wrong:
        with pytest.raises(RequestError, match="Only token ids can be decoded"):
            tokenizer.decode(ids)


@pytest.mark.parametrize("text", [None, 3, ["a"], b"a", "half a pair: \ud83d"])
def test_prompts_that_are_not_text(text: Any) -> None:
    with pytest.raises(RequestError):
        folder_tokenizer(DATA / "llama3").encode(text)


# Streaming


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_stream_of_random_ids(kind: str, seed: int) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    check_random_streams(tokenizer, seed, rounds=60)


def check_random_streams(tokenizer: Tokenizer, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    every = range(1000)  # beyond the vocabulary as well
    some = [*rng.choices(every, k=6), *rng.choices(sorted(tokenizer.byte_token_ids or every), k=6)]
    for _ in range(rounds):
        ids = rng.choice((every, some, range(12)))
        prompt = rng.choices(ids, k=rng.choice((0, 1, 5, 40)))
        check_stream(tokenizer, prompt, rng.choices(ids, k=rng.randrange(3 * CONTEXT)))


@pytest.mark.parametrize("kind", KINDS)
def test_stream_of_text_shows_whole_characters_at_once(kind: str) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    text = "It's Größe, 日本 🙂 👩‍👩‍👧 — naïve.  Two  spaces\n"
    for cut in range(0, len(text), 3):
        prompt = tokenizer.encode(text[:cut])
        output = tokenizer.encode(text[cut:], add_special_tokens=False)
        check_stream(tokenizer, prompt, output)
        if tokenizer.byte_token_ids:
            continue
        detokenizer = StreamingDetokenizer(tokenizer, prompt)
        shown = ""
        for n, token_id in enumerate(output, 1):
            shown += detokenizer.add(token_id)
            full = tokenizer.decode([*prompt, *output[:n]])
            assert full.removesuffix(REPLACEMENT).endswith(shown)
            assert len(shown) >= len(full) - len(tokenizer.decode(prompt)) - 1


@pytest.mark.parametrize("kind", ["llama3", "chatml", "gemma"])
def test_bytes_and_beginnings_of_tokens(kind: str) -> None:
    """Parts of characters have bytes, too, in byte-level tokens and in byte tokens."""
    tokenizer = folder_tokenizer(DATA / kind)
    text = "Größe, 日本 🙂 👩‍👩‍👧 — naïve. \ufffd"
    ids = tokenizer.encode(text, add_special_tokens=False)
    raw = [tokenizer.token_bytes(i) for i in ids]
    assert b"".join(raw) == text.encode()
    assert any(REPLACEMENT in each.decode(errors="replace") for each in raw)
    detokenizer = StreamingDetokenizer(tokenizer, [])
    for n, token_id in enumerate(ids):
        before = b"".join(raw[:n])  # of which the last character may be cut
        assert detokenizer.length == len(before.decode(errors="ignore"))
        detokenizer.add(token_id)


def test_first_space_of_the_output_is_kept() -> None:
    tokenizer = folder_tokenizer(DATA / "mistral")
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(the) == "the"
    assert "".join(stream(tokenizer, the, the)) == " the"
    assert "".join(stream(tokenizer, [], the)) == "the"


def test_first_space_is_kept_after_tokens_without_text() -> None:
    backend = Backend(models.WordLevel({"_": 0, " a": 1}, unk_token="_"))
    parts = [decoders.Replace("_", ""), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = Tokenizer(backend)
    silence = [0] * 3 * CONTEXT
    assert "".join(stream(tokenizer, [1], [*silence, 1])) == " a"
    assert "".join(stream(tokenizer, [1, *silence], [1])) == " a"
    assert "".join(stream(tokenizer, silence, [1])) == "a"


def test_byte_tokens_are_held_until_their_run_ends() -> None:
    tokenizer = folder_tokenizer(DATA / "mistral")
    smile = tokenizer.encode("🙂", add_special_tokens=False)[-4:]
    assert tokenizer.byte_token_ids.issuperset(smile)
    (a,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    assert stream(tokenizer, [a], [*smile, a]) == ["", "", "", "", "🙂a", ""]
    # The library turns the whole run into U+FFFD, so not even its valid part may be out before.
    assert stream(tokenizer, [a], [*smile, smile[0], a])[5:] == [REPLACEMENT * 5 + "a", ""]
    assert stream(tokenizer, [a, *smile[:2]], smile[2:]) == ["", "", "🙂"]
    assert stream(tokenizer, [a, *smile[:2]], [*smile[2:], a])[2] == "🙂a"


def test_character_that_begins_in_the_prompt() -> None:
    tokenizer = folder_tokenizer(DATA / "llama3")
    smile = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(smile) == 4
    for cut in range(1, 4):
        assert "".join(stream(tokenizer, smile[:cut], smile[cut:])) == "🙂"


@pytest.mark.parametrize("kind", KINDS)
def test_cost_per_token_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = folder_tokenizer(DATA / kind)
    decoded: list[int] = []
    decode = tokenizer.decode

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counted)
    rng = random.Random(0)
    # Invalid bytes, special tokens and ids outside of the vocabulary included.
    prompt, output = (rng.choices(range(500), k=2000) for _ in range(2))
    stream(tokenizer, prompt, output)
    run = 0
    longest = 0
    for token_id in output:
        if tokenizer.is_shown(token_id):
            run = run + 1 if token_id in tokenizer.byte_token_ids else 0
        longest = max(longest, run)
    assert max(decoded) <= 2 * CONTEXT + longest
    assert len(decoded) < 1.2 * len(output) + 10


def test_stream_of_invalid_bytes_does_not_wait_for_its_end() -> None:
    tokenizer = folder_tokenizer(DATA / "llama3")
    lead = tokenizer.encode("🙂", add_special_tokens=False)[0]
    pieces = stream(tokenizer, [], [lead] * 100)
    assert pieces == ["", *[REPLACEMENT] * 100]


@pytest.mark.skipif("INFER_TEST_MODELS" not in os.environ, reason="needs INFER_TEST_MODELS")
def test_stream_of_a_real_model() -> None:
    folders = Path(os.environ["INFER_TEST_MODELS"]).glob("*/tokenizer.json")
    for path in sorted(folders):
        check_random_streams(folder_tokenizer(path.parent), seed=0, rounds=100)


# Stop strings


def cut_up(text: str, cuts: Iterable[int]) -> Iterator[str]:
    ends = [0, *cuts, len(text)]
    return (text[a:b] for a, b in pairwise(ends))


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By definition: read on until some stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("text", ["abcabd", "aabaab", "xxENDyy", "abababc", "", "aab\n\nb"])
@pytest.mark.parametrize(
    "stops", [["abd"], ["ab", "b"], ["abcd", "ca"], ["END"], ["ababc", "bab"], ["\n\n"], []]
)
def test_stop_strings_in_every_partition(text: str, stops: list[str]) -> None:
    for n in range(4):
        for cuts in combinations(range(1, max(len(text), 1)), n):
            finder = StopStrings(stops)
            shown = "".join(finder.add(piece) for piece in cut_up(text, cuts))
            assert (shown + finder.finish(), finder.hit) == first_stop(text, stops)


def test_stop_strings_hold_back_only_what_may_become_one() -> None:
    finder = StopStrings(["STOP", "\n\n"])
    assert [finder.add(p) for p in ("ab", "S", "T", "x", "\n", "y\nS")] == [
        "ab", "", "", "STx", "", "\ny\n",
    ]  # fmt: skip
    assert (finder.finish(), finder.hit, finder.finish()) == ("S", None, "")
    finder = StopStrings("end")
    assert [finder.add(p) for p in ("the e", "nd of", " it")] == ["the ", "", ""]
    assert (finder.finish(), finder.hit) == ("", "end")


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], [1], [None]])
def test_stop_strings_that_cannot_be(stops: Any) -> None:
    with pytest.raises(RequestError, match="Stop strings"):
        StopStrings(stops)
