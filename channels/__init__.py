"""Producer/consumer channels over mbarriers, for warp-specialised Gluon kernels. To learn them: docs/channels.md.

A channel carries tiles (or bare signals) from one role of a kernel to another. It owns the memory, the barriers and
their arrival counts; a role holds one *end* of it and sees only `acquire` and `release`. Nothing here knows what the
tiles are for.

The life of a channel: `alloc` (memory and barriers) -> `init_all` (barrier counts of every channel of the kernel, then
one cluster-wide fence) -> `acquire` at a producer's or a consumer's end -> `release` of the acquired slot ->
`close_all` (once no CTA of the cluster can still arrive, barriers invalidated).

An end is immutable and holds its own position in the ring: `slot, keys = keys.acquire()`. The slot knows its barriers,
so a role touches neither an index, nor a phase, nor a barrier. `check_ends` finds an end that is dropped or used twice.
"""

from . import tma
from .barriers import close_all, cluster_fence, init_all
from .ends import Misuse, check_ends
from .shared_memory import SharedMemoryChannel, SharedMemoryConsumer, SharedMemoryProducer, Slot
from .signals import SignalChannel, SignalConsumer, SignalProducer
from .tensor_memory import TensorMemoryChannel, TensorMemoryConsumer, TensorMemoryProducer, TensorMemorySlot
from .turns import Turn, turn_of
from .work import WorkChannel, WorkConsumer, WorkProducer

__all__ = [
    "Misuse",
    "SharedMemoryChannel",
    "SharedMemoryConsumer",
    "SharedMemoryProducer",
    "SignalChannel",
    "SignalConsumer",
    "SignalProducer",
    "Slot",
    "TensorMemoryChannel",
    "TensorMemoryConsumer",
    "TensorMemoryProducer",
    "TensorMemorySlot",
    "Turn",
    "WorkChannel",
    "WorkConsumer",
    "WorkProducer",
    "check_ends",
    "close_all",
    "cluster_fence",
    "init_all",
    "tma",
    "turn_of",
]
