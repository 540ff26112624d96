"""From a kernel and its arguments to a `Launch`, without a card."""

import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .compat import TMA_DTYPE_DEVICE_TO_HOST, CompiledKernel, TensorDescriptor, compile_launch
from .launch import Argument, Launch, Pointer, Scalar, TensorMap

# By the number that CUDA gives a tensor map's type (CUtensorMapDataType). Triton encodes fp8 as plain bytes.
ELEMENT_TYPES = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64", 9: "bf16"}
SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B"}


def capture(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Launch:
    """The launch `kernel[grid](*arguments, **options)` of a Gluon kernel on an sm_100a card. Tensors are CPU tensors.

    options: compile-time parameters by name, num_warps, num_ctas and the like.
    """
    compiled = compile_launch(kernel, arguments, options, arch=100)
    names = [name for name in kernel.arg_names if name not in options]
    return describe(compiled, grid, dict(zip(names, arguments, strict=True)))


def describe(
    compiled: CompiledKernel,
    grid: tuple[int, ...],
    values: Mapping[str, Any],
    words: Mapping[str, Mapping[int, int]] | None = None,
) -> Launch:
    """The launch of a kernel that is compiled already. values: by name, of its run-time parameters at least. words:
    what is known of the memory behind pointers, by name."""
    metadata = compiled.metadata
    maps = iter(metadata.tensordesc_meta or ())
    storages: dict[int, str] = {}

    def storage_of(name: str, tensor: Tensor) -> tuple[str, int]:
        """(name of the storage, the tensor's offset in it in bytes): tensors that share memory share the name."""
        if tensor.device.type != "cpu":
            raise TypeError(f"{name}: expected a CPU tensor, got one on {tensor.device}; proofs take small CPU tensors")
        offset = tensor.storage_offset() * tensor.element_size()
        return storages.setdefault(tensor.untyped_storage().data_ptr(), name), int(offset)

    def argument(name: str, kind: Any, value: Any) -> Argument:
        if not isinstance(kind, str):
            raise TypeError(f"{name}: expected a tensor, a TensorDescriptor or a number, got {type(value).__name__}")
        if kind.startswith("tensordesc"):
            return tensor_map(name, value, next(maps), *storage_of(name, value.base))
        if kind.startswith("*"):
            storage, offset = storage_of(name, value)
            if offset:
                raise ValueError(f"{name}: expected a tensor at the start of its storage, got one at byte {offset}")
            return Pointer(name=name, storage=storage, words=(words or {}).get(name, {}))
        value = value.item() if hasattr(value, "item") else value
        # As it is passed: a proof about values must know the very number that the kernel gets.
        return Scalar(name=name, value=struct.unpack("f", struct.pack("f", value))[0] if kind == "fp32" else value)

    kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    if missing := [name for name in kinds if name not in values]:
        raise ValueError(f"arguments: expected a value for every run-time parameter, got none for {missing}")
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(
        ptx=compiled.asm["ptx"],
        grid=(x, y, z),
        num_ctas=metadata.num_ctas,
        threads=32 * metadata.num_warps,
        shared_bytes=metadata.shared,
        arguments=tuple(argument(name, kind, values[name]) for name, kind in kinds.items()),
        scratch=(metadata.global_scratch_size > 0, metadata.profile_scratch_size > 0),
    )


def tensor_map(name: str, value: TensorDescriptor, meta: Mapping[str, Any], storage: str, offset: int) -> TensorMap:
    """meta: how the compiled kernel wants this descriptor encoded; its block is what one CTA of the cluster copies."""
    kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    if kind not in ELEMENT_TYPES or meta["fp4_padded"] or meta["is_im2col"]:
        raise TypeError(f"{name}: expected a tiled descriptor of a plain type, got {dict(meta)}")
    return TensorMap(
        name=name,
        storage=storage,
        offset_bytes=offset,
        element_type=ELEMENT_TYPES[kind],
        element_bytes=meta["elem_size"],
        shape=tuple(map(int, value.shape)),
        strides=tuple(map(int, value.strides)),
        box=tuple(meta["block_size"]),
        swizzle=SWIZZLES[meta["swizzle"]],
        fill=value.padding,
    )
