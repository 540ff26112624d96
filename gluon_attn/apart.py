"""Processes for what may hang: a hung kernel cannot be stopped from within its process, and a failed one takes the
process's CUDA context with it. So tests and benchmarks hand *items* (names of cases) to `Apart`, which runs them in
groups, each group in a process, several at a time. When an item hangs or kills its process, it fails with what the
process printed, and the rest of the group goes on in a new process. By hand, in the foreground:

    echo '["name of a case"]' | python -m gluon_attn.apart tests.gpu.test_attention:run_case /dev/stderr 60
"""

import concurrent.futures
import dataclasses
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

__all__ = ["Apart", "Outcome", "Skipped"]

# Where this package lies: in a checkout the folder from which tests and benchmarks are imported.
ROOT = Path(__file__).parents[1]


class Skipped(Exception):
    """Raised by an item that cannot run here: says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    verdict: str  # passed, failed, skipped
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart:
    """How a module runs its items: `module:function` is called with one name after the other.

    group: items of one group share a process, one after the other. item_seconds: limit for one item, a first compile
    included. restarts: how many items of a group may hang or crash before the rest of it is given up.
    """

    function: str
    item_seconds: float = 900  # so large that only a hang takes it: a first compile can take minutes on a busy machine
    group: Callable[[str], object] = lambda name: name
    processes: int = len(os.sched_getaffinity(0))
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: int = 2

    def start(self, names: Iterable[str], pool: concurrent.futures.Executor) -> dict[str, concurrent.futures.Future]:
        groups: dict[object, list[str]] = {}
        for name in names:
            groups.setdefault(self.group(name), []).append(name)
        futures: dict[str, concurrent.futures.Future] = {}
        for members in sorted(groups.values(), key=len, reverse=True):
            future = pool.submit(self.run_group, members)
            futures |= dict.fromkeys(members, future)
        return futures

    def run_group(self, names: list[str]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for _ in range(self.restarts + 1):
            left = [name for name in names if name not in outcomes]
            if left:
                outcomes |= self.run_process(left)
        given_up = Outcome("failed", f"not run: {self.restarts + 1} items of its group before it hung or crashed")
        return {name: outcomes.get(name, given_up) for name in names}

    def run_process(self, names: list[str]) -> dict[str, Outcome]:
        """What became of the items up to the one that ended the process, if one did."""
        with tempfile.TemporaryDirectory() as folder:
            wanted, results, printed = (Path(folder) / name for name in ("wanted", "results", "printed"))
            wanted.write_text(json.dumps(names), encoding="utf-8")
            results.touch()
            with wanted.open() as stdin, printed.open("w") as output:
                process = subprocess.Popen(
                    # -u: what an item printed is written at once, as a process that is ended for a hang, or that
                    # crashes, writes nothing more.
                    [sys.executable, "-u", "-m", "gluon_attn.apart", self.function, str(results)]
                    + [str(self.item_seconds)],
                    cwd=ROOT,
                    env={**os.environ, **self.env},
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                ended = self.wait(process, results)
            rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
            output_of = dict(
                section.partition("\n")[::2] for section in printed.read_text(errors="replace").split(ITEM)
            )
        outcomes = {}
        for name, verdict, text in rows:
            shown = f"{text}\nIt printed:\n{output_of.get(name, '')[-4000:]}" if verdict == "failed" else text
            outcomes[name] = Outcome(verdict, shown)
        # A failed item may have taken the context with it; then it is known, and the next one is not to blame.
        if len(rows) < len(names) and not (rows and rows[-1][1] == "failed" and ended == LOST):
            name = names[len(rows)]
            text = output_of.get(name, "\n".join(output_of.values()))
            outcomes[name] = Outcome("failed", f"hung or crashed ({ended}); it printed:\n{text[-8000:]}")
        return outcomes

    def wait(self, process: subprocess.Popen, results: Path) -> str:
        """Until the process ends. It ends itself when an item is late; one that cannot even do that is killed."""
        seconds = self.item_seconds + 60
        finished = -1
        while True:
            try:
                return f"exit status {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                if results.stat().st_size == finished:
                    process.kill()
                    process.wait()
                    return f"killed after {seconds:.0f} s"
                finished = results.stat().st_size


# Precedes an item's name in what its process prints.
ITEM = "\n--- item: "
# How a process ends when a failed item took its CUDA context with it.
LOST_STATUS = 3
LOST = f"exit status {LOST_STATUS}"


def main(function: str, results: str, item_seconds: str) -> None:
    """In the process: run the items that stdin lists, and write a line of JSON for each."""
    names = json.load(sys.stdin)
    faulthandler.dump_traceback_later(float(item_seconds), exit=True)
    module, _, attribute = function.partition(":")
    run = getattr(importlib.import_module(module), attribute)
    with open(results, "w", encoding="utf-8") as file:
        for name in names:
            print(f"{ITEM}{name}", flush=True)
            faulthandler.dump_traceback_later(float(item_seconds), exit=True)
            verdict, text = "passed", ""
            try:
                run(name)
                settle()
            except Skipped as skipped:
                verdict, text = "skipped", str(skipped)
            except Exception:  # whatever it is, it is this item's verdict, and its traceback is shown with the failure
                verdict, text = "failed", traceback.format_exc()
            file.write(json.dumps([name, verdict, text]) + "\n")
            file.flush()
            if verdict == "failed" and not context_alive():
                os._exit(LOST_STATUS)  # an orderly exit would fail, or hang, on what is left of it
    faulthandler.cancel_dump_traceback_later()


def settle() -> None:
    """Wait for what the card still does for an item, and give back the memory that it is done with: other processes
    may want it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def context_alive() -> bool:
    try:
        settle()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    # Not main as it is here: the class Skipped that items raise is that of the imported module.
    importlib.import_module("gluon_attn.apart").main(*sys.argv[1:])
