"""What reports say beyond the lines involved, and that looking into a kernel does not change what is seen."""

import contextlib
import io

import pytest
import torch

import gluon_cpu
from gluon_cpu.ir.locations import assigned_name
from tests.compat import TensorDescriptor, gl, jit, mbarrier, tma
from tests.gluon_cpu import findings_more
from tests.gluon_cpu.findings_cases import CASES
from tests.gluon_cpu.support import line_of, new_barrier, poisoned


def ints(*shape: int) -> torch.Tensor:
    return poisoned(*shape, dtype=torch.int32)


@jit
def worker(done, COUNT: gl.constexpr):
    mbarrier.arrive(done, count=COUNT)  # <- an arrival among several


@jit
def three_roles(out_ptr, COUNT: gl.constexpr):
    done, never = new_barrier(COUNT), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(worker, (done, 1)), (worker, (done, 1)), (worker, (done, 2))], [1, 1])
    mbarrier.wait(done, 0)
    mbarrier.wait(never, 0)
    gl.store(out_ptr, 1)


@jit
def arrives_twice(out_ptr):
    done = new_barrier(3)
    gl.barrier()
    mbarrier.arrive(done)  # <- the arrival before
    mbarrier.arrive(done, count=4)  # <- the arrivals too many
    gl.store(out_ptr, 1)


def test_too_many_arrivals_names_those_before():
    with pytest.raises(gluon_cpu.BarrierMisuse, match="too many arrivals") as found:
        gluon_cpu.launch(arrives_twice, (1,), ints(1))
    message = str(found.value)
    assert "done.barrier of CTA 0: arrives_twice arrives with count 4\n" in message
    assert (
        f"has had 1 of 3 arrivals:\n    arrives_twice at gluon_cpu/{line_of(__file__, 'the arrival before')}\n"
        in message
    )
    assert "Its init, for 3 arrivals a phase:\n    at gluon_cpu/support.py" in message


def test_a_deadlock_says_who_arrived_and_where():
    with pytest.raises(gluon_cpu.TooFewArrivals, match=r"1 of 5 arrivals pending") as found:
        gluon_cpu.launch(three_roles, (1,), ints(1), COUNT=5)
    assert str(found.value).count(" at gluon_cpu/test_messages.py:") >= 3
    assert "x2" in str(found.value)  # the arrival with a count of two


@jit
def leader(done, turn, OFTEN: gl.constexpr, EARLY: gl.constexpr):
    for i in range(OFTEN):
        if EARLY or i + 1 < OFTEN:
            mbarrier.arrive(turn)
        mbarrier.wait(done, i & 1)
    if not EARLY:
        mbarrier.arrive(turn)


@jit
def arrives(done, OFTEN: gl.constexpr):
    for i in range(OFTEN):
        mbarrier.arrive(done)
        mbarrier.wait(done, i & 1)


@jit
def follows(done, turn, OFTEN: gl.constexpr):
    for i in range(OFTEN):
        mbarrier.wait(turn, i & 1)
        mbarrier.arrive(done)
        mbarrier.wait(done, i & 1)


@jit
def stands_by(ended):
    mbarrier.wait(ended, 0)


@jit
def ends(done, turn, ended, OFTEN: gl.constexpr, EARLY: gl.constexpr):
    leader(done, turn, OFTEN, EARLY)
    mbarrier.arrive(ended)


@jit
def in_a_circle(out_ptr, OFTEN: gl.constexpr, EARLY: gl.constexpr):
    """The leader waits for two arrivals; EARLY: it gives the turn before, without which one of them cannot come."""
    done, turn, ended = new_barrier(2), new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize(
        [
            (ends, (done, turn, ended, OFTEN, EARLY)),
            (arrives, (done, OFTEN)),
            (follows, (done, turn, OFTEN)),
            (stands_by, (ended,)),
        ],
        [1, 1, 1],
    )
    gl.store(out_ptr, 1)


