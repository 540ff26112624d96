"""Where cuDNN computes gradients faster than these kernels, so that hooks leave them to torch."""

import math

import torch
from torch import Tensor

from .device import Device

# From so many tokens on, by head dims of Q and of V. docs/backward.md has the measurements.
FASTER_THERE_FROM = {(192, 128): 2048, (256, 256): 8192, (128, 128): 2048}
MANY_HEADS = 8  # to a KV head, at (128, 128)


def cudnn_is_faster(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, device: Device | None) -> bool:
    """Whether its gradients were measured to be faster than ours: causal ones of some head dims, but for (192, 128) on
    an H100 alone, whose memory is slower than an H200's. Not where they have to be deterministic, as cuDNN's are not.

    q, k, v: (B, H, S, D), of which only shapes and the device are looked at. device: as for `attention`.
    """
    if not causal or torch.are_deterministic_algorithms_enabled():
        return False
    head_dims = q.shape[-1], v.shape[-1]
    if q.shape[2] < FASTER_THERE_FROM.get(head_dims, math.inf):
        return False
    if head_dims == (192, 128):
        return True
    if head_dims == (128, 128) and q.shape[1] < MANY_HEADS * k.shape[1]:
        return False
    return (Device.of(q.device) if device is None else device).model == "H100"
