"""The rewrites of PTX: what they change, and what they leave alone because it would not be exact."""

import pytest

from channels import shared_memory
from proving.attention_ptx import choose_divisors, leave_out_early_arrivals, leave_out_floor, line_of
from proving.branches import straighten_branches
from proving.dispatch import name_roles, recompute_captures, store_roles_once
from proving.equivalence import leave_barriers_valid
from proving.loads import spell_out_maxima
from proving.reductions import store_reductions_once
from proving.rewrites import SAFETY, rewritten

HEAD = "\t.reg .b32 \t%r<99>;\n"
BRANCH = """{head}\t@%p7 bra \t$L__BB0_2;
\t.loc\t1 2 3                           // softmax.py:2:3
$L__tmp3:
\tmul.f32 \t%r5, %r4, 0f4B800000;
\tadd.f32 \t%r6, %r5, %r1;
{end}
$L__BB0_2:
\tret;
"""


def changed(before: str, after: str) -> list[tuple[str, str]]:
    """The lines that differ; there must be as many of them as before."""
    pairs = zip(before.split("\n"), after.split("\n"), strict=True)
    return [(a.strip(), b.strip()) for a, b in pairs if a != b]


@pytest.mark.parametrize("end", ["", "\tbra.uni \t$L__BB0_2;"])
def test_branch_over_pure_operations_is_straightened(end):
    before = BRANCH.format(head=HEAD, end=end)
    after, count = straighten_branches(before)
    assert count == 1
    assert changed(before, after) == [
        (".reg .b32 \t%r<99>;", ".reg .b32 \t%r<99>; .reg .b32 %straight<2>;"),
        ("@%p7 bra \t$L__BB0_2;", "// straightened: @%p7 bra \t$L__BB0_2;"),
        # Where the branch is taken, the statement is skipped: then the old value stays.
        (
            "mul.f32 \t%r5, %r4, 0f4B800000;",
            "mul.f32 %straight0, %r4, 0f4B800000; selp.b32 %r5, %r5, %straight0, %p7;",
        ),
        ("add.f32 \t%r6, %r5, %r1;", "add.f32 %straight1, %r5, %r1; selp.b32 %r6, %r6, %straight1, %p7;"),
    ]


def test_negated_branch_keeps_the_old_value_where_the_condition_is_false():
    after, _ = straighten_branches(BRANCH.format(head=HEAD, end="").replace("@%p7", "@!%p7"))
    assert "selp.b32 %r5, %straight0, %r5, %p7;" in after


@pytest.mark.parametrize(
    "statement",
    [
        "\tst.shared.b32 \t[%r5], %r4;",
        "\tld.shared.b32 \t%r5, [%r4];",
        "\tbar.sync \t0;",
        "\t@%p1 add.f32 \t%r5, %r4, %r4;",
        "\tsetp.lt.s32 \t%p7, %r4, %r5;",
        "\tshfl.sync.idx.b32 \t%r5, %r4, 0, 31, -1;",
        "\tadd.s64 \t%rd5, %rd4, %rd4;",
        "\tmbarrier.arrive.shared::cta.b64 _, [%r5];",
        "$L__BB0_9:",
        "\tbra.uni \t$L__BB0_9;",
    ],
)
def test_branch_over_anything_else_stays(statement):
    before = BRANCH.format(head=HEAD, end=statement)
    assert straighten_branches(before) == (before, 0)


def test_branch_backwards_stays():
    before = HEAD + "$L__BB0_2:\n\tadd.s32 \t%r1, %r1, 1;\n\t@%p1 bra \t$L__BB0_2;\n\tmov.b32 \t%r3, 0;\n\tret;\n"
    assert straighten_branches(before) == (before, 0)


# As Triton dispatches: four worker warps, 4 to 7, two roles and then the end.
DISPATCH = """.reqntid 256
{head}\tld.param.b32 \t%r14, [kernel_param_1];
\tmov.u32 \t%r1, %tid.x;
\tmov.b32 \t%r15, global_smem;
\tadd.s32 \t%r20, %r14, 127;
\tadd.s32 \t%r21, %r1, 127;
\tshl.b32 \t%r4, %r1, 5;
\t@!%p2 bra \t$L__BB0_1;
\tst.shared.b32 \t[global_smem+8], 5;
\tbar.sync \t0, 128;
\tst.shared.b32 \t[global_smem+104], 33685760;
{more}
\tbarrier.sync \t1;
\tst.shared.b32 \t[global_smem+96], %r20;
\tbarrier.sync \t1;
\tst.shared.v2.b16 \t[global_smem+104], {{771, 771}};
\tbarrier.sync \t1;
\tret;
$L__BB0_1:
\tbarrier.sync \t1;
\tadd.s32 \t%r20, %r15, %r4;
\t.loc\t1 2 3                           // kernel.py:2:3
\tld.shared.b8 \t%r19, [%r20+100];
\tbrx.idx \t%r19, JTI0_0;
\tbra.uni \t$L__BB0_1;
"""
GUARD = "setp.eq.u32 %first, %thread, 0; @%first st.shared"