HELD_UP = {  # after how many phases, the last of which never ends
    1: "but not all. follows, stands_by have not arrived, and wait for something else:",
    2: "but not all. follows has not arrived, and waits for something else:",  # the other one did not in phase 0
}


@pytest.mark.parametrize("often", HELD_UP)
def test_a_deadlock_names_who_is_held_up_elsewhere(often):
    def run(early: bool) -> None:
        gluon_cpu.launch(in_a_circle, (1,), ints(1), OFTEN=often, EARLY=early)

    with pytest.raises(gluon_cpu.TooFewArrivals) as found:
        run(early=False)
    assert HELD_UP[often] in str(found.value), found.value
    assert gluon_cpu.check(lambda: run(early=True), schedules=6, quiet=True).ok


def test_a_deadlock_with_nobody_held_up_elsewhere_blames_the_count():
    with pytest.raises(gluon_cpu.TooFewArrivals, match="but not all: the init count is too high"):
        gluon_cpu.launch(three_roles, (1,), ints(1), COUNT=5)


@jit
def first_role_ends(out_ptr):
    done, never = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(worker, (done, 1)), (stands_by, (never,))], [1])
    gl.store(out_ptr, 1)


def test_a_role_that_has_ended_waits_for_the_others():
    with pytest.raises(gluon_cpu.Deadlock, match=r"\n  worker: waits for the other roles to end\n"):
        gluon_cpu.launch(first_role_ends, (1,), ints(1))


@jit
def goes_round(x_desc, loaded, tile, LOADS: gl.constexpr):
    for _ in range(LOADS):
        mbarrier.expect(loaded, tile.nbytes_per_cta)
        tma.async_load(x_desc, [0, 0], loaded, tile)


@jit
def waits_for(loaded, WAITS: gl.constexpr):
    for i in range(WAITS):
        mbarrier.wait(loaded, i & 1)


@jit
def a_load_more(x_desc, WAITS: gl.constexpr):
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(waits_for, (loaded, WAITS)), (goes_round, (x_desc, loaded, tile, 1))], [1], [24])
    mbarrier.invalidate(loaded)


@jit
def ends_it(done):
    mbarrier.wait(done, 0)
    mbarrier.invalidate(done)


@jit
def looks_too(done):
    mbarrier.wait(done, 0)


@jit
def ended_by_a_role(out_ptr, WITHIN: gl.constexpr):
    done = new_barrier(1)
    gl.barrier()
    mbarrier.arrive(done)
    if WITHIN:
        gl.warp_specialize([(ends_it, (done,)), (looks_too, (done,))], [1])
    else:
        gl.warp_specialize([(looks_too, (done,)), (looks_too, (done,))], [1])
        mbarrier.invalidate(done)
    gl.store(out_ptr, 1)


def test_what_must_come_before_an_invalidation_depends_on_who_uses_the_barrier():
    """A load: a wait for its phase, as a barrier of roles does not hold the copy engine. A role: that it has ended."""
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    desc = TensorDescriptor.from_tensor(torch.zeros(32, 32), [32, 32], layout)
    cure = r"somebody must wait for the phase that this TMA load completes: perhaps a role has too few rounds"
    with pytest.raises(gluon_cpu.BarrierMisuse, match=cure):
        gluon_cpu.launch(a_load_more, (1,), desc, WAITS=0, schedule=gluon_cpu.Schedule("early", 0))
    assert gluon_cpu.check(lambda: gluon_cpu.launch(a_load_more, (1,), desc, WAITS=1), schedules=6, quiet=True).ok

    def by_role(within: bool) -> None:
        gluon_cpu.launch(ended_by_a_role, (1,), ints(1), WITHIN=within)

    with pytest.raises(gluon_cpu.BarrierMisuse, match=r"mbarrier\.invalidate, for example until the roles have ended"):
        gluon_cpu.check(lambda: by_role(True), schedules=6, quiet=True)
    assert gluon_cpu.check(lambda: by_role(False), schedules=6, quiet=True).ok


