"""What a TMA reduction does to each element of global memory."""

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
