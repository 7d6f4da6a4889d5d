"""The steps that are on the GPU: where what they leave goes, and how it is read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.options import EngineOptions
from infer.engine.steps import Steps
from infer.engine.texts import Chunk
from infer.kernels.compiler.graph import stride
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy, PublicQueue, RawQueue, Recorded, Recording, StepQueue
from infer.kernels.state.sampler import LOGPROB, LOGPROBS_BYTES, ROW_LOGPROBS, Sampler
from infer.kernels.state.step import HEADER, ROW


class Wanted(NamedTuple):
    """What is read back of a step. rows: of those that are sampled the sequences, and which of them
    have their logits read back. logprobs: whether the sampler's are. chunk: of a text."""

    rows: tuple[scheduler.Sequence, ...]
    logits_of: tuple[int, ...] = ()
    logprobs: bool = False
    chunk: Chunk | None = None


@dataclass(eq=False)
class InFlight:
    """A submitted step that has not been read. since: when that was. prefilled: rows of a prompt.
    sequences: of a decode step. drafts: the token that each of its rows was drafted with, or None,
    if there are drafts; NO_TOKEN where only the GPU knows it. kind: what its time is measured by
    (`Speculation.measured`)."""

    submission: Any
    staging: Staging
    wanted: Wanted
    since: float
    prefilled: int
    sequences: int
    drafts: tuple[int | None, ...]
    kind: Hashable


class Read(NamedTuple):
    """What was wanted of a step. logits, and LOGPROB records of ranked: by rows that are sampled.
    of_text: [rows, width] of its chunk."""

    ids: list[int]
    logits: dict[int, NDArray[np.float32]]
    ranked: dict[int, NDArray[Any]]
    of_text: NDArray[np.float32] | None


class Staging:
    """Where the ids of a step in flight go, log probabilities, and the logits, or the hidden
    states, of some rows; before it, what a draft model has drafted."""

    def __init__(self, device: Device, most_rows: int, nbytes: int) -> None:
        """nbytes: of `rows`, to begin with."""
        self._device, self._most_rows = device, most_rows
        self.ids = device.buffer(4 * most_rows, "read", "ids")
        self.logprobs = device.buffer(LOGPROBS_BYTES * most_rows, "read", "logprobs")
        self._rows = device.buffer(nbytes, "read", "rows")

    def rows(self, nbytes: int) -> Buffer:
        """Room for so many bytes; made anew where it is too small."""
        if self._rows.nbytes < nbytes:
            self._device.destroy([self._rows])
            self._rows = self._device.buffer(nbytes, "read", "rows")
        return self._rows

    @cached_property
    def drafts(self) -> Buffer:
        """The rows of a step buffer; there when first asked for."""
        return self._device.buffer(ROW.itemsize * self._most_rows, "read", "drafts")

    def destroy(self) -> None:
        drafts = [self.drafts] if "drafts" in vars(self) else []
        self._device.destroy([self.ids, self.logprobs, self._rows, *drafts])


