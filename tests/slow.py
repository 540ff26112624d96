"""Cases that `make test` leaves to `make test-slow`: further ones of a kind, where another has the same purpose."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_if(is_slow: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrised test, marked where `is_slow` says so."""
    return [param(case) if is_slow(case) else case for case in cases]


def param(case: Any) -> Any:
    """A case, slow; a tuple has a value for each argument of the test."""
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
