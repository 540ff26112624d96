"""Configurations: what can be chosen, what was measured, and the choice."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..device import Device
from ..kernels.common.mask import Mask
from ..problem import Problem, needs_no_maximum
from ..runtime.descriptors import Bases
from ..score_mod import ScoreFunction
from ..sizes import Sizes, as_asked
from .configs import BlackwellConfig, ForwardConfig, HopperConfig
from .fits import head_dims_of, require_ctas, require_fits, require_supported
from .plan import Plan

# What a row block of so many rows takes, beside one of 64, by head dim; in 16 bits, without a mask. Fitted to times of
# an H200, bench/results/h200_few_queries.json: what is chosen so is at most 2.1 % behind the best there.
COSTS_OF_ROW_BLOCKS = {
    64: ((64, 1.0), (128, 1.4), (192, 1.8), (256, 2.55)),
    128: ((64, 1.0), (128, 1.3)),
}

FEWEST_KEYS = 512  # for these costs: the fewest that were timed are 1024

LONG = 1280  # keys, from where on it pays to compute the last heads' row blocks longest first

UNLIKE_ON_BLACKWELL = ((64, 128), (128, 64), (192, 64), (192, 128), (256, 64), (256, 128))  # of Q and V, padded

CGA_LAYOUTS: dict[int, Bases] = {1: (), 2: ((1, 0),), 4: ((1, 0), (2, 0))}


@dataclass(frozen=True)
class Row(Sizes):
    """A choice of config for the problems it fits, on the architectures that the config is for.

    element_bytes: of q, k and v. one_round: only if no program has more than one item to do: with little work small row
    blocks win, as more processors have some. row_blocks: (rows, cost) of each height that row blocks may have. Where
    `all_take_the_same`, the row serves if those of its config end soonest, whatever one_round says; elsewhere by
    one_round, and without that never. result_file (under bench/results/), card, date: where the configs were timed that
    it was chosen from; None for a row that waits for its measurement. The rows are few: they are not the fastest at
    every length, and a few per cent are within the noise. Fields of `Sizes` are given by name.
    """

    padded_head_dim: int
    causal: bool
    config: ForwardConfig
    element_bytes: int = 2
    one_round: bool = False
    row_blocks: tuple[tuple[int, float], ...] = ()
    result_file: str | None = None
    card: str | None = None
    date: str | None = None
    padded_head_dim_v: int | None = None  # None: as Q's

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of Q and K, and of V, padded."""
        return self.padded_head_dim, self.padded_head_dim_v or self.padded_head_dim

    @property
    def mask(self) -> Mask:
        return Mask(causal=self.causal)

    def is_of_kind(self, problem: Problem, device: Device) -> bool:
        """Whether it is for such head dims, mask, dtype and architecture, whatever the sizes."""
        return (
            (*self.head_dims, self.causal) == (problem.padded_head_dim, problem.padded_head_dim_v, problem.mask.causal)
            and self.element_bytes == problem.dtype.itemsize
            and device.arch in self.config.archs
        )

    def unmet(self, problem: Problem, device: Device, num_ctas: int | None) -> str | None:
        """The field of the row that keeps it from serving the problem, the first of them; "kind" for what
        `is_of_kind` asks, "smem_bytes" if the device has not enough. None: it serves it."""
        if not self.is_of_kind(problem, device):
            return "kind"
        if num_ctas is not None and num_ctas != self.config.num_ctas:
            return "num_ctas"
        if (unmet := self.unmet_size(problem)) is not None:
            return unmet
        if self.config.smem_bytes(self.padded_head_dim, self.element_bytes, self.padded_head_dim_v) > device.smem_bytes:
            return "smem_bytes"
        if self.row_blocks and all_take_the_same(problem):
            return None if self.ends_soonest(problem, device) == self.config.block_m else "row_blocks"
        if self.row_blocks and not self.one_round:
            return "row_blocks"
        if self.one_round and self.takes_rounds(problem, device):
            return "one_round"
        return None

    def fits(self, problem: Problem, device: Device, num_ctas: int | None) -> bool:
        return self.unmet(problem, device, num_ctas) is None

    @property
    def is_conditional(self) -> bool:
        """Whether more than sizes decide where it serves."""
        return self.one_round or bool(self.row_blocks)

    def takes_rounds(self, problem: Problem, device: Device) -> bool:
        """Whether some program has more than one item to do."""
        plan = Plan.of(problem, self.config, device)
        return plan.items > plan.programs

    def ends_soonest(self, problem: Problem, device: Device) -> int:
        """How many rows those of `row_blocks` have that end soonest, if programs take them in rounds. High ones compute
        more in the same time; low ones have fewer rows of no query, and give more processors some in the last round."""
        Plan.of(problem, self.config, device)  # raises for more row blocks than can be counted
        clusters, heads = device.sm_count // self.config.num_ctas, problem.batch * problem.heads
        chosen, soonest = self.config.block_m, math.inf
        for rows, cost in self.row_blocks:  # torch.compile traces no min() with a key
            end = -(-heads * -(-problem.q_len // rows) // clusters) * cost
            if end < soonest:
                chosen, soonest = rows, end
        return chosen


def all_take_the_same(problem: Problem) -> bool:
    """Whether row blocks of one height take the same time, of which the costs are known: nothing is hidden from some,
    no bias is read, and keys are about as many as were timed."""
    return problem.mask == Mask() and problem.bias is None and problem.kv_len >= FEWEST_KEYS


def hopper_config(
    softmax_roles: int,
    block_n: int,
    query_slots: int,
    kv_slots: int,
    softmax_registers: int,
    *,
    turns: bool = False,
    early_exp: int = 0,
    integer_max: bool = False,
    half_by_polynomial: bool = False,
    stage_in_queries: bool = False,
    num_ctas: int = 1,
    transpose_registers: int = 0,
    last_heads_longest_first: bool = False,
) -> HopperConfig:
    return HopperConfig(
        softmax_roles=softmax_roles,
        block_n=block_n,
        query_slots=query_slots,
        kv_slots=kv_slots,
        turns=turns,
        early_exp=early_exp,
        integer_max=integer_max,
        half_by_polynomial=half_by_polynomial,
        stage_in_queries=stage_in_queries,
        softmax_registers=softmax_registers,
        # What all roles have in common stays in registers only if each of them has enough, so more than the load warp
        # needs itself, if there are more.
        load_registers=24 if transpose_registers else 32,
        transpose_registers=transpose_registers,
        last_heads_longest_first=last_heads_longest_first,
        cga_layout=CGA_LAYOUTS[num_ctas],
    )


def blackwell_config(kv_slots: int, softmax_registers: int, *, num_ctas: int = 1, **options: Any) -> BlackwellConfig:
    """options: the further fields of BlackwellConfig."""
    return BlackwellConfig(
        block_n=128,
        kv_slots=kv_slots,
        softmax_registers=softmax_registers,
        load_registers=24,
        cga_layout=CGA_LAYOUTS[num_ctas],
        **options,
    )


def measured(
    head_dim: int,
    causal: bool,
    config: ForwardConfig,
    *,
    result_file: str = "h200_candidates.json",
    date: str = "2026-11-22",
    **fields: Any,
) -> Row:
    return Row(head_dim, causal, config, result_file=result_file, card="NVIDIA H200", date=date, **fields)


def rows_in_limits() -> Iterator[Row]:
    """Of causal windows and chunks of few keys. A row block sees few key blocks then, some of which it has to mask: in
    small tiles less is computed that nobody sees. Timed were windows of 128 and of 1024 keys; at D=128 the larger one
    has no row here, as none that was timed is faster than the table's by more than the noise."""

    def row(head_dim: int, fewest: int, most: int, config: HopperConfig) -> Row:
        file: dict[str, Any] = {
            "result_file": "h100_tune_features.json",
            "card": "NVIDIA H100 80GB HBM3",
            "date": "2026-11-26",
        }
        return Row(head_dim, True, config, min_kv_len=fewest, max_kv_len=most, in_limits=True, **file)

    few = hopper_config(2, 64, 2, 4, 232, early_exp=1, integer_max=True)
    yield row(64, 1, 362, few)
    yield row(64, 363, 1448, replace(few, softmax_roles=3, softmax_registers=160))
    yield row(128, 1, 362, hopper_config(1, 64, 2, 3, 232, early_exp=1))


def hopper_rows() -> Iterator[Row]:
    """Those of 16 bits, then those of fp8; first those of one CTA: those of two are chosen on request only."""
    # With little work, small row blocks, of which more processors have some.
    one = hopper_config(1, 128, 2, 2, 232)
    for head_dim in (64, 128):
        yield measured(head_dim, True, one, one_round=True)
    yield from rows_in_limits()
    # Without a mask all row blocks take the same time, so that it is known which end soonest. Else low ones serve in
    # one round, and high ones in more.
    two = hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2)
    three = hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1, integer_max=True)
    four = hopper_config(4, 64, 2, 4, 112)
    for config in (one, two):
        yield measured(64, False, config, one_round=True, row_blocks=COSTS_OF_ROW_BLOCKS[64])
    for config in (three, four):
        yield measured(64, False, config, row_blocks=COSTS_OF_ROW_BLOCKS[64])
    yield measured(64, False, three, min_kv_len=2048)
    yield measured(64, False, four)
    two = replace(two, integer_max=True)
    yield measured(128, False, one, one_round=True, row_blocks=COSTS_OF_ROW_BLOCKS[128])
    yield measured(128, False, two)
    # Large row blocks are for long sequences: with few row blocks to a head, much of the last one is not used. The
    # last heads longest first likewise: up to 1024 keys what it costs in every row block is more than it gains. At
    # D=256 in 16 bits the kernel would spill for it.
    three = replace(three, last_heads_longest_first=True)
    yield measured(64, True, three, min_kv_len=12288)
    four = hopper_config(4, 64, 2, 4, 112, integer_max=True, last_heads_longest_first=True)
    yield measured(64, True, four, min_kv_len=LONG)
    yield measured(64, True, hopper_config(4, 64, 2, 4, 112))
    yield measured(128, True, replace(two, last_heads_longest_first=True), min_kv_len=LONG)
    yield measured(128, True, two, min_kv_len=768)
    # Half of a large block on the diagonal is not seen, which counts where a row block has few. (768: timed were 512
    # and 1024.)
    yield measured(128, True, hopper_config(2, 64, 2, 4, 232, early_exp=1, integer_max=True))
    for num_ctas, causal in itertools.product((1, 2), (False, True)):
        yield measured(256, causal, hopper_config(2, 64, 1, 2, 232, stage_in_queries=True, num_ctas=num_ctas))

    three = hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1, num_ctas=2)
    yield measured(64, False, three, min_kv_len=2048)
    yield measured(64, False, hopper_config(4, 64, 2, 4, 112, early_exp=1, num_ctas=2))
    yield measured(64, True, replace(three, last_heads_longest_first=True), min_kv_len=2560)
    yield measured(64, True, hopper_config(4, 64, 2, 4, 112, num_ctas=2))
    two = hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, num_ctas=2)
    yield measured(128, False, two)
    yield measured(128, True, replace(two, last_heads_longest_first=True), min_kv_len=LONG)
    yield measured(128, True, two)

    # In fp8 a role of the kernel transposes V where keys are used so seldom that a kernel of its own does not pay; but
    # not at D=256, where with four warps more the assembler has too few registers for the products.
    fp8: dict[str, Any] = {"element_bytes": 1}
    often: dict[str, Any] = {"min_reuse": 2048, **fp8}
    yield measured(64, False, hopper_config(3, 128, 2, 2, 160, turns=True), min_kv_len=2048, **often)
    yield measured(64, False, hopper_config(4, 64, 2, 4, 112), min_reuse=1024, **fp8)
    yield measured(64, True, hopper_config(3, 128, 2, 2, 160, last_heads_longest_first=True), min_kv_len=4096, **often)
    yield measured(64, True, hopper_config(4, 64, 2, 4, 112), min_reuse=512, **fp8)
    yield measured(64, False, hopper_config(3, 128, 2, 2, 160, turns=True, num_ctas=2), min_kv_len=4096, **often)
    yield measured(64, False, hopper_config(4, 64, 2, 4, 112, early_exp=1, num_ctas=2), min_reuse=1024, **fp8)
    three = hopper_config(3, 128, 2, 2, 160, last_heads_longest_first=True, num_ctas=2)
    yield measured(64, True, three, min_kv_len=8192, **often)
    four = hopper_config(4, 64, 2, 4, 112, early_exp=1, last_heads_longest_first=True, num_ctas=2)
    yield measured(64, True, four, min_kv_len=4096, **often)
    for n in (1, 2):
        yield measured(128, False, hopper_config(2, 128, 2, 4, 240, early_exp=1, num_ctas=n), min_reuse=1024, **fp8)
        two = hopper_config(2, 128, 2, 4, 240, turns=True, early_exp=1, last_heads_longest_first=True, num_ctas=n)
        yield measured(128, True, two, min_reuse=4096, **fp8)
        wide = hopper_config(2, 64, 1, 4, 240, early_exp=1, num_ctas=n)
        yield measured(256, False, wide, **fp8)
        yield measured(256, True, replace(wide, last_heads_longest_first=True), **fp8)
        for causal in (False, True):
            config = hopper_config(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56, num_ctas=n)
            yield measured(128, causal, config, **fp8)
            config = hopper_config(2, 128, 2, 4, 216, transpose_registers=56, num_ctas=n)
            yield measured(64, causal, config, **fp8)


