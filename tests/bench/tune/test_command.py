"""The command, and what it writes."""

import dataclasses
import json
import math
import os
import re
import signal
import sys
import time
from typing import Any

import pytest
import torch

from bench import __main__ as bench_main
from bench.points import sweep
from bench.tune import command
from bench.tune.command import AGAIN, Batch
from bench.tune.search import Stop
from bench.tune.watch import Watch
from gluon_attn import HopperConfig, tuning
from gluon_attn.backward import table as backward_table
from gluon_attn.explain import DEVICES
from gluon_attn.forward.table import pick_config
from tests.bench.tune.fakes import (
    ASKED,
    BEST,
    BEST_OF_GRADIENTS,
    CHOICES,
    GRADIENTS,
    H200,
    IN_USE,
    PROVENANCE,
    FakeCard,
    Killed,
    name_of,
    tuned,
)


def test_what_is_no_faster_leaves_the_table_as_it_is(tmp_path):
    rows, [found], said = tuned(FakeCard(IN_USE), tmp_path / "p.json")
    assert rows == []
    assert found.measured.gain == 0
    assert said[-2].endswith(f"the table in use stays, with {name_of(IN_USE)}")
    assert said[-1].endswith("geometric mean of 1 shapes: +0.0%")


def test_a_process_that_was_taken_along_is_followed_by_another(capsys):
    """By a signal too, whichever; but not if someone asked it to end."""
    ends, resumed = [AGAIN, -signal.SIGSEGV, -signal.SIGKILL, 0], list[bool]()

    def start(resume: bool) -> int:
        resumed.append(resume)
        return ends[len(resumed) - 1]

    assert command.last_of(start, False) == 0
    assert resumed == [False, True, True, True]
    assert "goes on in another" in capsys.readouterr().err
    for status in (1, -signal.SIGTERM, -signal.SIGINT):
        ends[:] = [status]
        resumed.clear()
        assert command.last_of(start, True) == status
    assert str(command.last_of(lambda resume: AGAIN, False)).endswith("the same command with --resume goes on")


def test_without_time_there_is_no_other_process():
    starts: list[bool] = []

    def start(resume: bool) -> int:
        starts.append(resume)
        return AGAIN

    said = command.last_of(start, False, time.monotonic())
    assert said == "bench tune: its process ended, and no time is left for another; the table file has what was found"
    assert starts == [False]


def test_a_process_of_its_own_gets_what_was_asked_and_says_what_it_lacks(capfd):
    args = command.parser().parse_args(["--shape", "1,2,3,64", "--table", "none.json"])
    assert command.process(args, False, math.inf) == 1
    assert "bench tune: none.json: expected a table file, got none" in capfd.readouterr().err


def test_a_sweep_is_the_points_that_are_compared():
    args = command.parser().parse_args(["--sweep", "bf16", "backward", "bf16", "e4m3"])
    batches = command.batches_of(args)
    assert [batch.of_gradients for batch in batches] == [False, True, False]
    for batch, dtype in zip(batches, ("bf16", "bf16", "e4m3"), strict=True):
        assert [(p.q_len, p.head_dim, p.causal, p.batch) for p in batch.problems] == [
            (p.length, p.head_dim, p.causal, p.batch) for p in sweep(dtype, (64, 128))
        ]
        assert len(batch.problems) == 24


@pytest.fixture
def args(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "provenance", lambda commit: PROVENANCE | {"driver": "1"})

    def parsed(*options: str) -> Any:
        given = [*(options or ["--shape", "1,2,3,64"]), "--out", str(tmp_path / "made" / "table.json")]
        found = command.parser().parse_args([*given, "--generations", "6"])
        found.reach = 1.25
        return found

    return parsed


def test_one_file_has_the_rows_of_all_sets_and_how_they_do_beside_the_peer(args, monkeypatch, capsys):
    card = FakeCard()
    card.peer_s = {ASKED: 2e-3, GRADIENTS: 1e-3}
    given = args("--sweep", "bf16", "backward")
    command.run([Batch((ASKED,)), Batch((GRADIENTS,), of_gradients=True)], H200, card, given, resume=False)
    table = tuning.read(given.out)
    assert [row.config for row in table.rows] == [BEST]
    found = table.provenance
    assert found["command"]["sweep"] == ["bf16", "backward"]
    assert [shape["beside"]["peer"] for shape in found["shapes"]] == [2.0, 1.0]
    assert found["shapes"][0]["beside"]["new"] == 1e3 * card.seconds(BEST)
    assert [shape.get("of_gradients") for shape in found["shapes"]] == [None, True]
    means = found["geometric_means"]
    assert {name: of_set["shapes"] for name, of_set in means.items()} == {"bfloat16": 1, "gradients, bfloat16": 1}
    assert means["bfloat16"]["new_over_in_use"] > 1
    capsys.readouterr()
    run(monkeypatch, "--show", str(given.out))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[2].startswith(f"| bfloat16 D=96 full 3000 | {name_of(BEST)} | +8.")
    assert lines[2].endswith(" | 1.852 | 2.000 | – |")
    assert lines[3].startswith("| gradients, bfloat16 D=96 full 3000 | 64x128 ")
    assert lines[4].startswith("| geometric mean of 1, bfloat16 | | +8.")
    assert lines[5].startswith("| geometric mean of 1, gradients, bfloat16 | | +6.")


