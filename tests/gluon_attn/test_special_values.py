"""NaN and infinity in Q, K, V and the scales come out as of plain PyTorch, in every dtype and with every lever."""

from dataclasses import dataclass

import pytest
import torch

from gluon_attn import TileConfig, attention
from gluon_attn.device import Device
from gluon_attn.forward.table import blackwell_tile, hopper_tile
from tests.gluon_attn.special_values import E4M3, E5M2, check_special, special_tensors
from tests.slow import slow_if

H200, B200, B300 = Device.hopper(), Device.blackwell(), Device.blackwell_ultra()
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True, kw_only=True)
class Case:
    device: Device
    dtype: torch.dtype
    head_dim: int = 64
    causal: bool = False
    num_ctas: int = 1
    tile: TileConfig | None = None  # default: the table's
    slow: bool = False


integers = {"integer_max": True, "turns": "scores", "early_exp": 1}
CASES = {
    "H200, bf16, maxima as integers": Case(device=H200, dtype=BF16, tile=hopper_tile(3, 128, 2, 2, 160, **integers)),
    "H200, fp16, causal, maxima as integers": Case(
        device=H200, dtype=FP16, causal=True, tile=hopper_tile(4, 64, 2, 4, 112, turns="none", integer_max=True)
    ),
    "H200, bf16, D=128, 2 CTAs": Case(device=H200, dtype=BF16, head_dim=128, num_ctas=2, slow=True),
    "H200, bf16, D=256, causal": Case(device=H200, dtype=BF16, head_dim=256, causal=True, slow=True),
    "H200, e4m3": Case(device=H200, dtype=E4M3),
    "H200, e5m2, D=128, causal": Case(device=H200, dtype=E5M2, head_dim=128, causal=True),
    "H200, e4m3, V transposed before": Case(device=H200, dtype=E4M3, head_dim=256, slow=True),
    "H200, e5m2, causal, 2 CTAs": Case(device=H200, dtype=E5M2, causal=True, num_ctas=2, slow=True),
    "B200, bf16": Case(device=B200, dtype=BF16),
    "B200, fp16, D=128, causal": Case(device=B200, dtype=FP16, head_dim=128, causal=True, slow=True),
    "B200, bf16, every exponential by polynomial": Case(
        device=B200, dtype=BF16, tile=blackwell_tile(6, 192, polynomial_columns=16, load_pieces=2, exp_pieces=4)
    ),
    "B200, e5m2": Case(device=B200, dtype=E5M2),
    "B200, bf16, causal, 2 CTAs": Case(device=B200, dtype=BF16, causal=True, num_ctas=2, slow=True),
    "B200, bf16, 4 CTAs": Case(device=B200, dtype=BF16, num_ctas=4, slow=True),
    "B300, bf16, D=128, maxima from loads": Case(device=B300, dtype=BF16, head_dim=128),
    "B300, e4m3, causal": Case(device=B300, dtype=E4M3, causal=True),
    "B300, fp16, causal, 2 CTAs": Case(device=B300, dtype=FP16, causal=True, num_ctas=2, slow=True),
}


@pytest.mark.parametrize("name", slow_if(lambda name: CASES[name].slow, CASES))
def test_as_in_plain_pytorch(name):
    case = CASES[name]
    given = special_tensors(case.dtype, case.head_dim)
    out, lse = attention(
        given.q,
        given.k,
        given.v,
        causal=case.causal,
        return_lse=True,
        num_ctas=case.num_ctas if case.tile is None else None,
        tile=case.tile,
        device=case.device,
        **given.scales,
    )
    check_special(given, out, lse, causal=case.causal)
