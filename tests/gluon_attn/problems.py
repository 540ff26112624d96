"""Problems for tests that name only what they are about."""

from typing import Any

import torch

from gluon_attn.problem import Problem


def problem(**fields: Any) -> Problem:
    standard: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "batch": 2,
        "heads": 16,
        "kv_heads": 16,
        "q_len": 1024,
        "kv_len": 1024,
        "head_dim": 128,
        "causal": False,
        "scale": 0.1,
        "layout": "bhsd",
    }
    return Problem(**(standard | fields))


def qkv(requires_grad: bool = False, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> list[torch.Tensor]:
    shape = (1, 2, 16, head_dim)
    return [torch.zeros(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]