def test_one_schedule_one_line_to_replay():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(gluon_cpu.Deadlock):
        gluon_cpu.check(lambda: gluon_cpu.launch(findings_more.each_waits_for_the_other, (1,), ints(1), True))
    assert printed.getvalue().count("Schedule(") == 1
    assert "after 1 schedule:\n" in printed.getvalue()


CURES = {
    "a load read before its wait": "a wait for the barrier that the TMA load completes must come first",
    "a tile reused while a store reads it": "store_wait() must come first",
    "reading what a store has not written yet": "store_wait(0, read_only=False) must come first",
    "cp.async read before its wait": "async_copy.wait_group() must come first",
    "an operand overwritten before the wait": "warpgroup_mma_wait() must come first",
    "an accumulator read before its wait": "a wait for the barrier of a tcgen05_commit after the product must come",
    "a role that does not wait": "reader_that_does_not_wait waits for that before its read",
    "a slot freed before it is read": "writer waits for that before its write",
    "a slot freed before the product is done": "load_role waits for that before it issues the TMA load",
}


@pytest.mark.parametrize("policy", ["random", "late", "early"])
@pytest.mark.parametrize("name", CURES)
def test_the_cure_is_named_whichever_access_came_first(name, policy):
    case = CASES[name]
    with pytest.raises(gluon_cpu.DataRace) as found:
        case.launch(gluon_cpu.Schedule(policy, 0), case.bug)
    assert CURES[name] in str(found.value), found.value


@jit
def counts(log_ptr, counter_ptr, WHO: gl.constexpr, PRINT: gl.constexpr):
    for _ in range(8):
        at = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if PRINT:
            print("turn", at)
        gl.store(log_ptr + at, WHO)


@jit
def two_counters(log_ptr, counter_ptr, PRINT: gl.constexpr):
    gl.warp_specialize([(counts, (log_ptr, counter_ptr, 1, PRINT)), (counts, (log_ptr, counter_ptr, 2, PRINT))], [1])


def test_a_print_does_not_change_the_interleaving():
    def order(seed: int, loud: bool) -> list[int]:
        log, counter = ints(16), torch.zeros(1, dtype=torch.int32)
        with contextlib.redirect_stdout(io.StringIO()):
            schedule = gluon_cpu.Schedule("random", seed)
            gluon_cpu.launch(two_counters, (1,), log, counter, PRINT=loud, schedule=schedule)
        return log.tolist()

    orders = [order(seed, False) for seed in range(6)]
    assert len({tuple(o) for o in orders}) > 1
    assert orders == [order(seed, True) for seed in range(6)]


def test_every_finding_can_be_caught_by_name():
    from gluon_cpu import findings

    classes = [c for c in vars(findings).values() if isinstance(c, type) and issubclass(c, findings.Finding)]
    assert len(classes) >= 15
    assert all(getattr(gluon_cpu, c.__name__) is c for c in classes)
    assert all(c.__name__ in gluon_cpu.__all__ for c in classes)


NAMED = """\
wires = Wires(
    keys=alloc(1),
    values=alloc(2),
)
plain = alloc(3, two=2)
left, both = alloc(4), Pair(first=alloc(5), second=alloc(6))
Pair(first=alloc(7))
"""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("alloc(1)", "wires.keys"),
        ("alloc(2)", "wires.values"),
        ("alloc(3", "plain"),
        ("alloc(4)", "left"),
        ("alloc(5)", "both.first"),
        ("alloc(6)", "both.second"),
        ("alloc(7)", ""),
    ],
)
def test_a_buffer_is_named_by_its_variable_and_field(tmp_path, call, name):
    file = tmp_path / "named.py"
    file.write_text(NAMED, encoding="utf-8")
    [(line, column)] = [(i, text.index(call) + 1) for i, text in enumerate(NAMED.splitlines(), start=1) if call in text]
    assert assigned_name(str(file), line, column) == name
