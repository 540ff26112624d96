"""O and LSE against float64, in named cases, edges first; each group of cases in a process of its own."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import ForwardConfig, HopperConfig, attention
from gluon_attn.apart import Apart
from gluon_attn.device import Device
from gluon_attn.forward.table import HOPPER, hopper_config, pick_config
from gluon_attn.problem import Problem
from gluon_attn.tensors import output_dtype
from gluon_attn.testing import (
    FP8,
    Surrounded,
    check,
    config_for_reuse,
    config_for_rounds,
    normal,
    normal_qkv,
    poison_free_memory,
)
from gluon_attn.tuning import kernels_of_cards
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths in tokens, or, for cases about the persistent grid, in row blocks and programs."""

    label: str
    causal: bool
    num_ctas: int
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    q_len: int = 200
    kv_len: int | None = None  # default: q_len
    head_dim: int = 128
    dtype: str = "bfloat16"
    layout: str = "bhsd"
    scale: float | None = None
    data: str = "normal"
    memory: str = "surrounded"
    scaled: bool = False  # fp8: with scales of q, k and v
    config: ForwardConfig | None = None
    # Row blocks to a head, in place of q_len; and heads beyond one for each program of the grid, in place of heads.
    row_blocks: int | None = None
    extra_heads: int = 0

    @property
    def name(self) -> str:
        return f"{self.label}, {'causal' if self.causal else 'full'}, {self.num_ctas} CTA{'s' * (self.num_ctas - 1)}"

    @property
    def own_out(self) -> bool:
        """Half of the cases, by their names, pass `out`."""
        return zlib.crc32(self.name.encode()) % 2 == 0

    @property
    def group(self) -> tuple[int, bool, int]:
        """Cases that mostly share their kernels, and so their compiles."""
        return (64 if self.head_dim <= 64 else 128 if self.head_dim <= 128 else 256), self.causal, self.num_ctas


LENGTHS = (1, 63, 64, 65, 127, 129, 255, 1000, 4097)
HEAD_DIMS = (8, 40, 64, 80, 96, 128, 192, 256)
KERNEL_HEAD_DIMS = (64, 128, 256)


