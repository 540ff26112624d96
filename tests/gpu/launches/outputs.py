"""What is returned, and what is refused."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention
from gluon_attn.testing import Surrounded, check, normal_qkv
from tests.gpu.checks import Registry
from tests.gpu.launches.common import SIZES, Sizes, picked, run_and_check

OUTPUTS = Registry()


def raises(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    """attention(...) raises exactly this error."""
    with pytest.raises(error, match=message) as caught:
        attention(*args, **kwargs)
    assert type(caught.value) is error, f"expected {error.__name__}, got {caught.value!r}"


@OUTPUTS
def outputs() -> None:
    for layout, dtype in itertools.product(("bhsd", "bshd"), (torch.float16, torch.bfloat16)):
        q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=90, dtype=dtype, layout=layout)
        alone = attention(q, k, v, layout=layout)
        assert isinstance(alone, Tensor), "without return_lse, O alone is returned"
        out, lse = attention(q, k, v, layout=layout, return_lse=True)
        assert torch.equal(alone, out), "return_lse changes O"
        assert (out.shape, out.dtype, out.device, out.stride()) == (q.shape, q.dtype, q.device, q.stride())
        assert (lse.shape, lse.dtype, lse.device) == ((2, 4, 70), torch.float32, q.device)
        assert not out.requires_grad


@OUTPUTS
def out_is_returned() -> None:
    q, k, v = normal_qkv(q_len=70)
    out = torch.full_like(q, float("nan"))
    assert attention(q, k, v, out=out) is out
    check(q, k, v, out, None)
    # In the memory order of the other layout, and in the midst of a larger tensor.
    strided = torch.full_like(q.transpose(1, 2).contiguous(), float("nan")).transpose(1, 2)
    attention(q, k, v, out=strided)
    assert torch.equal(strided, out)
    around = Surrounded(q.shape, q.dtype)
    attention(q, k, v, out=around.view)
    assert torch.equal(around.view, out)
    around.check_outside_untouched()


@OUTPUTS
def inputs_are_not_written() -> None:
    tensors = normal_qkv(q_len=333, kv_heads=1)
    copies = [t.clone() for t in tensors]
    for num_ctas, causal in itertools.product((1, 2), (False, True)):
        attention(*tensors, num_ctas=num_ctas, causal=causal)
    assert all(map(torch.equal, tensors, copies))


# Of SIZES.
EMPTY = {
    "no batch": (0, 2, 2, 5, 7),
    "no heads": (2, 0, 0, 5, 7),
    "no queries": (2, 4, 2, 0, 7),
    "no keys": (2, 4, 2, 5, 0),
    "no queries, no keys": (2, 4, 2, 0, 0),
}


@OUTPUTS
def empty_dimensions() -> None:
    for what, numbers in EMPTY.items():
        for layout, causal, given in itertools.product(("bhsd", "bshd"), (False, True), (False, True)):
            sizes: Sizes = dict(zip(SIZES, numbers, strict=True))
            q, k, v = normal_qkv(**sizes, layout=layout)
            around = Surrounded(q.shape, q.dtype)
            out, lse = attention(
                q, k, v, causal=causal, layout=layout, return_lse=True, out=around.view if given else None
            )
            assert (out.shape, out.dtype, lse.shape) == (
                q.shape,
                q.dtype,
                (sizes["batch"], sizes["heads"], sizes["q_len"]),
            ), what
            assert bool((out == 0).all()), f"{what}: O is not 0"
            assert bool((lse == float("-inf")).all()), f"{what}: LSE is not -inf"
            if given:
                assert out.data_ptr() == around.view.data_ptr(), f"{what}: O is not in `out`"
                around.check_outside_untouched()


@OUTPUTS
def with_and_without_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in normal_qkv(q_len=130))
    for modes in (torch.no_grad, torch.inference_mode):
        with modes():
            run_and_check(q, k, v, causal=True)
    assert attention(q, k, v, causal=True, return_lse=True)[0].requires_grad
    # Neither has spoilt the other: both again, now with everything cached.
    with torch.no_grad():
        run_and_check(q, k, v, causal=True)
    assert attention(q, k, v, causal=True, return_lse=True)[0].requires_grad
    run_and_check(q.detach(), k.detach(), v.detach(), causal=True)


@OUTPUTS
def bad_tensors_are_refused() -> None:
    q, k, v = normal_qkv(q_len=64)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    attention(**given)  # the same shapes and strides are good, and known
    for name, t in given.items():
        shifted = torch.empty(t.numel() + 8, dtype=t.dtype, device="cuda")[1 : t.numel() + 1].view(t.shape)
        raises(ValueError, rf"^{name}: expected .*16 bytes.*got", **(given | {name: shifted}))
    for name in ("k", "v", "out"):
        raises(ValueError, rf"^{name}: expected .*cuda.*got cpu", **(given | {name: given[name].cpu()}))
    raises(TypeError, r"^k: expected .*bfloat16.*got", q, k.half(), v)
    attention(**given)


@OUTPUTS
def a_config_that_does_not_fit_is_refused() -> None:
    q, k, v = normal_qkv(q_len=64, head_dim=256)
    config = dataclasses.replace(picked(q, k, v, num_ctas=1), kv_slots=16)
    raises(ValueError, r"^config: expected .*232448.*got", q, k, v, config=config)
