"""One description of a kernel's parameters, and of a launch of it, from which all else is derived: the types it is
compiled for, the order of arguments, TMA descriptors, the launch on a card, on gluon_cpu and in a proof."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch

from .compat import CompiledKernel
from .compiler import compile_gluon, front_end
from .descriptors import Block, View
from .launcher import Launcher, current_stream, enter_context

Compiled = TypeVar("Compiled")
# What a call is given, by name: a Tensor; or None where a pointer may be null; on a card, or its address.
Tensors = dict[str, Any]
WORKSPACE_ALIGNMENT = 256  # bytes; TMA asks for 16, and lines of the L2 cache have 128


class KernelUnavailable(RuntimeError):
    """A call is fine, but its kernel could not be compiled or loaded: the cause says why."""


class NotInCapture(KernelUnavailable):
    """Its kernel is not loaded, and cannot be while a CUDA graph is captured: that would end the capture."""


def refuse_in_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise NotInCapture(
            "this call's kernel is not loaded, and cannot be while a CUDA graph is captured; make such a call before"
        )


@dataclass(frozen=True)
class Tma:
    """A parameter that is a TMA descriptor of the tensor called `tensor`. Not in each `Build` is it there."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Pointer:
    """A parameter that is the address of the tensor called `tensor`, of Triton's type `type`; null if that is None."""

    name: str
    tensor: str
    type: str = "fp32"


@dataclass(frozen=True)
class Scalar:
    """A parameter that is a number, of Triton's type `type`. It is not specialised on."""

    name: str
    type: str = "i32"


class Kernel:
    """A jitted kernel and its parameters: TMA descriptors first, then pointers, then numbers, then the compile-time
    ones, which are not listed.

    Raises ValueError if these are not the function's parameters, in that order.
    """

    def __init__(self, fn: Any, *parameters: Tma | Pointer | Scalar) -> None:
        self.fn = fn
        self.tma = tuple(p for p in parameters if isinstance(p, Tma))
        self.pointers = tuple(p for p in parameters if isinstance(p, Pointer))
        self.scalars = tuple(p for p in parameters if isinstance(p, Scalar))
        self.names: tuple[str, ...] = tuple(fn.arg_names)
        expected = tuple(p.name for p in fn.params if not p.is_constexpr)
        listed = tuple(p.name for kind in (self.tma, self.pointers, self.scalars) for p in kind)
        if listed != expected or listed != tuple(p.name for p in parameters):
            raise ValueError(
                f"parameters: expected {expected}, those of {fn.__name__} but for the compile-time ones, got "
                f"{tuple(p.name for p in parameters)}; list TMA descriptors, then pointers, then scalars"
            )

    def types(self, blocks: Mapping[str, Block], pointers: Mapping[str, str] | None = None) -> dict[str, str]:
        """Triton's type of each parameter, but for descriptors without a block, which are not there. blocks: of each
        TMA parameter's tensor. pointers: as `Build` has them."""
        types = {p.name: blocks[p.tensor].type_name for p in self.tma if p.tensor in blocks}
        types |= {p.name: f"*{(pointers or {}).get(p.name, p.type)}" for p in self.pointers}
        return types | {p.name: p.type for p in self.scalars}


