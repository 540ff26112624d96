"""From a Gluon kernel and its arguments to generated code, without a GPU; kept on disk by hash.

The real frontend and the compiler's own passes run up to the printed form; nothing is assembled.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from .generate import Generated, generate
from .ir.locations import NOWHERE, Site
from .ir.parse import parse_module

MODES = ("fast", "lowered")


class Compiled:
    """Generated code, loaded."""

    def __init__(self, g: Generated) -> None:
        from .runtime import namespace

        self.generated = g
        self.name = g.name
        self.num_ctas = g.num_ctas
        self.smem_bytes = g.smem_bytes
        self.constants = g.constants
        self.roles = len(g.roles)
        self.main_role = g.main_role
        self.filename = f"<gluon_cpu {g.name} {id(g):x}>"
        names = namespace()
        for i, info in enumerate(g.infos):
            names[f"I{i}"] = info
        import linecache

        # So that tracebacks and debuggers can show the generated line.
        linecache.cache[self.filename] = (len(g.source), None, g.source.splitlines(True), self.filename)
        code: CodeType = compile(g.source, self.filename, "exec")
        exec(code, names)
        self.names = names
        self.entry = names[g.entry]

    def site_of_traceback(self, tb: Any) -> Site:
        """Where in the kernel an exception came from."""
        found = NOWHERE
        for frame, line in traceback.walk_tb(tb):
            if frame.f_code.co_filename == self.filename:
                found = self.generated.lines[line - 1]
        return found


def cache_directory() -> Path:
    root = os.environ.get("GLUON_CPU_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "gluon_cpu"


@functools.cache
def version_key() -> str:
    """Changes with this package and with Triton: both shape what is cached."""
    from importlib.metadata import version

    h = hashlib.sha256(f"{version('triton')} {sys.version_info[:2]}".encode())
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()


@functools.cache
def backend_for(arch: int) -> Any:
    from .compat import GPUTarget, make_backend

    return make_backend(GPUTarget("cuda", arch, 32))


@functools.cache
def compile_options() -> frozenset[str]:
    """The names of the options that Triton's backend takes with a launch."""
    # Triton warns where nobody says whether to fuse.
    return frozenset(vars(backend_for(90).parse_options({"enable_fp_fusion": True})))


def arch_of(target: str) -> int:
    """The number in the name of a target that Gluon has warp specialisation and TMA for; ValueError for others."""
    digits = target.removeprefix("sm_").rstrip("abf") if isinstance(target, str) else ""
    if digits not in ("90", "100", "103"):
        raise ValueError(f"target: expected 'sm_90a', 'sm_100a' or 'sm_103a', got {target!r}")
    return int(digits)


def lower(module: Any, arch: int) -> Any:
    """The backend's passes between TTGIR and the conversion of control flow: offsets, fences, cluster barriers."""
    from .compat import ir, nvidia, passes

    ptx_version = 84 if arch < 100 else 87
    pm = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(pm)
    passes.ttgpuir.add_allocate_warp_groups(pm, False)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(pm, arch, ptx_version)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(pm)
    nvidia.passes.ttnvgpuir.add_proxy_fence_insertion(pm, arch)
    nvidia.passes.ttnvgpuir.add_tmem_barrier_insertion(pm)
    nvidia.passes.ttgpuir.add_membar(pm, arch, ptx_version)
    nvidia.passes.ttnvgpuir.add_tmem_wait_insertion(pm)
    pm.run(module, "lower")
    return module


# Modules compiled in fast mode, by what they are made of: `check` compiles them in lowered mode too, from there on.
_FAST: dict[str, Any] = {}
MOST_KEPT = 8
# Triton's bindings report a module that outlives them as a leak, in thirty lines.
atexit.register(_FAST.clear)


def build_text(source: Any, arch: int, options: Any, lowered: bool, key: str = "") -> str:
    """The printed module of a kernel. key: of what it is made of, whatever the mode; without one nothing is kept."""
    try:
        return printed_module(source, arch, options, lowered, key)
    except RuntimeError as error:
        # Its message is no more than the name of a pass. Done again to hear what the compiler printed, not listened to
        # before: it ends the process after some errors, and what it printed then must not be lost.
        said = errors_printed(lambda: printed_module(source, arch, options, lowered))
        raise RuntimeError(f"{source.fn.__name__}: the compiler refuses it: {said or error}") from error


def printed_module(source: Any, arch: int, options: Any, lowered: bool, key: str = "") -> str:
    module = _FAST.pop(key, None)
    if module is None:
        module = build_ttgir(source, arch, options)
    if lowered:
        module = lower(module, arch)
    elif key:
        _FAST[key] = module
        if len(_FAST) > MOST_KEPT:
            del _FAST[next(iter(_FAST))]
    return str(module.str() if hasattr(module, "str") else module)


