"""A grid of lengths, head dims, heads, masks, soft caps and sinks, as flash-attention's own tests have it: which of it
is computed, and how far off O, LSE and gradients may be. Small lengths here, by gluon_cpu; tests/gpu/test_grid.py has
all."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gluon_attn import attention, reference_attention
from gluon_attn.api import plan_of
from gluon_attn.backward.launch import backward_launches_of
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config
from gluon_attn.call import Extras, Options
from gluon_attn.device import Device
from gluon_attn.forward.launch import launches_of
from gluon_attn.runtime.kernel import Build
from gluon_attn.testing import largest, last_place
from tests.slow import slow_if

HOPPER = Device.hopper()
# Queries and keys.
LENGTHS = (
    (1, 1), (64, 1), (239, 1), (799, 3), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256),
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048), (113, 1), (1, 239), (4224, 4224),
)  # fmt: skip
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))  # of Q and of V
# By which kernels of the gradients compute them.
KERNEL_OF = {(64, 64): 0, (96, 96): 1, (128, 128): 1, (192, 192): 2, (256, 256): 2, (192, 128): 3}
WINDOWS = ((None, None), (30, 10), (30, None), (None, 10))
HEADS = {"MHA": (3, 3), "GQA": (4, 2), "MQA": (3, 1)}
DATA = ("normal", "growing keys", "shrinking keys", "deep scores")
CAP = 15.0
MOST_SCORES = 2**26  # of which there are some ten tensors in float64
SEED = 3793  # of those whose sample has each two options of two kinds together, one with few kernels


class Case(NamedTuple):
    lengths: tuple[int, int]
    head_dims: tuple[int, int]
    heads: str
    window: tuple[int | None, int | None]
    causal: bool
    capped: bool
    sinks: bool
    dtype: torch.dtype
    data: str

    @property
    def row(self) -> str:
        """What has the same kernels, but for lengths."""
        limits = ", ".join("∞" if n is None else str(n) for n in self.window)
        changed = " soft cap" * self.capped + " sinks" * self.sinks
        d, d_v = self.head_dims
        return f"D={d}/{d_v} window ({limits}){' causal' * self.causal}{changed} {str(self.dtype)[6:]}"

    @property
    def batch(self) -> int:
        """Few for long ones. But where programs would share key blocks, which is another kernel, mostly so many that
        they do not."""
        few = 1 if max(self.lengths) > 1024 else 2
        if self.window[0] is not None or self.lengths[0] <= 500:
            return few
        key_blocks = HEADS[self.heads][1] * -(-self.lengths[1] // (128 if self.head_dims[1] <= 128 else 64))
        return max(few, -(-HOPPER.sm_count // key_blocks))

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"causal": self.causal, "window": self.window}
        return given | ({"softcap": CAP} if self.capped else {})


def takes_effect(window: tuple[int | None, int | None], lengths: tuple[int, int]) -> bool:
    """All of it. What hides nothing attention leaves out, and then this would be the case without."""
    left, right = window
    return (left is None or left < lengths[1] - 1) and (right is None or right < lengths[0] - 1)


def row_of(head_dims: tuple[int, int], window: tuple[int | None, int | None]) -> tuple[bool, bool, bool, torch.dtype]:
    """causal, capped, sinks and dtype of all cases of these: what is compiled in one is compiled in the others."""
    g, w = KERNEL_OF[head_dims], WINDOWS.index(window)
    return (
        (g // 2 + w) % 2 == 1,
        (g + w) % 2 == 1,
        (g + w // 2) % 2 == 1,
        (torch.bfloat16, torch.float16)[(g // 2 + w // 2) % 2],
    )


def sample(seed: int = SEED) -> Iterator[Case]:
    """Not all of the product: each two options of two kinds are in some case."""
    draw = random.Random(seed)
    for n, lengths in enumerate(LENGTHS):
        windows = [w for w in WINDOWS if takes_effect(w, lengths)]
        windows, heads = (windows * 6)[:6], [*HEADS] * 2
        draw.shuffle(windows)
        draw.shuffle(heads)
        for i, (head_dims, window, of_heads) in enumerate(zip(HEAD_DIMS, windows, heads, strict=True)):
            data = DATA[(n + i) % len(DATA)] if min(lengths) > 64 else DATA[0]
            yield Case(lengths, head_dims, of_heads, window, *row_of(head_dims, window), data)


CASES = tuple(sample())
ROWS = tuple(dict.fromkeys(case.row for case in CASES))


def tensors(case: Case, where: str) -> dict[str, Tensor]:
    """q, k, v and, if there are any, sinks; in float64, of numbers of the case's dtype."""
    (q_len, kv_len), (d, d_v), (heads, kv_heads) = case.lengths, case.head_dims, HEADS[case.heads]
    batch = case.batch
    generator = torch.Generator().manual_seed(q_len + 5000 * kv_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = normal(batch, heads, q_len, d), normal(batch, kv_heads, kv_len, d), normal(batch, kv_heads, kv_len, d_v)
    if case.data in ("growing keys", "shrinking keys"):  # each block, walked from either end, has a larger maximum
        grown = 1 + torch.arange(kv_len) / 64
        k *= (grown if case.data == "growing keys" else grown.flip(0))[:, None]
    elif case.data == "deep scores":
        q[..., 0], k[..., 0] = d**0.5, -60.0  # all lower by 60
    found = {"q": q, "k": k, "v": v}
    if case.sinks:
        found["sinks"] = normal(heads)
    return {name: t.to(where, case.dtype).double() for name, t in found.items()}


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]
    of_rounded_out: dict[str, Tensor]


