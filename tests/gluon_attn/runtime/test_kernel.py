"""The description of a kernel's parameters, and all that is derived from it."""

import contextlib
import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.runtime import kernel as kernel_module
from gluon_attn.runtime.compat import TensorDescriptor
from gluon_attn.runtime.descriptors import Block, View
from gluon_attn.runtime.kernel import (
    Build,
    CardLaunch,
    CardLaunches,
    Kernel,
    Launch,
    Launches,
    Pointer,
    Scalar,
    Tma,
    allocated_at_once,
)


@jit
def made_up(a_desc, b_desc, sum_ptr, flags_ptr, count, factor, SIZE: gl.constexpr, OTHER: gl.constexpr):
    """Never compiled."""


PARAMETERS = (
    Tma("a_desc", "a"),
    Tma("b_desc", "b"),
    Pointer("sum_ptr", "sum"),
    Pointer("flags_ptr", "flags", "i8"),
    Scalar("count"),
    Scalar("factor", "fp32"),
)
BLOCKS = {"a": Block.of(torch.bfloat16, 64, 128), "b": Block.of(torch.float8_e4m3fn, 128, 64, ((1, 0),))}


def build(**changes: Any) -> Build:
    fields: dict[str, Any] = {
        "kernel": Kernel(made_up, *PARAMETERS),
        "blocks": BLOCKS,
        "constants": {"SIZE": 3, "OTHER": "x"},
    }
    return Build(**(fields | changes))


def launch(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "build": build(),
        "programs": 5,
        "views": {"a": View((1, 2, 64, 128), (16384, 8192, 128, 1)), "b": View((1, 2, 128, 64), (16384, 8192, 64, 1))},
        "scalars": {"factor": 0.5, "count": 7},
    }
    return Launch(**(fields | changes))


WRONG = {
    "two exchanged": (PARAMETERS[1], PARAMETERS[0], *PARAMETERS[2:]),
    "pointers exchanged": (*PARAMETERS[:2], PARAMETERS[3], PARAMETERS[2], *PARAMETERS[4:]),
    "a number before a pointer": (*PARAMETERS[:3], PARAMETERS[4], PARAMETERS[3], PARAMETERS[5]),
    "another name": (*PARAMETERS[:5], Scalar("factors", "fp32")),
    "one left out": (*PARAMETERS[:4], PARAMETERS[5]),
    "one twice": (PARAMETERS[0], *PARAMETERS),
    "a compile-time one": (*PARAMETERS, Scalar("SIZE")),
    "more than the function has": (*PARAMETERS, *(Scalar(name) for name in ("SIZE", "OTHER", "more"))),
}


@pytest.mark.parametrize("parameters", WRONG.values(), ids=WRONG.keys())
def test_another_description_than_the_functions_is_refused(parameters):
    with pytest.raises(ValueError, match=r"^parameters: expected \('a_desc', .*those of made_up .*, got \(.*; list "):
        Kernel(made_up, *parameters)


def test_kinds_in_another_order_than_the_launchers_are_refused():
    """Though the function has them in that order."""

    @jit
    def number_first(count, sum_ptr):
        pass

    with pytest.raises(ValueError, match=r"^parameters: .* list TMA descriptors, then pointers, then scalars$"):
        Kernel(number_first, Scalar("count"), Pointer("sum_ptr", "sum"))


def test_types():
    kernel = Kernel(made_up, *PARAMETERS)
    types = kernel.types(BLOCKS)
    assert list(types) == [p.name for p in PARAMETERS]
    assert types["a_desc"].startswith("tensordesc<bf16[1,1,64,128],")
    assert types["b_desc"].startswith("tensordesc<fp8e4nv[1,1,128,64],")
    assert [types[name] for name in ("sum_ptr", "flags_ptr", "count", "factor")] == ["*fp32", "*i8", "i32", "fp32"]


def test_what_is_compiled(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(kernel_module, "compile_gluon", lambda *args, **options: asked.append((args, options)))
    one = build(num_ctas=2, starts_early=True, constants={"SIZE": 3, "OTHER": "x", "flags_ptr": None})
    one.compile(90)
    (((fn, types, constants), options),) = asked
    assert fn is made_up
    assert types == one.kernel.types(BLOCKS)
    assert constants == {"SIZE": 3, "OTHER": "x", "flags_ptr": None}
    assert options == {"arch": 90, "num_warps": 4, "num_ctas": 2, "starts_early": True}


def test_a_descriptor_that_is_not_there(monkeypatch):
    """It has no block, no view and no tensor, and takes a place in every launch."""
    asked: list[Any] = []
    monkeypatch.setattr(kernel_module, "compile_gluon", lambda *args, **options: asked.append(args))
    one = build(blocks={"b": BLOCKS["b"]}, constants={"SIZE": 3, "OTHER": "x", "a_desc": None})
    one.compile(90)
    _, types, constants = asked[0]
    assert list(types) == ["b_desc", "sum_ptr", "flags_ptr", "count", "factor"]
    assert constants["a_desc"] is None
    given = {"b": tensors()["b"], "sum": torch.zeros(3), "flags": None}
    of_b = launch().views["b"]
    arguments = launch(build=one, views={"b": of_b}).arguments(given)
    assert arguments["a_desc"] is None
    assert isinstance(arguments["b_desc"], TensorDescriptor)
    monkeypatch.setattr(View, "arguments", lambda view, address, meta: (address, meta))
    compiled: Any = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=["of b"]))
    assert kernel_module.descriptions([None, of_b], compiled)(7) == (None, 7, "of b")


