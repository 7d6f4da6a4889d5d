"""Measures the time that `infer serve` itself takes for a token: in place of the engine's process,
another one makes tokens without a model.

    python scripts/front.py --clients 1 --step 0.6       milliseconds from a token to the next
    python scripts/front.py --clients 64 --step 10 --cores 2

Of the serving process: CPU time of a token and of a request, and how often its threads were
switched. Of each token the time from when that process tells it to when it was written to the
client's socket: the median, the 99th percentile and the most, in milliseconds. Of the engine's
process the CPU time that its thread takes to hand out a step.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from infer.engine import isolated, worker  # noqa: E402
from infer.engine.token_engine import Step, Timings, TokenAnswer  # noqa: E402
from infer.llm import LLM  # noqa: E402

WORKER, SERVER = "--worker", "--server"  # then seconds of a step


# The worker below takes the place of the engine's process


class Answer(TokenAnswer):
    def __init__(self, prompt: Sequence[int], params: Any) -> None:
        self.prompt, self.params, self.stop_ids = prompt, params, []
        self.timings, self.steps = Timings(), deque()
        self.ended = self.cancelled = False
        self.error = None
        self.made = 0

    def close(self) -> None:
        self.cancelled = True


def run_worker(step: float) -> None:
    answers: list[Answer] = []
    load = worker.load
    steps, seconds = 0, 0.0  # steps measured, and this thread's CPU time for them

    def generate(prompt: Sequence[int], params: Any, **_: Any) -> Answer:
        answers.append(Answer(prompt, params))
        return answers[-1]

    def wait(ready: Callable[[], bool]) -> None:
        nonlocal steps, seconds
        if steps:
            seconds += time.thread_time()
        while not ready():
            time.sleep(step)
            now = time.perf_counter()
            answers[:] = [each for each in answers if not (each.ended or each.cancelled)]
            for each in answers:
                # The time goes with the token, as its log probability.
                each.steps.append(Step(300 + each.made % 100, logprobs=(now, [])))
                each.made += 1
                each.ended = each.made == each.params.max_tokens
        steps += 1
        seconds -= time.thread_time()

    def settle() -> None:
        nonlocal steps, seconds
        if steps > 1:
            seconds += time.thread_time()
            print(f"hand-out {seconds / steps}", file=sys.stderr, flush=True)
        steps, seconds = 0, 0.0

    def stubbed(*args: Any, **options: Any) -> LLM:
        llm = load(*args, **options)
        for method in (generate, wait, settle):
            setattr(llm.engine, method.__name__, method)
        return llm

    worker.load = stubbed
    worker.main()


# The server


def run_server(step: str, arguments: Sequence[str]) -> None:
    from infer.cli.app import main
    from infer.server.choices import ChoicesFormat
    from infer.server.endpoint import Call

    popen = subprocess.Popen

    class Popen(popen):  # type: ignore[misc, valid-type]
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            super().__init__([sys.executable, __file__, WORKER, step], **options)

    isolated.subprocess.Popen = Popen  # type: ignore[misc]
    piece, part = ChoicesFormat.piece, Call.part
    told = defaultdict[Any, list[float]](list)  # by task: the times of tokens it is about to write
    delays: list[float] = []

    def timed_piece(self: Any, index: int, chunk: Any) -> bytes:
        if chunk.logprob is not None:
            told[asyncio.current_task()].append(chunk.logprob.logprob)
        return piece(self, index, chunk)

    async def timed_part(self: Any, data: bytes, *, last: bool = False) -> None:
        times = told.pop(asyncio.current_task(), ())
        await part(self, data, last=last)
        now = time.perf_counter()
        delays.extend(now - each for each in times)

    ChoicesFormat.piece, Call.part = timed_piece, timed_part  # type: ignore[assignment]
    sys.argv = ["infer", "serve", "demo", "--port", "0", "--log-level", "error", *arguments]
    try:
        main()
    finally:
        print(f"delays {' '.join(map(str, delays))}", flush=True)


def usage(pid: int) -> tuple[float, int]:
    """CPU seconds of a process, and switches of its threads that live."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        text = status.read_text()
        switches += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return seconds, switches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--clients", type=int, default=64, help="default: %(default)s")
    add("--requests", type=int, default=4, help="of each client; default: %(default)s")
    add("--tokens", type=int, default=128, help="of each answer; default: %(default)s")
    add("--prompt-tokens", type=int, default=100, help="default: %(default)s")
    add("--step", type=float, default=10.0, metavar="MS", help="default: %(default)s")
    add("--cores", type=int, help="that the server may have; default: all")
    args = parser.parse_args()
    command = [sys.executable, __file__, SERVER, str(args.step / 1e3), str(args.clients)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    said: list[str] = []
    ready, ended = threading.Event(), threading.Event()

    def read() -> None:
        for line in server.stdout or ():
            said.append(line)
            if "http://" in line:
                ready.set()
        ready.set()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    ready.wait()
    if ended.wait(0.1):
        sys.exit("".join(said))
    address = re.findall(r"http://[\w.:]+", "".join(said))[0]
    if args.cores:
        os.sched_setaffinity(server.pid, list(os.sched_getaffinity(0))[: args.cores])
    requests = args.requests * args.clients

    def load(requests: int) -> str:
        given = {
            "--url": f"{address}/v1",
            "--clients": args.clients,
            "--requests": requests,
            "--tokens": args.tokens,
            "--prompt-tokens": args.prompt_tokens,
            "--extra": '{"logprobs": 0, "ignore_eos": true}',
        }
        options = [str(each) for pair in given.items() for each in pair]
        command = [sys.executable, str(SCRIPTS / "load.py"), *options]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    load(args.clients)
    seconds, switches = usage(server.pid)
    print(load(requests))
    used, switched = usage(server.pid)
    server.terminate()
    ended.wait()
    (delays,) = (line for line in said if line.startswith("delays"))
    taken = np.array(delays.split()[1:], float)[-requests * args.tokens :] * 1e3
    p50, p99, most = np.percentile(taken, (50, 99, 100))
    tokens = requests * args.tokens
    handed = [float(line.split()[1]) for line in said if line.startswith("hand-out")]
    print(f"delay      p50 {p50:.2f} ms, p99 {p99:.2f} ms, at most {most:.2f} ms")
    print(
        f"server     {1e6 * (used - seconds) / tokens:.0f} µs and "
        f"{(switched - switches) / tokens:.2f} switches a token"
    )
    print(f"hand-out   {1e6 * handed[-1]:.0f} µs a step")


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        run_worker(float(sys.argv[2]))
    elif sys.argv[1:2] == [SERVER]:
        run_server(sys.argv[2], ["--max-batch", sys.argv[3]])
    else:
        main()