@dataclass(frozen=True, kw_only=True)
class Build:
    """A kernel and all that its machine code depends on but the architecture.

    blocks: of each TMA parameter's tensor. constants: the compile-time parameters; and None for a descriptor or a
    pointer that is not there in this kernel at all. starts_early: it may begin before the kernel launched before it
    ends. num_warps: that it is launched with; those of further roles come on top. pointers: Triton's types of what
    pointers point to where it is not what the kernel says, by parameter.
    """

    kernel: Kernel
    blocks: Mapping[str, Block]
    constants: Mapping[str, Any]
    num_ctas: int = 1
    starts_early: bool = False
    num_warps: int = 4
    pointers: Mapping[str, str] = field(default_factory=dict)

    @property
    def described(self) -> tuple[Tma, ...]:
        """Those of the kernel's TMA parameters that are there."""
        return tuple(p for p in self.kernel.tma if p.name not in self.constants)

    def compile(self, arch: int) -> CompiledKernel:
        """arch: 90, 100 or 103, for sm_90a and so on. Needs no card. Raises NotInCapture in a capture."""
        refuse_in_capture()
        return self.given_to(compile_gluon, arch)

    def front_end(self, arch: int) -> str:
        """All that `compile` depends on but Triton itself, as a text; takes a second, see `compiler.front_end`."""
        return self.given_to(front_end, arch)

    def given_to(self, compiling: Callable[..., Compiled], arch: int) -> Compiled:
        return compiling(
            self.kernel.fn,
            self.kernel.types(self.blocks, self.pointers),
            dict(self.constants),
            arch=arch,
            num_warps=self.num_warps,
            num_ctas=self.num_ctas,
            starts_early=self.starts_early,
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch, but for the tensors. Keeps none alive.

    views: shape and strides of each TMA parameter's tensor. scalars: the numbers, by parameter. given: the tensor
    of the call that takes the place of a parameter's, by the latter's name.
    """

    build: Build
    programs: int
    views: Mapping[str, View]
    scalars: Mapping[str, float]
    given: Mapping[str, str] = field(default_factory=dict)

    def tensor_names(self, parameters: Sequence[Tma | Pointer]) -> list[str]:
        """What the call calls the tensors of these parameters."""
        return [self.given.get(p.tensor, p.tensor) for p in parameters]

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """The arguments of an ordinary launch through Triton, `fn[(programs,)](*arguments.values(), **options)`, by
        parameter. A pointer to a tensor that is None is None: whoever launches knows what stands for null."""
        kernel, build = self.build.kernel, self.build
        named: dict[str, Any] = {}
        for p, name in zip(build.described, self.tensor_names(build.described), strict=True):
            named[p.name] = self.views[p.tensor].descriptor(tensors[name], build.blocks[p.tensor])
        named |= {
            p.name: tensors[name] for p, name in zip(kernel.pointers, self.tensor_names(kernel.pointers), strict=True)
        }
        named |= self.scalars
        named |= build.constants
        return {name: named[name] for name in kernel.names}

    @property
    def options(self) -> dict[str, Any]:
        """The options of that launch."""
        build = self.build
        return {
            "num_warps": build.num_warps,
            "num_ctas": build.num_ctas,
            "enable_fp_fusion": True,
            "launch_pdl": build.starts_early,
        }


class CardLaunch:
    """A launch bound to a compiled kernel on a card."""

    def __init__(self, launch: Launch, compiled: CompiledKernel, device_index: int) -> None:
        build = launch.build
        kernel = build.kernel
        self.launcher = Launcher(compiled, launch.programs, device_index)
        self.tensors = getter(launch.tensor_names((*build.described, *kernel.pointers)))
        self.described = len(build.described)
        there = [launch.views[p.tensor] if p in build.described else None for p in kernel.tma]
        self.describe = descriptions(there, compiled)
        # A launch takes a place for each compile-time parameter, and no value.
        numbers = tuple(launch.scalars[p.name] for p in kernel.scalars)
        listed = len(kernel.tma) + len(kernel.pointers) + len(kernel.scalars)
        self.rest = (*numbers, *(None for _ in kernel.names[listed:]))

    def __call__(self, tensors: Tensors, stream: int) -> None:
        """Enqueue, with the tensors' device current. stream: of it."""
        # Addresses, not tensors: Triton's launcher would ask the driver about each.
        addresses = [t if t is None or type(t) is int else t.data_ptr() for t in self.tensors(tensors)]
        arguments = (*self.describe(*addresses[: self.described]), *addresses[self.described :], *self.rest)
        self.launcher(arguments, stream)


class Launches:
    """A call: launches one after the other, and memory of its own that they hand on to each other.

    workspaces: makes that memory, by name, from the tensors that the call was given. It is released when all launches
    are enqueued: the allocator keeps it for work on the same stream that comes later.
    """

    def __init__(
        self,
        steps: Sequence[Callable[..., None]],
        workspaces: Callable[[Tensors], Tensors] | None = None,
    ) -> None:
        self.steps = tuple(steps)
        self.workspaces = workspaces

    def __call__(self, tensors: Tensors) -> None:
        """Enqueue on the current stream of the tensors' device. `tensors` is the call's own."""
        if self.workspaces is not None:
            tensors |= self.workspaces(tensors)
        self.enqueue(tensors)

    def enqueue(self, tensors: Tensors) -> None:
        for step in self.steps:
            step(tensors)


class Unavailable(Launches):
    """What cannot be compiled or loaded: a call raises KernelUnavailable. It is not tried again, as that takes time.

    It is kept, and the error without its frames: those have the tensors of the call that failed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(())
        self.error = without_frames(error)

    def __call__(self, tensors: Tensors) -> None:
        raise not_made(self.error) from self.error


def not_made(error: Exception) -> KernelUnavailable:
    return KernelUnavailable(
        f"this call's kernel could not be compiled or loaded: {type(error).__name__}: {error}; see docs/install.md"
    )


def without_frames(error: Exception) -> Exception:
    """The same error, it and those that led to it without tracebacks."""
    chain: list[BaseException] = [error]
    for at in chain:  # which grows
        at.__traceback__ = None
        chain += [led for led in (at.__cause__, at.__context__) if led is not None and led not in chain]
    return error


def available(make: Callable[[], Launches]) -> Launches:
    """What `make` returns; or Unavailable, if it fails. Refusals, which name an argument, it raises; and
    KernelUnavailable where there is no memory, as the next call may have some."""
    try:
        return make()
    except (NotInCapture, NotImplementedError, TypeError, ValueError):
        raise
    except Exception as error:  # whatever Triton, its compiler or the system raises
        if "out of memory" in str(error).lower():  # as the driver says it, through Triton and through torch
            raise not_made(error) from error
        return Unavailable(error)


class CardLaunches(Launches):
    """`Launches` on a card, each step a `CardLaunch`. Device and stream are asked for once for all of them."""

    def __init__(
        self, steps: Sequence[CardLaunch], workspaces: Callable[[Tensors], Tensors] | None, device_index: int
    ) -> None:
        super().__init__(steps, workspaces)
        self.device_index = device_index

    def enqueue(self, tensors: Tensors) -> None:
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self.enqueue(tensors)
        enter_context(self.device_index)
        stream = current_stream(self.device_index)
        for step in self.steps:
            step(tensors, stream)


def allocated_at_once(like: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Callable[[Tensors], Tensors]:
    """Workspaces of these shapes and dtypes in one allocation, by address; on q's card."""
    offsets, size = {}, 0
    for name, (shape, dtype) in like.items():
        offsets[name] = size
        size += -(-math.prod(shape) * dtype.itemsize // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def workspaces(tensors: Tensors) -> Tensors:
        memory = torch.empty(size, dtype=torch.uint8, device=tensors["q"].device)
        first = memory.data_ptr()
        return {"memory": memory} | {name: first + offset for name, offset in offsets.items()}

    return workspaces


def getter(names: Sequence[str]) -> Callable[[Tensors], tuple[Any, ...]]:
    """What takes these tensors out of a call's, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda tensors: tuple(tensors[name] for name in names)


def descriptions(views: Sequence[View | None], compiled: CompiledKernel) -> Callable[..., tuple[Any, ...]]:
    """What a kernel is passed for all its descriptor parameters, by the addresses of the tensors. A parameter that is
    not there, of which the view is None, takes a place and no value.

    In a loop all of them come back to the same ones, and one look-up finds everything; elsewhere single ones do, and
    only the others are encoded anew.
    """
    metas = compiled.metadata.tensordesc_meta
    there = [view for view in views if view is not None]
    each = [lru_cache(maxsize=64)(partial(view.arguments, meta=meta)) for view, meta in zip(there, metas, strict=True)]

    @lru_cache(maxsize=64)
    def of_all(*addresses: int) -> tuple[Any, ...]:
        arguments = iter([of(address) for of, address in zip(each, addresses, strict=True)])
        return tuple(chain.from_iterable((None,) if view is None else next(arguments) for view in views))

    return of_all
