"""`python -m gluon_attn explain`: what it says of a problem, and what it refuses."""

import dataclasses
import json
import re
import sys

import pytest
import torch

from bench import passes
from gluon_attn import __main__ as command
from gluon_attn import explain, explain_times, tuning
from gluon_attn.backward import table as backward
from gluon_attn.backward.configs import label as backward_label
from gluon_attn.backward.table import HOPPER, BackwardRow
from gluon_attn.device import Device
from gluon_attn.explain import problem_of
from gluon_attn.forward.configs import label
from gluon_attn.forward.table import PACKAGED, Row, hopper_config, pick_config
from gluon_attn.score_mod import softcap
from tests.gluon_attn.problems import problem

pytestmark = pytest.mark.usefixtures("packaged_alone")

H200 = Device.hopper()
PROVENANCE = {"date": "2026-11-25", "commit": "abc", "card": "NVIDIA H200", "torch": "2.11", "triton": "3.9.0"}
CONFIG = hopper_config(2, 64, 1, 3, 232, turns=True)


def said(*arguments: str) -> str:
    """By the command, for an H200."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "say", lines.append)
        patch.setattr(sys, "argv", ["gluon_attn", "explain", "--device", "h200", *arguments])
        command.main()
    return "\n".join(lines)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"q_len": 4096, "kv_len": 4096}, {"batch": 1, "heads": 2, "kv_heads": 2}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_row_that_is_named_is_the_one_that_serves(causal, sizes, dtype):
    asked = dataclasses.replace(problem(causal=causal, dtype=dtype), **sizes)
    lines = list(explain.explained(asked, H200, None, explain.RESULTS))
    [served] = [line for line in lines if line.startswith("served by row ")]
    row = PACKAGED[int(served.split()[3])]
    assert row.config == pick_config(asked, H200)
    assert served.endswith(label(row.config))


def test_every_row_that_is_passed_over_has_its_reason():
    """And those are the rows of the kind that come before."""
    asked = problem(causal=True, head_dim=64, q_len=512, kv_len=512, batch=16)
    lines = list(explain.explained(asked, H200, None, explain.RESULTS))
    passed = lines[lines.index("asked before it, and passed over") + 1 :]
    passed = passed[: passed.index("")]
    kind = [row for row in PACKAGED if row.is_of_kind(asked, H200)]
    served = next(i for i, row in enumerate(kind) if row.config == pick_config(asked, H200))
    assert len(passed) == served > 2
    assert passed[0].endswith("for little work only, and here 132 programs have 1024 items")
    assert passed[1].endswith("for windows and chunks alone")
    assert passed[3].endswith("from 12288 keys on, a query sees 512")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row(128, False, CONFIG, max_kv_len=512), "up to 512 keys, a query sees 1024"),
        (Row(128, False, CONFIG, min_reuse=2048), "from 2048 queries to a KV head on, there are 1024"),
        (Row(128, False, CONFIG, q_lens=(1, 9)), "for 1 to 9 queries, there are 1024"),
        (Row(128, False, CONFIG, sequence_heads=(1, 9)), "for 1 to 9 heads times batch, there are 32"),
        (Row(128, False, CONFIG, heads_per_kv_head=2), "for 2 query heads to a KV head, there are 1"),
        (Row(128, False, dataclasses.replace(CONFIG, kv_slots=40)), "of shared memory, there are 232448"),
        (
            Row(128, False, dataclasses.replace(CONFIG, cga_layout=((1, 0),))),
            "has 2 CTAs to a cluster, asked for are 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_reason(row, says):
    assert explain.why_not(row, problem(), H200, 1).endswith(says)


def test_the_launch_is_that_of_the_plan():
    text = said("--shape", "4,16,4096,128", "--causal")
    assert "launch: 132 programs of 1 CTA, for 1024 items, 7.76 each" in text
    assert "an item is two row blocks, a heavy one with a light one, of 128 queries; key blocks of 128" in text
    assert "shared memory: at most 230400 bytes to a CTA" in text
    assert "registers: 232 a thread of 2 softmax warpgroups, 32 that loads; 63488 of 65536" in text


def test_a_window_is_asked_for_by_the_keys_that_a_query_sees():
    shape = ("--shape", "2,32,8192,64", "--kv-heads", "4")
    text = said(*shape, "--window", "1023,0")
    assert text.startswith("q (2, 32, 8192, 64), k (2, 4, 8192, 64), bf16, causal, 1023 keys before, on NVIDIA H200")
    assert "a query sees 1024" in text
    assert "causal, on" in said(*shape, "--window", ",0")
    assert "no mask" in said(*shape)
    assert ", plain" in said(*shape, "--window", "2047,0")
    assert "causal, on" in said(*shape, "--window", "99999,0")
    assert ", plain" not in said(*shape, "--window", "99999,0")
    assert "causal, chunks of 2048, on" in said(*shape, "--chunk", "2048", "--causal")
    assert "5 keys after" in said(*shape, "--window", ",5")


def test_changed_scores_are_asked_for(tmp_path):
    """What is launched is what a call has; a row for them serves them alone."""
    shape = ("--shape", "2,16,1024,64")
    text = said(*shape, "--softcap", "30")
    assert text.startswith("q (2, 16, 1024, 64), k (2, 16, 1024, 64), bf16, no mask, softcap 30, on NVIDIA H200")
    config = pick_config(dataclasses.replace(problem(), head_dim=64, head_dim_v=64, score_mod=softcap(30.0)), H200)
    assert label(config) in text
    assert ", made of the row's " in text
    path = tmp_path / "mine.json"
    row = Row(64, False, CONFIG, scores="softcap")
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [row], [None])))
    assert "scores with softcap: it has softcap" in said(*shape, "--softcap", "30", "--table", str(path))
    tuning.reset()
    for option, has in {"--alibi": "alibi", "--bias": "bias", "--causal": "none of these"}.items():
        text = said(*shape, option, "--table", str(path))
        assert (f"for scores with softcap, here is {has}" in text) == (option != "--causal")
        tuning.reset()


def test_what_a_bias_is_served_by():
    """The configs that are launched, which have room for it, with the row that was asked."""
    shape = ("--shape", "2,16,1024,64", "--bias")
    text = said(*shape, "--backward")
    config = backward.pick_config(problem_of((2, 16, 1024, 64), explain.parser().parse_args(shape)))
    assert f": {backward_label(config)}, made of the row's {backward_label(HOPPER[64])}" in text
    text = said(*shape, "--causal")
    assert "no program with more than one item" not in text
    with pytest.raises(SystemExit):
        said("--shape", "2,16,1,64", "--bias")


@pytest.mark.parametrize("options", [[], ["--backward"]], ids=["O", "gradients"])
def test_shared_memory_has_room_for_a_bias(options):
    shape = (1, 4, 512, 128)
    text = said("--shape", ",".join(map(str, shape)), "--bias", *options)
    asked = problem_of(shape, explain.parser().parse_args(["--shape", "1,1,1,8", "--bias"]))
    assert asked.bias is not None
    if options:
        gradients = backward.pick_config(asked)
        expected = gradients.smem_bytes(128, 128, asked.bias)
        assert expected > gradients.smem_bytes(128, 128)
    else:
        config = pick_config(asked, H200)
        expected = config.smem_bytes(128, 2) + config.bias_bytes(asked.bias)
    assert f"shared memory: at most {expected} bytes to a CTA" in text


def test_what_transposes_v_is_said():
    assert "before it, 128 programs transpose V" in said("--shape", "1,16,1024,128", "--dtype", "e4m3")


@pytest.fixture
def results(tmp_path):
    """A folder with a result file in which the config of the table, and two others, were timed."""
    chosen = label(pick_config(problem(), H200))
    points = [
        {
            "name": f"at {length}",
            "point": {"dtype": "bf16", "head_dim": 128, "causal": False, "length": length, "batch": 2, "heads": 16},
            "results": {"slow": {"ms": 3.0}, chosen: {"ms": 2.0 + length}, "cudnn": {"ms": 2.5}},
        }
        for length in (512, 900, 4096)
    ]
    (tmp_path / "h200_candidates.json").write_text(json.dumps({"points": points}))
    return tmp_path


def test_alternatives_are_those_of_the_nearest_point(results):
    text = "\n".join(explain.explained(problem(), H200, None, results))
    assert "at the nearest point, at 900, batch 2, 16 heads" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["cudnn", "slow", "*"]
    assert text.endswith("902.0000 ms 360.80 x")


def test_a_window_is_near_what_sees_as_many_keys(results):
    """And the point is said to be plain."""
    text = "\n".join(explain.explained(problem(causal=False, left=599, right=0), H200, None, results))
    assert "no point of bench/results/" in text  # these points have no mask
    text = "\n".join(
        explain.explained(dataclasses.replace(problem(), q_len=4096, kv_len=4096, chunk=900), H200, None, results)
    )
    assert "at the nearest point, at 900, batch 2, 16 heads, plain" in text


def test_a_row_of_windows_shows_the_search_that_chose_it():
    text = said("--shape", "1,16,16384,128", "--causal", "--window", "127,0")
    assert "measured on an NVIDIA H100 80GB HBM3, 2026-11-26 (bench/results/h100_tune_features.json)" in text
    assert "left 127" in text
    [own] = [line.split() for line in text.splitlines() if line.startswith("  * ")]
    assert own[1:4] == ["1x64", "q2kv3e1", "1cta"]
    assert own[-1] == "x"
    assert float(own[-2]) <= 1.01


def test_without_a_checkout(tmp_path):
    text = "\n".join(explain.explained(problem(), H200, None, tmp_path))
    assert text.endswith("which a checkout has and an installed package has not")


def test_a_row_that_waits_for_its_measurement():
    text = said("--shape", "1,8,1024,192", "--head-dim-v", "64")
    assert "of the packaged table (not measured)" in text
    assert "measured: nothing, this row waits for its measurement" in text


def test_a_row_of_a_table_file(tmp_path):
    path = tmp_path / "mine.json"
    row = Row(128, False, CONFIG, q_lens=(512, 2048), min_kv_len=512)
    found = tuning.Measured(shape={"batch": 2}, ms={"a": 2, "b": 3}, chosen="a", in_use="b", gain=0.5, spread=0.01)
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [row], [found])))
    text = said("--shape", "2,16,1024,128", "--table", str(path))
    assert f"served by row 0 of {path}: {label(CONFIG)}" in text
    assert "512 to 2048 queries: it has 1024" in text
    assert "2026-11-25: +50.0% ±1.0% over b" in text
    tuning.reset()
    stays = dataclasses.replace(found, chosen="b", gain=0.0)
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [row], [stays])))
    text = said("--shape", "2,16,1024,128", "--table", str(path))
    assert "2026-11-25: it was in use already, and nothing that was timed was faster" in text
    assert explain_times.CONFIRMED not in text
    tuning.reset()
    path.write_text(
        json.dumps(tuning.as_json([H200], PROVENANCE, [row], [dataclasses.replace(found, chosen="b", in_use="a")]))
    )
    text = said("--shape", "2,16,1024,128", "--table", str(path))
    assert text.rstrip().endswith(explain_times.CONFIRMED)
    tuning.reset()
    text = said("--shape", "2,16,4096,128", "--table", str(path))
    assert f"{label(CONFIG)} (row 0 of {path}): for 512 to 2048 queries, there are 4096" in text


@pytest.mark.parametrize("backward", [[], ["--backward"]], ids=["O", "gradients"])
def test_a_file_that_is_not_asked_is_said_to_be_none(tmp_path, backward):
    path = tmp_path / "mine.json"
    options = "--shape", "2,16,1024,128", "--table", str(path), *backward
    row, of_gradients = Row(128, True, CONFIG), BackwardRow((128, 128), HOPPER[128], True)
    for name, reason in (
        ("NVIDIA X1", "is for NVIDIA X1 with 132 processors, and this is an NVIDIA H200 with 132 processors"),
        (H200.name, "has no row for such a head dim, mask and dtype"),
    ):
        card = dataclasses.replace(H200, name=name)
        path.write_text(json.dumps(tuning.as_json([card], PROVENANCE, [row], [None], [of_gradients], [None])))
        assert f"not asked: {path}, which {reason}" in said(*options).splitlines()
        tuning.reset()
    assert "not asked" not in said(*options, "--causal")


def test_a_row_of_a_table_file_of_the_package(tmp_path, monkeypatch):
    path = tmp_path / "x1.json"
    card = dataclasses.replace(H200, name="NVIDIA X1 80GB")
    row = Row(128, False, CONFIG)
    path.write_text(json.dumps(tuning.as_json([card], PROVENANCE | {"card": card.name}, [row], [None])))
    monkeypatch.setattr(tuning, "OF_CARDS", (tuning.Table(**vars(tuning.read(path))),))
    for name, says in ((card.name, "x1.json: "), ("NVIDIA X1 PCIe", "x1.json (measured on an NVIDIA X1 80GB): ")):
        lines = explain.explained(problem(), dataclasses.replace(card, name=name), None, explain.RESULTS)
        assert f"{says}{label(CONFIG)}" in "\n".join(lines)


def test_gradients_and_which_row_serves_them(results):
    text = said("--shape", "4,16,4096,128", "--causal", "--backward")
    assert text.startswith("gradients of q (4, 16, 4096, 128)")
    assert (
        "served by row 2 of the packaged table (measured on an NVIDIA H200, 2026-11-28): 64x128 q2do2ds1dq2 r24" in text
    )
    assert "launch: 132 programs, for 2048 key blocks of 128" in text
    assert "an item is two key blocks, one that many queries see with one that few; it walks row blocks of 64" in text
    assert "at the nearest point, D=128 causal 4096, batch 4, 16 heads" in text
    lines = text.splitlines()
    own, *others = lines[lines.index("  at the nearest point, D=128 causal 4096, batch 4, 16 heads") + 1 :][:4]
    assert re.fullmatch(r"  \* ours +[\d.]+ ms +1\.00 x  \(with this row\)", own)
    assert [(line.split()[0], line.partition(" x  ")[2]) for line in others] == [
        ("ours,", "(ours in another mode)"), ("cudnn", "(a peer)"), ("fa2,", "(a peer)")
    ]  # fmt: skip
    # In that file no config was timed but the row's. The other one has some, and in a fixed order too.
    heading = lines.index(
        "measured on an NVIDIA H200, 2026-11-27, commit 49a919d (bench/results/h200_gradients_dq_slots.json)"
    )
    assert lines[heading + 1] == "  at the nearest point, D=128 causal 1024, batch 16, 16 heads"
    timed = dict(re.findall(r"^  [ *] (\d\S+ .*?) +([\d.]+) ms", "\n".join(lines[heading:]), re.MULTILINE))
    points = json.loads((explain.RESULTS / "h200_gradients_dq_slots.json").read_text(encoding="utf-8"))["points"]
    (point,) = (p for p in points if p["name"] == "D=128 causal 1024" and not p["in_order"])
    assert {name: float(ms) for name, ms in timed.items()} == {
        name: pytest.approx(found["ms"], abs=1e-4) for name, found in point["results"].items()
    }
    assert [line.split()[1] for line in lines[heading:] if "*" in line] == ["64x128"]
    text = said("--shape", "1,4,16384,128", "--kv-length", "100", "--backward")
    assert "the last 4 key blocks are divided into 132 parts" in text
    # Its file has both passes, of the same name.
    unlike = said("--shape", "1,16,8192,192", "--head-dim-v", "128", "--causal", "--backward")
    assert "row 4 of the packaged table (measured on an NVIDIA H200, 2026-11-28)" in unlike
    assert passes.ANCHOR_NAME not in unlike  # which is of another problem
    assert re.findall(r"^  [ *] (\D+?)  +[\d.]+ ms", unlike, re.MULTILINE) == ["cudnn", "ours", "ours, one launch"]
    (ms,) = re.findall(r"\* ours +([\d.]+) ms", unlike)
    points = json.loads((explain.RESULTS / "h200_unlike.json").read_text(encoding="utf-8"))["points"]
    (point,) = (p for p in points if p["pass"] == "backward" and p["point"]["causal"])
    assert float(ms) == pytest.approx(point["results"]["ours"]["ms"], abs=1e-4)


def test_a_row_of_a_table_file_for_gradients(tmp_path):
    path = tmp_path / "mine.json"
    config = dataclasses.replace(HOPPER[128], query_slots=3)
    row = BackwardRow((128, 128), config, False, q_lens=(512, 2048))
    found = tuning.Measured(shape={"batch": 2}, ms={"a": 2, "b": 3}, chosen="a", in_use="b", gain=0.5, spread=0.01)
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [], [], [row], [found])))
    text = said("--shape", "2,16,1024,128", "--table", str(path), "--backward")
    assert f"served by row 0 of {path}: 64x128 q3do2ds1dq2 r24" in text
    assert "  no mask\n  512 to 2048 queries: it has 1024" in text
    assert "2026-11-25: +50.0% ±1.0% over b" in text
    tuning.reset()
    text = said("--shape", "2,16,4096,128", "--table", str(path), "--backward")
    assert f"64x128 q3do2ds1dq2 r24 (row 0 of {path}): for 512 to 2048 queries, there are 4096" in text
    assert "served by row 2 of the packaged table" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "1,8,64,64", "--backward", "--dtype", "e4m3"], "expected --dtype fp16 or bf16, as fp8 has no"),
        (["--shape", "1,8,64,64", "--backward", "--num-ctas", "1"], "--num-ctas: expected none with --backward"),
        (["--shape", "1,8,64,64", "--backward", "--device", "b200"], "--backward: expected a Hopper card"),
        (["--shape", "1,8,1024"], "expected four numbers from 1 on, as 4,16,4096,128, got '1,8,1024'"),
        (["--shape", "1,8,0,64"], "expected four numbers from 1 on"),
        (["--shape", "1,8,64,260"], "q: expected a head_dim that is a multiple of 8 from 8 to 256, got 260"),
        (["--shape", "1,8,64,64", "--kv-heads", "3"], "q: expected a number of heads that is a multiple of the 3 KV"),
        (["--shape", "1,8,64,64", "--kv-length", "0"], "--kv-length: expected 1 or more, got 0"),
        (["--shape", f"1,8,{10**20},64"], f"q: expected at most 2^60 elements, got shape (1, 8, {10**20}, 64); give"),
        (["--shape", f"{10**6},{10**6},{10**6},64"], "q: expected at most 2^60 elements"),
        (["--shape", "1,8,64,64", "--kv-length", f"{10**20}"], "k: expected at most 2^60 elements"),
        (["--shape", "1,8,64,64", "--head-dim-v", f"{10**20}"], "v: expected at most 2^60 elements"),
        (["--shape", "1,8,4000000000,64", "--bias"], "bias: expected at most 2^60 elements"),
        (["--shape", f"1,{10**15},1,64", "--alibi"], "q: expected fewer than 2^31 row blocks"),
        (["--shape", "1,8,64,64", "--num-ctas", "3"], "num_ctas: expected one of (1, 2) or None for NVIDIA H200"),
        (["--shape", "1,8,64,256", "--device", "b200"], "head_dim 256 on a Blackwell card is not supported"),
        (
            ["--shape", "1,8,64,64", "--table", "none.json"],
            "none.json: expected a table file, got none that can be read",
        ),
        ([], "the following arguments are required: --shape"),
    ],
)
def test_nonsense_is_refused(capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        said(*arguments)
    assert says in capsys.readouterr().err


def test_without_a_card_a_device_has_to_be_named(monkeypatch, capsys):
    monkeypatch.setattr(explain, "card", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        explain.main(["--shape", "1,8,64,64"])
    assert "--device: expected one of h200, h100, b200, b300, as there is no card" in capsys.readouterr().err


def test_a_compiled_kernel():
    text = said("--shape", "1,16,512,64", "--compile")
    assert "spills: 0 in the loops over blocks" in text


def test_a_point_beyond_the_row_is_said_to_be():
    """Of one query little was timed: at the nearest point there is work for many rounds, where that row is slow."""
    text = said("--shape", "1,32,1,128", "--kv-length", "8192", "--dtype", "fp16", "--device", "h200")
    assert "row blocks of 64 rows end soonest" in text
    assert "at the nearest point, D=128 full 8192, batch 2, 16 heads, which is beyond the row\n" in text
    for shape in ("4,16,4096,128", "1,16,1300,128"):
        for options in ((), ("--causal",), ("--backward",)):
            text = said("--shape", shape, "--device", "h200", *options)
            at = next(line for line in text.splitlines() if "at the nearest point" in line)
            # a row from 1280 keys on: the nearest point has 1024
            assert at.endswith("beyond the row") == (shape == "1,16,1300,128" and options == ("--causal",)), at