def rows() -> Iterator[dict[str, Any]]:
    """Cases less mask and number of CTAs: each is run with both masks, on 1 and on 2 CTAs."""
    for d in KERNEL_HEAD_DIMS:
        yield {"label": f"D={d}, one key block", "head_dim": d, "q_len": 64, "kv_len": 64}
        yield {"label": f"D={d}, two key blocks", "head_dim": d, "q_len": 64, "kv_len": 128}
        yield {"label": f"D={d}, two large key blocks", "head_dim": d, "q_len": 128, "kv_len": 256}
        yield {"label": f"D={d}, aligned", "head_dim": d, "q_len": 1024, "heads": 3}
        yield {"label": f"D={d}, fp16", "head_dim": d, "dtype": "float16", "q_len": 300, "kv_len": 333, "heads": 4}
        yield {"label": f"D={d}, fp16, long", "head_dim": d, "dtype": "float16", "q_len": 1500, "kv_heads": 1}
    for d, q_len, kv_len in itertools.product(KERNEL_HEAD_DIMS, LENGTHS, LENGTHS):
        yield {
            "label": f"D={d}, Sq={q_len}, Sk={kv_len}",
            "head_dim": d,
            "q_len": q_len,
            "kv_len": kv_len,
            "kv_heads": 1,
        }
    for d in HEAD_DIMS:
        yield {"label": f"D={d}", "head_dim": d, "q_len": 197, "kv_len": 325, "batch": 2}
    for d in KERNEL_HEAD_DIMS:
        yield {"label": f"D={d}, GQA 4:1", "head_dim": d, "heads": 8, "kv_heads": 2, "batch": 2, "q_len": 333}
    for dtype, d in itertools.product(("float8_e4m3fn", "float8_e5m2"), (16, 64, 112, 128, 256)):
        fp8 = {"dtype": dtype, "head_dim": d, "scaled": d != 112}
        yield {"label": f"D={d}, {dtype}", **fp8, "q_len": 300, "kv_len": 333, "heads": 4, "kv_heads": 2, "batch": 2}
        yield {"label": f"D={d}, {dtype}, bshd", **fp8, "q_len": 129, "kv_len": 1000, "layout": "bshd"}
    yield {"label": "MQA", "heads": 7, "kv_heads": 1, "batch": 2, "q_len": 129, "kv_len": 200}
    yield {"label": "bshd", "layout": "bshd", "batch": 2, "heads": 6, "kv_heads": 3, "q_len": 129, "kv_len": 300}
    yield {"label": "bshd, D=40", "layout": "bshd", "batch": 2, "heads": 6, "kv_heads": 2, "head_dim": 40, "q_len": 257}
    yield {"label": "bshd, D=192", "layout": "bshd", "batch": 2, "heads": 2, "head_dim": 192, "q_len": 130}
    yield {"label": "fp16, bshd", "layout": "bshd", "dtype": "float16", "batch": 2, "heads": 3, "q_len": 257}

    for memory in MEMORY:
        yield {"label": f"{memory} memory", "memory": memory, "batch": 2, "heads": 4, "q_len": 200}
        yield {"label": f"{memory} memory, bshd", "memory": memory, "batch": 2, "heads": 4, "layout": "bshd"}
    for batch, heads, q_len, kv_len in ((1, 3, 70, 70), (2, 1, 70, 70), (1, 1, 70, 70), (2, 3, 1, 70), (2, 3, 70, 1)):
        yield {
            "label": f"odd strides in ({batch}, {heads}, {q_len}, {kv_len})",
            "memory": "odd strides",
            "batch": batch,
            "heads": heads,
            "q_len": q_len,
            "kv_len": kv_len,
        }

    for d in KERNEL_HEAD_DIMS:
        yield {"label": f"D={d}, large scores", "data": "large scores", "head_dim": d, "q_len": 500, "kv_len": 700}
        yield {"label": f"D={d}, rising scores", "data": "rising scores", "head_dim": d, "q_len": 300, "kv_len": 700}
        yield {"label": f"D={d}, negative scores", "data": "negative scores", "head_dim": d, "q_len": 700}
        yield {"label": f"D={d}, far negative scores", "data": "far negative scores", "head_dim": d, "q_len": 700}
    yield {"label": "fp16, negative scores", "data": "negative scores", "dtype": "float16", "q_len": 1500}
    yield {"label": "fp16, large scores", "data": "large scores", "dtype": "float16", "q_len": 300, "kv_len": 700}
    yield {"label": "constant V", "data": "constant V", "q_len": 300, "kv_len": 777}
    yield {"label": "equal scores", "data": "equal scores", "q_len": 300, "kv_len": 777}
    yield {"label": "scale 1", "scale": 1.0, "q_len": 150, "kv_len": 300}
    yield {"label": "scale 0.01", "scale": 0.01, "q_len": 150, "kv_len": 300}

    for d in KERNEL_HEAD_DIMS:
        grid = {"head_dim": d}
        yield {"label": f"D={d}, 1 row block per program", **grid, "row_blocks": 1}
        yield {"label": f"D={d}, 2 row blocks per program", **grid, "row_blocks": 1, "batch": 2}
        yield {"label": f"D={d}, 2 row blocks per program, of one head", **grid, "row_blocks": 2}
        yield {"label": f"D={d}, 3 row blocks per program", **grid, "row_blocks": 1, "batch": 3}
        yield {"label": f"D={d}, 3 row blocks per program, of one head", **grid, "row_blocks": 3}
        yield {"label": f"D={d}, one row block more than programs", **grid, "row_blocks": 1, "extra_heads": 1}
        yield {"label": f"D={d}, one row block less than programs", **grid, "row_blocks": 1, "extra_heads": -1}
    yield {"label": "many small heads", "batch": 40, "heads": 16, "q_len": 5, "kv_len": 9}


