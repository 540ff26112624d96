"""What the table refuses on either architecture, as attention() says it."""

import pytest
import torch
from torch import Tensor

from gluon_attn import BlackwellConfig, attention
from gluon_attn.device import Device
from gluon_attn.forward.table import blackwell_config

HOPPER, BLACKWELL = Device.hopper(), Device.blackwell()


def qkv(dtype: torch.dtype = torch.bfloat16, q_len: int = 40, kv_len: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (q_len, kv_len, kv_len))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def test_four_ctas_are_blackwells():
    with pytest.raises(ValueError, match=r"^num_ctas: expected one of \(1, 2\) or None for NVIDIA H200, got 4"):
        attention(*qkv(), num_ctas=4, device=HOPPER)


@pytest.mark.parametrize("lengths", [(0, 200), (40, 0)], ids=["no query", "no key"])
def test_an_empty_problem_is_checked_like_any_other(lengths):
    q, k, v = qkv(q_len=lengths[0], kv_len=lengths[1])
    with pytest.raises(ValueError, match=r"^num_ctas: expected one of \(1, 2\)"):
        attention(q, k, v, num_ctas=4, device=HOPPER)
    with pytest.raises(ValueError, match=r"^config: expected a HopperConfig"):
        attention(q, k, v, config=blackwell_config(3, 192), device=HOPPER)


def test_a_quarter_of_p_that_is_too_small_is_refused():
    config = BlackwellConfig(
        block_n=64, kv_slots=4, softmax_registers=192, load_registers=24, exp_pieces=4, early_p=True
    )
    with pytest.raises(ValueError, match=r"^config: expected block_n=128 with early_p for torch.float8_e4m3fn, got 64"):
        attention(*qkv(torch.float8_e4m3fn), config=config, device=BLACKWELL)
