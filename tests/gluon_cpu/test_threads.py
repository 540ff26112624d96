"""One BLAS thread: the products here are small, and to hand them to threads costs more than they do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Threads of numpy's BLAS before and after gluon_cpu is imported; nothing if it is another BLAS.
SCRIPT = """
import ctypes, glob, os
import numpy as np

def threads():
    for path in glob.glob(os.path.join(os.path.dirname(np.__file__), "..", "numpy.libs", "*openblas*")):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(library, name):
                return getattr(library, name)()

before = threads()
import gluon_cpu
if before is not None:
    print(before, threads())
"""


def test_numpy_that_was_there_before():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    if not done.stdout:
        pytest.skip("numpy has another BLAS than OpenBLAS")
    before, after = map(int, done.stdout.split())
    if before == 1:
        pytest.skip("one processor: OpenBLAS has one thread anyway")
    assert after == 1