def every_case() -> Iterator[Case]:
    for row, num_ctas, causal in itertools.product(rows(), (1, 2), (False, True)):
        yield Case(**row, causal=causal, num_ctas=num_ctas)
    # What the table holds for one mask must also be right for the other.
    table = {f"table row {i}": row for i, row in enumerate(HOPPER)} | kernels_of_cards()
    for (name, table_row), causal in itertools.product(table.items(), (False, True)):
        kind: dict[str, Any] = {
            "config": table_row.config,
            "dtype": "bfloat16" if table_row.element_bytes == 2 else "float8_e4m3fn",
            "head_dim": table_row.padded_head_dim,
            "num_ctas": table_row.config.num_ctas,
            "causal": causal,
        }
        for q_len, kv_len in ((129, 1000), (1000, 129)):
            yield Case(label=f"{name}, Sq={q_len}, Sk={kv_len}", **kind, q_len=q_len, kv_len=kv_len)
        if causal and isinstance(table_row.config, HopperConfig) and table_row.config.last_heads_longest_first:
            sizes: dict[str, Any] = {"heads": 60, "q_len": 6 * table_row.config.block_m - 15, "kv_len": 1000}
            yield Case(label=f"{name}, items of two and then single row blocks", **kind, **sizes)

    # The table stages O in Q's tile at D=256 only.
    kinds = ((64, "bfloat16"), (96, "float16"), (128, "bfloat16"), (200, "bfloat16"))
    for (d, dtype), num_ctas, layout in itertools.product(kinds, (1, 2), ("bhsd", "bshd")):
        yield Case(
            label=f"O staged in Q, D={d} {dtype} {layout}",
            config=hopper_config(2, 64 if d > 128 else 128, 1, 2, 216, stage_in_queries=True, num_ctas=num_ctas),
            dtype=dtype,
            head_dim=d,
            num_ctas=num_ctas,
            layout=layout,
            causal=True,
            batch=2,
            heads=80,
            q_len=333,
            kv_len=300,
        )


def surrounded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views, not contiguous, of larger tensors that are NaN elsewhere."""
    return tuple(Surrounded.copy_of(t) for t in tensors)


def contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def other_order(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Memory in the order of the other layout."""
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q, k and v side by side in one tensor, as one projection computes them."""
    return torch.stack((q, k, v), dim=3).unbind(3)


def heads_expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Stride 0 over dimension 1: one K and V for all heads in layout bhsd, one key for all positions in bshd."""
    return (q, *(t[:, :1].expand(-1, t.shape[1], -1, -1) for t in (k, v)))


