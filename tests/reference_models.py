"""The stored references: tiny models and what transformers computes for them, read without torch.

scripts/make_references.py writes them. It describes the files and the cases, and what is well
defined with dynamic NTK rope.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parent / "data" / "models"

Spelling = Literal["published", "transformers5"]

CONFIG_FILES: dict[Spelling, str] = {
    "published": "config.published.json",
    "transformers5": "config.json",
}

TOLERANCE = 1e-5  # of logits, as a relative_error; most are within 3e-6


@dataclass(frozen=True)
class Reference:
    """One case: a checkpoint and its float32 answers.

    prompt_ids: int64 [prompt].
    logits: float32 [prompt, vocab], after each token of the prompt, given in one pass.
    greedy_ids: int64 [steps], the greedy continuation of the prompt, one token per pass.
    greedy_margins: float32 [steps], (best - second best logit) / norm of the logits.
    final_logits: float32 [vocab], the logits that chose greedy_ids[-1].
    routing_margin: float32, how clearly a mixture of experts chooses them at the least.
    """

    case: str
    prompt_ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    greedy_ids: NDArray[np.int64]
    greedy_margins: NDArray[np.float32]
    final_logits: NDArray[np.float32]
    routing_margin: NDArray[np.float32] | None = None

    def write_checkpoint(self, path: Path, spelling: Spelling = "published") -> Path:
        """Make the folder `path` with config.json and the safetensors files; returns `path`."""
        path.mkdir(parents=True)
        shutil.copyfile(DATA / self.case / CONFIG_FILES[spelling], path / "config.json")
        for file in (DATA / self.case).glob("*.safetensors*"):
            shutil.copyfile(file, path / file.name)
        return path


def cases() -> list[str]:
    """The names of all stored cases, sorted."""
    return sorted(folder.name for folder in DATA.iterdir())


def load(case: str) -> Reference:
    """The stored reference of one case."""
    with np.load(DATA / case / "reference.npz") as arrays:
        return Reference(case, **arrays)


def write_with_window(case: str, folder: Path, window: int) -> Path:
    """The checkpoint of a case, with another window and with positions for long prompts."""
    load(case).write_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    for own in (config, config.get("text_config", {})):
        if "sliding_window" in own:
            own |= {"max_position_embeddings": 2048, "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class LongReference:
    """The answers of one case to a prompt of 1,200 tokens, as in Reference, but for
    logits: float32 [rows, vocab], after the tokens at `rows` of the prompt; rows: int64 [rows]."""

    prompt_ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    greedy_ids: NDArray[np.int64]
    greedy_margins: NDArray[np.float32]
    final_logits: NDArray[np.float32]
    rows: NDArray[np.int64]
    routing_margin: NDArray[np.float32] | None = None


def long_cases() -> list[str]:
    """The names of those with such answers, sorted."""
    return sorted(file.parent.name for file in DATA.glob("*/long.npz"))


def load_long(case: str) -> LongReference:
    """The stored long answers of one case."""
    with np.load(DATA / case / "long.npz") as arrays:
        return LongReference(**arrays)


def hidden_cases() -> list[str]:
    """The names of those with hidden states, sorted."""
    return sorted(file.parent.name for file in DATA.glob("*/hidden.npz"))


def load_hidden(case: str) -> NDArray[np.float32]:
    """The stored hidden states of one case's prompt, after the last norm: [prompt, hidden_size]."""
    with np.load(DATA / case / "hidden.npz") as arrays:
        hidden: NDArray[np.float32] = arrays["hidden"]
    return hidden


@dataclass(frozen=True)
class BatchReference:
    """The answers of one case to prompts of unlike lengths, each computed alone.

    prompts: token ids. greedy_ids: int64 [prompts, steps]. rows: int64 [rows], the steps of which
    there are logits: float32 [prompts, rows, vocab], those that chose greedy_ids[:, rows].
    """

    prompts: list[list[int]]
    greedy_ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    logits: NDArray[np.float32]


def batch_cases() -> list[str]:
    """The names of those with such answers, sorted."""
    return sorted(file.parent.name for file in DATA.glob("*/batch.npz"))


def load_batch(case: str) -> BatchReference:
    """The stored answers of one case to several prompts."""
    with np.load(DATA / case / "batch.npz") as arrays:
        ends = np.cumsum(arrays["lengths"])[:-1]
        prompts = [part.tolist() for part in np.split(arrays["prompt_ids"], ends)]
        return BatchReference(prompts, arrays["greedy_ids"], arrays["rows"], arrays["logits"])


def tolerance_of(case: str) -> float:
    """The relative error of its logits at most. With large embeddings and soft caps those of
    transformers, in float32, are up to 1e-5 from what it computes in float64."""
    return 3e-5 if case in ("gemma", "gemma3_text", "gemma4") else TOLERANCE


def relative_error(actual: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """The largest norm(actual - expected) / norm(expected) of any row (last axis), in float64."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=-1)
    return float(np.max(difference / np.linalg.norm(expected.astype(np.float64), axis=-1)))
