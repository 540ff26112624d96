"""The timeline of the Hopper kernel: its clocks, their names and what is made of a trace, without a card."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from bench import scopes, timeline
from bench.waits import Wait, spread, summarise, waits_of
from gluon_attn.backward.launch import Choices, builds_of
from gluon_attn.backward.table import HOPPER as BACKWARD
from gluon_attn.device import Device
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import HOPPER, hopper_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import resources

ROLES = "/any/gluon_attn/kernels/hopper/forward/softmax.py"
GRADIENT, WORK = (f"/any/gluon_attn/kernels/hopper/backward/{name}.py" for name in ("gradient", "work"))
FILLED = ("/any/channels/shared_memory.py", "mbarrier.wait(self.filled.index(at.slot()), at.this_lap())")
FREED = ("/any/channels/shared_memory.py", "mbarrier.wait(self.freed.index(at.slot()), at.previous_lap())")
HANDOVER = ("/any/channels/shared_memory.py", "mbarrier.wait(self.handover.index(at.slot()), at.this_lap())")
SENT = ("/any/channels/signals.py", "mbarrier.wait(self.sent, self.ring.this_lap())")
TAKE = ("/any/channels/turns.py", "return Turn(self.mine.acquire(), self.following, self.TAKE_TURNS)")
STEP = (ROLES, "p, acc, stats, blocks = next_block(")  # whoever called the function that waits

NAMES = [
    ("keys", "wait", [FILLED, (ROLES, "k, keys = ends.keys.acquire()"), STEP]),
    ("values again", "wait", [FILLED, (ROLES, "ends.values.wait_again()"), STEP]),
    ("turn", "wait", [SENT, TAKE, (ROLES, "turn = ends.turn.take()"), STEP]),
    ("queries", "wait", [FILLED, (ROLES, "q_slot, queries = queries.acquire()")]),
    ("freed keys", "wait", [FREED, (ROLES, "k, keys = keys.acquire()")]),
    ("peer's keys", "wait", [HANDOVER, (ROLES, "k, keys = keys.acquire()")]),
    ("loaded values", "wait", [FILLED, (ROLES, "loaded, loaded_values = loaded_values.acquire()")]),
    ("products: scores", "warpgroup_mma_wait", [(ROLES, "scores = warpgroup_mma_wait(1, deps=[scores])"), STEP]),
    ("products: acc", "warpgroup_mma_wait", [(ROLES, "acc, _ = warpgroup_mma_wait(0, deps=[acc, p])"), STEP]),
    ("stores", "store_wait", [("/any/channels/tma.py", "tma.store_wait(0)"), (ROLES, "finish_stores(wires)")]),
    ("products: dq", "warpgroup_mma_wait", [(GRADIENT, "dqs = hand_over(wait_apart(dq, 1), dqs)"), STEP]),
    ("products: s", "warpgroup_mma_wait", [(GRADIENT, "s = wait_apart(s, 1)  # dP goes on"), STEP]),
    ("freed dqs", "wait", [FREED, (GRADIENT, "memory = ends.dqs.borrow().part(0)")]),
    ("dqs", "wait", [FILLED, (GRADIENT.replace("gradient", "reduce"), "sums.dqs.wait()")]),
    ("claims", "wait", [FILLED, (WORK, "slot, end = self.end.acquire()")]),
    ("the other warpgroup", "barrier", [(GRADIENT, "gl.barrier()")]),
    ("all at the start or the end", "barrier", [("/any/channels/barriers.py", "gl.barrier()")]),
    ("other programs", "atomic_poll", [(GRADIENT.replace("gradient", "reduce"), "atomic_poll(added, number)")]),
    ("something_else(wires)", "wait", [SENT, (ROLES, "something_else(wires)")]),
]


@pytest.mark.parametrize(("name", "kind", "frames"), NAMES, ids=[name for name, _, _ in NAMES])
def test_a_wait_is_named_by_the_line_of_the_role(name, kind, frames):
    assert scopes.wait_name(kind, frames) == name


def test_scopes_are_numbered_as_they_stand_in_the_code(tmp_path):
    """One `acquire`, inlined at two places."""
    files = {
        "channels/shared_memory.py": f"\n{FILLED[1]}\n",
        "kernels/hopper/forward/softmax.py": "k, keys = ends.keys.acquire()\nv, values = ends.values.acquire()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    channel, role = (tmp_path / name for name in files)
    ttgir = f"""
