"""A CTA of a cluster: its memories, its barriers, and who can still touch them."""

from typing import TYPE_CHECKING, Any

from . import findings, report
from .clocks import ORDER
from .memory import Bytes
from .ops.mbarrier import Barrier, plural
from .ops.tcgen05 import TensorMemory
from .shadow import BARRIER, Access, Conflict, Shadow, Unwritten

if TYPE_CHECKING:
    from .agent import Agent
    from .machine import Cluster


class Cta:
    """One CTA: its shared and tensor memory, its barriers, and who touched it from outside."""

    def __init__(self, cluster: "Cluster", number: int, smem_bytes: int) -> None:
        self.cluster = cluster
        self.number = number
        self.memory = Bytes(smem_bytes)
        self.shadow = Shadow(self.tell, initialised=False, fence_reads=True)
        self.checks = cluster.machine.checks
        self.barriers: dict[int, Barrier] = {}
        self.allocations: list[Any] = []
        self.uses: dict[int, dict[int, tuple[int, str, Any]]] = {}
        self.touched: dict[int, tuple[int, str, Any]] = {}
        self.agents: list[Agent] = []
        self.landed: dict[
            int, tuple[Barrier, int, Access]
        ] = {}  # the last load into each place: barrier, phase, access
        self.tensor_memory: TensorMemory | None = None
        self.exit_clk: Any = None
        self.init_fence: Any = None  # what was known at the last fence.mbarrier_init

    def tensor(self) -> TensorMemory:
        if self.tensor_memory is None:
            self.tensor_memory = TensorMemory(self)
        return self.tensor_memory

    def enter_allocation(self, info: Any, access: Access) -> None:
        if info not in self.allocations:
            self.allocations.append(info)
        elif self.allocations[-1] is not info:
            self.allocations.remove(info)
            self.allocations.append(info)
        if self.checks and info.bytes:
            self.shadow.fresh(info.offset, info.offset + info.bytes, access)

    def name_at(self, offset: int) -> str:
        """What the kernel calls the buffer at an offset."""
        for info in reversed(self.allocations):
            if info.offset <= offset < info.offset + info.bytes:
                count = info.bytes // info.stride if info.stride else 1
                return report.slot_name(info.name, info.offset, offset, info.stride, count)
        return f"byte {offset}"

    def place(self, offset: int) -> str:
        return f"{self.name_at(offset)}, shared memory of CTA {self.number}"

    def tell(self, e: Conflict | Unwritten) -> None:
        """What the shadow of this CTA's shared memory found."""
        self.cluster.machine.found(self.finding(e))

    def finding(self, e: Conflict | Unwritten) -> findings.Finding:
        if isinstance(e, Unwritten):
            return report.unwritten(
                e, f"{self.place(e.start)} is read before anybody wrote it (bytes {e.start} to {e.end})"
            )
        if e.kind == "barrier":
            barrier = next(b for b in self.barriers.values() if b.init_access is e.earlier)
            return report.barrier_as_data(e, barrier.place)
        if e.later.atomic is BARRIER:
            return report.race(e, f"the memory of {self.barriers[e.start].place}")
        return report.race(e, self.place(e.start))

    def note_use(self, offset: int, slot: int, time: int, who: str, info: Any, *, remote: bool) -> None:
        self.uses.setdefault(offset, {})[slot] = (time, who, info)
        if self.checks:
            self.shadow.use_barrier(offset, Access(slot, time, False, info, who, self.cluster.number))
        if remote:
            self.touched[slot] = (time, who, info)

    def check_exit(self) -> None:
        """That nobody from outside, and no engine, can touch this CTA's memory after its roles are done."""
        known = self.exit_clk[ORDER]
        for slot, (time, who, info) in self.touched.items():
            if known[slot] < time:
                self.cluster.machine.found(
                    findings.LifetimeError(
                        f"CTA {self.number} can exit while its memory is still in use:\n"
                        f"  by {report.doing(who, info)}\n"
                        f"    at {info.site.where}\n      {info.site.source}\n"
                        f"  Missing order: {self.exit_hint(who, info)}.",
                        (info.site,),
                    )
                )
        for b in self.barriers.values():
            if b.alive and b.tx:
                more = f"still expects {plural(b.tx, 'byte')}" if b.tx > 0 else ""
                more = more or f"has got {plural(-b.tx, 'byte')} that nobody expected"
                self.cluster.machine.found(
                    findings.BarrierMisuse(
                        f"{b.place} {more} when the kernel ends\n    initialised at {b.init_info.site.where}\n  "
                        f"{b.describe()}\n  The byte count of an mbarrier.expect is wrong, or an expect is missing.",
                        (b.init_info.site,),
                    )
                )

    def exit_hint(self, who: str, info: Any) -> str:
        if info.what.startswith("TMA store"):
            return "call store_wait() before the kernel ends: the store may still be reading shared memory"
        if info.what.startswith("tcgen05"):
            return "wait before the kernel ends for a barrier that a tcgen05_commit after it completes"
        if info.what.startswith("TMA"):
            return "wait for the barrier of this copy before the kernel ends"
        if info.what.startswith("cp.async"):
            return "wait for its group, or for the barrier it arrives on, before the kernel ends"
        if info.what.startswith("wgmma"):
            return "call warpgroup_mma_wait() before the kernel ends"
        if self.cluster.num_ctas > 1:
            return "a barrier of the whole cluster at the end keeps the CTA alive until its peers are done"
        return "wait for it before the kernel ends"
