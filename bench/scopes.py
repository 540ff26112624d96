"""A variant of a Hopper kernel, attention or its gradients, in which Triton's profiler (proton) notes the clock before
and after every wait.

The kernel's source stays as it is: while the variant is compiled, Gluon's waits are replaced by ones with a scope of
the profiler around them, and each scope is named after what the role that waits says in its own file.
"""

import contextlib
import functools
import linecache
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import knobs

from bench.compat import builtin, set_profile_allocator
from channels.compat import mbarrier, tma
from gluon_attn.backward.launch import NOT_THERE, allocated_apart, backward_launches_of
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.launch import NOT_GIVEN, compiled, launches_on_card, workspaces_of
from gluon_attn.forward.plan import Plan
from gluon_attn.kernels.hopper.backward import finish, gradient, reduce
from gluon_attn.kernels.hopper.backward.finish import WARPS as FINISH_WARPS
from gluon_attn.kernels.hopper.forward import softmax
from gluon_attn.runtime.compat import gl
from gluon_attn.runtime.kernel import CardLaunch, Launch, Tensors
from gluon_attn.tensors import output_dtype

# As the kernels' files call them. Of gradients also what one warpgroup waits for of the other.
WAITS = (
    (mbarrier, "wait"),
    (tma, "store_wait"),
    (softmax, "warpgroup_mma_wait"),
    (gradient, "warpgroup_mma_wait"),
    (gl, "barrier"),
)
ROLE_FILES = ("kernels/hopper/forward/", "kernels/hopper/backward/")
TRACE_BYTES = 64 * 2**20  # of all CTAs: the profiler copies no more to the host
WAIT_BYTES = 16  # two records


def scoped(wait: Callable[..., Any]) -> Any:
    """The Gluon builtin `wait`, with a scope around it that has its name until `scope_names` finds a better one."""
    from triton.profiler.language import enter_scope, exit_scope

    @functools.wraps(wait)
    def inside_scope(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        enter_scope(wait.__name__, _semantic=_semantic)
        result = wait(*args, _semantic=_semantic, **kwargs)
        exit_scope(wait.__name__, _semantic=_semantic)
        return result

    return builtin(inside_scope)


@contextlib.contextmanager
def scoped_waits() -> Iterator[None]:
    """While the profiler is on: what is compiled inside has a scope around each wait, and the profiler their names."""
    from triton.profiler.hooks import instrumentation

    from bench.scoped_wait import poll_inside_scope, wait_apart_inside_scope

    with contextlib.ExitStack() as stack:
        for module, name in WAITS:
            stack.enter_context(patch.object(module, name, scoped(getattr(module, name))))
        stack.enter_context(patch.object(gradient, "wait_apart", wait_apart_inside_scope))
        for role in (reduce, finish):
            stack.enter_context(patch.object(role, "atomic_poll", poll_inside_scope))
        of_module = patch.object(instrumentation.triton_proton, "get_scope_id_names", lambda m: scope_names(str(m)))
        stack.enter_context(of_module)
        # No cache of kernels can tell: keys leave out the source of Gluon's own functions.
        stack.enter_context(knobs.compilation.scope())
        knobs.compilation.always_compile = True
        compiled.cache_clear()
        stack.callback(compiled.cache_clear)
        yield


def scope_names(ttgir: str) -> list[tuple[int, str]]:
    """(number, name) of each scope of a kernel: the profiler numbers them in the order in which they stand there.

    They get their names so late because Gluon compiles a function like `acquire` once for all its callers; once it is
    inlined, a wait knows its place in each of them.
    """
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE))

    def frames(place: str) -> Iterator[tuple[str, str]]:
        """(file, text of the line), from the wait itself outwards."""
        at = places[place]
        if source := re.fullmatch(r'"(.*)":(\d+):\d+', at):
            yield source[1], linecache.getline(source[1], int(source[2])).strip()
        else:  # callsite(#loc1 at #loc2), or "a name"(#loc1)
            for inner in re.findall(r"#loc\d*", at):
                yield from frames(inner)

    starts = re.findall(r'proton\.record start "(\w+)" loc\((#loc\d*)\)', ttgir)
    return [(i, wait_name(kind, list(frames(place)))) for i, (kind, place) in enumerate(starts)]


def wait_name(kind: str, frames: list[tuple[str, str]]) -> str:
    """What is waited for, as a role says it: `k, keys = ends.keys.acquire()` waits for keys. kind: of WAITS."""
    of_roles = [at for at in frames if any(folder in at[0] for folder in ROLE_FILES)]
    file, line = (of_roles or frames[-1:])[0]
    if kind == "store_wait":
        return "stores"
    if kind == "barrier":
        return "the other warpgroup" if "gradient.py" in file else "all at the start or the end"
    if kind == "atomic_poll":
        return "other programs"
    if kind == "warpgroup_mma_wait":
        apart = re.search(r"wait_apart\((\w+)", line)
        return f"products: {apart[1] if apart else re.split('[,=]', line)[0].strip()}"
    channel = re.search(r"(\w+)\.(?:acquire|borrow|take|wait|wait_again)\(\)", line)
    if not channel:
        return line[:40]
    barrier = frames[0][1]
    side = "freed " if ".freed." in barrier else "peer's " if ".handover." in barrier else ""
    # A slot that is held is waited for anew, to keep what is around it in order.
    again = " again" if ".wait_again()" in line else ""
    name = "claims" if file.endswith("/work.py") else channel[1].replace("_", " ")
    return side + name + again


