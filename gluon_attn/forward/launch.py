"""From a plan to a launch on a card: the compiled kernel and its arguments."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.blackwell.forward import kernel as blackwell
from ..kernels.hopper.forward import kernel as hopper
from ..kernels.hopper.transpose.kernel import transpose_values
from ..problem import FP8_DTYPES, output_dtype
from ..runtime.compat import CompiledKernel
from ..runtime.compiler import compile_gluon
from ..runtime.descriptors import (
    DTYPE_NAMES,
    View,
    descriptor_types,
    empty_transposed,
    transposition_blocks,
    type_name,
)
from ..runtime.launcher import Launcher
from .configs import BlackwellTile, HopperTile, TileConfig
from .plan import Plan

SCALES = ("q_scale_ptr", "k_scale_ptr", "v_scale_ptr")


def kernel_of(tile: TileConfig) -> Any:
    """The jitted kernel that the tile is for."""
    return blackwell.attention_forward if isinstance(tile, BlackwellTile) else hopper.attention_forward


def constants_of(tile: TileConfig, causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    absent = {} if dtype in FP8_DTYPES else {name: None for name in SCALES if name in kernel_of(tile).arg_names}
    if isinstance(tile, HopperTile) and tile.epilogue == "tma":
        absent["o_ptr"] = None
    return {"CAUSAL": causal, "TILE": tile, **absent}


@functools.lru_cache(maxsize=256)
def compiled(
    dtype: torch.dtype,
    padded_head_dim: int,
    causal: bool,
    tile: TileConfig,
    *,
    arch: int | None = None,
    device_index: int | None = None,
) -> CompiledKernel:
    """The kernel for these compile-time choices; the lengths, batches, heads and strides are arguments of the launch.

    arch: 90, 100 or 103, for sm_90a and so on; None: the first that the tile is for.
    device_index: the card to launch it on, as a compiled kernel is loaded on one. None: to look at only.
    """
    types = descriptor_types(dtype, padded_head_dim, tile) | dict.fromkeys(SCALES, "*fp32")
    types |= {
        "o_ptr": f"*{DTYPE_NAMES[output_dtype(dtype)]}",
        "lse_ptr": "*fp32",
        "scale_log2": "fp32",
        "blocks_per_item": "i32",
        "heads_per_group": "i32",
    }
    return compile_gluon(
        kernel_of(tile),
        types,
        constants_of(tile, causal, dtype),
        arch=tile.archs[0] if arch is None else arch,
        num_warps=4,
        num_ctas=tile.num_ctas,
        starts_early=tile.transposes_before(dtype.itemsize),
    )


@functools.lru_cache(maxsize=64)
def compiled_transpose(dtype: torch.dtype, padded_head_dim: int, *, device_index: int | None = None) -> CompiledKernel:
    """The kernel that transposes V before, which Hopper alone needs. device_index: as for `compiled`."""
    blocks = transposition_blocks(dtype, padded_head_dim)
    types = {name: type_name(*of) for name, of in blocks.items()}
    return compile_gluon(transpose_values, types, {}, arch=90, num_warps=4, num_ctas=1)


class Launch:
    """A launch of attention on a card, but for the tensors: what depends on shapes, strides and options. Keeps no
    tensor alive."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """The tensors are looked at for their shapes, strides and device only; `v` and `out` may be on the meta device.

        v: transposed, if the tile has that done before.
        """
        problem, tile = plan.problem, plan.tile
        kernel = compiled(
            problem.dtype, problem.padded_head_dim, problem.causal, tile, arch=plan.arch, device_index=q.device.index
        )
        self.launcher = Launcher(kernel, plan.programs, q.device.index)
        of_v = View.of(v, "bhsd" if tile.transposes_before(v.itemsize) else problem.layout)
        views = [View.of(q, problem.layout), View.of(k, problem.layout), of_v, View.of(out, problem.layout)]
        self.describe = descriptions(views, kernel)
        # What comes after the pointers. A launch takes a place for each compile-time parameter, and no value.
        absent = constants_of(tile, problem.causal, problem.dtype)
        self.rest = (
            *(None for name in SCALES if name in absent),
            *(plan.scale_log2, plan.blocks_per_item, plan.heads_per_group),
            *(None for name in absent if name not in (*SCALES, "o_ptr")),
        )
        self.takes_out = "o_ptr" in kernel_of(tile).arg_names
        self.stores_by_pointer = self.takes_out and "o_ptr" not in absent
        self.needs_all_pointers = plan.tile.needs_all_pointers

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *scales: Tensor | None
    ) -> None:
        """Enqueue on the current stream of the tensors' device.

        lse: None if nobody asked for it. scales: in fp8 those of q, k and v, each None for 1. Where
        `needs_all_pointers`, none may be None.
        """
        described = self.describe(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        pointers = (out if self.stores_by_pointer else None, lse) if self.takes_out else (lse,)
        self.launcher((*described, *pointers, *scales, *self.rest))


class TransposingLaunch:
    """A launch of the kernel that transposes V, and then of attention: for fp8."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.transpose = Transpose(plan, v)
        self.attention = Launch(plan, q, k, empty_transposed(v.to("meta"), plan.problem.layout), out)
        self.needs_all_pointers = plan.tile.needs_all_pointers

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *scales: Tensor | None
    ) -> None:
        self.attention(q, k, self.transpose(v), out, lse, *scales)


class Transpose:
    """The launch that transposes V before attention, in fp8."""

    def __init__(self, plan: Plan, v: Tensor) -> None:
        problem = plan.problem
        self.layout = problem.layout
        kernel = compiled_transpose(problem.dtype, problem.padded_head_dim, device_index=v.device.index)
        self.launcher = Launcher(kernel, plan.transpose_programs, v.device.index)
        of_transposed = View.of(empty_transposed(v.to("meta"), self.layout))
        self.describe = descriptions([View.of(v, self.layout), of_transposed], kernel)

    def __call__(self, v: Tensor) -> Tensor:
        """V transposed, in memory that is new to this launch: it is the caller's to hold until both are enqueued."""
        transposed = empty_transposed(v, self.layout)
        self.launcher(self.describe(v.data_ptr(), transposed.data_ptr()))
        return transposed


def launch_of(plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Launch | TransposingLaunch:
    """The tensors are looked at for their shapes, strides and device only; `out` may be on the meta device."""
    kind = TransposingLaunch if plan.tile.transposes_before(v.itemsize) else Launch
    return kind(plan, q, k, v, out)


def descriptions(views: list[View], kernel: CompiledKernel) -> Callable[..., tuple[Any, ...]]:
    """What a kernel is passed for all its descriptor parameters, by the addresses of the tensors.

    In a loop all of them come back to the same ones, and one look-up finds everything; elsewhere single ones do, and
    only the others are encoded anew.
    """
    metas = kernel.metadata.tensordesc_meta
    each = [
        functools.lru_cache(maxsize=64)(functools.partial(view.arguments, meta=meta))
        for view, meta in zip(views, metas, strict=True)
    ]

    @functools.lru_cache(maxsize=64)
    def of_all(*addresses: int) -> tuple[Any, ...]:
        arguments = (of(address) for of, address in zip(each, addresses, strict=True))
        return tuple(itertools.chain.from_iterable(arguments))

    return of_all
