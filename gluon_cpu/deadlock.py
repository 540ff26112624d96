"""The report of a deadlock."""

from typing import TYPE_CHECKING, Any

from . import findings
from .advice import issuer
from .agent import Agent
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
            lines.append(f"    Some arrivals have come, but not all{blame(b)} Its init:\n{at(b.init_info)}")
    for cluster in machine.live:
        for cta in cluster.ctas:
            for b in cta.barriers.values():
                if b not in barriers and b.alive:
                    lines.append("  " + b.describe())
    return kind("\n".join(lines), tuple(sites))


def blame(barrier: Barrier) -> str:
    """Why arrivals may be missing. A role that is held up elsewhere cannot arrive, whatever the count."""
    count = "the init count is too high, or a role does not arrive."
    late = held_up(barrier)
    if not late:
        return f": {count}"
    who = f"{late[0]} has not arrived, and waits" if len(late) == 1 else f"{', '.join(late)} have not arrived, and wait"
    return f". {who} for something else: if an arrival is missing from there, follow that wait. If not, {count}"


def held_up(barrier: Barrier) -> list[str]:
    """The roles that have not arrived in this phase, and wait elsewhere; if some of them did arrive in the last phase,
    only those."""
    come = {issuer(who) for who, _, _ in barrier.arrived}
    before = {issuer(who) for _, _, who, _ in barrier.previous}
    elsewhere = [
        agent.who
        for agent in barrier.cta.cluster.agents
        if agent.blocked is not None
        and agent.blocked is not barrier
        and not isinstance(agent.blocked, Agent)  # it has ended, and waits for the other roles to end
        and agent.who not in come
    ]
    return [who for who in elsewhere if who in before] or elsewhere
