"""The key blocks that a program computes, as each role walks them: in the same order, each for itself."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from ...common.queries import Keys
from ...common.sequence import Sequence


@aggregate
class Order:
    """What there is to do, one item after the other: the key blocks of a KV head, the first one first, which under a
    causal mask is the one that most queries see; then those of the next. int32 scalars."""

    q_len: gl.tensor
    k_len: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
    key_blocks: gl.tensor
    items: gl.tensor
    KEYS: gl.constexpr
    BLOCK_M: gl.constexpr
    MASK: gl.constexpr  # a Mask


@jit
def order_of(q_desc, k_desc, MASK: gl.constexpr):
    """From descriptors of (B, H, Sq, D) and (B, Hkv, Sk, D)."""
    KEYS: gl.constexpr = k_desc.block_shape[2]
    kv_heads = k_desc.shape[1]
    key_blocks = (k_desc.shape[2] + KEYS - 1) // KEYS
    return Order(
        q_len=q_desc.shape[2],
        k_len=k_desc.shape[2],
        kv_heads=kv_heads,
        group=q_desc.shape[1] // kv_heads,
        key_blocks=key_blocks,
        items=k_desc.shape[0] * kv_heads * key_blocks,
        KEYS=KEYS,
        BLOCK_M=q_desc.block_shape[2],
        MASK=MASK,
    )


@aggregate
class Work:
    """The item at hand. Immutable: `next()` returns the next, as many items on as there are programs."""

    item: gl.tensor
    order: Order

    @jit
    def is_left(self):
        return self.item < self.order.items

    @jit
    def keys(self):
        order = self.order
        head = self.item // order.key_blocks
        first = self.item % order.key_blocks * order.KEYS
        sequence = Sequence(gl.to_tensor(0), order.q_len, gl.to_tensor(0), order.k_len)
        batch, kv_head = head // order.kv_heads, head % order.kv_heads
        return Keys(batch, kv_head, first, sequence, order.KEYS, order.BLOCK_M, order.MASK)

    @jit
    def next(self):
        return Work(self.item + gl.num_programs(0), self.order)


@jit
def first_work(order):
    return Work(gl.program_id(0), order)
