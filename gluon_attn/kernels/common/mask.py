"""Which keys a query sees: a frozen object that a kernel is compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A kernel's compile-time parameter MASK: the keys that it hides from a query count for neither O nor LSE.

    causal: query i sees keys j <= i + Sk - Sq, aligned to the bottom right.
    """

    causal: bool = False

    def __str__(self) -> str:
        """Part of a kernel's key in Triton's cache, so all of the fields."""
        return repr(self)
