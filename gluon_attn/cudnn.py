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
# At (128, 128), with a causal mask or none. docs/backward.md has the measurement of gradients alone, of 8 x 2048 tokens
# on an H200. Other lengths and cards are taken to be alike. Both passes together are left too: what the forward pass
# gains, at 1.16 of cuDNN's rate, is less than what gradients lose.
VERY_MANY_HEADS_PER_KV_HEAD = 32
VERY_MANY_FROM = 2048  # tokens


def cudnn_is_faster(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, device: Device | None, with_forward: bool = False
) -> bool:
    """Whether its gradients were measured to be faster than ours: causal ones at (192, 128); at (128, 128) causal ones
    on an H100 with many heads to a KV head, and on any card with very many, also without a mask. Not where they have to
    be deterministic, as cuDNN's are not.

    q, k, v: (B, H, S, D), of which only shapes and the device are looked at. device: as for `attention`. with_forward:
    compare both passes together, of which cuDNN has fewer faster.
    """
    head_dims, length = (q.shape[-1], v.shape[-1]), q.shape[2]
    if length != k.shape[2] or torch.are_deterministic_algorithms_enabled():
        return False
    group = q.shape[1] // max(1, k.shape[1])
    if head_dims == (128, 128) and group >= VERY_MANY_HEADS_PER_KV_HEAD and length >= VERY_MANY_FROM:
        return True
    least = (BOTH_FASTER_THERE_FROM if with_forward else FASTER_THERE_FROM).get(head_dims)
    if least is None or not causal or length < least:
        return False
    if head_dims == (192, 128):
        return True
    assert head_dims == (128, 128)
    if group < MANY_HEADS_PER_KV_HEAD:
        return False
    return (Device.of(q.device) if device is None else device).model == "H100"