def first_warps(config: HopperConfig) -> dict[str, int]:
    """The first warp of each role. Triton places the launch's own warps first, then the roles by descending number of
    warps, among them idle ones that make it a multiple of four."""
    asked = {f"softmax {i}": 4 for i in range(1, config.softmax_roles)}
    asked |= {"transpose": 4} if config.transpose_registers else {}
    return placed({"softmax 0": 4}, asked | {"load": 1})


def first_warps_of_gradients(*, finishes: bool) -> dict[str, int]:
    """Likewise; the first role has two warpgroups. finishes: there is a role that makes dQ."""
    asked = {"load": 1, "reduce": 1} | ({"finish": FINISH_WARPS.value} if finishes else {})
    return placed({"gradient, first half": 4, "gradient, second half": 4}, asked)


def placed(launched: dict[str, int], asked: dict[str, int]) -> dict[str, int]:
    """The first warp of each, by how many there are: of those that the kernel is launched with, and of the roles that
    it asks for."""
    missing = -sum(asked.values()) % 4
    idle = {f"idle {n}": n for n in (2, 1) if missing & n}
    first, free = {}, 0
    for role, warps in (*launched.items(), *sorted((asked | idle).items(), key=lambda of: -of[1])):
        first[role], free = free, free + warps
    return {role: first[role] for role in (*launched, *asked)}


def bytes_per_role(roles: int, ctas: int) -> int:
    """What a role of each CTA can record: a power of two, as the profiler wants it."""
    share = min((TRACE_BYTES // ctas - 4096) // roles, 2**20)
    return 1 << share.bit_length() - 1


def mode_of(warps: dict[str, int], ctas: int) -> Any:
    """The profiler's settings."""
    from triton.profiler.mode import Default

    return Default(
        sampling_strategy="selective",
        sampling_options=",".join(map(str, sorted(warps.values()))),
        buffer_type="global",  # the kernel leaves little shared memory
        optimizations="clock32",  # goes round every two seconds, and takes fewer instructions
        buffer_size=bytes_per_role(len(warps), ctas) * len(warps),
    )


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def tensors_of(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    """What the attention kernel is given. What transposes V before it has run: it is not looked at, nor timed."""
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=output_dtype(q.dtype))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tensors: Tensors = {**NOT_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if (workspaces := workspaces_of(plan)) is not None:
        tensors |= workspaces(tensors)
    for step in launches_on_card(plan, q, k, v, out).steps[:-1]:
        step(tensors, stream())
    return tensors


def attention_of(plan: Plan, tensors: Tensors) -> Callable[[], None]:
    """The kernel's launch, which this compiles. tensors: as `tensors_of` makes them."""
    call = launches_on_card(plan, *(tensors[name] for name in ("q", "k", "v", "out")))
    return lambda: call.steps[-1](tensors, stream())


def tensors_of_gradients(plan: BackwardPlan, **tensors: Tensor) -> Tensors:
    """Likewise of the main kernel of gradients, given q, k, v, out, dout and lse. What prepares it has run."""
    given: Tensors = {**NOT_THERE, **tensors, **{f"d{n}": torch.empty_like(tensors[n]) for n in "qkv"}, "dlse": None}
    given |= allocated_apart(plan)(given)
    launch_of(backward_launches_of(plan, given_to(given))[0], plan, given)()
    return given


def gradients_of(plan: BackwardPlan, tensors: Tensors) -> Callable[[], None]:
    """Its launch, likewise. What the programs of a launch tell each other is set to zero before each."""
    launch = launch_of(backward_launches_of(plan, given_to(tensors))[1], plan, tensors)
    told = [tensors[name] for name in ("added", "claimed", "done", "has_handed_in") if tensors[name] is not None]

    def launch_anew() -> None:
        for numbers in told:
            numbers.zero_()
        launch()

    return launch_anew


def given_to(tensors: Tensors) -> Tensors:
    """Those that the call of gradients is given."""
    return {name: tensors[name] for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}


def launch_of(launch: Launch, plan: BackwardPlan, tensors: Tensors) -> Callable[[], None]:
    """Not by the cached kernels of a call: while the profiler is on, no other kernel may be compiled."""
    step = CardLaunch(launch, launch.build.compile(plan.arch), tensors["q"].device.index)
    return lambda: step(tensors, stream())


def profile(launch_of_variant: Callable[[], Callable[[], None]], mode: Any, path: str) -> Callable[[], None]:
    """Launch the variant twice and write a trace of the second time to `path`.chrome_trace. Returns the launch.

    launch_of_variant: compiles the kernel and returns its launch. mode: as `mode_of` makes it."""
    from triton import profiler

    with scoped_waits():
        session = profiler.start(path, data="trace", backend="instrumentation", mode=mode)
        launch = launch_of_variant()
        launch()
        torch.cuda.synchronize()
        profiler.data.clear(session)
        launch()
        profiler.finalize(session, "chrome_trace")
    # For launches without the profiler, which would zero as much anew for each of them: nobody reads this.
    set_profile_allocator(functools.cache(lambda size, *_: torch.empty(size, dtype=torch.uint8, device="cuda")))
    return launch
