"""What can be chosen for a forward pass: configs to begin with, those beside one, those that there is no use in."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bench import predict
from bench.candidates import CANDIDATES
from gluon_attn.device import Device
from gluon_attn.explain import described
from gluon_attn.forward.configs import (
    REGISTERS_PER_SM,
    WARPGROUP,
    ForwardConfig,
    HopperConfig,
    label,
    orders_heads,
)
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import PACKAGED, Row, pick_config
from gluon_attn.problem import Problem

OVERHEAD_REGISTERS = 32  # of a softmax thread, at least, beside O, S and P

# What can be chosen of a config, one field at a time; the registers follow.
HOPPER: dict[str, tuple[Any, ...]] = {
    "softmax_roles": (1, 2, 3, 4),
    "block_n": (64, 128),
    "query_slots": (1, 2),
    "kv_slots": (1, 2, 3, 4, 6),
    "turns": (False, True),
    "early_exp": (0, 1, 2),
    "integer_max": (False, True),
    "half_by_polynomial": (False, True),
    "stage_in_queries": (False, True),
    "last_heads_longest_first": (False, True),
    "transpose_registers": (0, 56),
    "cga_layout": ((), ((1, 0),)),
    "softmax_registers": tuple(range(104, 241, 8)),
}
BLACKWELL: dict[str, tuple[Any, ...]] = {
    "kv_slots": (2, 3, 4, 6, 8, 12),
    "load_pieces": (1, 2, 4),
    "exp_pieces": (1, 2, 4),
    "early_p": (False, True),
    "exp_turns": (False, True),
    "max_in_load": (False, True),
    "packed_arithmetic": (False, True),
    "polynomial_columns": (0, 2, 4, 6),
    "rescale_threshold": (0.0, 8.0),
    "dynamic": (False, True),
    "longest_first": (False, True),
    "result_slots": (1, 2),
    "cga_layout": ((), ((1, 0),), ((1, 0), (2, 0))),
    "softmax_registers": (176, 184, 192, 200),
}


@dataclass(frozen=True)
class Forward:
    """Choices for one problem, on a device that has these rows in use."""

    problem: Problem
    device: Device
    rows: Sequence[Row]
    beneath: Sequence[Row] = PACKAGED  # those that a table file with what is found will be put in front of

    MOST_SPILLS: ClassVar[int] = 0  # in a loop over key blocks

    @property
    def title(self) -> str:
        return described(self.problem)

    @property
    def in_use(self) -> ForwardConfig:
        return pick_config(self.problem, self.device, None, self.rows)

    @property
    def without(self) -> ForwardConfig:
        """What serves if what is found is not loaded, nor what it replaces."""
        return pick_config(self.problem, self.device, None, self.beneath)

    def name(self, config: ForwardConfig) -> str:
        """One for each config: `label` leaves registers out."""
        return f"{label(config)} {config.softmax_registers}/{config.load_registers}"

    def first(self) -> list[ForwardConfig]:
        """What the search begins with: what the tables and bench/candidates.py have for the kind; and on Hopper each
        cut into roles and blocks of keys, with as many slots as there is memory for. Where bench/predict.py can tell,
        the fastest by it come first: there may not be time for all. Not pruned."""
        kind = self.problem.padded_head_dim, self.problem.padded_head_dim_v, self.problem.dtype.itemsize
        found = [row.config for row in self.rows if row.is_of_kind(self.problem, self.device)]
        if self.device.arch == 90:
            found += CANDIDATES.get(kind, [])
            found += self.cuts()
        found = list(dict.fromkeys(found))
        if not predict.can_order(self.problem, self.device):
            return found
        able = [c for c in found if isinstance(c, HopperConfig) and self.why_pruned(c) is None]
        return [*predict.in_order(able, self.problem, self.device), *(c for c in found if c not in able)]

    def cuts(self) -> Iterator[ForwardConfig]:
        base = HopperConfig(
            block_n=64, kv_slots=1, softmax_registers=232, load_registers=32, softmax_roles=2, query_slots=1,
            turns=False, stage_in_queries=False,
        )  # fmt: skip
        for roles, block_n, cga_layout in itertools.product(
            HOPPER["softmax_roles"], HOPPER["block_n"], HOPPER["cga_layout"]
        ):
            for query_slots, staged in ((2, False), (1, False), (1, True)):
                fields = {
                    "query_slots": query_slots,
                    "stage_in_queries": staged,
                    "turns": roles in (2, 3),
                    "early_exp": 1,
                }
                cut = changed(base, softmax_roles=roles, block_n=block_n, cga_layout=cga_layout, **fields)
                deep = [changed(cut, kv_slots=n) for n in HOPPER["kv_slots"] if 2 <= n <= 4] if cut else []
                fitting = [c for c in deep if c is not None and self.why_pruned(c) is None]
                if fitting:
                    yield fitting[-1]
                    break

    def neighbours(self, config: ForwardConfig) -> Iterator[ForwardConfig]:
        """Those that differ in one choice. Not pruned."""
        for name, values in (HOPPER if isinstance(config, HopperConfig) else BLACKWELL).items():
            for value in values:
                if value != getattr(config, name):
                    found = changed(config, **{name: value})
                    if found is not None and (name != "softmax_registers" or abs(value - getattr(config, name)) <= 8):
                        yield found

    def why_pruned(self, config: ForwardConfig) -> str | None:
        """Why there is no use in compiling it; None if there is."""
        try:
            require_fits(config, self.problem, self.device)
            Plan.of(self.problem, config, self.device)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        if orders_heads(config) and not self.problem.causal:
            return "an order of row blocks, which without a mask are alike"
        if isinstance(config, HopperConfig):
            if config.turns and config.softmax_roles == 1:
                return "turns of one role"
            # O and S in fp32, P in 16 bits at most, over the threads of a warpgroup, 64 rows.
            of_scores = config.block_n // 2 + config.block_n // 4
            needed = self.problem.padded_head_dim_v // 2 + of_scores + OVERHEAD_REGISTERS
            if needed > config.softmax_registers:
                return f"needs {needed} registers a softmax thread, has {config.softmax_registers}"
        return None

    def expected_ms(self, configs: Sequence[ForwardConfig]) -> Sequence[float] | None:
        """What each is predicted to take; None where that was not judged."""
        return predict.expected_ms(configs, self.problem, self.device)

    def served_by(self, rows: Sequence[Row]) -> ForwardConfig:
        """The config that serves the problem with these rows in front of those in use."""
        return pick_config(self.problem, self.device, None, (*rows, *self.rows))

    def serves(self, row: Row, problem: Problem) -> bool:
        return row.fits(problem.typical, self.device, None)

    def row(self, config: ForwardConfig, reach: float) -> Row:
        """For what is like the problem: lengths and heads that are at most so many times as large or as small."""
        problem = self.problem
        keys = around(problem.mask.most_keys(problem.kv_len), reach)
        return Row(
            problem.padded_head_dim,
            problem.causal,
            config,
            problem.dtype.itemsize,
            min_kv_len=keys[0],
            max_kv_len=keys[1],
            in_limits=problem.mask.limits_keys,
            padded_head_dim_v=problem.padded_head_dim_v,
            q_lens=around(problem.q_len, reach),
            sequence_heads=around(problem.batch * problem.heads, reach),
            heads_per_kv_head=problem.heads // problem.kv_heads,
            scores=problem.scores,
        )


def changed(config: ForwardConfig, **fields: Any) -> ForwardConfig | None:
    """The config with other fields, and on Hopper the registers that then are there; None if it refuses them."""
    if isinstance(config, HopperConfig) and "softmax_registers" not in fields:
        transpose = fields.get("transpose_registers", config.transpose_registers)
        roles = fields.get("softmax_roles", config.softmax_roles)
        if (transpose, roles) != (config.transpose_registers, config.softmax_roles):
            fields["load_registers"] = 24 if transpose else 32
            left = REGISTERS_PER_SM // WARPGROUP - fields["load_registers"] - transpose
            fields["softmax_registers"] = min(232, left // roles // 8 * 8)
    try:
        return dataclasses.replace(config, **fields)
    except ValueError:
        return None


def around(size: int, reach: float) -> tuple[int, int]:
    return max(1, math.ceil(size / reach)), math.floor(size * reach)
