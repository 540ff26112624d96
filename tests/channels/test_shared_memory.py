"""SharedMemoryChannel on its own: slots of unlike tiles, several consumers, publish, clusters; right and broken."""

import functools

import pytest
import torch

import gluon_cpu
from channels import SharedMemoryChannel, SharedMemoryProducer, close_all, init_all, tma
from tests.channels.support import NO_BUG, finds, refuses, under_schedules
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu.layouts import MATRIX, MATRIX_COPIES
from tests.gluon_cpu.support import descriptor, normal, poisoned, same, small_integers, store_matrix

STEPS = 5
MATRIX_1 = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0]))

NO_INIT = gl.constexpr(1)
NOT_FILLED = gl.constexpr(2)
OLD_END_FILLS = gl.constexpr(3)
NOT_RELEASED = gl.constexpr(4)
RELEASED_TWICE = gl.constexpr(5)
NO_FENCE = gl.constexpr(6)
RELEASED_TOO_EARLY = gl.constexpr(7)
WRONG_SLOT = gl.constexpr(8)
NOT_AWAITED = gl.constexpr(9)


# --- A slot of unlike tiles, two roles that read it


@jit
def fill(channel, a_desc, b_desc, steps, bug):
    end = channel.producer()
    for i in range(steps):
        slot, following = end.acquire()
        if (bug != NOT_FILLED) | (i != 1):
            tma.load(slot, (a_desc, b_desc), ([i * 32, 0], [0, i * 64]))
        if bug != OLD_END_FILLS:
            end = following


@jit
def read(channel, out_ptr, steps, bug, PART: gl.constexpr):
    end = channel.consumer()
    for i in range(steps):
        slot, following = end.acquire()
        SHAPE: gl.constexpr = slot.part(PART).shape
        out = out_ptr + i * SHAPE[0] * SHAPE[1]
        if bug == RELEASED_TOO_EARLY:
            slot.release_accessed()
        if bug == WRONG_SLOT:
            store_matrix(out, channel.slot(2 - i % 3).part(PART).load(MATRIX))
        else:
            store_matrix(out, slot.part(PART).load(MATRIX))
        if bug == NO_FENCE:
            slot.release()
        elif (bug != NOT_RELEASED) & (bug != RELEASED_TOO_EARLY):
            slot.release_accessed()
        if bug == RELEASED_TWICE:
            slot.release_accessed()
        end = following


@jit(do_not_specialize=["bug"])
def unlike(a_desc, b_desc, a_ptr, b_ptr, steps, bug):
    channel = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=3, CONSUMERS=2)
    if bug != NO_INIT:
        init_all((channel,))
    gl.warp_specialize(
        [
            (read, (channel, a_ptr, steps, NO_BUG_HERE, 0)),
            (read, (channel, b_ptr, steps, bug, 1)),
            (fill, (channel, a_desc, b_desc, steps, bug)),
        ],
        [4, 1],
        [24, 24],
    )
    if bug != NO_INIT:
        close_all((channel,))


NO_BUG_HERE = gl.constexpr(NO_BUG)


def run_unlike(schedule, bug=NO_BUG):
    a, b = normal(STEPS * 32, 32), normal(16, STEPS * 64, dtype=torch.bfloat16)
    a_out, b_out = poisoned(STEPS, 32, 32), poisoned(STEPS, 16, 64, dtype=torch.bfloat16)
    descs = descriptor(a, [32, 32]), descriptor(b, [16, 64])
    gluon_cpu.launch(unlike, (1,), *descs, a_out, b_out, STEPS, bug, schedule=schedule)
    same(a_out.reshape(a.shape), a)
    same(b_out, b.reshape(16, STEPS, 64).transpose(0, 1))


def test_a_slot_of_unlike_tiles():
    under_schedules(run_unlike)


UNLIKE_BUGS = {
    "no init": (NO_INIT, gluon_cpu.BarrierMisuse),
    "a slot is not filled": (NOT_FILLED, gluon_cpu.Deadlock),
    "the old end again": (OLD_END_FILLS, gluon_cpu.BarrierMisuse),
    "not released": (NOT_RELEASED, gluon_cpu.TooFewArrivals),
    "released twice": (RELEASED_TWICE, gluon_cpu.BarrierMisuse),
    "release in place of release_accessed": (NO_FENCE, gluon_cpu.MissingFence),
    "released before it is read": (RELEASED_TOO_EARLY, gluon_cpu.DataRace),
    "another slot than the acquired one": (WRONG_SLOT, gluon_cpu.UninitialisedRead),
}


