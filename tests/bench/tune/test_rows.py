"""Rows of several problems, and what each serves."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from bench.points import sweep
from bench.predict import problem_of
from bench.tune.command import REACH_OF_SWEEP, Batch
from bench.tune.forward import Forward
from bench.tune.gradients import Gradients
from bench.tune.rows import rows_for_all
from bench.tune.sweeps import HEAD_DIMS
from gluon_attn import tuning
from gluon_attn.backward import table as backward_table
from gluon_attn.backward.table import HOPPER, BackwardRow
from gluon_attn.device import Device
from gluon_attn.forward.table import PACKAGED, hopper_config, pick_config, pick_row
from gluon_attn.problem import Problem
from gluon_attn.score_mod import softcap
from gluon_attn.tuning import Measured
from tests.bench.tune.fakes import (
    ASKED,
    BEST,
    BEST_OF_GRADIENTS,
    CHOICES,
    GRADIENTS,
    H200,
    IN_USE,
    OF_GRADIENTS,
    PROVENANCE,
    name_of,
)
from tests.bench.tune.test_card import SCORES
from tests.gluon_attn.problems import problem


def found(asked: Problem, config: Any, device: Device = H200) -> tuple[Any, Any, Measured]:
    choices = Forward(asked, device, PACKAGED)
    chosen, in_use = choices.name(config), choices.name(choices.in_use)
    ms = {chosen: 1.0, in_use: 1.1}
    return choices, config, Measured(shape={}, ms=ms, chosen=chosen, in_use=in_use, gain=0.1, spread=0.01)


def served(rows: Any, asked: Problem) -> Any:
    return pick_config(asked, H200, None, (*(chosen.row for chosen in rows), *PACKAGED))


def test_what_is_written_serves_what_is_like_the_shape(tmp_path):
    rows = rows_for_all([found(ASKED, BEST)], 1.25)
    path = tmp_path / "table.json"
    forward: list[Any] = [chosen.row for chosen in rows]
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, forward, [chosen.measured for chosen in rows])))
    tuning.load(path)
    others: list[dict[str, Any]] = [
        {},
        {"q_len": 3300, "kv_len": 2500},
        {"batch": 2},
        {"kv_len": 4096},
        {"kv_heads": 12},
    ]
    of_others = [dataclasses.replace(ASKED, **unlike) for unlike in others]
    configs = [pick_config(asked, H200, None, tuning.rows_for(H200)) for asked in of_others]
    assert [config == BEST for config in configs] == [True, True, False, False, False]


def test_a_row_for_a_window_serves_what_sees_as_many_keys():
    """Of gradients too. Not the same call without a window, or with another one."""
    asked = dataclasses.replace(ASKED, causal=True, left=511)
    row = Forward(asked, H200, PACKAGED).row(BEST, 1.25)
    of_gradients = Gradients(asked, H200, backward_table.PACKAGED).row(HOPPER[64], 1.25)
    others = {511: True, 600: True, 1023: False, None: False}
    for left, is_served in others.items():
        other = dataclasses.replace(asked, left=left)
        assert row.fits(other, H200, None) == is_served
        assert (of_gradients.unmet_size(other) is None) == is_served


@pytest.mark.parametrize("kind", SCORES)
def test_a_row_for_changed_scores_serves_those_alone(kind, tmp_path):
    """With its config as it was chosen, read from the file too. Without such a row others serve them, as before."""
    asked = dataclasses.replace(ASKED, **SCORES[kind])
    config = hopper_config(2, 64, 1, 2, 232, half_by_polynomial=kind == "softcap")
    row = Forward(asked, H200, PACKAGED).row(config, 1.25)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [row], [None])))
    [of_file] = tuning.read(path).rows
    assert dataclasses.replace(of_file, card=None, date=None) == row
    rows = (of_file, *PACKAGED)
    assert pick_config(asked, H200, None, rows) == config
    others: dict[str | None, dict[str, Any]] = {None: {}} | {**SCORES}
    for other, fields in others.items():
        if other != kind:
            unlike = dataclasses.replace(ASKED, **fields)
            assert pick_config(unlike, H200, None, rows) == pick_config(unlike, H200)
    if kind == "bias":
        return
    of_gradients = Gradients(asked, H200, backward_table.PACKAGED).row(HOPPER[128], 1.25)
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [], [], [of_gradients], [None])))
    [read] = tuning.read(path).backward_rows
    assert read.unmet_size(asked) is None
    assert read.unmet_size(ASKED) == "scores"


@pytest.mark.parametrize(
    "fields", [{"score_mod": softcap(100.0)}, {"score_mod": softcap(30.0), "dtype": torch.float16}], ids=str
)
def test_soft_caps_whose_kernel_needs_maxima_have_rows_of_their_own(fields, tmp_path):
    """In fp16, and beyond the largest cap without: neither row serves what the other is for."""
    with_maxima = dataclasses.replace(ASKED, **fields)
    without = dataclasses.replace(ASKED, **SCORES["softcap"])
    assert (with_maxima.scores, without.scores) == ("softcap with maxima", "softcap")
    config = hopper_config(2, 64, 1, 2, 232)
    levered = dataclasses.replace(config, half_by_polynomial=True)
    rows = [
        Forward(with_maxima, H200, PACKAGED).row(config, 1.25), Forward(without, H200, PACKAGED).row(levered, 1.25)
    ]  # fmt: skip
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, rows, [None, None])))
    for read in (tuning.read(path).rows, tuning.read(path).rows[::-1]):
        assert pick_config(with_maxima, H200, None, (*read, *PACKAGED)) == config
        assert pick_config(without, H200, None, (*read, *PACKAGED)) == levered


@pytest.mark.parametrize("kind", SCORES)
def test_rows_of_other_calls_do_not_hide_those_for_changed_scores(kind):
    """Whichever file was loaded last."""
    asked = dataclasses.replace(ASKED, **SCORES[kind])
    row, plain = Forward(asked, H200, PACKAGED).row(BEST, 1.25), Forward(ASKED, H200, PACKAGED).row(IN_USE, 1.25)
    for rows in ((row, plain, *PACKAGED), (plain, row, *PACKAGED)):
        assert pick_row(asked, H200, None, rows) is row
        assert pick_row(ASKED, H200, None, rows) is plain
    if kind != "bias":
        config = dataclasses.replace(HOPPER[128], query_slots=1, rings_in_step=False)
        of_pass = Gradients(asked, H200, backward_table.PACKAGED)
        ours, theirs = of_pass.row(config, 1.25), Gradients(ASKED, H200, of_pass.rows).row(HOPPER[128], 1.25)
        assert backward_table.pick_row(asked, (theirs, ours, *of_pass.rows)) is ours


def test_a_reach_of_one_is_the_shape_alone():
    row = CHOICES.row(BEST, 1)
    assert (row.min_kv_len, row.max_kv_len, row.q_lens, row.sequence_heads) == (3000, 3000, (3000, 3000), (36, 36))
    assert Forward(problem(q_len=1), H200, PACKAGED).row(BEST, 1.25).q_lens == (1, 1)


def test_a_row_does_not_serve_a_problem_where_it_lost():
    """Nor where the table in use stayed; it still serves what is between."""
    near = dataclasses.replace(ASKED, q_len=3300, kv_len=3300)
    for second, config in ((dataclasses.replace(BEST, turns=False), None), (None, IN_USE)):
        of_near = config or second
        rows = rows_for_all([found(ASKED, BEST), found(near, of_near)], 1.25)
        assert served(rows, ASKED) == BEST
        assert served(rows, near) == of_near
        assert served(rows, dataclasses.replace(ASKED, q_len=3010, kv_len=3010)) == BEST
        [first] = [chosen.row for chosen in rows if chosen.row.config == BEST]
        assert first.max_kv_len is not None
        assert 3000 < first.max_kv_len < 3300


def test_rows_that_agree_reach_as_far_as_they_may():
    near = dataclasses.replace(ASKED, q_len=3300, kv_len=3300)
    rows = rows_for_all([found(ASKED, BEST), found(near, BEST)], 1.25)
    assert [chosen.row.max_kv_len for chosen in rows] == [3750, 4125]


def test_two_problems_that_no_condition_tells_apart_have_no_row():
    """Head dims that are padded to one: one row would serve both."""
    wide = dataclasses.replace(ASKED, head_dim=128, head_dim_v=128)
    assert rows_for_all([found(ASKED, BEST), found(wide, dataclasses.replace(BEST, turns=False))], 1.25) == []


def test_a_row_of_a_table_file_in_use_is_taken_over_where_it_stays():
    """What is written can take that file's place. Where the config would serve without it, there is no row."""
    table = Forward(ASKED, H200, PACKAGED).row(BEST, 1.25)
    choices = Forward(ASKED, H200, (table, *PACKAGED))
    of_gradients = Gradients(GRADIENTS, H200, backward_table.PACKAGED).row(BEST_OF_GRADIENTS, 1.25)
    backward = Gradients(GRADIENTS, H200, (of_gradients, *backward_table.PACKAGED))
    for of_pass, best, row, other in (
        (choices, BEST, table, IN_USE), (backward, BEST_OF_GRADIENTS, of_gradients, HOPPER[128])
    ):  # fmt: skip
        given: Any = of_pass
        name = given.name(best)
        stays = Measured(shape={}, ms={name: 1.0}, chosen=name, in_use=name, gain=0.0, spread=0.01)
        [taken] = rows_for_all([(given, best, stays)], 1.25)
        assert taken.row == row
        assert rows_for_all([(dataclasses.replace(given, beneath=given.rows), best, stays)], 1.25) == []
        assert rows_for_all([(dataclasses.replace(given, rows=given.beneath), other, stays)], 1.25) == []
        [back] = rows_for_all([(given, other, stays)], 1.25)  # the file's row was slower: one in front of it
        assert back.row.config == other


