"""V transposed, for fp8, by a kernel of its own before attention; and the tile of it that a role of attention uses too.

Hopper multiplies 8-bit operands only if both run along the summed dimension in memory, the keys; V as users have it
runs along the head dim. A role transposes each block as often as it is used; the kernel once, but through memory.
"""

from channels import SharedMemoryChannel, close_all, init_all, tma
from gluon_attn.runtime.compat import constexpr_function, gdc_launch_dependents, gl, jit

from ...common.packed import sequence_of_keys
from ...common.pieces import from_column
from ...common.sequence import RowBlock, key_coords


@constexpr_function
def values_layout(block_n, head_dim, num_warps, cga_layout):
    """In which V [BLOCK_N, D] is loaded.

    Key 16 a + 8 b + 2 t + e is to be column 16 a + 4 t + 2 b + e, where P has it (see packing.py). A thread has keys of
    one a and t, four neighbouring columns, for 16 neighbouring elements of the head dim: it reads 16 bytes and writes
    four at a time. The threads of a warp write whole rows of the transposed tile.
    """
    columns = [[0, 1 << i] for i in range(head_dim.bit_length() - 1)]
    threads = [[2, 0], [4, 0]] + [[key, 0] for key in (16, 32, 64) if key < block_n]
    others = columns[4:]
    lanes, others = (threads + others)[:5], others[5 - len(threads) :]
    warps = num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=columns[:4] + [[1, 0], [8, 0]] + others[warps:],
        lane_bases=lanes,
        warp_bases=others[:warps],
        block_bases=[[0, 0] for _ in cga_layout],
        shape=[block_n, head_dim],
    )


@jit
def transposed(slot, BLOCK_N: gl.constexpr, D: gl.constexpr, cga_layout: gl.constexpr):
    """The V in a slot, [BLOCK_N, D], as [D, BLOCK_N] in registers, its columns where P has them."""
    v = slot.view([BLOCK_N, D]).load(values_layout(BLOCK_N, D, gl.num_warps(), cga_layout))
    return v.reshape([BLOCK_N // 16, 2, 4, 2, D]).permute((4, 0, 2, 1, 3)).reshape([D, BLOCK_N])


@jit
def transpose_values(
    v_desc,  # (B, Hkv, Sk, Dv), blocks [1, 1, BLOCK_N, D]
    out_desc,  # (B, Hkv, Dv, Sk rounded up to 16), blocks [1, 1, D, BLOCK_N]
    cu_k_ptr,  # (sequences + 1,) int32, of packed sequences: out_desc is (1, Hkv, Dv, K), see `padded_keys`; or None
    used_k_ptr,  # (sequences,) int32: how many keys of each count; None: all
    PIECES: gl.constexpr,  # blocks of D columns side by side
):
    """The kernel: one program for each block of keys of each head."""
    gdc_launch_dependents()  # attention begins where this leaves room, and waits only before it loads V
    BLOCK_N: gl.constexpr = v_desc.block_shape[-2]
    D: gl.constexpr = v_desc.block_shape[-1]
    loaded = SharedMemoryChannel.alloc(v_desc, SLOTS=1, CONSUMERS=1)
    out = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    init_all((loaded,))

    if cu_k_ptr is None:
        blocks = (v_desc.shape[2] + BLOCK_N - 1) // BLOCK_N
        key = gl.program_id(0) % blocks * BLOCK_N
        head = gl.program_id(0) // blocks % v_desc.shape[1]
        batch = gl.program_id(0) // blocks // v_desc.shape[1]
        coords = [batch, head, key, 0]
    else:
        blocks = out_desc.shape[3] // BLOCK_N
        sequences = blocks - v_desc.shape[2] // BLOCK_N
        block, head, batch = gl.program_id(0) % blocks, gl.program_id(0) // blocks, 0
        sequence, key = sequence_of_keys(cu_k_ptr, used_k_ptr, v_desc.shape[2], sequences, block, BLOCK_N)
        coords = key_coords(RowBlock(batch, head, key, sequence), head, key)
        key = block * BLOCK_N
    empty, filled = loaded.producer(), loaded.consumer()
    for piece in gl.static_range(PIECES):
        column = piece * D
        slot, empty = empty.acquire()
        tma.load(slot, v_desc, from_column(coords, column))
        slot, filled = filled.acquire()
        v = transposed(slot, BLOCK_N, D, v_desc.layout.cga_layout)
        if piece + 1 < PIECES:  # the last one is never released
            slot.release_accessed()
        out.reshape([D, BLOCK_N]).store(v)
        tma.store_own(out_desc, [batch, head, column, key], out)
        tma.wait_stores_read()
    close_all((loaded,))
