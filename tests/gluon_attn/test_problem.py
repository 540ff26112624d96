"""What a Problem accepts, and the message for each thing it does not."""

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gluon_attn.problem import Problem
from gluon_attn.tensors import empty_output

HEAD_DIMS = range(8, 257, 8)


def qkv(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 16,
    kv_len: int = 32,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
) -> dict[str, Any]:
    q, k, v = (
        torch.zeros(batch, h, s, head_dim, dtype=dtype)
        for h, s in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return {"q": q, "k": k, "v": v}


class Refused(NamedTuple):
    """Arguments on top of valid ones, and the error: its type, the argument, what was expected, what came."""

    change: dict[str, Any]
    error: type[Exception]
    name: str
    want: str
    got: str


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = "float16, bfloat16, float8_e4m3fn or float8_e5m2"


def scales(i: int, scale: Any) -> tuple[Any, Any, Any]:
    """The scales of q, k and v, all but the i-th left out."""
    return tuple(scale if j == i else None for j in range(3))  # type: ignore[return-value]


def scaled(i: int, scale: Any) -> dict[str, Any]:
    return qkv(dtype=E4M3) | {"scales": scales(i, scale)}


VALID = qkv()
REFUSED = {
    # Rank and kind.
    "q is no tensor": Refused({"q": [1.0]}, TypeError, "q", "torch.Tensor", "list"),
    "k is no tensor": Refused({"k": VALID["k"].float().numpy()}, TypeError, "k", "torch.Tensor", "ndarray"),
    "v is None": Refused({"v": None}, TypeError, "v", "torch.Tensor", "NoneType"),
    "out is no tensor": Refused({"out": 3}, TypeError, "out", "torch.Tensor", "int"),
    "q of rank 3": Refused({"q": half(4, 16, 128)}, ValueError, "q", "4 dimensions", "3"),
    "k of rank 5": Refused({"k": half(1, 2, 2, 32, 128)}, ValueError, "k", "4 dimensions", "5"),
    "v of rank 2": Refused({"v": half(32, 128)}, ValueError, "v", "4 dimensions", "2"),
    "out of rank 3": Refused({"out": half(4, 16, 128)}, ValueError, "out", "4 dimensions", "3"),
    # Memory formats.
    "q sparse": Refused({"q": VALID["q"].to_sparse()}, TypeError, "q", "a dense tensor", "layout torch.sparse_coo"),
    "k nested": Refused({"k": torch.nested.nested_tensor([half(2, 3)])}, TypeError, "k", "a dense tensor", "nested"),
    "k_scale sparse": Refused(
        scaled(1, torch.ones(2, 2).to_sparse()), TypeError, "k_scale", "a dense tensor", "layout torch.sparse_coo"
    ),
    # Shapes that do not match.
    "k of another batch": Refused({"k": half(3, 2, 32, 128)}, ValueError, "k", "batch 2 (as q)", "3"),
    "v of another batch": Refused({"v": half(1, 2, 32, 128)}, ValueError, "v", "batch 2 (as q)", "1"),
    "k of another head dim": Refused({"k": half(2, 2, 32, 64)}, ValueError, "k", "head_dim 128 (as q)", "64"),
    "v of a head dim that TMA cannot address": Refused(
        {"v": half(2, 2, 32, 60)}, ValueError, "v", "multiple of 8", "60"
    ),
    "v of a head dim too large": Refused({"v": half(2, 2, 32, 264)}, ValueError, "v", "8 to 256", "264"),
    "v without columns": Refused({"v": half(2, 2, 32, 0)}, ValueError, "v", "multiple of 8", "0"),
    "out without v's head dim": Refused(
        {"v": half(2, 2, 32, 64), "out": half(2, 4, 16, 128)}, ValueError, "out", "(2, 4, 16, 64)", "16, 128)"
    ),
    "v of other heads than k": Refused({"v": half(2, 4, 32, 128)}, ValueError, "v", "2 heads (as k)", "4"),
    "v of another length than k": Refused({"v": half(2, 2, 31, 128)}, ValueError, "v", "32", "31"),
    "out of another shape": Refused({"out": half(2, 4, 17, 128)}, ValueError, "out", "(2, 4, 16, 128)", "17, 128)"),
    # Heads.
    "heads no multiple of KV heads": Refused(
        {"k": half(2, 3, 32, 128), "v": half(2, 3, 32, 128)}, ValueError, "q", "multiple of the 3 KV heads", "4"
    ),
    "fewer heads than KV heads": Refused(
        {"k": half(2, 8, 32, 128), "v": half(2, 8, 32, 128)}, ValueError, "q", "multiple of the 8 KV heads", "4"
    ),
    "no KV heads": Refused(
        {"k": half(2, 0, 32, 128), "v": half(2, 0, 32, 128)}, ValueError, "q", "multiple of the 0 KV heads", "4"
    ),
    # Dtype.
    "float32": Refused(qkv(dtype=torch.float32), TypeError, "q", KINDS, "torch.float32"),
    "float64": Refused(qkv(dtype=torch.float64), TypeError, "q", KINDS, "torch.float64"),
    "complex": Refused(qkv(dtype=torch.complex64), TypeError, "q", KINDS, "torch.complex64"),
    "another fp8": Refused(qkv(dtype=torch.float8_e4m3fnuz), TypeError, "q", KINDS, "torch.float8_e4m3fnuz"),
    "int": Refused(qkv(dtype=torch.int16), TypeError, "q", KINDS, "torch.int16"),
    "k of another dtype": Refused({"k": VALID["k"].half()}, TypeError, "k", "torch.bfloat16 (as q)", "torch.float16"),
    "v of another dtype": Refused({"v": VALID["v"].half()}, TypeError, "v", "torch.bfloat16 (as q)", "torch.float16"),
    "v of float32": Refused({"v": VALID["v"].float()}, TypeError, "v", "bfloat16", "torch.float32"),
    "k in another fp8 than q": Refused(
        qkv(dtype=E4M3) | {"k": VALID["k"].to(E5M2)}, TypeError, "k", "torch.float8_e4m3fn (as q)", "torch.float8_e5m2"
    ),
    "out of another dtype": Refused(
        {"out": VALID["q"].half()}, TypeError, "out", "torch.bfloat16 (for q's)", "torch.float16"
    ),
    "out in fp8": Refused(
        qkv(dtype=E4M3) | {"out": VALID["q"].to(E4M3)},
        TypeError,
        "out",
        "torch.bfloat16 (for q's)",
        "torch.float8_e4m3fn",
    ),
    # Head dim.
    "head dim 0": Refused(qkv(head_dim=0), ValueError, "q", "multiple of 8", "0"),
    "head dim 4": Refused(qkv(head_dim=4), ValueError, "q", "multiple of 8", "4"),
    "head dim 100": Refused(qkv(head_dim=100), ValueError, "q", "multiple of 8", "100"),
    "head dim 264": Refused(qkv(head_dim=264), ValueError, "q", "256", "264"),
    "fp8, head dim 8": Refused(qkv(head_dim=8, dtype=E4M3), ValueError, "q", "multiple of 16 from 16", "8"),
    "fp8, head dim 72": Refused(qkv(head_dim=72, dtype=E5M2), ValueError, "q", "multiple of 16", "72"),
    # Devices.
    "k on another device": Refused({"k": VALID["k"].to("meta")}, ValueError, "k", "cpu (as q)", "meta"),
    "v on another device": Refused({"v": VALID["v"].to("meta")}, ValueError, "v", "cpu (as q)", "meta"),
    "out on another device": Refused({"out": VALID["q"].to("meta")}, ValueError, "out", "cpu (as q)", "meta"),
    # Strides.
    "q with last stride 2": Refused({"q": half(2, 4, 16, 256)[..., ::2]}, ValueError, "q", "stride 1", "2"),
    "k transposed": Refused({"k": half(2, 2, 128, 32).mT}, ValueError, "k", "stride 1", "32"),
    "v with last stride 0": Refused({"v": half(2, 2, 32, 1).expand(-1, -1, -1, 128)}, ValueError, "v", "stride 1", "0"),
    "out with last stride 2": Refused({"out": half(2, 4, 16, 256)[..., ::2]}, ValueError, "out", "stride 1", "2"),
    "q rows off by 8 bytes": Refused({"q": half(2, 4, 16, 132)[..., :128]}, ValueError, "q", "16 bytes", "264"),
    "k heads off by 2 bytes": Refused(
        {"k": half(2 * 2 * 4097).as_strided((2, 2, 32, 128), (2 * 4097 - 2, 4097, 128, 1))},
        ValueError,
        "k",
        "16 bytes",
        "8194",
    ),
    "v batches off by 4 bytes": Refused(
        {"v": half(20000).as_strided((2, 2, 32, 128), (8194, 4096, 128, 1))}, ValueError, "v", "16 bytes", "16388"
    ),
    "out rows off by 8 bytes": Refused({"out": half(2, 4, 16, 132)[..., :128]}, ValueError, "out", "16 bytes", "264"),
    "fp8 rows off by 8 bytes": Refused(
        qkv(dtype=E4M3) | {"q": half(2, 4, 16, 136).to(E4M3)[..., :128]}, ValueError, "q", "16 bytes", "136"
    ),
    "out expanded": Refused(
        {"out": half(2, 1, 16, 128).expand(-1, 4, -1, -1)}, ValueError, "out", "share memory", "(2048, 0"
    ),
    "out elements overlap": Refused(
        {"out": half(4, 2048).as_strided((2, 4, 16, 128), (2048, 512, 64, 1))},
        ValueError,
        "out",
        "share memory",
        "(2048",
    ),
    # Options.
    "unknown layout": Refused({"layout": "sbhd"}, ValueError, "layout", "'bhsd', 'bshd'", "'sbhd'"),
    "no layout": Refused({"layout": None}, ValueError, "layout", "'bhsd', 'bshd'", "None"),
    "causal is a string": Refused({"causal": "top-left"}, TypeError, "causal", "bool", "str"),
    "causal is a number": Refused({"causal": 1}, TypeError, "causal", "bool", "int"),
    "causal is a bool of numpy": Refused({"causal": np.bool_(True)}, TypeError, "causal", "a bool", "numpy.bool"),
    "layout is a list": Refused({"layout": ["bhsd"]}, ValueError, "layout", "'bhsd', 'bshd'", "['bhsd']"),
    "scale 0": Refused({"scale": 0.0}, ValueError, "scale", "finite positive", "0.0"),
    "scale too small for fp32": Refused({"scale": 1e-45}, ValueError, "scale", "finite positive", "1e-45"),
    "scale too large for fp32": Refused({"scale": 1e39}, ValueError, "scale", "finite positive", "1e+39"),
    "negative scale": Refused({"scale": -0.5}, ValueError, "scale", "finite positive", "-0.5"),
    "infinite scale": Refused({"scale": float("inf")}, ValueError, "scale", "finite positive", "inf"),
    "scale NaN": Refused({"scale": float("nan")}, ValueError, "scale", "finite positive", "nan"),
    "scale is a string": Refused({"scale": "1"}, TypeError, "scale", "float", "str"),
    "scale is a tensor": Refused({"scale": torch.tensor(0.5)}, TypeError, "scale", "float", "Tensor"),
    # Scales of fp8 inputs, (B, Hkv) = (2, 2).
    "q_scale is a number": Refused(scaled(0, 0.5), TypeError, "q_scale", "torch.Tensor or None", "float"),
    "k_scale is a list": Refused(scaled(1, [1.0]), TypeError, "k_scale", "torch.Tensor or None", "list"),
    "q_scale in float64": Refused(scaled(0, torch.ones(2, 2).double()), TypeError, "q_scale", "float32", "float64"),
    "v_scale in bfloat16": Refused(scaled(2, torch.ones(2, 2).bfloat16()), TypeError, "v_scale", "float32", "bfloat16"),
    "q_scale for each query head": Refused(
        scaled(0, torch.ones(2, 4)), ValueError, "q_scale", "(2, 2) (batch, KV heads)", "(2, 4)"
    ),
    "k_scale of one batch": Refused(scaled(1, torch.ones(1, 2)), ValueError, "k_scale", "(2, 2)", "(1, 2)"),
    "v_scale of one number": Refused(scaled(2, torch.ones(())), ValueError, "v_scale", "(2, 2)", "()"),
    "k_scale on another device": Refused(
        scaled(1, torch.ones(2, 2, device="meta")), ValueError, "k_scale", "cpu (as q)", "meta"
    ),
    "q_scale expanded": Refused(
        scaled(0, torch.ones(1, 1).expand(2, 2)), ValueError, "q_scale", "a contiguous tensor", "strides (0, 0)"
    ),
    "v_scale transposed": Refused(
        scaled(2, torch.ones(2, 2).t()), ValueError, "v_scale", "a contiguous tensor", "strides (1, 2)"
    ),
}
# Scales are for fp8 alone: with 16-bit inputs each is refused, also one that would do nothing.
for i, name in enumerate(("q_scale", "k_scale", "v_scale")):
    REFUSED[f"{name} of bfloat16"] = Refused(
        {"scales": scales(i, torch.ones(2, 2))}, TypeError, name, "None with q of torch.bfloat16", "a Tensor"
    )


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED.keys())
def test_refused(row):
    arguments = VALID | row.change
    with pytest.raises((TypeError, ValueError)) as caught:
        Problem.of(**arguments)
    assert type(caught.value) is row.error
    message = str(caught.value)
    # Name, want, got; then what to do, which has no fixed form.
    expected = rf"^{row.name}: expected .*{re.escape(row.want)}.*, got .*{re.escape(row.got)}(?![\d.])"
    assert re.search(expected, message), message


