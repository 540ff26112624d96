"""Launching: arguments in, the machine run, outputs written where the tensors are."""

import inspect
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import findings, given, programmatic_launch
from .defaults import DEFAULT_MODE, DEFAULT_SCHEDULE, LAUNCHED
from .front import MODES, Compiled, arch_of, backend_for, compile_options, compile_source
from .global_memory import Descriptor, GlobalBuffer, Im2colDescriptor, merge_runs, strided_runs
from .ir.types import Scalar, TensorDesc
from .machine import Machine
from .ops.mbarrier import plural
from .schedule import Schedule
from .values import DTYPES
from .verdicts import SEEN, Accept, Verdicts, shown
from .wanted import Wanted, base_of, elements_before, is_descriptor


@dataclass
class Report:
    """What a launch without a finding has to say."""

    kernel: str
    schedule: Schedule
    mode: str
    programs: int
    num_ctas: int
    steps: int
    compile_seconds: float
    run_seconds: float
    roles: list[str] = field(default_factory=list)
    accepted: Counter[Accept] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.programs} programs of {self.num_ctas} CTAs, {self.steps} steps, "
            f"{self.run_seconds * 1e3:.1f} ms, schedule {self.schedule.policy} {self.schedule.seed}, no finding"
            + shown(self.accepted)
        )


FLOATS = {
    "float16": DTYPES["f16"], "bfloat16": DTYPES["bf16"], "float32": DTYPES["f32"], "float64": DTYPES["f64"],
    "float8_e4m3fn": DTYPES["f8E4M3FN"], "float8_e5m2": DTYPES["f8E5M2"],
}  # fmt: skip


@dataclass
class _Storage:
    """One allocation behind one or more tensors."""

    address: int
    raw: Any
    names: list[str]
    runs: list[tuple[int, int]]
    outputs: bool = True


class Arguments:
    """The launch's tensors, collected and placed in global memory."""

    def __init__(self) -> None:
        self.storages: dict[int, _Storage] = {}

    def add(self, name: str, tensor: Any) -> tuple[int, int]:
        """(key of the storage, byte offset of the tensor in it)."""
        if isinstance(tensor, np.ndarray):
            owner = tensor
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if not owner.flags.c_contiguous:
                owner = tensor
            base, raw = owner.ctypes.data, owner.reshape(-1).view(np.uint8)
            address, shape, strides, item = tensor.ctypes.data, tensor.shape, tensor.strides, tensor.itemsize
        else:
            import torch

            if tensor.device.type != "cpu":
                raise TypeError(f"{name}: expected a CPU tensor, got one on {tensor.device}")
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            item = tensor.element_size()
            address, shape = tensor.data_ptr(), tuple(tensor.shape)
            strides = tuple(s * item for s in tensor.stride())
        runs = strided_runs(tuple(shape), tuple(strides), item)
        found = self.storages.get(base)
        offset = address - base
        if found is None:
            found = self.storages[base] = _Storage(base, raw, [], [])
        found.names.append(name)
        found.runs += [(a + offset, b + offset) for a, b in runs]
        return base, offset

    def place(self, machine: Machine) -> dict[int, GlobalBuffer]:
        placed = {}
        for base, s in self.storages.items():
            placed[base] = machine.memory.add("/".join(dict.fromkeys(s.names)), base, s.raw, merge_runs(s.runs))
        return placed


def is_tensor(x: Any) -> bool:
    return isinstance(x, np.ndarray) or (hasattr(x, "data_ptr") and hasattr(x, "dtype"))


class NumpyPointer:
    """What Triton's specialisation looks at of a tensor, for a numpy array."""

    def __init__(self, array: Any) -> None:
        import torch

        self.array = array
        names = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64, "int32": torch.int32,
                 "int64": torch.int64, "int8": torch.int8, "int16": torch.int16, "uint8": torch.uint8,
                 "bool": torch.bool, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn,
                 "float8_e5m2": torch.float8_e5m2}  # fmt: skip
        if array.dtype.name not in names:
            raise TypeError(f"expected an array of a type that Triton knows, got {array.dtype}")
        self.dtype = names[array.dtype.name]

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


