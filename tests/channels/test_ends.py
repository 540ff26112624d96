"""Ends that are dropped, or used again, are found in the source; the project's own kernels have none."""

import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import gluon_attn.kernels
from channels import SharedMemoryConsumer, Turn, check_ends
from channels.compat import JITFunction
from tests.compat import aggregate, gl, jit

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


def marked(function) -> list[int]:
    """The lines of a function that say `# <-`."""
    first = function.fn.__code__.co_firstlineno
    lines = []
    for number, line in enumerate(SOURCE[first:], first + 1):
        if line.startswith(("def ", "@", "class ")) and number > first + 2:
            break
        if "# <-" in line:
            lines.append(number)
    return lines


@aggregate
class Ends:
    keys: SharedMemoryConsumer
    values: SharedMemoryConsumer
    turn: Turn

    @jit
    def skip(self):
        k, keys = self.keys.acquire()
        k.release()
        return Ends(keys, self.values, self.turn.take())


@jit
def use(slot):
    slot.release()


@jit
def next_of(end):
    slot, end = end.acquire()
    use(slot)
    return end


# --- right


@jit
def straight(channel):
    end = channel.consumer()
    slot, end = end.acquire()
    use(slot)
    slot, end = end.acquire()
    use(slot)


@jit
def once_from_a_new_end(channel):
    slot, _ = channel.consumer().acquire()
    use(slot)


@jit
def in_a_loop(channel, ends, steps):
    end = channel.consumer()
    for _ in range(steps):
        slot, end = end.acquire()
        if steps > 3:
            use(slot)
        else:
            slot.release_accessed()
        ends = ends.skip()
        end = next_of(end)


@jit
def waits_again(ends):
    slot, values = ends.values.acquire()
    ends.values.wait_again()
    use(slot)
    return Ends(ends.keys, values, ends.turn)


@jit
def on_one_path(end, FIRST: gl.constexpr):
    if FIRST:
        slot, end = end.acquire()
        use(slot)
    slot, end = end.acquire()
    use(slot)
    return end


# --- wrong


@jit
def dropped(end):
    end.acquire()  # <-


@jit
def dropped_by_an_aggregate(ends):
    ends.skip()  # <-


@jit
def dropped_by_a_function(end):
    next_of(end)  # <-


@jit
def slot_unused(end):
    _, end = end.acquire()  # <-
    _slot, end = end.acquire()  # <-
    return end


@jit
def slot_overwritten(end):
    slot, end = end.acquire()  # <-
    slot, end = end.acquire()
    use(slot)


@jit
def old_end_again(end):
    one, _following = end.acquire()
    two, _following = end.acquire()  # <-
    use(one)
    use(two)


@jit
def old_end_in_the_next_round(end, steps):
    for _ in range(steps):
        slot, _following = end.acquire()  # <-
        use(slot)


@jit
def old_end_on_one_path(end, steps):
    if steps > 1:
        slot, _following = end.acquire()
        use(slot)
    return next_of(end)  # <-


@jit
def old_end_in_an_aggregate(ends):
    slot, _keys = ends.keys.acquire()
    use(slot)
    return ends  # <-


@jit
def old_end_through_a_function(end):
    _following = next_of(end)
    return next_of(end)  # <-


@jit
def old_end_through_a_method(ends):
    following = ends.skip()
    return following, next_of(ends.keys)  # <-


@jit
def replaced_in_an_aggregate(ends):
    slot, keys = ends.keys.acquire()
    use(slot)
    return gl.aggregate_replace(ends, keys=keys)


@jit
def another_one_replaced(ends):
    slot, _keys = ends.keys.acquire()
    use(slot)
    return gl.aggregate_replace(ends, turn=ends.turn.take())  # <-


@jit
def new_end_in_every_round(channel, steps):
    for _ in range(steps):
        slot, _ = channel.consumer().acquire()  # <-
        use(slot)


@jit
def reached(end):
    dropped(end)


RIGHT = [replaced_in_an_aggregate, straight, once_from_a_new_end, in_a_loop, waits_again, on_one_path, use, next_of]
WRONG = [
    dropped,
    dropped_by_an_aggregate,
    dropped_by_a_function,
    slot_unused,
    slot_overwritten,
    old_end_again,
    old_end_in_the_next_round,
    old_end_on_one_path,
    old_end_in_an_aggregate,
    another_one_replaced,
    old_end_through_a_function,
    old_end_through_a_method,
    new_end_in_every_round,
]


def name_of(function) -> str:
    return function.fn.__name__


@pytest.mark.parametrize("function", RIGHT, ids=name_of)
def test_right(function):
    assert check_ends(function) == []


@pytest.mark.parametrize("function", WRONG, ids=name_of)
def test_wrong(function):
    found = check_ends(function)
    assert [misuse.line for misuse in found] == marked(function) != []
    assert all(misuse.file == __file__ for misuse in found)


def test_functions_that_are_reached_are_read_too():
    assert [misuse.line for misuse in check_ends(reached)] == marked(dropped)


def test_message():
    (found,) = check_ends(dropped)
    assert str(found) == (
        f"{__file__}:{marked(dropped)[0]}: `end.acquire()`: its result is dropped, and with it the next end"
    )


def test_only_gluon_functions():
    with pytest.raises(TypeError, match=r"kernel: expected a function under @gluon\.jit, got function"):
        check_ends(name_of)


def kernels_of_the_project() -> list[JITFunction]:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(gluon_attn.kernels.__path__, "gluon_attn.kernels.")
        if not module.ispkg
    ]
    ladder = Path(__file__).parents[2] / "docs" / "channels"
    sys.path.insert(0, str(ladder))
    try:
        modules += [importlib.import_module(path.stem) for path in sorted(ladder.glob("[0-9]_*.py"))]
    finally:
        sys.path.remove(str(ladder))
    return [
        f for m in modules for f in vars(m).values() if isinstance(f, JITFunction) and f.fn.__module__ == m.__name__
    ]


def test_the_project_has_none():
    functions = kernels_of_the_project()
    assert {"softmax", "load", "mma", "copy", "gemm"} <= {name_of(f) for f in functions}
    assert [str(misuse) for function in functions for misuse in check_ends(function)] == []
