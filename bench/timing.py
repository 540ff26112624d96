"""Timing of several calls against each other on one card."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import triton.testing

from bench.provenance import SEED

ORDER = random.Random(SEED)  # one for the process: each point in orders of its own, or all would favour the same call
FLUSH_BYTES = 256 * 2**20  # more than four times the L2 cache of an H200


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the median over all its runs, and the spread of its rounds' medians around their median."""

    median: float
    round_medians: tuple[float, ...]

    @property
    def spread(self) -> float:
        return (max(self.round_medians) - min(self.round_medians)) / statistics.median(self.round_medians)


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 9, runs: int = 15, warmup: int = 4
) -> dict[str, Timing]:
    """Time every call, round after round, so that clocks and temperature drift for all of them alike.

    The order is shuffled in each round: what ran just before sets the clock that a power-limited card begins
    with. Each run starts with a cold L2 cache and is timed by CUDA events. In each round `warmup` runs precede the
    timed ones: 9 rounds make 36 warm-up and 135 timed runs.
    """
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in ORDER.sample(list(calls), len(calls)):
            call = calls[name]
            for _ in range(warmup):
                call()
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
            for start, end in events:
                flush.zero_()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
            seconds[name].append([start.elapsed_time(end) / 1e3 for start, end in events])
    return {
        name: Timing(statistics.median(itertools.chain(*per_round)), tuple(map(statistics.median, per_round)))
        for name, per_round in seconds.items()
    }


def seconds_alone(call: Callable[[], object]) -> float:
    """Median time of a call that runs for 100 ms on end, after 25 ms to warm up, with a cold L2 cache each time: as
    `triton.testing.do_bench` has it, and so with a clock that no other call has set."""
    return triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median") / 1e3


def host_seconds(call: Callable[[], object], *, runs: int = 80) -> float:
    """Median host time of one call, with the device kept ahead so that it never blocks on a full queue."""
    for _ in range(20):
        call()
    taken = []
    for i in range(runs):
        if i % 40 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(taken)


def wall_seconds(call: Callable[[], object], *, runs: int = 80) -> float:
    """Time of one call in a row of `runs`, to the end of the last on the device."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / runs
