"""Hugging Face: which training stays with SDPA, as cuDNN has it faster."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gluon_attn import cudnn
from gluon_attn.cudnn import BOTH_FASTER_THERE_FROM

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from gluon_attn import hf  # noqa: E402  # it imports transformers
from tests.gluon_attn.hf_models import randn  # noqa: E402


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_what_is_trained_faster_by_cudnn(wants_gradients, ran, monkeypatch):
    """Both passes are SDPA's then, and nothing is said of it. With a mask SDPA would not take cuDNN."""
    monkeypatch.setitem(BOTH_FASTER_THERE_FROM, (192, 128), 24)
    q, k = (randn(1, 2, 24, 192).requires_grad_(wants_gradients) for _ in range(2))
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=True)
    call = transformers.AttentionInterface()[hf.NAME]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gluon_attn leaves")
        for options in ({}, {"deterministic": True}, {"is_causal": False}):
            call(module, q, k, k[..., :128], None, **options)
        with torch.no_grad():
            call(module, q, k, k[..., :128], None)
        with sdpa_kernel(SDPBackend.MATH):  # cuDNN is off
            call(module, q, k, k[..., :128], None)
    assert [who for who, _ in ran] == ["SDPA" if wants_gradients else "ours", "ours", "ours", "ours", "ours"]


@pytest.mark.parametrize("causal", [False, True])
def test_very_many_heads_to_a_kv_head(causal, ran, monkeypatch):
    """Likewise, of 128 columns, with a mask or without; not with fewer heads, and not in inference."""
    monkeypatch.setattr(cudnn, "VERY_MANY_FROM", 24)
    call = transformers.AttentionInterface()[hf.NAME]
    for heads, wants_gradients in ((32, True), (16, True), (32, False)):
        q, k = (randn(1, n, 24, 128).requires_grad_(wants_gradients) for n in (heads, 1))
        module = SimpleNamespace(is_causal=causal, num_key_value_groups=heads, training=True)
        call(module, q, k, k, None)
    assert [who for who, _ in ran] == ["SDPA", "ours", "ours"]
