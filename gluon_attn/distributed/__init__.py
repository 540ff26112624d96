"""Attention over a sequence that several cards share: ring attention and Ulysses, over torch.distributed.

    from gluon_attn.distributed import ring_attention, shard, unshard

Each rank holds its share of the sequence, as `shard` makes it, and gets its share of O, LSE and the gradients. The
sequence is cut into 2n chunks for n ranks; rank r has chunks r and 2n-1-r. Under a causal mask early rows see few keys
and late rows many, so that each rank has as much to compute as any other. Both functions take these shares.

- `ring_attention` passes K and V around while it computes, and merges what it finds by LSE. Any number of heads.
- `ulysses_attention` exchanges shares of the sequence for shares of the heads, before and after. It asks for as many KV
  heads as ranks, or a multiple. What a rank sends shrinks with the number of ranks; in the ring it does not.
- `ulysses_attention_varlen` is that of packed sequences, whose rows are cut into shares wherever they begin.

All ranks of the group call, with the same shapes and options: they cannot see each other's.
"""

from .ranks import shard, unshard
from .ring import ring_attention
from .ulysses import ulysses_attention, ulysses_attention_varlen

__all__ = ["ring_attention", "shard", "ulysses_attention", "ulysses_attention_varlen", "unshard"]
