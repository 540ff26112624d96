"""gluon_attn/features.py against what calls say: each feature, by card and kind; each two features together."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gluon_attn import MaskMod, ScoreMod, attention, attention_varlen, jit, supports
from gluon_attn.device import Device
from gluon_attn.features import APART, FEATURES, KINDS, NOT_THERE

DEVICES = {"hopper": Device.hopper(), "blackwell": Device.blackwell()}
DTYPES = {"16 bits": (torch.float16, torch.bfloat16), "fp8": (torch.float8_e4m3fn, torch.float8_e5m2)}


@jit
def twice(score, q_index, k_index, head, batch):
    return score * 2


@jit
def twice_backward(grad, score, q_index, k_index, head, batch):
    return grad * 2


@jit
def even(q_index, k_index, head, batch):
    return (q_index + k_index) % 2 == 0


def tensors(
    dtype: torch.dtype, d: int = 64, d_v: int | None = None, kv_heads: int = 4, keys: int = 24
) -> dict[str, Any]:
    q, k, v = (
        torch.zeros(shape, dtype=dtype)
        for shape in ((1, 4, 24, d), (1, kv_heads, keys, d), (1, kv_heads, keys, d_v or d))
    )
    return {"q": q, "k": k, "v": v}


def packed(call: dict[str, Any]) -> dict[str, Any]:
    """The same as one packed sequence."""
    qkv = {name: call[name][0].transpose(0, 1).contiguous() for name in "qkv"}
    starts = {f"cu_seqlens_{n}": torch.tensor([0, len(qkv[n])], dtype=torch.int32) for n in "qk"}
    return call | qkv | starts | {f"max_seqlen_{n}": len(qkv[n]) for n in "qk"}


# What turns a plain call of a dtype into one with the feature.
WITH: dict[str, Callable[[dict[str, Any], torch.dtype], dict[str, Any]]] = {
    "causal": lambda call, _: call | {"causal": True},
    "window": lambda call, _: call | {"window": (8, 0)},
    "chunk": lambda call, _: call | {"chunk": 16},
    "segment_ids": lambda call, _: (
        call | {"segment_ids": tuple(torch.zeros(1, call[n].shape[-2], dtype=torch.int32) for n in "qk")}
    ),
    "mask_mod": lambda call, _: call | {"mask_mod": MaskMod(even)},
    "softcap": lambda call, _: call | {"softcap": 30.0},
    "alibi_slopes": lambda call, _: call | {"alibi_slopes": torch.zeros(4)},
    "sinks": lambda call, _: call | {"sinks": torch.zeros(4)},
    "bias": lambda call, _: call | {"bias": torch.zeros(1, 1, 1, call["k"].shape[-2])},
    "score_mod": lambda call, _: call | {"score_mod": ScoreMod(twice, twice_backward)},
    "unequal lengths": lambda call, dtype: call | tensors(dtype, keys=40),
    "grouped heads": lambda call, dtype: call | tensors(dtype, kv_heads=2),
    "head dim 128": lambda call, dtype: call | tensors(dtype, 128),
    "head dim 256": lambda call, dtype: call | tensors(dtype, 256),
    "v's head dim": lambda call, dtype: call | tensors(dtype, 128, 64),
    "layout": lambda call, _: call | {"layout": "bshd"},
    "scale": lambda call, _: call | {"scale": 0.5},
    "return_lse": lambda call, _: call | {"return_lse": True},
    "deterministic": lambda call, _: call | {"deterministic": True},
    "out": lambda call, dtype: (
        call | {"out": torch.zeros(1, 4, 24, 64, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)}
    ),
    "q_scale": lambda call, _: call | {"q_scale": torch.ones(1, 4)},
    "num_ctas 2": lambda call, _: call | {"num_ctas": 2},
    "num_ctas 4": lambda call, _: call | {"num_ctas": 4},
    "cu_seqlens_q": lambda call, _: packed(call),
}
NAMED = {name: (name,) for name in ("out", "q_scale", "bias")} | {
    "head dim 256": ("v",),
    "v's head dim": ("v",),
    "num_ctas 4": ("num_ctas",),
}


def said(device: str, kind: str, names: tuple[str, ...]) -> set[str | None]:
    """What `supports` says of calls with these features, in each dtype of the kind."""
    gradient = kind == "gradients"
    answers = set()
    for dtype in DTYPES["16 bits" if gradient else kind]:
        call = tensors(dtype)
        for name in names:
            call = WITH[name](call, dtype)
        answers.add(supports(**call, device=DEVICES[device], needs_grad=gradient))
    return answers


def test_every_feature_has_an_example():
    assert sorted(WITH) == sorted(FEATURES)
    parameters = {*inspect.signature(attention).parameters, *inspect.signature(attention_varlen).parameters}
    assert parameters >= {name for name in FEATURES if name.isidentifier()}
    assert not parameters & set(NOT_THERE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FEATURES)
def test_it_is_there_or_refused(name, device):
    for kind, there in zip(KINDS, getattr(FEATURES[name], device), strict=True):
        answers = said(device, kind, (name,))
        if there:
            assert answers == {None}, kind
        else:
            named = (*NAMED.get(name, ()), "device")
            assert None not in answers, kind
            assert all(answer.partition(":")[0] in named for answer in answers if answer), (kind, answers)


TOGETHER = ("causal", "window", "chunk", "segment_ids", "mask_mod", "softcap", "alibi_slopes", "sinks", "bias",
            "score_mod", "deterministic", "cu_seqlens_q")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_all_pairs_go_together_but_those_apart(device, kind):
    for pair in itertools.combinations(TOGETHER, 2):
        answers = said(device, kind, tuple(sorted(pair, key=list(WITH).index)))
        names = {*pair}
        excluding = [both for both in APART if {*both} <= names]
        if excluding:
            first, second = excluding[0]
            assert answers == {f"{second}: not supported together with {first}; {APART[first, second]}"} or (
                device == "blackwell" and kind == "gradients"
            )
        elif device == "blackwell" and kind == "gradients":
            assert all(answer and answer.startswith("device: ") for answer in answers)
        elif missing := [name for name in pair if not getattr(FEATURES[name], device)[KINDS.index(kind)]]:
            assert all(answer and answer.startswith(f"{missing[0]}: ") for answer in answers)
        else:
            assert answers == {None}, pair


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_is_not_there_is_refused_by_name(name):
    call = tensors(torch.bfloat16) | {"device": Device.hopper(), name: 1}
    with pytest.raises(NotImplementedError, match=f"^{name}: {NOT_THERE[name]} is not supported so far"):
        attention(**call)
    assert supports(**call)
