"""Do gluon_cpu and the card agree? Small kernels, right and with one bug, run under ConSan and on gluon_cpu.

    python -m tests.gpu.agreement --out agreement.json     run all on the card: a table, also as a file (1 to 2 minutes)
    python -m tests.gpu.agreement --update                 compute anew what gluon_cpu says (agreement_gluon_cpu.json)

What gluon_cpu says is stored beside this file, so that time on the card is spent on the card; a CPU test keeps it up to
date. Triton's concurrency sanitizer (ConSan) reports through a device assert, which ends the CUDA context: each kernel
has a process of its own. One that ends in another way, or not at all, has a verdict of its own.
"""

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gluon_cpu
from gluon_attn.apart import Apart, Outcome
from tests.gluon_cpu import findings_copies
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu import test_semantics_barriers as barriers
from tests.gluon_cpu import test_semantics_shared as shared
from tests.gluon_cpu import test_semantics_tma as copies
from tests.gluon_cpu import test_semantics_wgmma as products
from tests.gluon_cpu.findings_cases import CASES, FENCED, ints, out_boxes, product
from tests.gluon_cpu.support import descriptor, normal, poisoned, small_integers

STORED = Path(__file__).with_name("agreement_gluon_cpu.json")

# ---------------------------------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One launch. right: without a bug, so that its numbers are compared too."""

    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    right: bool = True
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid: tuple[int, ...] = (1,)


def rows_of_findings() -> dict[str, Row]:
    """Both twins of every pair that runs on Hopper."""
    rows = {}
    for name, case in CASES.items():
        if case.options.get("target", "sm_90a") == "sm_90a":
            for twin, meta in (("bug", case.bug), ("right", case.right)):
                rows[f"{name}: {twin}"] = Row(
                    kernel=case.kernel,
                    arguments=case.arguments,
                    right=twin == "right",
                    meta={**meta, **case.options},
                    grid=case.grid,
                )
    return rows


def matrices(m: int = 64, *, cga: list[list[list[int]]] | None = None) -> tuple[Any, ...]:
    a, b = small_integers(m, 64, dtype=torch.bfloat16, seed=1), small_integers(32, 64, dtype=torch.bfloat16, seed=2)
    a_cga, b_cga = cga or (None, None)
    return descriptor(a, [m, 64], cga=a_cga), descriptor(b, [32, 64], cga=b_cga)


PAIR = {"num_ctas": 2}

# Right kernels, for more ways to synchronise than the pairs have.
RIGHT = {
    "a fence at the reader": Row(
        kernel=findings_copies.fence_between_roles,
        arguments=lambda: (out_boxes(),),
        meta={"AT_WRITER": False, "AT_SENDER": True},
    ),
    "fences at both": Row(
        kernel=findings_copies.fence_between_roles,
        arguments=lambda: (out_boxes(),),
        meta={**FENCED, "AT_SENDER": True},
    ),
    "a fence that the compiler inserts": Row(
        kernel=findings_copies.fence_within_a_role, arguments=lambda: (out_boxes(),)
    ),
    "a cluster barrier that the compiler inserts": Row(
        kernel=hopper.init_without_a_cluster_barrier, arguments=lambda: (ints(1),), meta=PAIR
    ),
    "a cluster ends together": Row(kernel=hopper.exit_before_the_peer_arrives, arguments=lambda: (ints(1),), meta=PAIR),
    "a fresh barrier": Row(kernel=barriers.fresh_barrier, arguments=lambda: (ints(1),)),
    "counts and predicates": Row(kernel=barriers.counts_and_predicates, arguments=lambda: (ints(1), True, False)),
    "bytes before their expect": Row(
        kernel=barriers.bytes_before_expect, arguments=lambda: (descriptor(normal(128), [128]), poisoned(128))
    ),
    "an expect counts as an arrival": Row(
        kernel=barriers.expect_counts_as_an_arrival,
        arguments=lambda: (descriptor(normal(256), [128]), poisoned(128)),
    ),
    "a barrier initialised again": Row(kernel=barriers.initialised_again, arguments=lambda: (ints(1),)),
    "a ring of two slots": Row(
        kernel=barriers.ring, arguments=lambda: (normal(7, 128), poisoned(128), 7), meta={"SLOTS": 2}
    ),
    "five roles": Row(kernel=barriers.five_roles, arguments=lambda: (ints(128), 7)),
    "two specialised regions": Row(kernel=barriers.twice_specialised, arguments=lambda: (ints(128),)),
    "a barrier for each CTA": Row(
        kernel=barriers.own_barriers,
        arguments=lambda: (descriptor(normal(256), [256], cga=[[1]]), poisoned(256)),
        meta=PAIR,
    ),
    "a barrier for the pair": Row(kernel=barriers.pair_barrier, arguments=lambda: (ints(256),), meta=PAIR),
    "an asynchronous store into the peer": Row(
        kernel=barriers.store_to_peers,
        arguments=lambda: (ints(32, 32),),
        meta=PAIR | {"SLICE": False, "WAIT": True},
    ),
    "a multicast load": Row(
        kernel=copies.multicast_load,
        arguments=lambda: (descriptor(normal(96, 32), [32, 32], cga=[[0, 0]]), poisoned(96, 32), 3),
        meta=PAIR,
    ),
    "a stream of stores": Row(kernel=copies.store_stream, arguments=lambda: (out_boxes(160), 5)),
    "groups of cp.async": Row(
        kernel=shared.cp_async_groups, arguments=lambda: (normal(2, 16, 32), poisoned(2, 16, 32))
    ),
    "cp.async arrives on a barrier": Row(
        kernel=shared.cp_async_signals, arguments=lambda: (normal(128), poisoned(128))
    ),
    "two buffers in the same bytes": Row(kernel=shared.reused, arguments=lambda: (normal(128), poisoned(128))),
    "three products in flight": Row(
        kernel=products.queue, arguments=lambda: (*matrices(), poisoned(3, 64, 32)), meta={"INLINE": False}
    ),
    "a chain of products": Row(kernel=products.chained, arguments=lambda: (*matrices(), poisoned(64, 32), 3)),
    "an operand written and fenced": Row(
        kernel=products.operand_written_by_the_role,
        arguments=lambda: (product()[0], poisoned(64, 64)),
    ),
    "a product over two CTAs": Row(
        kernel=products.sharded,
        arguments=lambda: (*matrices(128, cga=[[[1, 0]], [[0, 0]]]), poisoned(128, 32)),
        meta=PAIR,
    ),
}

