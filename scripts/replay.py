"""Replays what coding agents send, and counts the rows of prompts that had to be computed.

    python scripts/replay.py --shape llama-3.1-8b --quantize q4       60,000 tokens, on a GPU
    python scripts/replay.py --shape qwen3-next-80b-a3b --layers 8    the first layers alone
    python scripts/replay.py demo --system 128 --turns 3 --result 64 --answer 8    in software

One session of an agent, the same each time: a system prompt with tools that grows by tool results,
messages that are edited, reasoning that later turns leave out, other agents, side requests, new
conversations, sub-agents, a request that is cancelled. Prompts are random ids; answers are the
model's own, and are sent back with the next request.

A row is a position of a prompt. The ideal is what has to be computed with a cache that keeps all
positions for ever: those behind the longest beginning that an earlier request of the session had,
its answer included, and the last one in any case. The ratio is computed to ideal rows: 100 % is the
best. TTFT is the time to the first token. The stream of another client runs beside the session, and
its pauses are the times from one of its tokens to the next. Times are in milliseconds. --json keeps
a report in scripts/results/replay.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

from make_shape import write as write_shape  # noqa: E402

import infer  # noqa: E402
from infer.bench.measure import percentiles  # noqa: E402
from infer.bench.report import markdown_table  # noqa: E402
from infer.models.loading.shapes import SHAPES  # noqa: E402
from infer.versions import commit, versions  # noqa: E402

RESULTS = SCRIPTS / "results" / "replay"
BESIDE = 0  # the id with which the prompt of the stream beside begins, and no other prompt

Ids = list[int]


# The session


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens, but for turns. system: of the system prompt. turns: tool results in the
    main conversation. result: of the longest tool result; the shortest has an eighth. answer: of
    each answer. message: of what a user writes."""

    system: int = 16_000
    turns: int = 16
    result: int = 6_000
    answer: int = 64
    message: int = 44


@dataclass(frozen=True)
class Request:
    """Prompts that are sent at once. load: the row of the table in which they count. cancelled: in
    the middle of the prefill; it counts in no row."""

    load: str
    prompts: list[Ids]
    cancelled: bool = False


