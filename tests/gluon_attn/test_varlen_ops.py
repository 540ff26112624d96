"""Packed sequences under torch.compile, torch.export and modes that see operators, on gluon_cpu."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from gluon_attn.device import Device
from gluon_attn.ops import ARGUMENTS
from gluon_attn.tensors import PACKED
from gluon_attn.varlen import attention_varlen

HOPPER = Device.hopper()
LENGTHS = ((40, 0, 30), (50, 20, 30))


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, generator=generator).bfloat16().requires_grad_()
        for lengths, heads in ((LENGTHS[0], 2), (LENGTHS[1], 1), (LENGTHS[1], 1))
    )
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS]
    return [q, k, v, *starts]


def model(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    out, lse = attention_varlen(q * 2, k, v, cu_q, cu_k, 40, 50, causal=True, return_lse=True, device=HOPPER)
    return out * lse.T[..., None].to(out.dtype)


def gradients(out: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, given[:3], torch.ones_like(out))


def test_compiled_whole_it_is_what_it_is_in_eager_mode():
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    given = inputs()
    results = [fn(*given) for fn in (compiled, model)]
    assert torch.equal(*results)
    for one, other in zip(*(gradients(out, given) for out in results), strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)  # the bits of dQ depend on the order of its sums


def test_bounds_that_the_numbers_tell():
    """As max_seqlen is often found: no graph asks how large it is."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        longest = [int(cu.diff().max().item()) for cu in (cu_q, cu_k)]
        return attention_varlen(q, k, v, cu_q, cu_k, *longest, causal=True, device=HOPPER)

    given = inputs()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*given), attend(*given))


def test_the_operators_are_what_torch_expects():
    q, k, v, cu_q, cu_k = inputs()
    named = dict.fromkeys(ARGUMENTS) | {"q": q, "k": k, "v": v, "sinks": torch.ones(2), "read": [], "causal": True}
    named |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 40, "max_seqlen_k": 50}
    named |= {"layout": PACKED, "deterministic": True, "card": "hopper"}
    torch.library.opcheck(torch.ops.gluon_attn.forward, tuple(named.values()), raise_exception=True)


def test_exported():
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return model(*given)

    given = [t.detach() for t in inputs()]
    exported = torch.export.export(Model(), tuple(given))
    assert "gluon_attn.forward" in str(exported.graph)
    assert torch.equal(exported.module()(*given), model(*given))


@pytest.mark.parametrize("is_kept", [False, True], ids=["computed again", "kept by a policy"])
def test_checkpointed(is_kept):
    """A policy of what to keep sees the operator, and then its forward pass is not computed again."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = operator == torch.ops.gluon_attn.forward.default
        return CheckpointPolicy.MUST_SAVE if ours and is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    given = inputs()
    want = gradients(model(*given), given)
    kept = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(model, *given, use_reentrant=False, context_fn=kept)
    with FlopCounterMode(display=False) as counter:
        grads = gradients(out, given)
    pairs = sum(40 - i for i in range(40)) + 10 * 40 + sum(30 - i for i in range(30))
    assert counter.get_total_flops() == (5 if is_kept else 2 + 5) * 2 * 2 * 64 * pairs
    for one, other in zip(grads, want, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def test_autocast_converts_fp32():
    q, k, v, *starts = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(q.float(), k.float(), v.float(), *starts)
    assert torch.equal(out, model(q, k, v, *starts))


@pytest.mark.parametrize("dim", range(3))
def test_no_vmap(dim):
    """Of q, of k, of v."""
    given = [t.detach() for t in inputs()]
    batched = [given[i].expand(2, *given[i].shape) if i == dim else given[i] for i in range(5)]
    with pytest.raises(NotImplementedError, match=f"^{'qkv'[dim]}: .* torch.vmap has batched"):
        torch.vmap(model, in_dims=tuple(0 if i == dim else None for i in range(5)))(*batched)


def test_flops_count_what_is_seen():
    """Of each sequence; where its length is not known, as torch counts, of as many rows as the longest has."""
    given = inputs()
    pairs = sum(40 - i for i in range(40)) + 10 * 40 + sum(30 - i for i in range(30))
    with FlopCounterMode(display=False) as counter:
        gradients(model(*given), given)
    assert counter.get_total_flops() == (2 + 5) * 2 * 2 * 64 * pairs
    with FakeTensorMode() as mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = model(*map(mode.from_tensor, given))
    assert (out.shape, out.dtype) == ((70, 2, 64), torch.bfloat16)
    assert counter.get_total_flops() == 2 * 2 * 2 * 64 * 3 * (sum(40 - i for i in range(40)) + 10 * 40)
