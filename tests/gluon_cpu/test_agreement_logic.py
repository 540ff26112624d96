"""What tests/gpu/agreement.py rests on, without a card: what is stored is up to date, and a difference is seen.

gluon_cpu stands in for the card here, in processes as on the card: once as it is, and once with a defect that the
comparison has to see.
"""

import concurrent.futures
import dataclasses
import faulthandler
import os
import time
from typing import Any

import pytest
import torch
import triton.knobs

import gluon_cpu
from gluon_attn.apart import Apart, Outcome
from gluon_cpu.hooks import stand_in_driver
from tests.gpu import agreement
from tests.gpu.agreement import EXPLAINED, ROWS, Explained, compare, numbers_of, said_by_gluon_cpu, same_numbers, stored
from tests.slow import slow_if

BUG, RIGHT = "a role that does not wait: bug", "a role that does not wait: right"
BUG_OF_TWO, RIGHT_OF_TWO = (f"a multicast over what the peer still reads: {twin}" for twin in ("bug", "right"))
FOUND, SILENT = {"verdict": "found", "detail": "DataRace"}, {"verdict": "silent"}


def test_there_are_enough_kernels():
    assert sum(row.right for row in ROWS.values()) >= 30
    assert sum(not row.right for row in ROWS.values()) >= 30


# That gluon_cpu says of each kernel what it must is tested in test_findings.py; a few are compared with the file here,
# and a few compiled, of each kind.
NAMES = list(ROWS)
QUICK = {BUG, RIGHT, BUG_OF_TWO, RIGHT_OF_TWO, *NAMES[::20]}


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, NAMES))
def test_what_is_stored_is_up_to_date(name):
    said, kept = said_by_gluon_cpu(name), stored()[name]
    again = "\nRun: python -m tests.gpu.agreement --update"
    assert {**said, "numbers": 0} == {**kept, "numbers": 0}, again
    assert same_numbers(said.get("numbers", []), kept.get("numbers", [])), again
    assert said["verdict"] == ("silent" if ROWS[name].right else "found")


def test_nothing_is_stored_or_explained_that_is_not_run():
    assert list(stored()) == list(ROWS)
    assert set(EXPLAINED) <= set(ROWS)


@pytest.mark.parametrize("name", slow_if(lambda name: name not in (BUG, RIGHT_OF_TWO), NAMES))
def test_compiles_under_consan(name, monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "consan")
    row = ROWS[name]
    with stand_in_driver("sm_90a"):
        compiled = row.kernel.warmup(*row.arguments(), grid=row.grid, **row.meta)
    assert compiled.metadata.instrumentation_mode == "consan"
    assert (compiled.metadata.target.arch, "cubin" in compiled.asm) == (90, True)
    if compiled.metadata.shared:
        assert "assertfail" in compiled.asm["ptx"], "shared memory that nothing watches"


# ---------------------------------------------------------------------------------------------------------------------
# The runner, with gluon_cpu in place of the card
# ---------------------------------------------------------------------------------------------------------------------


def launch(name: str, **options: Any) -> None:
    """Reports as the card does: an assert in what the process prints, and an error from the launch."""
    row = ROWS[name]
    arguments = agreement.moved(row.arguments(), "cpu")
    try:
        with gluon_cpu.machine(**options):
            row.kernel[row.grid](*arguments, **row.meta)
    except gluon_cpu.Finding as finding:
        assertion = f"Assertion `{type(finding).__name__}' failed."
        print(f"kernel.py:1: kernel: block: [0,0,0], thread: [0,0,0] {assertion}", flush=True)
        raise RuntimeError("CUDA error: device-side assert triggered") from None
    if row.right:
        agreement.check_numbers(name, arguments, stored())


def wrong_numbers() -> None:
    entry = stored()[RIGHT]
    numbers = numbers_of([torch.full((128,), 1, dtype=torch.int32)])
    assert not same_numbers(numbers, entry["numbers"])
    agreement.check_numbers(RIGHT, [torch.full((128,), 1, dtype=torch.int32)], stored())


def hang() -> None:
    faulthandler.dump_traceback_later(1, exit=True)
    time.sleep(60)


