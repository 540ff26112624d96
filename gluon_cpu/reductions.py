"""What reductions and atomics leave in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np


def add(old: Any, new: Any) -> Any:
    return old + new


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def combine(kind: str, old: Any, new: Any) -> Any:
    """What an atomic leaves in memory."""
    if kind in ("fadd", "add"):
        return (old + new).astype(old.dtype)
    if kind in ("max", "min"):
        return (np.maximum if kind == "max" else np.minimum)(old, new)
    if kind in ("umax", "umin"):
        unsigned = old.dtype.str.replace("i", "u")
        return (np.maximum if kind == "umax" else np.minimum)(old.view(unsigned), new.view(unsigned)).view(old.dtype)
    if kind in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[kind](old, new)
    if kind == "exch":
        return new
    raise NotImplementedError(f"atomic {kind}")
