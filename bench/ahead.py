"""Work in child processes, several at once, each with a time limit: one that hangs or crashes ends itself alone."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

STARTING_S = 120.0  # a process imports torch and Triton


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
        self.job: int | None = None
        self.deadline = time.monotonic() + STARTING_S

    def give(self, number: int, job: Any) -> None:
        self.job, self.deadline = number, time.monotonic() + self.limit_s
        self.connection.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """What a child does: says that it is ready, then answers each job."""
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
        connection.send(answer)


def run_all(
    work: Callable[[Any], Any], jobs: Sequence[Any], *, at_once: int, limit_s: float
) -> Iterator[tuple[int, Any]]:
    """(number of the job, what `work` gave or `Failed`), as they end. Both must be picklable.

    limit_s: seconds of a job, beyond which its process is killed.
    """
    left = iter(range(len(jobs)))
    following = next(left, None)
    workers = [Worker(work, limit_s) for _ in range(min(at_once, len(jobs)))]
    ended = 0
    try:
        while ended < len(jobs):
            patience = min(worker.deadline for worker in workers) - time.monotonic()
            ready = set(wait([worker.connection for worker in workers], timeout=max(0.0, patience)))
            for worker in list(workers):
                answer: Any
                if worker.connection in ready:
                    try:
                        answer = worker.connection.recv()
                    except (EOFError, OSError):
                        worker.process.join()
                        answer = Failed(f"its process ended with {worker.process.exitcode}")
                elif time.monotonic() > worker.deadline:
                    answer = Failed(f"took more than {worker.limit_s:g} s")
                else:
                    continue
                number = worker.job
                if worker.connection not in ready or not worker.process.is_alive():
                    if number is None:
                        raise RuntimeError(f"bench: a child process did not start: {answer.why}")
                    worker.end()
                    workers.remove(worker)
                    if following is not None:
                        workers.append(Worker(work, limit_s))
                else:
                    worker.job, worker.deadline = None, float("inf")
                    if following is not None:
                        worker.give(following, jobs[following])
                        following = next(left, None)
                if number is not None:
                    ended += 1
                    yield number, answer
    finally:
        for worker in workers:
            worker.end()