def tensors() -> dict[str, Any]:
    return {
        "a": torch.zeros(1, 2, 64, 128, dtype=torch.bfloat16),
        "b": torch.zeros(1, 2, 128, 64, dtype=torch.float8_e4m3fn),
        "sum": torch.zeros(3),
        "flags": None,
    }


def test_arguments_and_options():
    """In the function's order, whatever the order in which they were given."""
    given = tensors()
    arguments = launch().arguments(given)
    assert list(arguments) == ["a_desc", "b_desc", "sum_ptr", "flags_ptr", "count", "factor", "SIZE", "OTHER"]
    for name, tensor in (("a_desc", "a"), ("b_desc", "b")):
        described = arguments[name]
        assert isinstance(described, TensorDescriptor)
        assert described.base is given[tensor]
        view = launch().views[tensor]
        assert (tuple(described.shape), tuple(described.strides)) == (view.shape, view.strides)
        assert (tuple(described.block_shape), described.layout) == (BLOCKS[tensor].shape, BLOCKS[tensor].layout)
    assert arguments["sum_ptr"] is given["sum"]
    assert arguments["flags_ptr"] is None
    assert [arguments[name] for name in ("count", "factor", "SIZE", "OTHER")] == [7, 0.5, 3, "x"]
    assert launch().options == {"num_warps": 4, "num_ctas": 1, "enable_fp_fusion": True, "launch_pdl": False}
    paired = launch(build=build(num_ctas=2, starts_early=True))
    assert paired.options == {"num_warps": 4, "num_ctas": 2, "enable_fp_fusion": True, "launch_pdl": True}


def test_a_pointer_that_the_kernel_has_not_is_none():
    """Whatever the call was given for it."""
    absent = launch(build=build(constants={"SIZE": 3, "OTHER": "x", "sum_ptr": None}))
    assert absent.arguments(tensors())["sum_ptr"] is None


def test_what_given_renames():
    """The tensor, of a descriptor or a pointer; its view and block stay those under the parameter's own name."""
    given = tensors()
    given |= {"other_a": given.pop("a"), "total": given.pop("sum")}
    renamed = launch(given={"a": "other_a", "sum": "total"})
    arguments = renamed.arguments(given)
    assert arguments["a_desc"].base is given["other_a"]
    assert tuple(arguments["a_desc"].shape) == renamed.views["a"].shape
    assert arguments["sum_ptr"] is given["total"]
    assert arguments["b_desc"].base is given["b"]
    assert renamed.tensor_names(renamed.build.kernel.tma) == ["other_a", "b"]


def test_on_a_card_the_same_in_the_same_order(monkeypatch):
    """Addresses encoded, numbers, and a place for each compile-time parameter."""
    passed: list[tuple[Any, ...]] = []

    class NoLauncher:
        def __init__(self, compiled: Any, programs: int, device_index: int) -> None:
            assert (programs, device_index) == (5, 1)

        def __call__(self, arguments: tuple[Any, ...], stream: int) -> None:
            assert stream == 3
            passed.append(arguments)

    encoded: list[Any] = []

    def encode(address: int, meta: Any, shape: list[int], strides: list[int]) -> Any:
        encoded.append(address)
        return ("map", address, meta)

    monkeypatch.setattr(kernel_module, "Launcher", NoLauncher)
    monkeypatch.setattr("gluon_attn.runtime.descriptors.encode_tma", encode)
    compiled: Any = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=["meta a", "meta b"]))
    on_card, given = CardLaunch(launch(), compiled, 1), tensors()
    on_card(given, 3)
    a, b = (given[name].data_ptr() for name in ("a", "b"))
    views = launch().views
    described = []
    for name, address in (("a", a), ("b", b)):
        described += [("map", address, f"meta {name}"), *views[name].shape, *views[name].strides]
    assert passed == [(*described, given["sum"].data_ptr(), None, 7, 0.5, None, None)]
    on_card(given, 3)
    assert encoded == [a, b], "the same addresses are encoded once"


