"""TMA: boxes, tails, fills, multicast, stores and reductions."""

from collections.abc import Callable

import pytest
import torch

import gluon_cpu
from tests.compat import (
    TensorDescriptor,
    cluster,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
)
from tests.gluon_cpu.layouts import MATRIX, MATRIX_COPIES, MATRIX_HALVES
from tests.gluon_cpu.support import (
    descriptor,
    load_matrix,
    load_tile,
    new_barrier,
    normal,
    poisoned,
    same,
    small_integers,
    store_matrix,
)


@jit
def load_box(desc, out_ptr, row, column):
    store_matrix(out_ptr, load_tile(desc, row, column).load(MATRIX))


def box(x: torch.Tensor, row: int, column: int, fill: float = 0.0) -> torch.Tensor:
    out = torch.full((32, 32), fill, dtype=torch.float32).to(x.dtype)
    for i in range(32):
        for j in range(32):
            if 0 <= row + i < x.shape[0] and 0 <= column + j < x.shape[1]:
                out[i, j] = x[row + i, column + j]
    return out


CORNERS = {"inside": (8, 4), "over the end": (30, 36), "before the start": (-5, -12), "outside": (100, 0)}


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS.keys())
def test_load_fills_what_is_out_of_bounds_with_zero(launch, corner):
    x, out = normal(50, 52), poisoned(32, 32)
    launch(load_box, (1,), descriptor(x, [32, 32]), out, *corner)
    same(out, box(x, *corner))


def test_load_fills_with_nan_if_asked(launch):
    x, out = normal(50, 52), poisoned(32, 32).fill_(1)
    launch(load_box, (1,), descriptor(x, [32, 32], padding="nan"), out, 30, -3)
    same(out, box(x, 30, -3, fill=float("nan")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_load_of_other_types_from_a_strided_tensor(launch, dtype):
    wide = normal(40, 96).to(dtype)
    x = wide[:, 16:80]
    out = poisoned(32, 32, dtype=dtype)
    launch(load_box, (1,), descriptor(x, [32, 32]), out, 16, 32)
    want = torch.zeros(32, 32, dtype=dtype)
    want[:24] = x[16:, 32:]
    same(out.float(), want.float())


@jit
def load_rank_5(desc, out_ptr):
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, desc.nbytes_per_cta)
    tma.async_load(desc, [1, 0, 2, 1, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, tile.reshape([32, 32]).load(MATRIX))


def test_rank_5(launch):
    x = normal(2, 2, 6, 9, 32)
    out = poisoned(4, 8, 32)
    launch(load_rank_5, (1,), descriptor(x, [1, 1, 4, 8, 32]), out)
    same(out, x[1, 0, 2:6, 1:9])


@jit
def store_box(desc, x_ptr, row, column):
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    tile.store(load_matrix(x_ptr, 32, 32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [row, column], tile)
    tma.store_wait(0)


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS.keys())
def test_store_is_clipped(launch, corner):
    x, out = normal(32, 32), torch.full((50, 52), 7.0)
    launch(store_box, (1,), descriptor(out, [32, 32]), x, *corner, outputs=[])
    want = torch.full((50, 52), 7.0)
    for i in range(32):
        for j in range(32):
            row, column = corner[0] + i, corner[1] + j
            if 0 <= row < 50 and 0 <= column < 52:
                want[row, column] = x[i, j]
    same(out, want)


@jit
def store_stream(desc, steps):
    """Two staging tiles: the tile of step i - 2 must have been read before step i writes it."""
    tiles = gl.allocate_shared_memory(gl.float32, [2] + desc.block_shape, desc.layout)
    for step in range(steps):
        tma.store_wait(1)
        tiles.index(step % 2).store(gl.full([32, 32], 1.0, gl.float32, MATRIX) * step)
        fence_async_shared()
        tma.async_store(desc, [step * 32, 0], tiles.index(step % 2))
    tma.store_wait(0)


def test_store_wait_for_all_but_the_newest(launch):
    out = poisoned(5 * 32, 32)
    launch(store_stream, (1,), descriptor(out, [32, 32]), 5)
    same(out, torch.arange(5.0).repeat_interleave(32)[:, None].expand(-1, 32).contiguous())


@jit
def store_then_read(desc, out_ptr, copy_ptr):
    """With read_only=False the writes are done, and visible, after the wait."""
    tile = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    tile.store(gl.full([32, 32], 5.0, gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], tile)
    tma.store_wait(0, read_only=False)
    store_matrix(copy_ptr, load_matrix(out_ptr, 32, 32, MATRIX) + 1.0)


def test_writes_of_a_store_can_be_waited_for(launch):
    out, copy = poisoned(32, 32), poisoned(32, 32)
    launch(store_then_read, (1,), descriptor(out, [32, 32]), out, copy)
    same(copy, torch.full((32, 32), 6.0))


@jit
def reduce_box(desc, x_ptr, OP: gl.constexpr):
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    tile.store(load_matrix(x_ptr, 32, 32, MATRIX))
    fence_async_shared()
    if OP == "add":
        tma.async_atomic_add(desc, [20, 16], tile)
    elif OP == "min":
        tma.async_atomic_min(desc, [20, 16], tile)
    elif OP == "max":
        tma.async_atomic_max(desc, [20, 16], tile)
    elif OP == "and":
        tma.async_atomic_and(desc, [20, 16], tile)
    elif OP == "or":
        tma.async_atomic_or(desc, [20, 16], tile)
    else:
        tma.async_atomic_xor(desc, [20, 16], tile)
    tma.store_wait(0)


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce_into_global_memory(launch, op):
    x = small_integers(32, 32, dtype=torch.int32, largest=1000)
    out = small_integers(40, 48, dtype=torch.int32, largest=1000, seed=1)
    want = out.clone()
    want[20:, 16:] = REDUCTIONS[op](want[20:, 16:], x[:20])
    launch(reduce_box, (1,), descriptor(out, [32, 32]), x, OP=op, outputs=[])
    same(out, want)


def test_programs_reduce_into_the_same_elements(launch):
    """Atomic: several writers of one element are no race. Integers, so that the order does not show."""
    x, out = small_integers(32, 32), torch.zeros(52, 48)
    launch(reduce_box, (6,), descriptor(out, [32, 32]), x, OP="add", outputs=[])
    same(out[20:, 16:], 6 * x)
    assert not out[:20].any()


@jit
def made_on_the_device(x_ptr, out_ptr, rows, columns, LAYOUT: gl.constexpr):
    desc = tma.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [32, 32], LAYOUT)
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, desc.nbytes_per_cta)
    tma.async_load(desc, [32, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, tile.load(MATRIX))


def test_descriptor_made_by_the_kernel(launch):
    x, out = normal(50, 52), poisoned(32, 32)
    launch(made_on_the_device, (1,), x, out, 50, 52, LAYOUT=gl.NVMMASharedLayout(128, 32, 2))
    same(out, box(x, 32, 0))


@jit
def predicated_load(desc, out_ptr, wanted):
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    tile.store(gl.full([32, 32], -1.0, gl.float32, MATRIX))
    fence_async_shared()
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, desc.nbytes_per_cta, pred=wanted)
    tma.async_load(desc, [0, 0], loaded, tile, pred=wanted)
    mbarrier.wait(loaded, 0, pred=wanted)
    store_matrix(out_ptr, tile.load(MATRIX))