ADVICE = {
    "q is no tensor": "torch.as_tensor",
    "out is no tensor": "leave it out",
    "q sparse": ".to_dense()",
    "k_scale sparse": ".to_dense()",
    "k nested": "attention_varlen",
    "complex": "not supported",
    "k of another dtype": ".to(torch.bfloat16)",
    "k on another device": "on one",
    "out of another dtype": "allocate it so",
    "out of another shape": "leave it out",
    "out with last stride 2": "leave it out",
    "out rows off by 8 bytes": "leave it out",
    "head dim 0": "without columns",
    "unknown layout": "b is the batch",
    "causal is a bool of numpy": "True or False",
    "scale is a tensor": ".item()",
    "scale is a string": "give a number",
    "q_scale is a number": "torch.full((2, 2)",
    "k_scale of one batch": ".expand(...).contiguous()",
    "k_scale on another device": ".to(q.device)",
    "q of rank 3": "unsqueeze",
    "k of rank 5": "flatten",
    "float32": ".to(torch.bfloat16)",
    "head dim 100": "pad",
    "fp8, head dim 72": "next multiple of 16",
    "q_scale in float64": ".float()",
    "q_scale expanded": ".contiguous()",
    "k_scale of bfloat16": "leave it out",
    "q with last stride 2": ".contiguous()",
    "q rows off by 8 bytes": ".contiguous()",
    "v of a head dim that TMA cannot address": "drop these columns of O",
    "heads no multiple of KV heads": "layout",
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_message_says_what_to_do(name):
    with pytest.raises(REFUSED[name].error, match=re.escape(ADVICE[name])):
        Problem.of(**(VALID | REFUSED[name].change))


@pytest.mark.parametrize("head_dim", [257, 264, 300, 512])
def test_no_padding_is_advised_beyond_the_largest_head_dim(head_dim):
    with pytest.raises(ValueError, match=r"256 is the largest") as caught:
        Problem.of(**qkv(head_dim=head_dim))
    assert "next multiple" not in str(caught.value)


def test_bshd_given_as_bhsd_points_to_the_layout():
    with pytest.raises(ValueError, match="layout"):
        Problem.of(**qkv(heads=8, kv_heads=2, q_len=32, kv_len=30, layout="bshd"))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_both_layouts_pose_the_same_problem(layout):
    problem = Problem.of(**qkv(layout=layout), causal=True, scale=0.25, layout=layout)
    assert dataclasses.asdict(problem) == {
        "dtype": torch.bfloat16,
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "q_len": 16,
        "kv_len": 32,
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": True,
        "scale": 0.25,
        "layout": layout,
        "score_mod": None,
        "sinks": None,
        "left": None,
        "right": None,
        "chunk": None,
        "mask_function": None,
        "sequences": None,
        "bias": None,
    }


def test_defaults():
    problem = Problem.of(**qkv(head_dim=64))
    assert (problem.causal, problem.layout) == (False, "bhsd")
    assert problem.scale == pytest.approx(0.125, rel=1e-15)


def test_scale_may_be_an_int():
    problem = Problem.of(**qkv(), scale=1)
    assert problem.scale == 1.0
    assert isinstance(problem.scale, float)


def test_frozen():
    problem = Problem.of(**qkv())
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.causal = True  # type: ignore[misc]
    assert hash(problem) == hash(Problem.of(**qkv()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_is_accepted(head_dim, dtype):
    problem = Problem.of(**qkv(head_dim=head_dim, dtype=dtype))
    assert (problem.head_dim, problem.dtype) == (head_dim, dtype)
    assert problem.scale == pytest.approx(head_dim**-0.5, rel=1e-15)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_every_head_dim_of_fp8_is_accepted(head_dim, dtype):
    problem = Problem.of(**qkv(head_dim=head_dim, dtype=dtype), scales=[torch.ones(2, 2)] * 3)
    assert (problem.head_dim, problem.dtype) == (head_dim, dtype)


@pytest.mark.parametrize("head_dim", [1, 2, 4, 7, 9, 12, 36, 100, 127, 129, 252, 255, 257, 260, 264, 512])
def test_no_other_head_dim_is_accepted(head_dim):
    with pytest.raises(ValueError, match=rf"^q: .*multiple of 8.*got {head_dim}\b"):
        Problem.of(**qkv(head_dim=head_dim))


def odd_strides(t: torch.Tensor) -> torch.Tensor:
    """The same, with a stride that TMA would refuse in each dimension of size 1."""
    return t.as_strided(t.shape, [7 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)])


ACCEPTED = {
    "MQA": (qkv(kv_heads=1), {}),
    "GQA 4:1": (qkv(heads=8, kv_heads=2), {}),
    "one query": (qkv(q_len=1), {}),
    "one key": (qkv(kv_len=1), {}),
    "more queries than keys, causal": (qkv(q_len=33, kv_len=32), {"causal": True}),
    "out": (qkv(), {"out": half(2, 4, 16, 128)}),
    "fp8": (qkv(dtype=E4M3), {}),
    "fp8, one scale": (qkv(dtype=E5M2), {"scales": scales(1, torch.ones(2, 2))}),
    "fp8, out": (qkv(dtype=E4M3), {"out": half(2, 4, 16, 128)}),
    "fp8, bshd": (qkv(dtype=E4M3, layout="bshd"), {"layout": "bshd", "scales": [torch.ones(2, 2)] * 3}),
    "out of other strides than q": (qkv(), {"out": half(2, 16, 4, 128).transpose(1, 2)}),
    "out sliced": (qkv(), {"out": half(2, 4, 20, 136)[:, :, 2:18, 8:]}),
    "memory in the order of the other layout": (
        {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in VALID.items()},
        {},
    ),
    "sliced rows": ({name: t[:, :, 3:-5] for name, t in qkv(q_len=24, kv_len=40).items()}, {}),
    "sliced columns": ({name: t[..., 8:136] for name, t in qkv(head_dim=256).items()}, {}),
    "sliced heads": ({name: t[:, ::2] for name, t in qkv(heads=8, kv_heads=4).items()}, {}),
    "packed q, k, v": (
        dict(zip("qkv", half(2, 16, 3, 4, 128).unbind(2), strict=True)),
        {"layout": "bshd"},
    ),
    "odd strides where the size is 1": (
        {name: odd_strides(t) for name, t in qkv(batch=1, heads=1, kv_heads=1, q_len=1, kv_len=1).items()},
        {},
    ),
    "odd strides of out where the size is 1": (
        qkv(batch=1, q_len=1),
        {"out": odd_strides(half(1, 4, 1, 128))},
    ),
    "K and V expanded over the heads": (
        VALID | {name: half(2, 1, 32, 128).expand(-1, 4, -1, -1) for name in ("k", "v")},
        {},
    ),
    "K and V expanded over the batch": (
        VALID | {name: half(1, 2, 32, 128).expand(2, -1, -1, -1) for name in ("k", "v")},
        {},
    ),
    "no batch": (qkv(batch=0), {}),
    "no heads": (qkv(heads=0, kv_heads=0), {}),
    "no queries": (qkv(q_len=0), {}),
    "no keys": (qkv(kv_len=0), {}),
}


@pytest.mark.parametrize(("tensors", "options"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(tensors, options):
    problem = Problem.of(**tensors, **options)
    q, k = tensors["q"], tensors["k"]
    sequence, head = (1, 2) if options.get("layout") == "bshd" else (2, 1)
    assert (problem.batch, problem.heads, problem.q_len) == (q.shape[0], q.shape[head], q.shape[sequence])
    assert (problem.kv_heads, problem.kv_len) == (k.shape[head], k.shape[sequence])


def test_nothing_is_copied_or_touched():
    tensors = {name: t.fill_(3.0) for name, t in qkv().items()}
    addresses = {name: t.data_ptr() for name, t in tensors.items()}
    Problem.of(**tensors)
    assert addresses == {name: t.data_ptr() for name, t in tensors.items()}
    assert all(bool((t == 3.0).all()) for t in tensors.values())


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 64), (64, 64), (72, 128), (136, 192), (192, 192), (200, 256)])
def test_head_dims_are_padded_each_for_itself(head_dim, padded):
    v = half(2, 2, 32, head_dim)
    posed = Problem.of(VALID["q"], VALID["k"], v)
    assert (posed.head_dim, posed.head_dim_v) == (128, head_dim)
    assert (posed.padded_head_dim, posed.padded_head_dim_v) == (128, padded)
    assert posed.scale == 128**-0.5


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)], ids=str)
def test_an_output_of_another_head_dim_is_in_the_order_of_q(order):
    q = torch.empty_permuted((2, 4, 16, 192), (*order, 3), dtype=torch.float16)
    alike, other = empty_output(q, half(2, 2, 32, 192)), empty_output(q, half(2, 2, 32, 128))
    assert alike.stride() == q.stride()
    assert other.shape == (2, 4, 16, 128)
    assert other.dtype == torch.float16
    assert other.stride() == tuple(stride * 128 // 192 if stride > 1 else 1 for stride in q.stride())
