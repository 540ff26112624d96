"""The project's kernels on the machine, as gluon_attn launches them on a card."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

import gluon_cpu
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.launch import NOT_THERE, Choices, backward_launches_of, workspaces
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config
from gluon_attn.cpu import register_twins
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.launch import NOT_GIVEN, launches_of, workspaces_of
from gluon_attn.forward.plan import Plan
from gluon_attn.problem import Problem
from gluon_attn.reference import reference_attention
from gluon_attn.runtime.kernel import Launch, Tensors
from gluon_attn.tensors import SCALES, empty_output, in_bhsd, output_dtype
from gluon_attn.testing import check, check_gradients, config_for_rounds

register_twins()


class Run:
    """A launch of attention, ready to be repeated: outputs are poisoned before each."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *scales: Tensor,
        causal: bool,
        layout: str = "bhsd",
        device: Device | None = None,
        num_ctas: int = 1,
        config: ForwardConfig | None = None,
        programs: int | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """scales: of q, k and v in fp8. device: default an H200. config: default the table's for much work, whatever
        the problem's size. programs: of the persistent grid, at most one for each item; default: as many as the
        device has. bias: that is added to scores."""
        self.q, self.k, self.v, self.scales = q, k, v, scales
        self.options: dict[str, Any] = {"causal": causal, "layout": layout, "bias": bias}
        problem = Problem.of(q, k, v, **self.options, scales=scales or (None, None, None))
        device = Device.hopper() if device is None else device
        config = config_for_rounds(problem, device, num_ctas) if config is None else config
        require_fits(config, problem, device)
        if programs is not None:
            device = dataclasses.replace(device, sm_count=programs * config.num_ctas)
        plan = self.plan = Plan.of(problem, config, device)
        self.out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=output_dtype(q.dtype))
        self.lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32)
        self.target = f"sm_{plan.arch}a"
        *before, self.launch = launches_of(plan, q, k, v, self.out, bias=bias)
        self.tensors: Tensors = {**NOT_GIVEN, "bias": bias, "q": q, "k": k, "v": v, "out": self.out, "lse": self.lse}
        self.tensors |= dict(zip(SCALES, scales, strict=False))
        self.before = TransposeRun(plan, v, before[0]) if before else None
        if self.before is not None:
            self.tensors["transposed_v"] = self.before.transposed

    def __call__(self, **options: Any) -> Any:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        if self.before is not None:
            self.before(**options)
        return run(self.launch, self.tensors, self.target, **options)

    def check(self, what: str = "") -> None:
        """O and LSE of the last launch against float64."""
        check(self.q, self.k, self.v, self.out, self.lse, scales=self.scales, what=what, **self.options)


def run(launch: Launch, tensors: dict[str, Any], target: str, **options: Any) -> Any:
    """One launch on the machine; options: of `gluon_cpu.launch`."""
    null = torch.empty(0)  # an empty tensor has no address
    arguments = launch.arguments({name: null if t is None else t for name, t in tensors.items()})
    return gluon_cpu.launch(
        launch.build.kernel.fn, (launch.programs,), *arguments.values(), target=target, **launch.options, **options
    )


