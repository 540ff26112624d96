"""What the verifier is told about a launch, and how launches are captured. No verifier is needed."""

import dataclasses

import pytest
import torch

from proving.capture import capture
from proving.kernel_input import kernel_input
from proving.launch import Launch, Pointer, Scalar, TensorMap
from tests.compat import gl, jit
from tests.proving import kernels

PTX = """.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u32 kernel_param_1,
	.param .u32 kernel_param_2,
	.param .u64 kernel_param_3,
	.param .u64 kernel_param_4,
	.param .u64 .ptr .global .align 1 kernel_param_5,
	.param .f32 kernel_param_6,
	.param .u32 kernel_param_7,
	.param .u64 .ptr .global .align 1 kernel_param_8,
	.param .u64 .ptr .global .align 1 kernel_param_9
)
.reqntid 256
{
	ret;
}
"""
MAP = TensorMap(
    name="q_desc",
    storage="q_desc",
    offset_bytes=256,
    element_type="bf16",
    element_bytes=2,
    shape=(300, 64),
    strides=(128, 1),
    box=(128, 64),
    swizzle="128B",
    fill="zero",
)
LAUNCH = Launch(
    ptx=PTX,
    grid=(3, 1, 1),
    num_ctas=2,
    threads=256,
    shared_bytes=33000,
    arguments=(
        MAP,
        Pointer(name="out_ptr", storage="out_ptr"),
        Scalar(name="scale", value=0.5),
        Scalar(name="n", value=-1),
    ),
    scratch=(False, True),
)


def test_everything_of_a_launch():
    assert kernel_input(LAUNCH) == {
        "schema": "spverify.kernel-input/v1",
        "entry": "kernel",
        "launch": {
            "grid_dim": [6, 1, 1],
            "block_dim": [256, 1, 1],
            "cluster_dim": [2, 1, 1],
            "dynamic_shared_bytes": 33000,
        },
        "declarations": [
            {"parameter": 0, "type": "tensor_map", "object": "q_desc"},
            {"parameter": 5, "type": "pointer", "space": "global", "object": "out_ptr"},
            {"parameter": 9, "type": "pointer", "space": "global", "object": "profile_scratch"},
        ],
        "arguments": [
            {"parameter": 1, "type": "u32", "value": 300},
            {"parameter": 2, "type": "u32", "value": 64},
            {"parameter": 3, "type": "u64", "value": 128},
            {"parameter": 4, "type": "u64", "value": 1},
            {"parameter": 6, "type": "f32", "value": 0.5},
            {"parameter": 7, "type": "u32", "value": 2**32 - 1},
            {"parameter": 8, "type": "pointer", "value": None},
        ],
        "tma_descriptors": [
            {
                "parameter": 0,
                "object": "q_desc",
                "element_type": "bf16",
                "rank": 2,
                "global_shape": [64, 300],
                "box_shape": [64, 128],
                "coordinate_strides_bytes": [2, 256],
                "element_strides": [1, 1],
                "base_byte_offset": 256,
                "swizzle": "128B",
                "interleave": "none",
                "oob_fill": "zero",
            }
        ],
        "assumptions": {"duplicate_tma_store_benign": False},
    }


def test_one_cta_has_no_cluster():
    assert kernel_input(dataclasses.replace(LAUNCH, num_ctas=1))["launch"] == {
        "grid_dim": [3, 1, 1],
        "block_dim": [256, 1, 1],
        "dynamic_shared_bytes": 33000,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (LAUNCH.arguments[:-1], "arguments: expected one for each of the 10 parameters of kernel, got"),
        ((*LAUNCH.arguments, *LAUNCH.arguments[-1:] * 2), "global_scratch: expected a parameter in the PTX, got the"),
        (LAUNCH.arguments[1:], "out_ptr: expected a number or a pointer as parameter 0 of the PTX, got"),
        ((LAUNCH.arguments[0], MAP), "q_desc: expected a tensor map of 128 bytes as parameter 5 of the PTX, got"),
    ],
)
def test_arguments_that_do_not_fit_the_parameters(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernel_input(dataclasses.replace(LAUNCH, arguments=arguments))


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_capture(num_ctas):
    launch = kernels.launch(num_ctas)
    rows, columns, inner = kernels.shapes(num_ctas)
    a, b, out, *numbers = launch.arguments
    assert (launch.grid, launch.num_ctas, launch.threads) == ((1, 1, 1), num_ctas, 256)
    assert ".target sm_100a" in launch.ptx
    assert isinstance(a, TensorMap)
    assert isinstance(b, TensorMap)
    # A box is what one CTA copies: of A its rows, of B its columns.
    assert (a.shape, a.box) == ((rows, inner), (128, 64))
    assert (b.shape, b.box) == ((inner, columns), (64, 64))
    assert (a.element_type, a.strides, a.swizzle, a.offset_bytes) == ("bf16", (inner, 1), "128B", 0)
    assert out == Pointer(name="out_ptr", storage="out_ptr")
    assert numbers == [Scalar(name="steps", value=kernels.STEPS)]
    assert kernel_input(launch)["launch"]["block_dim"] == [launch.threads, 1, 1]


@jit
def copy(source, target, n, factor, BLOCK: gl.constexpr):
    at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(target + at, gl.load(source + at, at < n) * factor)


def test_memory_that_two_arguments_share_has_one_name():
    x = torch.empty(128)
    launch = capture(copy, (2, 3), x, x, 7, 0.5, BLOCK=128)
    assert launch.arguments == (
        Pointer(name="source", storage="source"),
        Pointer(name="target", storage="source"),
        Scalar(name="n", value=7),
        Scalar(name="factor", value=0.5),
    )
    assert launch.grid == (2, 3, 1)
    assert kernel_input(launch)["launch"]["grid_dim"] == [2, 3, 1]


def test_a_number_that_triton_compiles_in_is_no_parameter():
    launch = capture(copy, (1,), torch.empty(128), torch.empty(128), 1, 0.5, BLOCK=128)
    assert [arg.name for arg in launch.arguments] == ["source", "target", "factor"]
    kernel_input(launch)  # raises if that were not so in the PTX


def test_pointer_into_the_middle_is_refused():
    x = torch.empty(256)
    with pytest.raises(ValueError, match="target: expected a tensor at the start of its storage, got one at byte 512"):
        capture(copy, (1,), x, x[128:], 7, 0.5, BLOCK=128)
