"""Runs any Gluon kernel on the CPU, CTA by CTA and role by role, and finds races, deadlocks and barrier misuse.

import gluon_cpu

gluon_cpu.launch(kernel, (4,), x, y, BLOCK=128, num_warps=4)      # one run, all checks on
with gluon_cpu.machine(target="sm_90a"):                          # ordinary launches run here
    kernel[(4,)](x, y, BLOCK=128)
gluon_cpu.check(fn, schedules=200)                                # many schedules of all launches in fn()
"""

import os

# Before numpy loads: the products here are small, and handing them to threads costs fifty times their time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from . import triton_version as triton_version  # first, as another release has not all names that are imported here
from .asm import register_asm
from .context import CheckResult, NothingChecked, check, machine, running
from .findings import (
    BarrierMisuse,
    BytesNeverCome,
    DataRace,
    Deadlock,
    DeviceAssert,
    DivisionByZero,
    Finding,
    LifetimeError,
    MissingFence,
    OutOfBounds,
    OutputError,
    OutputRace,
    RaceError,
    ReuseRace,
    TooFewArrivals,
    UninitialisedRead,
)
from .launch import Report, launch
from .schedule import POLICIES, Schedule
from .threads import single_threaded_blas
from .verdicts import Accept

single_threaded_blas()

__all__ = [
    "POLICIES",
    "Accept",
    "BarrierMisuse",
    "BytesNeverCome",
    "CheckResult",
    "DataRace",
    "Deadlock",
    "DeviceAssert",
    "DivisionByZero",
    "Finding",
    "LifetimeError",
    "MissingFence",
    "NothingChecked",
    "OutOfBounds",
    "OutputError",
    "OutputRace",
    "RaceError",
    "Report",
    "ReuseRace",
    "Schedule",
    "TooFewArrivals",
    "UninitialisedRead",
    "check",
    "launch",
    "machine",
    "register_asm",
    "running",
]
