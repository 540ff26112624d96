"""A loop that waits for global memory to change costs no steps; one that does more, or counts, goes on."""

import pytest
import torch

import gluon_cpu
from gluon_cpu.machine import Machine
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu.layouts import ROW, ROW_HALVES
from tests.gluon_cpu.support import line_of, new_barrier, poisoned, same
from tests.gluon_cpu.test_atomics import between_programs


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@jit
def by_load(ptr, value):
    while gl.atomic_load(ptr, sem="acquire") != value:  # <- waits
        pass


@jit
def by_load_before(ptr, value):
    """Its variable is what it has found."""
    found = gl.atomic_load(ptr, sem="acquire")
    while found != value:
        found = gl.atomic_load(ptr, sem="acquire")


@jit
def by_addition(ptr, value):
    while gl.atomic_add(ptr, 0, sem="acquire") != value:
        pass


@jit
def by_compare(ptr, value):
    while gl.atomic_cas(ptr, value, value, sem="acquire") != value:
        pass


@jit
def by_all_of_a_tensor(ptr, value):
    same_address = gl.arange(0, 128, ROW) * 0
    while gl.max(gl.atomic_load(ptr + same_address, sem="acquire"), axis=0) != value:
        pass


@jit
def with_a_condition(ptr, value):
    found = value - 1
    while found != value:
        if value >= 0:
            found = gl.atomic_load(ptr, sem="acquire")


WAITS = [by_load, by_load_before, by_addition, by_compare, by_all_of_a_tensor, with_a_condition]


@jit
def last_first(flag_ptr, count_ptr, out_ptr, WAIT: gl.constexpr, START: gl.constexpr):
    """Programs in the order of falling numbers. Each writes elsewhere meanwhile, which is not waited for."""
    for _ in range(4):
        gl.atomic_add(count_ptr, 1, sem="relaxed")
    WAIT(flag_ptr, START + gl.num_programs(0) - 1 - gl.program_id(0))
    gl.store(out_ptr, gl.program_id(0))
    gl.atomic_add(flag_ptr, 1, sem="release")


@pytest.mark.parametrize("mode", ["fast", "lowered"])
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_who_spins_costs_few_steps(policy, wait, mode):
    """Also if whom it waits for has not started yet."""
    for seed, resident in ((1, 12), (2, 1)):
        out, schedule = poisoned(1, dtype=torch.int32), gluon_cpu.Schedule(policy, seed=seed)
        arguments = ints(0), ints(0), out, wait, 0
        report = gluon_cpu.launch(last_first, (12,), *arguments, schedule=schedule, resident=resident, mode=mode)
        assert int(out) == 0
        assert report.steps < 1000


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_a_loop_that_nobody_ends_is_a_deadlock(launch, wait):
    with pytest.raises(gluon_cpu.Deadlock, match=r"nobody can go on(.|\n)*waits for what it polls for, in global"):
        launch(last_first, (3,), ints(0), ints(0), poisoned(1, dtype=torch.int32), wait, 1)


def test_a_deadlock_names_the_line_of_the_loop():
    with pytest.raises(gluon_cpu.Deadlock) as caught:
        gluon_cpu.launch(last_first, (3,), ints(0), ints(0), poisoned(1, dtype=torch.int32), by_load, 1)
    assert line_of(__file__, "waits") in str(caught.value)


@jit
def takes_turns(lock_ptr, sum_ptr):
    while gl.atomic_cas(lock_ptr, 0, 1, sem="acquire") != 0:
        pass
    gl.store(sum_ptr, gl.load(sum_ptr) + 1)
    gl.atomic_xchg(lock_ptr, 0, sem="release")


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_lock(policy):
    for seed in range(5):
        total, schedule = ints(0), gluon_cpu.Schedule(policy, seed=seed)
        report = gluon_cpu.launch(takes_turns, (12,), ints(0), total, schedule=schedule, resident=12)
        assert int(total) == 12
        assert report.steps < 1000


@jit
def either_of_two(flags_ptr, out_ptr):
    """Of two looks in a round, the first may be out of date at its end."""
    pid = gl.program_id(0)
    if pid < 2:
        gl.atomic_xchg(flags_ptr + pid, 1, sem="release")
    else:
        while gl.atomic_load(flags_ptr, sem="acquire") + gl.atomic_load(flags_ptr + 1, sem="acquire") != 2:
            pass
        gl.store(out_ptr + pid - 2, pid)


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_write_between_two_looks_is_not_missed(policy):
    for seed in range(40):
        out, schedule = poisoned(2, dtype=torch.int32), gluon_cpu.Schedule(policy, seed=seed)
        report = gluon_cpu.launch(either_of_two, (4,), ints(0, 0), out, schedule=schedule)
        same(out, ints(2, 3))
        assert report.steps < 200


@jit
def beats(flags_ptr, beaten, BY: gl.constexpr):
    count = 0
    while gl.atomic_load(flags_ptr) == 0:
        if BY == "addition":
            gl.atomic_add(flags_ptr + 1, 1)
        elif BY == "store":
            count += 1
            gl.atomic_store(flags_ptr + 1, count)
        else:
            mbarrier.arrive(beaten)


