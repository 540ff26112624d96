"""The sweep: what it compiles, times, resumes and takes as arguments."""

import json

import pytest

import bench.__main__ as command
from bench import sweep
from bench.points import DTYPES, SETS, Point
from gluon_attn import ForwardConfig
from gluon_attn.device import Device
from gluon_attn.forward.table import HOPPER, OTHER_HEAD_DIMS

EVERY_POINT = [p for points in SETS.values() for p in points]


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


def test_host_times_are_taken_by_rounds(monkeypatch):
    """So that a slow phase of the host falls on every call, and on less than half of the rounds of each."""
    monkeypatch.setattr(sweep, "ROUNDS_OF_HOST", 5)
    order: list[str] = []

    def seconds_of(call):
        order.append(call())
        slow = 4 <= len(order) <= 6
        return (2e-6 if call() == "ours" else 3e-6) * (10 if slow else 1)

    found = sweep.measure_by_rounds(seconds_of, {"cudnn": lambda: "cudnn", "ours": lambda: "ours"})
    assert order == ["cudnn", "ours"] * 5
    assert found == pytest.approx({"cudnn": 3.0, "ours": 2.0})


def test_each_kernel_is_compiled_once():
    configs: dict[Point, list[ForwardConfig]] = {p: [] for p in EVERY_POINT}
    jobs = sweep.jobs_of(EVERY_POINT, configs, Device.hopper())
    wanted = {
        (DTYPES[p.dtype], *row.head_dims, row.mask, row.config)
        for p in EVERY_POINT
        for row in HOPPER + OTHER_HEAD_DIMS
        if (*row.head_dims, row.causal) == (p.head_dim, p.head_dim_v, p.causal)
        and row.element_bytes == DTYPES[p.dtype].itemsize
    }
    assert len(jobs) == len(set(jobs))
    assert set(jobs) == wanted  # every config of the table for each


def test_a_line_of_progress_has_the_time_left_and_what_was_found():
    timed = {"tflops": 700.0, "ratio_to_cudnn": 1.25, "spread": 0.02}
    found = {"name": "a point", "results": {"ours": timed}, "host_us": {"ours": 14.26}}
    assert sweep.line(found, 61.2) == "[ 61 s left] a point              ours 700 (1.250 ±1.0%) | host_us ours 14.3"


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
    point = {"name": "a point", "point": {}, "results": {}}
    out.write_text(json.dumps({"provenance": PROVENANCE, "method": "", "points": [point]}))
    assert sweep.resumed(out, PROVENANCE) == [point]
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
