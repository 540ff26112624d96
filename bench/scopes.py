"""A variant of the Hopper kernel in which Triton's profiler (proton) notes the clock before and after every wait.

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
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.launch import NOT_GIVEN, compiled, launches_on_card, workspaces_of
from gluon_attn.forward.plan import Plan
from gluon_attn.kernels.hopper.forward import softmax
from gluon_attn.runtime.kernel import Tensors
from gluon_attn.tensors import output_dtype

WAITS = ((mbarrier, "wait"), (tma, "store_wait"), (softmax, "warpgroup_mma_wait"))  # as the kernel's files call them
ROLE_FILES = "kernels/hopper/forward/"
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

    with contextlib.ExitStack() as stack:
        for module, name in WAITS:
            stack.enter_context(patch.object(module, name, scoped(getattr(module, name))))
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
    line = next((text for file, text in frames if ROLE_FILES in file), frames[-1][1])
    if kind == "store_wait":
        return "stores"
    if kind == "warpgroup_mma_wait":
        return f"products: {re.split('[,=]', line)[0].strip()}"
    channel = re.search(r"(\w+)\.(?:acquire|take|wait_again)\(\)", line)
    if not channel:
        return line[:40]
    barrier = frames[0][1]
    side = "freed " if ".freed." in barrier else "peer's " if ".handover." in barrier else ""
    # A slot that is held is waited for anew, to keep what is around it in order.
    again = " again" if ".wait_again()" in line else ""
    return side + channel[1].replace("_", " ") + again


def first_warps(config: HopperConfig) -> dict[str, int]:
    """The first warp of each role. Triton places the launch's own warps first, then the roles by descending number of
    warps, among them idle ones that make it a multiple of four."""
    asked = {f"softmax {i}": 4 for i in range(1, config.softmax_roles)}
    asked |= {"transpose": 4} if config.transpose_registers else {}
    asked["load"] = 1
    missing = -sum(asked.values()) % 4
    idle = {f"idle {n}": n for n in (2, 1) if missing & n}
    first, free = {"softmax 0": 0}, 4
    for role, warps in sorted((asked | idle).items(), key=lambda placed: -placed[1]):
        first[role], free = free, free + warps
    return {role: first[role] for role in ("softmax 0", *asked)}


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


def tensors_of(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    """What the attention kernel is given. What transposes V before it has run: it is not looked at, nor timed."""
    out = torch.empty_like(q, dtype=output_dtype(q.dtype))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tensors: Tensors = {**NOT_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if (workspaces := workspaces_of(plan)) is not None:
        tensors |= workspaces(tensors)
    for step in launches_on_card(plan, q, k, v, out).steps[:-1]:
        step(tensors)
    return tensors


def attention_of(plan: Plan, tensors: Tensors) -> Callable[[], None]:
    """tensors: as `tensors_of` makes them."""
    call = launches_on_card(plan, *(tensors[name] for name in ("q", "k", "v", "out")))
    return functools.partial(call.steps[-1], tensors)


def profile(plan: Plan, warps: dict[str, int], tensors: Tensors, path: str) -> Callable[[], None]:
    """Launch the variant twice and write a trace of the second time to `path`.chrome_trace. Returns the launch."""
    from triton import profiler

    with scoped_waits():
        mode = mode_of(warps, plan.programs * plan.config.num_ctas)
        session = profiler.start(path, data="trace", backend="instrumentation", mode=mode)
        launch = attention_of(plan, tensors)
        launch()
        torch.cuda.synchronize()
        profiler.data.clear(session)
        launch()
        profiler.finalize(session, "chrome_trace")
    # For launches without the profiler, which would zero as much anew for each of them: nobody reads this.
    set_profile_allocator(functools.cache(lambda size, *_: torch.empty(size, dtype=torch.uint8, device="cuda")))
    return launch
