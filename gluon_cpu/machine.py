"""The machine: clusters of CTAs, one agent per role in each, the engines' tasks, and who takes the next turn."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from . import findings, report
from .clocks import ORDER, Clocks, SlotPool, join
from .global_memory import GlobalBuffer, GlobalMemory
from .memory import Bytes
from .ops.atomics import AtomicOps
from .ops.cluster import ClusterOps
from .ops.mbarrier import Barrier
from .ops.misc import MiscOps
from .ops.tcgen05 import Tcgen05Ops, TensorMemory
from .ops.wgmma import PendingUse, WgmmaOps
from .schedule import Picker, Schedule
from .shadow import Access, Acquired, Conflict, Shadow, Unwritten


class Cta:
    """One CTA: its shared and tensor memory, its barriers, and who touched it from outside."""

    def __init__(self, cluster: "Cluster", number: int, smem_bytes: int) -> None:
        self.cluster = cluster
        self.number = number
        self.memory = Bytes(smem_bytes)
        self.shadow = Shadow(initialised=False)
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
        return f"shared memory at byte {offset}"

    def place(self, offset: int) -> str:
        return f"{self.name_at(offset)}, shared memory of CTA {self.number}"

    def conflict(self, e: Conflict) -> findings.Finding:
        if e.kind == "barrier":
            barrier = next(b for b in self.barriers.values() if b.init_access is e.earlier)
            return report.barrier_as_data(e, barrier.place)
        return report.race(e, self.place(e.start))

    def shadow_read(self, runs: Any, base: int, clk: Any, access: Access) -> None:
        try:
            self.shadow.read(runs, base, clk, access)
        except Conflict as e:
            raise self.conflict(e) from None
        except Unwritten as e:
            raise findings.UninitialisedRead(
                f"{self.place(e.start)} is read before anybody wrote it (bytes {e.start} to {e.end}):\n"
                f"  {report.describe(access)}", (access.info.site,),
            ) from None  # fmt: skip

    def shadow_write(self, runs: Any, base: int, clk: Any, access: Access) -> None:
        try:
            self.shadow.write(runs, base, clk, access)
        except Conflict as e:
            raise self.conflict(e) from None

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
                hint = "wait for it before the kernel ends"
                if info.what.startswith("TMA store"):
                    hint = "call store_wait() before the kernel ends: the store may still be reading shared memory"
                elif self.cluster.num_ctas > 1 and "engine" not in who:
                    hint = "a barrier of the whole cluster at the end keeps the CTA alive until its peers are done"
                raise findings.LifetimeError(
                    f"CTA {self.number} can exit while its shared memory is still in use by {who}: {info.what}\n"
                    f"    at {info.site.where}\n      {info.site.source}\n  Missing order: {hint}.", (info.site,),
                )  # fmt: skip
        for b in self.barriers.values():
            if b.alive and b.tx:
                more = f"still expects {b.tx} bytes" if b.tx > 0 else f"has got {-b.tx} bytes that nobody expected"
                raise findings.BarrierMisuse(
                    f"{b.place} {more} when the kernel ends\n    initialised at {b.init_info.site.where}\n  "
                    f"{b.describe()}\n  The byte count of an mbarrier.expect is wrong, or an expect is missing.",
                    (b.init_info.site,),
                )


class Cluster:
    """One program of the grid."""

    def __init__(self, machine: "Machine", number: int, program: tuple[int, int, int]) -> None:
        self.machine = machine
        self.number = number
        self.program = program
        self.num_ctas: int = machine.num_ctas
        self.clocks = Clocks(machine.clock_capacity)
        self.meetings: dict[Any, Any] = {}
        self.foreign: list[Acquired] = []
        self.running = 0
        self.tasks = 0
        self.ctas = [Cta(self, c, machine.smem_bytes) for c in range(self.num_ctas)]
        self.pipes: dict[int, Any] = {}
        self.agents: list[Agent] = []


class Agent(AtomicOps, Tcgen05Ops, WgmmaOps, ClusterOps, MiscOps):
    """A role of a CTA: a generator that stops before everything that others can see."""

    priority: float | None = None

    def __init__(self, cta: Cta, role: str, role_number: int, parent: "Agent | None") -> None:
        cluster = cta.cluster
        self.cta = cta
        self.cluster = cluster
        self.role = role
        self.role_number = role_number
        self.number = role_number * cluster.num_ctas + cta.number
        self.who = role
        if cluster.num_ctas > 1:
            self.who += f" (CTA {cta.number})"
        if cluster.machine.programs > 1:
            self.who += f" of program {cluster.number}"
        clocks = cluster.clocks
        self.slot = clocks.slot(self.who)
        self.product_slot = clocks.slot(f"wgmma of {self.who}")
        self.store_read_slot = clocks.slot(f"TMA store of {self.who}")
        self.store_write_slot = clocks.slot(f"TMA store of {self.who}")
        self.copy_slot = clocks.slot(f"cp.async of {self.who}")
        self.pipe_slot = clocks.slot(f"tcgen05 of {self.who}")
        self.pipe = deque()
        self.copy_groups = deque()
        self.pipe_count = 0
        self.descriptors = parent.descriptors if parent is not None else {}
        self.load_slots = SlotPool(clocks, f"TMA load of {self.who}")
        self.clk = clocks.zeros() if parent is None else parent.async_clk()
        self.foreign = cluster.foreign
        self.t = 1
        self.clk[ORDER, self.slot] = 1
        self.at = None
        self.gen: Iterator[Any] = iter(())
        self.blocked: Any = None
        self.finished = False
        self.products = self.stores = self.copies = 0
        self.product_queue = deque()
        self.products_in_flight = deque()
        self.stores_in_flight = deque()
        self.parent = parent
        self.children = 0
        self.waiters: list[Agent] = []
        self.child_clk: Any = None
        cta.agents.append(self)
        cluster.agents.append(self)

    def restart(self, parent: "Agent") -> None:
        """Another run of the same role: it knows what its parent knows."""
        join(self.clk, parent.async_clk())
        self.finished = False
        self.tick()

    def describe(self) -> str:
        return f"the roles that {self.role} started"

    def step(self) -> None:
        machine = self.cluster.machine
        machine.at = self
        try:
            blocked = next(self.gen)
        except StopIteration:
            self.finish()
            return
        if machine.trace is not None:
            machine.trace.step(self)
        if blocked is None:
            machine.ready_agents.append(self)
        else:
            self.blocked = blocked
            blocked.waiters.append(self)
            if machine.trace is not None:
                machine.trace.block(self, blocked)

    def finish(self) -> None:
        self.finished = True
        self.run_products()
        cluster, cta = self.cluster, self.cta
        if self.products_in_flight:
            last = self.products_in_flight[-1]
            cta.touched[self.product_slot] = (last.number, self.who, last.info)
            self.products_in_flight.clear()
        parent = self.parent
        if parent is not None:
            if parent.child_clk is None:
                parent.child_clk = self.async_clk()
            else:
                join(parent.child_clk, self.async_clk())
            parent.children -= 1
            if parent.children == 0:
                cluster.machine.wake(parent)
        else:
            cta.exit_clk = self.clk
        cluster.running -= 1
        cluster.machine.progress = cluster.machine.steps
        if cluster.machine.trace is not None:
            cluster.machine.trace.finish(self)

    def spawn(self, info: Any, roles: list[tuple[int, str, Any, tuple[Any, ...]]]) -> None:
        """Start the other roles of a warp_specialize: (number, name, generator function, arguments)."""
        self.at = info
        machine = self.cluster.machine
        self.child_clk = None
        self.children = len(roles)
        for number, name, function, arguments in roles:
            agent = next((a for a in self.cta.agents if a.role_number == number), None)
            if agent is None:
                agent = Agent(self.cta, name, number, self)
            else:
                agent.restart(self)
            agent.at = info
            agent.gen = function(agent, machine.constants[self.cta.number], *arguments)
            self.cluster.running += 1
            machine.ready_agents.append(agent)
        self.tick()

    def joined(self, info: Any) -> "Agent | None":
        self.at = info
        if self.children:
            return self
        if self.child_clk is not None:
            join(self.clk, self.child_clk)
        return None


class Machine:
    """One launch."""

    def __init__(self, compiled: Any, programs: list[tuple[int, int, int]], grid: tuple[int, int, int],
                 schedule: Schedule, checks: bool, trace: Any = None, resident: int = 4) -> None:  # fmt: skip
        self.compiled = compiled
        self.num_ctas: int = compiled.num_ctas
        self.smem_bytes: int = compiled.smem_bytes
        self.constants: list[list[Any]] = compiled.constants
        # Without the compiler's own passes: it puts a fence between a role's generic writes and its async reads.
        self.fences_own_writes = not compiled.generated.lowered
        self.grid = grid
        self.program_list = programs
        self.programs = len(programs)
        self.schedule = schedule
        self.picker: Picker = schedule.picker()
        self.checks = checks
        self.trace = trace
        self.resident = resident
        self.memory = GlobalMemory()
        self.ready_agents: list[Any] = []
        self.ready_tasks: list[Any] = []
        self.live: list[Cluster] = []
        self.waiting: deque[int] = deque()
        self.programs_cancelled = 0
        self.at: Any = None
        self.steps = 0
        self.progress = 0  # the step at which somebody was last woken, done or set to work
        self.patience = 500_000
        self.released: dict[int, dict[Any, Any]] = {}  # by address, then by scope
        self.clock_capacity = max(256, 64 + 7 * compiled.roles * compiled.num_ctas + 32 * compiled.num_ctas)

    # Running

    def run(self, arguments: tuple[Any, ...]) -> None:
        order = self.picker.order(self.programs)
        waiting = self.waiting = deque(order)
        try:
            while waiting or self.live:
                while waiting and len(self.live) < self.resident:
                    self.start(waiting.popleft(), arguments)
                self.loop(bool(waiting))
        except findings.Finding as finding:
            self.seal(finding)
            raise
        except PendingUse as use:
            misuse = self.pending_use(use)
            self.seal(misuse)
            raise misuse from None

    def seal(self, finding: findings.Finding) -> None:
        finding.schedule = self.schedule
        finding.kernel = self.compiled.name

    def start(self, number: int, arguments: tuple[Any, ...]) -> None:
        cluster = Cluster(self, number, self.program_list[number])
        self.live.append(cluster)
        for cta in cluster.ctas:
            agent = Agent(cta, self.compiled.main_role, 0, None)
            agent.gen = self.compiled.entry(agent, self.constants[cta.number], *arguments)
            cluster.running += 1
            self.ready_agents.append(agent)

    def loop(self, more: bool) -> None:
        """Let things happen until a cluster is done."""
        agents, tasks, pick = self.ready_agents, self.ready_tasks, self.picker.pick
        live = self.live
        while True:
            if not agents and not tasks:
                if not self.reap():
                    raise self.deadlock()
                return
            entity = pick(agents, tasks)
            entity.step()
            self.steps += 1
            idle = self.steps - self.progress
            if idle > self.patience:
                raise self.deadlock()
            if idle > 20_000 and self.waiting:
                # Those that run may be spinning on what a program does that has not started yet.
                self.resident += 4
                self.progress = self.steps
                return
            if more and len(live) > 1 and not self.steps % 64 and self.reap():
                return

    def reap(self) -> bool:
        """Check and drop the clusters that are done; whether there was one."""
        done = [c for c in self.live if not c.running and not c.tasks]
        for cluster in done:
            self.live.remove(cluster)
            if self.checks:
                for cta in cluster.ctas:
                    cta.check_exit()
        return bool(done)

    def wake(self, waitable: Any) -> None:
        waiters = waitable.waiters
        if waiters:
            self.progress = self.steps
            for agent in waiters:
                agent.blocked = None
                if self.trace is not None:
                    self.trace.wake(agent, waitable)
            self.ready_agents.extend(waiters)
            waiters.clear()

    def add_task(self, task: Any) -> None:
        task.cluster.tasks += 1
        self.progress = self.steps
        self.ready_tasks.append(CountedTask(task))

    def run_now(self, task: Any) -> None:
        """Do a queued task at once, as somebody waits for it."""
        at = self.at
        if self.trace is not None:
            self.trace.task(task)
        task.step()
        self.at = at

    # Global memory

    def global_read(self, buffer: GlobalBuffer, runs: Any, base: int, clk: Any, access: Access, foreign: Any) -> None:
        buffer.was_read = True
        try:
            buffer.shadow.read(runs, base, clk, access, foreign)
        except Conflict as e:
            raise report.race(e, f"{buffer.name} (global memory, bytes {e.start} to {e.end})") from None

    def global_write(self, buffer: GlobalBuffer, runs: Any, base: int, clk: Any, access: Access, foreign: Any) -> None:
        buffer.written = True
        try:
            buffer.shadow.write(runs, base, clk, access, foreign)
        except Conflict as e:
            raise report.race(e, f"{buffer.name} (global memory, bytes {e.start} to {e.end})") from None

    # Findings of the whole machine

    def pending_use(self, use: PendingUse) -> findings.Finding:
        site = self.compiled.site_of_traceback(use.__traceback__)
        agent = self.at
        return findings.DataRace(
            f"the result of a wgmma is used before its wait, by {agent.who}\n    at {site.where}\n      {site.source}\n"
            f"  the product was issued at {use.info.site.where}\n      {use.info.site.source}\n"
            "  Missing order: take the result from warpgroup_mma_wait(...), with a count that covers this product.",
            (site, use.info.site),
        )

    def deadlock(self) -> findings.Finding:
        spinning = bool(self.ready_agents)
        lines = [f"no progress for {self.patience} steps:" if spinning else "deadlock: nobody can go on."]
        barriers: list[Any] = []
        sites = []
        for cluster in self.live:
            for agent in cluster.agents:
                if agent.finished:
                    lines.append(f"  {agent.who}: done")
                    continue
                site = agent.at.site if agent.at is not None else None
                where = f"\n    at {site.where}\n      {site.source}" if site else ""
                if agent.blocked is None:
                    lines.append(f"  {agent.who}: running{where}")
                    continue
                if site:
                    sites.append(site)
                target = agent.blocked
                if isinstance(target, Barrier):
                    lines.append(f"  {agent.who}: waits on {target.place}{where}")
                    if target not in barriers:
                        barriers.append(target)
                else:
                    lines.append(f"  {agent.who}: waits for {target.describe()}{where}")
        kind: type[findings.Finding] = findings.Deadlock
        for b in barriers:
            lines.append("  " + b.describe())
            if b.tx and not b.pending:
                kind = findings.BytesNeverCome
                lines.append(f"    All arrivals have come; {b.tx} expected bytes will never: the byte count of "
                             "mbarrier.expect is too large, or a copy is missing.")  # fmt: skip
            elif b.arrived:
                kind = findings.TooFewArrivals if kind is findings.Deadlock else kind
                lines.append("    Some arrivals have come, but not all: the init count is too high, or a role does "
                             "not arrive.")  # fmt: skip
        for cluster in self.live:
            for cta in cluster.ctas:
                for b in cta.barriers.values():
                    if b not in barriers and b.alive:
                        lines.append("  " + b.describe())
        return kind("\n".join(lines), tuple(sites))


class CountedTask:
    """A task in the ready list; counted, so that its cluster lives until it is done."""

    __slots__ = ("priority", "task")

    def __init__(self, task: Any) -> None:
        self.task = task
        self.priority: float | None = None

    def step(self) -> None:
        task = self.task
        task.cluster.tasks -= 1
        if not task.done:
            machine = task.cluster.machine
            if machine.trace is not None:
                machine.trace.task(task)
            task.step()
