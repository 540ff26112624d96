"""Right kernels whose wrong twins are found: whatever the schedule, nothing may be said of one of these.

They are the right ones of the tables and tests of findings. campaign_silent.py runs them under many schedules.
"""

import atexit
import functools
import importlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gluon_cpu
from tests.gluon_cpu import findings_copies as copies
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu import test_findings_blackwell as blackwell
from tests.gluon_cpu import test_findings_order as order
from tests.gluon_cpu import test_found as found
from tests.gluon_cpu import test_right_kernels as right
from tests.gluon_cpu.findings_cases import CASES, boxes, ints, out_boxes
from tests.gluon_cpu.support import descriptor, normal, poisoned

# Runs the twin with these options of a launch, and returns what must be the same under every schedule.
Twin = Callable[..., list[Tensor]]


def launched(
    kernel: Any, arguments: Callable[[], tuple[Any, ...]], *, grid: int | tuple[int, ...] = 1, **constant: Any
) -> Twin:
    """`constant`: constants of the kernel and options of its launch."""

    def run(**options: Any) -> list[Tensor]:
        given = arguments()
        gluon_cpu.launch(kernel, grid if isinstance(grid, tuple) else (grid,), *given, **constant, **options)
        tensors = (getattr(value, "base", value) for value in given)
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    return run


def unlike(twin: Twin) -> Twin:
    """A twin whose numbers may depend on the schedule."""

    def run(**options: Any) -> list[Tensor]:
        twin(**options)
        return []

    return run


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def one_tensor(tensor: Tensor, *more: Any) -> tuple[Any, ...]:
    """The tensor's descriptor, what else the kernel takes, and the tensor itself."""
    return descriptor(tensor, [32, 32]), *more, tensor


def of_cases() -> Iterator[tuple[str, Twin]]:
    """Of findings_cases.py. Where bugs share their right twin, once."""
    seen = set()
    for name, case in CASES.items():
        if (key := (case.kernel.__name__, repr(case.right))) not in seen:
            seen.add(key)
            yield name, launched(case.kernel, case.arguments, grid=case.grid, **case.right, **case.options)


def of_findings() -> Iterator[tuple[str, Twin]]:
    """The right kernels of test_findings.py that are in no table."""
    at_reader = {"AT_WRITER": False, "AT_SENDER": True}
    yield "a fence at the reader", launched(copies.fence_between_roles, lambda: (out_boxes(),), **at_reader)
    yield "a fence of the compiler's", launched(copies.fence_within_a_role, lambda: (out_boxes(),))
    for kernel in (hopper.init_without_a_cluster_barrier, hopper.exit_before_the_peer_arrives):
        yield kernel.__name__, launched(kernel, lambda: (ints(1),), num_ctas=2)


def of_right_kernels() -> Iterator[tuple[str, Twin]]:
    x = torch.arange(2048, dtype=torch.int32)
    blackwell_target: dict[str, Any] = {"target": "sm_100a"}
    for other in (False, True):
        constants = {"COMMIT": True, "WAIT": True, "OTHER_THREADS": other}
        yield f"two copies, {other=}", launched(right.two_copies, lambda: (x, ints(1024)), **constants)
    yield "a ring of copies", launched(right.ring_of_copies, lambda: (x[:1024], ints(1024)))
    loop = launched(right.accumulator_of_a_loop, lambda: (ints(1), 3), BUG=False, **blackwell_target)
    yield "an accumulator of a loop", loop
    for reads, fence in ((True, False), (False, True)):
        kind: dict[str, Any] = {"READS": reads, "FENCE": fence, **blackwell_target}
        yield f"answers, {reads=}", launched(right.answers, lambda: (ints(3), 3), **kind)
    yield "a reduction into a part", launched(right.add_to_a_part, lambda: (descriptor(part(), [32, 32]), 1.0))
    tiles = normal(128, 64, dtype=torch.bfloat16)
    product = launched(right.load_over_a_product, lambda: (descriptor(tiles, [64, 64]), poisoned(64, 64)), BUG=False)
    yield "a load after a product", product


