"""A small kernel with all that the attention kernels synchronise with, right, or with one bug, named by BUG.

out = A B, tile after tile along the inner dimension: one role loads by TMA into a ring that wraps around, one issues
products into tensor memory, one takes the sum out. One CTA, or a pair that multiplies together.
"""

from typing import Any

import torch

from proving.capture import capture
from proving.equivalence import Equivalence, Operand, leave_barriers_valid
from proving.launch import Launch
from tests.compat import (
    TensorDescriptor,
    TensorMemoryLayout,
    allocate_tensor_memory,
    cluster,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

SLOTS = gl.constexpr(2)
STEPS = 4
K_TILE = 64


@jit
def load(a_desc, b_desc, a, b, filled, freed, steps, BUG: gl.constexpr):
    K: gl.constexpr = a_desc.block_shape[1]
    BYTES: gl.constexpr = a.index(0).nbytes_per_cta + b.index(0).nbytes_per_cta
    for i in range(steps):
        at = i % SLOTS
        if BUG != "loads into a slot in use":
            mbarrier.wait(freed.index(at), (i // SLOTS + 1) & 1)
        mbarrier.expect(filled.index(at), BYTES // 2 if BUG == "expects half of the bytes" else BYTES)
        tma.async_load(a_desc, [0, i * K], filled.index(at), a.index(at))
        tma.async_load(b_desc, [i * K, 0], filled.index(at), b.index(at))
    if BUG != "invalidates while the tensor cores may arrive":
        for i in range(steps, steps + SLOTS):
            mbarrier.wait(freed.index(i % SLOTS), (i // SLOTS + 1) & 1)


@jit
def multiply(a, b, acc, filled, freed, done, steps, BUG: gl.constexpr):
    for i in range(steps):
        at = i % SLOTS
        if BUG != "multiplies what is not loaded":
            mbarrier.wait(filled.index(at), i // SLOTS & 1)
        tcgen05_mma(a.index(at), b.index(at), acc, use_acc=i != 0)
        if BUG == "frees a slot before the product is done":
            mbarrier.arrive(freed.index(at))
        elif BUG != "never frees a slot":
            tcgen05_commit(freed.index(at))
    if BUG != "never says that it is done":
        tcgen05_commit(done)


@jit
def take_out(acc, done, out_ptr, BUG: gl.constexpr):
    if BUG != "takes out what is not done":
        mbarrier.wait(done, 0)
    value = acc.load()
    LAYOUT: gl.constexpr = value.type.layout
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    if BUG == "transposes the output":
        gl.store(out_ptr + columns[None, :] * value.shape[0] + rows[:, None], value)
    else:
        gl.store(out_ptr + rows[:, None] * value.shape[1] + columns[None, :], value)


@jit
def product(a_desc, b_desc, out_ptr, steps, CGA: gl.constexpr, BUG: gl.constexpr):
    M: gl.constexpr = a_desc.block_shape[0]
    N: gl.constexpr = b_desc.block_shape[1]
    PAIR: gl.constexpr = len(CGA) > 0
    a = gl.allocate_shared_memory(a_desc.dtype, [SLOTS] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [SLOTS] + b_desc.block_shape, b_desc.layout)
    # A pair takes all 512 columns: only so are the two CTAs' accumulators sure to be in the same place, and the
    # verifier asks for that.
    TILES: gl.constexpr = 512 // N if PAIR else 1
    LAYOUT: gl.constexpr = TensorMemoryLayout((128, N), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    acc = allocate_tensor_memory(gl.float32, [TILES, M, N], LAYOUT).index(0)
    filled = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=PAIR and BUG != "does not wait for the peer's half")
    freed = mbarrier.allocate_mbarrier(batch=SLOTS)
    done = mbarrier.allocate_mbarrier()
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=2 if BUG == "counts an arrival too many" else 1)
        mbarrier.init(freed.index(i), count=1)
    mbarrier.init(done, count=1)
    if PAIR and BUG != "starts before the peer's barriers are there":
        cluster.barrier()
    else:
        gl.barrier()
    gl.warp_specialize(
        [
            (take_out, (acc, done, out_ptr, BUG)),
            (multiply, (a, b, acc, filled, freed, done, steps, BUG)),
            (load, (a_desc, b_desc, a, b, filled, freed, steps, BUG)),
        ],
        [1, 1],
        [24, 24],
    )
    if PAIR and BUG != "ends while the peer may arrive":
        cluster.barrier()
    else:
        gl.barrier()
    for i in gl.static_range(SLOTS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))
    mbarrier.invalidate(done)


def shapes(num_ctas: int) -> tuple[int, int, int]:
    """(rows, columns, inner) of the problem."""
    return 128 * num_ctas, 64 * num_ctas, K_TILE * STEPS


def call(num_ctas: int = 1, *, bug: str = "") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arguments, compile-time parameters and options) of a launch of `product`."""
    m, n, k = shapes(num_ctas)
    a, b = torch.ones(m, k, dtype=torch.bfloat16), torch.ones(k, n, dtype=torch.bfloat16)

    def descriptor(t: torch.Tensor, block: list[int], cga: list[list[int]]) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16, cga_layout=cga)
        return TensorDescriptor.from_tensor(t, block, layout)

    pair = num_ctas == 2
    arguments = (
        descriptor(a, [m, K_TILE], [[1, 0]] if pair else []),
        descriptor(b, [K_TILE, n], [[0, 1]] if pair else []),
        torch.full((m, n), float("nan")),
        STEPS,
    )
    return arguments, {"CGA": ((1, 0),) if pair else (), "BUG": bug, "num_ctas": num_ctas}


def launch(num_ctas: int = 1, *, bug: str = "") -> Launch:
    arguments, options = call(num_ctas, bug=bug)
    return capture(product, (1,), *arguments, **options)


def equivalence(num_ctas: int = 1) -> Equivalence:
    """What `product` computes."""
    m, n, k = shapes(num_ctas)
    return Equivalence(
        reference="def reference(a_desc, b_desc):\n    return a_desc.float() @ b_desc.float()\n",
        inputs=(
            Operand(name="a_desc", dtype="bfloat16", shape=(m, k)),
            Operand(name="b_desc", dtype="bfloat16", shape=(k, n)),
        ),
        outputs=(Operand(name="out_ptr", dtype="float32", shape=(m, n)),),
        rewrites=(leave_barriers_valid,),
    )
