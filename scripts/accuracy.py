"""Measures how far the logits of infer, and of transformers in bf16, are from transformers in f32.

    python scripts/accuracy.py demo --text FILE
    python scripts/accuracy.py --shape llama-3.1-8b --webgpu dawn --json FILE
    python scripts/accuracy.py --shape qwen3-30b-a3b --layers 6 --seed 1

Needs the extra `reference`. A model is a folder, an id or demo; a shape is a model of that width on
random weights, never zeros, of which --layers takes the first ones. Prompts are parts of a text, or
random ids. Ours are computed in each precision that the adapter has (`load(precision=)`). Of the
logits after every token of all prompts, against those of transformers in f32:

    NMSE            normalised mean square error of the logits
    prefill NMSE    the same of the logits after each prompt's last token, by the steps of a prompt
    KL, KL 99 %     divergence of the distributions, in nats: mean, and what one position of a
                    hundred exceeds
    same top        how often the most probable token is the same: greedy agreement

Transformers runs on the CPU unless --reference-device says otherwise.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from make_shape import write as make_shape  # noqa: E402
from quality import compare, log_softmax  # noqa: E402

import infer  # noqa: E402
from infer.bench.report import markdown_table  # noqa: E402
from infer.hub import resolve  # noqa: E402
from infer.kernels.checks.reference import nmse  # noqa: E402
from infer.kernels.errors import InferError, RequestError  # noqa: E402
from infer.kernels.gpu.adapters import PRECISIONS, choose_adapter  # noqa: E402
from infer.kernels.state.kv_cache import KV_DTYPES  # noqa: E402
from infer.models.loading.shapes import SHAPES  # noqa: E402
from infer.versions import versions  # noqa: E402

Floats = NDArray[np.float32]
TOKENS = "5,17,64,200,700"  # lengths of prompts that take different tiles


@dataclass(frozen=True)
class Accuracy:
    """How far the logits of one way to compute a model are from the reference, over all `tokens` of
    the prompts. products: the precision in which we multiplied ("f16" or "f32"), None for
    transformers."""

    model: str
    computed: str
    products: str | None
    tokens: int
    nmse: float
    prefill_nmse: float
    kl: float
    kl_99: float
    same_top: float


@dataclass(frozen=True)
class Logits:
    """Logits of the prompts. whole: for each prompt the logits after every token, [tokens, vocab].
    last: the logits after each prompt's last token, computed as for an answer, [prompts, vocab]."""

    whole: list[Floats]
    last: Floats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a folder, an id, or demo")
    parser.add_argument("--shape", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, metavar="N", help="of the shape: the first N alone")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (0)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what prompts are parts of")
    parser.add_argument(
        "--tokens", type=_integers, default=TOKENS, metavar="N,N", help=f"of prompts ({TOKENS})"
    )
    parser.add_argument("--device", help="index or part of the name of an adapter")
    parser.add_argument("--webgpu", help="the library that runs the kernels")
    parser.add_argument("--precision", choices=PRECISIONS, help="one alone, not all of them")
    parser.add_argument("--quantize", choices=("q8", "q4"), help="quantise our weights")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="f16", help="of our cache (f16)")
    parser.add_argument("--reference-device", default="cpu", help="of torch (cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    args = parser.parse_args()
    try:
        found = [*measure(args)]
    except (InferError, OSError) as error:
        sys.exit(f"error: {error}")
    print(table(found))
    if args.json is not None:
        own = {name: value for name, value in vars(args).items() if name not in ("json", "text")}
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "adapter": str(choose_adapter(args.device, args.webgpu)),
            "versions": versions(args.webgpu) | reference_versions(),
            "options": own | {"text": args.text and str(args.text)},
            "results": [asdict(each) for each in found],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def measure(args: argparse.Namespace) -> Iterator[Accuracy]:
    """Yields the accuracies, that of transformers in bf16 first. Raises RequestError for options
    that exclude each other."""
    if (args.model is None) == (args.shape is None):
        raise RequestError("Give either a model or a shape (scripts/accuracy.py demo).")
    if args.layers is not None and args.shape is None:
        raise RequestError("Layers are taken of a shape alone (--shape).")
    if min(args.tokens) < 1:
        raise RequestError("Prompts have at least one token.")
    reference_versions()  # before anything is computed
    with ExitStack() as stack:
        if args.shape is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / args.shape
            make_shape(args.shape, folder, args.layers, args.seed)
            layers = "" if args.layers is None else f", {args.layers} layers"
            name = f"{args.shape}{layers}, random"
        else:
            resolved = resolve(args.model)
            folder, name = resolved.path, resolved.name
        prompts = make_prompts(folder, args.tokens, args.text, args.seed)
        exact = of_transformers(folder, prompts, "float32", args.reference_device)
        rounded = of_transformers(folder, prompts, "bfloat16", args.reference_device)
        yield accuracy(name, "transformers bf16", None, rounded, exact)
        del rounded
        for precision in PRECISIONS if args.precision is None else (args.precision,):
            with infer.load(
                folder,
                device=args.device,
                webgpu=args.webgpu,
                precision=precision,
                quantize=args.quantize,
                kv_dtype=args.kv_dtype,
                context=max(args.tokens) + 1,
                max_batch=1,
            ) as llm:
                got = Logits(
                    [llm.logits(ids) for ids in prompts],
                    np.stack([prefilled(llm, ids) for ids in prompts]),
                )
                computed = ", ".join(filter(None, (f"precision {precision}", args.quantize)))
                products = llm.engine.runner.products
            yield accuracy(name, computed, products, got, exact)
            if products == "f32":
                break  # as in the other precision


def make_prompts(
    folder: Path, tokens: Sequence[int], text: Path | None, seed: int
) -> list[list[int]]:
    """A prompt of each length in `tokens`: consecutive parts of a text, or random ids."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if text is None:
        vocabulary = config.get("text_config", config)["vocab_size"]
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocabulary, count).tolist() for count in tokens]
    from infer.text.folder_tokenizer import open_tokenizer

    ids = open_tokenizer(folder).encode(text.read_text(encoding="utf-8"))
    if len(ids) < sum(tokens):
        raise RequestError(f"{text} has {len(ids):,} tokens, and prompts take {sum(tokens):,}.")
    ends = np.cumsum(tokens)
    return [ids[end - count : end] for end, count in zip(ends, tokens, strict=True)]


# Logits


def reference_versions() -> dict[str, str]:
    """The versions of torch and transformers. Raises RequestError if one is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise RequestError(
            f"{error.name} is not installed: pip install -e '.[reference]'."
        ) from None
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def of_transformers(
    folder: Path, prompts: Sequence[Sequence[int]], dtype: str, device: str
) -> Logits:
    """The logits of transformers in this dtype, one forward pass for each prompt. Raises
    RequestError if transformers does not find all weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    options["output_loading_info"] = True
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    if info["missing_keys"]:  # transformers would fill them with random values
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise RequestError(f"Transformers finds no {missing} in {folder}.")
    model = model.eval().to(device)
    whole: list[Floats] = []
    with torch.no_grad():
        for ids in prompts:
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0]
            whole.append(logits.float().cpu().numpy())
    del model
    gc.collect()
    return Logits(whole, np.stack([rows[-1] for rows in whole]))


def prefilled(llm: infer.LLM, ids: Sequence[int]) -> Floats:
    """The logits from which the first token after a prompt is chosen."""
    params = infer.SamplingParams(temperature=0.0, max_tokens=1).resolved({})
    (step,) = llm.engine.generate(ids, params, with_logits=True)
    assert step.logits is not None
    return step.logits


def accuracy(
    model: str, computed: str, products: str | None, got: Logits, exact: Logits
) -> Accuracy:
    """Compare logits with exact ones, which transformers computed in f32."""
    kl, same = [], []
    squares = np.zeros(2)
    for own, right in zip(got.whole, exact.whole, strict=True):  # one prompt at a time in f64
        wide = own.astype(np.float64), right.astype(np.float64)
        of_prompt, same_top = compare([log_softmax(wide[0])], [log_softmax(wide[1])])
        kl.append(of_prompt)
        same.append(same_top * len(own))
        squares += [((wide[0] - wide[1]) ** 2).sum(), (wide[1] ** 2).sum()]
    divergence = np.concatenate(kl)
    return Accuracy(
        model=model,
        computed=computed,
        products=products,
        tokens=len(divergence),
        nmse=float(squares[0] / squares[1]),
        prefill_nmse=nmse(got.last, exact.last),
        kl=float(divergence.mean()),
        kl_99=float(np.quantile(divergence, 0.99)),
        same_top=sum(same) / len(divergence),
    )


def table(found: Sequence[Accuracy]) -> str:
    header = ["model", "computed", "products", "NMSE", "prefill NMSE", "KL", "KL 99 %", "same top"]
    rows = [
        [
            each.model,
            each.computed,
            each.products or "",
            *(f"{value:.1e}" for value in (each.nmse, each.prefill_nmse, each.kl, each.kl_99)),
            f"{100 * each.same_top:.2f} %",
        ]
        for each in found
    ]
    return markdown_table(header, rows, left=3)


if __name__ == "__main__":
    main()
