"""Searches for several problems: they share kernels, which are compiled once, and the time."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.tune.search import BESIDE_A_PEER, Card, InUseFails, Progress, Search

GENERATIONS = 4
SHARE_OF_COMPILING = 0.5  # of the time that is left, in each generation
LEAST_OF_A_GENERATION_S = 10.0  # with less time left, none is begun
RUNS_OF_A_ROUND = 19  # of each call, by `bench.timing.time_interleaved`
AROUND_A_RUN_MS = 0.2  # that filling the cache takes, and beginning
SAVING_S = 2.0  # between two saves while kernels are compiled

Say = Callable[[str], None]


class Together:
    """until: of the progress' clock. beside_peer: time the peer too, first, for the order in which the problems come:
    those first that are slowest beside it; and after the search."""

    def __init__(
        self,
        searches: Sequence[Search[Any]],
        card: Card,
        progress: Progress,
        say: Say,
        *,
        until: float = math.inf,
        beside_peer: bool = False,
    ) -> None:
        self.searches, self.card, self.progress, self.say = list(searches), card, progress, say
        self.progress.until, self.beside_peer = until, beside_peer
        self.failures: list[InUseFails] = []

    def left_s(self) -> float:
        """Before what is timed after the search."""
        return self.progress.until - self.progress.now() - self.ending_s()

    def ending_s(self) -> float:
        """That it takes to time all of them beside the peer."""
        if not self.beside_peer:
            return 0.0
        starts = [search.found["start"] for search in self.searches]
        ms = [s["peer"] + 2 * s["in_use"] + 3 * AROUND_A_RUN_MS for s in starts if s and "peer" in s]
        return BESIDE_A_PEER["end"] * RUNS_OF_A_ROUND * sum(ms) / 1e3

    def run(self, generations: int, keep: Callable[[], None]) -> None:
        """keep: is called whenever a problem has something new."""
        for generation in range(generations):
            begun = self.progress.now()
            active = [search for search in self.searches if search.ask()]
            if not active:
                break
            if generation and self.left_s() < LEAST_OF_A_GENERATION_S:
                self.say("no time for more")
                break
            self.compile(active, self.progress.now() + SHARE_OF_COMPILING * self.left_s())
            if self.beside_peer and generation == 0:
                self.order()
                active = [search for search in self.searches if search in active and not search.ended]
            for i, search in enumerate(active):
                left = self.left_s()
                # Most need less than their share, as they end when the first is out of the noise.
                share = left * min(1.0, 2 / (len(active) - i))
                self.say(search.choices.title + (f", in at most {share:.0f} s" if math.isfinite(share) else ""))
                with self.passed_over():
                    search.step(self.progress.now() + share)
                keep()
            more = generations - 1 - generation
            if more and not all(search.ended for search in self.searches):
                left = min(more * (self.progress.now() - begun), max(0.0, self.left_s()))
                self.say(f"generations left: {more} at most, about {left:.0f} s if they take as long as this one")

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """If the config in use fails, the others go on."""
        try:
            yield
        except InUseFails as error:
            self.failures.append(error)
            self.say(f"  {error}")

    def compile(self, searches: Sequence[Search[Any]], until: float) -> None:
        """What is in use first, then the first of each problem, and so on."""
        ranks = itertools.zip_longest(*([(search, name) for name in search.lacking()] for search in searches))
        wanted = [pair for rank in ranks for pair in rank if pair is not None]
        start = saved = self.progress.now()
        if not wanted or start >= until:
            return
        jobs = [(search.problem, search.configs[name]) for search, name in wanted]
        with contextlib.closing(self.card.compile(jobs, until - start)) as answers:  # type: ignore[type-var]
            for i, (number, answer) in enumerate(answers, 1):
                search, name = wanted[number]
                search.take(name, answer)
                now = self.progress.now()
                if now - saved >= SAVING_S or i == len(wanted):
                    saved = now
                    self.progress.save()
                    others = max(0.0, min((now - start) / i * (len(wanted) - i), until - now))
                    about = f", about {others:.0f} s for the others" if i < len(wanted) else ""
                    self.say(f"  {self.progress.left}compiled {i} of {len(wanted)}{about}: {name}")
                if now >= until:
                    break
        self.progress.save()

    def order(self) -> None:
        """Times all beside the peer, and puts those first that are the slowest beside it."""
        ratios = {}
        for search in self.searches:
            name = search.name(search.in_use)
            with self.passed_over():
                ran = search.runs(name, math.inf)
                search.require_in_use()
                found = search.beside_peer("start", search.in_use) if ran else None
                ratios[id(search)] = found["peer"] / found["in_use"] if found else math.inf
                if found:
                    self.say(f"{search.choices.title}: {ratios[id(search)]:.3f} x the peer, with {name}")
        self.searches.sort(key=lambda search: ratios.get(id(search), math.inf))

    def end(self, rows: Sequence[Any]) -> list[tuple[Search[Any], dict[str, float]]]:
        """Times each problem anew, with the config in use and with what serves with these rows in front, beside the
        peer."""
        found = []
        for search in self.searches:
            if search.is_measured and search.name(search.in_use) not in search.found["failed"]:
                times = search.beside_peer("end", search.choices.served_by(rows))
                if times is not None:
                    found.append((search, times))
        return found
