"""Kernels with one bug each, and what must be said of it: the table behind test_findings.py."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gluon_cpu
from tests.gluon_cpu import findings_copies as copies
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu import findings_more as more
from tests.gluon_cpu import findings_pairs as pairs
from tests.gluon_cpu.support import descriptor, normal, poisoned, small_integers


@functools.cache
def markers() -> dict[str, str]:
    """Marker -> "file:line"."""
    found: dict[str, str] = {}
    for file in Path(__file__).parent.glob("findings_*.py"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if match := re.search(r"# <- (.*)$", line):
                assert match[1] not in found, match[1]
                found[match[1]] = f"{file.name}:{number}"
    return found


def ints(*shape: int) -> torch.Tensor:
    return poisoned(*shape, dtype=torch.int32)


def boxes(rows: int = 32) -> Any:
    return descriptor(normal(rows, 32), [32, 32])


def out_boxes(rows: int = 32) -> Any:
    """An output for boxes."""
    return descriptor(poisoned(rows, 32), [32, 32])


def product(*, results: int = 1) -> tuple[Any, ...]:
    a, b = small_integers(64, 64, dtype=torch.bfloat16), small_integers(32, 64, dtype=torch.bfloat16, seed=1)
    return descriptor(a, [64, 64]), descriptor(b, [32, 64]), poisoned(results, 64, 32)


def pair_product() -> tuple[Any, ...]:
    a, b = small_integers(256, 192, dtype=torch.bfloat16), small_integers(64, 192, dtype=torch.bfloat16, seed=1)
    return descriptor(a, [256, 64], cga=[[1, 0]]), descriptor(b, [64, 64], cga=[[1, 0]]), poisoned(256, 64)


def read_back_arguments() -> tuple[Any, ...]:
    out = poisoned(32, 32)
    return descriptor(out, [32, 32]), out, poisoned(32, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with its bug and without.

    lines: markers of the lines that the message must name. words: what else it must contain.
    always: whether every schedule of every policy shows it; else `check` must find one that does.
    """

    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    finding: type[gluon_cpu.Finding] | tuple[type[gluon_cpu.Finding], ...]
    lines: tuple[str, ...]
    words: tuple[str, ...] = ()
    bug: dict[str, Any] = dataclasses.field(default_factory=lambda: {"BUG": True})
    right: dict[str, Any] = dataclasses.field(default_factory=lambda: {"BUG": False})
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grid: tuple[int, ...] = (1,)
    always: bool = True

    def launch(self, schedule: Any, meta: dict[str, Any], mode: str | None = None) -> None:
        options = {"schedule": schedule, "mode": mode, **self.options}
        gluon_cpu.launch(self.kernel, self.grid, *self.arguments(), **meta, **options)


BLACKWELL = {"target": "sm_100a"}
PAIR = {"num_ctas": 2}
RACE, FENCE, MISUSE = gluon_cpu.DataRace, gluon_cpu.MissingFence, gluon_cpu.BarrierMisuse
BLACKWELL_PAIR = {"target": "sm_100a", "num_ctas": 2}
RIGHT_PAIR = {"COUNT": 1, "LOAD_BUG": False, "READ_BUG": False}
FENCED = {"AT_WRITER": True, "AT_SENDER": False}

