"""Atomics on global memory: one step each, and the order that acquire and release make between agents."""

from typing import Any, NamedTuple

import numpy as np

from ..clocks import ORDER, join
from ..reductions import combine
from ..shadow import Acquired, Scope
from .global_ops import GlobalOps, address_runs, scalar, spread


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a kernel are certainly the same, bit by bit."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, int | np.generic | np.ndarray):
        return False
    return a == b if isinstance(a, int) else a.shape == b.shape and a.tobytes() == b.tobytes()


class Released(NamedTuple):
    """What an agent published at an address: by cluster, what was known of it."""

    scope: Scope
    known: dict[int, Any]


class AtomicOps(GlobalOps):
    def atomic_scope(self, info: Any) -> Scope:
        return Scope(info.scope == "cta", self.cluster.number, self.cta.number)

    def atomic(self, info: Any, pointers: Any, data: Any, mask: Any = True, compare: Any = None) -> Any:
        """Read, combine, write in one step; with acquire or release it orders what lies around it as well."""
        self.at = info
        dtype, item, shape = info.dtype, info.dtype.itemsize, info.shape
        flat, keep = spread(pointers, mask, shape)
        values = np.ascontiguousarray(np.broadcast_to(np.asarray(data, dtype), shape).reshape(-1))
        expected = None if compare is None else np.broadcast_to(np.asarray(compare, dtype), shape).reshape(-1)
        old_out = np.zeros(flat.shape, dtype)
        machine = self.cluster.machine
        every = range(len(flat)) if keep is None else np.flatnonzero(keep)
        written: list[int] = []
        changed = False
        self.use_global_memory()
        if len(every):
            index = np.asarray(every)
            for part, buffer, offsets in self.parts(info, flat[index], item, "atomic"):
                chosen = index[part]
                if "acq" in info.semantics:
                    self.acquire(info, flat[chosen])
                if machine.checks:
                    access = self.access(info)._replace(atomic=self.atomic_scope(info))
                    runs = address_runs(offsets, item)
                    touch = machine.global_read if info.kind == "load" else machine.global_write
                    touch(buffer, runs, 0, self.clk, access, self.foreign)
                    buffer.was_read = True
                view = buffer.view(item)
                for i, o in zip(chosen.tolist(), (offsets // item).tolist(), strict=True):
                    cell = view[o : o + 1].view(dtype)
                    old_out[i] = cell[0]
                    if info.kind == "load" or (expected is not None and cell[0] != expected[i]):
                        continue
                    written.append(int(flat[i]))
                    before = cell.tobytes()
                    if expected is not None or info.plain:
                        cell[0] = values[i]
                    else:
                        cell[...] = combine(info.kind, cell.copy(), values[i : i + 1])
                    changed |= cell.tobytes() != before
        self.release(info, written)
        if changed or (written and "rel" in info.semantics):
            machine.global_memory_changed()
        return old_out.reshape(shape) if shape else scalar(old_out[0])

    def poll(self, info: Any, pointers: Any, wanted: Any, tries: int) -> Any:
        """None as long as an address holds something else than wanted, and tries are left; then what does, acquired."""
        found = self.atomic(info, pointers, 0) == np.broadcast_to(np.asarray(wanted, info.dtype), info.shape)
        if not np.all(found) and (info.limit is None or tries < info.limit):
            return None
        if "acq" in info.on_success:
            self.acquire(info, spread(pointers, True, info.shape)[0][np.asarray(found).reshape(-1)])
        return found if info.shape else bool(found)

    def until_written(self) -> Any:
        """What a poll that failed waits for: it can pass only when somebody has written."""
        return self.cluster.machine.memory

    def will_find_the_same(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
        """Whether the next round of a loop will be as this one was, until somebody writes to global memory.

        This one has looked there, nobody has written since, and it has left the loop's variables as they were.
        """
        return self.writes_before == self.cluster.machine.memory.writes and all(map(is_same, before, after))

    def acquire(self, info: Any, addresses: Any) -> None:
        """Know what was released at these addresses within this agent's scope, by other programs too."""
        mine = self.atomic_scope(info)
        for address in np.unique(addresses).tolist():
            for released in self.cluster.machine.released.get(address, {}).values():
                if not mine.covers(released.scope) or not released.scope.covers(mine):
                    continue
                for number, clk in released.known.items():
                    if number == self.cluster.number:
                        join(self.clk, clk)
                    elif not any(a.clk is clk and self.clk[ORDER, a.slot] >= a.time for a in self.foreign):
                        self.foreign.append(Acquired(self.slot, self.t, number, clk))

    def release(self, info: Any, addresses: list[int]) -> None:
        """Publish at the addresses that were written what is known here. A plain store ends what stood there before."""
        released = self.cluster.machine.released
        if info.plain:
            for address in addresses:
                released.pop(address, None)
        if "rel" not in info.semantics:
            return
        scope = self.atomic_scope(info)
        passed_on = [(a.cluster, a.clk) for a in self.foreign if self.clk[ORDER, a.slot] >= a.time]
        for address in set(addresses):
            here = released.setdefault(address, {})
            known = here.setdefault(scope, Released(scope, {})).known
            for number, clk in [*passed_on, (self.cluster.number, self.clk)]:
                before = known.get(number)
                known[number] = clk.copy() if before is None else np.maximum(before, clk)
        self.tick()
