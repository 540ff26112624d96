"""`python -m proving`: list the proofs, or find those that are missing. Exit status 0 only if all asked for hold."""

import argparse
import atexit
import fnmatch
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import store
from .attention import catalogue
from .check import DAMAGED, checked
from .failure import describe
from .prove import Proof, Task, explained
from .verifier import PACKAGE, Verdict, version

KEPT = Path(".out/proving")  # what the verifier was given and said, for proofs that failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proving", description=__doc__)
    parser.add_argument("command", choices=("list", "quick", "all", "one"), help="quick: the set for every commit")
    parser.add_argument("pattern", nargs="?", default="*", help="only proofs whose name matches, such as 'd64-*'")
    parser.add_argument(
        "--check", action="store_true", help="list: does each record still hold? Compiles nothing; exit status 1 if not"
    )
    parser.add_argument("--compile", action="store_true", help="list --check: compile where sources changed (minutes)")
    parser.add_argument("--again", action="store_true", help="run the verifier even where a record of the proof holds")
    return parser.parse_intermixed_args(arguments)  # the pattern may come after the options


def say(*words: str, end: str = "\n") -> None:
    print(*words, end=end, flush=True)


def cost(seconds: float, memory_mib: float) -> str:
    return f"{seconds:6.1f} s {memory_mib / 1024:5.2f} GiB"


def list_proofs(proofs: Sequence[Proof]) -> None:
    for proof in proofs:
        say(f"{proof.name:44} {'quick' if proof.quick else '':5}  {on_record(proof)}")


def on_record(proof: Proof) -> str:
    try:
        return described(store.load(proof.name))
    except store.Damaged:
        return DAMAGED


def described(record: store.Record | None) -> str:
    """What is on record of a proof."""
    if record is None:
        return "no record"
    same = f" as {record.same_as}" if record.same_as else ""
    return f"{record.result:9} {cost(record.seconds, record.memory_mib)} {record.date}{same}"


def check_proofs(proofs: Sequence[Proof], *, compiling: bool) -> int:
    """Say of each record whether it still holds: 0 if all do, else 1."""
    fallen = []
    for i, (proof, wrong) in enumerate(zip(proofs, checked(proofs, compiling=compiling), strict=True)):
        say(f"[{i + 1}/{len(proofs)}] {proof.name:44} {wrong or 'holds'}")
        if wrong:
            fallen.append(f"{proof.name} ({wrong})")
    say(f"{len(proofs) - len(fallen)} of {len(proofs)} hold")
    for name in fallen:
        say(f"does not hold: {name}")
    if fallen:
        say("make prove proves what does not hold, and renews records whose PTX is still the same")
    return 1 if fallen else 0


def prove(proof: Proof, *, again: bool) -> bool:
    """Whether the proof holds: by its record, or by one made now."""
    task = Task.of(proof)
    if not again and (record := store.find(task.key)):
        record = task.same_as(record) if record.name != proof.name else task.renewed(record)
        store.save(record)
        say(f"{record.result}, on record", f"as {record.same_as}" if record.same_as else "")
        return True
    verdict = task.run()
    say(f"{verdict.result:14} {cost(verdict.seconds, verdict.memory_mib)}")
    if task.proved(verdict):
        store.save(task.record(verdict))
        return True
    store.drop(proof.name)
    task, verdict = explained(proof, verdict)
    folder = keep(task, verdict)
    say(*(f"    {line}\n" for line in describe(task.ptx, verdict)), f"    kept in {folder}")
    return False


def keep(task: Task, verdict: Verdict) -> Path:
    folder = KEPT / task.proof.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.ptx").write_text(task.ptx, encoding="utf-8")
    (folder / "input.json").write_text(json.dumps(task.input, indent=1), encoding="utf-8")
    (folder / "output.json").write_text(json.dumps(verdict.report, indent=1), encoding="utf-8")
    return folder


def stop(*_: object) -> None:
    sys.exit("stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    proofs = [p for p in catalogue() if fnmatch.fnmatch(p.name, args.pattern) and (p.quick or args.command != "quick")]
    if not proofs:
        say(
            f"pattern: expected a proof's name or a pattern for names, got {args.pattern!r}; see python -m proving list"
        )
        return 2
    if args.command == "one" and len(proofs) > 1:
        say(f"pattern: expected one proof, got {len(proofs)}: {', '.join(p.name for p in proofs)}")
        return 2
    if args.command == "list":
        if args.check or args.compile:
            return check_proofs(proofs, compiling=args.compile)
        list_proofs(proofs)
        return 0
    if version() is None:
        say(f"{PACKAGE}: the verifier is not installed; pip install -e '.[prove]' installs it")
        return 2
    started, failed = time.monotonic(), []
    for i, proof in enumerate(proofs):
        say(f"[{i + 1}/{len(proofs)}] {proof.name:44} ", end="")
        if not prove(proof, again=args.again):
            failed.append(proof.name)
    say(f"{len(proofs) - len(failed)} of {len(proofs)} proved, {time.monotonic() - started:.0f} s")
    for name in failed:
        say(f"not proved: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    # By default the signal would end this process alone, and leave the verifier running.
    signal.signal(signal.SIGTERM, stop)
    # Triton 3.9's bindings leak a few objects when they compile a reduction, and say so on exit in thirty lines.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))
    sys.exit(main())
