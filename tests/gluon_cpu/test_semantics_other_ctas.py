"""Shared memory that the CTAs of a cluster share: who has an element is its layout's to say, and who writes or reads
it, its registers'. As Triton 3.9 compiles it: `st.shared::cluster` and `ld.shared::cluster` where the two differ."""

import pytest
import torch

import gluon_cpu
from tests.compat import cluster, gl, jit
from tests.gluon_cpu.layouts import (
    MATRIX_COLUMN_HALVES,
    MATRIX_COPIES,
    MATRIX_HALVES,
    PLAIN_HALVES,
    ROW_COPIES,
    ROW_HALVES,
)
from tests.gluon_cpu.support import addresses, normal, poisoned, same, store_matrix

ROWS = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0], [[1, 0]]))
ROWS_PADDED = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[32, 4]], [64, 32], [1, 0], [[1, 0]]))
COPIES = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0], [[0, 0]]))
RACE = (gluon_cpu.DataRace, gluon_cpu.UninitialisedRead)


@jit
def through(x_ptr, out_ptr, SHARED: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr, BARRIER: gl.constexpr):
    """The last barrier: nobody ends while its shared memory is read."""
    tiles = gl.allocate_shared_memory(gl.float32, [2, 64, 32], SHARED)
    cluster.barrier()
    tile = tiles.index(1)
    tile.store(gl.load(addresses(x_ptr, 64, 32, FROM)))
    if BARRIER:
        cluster.barrier()
    store_matrix(out_ptr, tile.load(TO))
    cluster.barrier()


SPREADS = {
    "halves, then columns": (ROWS, MATRIX_HALVES, MATRIX_COLUMN_HALVES),
    "columns, then halves": (ROWS, MATRIX_COLUMN_HALVES, MATRIX_HALVES),
    "halves, then all": (ROWS, MATRIX_HALVES, MATRIX_COPIES),
    "all by both, then halves": (ROWS, MATRIX_COPIES, MATRIX_HALVES),
    "with gaps": (ROWS_PADDED, MATRIX_HALVES, MATRIX_COLUMN_HALVES),
}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
def test_loads_and_stores_of_registers_spread_otherwise(launch, spread):
    x, out = normal(64, 32), poisoned(64, 32)
    layouts = dict(zip(("SHARED", "FROM", "TO"), spread, strict=True))
    launch(through, (1,), x, out, **layouts, BARRIER=True, num_ctas=2)
    same(out, x)
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(through, (1,), x, out, **layouts, BARRIER=False, num_ctas=2)


def test_each_cta_writes_its_own_copy(launch):
    """What a CTA holds of a tensor goes into its own copy, and not into the other one's."""
    x, out = normal(64, 32), poisoned(64, 32)
    launch(through, (1,), x, out, COPIES, MATRIX_HALVES, MATRIX_HALVES, BARRIER=False, num_ctas=2)
    same(out, x)
    with pytest.raises(gluon_cpu.UninitialisedRead, match="tiles"):
        launch(through, (1,), x, out, COPIES, MATRIX_HALVES, MATRIX_COPIES, BARRIER=True, num_ctas=2)


@jit
def slices(out_ptr, BARRIER: gl.constexpr):
    """Of a buffer of which each CTA has a half, a slice of half lies in one of them: both write to both."""
    tile = gl.allocate_shared_memory(gl.int32, [512], PLAIN_HALVES)
    i = gl.arange(0, 256, ROW_HALVES)
    cluster.barrier()
    tile.slice(0, 256).store(i)
    tile.slice(256, 256).store(i + 1000)
    if BARRIER:
        cluster.barrier()
    gl.store(out_ptr + gl.arange(0, 512, ROW_HALVES), tile.load(ROW_HALVES))
    gl.store(out_ptr + 512 + i, tile.slice(256, 256).load(ROW_HALVES))
    gl.store(out_ptr + 768 + i, tile.slice(256, 256).slice(128, 128).gather(i & 127, axis=0))
    cluster.barrier()


def test_slices_along_a_dimension_that_is_split(launch):
    out = poisoned(1024, dtype=torch.int32)
    launch(slices, (1,), out, BARRIER=True, num_ctas=2)
    i = torch.arange(256, dtype=torch.int32)
    same(out, torch.cat([i, i + 1000, i + 1000, (i & 127) + 1128]))
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(slices, (1,), out, BARRIER=False, num_ctas=2)


