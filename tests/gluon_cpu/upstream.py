"""Triton's own tests of its sanitizer (ConSan), run on gluon_cpu: `python -m tests.gluon_cpu.upstream PATH`.

PATH: a checkout of Triton, or the file python/test/gluon/test_consan.py. A test there runs a kernel in a process of its
own and looks at what the driver printed: one of ConSan's messages for a wrong kernel, nothing for a right one. Here the
kernel runs on the machine instead, under several schedules, and a finding of the matching kind stands for the message.

Each target is a process: the file decides as it is imported which tests a card takes. If the compiler ends a process,
the next one goes on with the case after.

Exit status: 0 if all that ran is found or clean, 1 if something is missed or found on right code, 2 for a mistake in
the arguments or a file that cannot be imported, 3 if no case ran to a verdict.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import gluon_cpu
from gluon_cpu.findings import Finding
from gluon_cpu.verdicts import SEEN, Seen
from tests.compat import triton_testing
from tests.gluon_cpu.arguments import at_least_one

TARGETS = {"sm_90a": (9, 0), "sm_100a": (10, 0)}  # with the capability that a card has
IN_CHECKOUT = Path("python/test/gluon/test_consan.py")
DEFAULT_SCHEDULES = 4
# Their kernels read tiles that nobody wrote, right ones too: it is not what they are about.
SKIPPED = ("UninitialisedRead",)

FOUND, MISSED, CLEAN = "found", "missed", "clean"
ON_RIGHT, NOT_RUNNABLE, LEFT_OUT = "finding on right code", "not runnable", "left out by the file"
JUDGED = (FOUND, MISSED, CLEAN, ON_RIGHT)
VERDICTS = {
    FOUND: "a wrong kernel, and a finding of the kind that it expects",
    MISSED: "a wrong kernel, and no finding of that kind",
    CLEAN: "a right kernel, and no finding",
    ON_RIGHT: "a right kernel, and a finding",
    NOT_RUNNABLE: "the machine or this adapter does not take it",
    LEFT_OUT: "it skips itself",
}

# What ConSan says, by how it begins, and the kinds of findings that say the same. Others: any finding.
ORDER = (gluon_cpu.RaceError, gluon_cpu.LifetimeError)
MESSAGES: dict[str, tuple[type[Finding], ...]] = {
    "Buffer being accessed has outstanding": ORDER,
    "Accessing buffer with pending access": ORDER,
    "Async shared-memory access is missing fence": (gluon_cpu.MissingFence,),
    "Barrier is being reused": (gluon_cpu.BarrierMisuse, gluon_cpu.RaceError),
    "Barrier": (gluon_cpu.BarrierMisuse,),
    "Deadlock detected": (gluon_cpu.Deadlock, gluon_cpu.BarrierMisuse),
}


def kinds_for(message: str) -> tuple[type[Finding], ...]:
    """The kinds of findings that stand for a message of ConSan's."""
    return next((kinds for start, kinds in MESSAGES.items() if message.startswith(start)), (Finding,))


class Said(str):
    """What the driver would have printed: `in` asks for a finding that says the same, and is remembered."""

    findings: list[Finding]
    asked: list[str]

    @classmethod
    def of(cls, findings: list[Finding]) -> "Said":
        said = cls("\n".join(finding.message for finding in findings))
        said.findings, said.asked = findings, []
        return said

    def __contains__(self, message: object) -> bool:
        self.asked.append(str(message))
        return any(isinstance(finding, kinds_for(str(message))) for finding in self.findings)


@dataclass
class Result:
    """In place of Triton's ProcessResult."""

    exc: Exception | None
    driver_stderr_output: Said


class NotRunnable(Exception):
    """The kernel did not run, so that nothing is known."""