def dispatch(more: str = "") -> str:
    # A register of the store is written once in what Triton emits.
    return DISPATCH.format(head=HEAD, more=more).replace("%r20, %r15", "%r30, %r15").replace("[%r20+100]", "[%r30+100]")


def test_roles_are_stored_by_one_thread():
    before = dispatch()
    after, count = store_roles_once(before)
    assert count == 2
    assert [b for _, b in changed(before, after)] == [line.strip() for line in after.split("\n") if GUARD in line]
    # What is before the table, or after the barrier that ends it, is not a table.
    assert "\n\tst.shared.b32 \t[global_smem+8], 5;" in after
    assert "\n\tst.shared.b32 \t[global_smem+96], %r20;" in after


@pytest.mark.parametrize("address", [8, 100, 108])
def test_constants_stored_beside_the_table_are_left_alone(address):
    """Warps 4 to 7 of 8 have the bytes 104 to 107: who stores elsewhere may be a role that thread 0 is not in."""
    assert store_roles_once(dispatch(f"\tbarrier.sync \t1;\n\tst.shared.b32 \t[global_smem+{address}], 7;"))[1] == 2


def test_values_for_the_workers_are_stored_by_one_thread_if_every_thread_has_the_same():
    before = dispatch("\tst.shared.b32 \t[global_smem+64], %r20;")  # from a parameter
    assert store_roles_once(before)[1] == 3
    before = dispatch("\tst.shared.v2.b32 \t[global_smem+64], {%r20, %r14};")
    assert store_roles_once(before)[1] == 3


@pytest.mark.parametrize("register", ["%r21", "%r4", "%r1", "%r55"])
def test_values_that_depend_on_the_thread_are_left_alone(register):
    after, count = store_roles_once(dispatch(f"\tst.shared.b32 \t[global_smem+64], {register};"))
    assert count == 2
    assert f"\n\tst.shared.b32 \t[global_smem+64], {register};" in after


@pytest.mark.parametrize(
    "also",
    [
        "\tmov.b32 \t%r20, 3;",
        "\t@%p1 add.s32 \t%r20, %r14, 1;",
        "\telect.sync \t%r20|%p4, -1;",
        "\tld.shared.v2.b32 \t{%r20, %r22}, [%r15];",
    ],
)
def test_a_register_written_twice_counts_as_different(also):
    assert store_roles_once(dispatch(f"{also}\n\tst.shared.b32 \t[global_smem+64], %r20;"))[1] == 2


def test_without_workers_nothing_is_changed():
    plain = HEAD + "\tst.shared.b32 \t[global_smem+104], 7;\n\tret;\n"
    assert rewritten(plain) == (plain, {rewrite.__name__: 0 for rewrite in SAFETY})
    assert name_roles(plain) == (plain, 0)


def test_workers_are_told_their_roles_by_visit():
    before = dispatch()
    after, count = name_roles(before)
    assert count == 1
    [line] = [line for line in after.split("\n") if "%role_key" in line]
    assert "ld.shared.b8" not in after
    # 33685760 is 0x02020100: warp 4 takes role 0, warp 5 role 1, the others role 2; on the second visit all take 3.
    roles = {64 * 0 + 4: 0, 64 * 0 + 5: 1, 64 * 0 + 6: 2, 64 * 0 + 7: 2} | {64 + warp: 3 for warp in (4, 5, 6, 7)}
    for key, role in roles.items():
        assert f"%role_key, {key}; selp.b32 %r19, {role}, %r19, %role_is;" in line
    assert line.count("selp") == len(roles)
    assert "%tid.x; mov.b32 %visits, 0;" in after
    assert "add.s32 %visits, %visits, 1;" in line


TABLE = "\tst.shared.b32 \t[global_smem+104], 0;\n\tbarrier.sync \t1;\n"


@pytest.mark.parametrize(
    "branch",
    [
        f"\t@%p9 bra \t$L__BB0_8;\n{TABLE}$L__BB0_8:",  # skips a table
        f"$L__BB0_8:\n{TABLE}\t@%p9 bra \t$L__BB0_8;",  # repeats it
    ],
)
def test_roles_are_not_named_if_the_tables_may_come_in_another_order(branch):
    before = dispatch(branch)
    assert name_roles(before) == (before, 0)


