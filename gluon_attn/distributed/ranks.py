"""Ranks, their shares of a sequence, and what of these is refused before anything is sent."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from ..api import check_differentiable, check_options, wants_gradient
from ..call import NO_EXTRAS, Extras, Options
from ..checks import type_name
from ..support import check_forward
from ..tensors import FP8_DTYPES

HEAD_START_CYCLES = 40_000  # of the card's clock: 20 µs, ten times what a kernel takes to begin after another
HEAD_START_BYTES = 2**25  # which travel for 110 µs, at 300 GB/s

REFUSED = "window", "chunk", "segment_ids", "mask_mod", "softcap", "alibi_slopes", "bias", "sinks", "score_mod"


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


def give_head_start(transfers: list[dist.Work], outgoing: list[Tensor]) -> None:
    """On a card, hold back what is launched next until large transfers have begun.

    NCCL's kernel waits for what came before in this stream, and so does the kernel that is launched next. If attention
    begins first, it keeps all processors until few of its programs are left. Then nothing travels beside it.
    """
    if transfers and outgoing[0].is_cuda and sum(t.nbytes for t in outgoing) >= HEAD_START_BYTES:
        with torch.cuda.device(outgoing[0].device):
            torch.cuda._sleep(HEAD_START_CYCLES)  # a private name of torch's: the test says when it goes


def arrive(transfers: list[dist.Work]) -> None:
    """Wait for them; on a card, what is launched afterwards does."""
    for transfer in transfers:
        transfer.wait()


def shard(t: Tensor, *, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of a whole tensor along `dim`: chunk r and chunk 2n-1-r of 2n, a copy. Also for positions,
    labels and whatever else goes with the sequence. No rank talks to another.

    Raises ValueError if the length is no multiple of 2n, where n is the number of ranks."""
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
    """The whole tensor, on each rank, of shares that `shard` made: its inverse. Without gradients.

    Raises NotImplementedError if `t` requires grad, and ValueError if the share's length is odd."""
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
    for name in REFUSED:
        if name in unsupported:
            raise NotImplementedError(
                f"{name}: masks other than causal, and changes of scores, are not supported over several cards so "
                "far; leave the argument out"
            )
    check_options(options["return_lse"], options["deterministic"], unsupported, function)
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