def test_whose_place_a_file_takes(tmp_path, monkeypatch):
    """With shapes that of a file that was loaded, and the package's stay beneath; with a sweep that of one of these."""
    path = tmp_path / "table.json"

    def file_of(config: Any, of_gradients: Any) -> Any:
        row = Forward(ASKED, H200, PACKAGED).row(config, 1.25)
        backward = Gradients(GRADIENTS, H200, backward_table.PACKAGED).row(of_gradients, 1.25)
        path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, [row], [None], [backward], [None])))
        return path

    of_package = dataclasses.replace(BEST, turns=False), dataclasses.replace(HOPPER[128], load_registers=32)
    monkeypatch.setattr(tuning, "OF_CARDS", (tuning.Table(**vars(tuning.read(file_of(*of_package)))),))
    without = {False: of_package, True: (IN_USE, HOPPER[128])}
    with tuning.load(file_of(BEST, BEST_OF_GRADIENTS)):
        for for_package, beneath in without.items():
            choices = Batch((ASKED,), for_package=for_package).choices(ASKED, H200)
            backward = Batch((GRADIENTS,), True, for_package).choices(GRADIENTS, H200)
            assert (choices.in_use, backward.in_use) == (BEST, BEST_OF_GRADIENTS)
            assert (choices.without, backward.without) == beneath


