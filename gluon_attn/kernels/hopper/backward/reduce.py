"""The reduce role: one warp that adds each block of dQ to what other programs have added in global memory."""

from channels import tma
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from .operands import dq_coords
from .work import first_work

CLAIMED = gl.constexpr(-1)  # who is first to add to a row block's dQ has begun, and is not done


@jit
def reduce(wires, order, operands, DETERMINISTIC: gl.constexpr):
    """Who is first to add to a row block's dQ stores instead, so that nobody has to set it to zero; the others wait for
    that. Who comes first is first.

    If DETERMINISTIC, in the order of the keys: who adds to a row block waits until as many have as have keys before its
    own. Each of them is a program of a lower number, and so has begun. It walks the row blocks in the same order, and
    adds to all that this program has.
    """
    ROWS: gl.constexpr = operands.dq.block_shape[2]
    gdc_wait()  # until the kernel before has set `added` to zero
    dqs = wires.dqs.consumer()
    work = first_work(order)
    while work.is_left():
        keys = work.keys()
        walked = keys.queries()
        for step in range(walked.steps() * order.group):
            head, block = keys.kv_head * order.group + step % order.group, walked.block(step // order.group)
            added = operands.added + (keys.batch * order.kv_heads * order.group + head) * walked.end + block
            # Before dQ is there, so that it takes no time.
            if DETERMINISTIC:
                turn = keys.first // keys.KEYS
                before = gl.atomic_load(added, sem="acquire")
                is_first = turn == 0
            else:
                turn = gl.to_tensor(1)
                before = gl.atomic_cas(added, 0, CLAIMED, sem="acquire")
                is_first = before == 0
            dq, dqs = dqs.acquire()
            coords = dq_coords(keys.batch, head, block, ROWS)
            if is_first:
                tma.store(operands.dq, coords, dq.part(0))
            else:
                if before != turn:
                    gl.atomic_poll(added, turn, sem="acquire")
                tma.add(operands.dq, coords, dq.part(0))
            tma.wait_stores_read()
            dq.release()
            if DETERMINISTIC | is_first:
                tma.wait_stores_done()
                gl.atomic_xchg(added, gl.where(is_first, 1, turn + 1), sem="release")
        work = work.next()