@dataclass
class Bound:
    """A launch whose arguments are bound: the code and what goes into it."""

    compiled: Compiled
    values: list[tuple[str, Any]]
    seconds: float


def bind(
    kernel: Any, args: Sequence[Any], kwargs: dict[str, Any], arch: int, mode: str, specialize: bool = True
) -> Bound:
    """Specialise as Triton does, and compile."""
    from .compat import create_function_from_signature, native_specialize_impl

    start = time.perf_counter()
    backend = backend_for(arch)
    binder = kernel.__dict__.setdefault("_gluon_cpu_binders", {}).get(arch)
    if binder is None:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        kernel.__dict__["_gluon_cpu_binders"][arch] = binder
    from .hooks import knob_options

    options_in = kwargs | knob_options(kernel, kwargs)
    shown = [NumpyPointer(a) if isinstance(a, np.ndarray) else a for a in args]
    named = {k: NumpyPointer(v) if isinstance(v, np.ndarray) else v for k, v in options_in.items()}
    try:
        bound_args, specialization, options = binder(*shown, **named)
    except TypeError:
        refuse_unknown(kernel, backend, shown, named)
        raise
    if not specialize:
        specialization = [
            s if p.is_constexpr or hasattr(bound_args[p.name], "data_ptr")
            else native_specialize_impl(backend, bound_args[p.name], False, False, False)
            for s, p in zip(specialization, kernel.params, strict=True)
        ]  # fmt: skip
    options, signature, constants, attrs = kernel._pack_args(backend, named, bound_args, specialization, options)
    compiled = compile_source(kernel, signature, constants, attrs, options, arch, mode)
    values: list[tuple[str, Any]] = []
    for name, value in bound_args.items():
        flatten(name, value, signature[name], values)
    return Bound(compiled, values, time.perf_counter() - start)


def refuse_unknown(kernel: Any, backend: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """TypeError for the argument whose type Triton does not know: its own error does not say which."""
    from .compat import native_specialize_impl

    given_to = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names})
    for parameter in kernel.params:
        value = given_to.arguments.get(parameter.name)
        if value is None or parameter.is_constexpr:
            continue
        try:
            native_specialize_impl(backend, value, False, False, False)
        except TypeError:
            raise TypeError(
                f"{parameter.name}: expected a tensor, a tensor descriptor, a number or a tuple of them, got {value!r}"
            ) from None


def flatten(name: str, value: Any, kind: Any, into: list[tuple[str, Any]]) -> None:
    """The arguments that reach the kernel, tuples taken apart."""
    if isinstance(kind, str) and kind == "constexpr":
        return
    if isinstance(kind, tuple):
        fields = getattr(value, "_fields", range(len(kind)))
        for f, v, k in zip(fields, value, kind, strict=True):
            flatten(f"{name}.{f}", v, k, into)
        return
    into.append((name, value.array if isinstance(value, NumpyPointer) else value))


