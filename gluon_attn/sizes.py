"""What a row of a tuning table asks of the sizes of a problem."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .problem import Problem

AnyRow = TypeVar("AnyRow", bound="Sizes")

# The second is of soft caps whose kernel needs row maxima: in fp16, and beyond NEAR_ZERO (score_mod.py).
SCORES = ("softcap", "softcap with maxima", "alibi", "bias")
SCORES_OF_GRADIENTS = SCORES[:3]  # with a bias their config is chosen in code


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """min_kv_len: from how many keys on, of those that a query sees. max_kv_len: up to how many; None: any. in_limits:
    only where a window or chunks limit how many these are. min_reuse: from how many queries of a KV head on, which is
    how often each of its keys is used, and pays for what is done to it once.

    Of rows of a table file, which serve what is like the shape that they were timed at: q_lens, the fewest and the most
    queries; sequence_heads, likewise heads times the batch; heads_per_kv_head, exactly so many query heads. None: any.

    scores: for calls whose scores are changed in this way alone, one of SCORES; a bias is then one with a row for each
    query. Such rows are asked before all others, see `as_asked`. None: however scores are.
    """

    min_kv_len: int = 1
    min_reuse: int = 1
    max_kv_len: int | None = None
    in_limits: bool = False
    q_lens: tuple[int, int] | None = None
    sequence_heads: tuple[int, int] | None = None
    heads_per_kv_head: int | None = None
    scores: str | None = None

    @property
    def is_limited(self) -> bool:
        """Whether it is for what is like a problem that was timed."""
        limits = self.max_kv_len, self.q_lens, self.sequence_heads, self.heads_per_kv_head, self.scores
        return self.in_limits or any(limit is not None for limit in limits)

    def covers(self, other: "Sizes", in_limits: tuple[int, int] | None = None) -> bool:
        """Whether it serves whatever the other does. in_limits: of calls with a window or chunks, the fewest and the
        most keys that a query sees there; None: of any calls."""
        fewest, most = in_limits or (1, math.inf)
        return (
            self.min_kv_len <= max(other.min_kv_len, fewest)
            and (self.max_kv_len is None or self.max_kv_len >= most)
            and self.min_reuse <= other.min_reuse
            and not replace(self, max_kv_len=None, in_limits=self.in_limits and in_limits is None).is_limited
        )

    @property
    def are_any(self) -> bool:
        """Whether it serves all sizes."""
        return not self.is_limited and (self.min_kv_len, self.min_reuse) == (1, 1)

    def unmet_size(self, problem: Problem) -> str | None:
        """The first of these fields that the problem does not meet."""
        if self.in_limits and not problem.mask.limits_keys:
            return "in_limits"
        keys = problem.mask.most_keys(problem.kv_len)
        if keys < self.min_kv_len:
            return "min_kv_len"
        if self.max_kv_len is not None and keys > self.max_kv_len:
            return "max_kv_len"
        if problem.q_len * problem.heads // problem.kv_heads < self.min_reuse:
            return "min_reuse"
        if self.q_lens is not None and not self.q_lens[0] <= problem.q_len <= self.q_lens[1]:
            return "q_lens"
        heads = problem.batch * problem.heads
        if self.sequence_heads is not None and not self.sequence_heads[0] <= heads <= self.sequence_heads[1]:
            return "sequence_heads"
        if self.heads_per_kv_head is not None and self.heads_per_kv_head * problem.kv_heads != problem.heads:
            return "heads_per_kv_head"
        if self.scores is not None and self.scores != problem.scores:
            return "scores"
        return None


def as_asked(rows: Sequence[AnyRow], problem: Problem) -> Sequence[AnyRow]:
    """Rows in the order in which a problem asks them: first those for its changed scores, if it has such, so that none
    of other calls, in a file that was loaded later, takes their place."""
    if problem.scores is None:
        return rows
    return sorted(rows, key=lambda row: row.scores is None)