@pytest.mark.parametrize(("bug", "kind"), UNLIKE_BUGS.values(), ids=UNLIKE_BUGS.keys())
def test_unlike_broken(bug, kind):
    finds(kind, functools.partial(run_unlike, bug=bug.value))


# --- Two rings that a role walks in step


@jit
def fill_both(first, second, x_desc, y_desc, steps):
    one, other = first.producer(), second.producer()
    for i in range(steps):
        slot, one = one.acquire()
        tma.load(slot, x_desc, [i * 32, 0])
        slot, other = other.acquire()
        tma.load(slot, y_desc, [i * 32, 0])


@jit
def read_both(first, second, out_ptr, steps, bug):
    """The sums of tiles; with a bug, the second end stays where it is."""
    one, other = first.consumer(), second.consumer()
    for i in range(steps):
        if bug == WRONG_SLOT:
            y, _ = other.acquire()
        else:
            y, _ = other.in_step_with(one).acquire()
        x, one = one.acquire()
        store_matrix(out_ptr + i * 32 * 32, x.part(0).load(MATRIX) + y.part(0).load(MATRIX))
        x.release_accessed()
        y.release_accessed()


@jit(do_not_specialize=["bug"])
def in_step(x_desc, y_desc, out_ptr, steps, bug):
    first = SharedMemoryChannel.alloc(x_desc, SLOTS=3, CONSUMERS=1)
    second = SharedMemoryChannel.alloc(y_desc, SLOTS=3, CONSUMERS=1)
    init_all((first, second))
    gl.warp_specialize(
        [(read_both, (first, second, out_ptr, steps, bug)), (fill_both, (first, second, x_desc, y_desc, steps))],
        [1],
        [24],
    )
    close_all((first, second))


def run_in_step(schedule, bug=NO_BUG):
    x, y = small_integers(STEPS * 32, 32), small_integers(STEPS * 32, 32, seed=1)
    out = poisoned(STEPS * 32, 32)
    tiles = descriptor(x, [32, 32]), descriptor(y, [32, 32])
    gluon_cpu.launch(in_step, (1,), *tiles, out, STEPS, bug, schedule=schedule)
    same(out, x + y)


def test_two_rings_in_step():
    under_schedules(run_in_step)


def test_in_step_broken():
    """The one slot is released in each step, the others never."""
    finds(gluon_cpu.BarrierMisuse, functools.partial(run_in_step, bug=WRONG_SLOT.value))


# --- A role fills the slots, TMA stores them; parts of one shape, chosen at run time


@jit
def write(channel, x_ptr, extra_ptr, steps, bug):
    end = channel.producer()
    for i in range(steps):
        slot, end = end.acquire()
        for part in range(2):
            at = x_ptr + (2 * i + part) * 32 * 32
            rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX_1))[:, None]
            columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX_1))[None, :]
            slot.part(part).store(gl.load(at + rows * 32 + columns))
        if bug == NO_FENCE:
            mbarrier.arrive(slot.filled)
        elif bug != NOT_FILLED:
            slot.publish()
    # Memory of the next slot, through which the last tile goes once more, transposed.
    if bug != NOT_AWAITED:
        end.borrow()
    tile = channel.slot(end.ring.slot()).part(0)
    rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX_1))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX_1))[None, :]
    last = (2 * steps - 1) * 32 * 32
    tile.store(gl.load(x_ptr + last + rows * 32 + columns))
    gl.store(extra_ptr + rows * 32 + columns, tile.permute((1, 0)).load(MATRIX_1))


@jit
def store(channel, out_desc, steps, bug):
    end = channel.consumer()
    for i in range(steps):
        slot, end = end.acquire()
        if bug == RELEASED_TOO_EARLY:
            slot.release()
        for part in range(2):
            tma.store(out_desc, [(2 * i + part) * 32, 0], slot.part(part))
        tma.wait_stores_read()
        if bug != RELEASED_TOO_EARLY:
            slot.release()


@jit(do_not_specialize=["bug"])
def published(x_ptr, extra_ptr, out_desc, steps, bug):
    channel = SharedMemoryChannel.alloc((out_desc, out_desc), SLOTS=2, CONSUMERS=1)
    init_all((channel,))
    gl.warp_specialize(
        [(store, (channel, out_desc, steps, bug)), (write, (channel, x_ptr, extra_ptr, steps, bug))],
        [1],
        [24],
    )
    close_all((channel,))


def run_published(schedule, bug=NO_BUG):
    x = normal(STEPS * 64, 32)
    out, extra = torch.full_like(x, float("nan")), poisoned(32, 32)
    gluon_cpu.launch(published, (1,), x, extra, descriptor(out, [32, 32]), STEPS, bug, schedule=schedule)
    same(out, x)
    same(extra, x[-32:].T)


