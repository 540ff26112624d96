"""Memory that a kernel may not be given: addresses that TMA does not take, what is freed, negated or elsewhere, and an
output over an input."""

import re
from typing import Any

import pytest
import torch

from channels.compat import jit
from gluon_attn import MaskMod, ScoreMod, attention, supports
from gluon_attn.device import Device
from tests.gluon_attn.problems import qkv

E4M3 = torch.float8_e4m3fn
HOPPER = Device.hopper()


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """A copy of `t`, two bytes past an aligned address."""
    copy = torch.zeros(t.numel() + 8, dtype=t.dtype)[1 : t.numel() + 1].view(t.shape)
    assert copy.data_ptr() % 16 == 2
    return copy.copy_(t)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_misaligned_base_is_refused(name):
    tensors: dict[str, Any] = dict(zip(("q", "k", "v", "out"), (*qkv(), qkv()[0]), strict=True))
    tensors[name] = misaligned(tensors[name])
    with pytest.raises(ValueError, match=rf"^{name}: expected .*16 bytes.*, got .*"):
        attention(**tensors)


def freed(t: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A view of memory that is given back."""
    memory = torch.zeros(offset + t.numel(), dtype=t.dtype)
    view = memory[offset:].view(t.shape)
    memory.untyped_storage().resize_(0)
    return view


UNREADABLE: dict[str, tuple[Any, str]] = {
    "negated": (
        torch._neg_view,
        r"a tensor that is stored as it reads, got .*negates.*; (call .resolve_neg|leave it out)",
    ),
    "freed": (freed, r"a storage of at least 4096 bytes, got one of 0, .*; allocate it again"),
    "freed, with an offset": (lambda t: freed(t, 64), r"a storage of at least 4224 bytes, got one of 0"),
}


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_memory_that_is_not_what_it_reads_as_is_refused(kind, name, calls_before, no_launch):
    """Also after a call with the same shapes, for which all that depends on them is known."""
    tensors: dict[str, Any] = dict(zip(("q", "k", "v", "out"), (*qkv(), qkv()[0]), strict=True))
    for _ in range(calls_before):
        attention(**tensors, device=HOPPER)
    of, message = UNREADABLE[kind]
    tensors[name] = of(tensors[name])
    with pytest.raises(ValueError, match=rf"^{name}: expected {message}"):
        attention(**tensors, device=HOPPER)


@jit
def unchanged(score, q_index, k_index, head, batch, read):
    return score


@jit
def all_seen(q_index, k_index, head, batch, read):
    return k_index >= 0


IDS = torch.zeros(1, 16, dtype=torch.int32)


# What a kernel reads besides q, k and v, by the name that an error has for it: what a call gives, of a tensor.
READ: dict[str, tuple[torch.Tensor, Any]] = {
    "sinks": (torch.ones(2), lambda t: {"sinks": t}),
    "alibi_slopes": (torch.ones(2), lambda t: {"alibi_slopes": t}),
    "bias": (torch.ones(1, 1, 16, 16), lambda t: {"bias": t}),
    "q_segment_ids": (IDS, lambda t: {"segment_ids": (t, IDS)}),
    "k_segment_ids": (IDS, lambda t: {"segment_ids": (IDS, t)}),
    "score_mod.tensors[0]": (torch.ones(2), lambda t: {"score_mod": ScoreMod(unchanged, tensors=(t,))}),
    "mask_mod.tensors[0]": (torch.ones(2), lambda t: {"mask_mod": MaskMod(all_seen, tensors=(t,))}),
}


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["negated", "freed"])
def test_so_is_that_of_what_a_kernel_reads_besides(kind, name, calls_before, no_launch):
    tensor, given = READ[name]
    for _ in range(calls_before):
        attention(*qkv(), **given(tensor), device=HOPPER)
    options, message = given(UNREADABLE[kind][0](tensor)), UNREADABLE[kind][1].replace("4096", r"\d+")
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: expected {message}") as caught:
        attention(*qkv(), **options, device=HOPPER)
    assert supports(*qkv(), **options, device=HOPPER) == str(caught.value)


@pytest.mark.parametrize("name", READ)
def test_so_is_one_on_another_device(name, no_launch):
    tensor, given = READ[name]
    named = "segment_ids" if name.endswith("segment_ids") else name
    with pytest.raises(ValueError, match=rf"^{re.escape(named)}: expected .*, got .*meta") as caught:
        attention(*qkv(), **given(tensor.to("meta")), device=HOPPER)
    assert supports(*qkv(), **given(tensor.to("meta")), device=HOPPER) == str(caught.value)


def test_a_parameter_and_no_heads_are_no_such_memory(no_launch):
    sinks = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert supports(*qkv(), sinks=sinks, device=HOPPER) is None
    assert supports(*(t[:, :0] for t in qkv()), sinks=sinks[:0], device=HOPPER) is None


def test_a_negated_scale_is_refused(no_launch):
    q, k, v = qkv(dtype=E4M3)
    with pytest.raises(ValueError, match=r"^v_scale: expected a tensor that is stored as it reads"):
        attention(q, k, v, v_scale=torch._neg_view(torch.ones(1, 2)), device=HOPPER)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_over_an_input_is_refused(name):
    q, k, v = qkv()
    with pytest.raises(
        ValueError, match=rf"^out: expected memory of its own, got a range that overlaps that of {name}"
    ):
        attention(q, k, v, out={"q": q, "k": k, "v": v}[name])


SPANS = {64: 2048, 128: 4032}  # elements from the first of out to the last, by those from one row to the next


@pytest.mark.parametrize("row", SPANS)
@pytest.mark.parametrize(("first", "what"), [(0, "overlaps"), (8, "overlaps"), (2040, "overlaps"), (2048, "is beside")])
@pytest.mark.parametrize("before", [False, True])
def test_out_may_be_beside_an_input_and_not_over_it(row, first, what, before):
    """Q has 2048 elements in the middle of memory. out begins that many elements after Q does; before: ends that many
    before Q does."""
    memory = torch.zeros(3 * 4096, dtype=torch.bfloat16)
    q, k, v = qkv()
    q = memory[4096 : 4096 + 2048].view(q.shape)
    at = 4096 + 2048 - first - SPANS[row] if before else 4096 + first
    out = memory.as_strided(q.shape, (32 * row, 16 * row, row, 1), at)
    if what == "is beside":
        attention(q, k, v, out=out, device=HOPPER)
        return
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got a range that overlaps that of q;"):
        attention(q, k, v, out=out, device=HOPPER)


def test_out_over_a_bias_is_refused():
    memory = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got a range that overlaps that of bias;"):
        attention(*qkv(), bias=memory[..., :16], out=memory, device=HOPPER)


def test_out_may_not_be_q_where_there_are_no_keys_either():
    q, k, v = qkv()
    k, v = k[:, :, :0], v[:, :, :0]
    before = q.clone()
    with pytest.raises(ValueError, match=r"^out: expected memory of its own"):
        attention(q, k, v, out=q, device=HOPPER)
    assert torch.equal(q, before)


def test_a_misaligned_fp8_base_says_by_how_many_elements():
    q, k, v = qkv(dtype=E4M3)
    shifted = torch.empty(q.numel() + 8, dtype=torch.uint8)[8:].view(E4M3).view(q.shape)
    with pytest.raises(ValueError, match=r"slice at a multiple of 16 elements"):
        attention(shifted, k, v, device=HOPPER)
