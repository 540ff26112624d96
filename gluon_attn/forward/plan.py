"""How a problem is laid out over a device's processors: the numbers of a launch that depend on no tensor."""

import math
from dataclasses import dataclass

from ..device import Device
from ..problem import Problem
from .configs import BlackwellTile, HopperTile, TileConfig

# Of the cache, that K and V of the heads at work may take: the rest is for Q, O and what else passes through.
SHARE_OF_L2 = 0.6

LARGEST_LENGTH = 2**31 - 2**12  # leaves room to round up to any block of rows or keys

# Of a head, for row blocks of the last heads to be walked one by one: with four, the lightest is still so heavy that
# nothing evens out.
MIN_ROW_BLOCKS_IN_TURN = 5

# Keys of a block in the kernel that transposes V.
TRANSPOSE_BLOCK_N = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A persistent grid of `programs` clusters that walks the row blocks of all heads, singly or in pairs.

    items: what there is to do: row blocks of all heads, or pairs of them.
    blocks_per_item: 1, or 2 to pair heavy row blocks with light ones (forward/work.py of the architecture's kernel).
    heads_in_turn: how many heads' row blocks are computed in turn, those with most keys first, if the tile has that: on
        Hopper of the last heads, where the others' row blocks are paired; on Blackwell of those that have room in L2.
    scale_log2: what the scores are multiplied with, so that exp2 replaces exp.
    arch: what to compile for: 90, 100 or 103.
    """

    problem: Problem
    tile: TileConfig
    programs: int
    items: int
    blocks_per_item: int
    heads_in_turn: int
    scale_log2: float
    arch: int

    @property
    def transpose_programs(self) -> int:
        """Programs of the kernel that transposes V: one for each block of keys of each head."""
        return self.problem.batch * self.problem.kv_heads * -(-self.problem.kv_len // TRANSPOSE_BLOCK_N)

    @staticmethod
    def of(problem: Problem, tile: TileConfig, device: Device) -> "Plan":
        """Raises ValueError for more row blocks, queries or keys than the kernel can count."""
        clusters = device.sm_count // tile.num_ctas
        if clusters == 0:
            raise ValueError(
                f"device: expected at least {tile.num_ctas} processors for a cluster of as many CTAs, got "
                f"{device.sm_count}; give num_ctas=1"
            )
        for name, length in (("q", problem.q_len), ("k", problem.kv_len)):
            if length > LARGEST_LENGTH:
                raise ValueError(
                    f"{name}: expected at most {LARGEST_LENGTH} positions, counted in 32 bits, got {length}; split the "
                    "sequence"
                )
        row_blocks, heads = -(-problem.q_len // tile.block_m), problem.batch * problem.heads
        if heads * row_blocks >= 2**31 - 2 * clusters:  # programs count two rounds beyond the last
            raise ValueError(
                f"q: expected fewer than 2^31 row blocks over all heads and batches, got {heads * row_blocks}; "
                "split the batch"
            )
        # Under a causal mask the last row block costs the most and the first the least. Pairs even that out, where the
        # two differ much and there is no program for every block anyway; unless that is left to the order of items.
        lightest, heaviest = problem.kv_len - problem.q_len + tile.block_m, problem.kv_len
        if problem.left is not None:
            heaviest = min(heaviest, problem.left + tile.block_m)
        uneven = problem.causal and heaviest >= 2 * lightest
        ordered = isinstance(tile, BlackwellTile) and (tile.dynamic or tile.longest_first)
        pairs = uneven and heads * row_blocks > clusters and not ordered
        blocks_per_item = 2 if pairs else 1
        if tile.pairs_span_heads:
            items = -(-heads * row_blocks // blocks_per_item)
        else:
            items = heads * -(-row_blocks // blocks_per_item)
        heads_in_turn = heads_in_l2(problem, device) if isinstance(tile, BlackwellTile) else 0
        # Two rounds of single ones in place of one of pairs: more of them even out no better, and one round of pairs in
        # all leaves nothing to even out.
        wanted = isinstance(tile, HopperTile) and tile.last_heads_in_turn and row_blocks >= MIN_ROW_BLOCKS_IN_TURN
        if wanted and pairs and items > clusters:
            heads_in_turn = -(-clusters // -(-row_blocks // 2))  # there are as many, as items > clusters
        return Plan(
            problem=problem,
            tile=tile,
            programs=items if tile.one_program_per_item else min(clusters, items),
            items=items,
            blocks_per_item=blocks_per_item,
            heads_in_turn=heads_in_turn,
            scale_log2=problem.scale * math.log2(math.e),
            arch=device.arch,
        )


def heads_in_l2(problem: Problem, device: Device) -> int:
    """How many query heads have their K and V in a share of the L2 cache together, at least one KV head's."""
    group = problem.heads // problem.kv_heads
    kv_head_bytes = 2 * problem.kv_len * problem.head_dim * problem.dtype.itemsize
    kv_heads = max(1, int(SHARE_OF_L2 * device.l2_bytes) // kv_head_bytes)
    return min(problem.batch * problem.heads, group * kv_heads)
