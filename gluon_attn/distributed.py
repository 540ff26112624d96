"""Attention over a sequence that several cards share: ring attention and Ulysses, over torch.distributed.

    from gluon_attn.distributed import ring_attention, shard, unshard

Each rank holds its share of the sequence, as `shard` makes it, and gets its share of O, LSE and the gradients. The
sequence is cut into 2n chunks for n ranks; rank r has chunks r and 2n-1-r. Under a causal mask early rows see few keys
and late rows many, so that each rank has as much to compute as any other. Both functions take these shares.

- `ring_attention` passes K and V around while it computes, and merges what it finds by LSE. Any number of heads.
- `ulysses_attention` exchanges shares of the sequence for shares of the heads, before and after. It asks for as many KV
  heads as ranks, or a multiple. What a rank sends shrinks with the number of ranks; in the ring it does not.
- `ulysses_attention_varlen` is that of packed sequences, whose rows are cut into shares wherever they begin.

All ranks of the group call, with the same shapes and options: they cannot see each other's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from .api import attend, attention, autocast, check_differentiable, check_options, wants_gradient
from .call import Extras, Options
from .checks import check_seqlens, type_name
from .device import Device
from .gradients import Gradients, attention_backward
from .support import check_forward
from .tensors import FP8_DTYPES, PACKED, in_bhsd
from .varlen import attention_varlen

NO_EXTRAS = Extras()

# ---------------------------------------------------------------------------------------------------------------------
# Ranks and their shares
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A group of processes, and which of them this one is."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> "Ranks":
        if not dist.is_initialized():
            raise RuntimeError(
                "group: expected torch.distributed to be initialised, got none; call "
                "torch.distributed.init_process_group() first, in each process"
            )
        is_group = group is None or isinstance(group, dist.ProcessGroup)
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to who is not in the group
        if not is_group and group != outside:
            todo = "give mesh.get_group()" if hasattr(group, "get_group") else "leave it out for all processes"
            raise TypeError(f"group: expected a torch.distributed ProcessGroup or None, got {type_name(group)}; {todo}")
        rank = dist.get_rank(group) if is_group else -1
        if rank < 0:
            raise ValueError(
                f"group: expected one that this process is in, got one without rank {dist.get_rank()}; call only in "
                "the group's own processes"
            )
        return Ranks(group=group, rank=rank, size=dist.get_world_size(group))

    def pass_on(self, outgoing_and_incoming: Iterable[tuple[Tensor, Tensor]]) -> list[dist.Work]:
        """Begin to send the first of each pair to the next rank, and to receive the second from the one before.

        Until `arrive`, nobody may write what goes out, or read what comes in.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        transfers = []
        for outgoing, incoming in outgoing_and_incoming:
            transfers.append(dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=after))
            transfers.append(dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=before))
        return dist.batch_isend_irecv(transfers) if transfers else []


def arrive(transfers: list[dist.Work]) -> None:
    """Wait for them; on a card, what is launched afterwards does."""
    for transfer in transfers:
        transfer.wait()


def shard(t: Tensor, *, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of a whole tensor along `dim`: chunk r and chunk 2n-1-r of 2n, a copy. Also for positions,
    labels and whatever else goes with the sequence. No rank talks to another."""
    ranks = Ranks.of(group)
    length, chunks = t.shape[dim], 2 * ranks.size
    if length % chunks:
        raise ValueError(
            f"t: expected a length in dimension {dim} that is a multiple of {chunks}, two chunks for each of the "
            f"{ranks.size} ranks, got {length}; pad the sequence at its end"
        )
    size = length // chunks
    return torch.cat([t.narrow(dim, at * size, size) for at in (ranks.rank, chunks - 1 - ranks.rank)], dim)


def unshard(t: Tensor, *, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole tensor, on each rank, of shares that `shard` made: its inverse. Without gradients."""
    ranks = Ranks.of(group)
    if t.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "t: expected a tensor that does not require grad, as gradients stay in shares, got requires_grad=True; "
            ".detach() it, and compute losses of shares"
        )
    check_halves("t", t.shape[dim])
    t = t.contiguous()
    shares = [torch.empty_like(t) for _ in range(ranks.size)]
    dist.all_gather(shares, t, ranks.group)
    half = t.shape[dim] // 2
    firsts = [share.narrow(dim, 0, half) for share in shares]
    seconds = [share.narrow(dim, half, half) for share in reversed(shares)]
    return torch.cat(firsts + seconds, dim)


