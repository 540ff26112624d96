"""Attention without a card: the same kernel, executed by gluon_cpu. The one file that imports gluon_cpu, when asked."""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .compat import TensorDescriptor
from .descriptors import View, tile_layout
from .kernels.hopper.kernel import attention_forward, constants_of
from .plan import Plan


def find_race(call: Callable[[], object], schedules: int) -> str | None:
    """Call `call`, which runs attention on CPU tensors, under many schedules. Returns the first finding, or None."""
    import gluon_cpu

    try:
        gluon_cpu.check(call, schedules=schedules, quiet=True)
    except gluon_cpu.Finding as finding:
        return str(finding)
    return None


def launch_arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """(arguments, options) of an ordinary launch `attention_forward[(plan.programs,)](*arguments, **options)`."""
    problem, tile = plan.problem, plan.tile

    def descriptor(t: Tensor, rows: int, *, sharded: bool) -> TensorDescriptor:
        view, layout = View.of(t, problem), tile_layout(problem.dtype, tile, sharded=sharded)
        block = [1, 1, rows, problem.padded_head_dim]
        return TensorDescriptor(t, list(view.shape), list(view.strides), block, layout)

    arguments = [
        descriptor(q, tile.rows_per_role, sharded=True),
        descriptor(k, tile.block_n, sharded=False),
        descriptor(v, tile.block_n, sharded=False),
        descriptor(out, tile.rows_per_role, sharded=True),
        lse,
        plan.scale_log2,
        plan.blocks_per_item,
    ]
    options = {"num_warps": 4, "num_ctas": tile.num_ctas, "enable_fp_fusion": True}
    return arguments, constants_of(tile, problem.causal) | options


class CpuLaunch:
    """A launch on CPU tensors, as `Launch` is one on a card's. Raises what gluon_cpu finds, both sides of a race named.

    Within `gluon_cpu.machine(...)` or `gluon_cpu.check(...)` their options hold, the schedule among them; elsewhere the
    defaults do: one random schedule, all checks on.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        import gluon_cpu

        arguments, options = launch_arguments(self.plan, q, k, v, out, lse)
        with contextlib.nullcontext() if gluon_cpu.running() else gluon_cpu.machine(target="sm_90a"):
            attention_forward[(self.plan.programs,)](*arguments, **options)
