"""The reduce role: one warp that adds each block of dQ to what other programs have added in global memory."""

from channels import tma
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from .operands import dq_coords
from .work import first_work


@jit
def reduce(wires, order, operands):
    """If DETERMINISTIC, in the order of the keys: who adds to a row block waits until as many have as have keys before
    its own. Each of them is a program of a lower number, and so has begun. It walks the row blocks in the same order,
    and adds to all that this program has."""
    ROWS: gl.constexpr = operands.dq.block_shape[2]
    gdc_wait()  # until the kernel before has set dQ, and the numbers of who has added, to zero
    dqs = wires.dqs.consumer()
    work = first_work(order)
    while work.is_left():
        keys = work.keys()
        walked = keys.queries()
        for member in range(order.group):
            head = keys.kv_head * order.group + member
            for step in range(walked.steps()):
                block = walked.block(step)
                dq, dqs = dqs.acquire()
                if operands.added[0] is not None:
                    added = operands.added[0] + (keys.batch * order.kv_heads * order.group + head) * walked.end + block
                    gl.atomic_poll(added, keys.first // keys.KEYS, sem="acquire")
                tma.add(operands.dq, dq_coords(keys.batch, head, block, ROWS), dq.part(0))
                tma.wait_stores_read()
                dq.release()
                if operands.added[0] is not None:
                    tma.wait_stores_done()
                    gl.atomic_add(added, 1, sem="release")
        work = work.next()
