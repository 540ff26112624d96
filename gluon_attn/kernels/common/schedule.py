"""The order in which the row blocks of all heads are computed."""

from gluon_attn.compat import aggregate, gl, jit

from .key_range import Rows


@aggregate
class Tile:
    """One row block of one query head. All int32 scalars."""

    batch: gl.tensor
    head: gl.tensor
    first_row: gl.tensor


@aggregate
class TileSchedule:
    """Numbers the row blocks of all heads: items 0, 1, ... are what programs take, one after the other.

    An item is one row block of a head, the last (under a causal mask the heaviest) first, or a pair: the p-th row block
    from the end and the p-th from the start, which under a square causal mask together cost the same. Items run
    through a head before the next head starts, so that programs working at the same time share its K and V in L2; or,
    if LONGEST_FIRST, through as many heads as have room there at the same time, a row block of each in turn.
    """

    heads: gl.tensor
    row_blocks: gl.tensor
    items_per_head: gl.tensor
    items: gl.tensor
    blocks_per_item: gl.tensor
    heads_per_group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    CAUSAL: gl.constexpr
    LONGEST_FIRST: gl.constexpr

    @jit
    def head_and_position(self, item):
        """(head, counted through all batches; position of the item's first row block, counted from the end)."""
        if self.LONGEST_FIRST:
            group_items = self.heads_per_group * self.items_per_head
            first_head = item // group_items * self.heads_per_group
            # The last group may be smaller.
            heads = gl.minimum(self.heads_per_group, self.items // self.items_per_head - first_head)
            return first_head + item % group_items % heads, item % group_items // heads
        else:
            return item // self.items_per_head, item % self.items_per_head

    @jit
    def tiles_in(self, item):
        """Row blocks of this item: 1, or 2 for a pair (the middle block of an odd number has no partner)."""
        _, from_end = self.head_and_position(item)
        return gl.where(self.blocks_per_item == 1, 1, gl.minimum(2, self.row_blocks - 2 * from_end))

    @jit
    def tile(self, item, i):
        """The item's i-th tile, i < tiles_in(item)."""
        head, from_end = self.head_and_position(item)
        row_block = gl.where(i == 0, self.row_blocks - 1 - from_end, from_end)
        return Tile(head // self.heads, head % self.heads, row_block * self.BLOCK_M)

    @jit
    def rows(self, first, ROWS: gl.constexpr):
        """ROWS rows of a tile from row `first` on, and the keys they see."""
        return Rows(first, self.q_len, self.kv_len, ROWS, self.BLOCK_N, self.CAUSAL)


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
    heads_per_group: heads that take turns, if LONGEST_FIRST."""
    row_blocks = (q_shape[2] + BLOCK_M - 1) // BLOCK_M
    items_per_head = (row_blocks + blocks_per_item - 1) // blocks_per_item
    return TileSchedule(
        heads=q_shape[1],
        row_blocks=row_blocks,
        items_per_head=items_per_head,
        items=q_shape[0] * q_shape[1] * items_per_head,
        blocks_per_item=blocks_per_item,
        heads_per_group=heads_per_group,
        q_len=q_shape[2],
        kv_len=k_shape[2],
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        CAUSAL=CAUSAL,
        LONGEST_FIRST=LONGEST_FIRST,
    )