def batch_expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Stride 0 over the batch."""
    return (q, *(t[:1].expand(t.shape[0], -1, -1, -1) for t in (k, v)))


def odd_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """A stride that TMA would refuse wherever the size is 1."""

    def odd(t: Tensor) -> Tensor:
        return t.as_strided(t.shape, [7 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)])

    return tuple(map(odd, tensors))


MEMORY: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "surrounded": surrounded,
    "contiguous": contiguous,
    "other order": other_order,
    "packed": packed,
    "heads expanded": heads_expanded,
    "batch expanded": batch_expanded,
    "odd strides": odd_strides,
}


def with_data(data: str, q: Tensor, k: Tensor, v: Tensor, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    match data:
        case "normal":
            return q, k, v
        case "large scores":
            return 50 * q, k, v
        case "constant V":
            return q, k, torch.full_like(v, 0.7)
        case "equal scores":
            return torch.zeros_like(q), k, v
        case "negative scores":  # about the limit from which on maxima are compared as integers, in some rows below
            return q.abs(), -k.abs(), v
        case "far negative scores":
            return 50 * q.abs(), -k.abs(), v
        case "rising scores":  # towards the first key, which is walked last: the running maximum changes all the time
            rise = torch.linspace(8, 0.1, k.shape[sequence], device="cuda", dtype=k.dtype)
            shape = [-1 if dim == sequence else 1 for dim in range(4)]
            return q.abs(), k.abs() * rise.reshape(shape), v
    raise KeyError(data)


def grid_sizes(case: Case) -> dict[str, Any]:
    """Heads, length and config of a case that is about how many row blocks a program of the persistent grid gets."""
    assert case.row_blocks is not None
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    programs = device.sm_count // case.num_ctas
    fields = {"kv_heads": 1, "q_len": 300, "kv_len": 300, "scale": 1.0, "layout": case.layout}
    problem = Problem(
        dtype=getattr(torch, case.dtype),
        batch=case.batch,
        heads=programs,
        head_dim=case.head_dim,
        causal=case.causal,
        **fields,  # type: ignore[arg-type]
    )
    config = pick_config(problem, device, case.num_ctas)
    q_len = case.row_blocks * config.block_m - 3  # so that every head has a tail
    return {
        "heads": programs + case.extra_heads,
        "kv_heads": 1,
        "q_len": q_len,
        "kv_len": q_len if case.causal else 200,
        "config": config,
    }


def run_case(name: str) -> None:
    case = CASES[name]
    if case.row_blocks is not None:
        case = dataclasses.replace(case, **grid_sizes(case), row_blocks=None)
    dtype = getattr(torch, case.dtype)
    q, k, v = normal_qkv(
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        q_len=case.q_len,
        kv_len=case.kv_len,
        head_dim=case.head_dim,
        dtype=dtype,
        layout=case.layout,
    )
    q, k, v = with_data(case.data, q, k, v, sequence=2 if case.layout == "bhsd" else 1)
    q, k, v = MEMORY[case.memory](q, k, v)

    lse_shape = (case.batch, case.heads, case.q_len)
    options: dict[str, Any] = {"causal": case.causal, "scale": case.scale, "layout": case.layout}
    shape = (case.batch, case.kv_heads or case.heads)
    scales: list[Tensor | None] = [None, None, None]
    if case.scaled:
        scales = [normal(*shape, dtype=torch.float32, seed=i).abs() + 0.5 for i in range(3)]
    problem = Problem.of(q, k, v, **options, scales=(scales[0], scales[1], scales[2]))
    for config in configs_of(case, problem, Device.of(q.device)):
        around = Surrounded(q.shape, output_dtype(dtype)) if case.own_out else None
        poison_free_memory((q.shape, output_dtype(dtype)), (lse_shape, torch.float32))
        out, lse = attention(
            q,
            k,
            v,
            **options,
            return_lse=True,
            out=around.view if around else None,
            num_ctas=None if config else case.num_ctas,
            config=config,
            q_scale=scales[0],
            k_scale=scales[1],
            v_scale=scales[2],
        )
        if around is not None:
            assert out.data_ptr() == around.view.data_ptr(), f"{case}: O is not in `out`"
            around.check_outside_untouched()
        check(q, k, v, out, lse, **options, scales=scales, what=f"{case}, {config or 'the config of the table'}")


def configs_of(case: Case, problem: Problem, device: Device) -> list[ForwardConfig | None]:
    """The case's config; or the one that attention() picks, and those for much work where that is for little."""
    if case.config:
        return [case.config]
    sized = (problem, device, case.num_ctas)
    others = [config_for_rounds(*sized), *([config_for_reuse(*sized)] if problem.dtype in FP8 else [])]
    return [None, *(config for config in dict.fromkeys(others) if config != pick_config(*sized))]


CASES = {case.name: case for case in every_case()}
assert len(CASES) == sum(1 for _ in every_case()), "two cases have one name"

APART = Apart(function="tests.gpu.test_attention:run_case", group=lambda name: CASES[name].group)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, outcome):
    settle(outcome(name))