def results(function: Any, given: dict[str, Tensor], dout: Tensor, dlse: Tensor, options: dict[str, Any]) -> Results:
    """Gradients are of O and of LSE, where that is finite. of_rounded_out: what they change by if delta is of an O that
    is rounded to `dout`'s dtype. That is as if LSE had another gradient."""
    inputs = {name: t.detach().requires_grad_() for name, t in given.items()}
    out, lse = function(**inputs, **options)
    seen = lse.isfinite()

    def of(out_too: bool, of_lse: Tensor) -> dict[str, Tensor]:
        loss = torch.where(seen, lse * of_lse.to(lse.dtype), 0.0).sum()
        loss = loss + (out * dout.to(out.dtype)).sum() if out_too else loss
        grads = torch.autograd.grad(loss, list(inputs.values()), retain_graph=True, materialize_grads=True)
        return dict(zip(inputs, grads, strict=True))

    grads, of_rounded = of(True, dlse), {}
    if out.dtype == torch.float64:
        by_row = (out.to(dout.dtype).double() - out) * dout.double()
        of_rounded = of(False, -by_row.sum(-1).detach())
        if "sinks" in inputs:  # a sum over rows, in which these errors may cancel here and not there; in fp32
            p = (inputs["sinks"][:, None] - lse).exp().detach()
            of_rounded["sinks"] = (p * by_row.detach().norm(dim=-1)).pow(2).sum((0, 2)).sqrt()
            of_rounded["sinks"] += 2.0**-22 * (p * dlse.abs()).sum((0, 2))
    return Results(out.detach(), lse.detach(), grads, of_rounded)


