"""What the benchmarks measure, and how they count: all that can be seen without a card."""

import dataclasses
import json
import math
from collections.abc import Sequence

import pytest
import torch

import bench.__main__ as command
from bench import peers, sustained, sweep
from bench.candidates import CANDIDATES, label, orders_heads
from bench.ceilings import Ceilings
from bench.points import DTYPES, LENGTHS, MODEL_DIM, SETS, TOKENS, Point
from gluon_attn import ForwardConfig, HopperConfig
from gluon_attn.device import Device
from gluon_attn.forward.table import HOPPER, require_fits
from gluon_attn.problem import Problem

EVERY_POINT = [p for points in SETS.values() for p in points]


def problem_of(point: Point) -> Problem:
    shape = (point.batch, point.heads, point.length, point.head_dim)
    q = torch.empty(shape, dtype=DTYPES[point.dtype], device="meta")
    return Problem.of(q, q, q, causal=point.causal)


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2"])
def test_a_sweep_has_every_length_mask_and_head_dim(name):
    points = [p for p in SETS["sweep"] if p.dtype == name]
    found = {(p.head_dim, p.causal, p.length) for p in points}
    assert found == {(d, causal, n) for d in (64, 128) for causal in (False, True) for n in LENGTHS}
    assert all(p.batch * p.length == TOKENS and p.heads * p.head_dim == MODEL_DIM for p in points)
    assert len(points) == len(found)


def test_names_tell_all_points_apart():
    assert len({p.name for p in EVERY_POINT}) == len(set(EVERY_POINT))


def test_flops_count_both_products_and_half_of_them_under_a_mask():
    full, causal = (Point(head_dim=64, causal=c, length=512, batch=2, heads=3) for c in (False, True))
    assert full.flops == 2 * (2 * 2 * 3 * 512 * 512 * 64)
    assert causal.flops == full.flops / 2


@pytest.mark.parametrize("point", SETS["variants"], ids=lambda p: p.name)
def test_a_variant_differs_from_its_plainer_problem_in_one_thing(point):
    plainer = point.plainer()
    assert (plainer.heads_per_kv_head, plainer.layout) == (1, "bhsd")
    changed = [
        point.heads_per_kv_head != plainer.heads_per_kv_head,
        point.layout != plainer.layout,
        point.length != plainer.length,
    ]
    assert changed.count(True) == 1
    assert (plainer.batch, plainer.heads, plainer.dtype) == (point.batch, point.heads, point.dtype)
    if point.length != plainer.length:
        assert all(plainer.length % row.config.block_m == 0 for row in HOPPER if row.padded_head_dim == point.head_dim)
        assert 0 < plainer.length - point.length < 384


