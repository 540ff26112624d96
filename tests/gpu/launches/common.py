"""What the tests around a launch have in common."""

from typing import Any

import torch
from torch import Tensor

from gluon_attn import ForwardConfig, attention
from gluon_attn.device import Device
from gluon_attn.forward.table import pick_config
from gluon_attn.problem import Problem
from gluon_attn.testing import check

Sizes = dict[str, Any]
SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len")
# One kernel, and two: at D=256 V is always transposed before.
KINDS: tuple[Sizes, ...] = ({"dtype": torch.bfloat16, "head_dim": 128}, {"dtype": torch.float8_e4m3fn, "head_dim": 256})


def run_and_check(q: Tensor, k: Tensor, v: Tensor, *, num_ctas: int | None = None, **options: Any) -> None:
    out, lse = attention(q, k, v, **options, num_ctas=num_ctas, return_lse=True)
    check(q, k, v, out, lse, **options, what=f"{tuple(q.shape)} {options}")


def picked(q: Tensor, k: Tensor, v: Tensor, *, num_ctas: int, causal: bool = False) -> ForwardConfig:
    return pick_config(Problem.of(q, k, v, causal=causal), Device.of(q.device), num_ctas)