class TransposeRun:
    """The launch before, that transposes V in fp8, ready to be repeated."""

    def __init__(self, plan: Plan, v: Tensor, launch: Launch) -> None:
        """v: in plan.problem's layout."""
        self.v = in_bhsd(v, plan.problem.layout)
        self.launch, self.target = launch, f"sm_{plan.arch}a"
        made = workspaces_of(plan)
        assert made is not None
        self.transposed = made({"v": v})["transposed_v"]
        self.tensors = {**NOT_GIVEN, "v": v, "transposed_v": self.transposed}

    def __call__(self, **options: Any) -> Any:
        self.transposed.view(torch.uint8).fill_(0x7F)  # NaN
        return run(self.launch, self.tensors, self.target, **options)

    def check(self, what: str = "") -> None:
        """Key 16 a + 8 b + 2 t + e is column 16 a + 4 t + 2 b + e; columns of no key are 0."""
        columns = self.transposed.shape[3]
        padded = torch.nn.functional.pad(self.v.view(torch.uint8), (0, 0, 0, columns - self.v.shape[2]))
        keys = padded.mT.unflatten(3, (columns // 16, 2, 4, 2)).transpose(4, 5)
        assert torch.equal(self.transposed.view(torch.uint8), keys.flatten(3)), what


class BackwardRun:
    """The launches of the gradients of attention, ready to be repeated: all that they write is poisoned before each."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        deterministic: bool,
        programs: int,
        which: str = "main",
        bias: Tensor | None = None,
        config: HopperBackward | None = None,
    ) -> None:
        """programs: of the main kernel. If there are fewer key blocks, and queries enough, programs share them. which:
        the launch that `launch` is: "before" or "main"; "after", and then there is one; or, where dV has a launch of
        its own, "dv", and "main" is the other one. bias: that is added to scores, whose gradient is computed too.
        config: default: the table's in code."""
        self.inputs = (q, k, v, normal_like(empty_output(q, v)))
        self.causal, self.bias = causal, bias
        device = dataclasses.replace(Device.hopper(), sm_count=programs)
        problem = Problem.of(q, k, v, causal=causal, bias=bias)
        config = config or pick_config(problem, of_bias=bias is not None)
        plan = BackwardPlan.of(problem, config, device, deterministic=deterministic)
        if which == "after":
            plan = dataclasses.replace(plan, finishes=False)
        self.shared_parts, self.finishes = plan.shared_parts, plan.finishes
        self.target = f"sm_{plan.arch}a"
        out, lse = reference_attention(q, k, v, causal=causal, bias=bias)
        self.grads = [torch.empty_like(t) for t in (q, k, v)]
        self.tensors: Tensors = dict(zip(("q", "k", "v", "dout"), self.inputs, strict=True))
        self.tensors |= {"out": out, "lse": lse, "dlse": None, **NOT_THERE}
        self.tensors |= dict(zip(("dq", "dk", "dv"), self.grads, strict=True))
        described = {n: t for n, t in self.tensors.items() if n not in ("lse", "dlse", *NOT_THERE)}
        self.launches = backward_launches_of(plan, described, bias=bias, of_bias=bias is not None)
        step = plan.config.launches[-1].grads if which == "main" else which
        self.launch = self.launches[Choices.of(plan).steps.index(step)]
        self.deterministic = deterministic
        self.kept: list[Tensor] | None = None
        self.between = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in workspaces(plan).items()}
        self.tensors |= self.between
        self.dbias: Tensor | None = None
        if bias is not None and problem.bias is not None:
            self.sums_dbias = problem.bias.sums_gradient
            self.dbias = problem.bias.zero_gradient(bias.shape, "cpu")
            self.tensors |= {"bias": bias, "dbias": self.dbias}

    def __call__(self, **options: Any) -> Any:
        """The report of the last launch."""
        for t in (*self.grads, *self.between.values()):
            t.fill_(float("nan") if t.is_floating_point() else -1)
        if self.dbias is not None:
            self.dbias.zero_()  # as a call does: blocks that no query sees are not stored, and some are sums
        return [run(launch, self.tensors, self.target, **options) for launch in self.launches][-1]

    def check(self, what: str = "") -> None:
        """The gradients of the last launch against float64."""
        q, k, v, dout = self.inputs
        of_bias = [] if self.bias is None or self.dbias is None else [self.dbias.to(self.bias.dtype)]
        check_gradients(q, k, v, dout, [*self.grads, *of_bias], causal=self.causal, bias=self.bias, what=what)

    def bits(self) -> list[Tensor]:
        """What has the same bits under every schedule, of the last launch: dK and dV; if it is deterministic dQ too,
        and the sums in fp32 that it is rounded from, which stay NaN where nobody adds; dBias, unless that is a sum."""
        of_q = [self.grads[0], self.between["dq_sums"].nan_to_num()] if self.deterministic else []
        return [*of_q, *self.grads[1:], *([] if self.dbias is None or self.sums_dbias else [self.dbias])]

    def keep_bits(self) -> None:
        """Launch it and remember them."""
        self(mode="lowered")
        self.check()
        self.kept = [grad.clone() for grad in self.bits()]

    def has_kept_bits(self) -> bool:
        assert self.kept is not None
        return all(map(torch.equal, self.bits(), self.kept))


def normal_qkv(
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    q_len: int,
    kv_len: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(h: int, s: int, d: int = head_dim) -> Tensor:
        return torch.randn(batch, h, s, d, generator=generator).to(dtype)

    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    return normal(heads, q_len), normal(kv_heads, kv_len), normal(kv_heads, kv_len, head_dim_v or head_dim)


def normal_like(t: Tensor) -> Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype)


def bias_of(kind: str, q: Tensor, k: Tensor) -> Tensor | None:
    """For scores of (B, H, Sq, D) queries and keys. kind: "a row each" for each query its own row, "one row" for all;
    "": there is none. In rows as long as TMA asks for; what is behind them is NaN."""
    if not kind:
        return None
    keys, rows = k.shape[2], {"a row each": q.shape[2], "one row": 1}[kind]
    numbers = torch.randn(*q.shape[:2], rows, keys, generator=torch.Generator().manual_seed(2))
    return torch.nn.functional.pad(numbers, (0, -keys % 8), value=float("nan")).to(q.dtype)[..., :keys]


def kv_scales(batch: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """fp8 scales of q, k and v, each between 1/2 and 2 and another one for every batch and KV head."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.exp2(2 * torch.rand(batch, kv_heads, generator=generator) - 1) for _ in range(3))
    return q, k, v
