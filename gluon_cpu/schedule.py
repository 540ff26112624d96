"""Which of those that can go on goes next: seeded policies, so that every run can be replayed."""

import random
from dataclasses import dataclass
from typing import Any

from .given import whole

POLICIES = ("random", "late", "early", "pct", "starve")


@dataclass(frozen=True)
class Schedule:
    """A policy and its seed.

    random: any agent or engine.  late: an engine only when no agent can go on.  early: engines first.
    pct: the highest of random priorities, a few of which drop on the way.  starve: one agent only when nobody else can.

    Raises ValueError for another policy, TypeError for a seed that is no whole number.
    """

    policy: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {POLICIES}, got {self.policy!r}")
        whole("seed", self.seed)

    def picker(self) -> "Picker":
        return {"random": Picker, "late": Late, "early": Early, "pct": Pct, "starve": Starve}[self.policy](self.seed)


class Picker:
    """Random. Takes one out of the agents and one out of the tasks that are ready; either list may be empty."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random
        self.steps = 0

    def pick(self, agents: list[Any], tasks: list[Any]) -> Any:
        n = len(agents)
        i = int(self.random() * (n + len(tasks)))
        return take(agents, i) if i < n else take(tasks, i - n)

    def eager(self) -> bool:
        """Whether a wgmma that is issued runs at once, rather than when it is waited for."""
        return self.random() < 0.5

    def order(self, n: int) -> list[int]:
        """In which order the programs of a grid start."""
        return sorted(range(n), key=lambda _: self.random())


def take(items: list[Any], i: int) -> Any:
    last = items.pop()
    if i == len(items):
        return last
    chosen = items[i]
    items[i] = last
    return chosen


class Late(Picker):
    def pick(self, agents: list[Any], tasks: list[Any]) -> Any:
        self.steps += 1
        # A spinning agent must not keep an engine from ever working.
        if agents and (not tasks or self.steps % 4096):
            return take(agents, int(self.random() * len(agents)))
        return take(tasks, int(self.random() * len(tasks)))

    def eager(self) -> bool:
        return False


class Early(Picker):
    def pick(self, agents: list[Any], tasks: list[Any]) -> Any:
        chosen = tasks or agents
        return take(chosen, int(self.random() * len(chosen)))

    def eager(self) -> bool:
        return True


class Pct(Picker):
    """Probabilistic concurrency testing: random priorities, with a few random points where the front runner drops."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drops = sorted(int(self.random() ** 3 * 4000) for _ in range(6))

    def priority(self, entity: Any) -> float:
        p = getattr(entity, "priority", None)
        if p is None:
            p = entity.priority = self.random()
        return float(p)

    def pick(self, agents: list[Any], tasks: list[Any]) -> Any:
        self.steps += 1
        candidates = agents + tasks
        best = max(candidates, key=self.priority)
        if (self.drops and self.steps >= self.drops[0]) or self.steps % 4096 == 0:
            if self.drops:
                self.drops.pop(0)
            best.priority = -self.random() - self.steps
            best = max(candidates, key=self.priority)
        (agents if best in agents else tasks).remove(best)
        return best


class Starve(Picker):
    """One agent, chosen by the seed, runs only when nothing else can."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.victim = int(self.random() * 64)

    def pick(self, agents: list[Any], tasks: list[Any]) -> Any:
        self.steps += 1
        if self.steps % 4096:
            others = [a for a in agents if a.number != self.victim % len(a.cluster.agents)]
            n = len(others)
            if n + len(tasks):
                i = int(self.random() * (n + len(tasks)))
                if i >= n:
                    return take(tasks, i - n)
                agents.remove(others[i])
                return others[i]
        return super().pick(agents, tasks)
