"""Attention without a card: the same kernels, executed by gluon_cpu. The one file that imports it, when asked."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from .backward.launch import allocated_apart, backward_launches_of
from .backward.plan import BackwardPlan
from .forward.launch import launches_of, workspaces_of
from .forward.plan import Plan
from .kernels.hopper.inline_asm import twins
from .runtime.kernel import Launch, Launches, Tensors


def find_race(call: Callable[[], object], schedules: int) -> str | None:
    """Call `call`, which runs attention on CPU tensors, under many schedules. Returns the first finding, or None."""
    import gluon_cpu

    try:
        gluon_cpu.check(call, schedules=schedules, quiet=True)
    except gluon_cpu.Finding as finding:
        return str(finding)
    return None


def register_twins() -> None:
    """Tell gluon_cpu what the kernels' inline assembly computes."""
    import gluon_cpu

    for assembly, twin in twins().items():
        gluon_cpu.register_asm(assembly, twin, elementwise=True)


class CpuLaunch:
    """A launch on CPU tensors, as `CardLaunch` is one on a card's. Raises what gluon_cpu finds, both sides of a race
    named.

    Within `gluon_cpu.machine(...)` or `gluon_cpu.check(...)` their options hold, the schedule among them; elsewhere the
    defaults do: one random schedule, all checks on.
    """

    def __init__(self, launch: Launch, arch: int) -> None:
        self.launch, self.target = launch, f"sm_{arch}a"

    def __call__(self, tensors: Tensors) -> None:
        import gluon_cpu

        null = torch.empty(0, device="cpu")  # an empty tensor has no address
        given = {name: null if t is None else t for name, t in tensors.items()}
        launch = self.launch
        with contextlib.nullcontext() if gluon_cpu.running() else gluon_cpu.machine():
            launch.build.kernel.fn[(launch.programs,)](
                *launch.arguments(given).values(), target=self.target, **launch.options
            )


def launches_on_cpu(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, used: bool = False, bias: Tensor | None = None
) -> Launches:
    """A call on CPU tensors. They are looked at for their shapes and strides only; `out` may be on the meta device.
    used, bias: as for `launches_of`."""
    register_twins()
    steps = [CpuLaunch(launch, plan.arch) for launch in launches_of(plan, q, k, v, out, used, bias)]
    return Launches(steps, workspaces_of(plan))


def backward_on_cpu(
    plan: BackwardPlan, tensors: Tensors, used: bool = False, bias: Tensor | None = None, of_bias: bool = False
) -> Launches:
    """As `launches_on_cpu`, of the gradients. All but the plan: as for `backward_launches_of`."""
    register_twins()
    steps = [CpuLaunch(launch, plan.arch) for launch in backward_launches_of(plan, tensors, used, bias, of_bias)]
    return Launches(steps, allocated_apart(plan))
