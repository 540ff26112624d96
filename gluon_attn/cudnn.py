"""Where cuDNN computes gradients faster than these kernels, so that hooks leave them to torch."""

import math

import torch
from torch import Tensor

from .device import Device

# From so many tokens on, by head dims of Q and of V. docs/backward.md has the measurements; those on an H100 are older
# than two slots of dQ, and between 2048 and 8192 tokens nothing was timed.
FASTER_THERE_FROM = {(192, 128): 2048, (256, 256): 8192, (128, 128): 2048}
MANY_HEADS_PER_KV_HEAD = 8  # at (128, 128)


def cudnn_is_faster(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, device: Device | None) -> bool:
    """Whether its gradients were measured to be faster than ours. These are causal ones at (192, 128); and on an H100,
    whose memory is slower than an H200's, at (256, 256), and at (128, 128) with many heads to a KV head. Not where they
    have to be deterministic, as cuDNN's are not.

    q, k, v: (B, H, S, D), of which only shapes and the device are looked at. device: as for `attention`.
    """
    if not causal or q.shape[2] != k.shape[2] or torch.are_deterministic_algorithms_enabled():
        return False
    head_dims = q.shape[-1], v.shape[-1]
    if q.shape[2] < FASTER_THERE_FROM.get(head_dims, math.inf):
        return False
    if head_dims == (192, 128):
        return True
    if head_dims == (128, 128) and q.shape[1] < MANY_HEADS_PER_KV_HEAD * k.shape[1]:
        return False
    return (Device.of(q.device) if device is None else device).model == "H100"