def test_a_later_set_has_the_time_that_an_earlier_one_leaves(tmp_path):
    other = Batch((dataclasses.replace(ASKED, causal=True),))
    sets = []
    for limit in (20, 2000):
        _, found, said = tuned(FakeCard(), tmp_path / "p.json", Batch((ASKED,)), other, limit_s=limit)
        sets.append([one.measured.shape["causal"] for one in found])
        assert ("no time for the next set" in said) == (limit == 20)
    assert sets == [[False], [False, True]]


def test_whatever_ends_the_process_the_file_has_what_was_found(args):
    """Of two problems, after the first; and the next process finds the rest."""
    other = dataclasses.replace(ASKED, causal=True)
    best = next(c for c in CHOICES.first() if isinstance(c, HopperConfig) and c.softmax_roles == 2 and c.block_n == 64)
    card, failing = FakeCard(best), pick_config(other, H200)
    card.fails = {"try_out": {name_of(failing): Killed()}}
    given, batches = args(), [Batch((ASKED, other))]
    with pytest.raises(Killed):
        command.run(batches, H200, card, given, resume=False)
    table = tuning.read(given.out)
    assert len(table.rows) == 1
    assert not table.rows[0].causal
    with pytest.raises(Stop, match=r"causal: the config in use fails: the process ended while it ran alone"):
        command.run(batches, H200, FakeCard(best), given, resume=True)
    assert [row.config for row in tuning.read(given.out).rows] == [best]


def test_a_config_in_use_that_fails_is_held_against_no_other(tmp_path):
    card = FakeCard()
    card.fails = {"try_out": {name_of(IN_USE): "dK is off"}}
    with pytest.raises(Stop, match="the config in use fails: dK is off"):
        tuned(card, tmp_path / "p.json", Batch((ASKED,)))
    assert card.tried == [name_of(IN_USE)]


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "tune", *arguments])
    bench_main.main()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "1,2,3"], "expected four numbers from 1 on, as 4,16,4096,128, got '1,2,3'"),
        (["--shape", "1,2,3,64", "--reach", "0.5"], "--reach: expected 1 or more, got 0.5"),
        (["--shape", "1,2,3,64", "--reach", "inf"], "--reach: expected 1048576 or less, which is as good as any size"),
        (["--shape", "1,2,3,64", "--reach", "nan"], "--reach: expected 1 or more, got nan"),
        (["--shape", "1,2,3,64", "--bias", "--dtype", "e4m3"], "bias: not supported with q of torch.float8_e4m3fn"),
        (["--shape", "1,2,3,64", "--generations", "0"], "--generations: expected 1 or more, got 0"),
        (["--shape", "1,2,3,64", "--minutes", "0"], "--minutes: expected 1 or more, got 0"),
        (["--shape", "1,2,3,64", "--backward", "--dtype", "e4m3"], "--backward: expected --dtype fp16 or bf16"),
        (["--shape", "1,2,3,64", "--out", "table"], "--out: expected a file name that ends in .json, got table"),
        (["--shape", "1,2,3,64", "--device", "h100"], "--device: expected with --list only"),
        (["--shape", f"1,2,{10**20},64"], f"q: expected at most 2^60 elements, got shape (1, 2, {10**20}, 64); give"),
        (["--shape", "1,2,3,300"], "q: expected a head_dim that is a multiple of 8 from 8 to 256, got 300"),
        (
            ["--shape", "1,2,3,64", "--table", "none.json"],
            "none.json: expected a table file, got none that can be read",
        ),
        (["--shape", "1,2,3,64", "--first", "0"], "--first: expected 1 or more, got 0"),
        (["--shape", "1,2,3,64", "--sweep", "bf16"], "argument --sweep: not allowed with argument --shape"),
        ([], "the following arguments are required: --shape or --sweep"),
        (["--shape", "1,2,3,64", "--out", str(tuning.TABLES / "x.json")], "--out: expected a file elsewhere than in"),
        (["--show", "none.json"], "none.json: expected a table file, got none that can be read"),
        (["--sweep", "bf16", "--causal"], "--causal: expected none with --sweep, which says what is tuned"),
        (["--sweep", "bf16", "--kv-heads", "2"], "--kv-heads: expected none with --sweep, which says what is tuned"),
        (["--sweep", "bf16", "--softcap", "9"], "--softcap: expected none with --sweep, which says what is tuned"),
        (["--shape", "1,2,3,64", "--softcap", "9", "--bias"], "argument --bias: not allowed with argument --softcap"),
        (["--shape", "1,2,3,64", "--softcap", "0"], "softcap: expected a positive number"),
        (["--shape", "1,2,3,64", "--bias", "--backward"], "--backward: expected none with --bias"),
        (["--sweep", "bf16", "--window", "9,"], "--window: expected none with --sweep, which says what is tuned"),
        (
            ["--shape", "1,2,3,64", "--window", "9"],
            "expected LEFT,RIGHT, as '1023,0', or '1023,' for no limit after",
        ),
        (["--shape", "1,2,3,64", "--chunk", "0"], "chunk: expected at least 1 key, got 0"),
    ],
)
def test_nonsense_is_refused(monkeypatch, capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("from_environment", [False, True], ids=["--table", "GLUON_ATTN_TABLE"])
def test_a_table_in_use_is_not_written_over(monkeypatch, capsys, tmp_path, from_environment):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [], [])))
    monkeypatch.chdir(tmp_path)
    options = ["--shape", "1,2,3,64", "--out", "./mine.json"]
    if from_environment:
        tuning.load(path)
    else:
        options += ["--table", str(path)]
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *options)
    says = "--out: expected another file than a table in use, as --resume compares what that holds, got mine.json;"
    assert says in capsys.readouterr().err
    run(monkeypatch, *options, "--list", "--device", "h200")  # which writes nothing


