"""What a kernel is compiled with of a change of scores, and what is refused of one; numbers are in kernels/."""

from typing import Any

import pytest
import torch

from channels.compat import jit
from gluon_attn.score_mod import MAX_TENSORS, ScoreMod, alibi, compiled_part, kind_of, softcap


@jit
def halved(score, q_index, k_index, head, batch):
    return score * 0.5


@jit
def doubled(score, q_index, k_index, head, batch):
    return score * 2.0


@jit
def gradient(dscore, score, modified, q_index, k_index, head, batch):
    return dscore * 0.5


def test_kernels_are_shared_whatever_the_tensors():
    one, other = (ScoreMod(halved, tensors=(torch.full((2,), x),)) for x in (1.0, 2.0))
    assert one.function == other.function
    assert hash(one.function) == hash(other.function)
    assert compiled_part(one) == (one.function, one.tensors)
    assert compiled_part(None) == (None, ())


def test_all_else_is_a_kernel_of_its_own():
    mods = [
        ScoreMod(halved),
        ScoreMod(doubled),
        ScoreMod(halved, gradient),
        ScoreMod(halved, constants=(1,)),
        ScoreMod(halved, constants=(2,)),
        ScoreMod(halved, aligned=True),
        ScoreMod(halved, tensors=(torch.zeros(2),)),
        ScoreMod(halved, tensors=(torch.zeros(2, dtype=torch.int32),)),
    ]
    functions = [mod.function for mod in mods] + [softcap(2.0), softcap(3.0), alibi(torch.zeros(2))]
    assert len({f.cache_key for f in functions}) == len(functions)
    assert len({str(f) for f in functions}) == len(functions)
    assert len(set(functions)) == len(functions)


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no function": (
        (3,),
        {},
        TypeError,
        r"^score_mod: expected forward to be .*jit, got int",
    ),
    "a plain one": ((len,), {}, TypeError, r"^score_mod: expected forward to be .*decorate it"),
    "a plain derivative": ((halved, len), {}, TypeError, r"^score_mod: expected backward to be .*decorate it"),
    "no tensor": ((halved,), {"tensors": (1.0,)}, TypeError, r"^score_mod: expected tensors\[0\] .*got float"),
    "another dtype": (
        (halved,),
        {"tensors": (torch.zeros(1, dtype=torch.float64),)},
        TypeError,
        r"^score_mod: expected tensors\[0\] .*got torch.float64; convert it",
    ),
    "a tensor for a tuple": (
        (halved,),
        {"tensors": torch.ones(2)},
        TypeError,
        r"^score_mod: expected tensors to be a tuple, got torch.Tensor; give \(tensor,\)",
    ),
    "a number for a tuple": (
        (halved,),
        {"constants": 1},
        TypeError,
        r"^score_mod: expected constants to be a tuple, got int; give \(number,\)",
    ),
    "a list for a number": (
        (halved,),
        {"constants": (1, [1])},
        TypeError,
        r"^score_mod: expected constants\[1\] to be an int or a float, got list; give all else as tensors",
    ),
    "many": (
        (halved,),
        {"tensors": (torch.zeros(1),) * (MAX_TENSORS + 1)},
        ValueError,
        r"^score_mod: expected at most 4 tensors, got 5",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    args, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        ScoreMod(*args, **options)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_caps_that_are_none(cap):
    with pytest.raises(ValueError, match=r"^softcap: expected a positive number"):
        softcap(cap)


@pytest.mark.parametrize("cap", [True, "1"])
def test_a_cap_that_is_no_number(cap):
    softcap(1.0)  # whose cached answer is not True's
    with pytest.raises(TypeError, match=rf"^softcap: expected a number or None, got {type(cap).__name__}; give a"):
        softcap(cap)


def test_kinds_of_functions():
    """A caller's own is none of those for which tables have rows."""
    assert kind_of(softcap(30.0)) == "softcap"
    assert kind_of(alibi(torch.ones(2))) == "alibi"
    assert kind_of(None) is None
    assert kind_of(ScoreMod(halved).function) is None
