"""Which CTA holds which part of a tensor, and at which byte offsets a buffer keeps its elements."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attributes import bases, fields, linear_layout
from .text import int_array
from .types import MemDesc, Tensor


@dataclass(frozen=True)
class Shard:
    """How the CTAs of a cluster share a tensor.

    bits[d] lists (bit of coordinate d, bit of the CTA number) pairs: CTA c holds the coordinates whose named bits are
    those of c. A CTA bit that no dimension names is one over which the tensor is replicated.
    """

    shape: tuple[int, ...]
    bits: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(s >> len(b) for s, b in zip(self.shape, self.bits, strict=True))

    @property
    def cta_bits(self) -> int:
        return sum(1 << cta_bit for dim in self.bits for _, cta_bit in dim)

    def coordinates(self, dim: int, cta: int) -> Any:
        """The coordinates of dimension `dim` that a CTA holds, in order."""
        return _coordinates(self.shape[dim], self.bits[dim], cta)

    def offset(self, cta: int) -> tuple[int, ...]:
        """The smallest coordinates that a CTA holds."""
        return tuple(sum(1 << b for b, cb in dim if cta >> cb & 1) for dim in self.bits)

    @property
    def contiguous(self) -> bool:
        """Whether every CTA holds a box: only top bits are split."""
        return all(
            sorted(b for b, _ in dim) == list(range((s - 1).bit_length() - len(dim), (s - 1).bit_length()))
            for s, dim in zip(self.shape, self.bits, strict=True)
        )


@functools.lru_cache(maxsize=4096)
def _coordinates(size: int, bits: tuple[tuple[int, int], ...], cta: int) -> Any:
    split = {b for b, _ in bits}
    fixed = sum(1 << b for b, cb in bits if cta >> cb & 1)
    mask = sum(1 << b for b in split)
    every = np.arange(size)
    return every[(every & mask) == 0] | fixed


def shard_of_bases(shape: tuple[int, ...], block_bases: list[list[int]]) -> Shard:
    bits: list[list[tuple[int, int]]] = [[] for _ in shape]
    for cta_bit, basis in enumerate(block_bases):
        hit = [(d, b) for d, b in enumerate(basis) if b and b < shape[d]]
        if not hit:
            continue
        if len(hit) > 1 or hit[0][1] & (hit[0][1] - 1):
            raise NotImplementedError(f"a CGA layout that mixes coordinates: basis {basis}")
        d, b = hit[0]
        bits[d].append((b.bit_length() - 1, cta_bit))
    return Shard(shape, tuple(tuple(b) for b in bits))


@functools.lru_cache(maxsize=4096)
def tensor_shard(t: Tensor, num_ctas: int) -> Shard:
    if num_ctas == 1 or not t.layout:
        return Shard(t.shape, ((),) * len(t.shape))
    return shard_of_bases(t.shape, linear_layout(t.layout, t.shape).block_bases)


def layout_rank(layout: str) -> int:
    """Dimensions that a shared memory layout describes; a buffer may have more, in front."""
    kind, f = fields(layout)
    if kind == "swizzled_shared":
        return f["order"].count(",") + 1
    if kind == "nvmma_shared":
        if "rank" in f:
            return int(f["rank"])
        return f["CGALayout"].split("]")[0].count(",") + 1 if "CGALayout" in f else 2
    if kind == "padded_shared" and "order" in f:
        return len(int_array(f["order"]))
    if kind in ("padded_shared", "shared_linear"):
        return f["offset"].split("]")[0].count(",") + 1
    return 2


@dataclass(frozen=True)
class Buffer:
    """Where a view of shared memory keeps its elements, in bytes from its start, per CTA.

    shard: of the trailing dimensions that the layout describes. offsets: byte offset of each local element, as an array
    of the local shape. stride: bytes of one whole buffer, by which an index into the leading dimension moves.
    """

    shard: Shard
    offsets: Any
    stride: int
    leading: tuple[int, ...]
    element_bytes: int
    zero_bits: int  # CTA bits over which the buffer is replicated


def padding(layout: str) -> list[tuple[int, int]]:
    """(interval, padding) pairs of a padded layout, in elements: after every `interval` elements `padding` are left."""
    return [(int(i), int(p)) for i, p in re.findall(r"(\d+):\+(\d+)", layout)] if "padded_shared" in layout else []


def padded(index: Any, pairs: list[tuple[int, int]]) -> Any:
    return index + sum((index // interval) * gap for interval, gap in pairs)


def shared_bases(layout: str, shape: tuple[int, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """(which coordinates each bit of the offset moves, and each bit of the CTA number)."""
    kind, f = fields(layout)
    if kind == "swizzled_shared" and len(shape) == 1:
        # A line, as barriers are; Gluon's class for linear layouts refuses one without any offset.
        cga = bases(f["CGALayout"]) if "CGALayout" in f else []
        across = 1 << sum(1 for b in cga if b[0])
        local = max(1, shape[0] // across)
        return [[1 << i] for i in range((local - 1).bit_length())], [[b[0] * local] for b in cga]
    if kind == "padded_shared" and "order" not in f:
        return bases(f["offset"]), bases(f["block"])
    if kind == "padded_shared":
        cga = bases(f["CGALayout"]) if "CGALayout" in f else []
        parts = [s >> sum(1 for b in cga if b[d]) for d, s in enumerate(shape)]
        steps = []
        for d in int_array(f["order"]):
            steps += [[1 << i if k == d else 0 for k in range(len(shape))] for i in range((parts[d] - 1).bit_length())]
        return steps, [[x * s for x, s in zip(b, parts, strict=True)] for b in cga]
    linear = linear_layout(layout, shape)
    if not hasattr(linear, "offset_bases"):
        raise NotImplementedError(f"shared memory layout {layout}")
    return linear.offset_bases, linear.block_bases


@functools.lru_cache(maxsize=4096)
def shared_buffer(m: MemDesc, num_ctas: int) -> Buffer:
    rank = layout_rank(m.layout)
    tail = m.alloc_shape[-rank:] if len(m.alloc_shape) >= rank else m.alloc_shape
    offset_bases, block_bases = shared_bases(m.layout, tail)
    shard = shard_of_bases(tail, block_bases if num_ctas > 1 else [])
    local = shard.local_shape
    count = int(np.prod(local))
    positions = np.zeros((1, rank), np.int64)
    for basis in offset_bases:
        positions = np.concatenate([positions, positions ^ np.array(basis)])
    flat = np.zeros(len(positions), np.int64)
    for d in range(rank):
        flat = flat * local[d] + np.searchsorted(shard.coordinates(d, 0), positions[:, d])
    if len(flat) < count:
        raise NotImplementedError(f"shared memory layout {m.layout} of shape {tail} is not one to one")
    element = m.element.bytes
    offsets = np.zeros(count, np.int64)
    gaps = padding(m.layout)
    # Backwards: an element that several offsets name, as those of padded fp4 are, lies at the lowest.
    offsets[flat[::-1]] = padded(np.arange(len(flat))[::-1], gaps) * element
    full = offsets.reshape(local)
    shape = m.shape[-rank:] if len(m.shape) >= rank else m.shape
    view = full[tuple(slice(0, n) for n in local_view(shape, tail, local))]
    zero_bits = (num_ctas - 1) & ~shard.cta_bits
    return Buffer(shard, view, int(padded(len(flat) - 1, gaps) + 1) * element, m.shape[:-rank], element, zero_bits)


def local_view(shape: tuple[int, ...], whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """Local extents of a slice of `shape` in a buffer `whole` of which a CTA holds `local`."""
    return tuple(
        min(s, loc) if s == w or loc == w else s * loc // w for s, w, loc in zip(shape, whole, local, strict=True)
    )


@dataclass(frozen=True, eq=False)
class Spread:
    """Where each element of a buffer lies, by its coordinates in the whole of it.

    owners: number of the CTA that has it, without the bits over which the buffer is replicated, which are zero_bits.
    offsets: its bytes from the start of the buffer there.
    """

    owners: Any
    offsets: Any
    zero_bits: int


@functools.lru_cache(maxsize=4096)
def spread_of(m: MemDesc, num_ctas: int) -> Spread:
    """Of the whole allocation that a view is part of."""
    rank = layout_rank(m.layout)
    tail = m.alloc_shape[-rank:]
    offset_bases, block_bases = shared_bases(m.layout, tail)
    positions = np.zeros((1, len(tail)), np.int64)
    for basis in offset_bases:
        positions = np.concatenate([positions, positions ^ np.array(basis)])
    places = padded(np.arange(len(positions)), padding(m.layout)) * m.element.bytes
    owners, zero_bits = np.zeros(len(positions), np.int64), 0
    for cta_bit, basis in enumerate(block_bases if num_ctas > 1 else []):
        moved = [b if b < s else 0 for b, s in zip(basis, tail, strict=True)]
        if not any(moved):
            zero_bits |= 1 << cta_bit
            continue
        positions = np.concatenate([positions, positions ^ np.array(moved)])
        places, owners = np.concatenate([places, places]), np.concatenate([owners, owners | 1 << cta_bit])
    flat: Any = np.ravel_multi_index(tuple(positions.T), tail)
    tables = np.zeros((2, math.prod(tail)), np.int64)
    tables[:, flat[::-1]] = owners[::-1], places[::-1]  # backwards: of several places the lowest
    return Spread(tables[0].reshape(tail), tables[1].reshape(tail), zero_bits)


def cuts_split(m: MemDesc, num_ctas: int) -> bool:
    """Whether a view is a slice along a dimension over which the CTAs are spread: it lies in some of them alone."""
    shard = shared_buffer(m, num_ctas).shard
    shape = m.shape[-len(shard.shape) :]
    return any(bits and s != w for s, w, bits in zip(shape, shard.shape, shard.bits, strict=False))
