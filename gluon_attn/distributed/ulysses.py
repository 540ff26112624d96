"""Ulysses: shares of the sequence are exchanged for shares of the heads before attention, and back after."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..api import attention, autocast
from ..call import Extras
from ..checks import check_seqlens
from ..device import Device
from ..tensors import PACKED, in_bhsd
from ..varlen import attention_varlen
from .ranks import Ranks, check_halves, check_inputs


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    device: Device | None = None,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over a sequence in shares, each rank computing some heads of all of it; with gradients.

    The method is DeepSpeed-Ulysses' (Jacobs et al., 2023): an all-to-all of q, k and v before, and one of O after.

    Args:
        q, k, v: this rank's shares as `shard` makes them, with all heads, in float16 or bfloat16. The number of query
            heads and that of KV heads are multiples of the number of ranks.
        group, causal, scale, layout, return_lse, deterministic, device: as for `ring_attention`; the numbers of keys
            and queries may differ under `causal` too.

    Returns:
        This rank's share of O, or with return_lse of (O, LSE).

    Raises:
        As `attention`, before anything is sent. ValueError, too, for heads that the ranks cannot share and shares of
        odd length; RuntimeError without torch.distributed.
    """
    q, k, v = autocast(q, k, v)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "deterministic": deterministic, "device": device}
    check_inputs("ulysses_attention", q, k, v, options | {"layout": layout, "return_lse": return_lse}, unsupported)
    ranks = Ranks.of(group)
    shares = shares_of(q, k, v, layout, ranks)
    if ranks.size == 1 or not q.numel() or not k.numel():
        return attention(q, k, v, layout=layout, return_lse=return_lse, **options)
    whole = [whole_sequence(t, ranks) for t in shares]
    out, lse = attention(*whole, return_lse=True, **options)  # (B, H/n, S, D)
    out = whole_heads(out, ranks)
    if layout == "bshd":
        out = out.transpose(1, 2)
    out = out.contiguous()
    return (out, whole_heads(lse[..., None], ranks)[..., 0]) if return_lse else out


def ulysses_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    device: Device | None = None,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` over packed rows in shares, as `ulysses_attention` computes it; with gradients.

    Args:
        q: (T/n, H, D), this rank's share of the T rows of all sequences, as `shard(rows, dim=0)` makes it, in float16
            or bfloat16; a sequence may be in several shares. T is a multiple of 2n: fill up with rows after the last
            sequence. k, v: (U/n, Hkv, D) likewise. H and Hkv are multiples of n.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of all T and U rows, the same in each rank; as
            `attention_varlen` has them.
        group, causal, scale, return_lse, deterministic, device: as for `ulysses_attention`.

    Returns:
        This rank's share of O, (T/n, H, D), or with return_lse of (O, LSE), LSE (H, T/n). Rows after the last sequence
        hold anything, their gradients are 0.

    Raises:
        As `ulysses_attention`.
    """
    q, k, v = autocast(q, k, v)
    lengths: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "deterministic": deterministic, "device": device}
    of_call = {"layout": PACKED, "return_lse": return_lse, "max_seqlens": check_seqlens(max_seqlen_q, max_seqlen_k)}
    starts = Extras(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_inputs("ulysses_attention_varlen", q, k, v, options | of_call, unsupported, starts)
    ranks = Ranks.of(group)
    shares = shares_of(q, k, v, PACKED, ranks)
    if ranks.size == 1 or not q.numel() or not k.numel():
        return attention_varlen(q, k, v, *lengths, return_lse=return_lse, **options)
    whole_q, whole_k, whole_v = (whole_sequence(t, ranks)[0].transpose(0, 1) for t in shares)  # (T, H/n, D)
    out, lse = attention_varlen(whole_q, whole_k, whole_v, *lengths, return_lse=True, **options)
    out = whole_heads(in_bhsd(out, PACKED), ranks)[0].transpose(0, 1).contiguous()
    return (out, whole_heads(lse[None, ..., None], ranks)[0, ..., 0]) if return_lse else out


def shares_of(q: Tensor, k: Tensor, v: Tensor, layout: str, ranks: Ranks) -> list[Tensor]:
    """(B, H, S/n, D) of each, checked: that the ranks can share heads and lengths."""
    shares = {name: in_bhsd(t, layout) for name, t in (("q", q), ("k", k), ("v", v))}
    for name, what in (("q", "heads"), ("k", "KV heads")):
        heads, length = shares[name].shape[1:3]
        if heads % ranks.size:
            instead = "use a smaller group" if layout == PACKED else "use ring_attention, or a smaller group"
            raise ValueError(
                f"{name}: expected a number of {what} that is a multiple of the {ranks.size} ranks, got {heads}; "
                f"{instead}"
            )
        check_halves(name, length)
    return list(shares.values())


def whole_sequence(t: Tensor, ranks: Ranks) -> Tensor:
    """(B, H, S/n, D), a share of the sequence -> (B, H/n, S, D), a share of the heads."""
    by_rank = AllToAll.apply(
        t.unflatten(1, (ranks.size, t.shape[1] // ranks.size)).movedim(1, 0), ranks
    )  # [n, B, H/n, S/n, D]
    first, second = by_rank.unflatten(3, (2, t.shape[2] // 2)).unbind(3)
    return torch.cat((first, second.flip(0))).movedim(0, 2).flatten(2, 3)


def whole_heads(t: Tensor, ranks: Ranks) -> Tensor:
    """(B, H/n, S, D), a share of the heads -> (B, H, S/n, D), a share of the sequence: the inverse."""
    chunks = t.unflatten(2, (2 * ranks.size, t.shape[2] // (2 * ranks.size))).movedim(2, 0)
    first, second = chunks.chunk(2)  # each [n, B, H/n, S/2n, D]
    by_rank = AllToAll.apply(torch.cat((first, second.flip(0)), dim=3), ranks)
    return by_rank.movedim(0, 1).flatten(1, 2)


class AllToAll(torch.autograd.Function):
    """Element i of the first dimension goes to rank i, and is what came from rank i. So do the gradients."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        t = t.contiguous()
        received = torch.empty_like(t)
        dist.all_to_all_single(received, t, group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return AllToAll.apply(*grads, ctx.ranks), None
