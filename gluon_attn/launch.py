"""From a plan to a launch on a card: the compiled kernel and its arguments."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .compat import CompiledKernel, Launcher, compile_gluon, current_stream
from .descriptors import DTYPE_NAMES, View, descriptor_types, empty_transposed, transposition_blocks, type_name
from .kernels.blackwell import kernel as blackwell
from .kernels.hopper import kernel as hopper
from .kernels.hopper.transpose import transpose_values
from .plan import Plan
from .problem import FP8_DTYPES, output_dtype
from .tile import BlackwellTile, HopperTile, TileConfig

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
    )


@functools.lru_cache(maxsize=64)
def compiled_transpose(dtype: torch.dtype, padded_head_dim: int, *, device_index: int | None = None) -> CompiledKernel:
    """The kernel that transposes V before, which Hopper alone needs. device_index: as for `compiled`."""
    blocks = transposition_blocks(dtype, padded_head_dim)
    types = {name: type_name(*of) for name, of in blocks.items()}
    return compile_gluon(transpose_values, types, {}, arch=90, num_warps=4, num_ctas=1)


class Launch:
    """A launch on a card, but for the tensors: what depends on shapes, strides and options. Keeps no tensor alive."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """The tensors are looked at for their shapes, strides and device only; `out` may be on the meta device."""
        problem, tile = plan.problem, plan.tile
        self.device_index = q.device.index
        kernel = compiled(
            problem.dtype,
            problem.padded_head_dim,
            problem.causal,
            tile,
            arch=plan.arch,
            device_index=self.device_index,
        )
        with torch.cuda.device(self.device_index):
            self.launcher = Launcher(kernel, plan.programs)
        self.transpose = TransposeLaunch(plan, v) if tile.transposes_before(problem.dtype.itemsize) else None
        of_q, of_k, of_v, of_out = (View.of(t, problem.layout) for t in (q, k, v, out))
        if self.transpose is not None:
            of_v = self.transpose.view
        self.describe = descriptions([of_q, of_k, of_v, of_out], kernel)
        self.scalars = [plan.scale_log2, plan.blocks_per_item, plan.heads_per_group]
        # A launch takes a place for each compile-time parameter, and no value.
        absent = constants_of(tile, problem.causal, problem.dtype)
        self.no_scales = [None for name in SCALES if name in absent]
        self.constants = [None for name in absent if name not in (*SCALES, "o_ptr")]
        self.takes_out = "o_ptr" in kernel_of(tile).arg_names
        self.stores_by_pointer = self.takes_out and "o_ptr" not in absent

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *scales: Tensor) -> None:
        """Enqueue on the current stream of the tensors' device. scales: those of q, k and v, in fp8."""
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self(q, k, v, out, lse, *scales)
        stream = current_stream(self.device_index)
        if self.transpose is not None:
            v = self.transpose(v, stream)
        of_q, of_k, of_v, of_out = self.describe
        arguments = [*of_q(q.data_ptr()), *of_k(k.data_ptr()), *of_v(v.data_ptr()), *of_out(out.data_ptr())]
        if self.takes_out:
            arguments.append(out if self.stores_by_pointer else None)
        arguments += (lse, *scales, *self.no_scales, *self.scalars, *self.constants)
        self.launcher(stream, arguments)


class TransposeLaunch:
    """The launch that transposes V before attention, in fp8."""

    def __init__(self, plan: Plan, v: Tensor) -> None:
        problem = plan.problem
        self.layout = problem.layout
        kernel = compiled_transpose(problem.dtype, problem.padded_head_dim, device_index=v.device.index)
        with torch.cuda.device(v.device):
            self.launcher = Launcher(kernel, plan.transpose_programs)
        self.view = View.of(empty_transposed(v.to("meta"), self.layout))
        self.describe = descriptions([View.of(v, self.layout), self.view], kernel)

    def __call__(self, v: Tensor, stream: int) -> Tensor:
        """V transposed, in memory that is new to this launch: it is the caller's to hold until both are enqueued."""
        transposed = empty_transposed(v, self.layout)
        of_v, of_transposed = self.describe
        self.launcher(stream, [*of_v(v.data_ptr()), *of_transposed(transposed.data_ptr())])
        return transposed


def descriptions(views: list[View], kernel: CompiledKernel) -> list[Callable[[int], tuple[Any, ...]]]:
    """Of each descriptor parameter of a kernel, what it is passed for a tensor at an address; tensors come back to the
    same ones."""
    return [
        functools.lru_cache(maxsize=64)(functools.partial(view.arguments, meta=meta))
        for view, meta in zip(views, kernel.metadata.tensordesc_meta, strict=True)
    ]
