"""What the overrides of torch's operators do not compute goes to the kernels that were there before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention, torch_sdpa
from gluon_attn.device import Device
from tests.gluon_attn.sdpa import (
    CUDNN,
    CUDNN_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    HOPPER,
    INPLACE,
    RNG,
    SDPA,
    SDPA_BACKWARD,
    SEED,
    by_cudnn,
    by_flash,
    q_of,
)

Q, K, B = q_of(), q_of(1, 2, 24, 64), q_of(1, 40, 2, 64)
SEQUENCES = torch.tensor([0, 40], dtype=torch.int32)
PACKED = (SEQUENCES, SEQUENCES, 40, 40, 0.0, False, False)
DENSE = (None, None, 40, 40, 0.0, False, False)
LSE = torch.zeros(1, 2, 40)
BIAS = torch.zeros(1, 1, 40, 40, dtype=torch.bfloat16)
OF_CUDNN = (SEED, SEED, None, None, None, 40, 40)
NOT_OURS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dropout": (SDPA, (Q, Q, Q, 0.5), {}),
    "debug mask": (SDPA, (Q, Q, Q, 0.0, False, True), {}),
    "causal, more queries": (SDPA, (Q, K, K, 0.0, True), {}),
    "causal, more keys": (SDPA, (K, Q, Q, 0.0, True), {"scale": 0.5}),
    "a single query": (SDPA, (Q[:, :, :1], Q, Q), {}),
    "fp32": (SDPA, (Q.float(),) * 3, {}),
    "head dim": (SDPA, (Q[..., :36],) * 3, {}),
    "strides": (SDPA, (Q, Q, Q.mT.contiguous().mT), {}),
    "scale": (SDPA, (Q, Q, Q), {"scale": -1.0}),
    "no keys": (SDPA, (Q, Q[:, :, :0], Q[:, :, :0]), {}),
    "no queries": (SDPA, (Q[:, :, :0], Q, Q), {}),
    "dropout, backward": (SDPA_BACKWARD, (Q, Q, Q, Q, Q, LSE, None, None, 40, 40, 0.5, False, *RNG), {}),
    "causal, backward": (SDPA_BACKWARD, (Q, Q, K, K, Q, LSE, None, None, 40, 24, 0.0, True, *RNG), {}),
    "fp32, backward": (SDPA_BACKWARD, (*(Q.float(),) * 5, LSE, None, None, 40, 40, 0.0, False, *RNG), {"scale": 0.5}),
    "LSE's shape": (SDPA_BACKWARD, (Q, Q, Q, Q, Q, LSE[..., None], None, None, 40, 40, 0.0, False, *RNG), {}),
    "packed, keys that begin elsewhere": (FLASH, (B[0], B[0], B[0], SEQUENCES, SEQUENCES.clone(), *PACKED[2:]), {}),
    "packed, fewer keys": (FLASH, (B[0], B[0, :24], B[0, :24], *PACKED), {}),
    "packed, some keys used": (FLASH, (B[0], B[0], B[0], *PACKED), {"seqused_k": torch.tensor([8], dtype=torch.int32)}),
    "packed, int64": (FLASH, (B[0], B[0], B[0], SEQUENCES.long(), SEQUENCES.long(), *PACKED[2:]), {}),
    "window, unequal lengths": (
        FLASH,
        (q_of(1, 24, 2, 64), B, B, None, None, 24, 40, 0.0, False, False),
        {"window_size_left": 8},
    ),
    "slopes": (FLASH, (B, B, B, *DENSE), {"alibi_slopes": torch.zeros(2)}),
    "lengths": (FLASH, (B, B, B, *DENSE), {"seqused_k": torch.tensor([8], dtype=torch.int32)}),
    "packed, in place": (INPLACE, (B[0], B[0], B[0], B[0], *PACKED), {}),
    "out that is q": (INPLACE, (B, B, B, B, *DENSE), {}),
    "cuDNN: dropout": (CUDNN, (Q, Q, Q, None, True, 0.5), {}),
    "cuDNN: dropout, causal, no LSE": (CUDNN, (Q, Q, Q, None, False, 0.5, True), {"scale": 0.5}),
    "cuDNN: bias": (CUDNN, (Q, Q, Q, BIAS, True), {}),
    "cuDNN: bias, no LSE": (CUDNN, (Q, Q, Q, BIAS, False), {"scale": 0.5}),
    "cuDNN: debug mask": (CUDNN, (Q, Q, Q, None, True, 0.0, False, True), {}),
    "cuDNN: causal, more keys": (CUDNN, (K, Q, Q, None, True, 0.0, True), {"scale": 0.5}),
    "cuDNN: a single query": (CUDNN, (Q[:, :, :1], Q, Q, None, True), {}),
    "cuDNN: fp32": (CUDNN, (*(Q.float(),) * 3, None, True), {}),
    "cuDNN: strides": (CUDNN, (Q, Q, Q.mT.contiguous().mT, None, True), {}),
    "cuDNN: no keys": (CUDNN, (Q, Q[:, :, :0], Q[:, :, :0], None, True), {}),
    "cuDNN: V's head dim": (CUDNN, (Q, Q, Q[..., :32], None, True), {}),
    "cuDNN: V's head dim, Q expanded": (
        CUDNN,
        (q_of(1, 1, 40, 192).expand(1, 2, 40, 192), q_of(1, 2, 40, 192), q_of(1, 2, 40, 128), None, True),
        {},
    ),
    "cuDNN: dropout, backward": (CUDNN_BACKWARD, (*(Q,) * 5, LSE[..., None], *OF_CUDNN, 0.5, False), {}),
    "cuDNN: bias, backward": (
        CUDNN_BACKWARD,
        (*(Q,) * 5, LSE[..., None], SEED, SEED, BIAS, None, None, 40, 40, 0.0, True),
        {"scale": 0.5},
    ),
    "cuDNN: packed, backward": (
        CUDNN_BACKWARD,
        (*(Q,) * 5, LSE[..., None], SEED, SEED, None, SEQUENCES, SEQUENCES, 40, 40, 0.0, False),
        {},
    ),
    "cuDNN: fp32, backward": (CUDNN_BACKWARD, (*(Q.float(),) * 5, LSE[..., None], *OF_CUDNN, 0.0, False), {}),
    "cuDNN: causal, backward": (CUDNN_BACKWARD, (Q, Q, K, K, Q, LSE[..., None], *OF_CUDNN, 0.0, True), {}),
    "cuDNN: LSE's shape": (CUDNN_BACKWARD, (*(Q,) * 5, LSE[..., None].expand(1, 2, 40, 2), *OF_CUDNN, 0.0, False), {}),
    "cuDNN: no LSE, backward": (CUDNN_BACKWARD, (*(Q,) * 5, None, *OF_CUDNN, 0.0, False), {}),
    "cuDNN: V's head dim, backward": (
        CUDNN_BACKWARD,
        (Q[..., :32], Q, Q, Q[..., :32], Q[..., :32], LSE[..., None], *OF_CUDNN, 0.0, False),
        {},
    ),
    "packed, backward, keys that begin elsewhere": (
        FLASH_BACKWARD,
        (B[0], B[0], B[0], B[0], B[0], LSE[0], SEQUENCES, SEQUENCES.clone(), 40, 40, 0.0, False, *RNG),
        {},
    ),
}


def flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


@pytest.mark.parametrize("name", [name for name, (op, *_) in NOT_OURS.items() if op])
def test_all_else_goes_to_torchs_own(name, originals):
    """With all of its arguments, and what comes back is what it returns."""
    op, args, kw = NOT_OURS[name]
    want = flat(op(*args, **kw))
    handle = torch_sdpa.override("CPU", HOPPER)
    try:
        got = flat(op(*args, **kw))
    finally:
        handle.remove()
    (_, *direct), (_, *through) = originals.calls
    for one, other in zip(direct, through, strict=True):
        pairs = (one.items(), other.items()) if isinstance(one, dict) else (enumerate(one), enumerate(other))
        plain, handed_on = ({n: x for n, x in some if x is not None and x is not False} for some in pairs)
        assert plain.keys() == handed_on.keys()
        assert all(x is handed_on[n] if isinstance(x, Tensor) else x == handed_on[n] for n, x in plain.items())
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
def test_on_blackwell_the_gradients_are_torchs(by, originals):
    handle = torch_sdpa.override("CPU", Device.blackwell())
    q = q_of().requires_grad_()
    try:
        out = by(q, q, q)[0]
        out.sum().backward()
    finally:
        handle.remove()
    name = "flash" if by is by_flash else "cudnn"
    assert [name for name, *_ in originals.calls] == [f"_scaled_dot_product_{name}_attention_backward"]
    assert torch.equal(out, attention(q.detach(), q.detach(), q.detach(), device=Device.blackwell()))  # type: ignore[arg-type]