def test_arguments_are_the_same_numbers_in_the_points_layout_and_dtype():
    point = Point(
        dtype="e4m3", head_dim=64, causal=False, length=128, batch=1, heads=4, heads_per_kv_head=4, layout="bshd"
    )
    q, k, v = point.tensors("cpu")
    assert (q.shape, k.shape, v.shape, q.dtype) == ((1, 4, 128, 64), (1, 1, 128, 64), (1, 1, 128, 64), torch.bfloat16)
    typed = point.arguments([q, k, v])
    for plain, own in zip((q, k, v), typed, strict=True):
        assert own.dtype == torch.float8_e4m3fn
        assert own.is_contiguous()
        assert torch.equal(own.transpose(1, 2).float(), plain.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", CANDIDATES, ids=lambda k: f"D={k[0]}, {8 * k[1]} bits")
def test_every_candidate_fits_and_has_a_name_of_its_own(kind):
    head_dim, element_bytes = kind
    dtype = "bf16" if element_bytes == 2 else "e4m3"
    for config in CANDIDATES[kind]:
        require_fits(
            config, problem_of(Point(dtype=dtype, head_dim=head_dim, causal=False, length=512)), Device.hopper()
        )
    assert len({label(config) for config in CANDIDATES[kind]}) == len(CANDIDATES[kind])


def test_the_table_is_among_the_candidates():
    for row in HOPPER:
        assert row.config in CANDIDATES[row.padded_head_dim, row.element_bytes]


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_candidates_of_a_point(head_dim, dtype):
    """The longest first is an order under a mask only, where each has its counterpart without."""
    full, causal = (
        sweep.candidates(Point(dtype=dtype, head_dim=head_dim, causal=causal, length=512), [1, 2])
        for causal in (False, True)
    )
    for num_ctas in (1, 2):
        only = sweep.candidates(Point(dtype=dtype, head_dim=head_dim, causal=False, length=512), [num_ctas])
        assert {config.num_ctas for config in only} == {num_ctas}
    ordered = [config for config in causal if orders_heads(config)]
    assert ordered
    assert full == [config for config in causal if not orders_heads(config)]
    otherwise = {
        dataclasses.replace(config, last_heads_longest_first=False)
        for config in ordered
        if isinstance(config, HopperConfig)
    }
    assert len(otherwise) == len(ordered)
    assert otherwise <= set(full)


def test_calls_timed_alone(monkeypatch):
    """Each in its turn, and the median of its rounds."""
    order: list[str] = []
    seconds = {"cudnn": iter((5.0, 1.0, 2.0, 9.0, 4.0)), "ours": iter((3.0, 3.0, 1.0, 2.0, 8.0))}

    def alone(call):
        order.append(call())
        return next(seconds[call()])

    monkeypatch.setattr(sweep, "seconds_alone", alone)
    point = Point(head_dim=64, causal=False, length=512)
    found = sweep.measure_alone(point, {"cudnn": lambda: "cudnn", "ours": lambda: "ours"})
    assert order == ["cudnn", "ours"] * 5
    assert {name: f["ms"] for name, f in found.items()} == {"cudnn": 4000, "ours": 3000}
    assert found["ours"]["tflops"] == pytest.approx(point.flops / 3e12)


def test_host_times_are_taken_in_turn(monkeypatch):
    """So that a slow phase of the host falls on every call, and on less than half of the rounds of each."""
    monkeypatch.setattr(sweep, "ROUNDS_OF_HOST", 5)
    order: list[str] = []

    def seconds_of(call):
        order.append(call())
        slow = 4 <= len(order) <= 6
        return (2e-6 if call() == "ours" else 3e-6) * (10 if slow else 1)

    found = sweep.measure_in_turn(seconds_of, {"cudnn": lambda: "cudnn", "ours": lambda: "ours"})
    assert order == ["cudnn", "ours"] * 5
    assert found == pytest.approx({"cudnn": 3.0, "ours": 2.0})


def test_each_kernel_is_compiled_once():
    configs: dict[Point, list[ForwardConfig]] = {p: [] for p in EVERY_POINT}
    jobs = sweep.jobs_of(EVERY_POINT, configs, Device.hopper())
    wanted = {
        (DTYPES[p.dtype], p.head_dim, row.mask, row.config)
        for p in EVERY_POINT
        for row in HOPPER
        if (row.padded_head_dim, row.causal) == (p.head_dim, p.causal) and row.element_bytes == DTYPES[p.dtype].itemsize
    }
    assert len(jobs) == len(set(jobs))
    assert set(jobs) == wanted  # every config of the table for each


def test_settled_samples_leave_out_the_start():
    samples = [(0.1, 700.0, 1900.0), (0.5, 600.0, 1500.0), (0.9, 620.0, 1480.0), (1.5, 90.0, 300.0)]
    assert sustained.settled(samples, 0.0, 1.0) == (610.0, 1490.0)
    assert all(math.isnan(x) for x in sustained.settled([], 0.0, 1.0))


def test_a_line_of_progress_has_the_time_left_and_what_was_found():
    timed = {"tflops": 700.0, "ratio_to_cudnn": 1.25, "spread": 0.02}
    found = {"name": "a point", "results": {"ours": timed}, "host_us": {"ours": 14.26}}
    assert sweep.line(found, 61.2) == "[ 61 s left] a point              ours 700 (1.250 ±1.0%) | host_us ours 14.3"


def test_intensity_and_ceiling():
    point = Point(head_dim=128, causal=False, length=1024, batch=2, heads=8, heads_per_kv_head=4)
    assert point.bytes == 2 * (2 * 2 * 8 * 1024 * 128 + 2 * 2 * 2 * 1024 * 128)  # Q and O, K and V, of two bytes each
    assert point.intensity == pytest.approx(4 * 2 * 8 * 1024**2 * 128 / point.bytes)
    fp8 = dataclasses.replace(point, dtype="e4m3", heads_per_kv_head=1)
    assert fp8.bytes == 2 * 8 * 1024 * 128 * (1 + 2 + 1 + 1)
    limits = Ceilings(matrix_tflops=700.0, copy_tbps=4.0)
    assert limits.tflops(100.0) == 400.0
    assert limits.tflops(1000.0) == 700.0


PROVENANCE = {
    "commit": "abc",
    "card": "H200",
    "driver": "1",
    "torch": "2",
    "triton": "3",
    "cudnn": 4,
    "command": {"rounds": 9},
}


def test_resuming_keeps_the_points_of_the_same_tree(tmp_path):
    out = tmp_path / "result.json"
    assert sweep.resumed(out, PROVENANCE) == []
    out.write_text(json.dumps({"provenance": PROVENANCE, "points": [{"name": "a point"}]}))
    assert sweep.resumed(out, PROVENANCE) == [{"name": "a point"}]
    with pytest.raises(SystemExit, match=r"--resume: expected .*result\.json to have commit 'def', got 'abc'"):
        sweep.resumed(out, PROVENANCE | {"commit": "def"})
    with pytest.raises(SystemExit, match=r"--resume: expected .* to have command .*'rounds': 5"):
        sweep.resumed(out, PROVENANCE | {"command": {"rounds": 5}})


def names_of(*arguments: str) -> list[str]:
    found = command.parser()
    return [p.name for p in command.chosen(found.parse_args(arguments), found.error)]


def test_what_is_timed_by_default():
    assert names_of() == [p.name for p in SETS["sweep"] if p.dtype == "bf16"]


def test_filters():
    options = "--dtype e4m3 bf16 --head-dim 128 --mask causal --length 512 8192 --layout bhsd bshd"
    assert names_of(*options.split()) == [
        f"D=128 causal {length}{dtype}{layout}"
        for dtype in ("", " e4m3")
        for length in (512, 8192)
        for layout in ("", " bshd")
    ]
    assert names_of("--sets", "small", "--length", "128", "--head-dim", "64") == [
        "D=64 full 128 B=1 H=16",
        "D=64 causal 128 B=1 H=16",
    ]
    # What is compared with a plainer problem differs from it in one thing, and keeps its layout.
    assert names_of("--sets", "variants", "--layout", "bshd") == [p.name for p in SETS["variants"]]


BAD_ARGUMENTS = [
    ("--length 777", "--length: expected some of 512, 1024, 2048, 4096, 8192, 16384, which these sets have, got 777"),
    ("--sets d256 --head-dim 128", "--head-dim: expected some of 256, which these sets have, got 128"),
    ("--sets d256 --dtype fp16", "--dtype: expected some of bf16, e4m3, which these sets have, got fp16"),
    ("--dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
    ("--ctas 3", "argument --ctas: invalid choice: 3"),
    ("--rounds 0", "--rounds: expected 1 or more, got 0"),
    ("--rounds 3 tables", "expected tables as the first word, without options of what is timed, got --rounds"),
    ("--out .", "--out: expected a file name that ends in .json, got ."),
    ("plot nothing.json", "nothing.json: expected a result file of `python -m bench`, got"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda a: a.split()[0])
def test_bad_arguments_are_refused_before_anything_is_timed(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(command.sys, "argv", ["bench", *arguments.split()])
    monkeypatch.setattr(sweep, "run", lambda *_: pytest.fail("timed something"))
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert message in capsys.readouterr().err + str(refused.value)


def test_calls_of_a_point(monkeypatch):
    """What of ours and of its peers is timed, by dtype, CTA counts and configs."""
    monkeypatch.setattr(peers, "flex", lambda *_: lambda: None)
    monkeypatch.setattr(Point, "tensors", lambda self: [torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)] * 3)
    plain = Point(head_dim=64, causal=False, length=512)

    def names(point: Point, configs: Sequence[ForwardConfig] = (), ctas: Sequence[int] = (1, 2)) -> list[str]:
        return list(peers.calls_of(point, configs, ["fa2", "flex"], ctas))

    assert names(plain) == ["cudnn", "fa2", "flex", "ours", "ours 1cta", "ours 2cta"]
    assert names(dataclasses.replace(plain, dtype="fp16"), ctas=[2]) == ["cudnn", "fa2", "flex", "ours", "ours 2cta"]
    assert names(dataclasses.replace(plain, dtype="e4m3"), ctas=[1]) == ["cudnn", "ours", "ours 1cta"]
    assert names(dataclasses.replace(plain, baseline_length=512))[3:] == ["ours", "ours, plainer"]
    configs = CANDIDATES[64, 2][:2]
    assert names(plain, configs)[3:] == [label(config) for config in configs]
