"""Work in child processes, several at once, each with a time limit: one that hangs or crashes ends itself alone."""

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

STARTING_S = 120.0  # a process imports torch and Triton
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds, of how many


def cores(quota: Path = QUOTA) -> int:
    """How many this process may use; in a container that has a share of them, as many as it amounts to."""
    there = len(os.sched_getaffinity(0))
    try:
        share, period = quota.read_text().split()
        return max(1, min(there, int(share) // int(period)))
    except (OSError, ValueError):  # none, or "max"
        return there


@dataclass(frozen=True)
class Failed:
    """Of a job that gave nothing: why."""

    why: str


class Worker:
    """A child process, and what it is doing."""

    def __init__(self, work: Callable[[Any], Any], limit_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # not forked: a CUDA context cannot be
        self.limit_s = limit_s
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + STARTING_S

    def give(self, number: int, job: Any) -> None:
        self.job, self.deadline = number, time.monotonic() + self.limit_s
        with contextlib.suppress(OSError):  # it has ended: so says what it answers
            self.connection.send(job)

    def answer(self) -> Any:
        """What it sent; `Failed` if it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return Failed(f"its process ended with {self.process.exitcode}")

    def end(self) -> None:
        """And what it has started: the assembler is a process too."""
        assert self.process.pid  # or killpg would end this process
        with contextlib.suppress(ProcessLookupError):  # it has not come to make a group of its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


def serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """What a child does: says that it is ready, then answers each job."""
    os.setpgrp()
    connection.send(None)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = work(job)
        except Exception as error:  # whatever it is, it is the job's, and is reported
            answer = Failed(f"{type(error).__name__}: {error}".splitlines()[0])
        try:
            connection.send(answer)
        except OSError:  # nobody waits for it
            return


class Workers:
    """Child processes for one kind of work, which take jobs until the end of the block.

    work: and what it is given and gives, must be picklable. limit_s: seconds of a job, beyond which its process is
    killed.
    """

    def __init__(self, work: Callable[[Any], Any], *, at_once: int, limit_s: float) -> None:
        self.work, self.at_once, self.limit_s = work, at_once, limit_s
        self.there: list[Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove(self.there)

    def remove(self, workers: Sequence[Worker]) -> None:
        for worker in list(workers):
            worker.end()
            self.there.remove(worker)

    def run(self, jobs: Sequence[Any], within_s: float = math.inf) -> Iterator[tuple[int, Any]]:
        """(number of the job, what `work` gave or `Failed`), as they end; no more after so many seconds. What is being
        done then, or when the caller stops asking, is given up."""
        given = ended = 0
        until = time.monotonic() + within_s
        try:
            while ended < len(jobs):
                while len(self.there) < min(self.at_once, len(jobs) - ended):
                    self.there.append(Worker(self.work, self.limit_s))
                for worker in self.there:
                    if worker.ready and worker.job is None and given < len(jobs):
                        worker.give(given, jobs[given])
                        given += 1
                waiting = [worker for worker in self.there if worker.job is not None or not worker.ready]
                patience = min(until, *(worker.deadline for worker in waiting)) - time.monotonic()
                spoke = set(wait([worker.connection for worker in waiting], timeout=max(0.0, patience)))
                if not spoke and time.monotonic() >= until:
                    return
                for worker in waiting:
                    answer: Any
                    if worker.connection in spoke:
                        answer = worker.answer()
                    elif time.monotonic() > worker.deadline:
                        answer = Failed(f"took more than {worker.limit_s:g} s")
                    else:
                        continue
                    number, worker.job = worker.job, None
                    if worker.connection not in spoke or not worker.process.is_alive():
                        self.remove([worker])
                        if number is None:
                            raise RuntimeError(f"bench: a child process did not start: {answer.why}")
                    worker.ready = True
                    if number is not None:
                        ended += 1
                        yield number, answer
        finally:
            self.remove([worker for worker in self.there if worker.job is not None])
