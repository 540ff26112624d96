"""Packed sequences: bit for bit a loop of calls, whatever lies between and after them; and what is refused."""

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_attn
import gluon_cpu
from gluon_attn import ScoreMod, attention, check_cu_seqlens, reference_attention, supports
from gluon_attn.cpu import CpuLaunch
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.launch import LIST, RECORD, compiled, launches_of, list_build
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import TABLE, Row, blackwell_config, hopper_config, pick_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.packed import CANDIDATES
from gluon_attn.problem import Problem
from gluon_attn.resources import resources
from gluon_attn.runtime.compat import gl, jit
from gluon_attn.runtime.kernel import Launch
from gluon_attn.tensors import FP8_DTYPES, output_dtype
from tests.gluon_attn.packs import Pack, pack, same_bits, starts
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

NAN = float("nan")
H200, B200 = Device.hopper(), Device.blackwell()
SMALL = hopper_config(2, 64, 2, 2, 232)  # 128 rows, 64 keys
WIDE = blackwell_config(3, 192, exp_pieces=4, polynomial_columns=2, rescale_threshold=8.0)  # 256 rows, 128 keys


def attention_varlen(*args: Any, **kw: Any) -> Any:
    return gluon_attn.attention_varlen(*args, **kw)


def first_of(arch: int, head_dim: int, element_bytes: int) -> Row:
    """Of the table's rows for a causal mask and one CTA."""
    return next(
        row
        for row in TABLE
        if (row.padded_head_dim, row.element_bytes, row.config.num_ctas) == (head_dim, element_bytes, 1)
        and row.causal
        and arch in row.config.archs
    )


def config_of(head_dim: int, head_dim_v: int, card: Device) -> ForwardConfig:
    return pick_config(problem(head_dim=head_dim, head_dim_v=head_dim_v, causal=True), card)


