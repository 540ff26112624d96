"""Global memory through pointers: loads, stores and cp.async."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..clocks import ORDER
from ..findings import OutOfBounds
from ..global_memory import SPACING, Descriptor, GlobalBuffer
from ..poison import used_by
from ..shadow import Access
from .mbarrier import BarrierOps


def address_runs(flat: Any, item: int) -> list[tuple[int, int]]:
    """Byte ranges that elements of `item` bytes at sorted or unsorted addresses occupy."""
    if len(flat) == 1:
        return [(int(flat[0]), int(flat[0]) + item)]
    steps = np.diff(flat)
    if bool((steps == item).all()):
        return [(int(flat[0]), int(flat[-1]) + item)]
    flat = np.unique(flat)
    breaks = np.flatnonzero(np.diff(flat) != item)
    starts = flat[np.concatenate([[0], breaks + 1])]
    ends = flat[np.concatenate([breaks, [len(flat) - 1]])] + item
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


class GlobalOps(BarrierOps):
    writes_before: int | None = None  # how many there had been when this round of a loop first used global memory

    def use_global_memory(self) -> None:
        if self.writes_before is None:
            self.writes_before = self.cluster.machine.memory.writes

    def resolve(self, info: Any, addresses: Any, item: int, what: str) -> tuple[GlobalBuffer, Any] | None:
        """(buffer, byte offsets in it) of addresses that must all lie in one tensor; None if one does not."""
        memory = self.cluster.machine.memory
        first = int(addresses[0])
        buffer = memory.find(first)
        if buffer is None:
            self.outside(info, f"{what} at address {first:#x}, which belongs to no tensor of this launch")
            return None
        offsets = addresses - buffer.base
        low, high = int(offsets.min()), int(offsets.max()) + item
        if not memory.inside(buffer, low, high):
            for a, b in address_runs(offsets, item):
                if not memory.inside(buffer, a, b):
                    last = buffer.runs[-1][1] if buffer.runs else buffer.size
                    of = f"{what} of bytes {a} to {b} of {buffer.name}, which has {last} bytes"
                    self.outside(info, of, "\n  Mask it.")
                    return None
        if offsets.size and (low % item):
            of = f"{what} of {item}-byte elements at byte {low} of {buffer.name}, which is not aligned"
            self.outside(info, of)
            return None
        return buffer, offsets

    def outside(self, info: Any, what: str, hint: str = "") -> None:
        message = f"{self.who}: {what}\n    at {info.site.where}\n      {info.site.source}{hint}"
        self.cluster.machine.found(OutOfBounds(message, (info.site,)))

    def parts(self, info: Any, addresses: Any, item: int, what: str) -> Iterator[tuple[Any, GlobalBuffer, Any]]:
        """(index array, buffer, byte offsets in it) of addresses, by buffer, without what is outside of all.

        Nearly always it is one buffer.
        """
        which = (addresses + SPACING // 2) // SPACING
        one = len(which) and bool((which == which[0]).all())
        for part in [slice(None)] if one else [np.flatnonzero(which == w) for w in np.unique(which)]:
            found = self.resolve(info, addresses[part], item, what)
            if found is not None:
                yield part, *found

    def global_load(self, info: Any, pointers: Any, mask: Any = True, other: Any = None) -> Any:
        self.at = info
        dtype, item, shape = info.dtype, info.dtype.itemsize, info.shape
        flat, keep = spread(pointers, mask, shape)
        out = np.zeros(flat.shape, dtype)
        self.use_global_memory()
        if other is not None:
            out[...] = np.broadcast_to(np.asarray(other, dtype), shape).reshape(-1) if shape else other
        wanted = flat if keep is None else flat[keep]
        if len(wanted):
            got = np.zeros(wanted.shape, dtype)
            machine = self.cluster.machine
            for part, buffer, offsets in self.parts(info, wanted, item, "load"):
                if machine.checks:
                    machine.global_read(
                        buffer, address_runs(offsets, item), 0, self.clk, self.access(info), self.foreign
                    )
                got[part] = buffer.view(item)[offsets // item].view(dtype)
            if keep is None:
                out = got
            else:
                out[keep] = got
        return out.reshape(shape) if shape else scalar(out[0])

    def global_store(self, info: Any, pointers: Any, data: Any, mask: Any = True) -> None:
        self.at = info
        dtype, item, shape = info.dtype, info.dtype.itemsize, info.shape
        flat, keep = spread(pointers, mask, shape)
        values = np.broadcast_to(np.asarray(used_by(data, mask), dtype), shape).reshape(-1)
        if keep is not None:
            flat, values = flat[keep], values[keep]
        if not len(flat):
            return
        self.use_global_memory()
        machine = self.cluster.machine
        for part, buffer, offsets in self.parts(info, flat, item, "store"):
            if machine.checks:
                machine.global_write(buffer, address_runs(offsets, item), 0, self.clk, self.access(info), self.foreign)
            view = buffer.view(item)
            view[offsets // item] = np.ascontiguousarray(values[part]).view(view.dtype)
        machine.global_memory_changed()

    # cp.async

    def async_copy(self, info: Any, pointers: Any, m: int, mask: Any = True, other: Any = None) -> None:
        """Copy global to shared memory in the background; what is masked off is `other` or zero."""
        self.at = info
        self.copies += 1
        # PTX orders no two copies, of one group or of two, until a wait for the first: a later one may come first.
        clk = self.clk.copy()
        who = f"cp.async for {self.who}"
        access = Access(self.copy_slot, self.copies, False, info, who, self.cluster.number, issued=self.t)
        cta, machine = self.cta, self.cluster.machine
        shape = info.shape
        flat, keep = spread(pointers, mask, shape)
        dtype, item = info.dtype, info.dtype.itemsize
        data = np.zeros(flat.shape, dtype)
        if other is not None:
            data[...] = np.broadcast_to(np.asarray(other, dtype), shape).reshape(-1)
        wanted = flat if keep is None else flat[keep]
        if len(wanted):
            got = np.zeros(wanted.shape, dtype)
            for part, buffer, offsets in self.parts(info, wanted, item, "cp.async"):
                if machine.checks:
                    machine.global_read(buffer, address_runs(offsets, item), 0, clk, access, self.foreign)
                got[part] = buffer.view(item)[offsets // item].view(dtype)
            if keep is None:
                data = got
            else:
                data[keep] = got
        if cta.checks:
            runs, base = info.pattern.runs_at(m)
            cta.shadow.write(runs, base, clk, access)
            cta.touched[self.copy_slot] = (self.copies, access.who, info)
        info.pattern.store(cta.memory, m, data.reshape(shape))
        self.tick()

    def async_commit_group(self, info: Any) -> None:
        self.at = info
        self.copy_groups.append(self.copies)

    def async_wait(self, info: Any, pendings: int) -> None:
        self.at = info
        while len(self.copy_groups) > pendings:
            done = self.copy_groups.popleft()
            self.clk[ORDER, self.copy_slot] = max(self.clk[ORDER, self.copy_slot], done)

    def async_copy_arrive(self, info: Any, m: int, no_increment: bool) -> None:
        """Each thread arrives once its earlier cp.async are done; unless `no_increment`, as extra arrivals."""
        self.at = info
        b = self.barrier_at(self.cta.number & ~info.zero, m)
        clk = self.clk.copy()
        clk[ORDER, self.copy_slot] = self.copies
        if not no_increment:
            b.pending += info.threads
        b.arrive(clk, self.who, info, info.threads, 0, self.slot, self.t)
        b.cta.note_use(m, self.slot, self.t, self.who, info, remote=False)
        self.tick()

    # Descriptors made on the device

    def global_scratch(self, info: Any) -> int:
        machine = self.cluster.machine
        return machine.memory.scratch(f"scratch of {self.who}", info.bytes).base

    def make_descriptor(self, info: Any, where: int, address: int, sizes: Any, strides: Any) -> None:
        """sizes and strides (bytes, but for the last dimension's) start from the innermost dimension."""
        self.at = info
        found = self.resolve(info, np.array([address]), info.item, "descriptor")
        if found is None:  # passed over, and there is nothing that its copies could touch
            found = self.cluster.machine.memory.scratch("nothing", info.item), np.zeros(1, np.int64)
        buffer, offsets = found
        shape = tuple(int(s) for s in reversed(sizes))
        steps = (*(int(s) for s in reversed(strides)), info.item)
        self.descriptors[where] = Descriptor(buffer, int(offsets[0]), shape, steps, info.item, info.nan)


def spread(pointers: Any, mask: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(flat addresses, flat mask or None if all are wanted)."""
    mask = used_by(mask)
    flat = np.broadcast_to(np.asarray(used_by(pointers, mask), np.int64), shape).reshape(-1)
    if mask is True:
        return flat, None
    keep = np.broadcast_to(np.asarray(mask, np.bool_), shape).reshape(-1)
    return flat, None if bool(keep.all()) else keep


def scalar(x: Any) -> Any:
    """A numpy scalar as generated code has scalars: Python's for integers and booleans, numpy's for floats."""
    if x.dtype.kind == "i":
        return int(x)
    return bool(x) if x.dtype.kind == "b" else x