@dataclass
class Case:
    """One test of theirs with its parameters."""

    name: str
    target: str
    verdict: str = ""
    reason: str = ""
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def leaves(group: BaseExceptionGroup) -> list[Any]:
    return [x for e in group.exceptions for x in (leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The frontend shows the source first, and its reason last.
    text = lines[-1] if type(error).__name__ == "CompilationError" and lines else (lines or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def of_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class OnCpu(TorchFunctionMode):
    """Tensors for "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: "cpu" if name == "device" and of_cuda(v) else v for name, v in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if of_cuda(x) else x for x in args)
        return func(*args, **kwargs)


class Adapter:
    """A pytest plugin: the file's tests as they are, but for where their kernels run."""

    def __init__(self, target: str, schedules: int, skip: list[str], done: set[str], log: Callable[..., None]) -> None:
        self.options: dict[str, Any] = {"target": target, "skip": skip, "keep_going": True, "outputs": []}
        self.target, self.schedules, self.done, self.log = target, schedules, done, log
        self.errors: list[str] = []
        self.case = Case("", target)
        self.results: list[Result] = []
        self.count = self.total = 0

    # What their conftest.py gives them.

    @pytest.fixture
    def device(self) -> str:
        return "cpu"

    @pytest.fixture
    def fresh_knobs(self) -> Any:
        from triton import knobs

        return knobs

    @pytest.fixture(autouse=True)
    def knobs_as_before(self) -> Iterator[None]:
        """Some of them set knobs, or read them again from an environment that is another afterwards."""
        from triton import knobs

        mode, debug = knobs.compilation.instrumentation_mode, knobs.runtime.debug
        yield
        knobs.compilation.instrumentation_mode, knobs.runtime.debug = mode, debug

    def run_in_process(self, fn: Any, args: tuple[Any, ...] = (), kwargs: Any = None, env: Any = None) -> Result:
        """In place of theirs: `fn` launches on the machine, under several schedules."""
        findings: list[Finding] = []
        try:
            gluon_cpu.check(
                lambda: fn(*args, **(kwargs or {})), schedules=self.schedules, quiet=True, progress=False,
                **self.options,
            )  # fmt: skip
        except pytest.skip.Exception:
            raise
        except ExceptionGroup as group:
            findings = leaves(group)
            if not all(isinstance(e, Finding) for e in findings):
                raise NotRunnable(first_line(next(e for e in findings if not isinstance(e, Finding)))) from group
        except Exception as error:
            raise NotRunnable(first_line(error)) from error
        failure = RuntimeError(f"device-side assert: {findings[0].message}") if findings else None
        result = Result(failure, Said.of(findings))
        self.results.append(result)
        return result

    # pytest's hooks

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(str(report.longrepr))

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.name not in self.done]
        self.total = len(items)
        for item in items:
            item.module.run_in_process = self.run_in_process  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that skips itself by a mark, or that cannot be set up."""
        if report.when == "setup" and not report.passed:
            name = report.nodeid.rpartition("::")[2]
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            verdict = LEFT_OUT if report.skipped else NOT_RUNNABLE
            self.log(Case(name, self.target, verdict, reason.strip().splitlines()[-1][:200]), shown=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.case, self.results = Case(item.name, self.target), []
        self.log(self.case)
        seen = Seen()
        token = SEEN.set(seen)
        start = time.perf_counter()
        error: BaseException | None = None
        try:
            with OnCpu():
                yield
        except (Exception, pytest.skip.Exception) as e:
            error = e
        finally:
            SEEN.reset(token)
        self.judge(error, seen.findings, seen.launches)
        self.case.seconds = round(time.perf_counter() - start, 2)
        self.log(self.case)

    def judge(self, error: BaseException | None, direct: list[Finding], launches: int) -> None:
        """direct: findings of kernels that the test launches itself, which are to have none. launches: how many."""
        case = self.case
        findings = [*direct, *(f for r in self.results for f in r.driver_stderr_output.findings)]
        kinds = sorted({type(finding).__name__ for finding in findings})
        case.findings = kinds
        expected = [message for r in self.results for message in r.driver_stderr_output.asked]
        lines = findings[0].message.splitlines() if findings else []
        where = next((line.strip() for line in lines if line.startswith("    at ")), "")
        if isinstance(error, pytest.skip.Exception):
            case.verdict, case.reason = LEFT_OUT, str(error)
        elif isinstance(error, NotRunnable):
            case.verdict, case.reason = NOT_RUNNABLE, str(error)
        elif direct:
            case.verdict, case.reason = ON_RIGHT, f"{', '.join(kinds)} {where}: {lines[0]}"
        elif error is None and not self.results and not launches:
            case.verdict, case.reason = NOT_RUNNABLE, "it launches no kernel"
        elif error is None:
            case.verdict = FOUND if findings else CLEAN
        elif not isinstance(error, AssertionError):
            case.verdict, case.reason = NOT_RUNNABLE, first_line(error)
        elif not findings:
            case.verdict = MISSED
            case.reason = "no finding" + (f", expected {expected[0]!r}" if expected else "")
        elif expected:
            case.verdict, case.reason = MISSED, f"{', '.join(kinds)} only, expected {expected[0]!r}"
        else:
            case.verdict, case.reason = ON_RIGHT, f"{', '.join(kinds)} {where}: {lines[0]}"


def work(args: argparse.Namespace) -> int:
    """The process of one target: a line of JSON for each case that begins, and one for its verdict."""
    path, log = Path(args.path), Path(args.log)
    known = read(log)
    # What a mark left out on the target before may run on this one.
    done = {c.name for c in known if c.target == args.target or c.verdict != LEFT_OUT}

    def write(case: Case, shown: bool = True) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(case)) + "\n")
        adapter.count += bool(case.verdict)
        if shown and case.verdict:
            reason = f": {case.reason}" if case.reason else ""
            print(
                f"[{args.target} {adapter.count}/{adapter.total}, {case.seconds:.1f} s] {case.name}: "
                f"{case.verdict}{reason}", file=sys.stderr, flush=True,
            )  # fmt: skip

    adapter = Adapter(args.target, args.schedules, args.skip, done, write)
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: TARGETS[args.target])
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    sys.dont_write_bytecode = True  # nothing of ours into their folder
    options = ["-c", os.devnull, "--rootdir", str(path.parent), "--noconftest", "--import-mode=importlib"]
    options += ["--assert=plain", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:warnings", "--capture=no"]
    options += ["-k", args.only] if args.only else []
    try:
        with gluon_cpu.machine(**adapter.options):
            patch.setattr(triton_testing(), "run_in_process", adapter.run_in_process)
            pytest.main([*options, str(path)], plugins=[adapter])
    finally:
        patch.undo()
    if adapter.errors:
        print("\n".join(adapter.errors), file=sys.stderr)
        return 2
    return 0


def read(log: Path) -> list[Case]:
    """The last that is known of each case on each target, in the order in which they began."""
    cases: dict[tuple[str, str], Case] = {}
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            case = Case(**json.loads(line))
            cases[case.name, case.target] = case
    return list(cases.values())


def process(arguments: list[str]) -> int:
    """The exit status of one for a target."""
    return subprocess.run([sys.executable, "-m", "tests.gluon_cpu.upstream", *arguments]).returncode


def run(path: Path, args: argparse.Namespace, log: Path) -> list[Case]:
    """All cases, each on the first target that takes it. Raises SystemExit(2) if the file cannot be imported."""
    for target in args.targets:
        while True:
            arguments = [str(path), "--schedules", str(args.schedules), "--target", target, "--log", str(log)]
            arguments += ["--skip", *args.skip, *(["--only", args.only] if args.only else [])]
            status = process(arguments)
            begun = [case for case in read(log) if not case.verdict]
            if status == 2:
                raise SystemExit(2)
            for case in begun:
                case.verdict, case.reason = NOT_RUNNABLE, f"the process ended, with status {status}"
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(case)) + "\n")
            if status == 0:
                break
            if not begun:
                raise SystemExit(f"the process for {target} ended with status {status}, in no case")
    best: dict[str, Case] = {}
    for case in read(log):
        if case.name not in best or best[case.name].verdict == LEFT_OUT:
            best[case.name] = case
    return list(best.values())


def table(cases: list[Case]) -> str:
    """The counts, and a line for each reason of those that are neither found nor clean."""
    counts = Counter(case.verdict for case in cases)
    width = max(map(len, VERDICTS))
    lines = [f"{name:{width}} {counts[name]:5}  {what}" for name, what in VERDICTS.items()]
    lines.append(f"{'all':{width}} {len(cases):5}")
    for verdict in (MISSED, ON_RIGHT, NOT_RUNNABLE):
        chosen = [case for case in cases if case.verdict == verdict]
        lines += [f"\n{verdict}:", *(f"  {case.name} ({case.target}): {case.reason}" for case in chosen)] * bool(chosen)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gluon_cpu.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("path", metavar="PATH", help=f"a checkout of Triton, or its {IN_CHECKOUT}")
    parser.add_argument(
        "--only", help="cases to run: an expression as of pytest's -k, 'test_tma_store or (ws and 1ctas)'"
    )
    parser.add_argument("--json", metavar="OUT", help="a file for all cases with verdict, reason, findings and seconds")
    parser.add_argument(
        "--schedules", type=at_least_one, default=DEFAULT_SCHEDULES, help="a case (default: %(default)s)"
    )
    parser.add_argument(
        "--skip", nargs="*", default=list(SKIPPED), help="findings not looked for (default: %(default)s)"
    )
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="default: all, in this order"
    )
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.log:
        return work(args)
    path = Path(args.path)
    path = (path / IN_CHECKOUT if path.is_dir() else path).resolve()
    if not path.is_file():
        parser.error(f"PATH: expected a checkout of Triton or its {IN_CHECKOUT}, got {args.path}: there is no {path}")
    with tempfile.TemporaryDirectory() as folder:
        cases = run(path, args, Path(folder) / "cases.jsonl")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n", encoding="utf-8")
    if not cases:
        parser.error("--only: no case is left")
    print(table(cases))
    if not any(case.verdict in JUDGED for case in cases):
        print("nothing was checked: no case ran to a verdict", file=sys.stderr)
        return 3
    return int(any(case.verdict in (MISSED, ON_RIGHT) for case in cases))


if __name__ == "__main__":
    sys.exit(main())
