"""Who sees which kind of fault? Plants each in a small kernel, and asks every judge: a table for docs/checked.md.

    make who-sees-what

gluon_cpu and the verifier are asked now, of the right kernel too, about which both must be silent. What ConSan said on
a card is taken from bench/results/h200_agreement.json; `python -m tests.gpu.agreement` asks it anew, on a card. Exit
status 1 if a judge reports a right kernel.
"""

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gluon_cpu
from proving.capture import capture
from proving.kernel_input import kernel_input
from proving.launch import Launch
from proving.ptx import strip_comment
from proving.rewrites import DIAGNOSIS, SAFETY, rewritten
from proving.verifier import Limits, verify
from tests.compat import gl, jit
from tests.gluon_cpu import findings_copies as copies
from tests.gluon_cpu.findings_cases import CASES, out_boxes
from tests.gluon_cpu.layouts import MATRIX
from tests.gluon_cpu.support import load_matrix, normal, poisoned, store_matrix
from tests.proving import kernels

CONSAN = Path(__file__).parents[2] / "bench" / "results" / "h200_agreement.json"
LIMITS = Limits(seconds=120)
NO_CARD, NOT_ITS_MATTER = "needs a card", "–"
SEEDS = 3
BY_COLUMNS = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))


@jit
def change_layout(x_ptr, out_ptr):
    store_matrix(out_ptr, gl.convert_layout(load_matrix(x_ptr, 32, 32, MATRIX), BY_COLUMNS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, planted. run: on gluon_cpu, with the fault or without; None: it lies in what comes after what that runs.
    launch: for the verifier. change: plants the fault into the PTX instead. consan: its name in the agreement tests."""

    name: str
    run: Callable[[bool, Any], None] | None
    launch: Callable[[bool], Launch]
    change: Callable[[str], str] | None = None
    consan: str | None = None


def of_case(name: str, case: str) -> Fault:
    """A fault that gluon_cpu's own tests plant, and those on the card."""
    planted = CASES[case]

    def meta(bug: bool) -> dict[str, Any]:
        return planted.bug if bug else planted.right

    return Fault(
        name=name,
        run=lambda bug, schedule: planted.launch(schedule, meta(bug)),
        launch=lambda bug: capture(
            planted.kernel, planted.grid, *planted.arguments(), **meta(bug), **num_ctas_of(planted)
        ),
        consan=f"{case}: bug",
    )


def num_ctas_of(planted: Any) -> dict[str, int]:
    return {"num_ctas": planted.options["num_ctas"]} if "num_ctas" in planted.options else {}


def of_product(name: str, bug: str, num_ctas: int = 1) -> Fault:
    """A fault of the kernel of test_guard.py, which has what attention on Blackwell synchronises with."""

    def run(planted: bool, schedule: Any) -> None:
        arguments, options = kernels.call(num_ctas, bug=bug if planted else "")
        gluon_cpu.launch(kernels.product, (1,), *arguments, **options, target="sm_100a", schedule=schedule)

    return Fault(name=name, run=run, launch=lambda planted: kernels.launch(num_ctas, bug=bug if planted else ""))


def fence_fault() -> Fault:
    """gluon_cpu and ConSan: between two roles. The verifier: the fence that the compiler puts into one role, as the
    rewrites do not know how it hands out roles in so small a kernel."""
    case = of_case("no fence between a role's writes and a copy by TMA", "no fence between two roles")
    return dataclasses.replace(
        case,
        launch=lambda _: capture(copies.fence_within_a_role, (1,), out_boxes()),
        change=without_first(r"fence\.proxy\.async\.shared::cta;"),
    )


def without_first(pattern: str) -> Callable[[str], str]:
    """PTX without the first line that matches."""

    def change(ptx: str) -> str:
        lines = ptx.split("\n")
        at = next(i for i, line in enumerate(lines) if re.fullmatch(pattern, strip_comment(line)))
        return "\n".join([*lines[:at], "\t// dropped", *lines[at + 1 :]])

    return change


def faults() -> Iterator[Fault]:
    yield of_case("a wait for a load is missing", "a load read before its wait")
    yield of_case("a second load into a slot in use", "two loads into one slot")
    yield of_case("the peer's slot is loaded into while it reads", "a multicast over what the peer still reads")
    yield of_product("a product of what is not loaded", "multiplies what is not loaded")
    yield of_product("a slot freed before the product is done", "frees a slot before the product is done")
    yield of_product("tensor memory read before its product ends", "takes out what is not done")
    yield of_product("a pair multiplies before the peer's half is there", "does not wait for the peer's half", 2)
    yield of_product("a slot is never freed", "never frees a slot")
    yield of_case("an arrival too few", "an arrival too few")
    yield of_case("an arrival too many", "an arrival too many")
    yield of_case("more bytes expected than come", "more bytes expected than come")
    yield of_case("fewer bytes expected than come", "fewer bytes expected than come")
    yield of_case("a barrier used after its end", "a barrier used after invalidate")
    yield of_case("a barrier that ends before the peer arrives", "a barrier taken from the peer")
    yield of_case("a tile written again while a store reads it", "a tile reused while a store reads it")
    yield of_case("global memory read before a store is done", "reading what a store has not written yet")
    yield of_case("the CTA ends while a store reads its tile", "exit before a store has read")
    yield fence_fault()
    yield of_case("a load over the end of a tensor", "a load over the end of a tensor")
    yield of_case("a store over the end of a tensor", "a store over the end of a tensor")
    yield of_case("shared memory read that nobody wrote", "reading shared memory that nobody wrote")
    yield of_case("tensor memory read that nobody wrote", "reading tensor memory that nobody wrote")
    yield of_case("two programs write the same bytes", "two programs write one output row")
    yield of_case("output that nobody writes", "an output row that no program writes")
    yield Fault(
        name="no barrier between the warps of a role",
        run=None,
        launch=lambda _: capture(change_layout, (1,), normal(32, 32), poisoned(32, 32)),
        change=without_first(r"bar\.sync\s+0(, 128)?;"),
    )
    yield Fault(
        name="no `tcgen05.wait::ld`",
        run=None,
        launch=lambda _: kernels.launch(),
        change=without_first(r"tcgen05\.wait::ld\.sync\.aligned;"),
    )


def asked_gluon_cpu(fault: Fault, bug: bool) -> str:
    """What it finds, or ""."""
    assert fault.run
    for policy in gluon_cpu.POLICIES:
        for seed in range(SEEDS):
            try:
                fault.run(bug, gluon_cpu.Schedule(policy, seed=seed))
            except gluon_cpu.Finding as finding:
                return type(finding).__name__
    return ""


def asked_verifier(fault: Fault, bug: bool) -> str:
    """Its result, or "" for `race_free`."""
    launch = fault.launch(bug)
    ptx = fault.change(launch.ptx) if bug and fault.change else launch.ptx
    verdict = verify(rewritten(ptx)[0], kernel_input(launch), LIMITS)
    if verdict.result == "unsupported":  # of a deadlock it then says more
        verdict = verify(rewritten(ptx, (*SAFETY, *DIAGNOSIS))[0], kernel_input(launch), LIMITS)
        return verdict.result
    return "" if verdict.race_free else verdict.result


@functools.cache
def on_the_card() -> dict[str, str]:
    rows = json.loads(CONSAN.read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row["consan"] for row in rows}


def said(found: str) -> str:
    return f"found: `{found}`" if found else "**silent**"


def row_of(fault: Fault) -> list[str]:
    """A row of the table. Raises ValueError if a judge reports the right kernel."""
    judges = {"gluon_cpu": asked_gluon_cpu, "the verifier": asked_verifier}
    if fault.run is None:
        del judges["gluon_cpu"]
    cells = {}
    for judge, ask in judges.items():
        if wrong := ask(fault, False):
            raise ValueError(f"{fault.name}: expected {judge} to accept the right kernel, got {wrong}")
        cells[judge] = said(ask(fault, True))
    card = {"found": "found", "silent": "**silent**"}.get(on_the_card().get(fault.consan or "", ""), NO_CARD)
    return [fault.name, cells.get("gluon_cpu", NOT_ITS_MATTER), cells["the verifier"], card]


def main() -> int:
    wrong = []
    print("| fault | gluon_cpu | verifier | ConSan |\n|---|---|---|---|", flush=True)
    for fault in faults():
        try:
            print(f"| {' | '.join(row_of(fault))} |", flush=True)
        except ValueError as error:
            wrong.append(str(error))
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
