"""Each kind of finding: a kernel with the bug is caught, with both lines named; its right twin stays silent."""

import pytest

import gluon_cpu
from tests.gluon_cpu import findings_copies as copies
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.findings_cases import CASES, Case, ints, markers, out_boxes

SEEDS = (0, 1, 2)


def check_message(case: Case, finding: gluon_cpu.Finding) -> None:
    message = str(finding)
    assert isinstance(finding, case.finding), f"{type(finding).__name__}: {message}"
    for marker in case.lines:
        assert markers()[marker] in message, f"{marker} ({markers()[marker]}) is not named in:\n{message}"
    for word in case.words:
        assert word in message, f"{word!r} is not in:\n{message}"
    assert finding.schedule is not None


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
@pytest.mark.parametrize("case", [c for c in CASES.values() if c.always], ids=[n for n, c in CASES.items() if c.always])
def test_caught_under_every_schedule(case, policy):
    for seed in SEEDS:
        with pytest.raises(gluon_cpu.Finding) as caught:
            case.launch(gluon_cpu.Schedule(policy, seed=seed), case.bug)
        check_message(case, caught.value)
    with pytest.raises(type(caught.value)) as again:
        case.launch(caught.value.schedule, case.bug)
    assert str(again.value) == str(caught.value), "the schedule does not replay the finding"


@pytest.mark.parametrize("case", [c for c in CASES.values() if not c.always], ids=lambda c: c.kernel.__name__)
def test_caught_under_some_schedule(case):
    def run() -> None:
        case.kernel[case.grid](*case.arguments(), **case.bug, **case.options)

    with pytest.raises(gluon_cpu.Finding) as caught:
        gluon_cpu.check(run, schedules=50, quiet=True)
    check_message(case, caught.value)
    with pytest.raises(type(caught.value)):
        case.launch(caught.value.schedule, case.bug, caught.value.mode)


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_right_twin_is_silent(case, policy):
    for seed in SEEDS:
        case.launch(gluon_cpu.Schedule(policy, seed=seed), case.right)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_lowered_mode_says_the_same(case):
    case.launch(gluon_cpu.Schedule(), case.right, "lowered")
    if case.always:
        with pytest.raises(gluon_cpu.Finding) as caught:
            case.launch(gluon_cpu.Schedule(), case.bug, "lowered")
        check_message(case, caught.value)


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_fence_at_the_reader_will_do(policy):
    """The fence may be on either side of the barrier: what counts is that it lies on the path."""
    out = out_boxes()
    schedule = gluon_cpu.Schedule(policy, seed=0)
    gluon_cpu.launch(copies.fence_between_roles, (1,), out, schedule=schedule, AT_WRITER=False, AT_SENDER=True)


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_fence_that_the_compiler_inserts_is_seen(policy):
    out = out_boxes()
    gluon_cpu.launch(copies.fence_within_a_role, (1,), out, schedule=gluon_cpu.Schedule(policy, seed=0))


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_cluster_barrier_that_the_compiler_inserts_is_seen(policy):
    schedule = gluon_cpu.Schedule(policy, seed=0)
    gluon_cpu.launch(hopper.init_without_a_cluster_barrier, (1,), ints(1), schedule=schedule, num_ctas=2)


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_cluster_ends_together(policy):
    """With several CTAs the compiler puts a cluster barrier before the end, so a late remote arrival is no bug."""
    schedule = gluon_cpu.Schedule(policy, seed=0)
    gluon_cpu.launch(hopper.exit_before_the_peer_arrives, (1,), ints(1), schedule=schedule, num_ctas=2)


def test_one_writer_for_each_marker():
    used = {line for case in CASES.values() for line in case.lines}
    assert used <= set(markers())
