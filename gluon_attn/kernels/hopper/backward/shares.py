"""Key blocks that programs share, so that all of them end together: the last ones, where their number does not go into
that of the processors; or all, where there are fewer than processors.

`shared` key blocks of `shared_parts` shares each are divided evenly into as many parts, of `shared` shares in a row.
Programs claim these as they claim key blocks. So a part ends one key block, or goes on with it, and perhaps begins the
next. The beginning of the next is computed first. Whoever ends a key block adds up what the others have computed of its
dK and dV, always in the same order. It waits for parts of a lower number only. These have been claimed by programs that
run, and that hand in before they wait themselves.

While the gradient role waits so, the reduce role may be at the program's next part. There it must not yet say that it
is first to add to some rows. Others would wait for that addition, perhaps the part that the gradient role waits for. So
it waits for its part's first dQ before it asks.
"""

from gluon_attn.runtime.compat import aggregate, atomic_poll, constexpr_function, gl, jit

from ..inline_asm import plus


@aggregate
class Share:
    """What a part has of the shared key blocks. int32 scalars."""

    block: gl.tensor  # of the shared ones: the one that the part begins with
    first: gl.tensor  # its shares of that block: from first to end
    end: gl.tensor
    of_next: gl.tensor  # of the next block: so many shares from the first on


@jit
def share_of(part, order):
    at = part * order.shared
    shares = gl.maximum(order.shared_parts, 1)
    first = at % shares
    end = first + order.shared
    return Share(at // shares, first, gl.minimum(end, shares), gl.maximum(end - shares, 0))


@jit
def place_of(tensor, sums, part, number, PIECES: gl.constexpr, D: gl.constexpr):
    """Pointers to where dK or dV of a part is handed in, in the tensor's layout: piece `number` of PIECES of D
    columns."""
    KEYS: gl.constexpr = tensor.shape[0]
    COLUMNS: gl.constexpr = tensor.shape[1]
    LAYOUT: gl.constexpr = tensor.type.layout
    row = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    return sums + (part * PIECES + number) * (KEYS * D) + row * COLUMNS + column


@constexpr_function
def pieces_handed_in(operands):
    """Of as many columns as one of dK has: those of dK, and of dV."""
    return operands.PIECES + operands.v.block_shape[-1] // operands.k.block_shape[-1]


@constexpr_function
def told(dv):
    """What a program tells when it has handed in. A launch without dV tells other than the one before, of dV alone."""
    return 1 if len(dv) else 2


@jit
def hand_in(dk, dv, part, operands):
    """What a program does with the part's dK and dV [KEYS, D] of a key block that another one ends. Two launches that
    have one of them each hand in at places of their own, as if each had both."""
    sums, done = operands.handed_in
    PIECES: gl.constexpr = pieces_handed_in(operands)
    D: gl.constexpr = operands.k.block_shape[-1]
    for i in gl.static_range(len(dk)):
        gl.store(place_of(dk[i], sums, part, i, PIECES, D), dk[i])
    for i in gl.static_range(len(dv)):
        gl.store(place_of(dv[i], sums, part, operands.PIECES, PIECES, D), dv[i])
    gl.barrier()  # one thread tells of what all have written
    gl.atomic_xchg(done + part, told(dv), sem="release")


@jit
def collect(dk, dv, part, order, operands):
    """dK and dV [KEYS, D] of the key block that this part ends, given those of its own shares."""
    sums, done = operands.handed_in
    PIECES: gl.constexpr = pieces_handed_in(operands)
    D: gl.constexpr = operands.k.block_shape[-1]
    first = share_of(part, order).block * order.shared_parts // order.shared  # the part that begins the key block
    for other in range(first, part):
        atomic_poll(done + other, told(dv), sem="acquire")
        gl.barrier()  # one thread has waited for all
        added = dk[:0]
        for i in gl.static_range(len(dk)):
            added += (plus(dk[i], gl.load(place_of(dk[i], sums, other, i, PIECES, D))),)
        dk = added
        added = dv[:0]
        for i in gl.static_range(len(dv)):
            added += (plus(dv[i], gl.load(place_of(dv[i], sums, other, operands.PIECES, PIECES, D))),)
        dv = added
    return dk, dv
