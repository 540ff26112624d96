"""What can be chosen for gradients: see forward.py."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bench import predict_gradients
from bench.gradients import MOST_SPILLS, configs
from bench.tune.forward import around
from gluon_attn.backward.configs import HopperBackward, label
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import PACKAGED, BackwardRow, padded_head_dims, pick_config, require_fits
from gluon_attn.device import Device
from gluon_attn.explain import described
from gluon_attn.forward.configs import REGISTERS_PER_SM, WARPGROUP
from gluon_attn.problem import Problem

OVERHEAD_REGISTERS = 32  # of a thread that computes, at least, beside dK, dV, S and dP
COMPUTING = HopperBackward.WARPS // 4  # warpgroups

# One field at a time. Keys and pieces follow from the head dims.
FIELDS: dict[str, tuple[Any, ...]] = {
    "block_m": (64, 128),
    "query_slots": (1, 2, 3, 4),
    "dout_slots": (1, 2, 3, 4),
    "ds_slots": (1, 2),
    "rings_in_step": (False, True),
    "dq_slots": (1, 2, 3),
    "load_registers": (24, 32, 40),
}


@dataclass(frozen=True)
class Gradients:
    """Choices for one problem, on a device that has these rows in use."""

    problem: Problem
    device: Device
    rows: Sequence[BackwardRow]
    beneath: Sequence[BackwardRow] = PACKAGED  # as in forward.py

    MOST_SPILLS: ClassVar[int] = MOST_SPILLS

    @property
    def title(self) -> str:
        return f"gradients of {described(self.problem)}"

    @property
    def head_dims(self) -> tuple[int, int]:
        return padded_head_dims(self.problem.head_dim, self.problem.head_dim_v)

    @property
    def in_use(self) -> HopperBackward:
        return pick_config(self.problem, self.rows)

    @property
    def without(self) -> HopperBackward:
        """What serves if what is found is not loaded, nor what it replaces."""
        return pick_config(self.problem, self.beneath)

    def name(self, config: HopperBackward) -> str:
        return label(config)

    def first(self) -> list[HopperBackward]:
        """Those of the rows of the kind; and for each size of row blocks and number of tiles of dS, with rings in step
        or not, as many slots for Q and dO as there is memory for, and two. Of dQ they have two slots; where Q is in one
        piece, one too. Not pruned."""
        found = [row.config for row in self.rows if row.is_of_kind(self.problem)]
        groups: dict[tuple[Any, ...], list[HopperBackward]] = {}
        for config in configs(*self.head_dims):
            cut = config.block_m, config.ds_slots, config.rings_in_step, config.grads
            if config.dq_slots in ((1, 2) if config.q_pieces == 1 else (2,)):
                groups.setdefault(cut, []).append(config)
        for alike in groups.values():
            found += [c for c in alike if c.query_slots == c.dout_slots == 2]
            found.append(max(alike, key=lambda c: (c.query_slots + c.dout_slots, min(c.query_slots, c.dout_slots))))
        return list(dict.fromkeys(found))

    def neighbours(self, config: HopperBackward) -> Iterator[HopperBackward]:
        """Those that differ in one choice; rings in step are deeper or shallower together. Not pruned."""
        for name, values in FIELDS.items():
            for value in values:
                if value == getattr(config, name):
                    continue
                fields = {name: value}
                if config.rings_in_step and name == "query_slots":
                    fields["dout_slots"] = value
                try:
                    yield dataclasses.replace(config, **fields)
                except ValueError:
                    continue

    def why_pruned(self, config: HopperBackward) -> str | None:
        """Why there is no use in compiling it; None if there is."""
        try:
            require_fits(config, self.head_dims, self.device)
            BackwardPlan.of(self.problem, config, self.device)
        except ValueError as error:
            return str(error)
        # dK and dV, S and dP, in fp32, over the threads that compute. Apart, dV and S, or dK, S and dP.
        d, d_v = self.head_dims
        columns = max(d + config.block_m, d_v) if config.grads == "apart" else d + d_v + config.block_m
        elements = config.keys * (columns + config.block_m)
        needed = elements // (COMPUTING * WARPGROUP) + OVERHEAD_REGISTERS
        has = (REGISTERS_PER_SM // WARPGROUP - config.load_registers) // COMPUTING // 8 * 8
        return f"needs {needed} registers a thread that computes, has {has}" if needed > has else None

    def expected_ms(self, configs: Sequence[HopperBackward]) -> Sequence[float] | None:
        """As in forward.py."""
        return predict_gradients.expected_ms(configs, self.problem, self.device)

    def served_by(self, rows: Sequence[BackwardRow]) -> HopperBackward:
        """The config that serves the problem with these rows in front of those in use."""
        return pick_config(self.problem, (*rows, *self.rows))

    def serves(self, row: BackwardRow, problem: Problem) -> bool:
        return row.unmet(problem.typical) is None

    def row(self, config: HopperBackward, reach: float) -> BackwardRow:
        """For what is like the problem: lengths and heads that are at most so many times as large or as small."""
        problem = self.problem
        keys = around(problem.mask.most_keys(problem.kv_len), reach)
        return BackwardRow(
            self.head_dims,
            config,
            problem.causal,
            min_kv_len=keys[0],
            max_kv_len=keys[1],
            in_limits=problem.mask.limits_keys,
            q_lens=around(problem.q_len, reach),
            sequence_heads=around(problem.batch * problem.heads, reach),
            heads_per_kv_head=problem.heads // problem.kv_heads,
            scores=problem.scores,
        )
