"""The list of proofs, and the command that goes through it. No verifier is needed."""

import collections
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from channels import barriers as barriers_module
from gluon_attn.forward.table import BLACKWELL, BLACKWELL_UNLIKE, UNLIKE_ON_BLACKWELL
from proving import __main__ as command
from proving import attention, prove, store
from proving import check as proofs_check
from proving.attention import ARCH, DTYPES, QUICK, Case, catalogue
from proving.launch import TensorMap

ROOT = Path(__file__).parents[2]
RECORD = store.Record(
    name="",
    key="k" * 64,
    source="",
    result="race_free",
    seconds=12.5,
    memory_mib=480,
    verifier="sentryward 0.1.1",
    triton="3.9.0",
    date="2026-11-20",
    launch={"grid_dim": [1, 1, 1]},
    rewrites={},
)


ONE = "d64-bf16-full-1cta"


def test_every_row_of_the_tuning_table_has_its_proofs():
    names = {proof.name for proof in catalogue()}
    rows = [row for row in BLACKWELL if ARCH in row.config.archs]
    assert len(rows) >= 2 * 2 * 2 * 3
    for row in rows:
        for name, dtype in DTYPES.items():
            if dtype.itemsize == row.element_bytes:
                mask = "causal" if row.causal else "full"
                proof = f"d{row.padded_head_dim}-{name}-{mask}-{row.config.num_ctas}cta"
                assert proof in names
                assert name != "bf16" or proof == "d128-bf16-causal-4cta" or f"{proof}-packed" in names


def test_pairs_of_unlike_head_dims_have_proofs():
    names = {proof.name for proof in catalogue()}
    rows = [row for row in BLACKWELL_UNLIKE if ARCH in row.config.archs and row.element_bytes == 2]
    assert {row.head_dims for row in rows} == set(UNLIKE_ON_BLACKWELL)
    for row in rows:
        head_dims, mask = "-".join(map(str, row.head_dims)), "causal" if row.causal else "full"
        if row.config.num_ctas == 1 or row.head_dims == (192, 128):
            assert f"d{head_dims}-bf16-{mask}-{row.config.num_ctas}cta" in names


def test_every_kind_of_feature_has_a_proof():
    kinds = {"window", "narrow-window", "chunk", "narrow-chunk", "odd-chunk", "documents", "mask-mod"}
    kinds |= {"softcap", "alibi", "sinks", "bias", "bias-of-one-row", "packed", "packed-some-empty", "packed-window"}
    assert {f"{ONE}-{kind}" for kind in kinds} <= {proof.name for proof in catalogue()}


def test_the_kernel_that_lists_row_blocks_has_proofs():
    assert {"lists-full", "lists-causal"} <= {proof.name for proof in catalogue()}


def test_names_are_unique():
    counts = collections.Counter(proof.name for proof in catalogue())
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_record_is_of_a_proof():
    assert {path.stem for path in store.RESULTS.glob("*.json")} <= {proof.name for proof in catalogue()}


def test_quick_proofs_are_few_and_of_one_cta():
    quick = [proof.name for proof in catalogue() if proof.quick]
    assert set(quick) == QUICK
    assert 4 <= len(quick) <= 6
    assert all("1cta" in name for name in quick)
    assert any("two-row-blocks" in name for name in quick)


def launch_of(name: str):
    return next(proof for proof in catalogue() if proof.name == name).launch()


@pytest.mark.slow  # it compiles the kernel
def test_one_row_block():
    launch = launch_of("d64-bf16-full-1cta")
    assert (launch.grid, launch.num_ctas) == ((1, 1, 1), 1)
    maps = {arg.name: arg for arg in launch.arguments if isinstance(arg, TensorMap)}
    assert {name: arg.shape for name, arg in maps.items()} == {
        "q_desc": (1, 1, 256, 64),
        "k_desc": (1, 1, 256, 64),
        "v_desc": (1, 1, 256, 64),
        "o_desc": (1, 1, 256, 64),
    }
    assert maps["q_desc"].box == (1, 1, 128, 64)


@pytest.mark.slow
def test_two_row_blocks_are_one_programs():
    launch = launch_of("d64-bf16-causal-1cta-two-row-blocks")
    assert launch.grid == (1, 1, 1)
    assert next(arg.shape for arg in launch.arguments if isinstance(arg, TensorMap)) == (1, 1, 512, 64)


