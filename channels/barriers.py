"""What every channel does with its barriers, and the fence between their lives' stages."""

from .compat import cluster, gl, jit, mbarrier


@jit
def init_barriers(barriers, COUNT: gl.constexpr):
    """barriers: [N] mbarriers; COUNT: arrivals of one CTA that complete a phase (see arrivals.py)."""
    BARRIERS: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(BARRIERS):
        mbarrier.init(barriers.index(i), count=COUNT)


@jit
def close_barriers(barriers):
    BARRIERS: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(BARRIERS):
        mbarrier.invalidate(barriers.index(i))


@jit
def cluster_fence():
    """Between the inits of all channels and the first arrive, and between the last arrive and the first `close`.

    A peer CTA may arrive on our barriers, or write into our slots, as soon as it runs: it must not before our inits are
    visible to it, and we must not invalidate a barrier, or exit, while it still can. Orders this CTA's threads as well.
    """
    if gl.num_ctas() > 1:
        cluster.barrier()
    else:
        gl.barrier()


@jit
def init_all(channels):
    """Before the roles begin: all channels of the kernel, a tuple. Every CTA of the cluster sees them afterwards."""
    for i in gl.static_range(len(channels)):
        channels[i].init()
    cluster_fence()


@jit
def close_all(channels):
    """Once the roles have ended. A peer may arrive on, or load into, what is ours until its roles have ended too."""
    cluster_fence()
    for i in gl.static_range(len(channels)):
        channels[i].close()