# How the stand-in behaves -> what it does; the row that it is taken for; the verdict and the status that must come out.
SCENES = {
    "a bug is found": (lambda: launch(BUG), BUG, "found", "same"),
    "a bug of two CTAs is found": (lambda: launch(BUG_OF_TWO), BUG_OF_TWO, "found", "same"),
    "a right kernel is silent": (lambda: launch(RIGHT), RIGHT, "silent", "same"),
    "a right kernel of two CTAs is silent": (lambda: launch(RIGHT_OF_TWO), RIGHT_OF_TWO, "silent", "same"),
    "a bug is missed": (lambda: launch(BUG, checks=False), BUG, "silent", "DIFFERENT"),
    "a false alarm": (lambda: launch(BUG), RIGHT, "found", "DIFFERENT"),
    "wrong numbers": (wrong_numbers, RIGHT, "wrong numbers", "DIFFERENT"),
    "a hang without a report": (hang, BUG, "hang", "DIFFERENT"),
    "a process that dies": (lambda: os._exit(9), BUG, "crash", "DIFFERENT"),
}


def play(scene: str) -> None:
    SCENES[scene][0]()


@pytest.fixture(scope="module")
def outcomes(request):
    apart = dataclasses.replace(
        agreement.CARD,
        function="tests.gluon_cpu.test_agreement_logic:play",
        env={},
        item_seconds=60,
        # Those that end no process share one: to start one costs more than all that they do in it.
        group=lambda scene: "all",
        restarts=1,
    )
    assert isinstance(apart, Apart)
    items = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_the_runner_tells_what_happened"
    ]
    chosen = [scene for scene in SCENES if scene in {item.callspec.params["scene"] for item in items}]
    with concurrent.futures.ThreadPoolExecutor(apart.processes) as pool:
        futures = apart.start(chosen, pool)
        return {scene: future.result()[scene] for scene, future in futures.items()}


SLOW = {scene for scene in SCENES if "two CTAs" in scene} | {"a false alarm", "a process that dies"}


@pytest.mark.parametrize("scene", slow_if(SLOW.__contains__, SCENES))
def test_the_runner_tells_what_happened(scene, outcomes):
    _, row, verdict, status = SCENES[scene]
    got = compare(row, outcomes[scene], stored()[row])
    assert (got.consan, got.status) == (verdict, status), outcomes[scene].text
    assert got.ok == (status == "same")


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

ASSERT = Outcome(
    "failed",
    "Traceback ...\ntriton.runtime.errors: CUDA error: device-side assert triggered\nIt printed:\n"
    "a.py:30: no_wait: block: [0,0,0], thread: [127,0,0] Assertion `Buffer being accessed has outstanding writes.` "
    "failed.\n",
)


def test_the_report_is_quoted():
    got = compare(BUG, ASSERT, FOUND, {})
    assert (got.consan, got.consan_detail, got.status) == (
        "found",
        "Buffer being accessed has outstanding writes.",
        "same",
    )


def test_a_python_assert_is_no_report():
    assert compare(BUG, Outcome("failed", "AssertionError: assert 1 == 2"), FOUND, {}).consan == "crash"


@pytest.mark.parametrize(
    ("outcome", "said", "explained", "status"),
    [
        (Outcome("passed"), FOUND, None, "DIFFERENT"),
        (Outcome("passed"), FOUND, Explained(("silent",), "why"), "explained"),
        (Outcome("passed"), FOUND, Explained(("hang",), "why"), "DIFFERENT"),
        (ASSERT, FOUND, Explained(("silent",), "why"), "REASON WITHOUT NEED"),
        (ASSERT, FOUND, Explained(("silent",), "why", sometimes=True), "same"),
        (ASSERT, SILENT, None, "DIFFERENT"),
        (Outcome("passed"), SILENT, None, "same"),
    ],
)
def test_a_reason_covers_only_what_it_says(outcome, said, explained, status):
    got = compare(BUG, outcome, said, {BUG: explained} if explained else {})
    assert got.status == status
    assert status in agreement.lines_of([got])[1]


@pytest.mark.parametrize("index", [0, 77, 4095])
def test_numbers_see_one_element(index):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    other, poisoned, swapped = x.clone(), x.clone(), x.clone()
    other.view(-1)[index] += 0.1
    poisoned.view(-1)[index] = float("nan")
    swapped.view(-1)[[index, index - 1]] = swapped.view(-1)[[index - 1, index]]
    assert same_numbers(numbers_of([x * (1 + 1e-7)]), numbers_of([x]))
    for wrong in (other, poisoned, swapped):
        assert not same_numbers(numbers_of([wrong]), numbers_of([x]))