def rows_of_other_head_dims() -> Iterator[Row]:
    """Of 192, and of a V head dim unlike Q's: what has room in shared memory and, in registers, does not spill.

    Only (192, 128) in 16 bits was timed. Of the others no row has a result file, and one config serves all lengths of
    a kind."""
    few = hopper_config(2, 64, 2, 2, 232, early_exp=2, integer_max=True)
    many = hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=2, integer_max=True, stage_in_queries=True)
    timed: dict[str, Any] = {
        "padded_head_dim_v": 128,
        "result_file": "h200_candidates_d192.json",
        "date": "2026-11-27",
    }
    yield measured(192, False, many, min_kv_len=LONG, **timed)
    yield measured(192, False, few, **timed)
    yield measured(192, True, replace(many, last_heads_longest_first=True), min_kv_len=LONG, **timed)
    yield measured(192, True, replace(few, turns=True, early_exp=1), **timed)
    chosen = {
        (192, 128): hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=2, stage_in_queries=True),
        (64, 128): hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2),
        (128, 64): hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2),
        (192, 64): hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=2),
        (256, 64): hopper_config(2, 64, 1, 3, 232, early_exp=1),
        (256, 128): hopper_config(2, 64, 1, 2, 232, early_exp=1),
        (64, 192): hopper_config(2, 64, 2, 3, 232, early_exp=1),
        (128, 192): hopper_config(2, 64, 1, 3, 232, early_exp=1),
        (192, 192): hopper_config(2, 64, 1, 2, 232, early_exp=1),
        (256, 192): hopper_config(2, 64, 1, 2, 232, early_exp=1),
        (64, 256): hopper_config(2, 64, 2, 2, 232),
        (128, 256): hopper_config(2, 64, 1, 2, 232),
        (192, 256): hopper_config(2, 64, 1, 2, 232),
    }
    for ((head_dim, head_dim_v), config), causal, n in itertools.product(chosen.items(), (False, True), (1, 2)):
        of_n = replace(config, cga_layout=CGA_LAYOUTS[n])
        if (head_dim, head_dim_v, n) != (192, 128, 1):
            yield Row(head_dim, causal, of_n, padded_head_dim_v=head_dim_v)
        # In fp8, O takes as much room as in 16 bits, and is never staged in Q's tile.
        block_n = 128 if head_dim_v <= 128 else 64
        fp8 = hopper_config(2, block_n, 1, 2, 240, early_exp=1, num_ctas=n)
        yield Row(head_dim, causal, fp8, 1, padded_head_dim_v=head_dim_v)


