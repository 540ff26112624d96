"""The list of proofs, and the command that goes through it. No verifier is needed."""

import collections

import pytest

from gluon_attn.forward.table import BLACKWELL
from proving import __main__ as command
from proving import store
from proving.attention import ARCH, DTYPES, QUICK, catalogue
from proving.launch import TensorMap


def test_every_row_of_the_tuning_table_has_its_proofs():
    names = {proof.name for proof in catalogue()}
    rows = [row for row in BLACKWELL if ARCH in row.tile.archs]
    assert len(rows) >= 2 * 2 * 2 * 3
    for row in rows:
        for name, dtype in DTYPES.items():
            if dtype.itemsize == row.element_bytes:
                mask = "causal" if row.causal else "full"
                assert f"d{row.padded_head_dim}-{name}-{mask}-{row.tile.num_ctas}cta" in names


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
    assert any("two-tiles" in name for name in quick)


def launch_of(name: str):
    return next(proof for proof in catalogue() if proof.name == name).launch()


@pytest.mark.slow  # it compiles the kernel
def test_one_tile():
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
def test_two_tiles_are_one_programs():
    launch = launch_of("d64-bf16-causal-1cta-two-tiles")
    assert launch.grid == (1, 1, 1)
    assert next(arg.shape for arg in launch.arguments if isinstance(arg, TensorMap)) == (1, 1, 512, 64)


def test_list_names_every_proof(capsys):
    assert command.main(["list"]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert [line.split()[0] for line in printed if line] == [proof.name for proof in catalogue()]


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
