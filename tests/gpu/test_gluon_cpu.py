"""On a Hopper card, kernels whose numbers rest on what `gluon_cpu` takes the compiler and the hardware to do: shared
memory of other CTAs, stores of copies, boxes with other dimensions than their tile, and how TMA rounds to tf32."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gluon_cpu", exc_type=ImportError)  # it says which Triton it needs

import gluon_cpu
from gluon_attn.apart import Apart
from tests.compat import TensorDescriptor, gl
from tests.gluon_cpu import test_semantics_barriers as barriers
from tests.gluon_cpu import test_semantics_clusters as clusters
from tests.gluon_cpu import test_semantics_other_ctas as other_ctas
from tests.gluon_cpu import test_semantics_tma as boxes
from tests.gluon_cpu.layouts import MATRIX_HALVES
from tests.gluon_cpu.support import descriptor, normal, poisoned
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(900)

# On a device: (kernel, its arguments, the tensors it writes, constants and options).
Launch = tuple[Any, tuple[Any, ...], list[Tensor], dict[str, Any]]
CASES: dict[str, Callable[[str], Launch]] = {}


def case(name: str) -> Callable[[Callable[[str], Launch]], Callable[[str], Launch]]:
    def add(make: Callable[[str], Launch]) -> Callable[[str], Launch]:
        CASES[name] = make
        return make

    return add


def through(spread: tuple[Any, Any, Any], device: str) -> Launch:
    x, out = normal(64, 32).to(device), poisoned(64, 32).to(device)
    layouts = dict(zip(("SHARED", "FROM", "TO"), spread, strict=True))
    return other_ctas.through, (x, out), [out], {**layouts, "BARRIER": True, "num_ctas": 2}


for _name, _spread in other_ctas.SPREADS.items():
    CASES[f"spread: {_name}"] = functools.partial(through, _spread)
CASES["spread: own copies"] = functools.partial(through, (other_ctas.COPIES, MATRIX_HALVES, MATRIX_HALVES))


def integers(kernel: Any, shape: tuple[int, ...], options: dict[str, Any], device: str) -> Launch:
    out = poisoned(*shape, dtype=torch.int32).to(device)
    return kernel, (out,), [out], {**options, "num_ctas": 2}


for _name, _kernel, _shape, _options in (
    ("slices along a split dimension", other_ctas.slices, (1024,), {"BARRIER": True}),
    ("gather and scatter", other_ctas.part_of_each, (128, 32), {"SHARED": other_ctas.ROWS, "BARRIER": True}),
    ("gather from own copy", other_ctas.from_own_copy, (64, 32), {}),
    ("scatter of copies", other_ctas.scatter_copies, (256,), {"BARRIER": True}),
    ("atomics of copies", other_ctas.add_copies, (512,), {"RESULT": False, "BARRIER": True}),
    ("atomics of copies, with results", other_ctas.add_copies, (512,), {"RESULT": True, "BARRIER": True}),
    ("st.async into a slice", barriers.store_to_peers, (32, 32), {"SLICE": True, "WAIT": True}),
):
    CASES[_name] = functools.partial(integers, _kernel, _shape, _options)


@case("TMA sums of copies")
def sums_of_copies(device: str) -> Launch:
    x = torch.zeros(32, 32, device=device)
    return clusters.add_a_copy, (descriptor(x, [32, 32], cga=[[0, 0]]),), [x], {"WAIT": True, "num_ctas": 2}


@case("TMA stores of halves and of copies")
def stores_of_copies(device: str) -> Launch:
    x, y = poisoned(64, 32).to(device), poisoned(32, 32).to(device)
    arguments = descriptor(x, [64, 32], cga=[[1, 0]]), descriptor(y, [32, 32], cga=[[0, 0]])
    return clusters.wait_for_all_but_the_copy, arguments, [x, y], {"ONE": True, "num_ctas": 2}


def box(columns: int, device: str) -> Launch:
    x, out = normal(32, 4, 64).to(device), poisoned(32, 64).to(device)
    shape = [32 // columns, columns, 64]
    desc = TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout(128, 32, 3))
    return boxes.rows_of_a_box, (desc, out, 2), [out], {"WAIT": True}


CASES["box: one column of a batch"] = functools.partial(box, 1)
CASES["box: rows in two dimensions"] = functools.partial(box, 2)


@case("TMA rounds to tf32")
def tf32(device: str) -> Launch:
    """Every exponent with halves, what is next to them, infinities and NaN among them."""
    bits = torch.randint(0, 2**32, (32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    low = torch.tensor([0x1000, 0x0FFF, 0x1001, 0x3000, 0x1FFF, 0x0000, 0x2FFF, 0x3001])
    bits = (bits & ~0x3FFF) | low.repeat(4)
    bits[0, :4] = torch.tensor([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF])
    x = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32).to(device)
    out = poisoned(32, 32).to(device)
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    desc = TensorDescriptor.from_tensor(x, [32, 32], layout, round_f32_to_tf32=True)
    return boxes.copy_tile, (desc, out), [out], {}


def on_cpu(name: str) -> list[Tensor]:
    kernel, arguments, outputs, options = CASES[name]("cpu")
    gluon_cpu.launch(kernel, (1,), *arguments, **options, outputs=[])
    return outputs


def check(name: str) -> None:
    want = on_cpu(name)
    kernel, arguments, outputs, options = CASES[name]("cuda")
    kernel[(1,)](*arguments, **options)
    torch.cuda.synchronize()
    for got, wanted in zip(outputs, want, strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(Apart(function="tests.gpu.test_gluon_cpu:check", group=lambda name: 0), request)


@pytest.mark.parametrize("name", CASES)
def test_the_card_computes_the_same(name, outcome):
    settle(outcome(name))
