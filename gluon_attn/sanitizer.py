"""Triton's concurrency sanitizer (ConSan): how it is turned on, what a finding says, and a race that it has to find.

It watches the one schedule that runs on a card. A finding is a device assert, which ends the process's CUDA context.
"""

from typing import Any

import torch

from channels import SignalChannel, cluster_fence

from .runtime.compat import gl, jit

__all__ = ["FINDING", "HAND_OVERS", "SANITIZER", "run_hand_over"]

# What the environment of a process needs, from its start.
SANITIZER = {"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
# What is printed then of a race.
FINDING = "Buffer being accessed has outstanding"


# Names in annotations would be globals that a kernel may not use: hence the quotes.
@jit
def fill(tile: "Any", ready: "Any") -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile.store(gl.full([128], 1.0, gl.float32, layout))
    ready.producer(0).release()


@jit
def read(tile: "Any", ready: "Any", out_ptr: "Any", WAIT: gl.constexpr) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if WAIT:
        ready.consumer(0).acquire()
    gl.store(out_ptr + gl.arange(0, 128, layout), tile.load(layout))


@jit
def hand_over(out_ptr: "Any", WAIT: gl.constexpr) -> None:
    """One role fills a tile in shared memory and signals; the other reads it, after the signal or (a race) before."""
    tile = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = SignalChannel.alloc(SIGNALS=1)
    ready.init()
    cluster_fence()
    gl.warp_specialize([(fill, (tile, ready)), (read, (tile, ready, out_ptr, WAIT))], [4], [64])
    cluster_fence()
    ready.close()


# Whether the reading role waits: without it there is a race.
HAND_OVERS = {"a role that waits": True, "a role that does not wait": False}


def run_hand_over(name: str) -> None:
    """One of HAND_OVERS, on the card."""
    waits = HAND_OVERS[name]
    out = torch.full((128,), float("nan"), device="cuda")
    hand_over[(1,)](out, WAIT=waits, num_warps=4)
    torch.cuda.synchronize()
    if waits:
        assert bool((out == 1).all())
