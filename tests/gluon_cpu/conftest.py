"""Every kernel of the semantics tests runs under two opposite schedules: the numbers must not depend on them."""

import functools

import pytest

import gluon_cpu


@pytest.fixture(params=["random", "late"])
def launch(request):
    """`gluon_cpu.launch` with a schedule."""
    return functools.partial(gluon_cpu.launch, schedule=gluon_cpu.Schedule(request.param, seed=1))


@pytest.fixture
def blackwell_launch(launch):
    """`launch` for sm_100a, or another target."""
    return functools.partial(launch, target="sm_100a")
