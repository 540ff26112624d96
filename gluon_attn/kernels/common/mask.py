"""Which keys a query sees: a frozen object that a kernel is compiled for."""

from dataclasses import dataclass
from typing import Any

LARGEST_LIMIT = 2**31 - 1  # of int32, in which kernels count


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A kernel's compile-time parameter MASK: the keys that it hides from a query count for neither O nor LSE.

    Positions are aligned to the bottom right: query i is at position p = i + Sk - Sq, that of key p. It sees the keys
    that all limits let through:

    causal: keys j <= p.
    left: keys j >= p - left, that is, `left` keys before its own position, besides the one at it. None: no limit.
    right: keys j <= p + right. None: no limit.
    chunk: keys of its own chunk, j // chunk == p // chunk, rounded down. So a query at a negative position sees none.
        None: no limit.
    function: a `MaskFunction`, that says which keys it lets through. None: all.

    Causal is right=0 by another name. As equal masks are equal objects, Mask(right=0) is made Mask(causal=True); and
    under causal, `right` hides nothing more and is made None.

    Raises ValueError for a limit that kernels cannot count.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    function: Any | None = None

    def __post_init__(self) -> None:
        for name, limit, least in (("left", self.left, 0), ("right", self.right, 0), ("chunk", self.chunk, 1)):
            if limit is not None and not least <= limit <= LARGEST_LIMIT:
                raise ValueError(f"self.{name}={limit} must be from {least} to {LARGEST_LIMIT}, or None for no limit")
        if self.right == 0:
            object.__setattr__(self, "causal", True)
        if self.causal:
            object.__setattr__(self, "right", None)

    def __str__(self) -> str:
        """Part of a kernel's key in Triton's cache, so all of the fields."""
        return repr(self)

    @property
    def has_ranges(self) -> bool:
        """Whether the function leaves blocks out."""
        return self.function is not None and (self.function.keys is not None or self.function.rows is not None)

    @property
    def has_early_limit(self) -> bool:
        """Whether early keys are hidden by a limit. Then a key may be seen by a query, but not by the one after."""
        return self.left is not None or self.chunk is not None

    @property
    def hides_early_keys(self) -> bool:
        """Whether a query may see a key, but not the one before, and the blocks walked end where that is known."""
        return self.has_early_limit or self.has_ranges

    @property
    def hides_late_keys(self) -> bool:
        """Whether a query may see a key, but not the one after."""
        return self.causal or self.right is not None or self.chunk is not None or self.function is not None

    @property
    def differs_by_row(self) -> bool:
        """Whether some queries see other keys than the rest."""
        return self.hides_early_keys or self.hides_late_keys

    @property
    def has_row_limits(self) -> bool:
        """Whether a row's limits are more than a diagonal: they stay the same within a chunk; and keys to the right end
        before they are hidden."""
        return self.right is not None or self.chunk is not None

    # -----------------------------------------------------------------------------------------------------------------
    # The same for the host, which knows of a function at most how many keys it lets through: else as if that were all
    # -----------------------------------------------------------------------------------------------------------------

    @property
    def reach(self) -> int | None:
        """How many keys after its own position a query sees; None: no limit."""
        return 0 if self.causal else self.right

    @property
    def most_keys_of_function(self) -> int | None:
        """What its `MaskMod` was given."""
        return None if self.function is None else self.function.most_keys

    @property
    def limits_keys(self) -> bool:
        """Whether a query sees so many keys at most, however many there are."""
        in_window = self.left is not None and self.reach is not None
        return in_window or self.chunk is not None or self.most_keys_of_function is not None

    def keys_seen(self, first_row: int, last_row: int, q_len: int, kv_len: int) -> int:
        """How many keys there are from the first to the last one that some of these queries see. There is none between
        that nobody sees."""
        first, last = first_row + kv_len - q_len, last_row + kv_len - q_len  # positions
        begin, end = 0, kv_len
        if self.left is not None:
            begin = max(begin, first - self.left)
        if self.reach is not None:
            end = min(end, last + self.reach + 1)
        if self.chunk is not None:
            begin = max(begin, first // self.chunk * self.chunk)
            end = min(end, (last // self.chunk + 1) * self.chunk)
        return max(0, end - begin)

    def most_keys(self, kv_len: int) -> int:
        """How many keys a query sees at most."""
        window = kv_len if self.left is None or self.reach is None else self.left + self.reach + 1
        return min(kv_len, window, self.chunk or kv_len, self.most_keys_of_function or kv_len)

    def rows_seen(self, first_key: int, last_key: int, q_len: int, kv_len: int) -> range:
        """The queries that see some of these keys. Of keys 0 <= first_key <= last_key < kv_len."""
        shift = kv_len - q_len
        begin, end = 0, q_len
        if self.reach is not None:
            begin = max(begin, first_key - self.reach - shift)
        if self.left is not None:
            end = min(end, last_key + self.left + 1 - shift)
        if self.chunk is not None:
            begin = max(begin, first_key // self.chunk * self.chunk - shift)
            end = min(end, (last_key // self.chunk + 1) * self.chunk - shift)
        return range(begin, max(begin, end))

    def some_rows_see_nothing(self, q_len: int, kv_len: int) -> bool:
        """Whether there are queries that see no key. They are the first ones: each sees that at its own position, but
        for those at negative ones."""
        reach = 0 if self.chunk is not None else self.reach
        return reach is not None and q_len > kv_len + reach


def visible_pairs(q_len: int, kv_len: int, mask: Mask) -> int:
    """How many pairs (query, key) there are of which the query sees the key: exact, and at once for every length.

    4 · D · visible_pairs · B · H are the FLOPs of a forward pass without those of hidden scores, 10 · D those of a
    backward one.
    """
    first = kv_len - q_len  # position
    if mask.chunk is None:
        return pairs_among(range(first, kv_len), kv_len, mask)
    size = mask.chunk
    chunks = range(max(first, 0) // size, -(-kv_len // size))

    def of_chunk(index: int) -> int:
        start, end = index * size, min(kv_len, (index + 1) * size)
        return pairs_among(range(max(first - start, 0), end - start), end - start, mask)

    if len(chunks) < 3:
        return sum(map(of_chunk, chunks))
    return of_chunk(chunks[0]) + (len(chunks) - 2) * of_chunk(chunks[1]) + of_chunk(chunks[-1])


def pairs_among(positions: range, keys: int, mask: Mask) -> int:
    """`visible_pairs` of queries at these positions and keys 0 ... `keys` - 1, chunks aside."""
    seen = keys * len(positions)
    if mask.reach is not None:
        seen = sum_clamped(positions.start + mask.reach + 1, positions.stop + mask.reach + 1, keys)
    if mask.left is not None:
        seen -= sum_clamped(positions.start - mask.left, positions.stop - mask.left, keys)
    return seen


def sum_clamped(first: int, end: int, top: int) -> int:
    """Of first ... end - 1, each as the number from 0 to `top` that is nearest to it."""

    def below(end: int) -> int:
        """Of all from 0 on."""
        rising = max(0, min(end, top + 1))
        return rising * (rising - 1) // 2 + top * max(0, end - top - 1)

    return below(end) - below(first)
