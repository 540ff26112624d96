"""The machine: clusters of CTAs, one agent per role in each, the engines' tasks, and who goes on next."""

from collections import deque
from typing import Any

from . import findings
from .agent import Agent
from .clocks import Clocks
from .cta import Cta
from .deadlock import deadlock
from .global_memory import GlobalBuffer, GlobalMemory
from .ops.wgmma import PendingUse
from .poison import JUDGE, PoisonUse
from .schedule import Picker, Schedule
from .shadow import Access, Acquired
from .verdicts import Verdicts

MORE_RESIDENT = 4  # programs that start where those that run only poll or spin


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
        self.agents: list[Agent] = []


class Machine:
    """One launch."""

    def __init__(self, compiled: Any, programs: list[tuple[int, int, int]], grid: tuple[int, int, int],
                 schedule: Schedule, checks: bool, trace: Any = None, resident: int = 4,
                 verdicts: Verdicts | None = None) -> None:  # fmt: skip
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
        self.verdicts = verdicts or Verdicts()
        self.trace = trace
        self.resident = resident
        self.memory = GlobalMemory(self.found)
        self.ready_agents: list[Any] = []
        self.ready_tasks: list[Any] = []
        self.live: list[Cluster] = []
        self.waiting: deque[int] = deque()
        self.lets_next_start = False  # whether a later launch may start before this one ends,
        self.lets_it_too_early = False  # and before somebody here has waited for the launch before
        self.has_waited = False  # for that
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
        judge = JUDGE.set(lambda use: self.found(self.poison_use(use)))
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
        finally:
            JUDGE.reset(judge)

    def found(self, finding: findings.Finding) -> None:
        """Raise a finding, unless it is one to go on after: see `Verdicts`."""
        self.seal(finding)
        self.verdicts.judge(finding)

    def seal(self, finding: findings.Finding) -> None:
        finding.schedule = self.schedule
        finding.mode = "lowered" if self.compiled.generated.lowered and self.num_ctas == 1 else None
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
                if self.reap():
                    return
                if not (self.waiting and self.memory.waiters):
                    raise deadlock(self)
                self.resident += MORE_RESIDENT  # who polls may wait for a program that has not started yet
                return
            entity = pick(agents, tasks)
            entity.step()
            self.steps += 1
            idle = self.steps - self.progress
            if idle > self.patience:
                raise deadlock(self)
            if idle > 20_000 and self.waiting:
                # Those that run may be spinning on what a program does that has not started yet.
                self.resident += MORE_RESIDENT
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
            if waitable is not self.memory:  # who polls may find what it found before
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

    def global_memory_changed(self) -> None:
        """Who polls looks again."""
        self.memory.writes += 1
        self.wake(self.memory)

    def global_read(self, buffer: GlobalBuffer, runs: Any, base: int, clk: Any, access: Access, foreign: Any) -> None:
        buffer.was_read = True
        buffer.shadow.read(runs, base, clk, access, foreign)

    def global_write(self, buffer: GlobalBuffer, runs: Any, base: int, clk: Any, access: Access, foreign: Any) -> None:
        buffer.written = True
        buffer.shadow.write(runs, base, clk, access, foreign)

    # Findings of the whole machine

    def poison_use(self, use: PoisonUse) -> findings.Finding:
        site, division = self.compiled.site_of_traceback(use.__traceback__), self.compiled.generated.lines[use.line - 1]
        return findings.DivisionByZero(
            f"the result of an integer division by zero is used, by {self.at.who}\n"
            f"    at {site.where}\n      {site.source}\n"
            f"  divided by zero at {division.where}\n      {division.source}\n"
            "  The hardware gives some number there. Keep it from addresses, masks, branches and outputs: mask it, or "
            "divide by the larger of the divisor and 1.",
            (site, division),
        )

    def pending_use(self, use: PendingUse) -> findings.Finding:
        site = self.compiled.site_of_traceback(use.__traceback__)
        agent = self.at
        return findings.DataRace(
            f"the result of a wgmma is used before its wait, by {agent.who}\n    at {site.where}\n      {site.source}\n"
            f"  the product was issued at {use.info.site.where}\n      {use.info.site.source}\n"
            "  Missing order: take the result from warpgroup_mma_wait(...), with a count that covers this product.",
            (site, use.info.site),
        )


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
