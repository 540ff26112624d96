"""The cases of the correctness grid: one call of attention each, both outputs against float64."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gluon_attn import ForwardConfig
from gluon_attn.forward.table import pick_config
from gluon_attn.problem import Problem
from gluon_attn.tensors import FP8_DTYPES, NAMED_DTYPES
from gluon_attn.testing import check, poison_free_memory

from . import device_at_hand, levers

DTYPES = NAMED_DTYPES
LAUNCHES = 4  # of each case on a card, all with the same bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    num_ctas: int
    causal: bool
    dtype: str = "bf16"
    head_dim: int = 64
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    q_len: int = 129
    kv_len: int = 333
    layout: str = "bhsd"
    lever: str = ""  # a name in levers.variants of the plain config; "plain" itself; "" for the table's config

    @property
    def group(self) -> tuple[Any, ...]:
        """Cases of one kernel, and so of one compile."""
        return self.dtype, max(64, 1 << (self.head_dim - 1).bit_length()), self.causal, self.num_ctas, self.lever

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, and in fp8 a scale of each for every batch and KV head."""
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length) if self.layout == "bhsd" else (self.batch, length, heads)
            return torch.randn(*shape, self.head_dim, generator=generator).to(DTYPES[self.dtype])

        tensors = [
            normal(self.heads, self.q_len),
            normal(self.kv_heads, self.kv_len),
            normal(self.kv_heads, self.kv_len),
        ]
        if tensors[0].dtype in FP8_DTYPES:
            tensors += [torch.exp2(2 * torch.rand(self.batch, self.kv_heads, generator=generator) - 1) for _ in "qkv"]
        return tuple(t.cuda() if device_at_hand.on_card() else t for t in tensors)

    def config(self) -> ForwardConfig | None:
        if not self.lever:
            return None
        plain = levers.plain(table_config(DTYPES[self.dtype], self.head_dim, self.causal, self.num_ctas))
        return plain if self.lever == "plain" else levers.variants(plain, device_at_hand.device().arch)[self.lever]


def table_config(
    dtype: torch.dtype, head_dim: int, causal: bool, num_ctas: int | None, length: int = 512
) -> ForwardConfig:
    """The table's config for much work: those for little are small."""
    sizes: dict[str, Any] = {
        "batch": 4096,
        "heads": 1,
        "kv_heads": 1,
        "q_len": length,
        "kv_len": length,
    }
    problem = Problem(dtype=dtype, causal=causal, scale=head_dim**-0.5, layout="bhsd", head_dim=head_dim, **sizes)
    return pick_config(problem, device_at_hand.device(), num_ctas)


def run(case: Case) -> None:
    """Poison the outputs, launch, check; on a card again and again, and the bits must stay."""
    tensors = case.tensors()
    q, k, v, *scales = tensors
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16 if scales else q.dtype, device=q.device)
    options: dict[str, Any] = {"causal": case.causal, "layout": case.layout}
    config = case.config()
    asked = {"config": config} if config else {"num_ctas": case.num_ctas}
    first = None
    for _ in range(LAUNCHES if device_at_hand.on_card() else 1):
        out.fill_(math.nan)
        if device_at_hand.on_card():
            poison_free_memory(((case.batch, case.heads, case.q_len), torch.float32))
        _, lse = device_at_hand.call(*tensors, out=out, **options, **asked)
        if first is None:
            check(q, k, v, out, lse, scales=scales, what=case.name, **options)
            first = out.clone(), lse
        same = torch.equal(out, first[0]) and torch.equal(lse, first[1])
        assert same, f"{case.name}: a further launch gave other bits than the first"


LENGTHS = ((1, 1), (128, 128), (129, 333), (333, 129), (1000, 1000))
HEAD_DIMS = (8, 40, 64, 72, 96, 128, 136, 192, 256)
HEADS: dict[str, dict[str, Any]] = {
    "GQA": {"batch": 2, "heads": 6, "kv_heads": 2},
    "MQA": {"heads": 7, "kv_heads": 1},
    "bshd": {"batch": 2, "heads": 4, "kv_heads": 2, "layout": "bshd"},
}


