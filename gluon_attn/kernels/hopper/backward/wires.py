"""The wires of the Hopper backward: its channels, by what flows through them."""

from channels import SharedMemoryChannel
from gluon_attn.runtime.compat import aggregate, gl, jit

from .finish import COLUMNS, ROWS, SUMS_SLOTS, SWIZZLE, TILES


@aggregate
class Wires:
    """Each channel's contract: who fills it -> who reads it, its slots, who frees them.

    A launch that computes dV alone needs no V and delta, and no dQ and dS.

    keys_values: load -> gradient; one slot of K and V [KEYS, D] each; freed when all rows have been walked.
    queries: load -> gradient; QUERY_SLOTS slots of Q [BLOCK_M, D] and LSE [BLOCK_M], and with a bias between the two
             its tile [BLOCK_M, KEYS], or its row [KEYS]; freed when what they add to dK is done.
    douts:   load -> gradient; DOUT_SLOTS slots of dO [BLOCK_M, D] and delta [BLOCK_M]; freed with Q, or at D=256 when
             what they add to dV is done; by a launch without dV when dP is, and by one of dV alone a step later.
    dqs:     gradient -> reduce; DQ_SLOTS slots of a row block's dQ, or of a part of its columns; freed when TMA has
             read it. Before dQ comes the gradient of a bias of each row, in tiles that a slot has room for. Between two
             key blocks the gradient role stages dK and dV there.
    ds:      no channel but memory: [DS_SLOTS, KEYS, BLOCK_M], in which the gradient role's two warpgroups exchange dS,
             as dQ sums over the keys of both.
    p:       likewise of P, one tile, if CONFIG.exchanges_p.
    claims:  load -> gradient, reduce; one slot of an int32, which item comes next, or one beyond the last; freed when
             both have read it.
    sums:    finish -> finish; one channel, but none without that role: SUMS_SLOTS slots of the sums of a piece of dQ,
             [32, 32] fp32; freed when they have been converted.
    dq_tiles: no channel but memory, of one, or none without that role: [TILES, ROWS, COLUMNS], pieces of dQ on their
             way to memory.
    """

    keys_values: SharedMemoryChannel
    queries: SharedMemoryChannel
    douts: SharedMemoryChannel
    dqs: SharedMemoryChannel
    ds: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    claims: SharedMemoryChannel
    sums: gl.tuple  # of one SharedMemoryChannel, or none
    dq_tiles: gl.tuple  # of one, or none
    CONFIG: gl.constexpr  # a HopperBackward

    @jit
    def channels(self):
        return (self.keys_values, self.queries, self.douts, self.dqs, self.claims) + self.sums


@jit
def alloc_claims(CONSUMERS: gl.constexpr):
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    item = gl.allocate_shared_memory(gl.int32, [1, 1], ONE)
    return SharedMemoryChannel.over(item, SLOTS=1, CONSUMERS=CONSUMERS)


@jit
def alloc_dq_tiles(desc):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, desc.dtype.primitive_bitwidth, 2)
    return gl.allocate_shared_memory(desc.dtype, [TILES, ROWS, COLUMNS], LAYOUT)


@jit
def alloc_wires(operands, order, CONFIG: gl.constexpr):
    KEYS: gl.constexpr = operands.k.block_shape[-2]
    BLOCK_M: gl.constexpr = operands.q.block_shape[-2]
    DTYPE: gl.constexpr = operands.k.dtype
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], DTYPE)
    READERS: gl.constexpr = 2 if operands.HAS_DK else 1  # without dK there is nothing to reduce
    return Wires(
        keys_values=SharedMemoryChannel.alloc(operands.of_keys_values(), SLOTS=1, CONSUMERS=1),
        queries=SharedMemoryChannel.alloc(operands.of_queries(), SLOTS=CONFIG.query_slots, CONSUMERS=1),
        douts=SharedMemoryChannel.alloc(operands.of_douts(), SLOTS=CONFIG.dout_slots, CONSUMERS=1),
        dqs=SharedMemoryChannel.alloc(operands.dq, SLOTS=CONFIG.dq_slots, CONSUMERS=1),
        ds=gl.allocate_shared_memory(DTYPE, [CONFIG.ds_tiles, KEYS, BLOCK_M], DS),
        p=gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK_M], DS),
        claims=alloc_claims(CONSUMERS=READERS),
        sums=()
        if len(operands.finished) == 0
        else (SharedMemoryChannel.alloc(operands.finished[0].sums, SLOTS=SUMS_SLOTS, CONSUMERS=1),),
        dq_tiles=() if len(operands.finished) == 0 else (alloc_dq_tiles(operands.finished[0].dq),),
        CONFIG=CONFIG,
    )
