"""Measures one engine: the tests of the benchmark, the time of the host, each kernel."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from infer.bench.drafts import Decreed, DecreedModel
from infer.bench.report import KernelTime, Load, Profile, Row
from infer.engine.answers import Answer
from infer.engine.constraint import Constraint
from infer.engine.engine import Engine
from infer.engine.options import AHEAD
from infer.engine.prompts import Prompt
from infer.engine.recordings import Recipe
from infer.engine.speculation import MAX_DRAFT, NoSpeculation
from infer.engine.token_engine import Request
from infer.kernels.errors import RequestError
from infer.kernels.gpu.plan import Dispatch, needed
from infer.kernels.gpu.profile import profile_passes
from infer.kernels.gpu.record import Copy, Recording
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.state.kv_cache import PAGE, kv_cache_bytes
from infer.kernels.state.step import HEADER, ROW, pack_step
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0).resolved({})
SAMPLED = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    seed=0,
).resolved({})

_WARM_UP_SECONDS = 0.3  # a GPU that was idle needs work before its clock is up
_HOST_STEPS = 32
LEAST_PASS = 1e-4  # seconds that a timed pass takes at least: a pass itself costs some 3 µs

BATCH_DEPTH = 128  # default number of tokens before the batch
BATCH_TOKENS = 32  # tokens of each answer in a run
_SETTLE = 2  # steps of all of a batch before those that are timed: the first gathers their rows
_PROBE = 16  # tokens of a prompt that tells how fast a prefill is, to choose its size
_SECONDS = 45.0  # that all tests take at most where their sizes are chosen

ItemT = TypeVar("ItemT")
# Called with the name of a test, the run of it that begins (0: the warm-up), and how many runs it
# has (0: none).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sizes:
    """Tokens of the prefill test and of a decode test, and the runs of each after its warm-up."""

    prompt: int = 512
    decode: int = 128
    repeats: int = 5


# On slow adapters one of the others, which take a third as long as the one before, or less.
_SIZES = (Sizes(), Sizes(256, 64, 3), Sizes(128, 32, 2), Sizes(64, 16, 1), Sizes(16, 8, 1))


# Bytes that a step has to read, and operations that it has to compute


def weight_bytes_per_token(engine: Engine) -> int:
    """Bytes of the weights that decode reads for a token, a LoRA adapter's included. Embeddings
    that are not also the head do not count, as only a row of them is read, nor do experts that the
    token is not routed to."""
    tied = engine.model.config.tie_word_embeddings
    beside = engine.adapters.always.values()
    return sum(change.a.nbytes + change.b.nbytes for change in beside) + sum(
        weight.nbytes * engine.model.active(name, weight.shape[0]) // weight.shape[0]
        for name, weight in engine.weights.items()
        if len(weight.shape) == 2
        and (not name.startswith("embed_") or (tied and name == "embed_tokens"))
    )


def cache_bytes_per_token(model: Decoder, kv_dtype: str, prompt_tokens: int, tokens: int) -> float:
    """Bytes of keys and values that a decode step reads, as the mean over `tokens` steps after a
    prompt, and of the layer states that it reads and writes. Step i attends to prompt_tokens + i
    positions, or fewer in layers with a window."""
    c = model.config
    lengths = range(prompt_tokens + 1, prompt_tokens + tokens + 1)
    read = sum(
        attended * kv_cache_bytes(c.kv_shape(layer), PAGE, kv_dtype)
        for layer, attended in _attended(c, lengths)
    )
    states = sum(sum(state.sizes) for state in c.states if state is not None)
    return read / (PAGE * tokens) + 2 * states


def _attended(config: DecoderConfig, lengths: range) -> Iterator[tuple[int, int]]:
    """Yields each layer with attention, and the sum of the positions that it attends to at these
    lengths."""
    for layer, (window, state) in enumerate(zip(config.windows, config.states, strict=True)):
        if state is None:
            yield layer, sum(min(length, window or length) for length in lengths)


def prefill_flops(model: Decoder, tokens: int, cached: int = 0) -> int:
    """Operations of a prefill of the tokens that are not cached: 2 for each value of a layer's
    matrices and each token, 2 for each value of the head for the last token, and 4 in attention for
    each query value and each position that it attends to. A LoRA adapter beside the weights does
    not count."""
    return _flops(model, range(cached + 1, tokens + 1), heads=1)


def decode_flops(model: Decoder, prompt_tokens: int, tokens: int) -> int:
    """Operations of `tokens` decode steps of one sequence after a prompt, counted as in
    `prefill_flops`, but with the head in each step."""
    return _flops(model, range(prompt_tokens + 1, prompt_tokens + tokens + 1), heads=tokens)


def _flops(model: Decoder, lengths: range, heads: int) -> int:
    """Operations for one token at each of these lengths (the positions that it attends to), and for
    the head, `heads` times."""
    c = model.config
    head = c.vocab_size * c.hidden_size
    layers = sum(
        model.active(spec.name, spec.shape[0]) * spec.shape[1]
        for spec in model.weights()
        if len(spec.shape) == 2 and not spec.name.startswith(("embed_", "lm_head"))
    )
    attention = sum(
        4 * c.num_attention_heads * c.kv_shape(layer)[1] * attended
        for layer, attended in _attended(c, lengths)
    )
    return 2 * (layers * len(lengths) + head * heads) + attention


# Measuring


class EngineBench:
    """The tests of one engine. bandwidth: bytes per second that a copy reads and writes. Each test
    runs `repeats` times after a warm-up, and progress is told its name and its runs."""

    def __init__(self, engine: Engine, bandwidth: float, repeats: int, progress: Progress) -> None:
        self.engine, self.bandwidth = engine, bandwidth
        self.repeats, self.progress = repeats, progress
        # Nothing is drafted but in tests of drafts.
        self.drafter = engine.runner.drafter
        engine.verification.draft_by(NoSpeculation())

    def sizes(
        self, prompt: int | None, decode: int | None, repeats: int | None, depth: int
    ) -> Sizes:
        """Returns the sizes of the tests. Those that are None become so large that the tests at
        depth 0 take _SECONDS at most, and that the context holds them. depth: how many tokens are
        cached before decode begins."""
        if prompt and decode and repeats:
            return Sizes(prompt, decode, repeats)
        self.progress("sizes of the tests", 0, 0)
        room = self.engine.context - 1
        ids = self._ids(min(_PROBE, room))
        params = replace(GREEDY, max_tokens=5)
        for _ in range(2):  # the first time compiles
            self.engine.forget()
            to_first, to_last = self._generate(ids, params)
        chosen = Sizes()
        for sizes in _SIZES:
            chosen = Sizes(
                prompt or min(sizes.prompt, room),
                decode or max(1, min(sizes.decode, room - depth)),
                repeats or sizes.repeats,
            )
            steps = 2 * chosen.decode * to_last / 4  # greedy and sampled
            run = chosen.prompt * to_first / len(ids) + steps
            if (chosen.repeats + 1) * run <= _SECONDS:
                break
        return chosen

    def prefill(self, tokens: int, cached: int = 0) -> Row:
        """The prefill test. cached: how many of the tokens are in the cache before."""
        ids = self._ids(tokens)

        def run() -> float:
            self.engine.forget()  # nothing else may be reused
            if cached:
                self._generate(ids[:cached], replace(GREEDY, max_tokens=1))
            return self._generate(ids, replace(GREEDY, max_tokens=1))[0]

        test = f"pp{tokens}, {cached} cached" if cached else f"pp{tokens}"
        (seconds,) = self._repeat(test, run)
        flops = prefill_flops(self.engine.model, tokens, cached)
        mean = statistics.fmean(seconds)
        return Row(
            test,
            tokens,
            seconds,
            *_tps(tokens, seconds),
            flops=flops,
            flops_per_second=flops / mean,
        )

    def decode(self, tokens: int, depth: int, *ways: SamplingParams) -> list[Row]:
        """The decode test, once for each way to sample. Runs of the ways alternate, so that a slow
        moment of the machine slows all of them."""
        # Decode needs a token to begin with. A longer prompt is in the cache after the warm-up.
        ids = self._ids(max(depth, 1))
        test = f"tg{tokens} @ d{depth}" if depth else f"tg{tokens}"
        names = [test if way.greedy else f"{test} sampled" for way in ways]
        params = [replace(way, max_tokens=tokens + 1) for way in ways]
        runs = [partial(self._decode_seconds, ids, way) for way in params]
        kv_dtype = self.engine.options.kv_dtype
        nbytes = cache_bytes_per_token(self.engine.model, kv_dtype, len(ids), tokens)
        nbytes += weight_bytes_per_token(self.engine)
        times = self._repeat(", ".join(names), *runs)
        return [
            self._decode_row(name, tokens, seconds, nbytes)
            for name, seconds in zip(names, times, strict=True)
        ]

    def batch(self, rows: int, tokens: int, depth: int) -> Row:
        """Decode `rows` answers at once, each with `depth` tokens before it: a prompt of its own,
        and what it has generated while the last answers began."""
        draw = random.Random(1)
        ids, end = range(self.engine.vocab_size), batch_positions(rows, depth, tokens)
        # Answers begin a few in each step; those that began a step before have a token more then.
        steps = [i // self.engine.runner.kinds.prompts for i in range(rows)]
        lengths = [max(1, depth - _SETTLE - (steps[-1] - step)) for step in steps]
        prompts = [draw.choices(ids, k=depth)[:length] for length in lengths]
        for prompt in prompts:  # cached from here on, so that one step begins it
            self._generate(prompt, replace(GREEDY, max_tokens=1))
        depths: list[float] = []

        def run() -> float:
            answers = [
                self.engine.answer(
                    Request(Prompt(prompt), replace(GREEDY, max_tokens=end - len(prompt)))
                )
                for prompt in prompts
            ]
            try:
                for _ in range(1 + _SETTLE):  # steps of the last answer, after all others began
                    next(answers[-1])
                before, begin = [answer.count for answer in answers], time.perf_counter()
                for _ in range(tokens):
                    next(answers[-1])
                seconds = time.perf_counter() - begin
                made = {answer.count - n for answer, n in zip(answers, before, strict=True)}
            finally:
                for answer in answers:
                    answer.close()
            if made != {tokens}:
                raise RequestError(
                    f"{rows} answers did not run at once: the cache has no room for all of them."
                )
            depths.append(statistics.fmean(map(sum, zip(lengths, before, strict=True))) - 1)
            return seconds

        (seconds,) = self._repeat(f"tg{tokens} x {rows} @ d{depth}", run)
        true = round(statistics.fmean(depths))  # more, where many begin at less than one step each
        model, kv_dtype = self.engine.model, self.engine.options.kv_dtype
        nbytes = cache_bytes_per_token(model, kv_dtype, true, tokens)
        nbytes += weight_bytes_per_token(self.engine) / rows
        row = self._decode_row(f"tg{tokens} x {rows} @ d{true}", rows * tokens, seconds, nbytes)
        flops = rows * decode_flops(model, true, tokens)
        rate = flops / statistics.fmean(seconds)
        return replace(row, sequences=rows, flops=flops, flops_per_second=rate)

    def drafts(self, rows: int, tokens: int, depth: int, accept: float, count: int | None) -> Row:
        """Decode `rows` answers at once, each after `depth` tokens, with drafts that count as right
        with the probability `accept`. count: drafts in each step; None: as many as pay."""
        engine, draw = self.engine, random.Random(3)
        ids, room = range(engine.vocab_size), drafts_positions(rows, depth, tokens)
        prompts = [draw.choices(ids, k=depth) for _ in range(rows)]
        params = replace(GREEDY, max_tokens=room - depth)
        engine.forget()
        decreed = DecreedModel if self.drafter.steps else Decreed
        of = engine.runner.kinds.draft_rows, accept, count, engine.vocab_size
        engine.verification.draft_by(decreed(*of), self.drafter)
        step_tokens: list[float] = []

        def run() -> float:
            answers = [engine.answer(Request(Prompt(prompt), params)) for prompt in prompts]
            try:
                while min(answer.count for answer in answers) < 1 + _SETTLE:
                    next(answers[0])
                made, accepted = _made(answers)
                begin = time.perf_counter()
                while _made(answers)[0] < made + rows * tokens:
                    next(answers[0])
                seconds = time.perf_counter() - begin
                made, accepted = (
                    b - a for a, b in zip((made, accepted), _made(answers), strict=True)
                )
            finally:
                for answer in answers:
                    answer.close()
            step_tokens.append(made / (made - accepted))
            return seconds * rows * tokens / made

        drafted = "auto" if count is None else str(count)
        many = f" x {rows} @ d{depth}" if rows > 1 else ""
        test = f"tg{tokens} + {drafted}{many}, {accept:g} right"
        try:
            (seconds,) = self._repeat(test, run)
        finally:
            engine.verification.draft_by(NoSpeculation())
        tps, spread = _tps(rows * tokens, seconds)
        step = statistics.fmean(step_tokens)
        many_rows = rows if rows > 1 else None
        return Row(test, rows * tokens, seconds, tps, spread, sequences=many_rows, step_tokens=step)

    def load(
        self,
        clients: int,
        prompt: int,
        tokens: int,
        params: SamplingParams = GREEDY,
        constraint: Callable[[SamplingParams], Constraint | None] = lambda params: None,
    ) -> Load:
        """Serve `clients` clients at once. Each sends `repeats` requests, the next when it has read
        the answer to the one before. Prompts have random ids and an eighth of `prompt` tokens to
        all of them; answers have `tokens` tokens, at least 2. constraint: makes the constraint that
        params ask for."""
        drawn = prompts(range(self.engine.vocab_size), prompt)
        params = replace(params, max_tokens=max(2, tokens))

        def begin(ids: Sequence[int]) -> Answer:
            return self.engine.answer(Request(Prompt(ids), params, constraint=constraint(params)))

        test = f"{clients} clients"
        self.progress(test, 0, 1)
        self._serve([*islice(drawn, clients)], clients, begin)  # the first time compiles
        requests = [*islice(drawn, clients * self.repeats)]
        self.progress(test, 1, 1)
        self.engine.forget()
        hits, preemptions = self.engine.pool.stats.hits, self.engine.scheduler.preemptions
        times = self._serve(requests, clients, begin)
        seconds = max(own[-1] for own in times) - times[0][0]
        made = sum(len(own) - 1 for own in times)
        return Load(
            clients=clients,
            requests=len(requests),
            prompt_tokens=sum(map(len, requests)),
            tokens=made,
            seconds=seconds,
            tps=made / seconds,
            ttft_seconds=percentiles([own[1] - own[0] for own in times]),
            itl_seconds=percentiles(np.concatenate([np.diff(own[1:]) for own in times])),
            reused_tokens=self.engine.pool.stats.hits - hits,
            preemptions=self.engine.scheduler.preemptions - preemptions,
        )

    def _serve(
        self,
        prompts: Sequence[Sequence[int]],
        clients: int,
        begin: Callable[[Sequence[int]], Answer],
    ) -> list[list[float]]:
        """Returns, for each request, the time at which it was sent and the time of each token, in
        seconds. One thread plays all clients: it makes the steps, and takes the tokens of all after
        each."""
        times: list[list[float]] = [[] for _ in prompts]
        waiting = iter(enumerate(prompts))
        opened: dict[int, Answer] = {}
        try:
            while True:
                for number, prompt in islice(waiting, clients - len(opened)):
                    times[number].append(time.perf_counter())
                    opened[number] = begin(prompt)
                if not opened:
                    return times
                self.engine.wait(lambda: any(answer.is_ready for answer in opened.values()))
                now = time.perf_counter()
                for number, answer in list(opened.items()):
                    while answer.is_ready:
                        if next(answer, None) is None:
                            del opened[number]
                            break
                        times[number].append(now)
        finally:
            for answer in opened.values():
                answer.close()

    def _decode_row(self, test: str, tokens: int, seconds: tuple[float, ...], nbytes: float) -> Row:
        tps, deviation = _tps(tokens, seconds)
        return Row(
            test,
            tokens,
            seconds,
            tps,
            deviation,
            bytes_per_token=nbytes,
            bandwidth=nbytes * tps,
            share=nbytes * tps / self.bandwidth,
        )

    def _ids(self, count: int) -> list[int]:
        return random.Random(0).choices(range(self.engine.vocab_size), k=count)

    def _generate(self, ids: Sequence[int], params: SamplingParams) -> tuple[float, float]:
        """Generate an answer. Returns the seconds to its first token, and from there to its
        last."""
        begin = first = last = time.perf_counter()
        for index, _ in enumerate(self.engine.generate(ids, params)):
            last = time.perf_counter()
            first = last if index == 0 else first
        return first - begin, last - first

    def _decode_seconds(self, ids: Sequence[int], params: SamplingParams) -> float:
        return self._generate(ids, params)[1]

    def _repeat(self, tests: str, *runs: Callable[[], float]) -> list[tuple[float, ...]]:
        """Returns the results of the runs, a tuple for each repetition, after a warm-up."""
        self.progress(tests, 0, self.repeats)
        end = time.perf_counter() + _WARM_UP_SECONDS
        for run in runs:
            run()
        while time.perf_counter() < end:
            runs[0]()
        times = []
        for number in range(1, self.repeats + 1):
            self.progress(tests, number, self.repeats)
            times.append([run() for run in runs])
        return list(zip(*times, strict=True))

    # One step on its own

    @property
    def greedy_step(self) -> Recording:
        """A decode step of one answer that takes the most probable token."""
        runner = self.engine.runner
        return runner.recordings.of(Recipe(runner.kinds.decode, GREEDY.chain()))

    def host_seconds(self) -> tuple[float, float]:
        """The host's time for a greedy decode step, as medians: to record and submit the step, and
        to read its id once it is there."""
        engine, queue = self.engine, self.engine.runner.queue
        recording = self.greedy_step
        place_step(engine, [0], 0)
        submits, reads = [], []
        with engine.device.scope():
            staging = engine.device.buffer(16, "read", "id")
            copies = [Copy((engine.runner.sampler.sampled, 0), (staging, 0), 4)]
            for _ in range(_HOST_STEPS):
                begin = time.perf_counter()
                submission = queue.submit(recording, 1, 1, copies)
                submits.append(time.perf_counter() - begin)
                queue.wait(submission)
                begin = time.perf_counter()
                queue.read(staging, 4, submission)
                reads.append(time.perf_counter() - begin)
        return statistics.median(submits), statistics.median(reads)

    def gpu_seconds(self, test: Row) -> float | None:
        """The GPU's time for a step in the middle of a greedy decode test at depth 0; None if the
        GPU has no timestamps."""
        if not self.engine.device.timestamps:
            return None
        kv_len = _middle(test, 0)
        place_step(self.engine, [0], kv_len - 1)
        return self._time([self.greedy_step.dispatches], 1, kv_len)[0]

    def profiles(
        self,
        prefill: Row,
        decode: dict[int, Row],
        host_seconds: float | None = None,
        batches: Sequence[tuple[int, int]] = (),
    ) -> list[Profile]:
        """The kernels of the prefill's first chunk, of a decode step in the middle of each test
        (by depth), of steps of many answers (rows, depth), and of the full sampler. host_seconds:
        the host's part of a decode step."""
        engine, runner = self.engine, self.engine.runner
        recordings, kinds = runner.recordings, runner.kinds
        chunks = runner.chunks(prefill.tokens)
        _, rows = chunks[0]
        place_step(engine, self._ids(rows), 0)
        plan = recordings.of(Recipe(kinds.prefill(rows))).dispatches
        whole = statistics.fmean(prefill.seconds) if len(chunks) == 1 else None
        profile = self._profile(f"prefill of {prefill.test}", plan, (), rows, rows)
        profiles = [replace(profile, step_seconds=whole)]
        plan = recordings.of(Recipe(kinds.decode)).dispatches
        sampler = runner.sampler.dispatches(GREEDY.chain(), gather=0)
        for depth, row in decode.items():
            kv_len = _middle(row, depth)
            place_step(engine, [0], kv_len - 1)
            profile = self._profile(f"decode of {row.test}", plan, sampler, 1, kv_len)
            profiles.append(replace(profile, step_seconds=1 / row.tps, host_seconds=host_seconds))
        for rows, depth in batches:
            if rows > 1:
                plan = recordings.of(Recipe(kinds.batch(rows))).dispatches
                sampler = runner.sampler.dispatches(GREEDY.chain(), gather=0)
                place_batch(engine, rows, depth)
                title = f"decode of {rows} sequences"
                profiles.append(self._profile(title, plan, sampler, rows, depth))
        place_step(engine, [0], 0, SAMPLED)
        sampler = runner.sampler.dispatches(SAMPLED.chain(), gather=0)
        profiles.append(self._profile("full sampler", (), sampler, 1, 1))
        return profiles

    def _profile(
        self,
        step: str,
        plan: Sequence[Dispatch],
        sampler: Sequence[Dispatch],
        rows: int,
        kv_len: int,
    ) -> Profile:
        """Time each kernel of a step. A kernel of the plan is timed by all its calls in one pass. A
        kernel of the sampler needs the results of those before it, so it is timed by what it adds
        to a pass of them."""
        self.progress(f"profile: {step}", 0, 0)
        calls: dict[str, list[Dispatch]] = {}
        for item in needed(plan, rows, kv_len):
            calls.setdefault(kernel_label(item.pipeline.spec), []).append(item)
        chains = [sampler[:end] for end in range(1, len(sampler) + 1)]
        passes = [[*plan, *sampler], *calls.values(), *chains]
        whole, *seconds = self._time(passes, rows, kv_len)
        timed = list(zip(calls.values(), seconds, strict=False))
        sums = [0.0, *seconds[len(calls) :]]
        timed += [
            ([item], max(0.0, after - before))
            for item, before, after in zip(sampler, sums, sums[1:], strict=False)
        ]
        kernels: dict[str, KernelTime] = {}
        for items, total in timed:
            label = kernel_label(items[0].pipeline.spec)
            so_far = kernels.get(label, KernelTime(label, 0, 0.0, 0, 0))
            kernels[label] = KernelTime(
                label,
                so_far.calls + len(items),
                so_far.seconds + total,
                so_far.nbytes + sum(item.moved(rows, kv_len) for item in items),
                so_far.flops + sum(item.flops(rows, kv_len) for item in items),
            )
        slowest_first = sorted(kernels.values(), key=lambda kernel: -kernel.seconds)
        return Profile(step, rows, kv_len, tuple(slowest_first), whole)

    def _time(self, passes: Sequence[Sequence[Dispatch]], rows: int, kv_len: int) -> list[float]:
        """Seconds of each pass on the GPU, with what is now in the step buffer."""
        device, step = self.engine.device, self.engine.runner.steps.step
        repeats = 3 if device.software else 20 if rows == 1 else 5
        with device.scope():
            saved = device.upload(device.read(step, np.uint32))
            return profile_passes(
                device,
                passes,
                rows,
                kv_len,
                repeats,
                least_seconds=LEAST_PASS,
                before=[Copy((saved, 0), (step, 0), step.nbytes)],
            )


