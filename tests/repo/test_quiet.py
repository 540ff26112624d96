"""What a program that imports the packages prints of their own: nothing."""

import subprocess
import sys


def test_an_import_says_nothing_at_exit():
    """Triton's bindings print thirty lines about leaks if a jitted function outlives them."""
    command = [sys.executable, "-c", "import numpy, channels, gluon_attn, gluon_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
