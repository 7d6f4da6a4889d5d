"""Make the tokenizers under tests/data/text, and what transformers answers for them.

    python scripts/make_text_references.py

Each folder there holds a hand-written tokenizer_config.json and chat template in the style of a
family of models. This script adds tokenizer.json, trained on the lines below, and writes
expected.json: inputs with the ids, texts and chats that transformers makes of them.
Needs the extra `reference`.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

DATA = Path(__file__).parent.parent / "tests" / "data" / "text"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it's the dog's turn to jump.",
    "What is the weather like in Paris? It is 21 degrees and the sun is out.",
    "system user assistant model tool call function name arguments parameters think",
    'def add(a, b):\n    return {"sum": a + b}\n',
    "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Maß, Öl.",
    "El rápido zorro marrón salta sobre el perro perezoso. ¿Qué tal, señor?",
]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces and a tab\t and\n\n newlines \n",
    "The dog's turn , isn't it ?",
    "naïve café, Größe, ﬁne, e\u0301",
    "日本語 и русский — 🙂👩‍👩‍👧 \u0000 \ufffd",
    "<s>text that begins with a special token</s>",
]
ID_LISTS = [[], [0], [2, 0, 40, 1, 41, 3], list(range(6, 60)), list(range(90, 110)), [100000, 50]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <city> & its 'surroundings' – today",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
Messages = list[dict[str, Any]]
SHORT: Messages = [{"role": "user", "content": " What is the weather? "}]
LONG: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello! 🙂", "name": None},
    {"role": "user", "content": "Bye"},
]
THOUGHT: Messages = [*SHORT, {"role": "assistant", "content": "Warm.", "reasoning": "It is May."}]
CALLED: Messages = [
    *SHORT,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "21 °C"},
]
PARTS: Messages = [
    {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": " two"}]}
]
TWO: Messages = [
    {
        "role": role,
        "content": [{"type": "text", "text": f"{role} one"}, {"type": "text", "text": " two"}],
    }
    for role in ("system", "user", "assistant")
]
BEGUN: Messages = [*SHORT, {"role": "assistant", "content": " It is warm, and "}]
BEGUN_PARTS: Messages = [
    *PARTS,
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "Three"}, {"type": "text", "text": " and "}],
    },
]
OPEN: dict[str, Any] = {"add_generation_prompt": True}
GOES_ON: dict[str, Any] = {"continue_final_message": True}


def in_parts(messages: Messages, *roles: str) -> Messages:
    """The messages with contents as lists of parts, for these roles or for all."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if m["role"] in roles or not roles
        else m
        for m in messages
    ]


def called(text: bool = False, **content: str | None) -> Messages:
    """A chat with a call and its result. text: whether the arguments of the call are JSON text.
    content: the content of the message with the call, or nothing."""
    arguments: Any = {"city": "Köln", "days": 2}
    arguments = json.dumps(arguments, ensure_ascii=False) if text else arguments
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "content": "21 °C"}
    return [*SHORT, {"role": "assistant", **content, "tool_calls": [call]}, result]


# Ways in which published templates write a message, and messages in the form that they read: other
# forms have to become the same text. EACH writes parts, CALLS calls, TEXT_CALLS those with text.
FORMS: dict[str, tuple[str, Messages]] = {
    # Qwen3, Llama 3 and ChatML.
    "text, or nothing": ("{{ m.content if m.content is string else '' }}", LONG),
    "trimmed text": ("{{ m.content | trim }}", LONG),
    "added text": ("{{ '\\n' + m.content }}", LONG),
    "text, or JSON": ("{{ m.content if m.content is string else m.content | tojson }}", LONG),
    # SmolVLM, LLaVA 1.6, Gemma 3, Llama 3.2 Vision, MiniMax.
    "parts": ("EACH", in_parts(LONG)),
    "several parts": ("EACH", TWO),
    "the first part": ("{{ m.content[0]['text'] }}", in_parts(LONG)),
    "both": ("{% if m.content is string %}{{ m.content }}{% else %}EACH{% endif %}", LONG),
    "both, several": ("{% if m.content is string %}{{ m.content }}{% else %}EACH{% endif %}", TWO),
    "text of the system": (
        "{% if m.role == 'system' %}{{ m.content | trim }}{% else %}EACH{% endif %}",
        in_parts(LONG, "user", "assistant"),
    ),
    "parts of results": (
        "{% if m.role == 'tool' %}EACH{% else %}{{ m.content }}CALLS{% endif %}",
        in_parts(called(), "tool"),
    ),
    # A content beside calls that is null.
    "content, or nothing": ("{% if m.content %}{{ m.content }}{% endif %}CALLS", called()),
    "no key": ("{% if 'content' in m %}{{ m.content }}{% else %}CALLS{% endif %}", called()),
    "undefined": (
        "{% if m.content is defined %}{{ m.content }}{% else %}CALLS{% endif %}",
        called(),
    ),
    "trimmed content": ("{{ m.content | trim }}CALLS", called()),
    "added content": ("{{ '\\n' + m.content }}CALLS", called(content="")),
    "split content": ("{{ m.content.split('</think>')[-1] }}CALLS", called(content="")),
    # Arguments, of Hermes, Qwen3-Coder, DeepSeek-V3.
    "written objects": ("{{ m.content }}CALLS", called(content=None)),
    "keys of objects": (
        "{{ m.content }}{% for c in m.tool_calls or [] %}{% for k, v in "
        "c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}",
        called(),
    ),
    "printed text": ("{{ m.content }}TEXT_CALLS", called(text=True)),
    "added text of calls": (
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ ':' + c.function.arguments }}"
        "{% endfor %}",
        called(text=True),
    ),
}
SHORTHANDS = {
    "EACH": "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}",
    "TEXT_CALLS": "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}",
    "CALLS": "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}",
}