def test_a_role_publishes():
    under_schedules(run_published)


PUBLISHED_BUGS = {
    "published without a fence": (NO_FENCE, gluon_cpu.MissingFence),
    "not published": (NOT_FILLED, gluon_cpu.Deadlock),
    "released while the store reads": (RELEASED_TOO_EARLY, gluon_cpu.ReuseRace),
    "memory used that was not borrowed": (NOT_AWAITED, gluon_cpu.ReuseRace),
}


@pytest.mark.parametrize(("bug", "kind"), PUBLISHED_BUGS.values(), ids=PUBLISHED_BUGS.keys())
def test_published_broken(bug, kind):
    finds(kind, functools.partial(run_published, bug=bug.value))


# --- Two CTAs: one load fills both, or each its own


@jit
def fill_alike(channel, x_desc, steps, bug):
    end = channel.producer()
    for i in range(steps):
        if bug == NOT_AWAITED:  # the peer's slot: only its own CTA's
            at = end.ring
            mbarrier.wait(channel.freed.index(at.slot()), at.previous_lap())
            tma.load(channel.slot(at.slot()), x_desc, [i * 32, 0])
            end = SharedMemoryProducer(channel, at.next())
        else:
            slot, end = end.acquire()
            tma.load(slot, x_desc, [i * 32, 0])


@jit
def add(channel, out_ptr, steps, bug):
    end = channel.consumer()
    total = gl.zeros([32, 32], gl.float32, MATRIX_COPIES)
    for i in range(steps):
        slot, end = end.acquire()
        tile = slot.part(0).load(MATRIX_COPIES)
        if (bug != NOT_RELEASED) | (i != 0):
            slot.release_accessed()
        total += tile
    store_matrix(out_ptr, total)


@jit(do_not_specialize=["bug"])
def in_two_ctas(x_desc, out_ptr, steps, bug, MULTICAST: gl.constexpr):
    channel = SharedMemoryChannel.alloc(x_desc, SLOTS=2, CONSUMERS=1, MULTICAST=MULTICAST)
    init_all((channel,))
    gl.warp_specialize(
        [(add, (channel, out_ptr, steps, bug)), (fill_alike, (channel, x_desc, steps, bug))],
        [1],
        [24],
    )
    close_all((channel,))


def run_in_two_ctas(schedule, bug=NO_BUG, multicast=True):
    x, out = small_integers(STEPS * 32, 32), poisoned(32, 32)
    desc = descriptor(x, [32, 32], cga=[[0, 0]])
    gluon_cpu.launch(in_two_ctas, (1,), desc, out, STEPS, bug, MULTICAST=multicast, num_ctas=2, schedule=schedule)
    same(out, x.reshape(STEPS, 32, 32).sum(dim=0))


@pytest.mark.parametrize("multicast", [False, True])
def test_two_ctas(multicast):
    under_schedules(functools.partial(run_in_two_ctas, multicast=multicast))


CLUSTER_BUGS = {
    "the peer's slot not awaited": (NOT_AWAITED, gluon_cpu.DataRace),
    "not released": (NOT_RELEASED, gluon_cpu.Deadlock),
}


@pytest.mark.parametrize(("bug", "kind"), CLUSTER_BUGS.values(), ids=CLUSTER_BUGS.keys())
def test_two_ctas_broken(bug, kind):
    finds(kind, functools.partial(run_in_two_ctas, bug=bug.value))


# --- What the compiler refuses, by name


@jit
def refused(desc, PART: gl.constexpr, SLOTS: gl.constexpr):
    channel = SharedMemoryChannel.alloc((desc, desc), SLOTS=SLOTS, CONSUMERS=1)
    init_all((channel,))
    slot, _ = channel.producer().acquire()
    tma.load(slot, (desc, desc), ([0, 0], [0, 0]))
    slot, _ = channel.consumer().acquire()
    slot.part(PART).load(MATRIX)
    slot.release_accessed()
    close_all((channel,))


REFUSED = {
    "nothing": ({}, None),
    "a part too far": ({"PART": 2}, "i: expected a part from 0 to 1, as the slot has 2, got 2"),
    "a part from the end": ({"PART": -1}, "i: expected a part from 0 to 1, as the slot has 2, got -1"),
    "no slot": ({"SLOTS": 0}, "SLOTS: expected an int of at least 1, got 0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_the_compiler(options, message):
    desc = descriptor(normal(32, 32), [32, 32])
    refuses(message, gluon_cpu.launch, refused, (1,), desc, outputs=[], **({"PART": 0, "SLOTS": 1} | options))