def blackwell_rows() -> tuple[Row, ...]:
    """The choices that are published for FlashAttention-4 and for Triton's example; none is measured by us.

    From the former: depth of the ring; rescaling from 8 on, but not in fp8, where P would overflow; an eighth of the
    exponentials by polynomial on sm_100, none on sm_103, whose exponential unit is twice as fast; P handed over early;
    longest row blocks first for causal. From the latter: maxima from the loads on sm_103, turns at D=64, exponentials
    in four pieces; two CTAs gain with D=128 and no mask.
    """
    rows = []
    for arch, head_dim, causal in itertools.product((103, 100), (64, 128), (False, True)):
        for num_ctas in (2, 1, 4) if (head_dim, causal) == (128, False) else (1, 2, 4):
            for element_bytes in (2, 1):
                config = blackwell_config(
                    # Half of a key block is in each CTA of a pair.
                    kv_slots=(384 if element_bytes == 2 else 512) // head_dim * min(2, num_ctas),
                    softmax_registers=192,
                    num_ctas=num_ctas,
                    exp_pieces=4,
                    # At D=128 in 16 bits the compiler makes it a reload from local memory in every step.
                    early_p=(head_dim, element_bytes) != (128, 2),
                    exp_turns=head_dim == 64,
                    max_in_load=arch == 103,
                    polynomial_columns=2 if arch == 100 else 0,
                    rescale_threshold=8.0 if element_bytes == 2 else 0.0,
                    longest_first=causal,
                )
                rows.append(Row(head_dim, causal, config, element_bytes))
    return tuple(rows)


