"""The transpose role, in fp8: a warpgroup that turns each block of V so that the tensor cores can read it."""

from gluon_attn.runtime.compat import gl, jit

from ..transpose.kernel import transposed
from .work import first_work


@jit
def transpose(wires, order, operands):
    """Takes every block of V from `loaded_values` to `values`."""
    BLOCK_N: gl.constexpr = operands.v.block_shape[-2]
    D: gl.constexpr = operands.v.block_shape[-1]
    PIECES: gl.constexpr = wires.values.PARTS
    gl.static_assert(PIECES == 1, "in pieces, V is transposed by a kernel of its own: two tiles take registers for one")
    loaded_values, values = wires.loaded_values.consumer(), wires.values.producer()

    work = first_work(order)
    while work.is_left():
        for _ in range(work.rows().key_range().steps()):
            loaded, loaded_values = loaded_values.acquire()
            v = transposed(loaded, BLOCK_N, D, operands.v.layout.cga_layout)
            loaded.release_accessed()
            slot, values = values.acquire()
            slot.part(0).store(v)
            slot.publish()
        work = work.next()
