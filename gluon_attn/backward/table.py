"""Which configuration of the backward serves which problem."""

from ..problem import Problem
from .configs import HopperBackward

HOPPER = {
    64: HopperBackward(block_m=128, keys=128, query_slots=3, dout_slots=3, ds_slots=1, rings_in_step=True),
    128: HopperBackward(block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=2),
    256: HopperBackward(block_m=64, keys=64, query_slots=2, dout_slots=1, ds_slots=1),
}

# By padded head dim, under bench/results/: where they were timed beside cuDNN. docs/lab_log.md says what lost to them.
RESULT_FILES = {64: "h200_gradients.json", 128: "h200_gradients.json", 256: "h200_gradients_d256.json"}


def padded_head_dim(problem: Problem) -> int:
    """Of the kernels that compute its gradients: of Q, K, V and O alike. TMA fills the columns between with zeros."""
    return next(padded for padded in HOPPER if max(problem.head_dim, problem.head_dim_v) <= padded)


def pick_config(problem: Problem) -> HopperBackward:
    """By the padded head dim."""
    return HOPPER[padded_head_dim(problem)]
