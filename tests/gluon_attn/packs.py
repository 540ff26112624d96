"""Packed sequences for tests, with poison around each. Without gluon_cpu: the card's tests run under Triton 3.8 too."""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAN = float("nan")


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class Pack(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    used: tuple[int, ...] | None

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "q": self.q, "k": self.k, "v": self.v,
            "cu_seqlens_q": starts(self.lengths_q), "cu_seqlens_k": starts(self.lengths_k),
            "max_seqlen_q": max(self.lengths_q), "max_seqlen_k": max(self.lengths_k),
            "seqused_k": None if self.used is None else torch.tensor(self.used, dtype=torch.int32),
        }  # fmt: skip

    def sequences(self) -> list[tuple[slice, Tensor, Tensor, Tensor]]:
        """(rows, q, k, v), of each."""
        used = self.lengths_k if self.used is None else self.used
        rows = (slice(*pair) for pair in pairwise(starts(self.lengths_q).tolist()))
        firsts = starts(self.lengths_k).tolist()
        return [
            (row, self.q[row], self.k[first : first + count], self.v[first : first + count])
            for row, first, count in zip(rows, firsts, used, strict=False)
        ]


def pack(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    *,
    used: tuple[int, ...] | None = None,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    poisoned: int | None = None,
    seed: int = 0,
) -> Pack:
    """Normal numbers, but NaN in keys that do not count, in rows after the last sequence, and in the keys of one."""
    made = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (sum(lengths_q) + 3, heads, head_dim), "k": (sum(lengths_k) + 70, kv_heads, head_dim),
        "v": (sum(lengths_k) + 70, kv_heads, head_dim_v or head_dim),
    }  # fmt: skip
    q, k, v = (torch.randn(shape, generator=made) for shape in shapes.values())
    q[sum(lengths_q) :] = NAN
    for t in (k, v):
        t[sum(lengths_k) :] = NAN
        for i, (first, end) in enumerate(pairwise(starts(lengths_k).tolist())):
            t[first + (used[i] if used is not None else end - first) : end] = NAN
            if i == poisoned:
                t[first:end] = NAN
    return Pack(q.to(dtype), k.to(dtype), v.to(dtype), lengths_q, lengths_k, used)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of NaN, whatever bits."""
    return torch.equal(torch.nan_to_num(a.float(), nan=12345.0), torch.nan_to_num(b.float(), nan=12345.0))
