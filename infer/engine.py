"""The decode loop: token ids in, token ids out. It knows nothing of text.

A prompt is prefilled in chunks; the last chunk's head samples the first token on the GPU and writes
the row of the next step, so that decode needs nothing from the host but the recording of its
dispatches. Step n + 1 is submitted before the id of step n is read.

What of a prompt is in the cache already is not computed again. Keys and values are found by their
position, and those after the common prefix are forgotten. The state of a layer that has none goes
on from where it is, or goes back to where it was saved, a few tokens before the end of the last
prompt, or starts anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.foreign import shown
from infer.kernels.compiler.arena import Arena
from infer.kernels.compiler.graph import stride
from infer.kernels.compiler.target import MAX_VEC_ROWS, StepKind, padded_rows
from infer.kernels.errors import DeviceError, ModelError, RequestError
from infer.kernels.gpu.adapters import is_forked
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import PublicQueue, RawQueue, Recording, StepQueue
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.ops.linear import Changes
from infer.kernels.state.layer_state import LayerState, copies
from infer.kernels.state.sampler import INVALID_TOKEN, Sampler, SamplerChain
from infer.kernels.state.step import NO_TOKEN, pack_step
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.rope import rope_table, same_until, table_length
from infer.pace import Pace
from infer.sampling import LogitsProcessor, NumpySampler, SamplingParams
from infer.steps import Steps

AHEAD = 2  # steps in flight: one runs while the next is recorded
_NOTHING = Recording([])


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. Only context and kv_dtype change what it computes.

    context: positions of the KV cache. kv_dtype: "f16", "f32" or "q8". prefill_chunk: rows of a
    prefill step at most. fuse=False runs every op as a kernel of its own; raw=False records through
    the public API; ahead=1 waits for every id before the next step. All three are slower, and there
    to compare with and to work round a driver's bug.
    """

    context: int
    kv_dtype: str = "f16"
    prefill_chunk: int = 512
    fuse: bool = True
    raw: bool = True
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        """Raises RequestError for values of other kinds, and counts below one."""
        for name in ("context", "prefill_chunk", "ahead"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} must be a positive integer, not {shown(value)}.")
        for name in ("fuse", "raw"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, not {shown(getattr(self, name))}."
                )


@dataclass(frozen=True)
class Step:
    """One token that was chosen, and the logits [vocab] it was chosen from when asked for."""

    token: int
    logits: NDArray[np.float32] | None = None


