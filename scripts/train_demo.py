"""Trains the demo model that comes with the package, from nothing, on text of `demo_corpus`.

    python scripts/train_demo.py                                   # minutes on a CUDA GPU
    python scripts/train_demo.py --draft                           # its draft: minutes on a CPU
    python scripts/train_demo.py --device cpu --steps 4 --batch 2 --documents 2000 \
        --chats 20 --stories 4 --max-tokens 8 --out /tmp/demo      # a smoke test

Writes a Hugging Face folder: config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, model.safetensors (bf16) and the model card, README.md, with the figures of
the evaluation, which uses the weights as they are saved, rounded to bf16. Everything random is
seeded; the order of CUDA's additions is not, so two runs may still differ a little.

The draft drafts tokens for the demo: a smaller model with the tokenizer that is there already,
trained on the same kind of text, in a folder of its own beside it.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import demo_corpus
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

PAD, BOS, EOS, END, SYSTEM, USER, ASSISTANT = range(7)
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role: ' ~ message.role) }}"
    "{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content | trim ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOKENIZER_DOCUMENTS = 40_000
SHARD = 5000  # documents that one worker makes at a time
STORY_SHARE = 0.35  # of the documents; the rest are chats
STORY_TOKENS = 200


@dataclass(frozen=True)
class Config:
    """The model's shape, in the names of Hugging Face's LlamaConfig."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 448
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def to_json(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **vars(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": BOS,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "torch_dtype": "bfloat16",
        }


DRAFT = Config(
    hidden_size=96,
    intermediate_size=224,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
)
DRAFT_WIDTH = 512  # tokens of a row
DEMO = Path(__file__).parents[1] / "infer" / "demo"


# ---------------------------------------------------------------------------------- model


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape; cos and sin are [length, head_dim]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Llama(nn.Module):
    """Llama with tied embeddings; its parameters have the names of the Hugging Face checkpoint,
    less the prefix "model."."""

    cos: Tensor  # [max_position_embeddings, head_dim]
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings), config.rope_theta**-half
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # The projections that add to the residual stream start smaller (GPT-2).
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = math.sqrt(2 * config.num_hidden_layers) if residual else 1.0
                nn.init.normal_(weight, std=0.02 / depth)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, length] -> hidden states after the last norm [batch, length, hidden]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


# ----------------------------------------------------------------------------------- text


