"""Pairs of registers of which one half is nothing. No verifier is needed."""

from proving.halves import fill_second_halves
from tests.proving.test_rewrites import HEAD, changed


def test_a_half_that_nobody_has_written_is_filled_if_nobody_reads_it():
    pair = "\tmov.b64 \t%rd5, {%r3, %r4};\n"
    before = HEAD + "\tadd.s32 \t%r3, %r1, 1;\n" + pair + "\tmov.b64 \t{%r6, _}, %rd5;\n"
    after, count = fill_second_halves(before)
    assert (count, changed(before, after)) == (1, [("mov.b64 \t%rd5, {%r3, %r4};", "mov.b64 %rd5, {%r3, %r3};")])
    for kept in (
        before.replace("{%r6, _}", "{_, %r6}"),
        before.replace("{%r6, _}", "{%r6, %r7}"),
        before + "\tadd.s64 \t%rd6, %rd5, 1;\n",
        before + "\tadd.s32 \t%r4, %r1, 2;\n",
    ):
        assert fill_second_halves(kept) == (kept, 0)
