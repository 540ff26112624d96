"""The verifier's description of a launch, its `input.json`: parameters, tensor maps, grid, cluster, threads, memory."""

from collections.abc import Mapping
from typing import Any

from gluon_attn.runtime.descriptors import PACKED_WRAP

from .launch import Argument, Launch, Pointer, Scalar, TensorMap
from .ptx import Parameter, entry

# What the verifier would take on trust unless told otherwise: copies that several lanes of a warp start alike would
# pass with a warning. Here they count as the races they are.
ASSUMPTIONS = {"duplicate_tma_store_benign": False}


class Writer:
    """Goes through the parameters of the PTX in order and says what each is."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters
        self.at = 0
        self.declarations: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.maps: list[dict[str, Any]] = []

    def next(self, name: str, *, map_bytes: int | None = None) -> tuple[int, str]:
        """(index, type) of the next parameter, which must be as large as what is passed for `name`."""
        if self.at == len(self.parameters):
            raise ValueError(f"{name}: expected a parameter in the PTX, got the end of its {self.at} parameters")
        parameter, index = self.parameters[self.at], self.at
        if parameter.bytes != map_bytes:
            want = "a number or a pointer" if map_bytes is None else f"a tensor map of {map_bytes} bytes"
            raise ValueError(f"{name}: expected {want} as parameter {index} of the PTX, got {parameter}")
        self.at += 1
        return index, parameter.type

    def scalar(self, name: str, value: int | float) -> None:
        index, kind = self.next(name)
        if isinstance(value, float):
            kind = "f" + kind[1:]
        elif value < 0:
            value += 2 ** int(kind[1:])  # a parameter has no sign
        self.values.append({"parameter": index, "type": kind, "value": value})

    def pointer(self, name: str, storage: str | None) -> None:
        index, _ = self.next(name)
        if storage is None:
            self.values.append({"parameter": index, "type": "pointer", "value": None})
        else:
            self.declarations.append({"parameter": index, "type": "pointer", "space": "global", "object": storage})

    def tensor_map(self, arg: TensorMap, alone: bool) -> None:
        """alone: no other argument names its memory. Raises ValueError where it must be alone and is not."""
        if arg.shape[0] == PACKED_WRAP + 1 and not alone:
            raise ValueError(f"{arg.name}: expected memory of its own, as its map is moved, got {arg.storage} twice")
        index, _ = self.next(arg.name, map_bytes=128)
        self.declarations.append({"parameter": index, "type": "tensor_map", "object": arg.storage})
        self.maps.append(
            {
                "parameter": index,
                "object": arg.storage,
                "element_type": arg.element_type,
                "rank": len(arg.shape),
                # Innermost dimension first, as PTX counts.
                "global_shape": list(reversed(arg.shape)),
                "box_shape": list(reversed(arg.box)),
                "coordinate_strides_bytes": [s * arg.element_bytes for s in reversed(strides_forwards(arg))],
                "element_strides": [1] * len(arg.shape),
                "base_byte_offset": arg.offset_bytes,
                "swizzle": arg.swizzle,
                "interleave": "none",
                "oob_fill": arg.fill,
            }
        )
        for i, value in enumerate((*arg.shape, *arg.strides)):
            self.scalar(f"{arg.name} (shape and strides, number {i})", value)


def strides_forwards(arg: TensorMap) -> tuple[int, ...]:
    """Its strides. The first one of a `View.packed` steps backwards, in 64 bits that wrap around: here it is forwards.

    Why: the verifier takes no address beyond 64 bits. Exact: every copy is PACKED_WRAP steps along that dimension, see
    `packed_coords`. So all addresses of the tensor move by as much, and it is reached by such copies alone.
    """
    if arg.shape[0] != PACKED_WRAP + 1:
        return arg.strides
    return arg.strides[-2], *arg.strides[1:]


def is_alone(arg: Pointer | TensorMap, launch: Launch) -> bool:
    """Whether no other argument names its memory."""
    return [other.storage for other in launch.arguments if not isinstance(other, Scalar)].count(arg.storage) == 1


def parameter_of(launch: Launch, name: str) -> int:
    """Which parameter of the PTX an argument begins with, from 0."""

    def parameters(arg: Argument) -> int:
        return 1 + len(arg.shape) + len(arg.strides) if isinstance(arg, TensorMap) else 1

    names = [arg.name for arg in launch.arguments]
    return sum(map(parameters, launch.arguments[: names.index(name)]))


def kernel_input(launch: Launch, decisions: Mapping[int, bool] | None = None) -> dict[str, Any]:
    """decisions: by line of the PTX, whether a branch on data is taken: by every thread, each time.

    Raises ValueError if the launch's arguments do not fit the PTX's parameters.
    """
    name, parameters = entry(launch.ptx)
    writer = Writer(parameters)
    for arg in launch.arguments:
        match arg:
            case Scalar():
                writer.scalar(arg.name, arg.value)
            case Pointer():
                writer.pointer(arg.name, arg.storage)
            case TensorMap():
                writer.tensor_map(arg, is_alone(arg, launch))
    for scratch, used in zip(("global_scratch", "profile_scratch"), launch.scratch, strict=True):
        writer.pointer(scratch, scratch if used else None)
    if left := parameters[writer.at :]:
        raise ValueError(f"arguments: expected one for each of the {len(parameters)} parameters of {name}, got {left}")
    x, y, z = launch.grid
    shape: dict[str, Any] = {"grid_dim": [x * launch.num_ctas, y, z], "block_dim": [launch.threads, 1, 1]}
    if launch.num_ctas > 1:
        shape["cluster_dim"] = [launch.num_ctas, 1, 1]
    decided = [{"line": line, "taken": taken} for line, taken in (decisions or {}).items()]
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": name,
        "launch": shape | {"dynamic_shared_bytes": launch.shared_bytes},
        "declarations": writer.declarations,
        "arguments": writer.values,
        "tma_descriptors": writer.maps,
        "assumptions": ASSUMPTIONS,
    } | ({"branch_decisions": decided} if decided else {})
