"""Random delays in the roles of the backward's kernels, to shuffle what happens in which order on a card.

A role's module gets, in place of a function that the role calls, one that first lets the calling warp spin for a random
time. That costs nothing where it is not done. It is for a process of its own: Triton looks at what a kernel calls once.
"""

import types
from typing import Any

import numpy as np

from channels import tma
from channels.compat import gl, jit
from gluon_attn.kernels.hopper.backward import finish, gradient, load, preprocess, reduce, work
from gluon_attn.kernels.hopper.backward.finish import convert, start_piece, tell_done
from gluon_attn.kernels.hopper.backward.gradient import hand_over, multiply
from gluon_attn.kernels.hopper.backward.preprocess import init_all
from gluon_attn.kernels.hopper.backward.shares import collect, hand_in
from gluon_attn.kernels.hopper.backward.work import claim

# $0: the cycles that were waited. $1: a seed. A hash of the clock, the seed and the warp decides: mostly up to 256
# cycles, in one of eight cases up to 32768, which is longer than a step of any role.
SPIN = gl.constexpr("""{
    .reg .u32 start, now, hash, warp, few;
    .reg .pred often, wait;
    mov.u32 start, %clock;
    mov.u32 warp, %warpid;
    mad.lo.u32 hash, $1, 0x9E3779B1, start;
    mad.lo.u32 hash, warp, 0x85EBCA77, hash;
    shr.u32 now, hash, 15;
    xor.b32 hash, hash, now;
    mul.lo.u32 hash, hash, 0x2C1B3C6D;
    shr.u32 now, hash, 13;
    xor.b32 hash, hash, now;
    and.b32 few, hash, 7;
    setp.ne.u32 often, few, 0;
    shr.u32 hash, hash, 17;
    shr.u32 few, hash, 7;
    selp.u32 hash, few, hash, often;
SPINNING:
    mov.u32 now, %clock;
    sub.u32 now, now, start;
    setp.lt.u32 wait, now, hash;
    @wait bra SPINNING;
    mov.u32 $0, hash;
}""")


@jit
def spin():
    """Let each warp that calls it wait for a random time of its own."""
    seed = gl.program_id(0)
    gl.inline_asm_elementwise(SPIN, "=r,r", [seed], dtype=gl.int32, is_pure=False, pack=1)


@jit
def late_init(channels):
    spin()
    init_all(channels)


@jit
def late_load(slot, descs, coords):
    spin()
    tma.load(slot, descs, coords)


@jit
def late_multiply(a, b, LAYOUT: gl.constexpr):
    spin()
    return multiply(a, b, LAYOUT)


@jit
def late_hand_over(dq, dqs):
    spin()
    return hand_over(dq, dqs)


@jit
def late_hand_in(dk, dv, part, operands):
    spin()
    hand_in(dk, dv, part, operands)


@jit
def late_collect(dk, dv, part, order, operands):
    spin()
    return collect(dk, dv, part, order, operands)


@jit
def late_tell_done(operands, order, keys):
    spin()
    tell_done(operands, order, keys)


@jit
def late_start_piece(next_sums, desc, coords, piece):
    spin()
    return start_piece(next_sums, desc, coords, piece)


@jit
def late_convert(sums, tile, scale):
    spin()
    convert(sums, tile, scale)


@jit
def late_claim(order, end, CLAIMS: gl.constexpr):
    spin()
    return claim(order, end, CLAIMS)


@jit
def late_store(desc, coords, tile):
    spin()
    tma.store(desc, coords, tile)


@jit
def late_add(desc, coords, tile):
    spin()
    tma.add(desc, coords, tile)


@jit
def late_after_stores():
    """Between the sum that has arrived and the number that says so."""
    tma.wait_stores_done()
    spin()


@jit
def late_after_older_stores():
    """Likewise, of the addition before."""
    tma.wait_stores_but_newest_done()
    spin()


def tma_with(**others: Any) -> types.ModuleType:
    """`channels.tma` with other functions, as a kernel sees it."""
    module = types.ModuleType("delayed_tma")
    vars(module).update({**vars(tma), **others})
    return module


LATE_ADDITIONS = tma_with(
    store=late_store,
    add=late_add,
    wait_stores_done=late_after_stores,
    wait_stores_but_newest_done=late_after_older_stores,
)
# By role: where it is, and what takes whose place there. `prepare` is the kernel before, `claim` is in three roles.
DELAYS: dict[str, tuple[types.ModuleType, dict[str, Any]]] = {
    "prepare": (preprocess, {"init_all": late_init}),
    "load": (load, {"tma": tma_with(load=late_load)}),
    "claim": (work, {"claim": late_claim}),
    "gradient": (
        gradient,
        {"multiply": late_multiply, "hand_over": late_hand_over, "hand_in": late_hand_in, "collect": late_collect},
    ),
    "reduce": (reduce, {"tma": LATE_ADDITIONS, "tell_done": late_tell_done}),
    "finish": (finish, {"start_piece": late_start_piece, "convert": late_convert}),
}


def delay(*roles: str) -> None:
    """From now on, in this process. Before the first kernel is compiled."""
    for role in roles:
        module, others = DELAYS[role]
        for name, other in others.items():
            if name not in vars(module):
                raise AttributeError(f"{module.__name__}: expected a {name} to delay; mend tests/gpu/delays.py")
            setattr(module, name, other)


def register_twin() -> None:
    """On gluon_cpu, where schedules shuffle events, nothing is waited."""
    import gluon_cpu

    gluon_cpu.register_asm(str(SPIN.value), lambda seed: np.zeros_like(seed))