@jit
def stops_after_three(flags_ptr, beaten, BY: gl.constexpr):
    if BY == "arrival":
        mbarrier.wait(beaten, 0)
    else:
        while gl.atomic_load(flags_ptr + 1) < 3:
            pass
    gl.atomic_xchg(flags_ptr, 1)


@jit
def beaten_until_stopped(flags_ptr, BY: gl.constexpr):
    beaten = new_barrier(3)
    gl.barrier()
    gl.warp_specialize([(beats, (flags_ptr, beaten, BY)), (stops_after_three, (flags_ptr, beaten, BY))], [1])


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
@pytest.mark.parametrize("by", ["addition", "store", "arrival"])
def test_a_loop_that_others_see_goes_on(policy, by):
    flags, schedule = ints(0, 0), gluon_cpu.Schedule(policy, seed=1)
    # Arrivals that nobody counts may lap who waits for them, which is found, and is not the point.
    gluon_cpu.launch(beaten_until_stopped, (1,), flags, by, schedule=schedule, skip=["BarrierMisuse"])
    assert int(flags[0]) == 1


@jit
def gives_up(flag_ptr, out_ptr):
    tries = 0
    while (gl.atomic_load(flag_ptr) == 0) & (tries < 100):
        tries += 1
    gl.store(out_ptr, tries)


def test_a_loop_that_counts_gives_up(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(gives_up, (1,), ints(0), out)
    same(out, ints(100))


@jit
def writes_for_ever(flags_ptr):
    """Whom it wakes finds what it found before."""
    if gl.program_id(0) == 0:
        by_load(flags_ptr, 1)
    else:
        while gl.atomic_load(flags_ptr) == 0:
            gl.atomic_add(flags_ptr + 1, 1)


def test_to_be_woken_in_vain_is_no_progress(monkeypatch):
    monkeypatch.setattr(Machine, "patience", property(lambda _: 2000, lambda *_: None), raising=False)
    with pytest.raises(gluon_cpu.Deadlock, match="no progress for 2000 steps"):
        gluon_cpu.launch(writes_for_ever, (2,), ints(0, 0))


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_orders_and_scopes_count_as_without_a_loop(policy):
    def run(release: str, acquire: str, scope: str) -> None:
        out = poisoned(128, dtype=torch.int32)
        arguments = poisoned(128, dtype=torch.int32), ints(0), out, release, acquire, scope
        schedule = gluon_cpu.Schedule(policy, seed=0)
        gluon_cpu.launch(between_programs, (2,), *arguments, IN_A_LOOP=True, schedule=schedule)
        same(out, torch.arange(128, dtype=torch.int32))

    run("release", "acquire", "gpu")
    for release, acquire in (("relaxed", "acquire"), ("release", "relaxed")):
        with pytest.raises(gluon_cpu.DataRace, match="data_ptr"):
            run(release, acquire, "gpu")
    with pytest.raises(gluon_cpu.DataRace, match="flag_ptr"):
        run("release", "acquire", "cta")


@jit
def for_the_pair(flag_ptr, data_ptr, out_ptr):
    """One CTA looks, and what it finds the other one is told."""
    i = gl.arange(0, 256, ROW_HALVES)
    if gl.program_id(0) == 0:
        gl.store(data_ptr + i, i)
        gl.atomic_xchg(flag_ptr, 1, sem="relaxed")
        gl.atomic_xchg(flag_ptr, 2, sem="release")
    else:
        by_load(flag_ptr, 2)
        gl.store(out_ptr + i, gl.load(data_ptr + i))


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_one_cta_waits_for_its_cluster(policy):
    for seed in range(10):
        data, out = poisoned(256, dtype=torch.int32), poisoned(256, dtype=torch.int32)
        schedule = gluon_cpu.Schedule(policy, seed=seed)
        report = gluon_cpu.launch(for_the_pair, (2,), ints(0), data, out, num_ctas=2, schedule=schedule, resident=1)
        same(out, torch.arange(256, dtype=torch.int32))
        assert report.steps < 200


@jit
def for_the_pair_by_two_looks(flags_ptr):
    if gl.program_id(0) == 0:
        gl.atomic_xchg(flags_ptr, 1)
        gl.atomic_xchg(flags_ptr + 1, 1)
    else:
        while gl.atomic_load(flags_ptr) + gl.atomic_load(flags_ptr + 1) != 2:
            pass


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_two_looks_for_a_cluster(policy):
    for seed in range(10):
        schedule = gluon_cpu.Schedule(policy, seed=seed)
        flags = ints(0, 0)
        report = gluon_cpu.launch(for_the_pair_by_two_looks, (2,), flags, num_ctas=2, schedule=schedule, resident=1)
        assert report.steps < 200


def test_a_deadlock_of_a_cluster():
    with pytest.raises(gluon_cpu.Deadlock, match=r"nobody can go on(.|\n)*waits for what it polls for, in global"):
        gluon_cpu.launch(last_first, (2,), ints(0), ints(0), poisoned(1, dtype=torch.int32), by_load, 1, num_ctas=2)
