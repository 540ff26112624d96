"""What atomics order: by memory order and by scope, between programs, CTAs of a cluster and roles."""

import pytest
import torch

import gluon_cpu
from tests.compat import gl, jit
from tests.gluon_cpu.layouts import ROW, ROW_1, ROW_HALVES
from tests.gluon_cpu.support import poisoned, same


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


@jit
def between_programs(
    data_ptr,
    flag_ptr,
    out_ptr,
    RELEASE: gl.constexpr,
    ACQUIRE: gl.constexpr,
    SCOPE: gl.constexpr,
    IN_A_LOOP: gl.constexpr = False,
):
    i = gl.arange(0, 128, ROW)
    if gl.program_id(0) == 0:
        gl.store(data_ptr + i, i)
        gl.atomic_xchg(flag_ptr, 1, sem=RELEASE, scope=SCOPE)
    else:
        if IN_A_LOOP:
            while gl.atomic_load(flag_ptr, sem=ACQUIRE, scope=SCOPE) == 0:
                pass
        else:
            gl.atomic_poll(flag_ptr, 1, sem=ACQUIRE, scope=SCOPE)
        gl.store(out_ptr + i, gl.load(data_ptr + i))


def hand_over(launch, release: str, acquire: str, scope: str) -> None:
    data, out = poisoned(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
    launch(between_programs, (2,), data, flag(), out, RELEASE=release, ACQUIRE=acquire, SCOPE=scope)
    same(out, torch.arange(128, dtype=torch.int32))


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_release_and_acquire_order_programs(launch, scope):
    hand_over(launch, "release", "acquire", scope)


@pytest.mark.parametrize(("release", "acquire"), [("relaxed", "acquire"), ("release", "relaxed")])
def test_relaxed_orders_nothing(launch, release, acquire):
    with pytest.raises(gluon_cpu.DataRace, match="data_ptr"):
        hand_over(launch, release, acquire, "gpu")


def test_scope_cta_is_not_atomic_for_another_program(launch):
    with pytest.raises(gluon_cpu.DataRace, match=r"flag_ptr(.|\n)*scope='cta' is so only among the roles of one CTA"):
        hand_over(launch, "release", "acquire", "cta")


@jit
def between_ctas(data_ptr, flag_ptr, out_ptr, SCOPE: gl.constexpr):
    """Each CTA of the cluster hands its half to the other."""
    i = gl.arange(0, 256, ROW_HALVES)
    gl.store(data_ptr + i, i)
    gl.atomic_xchg(flag_ptr + i, 1, sem="release", scope=SCOPE)
    gl.atomic_poll(flag_ptr + (i ^ 128), 1, sem="acquire", scope=SCOPE)
    gl.store(out_ptr + i, gl.load(data_ptr + (i ^ 128)))


def test_scope_between_the_ctas_of_a_cluster(launch):
    def run(scope: str) -> torch.Tensor:
        data, out = poisoned(256, dtype=torch.int32), poisoned(256, dtype=torch.int32)
        flags = torch.zeros(256, dtype=torch.int32)
        launch(between_ctas, (1,), data, flags, out, SCOPE=scope, num_ctas=2)
        return out

    same(run("gpu"), torch.arange(256, dtype=torch.int32) ^ 128)
    with pytest.raises(gluon_cpu.DataRace, match="flag_ptr"):
        run("cta")


@jit
def gives(data_ptr, flag_ptr, out_ptr):
    i = gl.arange(0, 128, ROW_1)
    gl.store(data_ptr + i, i)
    gl.atomic_store(flag_ptr, 1, sem="release", scope="cta")


@jit
def takes(data_ptr, flag_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    while gl.atomic_load(flag_ptr, sem="acquire", scope="cta") == 0:
        pass
    gl.store(out_ptr + i, gl.load(data_ptr + i))


@jit
def between_roles(data_ptr, flag_ptr, out_ptr):
    gl.warp_specialize([(takes, (data_ptr, flag_ptr, out_ptr)), (gives, (data_ptr, flag_ptr, out_ptr))], [1])


def test_scope_cta_orders_the_roles_of_a_cta(launch):
    data, out = poisoned(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
    launch(between_roles, (1,), data, flag(), out)
    same(out, torch.arange(128, dtype=torch.int32))


@jit
def failing_compare(data_ptr, flag_ptr, out_ptr, EXPECTED: gl.constexpr):
    """The flag holds 7: a compare that fails writes nothing, and so releases nothing."""
    i = gl.arange(0, 128, ROW)
    if gl.program_id(0) == 0:
        gl.store(data_ptr + i, i)
        gl.atomic_cas(flag_ptr, EXPECTED, 8, sem="release")
        gl.atomic_xchg(flag_ptr, 9, sem="relaxed")
    else:
        gl.atomic_poll(flag_ptr, 9, sem="acquire")
        gl.store(out_ptr + i, gl.load(data_ptr + i))


def test_a_compare_that_fails_releases_nothing(launch):
    def run(expected: int) -> torch.Tensor:
        data, out = poisoned(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
        launch(failing_compare, (2,), data, flag() + 7, out, EXPECTED=expected)
        return out

    same(run(7), torch.arange(128, dtype=torch.int32))  # the exchange continues what the compare released
    with pytest.raises(gluon_cpu.DataRace, match="data_ptr"):
        run(1)


@jit
def overwritten_flag(data_ptr, flag_ptr, out_ptr, EXCHANGE: gl.constexpr):
    """A plain atomic store, unlike an exchange, ends what was released at the address before."""
    i = gl.arange(0, 128, ROW)
    pid = gl.program_id(0)
    if pid == 0:
        gl.store(data_ptr + i, i)
        gl.atomic_xchg(flag_ptr, 1, sem="release")
    elif pid == 1:
        gl.atomic_poll(flag_ptr, 1, sem="relaxed")
        if EXCHANGE:
            gl.atomic_xchg(flag_ptr, 2, sem="relaxed")
        else:
            gl.atomic_store(flag_ptr, 2, sem="relaxed")
    else:
        gl.atomic_poll(flag_ptr, 2, sem="acquire")
        gl.store(out_ptr + i, gl.load(data_ptr + i))


def test_a_store_ends_what_was_released_before(launch):
    def run(exchange: bool) -> torch.Tensor:
        data, out = poisoned(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
        launch(overwritten_flag, (3,), data, flag(), out, EXCHANGE=exchange)
        return out

    same(run(True), torch.arange(128, dtype=torch.int32))
    with pytest.raises(gluon_cpu.DataRace, match="data_ptr"):
        run(False)


@jit
def loads_of_both_kinds(flag_ptr, out_ptr):
    pid = gl.program_id(0)
    if pid % 2 == 0:
        gl.store(out_ptr + pid, gl.load(flag_ptr))
    else:
        gl.store(out_ptr + pid, gl.atomic_load(flag_ptr))


def test_an_atomic_load_writes_nothing(launch):
    out = poisoned(4, dtype=torch.int32)
    launch(loads_of_both_kinds, (4,), flag() + 5, out)
    same(out, torch.full((4,), 5, dtype=torch.int32))


@jit
def gives_up(flag_ptr, out_ptr):
    """Every second flag comes to hold what is waited for; the others never do."""
    i = gl.arange(0, 128, ROW)
    gl.atomic_xchg(flag_ptr + i, i & 1)
    gl.store(out_ptr + i, gl.atomic_poll(flag_ptr + i, 1, timeout_ns=100).to(gl.int32))
    gl.store(out_ptr + 128, flag_ptr.atomic_poll(0, timeout_ns=100).to(gl.int32))


def test_a_poll_with_a_time_limit_gives_up(launch):
    out = poisoned(129, dtype=torch.int32)
    launch(gives_up, (1,), torch.full((128,), 7, dtype=torch.int32), out)
    same(out, torch.tensor([0, 1] * 64 + [1], dtype=torch.int32))


@jit
def four_polls(flag_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    gl.atomic_xchg(flag_ptr + i, i + 1)
    found = gl.atomic_poll(flag_ptr + i, i + 1)
    gl.store(out_ptr + i, found.to(gl.int32))


def test_poll_of_a_tensor(launch):
    out = poisoned(128, dtype=torch.int32)
    launch(four_polls, (1,), torch.zeros(128, dtype=torch.int32), out)
    same(out, torch.ones(128, dtype=torch.int32))


@jit
def last_first(flag_ptr, out_ptr, START: gl.constexpr):
    """Programs in the order of falling numbers: each polls for how many have had their turn."""
    gl.atomic_poll(flag_ptr, START + gl.num_programs(0) - 1 - gl.program_id(0), sem="acquire")
    gl.store(out_ptr, gl.program_id(0))
    gl.atomic_add(flag_ptr, 1, sem="release")


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_poll_that_fails_waits_for_a_write(policy):
    """It does not spin, also if whom it waits for has not started yet."""
    out = poisoned(1, dtype=torch.int32)
    schedule = gluon_cpu.Schedule(policy, seed=1)
    report = gluon_cpu.launch(last_first, (12,), flag(), out, 0, schedule=schedule, resident=1)
    assert int(out) == 0
    assert report.steps < 2000


def test_a_poll_for_what_nobody_writes_is_a_deadlock():
    with pytest.raises(gluon_cpu.Deadlock, match=r"nobody can go on(.|\n)*waits for what it polls for, in global"):
        gluon_cpu.launch(last_first, (3,), flag(), poisoned(1, dtype=torch.int32), 1)