def with_less_memory(config: BlackwellConfig) -> Iterator[BlackwellConfig]:
    """This config, and such as take ever less shared memory: fewer slots, and then fewer keys to a block."""
    for block_n, result_slots in ((128, 2), (128, 1), (64, 1)):
        for kv_slots in range(config.kv_slots, 1, -1):
            yield replace(config, block_n=block_n, result_slots=result_slots, kv_slots=kv_slots)


def blackwell_rows_of_unlike_head_dims() -> Iterator[Row]:
    """Of a V head dim unlike Q's, at most 128: with as many keys to a block, and then as many slots, as have room. None
    is measured."""
    device = Device.blackwell()
    for head_dims, arch, causal, num_ctas, element_bytes in itertools.product(
        UNLIKE_ON_BLACKWELL, (103, 100), (False, True), (1, 2, 4), (2, 1)
    ):
        config = blackwell_config(
            kv_slots=6,
            softmax_registers=192,
            num_ctas=num_ctas,
            exp_pieces=4,
            max_in_load=arch == 103,
            polynomial_columns=2 if arch == 100 else 0,
            rescale_threshold=8.0 if element_bytes == 2 else 0.0,
            longest_first=causal,
        )
        cuts = with_less_memory(config)
        roomy = next(c for c in cuts if c.smem_bytes(head_dims[0], element_bytes, head_dims[1]) <= device.smem_bytes)
        yield Row(head_dims[0], causal, roomy, element_bytes, padded_head_dim_v=head_dims[1])


