"""What `python -m bench.counters` makes of the profiler's table, and what it says when there is none."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

import bench.counters as command
from bench.counters import METRICS, VARIANTS, entry, parse, profiled, tiles_of
from bench.points import Point
from gluon_attn.device import Device
from gluon_attn.forward.table import HOPPER, require_fits
from gluon_attn.problem import Problem

# Of two launches on an H200, with commas, columns that nobody asked for, and other programs' lines in between.
BYTES, SECTORS = METRICS["bytes_to_l2"], METRICS["sectors_to_l2"]
TMA = dict.fromkeys(METRICS, "0") | {"bytes_to_l2": "69,206,016", "sectors_to_l2": "2,162,688"}
REGISTERS = dict.fromkeys(METRICS, "0") | {"bytes_to_l2": "134,228,640", "sectors_to_l2": "4,194,645"}


def printed(*launches: dict[str, str]) -> str:
    """As ncu prints it. launches: cells by our names."""

    def line(*cells: str) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    names = [name for name in METRICS if name in launches[0]]
    first = line("ID", "Kernel Name", "Block Size", f"{SECTORS[:-4]}.max", *(METRICS[name] for name in names))
    rows = [
        line(str(i), "attention_forward", "(640, 1, 1)", "17,000", *(launch[name] for name in names))
        for i, launch in enumerate(launches)
    ]
    talk = "==PROF== Connected to process 502 (/usr/bin/python3)\nnothing to see"
    return "\n".join([talk, first, line("", "", "", "sector", *("" for _ in names)), *rows, "==PROF== Disconnected"])


def test_counts_are_read_launch_by_launch():
    first, second = parse(printed(TMA, REGISTERS), launches=2)
    assert list(first) == list(METRICS)
    assert (first["bytes_to_l2"], first["sectors_to_l2"]) == (69206016, 2162688)
    assert (second["bytes_to_l2"], second["sectors_to_l2"]) == (134228640, 4194645)
    assert first["l2_requests"] == 0


@pytest.mark.parametrize("text", ["==PROF== Connected\n==WARNING== No kernels were profiled.", printed(TMA)])
def test_a_launch_that_was_not_counted_is_an_error(text):
    with pytest.raises(SystemExit, match=r"expected 2 launches from ncu, got [01]:\n==PROF== Connected"):
        parse(text, launches=2)


@pytest.mark.parametrize("cell", ["n/a", "", "69.2", None])
def test_a_metric_without_a_count_is_an_error(cell):
    launch = TMA | {"bytes_to_l2": cell} if cell is not None else {n: c for n, c in TMA.items() if n != "bytes_to_l2"}
    with pytest.raises(SystemExit, match=f"expected counts of every metric from ncu, got none of {BYTES}$"):
        parse(printed(launch), launches=1)


def test_sectors_are_compared_with_those_of_the_output():
    point = Point(head_dim=64, causal=False, length=2048)
    counts = dict.fromkeys(METRICS, 0) | {"sectors_to_l2": 2162688, "l2_sectors": 400, "l2_requests": 100}
    found = entry(point, tiles_of(64)[0], counts)
    assert found["sectors_per_output_sector"] == 1.0  # 128 bytes of O and 4 of LSE for each of 2^19 rows
    assert found["sectors_per_l2_request"] == 4.0
    assert (found["epilogue"], found["l2_requests"]) == ("tma", 100)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_tiles_are_one_of_the_table_stored_in_three_ways(head_dim):
    tma, rows, registers = tiles_of(head_dim)
    assert tma in [row.tile for row in HOPPER if (row.padded_head_dim, row.causal) == (head_dim, False)]
    assert [t.epilogue for t in (tma, rows, registers)] == ["tma", "rows", "registers"]
    for tile in (rows, registers):
        assert dataclasses.replace(tile, epilogue="tma", stage_in_queries=tma.stage_in_queries) == tma
    q = torch.empty((8, 2048 // head_dim, 2048, head_dim), dtype=torch.bfloat16, device="meta")
    for tile in (tma, rows, registers):
        require_fits(tile, Problem.of(q, q, q), Device.hopper())


def test_every_head_dim_and_epilogue_is_counted():
    named = [(point.head_dim, tile.epilogue) for point, tile in VARIANTS]
    assert named == [(d, epilogue) for d in (64, 128, 256) for epilogue in ("tma", "rows", "registers")]
    assert all(point.batch * point.length == 16384 and not point.causal for point, _ in VARIANTS)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes a program of that name, the only one in PATH, from lines of Python."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(body: str) -> None:
        path = Path(tmp_path) / "ncu"
        path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    return write


def test_it_profiles_itself(ncu):
    ncu('print(*sys.argv[1:], sep="\\n")')
    arguments = profiled().splitlines()
    assert arguments[arguments.index("--profile-from-start") + 1] == "off"
    assert arguments[arguments.index("--metrics") + 1].split(",") == list(METRICS.values())
    assert arguments[-4:] == [sys.executable, "-m", "bench.counters", "--child"]


def test_without_ncu(ncu):
    with pytest.raises(SystemExit, match=r"needs ncu \(Nsight Compute, of the CUDA toolkit\), found none in PATH"):
        profiled()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("status", [0, 1])
def test_without_permission_to_read_counters(ncu, stream, status):
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    ncu(f"print({said!r}, file=sys.{stream}); sys.exit({status})")
    with pytest.raises(SystemExit, match=r"may not read the card's counters \(ERR_NVGPUCTRPERM\); run it as root"):
        profiled()


def test_a_profiler_that_fails_is_quoted(ncu):
    ncu('print("no metric of that name"); print("and more", file=sys.stderr); sys.exit(3)')
    with pytest.raises(SystemExit, match=r"ncu failed with exit status 3:\nno metric of that name\nand more"):
        profiled()


@pytest.mark.parametrize(
    ("capability", "found"), [(None, "no CUDA device"), ((8, 0), "a card"), ((10, 0), "a card")], ids=str
)
@pytest.mark.parametrize("arguments", [[], ["--child"]], ids=str)
def test_without_a_hopper_card(capability, found, arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(sys, "argv", ["counters", *arguments])
    with pytest.raises(SystemExit, match=f"needs a Hopper card, found {found}; nothing was counted"):
        command.main()


def test_the_result_file_has_every_variant(monkeypatch, tmp_path, capsys):
    out = tmp_path / "counts.json"
    launches = [TMA | {"l2_sectors": str(300 + i), "l2_requests": "100"} for i in range(len(VARIANTS))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(command, "precompile", lambda jobs, arch: iter(jobs))
    monkeypatch.setattr(command, "profiled", lambda: printed(*launches))
    monkeypatch.setattr(command, "provenance", lambda commit: {"commit": commit})
    monkeypatch.setattr(sys, "argv", ["counters", "--out", str(out), "--commit", "abc"])
    command.main()
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["provenance"]["commit"] == "abc"
    assert report["metrics"] == METRICS
    kinds = [(v["name"], v["epilogue"]) for v in report["variants"]]
    assert kinds == [(point.name, tile.epilogue) for point, tile in VARIANTS]
    assert [v["sectors_per_l2_request"] for v in report["variants"]] == [3 + i / 100 for i in range(len(VARIANTS))]
    assert "compiled 9 kernels" in capsys.readouterr().out
