"""Ring attention: K and V travel around the ranks, and what each part gives is merged by LSE."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..api import attend, attention, autocast
from ..call import NO_EXTRAS, Options
from ..device import Device
from ..gradients import Gradients, attention_backward
from ..tensors import in_bhsd
from .ranks import Ranks, arrive, check_halves, check_inputs, give_head_start


def ring_attention(
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
    """`attention` over a sequence in shares, K and V passed around in a ring; with gradients.

    Args:
        q, k, v: this rank's shares, as for `attention`, in float16 or bfloat16; in each rank of the same shape. Under
            `causal` those that `shard` makes, with as many keys as queries; else any shares.
        group: the processes that have the sequence; None: all. With cards, over NCCL.
        causal, scale, layout, return_lse, deterministic, device: as for `attention`, of the whole sequence.

    Returns:
        This rank's share of O, or with return_lse of (O, LSE). Parts are computed in q's dtype, and merged in fp32.

    The next K and V travel while those here are computed with; in the backward pass, sums of dK and dV too, in fp32
    where they have more than one part. What the causal mask hides whole is left out: half of each step but the first.

    Raises:
        As `attention`, before anything is sent. ValueError, too, where causal shares have another number of keys than
        queries, or an odd one; RuntimeError without torch.distributed.
    """
    q, k, v = autocast(q, k, v)
    options: dict[str, Any] = {
        "causal": causal, "scale": scale, "layout": layout, "deterministic": deterministic, "device": device,
    }  # fmt: skip
    check_inputs("ring_attention", q, k, v, options | {"return_lse": return_lse}, unsupported)
    ranks = Ranks.of(group)
    if causal:
        q_len, kv_len = (in_bhsd(t, layout).shape[2] for t in (q, k))
        if q_len != kv_len:
            raise ValueError(
                f"k: expected {q_len} keys (as queries) under causal, got {kv_len}; pad K and V, or leave causal out"
            )
        check_halves("q", q_len)
    if ranks.size == 1 or not q.numel() or not k.numel():
        return attention(q, k, v, return_lse=return_lse, **options)
    out, lse = RingAttention.apply(q, k, v, ranks, options)
    return (out, lse) if return_lse else out


class Block(NamedTuple):
    """What one step computes: which of my rows, against which keys of the share that is here."""

    rows: slice
    keys: slice
    causal: bool


def block_of(rank: int, source: int, length: int, causal: bool) -> Block:
    """For rank `rank` with the keys of rank `source`: what is left out, no row of it sees.

    Of 2n chunks, rank r has chunks r and 2n-1-r, so a rank before has an earlier first chunk and a later second one.
    length: of a causal share.
    """
    everything = slice(None)
    if not causal or source == rank:
        return Block(everything, everything, causal)  # my chunks are in order: the mask is that of my share alone
    if source < rank:
        return Block(everything, slice(length // 2), False)
    return Block(slice(length // 2, None), everything, False)


class RingAttention(torch.autograd.Function):
    """(O, LSE), with gradients of q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, options: dict[str, Any]) -> Any:
        out, lse = ring_forward(q, k, v, ranks, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ranks, ctx.options = ranks, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        # Without gradients of either, too: the other ranks wait for this one.
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *RingGradients.apply(dout, dlse, q, k, v, out, lse, ctx.ranks, ctx.options), None, None
        return *ring_backward(dout, dlse, q, k, v, out, lse, ctx.ranks, **ctx.options), None, None


class RingGradients(Gradients):
    """`ring_backward` where a graph of the backward pass is made: says what is missing if that is used."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors_and_ranks, options = arguments
        return ring_backward(*tensors_and_ranks, **options)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, *, causal: bool, layout: str, deterministic: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    length = in_bhsd(q, layout).shape[2]
    here = [k.contiguous(), v.contiguous()]
    total = total_lse = None
    for step in range(ranks.size):
        coming = [torch.empty_like(t) for t in here] if step + 1 < ranks.size else []
        transfers = ranks.pass_on(zip(here, coming, strict=False))
        give_head_start(transfers, here)  # a backward pass has a small kernel in between
        rows, keys, diagonal = block_of(ranks.rank, (ranks.rank - step) % ranks.size, length, causal)
        call = Options(causal=diagonal, layout=layout, card_is_shared=bool(coming), **options)
        mine, theirs, values = along(q, rows, layout), *(along(t, keys, layout) for t in here)
        out, lse = attend(mine, theirs, values, NO_EXTRAS, call, return_lse=True)
        if total is None or total_lse is None:
            total, total_lse = out.float(), lse
        else:
            merge(in_bhsd(total, layout)[:, :, rows], total_lse[..., rows], in_bhsd(out, layout), lse)
        arrive(transfers)
        here = coming
    assert total is not None
    assert total_lse is not None
    return total.to(q.dtype), total_lse


def ring_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranks: Ranks,
    *,
    causal: bool,
    layout: str,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ adds up here, and dK and dV of this rank's keys stay here. Those of others' keys follow their K and V one step
    behind, and one step further, home: the first part as it is computed, then sums in fp32.

    Each part of a gradient is exact, as it is given O and LSE of all keys.
    """
    length = in_bhsd(q, layout).shape[2]
    here = [k.contiguous(), v.contiguous()]
    dq = None
    own: list[Tensor] = []  # dK and dV by this rank's rows
    sums: list[Tensor] = []  # of dK and dV, of the keys that are here, by the rows of other ranks and this one
    for step in range(ranks.size):
        coming = [torch.empty_like(t) for t in here] if step + 1 < ranks.size else []
        coming_sums = [torch.empty_like(t) for t in sums]
        moving = [*zip(here, coming, strict=False), *zip(sums, coming_sums, strict=True)]
        transfers = ranks.pass_on(moving)
        rows, keys, diagonal = block_of(ranks.rank, (ranks.rank - step) % ranks.size, length, causal)
        parts = attention_backward(
            None if dout is None else along(dout, rows, layout),
            None if dlse is None else dlse[..., rows],
            along(q, rows, layout),
            along(here[0], keys, layout),
            along(here[1], keys, layout),
            along(out, rows, layout),
            lse[..., rows].contiguous(),
            causal=diagonal,
            layout=layout,
            **options,
        )
        arrive(transfers)
        if dq is None:  # the first step is of all rows and keys
            dq, own = parts[0].float(), list(parts[1:])
        else:
            along(dq, rows, layout).add_(parts[0])
            if step == 1:  # nobody had these keys before but their own rank
                sums = [at_keys(part, keys, t, layout) for part, t in zip(parts[1:], here, strict=True)]
            else:
                sums = [t.float() for t in coming_sums]
                for total, part in zip(sums, parts[1:], strict=True):
                    along(total, keys, layout).add_(part)
        here = coming
    assert dq is not None
    home = [torch.empty_like(t) for t in sums]
    arrive(ranks.pass_on(zip(sums, home, strict=True)))
    dk, dv = ((mine + others).to(k.dtype) for mine, others in zip(own, home, strict=True))  # added in fp32
    return dq.to(q.dtype), dk, dv


def along(t: Tensor, part: slice, layout: str) -> Tensor:
    """A view of part of the sequence."""
    return t[:, :, part] if layout == "bhsd" else t[:, part]


def at_keys(part: Tensor, keys: slice, all_keys: Tensor, layout: str) -> Tensor:
    """A gradient of some keys as one of all keys, 0 for the others."""
    if part.shape == all_keys.shape:
        return part
    whole = torch.zeros_like(all_keys)
    along(whole, keys, layout).copy_(part)
    return whole


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add to `out` (B, H, S, D) and `lse` (B, H, S), in fp32 and in place, attention of the same rows to other keys.

    Rows that have seen no key so far, LSE = -inf, count nothing; if they see none in either, they stay so.
    """
    both = torch.logaddexp(lse, part_lse)
    finite = both.masked_fill(both == float("-inf"), 0.0)  # -inf less -inf would be NaN
    out.mul_((lse - finite).exp()[..., None]).addcmul_(part, (part_lse - finite).exp()[..., None])
    lse.copy_(both)
