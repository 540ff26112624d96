"""One attention problem: its shapes and options, and which tensors pose it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .bias import Bias, bias_of
from .checks import (
    Window,
    check_bias,
    check_bool,
    check_head_dim,
    check_is_tensor,
    check_kind,
    check_layout,
    check_lengths,
    check_of_heads,
    check_scale_tensor,
    check_shapes,
    check_strides,
    checked_scale,
    checked_window,
)
from .kernels.common.mask import Mask
from .mask_mod import MaskFunction
from .score_mod import ScoreFunction, kind_of
from .tensors import PADDED_HEAD_DIMS, SCALES, in_bhsd

# Of packed sequences: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and seqused_k, as they are given.
Lengths = tuple[object, object, object, object, object]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """q (B, H, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv), dimensions in the order of `layout`; scale finite and
    positive. head_dim: D. head_dim_v: Dv, which O has too.

    Of packed sequences (`sequences` says how many) batch is 1, and q_len and kv_len count the rows of all of them
    together: where each begins and ends is known on the card alone.
    """

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    scale: float
    layout: str
    score_mod: ScoreFunction | None = None  # how scores are changed
    sinks: torch.dtype | None = None  # of each head's score without a value, if there are such
    left: int | None = None  # how many keys before its own position a query sees, see `Mask`; None: no limit
    right: int | None = None  # how many after
    chunk: int | None = None  # of how many keys the chunks are, of which a query sees its own; None: no chunks
    sequences: int | None = None  # that are packed; None: a batch of equal lengths
    mask_function: MaskFunction | None = None  # what says besides which keys a query sees
    head_dim_v: int = 0  # 0: as Q's
    bias: Bias | None = None  # that is added to scores

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: Window = (None, None),
        chunk: int | None = None,
        score_mod: ScoreFunction | None = None,
        mask_function: MaskFunction | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        layout: str = "bhsd",
        out: Tensor | None = None,
        scales: Sequence[Tensor | None] = (None, None, None),
        lengths: Lengths | None = None,
        bias: Tensor | None = None,
    ) -> "Problem":
        """The problem that these tensors pose, all of its shapes, dtypes, devices and strides checked.

        scales: those of q, k and v, for fp8; None is 1. lengths: of packed sequences.
        What may change from call to call with the same shapes is not looked at: base addresses, and whether the
        memory is there and holds what the tensor reads as (`refuse_address`, `check_readable`).
        Raises TypeError or ValueError naming the argument, what it should be, what it is, and what to do.
        """
        named = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        for name, t in named.items():
            check_is_tensor(name, t)
        check_layout(layout, packed=bool(lengths))
        check_bool("causal", causal)
        left, right = checked_window(window, chunk)
        for name, t in named.items():
            check_kind(name, t, q, layout)
        sequences = None if lengths is None else check_lengths(q, *lengths)
        batch, heads, q_len, head_dim = in_bhsd(q, layout).shape
        check_head_dim("q", q)
        check_shapes(in_bhsd(q, layout), in_bhsd(k, layout), in_bhsd(v, layout))
        if v.shape[-1] != head_dim:
            check_head_dim("v", v)
        if out is not None and out.shape != (*q.shape[:-1], v.shape[-1]):
            like = "as q" if v.shape[-1] == head_dim else "as q, with v's head_dim"
            want = (*q.shape[:-1], v.shape[-1])
            raise ValueError(f"out: expected shape {want} ({like}), got {tuple(out.shape)}; leave it out")
        for name, t in named.items():
            check_strides(name, t, is_written=name == "out")
        for name, one in zip(SCALES, scales, strict=True):
            check_scale_tensor(name, one, q, (batch if sequences is None else sequences, in_bhsd(k, layout).shape[1]))
        if sinks is not None:
            check_of_heads("sinks", sinks, q, ((heads,),), (torch.float32, torch.float16, torch.bfloat16))
        scale = checked_scale(scale, head_dim)
        if bias is not None:
            check_bias(bias, q, (batch, heads, q_len, in_bhsd(k, layout).shape[2]), scale)
        return Problem(
            dtype=q.dtype,
            batch=batch,
            heads=heads,
            kv_heads=in_bhsd(k, layout).shape[1],
            q_len=q_len,
            kv_len=in_bhsd(k, layout).shape[2],
            head_dim=head_dim,
            head_dim_v=v.shape[-1],
            causal=causal or right == 0,
            left=left,
            right=None if causal or right == 0 else right,
            chunk=chunk,
            score_mod=score_mod,
            mask_function=mask_function,
            sinks=None if sinks is None else sinks.dtype,
            scale=scale,
            layout=layout,
            sequences=sequences,
            bias=None if bias is None else bias_of(bias, (batch, heads, q_len)),
        )

    @property
    def typical(self) -> "Problem":
        """A batch of equal lengths that is like packed sequences, for a choice that depends on lengths."""
        if self.sequences is None:
            return self
        count = max(1, self.sequences)
        return replace(
            self, batch=count, q_len=-(-self.q_len // count), kv_len=-(-self.kv_len // count), sequences=None
        )

    @property
    def mask(self) -> Mask:
        """Without limits that hide nothing at these lengths, so that short sequences run the kernel without."""
        mask = Mask(causal=self.causal, left=self.left, right=self.right, chunk=self.chunk, function=self.mask_function)
        if self.sequences is not None:
            return mask
        # Positions are from Sk - Sq to Sk - 1, and those below 0 see no key of a chunk, or under a causal mask.
        one_chunk = mask.chunk is None or (mask.chunk >= self.kv_len and (mask.causal or self.q_len <= self.kv_len))
        return Mask(
            causal=mask.causal,
            left=None if mask.left is None or mask.left >= self.kv_len - 1 else mask.left,
            right=None if mask.right is None or mask.right >= self.q_len - 1 else mask.right,
            chunk=None if one_chunk else mask.chunk,
            function=mask.function,
        )

    @property
    def scores(self) -> str | None:
        """How scores are changed, of the ways that a row of a tuning table may be for: `SCORES` in sizes.py. None: not
        at all, or by a bias that all queries have in common, or by a caller's own function."""
        return scores_of(self.score_mod, self.bias, self.dtype)

    @property
    def has_documents(self) -> bool:
        """Whether a query sees keys of its own document only, which a kernel before prepares."""
        return self.mask_function is not None and self.mask_function.found_before

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch: no query, or no key."""
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len, self.sequences)

    @property
    def padded_head_dim(self) -> int:
        """Columns of Q and K in the kernel that computes it. TMA fills those between with zeros."""
        return Problem.padded(self.head_dim)

    @property
    def padded_head_dim_v(self) -> int:
        """Likewise of V and O."""
        return Problem.padded(self.head_dim_v)

    @staticmethod
    def padded(head_dim: int) -> int:
        return next(padded for padded in PADDED_HEAD_DIMS if head_dim <= padded)


def scores_of(score_mod: ScoreFunction | None, bias: Bias | None, dtype: torch.dtype) -> str | None:
    """See `Problem.scores`."""
    if bias is not None:
        return "bias" if bias.each_row else None
    kind = kind_of(score_mod)
    return "softcap with maxima" if kind == "softcap" and not needs_no_maximum(score_mod, dtype) else kind


def needs_no_maximum(score_mod: ScoreFunction | None, dtype: torch.dtype) -> bool:
    """Whether the Hopper kernel takes 0 for the maximum of each row, see online_softmax.py."""
    return score_mod is not None and score_mod.near_zero and dtype == torch.bfloat16