@dataclass
class Timings:
    """Of one generation: seconds to the first token, and from there to the last; tokens of the
    prompt that were computed and that the cache still had; tokens after the first."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0


@dataclass(eq=False)
class _InFlight:
    """A submitted step whose id has not been read; kv_len: the positions up to its last row."""

    submission: Any
    kv_len: int
    ids: Buffer
    logits: Buffer | None


class Engine:
    """One model on one device, with its cache. For one generation, and one thread, at a time."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        weights: Mapping[str, GpuTensor],
        options: EngineOptions,
        adapters: Mapping[str | None, Changes] = MappingProxyType({}),
    ) -> None:
        """adapters: by name what lies beside the weights; None: what does when none is asked for.
        Allocates everything but the weights and these. Raises OutOfMemoryError."""
        self.device, self.model, self.weights, self.options = device, model, weights, options
        self.context, self.vocab_size = options.context, model.config.vocab_size
        self.adapters: dict[str | None, Changes] = {None: {}, **adapters}
        self.steps = Steps(
            device,
            model,
            weights,
            self.adapters,
            context=options.context,
            kv_dtype=options.kv_dtype,
            prefill_chunk=options.prefill_chunk,
            fuse=options.fuse,
        )
        self.states = [cache for cache in self.steps.caches if isinstance(cache, LayerState)]
        self.sampler = Sampler(device, self.vocab_size, self.steps.logits, self.steps.step)
        self.pace = Pace(model.config.num_hidden_layers)
        self._recordings: dict[tuple[str, str | None, bool, SamplerChain | None], Recording] = {}
        self._staging = self._new_staging()
        self._in_flight: deque[_InFlight] = deque()
        self._reads = 0
        # What the cache holds: keys and values of these tokens, of this adapter, rotated by the
        # table for prompts of this length.
        self.tokens: list[int] = []
        self._adapter: str | None = None
        self._table_length = 0
        self._token = -1  # the last that was read
        # Positions that the states hold, or held when they were saved. Steps that nobody has read,
        # as after an interrupt, may have made it more than there are tokens.
        self._held = self._saved = 0
        self.timings = Timings()

    def _new_staging(self) -> list[tuple[Buffer, Buffer]]:
        """For each step in flight where its id goes, and its logits."""
        device, nbytes = self.device, self.steps.logits.nbytes
        return [
            (device.buffer(16, "read", "ids"), device.buffer(nbytes, "read", "logits"))
            for _ in range(self.options.ahead)
        ]

    def warm_up(
        self,
        prompt_tokens: int,
        params: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Have compiled beforehand what a generation from a prompt of that length would compile
        on its way: the sampler, and where the CPU computes, whose driver puts a kernel off until it
        first runs, all the rest. params: `resolved`. progress: as for `Steps.compile`."""
        last = min(prompt_tokens, MAX_VEC_ROWS) if self.states else 0  # a step of their own
        parts = (prompt_tokens - last, last, 0 if params.max_tokens == 1 else 1)
        kinds = dict.fromkeys(kind for part in parts for *_, kind in self.chunks(part))
        recordings = [self.recording(kind, True, params.chain()) for kind in kinds]
        if not self.device.software:
            return
        first = {item.pipeline: item for r in recordings for item in r.dispatches}
        for done, item in enumerate(first.values(), 1):
            # No workgroup runs, but the driver has to have the kernel.
            nothing = Recording([replace(item, grid=(0, 1, 1))])
            self.queue.wait(self.queue.submit(nothing, 0, 0, ()))
            if progress is not None:
                progress(done, len(first))

    @cached_property
    def queue(self) -> StepQueue:
        """What steps are submitted to."""
        return (RawQueue if self.options.raw else PublicQueue)(self.device)

    # Generating

    def check_prompt(self, prompt_ids: Sequence[int], room: int = 1) -> None:
        """Raises RequestError for a prompt that is empty, not of this vocabulary, or that leaves
        no room for so many more tokens."""
        if not prompt_ids:
            raise RequestError("The prompt is empty: give at least one token.")
        wrong = next((i for i in prompt_ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"Token {shown(wrong)} is not in the model's vocabulary of {self.vocab_size} "
                "tokens."
            )
        if len(prompt_ids) + room > self.context:
            raise RequestError(
                f"The prompt has {len(prompt_ids)} tokens, and the context holds {self.context}, "
                "the answer included. Shorten the prompt or raise the context (--context)."
            )

    def check_adapter(self, adapter: str | None) -> None:
        """Raises RequestError for an adapter that is not loaded."""
        if not (adapter is None or isinstance(adapter, str)) or adapter not in self.adapters:
            names = ", ".join(sorted(filter(None, self.adapters))) or "none"
            raise RequestError(
                f"No adapter is called {shown(adapter)}. Loaded by a name: {names}. Give load() a "
                "dictionary of adapters."
            )

    def _use(self, adapter: str | None) -> None:
        """From now on, that adapter; the cache only serves the one it was filled with."""
        self.check_adapter(adapter)
        self._recover()
        if adapter != self._adapter:
            self._adapter, self.tokens = adapter, []

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        with_logits: bool = False,
        logits_processor: LogitsProcessor | None = None,
        adapter: str | None = None,
    ) -> Iterator[Step]:
        """The tokens after the prompt, one by one, a stop id included, until a stop id, max_tokens
        or the end of the context.

        params: `resolved`. with_logits also reads back the logits of every step. With a
        logits_processor they come back too, numpy chooses, and no step is ahead. adapter: one of
        `adapters`.
        """
        self.check_prompt(prompt_ids)
        self._use(adapter)
        record = params.record(
            vocab_size=self.vocab_size,
            prompt_tokens=len(prompt_ids),
            context=self.context,
            stop_ids=stop_ids,
        )
        self.sampler.begin(0, record[0], prompt_ids, params.logit_bias)
        # The last token needs no position: nothing comes after it.
        limit = self.context - len(prompt_ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        self.timings = Timings()
        if logits_processor is None:
            chain = params.chain()
            sample = partial(self._sample_on_gpu, chain=chain, with_logits=with_logits)
        else:
            sampler = NumpySampler(params, self.vocab_size, prompt_ids, logits_processor)
            sample = partial(self._sample_on_host, sampler=sampler)
        steps = self._sample(prompt_ids, limit, sample)
        begin = time.perf_counter()
        try:
            for step in steps:
                now = time.perf_counter()
                if self.timings.prefill_seconds == 0.0:
                    self.timings.prefill_seconds = now - begin
                    if self.timings.prefilled_tokens > MAX_VEC_ROWS and not self.pace.known:
                        self.pace.row_seconds = (now - begin) / self.timings.prefilled_tokens
                else:
                    self.timings.decode_seconds = now - begin - self.timings.prefill_seconds
                    self.timings.decoded_tokens += 1
                yield step
                if step.token in stop_ids:
                    return
        finally:
            self._drain()

    def _sample(
        self,
        prompt_ids: Sequence[int],
        limit: int,
        sample: Callable[[Sequence[int], int], Iterator[Step]],
    ) -> Iterator[Step]:
        """`limit` steps of `sample(ids, limit)`, which begins again with all tokens so far when
        the sequence grows beyond a length at which all positions are rotated otherwise."""
        ids = list(prompt_ids)
        while limit:
            part = int(min(limit, same_until(self.model.config.rope, len(ids)) + 1 - len(ids)))
            for step in sample(ids, part):
                ids.append(step.token)
                yield step
            limit -= part

    def _sample_on_gpu(
        self, prompt_ids: Sequence[int], limit: int, *, chain: SamplerChain, with_logits: bool
    ) -> Iterator[Step]:
        self._prefill(prompt_ids, chain, with_logits)
        decode = self.recording("decode", True, chain)
        submitted, length = 1, len(prompt_ids)  # which grows meanwhile
        for _ in range(limit):
            while submitted < limit and len(self._in_flight) < self.options.ahead:
                self._submit(decode, 1, length + submitted, with_logits)
                submitted += 1
            step = self._read()
            if step.token == INVALID_TOKEN:
                raise ModelError(
                    "The model's logits are not finite: its weights may be damaged, or its values "
                    "too large for the KV cache's f16 (load it with kv_dtype f32)."
                )
            yield step

    def _sample_on_host(
        self, prompt_ids: Sequence[int], limit: int, *, sampler: NumpySampler
    ) -> Iterator[Step]:
        self._prefill(prompt_ids, None, with_logits=True)
        for done in range(limit):
            step = self._read()
            assert step.logits is not None  # asked for
            token = sampler(step.logits)
            if done + 1 < limit:
                self._extend([token], None, with_logits=True)
            yield Step(token, step.logits)

    def _prefill(self, ids: Sequence[int], chain: SamplerChain | None, with_logits: bool) -> None:
        """Bring the cache to `ids` and submit the head after the last of them."""
        self._rotate_for(len(ids))
        reused = self._reuse(ids[:-1])
        if not self.timings.prefilled_tokens:  # this is the prompt
            self.timings.reused_tokens, self.timings.prefilled_tokens = reused, len(ids) - reused
        if self.states:
            # A next prompt that begins like this one may end otherwise, as chat templates have it.
            self._extend(ids[reused:-MAX_VEC_ROWS], None, with_logits, head=False)
            self._save()
        self._extend(ids[len(self.tokens) :], chain, with_logits)

    def _reuse(self, ids: Sequence[int]) -> int:
        """Trim the cache to the longest prefix of `ids` that it can go on from, and return how
        long that is."""
        reused = 0
        for ours, theirs in zip(self.tokens, ids, strict=False):
            if ours != theirs:
                break
            reused += 1
        goes_on = reused == len(self.tokens) == self._held
        if self.states and not goes_on:
            reused = self._saved if self._saved <= reused else 0
        del self.tokens[reused:]
        if self.states and not goes_on and reused:
            self.queue.submit(_NOTHING, 0, 0, copies(self.states, back=True))
        self._held, self._saved = reused, min(self._saved, reused)
        return reused

    def _save(self) -> None:
        """Save the states."""
        self._saved = 0  # until what is saved is known
        self.queue.submit(_NOTHING, 0, 0, copies(self.states, back=False))
        self._saved = self._held

    def _rotate_for(self, prompt_length: int) -> None:
        """The rope table of a prompt of that length; the cache only serves the table it had."""
        rope = self.model.config.rope
        length = table_length(rope, prompt_length)
        if length != self._table_length:
            self.device.write(self.steps.rope.table, rope_table(rope, self.context, length))
            self._table_length, self.tokens = length, []

    def _extend(
        self,
        ids: Sequence[int],
        chain: SamplerChain | None,
        with_logits: bool,
        head: bool = True,
    ) -> None:
        """Append ids to the cache, in steps of the kinds that fit, and submit the head (and, with
        a chain, the sampler) after the last, unless there is another `_extend` to come."""
        before: Any = None
        since, known = time.perf_counter(), self.pace.known
        for start, count, kind in self.chunks(len(ids)):
            last = head and start + count == len(ids)
            rows = (count - 1,) if last else ()
            position = len(self.tokens)
            part = ids[start : start + count]
            self.device.write(self.steps.step, pack_step(part, position, logits_rows=rows))
            recording = self.recording(kind, last, chain if last else None)
            if before is not None and known:  # one step ahead is enough to keep the GPU busy
                since = self._measure(before, since)
            self._held = position + count
            pieces = 1 if count <= MAX_VEC_ROWS else self.pace.submissions(count)
            *first, rest = recording.parts(pieces)
            for piece in first:
                self.queue.submit(piece, count, position + count, ())
            submission = self._submit(rest, count, position + count, with_logits, read=last)
            self.tokens.extend(part)
            before = (submission, count)
            if not known and not last:  # find out
                since, known = self._measure(before, since), True

    def _measure(self, before: tuple[Any, int], since: float) -> float:
        """Wait for a submission of so many rows, the GPU having been free for it since then."""
        submission, rows = before
        self.queue.wait(submission)
        now = time.perf_counter()
        self.pace.row_seconds = (now - since) / rows
        return now

    def chunks(self, length: int) -> Iterator[tuple[int, int, str]]:
        """(start, rows, kind of step) of the steps that take so many ids: each of the kind for the
        fewest rows that has room."""
        start, kinds = 0, self.steps.rows
        while start < length:
            most = self.pace.rows  # which the last step may have found out
            rows = min(length - start, most, kinds["prefill"])
            yield start, rows, next(kind for kind, n in reversed(kinds.items()) if n >= rows)
            start += rows

    def recording(self, kind: str, head: bool, chain: SamplerChain | None) -> Recording:
        key = (kind, self._adapter, head, chain)
        if key not in self._recordings:
            plan = self.steps.plan(kind, self._adapter)
            dispatches = [*plan.body, *plan.head] if head else [*plan.body]
            if chain is not None:
                dispatches += self.sampler.dispatches(chain, gather=kind != "decode")
            self._recordings[key] = Recording(dispatches)
        return self._recordings[key]

    def _submit(
        self, recording: Recording, rows: int, kv_len: int, with_logits: bool, read: bool = True
    ) -> Any:
        if not read:
            return self.queue.submit(recording, rows, kv_len, ())
        ids, logits = self._staging[self._reads % len(self._staging)]
        self._reads += 1
        read_back = [(self.sampler.sampled, ids, 4)]
        if with_logits:
            read_back.append((self.steps.logits, logits, 4 * self.vocab_size))
        self._held = kv_len
        submission = self.queue.submit(recording, rows, kv_len, read_back)
        self._in_flight.append(_InFlight(submission, kv_len, ids, logits if with_logits else None))
        return submission

    def _read(self) -> Step:
        """The oldest step in flight, once it is done."""
        step, logits = self._in_flight[0], None  # it stays there if an interrupt comes
        token = int(self.queue.read(step.ids, 4, step.submission)[0])
        if step.logits is not None:
            logits = self.queue.read(step.logits, 4 * self.vocab_size, step.submission)
        self._in_flight.popleft()
        if step.kv_len == len(self.tokens) + 1:  # decode: it had the token before
            if token == NO_TOKEN:  # but its row had stopped and changed nothing
                self._held = len(self.tokens)
            else:
                self.tokens.append(self._token)
        self._token = token
        return Step(token, None if logits is None else logits.view(np.float32))

    def _drain(self) -> None:
        """Read the steps ahead of an end."""
        if is_forked():  # they are the other process's
            return
        with suppress(DeviceError):  # what a lost device was at is lost too; `_recover` says so
            while self._in_flight:
                self._read()

    def _recover(self) -> None:
        """After an interrupt that came while steps were drained: nobody knows what they made, and
        their staging buffers may be mapped."""
        if self._in_flight:
            self.device.wait()
            self.device.destroy(buffer for pair in self._staging for buffer in pair)
            self._staging, self.tokens, self._saved = self._new_staging(), [], 0
            self._in_flight.clear()

    # Scoring

    def score(
        self, ids: Sequence[int], adapter: str | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """The logits of every position, in chunks [rows, vocab_size]. Nothing in the cache is
        reused, because a position in it has no logits any more."""
        self.check_prompt(ids, room=0)
        self._use(adapter)
        self._rotate_for(len(ids))
        row = 4 * stride(self.vocab_size)
        # Of more than a few rows, matmul writes whole tiles.
        whole = self.device.limits.max_binding >= 128 * row
        rows = min(self.steps.rows["prefill"], 128 if whole else MAX_VEC_ROWS)
        with self.device.scope():
            logits = self.device.buffer(padded_rows(rows) * row, label="logits of all rows")
            plan = self.steps.lower(StepKind(rows), logits, adapter).place(Arena(self.device))
            recording = Recording((*plan.body, *plan.head))
            self.tokens.clear()
            self._saved = 0
            for start in range(0, len(ids), rows):
                part = ids[start : start + rows]
                self.device.write(self.steps.step, pack_step(part, start))
                self._held = start + len(part)
                self.queue.submit(recording, len(part), start + len(part), ())
                self.tokens.extend(part)
                values = self.device.read(logits, np.float32, len(part) * row // 4)
                yield values.reshape(len(part), -1)[:, : self.vocab_size]