WORKER = "\tld.shared.v2.b32 \t{%r40, %r41}, [global_smem+64];\n\tbrx.idx"


def test_a_worker_computes_what_it_is_told():
    before = dispatch("\tst.shared.v2.b32 \t[global_smem+64], {%r20, %r14};").replace("\tbrx.idx", WORKER)
    for ptx in (before, store_roles_once(before)[0]):
        after, count = recompute_captures(ptx)
        assert count == 1
        assert changed(ptx, after)[1:] == [
            (
                "ld.shared.v2.b32 \t{%r40, %r41}, [global_smem+64];",
                "ld.param.b32 %captured0, [kernel_param_1]; add.s32 %captured1, %captured0, 127; "
                "ld.param.b32 %captured2, [kernel_param_1]; mov.b32 %r40, %captured1; mov.b32 %r41, %captured2;",
            )
        ]


@pytest.mark.parametrize("values", ["{%r20, %r21}", "{%r55, %r20}"])
def test_a_worker_reads_what_depends_on_the_thread(values):
    before = dispatch(f"\tst.shared.v2.b32 \t[global_smem+64], {values};").replace("\tbrx.idx", WORKER)
    assert recompute_captures(before) == (before, 0)


def test_a_rewrite_that_moves_lines_is_refused():
    def split(ptx: str) -> tuple[str, int]:
        return ptx.replace(";", ";\n", 1), 1

    with pytest.raises(RuntimeError, match=r"split: expected 2 lines as before, got 3"):
        rewritten("ret;\nret;\n", (split,))


def test_invalidations_are_left_out_and_nothing_else():
    before = (
        "\t@%p1 mbarrier.inval.shared::cta.b64 [%r5];\n\tmbarrier.inval.shared::cta.b64 [%r5];\n"
        "\tmbarrier.init.shared::cta.b64 [%r5], 1;\n\t// mbarrier.inval\n"
    )
    after, count = leave_barriers_valid(before)
    assert count == 2
    assert len(changed(before, after)) == 2
    assert "mbarrier.init" in after


FLOORED = """\tmov.b32 \t%r1, {constant};
\tdiv.full.f32 \t%r2, %r1, %r3;
\tmax.NaN.f32 \t%r4, %r5, %r2;
\tmax.NaN.f32 \t%r6, %r4, %r5;
"""


def test_the_least_maximum_is_left_out_and_nothing_else():
    before = FLOORED.format(constant="0fF1800000")
    after, count = leave_out_floor(before)
    assert count == 1
    assert after == before.replace("max.NaN.f32 \t%r4, %r5, %r2;", "mov.b32 %r4, %r5;")


def test_a_maximum_with_another_constant_is_kept():
    before = FLOORED.format(constant="0fF1000000")
    assert leave_out_floor(before) == (before, 0)


INVERSE = """\tsetp.eq.f32 \t%p1, %r1, 0f00000000;
\tmov.b32 \t%r2, {one};
\tdiv.full.f32 \t%r3, %r2, %r1;
\tselp.f32 \t%r4, {otherwise}, %r3, {condition};
"""
AN_INVERSE = {"one": "0f3F800000", "otherwise": "0f00000000", "condition": "%p1"}


def test_an_inverse_chooses_its_divisor():
    before = INVERSE.format(**AN_INVERSE)
    after, count = choose_divisors(before)
    assert count == 1
    assert [line for _, line in changed(before, after)] == [
        "{ .reg .b32 %divisor; selp.f32 %divisor, 0f3F800000, %r1, %p1; div.full.f32 %r3, %r2, %divisor; }",
        "mov.b32 %r4, %r3;",
    ]


@pytest.mark.parametrize("other", [{"one": "0f40000000"}, {"otherwise": "0f3F800000"}, {"condition": "%p2"}])
def test_what_is_no_inverse_is_kept(other):
    before = INVERSE.format(**AN_INVERSE | other)
    assert choose_divisors(before) == (before, 0)


REDUCTION = """\tmov.u32 \t%r1, %tid.x;
\tmov.b32 \t%r2, global_smem;
\tshr.u32 \t%r3, %r1, {shift};
\tand.b32 \t%r4, %r3, {bits};
\tadd.s32 \t%r5, %r2, %r4;
\tmov.b32 \t%r6, {lanes};
\tredux.sync.max.s32 \t%r7, %r8, %r6;
{more}
\tst.shared.b32 \t[%r5+64], %r7;
"""


def reduction(shift: int = 3, bits: int = 12, lanes: int = -1, more: str = "") -> str:
    return REDUCTION.format(shift=shift, bits=bits, lanes=lanes, more=more)


