"""Waits of our own with a scope of the profiler around them. Apart, as they need the profiler to be installed."""

from triton.profiler.language import enter_scope, exit_scope

from gluon_attn.kernels.hopper.inline_asm import wait_apart
from gluon_attn.runtime.compat import atomic_poll, gl, jit


@jit
def wait_apart_inside_scope(product, PENDING: gl.constexpr):
    """`wait_apart`, named as the builtin that it stands for."""
    enter_scope("warpgroup_mma_wait")
    product = wait_apart(product, PENDING)
    exit_scope("warpgroup_mma_wait")
    return product


@jit
def poll_inside_scope(pointer, expected_value, sem: gl.constexpr):
    """`atomic_poll`."""
    enter_scope("atomic_poll")
    atomic_poll(pointer, expected_value, sem=sem)
    exit_scope("atomic_poll")