def run(case: Pack, config: ForwardConfig, programs: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    """(O, LSE), with NaN before, so that gluon_cpu finds what nobody writes; rows after the last sequence stay."""
    out = torch.full((*case.q.shape[:-1], case.v.shape[-1]), NAN, dtype=output_dtype(case.q.dtype))
    out[sum(case.lengths_q) :] = 7.0
    device = device_of(config, programs)
    got = attention_varlen(**case.arguments, return_lse=True, out=out, config=config, device=device, **options)
    assert got[0] is out
    assert bool((out[sum(case.lengths_q) :] == 7.0).all())
    return got


def device_of(config: ForwardConfig, programs: int) -> Device:
    card = H200 if 90 in config.archs else B200
    return Device(
        name=card.name, capability=card.capability, sm_count=programs * config.num_ctas, smem_bytes=card.smem_bytes,
        l2_bytes=card.l2_bytes,
    )  # fmt: skip


def check(case: Pack, config: ForwardConfig, *, exact: bool = True, **options: Any) -> None:
    """Against a loop of calls, bit for bit, and these against the definition."""
    out, lse = run(case, config, **options)
    for i, (rows, q, k, v) in enumerate(case.sequences()):
        if len(q) == 0:
            continue
        of_sequence = {name: of_one(value, i) for name, value in options.items()}
        q, k, v = (t[None] for t in (q, k, v))
        one: Any = attention(
            q, k, v, **of_sequence, layout="bshd", return_lse=True, config=config, device=device_of(config, 2)
        )
        assert same_bits(out[rows], one[0][0]), i
        assert same_bits(lse[:, rows], one[1][0]), i
        if exact and not k.isnan().any():
            wide = (t if t.dtype in FP8_DTYPES else t.double() for t in (q, k, v))
            want, want_lse = reference_attention(*wide, **of_sequence, layout="bshd")
            atol = 0.2 if q.dtype in FP8_DTYPES else 4e-3
            torch.testing.assert_close(out[rows].double(), want[0].double(), atol=atol, rtol=0)
            torch.testing.assert_close(lse[:, rows].double(), want_lse[0].double(), atol=2e-3, rtol=1e-5)


def of_one(value: Any, sequence: int) -> Any:
    """What a call of one sequence is given for what all of them have together."""
    if isinstance(value, Tensor) and value.dim() == 2:
        return value[sequence : sequence + 1]
    return value


# Empty on either side, one row, a block of rows (128, 256) and of keys (64, 128) less and more one; Sq != Sk.
MIX_Q = (0, 1, 129, 40, 127, 3)
MIX_K = (5, 65, 63, 0, 128, 200)
USED = (5, 64, 0, 0, 127, 129)


@jit
def near(score, q_index, k_index, head, batch, factor):
    return score + gl.load(factor + batch) * (q_index - k_index + head).to(gl.float32)


CASES: dict[str, tuple[ForwardConfig, dict[str, Any], dict[str, Any]]] = {
    "Hopper": (SMALL, {}, {}),
    "Hopper, causal, some keys used": (SMALL, {"used": USED}, {"causal": True}),
    "Hopper, turns": (hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True), {}, {}),
    "Hopper, four roles": (
        hopper_config(4, 64, 2, 4, 112, integer_max=True, last_heads_longest_first=True), {}, {"causal": True}
    ),
    "Hopper, O in Q's tile": (hopper_config(2, 64, 1, 2, 232, stage_in_queries=True), {}, {"causal": True}),
    "Hopper, 2 CTAs": (hopper_config(2, 64, 2, 2, 232, num_ctas=2), {"used": USED}, {"causal": True}),
    "Hopper, D=128, window": (SMALL, {"head_dim": 128}, {"window": (30, 20)}),
    "Hopper, chunk": (SMALL, {}, {"chunk": 50}),
    "Hopper, soft cap, sinks": (SMALL, {}, {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0])}),
    "Hopper, slopes": (SMALL, {}, {"alibi_slopes": torch.rand(6, 2), "causal": True}),
    "Hopper, e4m3": (
        hopper_config(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56),
        {"dtype": torch.float8_e4m3fn},
        {"causal": True, "q_scale": torch.rand(6, 1) + 0.5, "v_scale": torch.rand(6, 1)},
    ),
    "Hopper, e4m3, V transposed before": (
        hopper_config(2, 128, 2, 2, 216), {"dtype": torch.float8_e4m3fn, "used": USED}, {}
    ),
    "Hopper, D=256": (
        hopper_config(2, 64, 1, 2, 232, stage_in_queries=True), {"head_dim": 256, "used": USED}, {"causal": True}
    ),
    "Hopper, D=128, e4m3, V transposed before": (
        hopper_config(2, 128, 2, 2, 216),
        {"dtype": torch.float8_e4m3fn, "head_dim": 128, "used": USED},
        {"causal": True},
    ),
    "Hopper, D=192, V of 128": (
        config_of(192, 128, H200), {"head_dim": 192, "head_dim_v": 128, "used": USED}, {"causal": True}
    ),
    "Hopper, V wider than Q": (SMALL, {"head_dim": 40, "head_dim_v": 64}, {"window": (30, 20)}),
    "Blackwell, D=192, V of 128": (
        config_of(192, 128, B200), {"head_dim": 192, "head_dim_v": 128, "used": USED}, {"causal": True}
    ),
    "Blackwell, D=128": (blackwell_config(2, 192), {"head_dim": 128, "used": USED}, {"causal": True}),
    "Blackwell": (WIDE, {"used": USED}, {"causal": True}),
    "Blackwell, 2 CTAs": (blackwell_config(3, 192, num_ctas=2), {}, {}),
    "Blackwell, e4m3, window": (blackwell_config(3, 192), {"dtype": torch.float8_e4m3fn}, {"window": (40, 0)}),
}  # fmt: skip
QUICK = ("Hopper, causal, some keys used", "Hopper, e4m3, V transposed before", "Blackwell")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CASES))
@pytest.mark.slow_but("Blackwell", "Hopper, causal, some keys used")
def test_packed_sequences_are_a_loop_of_calls(name):
    config, shape, options = CASES[name]
    check(pack(MIX_Q, MIX_K, **shape), config, **options)


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["Hopper", "Blackwell"])
@pytest.mark.slow_but("Blackwell")
def test_a_neighbour_of_nan_does_no_harm(config):
    """Its keys lie in the same blocks as those of the sequences beside it."""
    check(pack((70, 30, 60), (70, 30, 60), poisoned=1), config)


def test_a_score_mod_is_told_the_sequence_and_positions_in_it():
    case, factors = pack((3, 70), (70, 40)), torch.tensor([0.1, -0.2])
    out, _ = run(case, SMALL, score_mod=ScoreMod(near, tensors=(factors,)))
    for i, (rows, q, k, v) in enumerate(case.sequences()):
        of_one = ScoreMod(near, tensors=(factors[i:].contiguous(),))
        one: Any = attention(
            *(t[None] for t in (q, k, v)), layout="bshd", score_mod=of_one, config=SMALL, device=device_of(SMALL, 2)
        )
        assert same_bits(out[rows], one[0])


