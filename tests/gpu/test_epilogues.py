"""The small kernel of docs/epilogues.md on a card: each way stores the same numbers, and nothing past the last head."""

import pytest
import torch

from bench.epilogues import HEAD_DIMS, PROGRAMS, ROWS, WAYS, run


@pytest.mark.parametrize("length", [1, ROWS, (2 * PROGRAMS + 1) * ROWS - 1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers(way, head_dim, length):
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (length, head_dim), device="cuda").bfloat16()
    w = torch.randint(-2, 3, (3, head_dim, head_dim), device="cuda").bfloat16()
    memory = torch.full((4, length, head_dim), float("nan"), dtype=x.dtype, device="cuda")  # a head too many
    run(x, w, memory[:3], way)
    assert torch.equal(memory[:3], (x.float() @ w.float()).to(x.dtype))
    assert memory[3].isnan().all()
