"""Which gradients hooks leave to cuDNN."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from gluon_attn.cudnn import cudnn_is_faster
from gluon_attn.device import Device

HOPPER = Device.hopper()
H100 = replace(HOPPER, name="NVIDIA H100 80GB HBM3")
FASTER = {
    "V unlike Q": (2, 2, 2048, (192, 128), HOPPER),
    "8 heads to a KV head on an H100": (8, 1, 2048, (128, 128), H100),
    "16 of them": (32, 2, 16384, (128, 128), H100),
}
NOT_FASTER = {
    "V unlike Q, not long": (2, 2, 2047, (192, 128), H100),
    "D=256, long": (1, 1, 8192, (256, 256), H100),
    "D=128, long": (4, 4, 8192, (128, 128), H100),
    "8 heads on an H200": (8, 1, 2048, (128, 128), HOPPER),
    "8 heads, not long": (8, 1, 2047, (128, 128), H100),
    "8 heads, D=64": (8, 1, 2048, (64, 64), H100),
    "4 heads": (8, 2, 2048, (128, 128), H100),
}


@pytest.mark.parametrize("name", [*FASTER, *NOT_FASTER])
def test_gradients_that_cudnn_computes_faster_stay_there(name):
    """But for those without a mask, and deterministic ones."""
    heads, kv_heads, length, (d, d_v), device = (FASTER | NOT_FASTER)[name]
    q, k, v = (torch.empty(1, h, length, d, device="meta") for h, d in ((heads, d), (kv_heads, d), (kv_heads, d_v)))
    assert cudnn_is_faster(q, k, v, causal=True, device=device) == (name in FASTER)
    assert not cudnn_is_faster(q, k, v, causal=False, device=device)
    assert not cudnn_is_faster(q, k, v, causal=True, device=device, with_forward=True)  # none is long at (192, 128)
    torch.use_deterministic_algorithms(True)
    try:
        assert not cudnn_is_faster(q, k, v, causal=True, device=device)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("heads", "length", "head_dim", "stays"),
    [
        (32, 2048, 128, True),
        (64, 9000, 128, True),
        (31, 2048, 128, False),
        (32, 2047, 128, False),
        (32, 2048, 64, False),
    ],
)
def test_very_many_heads_to_a_kv_head(heads, length, head_dim, stays):
    q, k = (torch.empty(1, h, length, head_dim, device="meta") for h in (heads, 1))
    for causal, with_forward in itertools.product((False, True), repeat=2):
        faster = partial(cudnn_is_faster, causal=causal, device=HOPPER, with_forward=with_forward)
        assert faster(q, k, k) == stays
        assert not faster(q[:, :, 1:], k, k)  # unlike lengths


@pytest.mark.parametrize(
    ("length", "head_dims", "faster"),
    [(4096, (192, 128), True), (4095, (192, 128), False), (16384, (128, 128), False), (16384, (256, 256), False)],
)
def test_both_passes_together(length, head_dims, faster):
    q, k, v = (torch.empty(1, 8, length, d, device="meta") for d in (head_dims[0], *head_dims))
    for device in (HOPPER, H100):
        assert cudnn_is_faster(q, k, v, causal=True, device=device, with_forward=True) == faster
        assert not cudnn_is_faster(q, k, v, causal=False, device=device, with_forward=True)
