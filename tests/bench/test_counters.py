"""What `python -m bench.counters` makes of the profiler's table, and what it says when there is none."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

import bench.counters as command
from bench.counters import HEADS, METRICS, VARIANTS, Variant, entry, parse, profiled
from bench.timing import Timing

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
        line(str(i), "project", "(256, 1, 1)", "17,000", *(launch[name] for name in names))
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
    counts = dict.fromkeys(METRICS, 0) | {"sectors_to_l2": 2**22, "l2_sectors": 400, "l2_requests": 100}
    found = entry(Variant(64, "registers"), 31.4159, counts)
    assert found["sectors_per_output_sector"] == 2.0  # O has 64 MiB, so 2^21 sectors
    assert found["sectors_per_l2_request"] == 4.0
    assert (found["head_dim"], found["way"], found["microseconds"]) == (64, "registers", 31.42)
    assert found["l2_requests"] == 100


def test_every_head_dim_and_way_is_counted_on_as_large_an_output():
    assert [(v.head_dim, v.way) for v in VARIANTS] == [(d, w) for d in (64, 128) for w in ("tma", "rows", "registers")]
    assert {HEADS * v.length * v.head_dim * 2 for v in VARIANTS} == {2**26}


def test_the_ways_of_a_head_dim_are_timed_by_rounds(monkeypatch):
    """Each time comes back to its own variant, though they are timed in another order."""
    seconds = {"registers": 3e-5, "rows": 2e-5, "tma": 1e-5}
    asked = []

    def by_rounds(calls):
        asked.append(sorted(calls))
        return {way: Timing(seconds[way], ()) for way in sorted(calls)}

    monkeypatch.setattr(Variant, "call", lambda self: self)
    monkeypatch.setattr(command, "recorded", lambda call: call)
    monkeypatch.setattr(command, "time_interleaved", by_rounds)
    assert command.timed() == pytest.approx([10, 20, 30] * 2)
    assert asked == [["registers", "rows", "tma"]] * 2


def test_a_variant_makes_tensors_that_the_kernel_takes(monkeypatch):
    """On the CPU, with shorter heads."""
    monkeypatch.setattr(command, "HEADS", 2)
    monkeypatch.setattr(command, "OUTPUT_BYTES", 2 * 2 * 64 * 100)
    monkeypatch.setattr(torch, "randn", functools.partial(without_device, torch.randn))
    taken = []
    monkeypatch.setattr(command, "run", lambda x, w, o, way: taken.append((x.shape, w.shape, o.shape, o.dtype, way)))
    Variant(64, "rows").call()()
    assert taken == [((100, 64), (2, 64, 64), (2, 100, 64), torch.bfloat16, "rows")]


def without_device(make, *shape, device, **options):
    assert device == "cuda"
    return make(*shape, **options)


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


def test_a_profiler_that_hangs_is_ended(ncu, monkeypatch):
    ncu("import time; time.sleep(60)")
    monkeypatch.setattr(command, "NCU_SECONDS", 0.2)
    with pytest.raises(SystemExit, match=r"ncu was not done after 0.2 s; nothing was written"):
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
    monkeypatch.setattr(command, "timed", lambda: [10.0 + i for i in range(len(VARIANTS))])
    monkeypatch.setattr(command, "machine_counts", lambda head_dim, way: {"copies": int(way == "tma")})
    monkeypatch.setattr(command, "profiled", lambda: printed(*launches))
    monkeypatch.setattr(command, "provenance", lambda commit: {"commit": commit})
    monkeypatch.setattr(sys, "argv", ["counters", "--out", str(out), "--commit", "abc"])
    command.main()
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["provenance"]["commit"] == "abc"
    assert report["metrics"] == METRICS
    assert [(v["head_dim"], v["way"]) for v in report["variants"]] == [(v.head_dim, v.way) for v in VARIANTS]
    assert [v["microseconds"] for v in report["variants"]] == [10.0 + i for i in range(len(VARIANTS))]
    assert [(m["way"], m["copies"]) for m in report["machine_code"]][:3] == [("tma", 1), ("rows", 0), ("registers", 0)]
    assert [v["sectors_per_l2_request"] for v in report["variants"]] == [3 + i / 100 for i in range(len(VARIANTS))]
    assert f"written: {out}" in capsys.readouterr().out
