"""Producer/consumer channels over mbarriers, for warp-specialised Gluon kernels.

A channel carries tiles (or bare signals) from one role of a kernel to another. It owns the memory, the barriers and
their arrival counts; a role holds one *end* of it and sees only `acquire` and `release`. Nothing here knows what the
tiles are for.
"""

from .channel import SharedMemoryChannel, SignalChannel, cluster_fence

__all__ = ["SharedMemoryChannel", "SignalChannel", "cluster_fence"]
