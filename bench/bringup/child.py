"""The process of a step: `python -m bench.bringup.child MODULE:STEPS NAME FILE`, started by the runner."""

import faulthandler
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .runner import Notes, Skip, Step


def find(reference: str) -> Sequence[Step]:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def main(reference: str, name: str, noted: str) -> None:
    notes = Notes(Path(noted))
    step = next(step for step in find(reference) if step.name == name)
    # If it is about to be killed: where it is. Well before, as its time began with the start of this process.
    faulthandler.dump_traceback_later(max(0.5 * step.seconds, step.seconds - 30))
    verdict, reason = "passed", ""
    try:
        step.run(notes)
    except Skip as skip:
        verdict, reason = "skipped", str(skip)
    except Exception as error:  # whatever it is, it is this step's verdict
        traceback.print_exc()
        verdict, reason = "failed", f"{type(error).__name__}: {error}"
    notes.append({"verdict": verdict, "reason": reason})


if __name__ == "__main__":
    main(*sys.argv[1:])
