"""What becomes of a finding: raised, kept for the end, or passed over because somebody said so and why."""

from collections import Counter
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from . import findings
from .findings import Finding
from .given import listed, text
from .ir.locations import Site


def kinds() -> dict[str, type[Finding]]:
    """Every kind of finding by its name."""
    named = {name: value for name, value in vars(findings).items() if isinstance(value, type)}
    return {name: value for name, value in named.items() if issubclass(value, Finding)}


# Nothing goes on after these.
FINAL = ("Deadlock", "BytesNeverCome", "TooFewArrivals", "Finding")


def kind_named(name: str, argument: str) -> type[Finding]:
    passable = sorted(set(kinds()) - set(FINAL))
    if name in FINAL:
        raise ValueError(
            f"{argument}: {name} cannot be passed over, as nothing goes on after it; expected one of {passable}"
        )
    if name not in passable:
        raise ValueError(f"{argument}: expected a kind of finding, one of {passable}, got {name!r}")
    return kinds()[name]


@dataclass(frozen=True, kw_only=True)
class Accept:
    """A finding that is known, and why it may stay.

    kind: the name of its class, or of a base class of it: 'UninitialisedRead', 'RaceError'.
    place: 'file.py:120', 'file.py' or the name of a function. One of the lines that the finding names, or of the calls
    that led there, must be at that place.
    reason: why it may stay; reports repeat it.

    Raises ValueError for a kind that there is not or that ends a run, for an empty place, and for an empty reason;
    TypeError for what is no text.
    """

    kind: str
    place: str
    reason: str

    def __post_init__(self) -> None:
        for name in ("kind", "place", "reason"):
            text(name, getattr(self, name))
        kind_named(self.kind, "kind")
        for name in ("place", "reason"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name}: expected a text, got an empty one; say where it is and why it may stay")

    @classmethod
    def parse(cls, words: str) -> "Accept":
        """Of `KIND@PLACE=REASON`, the form of the command line."""
        kind, at, rest = words.partition("@")
        place, equals, reason = rest.partition("=")
        if not at or not equals:
            raise ValueError(
                f"accept: expected KIND@PLACE=REASON, as 'DataRace@kernel.py:120=why it may stay', got {words!r}"
            )
        return cls(kind=kind.strip(), place=place.strip(), reason=reason.strip())

    def covers(self, finding: Finding) -> bool:
        return isinstance(finding, kinds()[self.kind]) and any(self.is_at(site) for site in finding.sites)

    def is_at(self, site: Site) -> bool:
        file, colon, line = self.place.rpartition(":")
        if not colon:
            file, line = self.place, ""
        for frame in site.frames:
            if frame.function == self.place:
                return True
            same_file = frame.file == file or frame.file.endswith("/" + file)
            if same_file and (not line or line == str(frame.line)):
                return True
        return False

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}: {self.reason}"


@dataclass
class Seen:
    """What the launches of a `check` saw together.

    raised: what a launch raised since the last `collect`; the function may have caught it.
    """

    launches: int = 0
    findings: list[Finding] = field(default_factory=list)
    raised: list[Finding] = field(default_factory=list)
    accepted: Counter[Accept] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        """Keep a finding, unless there is one of its kind at its lines already."""
        if all(identity(finding) != identity(known) for known in self.findings):
            self.findings.append(finding)

    def collect(self) -> list[Finding]:
        """All findings, with those that were raised."""
        for finding in self.raised:
            self.add(finding)
        self.raised.clear()
        return self.findings


SEEN: ContextVar[Seen | None] = ContextVar("gluon_cpu_seen", default=None)


def identity(finding: Finding) -> tuple[str, frozenset[tuple[str, int]]]:
    return type(finding).__name__, frozenset(site.key for site in finding.sites)


class Verdicts:
    """Of one launch: which findings are raised at once.

    skip: kinds that are not looked for. accept: known findings. keep_going: whether others are kept for the end.
    Raises ValueError for a kind that there is not, TypeError for something else than an `Accept`.
    """

    def __init__(self, skip: Iterable[str] = (), accept: Collection[Accept] = (), keep_going: bool = False) -> None:
        listed("skip", skip, of="kinds of findings")
        listed("accept", accept, of="gluon_cpu.Accept objects")
        self.skipped = tuple(kind_named(name, "skip") for name in skip)
        for entry in accept:
            if not isinstance(entry, Accept):
                raise TypeError(f"accept: expected gluon_cpu.Accept objects, got {entry!r}")
        self.accept = tuple(accept)
        self.keep_going = keep_going
        self.seen = Seen()

    def judge(self, finding: Finding) -> None:
        """Raise it, or remember it and return."""
        if isinstance(finding, self.skipped):
            return
        for entry in self.accept:
            if entry.covers(finding):
                self.seen.accepted[entry] += 1
                return
        if not self.keep_going:
            raise finding
        self.seen.add(finding)


def shown(accepted: Counter[Accept]) -> str:
    """The lines of a report about what was accepted."""
    return "".join(
        f"\n  accepted {n} times: {entry}" if n > 1 else f"\n  accepted: {entry}" for entry, n in accepted.items()
    )
