"""Rates that the card keeps up, and what they cost in energy: it is limited by power, and short bursts are not."""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.provenance import output_of, query_of_card

SECONDS = 1.5
SETTLING = 0.4  # of the time, at the start: the clocks have not come down yet
CALLS_AT_A_TIME = 10

Sample = tuple[float, float, float]  # time, watts, MHz


@dataclass(frozen=True)
class Sustained:
    """tflops, watts and sm_mhz: of the settled part of the loop. NaN for what could not be read."""

    tflops: float
    watts: float
    sm_mhz: float

    @property
    def joules_per_tflop(self) -> float:
        return self.watts / self.tflops


class Sampler(threading.Thread):
    """Reads power and clock of the current card as often as nvidia-smi answers, until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.query = query_of_card("power.draw.instant", "clocks.sm")  # a thread has a current card of its own
        self.samples: list[Sample] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                fields = output_of(*self.query).split(",")  # "612.30 W, 1485 MHz"
                watts, mhz = (float(field.split()[0]) for field in fields)
                self.samples.append((time.perf_counter(), watts, mhz))
            except (IndexError, ValueError):
                self.stopped.wait(0.05)

    def stop(self) -> list[Sample]:
        self.stopped.set()
        self.join()
        return self.samples


def settled(samples: list[Sample], start: float, end: float) -> tuple[float, float]:
    """Mean (watts, MHz) of the samples of the settled part of start ... end."""
    first = start + SETTLING * (end - start)
    kept = [s for s in samples if first <= s[0] <= end]
    if not kept:
        return float("nan"), float("nan")
    return statistics.mean(s[1] for s in kept), statistics.mean(s[2] for s in kept)


def measure(call: Callable[[], object], flops: float, seconds: float = SECONDS) -> Sustained:
    """Run `call`, of `flops` operations, back to back for `seconds`, power and clock sampled beside it."""
    call()
    torch.cuda.synchronize()
    sampler = Sampler()
    sampler.start()
    marks: list[torch.cuda.Event] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(CALLS_AT_A_TIME):
            call()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > 2:
            marks[-3].synchronize()  # a short queue, so that the loop runs as long as the card does
    torch.cuda.synchronize()
    watts, sm_mhz = settled(sampler.stop(), start, time.perf_counter())
    first = int(SETTLING * len(marks))
    milliseconds = marks[first].elapsed_time(marks[-1])
    calls = CALLS_AT_A_TIME * (len(marks) - 1 - first)
    return Sustained(flops * calls / milliseconds / 1e9 if calls else float("nan"), watts, sm_mhz)
