"""NaN and infinity in attention's inputs: a case to each head, and what O and LSE must be by the specification.

No head sees another one's numbers, so one launch holds many cases. This module knows no device: the tests on gluon_cpu
and on a card share it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gluon_attn import reference_attention

NAN, INF = float("nan"), float("inf")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Q_LEN, KV_LEN = 100, 333  # three blocks of 128 keys, or six of 64; the last one is not full
# Columns 0, 1 and 2 of 16, of which some have their exponentials by polynomial; the first and the last column of a
# block, of 64 or of 128; a block that is walked neither first nor last; the last key.
KEYS = (0, 1, 2, 63, 127, 145, KV_LEN - 1)
O_TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, E4M3: 0.12, E5M2: 0.12}
LSE_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """(1, len(names), length, D); scales, of fp8 alone: (1, len(names))."""

    names: tuple[str, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    scales: dict[str, Tensor]


Change = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], None]  # of a head's q, k, v [length, D] and scales [1]


def special_values(dtype: torch.dtype) -> tuple[float, ...]:
    return (NAN,) if dtype == E4M3 else (NAN, INF, -INF)


def in_queries(dtype: torch.dtype) -> Change:
    """Each special value in three rows, in the first, a middle and the last column."""

    def change(q: Tensor, _k: Tensor, _v: Tensor, _scales: dict[str, Tensor]) -> None:
        for i, value in enumerate(special_values(dtype)):
            q[i, 0] = q[40 + i, q.shape[1] // 2] = q[Q_LEN - 1 - i, -1] = value

    return change


def in_values(dtype: torch.dtype) -> Change:
    """A special value in each key's row of V, each in a column of its own."""

    def change(_q: Tensor, _k: Tensor, v: Tensor, _scales: dict[str, Tensor]) -> None:
        for i, key in enumerate(KEYS):
            v[key, i] = special_values(dtype)[i % len(special_values(dtype))]

    return change


def in_key(key: int, value: float) -> Change:
    """Infinity is one of the other sign in the scores of about half of the rows."""

    def change(_q: Tensor, k: Tensor, _v: Tensor, _scales: dict[str, Tensor]) -> None:
        k[key, key % k.shape[1]] = value

    return change


def hidden_keys(keys: slice) -> Change:
    """Scores of -inf: how a caller may mask keys."""

    def change(q: Tensor, k: Tensor, _v: Tensor, _scales: dict[str, Tensor]) -> None:
        q[:, 0] = 1.0
        k[keys, 0] = -INF

    return change


def scale_of(name: str, value: float) -> Change:
    def change(_q: Tensor, _k: Tensor, _v: Tensor, scales: dict[str, Tensor]) -> None:
        scales[name][:] = value

    return change


def changes(dtype: torch.dtype, *, refused_on_cpu: bool) -> dict[str, Change]:
    found: dict[str, Change] = {
        "nothing": lambda *_: None,
        "Q": in_queries(dtype),
        "V": in_values(dtype),
        "K, a negative NaN": in_key(70, -NAN),
    }
    for value in special_values(dtype)[:2]:
        found |= {f"K, {value} at key {key}": in_key(key, value) for key in KEYS}
    if dtype != E4M3:
        found |= {f"-inf from key {first} on": hidden_keys(slice(first, None)) for first in (0, 64, 128, 300)}
        found["-inf up to key 140"] = hidden_keys(slice(0, 140))
    if dtype in (E4M3, E5M2):
        scales = ("q_scale", "k_scale", "v_scale")
        found |= {f"{name}, {value}": scale_of(name, value) for name in scales for value in (NAN, INF, 0.0)}
        found["v_scale, negative"] = scale_of("v_scale", -1.5)
        if refused_on_cpu:
            found |= {f"{name}, negative": scale_of(name, -1.5) for name in scales[:2]}
    return found


def special_tensors(dtype: torch.dtype, head_dim: int, *, refused_on_cpu: bool = False) -> Tensors:
    """refused_on_cpu: with cases that only a card takes, as they are seen only by reading the tensors."""
    cases = changes(dtype, refused_on_cpu=refused_on_cpu)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, len(cases), n, head_dim, generator=generator) for n in (Q_LEN, KV_LEN, KV_LEN))
    scales = {}
    if dtype in (E4M3, E5M2):
        scales = {name: torch.full((1, len(cases)), 1.25) for name in ("q_scale", "k_scale", "v_scale")}
    for h, change in enumerate(cases.values()):
        change(q[0, h], k[0, h], v[0, h], {name: scale[0, h : h + 1] for name, scale in scales.items()})
    return Tensors(names=tuple(cases), q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), scales=scales)


def check_special(given: Tensors, out: Tensor, lse: Tensor, *, causal: bool, **options: Any) -> None:
    """O and LSE are NaN, infinite and finite where those of the specification are, and there the same.

    Three things are not promised, so not looked at:
    a row that does not see a key by the causal mask may have that key's NaN of V, as PyTorch's 0 · NaN is, or not;
    with V's scale infinite, O is not finite, but may be infinite where PyTorch has NaN;
    with a negative scale of Q or K, LSE and O are NaN.

    options: that the call had besides.
    """
    scales: dict[str, Any] = dict(given.scales)
    inputs = [given.q, given.k, given.v]
    if given.q.dtype == torch.bfloat16:
        # Of the same range as fp32; and some processors' own products in bf16 let NaN into the row before.
        inputs = [t.float() for t in inputs]
    given_besides: dict[str, Any] = scales | options
    want, want_lse = reference_attention(*inputs, causal=causal, **given_besides)
    tolerance = O_TOLERANCE[given.q.dtype]
    out, want = out.float().cpu().clone(), want.float()
    for h, name in enumerate(given.names):
        if name == "V" and causal:
            sees = torch.ones(Q_LEN, KV_LEN).tril(KV_LEN - Q_LEN)
            special = ~given.v[0, h].float().isfinite()
            unseen = special.any(0) & (sees @ special.float() == 0)
            out[0, h][unseen] = want[0, h][unseen] = 0.0
        elif name == f"v_scale, {INF}":
            assert not out[0, h].isfinite().any(), name
            out[0, h] = want[0, h] = 0.0
        elif name in ("q_scale, negative", "k_scale, negative"):
            want[0, h] = want_lse[0, h] = NAN
    wrong = []
    for what, got, expected, atol in (("O", out, want, tolerance), ("LSE", lse.cpu(), want_lse, LSE_TOLERANCE)):
        bad = ~torch.isclose(got, expected, rtol=0.01, atol=atol, equal_nan=True)
        for h, name in enumerate(given.names):
            if (count := int(bad[0, h].sum())) > 0:
                where = tuple(bad[0, h].nonzero()[0].tolist())
                wrong.append(
                    f"{name}: {count} wrong in {what}, the first at {where}: expected {expected[0, h][where]:.4g}, "
                    f"got {got[0, h][where]:.4g}"
                )
    assert not wrong, "\n".join(wrong)
