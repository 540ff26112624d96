"""What the kernels of these tests share: loads and stores, inputs, poisoned outputs."""

from pathlib import Path

import torch
from torch import Tensor

from tests.compat import TensorDescriptor, cluster, gl, jit, mbarrier, tma


@jit
def addresses(ptr, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers [M, N] to a contiguous matrix."""
    rows = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    return ptr + rows[:, None] * N + columns[None, :]


@jit
def load_matrix(ptr, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.load(addresses(ptr, M, N, LAYOUT))


@jit
def store_matrix(ptr, value):
    gl.store(addresses(ptr, value.shape[0], value.shape[1], value.type.layout), value)


@jit
def new_barrier(COUNT: gl.constexpr):
    """One mbarrier per CTA, initialised; the caller orders it before other roles and CTAs."""
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=COUNT)
    return barrier


@jit
def load_tile(desc, row=0, column=0):
    """The box of a tensor that begins here, in shared memory."""
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    if gl.num_ctas() > 1:
        cluster.barrier()
    else:
        gl.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)  # full, also where the box hangs over the edge
    tma.async_load(desc, [row, column], loaded, tile)
    mbarrier.wait(loaded, 0)
    mbarrier.invalidate(loaded)  # the next tile may come to lie in its bytes
    return tile


def line_of(file: str, marker: str) -> str:
    """ "name.py:line" of the line of a test that ends in `# <- marker`."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# <- {marker}"))
    return f"{Path(file).name}:{line}"


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small_integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, largest: int = 4) -> Tensor:
    """Values for which products and sums are exact in every float type, so that results can be compared bit by bit."""
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output that no kernel's right result leaves as it is."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype)
    return torch.full(shape, 113, dtype=dtype)


def descriptor(t: Tensor, block: list[int], *, cga: list[list[int]] | None = None, **options) -> TensorDescriptor:
    """A TMA descriptor with the default swizzle for its block; `cga`: how the block is spread over the CTAs."""
    kind = {
        torch.float32: gl.float32,
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
        torch.int32: gl.int32,
        torch.int8: gl.int8,
        torch.uint8: gl.uint8,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float8_e5m2: gl.float8e5,
    }[t.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind, cga_layout=cga)
    return TensorDescriptor.from_tensor(t, block, layout, **options)


def same(got: Tensor, want: Tensor) -> None:
    """Equal element by element; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
