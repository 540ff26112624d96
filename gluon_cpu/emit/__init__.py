"""Handlers that turn each operation into Python; importing the submodules registers them."""

from . import arith, blackwell, control, copies, globals_, memory, sync, tensor

__all__ = ["arith", "blackwell", "control", "copies", "globals_", "memory", "sync", "tensor"]
