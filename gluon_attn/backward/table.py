"""Which configuration of the backward serves which problem."""

from dataclasses import replace

from ..device import Device
from ..problem import PADDED_HEAD_DIMS, Problem
from .configs import HopperBackward

HOPPER = {
    64: HopperBackward(block_m=128, keys=128, query_slots=3, dout_slots=3, ds_slots=1, rings_in_step=True),
    128: HopperBackward(block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=2),
    256: HopperBackward(block_m=64, keys=64, query_slots=2, dout_slots=1, ds_slots=1),
}

# By padded head dim, under bench/results/: where they were timed beside cuDNN. docs/lab_log.md says what lost to them.
RESULT_FILES = {64: "h200_gradients.json", 128: "h200_gradients.json", 256: "h200_gradients_d256.json"}


# By padded head dims of Q and of V. Waits for its measurement.
UNLIKE = {
    (192, 128): HopperBackward(block_m=64, keys=64, query_slots=2, dout_slots=2, ds_slots=1, dq_slots=2, q_pieces=3),
}


def padded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Of Q and of V in the kernels that compute such gradients. TMA fills the columns between with zeros. Where there
    are none for two head dims, both are padded to one."""
    for d, d_v in UNLIKE:
        if PADDED_HEAD_DIMS[PADDED_HEAD_DIMS.index(d) - 1] < head_dim <= d and head_dim_v <= d_v:
            return d, d_v
    both = next(padded for padded in HOPPER if max(head_dim, head_dim_v) <= padded)
    return both, both


# With a bias of each row, at D=64 with row blocks of half the size: a tile of it takes memory, and registers.
WITH_BIAS = {64: HopperBackward(block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=2)}


def pick_config(problem: Problem) -> HopperBackward:
    """By the padded head dims; with a bias, with fewer slots for Q if it leaves no room."""
    d, d_v = padded_head_dims(problem.head_dim, problem.head_dim_v)
    config = HOPPER[d] if d == d_v else UNLIKE[d, d_v]
    if problem.bias is None:
        return config
    if problem.bias.each_row and d == d_v:
        config = WITH_BIAS.get(d, config)
    room = Device.hopper().smem_bytes - config.smem_bytes(d, d_v)
    return config if config.bias_bytes(problem.bias) <= room else replace(config, query_slots=1)
