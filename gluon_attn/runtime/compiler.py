"""Compiling a Gluon kernel for an architecture, with or without the card."""

from typing import Any

from .assembler import newest_assembler, warn_if_serialised
from .compat import MINORS, CompiledKernel, GluonASTSource, GPUTarget, ir, knobs, make_backend, minor_of, triton


def check_triton_version(arch: int | None = None, *, on_cpu: bool = False) -> None:
    """RuntimeError unless this minor release of Triton is supported, as Gluon changes with each; and for what is asked.

    arch: that kernels are compiled for. on_cpu: that they are executed by gluon_cpu.
    """
    minor = MINORS.get(minor_of(triton.__version__))
    if minor is None:
        expected, why = list(MINORS), ""
    elif on_cpu and not minor.gluon_cpu:
        expected, why = [n for n, m in MINORS.items() if m.gluon_cpu], " to execute kernels on the CPU"
    elif arch is not None and arch not in minor.archs:
        expected, why = [n for n, m in MINORS.items() if arch in m.archs], f" for kernels for sm_{arch}a"
    else:
        return
    major, _, newest = expected[-1].partition(".")
    raise RuntimeError(
        f"triton: expected version {' or '.join(expected)}{why}, got {triton.__version__}; install it with "
        f"pip install 'triton>={expected[-1]},<{major}.{int(newest) + 1}' (add --no-deps beside a torch that pins "
        "another)"
    )


def compile_gluon(
    fn: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int,
    num_warps: int,
    num_ctas: int,
    starts_early: bool = False,
) -> CompiledKernel:
    """Compile a Gluon kernel for an architecture (90 for sm_90a), with or without the card. Triton caches it on disk.

    signature: Triton's type of each parameter that is not in `constants`. Pointers are taken to be 16-byte aligned.
    Nothing else about arguments is specialised on, so that a new length never needs a new kernel.
    starts_early: a launch may begin before the kernel launched before it ends, if that one says so; `gdc_wait` waits
    for the end (CUDA's programmatic dependent launch).
    """
    source = source_of(fn, signature, constants)
    options = options_of(num_warps, num_ctas, starts_early)
    with newest_assembler():
        kernel = triton.compile(source, target=target_of(arch), options=options)
    warn_if_serialised(kernel)
    return kernel


def front_end(
    fn: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int,
    num_warps: int,
    num_ctas: int,
    starts_early: bool = False,
) -> str:
    """What Triton's front end makes of a kernel, without lines of the source, and the options that it is compiled with:
    all that `compile_gluon` of the same arguments depends on, but for Triton itself. Takes about a second."""
    options = options_of(num_warps, num_ctas, starts_early)
    backend = make_backend(target_of(arch))
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source_of(fn, signature, constants).make_ir(target_of(arch), parsed, *made, context)
    return f"{options}\n{module.str_nodebug()}"


def source_of(fn: Any, signature: dict[str, str], constants: dict[str, Any]) -> Any:
    """What Triton compiles."""
    names = fn.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    return GluonASTSource(fn, types, {(names.index(n),): value for n, value in constants.items()}, aligned)


def options_of(num_warps: int, num_ctas: int, starts_early: bool) -> dict[str, Any]:
    return {
        "num_warps": num_warps,
        "num_ctas": num_ctas,
        "launch_pdl": starts_early,
        "enable_fp_fusion": True,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }


def target_of(arch: int) -> Any:
    check_triton_version(arch)
    return GPUTarget("cuda", arch, 32)