def check_halves(name: str, length: int) -> None:
    if length % 2:
        raise ValueError(
            f"{name}: expected a share of even length, a chunk from either half of the sequence, got {length}; make "
            "shares with gluon_attn.distributed.shard"
        )


def check_inputs(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    unsupported: dict[str, Any],
    extras: Extras = NO_EXTRAS,
) -> None:
    """What `attention` would refuse of the shares is refused before anything is sent: others would wait for it. extras:
    where packed sequences begin."""
    if is_compiling():
        raise NotImplementedError(
            f"{function}: transfers in a graph are not supported; keep the call out of it by a function of your own "
            "under @torch.compiler.disable"
        )
    for name in ("window", "chunk", "softcap", "alibi_slopes", "sinks", "score_mod"):
        if name in unsupported:
            raise NotImplementedError(
                f"{name}: masks other than causal, and changes of scores, are not supported over several cards so "
                "far; leave the argument out"
            )
    check_options(options["return_lse"], options["deterministic"], unsupported)
    if torch.is_grad_enabled() and wants_gradient(q, k, v):
        check_differentiable(q, k, v, extras, Options(device=options["device"]))
    with torch.no_grad():
        names = {"causal", "scale", "layout", "device", "max_seqlens"} & options.keys()
        check_forward(q, k, v, extras, Options(**{name: options[name] for name in names}))
    if q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"q: expected float16 or bfloat16, as fp8 is not supported over several cards so far, got {q.dtype}; "
            "convert with .to(torch.bfloat16)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Ring attention
# ---------------------------------------------------------------------------------------------------------------------


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

    The next K and V travel while those here are computed with; in the backward pass, sums of dK and dV too, in fp32.
    What the causal mask hides whole is left out: half of each step but the first.

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
        rows, keys, diagonal = block_of(ranks.rank, (ranks.rank - step) % ranks.size, length, causal)
        call = Options(causal=diagonal, layout=layout, card_is_shared=bool(coming), **options)
        mine, theirs, values = along(q, rows, layout), *(along(t, keys, layout) for t in here)
        out, lse = attend(mine, theirs, values, Extras(), call, return_lse=True)
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
    """dQ adds up here; sums of dK and dV follow their K and V one step behind, and one step further, home.

    Each part of a gradient is exact, as it is given O and LSE of all keys.
    """
    length = in_bhsd(q, layout).shape[2]
    here = [k.contiguous(), v.contiguous()]
    dq = None
    sums: list[Tensor] = []  # of dK and dV, of the keys that are here
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
        here = coming
        if dq is None:  # the first step is of all rows and keys
            dq, *sums = (part.float() for part in parts)
            continue
        sums = coming_sums
        along(dq, rows, layout).add_(parts[0])
        for total, part in zip(sums, parts[1:], strict=True):
            along(total, keys, layout).add_(part)
    assert dq is not None
    home = [torch.empty_like(t) for t in sums]
    arrive(ranks.pass_on(zip(sums, home, strict=True)))
    dk, dv = (total.to(k.dtype) for total in home)
    return dq.to(q.dtype), dk, dv


def along(t: Tensor, part: slice, layout: str) -> Tensor:
    """A view of part of the sequence."""
    return t[:, :, part] if layout == "bhsd" else t[:, part]


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add to `out` (B, H, S, D) and `lse` (B, H, S), in fp32 and in place, attention of the same rows to other keys.

    Rows that have seen no key so far, LSE = -inf, count nothing; if they see none in either, they stay so.
    """
    both = torch.logaddexp(lse, part_lse)
    finite = both.masked_fill(both == float("-inf"), 0.0)  # -inf less -inf would be NaN
    out.mul_((lse - finite).exp()[..., None]).addcmul_(part, (part_lse - finite).exp()[..., None])
    lse.copy_(both)


# ---------------------------------------------------------------------------------------------------------------------
# Ulysses
# ---------------------------------------------------------------------------------------------------------------------


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
