"""Cases that `make test` leaves to `make test-slow`: further ones of a kind, where another has the same purpose."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_if(is_slow: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrised test, marked where `is_slow` says so."""
    return [pytest.param(case, marks=pytest.mark.slow) if is_slow(case) else case for case in cases]