# Chats by folder: messages and arguments.
CHATS: dict[str, list[tuple[Messages, dict[str, Any]]]] = {
    "llama3": [
        (SHORT, OPEN | {"date_string": "26 Jul 2024"}),
        (LONG, {"add_generation_prompt": False, "date_string": "26 Jul 2024"}),
        (CALLED, OPEN | {"date_string": "26 Jul 2024", "tools": [WEATHER]}),
        (SHORT, OPEN | {"date_string": "today", "bos_token": "<|eom_id|>"}),
        (BEGUN, GOES_ON | {"date_string": "26 Jul 2024"}),
    ],
    "chatml": [
        (SHORT, OPEN),
        (SHORT, OPEN | {"enable_thinking": False}),
        (LONG, OPEN | {"enable_thinking": True}),
        (THOUGHT, {"add_generation_prompt": False}),
        (CALLED, OPEN | {"tools": [WEATHER, WEATHER]}),
        (BEGUN, GOES_ON),
        ([*SHORT, THOUGHT[-1] | {"content": ""}], GOES_ON | {"add_generation_prompt": False}),
    ],
    "mistral": [
        (SHORT, OPEN),
        (LONG[1:], OPEN),
        (SHORT, OPEN | {"tools": [WEATHER]}),
        (SHORT, OPEN | {"chat_template": "tool_use"}),
        (SHORT, OPEN | {"chat_template": "{{ messages[0].content }}{{ unk_token }}"}),
        (BEGUN, GOES_ON),
        (BEGUN, GOES_ON | {"tools": [WEATHER]}),
    ],
    "gemma": [
        (SHORT, OPEN),
        (LONG, OPEN),
        (PARTS, OPEN),
        (
            SHORT,
            OPEN
            | {
                "chat_template": "rag",
                "documents": [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}],
            },
        ),
        (SHORT, OPEN | {"chat_template": "{{ boi_token }}"}),
        (BEGUN, GOES_ON),
        (BEGUN_PARTS, GOES_ON),
    ],
}


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def characters() -> list[str]:
    return sorted(set("".join(CORPUS)) - {" "})


def words() -> list[str]:
    """Every third word, so that others fall into pieces."""
    return sorted(set(" ".join(CORPUS).split()))[::3]


def byte_level(tokens: list[AddedToken], bos: str | None) -> Tokenizer:
    """Byte-level BPE, as of Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos is not None:
        bos_id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """BPE over characters with byte tokens, as converted from SentencePiece for Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = special("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Byte tokens are ordinary tokens: only training had to know them.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with byte tokens and no prefix space, its decoder that of Gemma."""
    names = ["<bos>", "<eos>", "<unk>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<end>"]
    names += ["<start_of_image>"]
    # Made by rule, since the trainers of Unigram and WordPiece give other orders each time.
    vocab = [(name, 0.0) for name in names]
    vocab += [(character, -8.0) for character in characters()]
    vocab += [("▁" + word, -6.0 - len(word) / 10) for word in words()]
    vocab += [("▁", -7.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=True))
    tokenizer.add_special_tokens(special(*names))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """BPE whose pre-tokenizer and decoder put and take the first space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=special("<unk>", "<s>", "</s>"), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece, which puts spaces between words and takes some away again."""
    names = ("[UNK]", "[CLS]", "[SEP]")
    tokens = [*names, *characters(), *("##" + c for c in characters()), *words(), "'s", "n't"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(special(*names))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


def references(folder: Path) -> dict[str, Any]:
    """Returns transformers' results for the inputs above with the tokenizer in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = []
    for messages, args in CHATS.get(folder.name, []):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **args)
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **args)
        chats.append({"messages": messages, "args": args, "text": text, "ids": ids})
    return {
        "encode": [
            {
                "text": text,
                "ids": tokenizer.encode(text),
                "bare_ids": tokenizer.encode(text, add_special_tokens=False),
            }
            for text in TEXTS
        ],
        "decode": [
            {
                "ids": ids,
                "text": tokenizer.decode(ids, skip_special_tokens=True),
                "full_text": tokenizer.decode(ids, skip_special_tokens=False),
            }
            for ids in ID_LISTS
        ],
        "chats": chats,
    }


def forms() -> list[dict[str, Any]]:
    """Returns transformers' results for FORMS."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "chatml")
    cases = []
    for name, (body, messages) in FORMS.items():
        for shorthand, written in SHORTHANDS.items():
            body = body.replace(shorthand, written)
        template = "{{ tools }}{% for m in messages %}<{{ m.role }}>" + body + "{% endfor %}"
        args = {"chat_template": template}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **args)
        cases.append({"name": name, "messages": messages, "args": args, "text": text})
    return cases


def main() -> None:
    """Write tokenizer.json into each folder, and expected.json beside them."""
    llama3 = special(
        "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>"
    )
    chatml = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    chatml += [
        AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")
    ]
    built = {
        "llama3": byte_level([*llama3, *special("<|end_header_id|>")], "<|begin_of_text|>"),
        "chatml": byte_level(chatml, None),
        "mistral": byte_fallback(),
        "gemma": unigram(),
        "metaspace": metaspace(),
        "wordpiece": word_piece(),
    }
    for name, tokenizer in built.items():
        tokenizer.save(str(DATA / name / "tokenizer.json"), pretty=False)
    expected = {name: references(DATA / name) for name in built}
    expected["chatml"]["forms"] = forms()
    text = json.dumps(expected, indent=1, ensure_ascii=True)
    (DATA / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
