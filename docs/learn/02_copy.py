"""Copies by TMA and an mbarrier: phases, parity, expected bytes; and kernels that are broken on purpose."""

import torch
from course import broken, check, descriptor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@jit
def double(x_desc, out_desc, WRONG: gl.constexpr = ""):
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    filled = mbarrier.allocate_mbarrier()
    mbarrier.init(filled, count=1)
    ROWS: gl.constexpr = x_desc.block_shape[0]
    steps = x_desc.shape[0] // ROWS // gl.num_programs(0)
    for step in range(steps):
        row = (gl.program_id(0) * steps + step) * ROWS
        BYTES: gl.constexpr = tile.nbytes_per_cta * 2 if WRONG == "bytes" else tile.nbytes_per_cta
        mbarrier.expect(filled, BYTES)
        tma.async_load(x_desc, [row, 0], filled, tile)
        mbarrier.wait(filled, 0 if WRONG == "phase" else step & 1)
        x = tile.load(TILE)
        tile.store(2 * x)
        fence_async_shared()
        tma.async_store(out_desc, [row, 0], tile)
        tma.store_wait(0)
    mbarrier.invalidate(filled)


@jit
def write(tile, written, FENCE: gl.constexpr):
    tile.store(gl.full(tile.shape, 7, tile.dtype, TILE))
    if FENCE:
        fence_async_shared()
    mbarrier.arrive(written)


@jit
def send(tile, written, out_desc):
    mbarrier.wait(written, 0)
    tma.async_store(out_desc, [0, 0], tile)
    tma.store_wait(0)


@jit
def two_roles(out_desc, FENCE: gl.constexpr):
    tile = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    written = mbarrier.allocate_mbarrier()
    mbarrier.init(written, count=1)
    gl.barrier()
    gl.warp_specialize([(write, (tile, written, FENCE)), (send, (tile, written, out_desc))], [1], [24])
    mbarrier.invalidate(written)


BLOCK = [64, 64]


def run_double(x: torch.Tensor, out: torch.Tensor, programs: int = 1, wrong: str = "") -> None:
    """out = 2 x. Rows: a multiple of 64 times `programs`."""
    double[(programs,)](descriptor(x, BLOCK), descriptor(out, BLOCK), WRONG=wrong)


def checked(wrong: str = "") -> None:
    x, out = torch.randn(256, 64), torch.full((256, 64), float("nan"))
    run_double(x, out, wrong=wrong)
    assert torch.equal(out, 2 * x)


def run_two_roles(fence: bool) -> None:
    out = torch.full((64, 64), float("nan"))
    two_roles[(1,)](descriptor(out, BLOCK), FENCE=fence)
    assert bool((out == 7).all())


def main() -> None:
    check(checked, "double")
    check(lambda: run_two_roles(fence=True), "two roles")
    broken(lambda: checked("phase"), "waits for parity 0 at every step")
    broken(lambda: checked("bytes"), "announces too many bytes")
    broken(lambda: run_two_roles(fence=False), "no fence")


if __name__ == "__main__":
    main()