@pytest.mark.parametrize(
    "policy", slow_if(lambda policy: policy != "random", ("random", "late", "early", "pct", "starve"))
)
@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["Hopper", "Blackwell"])
def test_no_schedule_changes_a_bit(policy, config):
    case = pack((130, 0, 5), (70, 3, 130))
    want = run(case, config, causal=True)
    for seed in range(2):
        with gluon_cpu.machine(schedule=gluon_cpu.Schedule(policy, seed=seed)):
            got = run(case, config, programs=2, causal=True)
        assert all(
            same_bits(a[..., :135, :], b[..., :135, :])
            for a, b in zip((got[0], got[1].mT), (want[0], want[1].mT), strict=True)
        )


def test_lengths_of_equal_sequences_are_a_batch():
    q = torch.randn(3, 40, 2, 64).half()
    cu = starts((40, 40, 40))
    packed = attention_varlen(*(q.flatten(0, 1) for _ in range(3)), cu, cu, 40, 40, device=H200)
    batched = attention(q, q, q, layout="bshd", device=H200)
    assert isinstance(batched, Tensor)
    assert same_bits(packed.view_as(batched), batched)


def test_strides_of_a_packed_projection_are_taken():
    q, k, v = torch.randn(50, 3, 2, 64).half().unbind(1)
    cu = starts((20, 30))
    got = attention_varlen(q, k, v, cu, cu, 30, 30, device=H200)
    want = attention_varlen(*(t.contiguous() for t in (q, k, v)), cu, cu, 30, 30, device=H200)
    assert same_bits(got, want)


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(rows, keys):
    q, k = torch.randn(rows, 2, 64).half(), torch.randn(keys, 2, 64).half()
    got = attention_varlen(
        q,
        k,
        k,
        starts((rows,)),
        starts((keys,)),
        rows,
        keys,
        return_lse=True,
        sinks=torch.tensor([1.0, 2.0]),
        device=H200,
    )
    assert got[0].shape == (rows, 2, 64)
    assert not got[0].any()
    assert torch.equal(got[1], torch.tensor([[1.0], [2.0]]).expand(2, rows))


