"""The order in which the row blocks of all heads are computed."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from .keys import Rows


@aggregate
class Tile:
    """One row block of one query head. All int32 scalars."""

    batch: gl.tensor
    head: gl.tensor
    first_row: gl.tensor


@aggregate
class TileSchedule:
    """The sizes of a problem in tiles. For Blackwell (Hopper's roles walk otherwise, see hopper/work.py) also numbers
    for the row blocks of all heads, and which a program computes: items of one or two tiles, numbered one after the
    other.

    Numbers run through a head before the next head starts, so that programs working at the same time share its K and V
    in L2; or, if LONGEST_FIRST, through as many heads as have room there at the same time, a row block of each in turn.
    A head's last row block, under a causal mask the heaviest, comes first. If items are pairs, the first row block is
    next, then the last but one, and so on: under a square causal mask two that follow each other cost the same
    together. Every other head is numbered in reverse, for so they do where an item spans two heads.
    """

    batches: gl.tensor
    heads: gl.tensor
    all_heads: gl.tensor  # of all batches
    row_blocks: gl.tensor
    tiles: gl.tensor
    blocks_per_item: gl.tensor
    heads_per_group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    CAUSAL: gl.constexpr
    LONGEST_FIRST: gl.constexpr

    @jit
    def first(self):
        """The number of this program's first tile. A program is done when its number is not below `tiles`."""
        return gl.program_id(0) * self.blocks_per_item

    @jit
    def following(self, number):
        """The number of this program's next tile."""
        others = (gl.num_programs(0) - 1) * self.blocks_per_item
        return number + 1 + gl.where(self.is_paired(number + 1), 0, others)

    @jit
    def is_paired(self, number):
        """Whether the tile is the second one of a pair."""
        return (number & (self.blocks_per_item - 1)) != 0

    @jit
    def head_and_place(self, number):
        """(head, counted through all batches; place among the head's row blocks)."""
        if self.LONGEST_FIRST:
            group = number // (self.heads_per_group * self.row_blocks)
            first_head = group * self.heads_per_group
            heads = gl.minimum(self.heads_per_group, self.all_heads - first_head)  # the last group may be smaller
            in_group = number - first_head * self.row_blocks
            place = in_group // heads
            return first_head + in_group - place * heads, place
        else:
            head = number // self.row_blocks
            place = number % self.row_blocks
            return head, gl.where(self.is_paired(head), self.row_blocks - 1 - place, place)

    @jit
    def tile(self, number):
        head, place = self.head_and_place(number)
        pair = place >> (self.blocks_per_item - 1)
        row_block = gl.where(self.is_paired(place), pair, self.row_blocks - 1 - pair)
        return Tile(head // self.heads, head % self.heads, row_block * self.BLOCK_M)

    @jit
    def rows(self, tile):
        """A tile's rows, and the keys they see."""
        seen = self.kv_len
        if self.CAUSAL:
            seen = gl.minimum(self.kv_len, tile.first_row + (self.kv_len - self.q_len) + 1)
        return Rows(tile.first_row, seen, self.q_len, self.kv_len, self.BLOCK_M, self.BLOCK_N, self.CAUSAL)


@jit
def tile_schedule(
    q_shape,
    k_shape,
    blocks_per_item,
    heads_per_group,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
):
    """Shapes: (B, H, Sq, D) and (B, Hkv, Sk, D). blocks_per_item: 1, or 2 to pair heavy row blocks with light ones.
    heads_per_group: heads that take turns, if LONGEST_FIRST (on Hopper the last ones only)."""
    row_blocks = (q_shape[2] + BLOCK_M - 1) // BLOCK_M
    return TileSchedule(
        batches=q_shape[0],
        heads=q_shape[1],
        all_heads=q_shape[0] * q_shape[1],
        row_blocks=row_blocks,
        tiles=q_shape[0] * q_shape[1] * row_blocks,
        blocks_per_item=blocks_per_item,
        heads_per_group=heads_per_group,
        q_len=q_shape[2],
        kv_len=k_shape[2],
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        CAUSAL=CAUSAL,
        LONGEST_FIRST=LONGEST_FIRST,
    )