def convert(machine: Machine, bound: Bound) -> tuple[Any, ...]:
    """What the generated kernel takes, in its order: a descriptor is followed by its shape and its strides."""
    types = bound.compiled.generated.arguments
    collected = Arguments()
    where: dict[int, tuple[int, int]] = {}
    for i, (name, value) in enumerate(bound.values):
        target = base_of(value) if is_descriptor(value) else value
        if is_tensor(target):
            where[i] = collected.add(name, target)
    placed = collected.place(machine)
    out: list[Any] = []
    for i, (name, value) in enumerate(bound.values):
        kind = types[len(out)]
        if is_descriptor(value):
            if not isinstance(kind, TensorDesc):
                raise TypeError(f"{name}: expected {kind}, got a tensor descriptor")
            base, offset = where[i]
            item = kind.element.bytes
            shape, strides = tuple(int(s) for s in value.shape), tuple(int(s) for s in value.strides)
            steps = tuple(s * item for s in strides)
            nan = getattr(value, "padding", "zero") == "nan"
            tensor = (placed[base], offset - elements_before(value) * item, shape, steps, item, nan)
            if getattr(value, "mode", "tiled") == "im2col":
                pixel_steps = tuple((value.element_strides or [1] * len(shape))[:-1])
                window = (tuple(value.pixel_box_lower_corner), tuple(value.pixel_box_upper_corner), pixel_steps)
                descriptor: Descriptor = Im2colDescriptor(*tensor, *window)
            else:
                descriptor = Descriptor(*tensor)
            descriptor.rounds_to_tf32 = getattr(value, "round_f32_to_tf32", False)
            out += [descriptor, *shape, *strides]
        elif i in where:
            base, offset = where[i]
            # On a card an empty tensor has no memory, and so a null address.
            out.append(placed[base].base + offset if math.prod(value.shape) else 0)
        else:
            out.append(convert_scalar(kind, value))
    if len(out) != len(types):
        raise TypeError(f"{bound.compiled.name}: {len(types)} arguments in the compiled kernel, {len(out)} given")
    return tuple(out)


def convert_scalar(kind: Any, value: Any) -> Any:
    assert isinstance(kind, Scalar), kind
    if hasattr(value, "item"):
        value = value.item()
    if kind.is_float:
        return DTYPES[kind.name].type(value)
    if kind.name == "i1":
        return bool(value)
    if kind.name == "ptr":
        return int(value or 0)
    bits = 8 * kind.bytes
    half = 1 << (bits - 1)
    return (int(value) + half) % (1 << bits) - half


def programs_of(grid: Any) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]]:
    x, y, z = given.grid_sizes(grid)
    return (x, y, z), [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]


