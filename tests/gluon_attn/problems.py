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