def rows() -> Iterator[dict[str, Any]]:
    """Cases for a card, less the number of CTAs and the mask."""
    kernels = [(dtype, d) for dtype, d in itertools.product(DTYPES, HEAD_DIMS) if d in (64, 128, 256)]
    for (dtype, d), (q_len, kv_len) in itertools.product(kernels, LENGTHS):
        row = {"dtype": dtype, "head_dim": d, "q_len": q_len, "kv_len": kv_len}
        yield {"name": f"{dtype}, D={d}, {q_len} x {kv_len}", **row}
    for dtype, d in itertools.product(("bf16", "e4m3"), HEAD_DIMS):
        if d not in (64, 128, 256) and d % (16 if dtype == "e4m3" else 8) == 0:
            yield {"name": f"{dtype}, D={d}", "dtype": dtype, "head_dim": d}
    for (dtype, d), (name, heads) in itertools.product(kernels, HEADS.items()):
        yield {"name": f"{dtype}, D={d}, {name}", "dtype": dtype, "head_dim": d, **heads}
    # More row blocks than programs: every channel lives on from one to the next.
    for d in (64, 128):
        heads = 2 * device_at_hand.device().sm_count + 1
        yield {"name": f"D={d}, {heads} heads", "head_dim": d, "heads": heads, "q_len": 300, "kv_len": 300}


def supported(case: Case) -> bool:
    """Whether the table has a config for it here."""
    try:
        table_config(DTYPES[case.dtype], case.head_dim, case.causal, case.num_ctas)
    except (NotImplementedError, ValueError):
        return False
    return True


def lever_rows(head_dim: int, causal: bool, num_ctas: int) -> Iterator[dict[str, Any]]:
    plain = levers.plain(table_config(torch.bfloat16, head_dim, causal, num_ctas))
    for lever in ("plain", *levers.variants(plain, device_at_hand.device().arch)):
        yield {"name": f"D={head_dim}, {lever}", "head_dim": head_dim, "lever": lever, "q_len": 700, "kv_len": 660}


def for_card() -> Iterator[Case]:
    for num_ctas, causal in itertools.product(device_at_hand.cta_counts(), (False, True)):
        configs = itertools.chain(rows(), *(lever_rows(d, causal, num_ctas) for d in (64, 128)))
        yield from (named(row, num_ctas, causal) for row in configs)


def for_cpu() -> Iterator[Case]:
    """A few: one CTA's kernels compile in seconds, those of a cluster in half a minute."""
    yield named({"name": "bf16, odd lengths"}, 1, False)
    yield named({"name": "fp16, D=128, GQA", "dtype": "fp16", "head_dim": 128, **HEADS["GQA"]}, 1, True)
    yield named({"name": "e4m3, D=112", "dtype": "e4m3", "head_dim": 112}, 1, True)
    yield named({"name": "e5m2, bshd", "dtype": "e5m2", **HEADS["bshd"]}, 1, False)
    yield named({"name": "D=24, bshd", "head_dim": 24, **HEADS["bshd"]}, 2, True)
    yield named({"name": "rows that see no key", "q_len": 600, "kv_len": 130}, 2, True)
    yield named({"name": "odd lengths", "q_len": 1030, "kv_len": 333}, 4, True)
    yield from (named(row, 1, True) for row in lever_rows(64, causal=True, num_ctas=1))


def named(row: dict[str, Any], num_ctas: int, causal: bool) -> Case:
    mask = "causal" if causal else "full"
    return Case(**row | {"name": f"{row['name']}, {mask}, {num_ctas} CTAs"}, num_ctas=num_ctas, causal=causal)


def all_cases() -> dict[str, Case]:
    """By name, those that there is a kernel for here."""
    cases = [case for case in (for_card() if device_at_hand.on_card() else for_cpu()) if supported(case)]
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases have one name"
    return by_name


def run_case(name: str) -> None:
    run(all_cases()[name])
