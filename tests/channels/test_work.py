"""WorkChannel: clusters that run take the items of those that have not been started."""

import functools

import pytest
import torch

import gluon_cpu
from channels import WorkChannel, WorkConsumer, close_all, init_all
from tests.channels.support import NO_BUG, finds, under_schedules
from tests.compat import clc, gl, jit, mbarrier
from tests.gluon_cpu.support import poisoned, same

ITEMS = 7

NOT_ASKED = gl.constexpr(1)
NOT_READ = gl.constexpr(2)
NO_FENCE = gl.constexpr(3)
READ_TWICE = gl.constexpr(4)


@jit
def ask(items, count, bug):
    """As many questions as the other role has answers to read: it does not know which is the last."""
    end = items.producer()
    for i in range(count):
        if (bug != NOT_ASKED) | (i != 2):
            end = end.ask()


@jit
def work(items, out_ptr, count, bug, LAYOUT: gl.constexpr):
    end = items.consumer()
    item = gl.program_id(0)
    for i in range(count):
        if item >= 0:
            LENGTH: gl.constexpr = 128 * gl.num_ctas()
            gl.store(out_ptr + item * LENGTH + gl.arange(0, LENGTH, LAYOUT), item)
        if bug == NO_FENCE:
            slot = end.ring.slot()
            mbarrier.wait(items.filled.index(slot), end.ring.this_lap())
            answer = clc.load_result(items.answers.index(slot))
            item = gl.where(answer.is_canceled(), answer.program_id(0), -1)
            mbarrier.arrive(items.freed.index(slot))
            end = WorkConsumer(items, end.ring.next())
        elif (bug != NOT_READ) | (i != 2):
            item, end = end.acquire(none=-1)
        if bug == READ_TWICE:
            mbarrier.arrive(items.freed.index(0))


@jit(do_not_specialize=["bug"])
def take_items(out_ptr, count, bug, LAYOUT: gl.constexpr):
    items = WorkChannel.alloc(SLOTS=2, ROLES=1)
    init_all((items,))
    gl.warp_specialize(
        [(work, (items, out_ptr, count, bug, LAYOUT)), (ask, (items, count, bug))],
        [1],
        [24],
    )
    close_all((items,))


def run(schedule, bug=NO_BUG, num_ctas=1):
    layout = gl.BlockedLayout([1], [32], [4], [0], [[1]] if num_ctas == 2 else [])
    out = poisoned(ITEMS, 128 * num_ctas, dtype=torch.int32)
    options = {"target": "sm_100a", "num_ctas": num_ctas, "resident": 3, "schedule": schedule}
    gluon_cpu.launch(take_items, (ITEMS,), out, ITEMS, bug, LAYOUT=layout, **options)
    same(out, torch.arange(ITEMS, dtype=torch.int32)[:, None].expand_as(out))


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_every_item_is_done(num_ctas):
    under_schedules(functools.partial(run, num_ctas=num_ctas))


BUGS = {
    "not asked": (NOT_ASKED, gluon_cpu.Deadlock),
    "an answer not read": (NOT_READ, gluon_cpu.BarrierMisuse),
    "no fence after reading": (NO_FENCE, gluon_cpu.MissingFence),
    "freed twice": (READ_TWICE, gluon_cpu.BarrierMisuse),
}


@pytest.mark.parametrize(("bug", "kind"), BUGS.values(), ids=BUGS.keys())
def test_broken(bug, kind):
    finds(kind, functools.partial(run, bug=bug.value))