def configs_with_bias() -> Iterator[HopperConfig]:
    """Where a bias of each row leaves no room for the table's config, the first of these that fits: with as many keys
    to a block, roles and slots as have room."""
    for query_slots, stages in ((2, False), (1, True), (1, False)):
        yield hopper_config(
            2, 128, query_slots, 2, 232, turns=True, early_exp=2, integer_max=True, stage_in_queries=stages
        )
    yield hopper_config(2, 64, 2, 3, 232, early_exp=1)
    for roles, stages in itertools.product((2, 1), (True, False)):
        yield hopper_config(roles, 64, 1, 2, 232, stage_in_queries=stages)


HOPPER = tuple(hopper_rows())
WITH_BIAS = tuple(configs_with_bias())
BLACKWELL = blackwell_rows()
TABLE = HOPPER + BLACKWELL
OTHER_HEAD_DIMS = tuple(rows_of_other_head_dims())
BLACKWELL_UNLIKE = tuple(blackwell_rows_of_unlike_head_dims())
PACKAGED = TABLE + OTHER_HEAD_DIMS + BLACKWELL_UNLIKE


def pick_config(
    problem: Problem, device: Device, num_ctas: int | None = None, rows: Sequence[Row] = PACKAGED
) -> ForwardConfig:
    """The config for a problem, of the first row that fits. Pure.

    num_ctas: 1, 2 or (Blackwell) 4 to insist on it; default: whichever comes first in the table. rows: the table;
    `tuning.rows_for` has the one in use.
    Raises NotImplementedError if there is no kernel for such a problem on the device, ValueError if no row fits it.
    """
    row = pick_row(problem, device, num_ctas, rows)
    if problem.bias is not None:
        return for_bias(row.config, problem, device)
    return for_scores(row, problem.score_mod, problem.dtype)


