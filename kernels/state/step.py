"""The step buffer and the sampling buffer: what the host tells the GPU about a step's rows.

In prefill the host writes the rows. In decode the sampler's last kernel writes the next step's rows
on the GPU; the host writes only which sequences they are of, when one comes or goes. step.wgsl and
sampling.wgsl are the GPU's side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_PROMPTS = 8  # whose tokens a step of prefill takes
MAX_LOGITS_ROWS = MAX_PROMPTS
MAX_LOGPROBS = 20  # of the most probable tokens
MAX_STOP_IDS = 51
FORBIDDEN = -1e30  # for a bias of -inf, which WGSL may not know: below every score, and a number
NO_TOKEN = 0xFFFFFFFF  # what the sampler writes for a row that had already stopped
DRAFTED = 1 << 31  # beside how many rows states are `behind`: they do not take in the row either

Tokens = Sequence[int] | NDArray[np.integer]

ROW = np.dtype(
    [
        ("token", "<u4"),
        ("position", "<u4"),
        ("sequence", "<u4"),
        ("adapter", "<u4"),
        ("alive", "<u4"),
        ("behind", "<u4"),
        ("drafts", "<u4"),
        ("place", "<u4"),
    ]
)
HEADER = np.dtype(
    [
        ("n_rows", "<u4"),
        ("n_logits", "<u4"),
        ("unused", "<u4", 6),
        ("logits_rows", "<u4", MAX_LOGITS_ROWS),
        ("ends", "<u4", MAX_PROMPTS),
    ]
)
SAMPLING = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("top_k", "<u4"),
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("max_position", "<u4"),
        ("min_position", "<u4"),
        ("n_stop_ids", "<u4"),
        ("masked", "<u4"),
        ("stop_ids", "<u4", MAX_STOP_IDS),
    ]
)


def step_bytes(rows: int) -> int:
    """Size of a step buffer for that many rows."""
    return HEADER.itemsize + rows * ROW.itemsize


def pack_step(
    tokens: Tokens,
    position: int,
    *,
    sequence: int = 0,
    adapter: int | Tokens = 0,
    logits_rows: Sequence[int] = (),
) -> NDArray[np.uint8]:
    """The bytes of a step whose rows are consecutive tokens of one sequence from `position` on.
    adapter: of all rows, or of each; 0: none."""
    return pack_prompts([(tokens, position, sequence, adapter)], logits_rows)


def pack_prompts(
    chunks: Sequence[tuple[Tokens, int, int, int | Tokens]],
    logits_rows: Sequence[int] = (),
    leads: Sequence[int] = (),
) -> NDArray[np.uint8]:
    """The bytes of a step with rows (tokens, position, sequence, adapter) of each of up to
    MAX_PROMPTS sequences, one behind the other. leads: so many of the first rows of each sequence
    leave nothing but what the rows behind them read of them."""
    ends = np.cumsum([len(tokens) for tokens, *_ in chunks])
    header = np.zeros(1, HEADER)
    header["n_rows"], header["n_logits"] = ends[-1], len(logits_rows)
    header["logits_rows"][0, : len(logits_rows)] = logits_rows
    header["ends"] = ends[-1]
    header["ends"][0, : len(ends)] = ends
    rows = np.zeros(ends[-1], ROW)
    for end, (tokens, position, sequence, adapter) in zip(ends, chunks, strict=True):
        own = rows[end - len(tokens) : end]
        own["token"] = tokens
        own["position"] = np.arange(position, position + len(tokens))
        own["sequence"] = sequence
        own["adapter"] = adapter
    rows["alive"] = 1
    for end, lead, (tokens, *_) in zip(ends, leads, chunks, strict=False):
        rows["alive"][end - len(tokens) :][:lead] = 2
    return np.concatenate([header.view(np.uint8), rows.view(np.uint8)])


# Its token, position, sequence, adapter, and how many rows its states are behind.
StepRow = tuple[int, int, int, int, int]


def pack_rows(rows: Sequence[StepRow], count: int) -> NDArray[np.uint8]:
    """The bytes of a step of these rows, and more rows up to `count`, which compute the same as the
    last one and leave nothing."""
    header = np.zeros(1, HEADER)
    header["n_rows"] = count
    own = [(*row, 1, behind, 0, 0) for *row, behind in rows]
    own += [(*rows[-1][:-1], 0, 0, 0, 0)] * (count - len(rows))
    return np.concatenate([header.view(np.uint8), np.array(own, ROW).view(np.uint8)])


def pack_stopped(count: int) -> NDArray[np.uint8]:
    """The bytes of a step of so many rows that leave nothing."""
    header = np.zeros(1, HEADER)
    header["n_rows"] = count
    return np.concatenate([header.view(np.uint8), np.zeros(count, ROW).view(np.uint8)])


def pack_drafting(
    rows: Sequence[tuple[int, int, int, int, int, int, int]], count: int, behind: bool
) -> NDArray[np.uint8]:
    """The bytes of a draft model's first step of a round: for each sequence its last token and, if
    some are behind, the one before it. rows: (the token before, the last token, its position,
    sequence, how many rows its states are behind, how many tokens to draft, the row that takes the
    first of them). The first `count` rows go on; those without a sequence compute nothing."""
    header = np.zeros(1, HEADER)
    header["n_rows"], header["n_logits"] = (1 + behind) * count, count
    own = np.zeros((2, count), ROW)
    for i, (before, last, position, sequence, of_states, drafts, place) in enumerate(rows):
        own[0, i] = last, position, sequence, 0, 1, of_states, drafts, place
        own[1, i] = before, position - 1, sequence, 0, 1, 0, 0, 0
    return np.concatenate([header.view(np.uint8), own.reshape(-1).view(np.uint8)])