class Submissions:
    """in_flight: submitted and not read, the oldest first, `ahead` at most. count: of all so far.
    Where something is copied goes by the number of its step: a staging buffer is used again when
    its last step has been read."""

    def __init__(self, steps: Steps, sampler: Sampler, options: EngineOptions) -> None:
        self._device, self._logits, self._sampler = steps.device, steps.logits, sampler
        self._step = steps.step
        self._most_rows, self._raw = steps.most_rows, options.raw
        self.ahead = options.ahead
        self.in_flight: deque[InFlight] = deque()
        self.count = 0
        self._staging = self._new_staging(self.ahead)
        self._prepared = 0  # steps that were

    def _new_staging(self, count: int) -> list[Staging]:
        nbytes = 4 * stride(self._sampler.vocab_size)
        return [Staging(self._device, self._most_rows, nbytes) for _ in range(count)]

    @cached_property
    def _spares(self) -> list[Staging]:
        """Of steps that are prepared while one runs that was, too."""
        return self._new_staging(2)

    @cached_property
    def queue(self) -> StepQueue:
        """What steps are submitted to."""
        return (RawQueue if self._raw else PublicQueue)(self._device)

    @property
    def _next_staging(self) -> Staging:
        """Of the step that is submitted next."""
        return self._staging[self.count % len(self._staging)]

    @property
    def spare(self) -> Staging:
        """Of a step that is prepared, and may be made in vain beside others."""
        return self._spares[self._prepared % 2]

    def copies(
        self,
        rows: int,
        logits_of: Sequence[int],
        logprobs: bool,
        staging: Staging | None = None,
    ) -> list[Copy]:
        """At the end of the step that is submitted next: what the sampler leaves of so many rows,
        and the logits of some. staging: if it is the `spare`."""
        staging, sampler = staging or self._next_staging, self._sampler
        copies: list[Copy] = []
        if rows:
            copies.append(Copy((sampler.sampled, 0), (staging.ids, 0), 4 * rows))
        if logprobs:
            nbytes = LOGPROBS_BYTES * rows
            copies.append(Copy((sampler.logprobs, 0), (staging.logprobs, 0), nbytes))
        row, nbytes = 4 * stride(sampler.vocab_size), 4 * sampler.vocab_size
        for at, i in enumerate(logits_of):
            to = staging.rows(len(logits_of) * row), at * row
            copies.append(Copy((self._logits, i * row), to, nbytes))
        return copies

    def copy_of_drafts(self, rows: int) -> Copy:
        """Of what a draft model has put into so many rows of the step that is submitted next."""
        to = self._next_staging.drafts, 0
        return Copy((self._step, HEADER.itemsize), to, rows * ROW.itemsize)

    def read_drafts(self, submission: Any, rows: int) -> NDArray[Any]:
        """These rows, ROW records, when they are there."""
        nbytes = rows * ROW.itemsize
        return self.queue.read(self._next_staging.drafts, nbytes, submission).view(ROW)

    def submit(
        self,
        recording: Recording,
        rows: int,
        kv_len: int,
        wanted: Wanted,
        *,
        prefilled: int = 0,
        sequences: int = 0,
        drafts: tuple[int | None, ...] = (),
        kind: Hashable = 0,
        commands: Recorded | None = None,
        staging: Staging | None = None,
        since: float | None = None,
    ) -> None:
        """commands: it was recorded before, perhaps with another staging. since: when its body was
        submitted."""
        self._prepared += staging is not None
        staging = staging or self._next_staging
        if commands is None:
            chunk = wanted.chunk
            copies = self.copies(len(wanted.rows), wanted.logits_of, wanted.logprobs)
            if chunk is not None and chunk.rows:
                nbytes, begin = (4 * chunk.words * n for n in (len(chunk.rows), chunk.rows.start))
                copies.append(Copy((chunk.buffer, begin), (staging.rows(nbytes), 0), nbytes))
            submission = self.queue.submit(recording, rows, kv_len, copies)
        else:
            submission = self.queue.send(commands)
        self.count += 1
        since = time.perf_counter() if since is None else since
        of = submission, staging, wanted, since, prefilled, sequences, drafts, kind
        self.in_flight.append(InFlight(*of))

    def read(self) -> Read:
        """What the oldest step in flight has left, once it is done. It stays in flight, so that
        nothing is lost where an interrupt comes."""
        step = self.in_flight[0]
        wanted, ids = step.wanted, list[int]()
        logits: dict[int, NDArray[np.float32]] = {}
        ranked: dict[int, NDArray[Any]] = {}
        of_text = None
        if wanted.rows:
            nbytes = 4 * len(wanted.rows)
            ids = self.queue.read(step.staging.ids, nbytes, step.submission).tolist()
        else:
            self.queue.wait(step.submission)
        if wanted.logits_of:
            width = self._sampler.vocab_size
            values = self._rows(step, len(wanted.logits_of), stride(width), width)
            logits = dict(zip(wanted.logits_of, values, strict=True))
        if wanted.logprobs:
            nbytes = LOGPROBS_BYTES * len(wanted.rows)
            raw = self.queue.read(step.staging.logprobs, nbytes, step.submission)
            ranked = dict(enumerate(raw.view(LOGPROB).reshape(-1, ROW_LOGPROBS)))
        chunk = wanted.chunk
        if chunk is not None and chunk.rows:
            of_text = self._rows(step, len(chunk.rows), chunk.words, chunk.width)
        return Read(ids, logits, ranked, of_text)

    def _rows(self, step: InFlight, count: int, words: int, width: int) -> NDArray[np.float32]:
        """[count, width]: what was read back of so many words each."""
        nbytes = 4 * count * words
        raw = self.queue.read(step.staging.rows(nbytes), nbytes, step.submission)
        return raw.view(np.float32).reshape(count, -1)[:, :width]

    def forget(self) -> None:
        """Nothing is in flight: nobody knows what was, and staging buffers may be mapped."""
        self._device.wait()
        for staging in (*self._staging, *vars(self).pop("_spares", ())):
            staging.destroy()
        self._staging = self._new_staging(self.ahead)
        self.in_flight.clear()
