"""Programs that claim key blocks, as those of the Hopper backward do: two roles, of which one claims."""

from channels import close_all, init_all
from channels.compat import gl, jit
from gluon_attn.kernels.hopper.backward.wires import alloc_claims
from gluon_attn.kernels.hopper.backward.work import first_work, order_of


@jit
def claim(claims, order):
    work = first_work(order, claims, CLAIMS=True)
    while work.is_left():
        work = work.next()


@jit
def note(claims, order, visits, items, places, STRIDES: gl.constexpr):
    work, step = first_work(order, claims, CLAIMS=False), 0
    while work.is_left():
        keys = work.keys()
        at = keys.batch * STRIDES[0] + keys.kv_head * STRIDES[1] + keys.first // keys.KEYS
        knows_head = keys.head(1) == order.group * keys.kv_head + 1
        right = knows_head & (keys.first % order.KEYS == 0)
        if order.records[0] is None:
            right = right & (keys.sequence.k_len == order.k_len) & (keys.sequence.q_len == order.q_len)
        gl.atomic_add(visits + at, gl.where(right, 1, -1))
        gl.store(items + at, work.item)
        if places is not None:
            gl.store(places + at, 1000 * gl.program_id(0) + step)
        work, step = work.next(), step + 1


@jit(do_not_specialize=["blocks_per_item", "last_heads", "heads_at_once"])
def note_claims(
    visits,
    items,
    places,
    claimed,
    records_ptr,
    q_desc,
    k_desc,
    blocks_per_item,
    last_heads,
    heads_at_once,
    MASK: gl.constexpr,
    ROTATED: gl.constexpr,
    STRIDES: gl.constexpr,
):
    """At STRIDES[0] * batch + STRIDES[1] * KV head + key block: how often it was visited, by one that knows its lengths
    and query heads; as which item; and, if places is not None, 1000 * the program + how many it has visited before."""
    none = gl.to_tensor(0)
    aux = (none,) * 4
    order = order_of(
        q_desc,
        k_desc,
        blocks_per_item,
        last_heads,
        heads_at_once,
        none,
        none,
        aux,
        (records_ptr,),
        claimed,
        MASK,
        False,
        ROTATED,
        None,
    )
    claims = alloc_claims(CONSUMERS=1)
    init_all((claims,))
    notes = (claims, order, visits, items, places, STRIDES)
    gl.warp_specialize([(note, notes), (claim, (claims, order))], [1], [24])
    close_all((claims,))