CASES = {
    # Races on shared memory, between roles and with the engines
    "a role that does not wait": Case(
        kernel=hopper.no_wait,
        arguments=lambda: (ints(128),),
        finding=RACE,
        lines=("unsynchronised read", "writer writes"),
        words=("writer", "reader_that_does_not_wait", "tile", "CTA 0"),
    ),
    "a slot freed before it is read": Case(
        kernel=hopper.freed_too_early,
        arguments=lambda: (ints(3, 128),),
        finding=RACE,
        lines=("read after free", "writer writes"),
        words=("writer", "reader_that_frees_early", "tile"),
    ),
    "a wait for the wrong phase": Case(
        kernel=hopper.wrong_phase,
        arguments=lambda: (ints(128),),
        finding=(RACE, MISUSE),  # the read without an order, or the phase that completes without one after the wait
        lines=(),
        words=("reader_of_the_wrong_phase", "writer"),
    ),
    "two roles write overlapping halves": Case(
        kernel=hopper.overlapping_halves,
        arguments=lambda: (ints(128),),
        finding=RACE,
        lines=("write of a half",),
        words=("half_writer", "tile"),
    ),
    "a load read before its wait": Case(
        kernel=copies.load_not_awaited,
        arguments=lambda: (boxes(), poisoned(32, 32)),
        finding=RACE,
        lines=("load in flight", "read of a load in flight"),
        words=("tile",),
    ),
    "two loads into one slot": Case(
        kernel=copies.two_loads_into_one_slot,
        arguments=lambda: (boxes(64), poisoned(32, 32)),
        finding=RACE,
        lines=("first load into the slot", "second load into the slot"),
        words=("tile",),
    ),
    "cp.async read before its wait": Case(
        kernel=copies.copy_not_awaited,
        arguments=lambda: (normal(128), poisoned(128)),
        finding=RACE,
        lines=("cp.async in flight", "read of a cp.async in flight"),
        words=("tile",),
    ),
    "a multicast over what the peer still reads": Case(
        kernel=hopper.multicast_over_the_peer,
        arguments=lambda: (descriptor(normal(64, 32), [32, 32], cga=[[0, 0]]), poisoned(64)),
        finding=RACE,
        lines=("multicast", "peer reads its slot"),
        words=("CTA 1", "tile"),
        options=PAIR,
    ),
    "an asynchronous store read before its wait": Case(
        kernel=hopper.store_to_one_peer,
        arguments=lambda: (ints(64, 32),),
        finding=RACE,
        lines=("store into a peer", "read of a store from a peer"),
        words=("tile",),
        options={"num_ctas": 4},
    ),
    # Memory that the compiler takes for its own use: only lowered mode knows
    "roles started over a barrier that has not ended": Case(
        kernel=hopper.captures_over_a_barrier,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("captures of the roles",),
        words=("barrier first", "never invalidated", "captures of warp_specialize"),
        always=False,
    ),
    "a sum over a tile that a store still reads": Case(
        kernel=hopper.scratch_over_a_store,
        arguments=lambda: (out_boxes(), small_integers(128), poisoned(1)),
        finding=gluon_cpu.ReuseRace,
        lines=("store of a tile used no more", "sum over the warps"),
        words=("tile", "scratch of reduce", "store_wait"),
        bug={"HOW": "reduce", "BUG": True},
        right={"HOW": "reduce", "BUG": False},
        always=False,
    ),
    # Stores
    "a tile reused while a store reads it": Case(
        kernel=copies.tile_reused,
        arguments=lambda: (out_boxes(64),),
        finding=RACE,
        lines=("tile written again", "store still reads"),
        words=("tile",),
    ),
    "a wait for too few stores": Case(
        kernel=copies.store_wait_too_weak,
        arguments=lambda: (out_boxes(128),),
        finding=RACE,
        lines=("staged over", "one of two stores"),
        words=("tiles",),
    ),
    "exit before a store has read": Case(
        kernel=copies.exit_before_read,
        arguments=lambda: (out_boxes(),),
        finding=gluon_cpu.LifetimeError,
        lines=("store outlives the CTA",),
        words=("tile",),
    ),
    "reading what a store has not written yet": Case(
        kernel=copies.read_back,
        arguments=read_back_arguments,
        finding=RACE,
        lines=("write on its way", "read of what was stored"),
    ),
    # Fences
    "no fence between two roles": Case(
        kernel=copies.fence_between_roles,
        arguments=lambda: (out_boxes(),),
        finding=FENCE,
        lines=("generic write", "engine reads"),
        words=("fence", "stage", "send", "tile"),
        bug={"AT_WRITER": False, "AT_SENDER": False},
        right=FENCED,
    ),
    "no fence between a read and the next load": Case(
        kernel=copies.overwritten_after_a_read,
        arguments=lambda: (descriptor(normal(32, 32), [32, 32]), poisoned(32, 32)),
        finding=FENCE,
        lines=("generic read", "engine overwrites what was read"),
        words=("fence", "take", "refill", "tile"),
    ),
    "no fence before the tensor core reads": Case(
        kernel=hopper.operand_not_fenced,
        arguments=product,
        finding=FENCE,
        lines=("operand written", "tensor core reads"),
        words=("fence", "operand_role", "tile"),
    ),
    # Warpgroup products
    "a result used before its wait": Case(
        kernel=hopper.result_before_its_wait,
        arguments=lambda: product(results=2),
        finding=RACE,
        lines=("product in flight", "result used"),
    ),
    "an operand overwritten before the wait": Case(
        kernel=hopper.operand_overwritten,
        arguments=product,
        finding=RACE,
        lines=("product reads its operand", "operand overwritten"),
        words=("b",),
    ),
    "a result used before the wait that is inline assembly": Case(
        kernel=hopper.result_before_its_inline_wait,
        arguments=lambda: product(results=2),
        finding=RACE,
        lines=("product in flight past an inline wait", "result used after an inline wait"),
    ),
    "an operand overwritten before the wait that is inline assembly": Case(
        kernel=hopper.operand_overwritten_past_an_inline_wait,
        arguments=product,
        finding=RACE,
        lines=("product reads past an inline wait", "operand overwritten after an inline wait"),
        words=("b",),
    ),
    "a slot freed before the product is done": Case(
        kernel=hopper.slot_freed_before_the_product,
        arguments=product,
        finding=RACE,
        lines=("product of a slot", "load into a slot"),
        words=("multiply_role", "load_role"),
    ),
    # Barriers
    "each waits for the other": Case(
        kernel=more.each_waits_for_the_other,
        arguments=lambda: (ints(1),),
        finding=gluon_cpu.Deadlock,
        lines=("left waits", "right waits"),
        words=("left_role", "right_role", "ping", "pong", "phase", "pending"),
    ),
    "an arrival too many": Case(
        kernel=more.too_many_arrivals,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("one arrival too many",),
        words=("barrier",),
    ),
    "an arrival too few": Case(
        kernel=more.too_few_arrivals,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("one arrival too few",),
        words=("barrier", "pending"),
    ),
    "more bytes expected than come": Case(
        kernel=more.wrong_bytes,
        arguments=lambda: (boxes(), poisoned(32, 32)),
        finding=MISUSE,
        lines=("wait for bytes",),
        words=("loaded", "4096"),
        bug={"BYTES": 8192},
        right={"BYTES": 4096},
    ),
    "fewer bytes expected than come": Case(
        kernel=more.wrong_bytes,
        arguments=lambda: (boxes(), poisoned(32, 32)),
        finding=gluon_cpu.Finding,  # stuck below zero, or complete too early and a race: as the pieces of the copy land
        lines=(),
        words=("loaded",),
        bug={"BYTES": 2048},
        right={"BYTES": 4096},
    ),
    "a wait lapped by two phases": Case(
        kernel=more.lapped,
        arguments=lambda: (ints(1),),
        finding=gluon_cpu.Finding,
        lines=("lapped wait",),
        words=("barrier",),
        always=False,
    ),
    "a barrier used before its init": Case(
        kernel=more.used_before_init,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("arrive before init",),
        words=("barrier", "init"),
    ),
    "a barrier used after invalidate": Case(
        kernel=more.used_after_invalidate,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("arrive after invalidate",),
        words=("barrier", "invalid"),
    ),
    "a barrier initialised twice": Case(
        kernel=more.initialised_twice,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("second init",),
        words=("barrier",),
    ),
    "a barrier invalidated before the last arrival": Case(
        kernel=more.invalidated_too_early,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("late arrival", "early invalidate"),
        words=("barrier", "arriving_role", "closing_role"),
    ),
    "a barrier taken from the peer": Case(
        kernel=hopper.invalidated_before_the_peer_arrives,
        arguments=lambda: (ints(1),),
        finding=MISUSE,
        lines=("remote arrival", "barrier taken from the peer"),
        words=("CTA 0", "CTA 1", "both"),
        options=PAIR,
    ),
    # Memory
    "a slot that does not exist": Case(
        kernel=more.index_out_of_bounds,
        arguments=lambda: (ints(128),),
        finding=gluon_cpu.OutOfBounds,
        lines=("slot 2 of 2",),
        words=("tiles", "2"),
        bug={"BUG": True, "slots": 2},
        right={"BUG": False, "slots": 2},
    ),
    "a load over the end of a tensor": Case(
        kernel=more.load_out_of_bounds,
        arguments=lambda: (normal(100), poisoned(128), 100),
        finding=gluon_cpu.OutOfBounds,
        lines=("load over the end",),
        words=("x_ptr",),
    ),
    "a store over the end of a tensor": Case(
        kernel=more.store_out_of_bounds,
        arguments=lambda: (poisoned(100), 100),
        finding=gluon_cpu.OutOfBounds,
        lines=("store over the end",),
        words=("out_ptr",),
    ),
    "reading shared memory that nobody wrote": Case(
        kernel=more.unwritten_shared,
        arguments=lambda: (ints(128),),
        finding=gluon_cpu.UninitialisedRead,
        lines=("read of nothing",),
        words=("tile",),
    ),
    "reading a tile of which half is written": Case(
        kernel=more.half_written,
        arguments=lambda: (ints(128),),
        finding=gluon_cpu.UninitialisedRead,
        lines=("half of it is nothing",),
        words=("tile",),
    ),
    "reading tensor memory that nobody wrote": Case(
        kernel=more.unwritten_tensor_memory,
        arguments=lambda: (poisoned(64, 32),),
        finding=gluon_cpu.UninitialisedRead,
        lines=("tensor memory of nothing",),
        words=("tmem",),
        options=BLACKWELL,
    ),
    "a message through global memory without an order": Case(
        kernel=more.message_without_order,
        arguments=lambda: (ints(4), torch.zeros(1, dtype=torch.int32), ints(1)),
        finding=RACE,
        lines=("part written", "part read"),
        words=("parts_ptr",),
        grid=(4,),
    ),
    "two programs write one output row": Case(
        kernel=more.one_output_of_two_programs,
        arguments=lambda: (poisoned(4, 128),),
        finding=gluon_cpu.OutputError,
        lines=("row written twice",),
        words=("out_ptr", "bytes of its own"),
        grid=(4,),
    ),
    # Blackwell
    "an output row that no program writes": Case(
        kernel=more.rows_of_an_output,
        arguments=lambda: (poisoned(4, 128),),
        finding=gluon_cpu.OutputError,
        lines=(),
        words=("out_ptr", "nobody"),
        bug={"ROWS": 3},
        right={"ROWS": 4},
        grid=(4,),
    ),
    "an accumulator read before its wait": Case(
        kernel=more.accumulator_not_awaited,
        arguments=product,
        finding=RACE,
        lines=("mma in flight", "accumulator read"),
        words=("acc",),
        options=BLACKWELL,
    ),
    "a commit before the last product": Case(
        kernel=more.commit_too_early,
        arguments=product,
        finding=RACE,
        lines=("not covered by the commit", "read after the wrong commit"),
        words=("acc",),
        options=BLACKWELL,
    ),
    "an operand of tcgen05 overwritten": Case(
        kernel=more.mma_operand_overwritten,
        arguments=product,
        finding=RACE,
        lines=("mma reads its operand", "load over an operand"),
        options=BLACKWELL,
    ),
    "an alias in tensor memory overwritten": Case(
        kernel=more.alias_overwritten,
        arguments=product,
        finding=RACE,
        lines=("mma writes S", "P over S"),
        words=("scores",),
        options=BLACKWELL,
    ),
    "an operand of the pair overwritten": Case(
        kernel=pairs.pair,
        arguments=pair_product,
        finding=(RACE, MISUSE),  # a race, or first the barrier of the loads, which two steps now share
        lines=(),
        words=("pair_load", "loaded"),
        bug=RIGHT_PAIR | {"LOAD_BUG": True},
        right=RIGHT_PAIR,
        options=BLACKWELL_PAIR,
    ),
    "an accumulator of the pair read before its wait": Case(
        kernel=pairs.pair,
        arguments=pair_product,
        finding=RACE,
        lines=("mma of the pair", "accumulator of the pair read"),
        words=("pair_epilogue", "acc"),
        bug=RIGHT_PAIR | {"READ_BUG": True},
        right=RIGHT_PAIR,
        options=BLACKWELL_PAIR,
    ),
    "a commit expected from both CTAs of the pair": Case(
        kernel=pairs.pair,
        arguments=pair_product,
        finding=MISUSE,  # only the leader issues: one arrival in each CTA
        lines=("wait for the pair",),
        words=("done", "pending"),
        bug=RIGHT_PAIR | {"COUNT": 2},
        right=RIGHT_PAIR,
        options=BLACKWELL_PAIR,
    ),
}