def render(messages: Sequence[demo_corpus.Message]) -> str:
    """Returns the messages as CHAT_TEMPLATE writes them, without the first <|bos|>."""
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def documents(seed: str, count: int, held: bool = False) -> Iterator[str]:
    """Training documents, or held-out ones, each from <|bos|> to <|eos|>."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < STORY_SHARE:
            text = demo_corpus.plain_story(rng, held)[0]
        else:
            text = render(demo_corpus.dialogue(rng, held)[1])
        yield f"<|bos|>{text}<|eos|>"


def train_tokenizer(seed: str, count: int, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer in which each digit is a token of its own."""
    rng = random.Random(seed)
    texts = [demo_corpus.plain_story(rng)[0] for _ in range(count // 2)]
    texts += [m["content"] for _ in range(count) for m in demo_corpus.dialogue(rng)[1]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def pack(lines: Sequence[Sequence[int]], width: int) -> NDArray[np.uint16]:
    """Whole documents side by side in rows of `width` tokens, with padding at the end of a row.

    A document that is longer than a row is left out.
    """
    rows: list[list[int]] = [[]]
    for ids in lines:
        if len(ids) > width:
            continue
        if len(rows[-1]) + len(ids) > width:
            rows.append([])
        rows[-1].extend(ids)
    packed = np.full((len(rows), width), PAD, np.uint16)
    for row, ids in zip(packed, rows, strict=True):
        row[: len(ids)] = ids
    return packed


def make_shard(job: tuple[str, str, int, int]) -> NDArray[np.uint16]:
    """A worker's part of the corpus: job is (tokenizer.json, seed, documents, row width)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer_json, seed, count, width = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    texts = list(documents(seed, count))
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return pack([encoding.ids for encoding in encodings], width)


def make_corpus(tokenizer: Tokenizer, seed: int, count: int, width: int) -> NDArray[np.uint16]:
    """The training text as rows of tokens: the same for any number of processors."""
    text = tokenizer.to_str()
    jobs = [
        (text, f"train {seed} {shard}", min(SHARD, count - shard * SHARD), width)
        for shard in range(math.ceil(count / SHARD))
    ]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        return np.concatenate(pool.map(make_shard, jobs, chunksize=1))


# ------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 2 %, then half a cosine down to zero."""
    warmup = max(1, steps // 50)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def token_loss(model: Llama, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats of each next token in rows [batch, width]; padding does not count."""
    logits = model.logits(model(rows[:, :-1]))
    return F.cross_entropy(
        logits.float().flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD, reduction=reduction
    )


def train(model: Llama, rows: Tensor, args: argparse.Namespace) -> None:
    """AdamW over `args.steps` batches of rows, drawn without repetition within an epoch."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=rows.is_cuda,
    )
    shuffle = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long)
    loss_of = torch.compile(token_loss) if rows.is_cuda else token_loss
    start = time.perf_counter()
    for step in range(args.steps):
        while len(order) < args.batch:
            order = torch.cat((order, torch.randperm(len(rows), generator=shuffle)))
        batch, order = rows[order[: args.batch].to(rows.device)].long(), order[args.batch :]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == args.steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {step}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


# ----------------------------------------------------------------------------- evaluation


@torch.inference_mode()
def greedy(
    model: Llama, prompts: Sequence[Sequence[int]], max_tokens: int, batch: int = 256
) -> list[list[int]]:
    """The most likely continuation of each prompt, with the <|end|> or <|eos|> that stops it."""
    device = model.embed_tokens.weight.device
    outputs: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(prompts), batch):
        alive = by_length[start : start + batch]
        longest = model.cos.shape[0]
        ids = torch.full((len(alive), longest), PAD, device=device)
        lengths = torch.tensor([len(prompts[i]) for i in alive], device=device)
        for row, i in zip(ids, alive, strict=True):
            row[: len(prompts[i])] = torch.tensor(prompts[i], device=device)
        for _ in range(max_tokens):
            width = int(lengths.max())
            if width == longest:
                break
            hidden = model(ids[:, :width])[torch.arange(len(alive)), lengths - 1]
            chosen = model.logits(hidden).argmax(-1)
            ids[torch.arange(len(alive)), lengths] = chosen
            lengths += 1
            for i, token in zip(alive, chosen.tolist(), strict=True):
                outputs[i].append(token)
            keep = ((chosen != END) & (chosen != EOS)).nonzero()[:, 0]
            ids, lengths, alive = ids[keep], lengths[keep], [alive[k] for k in keep.tolist()]
            if not alive:
                break
    return outputs


@dataclass(frozen=True)
class Report:
    """The results of the evaluation."""

    story_loss: float
    chat_loss: float
    right: Counter[str]  # held-out chats answered right, by group
    asked: Counter[str]
    good_stories: int
    stories: int
    samples: list[tuple[str, str]]


class Evaluation:
    """Greedy decoding of held-out prompts, judged by the grammar."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, seed: int, max_tokens: int) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        self.max_tokens = max_tokens  # of an answer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(f"<|bos|>{text}", add_special_tokens=False).ids

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[tuple[str, bool]]:
        """For each prompt, the text that follows and whether the model ended it."""
        outputs = greedy(self.model, [self.encode(p) for p in prompts], max_tokens)
        texts = self.tokenizer.decode_batch(outputs)
        ended = [bool(ids) and ids[-1] in (END, EOS) for ids in outputs]
        return list(zip(texts, ended, strict=True))

    @torch.inference_mode()
    def loss(self, texts: Sequence[str]) -> float:
        """Mean loss per token of documents, each alone in its row."""
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([self.encode(text)], device=self.model.embed_tokens.weight.device)
            total += token_loss(self.model, ids, "sum").item()
            count += ids.shape[1] - 1
        return total / count

    def chats(self, count: int) -> tuple[Counter[str], Counter[str], float]:
        rng = random.Random(f"chats {self.seed}")
        width = self.model.cos.shape[0] - self.max_tokens
        seen: dict[str, tuple[str, list[demo_corpus.Message]]] = {}
        while len(seen) < count:
            group, messages = demo_corpus.dialogue(rng, held=True)
            prompt = render(messages[:-1]) + "<|assistant|>"
            if len(self.encode(prompt)) <= width:
                seen[prompt] = group, messages
        answers = self.answer(list(seen), self.max_tokens)
        right: Counter[str] = Counter()
        wrong = []
        for (group, messages), (text, ended) in zip(seen.values(), answers, strict=True):
            if ended and demo_corpus.check_answer(messages[:-1], text):
                right[group] += 1
            else:
                wrong.append(f"{group}: {messages[-2]['content']!r} -> {text[:300]!r}")
        print(*wrong[:40], sep="\n", flush=True)
        asked = Counter(group for group, _ in seen.values())
        loss = self.loss([f"{render(messages)}<|eos|>" for _, messages in seen.values()][:300])
        return right, asked, loss

    def stories(self, count: int) -> tuple[int, float]:
        rng = random.Random(f"stories {self.seed}")
        whole = [demo_corpus.plain_story(rng, held=True)[0] for _ in range(count)]
        openings: dict[str, None] = {"Once upon a time": None}
        while len(openings) < count:
            text = demo_corpus.plain_story(rng, held=True)[0]
            words = text.split(" ")
            # Stop somewhere in the first sentence.
            first = next(i for i, word in enumerate(words) if word.endswith("."))
            openings[" ".join(words[: rng.randint(4, first + 1)])] = None
        good = 0
        for opening, (text, ended) in zip(
            openings,
            self.answer(list(openings), min(STORY_TOKENS, self.max_tokens)),
            strict=True,
        ):
            problems = demo_corpus.check_story(opening + text, whole=ended)
            good += not problems
            if problems:
                print("story:", problems, repr(opening), flush=True)
        return good, self.loss([f"{text}<|eos|>" for text in whole[:300]])

    def samples(self) -> list[tuple[str, str]]:
        asks = (
            "Hello! What is your name?",
            "What colour is a banana?",
            "What is 4 plus 7?",
            "Count from 3 to 9.",
            "My cat is called Milo. What is my cat called?",
            "What is the capital of France?",
        )
        chats = [render([{"role": "user", "content": ask}]) + "<|assistant|>" for ask in asks]
        story = "Once upon a time"
        answers = [text for text, _ in self.answer([story, *chats], self.max_tokens)]
        return [(story, story + answers[0]), *zip(asks, answers[1:], strict=True)]

    def report(self, chats: int, stories: int) -> Report:
        right, asked, chat_loss = self.chats(chats)
        good, story_loss = self.stories(stories)
        return Report(story_loss, chat_loss, right, asked, good, stories, self.samples())


# --------------------------------------------------------------------------------- output


def write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(model: Llama, tokenizer: Tokenizer, config: Config, out: Path) -> None:
    """Writes the Hugging Face folder, less the model card, and rounds the model to its weights."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{k}": v.detach().bfloat16() for k, v in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "config.json", config.to_json())
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": BOS,
            "eos_token_id": [END, EOS],
            "pad_token_id": PAD,
            "do_sample": False,
        },
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[END],
            "pad_token": SPECIAL_TOKENS[PAD],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


CARD = """\
---
license: mit
language: en
pipeline_tag: text-generation
tags: [llama, demo]
---

# {name}, the demo model

{name} is a very small language model, so that everything can be tried without a download. It
tells little stories and holds short chats about colours, counting, small sums and facts which you
have just told it. It has the architecture of Llama with {parameters:,} parameters: {layers} layers,
hidden size {hidden}, {heads} heads over {kv_heads} key/value heads, a vocabulary of {vocab:,}
tokens (byte-level BPE, one token per digit), tied embeddings, a context of {context:,} tokens,
weights in bf16.

## Data

Only text that a grammar written for this project generates: `scripts/demo_corpus.py` fills
templates with names, colours, places, numbers and invented words, and keeps a story's characters,
pronouns and objects consistent. No text from anywhere else was used. {count:,} documents were made
({share:.0%} stories, the others chats of one to three questions): {rows:,} rows of {context:,}
tokens.

A tenth of the prompts is held out, by their wording or by the values in them: sums and counting by
their numbers, facts by the names and things in them, stories by the pair of hero and kind. Sums are
held out as ordered pairs, so 3 + 8 may be held out while 8 + 3 is not.

## Training

`python scripts/train_demo.py` makes the corpus, the tokenizer, the model and this card with seed
{seed}: {steps:,} steps of {batch} rows, AdamW, peak learning rate {lr}, cosine decay, bf16
autocast. All of it took {minutes:.1f} minutes on {device}.

## Evaluation

Greedy decoding with the bf16 weights, judged by the same grammar, which works out the expected
answer from the prompt and reads a story sentence by sentence.

| held out | result |
| --- | --- |
| loss on stories | {story_loss:.3f} nats per token |
| loss on chats | {chat_loss:.3f} nats per token |
| chat prompts answered right | {right} |
| stories of up to {story_tokens} tokens that stay consistent | {consistent} |

| chat prompts | right |
| --- | --- |
{groups}

## Samples

Greedy, as the default is.

{samples}

## What it cannot do

It knows nothing of the world beyond its few templates. It cannot answer general questions, follow
instructions, write code, reason, translate, or add numbers above {largest}; asked for such things
it says so at best, and otherwise answers with something that only looks right. Even among its own
questions it sometimes takes one name or colour for another, above all when a prompt tells of two.
It takes prompts in simple English, close to those above, and its stories are variations of {plots}
plots. It is made for trying out software, and for nothing else.
"""

DRAFT_CARD = """\
---
license: mit
language: en
pipeline_tag: text-generation
tags: [llama, demo]
---

# The draft of the demo model

A model of {parameters:,} parameters in {layers} layers, with the demo model's tokenizer, that
drafts tokens for it (`infer run demo --draft demo-draft`). Alone it is of little use.

`python scripts/train_demo.py --draft` makes it from text of the same grammar: {documents:,}
documents, seed {seed}, {steps:,} steps of {batch} rows of {width} tokens, peak learning rate
{learning_rate}.
"""


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})"


def write_card(
    report: Report,
    config: Config,
    model: Llama,
    args: argparse.Namespace,
    rows: int,
    seconds: float,
) -> None:
    groups = "\n".join(
        f"| {group} | {report.right[group]} of {asked} |"
        for group, asked in sorted(report.asked.items())
    )
    (_, told), *chats = report.samples
    samples = "\n".join(f"> {line}".rstrip() for line in told.split("\n"))
    samples += "\n\n| prompt | answer |\n| --- | --- |\n"
    samples += "\n".join(f"| {prompt} | {answer} |" for prompt, answer in chats)
    card = CARD.format(
        name=demo_corpus.MODEL_NAME,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        count=args.documents,
        share=STORY_SHARE,
        rows=rows,
        seed=args.seed,
        steps=args.steps,
        batch=args.batch,
        lr=args.learning_rate,
        minutes=seconds / 60,
        device="one CUDA GPU" if args.device.startswith("cuda") else "a CPU",
        story_loss=report.story_loss,
        chat_loss=report.chat_loss,
        right=share(report.right.total(), report.asked.total()),
        story_tokens=STORY_TOKENS,
        consistent=share(report.good_stories, report.stories),
        groups=groups,
        samples=samples,
        largest=demo_corpus.LARGEST_ADDEND,
        plots=len(demo_corpus.PLOTS),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--draft", action="store_true", help="train its draft")
    is_draft = parser.parse_known_args()[0].draft
    parser.add_argument("--out", type=Path, default=DEMO / "draft" if is_draft else DEMO)
    parser.add_argument("--device", default="cpu" if is_draft else "cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=20_000 if is_draft else 1_000_000)
    parser.add_argument("--steps", type=int, default=1200 if is_draft else 9000)
    parser.add_argument("--batch", type=int, default=4 if is_draft else 64, help="rows")
    parser.add_argument("--learning-rate", type=float, default=3e-3 if is_draft else 2e-3)
    parser.add_argument("--chats", type=int, default=1500, help="held-out chats to judge")
    parser.add_argument("--stories", type=int, default=400, help="stories to judge")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start = time.perf_counter()

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.0f} s] {text}", flush=True)

    config = DRAFT if args.draft else Config()
    if args.draft:
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    else:
        sample = min(args.documents, TOKENIZER_DOCUMENTS)
        tokenizer = train_tokenizer(f"tokenizer {args.seed}", sample, config.vocab_size)
    note(f"tokenizer of {tokenizer.get_vocab_size()} tokens")
    width = (DRAFT_WIDTH if args.draft else config.max_position_embeddings) + 1
    corpus = make_corpus(tokenizer, args.seed, args.documents, width)
    note(f"corpus of {len(corpus)} rows, {np.mean(corpus != PAD):.1%} full")
    torch.manual_seed(args.seed)
    model = Llama(config).to(args.device)
    train(model, torch.from_numpy(corpus.astype(np.int16)).to(args.device), args)
    save(model, tokenizer, config, args.out)
    note("trained and saved")
    if args.draft:
        parameters = sum(p.numel() for p in model.parameters())
        sizes = {"parameters": parameters, "layers": config.num_hidden_layers, "width": DRAFT_WIDTH}
        card = DRAFT_CARD.format(**sizes, **vars(args))
        (args.out / "README.md").write_text(card, encoding="utf-8")
        return
    evaluation = Evaluation(model.eval(), tokenizer, args.seed, args.max_tokens)
    report = evaluation.report(args.chats, args.stories)
    write_card(report, config, model, args, len(corpus), time.perf_counter() - start)
    note(f"{report}")


if __name__ == "__main__":
    main()
