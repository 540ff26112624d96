"""TMA copies through slots: loads, stores of a role's own tile and of a published one, additions; right and broken."""

import functools

import pytest
import torch

import gluon_cpu
from channels import SharedMemoryChannel, close_all, init_all, tma
from tests.channels.support import NO_BUG, finds, refuses, under_schedules
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu.layouts import MATRIX
from tests.gluon_cpu.support import descriptor, load_matrix, normal, poisoned, same, small_integers, store_matrix

STEPS = 4

NOT_READ_YET = gl.constexpr(1)
NOT_READ_AT_END = gl.constexpr(2)
READ_IN_PLACE_OF_DONE = gl.constexpr(3)
OTHER_TILE = gl.constexpr(4)
STORED = gl.constexpr(5)
NOT_PUBLISHED = gl.constexpr(6)
NEWEST_READ = gl.constexpr(7)


# --- Loads, and stores of what the role itself has written


@jit
def fill(channel, desc, steps, bug):
    end = channel.producer()
    for i in range(steps):
        slot, end = end.acquire()
        tma.load(slot, desc, [(i if bug != OTHER_TILE else 0) * 32, 0])


@jit
def double(channel, staged, desc, steps, bug):
    end = channel.consumer()
    for i in range(steps):
        slot, end = end.acquire()
        x = slot.part(0).load(MATRIX)
        slot.release_accessed()
        if bug != NOT_READ_YET:
            tma.wait_stores_read()
        staged.store(2 * x)
        tma.store_own(desc, [i * 32, 0], staged)
    if bug != NOT_READ_AT_END:
        tma.wait_stores_read()


@jit(do_not_specialize=["bug"])
def doubled(x_desc, out_desc, steps, bug):
    channel = SharedMemoryChannel.alloc(x_desc, SLOTS=2, CONSUMERS=1)
    staged = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    init_all((channel,))
    gl.warp_specialize(
        [(double, (channel, staged, out_desc, steps, bug)), (fill, (channel, x_desc, steps, bug))], [1], [24]
    )
    close_all((channel,))


def run_doubled(schedule, bug=NO_BUG):
    x, out = normal(STEPS * 32, 32), poisoned(STEPS * 32, 32)
    gluon_cpu.launch(doubled, (1,), descriptor(x, [32, 32]), descriptor(out, [32, 32]), STEPS, bug, schedule=schedule)
    same(out, 2 * x)


# --- What is in global memory after wait_stores_done


@jit(do_not_specialize=["bug"])
def there_and_back(out_desc, out_ptr, copy_ptr, bug):
    staged = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    staged.store(gl.full([32, 32], 7.0, gl.float32, MATRIX))
    tma.store_own(out_desc, [0, 0], staged)
    if bug == READ_IN_PLACE_OF_DONE:
        tma.wait_stores_read()
    else:
        tma.wait_stores_done()
    store_matrix(copy_ptr, load_matrix(out_ptr, 32, 32, MATRIX))


def run_there_and_back(schedule, bug=NO_BUG):
    out, copy = poisoned(32, 32), poisoned(32, 32)
    gluon_cpu.launch(there_and_back, (1,), descriptor(out, [32, 32]), out, copy, bug, schedule=schedule)
    same(copy, torch.full((32, 32), 7.0))


# --- Two stores: what the older one wrote is there while the newer one may be on its way


@jit(do_not_specialize=["bug"])
def older_back(out_desc, out_ptr, copy_ptr, bug):
    older = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    newer = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    older.store(gl.full([32, 32], 7.0, gl.float32, MATRIX))
    newer.store(gl.full([32, 32], 8.0, gl.float32, MATRIX))
    tma.store_own(out_desc, [0, 0], older)
    tma.store_own(out_desc, [32, 0], newer)
    tma.wait_stores_but_newest_done()
    if bug == NEWEST_READ:
        store_matrix(copy_ptr, load_matrix(out_ptr + 32 * 32, 32, 32, MATRIX))
    else:
        store_matrix(copy_ptr, load_matrix(out_ptr, 32, 32, MATRIX))
    tma.wait_stores_read()


def run_older_back(schedule, bug=NO_BUG):
    out, copy = poisoned(64, 32), poisoned(32, 32)
    gluon_cpu.launch(older_back, (1,), descriptor(out, [32, 32]), out, copy, bug, schedule=schedule)
    same(copy, torch.full((32, 32), 7.0))


# --- A role publishes tiles, two others add them to one place


@jit
def write(channel, x_ptr, steps, bug):
    end = channel.producer()
    for i in range(steps):
        slot, end = end.acquire()
        slot.part(0).store(load_matrix(x_ptr + i * 32 * 32, 32, 32, MATRIX))
        if bug == NOT_PUBLISHED:
            mbarrier.arrive(slot.filled, count=1)
        else:
            slot.publish()