@pytest.mark.parametrize("current", [5, 2])
def test_launches_ask_for_device_and_stream_once(monkeypatch, current):
    """Also from another device, which is current again afterwards; memory is made before, on the tensors' own."""
    devices = [current]
    said: list[Any] = []

    @contextlib.contextmanager
    def device(index):
        devices.append(index)
        yield
        devices.pop()

    def asked(what, answer=None):
        def ask(index):
            said.append((what, index, devices[-1]))
            return answer

        return ask

    cuda = SimpleNamespace(device=device, current_device=lambda: devices[-1])
    monkeypatch.setattr(kernel_module, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(kernel_module, "enter_context", asked("context"))
    monkeypatch.setattr(kernel_module, "current_stream", asked("stream", answer=3))
    steps: Any = [lambda tensors, stream, i=i: said.append((i, dict(tensors), stream, devices[-1])) for i in range(2)]
    CardLaunches(steps, lambda tensors: {"made": tensors["q"] + 1}, 5)({"q": 1})
    given = {"q": 1, "made": 2}
    assert said == [("context", 5, 5), ("stream", 5, 5), (0, given, 3, 5), (1, given, 3, 5)]
    assert devices == [current]


def test_a_launch_keeps_no_tensor_alive(monkeypatch):
    """Neither before nor after it was asked for arguments; and on a card neither."""
    monkeypatch.setattr(kernel_module, "Launcher", lambda *args: lambda arguments, stream: None)
    monkeypatch.setattr("gluon_attn.runtime.descriptors.encode_tma", lambda *args: "map")
    compiled: Any = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=["meta a", "meta b"]))
    given = tensors()
    one = launch()
    on_card = CardLaunch(one, compiled, 0)
    one.arguments(given)
    on_card(given, 3)
    left = [weakref.ref(t) for t in given.values() if t is not None]
    assert all(ref() is not None for ref in left)
    given.clear()
    gc.collect()
    assert [ref() for ref in left] == [None] * 3
    assert one.programs == 5  # and the launches are still there
    assert on_card is not None


@jit
def twice(in_ptr, out_ptr, SIZE: gl.constexpr):
    at = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out_ptr + at, 2 * gl.load(in_ptr + at))


def test_a_workspace_is_handed_on_and_released():
    """Two launches of one kernel: from x to a workspace, and from that to y; on the machine."""
    kernel = Kernel(twice, Pointer("in_ptr", "x"), Pointer("out_ptr", "y"))
    of: dict[str, Any] = {
        "build": Build(kernel=kernel, blocks={}, constants={"SIZE": 32}),
        "programs": 1,
        "views": {},
        "scalars": {},
    }
    steps: list[Launch] = [Launch(**of, given={"y": "between"}), Launch(**of, given={"x": "between"})]
    made: list[Any] = []

    def make(given: dict[str, Any]) -> dict[str, Any]:
        t = torch.full_like(given["x"], float("nan"))
        made.append(weakref.ref(t))
        return {"between": t}

    def on_machine(one: Launch) -> Any:
        def step(given: dict[str, Any]) -> None:
            with gluon_cpu.machine():
                one.build.kernel.fn[(one.programs,)](*one.arguments(given).values(), num_warps=1)

        return step

    call = Launches([on_machine(one) for one in steps], make)
    for _ in range(2):
        x, y = torch.randn(32), torch.full((32,), float("nan"))
        call({"x": x, "y": y})
        assert torch.equal(y, 4 * x)
    gc.collect()
    assert len(made) == 2, "one for each call"
    assert [ref() for ref in made] == [None, None]


def test_the_steps_of_a_call_share_its_tensors():
    order: list[Any] = []

    def first(given: dict[str, Any]) -> None:
        order.append(("first", sorted(given)))

    def second(given: dict[str, Any]) -> None:
        order.append(("second", given["made"]))

    Launches([first, second], lambda given: {"made": given["x"] + 1})({"x": torch.zeros(())})
    assert order[0] == ("first", ["made", "x"])
    assert order[1] == ("second", torch.ones(()))


def test_workspaces_of_one_allocation_share_no_memory():
    like = {"a": ((3, 5), torch.float32), "none": ((0,), torch.int32), "b": ((7,), torch.bfloat16)}
    found = allocated_at_once(like)({"q": torch.zeros(1)})
    memory = found.pop("memory")
    assert sorted(found) == sorted(like)
    taken: set[int] = set()
    for name, (shape, dtype) in like.items():
        first, size = found[name] - memory.data_ptr(), math.prod(shape) * dtype.itemsize
        assert first % 16 == 0
        assert first >= 0
        assert first + size <= memory.numel()
        assert taken.isdisjoint(range(first, first + size))
        taken |= set(range(first, first + size))
