"""Shared memory of a CTA as bytes, and how views of it read and write them.

A view at run time is one integer: the byte offset of its start, and above bit 40 the offsets of a slice, which combine
with those of the elements by exclusive or, as swizzling demands. So does, above bit 60, the number of the CTA in which
a slice begins.
"""

import math
from typing import Any

import numpy as np

from .ir.layouts import padding, shared_buffer, spread_of
from .ir.types import MemDesc

OFFSET_MASK = (1 << 40) - 1
SLICE_SHIFT = 40
CTA_SHIFT = 60
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Bytes:
    """A zeroed or poisoned memory with views of every access width."""

    def __init__(self, size: int) -> None:
        whole = np.empty((size + 15) // 16 + 1, np.complex128)
        self.size = size
        self.views: dict[int, Any] = {width: whole.view(dtype) for width, dtype in RAW.items()}
        self.poison(0, self.views[1].size)

    def poison(self, start: int, size: int) -> None:
        self.views[1][start : start + size] = 0xFF  # NaN in every float format


def runs_of(offsets: Any, element_bytes: int) -> tuple[tuple[int, int], ...]:
    """Byte ranges, sorted and joined, that elements at `offsets` occupy."""
    flat = np.unique(offsets.reshape(-1))
    if not len(flat):
        return ()
    breaks = np.flatnonzero(np.diff(flat) != element_bytes)
    starts = flat[np.concatenate([[0], breaks + 1])]
    ends = flat[np.concatenate([breaks, [len(flat) - 1]])] + element_bytes
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


class Pattern:
    """How one view type lies in memory: what to gather, in pieces as wide as its neighbours allow."""

    def __init__(self, offsets: Any, element_bytes: int, dtype: Any) -> None:
        self.offsets = offsets
        self.element_bytes = element_bytes
        self.dtype = dtype
        self.shape = offsets.shape
        self.count = int(offsets.size)
        self.runs = runs_of(offsets, element_bytes)
        self.bytes = self.count * element_bytes
        self.variants: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.sliced: dict[int, Pattern] = {}
        # The dimension along which neighbours in memory lie goes last.
        rank = offsets.ndim
        order = list(range(rank))
        for d in range(rank):
            if offsets.shape[d] > 1 and np.take(offsets, 1, d).flat[0] - offsets.flat[0] == element_bytes:
                order = [*(i for i in order if i != d), d]
                break
        self.order = tuple(order)
        self.back = tuple(int(i) for i in np.argsort(order))
        self.ordered_shape = tuple(offsets.shape[d] for d in order)
        self.is_ordered = self.order == tuple(range(rank))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"variants": {}, "sliced": {}}

    def at_slice(self, xor: int) -> "Pattern":
        if xor not in self.sliced:
            self.sliced[xor] = Pattern(self.offsets ^ xor, self.element_bytes, self.dtype)
        return self.sliced[xor]

    def variant(self, alignment: int) -> tuple[Any, ...]:
        """(width, index, start, span, is a plain range, inverse or None) for a start of the given alignment."""
        flat = self.offsets.transpose(self.order).reshape(-1)
        width = self.element_bytes
        while (
            width < min(16, alignment)
            and len(flat) % 2 == 0
            and flat[0] % (2 * width) == 0
            and bool((flat[::2] % (2 * width) == 0).all())
            and bool((flat[1::2] == flat[::2] + width).all())
        ):
            flat = flat[::2]
            width *= 2
        index = (flat // width).astype(np.intp)
        start = int(index.min()) if len(index) else 0
        index -= start
        span = int(index.max()) + 1 if len(index) else 0
        plain = span == len(index) and bool((index == np.arange(span)).all())
        inverse = None
        if span == len(index) and not plain:
            inverse = np.empty_like(index)
            inverse[index] = np.arange(span)
        return width, index, start, span, plain, inverse

    def pieces(self, base: int) -> tuple[Any, ...]:
        alignment = 16 if base % 16 == 0 else base & -base
        key = (alignment, 0)
        found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = self.variant(alignment)
        return found

    def load(self, memory: Bytes, m: int) -> Any:
        """A fresh array of the view's elements."""
        if m >> SLICE_SHIFT:
            return self.at_slice(m >> SLICE_SHIFT).load(memory, m & OFFSET_MASK)
        width, index, start, span, plain, _ = self.pieces(m)
        at = m // width + start
        raw = memory.views[width][at : at + span]
        raw = raw.copy() if plain else raw.take(index)
        out = raw.view(self.dtype).reshape(self.ordered_shape)
        return out if self.is_ordered else out.transpose(self.back)

    def store(self, memory: Bytes, m: int, data: Any) -> None:
        if m >> SLICE_SHIFT:
            self.at_slice(m >> SLICE_SHIFT).store(memory, m & OFFSET_MASK, data)
            return
        width, index, start, span, plain, inverse = self.pieces(m)
        if not self.is_ordered:
            data = data.transpose(self.order)
        if not data.flags.c_contiguous:
            data = np.ascontiguousarray(data)
        raw = data.reshape(-1).view(RAW[width])
        at = m // width + start
        target = memory.views[width][at : at + span]
        if plain:
            target[:] = raw
        elif inverse is not None:
            raw.take(inverse, out=target, mode="clip")
        else:
            target[index] = raw

    def runs_at(self, m: int) -> tuple[Any, int]:
        """(runs, base) to hand to a shadow memory."""
        if m >> SLICE_SHIFT:
            return self.at_slice(m >> SLICE_SHIFT).runs, m & OFFSET_MASK
        return self.runs, m


_PATTERNS: dict[tuple[MemDesc, int], Pattern] = {}


def pattern(m: MemDesc, num_ctas: int, dtype: Any) -> Pattern:
    """The pattern of a view type, leading dimensions (whole buffers one after the other) included."""
    key = (m, num_ctas)
    if key not in _PATTERNS:
        buffer = shared_buffer(m, num_ctas)
        offsets = buffer.offsets
        if buffer.leading:
            steps = np.arange(math.prod(buffer.leading)) * buffer.stride
            offsets = (steps.reshape(*buffer.leading, *[1] * offsets.ndim) + offsets).astype(np.int64)
        _PATTERNS[key] = Pattern(offsets, m.element.bytes, dtype)
    return _PATTERNS[key]


def slice_offset(m: MemDesc, starts: tuple[int, ...], num_ctas: int) -> tuple[int, int]:
    """(bytes to add, what to combine by exclusive or) for a slice of view `m` that starts at `starts`."""
    buffer = shared_buffer(m, num_ctas)
    rank = len(buffer.shard.shape)
    lead, tail = starts[:-rank] if len(starts) > rank else (), starts[-rank:]
    add, step = 0, buffer.stride
    for size, at in zip(reversed(m.alloc_shape[: len(lead)]), reversed(lead), strict=True):
        add += at * step
        step *= size
    spread = spread_of(m, num_ctas)
    start, cta = int(spread.offsets[tail]), int(spread.owners[tail]) << CTA_SHIFT
    # Gaps add up, where a swizzle combines bits.
    return (add + start, cta) if padding(m.layout) else (add, start << SLICE_SHIFT | cta)


def decode(m: int) -> tuple[int, int, int]:
    """(start, bytes to xor, CTA number to xor) of a view at run time."""
    return m & OFFSET_MASK, m >> SLICE_SHIFT & (1 << CTA_SHIFT - SLICE_SHIFT) - 1, m >> CTA_SHIFT
