"""Handlers that turn each operation into Python; importing the submodules registers them."""

from . import arith, atomics, blackwell, control, conversions, copies, globals_, memory, sync, tensor

__all__ = ["arith", "atomics", "blackwell", "control", "conversions", "copies", "globals_", "memory", "sync", "tensor"]