def build_ttgir(source: Any, arch: int, options: Any) -> Any:
    """What the frontend and the compiler's own passes make of a kernel, in either mode."""
    from .compat import ir
    from .hooks import frontend_hooks

    let_go_at_exit()
    backend = backend_for(arch)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    target = source_target(arch)
    with frontend_hooks(arch):
        module = source.make_ir(
            target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )
    metadata: dict[str, Any] = {}
    return backend.gluon_to_ttgir(module, metadata, options, arch)


@functools.cache
def let_go_at_exit() -> None:
    """Nothing of the compiler's own is alive when the bindings go.

    Some kernels, those with a reduction among them, leave functions of this module alive until after the bindings that
    it names are gone, which the bindings then report as leaks, in thirty lines. Without its names nothing holds them. A
    process that ends has no further use for them; handlers registered later have run before this one.
    """
    from .compat import semantic

    atexit.register(vars(semantic).clear)


def errors_printed(action: Callable[[], object]) -> str:
    """The errors that native code prints to the process's standard error while an action fails."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.suppress(RuntimeError):
                action()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        printed = file.read().decode(errors="replace")
    return "\n  ".join(errors_in(printed))


DIAGNOSTIC = re.compile(r"\b(error|warning|note|remark): ")
DUMP = ("module", '"builtin.module"', "#", "{-#", "//")  # how the module begins that may follow an error


def errors_in(printed: str) -> list[str]:
    """Each error with the lines that explain it, up to the next diagnostic or the module; each line once."""
    kept: dict[str, None] = {}
    inside = False
    for line in printed.splitlines():
        diagnostic = DIAGNOSTIC.search(line)
        if diagnostic:
            inside = diagnostic[1] == "error"
        elif not line.strip() or line.startswith(DUMP):
            inside = False
        if inside:
            kept[line.rstrip()] = None
    placed = [line for line in kept if not line.startswith("<unknown>")]
    return placed or list(kept)


def source_target(arch: int) -> Any:
    from .compat import GPUTarget

    return GPUTarget("cuda", arch, 32)


def source_hash(kernel: Any, signature: Any, constants: Any, attrs: Any, options: Any, arch: int, mode: str) -> str:
    from .hooks import uses_breakpoint

    parts = (
        version_key(), kernel.cache_key, kernel.__module__, str(sorted(signature.items())), repr_constants(constants),
        str(sorted(attrs.items(), key=str)), options.hash(), arch, mode, source_position(kernel),
        uses_breakpoint(kernel),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def source_position(kernel: Any) -> tuple[str, int]:
    code = kernel.fn.__code__
    return code.co_filename, code.co_firstlineno


def repr_constants(constants: Any) -> str:
    def one(v: Any) -> str:
        key = getattr(v, "cache_key", None)
        return key if isinstance(key, str) else repr(v)

    return str(sorted((str(k), one(v)) for k, v in constants.items()))


_LOADED: dict[str, Compiled] = {}


def compile_source(
    kernel: Any, signature: Any, constants: Any, attrs: Any, options: Any, arch: int, mode: str
) -> Compiled:
    """Compile, or take from memory or disk."""
    from .compat import GluonASTSource

    key = source_hash(kernel, signature, constants, attrs, options, arch, mode)
    if key in _LOADED:
        return _LOADED[key]
    path = cache_directory() / f"{key}.pickle"
    generated = read_cache(path)
    if generated is None:
        source = GluonASTSource(kernel, signature, constants, attrs)
        either = source_hash(kernel, signature, constants, attrs, options, arch, mode="")
        text = build_text(source, arch, options, mode == "lowered", either)
        generated = generate(parse_module(text), mode == "lowered")
        frames = [f for info in generated.infos for f in info.site.frames]
        generated.files = {name: file_hash(name) for name in {f.file for f in frames}}
        write_cache(path, generated)
    compiled = _LOADED[key] = Compiled(generated)
    return compiled


def read_cache(path: Path) -> Generated | None:
    try:
        with path.open("rb") as f:
            found = pickle.load(f)
    except (OSError, EOFError, pickle.PickleError, AttributeError, ImportError, IndexError):
        return None
    if not isinstance(found, Generated):
        return None
    # Triton's key covers what a function says, not where it stands: reports need the lines as they are now.
    return found if all(file_hash(name) == known for name, known in found.files.items()) else None


def file_hash(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return ""


def write_cache(path: Path, generated: Generated) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        with scratch.open("wb") as f:
            pickle.dump(generated, f, protocol=5)
        scratch.replace(path)
    except OSError:
        return  # a cache that cannot be written costs time, nothing else
