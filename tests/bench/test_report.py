"""Tables and plots say what the result file says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import report
from bench.points import LENGTHS, Point

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def found(ours: float, **fields) -> dict:
    point = Point(**({"head_dim": 64, "causal": False, "length": 512} | fields))
    results = {
        name: {"tflops": rate, "ratio_to_cudnn": rate / 400.0}
        for name, rate in (("cudnn", 400.0), ("ours", ours), ("ours 1cta", ours), ("ours 2cta", 2 * ours))
    }
    return {"point": {field: getattr(point, field) for field in point.__dataclass_fields__}, "results": results}


PROVENANCE = {"card": "a card", "date": "2026-01-02", "torch": "1", "triton": "2", "cudnn": 3, "commit": "abc"}
TWO = [found(200.0), found(800.0, length=16384)]
NOT_OF_THE_SWEEP = [
    found(1.0, batch=1, heads=16),
    found(1.0, heads_per_kv_head=4),
    found(1.0, length=501, baseline_length=512),
]


@pytest.mark.parametrize(
    ("table", "title", "first", "last"),
    [(report.rates, "TFLOP/s", "200", "800"), (report.ratios, "× cuDNN", "0.50", "2.00")],
)
def test_tables_by_length(table, title, first, last):
    lines = list(table({"provenance": PROVENANCE, "points": [*TWO, *NOT_OF_THE_SWEEP]}))
    assert lines[0] == f"| {title} | 512 | 1024 | 2048 | 4096 | 8192 | 16384 |"
    assert lines[2:] == [f"| bf16 D=64 full | {first} | – | – | – | – | {last} |"]


def test_means_leave_out_what_is_not_of_the_sweep():
    assert list(report.means({"points": [*NOT_OF_THE_SWEEP, *TWO]})) == [
        "bf16, D=64: 1.000 times cuDNN over 2 points, at least 0.500"
    ]


def test_candidates_have_no_mean():
    candidates = found(1.0)
    candidates["results"] = {"cudnn": candidates["results"]["cudnn"], "2x128 1cta": candidates["results"]["ours"]}
    assert list(report.means({"points": [candidates]})) == []
    assert "| – |" in report.tables({"provenance": PROVENANCE, "points": [candidates]})


def test_another_layout_is_a_row_of_its_own():
    lines = list(report.rates({"points": [*TWO, found(300.0, layout="bshd")]}))
    assert list(report.means({"points": [TWO[0], found(300.0, layout="bshd"), TWO[1]]})) == [
        "bf16, D=64: 1.000 times cuDNN over 2 points, at least 0.500",
        "bf16 bshd, D=64: 0.750 times cuDNN over 1 points, at least 0.750",
    ]
    assert lines[2:] == [
        "| bf16 D=64 full | 200 | – | – | – | – | 800 |",
        "| bf16 D=64 full bshd | 300 | – | – | – | – | – |",
    ]


def test_compared_with_plainer_problems():
    odd = found(1.0, length=501, baseline_length=512)
    odd["results"]["ours, plainer"] = {"tflops": 2.0}
    assert list(report.plainer({"points": [*TWO, odd | {"name": "odd"}]})) == [
        "odd: 0.500 of the rate on the plainer problem"
    ]


def test_cta_counts():
    caption, *_, last = report.by_cta_count({"points": TWO})
    assert caption.startswith("TFLOP/s of ours with one CTA to a cluster and with two")
    assert last == "| bf16 D=64 full 16384 | 800 | 1600 | 2.00 |"


OTHERS = ['{"provenance": 1, "points": [{"shape": {}}]}', '{"provenance": 1, "points": [{"name": "", "results": {}}]}']


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": []}', *OTHERS])
def test_not_a_result_file(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"x\.json: expected a result file of `python -m bench`, got"):
        report.read(path)


def test_of_a_point_in_two_files_the_last_counts(tmp_path):
    paths = [tmp_path / name for name in ("first.json", "second.json")]
    both = [{"name": name, "point": {}, "results": 1} for name in "ab"]
    again = [{"name": name, "point": {}, "results": 2} for name in "ca"]
    for path, points in zip(paths, (both, again), strict=True):
        path.write_text(json.dumps({"provenance": PROVENANCE | {"date": path.stem}, "method": "", "points": points}))
    merged = report.read_all(paths)
    assert [(point["name"], point["results"]) for point in merged["points"]] == [("a", 2), ("b", 1), ("c", 2)]
    assert (merged["provenance"]["date"], [p["date"] for p in merged["further"]]) == ("first", ["second"])


def shown(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    command.main()


@pytest.mark.parametrize(
    ("file", "head"),
    [
        ("h200_masks.json", "| time over FlexAttention's | D=128 B=1 H=16 16384 forward |"),
        ("h200_varlen.json", "| host, µs a call | ours packed |"),
        ("h200_unlike.json", "| TFLOP/s | ours | ours, one launch |"),
        ("h200_forward.json", "| × cuDNN | 512 |"),
    ],
)
def test_tables_of_every_set(monkeypatch, capsys, file, head):
    shown(monkeypatch, "tables", RESULTS / file)
    printed = capsys.readouterr().out
    assert head in printed
    assert printed.startswith("NVIDIA H200, 2026-11-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plot", "h200_masks.json"), "plot: .*: expected only files of lengths, got one of masks, bias"),
        (("tables", "h200_forward.json", "h200_varlen.json"), "varlen.json: expected no other file beside it, got one"),
    ],
)
def test_sets_apart_are_shown_alone(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        shown(monkeypatch, arguments[0], *(RESULTS / file for file in arguments[1:]))
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("file", ["h200_gradients.json", "h200_gradients_finish.json"])
def test_gradients_have_a_command_of_their_own(monkeypatch, file):
    with pytest.raises(SystemExit, match=r"got one of another benchmark; .* python -m bench\.gradients --show .*json$"):
        shown(monkeypatch, "tables", RESULTS / file)


FP8 = found(200.0, dtype="e4m3")


def test_what_cudnn_computes_fp8_in():
    said = "cuDNN computes in bf16 for e4m3 and e5m2 too"
    assert [said in "".join(report.ratios({"points": points})) for points in ([FP8], TWO)] == [True, False]


@pytest.mark.parametrize(
    ("every", "titles"), [(False, ["bf16 D=64 full"]), (True, ["bf16 D=64 full", "e4m3 D=64 full"])]
)
def test_plot(tmp_path, every, titles):
    pytest.importorskip("matplotlib")
    written = report.plot({"provenance": PROVENANCE, "points": [*TWO, FP8]}, tmp_path / "speed.svg", every)
    text = written.read_text(encoding="utf-8")
    assert [title for title in ("bf16 D=64 full", "e4m3 D=64 full") if title in text] == titles


def test_plot_of_another_suffix(tmp_path):
    with pytest.raises(SystemExit, match=r"plot: --to: expected a file name that ends in \.png or \.svg, got .*speed$"):
        report.plot({"provenance": PROVENANCE, "points": TWO}, tmp_path / "speed")


@pytest.mark.parametrize("points", [[found(1.0, batch=1, heads=16)], [FP8]], ids=["no sweep", "not of the front"])
def test_nothing_to_plot(tmp_path, points):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="plot: expected points of a sweep in bf16 with D = 64 or 128"):
        report.plot({"provenance": PROVENANCE, "points": points}, tmp_path / "speed.png")


def test_the_page_has_the_committed_figures():
    page = (RESULTS.parents[1] / "docs" / "figures.md").read_text(encoding="utf-8")
    committed = report.read_all([RESULTS / "h200_forward_second.json"])
    heads = ("| TFLOP", "| × cuDNN", "| bf16", "| e4m3")
    lines = [row for table in (report.rates, report.ratios) for row in table(committed) if row.startswith(heads)]
    assert len(lines) > 2 * len(LENGTHS)
    assert [line for line in lines if line not in page] == []


def test_what_is_shown_where_nothing_was_timed(tmp_path):
    """On a fresh clone `python -m bench tables` shows the committed file."""
    for name in ("bench", "channels", "gluon_attn"):
        (tmp_path / name).symlink_to(RESULTS.parents[1] / name)
    run = subprocess.run(
        [sys.executable, "-m", "bench", "tables"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "| bf16 D=128 causal |" in run.stdout


def test_the_readme_picture_is_made_by_its_command(tmp_path):
    pytest.importorskip("matplotlib")
    to = tmp_path / "speed.png"
    command = [sys.executable, "-m", "bench", "plot", str(RESULTS / "h200_forward_second.json"), "--to", str(to)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"written: {to}\n"
    assert to.read_bytes().startswith(b"\x89PNG")


def test_the_command():
    files = [str(RESULTS / name) for name in ("h200_forward.json", "h200_candidates.json")]
    command = [sys.executable, "-m", "bench", "tables", *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stderr
    assert "| bf16 D=128 causal |" in run.stdout
    assert [line.rpartition(" ")[2] for line in run.stdout.splitlines()[:2]] == ["0b57c71", "98fb2ba"]


@pytest.mark.parametrize("there", [False, True])
def test_tables_without_a_file_shows_the_last_run_or_what_is_shipped(monkeypatch, capsys, tmp_path, there):
    last = tmp_path / "latest.json"
    if there:
        named = [point | {"name": str(i)} for i, point in enumerate(TWO)]
        last.write_text(json.dumps({"provenance": PROVENANCE, "method": "", "points": named}))
    monkeypatch.setattr(command, "RESULT", last)
    monkeypatch.setattr(sys, "argv", ["bench", "tables"])
    command.main()
    said = capsys.readouterr()
    assert ("h200_forward.json" in said.err) != there
    shown = json.loads((RESULTS / "h200_forward.json").read_text()) if not there else {"provenance": PROVENANCE}
    assert shown["provenance"]["commit"] in said.out.splitlines()[0]