def part() -> Tensor:
    out = poisoned(64, 32)
    out[:32] = 5.0
    return out


def of_order() -> Iterator[tuple[str, Twin]]:
    x = torch.arange(256, dtype=torch.int32)
    yield "two stores to one place", launched(order.two_stores, lambda: (out_boxes(),), BUG=False)
    for reuse in (True, False):
        kind = {"PENDING": 0, "REUSE": reuse}
        yield (
            f"a tile of two stores, {reuse=}",
            launched(order.tile_of_two_stores, lambda: (out_boxes(), out_boxes()), **kind),
        )
    yield "two copies into one place", launched(order.two_copies, lambda: (x, ints(128)), BUG=False)
    counts = launched(order.counts_and_reads, lambda: (flag(), ints(1)), grid=2, BUG=False)
    yield "an atomic beside another program's", unlike(counts)
    # How often a program asks for the flag depends on the schedule; what it then reads does not.
    yield "a flag and a barrier", launched(order.hand_over, lambda: (ints(128), flag(), ints(128)), grid=2, BUG=False)
    lives = launched(order.barrier_of_two_lives, lambda: (descriptor(normal(32, 32), [32, 32]), poisoned(32, 32)))
    yield "a barrier of two lives", lives
    for writes in (True, False):
        both = launched(order.written_and_stored_by_two, lambda: (out_boxes(),), CHILD_WRITES=writes)
        yield f"written and stored by two, {writes=}", both

    def round_trip() -> tuple[Any, ...]:
        data = poisoned(32, 32)
        return data, descriptor(data, [32, 32]), poisoned(32, 32)

    yield "into global memory and back", launched(order.global_round_trip, round_trip, HOW="TMA store")
    over = launched(
        order.hand_over_between_programs,
        lambda: (*one_tensor(poisoned(32, 32), flag()), poisoned(32, 32)),
        grid=2,
        BY_TMA=False,
    )
    yield "a tile for another program", over
    yield "three arrivals", launched(order.three_arrivals, lambda: (), COUNT=3)
    yield (
        "two tiles on one barrier",
        launched(order.two_tiles_on_one_barrier, lambda: (boxes(64), poisoned(64)), BUG=False),
    )


def of_attention() -> Iterator[tuple[str, Twin]]:
    """Small attention as Blackwell does it, against its own numbers."""

    def run(num_ctas: int, constant: dict[str, Any], **options: Any) -> list[Tensor]:
        blackwell.launch(num_ctas, **constant, **options)
        return []

    for num_ctas, dtype in itertools.product((1, 2, 4), (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)):
        yield f"small attention, {num_ctas} CTAs, {dtype}", functools.partial(run, num_ctas, {"dtype": dtype})
    for num_ctas in (2, 4):
        maxima = {"target": "sm_103a", "WITH_MAX": True}
        yield f"small attention with maxima, {num_ctas} CTAs", functools.partial(run, num_ctas, maxima)


def of_page() -> Iterator[tuple[str, Twin]]:
    """The examples of docs/found.md, mended, against their own numbers. Each is imported when it first runs."""

    def run(name: str, **options: Any) -> list[Tensor]:
        found.run(mended(name), **options)
        return []

    for name in found.FOUND:
        yield f"found.md, {name}, mended", functools.partial(run, name)


@functools.cache
def mended(name: str) -> Any:
    folder = Path(tempfile.mkdtemp())  # kept as long as the process: lines of it may be shown
    atexit.register(shutil.rmtree, folder)
    with found.PAGE.examples(folder, **{name: found.mended(found.PAGE.own[name].code)}):
        return importlib.import_module(name)


SOURCES = (of_cases, of_findings, of_right_kernels, of_order, of_attention, of_page)
TWINS: dict[str, Twin] = {f"twins: {name}": twin for source in SOURCES for name, twin in source()}
