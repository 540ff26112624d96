"""TMA of descriptors that have rows twice, so that a box ends where a part of a tensor does; and 64-bit addresses."""

import pytest
import torch

import gluon_cpu
from tests.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
)
from tests.gluon_cpu.support import (
    new_barrier,
    normal,
    same,
)


class Shifted:
    """A descriptor's base that lies before its tensor, as gluon_cpu and Triton know one."""

    def __init__(self, tensor: torch.Tensor, elements_before: int) -> None:
        self.tensor, self.elements_before, self.dtype = tensor, elements_before, tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.elements_before * self.tensor.element_size()


def ragged(x: torch.Tensor) -> TensorDescriptor:
    """Rows twice, with one stride: [end, rows - length + r] is row r of those that end before row `end`."""
    rows, columns = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([1, 32, 32], gl.float32)
    shape, strides = [rows + 1, rows, columns], [columns, columns, 1]
    return TensorDescriptor(Shifted(x, rows * columns), shape, strides, [1, 32, 32], layout)


@jit
def copy_ragged(from_desc, to_desc, end, row):
    tile = gl.allocate_shared_memory(from_desc.dtype, from_desc.block_shape, from_desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, from_desc.nbytes_per_cta)
    tma.async_load(from_desc, [end, row, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    tma.async_store(to_desc, [end, row, 0], tile)
    tma.store_wait(0)


def test_rows_twice_end_where_one_of_them_does(launch):
    x, out = normal(50, 32), torch.full((50, 32), 7.0)
    launch(copy_ragged, (1,), ragged(x), ragged(out), 30, 50 - 20, outputs=[])  # rows 10 to 29
    want = torch.full((50, 32), 7.0)
    want[10:30] = x[10:30]
    same(out, want)


def test_a_box_that_a_descriptor_promises_where_there_is_no_memory(launch):
    with pytest.raises(gluon_cpu.OutOfBounds, match=r"inside of what the descriptor says, but outside of from_desc"):
        launch(copy_ragged, (1,), ragged(normal(50, 32)), ragged(normal(50, 32)), 5, 50 - 20, outputs=[])


def test_a_load_wholly_outside_touches_the_base(launch):
    with pytest.raises(gluon_cpu.OutOfBounds, match=r"wholly outside .* descriptor of from_desc begins .* byte -6400 "):
        launch(copy_ragged, (1,), ragged(normal(50, 32)), ragged(normal(50, 32)), 30, 50, outputs=[])


@jit
def store_ragged(to_desc, end, row):
    tile = gl.allocate_shared_memory(to_desc.dtype, to_desc.block_shape, to_desc.layout)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    tile.store(gl.full([1, 32, 32], 5.0, gl.float32, LAYOUT))
    fence_async_shared()
    tma.async_store(to_desc, [end, row, 0], tile)
    tma.store_wait(0)


def test_a_store_wholly_outside_touches_nothing(launch):
    out = torch.full((50, 32), 7.0)
    launch(store_ragged, (1,), ragged(out), 30, 50, outputs=[])
    same(out, torch.full((50, 32), 7.0))


WRAP = gl.constexpr(1 << 30)


def wrapped(x: torch.Tensor) -> TensorDescriptor:
    """The same from the first element on: as a step along the first dimension is 2^34 elements less a row, 2^30 of them
    lead back by 2^30 rows, as addresses have 64 bits."""
    rows, columns = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 32, 32], gl.float32)
    shape, strides = [WRAP.value + 1, rows, WRAP.value + 1, columns], [(1 << 34) - columns, columns, columns, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 32, 32], layout)


@jit
def copy_wrapped(from_desc, to_desc, first, length, row):
    tile = gl.allocate_shared_memory(from_desc.dtype, from_desc.block_shape, from_desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, from_desc.nbytes_per_cta)
    coords = [WRAP, first + length - 1, WRAP + 1 - length + row, 0]
    tma.async_load(from_desc, coords, loaded, tile)
    mbarrier.wait(loaded, 0)
    tma.async_store(to_desc, coords, tile)
    tma.store_wait(0)


@pytest.mark.parametrize(("first", "length", "row"), [(10, 20, 0), (10, 20, 15), (49, 1, 0)])
def test_addresses_have_64_bits(launch, first, length, row):
    x, out = normal(50, 32), torch.full((50, 32), 7.0)
    launch(copy_wrapped, (1,), wrapped(x), wrapped(out), first, length, row, outputs=[])
    want = torch.full((50, 32), 7.0)
    want[first + row : first + length] = x[first + row : first + length]
    same(out, want)


@pytest.mark.parametrize(("first", "length", "row"), [(10, 20, 20), (0, 0, 0), (30, 0, 3)])
def test_a_load_wholly_outside_touches_a_base_that_is_memory(launch, first, length, row):
    out = torch.full((50, 32), 7.0)
    launch(copy_wrapped, (1,), wrapped(normal(50, 32)), wrapped(out), first, length, row, outputs=[])
    same(out, torch.full((50, 32), 7.0))
