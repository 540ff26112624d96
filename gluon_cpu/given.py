"""Refuses arguments that make no sense: with the name, what is expected, what was given, and what to do."""

import difflib
import operator
import os
from collections.abc import Collection, Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np


def whole(name: str, value: Any, least: int | None = None) -> None:
    """A whole number, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def power_of_two(name: str, value: Any, most: int) -> None:
    whole(name, value)
    if not 1 <= value <= most or value & (value - 1):
        raise ValueError(f"{name}: expected a power of two from 1 to {most}, got {value}")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a text, got {value!r}")


def listed(name: str, value: Any, of: str) -> None:
    """A list, tuple or set; a single thing in its place is told how to become one."""
    if not isinstance(value, list | tuple | set | frozenset):
        hint = f"[{value!r}]" if isinstance(value, str) else "[...]"
        raise TypeError(f"{name}: expected a list of {of}, got {value!r}: write {hint}")


def known(given: Iterable[str], names: Collection[str], whose: str) -> None:
    """Keywords that there are."""
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            raise TypeError(f"{name}: no option and no parameter of {whose}; {hint}")


def file_name(name: str, path: Any) -> None:
    """A name for a file, in a folder that there is."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected the name of a file, got {path!r}")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(
            f"{name}: expected a file in a folder that there is, got {path}; make the folder {folder} first"
        )
    if Path(path).is_dir():
        raise ValueError(f"{name}: expected the name of a file, got the folder {path}")


def grid_sizes(grid: Any) -> tuple[int, int, int]:
    """A grid's three sizes, of a number or of one to three."""
    sizes = grid if isinstance(grid, list | tuple) else (grid,)
    try:
        numbers = [operator.index(size) for size in sizes]
    except TypeError:
        raise TypeError(f"grid: expected whole numbers, as (4,) or (4, 2), got {grid!r}") from None
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"grid: expected one to three sizes, got {len(numbers)}: {grid!r}")
    if min(numbers) < 1:
        raise ValueError(f"grid: expected positive sizes, got {tuple(numbers)}")
    x, y, z = numbers + [1] * (3 - len(numbers))
    return x, y, z
