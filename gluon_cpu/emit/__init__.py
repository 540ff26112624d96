"""Handlers that turn each operation into Python; importing the submodules registers them."""

from . import arith, atomics, blackwell, control, conversions, globals_, hopper, memory, sync, tensor

__all__ = ["arith", "atomics", "blackwell", "control", "conversions", "globals_", "hopper", "memory", "sync", "tensor"]
