"""The mask that a proof is about leaves out only keys that no query sees: its numbers, on gluon_cpu."""

import pytest
import torch

from gluon_attn import MaskMod, attention
from gluon_attn.device import Device
from gluon_attn.testing import check
from proving.masks import keys_of_prefix, prefix


@pytest.mark.parametrize("keys", [keys_of_prefix, None], ids=["blocks left out", "all blocks"])
def test_against_float64(keys):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, dtype=torch.bfloat16) for length in (256, 512, 512))
    mask_mod = MaskMod(prefix, keys=keys, constants=(70,))
    out, lse = attention(q, k, v, mask_mod=mask_mod, device=Device.blackwell(), return_lse=True)
    rows, columns = torch.arange(256)[:, None], torch.arange(512)
    seen = (columns < 70) | (columns <= rows)
    check(q, k, v, out, lse, bias=torch.where(seen, 0.0, -torch.inf).to(q.dtype)[None, None], what="a prefix")
