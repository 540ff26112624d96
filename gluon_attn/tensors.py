"""What tensors there are: dtypes, orders of dimensions, head dims, and memory for an output."""

from collections.abc import Sequence

import torch
from torch import Tensor

LAYOUTS = ("bhsd", "bshd")
PACKED = "thd"  # the layout of packed sequences: all tokens, head, head dim
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float16, torch.bfloat16, *FP8_DTYPES)
# As commands and result files call them.
NAMED_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = ("q_scale", "k_scale", "v_scale")
MAX_HEAD_DIM = 256
PADDED_HEAD_DIMS = (64, 128, 192, 256)  # that kernels have
TMA_ALIGNMENT_BYTES = 16


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of O, for q, k and v of `dtype`."""
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def empty_output(q: Tensor, v: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Memory for O of these, in q's order of dimensions."""
    alike = v.size(-1) == q.size(-1)
    if alike and device is None and q.dtype not in FP8_DTYPES:
        return torch.empty_like(q)  # with options it would take as long again on the host
    dtype = output_dtype(q.dtype)
    if alike:
        return torch.empty_like(q, dtype=dtype, device=device)
    inwards = sorted(range(q.dim() - 1), key=q.stride, reverse=True)
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty_permuted(shape, (*inwards, q.dim() - 1), dtype=dtype, device=device or q.device)


def shape_of_lse(q: Sequence[int], layout: str) -> tuple[int, ...]:
    """q: its shape."""
    if layout == PACKED:
        return q[1], q[0]
    return (q[0], q[1], q[2]) if layout == "bhsd" else (q[0], q[2], q[1])


def in_bhsd(t: Tensor, layout: str) -> Tensor:
    """A view of `t` with dimensions (batch, head, sequence, head_dim)."""
    if layout == PACKED:
        return t.transpose(0, 1)[None]
    return t.transpose(1, 2) if layout == "bshd" else t
