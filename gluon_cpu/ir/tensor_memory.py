"""Where views of tensor memory keep their elements."""

import functools
from typing import Any

import numpy as np

from ..compat import TensorMemoryLayout, TensorMemoryScalesLayout
from .attributes import bases, builder, fields
from .layouts import Shard, shard_of_bases
from .text import int_attr
from .types import MemDesc

COLUMN_BYTES = 512
LANE_BYTES = 4


@functools.lru_cache(maxsize=4096)
def tensor_memory_shard(m: MemDesc, num_ctas: int) -> Shard:
    """Of the last two dimensions of the allocation."""
    shape = m.alloc_shape[-2:]
    _, f = fields(m.layout)
    cga = bases(f["CGALayout"]) if "CGALayout" in f else []
    if num_ctas == 1:
        cga = []
    across = [1, 1]
    for basis in cga:
        for d in range(2):
            across[d] *= 2 if basis[d] else 1
    local = [max(1, s // a) for s, a in zip(shape, across, strict=True)]
    return shard_of_bases(shape, [[b * n for b, n in zip(basis, local, strict=True)] for basis in cga])


def is_padded_fp4(m: MemDesc) -> bool:
    return fields(m.layout)[1].get("fp4Padded", "false") != "false"


def fp4_containers(m: MemDesc) -> MemDesc:
    """The bytes behind a view of padded fp4, which counts two values as one: each value has a byte, its bits 2 to 5."""
    layout = m.layout.replace("fp4Padded = true", "fp4Padded = false")
    return MemDesc(
        (*m.shape[:-1], 2 * m.shape[-1]), m.element, layout, m.space, (*m.alloc_shape[:-1], 2 * m.alloc_shape[-1])
    )


def local_layout(m: MemDesc) -> Any:
    """The layout of one CTA's part."""
    kind, f = fields(m.layout)
    if kind == "tensor_memory_scales_encoding":
        return TensorMemoryScalesLayout([])
    if is_padded_fp4(m):
        raise NotImplementedError("padded fp4 in tensor memory, but as an operand of a product")
    block = [int_attr(f["blockM"]), int_attr(f["blockN"])]
    return TensorMemoryLayout(block, int_attr(f["colStride"]), [], False, False)


@functools.lru_cache(maxsize=4096)
def tensor_memory_offsets(m: MemDesc, num_ctas: int) -> tuple[Any, int]:
    """(byte offset of each local element of the view's last two dimensions, bytes of one whole buffer)."""
    local = tensor_memory_shard(m, num_ctas).local_shape
    b = builder()
    linear = b.to_linear_layout(local_layout(m)._to_ir(b), list(local))
    element = m.element.bytes
    offsets = np.full(local, -1, np.int64)
    rows, columns = [(0, np.zeros(2, np.int64))], [(0, np.zeros(2, np.int64))]
    for i, basis in enumerate(linear.rows):
        rows += [(r | 1 << i, c ^ np.array(basis)) for r, c in rows]
    for i, basis in enumerate(linear.cols):
        columns += [(r | 1 << i, c ^ np.array(basis)) for r, c in columns]
    for column, at in columns:
        byte = column * element
        start = byte // 4 * COLUMN_BYTES + byte % 4
        for lane, other in rows:
            where = tuple(int(x) for x in at ^ other)
            if offsets[where] < 0:
                offsets[where] = start + lane * LANE_BYTES
    size = (len(columns) * element + 3) // 4 * COLUMN_BYTES
    shape = m.shape[-2:]
    whole = m.alloc_shape[-2:]
    extent = tuple(s if loc == w else min(s, loc) for s, w, loc in zip(shape, whole, local, strict=True))
    return offsets[: extent[0], : extent[1]], size
