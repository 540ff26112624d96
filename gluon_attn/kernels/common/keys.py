"""Which keys a block of query rows sees: the one trip count of every role, and the mask."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from .thread_view import keep_first_columns


@aggregate
class Rows:
    """ROWS consecutive query rows from `first` on, against keys in blocks of BLOCK_N.

    Row first + i sees keys 0 ... visible(i) - 1. Causal is bottom-right aligned: the last query sees every key. Blocks
    are walked from the last one that any row sees to block 0, so that those with a masked key come first.
    """

    first: gl.tensor
    seen: gl.tensor  # how many keys the first row sees; zero or negative for none
    q_len: gl.tensor
    kv_len: gl.tensor
    ROWS: gl.constexpr
    BLOCK_N: gl.constexpr
    CAUSAL: gl.constexpr

    @jit
    def visible(self, i):
        """How many keys row first + i (a scalar or a tensor) sees; zero or negative for none."""
        if self.CAUSAL:
            return gl.minimum(self.kv_len, self.seen + i)
        else:
            return self.seen + i * 0

    @jit
    def part(self, offset, ROWS: gl.constexpr):
        """ROWS of these rows, from row first + offset on."""
        seen = self.visible(offset)
        return Rows(self.first + offset, seen, self.q_len, self.kv_len, ROWS, self.BLOCK_N, self.CAUSAL)

    @jit
    def blocks(self):
        """Blocks to walk: at least one, even if all of it is masked, as its statistics are then those of no key."""
        return (gl.maximum(self.visible(self.ROWS - 1), 1) + self.BLOCK_N - 1) // self.BLOCK_N

    @jit
    def unmasked_blocks(self):
        """How many of them, from block 0 on, every row sees entirely; may be 0."""
        return gl.maximum(self.seen, 0) // self.BLOCK_N

    @jit
    def masked_blocks(self):
        """How many of them, from the last one on, hold a key that some row does not see; may be 0."""
        return self.blocks() - self.unmasked_blocks()

    @jit
    def mask(self, scores, block, FIRST_COLUMN: gl.constexpr = 0):
        """Scores of key block `block`, -inf where a row does not see a key: [ROWS, BLOCK_N], or some of the columns
        from FIRST_COLUMN on."""
        # Not visible(i): only rows past the last query would see less by it, and nobody stores those.
        columns = self.seen - (block * self.BLOCK_N + FIRST_COLUMN)
        return keep_first_columns(scores, columns, float("-inf"), DIAGONAL=self.CAUSAL)