def test_list_names_every_proof(capsys):
    assert command.main(["list"]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert [line.split()[0] for line in printed if line] == [proof.name for proof in catalogue()]


@pytest.fixture
def record(tmp_path, monkeypatch) -> store.Record:
    """The record of one proof, in a folder of its own; it holds."""
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    proof = next(proof for proof in catalogue() if proof.name == ONE)
    record = dataclasses.replace(RECORD, name=ONE, source=proof.source_key())
    store.save(record)
    return record


def check(capsys) -> tuple[int, str]:
    status = command.main(["list", ONE, "--check"])
    return status, capsys.readouterr().out


def test_a_record_that_holds(record, capsys):
    status, printed = check(capsys)
    assert status == 0
    assert "1 of 1 hold" in printed


def change_launch(case: Case) -> Case:
    return dataclasses.replace(case, kv_len=case.kv_len + 1)


def change_config(case: Case) -> Case:
    return dataclasses.replace(case, config=dataclasses.replace(case.config, kv_slots=2))


@pytest.mark.parametrize("change", [change_launch, change_config])
def test_a_record_of_something_else_does_not_hold(record, capsys, monkeypatch, change):
    proof = next(proof for proof in catalogue() if proof.name == ONE)
    case = change(proof.source.__self__)  # type: ignore[attr-defined]  # a bound method
    monkeypatch.setattr(command, "catalogue", lambda: [dataclasses.replace(proof, source=case.source)])
    status, printed = check(capsys)
    assert status == 1
    assert f"does not hold: {ONE}" in printed


def test_a_changed_kernel_has_no_proof(record, capsys, monkeypatch):
    """The source of a function that it calls, deep below, changes: what Triton reads, not the file."""
    function = barriers_module.init_barriers
    monkeypatch.setattr(function, "_src", function.src.replace("count=COUNT", "count=COUNT + 1"))
    monkeypatch.setattr(attention, "front_end", attention.front_end.__wrapped__)  # nothing kept
    status, printed = check(capsys)
    assert status == 1
    assert "its kernel, launch or rewrites changed" in printed


def test_a_comment_changes_nothing(record, capsys, monkeypatch):
    function = barriers_module.init_barriers
    monkeypatch.setattr(function, "_src", function.src.replace("count=COUNT)", "count=COUNT)  # all of them"))
    monkeypatch.setattr(attention, "front_end", attention.front_end.__wrapped__)
    assert check(capsys)[0] == 0


def test_a_changed_rewrite_makes_records_stale(record, capsys, monkeypatch):
    monkeypatch.setattr(prove, "adapter", lambda: "another")
    assert check(capsys)[0] == 1


def test_a_proof_without_a_record_does_not_hold(record, capsys):
    store.drop(ONE)
    status, printed = check(capsys)
    assert status == 1
    assert "no record" in printed


DAMAGES = ["{", "", "[]", '{"name": "another"}', "\xff"]


@pytest.mark.parametrize("text", DAMAGES)
def test_a_damaged_record_does_not_hold(record, text, capsys):
    store.path_of(ONE).write_text(text, encoding="latin-1")
    status, printed = check(capsys)
    assert status == 1
    assert f"does not hold: {ONE} (damaged)" in printed
    assert command.main(["list", ONE]) == 0
    assert "damaged" in capsys.readouterr().out


def test_a_pattern_may_come_after_the_options(record, capsys):
    assert command.main(["list", "--check", ONE]) == 0
    assert "1 of 1 hold" in capsys.readouterr().out


def test_another_verifier_asks_for_new_proofs(record, capsys, monkeypatch):
    monkeypatch.setattr(proofs_check, "version", lambda: "9.9")
    status, printed = check(capsys)
    assert status == 1
    assert "made with sentryward 0.1.1, installed is 9.9" in printed


def test_a_check_needs_no_verifier(record, capsys, monkeypatch):
    monkeypatch.setattr(proofs_check, "version", lambda: None)
    assert check(capsys)[0] == 0


@pytest.mark.slow
def test_records_are_checked_on_all_cores():
    """Some of those that are committed, by the command as it is run; `make check-proofs` looks at all."""
    arguments = [sys.executable, "-m", "proving", "list", "d64-bf16-full-2cta*", "--check"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not hold" not in done.stdout


@pytest.mark.slow  # it compiles the kernel
def test_what_the_compiler_makes_has_the_last_word(record, capsys):
    """The sources changed and the PTX did not, or it did."""
    key = prove.Task.of(next(proof for proof in catalogue() if proof.name == ONE)).key_with("0.1.1")
    store.save(dataclasses.replace(record, source="other", key=key))
    assert check(capsys)[0] == 1
    assert command.main(["list", ONE, "--check", "--compile"]) == 0
    store.save(dataclasses.replace(record, source="other", key="other"))
    assert command.main(["list", ONE, "--check", "--compile"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all", "d96-*"], "pattern: expected a proof's name or a pattern for names, got 'd96-*'"),
        (["one", "d64-*"], "pattern: expected one proof, got"),
    ],
)
def test_what_cannot_be_asked_for(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().out