#loc = loc(unknown)
#loc6 = loc("ends.values"(#loc5))
      proton.record start "wait" loc(#loc6)
      proton.record end "wait" loc(#loc6)
      proton.record start "wait" loc(#loc4)
      proton.record end "wait" loc(#loc4)
#loc1 = loc("{channel}":2:9)
#loc2 = loc("{role}":1:15)
#loc3 = loc("{role}":2:17)
#loc4 = loc(callsite(#loc1 at #loc2))
#loc5 = loc(callsite(#loc1 at #loc3))
"""
    assert scopes.scope_names(ttgir) == [(0, "values"), (1, "keys")]


# By roles of softmax, registers of one that transposes: alone, two and three beside each other, and fp8's.
FIRST_WARPS = [
    (1, 0, {"softmax 0": 0, "load": 6}),
    (2, 0, {"softmax 0": 0, "softmax 1": 4, "load": 10}),
    (3, 0, {"softmax 0": 0, "softmax 1": 4, "softmax 2": 8, "load": 14}),
    (2, 56, {"softmax 0": 0, "softmax 1": 4, "transpose": 8, "load": 14}),
]


@pytest.mark.parametrize(("softmax_roles", "transpose_registers", "expected"), FIRST_WARPS)
def test_first_warps(softmax_roles, transpose_registers, expected):
    config = hopper_config(softmax_roles, 128, 2, 2, 152, transpose_registers=transpose_registers)
    assert scopes.first_warps(config) == expected


def test_all_ctas_fit_into_what_the_profiler_copies():
    ctas = Device.hopper().sm_count
    for row in HOPPER:
        assert isinstance(row.config, HopperConfig)
        roles = len(scopes.first_warps(row.config))
        room = scopes.bytes_per_role(roles, ctas)
        assert room & (room - 1) == 0
        assert ctas * (roles * room + 4096) <= scopes.TRACE_BYTES < ctas * (roles * 2 * room + 4096)
        assert room // scopes.WAIT_BYTES >= 4096


KERNELS = {
    "turns, pairs of CTAs": (torch.bfloat16, hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, num_ctas=2)),
    "fp8": (torch.float8_e4m3fn, hopper_config(2, 128, 2, 2, 152, transpose_registers=56)),
    "fp8, V transposed before": (torch.float8_e4m3fn, hopper_config(3, 128, 2, 2, 160)),
}
ALWAYS = {"queries", "keys", "values", "products: scores", "products: acc", "stores", "freed queries", "freed keys"}
EXPECTED = {
    "turns, pairs of CTAs": ALWAYS | {"turn", "values again", "freed values", "peer's keys", "peer's values"},
    "fp8": ALWAYS | {"loaded values", "freed values", "all at the start or the end"},
    "fp8, V transposed before": ALWAYS | {"freed values", "all at the start or the end"},
}


@pytest.fixture
def profiler(monkeypatch):
    """The profiler's part in compiling, on a card that is described instead of asked."""
    instrumentation = pytest.importorskip("triton.profiler.hooks.instrumentation")
    device = {"max_shared_mem": Device.hopper().smem_bytes}
    card = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: SimpleNamespace(backend="cuda", arch=90),
        utils=SimpleNamespace(get_device_properties=lambda _: device),
    )
    runtime = SimpleNamespace(driver=SimpleNamespace(active=card))
    monkeypatch.setattr(instrumentation, "triton", SimpleNamespace(runtime=runtime, knobs=knobs))
    told: list[tuple] = []  # (function, its name, names of scopes, their parents, file of metadata)
    monkeypatch.setattr(instrumentation.libproton, "init_function_metadata", lambda *of: told.append(of))
    return SimpleNamespace(InstrumentationHook=instrumentation.InstrumentationHook, told=told)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_wait_has_a_scope(profiler, kernel):
    dtype, config = KERNELS[kernel]
    warps = scopes.first_warps(config)
    plain = compiled(dtype, 64, Mask(), config)
    with scopes.scoped_waits():
        hook = profiler.InstrumentationHook(scopes.mode_of(warps, ctas=132))
        hook.activate()
        try:
            instrumented = compiled(dtype, 64, Mask(), config)
            hook.init_handle(None, 1, "attention_forward", instrumented.metadata_group, instrumented.hash)
        finally:
            hook.deactivate()
    ((_, _, names, parents, _),) = profiler.told
    assert parents == []  # no scope inside another
    assert compiled(dtype, 64, Mask(), config).hash == plain.hash != instrumented.hash
    assert "proton" not in plain.asm["ttgir"]
    assert knobs.compilation.instrumentation_mode == ""

    ttgir, records = instrumented.asm["ttgir"], r'proton\.record {} "{}" .*\n'
    waits = {"wait": "ttng.wait_barrier", "warpgroup_mma_wait": "ttng.warp_group_dot_wait"}
    for kind, operation in (waits | {"store_wait": "ttng.async_tma_store_wait"}).items():
        inside = rf"{records.format('start', kind)}.*{re.escape(operation)} .*\n\s*{records.format('end', kind)}"
        assert len(re.findall(inside, ttgir)) == ttgir.count(f"{operation} ") > 0
    assert [number for number, _ in names] == list(range(ttgir.count("proton.record start")))
    assert {name for _, name in names} == EXPECTED[kernel]

    assert instrumented.metadata.profile_scratch_size > len(warps) * scopes.bytes_per_role(len(warps), 132)
    # Which role each warp from the fourth on is told to run, when they are not all told the same.
    told = re.findall(r"store i8 (\d+), ptr addrspace\(3\)", instrumented.asm["llir"])
    warps_told = instrumented.metadata.num_warps - 4
    each = [list(map(int, told[i : i + warps_told])) for i in range(0, len(told), warps_told)]
    (numbers,) = (numbers for numbers in each if len(set(numbers)) > 1)
    assert [4 + numbers.index(min(numbers) + i) for i in range(len(warps) - 1)] == list(warps.values())[1:]
    # As many waits for products, or the assembler has serialised them.
    loops = [(one.products, one.waits, one.spills) for one in resources(plain).loops]
    assert [(one.products, one.waits, one.spills) for one in resources(instrumented).loops] == loops


OF_GRADIENTS = {
    "keys values", "queries", "douts", "products: s", "products: dp", "products: dv", "products: dq", "products: dk",
    "the other warpgroup", "freed dqs", "freed keys values", "freed queries", "freed douts", "claims", "freed claims",
    "dqs", "loaded sums", "freed next sums", "other programs", "stores", "all at the start or the end",
}  # fmt: skip


@pytest.mark.slow
def test_every_wait_of_gradients_has_a_scope(profiler):
    assert scopes.first_warps_of_gradients(finishes=False) == {
        "gradient, first half": 0, "gradient, second half": 4, "load": 10, "reduce": 11,
    }  # fmt: skip
    warps = scopes.first_warps_of_gradients(finishes=True)
    assert warps == {"gradient, first half": 0, "gradient, second half": 4, "load": 10, "reduce": 11, "finish": 8}
    mask, config = Mask(causal=True), BACKWARD[128]
    choices = Choices(
        dtype=torch.bfloat16,
        padded_head_dims=(128, 128),
        mask=mask,
        config=config,
        finishes=True,
        deterministic=True,
    )
    build = builds_of(choices)[1]
    plain = build.compile(90)
    with scopes.scoped_waits():
        hook = profiler.InstrumentationHook(scopes.mode_of(warps, ctas=132))
        hook.activate()
        try:
            instrumented = build.compile(90)
            hook.init_handle(None, 1, "attention_backward", instrumented.metadata_group, instrumented.hash)
        finally:
            hook.deactivate()
    ((_, _, names, _, _),) = profiler.told
    assert {name for _, name in names} == OF_GRADIENTS
    assert "proton" not in plain.asm["ttgir"]
    told = re.findall(r"store i8 (\d+), ptr addrspace\(3\)", instrumented.asm["llir"])
    assert told == ["2", "2", "0", "1", "3", "3", "3", "3"]  # what warps 8 to 15 run: finish, load, reduce
    assert [one.waits for one in resources(instrumented).loops] == [one.waits for one in resources(plain).loops]


def event(cta: int, warp: int, name: str, start: float, cycles: float, *, init: int = 7_000_000) -> dict:
    """As Triton 3.9 writes it: `ts` and `dur` in thousands of cycles, `ts` shifted by when the CTA began."""
    return {
        "args": {
            "Finalization Time (ns)": 100,
            "Frequency (MHz)": 1000.0,
            "Init Time (ns)": init + 500 * cta,
            "Post Final Time (ns)": init + 500 * cta + 9100 + 1000 * cta,
            "call_stack": ["ROOT", "attention_forward"],
        },
        "cat": "attention_forward",
        "cname": "cq_build_passed",
        "dur": cycles / 1e3,
        "name": name,
        "ph": "X",
        "pid": f"attention_forward Core{2 * cta} CTA{cta}",
        "tid": f"warp {warp} (line 0)",
        "ts": (start + 500 * cta) / 1e3,
    }


EVENTS = [
    event(0, 0, "queries", 0, 400),
    event(0, 0, "keys", 500, 100),
    event(0, 0, "keys", 800, 200),
    event(0, 14, "freed keys", 100, 50),
    event(10, 0, "keys", 0, 600),
    event(10, 0, "queries", 1900, 100),
    event(10, 14, "freed keys", 400, 150),
]
TRACE = {"displayTimeUnit": "ns", "traceEvents": EVENTS}
WARPS = {"softmax 0": 0, "load": 14}


def test_waits_of_a_trace():
    waits, spans = waits_of(TRACE)
    assert [(w.cta, w.warp, w.name) for w in waits] == [
        (0, 0, "queries"), (0, 0, "keys"), (0, 0, "keys"), (0, 14, "freed keys"),
        (10, 0, "keys"), (10, 0, "queries"), (10, 14, "freed keys"),
    ]  # fmt: skip
    assert [w.start for w in waits] == pytest.approx([0, 500, 800, 100, 0, 1900, 400])
    assert [w.cycles for w in waits] == pytest.approx([400, 100, 200, 50, 600, 100, 150])
    assert spans == {0: (0, 9000), 10: (5000, 24000)}
    assert spread(spans) == {
        "begin": {"min": 0.0, "median": 2.5, "max": 5.0},
        "end": {"min": 9.0, "median": 16.5, "max": 24.0},
    }


def test_the_summary_adds_up_over_ctas():
    found = summarise(waits_of(TRACE)[0], WARPS)
    softmax = found["softmax 0"]
    assert (softmax["ctas"], softmax["cycles"]) == (2, pytest.approx(1000 + 2000))
    assert list(softmax["waits"]) == ["keys", "queries"]
    assert softmax["waits"]["keys"] == pytest.approx({"number": 3, "cycles": 900, "share": 0.3, "longest": 600})
    assert softmax["waits"]["queries"] == pytest.approx({"number": 2, "cycles": 500, "share": 1 / 6, "longest": 400})
    assert found["load"]["cycles"] == pytest.approx(50 + 150)  # of each CTA from its first wait on
    text = timeline.table(found, {0: summarise([w for w in waits_of(TRACE)[0] if w.cta == 0], WARPS)})
    assert "softmax 0: 1.5 kcycles, 47% of them waiting" in text
    keys = next(line for line in text.splitlines() if line.startswith("  keys "))
    assert [cell.strip() for cell in keys.split("|")] == ["keys", "2", "300", "600", "30.0%", "30.0%"]


def test_a_role_without_waits_is_an_error():
    with pytest.raises(ValueError, match=r"expected waits of load in warp 14, got some of warps \[0\]"):
        summarise([Wait(0, 0, "keys", 0.0, 1.0)], WARPS)


@pytest.fixture
def measured(tmp_path):
    """What `measure` leaves behind."""
    (tmp_path / timeline.REPORT).write_text(json.dumps({"warps": WARPS, "name": "a point", "config": "a config"}))
    (tmp_path / timeline.TRACE).write_text(json.dumps(TRACE))
    return tmp_path


def command(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["timeline", *map(str, arguments)])
    timeline.main()


def test_redraw_draws_one_cta_within_the_window(measured, monkeypatch):
    pytest.importorskip("matplotlib")
    command(monkeypatch, "--redraw", "--out", measured, "--cta", 10, "--window", 0, 1)
    picture = (measured / timeline.PICTURE).read_text()
    assert all(
        f">{text}<" in picture for text in ("softmax 0", "load", "keys", "freed keys", "a point, a config, CTA 10")
    )
    assert ">queries<" not in picture  # later


def test_redraw_of_a_cta_that_is_not_there(measured, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match=r"--cta: expected one that .*timeline.chrome_trace has, got 3; run it again"):
        command(monkeypatch, "--redraw", "--out", measured, "--cta", 3)


def test_without_a_card(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper card, found no CUDA device; nothing was run"):
        command(monkeypatch, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_the_profiler(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton.profiler", None)
    with pytest.raises(SystemExit, match=r"needs Triton's profiler \(proton\), which Triton's own wheels bring along"):
        command(monkeypatch, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_on_another_card(tmp_path, monkeypatch):
    pytest.importorskip("triton.profiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(timeline.Point, "tensors", lambda self: [torch.empty((1, 1, 64, 64))] * 3)
    monkeypatch.setattr(timeline, "Device", SimpleNamespace(of=lambda _: Device.blackwell()))
    with pytest.raises(SystemExit, match="needs a Hopper card, found NVIDIA B200; nothing was run"):
        command(monkeypatch, "--out", tmp_path / "new", "--length", 64)
