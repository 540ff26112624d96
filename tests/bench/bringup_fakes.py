"""Steps that are nothing but their fates, for test_bringup.py: each runs in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.bringup.runner import Skip, Step

# Names the folder in which a step that starts a process leaves that process's id, in a file of the step's name.
LEFT_BEHIND = "BRINGUP_TEST_LEFT_BEHIND"
HUNG_SECONDS = 10  # until a hung step is given up; a busy machine needs some of them to start its process


def leave_a_process(step: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(os.environ[LEFT_BEHIND]) / step).write_text(str(child.pid))


def passes(notes):
    notes.put("answer", 41)
    notes.put("answer", 42)
    notes.say("all is well")
    assert os.environ["GIVEN"] == "yes"


def fails(notes):
    notes.put("seen before", True)
    print("this was printed")
    raise ValueError("a reason")


def skips(notes):
    raise Skip("there is no card")


def hangs(notes):
    """With a process of its own, which must not outlive it, and deaf to what is not SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_a_process("hangs")
    notes.put("seen before", True)
    time.sleep(600)


def crashes(notes):
    notes.say("so far so good")
    os.abort()


def leaves_a_process_behind(notes):
    leave_a_process("leaves a process behind")


FAKES = [
    Step(name="passes", run=passes, seconds=60, env={"GIVEN": "yes"}),
    Step(name="fails", run=fails, seconds=60),
    Step(name="skips", run=skips, seconds=60),
    Step(name="hangs", run=hangs, seconds=HUNG_SECONDS),
    Step(name="crashes", run=crashes, seconds=60),
    Step(name="needs a failed one", run=passes, seconds=60, needs=["passes", "fails"]),
    Step(name="needs a skipped one", run=passes, seconds=60, needs=["skips"]),
    Step(name="needs what needs a failed one", run=passes, seconds=60, needs=["passes", "needs a failed one"]),
    Step(name="needs a passed one", run=passes, seconds=60, needs=["passes"], env={"GIVEN": "yes"}),
    Step(name="leaves a process behind", run=leaves_a_process_behind, seconds=60),
]
