"""TensorMemoryChannel on its own, beside the shared memory channel that its products free; right and broken."""

import functools

import pytest
import torch

import gluon_cpu
from channels import SharedMemoryChannel, TensorMemoryChannel, close_all, init_all, tma
from tests.channels.support import NO_BUG, finds, under_schedules
from tests.compat import TensorMemoryLayout, gl, jit, tcgen05_mma
from tests.gluon_cpu.support import descriptor, poisoned, same, small_integers, store_matrix

STEPS = 5  # products, each of one slot of operands into one slot of tensor memory

NOT_PUBLISHED = gl.constexpr(1)
NOT_RELEASED = gl.constexpr(2)
RELEASED_TOO_EARLY = gl.constexpr(3)
NOT_AWAITED = gl.constexpr(4)
OLD_END_FILLS = gl.constexpr(5)
OPERANDS_RELEASED_TOO_EARLY = gl.constexpr(6)
NOT_DRAINED = gl.constexpr(7)


@jit
def load(operands, a_desc, b_desc, steps, bug):
    end = operands.producer()
    for i in range(steps):
        slot, end = end.acquire()
        tma.load(slot, (a_desc, b_desc), ([0, i * 64], [0, i * 64]))
    if bug != NOT_DRAINED:
        end.drain()


@jit
def multiply(operands, products, steps, bug, RINGS: gl.constexpr):
    """Step after step, a product to each ring."""
    end, one, other = operands.consumer(), products.producer(0), products.producer(RINGS - 1)
    for i in range(steps):
        slot, end = end.acquire()
        result, following = one.acquire()
        if bug == OPERANDS_RELEASED_TOO_EARLY:
            slot.release()
        tcgen05_mma(slot.part(0), slot.part(1).permute((1, 0)), result.memory, use_acc=False)
        if (bug != NOT_PUBLISHED) | (i != 1):
            result.publish_after_products()
        if bug != OLD_END_FILLS:
            one = following
        if RINGS > 1:
            result, other = other.acquire()
            tcgen05_mma(slot.part(0), slot.part(1).permute((1, 0)), result.memory, use_acc=False)
            result.publish_after_products()
        if bug != OPERANDS_RELEASED_TOO_EARLY:
            slot.release_after_products()


@jit
def take_out(products, out_ptr, steps, bug, WHICH: gl.constexpr):
    end = products.consumer(WHICH)
    for i in range(steps):
        early = end.next_slot()
        M: gl.constexpr = early.memory.shape[0]
        N: gl.constexpr = early.memory.shape[1]
        out = out_ptr + i * M * N
        if bug == NOT_AWAITED:
            store_matrix(out, early.memory.load())
        slot, end = end.acquire()
        if bug == RELEASED_TOO_EARLY:
            slot.release()
        if bug != NOT_AWAITED:
            store_matrix(out, slot.memory.load())
        if (bug != NOT_RELEASED) & (bug != RELEASED_TOO_EARLY):
            slot.release()


@jit(do_not_specialize=["bug"])
def multiply_steps(
    a_desc,
    b_desc,
    one_ptr,
    other_ptr,
    steps,
    bug,
    CGA: gl.constexpr,
    RINGS: gl.constexpr,
    SLOTS: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Two roles take the products out: of a ring each, or both of the same."""
    PAIR: gl.constexpr = len(CGA) > 0
    LAYOUT: gl.constexpr = TensorMemoryLayout((128, 32), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    operands = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=2, CONSUMERS=0, TWO_CTAS=PAIR)
    SHAPE: gl.constexpr = [a_desc.block_shape[0], b_desc.block_shape[0]]
    products = TensorMemoryChannel.alloc(gl.float32, SHAPE, LAYOUT, RINGS=RINGS, SLOTS=SLOTS, CONSUMERS=CONSUMERS)
    init_all((operands, products))
    gl.warp_specialize(
        [
            (take_out, (products, one_ptr, steps, NO_BUG_HERE, 0)),
            (take_out, (products, other_ptr, steps, bug, RINGS - 1)),
            (multiply, (operands, products, steps, bug, RINGS)),
            (load, (operands, a_desc, b_desc, steps, bug)),
        ],
        [4, 1, 1],
        [24, 24, 24],
    )
    close_all((operands, products))


NO_BUG_HERE = gl.constexpr(NO_BUG)


def run(schedule, bug=NO_BUG, rings=1, slots=2, pair=False):
    """Each of two roles takes all products out: both from one ring, or each from its own."""
    rows, cga = (256, ((1, 0),)) if pair else (128, ())
    a = small_integers(rows, STEPS * 64, dtype=torch.bfloat16, seed=1)
    b = small_integers(32, STEPS * 64, dtype=torch.bfloat16, seed=2)
    outs = poisoned(STEPS, rows, 32), poisoned(STEPS, rows, 32)
    spread = [list(basis) for basis in cga]
    descs = descriptor(a, [rows, 64], cga=spread), descriptor(b, [32, 64], cga=spread)
    constants = {"CGA": cga, "RINGS": rings, "SLOTS": slots, "CONSUMERS": 3 - rings}
    gluon_cpu.launch(
        multiply_steps,
        (1,),
        *descs,
        *outs,
        STEPS,
        bug,
        **constants,
        num_ctas=2 if pair else 1,
        target="sm_100a",
        schedule=schedule,
    )
    want = torch.einsum("msk,nsk->smn", a.float().reshape(rows, STEPS, 64), b.float().reshape(32, STEPS, 64))
    for out in outs:
        same(out, want)


KINDS = {
    "one slot, two consumers": {"slots": 1},
    "a ring, two consumers": {},
    "two rings of one slot": {"rings": 2, "slots": 1},
    "a pair, two rings, rings": {"rings": 2, "pair": True},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_products_come_out(kind):
    under_schedules(functools.partial(run, **kind))


BUGS = {
    "not published": (NOT_PUBLISHED, gluon_cpu.Deadlock),
    "not released": (NOT_RELEASED, gluon_cpu.TooFewArrivals),
    "released before it is read": (RELEASED_TOO_EARLY, gluon_cpu.DataRace),
    "not awaited": (NOT_AWAITED, gluon_cpu.UninitialisedRead),
    "the old end again": (OLD_END_FILLS, gluon_cpu.DataRace),
    "operands released before the products are done": (OPERANDS_RELEASED_TOO_EARLY, gluon_cpu.DataRace),
    "not drained": (NOT_DRAINED, gluon_cpu.BarrierMisuse),
}


@pytest.mark.parametrize(("bug", "kind"), BUGS.values(), ids=BUGS.keys())
def test_broken(bug, kind):
    finds(kind, functools.partial(run, bug=bug.value))


def test_the_pair_waits_for_both_ctas():
    finds(gluon_cpu.DataRace, functools.partial(run, bug=RELEASED_TOO_EARLY.value, rings=2, pair=True))