@jit
def part_of_each(out_ptr, SHARED: gl.constexpr, BARRIER: gl.constexpr):
    """A slice along the dimension that is not split: a part of each CTA's rows, gathered in reverse and scattered."""
    tile = gl.allocate_shared_memory(gl.int32, [64, 64], SHARED)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_HALVES))
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX_HALVES))
    at = rows[:, None] * 32 + columns[None, :]
    part = tile.slice(32, 32, dim=1)
    part.store(at)
    if BARRIER:
        cluster.barrier()
    up = 63 - rows[:, None] + 0 * at
    value = part.gather(up, axis=0)
    store_matrix(out_ptr, value)
    tile.slice(0, 32, dim=1).scatter(value, up, axis=0)
    cluster.barrier()
    store_matrix(out_ptr + 2048, tile.slice(0, 32, dim=1).load(MATRIX_HALVES))
    cluster.barrier()


@pytest.mark.parametrize("gaps", [False, True])
def test_gather_and_scatter_of_a_part_of_what_ctas_share(launch, gaps):
    shared = ROWS
    if gaps:
        shared = gl.PaddedSharedLayout.with_identity_for([[64, 4]], [64, 64], [1, 0], [[1, 0]])
    out = poisoned(128, 32, dtype=torch.int32)
    launch(part_of_each, (1,), out, SHARED=shared, BARRIER=True, num_ctas=2)
    at = torch.arange(64 * 32, dtype=torch.int32).view(64, 32)
    same(out, torch.cat([at.flip(0), at]))
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(part_of_each, (1,), out, SHARED=shared, BARRIER=False, num_ctas=2)


@jit
def from_own_copy(out_ptr):
    """Registers of which each CTA has half of the rows, in a buffer that both have: rows are those of the tensor."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_COPIES))
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX_COPIES))
    tile = gl.allocate_shared_memory(gl.int32, [64, 32], COPIES, rows[:, None] * 32 + columns[None, :])
    backwards = 31 - gl.arange(0, 32, gl.SliceLayout(0, MATRIX_HALVES))
    own = 0 * gl.arange(0, 64, gl.SliceLayout(1, MATRIX_HALVES))
    store_matrix(out_ptr, tile.gather(own[:, None] + backwards[None, :], axis=1))


def test_gather_from_a_buffer_that_every_cta_has(launch):
    out = poisoned(64, 32, dtype=torch.int32)
    launch(from_own_copy, (1,), out, num_ctas=2)
    same(out, torch.arange(64 * 32, dtype=torch.int32).view(64, 32).flip(1))


@jit
def scatter_copies(out_ptr, BARRIER: gl.constexpr):
    """Both CTAs have every value, and both write it: the same value to the same place."""
    tile = gl.allocate_shared_memory(gl.int32, [256], PLAIN_HALVES)
    i = gl.arange(0, 256, ROW_COPIES)
    cluster.barrier()
    tile.scatter(i, 255 - i, axis=0)
    if BARRIER:
        cluster.barrier()
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), tile.load(ROW_HALVES))
    cluster.barrier()


def test_scatter_of_what_every_cta_has(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(scatter_copies, (1,), out, BARRIER=True, num_ctas=2)
    same(out, torch.arange(255, -1, -1, dtype=torch.int32))
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(scatter_copies, (1,), out, BARRIER=False, num_ctas=2)


@jit
def add_copies(out_ptr, RESULT: gl.constexpr, BARRIER: gl.constexpr):
    """Both CTAs have every value: it is added once, and both have what was there before."""
    tile = gl.allocate_shared_memory(gl.int32, [256], PLAIN_HALVES)
    i = gl.arange(0, 256, ROW_COPIES)
    j = gl.arange(0, 256, ROW_HALVES)
    tile.store(1000 + j)
    if BARRIER:
        cluster.barrier()
    old = tile.atomic_scatter_add(i, i ^ 7, axis=0)
    cluster.barrier()
    gl.store(out_ptr + j, tile.load(ROW_HALVES))
    if RESULT:
        gl.store(out_ptr + 256 + j, gl.convert_layout(old, ROW_HALVES))
    else:
        gl.store(out_ptr + 256 + j, 1000 + (j ^ 7))
    cluster.barrier()


@pytest.mark.parametrize("result", [False, True])
def test_atomics_of_what_every_cta_has(launch, result):
    out = poisoned(512, dtype=torch.int32)
    launch(add_copies, (1,), out, RESULT=result, BARRIER=True, num_ctas=2)
    i = torch.arange(256, dtype=torch.int32)
    same(out, torch.cat([1000 + i + (i ^ 7), 1000 + (i ^ 7)]))
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(add_copies, (1,), out, RESULT=result, BARRIER=False, num_ctas=2)