@pytest.mark.parametrize(("shift", "bits"), [(3, 12), (5, 3), (5, 255), (0, 96)])
def test_what_a_warp_reduced_is_stored_by_its_first_lane(shift, bits):
    before = reduction(shift, bits)
    after, count = store_reductions_once(before)
    assert count == 1
    [(_, line)] = changed(before, after)
    assert "mov.u32 %lane, %laneid; setp.eq.u32 %first, %lane, 0; @%first st.shared.b32" in line


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(reduction(bits=14), id="the address depends on the lane"),
        pytest.param(reduction(shift=4, bits=1), id="the address depends on the lane's highest bit"),
        pytest.param(reduction(lanes=65535), id="half of the lanes reduce"),
        pytest.param(reduction(more="\tadd.s32 \t%r7, %r7, %r1;"), id="the value is changed"),
        pytest.param(reduction(more="\tadd.s32 \t%r5, %r5, %r1;"), id="the address is changed"),
        pytest.param(reduction(more="\tmov.b64 \t{%r7, %r9}, %rd1;"), id="the value is written with another"),
        pytest.param(reduction(more="\t@%p1 bra \t$L__BB0_2;"), id="lanes part"),
        pytest.param(reduction(more="$L__BB0_2:"), id="lanes come together"),
        pytest.param(
            reduction().replace("redux.sync.max.s32 \t%r7, %r8, %r6", "mov.b32 \t%r7, %r1"), id="no reduction"
        ),
        pytest.param(reduction(more="\tmul.f32 %r20, %r1, 2; selp.b32 %r7, %r7, %r20, %p1;"), id="second in its line"),
    ],
)
def test_other_stores_of_a_warp_are_left_alone(before):
    assert store_reductions_once(before) == (before, 0)


LOAD = "\ttcgen05.ld.{red}sync.aligned.32x32b.x2.{kind} {{%r1, %r2}}, {maximum}[%r4 + 0];\n"


def test_a_load_with_a_maximum_becomes_a_load_and_a_maximum():
    before = LOAD.format(red="red.", kind="max.NaN.f32", maximum="{%r3}, ")
    after, count = spell_out_maxima(before)
    assert count == 1
    assert [line for _, line in changed(before, after)] == [
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r4 + 0]; tcgen05.wait::ld.sync.aligned; "
        "mov.b32 %r3, %r1; max.NaN.f32 %r3, %r3, %r2;"
    ]


@pytest.mark.parametrize(
    "before",
    [
        LOAD.format(red="", kind="b32", maximum=""),
        LOAD.format(red="red.", kind="min.f32", maximum="{%r3}, "),
        LOAD.format(red="red.", kind="max.abs.f32", maximum="{%r3}, "),
        LOAD.format(red="red.", kind="max.s32", maximum="{%r3}, "),
    ],
)
def test_other_loads_are_left_alone(before):
    assert spell_out_maxima(before) == (before, 0)


TWO_PAIRS = """\t.loc\t4 {line} 13, function_name $L__info_string0, inlined_at 3 38 9
\t.loc\t3 11 9, function_name $L__info_string0, inlined_at 4 {line} 13
\t@%p1 mbarrier.init.shared::cta.b64 [%r1], 2;
\t.loc\t3 11 9, function_name $L__info_string0, inlined_at 5 {line} 13
\t@%p1 mbarrier.init.shared::cta.b64 [%r2], 2;
\tmov.b16 \t%rs1, {mask};
\t@%p2 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %rs1;
\tmov.b16 \t%rs2, 15;
\t.file\t3 "/somewhere/barriers.py"
\t.file\t4 "/somewhere/shared_memory.py"
\t.file\t5 "/somewhere/tensor_memory.py"
"""
OF_COMMITS = line_of(shared_memory, "init_barriers(self.freed, commit_arrivals(")


def test_the_first_pair_does_not_arrive_in_the_second():
    before = TWO_PAIRS.format(line=OF_COMMITS, mask=15)
    after, count = leave_out_early_arrivals(before)
    assert count == 2
    (init, first), (mask, second) = changed(before, after)
    assert (init, mask) == ("@%p1 mbarrier.init.shared::cta.b64 [%r1], 2;", "mov.b16 \t%rs1, 15;")
    assert "setp.lt.u32 %first, %rank, 2; selp.b32 %count, 2, 1, %first; @%p1 mbarrier.init" in first
    assert first.endswith("[%r1], %count; }")
    assert second.endswith("setp.lt.u32 %first, %rank, 2; selp.b16 %rs1, 3, 15, %first; }")


def test_arrivals_in_the_own_pair_and_other_barriers_are_left_alone():
    before = TWO_PAIRS.format(line=OF_COMMITS + 1, mask=3)
    assert leave_out_early_arrivals(before) == (before, 0)
