"""The steps on the GPU: where their results are copied to, and how they are read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer.engine import scheduler
from infer.engine.options import EngineOptions
from infer.engine.steps import Steps
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy, PublicQueue, RawQueue, Recorded, Recording, StepQueue
from infer.kernels.lowering.target import stride
from infer.kernels.state.sampler import LOGPROB, LOGPROBS_BYTES, ROW_LOGPROBS, Sampler
from infer.kernels.state.step import HEADER, ROW


class Rows(NamedTuple):
    """Rows of a buffer, each of `words` of 4 bytes, of which the first `width` count."""

    buffer: Buffer
    rows: range
    words: int
    width: int


class Wanted(NamedTuple):
    """The values to read back of a step. rows: the sequences of the sampled rows. logits_of: the
    indices of those whose logits are read back. logprobs: whether the sampler's log probabilities
    are. others: what a text wants that is embedded or scored."""

    rows: tuple[scheduler.Sequence, ...]
    logits_of: tuple[int, ...] = ()
    logprobs: bool = False
    others: Rows | None = None


@dataclass(eq=False)
class InFlight:
    """A submitted step that has not been read. since: when it was submitted. take: is called with
    this step, its results, the time at which the step before was read, and the time at which this
    one was. tells_pace: whether its time tells how fast prompts are computed."""

    submission: Any
    staging: Staging
    wanted: Wanted
    since: float
    take: Take
    tells_pace: bool = False


class Read(NamedTuple):
    """The values read back of a step. logits, and ranked, LOGPROB records: by sampled row. others:
    of a text, [rows, width]."""

    ids: list[int]
    logits: dict[int, NDArray[np.float32]]
    ranked: dict[int, NDArray[Any]]
    others: NDArray[np.float32] | None


Take = Callable[[InFlight, Read, float, float], None]


class Staging:
    """The staging buffers of a step in flight: for its ids, its log probabilities, the logits or
    hidden states of some rows, and the drafts that a draft model made before it."""

    def __init__(self, device: Device, most_rows: int, nbytes: int) -> None:
        """nbytes: the first size of `rows`."""
        self._device, self._most_rows = device, most_rows
        self.ids = device.buffer(4 * most_rows, "read", "ids")
        self.logprobs = device.buffer(LOGPROBS_BYTES * most_rows, "read", "logprobs")
        self._rows = device.buffer(nbytes, "read", "rows")

    def rows(self, nbytes: int) -> Buffer:
        """A buffer of at least so many bytes; replaced if it is too small."""
        if self._rows.nbytes < nbytes:
            self._device.destroy([self._rows])
            self._rows = self._device.buffer(nbytes, "read", "rows")
        return self._rows

    @cached_property
    def drafts(self) -> Buffer:
        """For the rows of a step buffer; allocated when first asked for."""
        return self._device.buffer(ROW.itemsize * self._most_rows, "read", "drafts")

    def destroy(self) -> None:
        drafts = [self.drafts] if "drafts" in vars(self) else []
        self._device.destroy([self.ids, self.logprobs, self._rows, *drafts])


class Submissions:
    """in_flight: steps submitted and not read, the oldest first, at most `ahead`. count: all steps
    so far. Steps take staging buffers in turn: one is used again once its last step was read."""

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
        """For prepared steps: one may be recorded while another runs."""
        return self._new_staging(2)

    @cached_property
    def queue(self) -> StepQueue:
        """The queue that steps are submitted to."""
        return (RawQueue if self._raw else PublicQueue)(self._device)

    @property
    def _next_staging(self) -> Staging:
        """The staging of the step that is submitted next."""
        return self._staging[self.count % len(self._staging)]

    @property
    def spare(self) -> Staging:
        """The staging of a step that is prepared, and perhaps never used."""
        return self._spares[self._prepared % 2]

    def copies(
        self,
        rows: int,
        logits_of: Sequence[int],
        logprobs: bool,
        staging: Staging | None = None,
    ) -> list[Copy]:
        """The copies at the end of the next step: what the sampler leaves for so many rows, and
        the logits of some. staging: given if it is the `spare`."""
        staging, sampler = staging or self._next_staging, self._sampler
        copies: list[Copy] = []
        if rows:
            copies.append(Copy((sampler.sampled, 0), (staging.ids, 0), 4 * rows))
        if logprobs:
            nbytes = LOGPROBS_BYTES * rows
            copies.append(Copy((sampler.logprobs, 0), (staging.logprobs, 0), nbytes))
        if not logits_of:
            return copies
        row, nbytes = 4 * stride(sampler.vocab_size), 4 * sampler.vocab_size
        for at, i in enumerate(logits_of):
            to = staging.rows(len(logits_of) * row), at * row
            copies.append(Copy((self._logits, i * row), to, nbytes))
        return copies

    def copy_of_drafts(self, rows: int) -> Copy:
        """The copy of so many rows of the next step, where a draft model has put its drafts."""
        to = self._next_staging.drafts, 0
        return Copy((self._step, HEADER.itemsize), to, rows * ROW.itemsize)

    def read_drafts(self, submission: Any, rows: int) -> NDArray[Any]:
        """These rows, ROW records, once the submission is done."""
        nbytes = rows * ROW.itemsize
        return self.queue.read(self._next_staging.drafts, nbytes, submission).view(ROW)

    def submit(
        self,
        recording: Recording,
        rows: int,
        kv_len: int,
        wanted: Wanted,
        take: Take,
        *,
        tells_pace: bool = False,
        body_since: float | None = None,
    ) -> None:
        """Record and submit a step. take, tells_pace: as of `InFlight`. body_since: when its body
        was submitted, if that came first."""
        staging, others = self._next_staging, wanted.others
        copies = self.copies(len(wanted.rows), wanted.logits_of, wanted.logprobs)
        if others is not None and others.rows:
            nbytes, begin = (4 * others.words * n for n in (len(others.rows), others.rows.start))
            copies.append(Copy((others.buffer, begin), (staging.rows(nbytes), 0), nbytes))
        submission = self.queue.submit(recording, rows, kv_len, copies)
        since = time.perf_counter() if body_since is None else body_since
        self._add(InFlight(submission, staging, wanted, since, take, tells_pace))

    def send(
        self,
        commands: Recorded,
        wanted: Wanted,
        take: Take,
        *,
        staging: Staging | None = None,
        body_since: float | None = None,
    ) -> None:
        """Submit a step that was recorded before. staging: another than that of the next step."""
        self._prepared += staging is not None
        staging = staging or self._next_staging
        submission = self.queue.send(commands)
        since = time.perf_counter() if body_since is None else body_since
        self._add(InFlight(submission, staging, wanted, since, take))

    def _add(self, step: InFlight) -> None:
        self.count += 1
        self.in_flight.append(step)

    def read(self) -> Read:
        """The results of the oldest step in flight, once it is done. The step stays in flight, so
        that an interrupt loses nothing."""
        step = self.in_flight[0]
        wanted, ids = step.wanted, list[int]()
        logits: dict[int, NDArray[np.float32]] = {}
        ranked: dict[int, NDArray[Any]] = {}
        others = None
        if wanted.rows:
            nbytes = 4 * len(wanted.rows)
            urgent = len(self.in_flight) == 1
            ids = self.queue.read(step.staging.ids, nbytes, step.submission, urgent).tolist()
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
        if wanted.others is not None and wanted.others.rows:
            of = wanted.others
            others = self._rows(step, len(of.rows), of.words, of.width)
        return Read(ids, logits, ranked, others)

    def _rows(self, step: InFlight, count: int, words: int, width: int) -> NDArray[np.float32]:
        """[count, width], read back from rows of so many words each."""
        nbytes = 4 * count * words
        raw = self.queue.read(step.staging.rows(nbytes), nbytes, step.submission)
        return raw.view(np.float32).reshape(count, -1)[:, :width]

    def forget(self) -> None:
        """Begin anew with nothing in flight. Staging buffers may still be mapped, so they are
        replaced."""
        self._device.wait()
        for staging in (*self._staging, *vars(self).pop("_spares", ())):
            staging.destroy()
        self._staging = self._new_staging(self.ahead)
        self.in_flight.clear()
