"""Four CTAs: arrivals that come early (docs/proving.md) are harmless. A model of the ring of keys and values, searched.

The model has the steps of the load roles, the products and the engines, and mbarriers that count and are waited for by
parity, as the hardware's. Every order of steps is followed, for any number of laps: positions count from the lap that
nobody is behind, so that there are finitely many states.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Barrier(NamedTuple):
    phase: int = 0  # phases completed
    pending: int = 0  # arrivals that the phase in progress lacks
    loads: int = 0  # announced, and not there yet

    def passes(self, phase: int) -> bool:
        """A wait for the end of this phase: it sees the parity only."""
        return self.phase & 1 != phase & 1

    def step(self, count: int, *, arrivals: int = 0, loads: int = 0) -> "Barrier":
        pending, left = self.pending - arrivals, self.loads + loads
        over = pending == 0 and left == 0
        return Barrier(self.phase + 1, count) if over else Barrier(self.phase, pending, left)


class State(NamedTuple):
    announced: tuple[int, ...]  # of each CTA: how many tiles its load role has acquired a slot for, and announced
    multiplied: tuple[int, ...]  # of each pair: how many tiles its products are done with
    filled: tuple[Barrier, ...]  # [pair, slot]
    freed: tuple[Barrier, ...]  # [CTA, slot]
    in_flight: frozenset[tuple[int, int, int]]  # loads (issuing CTA, pair that it fills, tile)
    commits: tuple[int, ...]  # [pair, CTA, slot]: that have not arrived yet


def put(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


class Ring:
    """slots: of the ring. ctas: of a pair. told: the pairs whose commits reach the CTAs of each pair."""

    def __init__(self, slots: int, ctas: int, told=((0, 1), (0, 1)), counts=None, waits=(True, True)):
        self.slots, self.ctas, self.told, self.waits = slots, ctas, told, waits
        self.counts = counts or tuple(map(len, told))
        self.early = 0

    def start(self) -> State:
        freed = tuple(Barrier(0, self.counts[c // self.ctas]) for c in range(2 * self.ctas) for _ in range(self.slots))
        filled = (Barrier(0, self.ctas),) * (2 * self.slots)
        return State((0,) * (2 * self.ctas), (0, 0), filled, freed, frozenset(), (0,) * (4 * self.ctas * self.slots))

    def from_the_last_lap(self, s: State) -> State:
        """The same two laps later is the same."""
        laps = min(*s.announced, *s.multiplied) // (2 * self.slots) * 2
        tiles = laps * self.slots
        return State(
            tuple(n - tiles for n in s.announced),
            tuple(n - tiles for n in s.multiplied),
            tuple(b._replace(phase=b.phase - laps) for b in s.filled),
            tuple(b._replace(phase=b.phase - laps) for b in s.freed),
            frozenset((cta, pair, tile - tiles) for cta, pair, tile in s.in_flight),
            s.commits,
        )

    def announce(self, s: State, cta: int) -> Iterator[State]:
        """A load role waits until its slot is free, and announces bytes; in the first pair it issues the load too."""
        pair, tile = cta // self.ctas, s.announced[cta]
        lap, slot = divmod(tile, self.slots)
        freed, at = s.freed[cta * self.slots + slot], pair * self.slots + slot
        if self.waits[pair]:
            if not freed.passes(lap - 1):
                return
            assert freed.phase == lap, "a wait passes for another lap"
        assert (s.filled[at].phase, s.filled[at].pending > 0) == (lap, True), "announced in another lap"
        filled = s.filled[at].step(self.ctas, arrivals=1, loads=1)
        loads = {(cta, 0, tile), (cta, 1, tile)} if pair == 0 else set()
        yield s._replace(
            announced=put(s.announced, cta, tile + 1),
            filled=put(s.filled, at, filled),
            in_flight=s.in_flight | loads,
        )

    def land(self, s: State, load: tuple[int, int, int]) -> State:
        _, pair, tile = load
        lap, slot = divmod(tile, self.slots)
        at = pair * self.slots + slot
        assert s.multiplied[pair] > tile - self.slots, "written while it is read"
        assert s.filled[at].phase == lap, "bytes count for another lap"
        filled = s.filled[at].step(self.ctas, loads=-1)
        return s._replace(filled=put(s.filled, at, filled), in_flight=s.in_flight - {load})

    def multiply(self, s: State, pair: int) -> Iterator[State]:
        """The products of a tile, from the wait to the end: what is between is seen by nobody."""
        tile = s.multiplied[pair]
        lap, slot = divmod(tile, self.slots)
        filled = s.filled[pair * self.slots + slot]
        if not filled.passes(lap):
            return
        assert filled.phase == lap + 1, "products of another lap"
        there = (s.announced[cta] > tile and (cta, pair, tile) not in s.in_flight for cta in range(self.ctas))
        assert all(there), "read before it is there"
        commits = s.commits
        for cta in range(2 * self.ctas):
            if pair in self.told[cta // self.ctas]:
                at = (pair * 2 * self.ctas + cta) * self.slots + slot
                commits = put(commits, at, commits[at] + 1)
        yield s._replace(multiplied=put(s.multiplied, pair, tile + 1), commits=commits)

    def arrive(self, s: State, at: int) -> State:
        cta, slot = divmod(at % (2 * self.ctas * self.slots), self.slots)
        where = cta * self.slots + slot
        freed = s.freed[where]
        laps_announced = -((slot - s.announced[cta]) // self.slots)
        self.early += freed.phase >= max(laps_announced, 1)  # the end of the last phase has not been waited for
        after = freed.step(self.counts[cta // self.ctas], arrivals=1)
        return s._replace(freed=put(s.freed, where, after), commits=put(s.commits, at, s.commits[at] - 1))

    def steps(self, s: State) -> Iterator[State]:
        for cta in range(2 * self.ctas):
            yield from self.announce(s, cta)
        for load in s.in_flight:
            yield self.land(s, load)
        for pair in range(2):
            yield from self.multiply(s, pair)
        for at, commits in enumerate(s.commits):
            if commits:
                yield self.arrive(s, at)

    def search(self) -> int:
        """How many states there are. AssertionError for one that must not be."""
        seen = {self.start()}
        left = [*seen]
        while left:
            following = [self.from_the_last_lap(s) for s in self.steps(left.pop())]
            assert following, "deadlock"
            new = set(following) - seen
            seen |= new
            left += new
        return len(seen)


SIZES = pytest.mark.parametrize(
    ("slots", "ctas"), [(1, 2), (2, 1)], ids=["two pairs, one slot", "their leads, two slots"]
)


@SIZES
def test_arrivals_come_early_and_do_no_harm(slots, ctas):
    ring = Ring(slots, ctas)
    assert ring.search() > 5000
    assert ring.early > 0


@SIZES
def test_none_comes_early_in_the_kernel_that_is_proved(slots, ctas):
    """There the second pair hears of itself only; the first one has to hear of both, as it loads for both."""
    ring = Ring(slots, ctas, told=((0, 1), (1,)))
    ring.search()
    assert ring.early == 0


BROKEN = {
    "nobody hears of the other pair": ({"told": ((0,), (1,))}, "written while it is read|another lap"),
    "one arrival ends a lap": ({"counts": (1, 1)}, "another lap|is read"),
    "an arrival too many is waited for": ({"counts": (3, 2)}, "deadlock|another lap"),
    "the second pair does not wait": ({"waits": (True, False)}, "announced in another lap"),
    "the first pair does not wait": ({"waits": (False, True)}, "another lap|is read"),
}


@pytest.mark.parametrize(("change", "found"), BROKEN.values(), ids=BROKEN.keys())
@SIZES
def test_what_is_broken_is_found(slots, ctas, change, found):
    with pytest.raises(AssertionError, match=found):
        Ring(slots, ctas, **change).search()
