"""Checking attention: inputs, outputs that start as NaN, and an error budget against float64.

For tests and benchmarks, of this project and of who changes its kernels. A result is `check`ed against
`reference_attention` in float64; how far off it may be is taken from plain PyTorch in the same dtype.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .api import attention
from .backward.configs import HopperBackward
from .backward.launch import NOT_THERE, allocated_apart, backward_on_card
from .backward.plan import BackwardPlan
from .checks import Window
from .device import Device
from .forward.configs import ForwardConfig
from .forward.launch import AUX
from .forward.table import pick_config
from .problem import Problem
from .reference import masked, reference_attention
from .score_mod import ScoreFunction

__all__ = [
    "FP8",
    "GradientError",
    "Surrounded",
    "backward_call",
    "check",
    "check_gradients",
    "config_for_reuse",
    "config_for_rounds",
    "gradient_errors",
    "last_place",
    "normal",
    "normal_qkv",
    "poison_free_memory",
    "repeat",
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# ---------------------------------------------------------------------------------------------------------------------
# Inputs and outputs
# ---------------------------------------------------------------------------------------------------------------------


def normal(
    *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: torch.device | str = "cuda"
) -> Tensor:
    """Normal numbers, the same ones for the same seed on devices of one type."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def normal_qkv(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int,
    kv_len: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
    seed: int = 0,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of normal numbers.

    q is (batch, heads, q_len, head_dim), or with layout "bshd" (batch, q_len, heads, head_dim); k and v likewise.
    kv_heads, kv_len and head_dim_v, which is v's, are those of q unless they are given.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim_v))
    shapes = [(batch, h, s, d) if layout == "bhsd" else (batch, s, h, d) for h, s, d in sizes]
    q, k, v = (normal(*shape, dtype=dtype, seed=3 * seed + i, device=device) for i, shape in enumerate(shapes))
    return q, k, v


class Surrounded:
    """A view of the given shape in the middle of a larger tensor of NaN: around every head, row and column.

    As an input it shows whether anything outside of it is read, as an output whether anything outside is written.
    """

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device | str = "cuda") -> None:
        """shape: of four dimensions. The buffer has one index more on either side of the first three, and 16 bytes of
        columns on either side of the last."""
        batch, outer, inner, columns = shape
        around = 2 * self.margin(dtype)
        self.buffer = torch.full(
            (batch + 2, outer + 2, inner + 2, columns + around), float("nan"), dtype=dtype, device=device
        )
        self.view = self.inside(self.buffer)

    @staticmethod
    def margin(dtype: torch.dtype) -> int:
        """Columns on either side: 16 bytes, as much as the alignment of a TMA tensor asks for."""
        return 16 // dtype.itemsize

    @classmethod
    def inside(cls, buffer: Tensor) -> Tensor:
        """The view of a buffer."""
        margin = cls.margin(buffer.dtype)
        return buffer[1:-1, 1:-1, 1:-1, margin:-margin]

    @classmethod
    def copy_of(cls, t: Tensor) -> Tensor:
        """A copy of t, surrounded by NaN."""
        surrounded = cls(t.shape, t.dtype, t.device)
        return surrounded.view.copy_(t)

    def check_outside_untouched(self) -> None:
        """Raises AssertionError, with their number, if elements around the view were written."""
        outside = self.buffer.clone()
        self.inside(outside).fill_(float("nan"))
        written = int((~outside.isnan()).sum())
        assert written == 0, f"{written} elements outside of the output were written"


def config_for_rounds(problem: Problem, device: Device, num_ctas: int) -> ForwardConfig:
    """What the table has where programs have several items each, so that small problems test that config too."""
    return pick_config(problem, dataclasses.replace(device, sm_count=num_ctas), num_ctas)


def config_for_reuse(problem: Problem, device: Device, num_ctas: int) -> ForwardConfig:
    """What the table has where very many queries use each key: in fp8 on Hopper, one with V transposed before."""
    # On two CTAs the table has one for many keys only, at D=64 under a causal mask.
    kv_len = problem.kv_len if num_ctas == 1 else max(problem.kv_len, 2**12)
    return config_for_rounds(dataclasses.replace(problem, q_len=2**14, kv_len=kv_len), device, num_ctas)


