"""The report of a deadlock."""

from typing import TYPE_CHECKING, Any

from . import findings
from .ops.mbarrier import Barrier, at, plural

if TYPE_CHECKING:
    from .machine import Machine


def deadlock(machine: "Machine") -> findings.Finding:
    """Where every role stands, and the state of every barrier, those that are waited for first."""
    spinning = bool(machine.ready_agents)
    lines = [f"no progress for {machine.patience} steps:" if spinning else "deadlock: nobody can go on."]
    barriers: list[Any] = []
    sites = []
    for cluster in machine.live:
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
                lines.append(f"  {agent.who}: waits for phase {agent.wanted_phase} of {target.place}{where}")
                if target not in barriers:
                    barriers.append(target)
            else:
                lines.append(f"  {agent.who}: waits for {target.describe()}{where}")
    kind: type[findings.Finding] = findings.Deadlock
    for b in barriers:
        lines.append("  " + b.describe())
        if b.tx and not b.pending:
            kind = findings.BytesNeverCome
            lines.append(f"    All arrivals have come; {plural(b.tx, 'expected byte')} will never: the byte count of "
                         "mbarrier.expect is too large, or a copy is missing.")  # fmt: skip
        elif b.arrived:
            kind = findings.TooFewArrivals if kind is findings.Deadlock else kind
            lines.append("    Some arrivals have come, but not all: the init count is too high, or a role does "
                         f"not arrive. Its init:\n{at(b.init_info)}")  # fmt: skip
    for cluster in machine.live:
        for cta in cluster.ctas:
            for b in cta.barriers.values():
                if b not in barriers and b.alive:
                    lines.append("  " + b.describe())
    return kind("\n".join(lines), tuple(sites))
