"""A process that is watched from outside: a kernel that hangs, or code that never comes back, can be stopped in no
other way than with its process."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

POLL_S = 0.1
SPAWN = multiprocessing.get_context("spawn")  # not forked: a CUDA context cannot be


class Watch:
    """Shared by a process and the one that watches it: until when what is being done has time.

    now: seconds of a clock that both have.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        # Without a lock, which a process that is killed would keep.
        self.until = SPAWN.Value("d", 0.0, lock=False)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """The block ends by then, or its process is ended."""
        self.until.value = self.now() + seconds
        try:
            yield
        finally:
            self.until.value = 0.0

    @property
    def is_over(self) -> bool:
        return 0 < self.until.value <= self.now()


def run_watched(target: Callable[..., None], args: tuple[Any, ...], watch: Watch, until: float) -> int | None:
    """Runs a function in a process of its own, which is killed if something in it takes longer than it may, or it all
    goes on beyond `until`. Its exit status; minus the signal's number if one ended it."""
    child = SPAWN.Process(target=target, args=args)
    child.start()
    try:
        while child.is_alive():
            child.join(POLL_S)
            if watch.is_over or watch.now() > until:
                child.kill()
                child.join()
    finally:
        if child.is_alive():  # this process is being interrupted: so is that one
            child.terminate()
            child.join(10)
    return child.exitcode
