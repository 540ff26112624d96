"""The reduce role: one warp that adds each block of dQ to what other programs have added in global memory."""

from channels import SharedMemoryConsumer, tma
from gluon_attn.runtime.compat import aggregate, atomic_load, atomic_poll, gdc_wait, gl, jit

from .finish import tell_done
from .operands import bias_coords, dq_coords, first_tile, in_workspaces
from .work import first_work

BEGUN = gl.constexpr(-1)  # who is first to add to a row block has begun, and is not done

# A key block with at most so many steps, those of all query heads of its group, tells of each addition at once, if a
# step has 128 rows. So D=64 causal at 512 has 0.96 of the rate without an order on an H200, and 0.90 without. From 4096
# on, an H100 would be slower so.
FEW_STEPS = gl.constexpr(16)


@aggregate
class Sums:
    """The sums of dQ, as this role adds to them. Whoever is first to add to a row block stores instead, so that nobody
    has to set it to zero."""

    dqs: SharedMemoryConsumer
    added: gl.tensor  # pointer: how many have added to the row block before; or at least one, see the functions
    number: gl.tensor  # what to write there when its addition is done; 0: nothing

    @jit
    def tell(self):
        gl.atomic_xchg(self.added, self.number, sem="release")

    @jit
    def told(self):
        """These with nothing left to tell: it waits until the last addition is done, and tells of it. To be called
        before this role waits for other programs, as they may wait for that addition."""
        if self.number > 0:
            tma.wait_stores_done()
            self.tell()
        return Sums(self.dqs, self.added, gl.to_tensor(0))


@jit
def store_or_add(dq, coords, operands, is_first, part):
    """Start it for a slot of dQ, that is all of a row block, or a part of it."""
    ROWS: gl.constexpr = operands.dq.block_shape[-2]
    coords = [coords[0], coords[1], coords[2] + part * ROWS, coords[3]]
    if is_first:
        tma.store(operands.dq, coords, dq.part(0))
    else:
        tma.add(operands.dq, coords, dq.part(0))


@jit
def add_dbias(dqs, operands, coords):
    """Add, or store, what a step has for the gradient of a bias of each row, if that is computed: it comes before dQ,
    through the same slots. coords: of its first tile. What a tile has beyond the tensor goes nowhere. Returns the next
    end."""
    desc = operands.bias[1]
    if desc is not None:
        ROWS: gl.constexpr = desc.block_shape[2]
        for i in gl.static_range(operands.q.block_shape[-2] // ROWS):
            slot, dqs = dqs.acquire()
            tile = first_tile(slot.part(0), desc)
            of_tile = [coords[0], coords[1], coords[2] + i * ROWS, coords[3]]
            if operands.SUMS_DBIAS:
                tma.add(desc, of_tile, tile)
            else:
                tma.store(desc, of_tile, tile)
            tma.wait_stores_read()
            slot.release()
    return dqs


@jit
def add_in_any_order(sums, added, operands, coords, dbias_coords, PARTS: gl.constexpr):
    """Who comes first is first; the others wait until it has stored. It is asked before dQ is there, so that asking
    takes no time. But not before the gradient role is sure to make it: see `collect`."""
    before = gl.atomic_cas(added, 0, BEGUN, sem="acquire")
    sums = Sums(add_dbias(sums.dqs, operands, dbias_coords), added, gl.to_tensor(1))
    for part in gl.static_range(PARTS):
        dq, dqs = sums.dqs.acquire()
        if part == 0:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
            if before == BEGUN:
                atomic_poll(added, sums.number, sem="acquire")
        store_or_add(dq, coords, operands, before == 0, part)
        tma.wait_stores_read()
        dq.release()
        sums = Sums(dqs, sums.added, sums.number)
    if before == 0:
        tma.wait_stores_done()
        sums.tell()
    return sums


@jit
def add_in_order(sums, added, number, at_once, operands, coords, dbias_coords, PARTS: gl.constexpr):
    """In the order of the keys: wait until as many have added as have keys before these and see the row block. Those
    keys come before in the order of work, and so are done, or are those of a program that runs; and the first that are
    not done wait for nobody. In which order a program walks its row blocks only matters for how long others wait: see
    `QueryRange`.

    That an addition is done is told after the next one of the key block has begun: to wait for it would hold up the
    gradient role. But it is told before the next one waits; and, with at_once, at once.
    """
    before = atomic_load(added, sem="acquire")
    sums = Sums(add_dbias(sums.dqs, operands, dbias_coords), sums.added, sums.number)
    for part in gl.static_range(PARTS):
        dq, dqs = sums.dqs.acquire()
        sums = Sums(dqs, sums.added, sums.number)
        if part == 0:
            if before != number:
                before = atomic_load(added, sem="acquire")
            if before != number:
                sums = sums.told()
                atomic_poll(added, number, sem="acquire")
        store_or_add(dq, coords, operands, number == 0, part)
        if part == 0:  # noqa: SIM102 - as above
            if sums.number > 0:
                tma.wait_stores_but_newest_done()
                sums.tell()
        tma.wait_stores_read()
        dq.release()
        sums = Sums(sums.dqs, added, number + 1)
    if at_once is not None:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
        if at_once:
            sums = sums.told()
    return sums


@jit
def reduce(wires, order, operands, DETERMINISTIC: gl.constexpr):
    """Adds dQ of every step of the gradient role to its row block's sums."""
    # Until the kernel before has set `added` to zero. And, whatever there is to do, for those who wait for this kernel,
    # but not for the one before.
    gdc_wait()
    if operands.HAS_DK:
        reduce_steps(wires, order, operands, DETERMINISTIC)


@jit
def reduce_steps(wires, order, operands, DETERMINISTIC: gl.constexpr):
    PARTS: gl.constexpr = wires.CONFIG.dq_parts
    ROWS: gl.constexpr = operands.dq.block_shape[-2] * PARTS
    sums = Sums(wires.dqs.consumer(), operands.added, gl.to_tensor(0))
    work = first_work(order, wires.claims, CLAIMS=False)
    while work.is_left():
        keys = work.keys()
        walked = keys.query_range()
        # If steps are few, others soon stand in line for each. Those of 64 rows take a shorter time than an addition.
        at_once = walked.steps() <= FEW_STEPS if keys.BLOCK_M >= 128 else None
        for step in range(walked.steps()):
            member, block = walked.visit(step)
            head = keys.head(member)
            batch, sums_block = in_workspaces(keys, block)
            coords = dq_coords(batch, head, sums_block, ROWS)
            if keys.sequence.PACKED:
                row_blocks = operands.lse.shape[3] // keys.BLOCK_M
            else:
                row_blocks = keys.row_blocks()
            added = operands.added + (batch * order.kv_heads * order.group + head) * row_blocks + sums_block
            dbias_coords = ()
            if operands.bias[1] is not None:
                dbias_coords = bias_coords(operands.bias[1], batch, head, block * keys.BLOCK_M, keys.first)
            if DETERMINISTIC:
                number = keys.key_blocks_before(block)
                sums = add_in_order(sums, added, number, at_once, operands, coords, dbias_coords, PARTS)
            else:
                if order.SHARES:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
                    if step == 0:
                        sums.dqs.wait()
                sums = add_in_any_order(sums, added, operands, coords, dbias_coords, PARTS)
        if DETERMINISTIC:
            sums = sums.told()
        if len(operands.finished) > 0:
            tell_done(operands, order, keys)
        work = work.next()
