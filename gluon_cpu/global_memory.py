"""Global memory: the launch's tensors, each at an address range of its own, so that every stray access shows."""

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np

from . import findings, report
from .shadow import Conflict, Shadow, Unwritten

# Far enough apart that no realistic index leads from one tensor into the next.
SPACING = 1 << 44
HALF_OF_ADDRESSES = 1 << 63


class GlobalBuffer:
    """One piece of storage that tensors of the launch lie in."""

    def __init__(
        self,
        name: str,
        address: int,
        base: int,
        raw: Any,
        runs: list[tuple[int, int]],
        found: Callable[[findings.Finding], None],
    ) -> None:
        self.name = name
        self.address = address  # where it really is
        self.base = base  # address of raw[0]
        self.raw = raw  # bytes
        self.runs = runs  # byte ranges that belong to a tensor
        self.found = found
        self.shadow = Shadow(self.tell, initialised=True, fenceable=False)
        self.written = False
        self.was_read = False
        self.size = raw.size
        self.views: dict[int, Any] = {}
        self.scratch = False

    def tell(self, e: Conflict | Unwritten) -> None:
        assert isinstance(e, Conflict)  # it was all there before the launch
        self.found(report.race(e, f"{self.name} (global memory, bytes {e.start} to {e.end})"))

    def view(self, width: int) -> Any:
        found = self.views.get(width)
        if found is None:
            usable = self.raw.size // width * width
            found = self.views[width] = self.raw[:usable].view(
                {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
            )
        return found


class GlobalMemory:
    def __init__(self, found: Callable[[findings.Finding], None]) -> None:
        self.found = found
        self.buffers: list[GlobalBuffer] = []
        self.bases: list[int] = []
        self.waiters: list[Any] = []  # who polls, until somebody writes
        self.writes = 0

    def describe(self) -> str:
        return "what it polls for, in global memory"

    def add(self, name: str, address: int, raw: Any, runs: list[tuple[int, int]]) -> GlobalBuffer:
        base = (len(self.buffers) + 1) * SPACING + address % (1 << 12)
        buffer = GlobalBuffer(name, address, base, raw, runs, self.found)
        self.buffers.append(buffer)
        self.bases.append(base)
        return buffer

    def scratch(self, name: str, size: int) -> GlobalBuffer:
        raw = np.zeros((size + 7) // 8, np.uint64).view(np.uint8)
        buffer = self.add(name, 0, raw, [])
        buffer.scratch = True
        return buffer

    def find(self, address: int) -> GlobalBuffer | None:
        """The buffer that an address is meant for, in or out of its bounds."""
        i = (address + SPACING // 2) // SPACING - 1
        return self.buffers[i] if 0 <= i < len(self.buffers) else None

    def inside(self, buffer: GlobalBuffer, start: int, end: int) -> bool:
        """Whether bytes [start, end) of a buffer belong to tensors."""
        if buffer.scratch:
            return start >= 0 and end <= buffer.size
        if len(buffer.runs) == 1:
            a, b = buffer.runs[0]
            return a <= start and end <= b
        i = bisect.bisect_right(buffer.runs, (start, 1 << 62)) - 1
        return i >= 0 and end <= buffer.runs[i][1]


def strided_runs(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> list[tuple[int, int]]:
    """Byte ranges, sorted and joined, of a strided tensor (strides in bytes, none negative) from its first element."""
    if any(s == 0 for s in shape):
        return []
    dims = sorted(((st, s) for s, st in zip(shape, strides, strict=True) if s > 1 and st), reverse=True)
    length = item
    while dims and dims[-1][0] <= length:
        stride, size = dims.pop()
        length = max(length, stride * (size - 1) + length)
    starts = np.zeros(1, np.int64)
    for stride, size in dims:
        starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
    runs: list[tuple[int, int]] = []
    for a in np.sort(starts).tolist():
        if runs and a <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], a + length))
        else:
            runs.append((a, a + length))
    return runs


def merge_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for a, b in sorted(runs):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


class Descriptor:
    """A tensor as TMA sees it: strides in bytes; `offset` is that of its first element within the buffer.

    It may be described as larger than the buffer, or as beginning before it, as long as no box leaves the buffer: two
    dimensions of one stride make a box end where one of them does. Addresses have 64 bits, as on a card, and wrap.
    """

    rounds_to_tf32 = False

    def __init__(
        self, buffer: GlobalBuffer, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, nan: bool
    ) -> None:
        self.buffer = buffer
        self.offset = offset
        self.shape = shape
        self.strides = strides
        self.item = item
        self.nan = nan
        self.raw = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[item]
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        fits = offset >= 0 and last + item <= buffer.size
        self.array: Any = np.ndarray(shape, self.raw, buffer.raw, offset, strides) if fits else None
        self.extents: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    @property
    def begins_in_memory(self) -> bool:
        return 0 <= self.offset < self.buffer.size

    def as_loaded(self, raw: Any) -> Any:
        """Elements on their way into shared memory: rounded to the nearest, halves to even, if they become tf32. Not
        where the exponent is that of infinity and NaN."""
        if not self.rounds_to_tf32:
            return raw
        half = (raw >> np.uint32(13) & np.uint32(1)) + np.uint32(0xFFF)
        special = raw & np.uint32(0x7F800000) == np.uint32(0x7F800000)
        return np.where(special, raw, raw + half & np.uint32(0xFFFFE000))

    def clip(self, low: tuple[int, ...], extent: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(first, beyond last) coordinates of a box that lie in the tensor, None if none do."""
        a = tuple(max(0, x) for x in low)
        b = tuple(min(s, x + e) for x, e, s in zip(low, extent, self.shape, strict=True))
        return None if any(x >= y for x, y in zip(a, b, strict=True)) else (a, b)

    def box(self, a: tuple[int, ...], b: tuple[int, ...]) -> Any:
        """The raw elements of the box [a, b), to read or to write; None if some are not in the buffer."""
        if self.array is not None:
            return self.array[tuple(slice(x, y) for x, y in zip(a, b, strict=True))]
        runs, base = self.runs(a, b)
        if not all(base + start >= 0 and base + end <= self.buffer.size for start, end in runs):
            return None
        extent = tuple(y - x for x, y in zip(a, b, strict=True))
        return np.ndarray(extent, self.raw, self.buffer.raw, base, self.strides)

    def runs(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[tuple[int, int]], int]:
        """(byte ranges, base) of the box [a, b)."""
        extent = tuple(y - x for x, y in zip(a, b, strict=True))
        found = self.extents.get(extent)
        if found is None:
            found = self.extents[extent] = strided_runs(extent, self.strides, self.item)
        base = self.offset + sum(x * s for x, s in zip(a, self.strides, strict=True))
        return found, (base + HALF_OF_ADDRESSES) % (2 * HALF_OF_ADDRESSES) - HALF_OF_ADDRESSES


class Im2colDescriptor(Descriptor):
    """A tensor [N, D, H, W, C], with one to three spatial dimensions, of which a copy takes pixels, window by window.

    The window of each image goes from `lower` to its last pixel + `upper`, both included, in steps of `steps`; a filter
    tap moves it. Pixels beyond the tensor are filled.
    """

    def __init__(
        self, buffer: GlobalBuffer, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, nan: bool,
        lower: tuple[int, ...], upper: tuple[int, ...], steps: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__(buffer, offset, shape, strides, item, nan)
        self.lower = lower
        self.upper = tuple(size - 1 + u for size, u in zip(shape[1:-1], upper, strict=True))
        self.steps = steps  # of all dimensions but that of the channels

    def pixels(self, start: tuple[int, ...], tap: tuple[int, ...], count: int) -> Any:
        """The coordinates of `count` pixels from `start` on, moved by a filter tap: [count, dimensions - 1]."""
        at = list(start)
        found = np.empty((count, len(at)), np.int64)
        for i in range(count):
            found[i] = at
            for d in range(len(at) - 1, 0, -1):
                at[d] += self.steps[d]
                if at[d] <= self.upper[d - 1]:
                    break
                at[d] = self.lower[d - 1]
            else:
                at[0] += self.steps[0]
        found[:, 1:] += np.array(tap)
        return found

    def pixel_runs(self, pixels: Any, first: int, last: int) -> list[tuple[int, int]]:
        """Byte ranges of channels [first, last) of pixels that lie in the tensor."""
        starts = np.unique(self.offset + pixels @ np.array(self.strides[:-1]) + first * self.item).tolist()
        return merge_runs([(a, a + (last - first) * self.item) for a in starts])