def test_resuming_asks_for_the_same_tables_and_the_same_changes(args, monkeypatch, tmp_path):
    """And says which differ without what is in them."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [], [])))
    card, given = FakeCard(), args()
    card.calls_left = 1
    with pytest.raises(KeyboardInterrupt):
        command.run([Batch((ASKED,))], H200, card, given, resume=False)
    with tuning.load(path), pytest.raises(Stop, match=r"to have tables_sha256 \['[0-9a-f]{16}'\], got \[\]; leave"):
        command.run([Batch((ASKED,))], H200, FakeCard(), given, resume=True)
    with monkeypatch.context() as patched:
        patched.setattr(command, "provenance", lambda commit: PROVENANCE | {"driver": "1", "changed": ["a.py"]})
        with pytest.raises(Stop, match=r"to have changed \['a\.py'\], got \[\]; leave --resume out"):
            command.run([Batch((ASKED,))], H200, FakeCard(), given, resume=True)
    command.run([Batch((ASKED,))], H200, FakeCard(), given, resume=True)


@pytest.mark.parametrize("given", [{}, {"shapes": 3}, {"shapes": [3]}, {"shapes": [{"shape": {"dtype": "fp16"}}]}])
def test_a_file_that_does_not_say_what_it_was_chosen_from_is_not_shown(monkeypatch, capsys, tmp_path, given):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE | given, [], [])))
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--show", str(path))
    said = capsys.readouterr()
    assert "--show: expected a file with provenance.shapes, as python -m bench tune writes them, got" in said.err
    assert said.out == ""


def test_a_file_for_another_card_is_not_improved_on(monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [], [])))
    options = "--shape", "1,2,3,64", "--list", "--table", str(path)
    says = "--table: expected a table file for NVIDIA H100 .*mine.json, which is for NVIDIA H200 with 132 processors"
    with pytest.raises(SystemExit, match=says):
        run(monkeypatch, *options, "--device", "h100")
    assert tuning.active() == ()
    run(monkeypatch, *options, "--device", "h200")
    assert [table.source for table in tuning.active()] == [str(path)]


@pytest.mark.parametrize(
    ("device", "options", "says"),
    [
        ("h200", "--shape 100000,1000,100000,128", "q: expected fewer than 2.31 row blocks over all heads and batches"),
        ("b200", "--shape 1,2,1000,224 --head-dim-v 72 --bias", "config: none has room for a bias of"),
    ],
)
def test_what_has_no_launch_is_refused(monkeypatch, capsys, device, options, says):
    """Whether its configs are listed or timed."""
    with pytest.raises(SystemExit, match=f"^bench tune: {says}"):
        run(monkeypatch, *options.split(), "--list", "--device", device)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(command, "here", lambda: DEVICES[device])
    with pytest.raises(SystemExit, match=f"^bench tune: {says}"):
        command.run_here(command.parser().parse_args(options.split()), False, math.inf, Watch())


def test_without_a_card_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper or Blackwell card, found no CUDA device; nothing was timed"):
        run(monkeypatch, "--shape", "1,2,3,64")


def test_the_first_configs_are_listed(monkeypatch, capsys):
    run(monkeypatch, "--shape", "3,12,3000,96", "--kv-heads", "4", "--device", "h100", "--list", "--first", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "q (3, 12, 3000, 96), k (3, 4, 3000, 96), bf16, no mask"
    assert re.fullmatch(rf"  in use  {re.escape(name_of(IN_USE))} +predicted for an H200: 0\.\d+ ms", lines[1])
    assert any(line.startswith("  pruned  ") and "which without a mask are alike" in line for line in lines)
    assert [line[2:9].strip() for line in lines[2:5]] == ["", "", "late"]


@pytest.mark.parametrize("arguments", [["--sweep", "bf16", "--list", "--device", "h100"], ["--show"]])
def test_a_reader_that_has_enough_ends_it_quietly(monkeypatch, arguments):
    monkeypatch.setattr(command, "table", lambda provenance: ["a line"] * 9000)
    shown = [str(path) for path in tuning.TABLES.glob("h100_bf16.json")] * (arguments == ["--show"])
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        run(monkeypatch, *arguments, *shown)


@pytest.mark.parametrize("name", ["d256", "backward"])
def test_a_sweep_that_a_card_has_no_kernels_for_is_refused_at_once(monkeypatch, capsys, name):
    with pytest.raises(SystemExit, match="bench tune: "):
        run(monkeypatch, "--sweep", "bf16", name, "--list", "--device", "b200")
    assert capsys.readouterr().out == ""


def test_the_first_configs_of_gradients_are_listed(monkeypatch, capsys):
    run(monkeypatch, "--shape", "4,16,4096,128", "--device", "h100", "--list", "--backward")
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"  in use  {re.escape(name_of(backward_table.HOPPER[128]))} +predicted for an H200: [12]\.\d+ ms", lines[1]
    )
    assert "pruned  128x128 q1do1ds1 r24: needs 288 registers" in lines[-2]
    with pytest.raises(SystemExit, match="--backward: expected a Hopper card"):
        run(monkeypatch, "--shape", "4,16,4096,128", "--device", "b200", "--list", "--backward")


@pytest.mark.parametrize(
    "options",
    [
        ["--causal"],
        ["--dtype", "e4m3"],
        ["--causal", "--backward"],
        ["--dtype", "fp16"],
        ["--window", "1023,0"],
        ["--softcap", "30", "--backward"],
        ["--kv-length", "8192", "--backward"],
        ["--device", "b200"],
    ],
    ids=" ".join,
)
def test_what_is_predicted_is_listed_where_it_was_judged(monkeypatch, capsys, options):
    """Of every config that can be timed, or of none."""
    judged = ["--causal"], ["--dtype", "e4m3"], ["--causal", "--backward"]
    run(monkeypatch, "--shape", "4,16,4096,128", "--device", "h100", "--list", *options)
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    for line in lines:
        assert ("predicted" in line) == (options in judged and not line.startswith("  pruned"))


def test_a_run_for_gradients_writes_rows_of_theirs(args):
    given = args("--shape", "1,2,3,64", "--backward")
    batch = Batch((GRADIENTS,), of_gradients=True)
    command.run([batch], H200, FakeCard(BEST_OF_GRADIENTS), given, resume=False)
    table = tuning.read(given.out)
    assert table.rows == ()
    assert [row.config for row in table.backward_rows] == [BEST_OF_GRADIENTS]
    assert table.provenance["command"]["backward"] is True


def test_a_whole_run_writes_a_table_file_that_loads(args, capsys):
    given = args()
    other = dataclasses.replace(ASKED, causal=True)
    for best, configs in ((BEST, [BEST]), (IN_USE, [])):
        command.run([Batch((ASKED,))], H200, FakeCard(best), given, resume=False)
        table = tuning.read(given.out)
        assert [row.config for row in table.rows] == configs
        assert table.provenance["command"]["reach"] == 1.25
        [shape] = table.provenance["shapes"]
        assert shape["chosen"] == name_of(best)
        assert set(shape["ms"]) == {name_of(best), name_of(IN_USE)}
        assert [p.name for p in given.out.parent.iterdir()] == ["table.json"]
        assert f"written: {given.out}, {len(configs)} rows" in capsys.readouterr().out
    card = FakeCard()
    card.fails = {"try_out": {name_of(pick_config(other, H200)): "O is off by 1"}}
    with pytest.raises(Stop, match="the config in use fails"):
        command.run([Batch((other, ASKED))], H200, card, given, resume=False)
    assert [row.config for row in tuning.read(given.out).rows] == [BEST]  # of the second shape, though the first failed
