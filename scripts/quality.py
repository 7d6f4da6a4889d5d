"""Measures the cost of quantising: how far the answers of a quantised model are from its own.

    python scripts/quality.py                    the demo model
    python scripts/quality.py MODEL --text FILE  another one on a text
    python scripts/quality.py MODEL              on stories that the model itself samples

The demo model reads stories and chats that its training text did not contain. Each model runs as it
is stored, then quantised. Of every token's distribution, against the stored model's:

    perplexity      exp of the mean negative log probability of the text's next token
    KL, KL 99 %     divergence from the stored model's distribution, in nats: mean, and what one
                    position of a hundred exceeds
    same top        how often the most probable token is the same
    decode          KL and same top once more, one token at a time: decoding has kernels of its own

Keys and values are f32, so that the weights alone differ, and at the end f16 and q8 beside the
weights as stored.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

import demo_corpus  # noqa: E402

import infer  # noqa: E402
from infer.bench.report import markdown_table  # noqa: E402
from infer.kernels.gpu.adapters import choose_adapter  # noqa: E402
from infer.models.loading import plan  # noqa: E402
from infer.versions import versions  # noqa: E402

Floats = NDArray[np.float32]

# Name, load's quantize and kv_dtype, and what embeddings are stored as under q4.
VARIANTS = (
    ("as stored", None, "f32", "q8"),
    ("q8", "q8", "f32", "q8"),
    ("q4", "q4", "f32", "q8"),
    ("q4, embeddings too", "q4", "f32", "q4"),
    ("KV cache f16", None, "f16", "q8"),
    ("KV cache q8", None, "q8", "q8"),
)


@dataclass(frozen=True)
class Quality:
    """The quality of one variant of a model on `tokens` tokens. Fields that begin with decode_ are
    of forced decoding of decode_tokens tokens."""

    model: str
    variant: str
    weight_bytes: int
    tokens: int
    perplexity: float
    kl: float
    kl_99: float
    same_top: float
    decode_tokens: int
    decode_kl: float
    decode_same_top: float


# Texts


def demo_texts(llm: infer.LLM, rng: random.Random) -> Iterator[list[int]]:
    """Stories and chats that were held out from the demo model's training."""
    while True:
        yield llm.encode(demo_corpus.plain_story(rng, held=True)[0])
        messages = demo_corpus.dialogue(rng, held=True)[1]
        yield llm.tokenizer.encode_chat(messages, add_generation_prompt=False)


def sampled_texts(llm: infer.LLM, rng: random.Random) -> Iterator[list[int]]:
    """Stories that the model tells by itself, without any filter."""
    prompt = llm.encode("Once upon a time")
    while True:
        options = infer.SamplingParams(
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=rng.getrandbits(32), max_tokens=300
        )
        yield prompt + llm.generate(prompt, params=options).token_ids


def file_texts(llm: infer.LLM, path: Path) -> Iterator[list[int]]:
    """A text in pieces of the context's length."""
    ids = llm.encode(path.read_text(encoding="utf-8"))
    for start in range(0, len(ids), llm.context):
        yield ids[start : start + llm.context]


def enough(texts: Iterator[list[int]], tokens: int, longest: int) -> list[list[int]]:
    """Texts until they have `tokens` tokens together, each cut to `longest` tokens."""
    chosen: list[list[int]] = []
    for ids in texts:
        if sum(map(len, chosen)) >= tokens:
            break
        if len(ids) > 1:
            chosen.append(ids[:longest])
    return chosen


# Distributions


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def scored(llm: infer.LLM, texts: Sequence[list[int]]) -> list[Floats]:
    """The log probabilities after every token of each text except the last, computed by the kernels
    of prefill."""
    return [log_softmax(llm.logits(ids)[:-1]) for ids in texts]


def decoded(llm: infer.LLM, texts: Sequence[list[int]]) -> list[Floats]:
    """Returns the log probabilities computed by the kernels of decode: each token of a text is
    forced after the one before."""
    return [log_softmax(forced(llm, ids)) for ids in texts]


