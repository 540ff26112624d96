"""Head dims that are no power of two, and V's unlike Q's: numbers on gluon_cpu, machine code, what is refused."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import HopperConfig, attention, attention_varlen
from gluon_attn.backward.launch import Choices, compiled_backward
from gluon_attn.backward.table import IN_ONE_LAUNCH, UNLIKE, padded_head_dims
from gluon_attn.cpu import find_race
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import BLACKWELL_UNLIKE, OTHER_HEAD_DIMS, Row, hopper_config, pick_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem
from gluon_attn.resources import resources
from gluon_attn.testing import check, check_gradients
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

HOPPER, BLACKWELL = Device.hopper(), Device.blackwell()
ON_BLACKWELL = (BLACKWELL, Device.blackwell_ultra())
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# Head dims of Q and V, heads, KV heads, queries, keys, and options of `attention`.
CASES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "192/128, causal, GQA": ((192, 128), (2, 1), (130, 200), {"causal": True}),
    "192/128, window": ((192, 128), (1, 1), (200, 330), {"window": (70, 20)}),
    "192/128, bshd": ((192, 128), (3, 3), (65, 129), {"layout": "bshd"}),
    "192/128, two CTAs": ((192, 128), (1, 1), (200, 330), {"causal": True, "num_ctas": 2}),
    "192/192": ((192, 192), (1, 1), (130, 200), {"causal": True}),
    "160/96": ((160, 96), (1, 1), (130, 200), {}),
    "192/64": ((192, 64), (1, 1), (130, 200), {"causal": True}),
    "192/256": ((192, 256), (1, 1), (130, 200), {"causal": True}),
    "64/192": ((64, 192), (1, 1), (130, 200), {}),
    "40/136": ((40, 136), (1, 1), (1, 77), {"causal": True}),
    "64/128": ((64, 128), (1, 1), (130, 200), {"causal": True}),
    "128/256": ((128, 256), (1, 1), (130, 200), {}),
    "256/8": ((256, 8), (1, 1), (130, 200), {"causal": True}),
    "256/192": ((256, 192), (1, 1), (130, 200), {}),
}
QUICK = {"192/128, causal, GQA", "64/192"}


def inputs(
    head_dims: tuple[int, int], heads: tuple[int, int], lengths: tuple[int, int], dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(h: int, s: int, d: int) -> Tensor:
        shape = (2, h, s, d) if layout == "bhsd" else (2, s, h, d)
        return torch.randn(shape, generator=generator).to(dtype)

    (d, d_v), (h, h_kv), (q_len, kv_len) = head_dims, heads, lengths
    return normal(h, q_len, d), normal(h_kv, kv_len, d), normal(h_kv, kv_len, d_v)


# The same, on Blackwell, where a row block has 256 rows and a key block 128 keys, or 64.
BLACKWELL_CASES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "64/128, causal, GQA": ((64, 128), (2, 1), (300, 400), {"causal": True}),
    "64/128, two CTAs": ((64, 128), (1, 1), (600, 400), {"num_ctas": 2}),
    "128/64, window": ((128, 64), (1, 1), (300, 430), {"window": (70, 20)}),
    "72/40": ((72, 40), (1, 1), (130, 200), {}),
    "192/128, causal, GQA": ((192, 128), (2, 1), (300, 400), {"causal": True}),
    "192/128, bshd": ((192, 128), (3, 3), (65, 129), {"layout": "bshd"}),
    "192/128, two CTAs": ((192, 128), (1, 1), (600, 400), {"causal": True, "num_ctas": 2}),
    "192/128, four CTAs": ((192, 128), (1, 1), (600, 400), {"causal": True, "num_ctas": 4}),
    "160/96": ((160, 96), (1, 1), (130, 200), {}),
    "192/64": ((192, 64), (1, 1), (130, 400), {"causal": True}),
    "192/64, more queries than keys": ((192, 64), (1, 1), (400, 60), {"causal": True}),
    "256/128": ((256, 128), (1, 1), (300, 400), {"causal": True}),
    "200/8": ((200, 8), (1, 1), (130, 200), {}),
}
QUICK_BLACKWELL = {"64/128, causal, GQA", "192/128, causal, GQA"}


def checked(name: str, dtype: torch.dtype, device: Device = HOPPER) -> None:
    head_dims, heads, lengths, options = (CASES if device == HOPPER else BLACKWELL_CASES)[name]
    q, k, v = inputs(head_dims, heads, lengths, dtype, options.get("layout", "bhsd"))
    out, lse = attention(q, k, v, device=device, return_lse=True, **options)
    seen = {n: value for n, value in options.items() if n != "num_ctas"}
    check(q, k, v, out, lse, what=name, **seen)


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CASES))
def test_against_float64(name):
    checked(name, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, E4M3], ids=str)
@pytest.mark.parametrize("name", ["192/128, causal, GQA", "192/192", "64/192", "192/256", "192/128, two CTAs"])
def test_other_dtypes(name, dtype):
    checked(name, dtype)


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK_BLACKWELL, BLACKWELL_CASES))
def test_against_float64_on_blackwell(name):
    checked(name, BF16, dataclasses.replace(BLACKWELL, sm_count=4))  # programs of several row blocks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, E4M3], ids=str)
@pytest.mark.parametrize("name", ["64/128, causal, GQA", "192/128, causal, GQA", "256/128", "192/128, two CTAs"])
def test_other_dtypes_on_blackwell(name, dtype):
    checked(name, dtype, BLACKWELL)


@pytest.mark.slow
def test_maxima_in_loads():
    checked("192/128, causal, GQA", BF16, Device.blackwell_ultra())


@pytest.mark.parametrize(
    ("head_dims", "num_ctas", "dtype"),
    [
        ((64, 128), 1, BF16),
        pytest.param((192, 128), 1, BF16, marks=pytest.mark.slow),
        pytest.param((128, 64), 2, E4M3, marks=pytest.mark.slow),
        pytest.param((192, 64), 4, BF16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_under_many_schedules_on_blackwell(head_dims, num_ctas, dtype):
    """Keys and values in a ring each, which go round; programs of several row blocks."""
    q, k, v = inputs(head_dims, (2, 1), (400 * num_ctas, 500), dtype, "bhsd")
    device = dataclasses.replace(BLACKWELL, sm_count=num_ctas)
    race = find_race(lambda: attention(q[:1], k[:1], v[:1], causal=True, num_ctas=num_ctas, device=device), schedules=3)
    assert race is None


@pytest.mark.slow
def test_values_in_pieces_are_transposed_before():
    """In fp8, by a kernel of its own: there is no role for V in pieces."""
    q, k, v = inputs((64, 192), (1, 1), (130, 200), E4M3, "bhsd")
    role = hopper_config(2, 64, 1, 2, 216, transpose_registers=56)
    with pytest.raises(ValueError, match="transpose_registers=0 at head_dim 64 \\(v's: 192\\), where V is in pieces"):
        require_fits(role, Problem.of(q, k, v), HOPPER)


@pytest.mark.slow
def test_out_and_surroundings():
    """O of another head dim in a view of a larger tensor: nothing beside it is written."""
    q, k, v = inputs((192, 128), (2, 1), (130, 200), BF16, "bhsd")
    larger = torch.full((2, 2, 132, 144), float("nan"), dtype=BF16)
    out = larger[:, :, 1:131, 8:136]
    _, lse = attention(q, k, v, out=out, return_lse=True, device=HOPPER)
    check(q, k, v, out, lse, what="out")
    out.fill_(float("nan"))
    assert larger.isnan().all()


@pytest.mark.slow
def test_special_values():
    """A row that sees no key, a score of NaN, infinity in V: as plain PyTorch has them."""
    q, k, v = inputs((192, 128), (1, 1), (70, 65), BF16, "bhsd")
    q[0, 0, 20] = float("nan")
    v[1, 0, 3, 127] = float("inf")
    out, lse = attention(q, k, v, causal=True, return_lse=True, device=HOPPER)
    assert (out[:, :, :5, :127] == 0).all()  # of an infinite V, 0 times it is NaN
    assert (lse[:, :, :5] == float("-inf")).all()
    assert out[0, 0, 20].isnan().all()
    assert lse[0, 0, 20].isnan()
    assert (out[1, 0, 10:, 127] == float("inf")).all()
    assert out[1, 0, :, :127].isfinite().all()


def gradients_checked(
    head_dims: tuple[int, int], heads: tuple[int, int], lengths: tuple[int, int], device: Device, **options: Any
) -> None:
    layout = options.get("layout", "bhsd")
    q, k, v = (t.requires_grad_() for t in inputs(head_dims, heads, lengths, BF16, layout))
    out = attention(q, k, v, device=device, **options)
    assert isinstance(out, Tensor)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    got = list(torch.autograd.grad(out, (q, k, v), dout))
    seen = {n: value for n, value in options.items() if n != "deterministic"}
    check_gradients(q.detach(), k.detach(), v.detach(), dout, got, what=f"{head_dims} {options}", **seen)


FEW_GRADIENTS = ("192/128, causal, GQA",)


@pytest.mark.parametrize(
    "name", slow_if(lambda name: name not in FEW_GRADIENTS, [*FEW_GRADIENTS, "192/128, bshd", "64/192", "256/8"])
)
def test_gradients_against_float64(name):
    head_dims, heads, lengths, options = CASES[name]
    gradients_checked(head_dims, heads, lengths, HOPPER, **options)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("lengths", "options", "sm_count"),
    [
        ((140, 300), {}, 2),  # several key blocks to a program
        ((300, 40), {"causal": True}, 2),  # rows that see no key
        ((600, 100), {}, 8),  # key blocks that programs share
        ((200, 260), {"window": (70, 0)}, 4),
    ],
    ids=str,
)
def test_gradients_in_pieces(lengths, options, sm_count, deterministic):
    device = dataclasses.replace(HOPPER, sm_count=sm_count)
    gradients_checked((192, 128), (2, 1), lengths, device, deterministic=deterministic, **options)


# S and dP sum over the columns of Q and V, dV and dK over 64 rows, dQ over the keys; dK and dQ are in three pieces. A
# wait for each product, of dK's pieces for all.
STEPS = {
    "all": (192 + 128 + 64 + 3 * 64 + 3 * 64, 7),
    "dv": (192 + 64, 2),
    "dk, dq": (192 + 128 + 3 * 64 + 3 * 128, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", [UNLIKE[192, 128], IN_ONE_LAUNCH[192, 128]], ids=["two launches", "one launch"])
def test_products_of_the_gradients_overlap(config, causal):
    choices = Choices(dtype=BF16, padded_head_dims=(192, 128), mask=Mask(causal=causal), config=config, finishes=False)
    kernels = compiled_backward(choices)[1:-1]
    for part, kernel in zip(config.launches, kernels, strict=True):
        found = resources(kernel)
        loops = [loop for loop in found.loops if loop.products > 4]
        assert len(loops) == 2
        sums, waits = STEPS[part.grads]
        assert {loop.products for loop in loops} == {sums // 16}
        assert all(loop.waits <= waits and loop.spills <= 1 for loop in loops), loops
        # The exponentials are beside a product.
        assert all(loop.early_exp2 == loop.exp2 for loop in loops), loops
        assert found.smem_bytes <= part.smem_bytes(192, 128) <= HOPPER.smem_bytes


def test_gradients_are_padded_to_what_kernels_have():
    for dims, padded in {
        (192, 128): (192, 128),
        (136, 8): (192, 128),
        (128, 64): (128, 128),
        (64, 192): (256, 256),
        (192, 192): (256, 256),
        (200, 128): (256, 256),
    }.items():
        assert padded_head_dims(*dims) == padded


@pytest.mark.slow
@pytest.mark.parametrize(("head_dims", "dtype"), [((192, 128), BF16), ((64, 192), E4M3)], ids=str)
def test_packed_sequences(head_dims, dtype):
    """As each alone, O and in 16 bits the gradients."""
    starts = torch.tensor([0, 130, 131, 208], dtype=torch.int32)
    q, k, v = (t[0] for t in inputs(head_dims, (2, 1), (208, 208), dtype, "bshd"))
    q, k, v = (t.contiguous().requires_grad_(dtype == BF16) for t in (q, k, v))
    out = attention_varlen(q, k, v, starts, starts, 130, 130, causal=True, device=HOPPER)
    assert isinstance(out, Tensor)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    got = torch.autograd.grad(out, (q, k, v), dout) if dtype == BF16 else ()
    for first, end in itertools.pairwise(starts.tolist()):
        one_q, one_k, one_v = (t.detach()[first:end].transpose(0, 1)[None] for t in (q, k, v))
        one_out, one_dout, *grads = (t[first:end].transpose(0, 1)[None] for t in (out.detach(), dout, *got))
        check(one_q, one_k, one_v, one_out, None, causal=True, what=f"from {first}")
        if grads:
            check_gradients(one_q, one_k, one_v, one_dout, grads, causal=True, what=f"from {first}")


def name_of(row: Row) -> str:
    dims, mask = f"{row.padded_head_dim}/{row.padded_head_dim_v}", "causal" if row.causal else "full"
    ordered = ", longest first" * getattr(row.config, "last_heads_longest_first", False)
    return f"{dims}, {mask}, {8 * row.element_bytes} bits, {row.config.num_ctas} CTAs{ordered}"


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHER_HEAD_DIMS, ids=name_of)
def test_no_product_is_serialised_and_nothing_spills(row):
    """S is a sum over pieces, O has an accumulator for each; no step pays for columns that are not there."""
    config, (head_dim, head_dim_v) = row.config, row.head_dims
    dtype = BF16 if row.element_bytes == 2 else E4M3
    found = resources(compiled(dtype, head_dim, row.mask, config, padded_head_dim_v=head_dim_v))
    assert isinstance(config, HopperConfig)
    pieces = 3 if head_dim_v == 192 else 1
    depth = 32 // row.element_bytes
    per_step = (head_dim + config.block_n * pieces) // depth
    kinds = (2 if row.causal else 1) + config.integer_max  # unmasked ones twice, as in test_compiled_hopper.py
    assert len(found.loops) == config.softmax_roles * kinds
    assert {(loop.products, loop.waits) for loop in found.loops} == {(per_step, 2)}
    assert {loop.spills for loop in found.loops} == {0}
    assert found.smem_bytes <= config.smem_bytes(head_dim, row.element_bytes, head_dim_v) <= HOPPER.smem_bytes


ROWS_ON_BLACKWELL = [
    row for row in BLACKWELL_UNLIKE if row.config.archs[0] == (100 if row.causal else 103) and row.config.num_ctas < 4
]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS_ON_BLACKWELL, ids=name_of)
def test_no_loop_spills_on_blackwell(row):
    """And it takes the memory that the config says. All loops of the products' role have their own count of products
    there: of a tile of Q in pieces, those of one piece."""
    config, (head_dim, head_dim_v) = row.config, row.head_dims
    dtype = BF16 if row.element_bytes == 2 else E4M3
    kernel = compiled(dtype, head_dim, row.mask, config, padded_head_dim_v=head_dim_v)
    found = resources(kernel)
    assert isinstance(config, BlackwellConfig)
    corrects = [loop for loop in found.loops if loop.tensor_memory_loads and not loop.exp2]
    # There the compiler keeps a number of one step in local memory, as at D=128 under a mask.
    in_correction = int((head_dim_v, config.num_ctas) == (64, 2) and not row.mask.causal)
    assert [loop for loop in found.loops if loop.spills and loop not in corrects] == []
    assert sum(loop.spills for loop in corrects) <= in_correction
    assert found.spills <= 64
    smem_bytes = config.smem_bytes(head_dim, row.element_bytes, head_dim_v)
    assert found.smem_bytes <= smem_bytes <= min(found.smem_bytes + 1024, BLACKWELL.smem_bytes)
    assert config.tensor_memory_columns(head_dim_v) <= kernel.metadata.tmem_size <= config.TENSOR_MEMORY_COLUMNS


@pytest.mark.parametrize("device", ON_BLACKWELL, ids=lambda device: device.name)
def test_every_pair_has_a_config_on_blackwell(device):
    dims = (8, 64, 96, 128, 136, 192, 200, 256)
    for d, d_v, dtype, causal in itertools.product(dims, dims, (BF16, E4M3), (False, True)):
        if d * dtype.itemsize % 16 or d_v * dtype.itemsize % 16:
            continue
        asked = problem(head_dim=d, head_dim_v=d_v, dtype=dtype, causal=causal, kv_len=4096)
        for n in (1, 2, 4):
            if d_v <= 128:
                config = pick_config(asked, device, n)
                require_fits(config, asked, device)
                assert isinstance(config, BlackwellConfig)
                assert config.tensor_memory_columns(asked.padded_head_dim_v) <= config.TENSOR_MEMORY_COLUMNS
            else:
                with pytest.raises(NotImplementedError, match=f"^v: head_dim {d_v} .* expected at most 128"):
                    pick_config(asked, device, n)


def test_every_pair_has_a_config():
    dims = (8, 64, 96, 128, 136, 192, 200, 256)
    for d in dims:
        for d_v in dims:
            for dtype in (BF16, E4M3):
                if d * dtype.itemsize % 16 == d_v * dtype.itemsize % 16 == 0:
                    for causal in (False, True):
                        asked = problem(head_dim=d, head_dim_v=d_v, dtype=dtype, causal=causal, kv_len=4096)
                        for n in (1, 2):
                            require_fits(pick_config(asked, HOPPER, n), asked, HOPPER)


def test_configs_in_which_o_has_no_room_are_refused():
    config = next(row.config for row in OTHER_HEAD_DIMS if row.head_dims == (192, 128))
    for dims in ((192, 256), (128, 64)):
        with pytest.raises(ValueError, match="config: expected stage_in_queries=False at head_dim"):
            require_fits(config, problem(head_dim=dims[0], head_dim_v=dims[1]), HOPPER)


def test_slots_of_keys_and_of_values():
    """On Blackwell, of the slots that both have, keys get the odd one: the next block of K is needed before this one's
    V is free."""
    for slots, (keys, values) in {2: (1, 1), 3: (2, 1), 6: (3, 3)}.items():
        config = dataclasses.replace(BLACKWELL_UNLIKE[0].config, kv_slots=slots)
        assert isinstance(config, BlackwellConfig)
        assert (config.key_slots, config.value_slots) == (keys, values)


def test_a_config_without_room_is_refused():
    rows = [row for row in BLACKWELL_UNLIKE if (row.head_dims, row.element_bytes) == ((64, 128), 2)]
    config = rows[-1].config
    with pytest.raises(ValueError, match=r"got one that needs \d+ at head_dim 256 \(v's: 128\)"):
        require_fits(config, problem(head_dim=256, head_dim_v=128), BLACKWELL)
