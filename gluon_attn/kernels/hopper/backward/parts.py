"""Where there are fewer key blocks than processors: several programs share a key block, each for a part of its queries.

The program of the last part adds up what the others have computed of dK and dV, always in the same order. It waits for
programs of a lower number only, and so for such that have begun.
"""

from gluon_attn.runtime.compat import gdc_wait, gl, jit


@jit
def place_of(tensor, sums, number, of_dv: gl.constexpr, part, parts):
    """Pointers to where a part's dK or dV is, in the tensor's layout."""
    KEYS: gl.constexpr = tensor.shape[0]
    D: gl.constexpr = tensor.shape[1]
    LAYOUT: gl.constexpr = tensor.type.layout
    row = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    return sums + ((number * (parts - 1) + part) * 2 + of_dv) * (KEYS * D) + row * D + column


@jit
def hand_in(dk, dv, keys, number, parts):
    """What a part other than the last does with its dK and dV [KEYS, D] of key block `number`."""
    sums, done = parts
    gl.store(place_of(dk, sums, number, 0, keys.part, keys.parts), dk)
    gl.store(place_of(dv, sums, number, 1, keys.part, keys.parts), dv)
    gdc_wait()  # until `done` is 0: a part without row blocks has waited for nothing of the kernel before
    gl.barrier()  # one thread tells of what all have written
    gl.atomic_add(done + number, 1, sem="release")


@jit
def collect(dk, dv, keys, number, parts):
    """dK and dV [KEYS, D] of all parts, given those of the last."""
    sums, done = parts
    gdc_wait()  # as above
    gl.atomic_poll(done + number, keys.parts - 1, sem="acquire")
    gl.barrier()  # one thread has waited for all
    for part in range(keys.parts - 1):
        dk += gl.load(place_of(dk, sums, number, 0, part, keys.parts))
        dv += gl.load(place_of(dv, sums, number, 1, part, keys.parts))
    return dk, dv
