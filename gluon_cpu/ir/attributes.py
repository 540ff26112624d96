"""Layout attributes, as printed, to Gluon's layout objects and from there to linear layouts.

The compiler itself turns a layout into its linear form, so that no rule of swizzling or of tiling is written twice.
"""

import atexit
import functools
import re
from typing import Any

from ..compat import GPUTarget, gl, gluon_ir, ir, make_backend
from .text import int_array, int_attr, matching, parse_dict


@functools.cache
def builder() -> Any:
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 100, 32)).load_dialects(context)
    # The builder refers to the context without keeping it alive.
    _CONTEXTS.append(context)
    return gluon_ir.GluonOpBuilder(context)


_CONTEXTS: list[Any] = []


# A process that ends may leave this module alive until after the bindings are gone, which then report the builder and
# all that it leads to as leaks, in thirty lines.
@atexit.register
def let_go_of_builder() -> None:
    builder.cache_clear()
    _CONTEXTS.clear()


def bases(text: str) -> list[list[int]]:
    """`[[0, 1], [8, 0]]` as nested lists; `[]` has none."""
    inner = (re.findall(r"-?\d+", part) for part in re.findall(r"\[([^\[\]]*)\]", text))
    return [[int(n) for n in numbers] for numbers in inner if numbers]


def fields(text: str) -> tuple[str, dict[str, str]]:
    """(`nvidia_mma`, its parameters) of `#ttg.nvidia_mma<{...}>`."""
    m = re.match(r"#\w+\.(\w+)<", text)
    if not m:
        raise NotImplementedError(f"layout {text}")
    inside = text[m.end() : matching(text, m.end() - 1)].strip()
    if inside.startswith("["):  # the gaps of a padded layout come first
        inside = inside[matching(inside, 0) + 1 :].strip()
    if inside.startswith("{"):
        end = matching(inside, 0)
        entries = parse_dict(inside[1:end])
        entries |= parse_dict(inside[end + 1 :].lstrip(", "))
        return m[1], entries
    return m[1], parse_dict(inside)


def to_gluon(text: str, shape: tuple[int, ...]) -> Any:
    """The Gluon layout object of an attribute; `shape` is that of the tensor it describes."""
    kind, f = fields(text)
    cga = bases(f["CGALayout"]) if "CGALayout" in f else []
    if kind == "blocked":
        per_thread, threads, warps, order = (
            int_array(f[k]) for k in ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")
        )
        return gl.BlockedLayout(per_thread, threads, warps, order, cga)
    if kind == "slice":
        dim = int_attr(f["dim"])
        return gl.SliceLayout(dim, to_gluon(f["parent"], (*shape[:dim], 1, *shape[dim:])))
    if kind == "linear":
        register, lane, warp, block = (bases(f[k]) for k in ("register", "lane", "warp", "block"))
        rank = len((register + lane + warp + block or [[0] * len(shape)])[0])
        full = [1] * rank
        for basis in register + lane + warp + block:
            for d, b in enumerate(basis):
                full[d] = max(full[d], 2 * b)
        return gl.DistributedLinearLayout(register, lane, warp, block, full)
    if kind == "dot_op":
        parent = to_gluon(f["parent"], shape)
        return gl.DotOperandLayout(int_attr(f["opIdx"]), parent, int_attr(f.get("kWidth", "0")))
    if kind == "nvidia_mma":
        version: Any = [int_attr(f["versionMajor"]), int_attr(f["versionMinor"])]
        return gl.NVMMADistributedLayout(version, int_array(f["warpsPerCTA"]), int_array(f["instrShape"]), cga)
    if kind == "nvmma_shared":
        return gl.NVMMASharedLayout(
            int_attr(f["swizzlingByteWidth"]), int_attr(f["elementBitWidth"]),
            int_attr(f["rank"]) if "rank" in f else (len(cga[0]) if cga else 2),
            bool(int_attr(f.get("transposed", "false"))), bool(int_attr(f.get("fp4Padded", "false"))), cga,
        )  # fmt: skip
    if kind == "swizzled_shared":
        vec, per_phase, max_phase = (int_attr(f[k]) for k in ("vec", "perPhase", "maxPhase"))
        return gl.SwizzledSharedLayout(vec, per_phase, max_phase, int_array(f["order"]), cga)
    if kind == "shared_linear":
        return gl.SharedLinearLayout(bases(f["offset"]), bases(f.get("block", "")), int_attr(f.get("alignment", "16")))
    raise NotImplementedError(f"layout {text}")


@functools.cache
def linear_layout(text: str, shape: tuple[int, ...]) -> Any:
    """The compiler's linear layout of a tensor or buffer of `shape`."""
    b = builder()
    return b.to_linear_layout(to_gluon(text, shape)._to_ir(b), list(shape))
