"""The records of proofs: one for each kernel and launch, good as long as neither changes. No verifier is needed."""

import dataclasses

import pytest

from proving import store
from proving.ptx import fingerprint, source_line

PTX = """	.loc	1 45 9                          // softmax.py:45:9
$L__tmp3:
	bar.sync 	0;                         // all
	ret;
}
	.file	1 "/somewhere/softmax.py"
"""
RECORD = store.Record(
    name="d64",
    key="k" * 64,
    source="s" * 64,
    result="race_free",
    seconds=12.5,
    memory_mib=480,
    verifier="sentryward 0.1.1",
    triton="3.9.0",
    date="2026-11-20",
    launch={"grid_dim": [1, 1, 1]},
    rewrites={"straighten_branches": 2},
)


def test_a_record_is_kept(tmp_path):
    assert store.load("d64", tmp_path) is None
    store.save(RECORD, tmp_path)
    assert store.load("d64", tmp_path) == RECORD
    store.drop("d64", tmp_path)
    store.drop("d64", tmp_path)
    assert store.load("d64", tmp_path) is None


def test_a_record_is_found_by_its_key(tmp_path):
    store.save(dataclasses.replace(RECORD, name="a", same_as="d64"), tmp_path)
    store.save(RECORD, tmp_path)
    store.save(dataclasses.replace(RECORD, name="e64", key="x"), tmp_path)
    assert store.find(RECORD.key, tmp_path) == RECORD
    assert store.find("y", tmp_path) is None


def test_a_damaged_record_is_said_and_left_out_of_a_search(tmp_path):
    store.path_of("a", tmp_path).write_text("{", encoding="utf-8")
    with pytest.raises(store.Damaged, match="expected the record of a proof"):
        store.load("a", tmp_path)
    store.save(RECORD, tmp_path)
    assert store.find(RECORD.key, tmp_path) == RECORD


def test_a_record_under_another_name_is_damaged(tmp_path):
    store.save(RECORD, tmp_path)
    store.path_of(RECORD.name, tmp_path).rename(store.path_of("e64", tmp_path))
    with pytest.raises(store.Damaged, match="expected the record of e64, got that of d64"):
        store.load("e64", tmp_path)


def test_a_committed_record_is_a_proof():
    records = [store.load(path.stem) for path in store.RESULTS.glob("*.json")]
    assert records
    assert all(record and record.result in ("race_free", "verified") for record in records)


@pytest.mark.parametrize(
    "other",
    [
        PTX.replace("45", "46"),
        PTX.replace("/somewhere", "/else"),
        PTX.replace("// all", ""),
        PTX.replace("tmp3", "tmp4"),
    ],
)
def test_the_fingerprint_is_of_the_code_alone(other):
    assert other != PTX
    assert fingerprint(other) == fingerprint(PTX)


@pytest.mark.parametrize("other", [PTX.replace("0;", "1;"), PTX.replace("\tret;\n", "")])
def test_the_fingerprint_sees_every_change_of_the_code(other):
    assert fingerprint(other) != fingerprint(PTX)


def test_the_key_is_of_all_that_a_proof_depends_on():
    keys = {
        store.key_of(ptx, inputs, verifier)
        for ptx in (PTX, PTX.replace("0;", "1;"))
        for inputs in (({"grid": 1}, None), ({"grid": 2}, None), ({"grid": 1}, "def reference"))
        for verifier in ("0.1.1", "0.1.2")
    }
    assert len(keys) == 12


def test_a_line_of_the_ptx_leads_to_the_source():
    assert source_line(PTX, 3) == "softmax.py:45"
    assert source_line("ret;\n", 1) is None
