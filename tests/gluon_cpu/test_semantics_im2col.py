"""TMA in im2col mode: the matrix of a convolution."""

import pytest
import torch

import gluon_cpu
from tests.compat import (
    TensorDescriptorIm2Col,
    gl,
    jit,
    mbarrier,
    tma,
)
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned, same, small_integers


@jit
def load_pixels(desc, out_desc, start, tap):
    """Each CTA loads its pixels, and stores them."""
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    gl.barrier(cluster=True)
    mbarrier.expect(loaded, desc.nbytes_per_cta)
    tma.async_load_im2col(desc, start, [gl.to_tensor(t).to(gl.int16) for t in tap], loaded, tile)
    mbarrier.wait(loaded, 0)
    tma.async_store(out_desc, [0, 0], tile)
    tma.store_wait(0)


def im2col(x, lower, upper, block, *, cga=None, steps=None, padding="zero"):
    """Descriptors of pixels of `x` and of an output for them."""
    out = poisoned(*block, dtype=x.dtype)
    out_desc = descriptor(out, block, cga=cga)
    desc = TensorDescriptorIm2Col.from_tensor(
        x, block, out_desc.layout, padding=padding, element_strides=steps, pixel_box_lower_corner=lower,
        pixel_box_upper_corner=upper,
    )  # fmt: skip
    return out, (desc, out_desc)


def convolution(x: torch.Tensor, taps: list[torch.Tensor], pad: int, stride: int) -> torch.Tensor:
    """The convolution of [N, *space, C], one value of a tap for each channel, as torch does it: [pixels, C]."""
    spatial, channels = x.ndim - 2, x.shape[-1]
    side = round(len(taps) ** (1 / spatial))
    weight = torch.stack(taps, -1).reshape(channels, 1, *[side] * spatial)
    apply = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}[spatial]
    return apply(x.movedim(-1, 1), weight, padding=pad, stride=stride, groups=channels).movedim(1, -1).flatten(0, -2)


@pytest.mark.parametrize(
    ("space", "pad", "stride"),
    [((6, 7), 0, 1), ((6, 7), 1, 1), ((7, 9), 1, 2), ((30,), 1, 1), ((4, 5, 3), 1, 1), ((4, 5, 3), 1, 2)],
    ids=["plain", "padded", "stride 2", "one dimension", "three dimensions", "three dimensions, stride 2"],
)
def test_im2col_is_the_matrix_of_a_convolution(launch, space, pad, stride):
    """A filter of two taps along every dimension: the sum of a load for each, shifted by it, is torch's convolution."""
    x = small_integers(2, *space, 32)
    outer = [(size + 2 * pad - 2) // stride + 1 for size in space]
    count = 2 * int(torch.tensor(outer).prod())
    block = [1 << (count - 1).bit_length(), 32]
    upper = [(o - 1) * stride + 1 - size - pad for o, size in zip(outer, space, strict=True)]
    shifts = torch.cartesian_prod(*[torch.arange(2)] * len(space)).reshape(-1, len(space)).tolist()
    weights = [small_integers(32, seed=n) for n in range(len(shifts))]
    total = torch.zeros(block)
    for shift, weight in zip(shifts, weights, strict=True):
        out, descriptors = im2col(x, [-pad] * len(space), upper, block, steps=[1, *[stride] * len(space), 1])
        launch(load_pixels, (1,), *descriptors, (0, *[-pad] * len(space), 0), tuple(shift))
        assert not out[count:].any()  # pixels of images that there are not
        total += out * weight
    same(total[:count], convolution(x, weights, pad, stride))


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_im2col_from_the_middle(launch, mode):
    """A load may start in the middle of a row; channels beyond the last are filled."""
    x = normal(2, 5, 6, 48, dtype=torch.bfloat16)
    out, descriptors = im2col(x, [0, 0], [0, 0], [32, 32], padding="nan")
    launch(load_pixels, (1,), *descriptors, (1, 1, 4, 32), (0, 0), mode=mode, outputs=[])
    want = poisoned(32, 32, dtype=torch.bfloat16)
    want[: 30 - 10, :16] = x[1].flatten(0, 1)[10:, 32:]
    same(out, want)


def test_im2col_over_two_ctas(launch):
    """As compiled: the second half starts as many pixels further along the innermost dimension."""
    x = normal(1, 40, 32)
    out, descriptors = im2col(x, [0], [0], [32, 32], cga=[[1, 0]])
    launch(load_pixels, (1,), *descriptors, (0, 3, 0), (1,), num_ctas=2)
    same(out, x[0, 4:36])


def test_im2col_refuses_a_start_outside_of_its_window(launch):
    x = normal(1, 8, 8, 32)
    _, descriptors = im2col(x, [0, 0], [0, 0], [32, 32], cga=[[1, 0]])
    with pytest.raises(NotImplementedError, match=r"starts outside of its window: pixel \[0, 16\] of CTA 1"):
        launch(load_pixels, (1,), *descriptors, (0, 0, 0, 0), (0, 0), num_ctas=2)


def test_im2col_offsets_have_no_sign(launch):
    x = normal(1, 8, 8, 32)
    _, descriptors = im2col(x, [0, 0], [0, 0], [32, 32])
    with pytest.raises(gluon_cpu.OutOfBounds, match=r"offsets \[0, -1\] of an im2col load; each has 8 bits"):
        launch(load_pixels, (1,), *descriptors, (0, 0, 0, 0), (0, -1))


@jit
def write_then_load(x_ptr, desc, out_desc):
    gl.store(x_ptr + gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0])), 1.0)
    load_pixels(desc, out_desc, (0, 0, 0, 0), (0, 0))


def test_im2col_reads_are_checked(launch):
    """Another program writes the first pixel."""
    x = normal(1, 4, 4, 32)
    _, descriptors = im2col(x, [0, 0], [0, 0], [16, 32])
    with pytest.raises(gluon_cpu.DataRace, match="global memory"):
        launch(write_then_load, (2,), x, *descriptors)