@jit
def send(channel, desc, steps, bug):
    end = channel.consumer()
    for _ in range(steps):
        slot, end = end.acquire()
        if bug == STORED:
            tma.store(desc, [0, 0], slot.part(0))
        else:
            tma.add(desc, [0, 0], slot.part(0))
        tma.wait_stores_read()
        slot.release()


@jit(do_not_specialize=["bug"])
def added(x_ptr, out_desc, steps, bug):
    channel = SharedMemoryChannel.alloc(out_desc, SLOTS=2, CONSUMERS=2)
    init_all((channel,))
    gl.warp_specialize(
        [
            (write, (channel, x_ptr, steps, bug)),
            (send, (channel, out_desc, steps, NO_BUG_HERE)),
            (send, (channel, out_desc, steps, bug)),
        ],
        [1, 1],
        [24, 24],
    )
    close_all((channel,))


NO_BUG_HERE = gl.constexpr(NO_BUG)


def run_added(schedule, bug=NO_BUG):
    x, out = small_integers(STEPS, 32, 32), torch.zeros(32, 32)
    gluon_cpu.launch(added, (1,), x, descriptor(out, [32, 32]), STEPS, bug, outputs=[], schedule=schedule)
    same(out, 2 * x.sum(0))


# --- All of them, right and broken

RIGHT = {
    "loads and own stores": run_doubled,
    "stores that are done": run_there_and_back,
    "stores of which all but the newest are done": run_older_back,
    "additions of published tiles": run_added,
}


@pytest.mark.parametrize("run", RIGHT.values(), ids=RIGHT.keys())
def test_right(run):
    under_schedules(run)


BROKEN = {
    "written again before the copy has read it": (run_doubled, NOT_READ_YET, gluon_cpu.ReuseRace),
    "the CTA ends before the copy has read it": (run_doubled, NOT_READ_AT_END, gluon_cpu.LifetimeError),
    "a copy that has read its tile, taken for done": (run_there_and_back, READ_IN_PLACE_OF_DONE, gluon_cpu.DataRace),
    "the newest store, taken for done": (run_older_back, NEWEST_READ, gluon_cpu.DataRace),
    "a store beside additions": (run_added, STORED, gluon_cpu.OutputRace),
    "announced without a fence": (run_added, NOT_PUBLISHED, gluon_cpu.MissingFence),
}


@pytest.mark.parametrize(("run", "bug", "kind"), BROKEN.values(), ids=BROKEN.keys())
def test_broken(run, bug, kind):
    finds(kind, functools.partial(run, bug=bug.value))


def test_another_tile_gives_other_numbers():
    with pytest.raises(AssertionError, match="not equal"):
        run_doubled(gluon_cpu.Schedule("random", seed=0), bug=OTHER_TILE.value)


# --- What the compiler refuses, by name


@jit
def refused(a_desc, b_desc, FIRST: gl.constexpr, COORDS: gl.constexpr):
    channel = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=1, CONSUMERS=1)
    init_all((channel,))
    slot, _ = channel.producer().acquire()
    descs = (b_desc, a_desc) if FIRST == "b" else (a_desc, b_desc)
    if FIRST == "one":
        tma.load(slot, a_desc, [0, 0])
    elif COORDS == 0:
        tma.load(slot, descs, (0, 0))
    elif COORDS == 1:
        tma.load(slot, descs, ([0, 0], [0]))
    else:
        tma.load(slot, descs, ([0, 0], [0, 0]))
    slot, _ = channel.consumer().acquire()
    if COORDS == 3:
        tma.store(a_desc, [0, 0, 0], slot.part(0))
    elif COORDS == 4:
        tma.add(a_desc, [0], slot.part(0))
    slot.release_accessed()
    close_all((channel,))


REFUSED = {
    "nothing": ({}, None),
    "the other part's descriptor": (
        {"FIRST": "b"},
        "descs: part 0 was allocated for fp32 [32, 32], got a descriptor of bf16 [16, 64]",
    ),
    "one descriptor": ({"FIRST": "one"}, "descs: expected a TMA descriptor for each of the slot's 2 parts, got 1"),
    "flat coordinates": ({"COORDS": 0}, "coords: expected a list of 2 indices for part 0, got a single one"),
    "a coordinate too few": ({"COORDS": 1}, "coords: expected 2 indices for part 1, .* got 1"),
    "a coordinate too many in a store": ({"COORDS": 3}, "coords: expected 2 indices for part 0, .* got 3"),
    "a coordinate too few in an addition": ({"COORDS": 4}, "coords: expected 2 indices for part 0, .* got 1"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_the_compiler(options, message):
    descs = descriptor(normal(32, 32), [32, 32]), descriptor(normal(16, 64, dtype=torch.bfloat16), [16, 64])
    refuses(message, gluon_cpu.launch, refused, (1,), *descs, outputs=[], **({"FIRST": "a", "COORDS": 2} | options))