ROWS = {**rows_of_findings(), **RIGHT}

# ---------------------------------------------------------------------------------------------------------------------
# Differences that have a reason
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Explained:
    """Why the verdicts of a row may differ. consan: its verdicts that the reason covers.

    sometimes: the two may agree as well, as the schedule falls on the card; else a row that agrees needs no reason, and
    is reported.
    """

    consan: tuple[str, ...]
    reason: str
    sometimes: bool = False


GLOBAL_MEMORY = Explained(("silent",), "ConSan watches shared and tensor memory, not global memory.")
NOT_WRITTEN = Explained(("silent",), "ConSan follows the order of accesses, not whether memory was ever written.")
ONE_SCHEDULE = Explained(
    ("silent", "hang"),
    "ConSan sees the one schedule that runs on the card, and in that one the bug may not show.",
    sometimes=True,
)

EXPLAINED = {
    "exit before a store has read: bug": Explained(
        ("silent",), "ConSan checks accesses; after the last one of a program nothing asks what is still in flight."
    ),
    "reading what a store has not written yet: bug": GLOBAL_MEMORY,
    "a load over the end of a tensor: bug": GLOBAL_MEMORY,
    "a store over the end of a tensor: bug": GLOBAL_MEMORY,
    "a message through global memory without an order: bug": GLOBAL_MEMORY,
    "two programs write one output row: bug": GLOBAL_MEMORY,
    "an output row that no program writes: bug": GLOBAL_MEMORY,
    "reading shared memory that nobody wrote: bug": NOT_WRITTEN,
    "reading a tile of which half is written: bug": NOT_WRITTEN,
    "a slot that does not exist: bug": Explained(
        ("lost",), "ConSan knows buffers by their addresses; an address beyond all of them is an internal error to it."
    ),
    "a result used before its wait: bug": Explained(
        ("silent",), "ConSan follows a product's operands in shared memory; its result is in registers."
    ),
    "an asynchronous store into the peer": Explained(
        ("found",),
        "To ConSan such a store writes the whole tile in each CTA that it reaches. Here the two CTAs write rows of "
        "both tiles, no byte twice: a race to ConSan. 'an asynchronous store read before its wait: right' has stores "
        "that fill one tile each.",
    ),
    "a slot freed before the product is done: bug": ONE_SCHEDULE,
    "a wait lapped by two phases: bug": ONE_SCHEDULE,
    "a barrier invalidated before the last arrival: bug": ONE_SCHEDULE,
    "a barrier taken from the peer: bug": ONE_SCHEDULE,
    "a multicast over what the peer still reads: bug": ONE_SCHEDULE,
}

# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------

Numbers = list[dict[str, Any]]


def tensors_of(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments and under its descriptors, each once."""
    found = [a if isinstance(a, Tensor) else getattr(a, "base", None) for a in arguments]
    return list({id(t): t for t in found if isinstance(t, Tensor)}.values())


def moved(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """The arguments on a device. What shares a tensor still does."""
    there = {id(t): t.to(device) for t in tensors_of(arguments)}

    def move(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return there[id(argument)]
        if hasattr(argument, "base"):
            return dataclasses.replace(argument, base=there[id(argument.base)])
        return argument

    return tuple(move(a) for a in arguments)


def numbers_of(arguments: Iterable[Any]) -> Numbers:
    """What a launch left in each tensor: its NaNs, and sums with weights that a wrong or misplaced element changes."""
    numbers = []
    for tensor in tensors_of(arguments):
        x = tensor.detach().cpu().double().flatten()
        missing = x.isnan()
        x = x.masked_fill(missing, 0)
        i = torch.arange(x.numel(), dtype=torch.float64)
        sums = [float((x * torch.cos(1 + (7 + k) * i)).sum()) for k in range(3)]
        nans = [int(missing.sum()), int(i[missing].sum())]
        numbers.append({"shape": list(tensor.shape), "nans": nans, "sums": sums, "size": float(x.abs().sum())})
    return numbers


def same_numbers(got: Numbers, want: Numbers) -> bool:
    """Within rounding: most rows compute with small integers or only copy; sums of fp32 may be taken in any order."""
    if [(n["shape"], n["nans"]) for n in got] != [(n["shape"], n["nans"]) for n in want]:
        return False
    return all(
        abs(a - b) <= 1e-6 * w["size"] + 1e-12
        for g, w in zip(got, want, strict=True)
        for a, b in zip([*g["sums"], g["size"]], [*w["sums"], w["size"]], strict=True)
    )


WRONG_NUMBERS = "numbers differ from those of gluon_cpu"


def check_numbers(name: str, arguments: Iterable[Any], stored: Mapping[str, Mapping[str, Any]]) -> None:
    got, want = numbers_of(arguments), stored[name]["numbers"]
    if not same_numbers(got, want):
        raise ValueError(f"{WRONG_NUMBERS}:\n  got {got}\n  want {want}")


# ---------------------------------------------------------------------------------------------------------------------
# gluon_cpu
# ---------------------------------------------------------------------------------------------------------------------

# Found: under one of these many schedules; silent: under all. Most bugs show under the first one.
SCHEDULES = 50


def said_by_gluon_cpu(name: str, schedules: int = SCHEDULES) -> dict[str, Any]:
    row, last = ROWS[name], ()

    def launch() -> None:
        nonlocal last
        last = row.arguments()
        row.kernel[row.grid](*last, **row.meta)

    try:
        gluon_cpu.check(launch, schedules=schedules, quiet=True)
    except gluon_cpu.Finding as finding:
        return {"verdict": "found", "detail": type(finding).__name__}
    return {"verdict": "silent"} | ({"numbers": numbers_of(last)} if row.right else {})


def stored() -> dict[str, dict[str, Any]]:
    return json.loads(STORED.read_text(encoding="utf-8"))


def update() -> None:
    said = {}
    for i, name in enumerate(ROWS, 1):
        said[name] = said_by_gluon_cpu(name)
        print(f"{i:3} of {len(ROWS)}  {name}: {said[name]['verdict']}", flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in said.items())
    STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"wrote {STORED}")


# ---------------------------------------------------------------------------------------------------------------------
# The card
# ---------------------------------------------------------------------------------------------------------------------

# For a compiled kernel of microseconds, on a card that fifteen other processes use.
LAUNCH_SECONDS = 20


def run_on_the_card(name: str) -> None:
    row = ROWS[name]
    arguments = moved(row.arguments(), "cuda")
    compiled = row.kernel.warmup(*arguments, grid=row.grid, **row.meta)
    if compiled.metadata.instrumentation_mode != "consan":
        raise RuntimeError(f"compiled for instrumentation mode {compiled.metadata.instrumentation_mode!r}, not ConSan")
    torch.cuda.synchronize()
    faulthandler.dump_traceback_later(LAUNCH_SECONDS, exit=True)
    row.kernel[row.grid](*arguments, **row.meta)
    torch.cuda.synchronize()
    if row.right:
        check_numbers(name, arguments, stored())


CARD = Apart(
    function="tests.gpu.agreement:run_on_the_card",
    item_seconds=120,
    env={"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"},
    restarts=0,
)

# How Triton's bindings begin thirty lines on exit that tell nothing.
BINDINGS_LEAK = "nanobind: leaked"
DEVICE_ASSERT = re.compile(r"Assertion `([^`]*?)['`]? failed")


def verdict_of(outcome: Outcome) -> tuple[str, str]:
    """(silent, found, lost, hang, wrong numbers or crash; what there is to say of it). lost: ConSan failed itself."""
    if outcome.verdict == "passed":
        return "silent", ""
    if match := DEVICE_ASSERT.search(outcome.text):
        return ("lost" if match[1].startswith("internal ConSan error") else "found"), match[1]
    if "device-side assert triggered" in outcome.text:
        return "found", "an assert whose text was lost"
    if "Timeout (" in outcome.text or "killed after" in outcome.text:
        return "hang", "no report"
    said = outcome.text.partition(BINDINGS_LEAK)[0].strip()[-1500:]
    return ("wrong numbers" if WRONG_NUMBERS in outcome.text else "crash"), said


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    name: str
    consan: str
    consan_detail: str
    gluon_cpu: str
    gluon_cpu_detail: str
    status: str  # same, explained; DIFFERENT, or REASON WITHOUT NEED: both fail
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("same", "explained")


def compare(
    name: str,
    outcome: Outcome,
    said: Mapping[str, Any],
    explained: Mapping[str, Explained] = EXPLAINED,
) -> Comparison:
    verdict, detail = verdict_of(outcome)
    known = explained.get(name)
    status, reason = "same", ""
    if verdict != said["verdict"]:
        status = "DIFFERENT"
        if known and verdict in known.consan:
            status, reason = "explained", known.reason
    elif known and not known.sometimes:
        status, reason = "REASON WITHOUT NEED", known.reason
    return Comparison(
        name=name,
        consan=verdict,
        consan_detail=detail,
        gluon_cpu=said["verdict"],
        gluon_cpu_detail=said.get("detail", ""),
        status=status,
        reason=reason,
    )


def lines_of(comparisons: Iterable[Comparison]) -> list[str]:
    """The table, differences last and in full."""
    comparisons = list(comparisons)
    width = max((len(c.name) for c in comparisons), default=0)
    lines = [f"{'kernel':{width}} | {'ConSan':13} | {'gluon_cpu':26} | "]
    for c in comparisons:
        ours = f"{c.gluon_cpu} {c.gluon_cpu_detail}"
        lines.append(f"{c.name:{width}} | {c.consan:13} | {ours:26} | {c.status}")
    for c in comparisons:
        if c.status != "same":
            lines += [f"\n{c.status}: {c.name}: ConSan {c.consan}, gluon_cpu {c.gluon_cpu}"]
            lines += [f"  {c.reason}"] if c.reason else []
            lines += [f"  ConSan: {c.consan_detail}"] if c.consan_detail else []
    counts = {status: sum(c.status == status for c in comparisons) for status in {c.status for c in comparisons}}
    return [*lines, "", f"{len(comparisons)} kernels: {', '.join(f'{n} {s}' for s, n in sorted(counts.items()))}"]


def run_all(apart: Apart, names: Iterable[str], said: Mapping[str, Mapping[str, Any]]) -> list[Comparison]:
    names = list(names)
    comparisons = {}
    with concurrent.futures.ThreadPoolExecutor(apart.processes) as pool:
        futures = {future: name for name, future in apart.start(names, pool).items()}
        for future in concurrent.futures.as_completed(futures):
            name = futures[future]
            comparisons[name] = compare(name, future.result()[name], said[name])
            print(f"{len(comparisons):3} of {len(names)}  {name}: {comparisons[name].consan}", flush=True)
    return [comparisons[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table to this file, as JSON")
    parser.add_argument("--update", action="store_true", help="compute anew what gluon_cpu says; needs no card")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args()
    if options.update:
        update()
        return 0
    comparisons = run_all(CARD, [name for name in ROWS if options.only in name], stored())
    print("", *lines_of(comparisons), sep="\n")
    if options.out:
        table = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "rows": [dataclasses.asdict(c) for c in comparisons],
        }
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0 if all(c.ok for c in comparisons) else 1


if __name__ == "__main__":
    raise SystemExit(main())
