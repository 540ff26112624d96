"""Attention without a card: the same kernel, executed by gluon_cpu. The one file that imports gluon_cpu, when asked."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from .forward.launch import constants_of, kernel_of
from .forward.plan import Plan
from .kernels.hopper.inline_asm import twins
from .kernels.hopper.transpose.kernel import transpose_values
from .runtime.compat import TensorDescriptor
from .runtime.descriptors import (
    View,
    block_and_layout,
    empty_transposed,
    transposition_blocks,
)


def find_race(call: Callable[[], object], schedules: int) -> str | None:
    """Call `call`, which runs attention on CPU tensors, under many schedules. Returns the first finding, or None."""
    import gluon_cpu

    try:
        gluon_cpu.check(call, schedules=schedules, quiet=True)
    except gluon_cpu.Finding as finding:
        return str(finding)
    return None


def launch_arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *scales: Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """(arguments, options) of an ordinary launch `kernel_of(plan.tile)[(plan.programs,)](*arguments, **options)`.

    v: transposed, if the tile has that done before. scales: those of q, k and v, in fp8.
    """
    problem, tile = plan.problem, plan.tile

    def descriptor(name: Literal["q", "k", "v", "o"], t: Tensor) -> TensorDescriptor:
        view = View.of(t, "bhsd" if name == "v" and tile.transposes_before(t.itemsize) else problem.layout)
        _, block, layout = block_and_layout(name, problem.dtype, problem.padded_head_dim, tile)
        return TensorDescriptor(t, list(view.shape), list(view.strides), block, layout)

    named = {"q_desc": descriptor("q", q), "k_desc": descriptor("k", k), "v_desc": descriptor("v", v)}
    named |= {"o_desc": descriptor("o", out), "o_ptr": out, "lse_ptr": lse}
    named |= dict(zip(("q_scale_ptr", "k_scale_ptr", "v_scale_ptr"), scales, strict=False))
    named |= {"scale_log2": plan.scale_log2, "blocks_per_item": plan.blocks_per_item}
    named |= {"heads_per_group": plan.heads_per_group}
    named |= constants_of(tile, problem.causal, problem.dtype)
    options = {"num_warps": 4, "num_ctas": tile.num_ctas, "enable_fp_fusion": True}
    options |= {"launch_pdl": tile.transposes_before(problem.dtype.itemsize)}
    return [named[name] for name in kernel_of(tile).arg_names], options


def transpose_arguments(plan: Plan, v: Tensor) -> tuple[Tensor, list[Any], dict[str, Any]]:
    """(what is filled with V transposed, arguments, options) of the launch before, of
    `transpose_values[(plan.transpose_programs,)]`, if the tile has V transposed before."""
    problem = plan.problem
    transposed = empty_transposed(v, problem.layout)
    blocks = transposition_blocks(problem.dtype, problem.padded_head_dim)
    views = {"v_desc": (v, View.of(v, problem.layout)), "out_desc": (transposed, View.of(transposed))}
    arguments = [
        TensorDescriptor(t, list(view.shape), list(view.strides), *blocks[name][1:])
        for name, (t, view) in views.items()
    ]
    return transposed, arguments, {"num_warps": 4}


def register_twins() -> None:
    """Tell gluon_cpu what the kernels' inline assembly computes."""
    import gluon_cpu

    for assembly, twin in twins().items():
        gluon_cpu.register_asm(assembly, twin)


class CpuLaunch:
    """A launch on CPU tensors, as `Launch` is one on a card's. Raises what gluon_cpu finds, both sides of a race named.

    Within `gluon_cpu.machine(...)` or `gluon_cpu.check(...)` their options hold, the schedule among them; elsewhere the
    defaults do: one random schedule, all checks on.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.needs_all_pointers = plan.tile.needs_all_pointers
        register_twins()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *scales: Tensor | None
    ) -> None:
        import gluon_cpu

        null = torch.empty(0)  # an empty tensor has no address
        target = f"sm_{self.plan.arch}a"
        with contextlib.nullcontext() if gluon_cpu.running() else gluon_cpu.machine():
            if self.plan.tile.transposes_before(v.itemsize):
                v, arguments, options = transpose_arguments(self.plan, v)
                transpose_values[(self.plan.transpose_programs,)](*arguments, target=target, **options)
            given = (null if t is None else t for t in (lse, *scales))
            arguments, options = launch_arguments(self.plan, q, k, v, out, *given)
            kernel_of(self.plan.tile)[(self.plan.programs,)](*arguments, target=target, **options)
