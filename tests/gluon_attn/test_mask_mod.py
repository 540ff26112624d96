"""What a kernel is compiled with of a mask function, and what is refused of one; numbers are in kernels/."""

from typing import Any

import pytest
import torch

from channels.compat import jit
from gluon_attn import MaskMod, attention, supports
from gluon_attn.device import Device
from gluon_attn.forward.table import pick_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.mask_mod import compiled_part
from gluon_attn.score_mod import MAX_TENSORS
from tests.gluon_attn.problems import problem

HOPPER = Device.hopper()


@jit
def later(q_index, k_index, head, batch):
    return k_index > q_index


@jit
def earlier(q_index, k_index, head, batch):
    return k_index < q_index


@jit
def all_keys(first_row, last_row, q_len, k_len, head, batch):
    return 0, k_len


def test_kernels_are_shared_whatever_the_tensors():
    one, other = (MaskMod(later, tensors=(torch.full((2,), x),)) for x in (1, 2))
    assert one.function == other.function
    assert compiled_part(one) == (one.function, one.tensors)
    assert compiled_part(None) == (None, ())


def test_all_else_is_a_kernel_of_its_own():
    mods = [
        MaskMod(later),
        MaskMod(earlier),
        MaskMod(later, keys=all_keys),
        MaskMod(later, rows=all_keys),
        MaskMod(later, constants=(1,)),
        MaskMod(later, aligned=True),
        MaskMod(later, lengths=True),
        MaskMod(later, tensors=(torch.zeros(2),)),
    ]
    masks = [Mask(function=mod.function) for mod in mods]
    assert len({str(mask) for mask in masks}) == len(mods)
    assert len(set(masks)) == len(mods)


def test_what_is_hidden():
    without, ranges = (Mask(function=MaskMod(later, keys=keys).function) for keys in (None, all_keys))
    assert (without.has_ranges, without.hides_late_keys, without.hides_early_keys) == (False, True, False)
    assert (ranges.has_ranges, ranges.hides_late_keys, ranges.hides_early_keys) == (True, True, True)
    assert not ranges.has_early_limit


def test_few_keys_are_served_as_a_window_of_so_many():
    """By the rows for windows, and at most as many as there are; nothing of the kernel but its blocks depends on it."""
    known, unknown = (Mask(causal=True, function=MaskMod(later, most_keys=n).function) for n in (1025, None))
    window = Mask(causal=True, left=1024)
    assert [(m.limits_keys, m.most_keys(8192), m.most_keys(700)) for m in (known, window, unknown)] == [
        (True, 1025, 700),
        (True, 1025, 700),
        (False, 8192, 700),
    ]
    sizes: dict[str, Any] = {"head_dim": 64, "q_len": 8192, "kv_len": 8192, "causal": True}
    of_known, of_window, of_unknown = (
        pick_config(problem(**sizes, mask_function=m.function, left=m.left), HOPPER) for m in (known, window, unknown)
    )
    assert of_known == of_window != of_unknown
    assert str(known) == str(unknown)


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no function": ((3,), {}, TypeError, r"^mask_mod: expected function to be .*jit, got int"),
    "a plain range": ((later,), {"keys": len}, TypeError, r"^mask_mod: expected keys to be .*decorate it"),
    "no tensor": ((later,), {"tensors": (1.0,)}, TypeError, r"^mask_mod: expected tensors\[0\] .*got float"),
    "a tensor for a tuple": (
        (later,),
        {"tensors": torch.ones(2)},
        TypeError,
        r"^mask_mod: expected tensors to be a tuple, got torch.Tensor",
    ),
    "a list for a number": (
        (later,),
        {"constants": ([1],)},
        TypeError,
        r"^mask_mod: expected constants\[0\] to be an int or a float, got list",
    ),
    "no keys": ((later,), {"most_keys": 0}, ValueError, r"^most_keys: expected an int from 1 on, or None, got 0"),
    "half a key": ((later,), {"most_keys": 1.5}, ValueError, r"^most_keys: expected an int from 1 on.*got 1.5"),
    "many": (
        (later,),
        {"tensors": (torch.zeros(1),) * (MAX_TENSORS + 1)},
        ValueError,
        r"^mask_mod: expected at most 4 tensors, got 5",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    args, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        MaskMod(*args, **options)


IDS = torch.zeros(1, 24, dtype=torch.int32)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a plain function": ({"mask_mod": len}, TypeError, r"^mask_mod: expected a gluon_attn.MaskMod or None, got built"),
    "both": (
        {"mask_mod": MaskMod(later), "segment_ids": IDS},
        NotImplementedError,
        r"^mask_mod: not supported together with segment_ids",
    ),
    "too many tensors": (
        {"mask_mod": MaskMod(later, tensors=(IDS,) * 4), "alibi_slopes": torch.zeros(2)},
        NotImplementedError,
        r"^score_mod: expected at most 4 tensors together",
    ),
    "another stride": (
        {"mask_mod": MaskMod(later, tensors=(IDS.expand(2, 24).mT,))},
        ValueError,
        r"^mask_mod.tensors\[0\]: expected a contiguous tensor",
    ),
    "a list": ({"segment_ids": [[0] * 24]}, TypeError, r"^segment_ids: expected a tensor, or two, .*got 1"),
    "of queries alone": ({"segment_ids": (IDS, None)}, TypeError, r"^segment_ids: .*\(1, 24\) for k, got NoneType"),
    "int64": ({"segment_ids": IDS.long()}, TypeError, r"^segment_ids: expected dtype torch.int32, got torch.int64"),
    "length": ({"segment_ids": IDS[:, 1:]}, ValueError, r"^segment_ids: expected shape \(1, 24\), .*got \(1, 23\)"),
    "no batch": ({"segment_ids": IDS[0]}, ValueError, r"^segment_ids: expected shape \(1, 24\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(name):
    options, error, message = REFUSED[name]
    q = torch.zeros(1, 2, 24, 64, dtype=torch.bfloat16)
    with pytest.raises(error, match=message) as raised:
        attention(q, q, q, device=HOPPER, **options)
    assert supports(q, q, q, device=HOPPER, **options) == str(raised.value)
    assert supports(q, q, q, device=HOPPER, segment_ids=IDS) is None