def batch_positions(rows: int, depth: int, tokens: int) -> int:
    """Positions that one of `rows` answers may take in `EngineBench.batch`: the first generates a
    token for each answer that begins after it, and the pipeline stays full behind the last timed
    step."""
    return max(depth, rows + _SETTLE) + tokens + 1 + AHEAD


def place_batch(engine: Engine, rows: int, kv_len: int) -> None:
    """Write a step with one row of each of `rows` sequences, each at the last of kv_len
    positions."""
    place_step(engine, [0], kv_len - 1)
    step = pack_step([0] * rows, kv_len - 1)
    own = step[HEADER.itemsize :].view(ROW)
    own["position"], own["sequence"] = kv_len - 1, range(rows)
    engine.device.write(engine.runner.steps.step, step)
    pages = -(-kv_len // PAGE)
    for cache in engine.runner.caches.pools:
        for i in range(rows):
            first = i * pages
            cache.assign(i, 0, [n % cache.n_pages for n in range(first, first + pages)])


def place_step(
    engine: Engine, ids: Sequence[int], position: int, params: SamplingParams = GREEDY
) -> None:
    """Write a step of these rows into the step buffer, alive to the end of the context. Submitting
    it overwrites the engine's cache, which therefore holds nothing any more."""
    record = params.record(
        vocab_size=engine.vocab_size,
        prompt_tokens=position + len(ids),
        context=engine.context,
        stop_ids=(),
    )
    engine.forget()
    engine.runner.sampler.begin(0, record[0], ids, params.logit_bias)
    engine.device.write(
        engine.runner.steps.step, pack_step(ids, position, logits_rows=(len(ids) - 1,))
    )


def drafts_positions(rows: int, depth: int, tokens: int) -> int:
    """Positions of each answer of a test with drafts; some answers are faster than others."""
    return depth + 2 * tokens + (rows + _SETTLE) * (1 + MAX_DRAFT) + 1


def _made(answers: Sequence[Answer]) -> tuple[int, int]:
    """The number of tokens of all these answers, and how many of them were drafted."""
    accepted = sum(answer.timings.accepted_tokens for answer in answers)
    return sum(answer.count for answer in answers), accepted


def _middle(row: Row, depth: int) -> int:
    """Positions that the step in the middle of a decode test attends to."""
    return max(depth, 1) + (row.tokens + 1) // 2


def kernel_label(spec: KernelSpec) -> str:
    """A kernel's name with its sizes and with what is fused into it."""
    params = dict(spec.params)
    sizes = ("K", "N", "WIDTH", "HEAD_DIM", "GROUP", "WINDOW")
    words = [f"{name}={params[name]}" for name in sizes if params.get(name)]
    fused = ("NORM", "GATED", "BIAS", "RESIDUAL", "ROPE", "QUANTIZE", "PENALTIES")
    words += [name.lower() for name in fused if params.get(name) is True]
    return " ".join([spec.name, *words])


def _tps(tokens: int, seconds: Sequence[float]) -> tuple[float, float]:
    """The mean and the standard deviation of tokens per second over the runs."""
    speeds = [tokens / second for second in seconds]
    return statistics.fmean(speeds), deviation(speeds)


def prompts(ids: Sequence[ItemT], longest: int) -> Iterator[list[ItemT]]:
    """Yields random prompts without end, of an eighth of `longest` ids up to `longest`."""
    draw = random.Random(2)
    while True:
        yield draw.choices(ids, k=draw.randint(max(1, longest // 8), longest))


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return p50, p99


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