def launch(
    kernel: Any,
    grid: Any,
    *args: Any,
    target: str = "sm_90a",
    num_warps: int = 4,
    num_ctas: int = 1,
    schedule: Schedule | None = None,
    mode: str | None = None,
    trace: Any = None,
    timeline: Any = None,
    checks: bool = True,
    outputs: Sequence[Any] | Wanted | None = None,
    resident: int = 4,
    specialize: bool = True,
    launch_pdl: bool = False,
    skip: Collection[str] = (),
    accept: Collection[Accept] = (),
    keep_going: bool = False,
    **meta: Any,
) -> Report:
    """Run a Gluon kernel here and now; the outputs are in the tensors afterwards.

    target: 'sm_90a', 'sm_100a' or 'sm_103a'. schedule: which interleaving; the same one replays exactly.
    mode: 'fast' (one CTA) or 'lowered' (with the compiler's memory offsets, fences and cluster barriers); by num_ctas.
    trace: a file for a Chrome trace. timeline: a file (.svg, .png) for a picture of what one program does.
    checks: False to only compute. resident: programs that run at the same time.
    outputs: the tensors of which every element must be written: arguments, or names of parameters. By default, of
    tensors that the kernel writes and never reads, no element may stay NaN: who hands over NaN wants them filled.
    launch_pdl: the kernel may start before the launch before it ends, if that one says so (see programmatic_launch.py).
    specialize: False to compile without regard to the values of integers, as kernels compiled ahead of time are.
    skip: kinds of findings, by name, that are not looked for. accept: findings that are known, with a reason each.
    keep_going: collect findings to the end, where the run can go on; the first is certain, others may follow from it.
    Raises a `Finding` if the kernel has a defect; with keep_going, an ExceptionGroup of them. TypeError and ValueError
    for arguments that make no sense. NotImplementedError for what the machine does not know.
    """
    check_arguments(kernel, schedule, args, meta, num_warps=num_warps, num_ctas=num_ctas, resident=resident)
    for name, value in {
        "checks": checks, "specialize": specialize, "launch_pdl": launch_pdl, "keep_going": keep_going,
    }.items():  # fmt: skip
        given.flag(name, value)
    if trace is not None:
        given.file_name("trace", trace)
    verdicts = Verdicts(skip, accept, keep_going)
    wanted = Wanted(outputs) if outputs is not None and not isinstance(outputs, Wanted) else outputs
    schedule = schedule or DEFAULT_SCHEDULE.get() or Schedule()
    mode = mode or DEFAULT_MODE.get() or ("fast" if num_ctas == 1 else "lowered")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    if mode == "fast" and num_ctas > 1:
        raise ValueError("mode: 'fast' knows one CTA only; leave mode out, or pass 'lowered'")
    picture = None
    if timeline is not None:
        from .timeline import Timeline

        picture = Timeline.of(timeline)
    bound = bind(
        kernel, args, {**meta, "num_warps": num_warps, "num_ctas": num_ctas}, arch_of(target), mode, specialize
    )
    if callable(grid):
        grid = grid(dict(bound.values) | meta)
    sizes, programs = programs_of(grid)
    names_wanted = None if wanted is None else wanted.names(bound.values, is_tensor)
    tracer = None
    if trace is not None or picture is not None:
        from .trace import Trace

        tracer = Trace(None if trace is None else str(trace))
    machine = Machine(bound.compiled, programs, sizes, schedule, checks, tracer, resident, verdicts)
    start = time.perf_counter()
    arguments = convert(machine, bound)
    unknown = programmatic_launch.LAST.get() if launch_pdl and checks else None
    programmatic_launch.LAST.set(None)
    if unknown is not None:
        for buffer in machine.memory.buffers:
            unknown.before(buffer)
    try:
        with np.errstate(all="ignore"):
            machine.run(arguments)
            if checks:
                check_outputs(machine, bound, names_wanted)
                if unknown is not None and not machine.has_waited:
                    raise NotImplementedError(
                        f"launch_pdl: expected a gdc_wait() in {bound.compiled.name}, which may start before "
                        f"{unknown.kernel} ends: without one, later launches may start before that as well"
                    )
                if machine.lets_next_start:
                    older = unknown if machine.lets_it_too_early else None
                    programmatic_launch.LAST.set(
                        programmatic_launch.footprint(bound.compiled.name, machine.memory.buffers, older)
                    )
    except findings.Finding as finding:  # which ends the run
        machine.seal(finding)
        if tracer is not None:
            tracer.found(machine, finding)
        if not keep_going:
            verdicts.seen.raised.append(finding)
            raise
        verdicts.seen.add(finding)
    finally:
        if tracer is not None:
            tracer.save()
        if picture is not None and tracer is not None:
            picture.take(tracer, machine)
        conclude(verdicts)
    if verdicts.seen.findings and SEEN.get() is None:
        raise ExceptionGroup(f"{plural(len(verdicts.seen.findings), 'finding')}", verdicts.seen.findings)
    seconds = time.perf_counter() - start
    names = [r.name for r in bound.compiled.generated.roles]
    report = Report(
        bound.compiled.name,
        schedule,
        mode,
        len(programs),
        num_ctas,
        machine.steps,
        bound.seconds,
        seconds,
        names,
        verdicts.seen.accepted,
    )
    within = LAUNCHED.get()
    if within is not None:
        within.append(report)
    return report


