"""Loops that wait for others: around again, they find the same, unless somebody has written to global memory."""

from collections.abc import Iterator

from ..generate import Emitter
from ..ir.parse import Op
from ..ir.types import Tensor

LOOKS = ("tt.load", "tt.atomic_load", "tt.atomic_cas", "tt.atomic_rmw", "tt.atomic_poll")
# All but the writes depends on operands alone, and nobody else sees it. A write is seen at run time: the loop goes on.
REPEATABLE = {
    *LOOKS, "tt.store", "tt.atomic_store", "tt.addptr", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims",
    "tt.make_range", "tt.bitcast", "tt.int_to_ptr", "tt.ptr_to_int", "tt.get_program_id", "tt.get_num_programs",
    "scf.if", "scf.for", "scf.yield", "scf.condition", "ttg.barrier", "gpu.barrier", "ttg.warp_barrier",
    "ttng.cluster_barrier",
}  # fmt: skip
REPEATABLE_IN_ONE_CTA = {"tt.reduce", "tt.reduce.return", "ttg.convert_layout"}  # of several, these have others' parts


def inside(op: Op) -> Iterator[Op]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.ops:
                yield inner
                yield from inside(inner)


def may_wait(e: Emitter, loop: Op) -> bool:
    """Whether a round of the loop depends on nothing but its variables and global memory.

    In a cluster only if one CTA looks for all: what another one has found may be out of date. It waits for all, too, as
    the others wait for it at the barriers of each round.
    """
    alone = e.num_ctas == 1
    repeatable = REPEATABLE | REPEATABLE_IN_ONE_CTA if alone else REPEATABLE
    ops = list(inside(loop))
    looks = [op for op in ops if op.name in LOOKS]
    by_one = all(op.name != "tt.load" and not isinstance(op.operand_types[0], Tensor) for op in looks)
    if not looks or not (alone or by_one):
        return False
    return all(op.name in repeatable or op.name.startswith(("arith.", "math.")) for op in ops)