def forced(llm: infer.LLM, ids: list[int]) -> Floats:
    rows: list[Floats] = []

    def next_of_text(so_far: NDArray[np.int64], logits: Floats) -> Floats:
        rows.append(logits.copy())
        only = np.full_like(logits, -np.inf)
        only[ids[len(so_far)]] = 0.0
        return only

    params = infer.SamplingParams(max_tokens=len(ids) - 1).resolved({})
    for _ in llm.engine.generate(ids[:1], params, logits_processor=next_of_text):
        pass
    return np.stack(rows)


def compare(got: Sequence[Floats], exact: Sequence[Floats]) -> tuple[Floats, float]:
    """The divergence at each position, and the share of positions with the same most probable
    token."""
    kl = [(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(exact, got, strict=True)]
    same = [p.argmax(axis=1) == q.argmax(axis=1) for p, q in zip(exact, got, strict=True)]
    return np.concatenate(kl), float(np.concatenate(same).mean())


def perplexity(log_probabilities: Sequence[Floats], texts: Sequence[list[int]]) -> float:
    own = [
        rows[np.arange(len(rows)), ids[1:]]
        for rows, ids in zip(log_probabilities, texts, strict=True)
    ]
    return math.exp(-float(np.concatenate(own).mean()))


# The comparison


def measure(
    model: str, text: Path | None, tokens: int, decode_tokens: int, device: str | None
) -> Iterator[Quality]:
    """The quality of each variant, the stored model first."""
    texts: list[list[int]] = []
    few: list[list[int]] = []
    exact: tuple[list[Floats], list[Floats]] = ([], [])
    for variant, quantize, kv_dtype, embeddings in VARIANTS:
        plan.EMBEDDING_DTYPE = embeddings
        with infer.load(model, quantize=quantize, kv_dtype=kv_dtype, device=device) as llm:
            if not texts:
                rng = random.Random(0)
                if text is not None:
                    found = file_texts(llm, text)
                else:
                    found = (demo_texts if model == "demo" else sampled_texts)(llm, rng)
                texts = enough(found, tokens, llm.context)
                few = enough(iter(texts), decode_tokens, llm.context)
                exact = scored(llm, texts), decoded(llm, few)
            got = exact[0] if variant == "as stored" else scored(llm, texts)
            kl, same_top = compare(got, exact[0])
            decode_kl, decode_same_top = compare(decoded(llm, few), exact[1])
            yield Quality(
                model=llm.name,
                variant=variant,
                weight_bytes=sum(tensor.nbytes for tensor in llm.engine.weights.values()),
                tokens=len(kl),
                perplexity=perplexity(got, texts),
                kl=float(kl.mean()),
                kl_99=float(np.quantile(kl, 0.99)),
                same_top=same_top,
                decode_tokens=len(decode_kl),
                decode_kl=float(decode_kl.mean()),
                decode_same_top=decode_same_top,
            )


def table(found: Sequence[Quality]) -> str:
    header = ["model", "weights", "MiB", "perplexity", "KL", "KL 99 %", "same top"]
    header += ["decode KL", "decode same top"]
    rows = [
        [
            q.model,
            q.variant,
            f"{q.weight_bytes / 2**20:,.2f}",
            f"{q.perplexity:.4f}",
            f"{q.kl:.5f}",
            f"{q.kl_99:.5f}",
            f"{100 * q.same_top:.2f} %",
            f"{q.decode_kl:.5f}",
            f"{100 * q.decode_same_top:.2f} %",
        ]
        for q in found
    ]
    return markdown_table(header, rows, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="What quantising costs.")
    parser.add_argument("models", nargs="*", default=["demo"], help="ids, folders, or demo")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to read")
    parser.add_argument("--tokens", type=int, default=8000, metavar="N", help="how much (8000)")
    parser.add_argument(
        "--decode-tokens", type=int, default=1000, metavar="N", help="how much to decode (1000)"
    )
    parser.add_argument("--device", help="index or part of the name of an adapter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    options = parser.parse_args()
    found = [
        quality
        for model in options.models
        for quality in measure(
            model, options.text, options.tokens, options.decode_tokens, options.device
        )
    ]
    print(table(found))
    if options.json is not None:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "adapter": str(choose_adapter(options.device)),
            "versions": versions(),
            "results": [asdict(q) for q in found],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
