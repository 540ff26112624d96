"""The role that transposes V, for fp8.

Hopper multiplies 8-bit operands only if both run along the summed dimension in memory, the keys; V as users have it
runs along the head dim.
"""

from gluon_attn.compat import constexpr_function, gl, jit

from .work import first_work


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
def transpose(wires, schedule, operands):
    """Takes every block of V from `loaded_values` to `values`."""
    BLOCK_N: gl.constexpr = operands.v.block_shape[2]
    D: gl.constexpr = operands.v.block_shape[3]
    LAYOUT: gl.constexpr = values_layout(BLOCK_N, D, gl.num_warps(), operands.v.layout.cga_layout)
    loaded_values, values = wires.loaded_values.consumer(), wires.values.producer()

    work = first_work(schedule)
    while work.is_left():
        rows = schedule.rows(work.tile())
        for _ in range(rows.blocks()):
            loaded, loaded_values = loaded_values.acquire()
            v = loaded.view([BLOCK_N, D]).load(LAYOUT)
            loaded.release_accessed()
            v = v.reshape([BLOCK_N // 16, 2, 4, 2, D]).permute((4, 0, 2, 1, 3)).reshape([D, BLOCK_N])
            transposed, values = values.acquire()
            transposed.part(0).store(v)
            transposed.publish()
        work = work.next()
