"""How a problem is laid out over a device's processors: the numbers of a launch that depend on no tensor."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..device import Device
from ..kernels.common.packed import CANDIDATES
from ..kernels.common.sequence import KEYS_MULTIPLE
from ..problem import Problem
from .configs import BlackwellConfig, ForwardConfig, HopperConfig

# Of the cache, that K and V of the heads at work may take: the rest is for Q, O and what else passes through.
SHARE_OF_L2 = 0.6

LARGEST_LENGTH = 2**31 - 2**12  # leaves room to round up to any block of rows or keys
LARGEST_PACKED = 2**30  # so that coordinates, up to twice as many rows, do too

# Of a head, for row blocks of the last heads to be walked one by one: with four, the lightest is still so heavy that
# nothing evens out.
MIN_ROW_BLOCKS_LONGEST_FIRST = 5

# Keys of a block in the kernel that transposes V.
TRANSPOSE_BLOCK_N = KEYS_MULTIPLE.value


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A persistent grid of `programs` clusters that walks the row blocks of all heads, one or two at a time.

    items: what there is to do: row blocks of all heads, or heavy ones with light ones.
    blocks_per_item: 1, or 2 for a heavy row block with a light one (forward/work.py of the architecture's kernel).
    heads_longest_first: how many heads' row blocks are computed together, those with most keys first, if the config
        has that: on Hopper of the last heads, where the others' make items of two; on Blackwell of those that have
        room in L2.
    scale_log2: what the scores are multiplied with, so that exp2 replaces exp.
    arch: what to compile for: 90, 100 or 103.
    """

    problem: Problem
    config: ForwardConfig
    programs: int
    items: int
    blocks_per_item: int
    heads_longest_first: int
    scale_log2: float
    arch: int

    @property
    def transpose_programs(self) -> int:
        """Programs of the kernel that transposes V: one for each block of keys of each head."""
        blocks = -(-self.problem.kv_len // TRANSPOSE_BLOCK_N)
        if self.problem.sequences is not None:
            blocks = self.padded_key_blocks
        return self.problem.batch * self.problem.kv_heads * blocks

    @property
    def padded_key_blocks(self) -> int:
        """Of packed sequences, as `padded_keys` counts them."""
        return self.problem.kv_len // TRANSPOSE_BLOCK_N + (self.problem.sequences or 0)

    @property
    def capacity(self) -> int:
        """Row blocks of a head that packed sequences have at most, whatever their lengths."""
        return self.problem.q_len // self.config.block_m + (self.problem.sequences or 0)

    @property
    def list_programs(self) -> int:
        """Of the kernel that lists the row blocks of packed sequences."""
        return -(-self.capacity // CANDIDATES.value)

    @property
    def list_numbers(self) -> dict[str, float]:
        """What that kernel is given besides tensors."""
        problem, mask, block_m = self.problem, self.problem.mask, self.config.block_m
        most = mask.most_keys(problem.kv_len)
        return {
            "sequences": problem.sequences or 0,
            "q_rows": problem.q_len,
            "k_rows": problem.kv_len,
            "reach": -1 if mask.reach is None else min(mask.reach, problem.q_len),
            "most_keys": most if most == problem.kv_len else most + block_m,
            "capacity": self.capacity,
        }

    @staticmethod
    def of(problem: Problem, config: ForwardConfig, device: Device, *, card_is_shared: bool = False) -> "Plan":
        """Raises ValueError for more row blocks, queries or keys than the kernel can count.

        card_is_shared: have a program for each item, which the hardware starts where there is room. Of programs that
            share the items beforehand, one for which a transfer leaves no processor would begin when that ends.
        """
        clusters = device.sm_count // config.num_ctas
        if clusters == 0:
            raise ValueError(
                f"device: expected at least {config.num_ctas} processors for a cluster of as many CTAs, got "
                f"{device.sm_count}; give num_ctas=1"
            )
        for name, length in (("q", problem.q_len), ("k", problem.kv_len)):
            if length > LARGEST_LENGTH:
                raise ValueError(
                    f"{name}: expected at most {LARGEST_LENGTH} positions, counted in 32 bits, got {length}; split the "
                    "sequence"
                )
        if problem.sequences is not None:
            return Plan.of_packed(problem, config, device)
        row_blocks, heads = -(-problem.q_len // config.block_m), problem.batch * problem.heads
        if heads * row_blocks >= 2**31 - 2 * clusters:  # programs count two rounds beyond the last
            raise ValueError(
                f"q: expected fewer than 2^31 row blocks over all heads and batches, got {heads * row_blocks}; "
                "split the batch"
            )
        # Under a causal mask the last row block costs the most and the first the least. Items of two even that out,
        # where they differ much and there is no program for every block anyway; unless the order of items does. In a
        # narrow window most row blocks cost the same: of items of two some would be twice one, some hardly more.
        mask = problem.mask
        rows = min(config.block_m, problem.q_len)

        def keys_of(index: int) -> int:
            first = index * config.block_m
            return mask.keys_seen(first, min(first + rows, problem.q_len) - 1, problem.q_len, problem.kv_len)

        known = mask.chunk is None and not mask.has_ranges  # what row blocks cost
        uneven = mask.hides_late_keys and known and pairs_even_out(keys_of, row_blocks)
        ordered = isinstance(config, BlackwellConfig) and (config.dynamic or config.longest_first)
        by_twos = uneven and heads * row_blocks > clusters and not ordered
        blocks_per_item = 2 if by_twos else 1
        if config.items_span_heads:
            items = -(-heads * row_blocks // blocks_per_item)
        else:
            items = heads * -(-row_blocks // blocks_per_item)
        heads_longest_first = 0
        if isinstance(config, BlackwellConfig):
            # Where row blocks of a window cost the same, neighbours at work at the same time share their keys in L2.
            alike = mask.hides_early_keys and not uneven
            heads_longest_first = 1 if alike else heads_in_l2(problem, device)
        # Two rounds of single row blocks in place of one of items of two: more of them even out no better, and one in
        # all leaves nothing to even out.
        wanted = (
            isinstance(config, HopperConfig)
            and config.last_heads_longest_first
            and row_blocks >= MIN_ROW_BLOCKS_LONGEST_FIRST
        )
        if wanted and by_twos and items > clusters:
            heads_longest_first = -(-clusters // -(-row_blocks // 2))  # there are as many, as items > clusters
        return Plan(
            problem=problem,
            config=config,
            programs=items if config.one_program_per_item or card_is_shared else min(clusters, items),
            items=items,
            blocks_per_item=blocks_per_item,
            heads_longest_first=heads_longest_first,
            scale_log2=problem.scale * math.log2(math.e),
            arch=device.arch,
        )

    @staticmethod
    def of_packed(problem: Problem, config: ForwardConfig, device: Device) -> "Plan":
        """Of packed sequences, whose lengths are not known: with a program for each row block that there may be, but no
        more than run at a time."""
        for name, rows in (("q", problem.q_len), ("k", problem.kv_len)):
            if rows > LARGEST_PACKED:
                raise ValueError(
                    f"{name}: expected at most {LARGEST_PACKED} rows of all sequences together, got {rows}; split the "
                    "batch"
                )
        clusters = device.sm_count // config.num_ctas
        items = problem.heads * (problem.q_len // config.block_m + (problem.sequences or 0))
        if items >= 2**31 - 2 * clusters:
            raise ValueError(
                f"q: expected fewer than 2^31 row blocks over all heads and sequences, got up to {items}; split the "
                "batch"
            )
        return Plan(
            problem=problem,
            config=config,
            programs=min(clusters, items),
            items=items,
            blocks_per_item=1,
            heads_longest_first=0,
            scale_log2=problem.scale * math.log2(math.e),
            arch=device.arch,
        )


def pairs_even_out(cost: Callable[[int], int], blocks: int) -> bool:
    """Whether blocks of these costs, of which some have at least twice as much as others, are better computed in pairs:
    the first with the last, the second with the last but one. That is, whether what the heaviest pair has above the
    mean of pairs is less than what the heaviest block has above the mean of blocks; for who gets one more of those than
    others makes them wait so long. Looked at: some blocks, evenly spread.
    """
    chosen = [(i, blocks - 1 - i) for i in range(0, blocks, -(-blocks // 64))]
    alone = [cost(i) for pair in chosen for i in pair]
    pairs = [sum(map(cost, {*pair})) for pair in chosen]  # the middle one of an odd number is alone
    mean = sum(alone) / len(alone)
    return max(alone) >= 2 * min(alone) and max(pairs) - 2 * mean < max(alone) - mean


def heads_in_l2(problem: Problem, device: Device) -> int:
    """How many query heads have their K and V in a share of the L2 cache together, at least one KV head's."""
    group = problem.heads // problem.kv_heads
    kv_head_bytes = problem.kv_len * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    kv_heads = max(1, int(SHARE_OF_L2 * device.l2_bytes) // kv_head_bytes)
    return min(problem.batch * problem.heads, group * kv_heads)