def check_arguments(kernel: Any, schedule: Any, args: Sequence[Any], meta: dict[str, Any], **numbers: Any) -> None:
    """numbers: options that are whole numbers."""
    from .compat import GluonJITFunction

    if not isinstance(kernel, GluonJITFunction):
        what = "a Triton kernel (@triton.jit)" if hasattr(kernel, "cache_key") else repr(kernel)
        raise TypeError(f"kernel: expected a Gluon kernel (@gluon.jit), got {what}")
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: expected a Schedule, as Schedule('late', seed=0), got {schedule!r}")
    given.power_of_two("num_warps", numbers["num_warps"], most=32)
    given.power_of_two("num_ctas", numbers["num_ctas"], most=16)
    given.whole("resident", numbers["resident"], least=1)
    given.known(meta, {*kernel.arg_names, *OPTIONS, *compile_options()}, f"launch or of {kernel.__name__}")
    try:
        kernel.signature.bind(*args, **{name: value for name, value in meta.items() if name in kernel.arg_names})
    except TypeError as error:
        names = ", ".join(kernel.arg_names)
        raise TypeError(f"{kernel.__name__}: expected arguments for ({names}), got others: {error}") from None


# The options of `launch`, those that a kernel's own arguments stand among left out.
OPTIONS = frozenset(
    name for name, parameter in inspect.signature(launch).parameters.items() if parameter.kind == parameter.KEYWORD_ONLY
)


def conclude(verdicts: Verdicts) -> None:
    """Tell the surrounding `check`, if there is one."""
    seen = SEEN.get()
    if seen is not None:
        seen.launches += 1
        seen.accepted.update(verdicts.seen.accepted)
        seen.raised += verdicts.seen.raised
        for finding in verdicts.seen.findings:
            seen.add(finding)


def check_outputs(machine: Machine, bound: Bound, wanted: set[str] | None) -> None:
    """That somebody wrote every element of every output. wanted: the names of those; None: by what the kernel does."""
    for buffer in machine.memory.buffers:
        if buffer.scratch:
            continue
        if wanted is None and (not buffer.written or buffer.was_read):
            continue
        if wanted is not None and not wanted & set(buffer.name.split("/")):
            continue
        gaps = buffer.shadow.written_gaps(buffer.runs)
        if wanted is None:
            # A kernel may well write a part of a tensor and leave the rest. But who hands over NaN wants it filled.
            dtype = dtype_of(bound, buffer)
            gaps = [(a, b) for a, b in gaps if dtype is not None and np.isnan(buffer.raw[a:b].view(dtype)).any()]
        if gaps:
            missing = sum(b - a for a, b in gaps)
            total = sum(b - a for a, b in buffer.runs)
            machine.found(
                findings.OutputError(
                    f"{missing} of the {total} bytes of output {buffer.name} are written by nobody; first bytes "
                    f"{gaps[0][0]} to {gaps[0][1]}{element_of(bound, buffer, gaps[0][0])}\n"
                    "  If the kernel is meant to leave them, name the tensors that it must fill: outputs=[...]."
                )
            )


def dtype_of(bound: Bound, buffer: GlobalBuffer) -> Any:
    """The floating-point type of a buffer's elements; None if they are of another, or of several."""
    found = set()
    for name, value in bound.values:
        if name in buffer.name.split("/"):
            tensor = base_of(value) if is_descriptor(value) else value
            kind = tensor.dtype.name if isinstance(tensor, np.ndarray) else str(tensor.dtype).removeprefix("torch.")
            found.add(kind)
    if len(found) != 1:
        return None
    return FLOATS.get(found.pop())


def element_of(bound: Bound, buffer: GlobalBuffer, byte: int) -> str:
    """The coordinates of a byte in the tensor it belongs to, for messages."""
    for name, value in bound.values:
        tensor = base_of(value) if is_descriptor(value) else value
        if name not in buffer.name.split("/") or not is_tensor(tensor) or isinstance(tensor, np.ndarray):
            continue
        index = byte // tensor.element_size() - tensor.storage_offset()
        coordinates = []
        for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: -p[1]):
            coordinates.append(index // stride % size if stride else 0)
        if tensor.is_contiguous() and math.prod(tensor.shape) > 0:
            return f", that is {name}[{', '.join(map(str, coordinates))}]"
    return ""