def in_parts(function: Any, given: dict[str, Tensor], dout: Tensor, dlse: Tensor, options: dict[str, Any]) -> Results:
    """`results`, of so many batches at a time as there is memory for."""
    q, k = given["q"], given["k"]
    count = max(1, MOST_SCORES // (q.shape[1] * q.shape[2] * k.shape[2]))
    parts = []
    for first in range(0, len(q), count):
        of = slice(first, first + count)
        some = {name: t if name == "sinks" else t[of] for name, t in given.items()}
        parts.append(results(function, some, dout[of], dlse[of], options))

    def joined(of_parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: torch.stack([p[name] for p in of_parts]).sum(0)
            if name == "sinks"
            else torch.cat([p[name] for p in of_parts])
            for name in of_parts[0]
        }

    out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
    return Results(out, lse, joined([p.grads for p in parts]), joined([p.of_rounded_out for p in parts]))


def check(case: Case, where: str) -> None:
    """O, LSE and all gradients against float64: off by no more than twice what plain PyTorch in the same dtype is, and
    a rounding; three times with a soft cap or sinks. where: "cpu", to execute the kernels there, or "cuda"."""
    given = tensors(case, where)
    d_v = case.head_dims[1]
    generator = torch.Generator().manual_seed(1)
    shape = given["q"].shape[:3]
    dout = torch.randn(*shape, d_v, generator=generator).to(where, case.dtype)
    dlse = torch.randn(shape, generator=generator).to(where)
    typed = {name: t.float() if name == "sinks" else t.to(case.dtype) for name, t in given.items()}
    on_cpu: dict[str, Any] = {"device": HOPPER} if where == "cpu" else {}
    got = results(attention, typed, dout, dlse, case.options | {"return_lse": True} | on_cpu)
    exact = in_parts(reference_attention, given, dout, dlse, case.options)
    plain = in_parts(reference_attention, typed, dout, dlse, case.options)
    factor = 3 if case.capped or case.sinks else 2

    sees_nothing = exact.lse == -math.inf
    assert torch.equal(got.lse == -math.inf, sees_nothing), f"{case}: LSE is -inf in other rows than see no key"
    assert not got.out[sees_nothing].any(), f"{case}: O is not 0 in a row that sees no key"
    off = largest((got.lse.double() - exact.lse)[~sees_nothing])
    allowed = 1e-4 + 2.0**-15 * largest(exact.lse[~sees_nothing])
    assert off <= allowed, f"{case}: LSE is off by {off:.3e}, allowed {allowed:.3e}"
    require(case, "O", got.out, exact.out, plain.out, factor, 0.0)
    all_grads = max(map(largest, exact.grads.values()))
    for name, want in exact.grads.items():
        floor = 2.0**-20 * all_grads + 2 * largest(exact.of_rounded_out[name])
        require(case, f"d{name}", got.grads[name], want, plain.grads[name], factor, floor)


def require(case: Case, name: str, got: Tensor, want: Tensor, plain: Tensor, factor: int, floor: float) -> None:
    """AssertionError for an error of more than `factor` that of `plain`, a last place and `floor`."""
    assert bool(got.isfinite().all()), f"{case}: {name} is not finite"
    error, of_plain = largest(got.double() - want), largest(plain.double() - want)
    allowed = factor * of_plain + last_place(got.dtype, largest(want)) + floor
    assert error <= allowed, f"{case}: {name} is off by {error:.3e}, allowed {allowed:.3e} (plain torch {of_plain:.3e})"


def kernels_of(case: Case) -> set[str]:
    """All that is compiled for a case, as texts."""
    (q_len, kv_len), (d, d_v), (heads, kv_heads) = case.lengths, case.head_dims, HEADS[case.heads]
    batch = case.batch
    q = torch.empty(batch, heads, q_len, d, dtype=case.dtype)
    k, v = (torch.empty(batch, kv_heads, kv_len, n, dtype=case.dtype) for n in (d, d_v))
    out = torch.empty(batch, heads, q_len, d_v, dtype=case.dtype)
    extras = Extras(sinks=torch.empty(heads) if case.sinks else None)
    options = Options(**case.options, device=HOPPER)
    plan = plan_of(q, k, v, extras, options)
    assert plan is not None
    forward = launches_of(plan, q, k, v, out)
    backward_plan = BackwardPlan.of(plan.problem, pick_config(plan.problem), HOPPER)
    shapes: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v}
    return {text_of(launch.build) for launch in (*forward, *backward_launches_of(backward_plan, shapes))}


def text_of(build: Build) -> str:
    texts: list[str] = []

    def compiling(fn: Any, signature: Any, constants: Any, **options: Any) -> Any:
        texts.append(repr((fn.__name__, signature, constants, options)))

    build.given_to(compiling, 90)
    return texts[0]


def test_the_sample_has_each_two_options_together():
    """But windows that hide nothing at those lengths."""
    kinds = ("lengths", "head_dims", "heads", "window", "causal", "capped", "sinks", "dtype")
    values: dict[str, Any] = {
        "lengths": LENGTHS, "head_dims": HEAD_DIMS, "heads": HEADS, "window": WINDOWS, "causal": (False, True),
        "capped": (False, True), "sinks": (False, True), "dtype": (torch.bfloat16, torch.float16),
    }  # fmt: skip
    for one, other in itertools.combinations(kinds, 2):
        there = {(getattr(case, one), getattr(case, other)) for case in CASES}
        wanted = set(itertools.product(values[one], values[other]))
        if (one, other) == ("lengths", "window"):
            wanted = {(n, w) for n, w in wanted if w == WINDOWS[0] or takes_effect(w, n)}
        assert there == wanted, f"{one}, {other}: {sorted(map(str, wanted - there))}"
    assert {case.data for case in CASES} == set(DATA)
    assert {(case.data, case.head_dims) for case in CASES} == set(itertools.product(DATA, HEAD_DIMS))


def test_few_kernels_compute_it():
    """So that it does not take long on a card, most of all of those that take the compiler long."""
    found = set[str]().union(*map(kernels_of, CASES))
    assert len([text for text in found if "('attention_" in text]) <= 49
    assert len(found) <= 68


SMALL = [case for case in CASES if max(case.lengths) < 260]
QUICK = [case for row in ROWS[::5] for case in SMALL if case.row == row][::4]


@pytest.mark.parametrize("case", slow_if(lambda case: case not in QUICK, SMALL), ids=str)
def test_small_lengths(case):
    check(case, "cpu")
