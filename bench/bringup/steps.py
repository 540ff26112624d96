"""What is tried on a new card, in rising order of risk. Without one, what can be is done on gluon_cpu as a B200."""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from bench.provenance import output_of, provenance
from gluon_attn.apart import Apart, Outcome
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import TABLE, Row
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import resources
from gluon_attn.runtime.assembler import assembler_version
from gluon_attn.runtime.compiler import check_triton_version
from gluon_attn.sanitizer import FINDING, HAND_OVERS, SANITIZER, run_hand_over
from gluon_attn.testing import repeat

from . import cases, device_at_hand, speed
from .runner import Notes, Step

PROCESSES = max(1, min(8, (os.cpu_count() or 2) - 1))
# What is raised where a packed Triton lacks its assembler or its disassembler.
UNAVAILABLE = (OSError, RuntimeError, subprocess.SubprocessError)
FAILURES_SAID = 12  # in the text; the JSON has all
FOLDER = "BRINGUP_FOLDER"  # where a compiling process leaves what it has found, for the step that started it


def machine(notes: Notes) -> None:
    """Versions and the like: the provenance of everything else."""
    found: dict[str, Any] = {"card": "none: gluon_cpu executes as a B200"}
    if torch.cuda.is_available():
        found = provenance(None) | {"capability": ".".join(map(str, torch.cuda.get_device_capability()))}
    else:
        found |= {"commit": output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown"}
        found |= {
            "date": output_of("date", "-u", "+%Y-%m-%d"),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
    found |= {"changed": output_of("git", "status", "--porcelain", "--untracked-files=no").splitlines()}
    try:
        found |= {"assembler": assembler_version()}
    except UNAVAILABLE as error:
        found |= {"assembler": f"unknown: {error}"}
    found |= {"python": platform.python_version(), "cpus": os.cpu_count()}
    for key, value in found.items():
        notes.put(key, value)
    check_triton_version()


def card(notes: Notes) -> None:
    """torch, the driver and Triton's launches work at all: a sum, and a kernel of two roles with one channel."""
    device_at_hand.require_card()
    assert float(torch.ones(1000, device="cuda").sum()) == 1000
    run_hand_over("a role that waits")
    notes.say(f"{device_at_hand.device()}")


# ---------------------------------------------------------------------------------------------------------------------
# Compile
# ---------------------------------------------------------------------------------------------------------------------


def table_rows() -> dict[str, tuple[Row, int]]:
    """Each row of the table that is for this card, or without one each of Blackwell, with what to compile it for."""
    rows = [(row, device_at_hand.device().arch if device_at_hand.on_card() else row.config.archs[0]) for row in TABLE]
    wanted = [
        (row, arch) for row, arch in rows if arch in row.config.archs and (device_at_hand.on_card() or arch != 90)
    ]
    return {f"{i}: sm_{arch}a {describe(row)}": (row, arch) for i, (row, arch) in enumerate(wanted)}


def describe(row: Row) -> str:
    mask = "causal" if row.causal else "full"
    return f"D={row.padded_head_dim}, {mask}, {row.config.num_ctas} CTAs, {8 * row.element_bytes} bits"


def compile_row(name: str) -> None:
    row, arch = table_rows()[name]
    dtype = torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn
    kernel = compiled(dtype, row.padded_head_dim, row.mask, row.config, arch=arch)
    try:
        found = dataclasses.asdict(resources(kernel))
    except UNAVAILABLE as error:
        found = {"not disassembled": str(error)}
    index = name.partition(":")[0]
    Path(os.environ[FOLDER], index).write_text(json.dumps(found), encoding="utf-8")


def compile_table(notes: Notes) -> None:
    names = list(table_rows())
    with tempfile.TemporaryDirectory() as folder:
        apart = Apart(
            function="bench.bringup.steps:compile_row",
            item_seconds=300,
            group=lambda name: int(name.partition(":")[0]) // 6,
            processes=os.cpu_count() or 1,
            env={FOLDER: folder},
        )

        def note(name: str, outcome: Outcome) -> None:
            if outcome.verdict != "passed":
                notes.put(name, outcome.text[-2000:])
                return
            found = json.loads(Path(folder, name.partition(":")[0]).read_text())
            notes.put(name, found)
            if any(loop["spills"] for loop in found.get("loops", [])):
                notes.say(f"spills in a steady loop: {name}")

        settle(notes, apart, names, note)


def settle(notes: Notes, apart: Apart, names: list[str], note: Any) -> None:
    """Run the items, note each as soon as it is known, and fail if one has."""
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(apart.processes) as pool:
        futures = apart.start(names, pool)
        for future in concurrent.futures.as_completed(set(futures.values())):
            for name, outcome in future.result().items():
                note(name, outcome)
                if outcome.verdict == "failed":
                    failed += 1
                    if failed <= FAILURES_SAID:
                        notes.say(f"failed: {name}: {last_line(outcome.text)}")
    notes.say(f"{len(names) - failed} of {len(names)} passed")
    assert names, "there was nothing to do"
    assert failed == 0, f"{failed} of {len(names)} failed"


def last_line(text: str) -> str:
    """Of a traceback: the error. What the item printed comes after it."""
    return (text.partition("\nIt printed:")[0].strip().splitlines() or [""])[-1][:200]


# ---------------------------------------------------------------------------------------------------------------------
# Right
# ---------------------------------------------------------------------------------------------------------------------


def smallest(num_ctas: int, notes: Notes) -> None:
    """One row and one key, then one key block, then two with a causal mask."""
    device_at_hand.require_ctas(num_ctas)
    for q_len, kv_len, causal in ((1, 1, False), (128, 128, False), (129, 200, True)):
        name = f"{q_len} x {kv_len}, {'causal' if causal else 'full'}"
        print(name, flush=True)  # seen if the next line hangs
        cases.run(cases.Case(name=name, num_ctas=num_ctas, causal=causal, q_len=q_len, kv_len=kv_len))
        notes.say(f"right: {name}")


def sanitizer_finds(notes: Notes) -> None:
    """The sanitizer is silent about a role that waits, and finds the race of one that does not."""
    device_at_hand.require_card()
    apart = Apart(function="gluon_attn.sanitizer:run_hand_over", item_seconds=200, processes=1, restarts=0)
    for name, waits in HAND_OVERS.items():
        verdict, outcome = "passed" if waits else "failed", apart.run_group([name])[name]
        assert outcome.verdict == verdict, f"{name}: expected {verdict}, got {outcome.verdict}: {outcome.text[-2000:]}"
        assert verdict == "passed" or FINDING in outcome.text, f"{name}: not found: {outcome.text[-2000:]}"
    notes.say("the planted race was found")


def sanitize(num_ctas: int, causal: bool, notes: Notes) -> None:
    device_at_hand.require_card()
    device_at_hand.require_ctas(num_ctas)
    config = cases.table_config(torch.bfloat16, 64, causal, num_ctas)
    kernel = compiled(
        torch.bfloat16, 64, Mask(causal=causal), config, arch=device_at_hand.device().arch, device_index=0
    )
    # Instrumented kernels keep what they watch in global memory; without it nothing would be watched.
    assert kernel.metadata.profile_scratch_size > 0, "the kernel is not instrumented"
    notes.say("compiled")
    for q_len, kv_len in ((129, 129), (300, 333), (333, 300), (600, 600)):
        print(f"{q_len} x {kv_len}", flush=True)
        cases.run(cases.Case(name="ConSan", num_ctas=num_ctas, causal=causal, q_len=q_len, kv_len=kv_len))
        notes.say(f"no finding: {q_len} x {kv_len}")


def grid(notes: Notes) -> None:
    every = cases.all_cases()
    apart = Apart(
        function="bench.bringup.cases:run_case",
        item_seconds=240,
        group=lambda name: every[name].group,
        processes=PROCESSES,
    )

    def note(name: str, outcome: Outcome) -> None:
        notes.put(name, outcome.verdict if outcome.verdict == "passed" else outcome.text[-2000:])

    settle(notes, apart, list(every), note)


def repeated(num_ctas: int, notes: Notes) -> None:
    """Bit by bit the same, launch after launch, into poisoned outputs."""
    device_at_hand.require_card()
    device_at_hand.require_ctas(num_ctas)
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        case = cases.Case(name="", num_ctas=num_ctas, causal=causal, head_dim=head_dim, heads=16, kv_heads=4)
        case = dataclasses.replace(case, batch=3, q_len=1111, kv_len=1111)
        repeat(1000, *case.tensors(), causal=causal, num_ctas=num_ctas)
        notes.say(f"1000 launches alike: D={head_dim}, {'causal' if causal else 'full'}")


# ---------------------------------------------------------------------------------------------------------------------
# The list
# ---------------------------------------------------------------------------------------------------------------------

CTAS = (1, 2, 4)
POINTS = [(d, causal, f"D={d}, {'causal' if causal else 'full'}") for d in (64, 128) for causal in (False, True)]


def steps() -> list[Step]:
    smallest_of = {n: f"smallest, {n} CTAs" for n in CTAS}
    found = [
        Step(name="machine", run=machine, seconds=120),
        Step(name="card", run=card, seconds=120),
        Step(name="compile", run=compile_table, seconds=2400),
    ]
    for n in CTAS:
        found.append(Step(name=smallest_of[n], run=functools.partial(smallest, n), seconds=400))
    control = "ConSan finds a race"
    found.append(Step(name=control, run=sanitizer_finds, seconds=600, needs=["card"], env=SANITIZER))
    for n, causal in itertools.product((1, 2), (False, True)):
        name = f"ConSan, {'causal' if causal else 'full'}, {n} CTAs"
        run = functools.partial(sanitize, n, causal)
        # Instrumented, a Blackwell kernel is a million lines of PTX, over which the assembler takes minutes.
        found.append(Step(name=name, run=run, seconds=2400, needs=[control], env=SANITIZER))
    found.append(Step(name="grid", run=grid, seconds=3600, needs=[smallest_of[1]]))
    for n in CTAS:
        run = functools.partial(repeated, n)
        found.append(Step(name=f"repeated, {n} CTAs", run=run, seconds=900, needs=["card", smallest_of[n]]))
    for d, causal, point in POINTS:
        run = functools.partial(speed.sweep, d, causal)
        found.append(Step(name=f"sweep, {point}", run=run, seconds=900, needs=["card", smallest_of[1]]))
    for d, causal, point in POINTS:
        run = functools.partial(speed.compare_levers, d, causal)
        found.append(Step(name=f"levers, {point}", run=run, seconds=1800, needs=["card", smallest_of[1]]))
    return found


STEPS = steps()
