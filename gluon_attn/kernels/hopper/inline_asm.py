"""All inline assembly of the project: arithmetic, each piece with a twin in Python that says what it computes; and a
wait, which gluon_cpu knows."""

from collections.abc import Callable

import numpy as np

from gluon_attn.runtime.compat import builtin, constexpr_function, gl, jit

PTX_NAMES = {"bf16": "bf16", "fp16": "f16", "fp8e4nv": "e4m3", "fp8e5": "e5m2"}


@constexpr_function
def round_pair_asm(dtype):
    return f"cvt.rn.{PTX_NAMES[dtype.name]}x2.f32 $0, $2, $1;"


@constexpr_function
def round_four_asm(dtype):
    convert = f"cvt.rn.satfinite.{PTX_NAMES[dtype.name]}x2.f32"
    return f"{{ .reg .b16 l, h; {convert} l, $2, $1; {convert} h, $4, $3; mov.b32 $0, {{l, h}}; }}"


@jit
def round_pair(low, high, dtype: gl.constexpr):
    """Two fp32 tensors rounded to the nearest even `dtype` (bf16 or fp16), packed into one uint32 tensor.

    The hardware does both with one instruction. Written in Gluon it stays two conversions and two byte permutations:
    the compiler does not see that the halves it packs are the halves it has just converted together.
    """
    ASM: gl.constexpr = round_pair_asm(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1)


@jit
def round_four(a, b, c, d, dtype: gl.constexpr):
    """Four fp32 tensors rounded to the nearest even `dtype` (an fp8), the largest number for what is larger, packed
    into one uint32 tensor, a in its low byte."""
    ASM: gl.constexpr = round_four_asm(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [a, b, c, d], dtype=gl.uint32, is_pure=True, pack=1)


WIDEN_PAIR = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@jit
def widened(x):
    """A tensor of 16 bits, of which a thread has neighbours in one register, in fp32. Of bf16 that is an instruction
    for each: the compiler moves the upper one of two down before it moves it up again."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(WIDEN_PAIR, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


TANH = gl.constexpr("tanh.approx.f32 $0, $1;")


@jit
def tanh(x):
    """Of fp32, by the unit that computes exponentials too, right to 2^-11 of itself."""
    return gl.inline_asm_elementwise(TANH, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


PLUS = gl.constexpr("add.f32 $0, $1, $2;")


@jit
def plus(a, b):
    """a + b, of fp32, where sums of many registers go round a loop: LLVM's vectoriser would look for pairs among them,
    for seconds, and the card adds one by one all the same."""
    return gl.inline_asm_elementwise(PLUS, "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@builtin
def pending_values(product, _semantic=None):
    """The registers of a product that is still to be waited for, as a tensor."""
    return gl.tensor(product.handle, product.type.tensor_type)


@constexpr_function
def wait_asm(pending):
    return f"wgmma.wait_group.sync.aligned {pending};"


@constexpr_function
def tied_registers(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


@jit
def wait_apart(product, PENDING: gl.constexpr):
    """`warpgroup_mma_wait(PENDING, deps=[product])` in which each warpgroup of a role waits for its own product alone.

    The compiler puts a barrier of the whole role after its own wait. Here the role's warpgroups may drift apart, so
    memory that one of them writes and another's product reads needs a barrier in the kernel. product: fp32.
    """
    values = pending_values(product)
    REGISTERS: gl.constexpr = values.numel // (32 * gl.num_warps())
    ASM: gl.constexpr = wait_asm(PENDING)
    TIED: gl.constexpr = tied_registers(REGISTERS)
    return gl.inline_asm_elementwise(ASM, TIED, [values], dtype=gl.float32, is_pure=False, pack=REGISTERS)


def round_packed(dtype: np.dtype, *values: np.ndarray) -> np.ndarray:
    """What `round_pair` and `round_four` compute; `dtype` is numpy.float16 or one of ml_dtypes."""
    import ml_dtypes

    bits = 8 * dtype.itemsize
    word = np.zeros(np.shape(values[0]), np.uint32)
    for i, value in enumerate(values):
        x = np.asarray(value, np.float32)
        if bits == 8:
            largest = np.float32(ml_dtypes.finfo(dtype).max)
            x = np.clip(x, -largest, largest)
        word |= x.astype(dtype).view(f"uint{bits}").astype(np.uint32) << np.uint32(bits * i)
    return word


def widened_on_cpu(x: np.ndarray) -> np.ndarray:
    """What `widened` computes of bf16."""
    return np.asarray(x).astype(np.float32)


def twins() -> dict[str, Callable[..., np.ndarray]]:
    """Each piece of assembly and its twin, for gluon_cpu. All are elementwise."""
    from functools import partial

    import ml_dtypes

    kinds = {gl.bfloat16: ml_dtypes.bfloat16, gl.float16: np.float16}
    fp8_kinds = {gl.float8e4nv: ml_dtypes.float8_e4m3fn, gl.float8e5: ml_dtypes.float8_e5m2}
    found: dict[str, Callable[..., np.ndarray]] = {
        TANH.value: np.tanh,
        PLUS.value: np.add,
        WIDEN_PAIR.value: widened_on_cpu,
    }
    for gluon, kind in kinds.items():
        found[round_pair_asm(gluon)] = partial(round_packed, np.dtype(kind))
    for gluon, kind in fp8_kinds.items():
        found[round_four_asm(gluon)] = partial(round_packed, np.dtype(kind))
    return found
