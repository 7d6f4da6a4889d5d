"""Makes a model folder in the shape of a published model, with random weights.

    python scripts/make_shape.py llama-3.1-8b /tmp/llama-3.1-8b
    infer serve /tmp/llama-3.1-8b --quantize q4 --max-batch 32
    python scripts/make_shape.py qwen3-30b-a3b /tmp/experts --layers 6 --seed 1

A server under load (load.py), and anything else that loads a model, needs such a folder; `infer
bench --shape` does not. The tokenizer is the demo's. Ids that it does not have read as <|id|>, and
no id ends an answer.
"""

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infer.hub import DEMO, resolve
from infer.kernels.errors import InferError, RequestError
from infer.models import build_model
from infer.models.loading.config import RawConfig
from infer.models.loading.shapes import SHAPES

PERIOD = 16_777_213  # values until they repeat; prime, so that no two rows are alike


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("folder", type=Path, help="which is made")
    parser.add_argument("--layers", type=int, metavar="N", help="the first N alone")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    args = parser.parse_args()
    try:
        write(args.shape, args.folder, args.layers, args.seed)
    except (InferError, OSError) as error:
        sys.exit(f"error: {error}")


def write(shape: str, folder: Path, layers: int | None = None, seed: int = 0) -> None:
    """Write the model folder. Raises RequestError if the folder exists, or if the shape has fewer
    layers."""
    if folder.exists():
        raise RequestError(f"{folder} is there already. Name another folder.")
    config = first_layers(shape, layers)
    folder.mkdir(parents=True)
    _write_tokenizer(folder, config["vocab_size"])
    _write_weights(folder / "model.safetensors", RawConfig(config, shape), seed)
    # The last: without it the folder is no model.
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))


def first_layers(shape: str, layers: int | None) -> dict[str, Any]:
    """The config of a shape with its first `layers` layers (None: all of them)."""
    config = copy.deepcopy(SHAPES[shape])
    count = config["num_hidden_layers"]
    if layers is None:
        return config
    if not 1 <= layers <= count:
        raise RequestError(f"{shape} has {count} layers, of which {layers} cannot be taken.")
    for key, value in config.items():
        if isinstance(value, list | str) and len(value) == count:  # something of each layer
            config[key] = value[:layers]
    return config | {"num_hidden_layers": layers}


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    demo = resolve(DEMO).path
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"<|{i}|>": i for i in range(len(vocab), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_weights(path: Path, config: RawConfig, seed: int) -> None:
    """Matrices as random_weights.py has them, vectors around 1 (norms) and 0."""
    tensors = {
        source.key: source.file_shape
        for weight in build_model(config).weights()
        for source in weight.sources
    }
    header: dict[str, Any] = {}
    end = 0
    for key, own in tensors.items():
        begin, end = end, end + 2 * prod(own)
        header[key] = {"dtype": "BF16", "shape": own, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    values = np.random.default_rng(seed).uniform(-1, 1, PERIOD).astype(np.float32)
    scaled: dict[tuple[float, float], NDArray[np.uint16]] = {}
    at = 0
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, own in tensors.items():
            way = (0.0, (3 / own[-1]) ** 0.5) if len(own) > 1 else (float("norm" in key), 0.05)
            if way not in scaled:
                scaled[way] = _bf16(way[0] + way[1] * values)
            for part in _parts(scaled[way], at, prod(own)):
                file.write(part.data)
            at = (at + prod(own)) % PERIOD


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _parts(values: NDArray[np.uint16], at: int, count: int) -> Iterator[NDArray[np.uint16]]:
    """`count` values from the place `at` on, starting again at the end."""
    while count:
        part = values[at : at + count]
        yield part
        count -= len(part)
        at = 0


if __name__ == "__main__":
    main()