class Session:
    """The requests of a coding agent. A conversation is a list of messages, and a message is a list
    of ids."""

    def __init__(
        self, sizes: Sizes, vocab_size: int, send: Callable[[Request], Sequence[Ids]]
    ) -> None:
        """send: returns the answers to the prompts of a request."""
        self._sizes, self._send = sizes, send
        self._vocab, self._draw = range(BESIDE + 1, vocab_size), random.Random(4)

    def play(self) -> None:
        sizes, first_request = self._sizes, "first request of a conversation"
        system = self._ids(sizes.system)
        main = [system, self._message()]
        self._answer(first_request, main)
        self._grow(main, sizes.turns)

        *asked, _ = main
        self._ask("the same again", asked)
        self._ask("last message edited", [*asked[:-1], self._message()])
        middle = len(asked) // 2
        for count in ("first", "second"):
            edited = [*asked[:middle], self._message(), *asked[middle + 1 :]]
            self._ask(f"message in the middle edited, {count} time", edited)

        for count, steps in (("2nd", 4), ("3rd", 8)):
            loop = [system, self._message()]
            self._answer(f"new conversation, same system prompt: {count}", loop)
            self._grow(loop, steps)
            answers, results = loop[2::2], loop[3::2]
            said = [ids[len(ids) // 2 :] for ids in answers]  # behind the reasoning
            rest = chain.from_iterable(zip(said, [*results, self._message()], strict=True))
            self._ask(f"reasoning of {steps} steps dropped", [*loop[:2], *rest])

        for _ in range(5):
            self._ask(first_request, [self._result(), self._message()])
        one, other = [system, self._message()], [self._ids(sizes.system), self._message()]
        self._answer("new conversation, same system prompt: after 5 others", one)
        self._answer(first_request, other)
        for agent in (one, other) * 3:
            self._grow(agent, 1, "two agents by turns")

        for length in (30, 300):
            for _ in range(4):
                self._ask("side request", [self._ids(length)])
            self._grow(one, 1, f"agent after 4 side requests of {length} tokens")

        common = self._ids(sizes.system // 4)
        self._ask("8 sub-agents at once", *([common, self._message()] for _ in range(8)))

        cut = [self._ids(sizes.system), self._message()]
        for is_cancelled in (True, False):
            self._ask("cancelled, sent again", cut, cancelled=is_cancelled)

    def _grow(
        self, conversation: list[Ids], steps: int, load: str = "growth by tool results"
    ) -> None:
        for _ in range(steps):
            conversation.append(self._result())
            self._answer(load, conversation)

    def _answer(self, load: str, conversation: list[Ids]) -> None:
        """Ask for an answer to a conversation, and add it as the last message."""
        conversation += self._ask(load, conversation)

    def _ask(self, load: str, *conversations: list[Ids], cancelled: bool = False) -> Sequence[Ids]:
        prompts = [list(chain(*conversation)) for conversation in conversations]
        return self._send(Request(load, prompts, cancelled))

    def _ids(self, count: int) -> Ids:
        return self._draw.choices(self._vocab, k=count)

    def _message(self) -> Ids:
        return self._ids(self._sizes.message)

    def _result(self) -> Ids:
        most = self._sizes.result
        return self._ids(self._draw.randint(max(1, most // 8), most))


class Ideal:
    """A cache that keeps every position, to compare with."""

    def __init__(self) -> None:
        self._computed: list[NDArray[np.int64]] = []

    def add(self, ids: Sequence[int]) -> None:
        """Note that these positions were computed."""
        self._computed.append(np.array(ids))

    def rows(self, prompt: Sequence[int]) -> int:
        """How many rows of a prompt must be computed with an ideal cache: at least the last row."""
        cached = max((_common(np.array(prompt), ids) for ids in self._computed), default=0)
        return len(prompt) - min(cached, len(prompt) - 1)


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many ids at the beginning of two lists are equal."""
    length = min(len(a), len(b))
    unlike = np.flatnonzero(a[:length] != b[:length])
    return int(unlike[0]) if unlike.size else length


# The engine


class Beside:
    """A stream that runs until it is stopped, in a thread of its own."""

    def __init__(self, llm: infer.LLM) -> None:
        self._llm, self._stopped = llm, threading.Event()
        self._times: list[list[float]] = []  # times of tokens, a list for each answer
        self._error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        prompt = [BESIDE, *range(1, 31)]
        try:
            while not self._stopped.is_set():  # each answer ends with the context
                self._times.append([])
                with self._llm.stream(prompt, temperature=0.0, ignore_eos=True) as stream:
                    for _ in stream:
                        self._times[-1].append(time.perf_counter())
                        if self._stopped.is_set():
                            break
        except BaseException as error:
            self._error = error

    def pauses(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds from one token to the next, wherever that overlaps one of the spans of time."""
        return [
            after - before
            for times in self._times
            for before, after in pairwise(times)
            if any(before < end and after > begin for begin, end in spans)
        ]


@dataclass
class Load:
    """All requests of a kind. ttft_seconds: of each request, to the first token. spans: from when
    each was sent to the end of its answer. pauses: of the stream beside: the median, the 99th
    percentile and the most, in seconds; None where there were none."""

    load: str
    requests: int = 0
    prompt_tokens: int = 0
    ideal_rows: int = 0
    computed_rows: int = 0
    ttft_seconds: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    pauses: tuple[float, float, float] | None = None


def replay(llm: infer.LLM, sizes: Sizes) -> list[Load]:
    """Play the session, with a stream beside it, on a model whose cache is empty. Returns the
    results of each kind of request."""
    params = infer.SamplingParams(temperature=0.0, max_tokens=sizes.answer, ignore_eos=True)
    ideal, beside = Ideal(), Beside(llm)
    loads: dict[str, Load] = {}

    def send(request: Request) -> list[Ids]:
        if request.cancelled:
            (prompt,) = request.prompts
            ideal.add(prompt[: cancel(llm, prompt, params)])
            return [[]]
        load = loads.setdefault(request.load, Load(request.load))
        for prompt in request.prompts:
            load.ideal_rows += ideal.rows(prompt)
            ideal.add(prompt)
        begin = time.perf_counter()
        results = llm.generate(prompts=request.prompts, params=params)
        load.spans.append((begin, time.perf_counter()))
        for prompt, result in zip(request.prompts, results, strict=True):
            ideal.add([*prompt, *result.token_ids[:-1]])  # the last was never computed
            load.requests += 1
            load.prompt_tokens += len(prompt)
            load.computed_rows += result.timings.prefilled_tokens
            load.ttft_seconds.append(result.timings.prefill_seconds)
        return [result.token_ids for result in results]

    with beside.running():
        Session(sizes, llm.config.vocab_size, send).play()
    for load in loads.values():
        if found := beside.pauses(load.spans):
            load.pauses = (*percentiles(found), max(found))
    return list(loads.values())


def cancel(llm: infer.LLM, prompt: Ids, params: infer.SamplingParams) -> int:
    """Send a request and cancel it after the step that completes half of its prompt. Returns how
    many positions of the prompt were computed: all of them, if a single step computes them."""
    engine = llm.engine
    with llm.stream(prompt, params) as stream:
        thread = threading.Thread(target=next, args=(stream, None))
        thread.start()
        while thread.is_alive():
            with engine.turns.turn():  # between two steps
                for sequence in engine.scheduler.prefilling:
                    computed = sequence.computed
                    if sequence.tokens == prompt and 2 * computed >= len(prompt):
                        stream.close()
                        return computed
        thread.join()
    return len(prompt)


# The command line


def table(loads: Sequence[Load]) -> str:
    header = ["load", "requests", "prompt tokens", "ideal rows", "computed", "ratio"]
    header += ["TTFT p50", "TTFT max", "pause p50", "pause p99", "pause max"]
    rows = []
    for load in loads:
        counts = load.requests, load.prompt_tokens, load.ideal_rows, load.computed_rows
        times = [median(load.ttft_seconds), max(load.ttft_seconds), *(load.pauses or ())]
        cells = [*(f"{count:,}" for count in counts)]
        cells.append(f"{100 * load.computed_rows / load.ideal_rows:,.0f} %")
        cells += [f"{1e3 * seconds:,.1f}" for seconds in times]
        rows.append([load.load, *cells, *[""] * (len(header) - 1 - len(cells))])
    return markdown_table(header, rows, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", help="a folder, or what the hub's cache has")
    model.add_argument("--shape", choices=SHAPES, metavar="SHAPE", help="on random weights")
    add("--layers", type=int, metavar="N", help="of the shape, the first N alone")
    options: dict[str, Any] = {"device": str, "quantize": str, "kv_dtype": str}
    options |= {"cache_memory": str, "context": int, "max_batch": int}
    for name, kind in options.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="as of infer serve")
    for name, size in asdict(Sizes()).items():
        add(f"--{name}", type=int, default=size, metavar="N", help="default: %(default)s")
    add("--json", metavar="NAME", help="of the report, after the date")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    with ExitStack() as stack:
        name = args.model
        if args.shape is not None:
            name = f"{stack.enter_context(TemporaryDirectory())}/{args.shape}"
            write_shape(args.shape, Path(name), args.layers)
        llm = stack.enter_context(infer.load(name, **given))
        llm.engine.runner.compile_batches(infer.SamplingParams(temperature=0.0).resolved({}))
        llm.generate(prompts=[[BESIDE] * min(512, sizes.system)] * 2, max_tokens=2)
        llm.engine.forget()
        loads = replay(llm, sizes)
        gpu, used = llm.gpu, {"context": llm.context, "max_batch": llm.slots}
    print(table(loads))
    if args.json:
        report: dict[str, Any] = {
            "schema": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "versions": versions(gpu.webgpu),
            "adapter": gpu.name,
            "driver": gpu.driver,
            "options": vars(args) | used,
            "loads": [asdict(load) for load in loads],
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{report['date'][:10]}-{args.json}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