def test_the_rows_of_a_sweep_do_not_overlap():
    """Each point has a config of its own, and is served by that; every length between is by one of its neighbours'."""
    problems = [problem_of(point) for dtype in ("bf16", "e4m3") for point in sweep(dtype, HEAD_DIMS)]
    rows = [Forward(p, H200, PACKAGED).row(BEST, REACH_OF_SWEEP) for p in problems]
    for i, asked in enumerate(problems):
        assert [row.fits(asked, H200, None) for row in rows] == [j == i for j in range(len(problems))]
    causal = [row for row in rows if (row.padded_head_dim, row.causal, row.element_bytes) == (128, True, 2)]
    for row, after in itertools.pairwise(causal):
        assert row.max_kv_len is not None
        assert after.min_kv_len == row.max_kv_len + 1


def test_rows_of_gradients():
    choices = dataclasses.replace(OF_GRADIENTS, problem=GRADIENTS)
    names = name_of(BEST_OF_GRADIENTS), name_of(HOPPER[128])
    measured = Measured(shape={}, ms=dict.fromkeys(names, 1.0), chosen=names[0], in_use=names[1], gain=0.1, spread=0.0)
    longer = dataclasses.replace(choices, problem=dataclasses.replace(GRADIENTS, q_len=3300, kv_len=3300))
    stays = longer, HOPPER[128], dataclasses.replace(measured, chosen=names[1])
    [alone] = rows_for_all([(choices, BEST_OF_GRADIENTS, measured)], 1.25)
    assert alone.row == BackwardRow(
        (128, 128), BEST_OF_GRADIENTS, False, min_kv_len=2400, max_kv_len=3750, q_lens=(2400, 3750),
        sequence_heads=(10, 15), heads_per_kv_head=3,
    )  # fmt: skip
    beside: list[Any] = [chosen.row for chosen in rows_for_all([(choices, BEST_OF_GRADIENTS, measured), stays], 1.25)]
    assert choices.served_by(beside) == BEST_OF_GRADIENTS
    assert longer.served_by(beside) == HOPPER[128]
