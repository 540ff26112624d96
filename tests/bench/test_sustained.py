"""Samples of a long run."""

import math

from bench import sustained


def test_settled_samples_leave_out_the_start():
    samples = [(0.1, 700.0, 1900.0), (0.5, 600.0, 1500.0), (0.9, 620.0, 1480.0), (1.5, 90.0, 300.0)]
    assert sustained.settled(samples, 0.0, 1.0) == (610.0, 1490.0)
    assert all(math.isnan(x) for x in sustained.settled([], 0.0, 1.0))
