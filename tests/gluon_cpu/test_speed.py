"""How fast gluon_cpu is, in processor time: `pytest -m speed` on a quiet machine, and at no other time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gluon_cpu.attention import Run, normal_qkv

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.speed


def seconds_of(run: Run, repeats: int = 7) -> float:
    """Of processor time, the fastest of several launches: others may run beside it."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def test_a_launch_on_one_cta_takes_20_ms():
    torch.set_num_threads(1)
    seconds = seconds_of(Run(*normal_qkv(q_len=256), causal=True))
    assert seconds < 0.020, f"{1000 * seconds:.1f} ms"


def test_a_launch_on_two_ctas_takes_60_ms():
    torch.set_num_threads(1)
    seconds = seconds_of(Run(*normal_qkv(q_len=512), causal=True, num_ctas=2))
    assert seconds < 0.060, f"{1000 * seconds:.1f} ms"


def timed_process(code: str, cache: Path) -> float:
    """What the code prints: seconds."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "GLUON_CPU_CACHE": str(cache), "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


FIRST_LAUNCH = """
import time
from tests.gluon_cpu.attention import Run, normal_qkv
run = Run(*normal_qkv(q_len=64), causal=True)
start = time.process_time()
run()
print(time.process_time() - start)
"""


def test_a_first_launch_takes_3_s_and_the_next_half_of_that(tmp_path):
    first, second = timed_process(FIRST_LAUNCH, tmp_path), timed_process(FIRST_LAUNCH, tmp_path)
    assert first < 3.0, f"{first:.2f} s"
    assert second < first / 2, f"{second:.2f} s after {first:.2f} s"


IMPORT = """
import torch, triton  # not ours to pay for
import time
start = time.process_time()
import gluon_cpu
from gluon_attn.forward.table import HOPPER
print(time.process_time() - start)
"""


def test_import_takes_1_s(tmp_path):
    seconds = timed_process(IMPORT, tmp_path)
    assert seconds < 1.0, f"{seconds:.2f} s"
