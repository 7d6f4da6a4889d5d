"""Measures the cost of holding every answer of a batch to a JSON schema.

    python scripts/structured.py --shape llama-3.1-8b --quantize q4 --clients 1,16,64
    python scripts/structured.py MODEL --json NAME

Clients as in `infer bench --clients`: their answers free, under a schema, and under one that bounds
the length of each string, where masks take longest; and the share of the speed that is left. A
shape has random weights and no tokenizer, so its tokens are random words, unless --tokenizer names
another. --speculate auto drafts in all, under a schema what it forces too. --json keeps a
report in scripts/results/structured.
"""

import argparse
import json
import random
import string
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infer.bench.measure import GREEDY, EngineBench
from infer.bench.options import Subject
from infer.bench.report import Load, markdown_table
from infer.bench.run import open_engine
from infer.engine.constraint import Constraints
from infer.engine.speculation import WAYS
from infer.hub import resolve
from infer.text.folder_tokenizer import open_tokenizer
from infer.text.tokenizer import Tokenizer
from infer.versions import commit, versions

RESULTS = Path(__file__).resolve().parent / "results" / "structured"
END = "<|end|>"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 30},
                "code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "colour", "tags", "address"],
    "additionalProperties": False,
}


def endless(item: dict[str, Any]) -> dict[str, Any]:
    """A schema of lists with at least 100,000 items, so that all answers run to their last
    token."""
    return {"type": "array", "items": item, "minItems": 100_000}


def unbounded(schema: Any) -> Any:
    """A copy of the schema whose strings may have any length."""
    if isinstance(schema, dict):
        return {name: unbounded(part) for name, part in schema.items() if name != "maxLength"}
    return [unbounded(part) for part in schema] if isinstance(schema, list) else schema


def words(size: int) -> Tokenizer:
    """A tokenizer of `size` tokens: bytes, numbers, punctuation of JSON, and words."""
    draw = random.Random(0)
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    others = [str(n) for n in range(1000)]
    others += ["".join(draw.choices('{}[]",:._-Ġ', k=draw.randint(2, 4))) for _ in range(3000)]
    for word in others:
        vocab.setdefault(word, len(vocab))
    while len(vocab) < size - 1:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9)))
        vocab.setdefault(draw.choice(("", "Ġ")) + word, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return Tokenizer(backend, special_tokens={"eos_token": END})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder, or what the hub's cache has")
    parser.add_argument("--shape")
    parser.add_argument("--quantize")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--clients", default="1,16")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--decode-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speculate", default="off", choices=WAYS)
    parser.add_argument("--json", metavar="NAME", help="of the report, after the date")
    args = parser.parse_args()
    clients = [int(each) for each in args.clients.split(",")]
    needed = args.prompt_tokens + args.decode_tokens + 1
    subject = Subject(model=args.model, shape=args.shape, quantize=args.quantize)
    options = {"needed": needed, "max_batch": max(clients), "speculate": args.speculate}
    loads: list[dict[str, Load]] = []
    with open_engine(subject, **options) as (_, engine):
        folder = args.tokenizer if args.model is None else resolve(args.model).path
        tokenizer = words(engine.vocab_size) if folder is None else open_tokenizer(folder)
        constraints = Constraints(tokenizer, engine.vocab_size)
        bench = EngineBench(engine, 1.0, args.repeats, lambda test, run, runs: None)
        schemas = {"held": endless(unbounded(PERSON)), "bounded": endless(PERSON)}
        engine.runner.steps.compile_batches()  # as a server does
        for count in clients:
            sizes = count, args.prompt_tokens, args.decode_tokens
            own = {"free": bench.load(*sizes)}
            for kind, schema in schemas.items():
                held = replace(GREEDY, schema=schema)
                own[kind] = bench.load(*sizes, held, constraints.of)
            loads.append(own)
        gpu = engine.gpu
    rows = []
    for each in loads:
        speeds = [load.tps for load in each.values()]
        itl = [1e3 * load.itl_seconds[0] for load in each.values()]
        cells = [f"{each['free'].clients}", *(f"{value:,.1f}" for value in (*speeds, *itl))]
        rows.append([*cells, *(f"{100 * speed / speeds[0]:.0f} %" for speed in speeds[1:])])
    names = list(loads[0])
    header = ["clients", *(f"{name}, t/s" for name in names), *(f"{name}, ms" for name in names)]
    print(markdown_table([*header, *(f"{name}, share" for name in names[1:])], rows, 0))
    if args.json:
        report = {
            "schema": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "versions": versions(),
            "adapter": gpu.name,
            "driver": gpu.driver,
            "options": vars(args) | {"tokenizer": args.tokenizer and args.tokenizer.name},
            "loads": [{name: asdict(load) for name, load in each.items()} for each in loads],
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{report['date'][:10]}-{args.json}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
