"""Which keys a query sees: a frozen object that a kernel is compiled for."""

from dataclasses import dataclass

LARGEST_LEFT = 2**31 - 1  # of int32, in which kernels count


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A kernel's compile-time parameter MASK: the keys that it hides from a query count for neither O nor LSE.

    Positions are aligned to the bottom right: query i is at the position of key i + Sk - Sq.
    causal: query i sees keys j <= i + Sk - Sq.
    left: query i sees keys j >= i + Sk - Sq - left, that is, `left` keys before its own position, besides the one at
        it. None: no limit. Without causal it sees all keys from there on.
    """

    causal: bool = False
    left: int | None = None

    def __post_init__(self) -> None:
        if self.left is not None and not 0 <= self.left <= LARGEST_LEFT:
            raise ValueError(f"{self.left=} must be from 0 to {LARGEST_LEFT}, or None for no limit")

    def __str__(self) -> str:
        """Part of a kernel's key in Triton's cache, so all of the fields."""
        return repr(self)

    @property
    def hides_early_keys(self) -> bool:
        """Whether a query may see a key, but not the one before."""
        return self.left is not None

    @property
    def differs_by_row(self) -> bool:
        """Whether some queries see other keys than the rest."""
        return self.causal or self.left is not None
