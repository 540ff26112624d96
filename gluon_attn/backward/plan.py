"""How the gradients of a problem are laid out over a device's processors."""

import math
from dataclasses import dataclass

from ..device import Device
from ..forward.plan import LARGEST_LENGTH
from ..problem import Problem
from .configs import HopperBackward


@dataclass(frozen=True, kw_only=True)
class BackwardPlan:
    """The numbers of a backward's launches that depend on no tensor.

    programs: of the main kernel, one for each key block of each KV head, or as many as there are processors: fewer
        where each costs the same, as programs then end together, and the next one's K and V need not wait for a launch.
    row_programs: of the kernels before and after it, one for each block of rows of each head.
    """

    problem: Problem
    config: HopperBackward
    programs: int
    row_programs: int
    deterministic: bool
    arch: int

    @property
    def row_blocks(self) -> int:
        return -(-self.problem.q_len // self.config.block_m)

    @property
    def rows(self) -> int:
        """Of a head, rounded up to whole blocks: that many the workspaces have."""
        return self.row_blocks * self.config.block_m

    @property
    def scale_log2(self) -> float:
        return self.problem.scale * math.log2(math.e)

    @staticmethod
    def of(problem: Problem, config: HopperBackward, device: Device, *, deterministic: bool = False) -> "BackwardPlan":
        """Raises ValueError for more queries or keys than the kernels can count."""
        for name, length in (("q", problem.q_len), ("k", problem.kv_len)):
            if length > LARGEST_LENGTH:
                raise ValueError(
                    f"{name}: expected at most {LARGEST_LENGTH} positions, counted in 32 bits, got {length}; split the "
                    "sequence"
                )
        key_blocks = problem.batch * problem.kv_heads * -(-problem.kv_len // config.keys)
        row_programs = problem.batch * problem.heads * -(-problem.q_len // config.block_m)
        for name, blocks in (("q", row_programs), ("k", key_blocks)):
            if blocks >= 2**31 - 2 * device.sm_count:
                raise ValueError(
                    f"{name}: expected fewer than 2^31 blocks over all heads and batches, got {blocks}; split the batch"
                )
        return BackwardPlan(
            problem=problem,
            config=config,
            programs=key_blocks if problem.causal else min(device.sm_count, key_blocks),
            row_programs=row_programs,
            deterministic=deterministic,
            arch=device.arch,
        )