def backward_call(
    config: HopperBackward,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: Window = (None, None),
    chunk: int | None = None,
    score_mod: ScoreFunction | None = None,
    read: Sequence[Tensor] = (),
    deterministic: bool = False,
    device: Device | None = None,
    output: Callable[[Tensor], Tensor] = torch.empty_like,
    workspaces: Callable[[str, Tensor], Tensor] | None = None,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """A call of the backward's kernels, (B, H, S, D), with this config instead of the table's: (dQ, dK, dV).

    read: the tensors that score_mod reads. device: what to plan for, with fewer processors say; default: the tensors'
    own card. output: makes each gradient, from the tensor that it is of. workspaces: given each workspace's name and
    new memory, says what is to be used."""
    problem = Problem.of(q, k, v, causal=causal, window=window, chunk=chunk, score_mod=score_mod)
    chosen = Device.of(q.device) if device is None else device
    plan = BackwardPlan.of(problem, config, chosen, deterministic=deterministic)
    shapes = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": q, "dk": k, "dv": v}
    if q.device.type == "cpu":
        from .cpu import backward_on_cpu

        launches = backward_on_cpu(plan, shapes)
    else:
        launches = backward_on_card(plan, shapes)
    of_scores = {pointer.tensor: t for pointer, t in zip(AUX, read, strict=False)}
    if workspaces is not None:
        make, replace = allocated_apart(plan), workspaces
        launches.workspaces = lambda given: {name: replace(name, memory) for name, memory in make(given).items()}

    def call() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (output(t) for t in (q, k, v))
        launches({**shapes, "dq": dq, "dk": dk, "dv": dv, "lse": lse, "dlse": None, **NOT_THERE, **of_scores})
        return dq, dk, dv

    return call


def poison_free_memory(*like: tuple[Iterable[int], torch.dtype]) -> None:
    """Fill memory of these shapes with NaN and free it: what is allocated next is likely to get it."""
    poisoned = [torch.full(tuple(shape), float("nan"), dtype=dtype, device="cuda") for shape, dtype in like]
    del poisoned


# ---------------------------------------------------------------------------------------------------------------------
# The error budget
# ---------------------------------------------------------------------------------------------------------------------


def last_place(dtype: torch.dtype, at: float) -> float:
    """One unit in the last place of `dtype` at a number of that magnitude."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(abs(at), info.tiny)))


def largest(x: Tensor) -> float:
    """The largest magnitude; 0 of nothing."""
    return float(x.abs().max()) if x.numel() else 0.0


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Products of fp32 on a card are of fp32, not of tf32, whatever the caller's setting, which is restored."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@exact_products()
def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    chunk: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    scales: Sequence[Tensor | None] = (),
    bias: Tensor | None = None,
    what: str = "",
) -> None:
    """O and LSE against float64; raises AssertionError with what is wrong, after `what`.

    q and out are (B, H, Sq, D), k and v (B, Hkv, Sk, D); with layout "bshd" heads and lengths change places. lse is
    (B, H, Sq) in fp32, or None where there is none to check. causal, scale, layout: as attention() was given them;
    window, chunk: as `reference_attention` takes them.
    scales: of q, k and v, (B, Hkv), if they are in fp8; None is 1. bias: that was added to scores, of 16 bits.

    O may be off by twice what plain PyTorch in the same dtype is, plus one unit in the last place at the largest |O|.
    Of fp8 inputs the products are those of the numbers they stand for, times their scales, and plain PyTorch is
    attention in fp32 with nothing but the probabilities rounded to e4m3: see `plain_fp8`.

    LSE is fp32, whatever the inputs' dtype, so twice the error of plain PyTorch in fp32, plus 2^-16 of the largest
    |LSE| (at least 1): products on the tensor cores are summed with truncation, up to 16 steps for D = 256, each off
    by 2^-23 of partial sums that can be several times the score; exp2 and log2 are approximations to 2^-22.
    The products of fp8 are summed on Hopper's tensor cores 32 at a time to about 13 bits: there, for each step 2^-12 of
    the largest score more. Up to 0.45 of that were seen, with normal numbers and scores up to 100.
    """
    q_len = q.shape[2] if layout == "bhsd" else q.shape[1]
    heads = q.shape[1] if layout == "bhsd" else q.shape[2]
    wanted_dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    got_kind = (out.shape, out.dtype, out.device)
    wanted_shape = (*q.shape[:-1], v.shape[-1])
    assert got_kind == (wanted_shape, wanted_dtype, q.device), f"{what}: O is {out.shape}, {out.dtype}"
    options: dict[str, Any] = {"causal": causal, "window": window, "chunk": chunk, "scale": scale, "layout": layout}
    fp8 = q.dtype in FP8
    if fp8:
        kv_heads = k.shape[1] if layout == "bhsd" else k.shape[2]
        by = [*scales, None, None, None][:3]
        q, k, v = (stands_for(t, s, kv_heads, layout) for t, s in zip((q, k, v), by, strict=True))
        plain = plain_fp8(q, k, v, **options)
    else:
        options["bias"] = bias
        plain, _ = reference_attention(q, k, v, **options)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), **options)
    _, single_lse = reference_attention(q.float(), k.float(), v.float(), **options)

    bad = int((~out.isfinite()).sum())
    assert bad == 0, f"{what}: {bad} of {out.numel()} elements of O are not finite"
    error, plain_error = largest(out.double() - want), largest(plain.double() - want)
    budget = 2 * plain_error + last_place(out.dtype, largest(want))
    assert error <= budget, f"{what}: O is off by {error:.3e}, budget {budget:.3e} (plain PyTorch: {plain_error:.3e})"

    sees_nothing = want_lse == float("-inf")  # (B, H, Sq)
    rows = out if layout == "bhsd" else out.transpose(1, 2)
    assert bool((rows[sees_nothing] == 0).all()), f"{what}: O is not 0 in a row that sees no key"
    if lse is None:
        return
    assert (lse.shape, lse.dtype) == ((q.shape[0], heads, q_len), torch.float32), f"{what}: LSE {lse.shape} {lse.dtype}"
    assert torch.equal(lse == float("-inf"), sees_nothing), f"{what}: LSE is -inf in other rows than see no key"
    lse, want_lse, single_lse = (t.double()[~sees_nothing] for t in (lse, want_lse, single_lse))
    bad = int((~lse.isfinite()).sum())
    assert bad == 0, f"{what}: {bad} elements of LSE are not finite"
    error, single_error = largest(lse - want_lse), largest(single_lse - want_lse)
    budget = 2 * single_error + 2.0**-16 * max(1.0, largest(want_lse))
    if fp8 and out.is_cuda and torch.cuda.get_device_capability(out.device) == (9, 0):
        budget += math.ceil(q.shape[-1] / 32) * 2.0**-12 * largest_score(q, k, scale, layout)
    assert error <= budget, f"{what}: LSE is off by {error:.3e}, budget {budget:.3e} (plain fp32: {single_error:.3e})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientError:
    """Of one gradient, in magnitude at its largest. plain_error: that of plain PyTorch in the same dtype.

    budget: twice plain_error, plus one unit in the last place at the gradient's largest number, plus 2^-20 of the
    largest number that fp32 sums have on the way: of all gradients, and of what delta is made of, rowsum(dO * O) and
    dLSE, times scale and the largest number of Q and K. For dS is P (dP - delta), and where that is 0, as with a single
    key, dP and delta are rounded unlike.
    """

    name: str
    error: float  # NaN if the gradient has NaN
    plain_error: float
    budget: float

    def badness(self) -> float:
        """The error in budgets; infinite if it is NaN."""
        return math.inf if math.isnan(self.error) else self.error / max(self.budget, 2.0**-126)


GRADIENTS = ("dQ", "dK", "dV", "dBias")  # their names in messages


@exact_products()
def gradient_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    runs: Sequence[Sequence[Tensor]],
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    chunk: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    bias: Tensor | None = None,
) -> list[GradientError]:
    """Of dQ, dK and dV against float64, the largest of several runs. dout, dlse: of O and of LSE. With a bias, of that
    too: runs have four gradients then."""

    def plain(dtype: torch.dtype) -> tuple[list[Tensor], float]:
        """The gradients, and the largest number that delta of a row is made of."""
        given = (q, k, v) if bias is None else (q, k, v, bias)
        inputs = [t.detach().to(dtype).requires_grad_() for t in given]
        out, lse = reference_attention(
            *inputs[:3], causal=causal, window=window, chunk=chunk, scale=scale, layout=layout,
            bias=None if bias is None else inputs[3],
        )  # fmt: skip
        outputs, with_grads = [out], [dout.to(dtype)]
        addends = [(out.detach() * dout.to(dtype)).sum(dim=-1)]
        if dlse is not None:
            # A row that sees no key has an LSE that no input moves.
            outputs, with_grads = [out, lse], [*with_grads, dlse.masked_fill(lse == float("-inf"), 0.0).to(lse.dtype)]
            addends.append(with_grads[1])
        return list(torch.autograd.grad(outputs, inputs, with_grads)), max(map(largest, addends))

    exact, delta = plain(torch.float64)
    scale_used = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    single = 2.0**-20 * max(*map(largest, exact), delta * scale_used * max(largest(q.detach()), largest(k.detach())))
    found = []
    for i, (want, same_dtype) in enumerate(zip(exact, plain(q.dtype)[0], strict=True)):
        errors = torch.tensor([largest(run[i].double() - want) for run in runs], dtype=torch.float64)
        plain_error = largest(same_dtype.double() - want)
        budget = 2 * plain_error + last_place(q.dtype, largest(want)) + single
        error = float(errors.max())  # NaN, if there is one
        found.append(GradientError(name=GRADIENTS[i], error=error, plain_error=plain_error, budget=budget))
    return found


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    grads: Sequence[Tensor | None],
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    chunk: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    bias: Tensor | None = None,
    what: str = "",
) -> None:
    """The gradients (dQ, dK, dV), and dBias if there is a bias, against float64; raises AssertionError with what is
    wrong, after `what`.

    dout, dlse: of O and of LSE. How far off each may be: `GradientError.budget`.
    """
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    for name, t, got in zip(GRADIENTS[: len(inputs)], inputs, grads, strict=True):
        assert got is not None, f"{what}: no {name}"
        assert (got.shape, got.dtype, got.device) == (t.shape, t.dtype, t.device), f"{what}: {name} {got.shape}"
        bad = int((~got.isfinite()).sum())
        assert bad == 0, f"{what}: {bad} of {got.numel()} elements of {name} are not finite"
    runs = [[g for g in grads if g is not None]]
    limits: dict[str, Any] = {"causal": causal, "window": window, "chunk": chunk}
    for e in gradient_errors(q, k, v, dout, runs, dlse=dlse, **limits, scale=scale, layout=layout, bias=bias):
        assert e.error <= e.budget, (
            f"{what}: {e.name} is off by {e.error:.3e}, budget {e.budget:.3e} ({e.plain_error:.3e} in torch)"
        )


def largest_score(q: Tensor, k: Tensor, scale: float | None, layout: str) -> float:
    """Of the scaled scores, masked or not, the largest magnitude."""
    q, k = (t if layout == "bhsd" else t.transpose(1, 2) for t in (q, k))
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)
    return largest(q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else abs(scale))


def stands_for(t: Tensor, scale: Tensor | None, kv_heads: int, layout: str) -> Tensor:
    """What an fp8 tensor stands for, exactly: each head times the number in `scale` (B, kv_heads) of its KV head."""
    t = t.double() if layout == "bhsd" else t.double().transpose(1, 2)
    if scale is not None:
        t = t.unflatten(1, (kv_heads, t.shape[1] // kv_heads)) * scale.double()[:, :, None, None, None]
        t = t.flatten(1, 2)
    return t if layout == "bhsd" else t.transpose(1, 2)


def plain_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int | None, int | None],
    chunk: int | None,
    scale: float | None,
    layout: str,
) -> Tensor:
    """Attention in fp32 of what fp8 inputs stand for, the probabilities rounded to e4m3, O rounded to bf16.

    They are rounded times 2^8, as any kernel with fp8 products must: e4m3 has no normal number below 2^-6.
    """
    q, k, v = (t.float() if layout == "bhsd" else t.float().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // max(t.shape[1], 1), dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = masked(scores, causal=causal, window=window, chunk=chunk)
    largest_scores = scores.amax(-1, keepdim=True)
    p = (scores - largest_scores.masked_fill(largest_scores == float("-inf"), 0.0)).exp() * 2.0**8
    out = p.to(torch.float8_e4m3fn).float() @ v / p.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (out if layout == "bhsd" else out.transpose(1, 2)).to(torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# Again and again
# ---------------------------------------------------------------------------------------------------------------------


AT_A_TIME = 8  # launches


def repeat(
    launches: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, num_ctas: int | None = None
) -> None:
    """attention(q, k, v, causal=causal, num_ctas=num_ctas) is right, and gives the same bits each time; raises
    AssertionError if not.

    launches: a multiple of 8, as they are enqueued back to back, 8 at a time, with one wait at the end; of another
    number, ValueError."""
    if launches <= 0 or launches % AT_A_TIME:
        raise ValueError(f"launches: expected a positive multiple of {AT_A_TIME}, got {launches}")

    def launch(given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, causal=causal, num_ctas=num_ctas, return_lse=True, out=given)
        return out, lse

    out, lse = launch()
    check(q, k, v, out, lse, causal=causal)
    different = torch.zeros((), dtype=torch.int64, device=q.device)
    outs = [torch.empty_like(out) for _ in range(AT_A_TIME)]
    for _ in range(launches // AT_A_TIME):
        for given in outs:
            given.fill_(float("nan"))
        lses = [launch(given)[1] for given in outs]
        for given, lse_again in zip(outs, lses, strict=True):
            same = (given == out).all() & (lse_again == lse).all()
            different += ~same
    wrong = int(different)
    assert wrong == 0, f"{wrong} of {launches} launches differ from the first: causal={causal}, num_ctas={num_ctas}"
