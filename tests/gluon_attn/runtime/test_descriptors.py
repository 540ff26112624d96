"""Descriptors of packed sequences, against what TMA takes and where a row lies."""

import itertools

import pytest
import torch

from gluon_attn.runtime.descriptors import PACKED_WRAP, Block, View

STRIDED = torch.empty(50, 3, 4, 64).unbind(1)[1]  # (T, H, D), of a projection


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 50, 2**24])
def test_a_packed_view_is_within_what_tma_takes(rows, dtype):
    t = torch.empty(1, 4, rows, 256, dtype=dtype, device="meta")
    view = View.packed(t)
    assert len(view.shape) == len(view.strides) == 5
    assert all(0 < size <= 2**31 for size in view.shape)
    assert all(0 < stride * dtype.itemsize < 2**40 for stride in view.strides)
    assert all(stride * dtype.itemsize % 16 == 0 for stride in view.strides[:-1])


@pytest.mark.parametrize("t", [torch.empty(50, 4, 64), STRIDED, torch.empty(50, 1, 64).half()])
def test_a_row_of_a_sequence_is_where_the_tensor_has_it_and_none_is_past_its_end(t):
    view = View.packed(t.transpose(0, 1)[None])
    for (first, end), head in itertools.product(
        [(0, 1), (0, 50), (10, 30), (49, 50), (20, 20), (0, 0)], range(t.shape[1])
    ):
        for row in (0, 1, 19, 20, 60):
            at = (PACKED_WRAP, head, end - 1, PACKED_WRAP + 1 - (end - first) + row, 0)
            assert all(-(2**31) <= x < 2**31 for x in at)
            inside = all(0 <= x < size for x, size in zip(at, view.shape, strict=True))
            assert inside == (first + row < end)
            if inside:
                elements = sum(x * stride for x, stride in zip(at, view.strides, strict=True))
                expected = (first + row) * t.stride(0) + head * t.stride(1)
                assert elements * t.element_size() % 2**64 == expected * t.element_size()


def test_a_packed_descriptor_begins_where_its_tensor_does():
    """A load wholly outside touches its base."""
    t = torch.empty(50, 4, 64).half()
    block = Block.of(t.dtype, 64, 64, packed=True)
    assert View.packed(t.transpose(0, 1)[None]).descriptor(t, block).base is t
