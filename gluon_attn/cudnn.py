"""Where cuDNN computes gradients faster than these kernels, so that hooks leave them to torch."""

import torch
from torch import Tensor

from .device import Device

# Causal, from so many tokens on, by head dims of Q and of V. docs/backward.md has the measurements. At (128, 128) that
# is on an H100 alone, whose memory is slower than an H200's, and was timed before there were two slots of dQ.
FASTER_THERE_FROM = {(192, 128): 2048, (128, 128): 2048}
MANY_HEADS_PER_KV_HEAD = 8  # at (128, 128)
# Likewise, a forward pass with its gradients: docs/integrations.md has these measurements.
BOTH_FASTER_THERE_FROM = {(192, 128): 4096}


def cudnn_is_faster(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, device: Device | None, with_forward: bool = False
) -> bool:
    """Whether its gradients were measured to be faster than ours: causal ones at (192, 128); and on an H100 at
    (128, 128), with many heads to a KV head. Not where they have to be deterministic, as cuDNN's are not.

    q, k, v: (B, H, S, D), of which only shapes and the device are looked at. device: as for `attention`. with_forward:
    compare both passes together, which cuDNN has faster at (192, 128) alone.
    """
    head_dims = q.shape[-1], v.shape[-1]
    least = (BOTH_FASTER_THERE_FROM if with_forward else FASTER_THERE_FROM).get(head_dims)
    if least is None or not causal or torch.are_deterministic_algorithms_enabled():
        return False
    if q.shape[2] != k.shape[2] or q.shape[2] < least:
        return False
    if head_dims == (192, 128):
        return True
    assert head_dims == (128, 128)
    if q.shape[1] < MANY_HEADS_PER_KV_HEAD * k.shape[1]:
        return False
    return (Device.of(q.device) if device is None else device).model == "H100"
