"""Programs that claim key blocks, as those of the Hopper backward do: two roles, of which one claims."""

from channels import close_all, init_all
from channels.compat import gl, jit
from gluon_attn.kernels.hopper.backward.wires import alloc_claims
from gluon_attn.kernels.hopper.backward.work import first_work, order_of


@jit
def claim(claims, order, visits, items, STRIDES: gl.constexpr):
    work = first_work(order, claims, CLAIMS=True)
    while work.is_left():
        work = work.next()


@jit
def note(claims, order, visits, items, STRIDES: gl.constexpr):
    work = first_work(order, claims, CLAIMS=False)
    while work.is_left():
        keys = work.keys()
        at = keys.batch * STRIDES[0] + keys.kv_head * STRIDES[1] + keys.first // keys.KEYS
        gl.atomic_add(visits + at, 1)
        gl.store(items + at, work.item)
        work = work.next()


@jit(do_not_specialize=["last_heads", "heads_at_once"])
def note_claims(
    visits,
    items,
    claimed,
    records_ptr,
    q_desc,
    k_desc,
    last_heads,
    heads_at_once,
    MASK: gl.constexpr,
    ROTATED: gl.constexpr,
    STRIDES: gl.constexpr,
):
    """At STRIDES[0] * batch + STRIDES[1] * KV head + key block: how often it was claimed; and as which item."""
    none = gl.to_tensor(0)
    aux, one = (none,) * 4, none + 1
    order = order_of(
        q_desc,
        k_desc,
        one,
        last_heads,
        heads_at_once,
        none,
        none,
        aux,
        (records_ptr,),
        (claimed,),
        MASK,
        ROTATED,
        None,
    )
    claims = (alloc_claims(CONSUMERS=1),)
    init_all(claims)
    gl.warp_specialize(
        [(note, (claims, order, visits, items, STRIDES)), (claim, (claims, order, visits, items, STRIDES))], [1], [24]
    )
    close_all(claims)