def pick_row(problem: Problem, device: Device, num_ctas: int | None, rows: Sequence[Row]) -> Row:
    """The first row that fits. Raises what `pick_config` raises."""
    require_supported(problem, device)
    require_ctas(num_ctas, device)
    if problem.bias is not None and num_ctas not in (None, 1):
        raise ValueError(f"num_ctas: expected 1 or None with a bias, got {num_ctas}; leave it out")
    typical = problem.typical
    for row in as_asked(rows, problem):
        if problem.sequences is not None and isinstance(row.config, BlackwellConfig) and row.config.dynamic:
            continue  # programs take packed sequences from a list
        if problem.bias is not None and row.config.num_ctas > 1:
            continue
        if row.fits(typical, device, num_ctas):
            return row
    raise ValueError(
        f"config: no row of the tuning table fits head_dim {head_dims_of(problem)}, num_ctas {num_ctas} and the "
        f"{device.smem_bytes} bytes of shared memory of {device.name}; give a ForwardConfig as config"
    )


def rows_by_default(
    padded_head_dim: int,
    causal: bool,
    element_bytes: int,
    arch: int,
    padded_head_dim_v: int | None = None,
    table: Sequence[Row] = PACKAGED,
    in_limits: tuple[int, int] | None = None,
) -> list[Row]:
    """The rows that `pick_config` chooses from, by lengths and heads, where nobody insists on a number of CTAs: those
    of the table but for one that an earlier one fits wherever it does. in_limits: of calls with a window or chunks, the
    fewest and the most keys that a query sees there; None: of any calls."""
    rows: list[Row] = []
    for row in table:
        facts = (*row.head_dims, row.causal, row.element_bytes)
        asked = (padded_head_dim, padded_head_dim_v or padded_head_dim, causal, element_bytes)
        if facts != asked or arch not in row.config.archs:
            continue
        if not any(earlier.covers(row, in_limits) and not earlier.is_conditional for earlier in rows):
            rows.append(row)
    return rows


def for_scores(row: Row, score_mod: ScoreFunction | None, dtype: torch.dtype) -> ForwardConfig:
    """A row's config for scores that a function changes, or None: without the lever that looks at raw scores; on Hopper
    with one for soft caps, whose tanh asks the exponential unit too. On an H100 that is 10 % faster at D=64 and 5 %
    slower at D=128: bench/results/h100_scores.json. A row for such scores has been chosen with or without."""
    config = row.config
    if score_mod is None or row.scores is not None:
        return config
    if isinstance(config, HopperConfig):
        return replace(config, half_by_polynomial=row.head_dims == (64, 64) and needs_no_maximum(score_mod, dtype))
    assert isinstance(config, BlackwellConfig)
    return replace(config, max_in_load=False)


def for_bias(config: ForwardConfig, problem: Problem, device: Device) -> ForwardConfig:
    """The config for scores that a bias is added to: this one, or else the first that has room for it."""
    candidates: Iterable[ForwardConfig]
    if isinstance(config, BlackwellConfig):
        own = replace(config, max_in_load=False)
        # Itself first: what takes less begins with 128 keys and two result slots, whatever it has.
        candidates = (own, *with_less_memory(own))
    else:
        wide = problem.padded_head_dim_v > 128  # too many registers for scores of 128 keys
        candidates = (config, *(c for c in WITH_BIAS if c.block_n == 64 or not wide))
    for one in candidates:
        try:
            require_fits(one, problem, device)
        except ValueError:
            continue
        return one
    raise ValueError(
        f"config: none has room for a bias of {problem.bias} at head_dim {head_dims_of(problem)} in the "
        f"{device.smem_bytes} bytes of shared memory of {device.name}; give a ForwardConfig as config"
    )