@pytest.mark.parametrize("wanted", [True, False])
def test_predicates(launch, wanted):
    x, out = normal(32, 32), poisoned(32, 32)
    launch(predicated_load, (1,), descriptor(x, [32, 32]), out, wanted)
    same(out, x if wanted else torch.full((32, 32), -1.0))


# ---------------------------------------------------------------------------------------------------------------------
# Two CTAs
# ---------------------------------------------------------------------------------------------------------------------


@jit
def load_shards(desc, out_desc, row):
    """Each CTA loads and stores its own rows of the box."""
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma.async_load(desc, [row, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    tma.async_store(out_desc, [row, 0], tile)
    tma.store_wait(0)


def test_each_cta_loads_and_stores_its_shard(launch):
    x, out = normal(50, 32), poisoned(50, 32)
    descriptors = [descriptor(t, [32, 32], cga=[[1, 0]]) for t in (x, out)]
    launch(load_shards, (1,), *descriptors, 24, num_ctas=2, outputs=[])
    want = poisoned(50, 32)
    want[24:] = x[24:]
    same(out, want)


@jit
def multicast_load(desc, out_ptr, steps):
    """One load, issued by CTA 0, lands in both CTAs and completes on each one's own barrier."""
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    for step in range(steps):
        mbarrier.expect(loaded, tile.nbytes_per_cta)
        tma.async_load(desc, [step * 32, 0], loaded, tile, multicast=True)
        mbarrier.wait(loaded, step & 1)
        x = tile.load(MATRIX_COPIES)
        store_matrix(out_ptr + step * 1024, gl.convert_layout(x, MATRIX_HALVES))
        cluster.barrier()  # both have read before either slot is filled again


def test_multicast(launch):
    x, out = normal(96, 32), poisoned(96, 32)
    launch(multicast_load, (1,), descriptor(x, [32, 32], cga=[[0, 0]]), out, 3, num_ctas=2)
    same(out, x)


@jit
def multicast_of_four(desc, out_ptr):
    """Four CTAs, rows split over bit 1, copies over bit 0: CTAs 0 and 2 issue, each for itself and its neighbour."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[0, 0], [1, 0]])
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma.async_load(desc, [0, 0], loaded, tile, multicast=True)
    mbarrier.wait(loaded, 0)
    QUARTERS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[0, 1], [1, 0]])
    store_matrix(out_ptr, gl.convert_layout(tile.load(LAYOUT), QUARTERS))
    cluster.barrier()


def test_multicast_within_pairs_of_four(launch):
    x, out = normal(64, 64), poisoned(64, 64)
    launch(multicast_of_four, (1,), descriptor(x, [64, 64], cga=[[0, 0], [1, 0]]), out, num_ctas=4)
    same(out, x)


@jit
def one_of_a_batch(desc, out, batch, WAIT: gl.constexpr):
    """The box has a dimension that the tile has not: one of a batch of matrices."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], gl.NVMMASharedLayout(128, 32, 2))
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma.async_load(desc, [batch, 8, 0], loaded, tile)
    if WAIT:
        mbarrier.wait(loaded, 0)
    tma.async_store(out, [batch + 1, 0, 0], tile)
    tma.store_wait(0)
    mbarrier.wait(loaded, 0)


def test_a_box_with_more_dimensions_than_its_tile(launch):
    x, out = normal(4, 32, 32), torch.zeros(4, 32, 32)
    layout = gl.NVMMASharedLayout(128, 32, 3)
    descriptors = [TensorDescriptor.from_tensor(t, [1, 32, 32], layout) for t in (x, out)]
    launch(one_of_a_batch, (1,), *descriptors, 2, WAIT=True)
    want = torch.zeros(4, 32, 32)
    want[3, :24] = x[2, 8:]
    same(out, want)
    with pytest.raises((gluon_cpu.DataRace, gluon_cpu.UninitialisedRead), match="tile"):
        launch(one_of_a_batch, (1,), *descriptors, 2, WAIT=False)


@jit
def rows_of_a_box(desc, out_ptr, column, WAIT: gl.constexpr):
    """A tile that has the rows of the box, counted in fewer dimensions."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 64], gl.NVMMASharedLayout(128, 32, 2))
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma.async_load(desc, [8, column, 0], loaded, tile)
    if WAIT:
        mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, tile.load(MATRIX))
    mbarrier.wait(loaded, 0)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_box_that_has_its_rows_in_two_dimensions(launch, columns):
    x, out = normal(32, 4, 64), poisoned(32, 64)
    layout = gl.NVMMASharedLayout(128, 32, 3)
    desc = TensorDescriptor.from_tensor(x, [32 // columns, columns, 64], layout)
    launch(rows_of_a_box, (1,), desc, out, 2, WAIT=True)
    padded = torch.cat([x[8:], torch.zeros(8, 4, 64)])
    same(out, padded[: 32 // columns, 2 : 2 + columns].reshape(32, 64))
    with pytest.raises((gluon_cpu.DataRace, gluon_cpu.UninitialisedRead), match="tile"):
        launch(rows_of_a_box, (1,), desc, out, 2, WAIT=False)


@jit
def rows_of_a_box_for_two(desc, out_ptr):
    """The same in both CTAs, each of which loads all of it."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 64], gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[0, 0]]))
    loaded = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma.async_load(desc, [8, 2, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, gl.convert_layout(tile.load(MATRIX_COPIES), MATRIX_HALVES))
    cluster.barrier()


def test_a_box_that_has_its_rows_in_two_dimensions_in_two_ctas(launch):
    x, out = normal(32, 4, 64), poisoned(32, 64)
    layout = gl.NVMMASharedLayout(128, 32, 3, cga_layout=[[0, 0, 0]])
    launch(rows_of_a_box_for_two, (1,), TensorDescriptor.from_tensor(x, [16, 2, 64], layout), out, num_ctas=2)
    same(out, x[8:24, 2:4].reshape(32, 64))


@jit
def copy_tile(desc, out_ptr):
    store_matrix(out_ptr, load_tile(desc).load(MATRIX))


def test_a_descriptor_that_rounds_to_tf32(launch):
    """To the nearest of 10 bits, halves to even; infinity, NaN and what is filled in stay as they are."""
    ulp = 2.0**-10
    x = torch.zeros(20, 32)
    x[0, :7] = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2**-23, -1 - ulp / 2, 0.1, 3e38, 2 - 2**-23])
    x[1, :2] = torch.tensor([float("inf"), float("-inf")])
    x[2] = normal(32)
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    desc = TensorDescriptor.from_tensor(x, [32, 32], layout, round_f32_to_tf32=True)
    out = poisoned(32, 32)
    launch(copy_tile, (1,), desc, out)
    want = [1, 1 + 2 * ulp, 1 + ulp, -1, 1638 * 2.0**-14]
    same(out[0, :5], torch.tensor(want))
    same(out[0, 6:8], torch.tensor([2.0, 0.0]))
    same(out[1], x[1])
    same(out[20:], torch.zeros(12, 32))
    assert bool((out.view(torch.int32) & 0x1FFF == 0).all())
    torch.testing.assert_close(out[2], x[2], rtol=ulp / 2, atol=0)