def test_all_sequences_may_be_empty_on_the_card():
    """Where the host sees rows."""
    q, cu = torch.randn(8, 2, 64).half(), torch.zeros(3, dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    attention_varlen(q, q, q, cu, cu, 8, 8, out=out, device=H200)
    assert bool((out == 7.0).all())


def test_rows_after_the_last_sequence_stay_where_there_is_no_key_at_all():
    q, kv = torch.randn(8, 2, 64).half(), torch.empty(0, 2, 64).half()
    starts, of_keys = torch.tensor([0, 3, 5], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    attention_varlen(q, kv, kv, starts, of_keys, 3, 0, out=out, device=H200)
    assert bool((out[:5] == 0.0).all())
    assert bool((out[5:] == 7.0).all())


COMPILED = {
    "Hopper": (90, 128, torch.bfloat16),
    "Hopper, D=256": (90, 256, torch.bfloat16),
    "Hopper, e4m3": (90, 128, torch.float8_e4m3fn),
    "Blackwell": (100, 64, torch.bfloat16),
    "Blackwell, e4m3": (100, 128, torch.float8_e4m3fn),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_and_its_loops_keep_their_registers(name):
    arch, head_dim, dtype = COMPILED[name]
    row = first_of(arch, head_dim, dtype.itemsize)
    packed, batch = (
        compiled(dtype, head_dim, row.mask, row.config, packed=packed, arch=arch) for packed in (True, False)
    )
    loops = resources(packed).loops
    assert loops
    assert sum(loop.spills for loop in loops) <= sum(loop.spills for loop in resources(batch).loops)
    assert "tensor.5d" in packed.asm["ptx"], "see `View.packed`"
    assert "tensor.5d" not in batch.asm["ptx"]


# ---------------------------------------------------------------------------------------------------------------------
# The list of row blocks
# ---------------------------------------------------------------------------------------------------------------------


def listed(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], mask: Mask, block_m: int) -> list[list[int]]:
    capacity = sum(lengths_q) // block_m + len(lengths_q)
    most = mask.most_keys(sum(lengths_k))
    numbers = {
        "sequences": len(lengths_q), "q_rows": sum(lengths_q), "k_rows": sum(lengths_k),
        "reach": -1 if mask.reach is None else mask.reach, "capacity": capacity,
        "most_keys": most if most == sum(lengths_k) else most + block_m,
    }  # fmt: skip
    records = torch.full(((1 + capacity) * RECORD.value,), -7, dtype=torch.int32)
    launch = Launch(
        build=list_build(block_m, False), programs=-(-capacity // CANDIDATES.value), views={}, scalars=numbers
    )
    cu_q, cu_k = starts(lengths_q), starts(lengths_k)
    CpuLaunch(launch, 90)({"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": None, "records": records})
    count, rows = int(records[0]), records.view(-1, RECORD.value)[1:, :6].tolist()
    assert all(row == [-7] * 6 for row in rows[count:])
    return rows[:count]


def blocks_of(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], block_m: int) -> list[list[int]]:
    cu_q, cu_k = starts(lengths_q).tolist(), starts(lengths_k).tolist()
    return [
        [cu_q[b], q_len, cu_k[b], k_len, b, i]
        for b, (q_len, k_len) in enumerate(zip(lengths_q, lengths_k, strict=True))
        for i in range(-(-q_len // block_m))
    ]


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(left=100, causal=True), Mask(right=70)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_each_row_block_is_listed_once_longest_first(mask, seed):
    draw = random.Random(seed)
    count = (3, 40, 150)[seed]  # more than a block of sequences in the last
    lengths_q = tuple(draw.choice((0, 0, 1, 63, 64, 65, draw.randrange(400))) for _ in range(count))
    lengths_k = tuple(draw.choice((0, 1, 64, draw.randrange(400))) for _ in range(count))
    got = listed(lengths_q, lengths_k, mask, 64)
    assert sorted(got) == sorted(blocks_of(lengths_q, lengths_k, 64))

    def cost(record: list[int]) -> int:
        _, q_len, _, k_len, _, index = record
        end = k_len if mask.reach is None else min((index + 1) * 64, q_len) + k_len - q_len + mask.reach
        most = sum(lengths_k) if mask.left is None else min(sum(lengths_k), mask.most_keys(sum(lengths_k)) + 64)
        return min(max(0, min(end, k_len)), most)

    costs = [cost(record) for record in got]
    assert costs == sorted(costs, reverse=True)


def test_lengths_are_in_no_kernel_and_no_grid_beyond_what_runs_at_once():
    """What is compiled depends on neither, nor on how many sequences there are."""
    builds, programs = [], []
    for lengths in ((9000, 4096), (1,) * 90, (70000,), (5000,) * 7):
        case = pack(lengths, lengths)
        problem = Problem.of(
            case.q, case.k, case.v, layout="thd", causal=True,
            lengths=(starts(lengths), starts(lengths), max(lengths), max(lengths), None),
        )  # fmt: skip
        plan = Plan.of(problem, SMALL, H200)
        launches = launches_of(plan, case.q, case.k, case.v, case.q)
        builds.append([launch.build for launch in launches])
        programs.append(launches[-1].programs)
        assert isinstance(pick_config(problem, H200), ForwardConfig)
    assert all(build == builds[0] for build in builds)
    assert programs == [132] * 4
    assert LIST.fn.params[4].do_not_specialize


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------

GOOD = pack((4, 5), (6, 7)).arguments | {"device": H200}
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "four dimensions": (ValueError, r"q: expected 3 dimensions", {"q": torch.zeros(1, 9, 2, 64).half()}),
    "int64": (TypeError, r"cu_seqlens_q: expected dtype torch.int32", {"cu_seqlens_q": torch.tensor([0, 4, 9])}),
    "a list": (TypeError, r"cu_seqlens_q: expected a tensor.*; give where", {"cu_seqlens_q": [0, 4, 9]}),
    "a list of keys": (TypeError, r"cu_seqlens_k: expected a torch.Tensor.*; give where", {"cu_seqlens_k": [0, 4, 9]}),
    "none": (ValueError, r"cu_seqlens_q: expected.*; give where", {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}),
    "other numbers of sequences": (
        ValueError, r"cu_seqlens_k: expected shape \(3,\).*; give where", {"cu_seqlens_k": starts((1,))}
    ),
    "not contiguous": (ValueError, r"cu_seqlens_q: expected a contiguous", {"cu_seqlens_q": starts((1,) * 5)[::2]}),
    "another device": (ValueError, r"cu_seqlens_k: expected device", {"cu_seqlens_k": starts((6, 7)).to("meta")}),
    "used of other sequences": (
        ValueError, r"seqused_k: expected shape \(2,\).*; give how many", {"seqused_k": starts((6, 7))}
    ),
    "used is a list": (TypeError, r"seqused_k: expected a torch.Tensor.*; give how many", {"seqused_k": [6, 7]}),
    "slopes are a list": (TypeError, r"alibi_slopes: expected a torch.Tensor.*; make it", {"alibi_slopes": [1.0, 1.0]}),
    "sinks are a list": (TypeError, r"sinks: expected a torch.Tensor.*; make it", {"sinks": [1.0, 1.0]}),
    "sinks of another shape": (ValueError, r"sinks: expected shape \(2,\).*; one for all", {"sinks": torch.ones(1)}),
    "max is a tensor": (TypeError, r"max_seqlen_k: expected an int.*item", {"max_seqlen_k": torch.tensor(7)}),
    "max is negative": (ValueError, r"max_seqlen_q: expected at least 0", {"max_seqlen_q": -1}),
    "layout": (TypeError, r"^attention_varlen\(\) got .*'layout'; use nothing: .*one", {"layout": "bshd"}),
    "seqused_q": (TypeError, r"^attention_varlen\(\) got .*'seqused_q'; use seqused_k", {"seqused_q": starts((4,))}),
    "head counts": (ValueError, r"multiple of the 3 KV heads", dict.fromkeys("kv", torch.zeros(83, 3, 64).half())),
    "scales of one": (
        ValueError, r"q_scale: expected shape \(2, 1\)",
        {**{n: GOOD[n].to(torch.float8_e4m3fn) for n in "qkv"}, "q_scale": torch.ones(1, 1)},
    ),
    "slopes of one": (ValueError, r"alibi_slopes: expected shape", {"alibi_slopes": torch.ones(1, 2)}),
    "dynamic": (
        ValueError, r"config: expected dynamic=False",
        {"device": B200, "config": blackwell_config(3, 192, dynamic=True)},
    ),
    "two changes of scores": (
        NotImplementedError, r"alibi_slopes: not supported together", {"softcap": 1.0, "alibi_slopes": torch.ones(2)}
    ),
    "pages": (NotImplementedError, r"page_table: a paged KV cache", {"page_table": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    error, message, change = WRONG[name]
    with pytest.raises(error, match=message):
        attention_varlen(**{**GOOD, **change})


@pytest.mark.parametrize("name", [name for name in WRONG if name != "layout"])
def test_supports_says_the_same(name):
    error, message, change = WRONG[name]
    assert supports(**GOOD) is None
    refusal = supports(**{**GOOD, **change})
    assert refusal is not None
    assert re.search(message, refusal), error


def test_a_batch_has_no_lengths():
    q = torch.zeros(1, 2, 3, 64).half()
    with pytest.raises(TypeError, match=r"cu_seqlens_q.*use attention_varlen"):
        attention(q, q, q, cu_seqlens_q=starts((3,)), device=H200)
    with pytest.raises(ValueError, match="layout: expected one of"):
        attention(q, q, q, layout="thd", device=H200)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_lengths_that_are_not_stored_as_they_read_are_refused(name):
    """Also after a call with the same shapes."""
    good = {**GOOD, "seqused_k": torch.tensor([6, 7], dtype=torch.int32)}
    attention_varlen(**good)
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor that is stored as it reads"):
        attention_varlen(**{**good, name: torch._neg_view(-good[name])})


def test_limits_beyond_int32_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^window: expected numbers from 0 to 2147483647, got 1099511627776; give"):
        attention_varlen(**GOOD, window=(2**40, 2**40))
    with pytest.raises(ValueError, match=r"^chunk: expected at most 2147483647 keys, got 2147483648; leave it out"):
        attention_varlen(**GOOD, chunk=2**31)


def test_lengths_of_no_tensor_are_refused_by_name_with_gradients_too():
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: expected a tensor of shape"):
        attention_varlen(**{**GOOD, "q": GOOD["q"].detach().requires_grad_(), "cu_seqlens_q": [0, 4, 9]})


BAD_NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "first": ("cu_seqlens_q: expected 0 first", {"cu_seqlens_q": torch.tensor([1, 4, 9], dtype=torch.int32)}),
    "falling": ("cu_seqlens_k: expected numbers that do not fall", {"cu_seqlens_k": starts((7, -1))}),
    "beyond": ("cu_seqlens_q: expected at most the 12 rows", {"cu_seqlens_q": starts((4, 9)), "max_seqlen_q": 9}),
    "longer": ("max_seqlen_k: expected at least 7", {"max_seqlen_k": 6}),
    "used": ("seqused_k: expected 0 to 6", {"seqused_k": torch.tensor([8, 1], dtype=torch.int32)}),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_what_is_on_the_card_can_be_checked(name):
    message, change = BAD_NUMBERS[name]
    arguments = {n: t for n, t in GOOD.items() if n not in ("v", "device")}
    check_cu_seqlens(**arguments)
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(**{**arguments, **change})
