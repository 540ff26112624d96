"""Tile configurations: what can be chosen, what was measured, and the choice."""

from dataclasses import dataclass

from .device import Device
from .problem import Problem

ROWS_PER_ROLE = 64  # query rows a warpgroup product covers
REGISTERS_PER_SM = 65536
REGISTERS_PER_ROLE = range(24, 257, 8)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How the Hopper kernel is cut: tile, channels, roles.

    softmax_roles: softmax warpgroups, 1 to 4, each with 64 query rows per CTA.
    block_n: keys per block, 64 or 128.
    query_slots, kv_slots: depth of the queries channel, and of the keys and the values channel.
    take_turns: whether the softmax roles issue their products in turn, so that one's softmax runs beside another's.
    stage_in_queries: stage O for its store in the tile of Q, rather than in a buffer of its own.
    softmax_registers, load_registers: registers per thread of the two roles.
    cga_layout: how the rows of a tile are sharded over the CTAs of a cluster, as bases of a (rows, D) tile: () for one
        CTA, ((1, 0),) for two. With two CTAs one load of K and V serves both.
    """

    softmax_roles: int
    block_n: int
    query_slots: int
    kv_slots: int
    take_turns: bool
    stage_in_queries: bool
    softmax_registers: int
    load_registers: int
    cga_layout: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.softmax_roles not in (1, 2, 3, 4):
            raise ValueError(f"{self.softmax_roles=} must be 1, 2, 3 or 4")
        if self.block_n not in (64, 128):
            raise ValueError(f"{self.block_n=} must be 64 or 128")
        if self.query_slots < 1:
            raise ValueError(f"{self.query_slots=} must be at least 1")
        if self.kv_slots < 1:
            raise ValueError(f"{self.kv_slots=} must be at least 1")
        for name in ("softmax_registers", "load_registers"):
            if getattr(self, name) not in REGISTERS_PER_ROLE:
                raise ValueError(f"self.{name}={getattr(self, name)} must be a multiple of 8 from 24 to 256")
        if self.cga_layout not in ((), ((1, 0),)):
            raise ValueError(f"{self.cga_layout=} must be () for one CTA or ((1, 0),) for two, sharded along the rows")
        if self.registers > REGISTERS_PER_SM:
            raise ValueError(f"{self.registers=} must be at most {REGISTERS_PER_SM}, all warps of a CTA together")

    @property
    def num_ctas(self) -> int:
        return 2 ** len(self.cga_layout)

    @property
    def rows_per_role(self) -> int:
        """Query rows of a softmax role, over all CTAs of the cluster."""
        return ROWS_PER_ROLE * self.num_ctas

    @property
    def block_m(self) -> int:
        """Query rows of a tile, over all CTAs of the cluster."""
        return self.rows_per_role * self.softmax_roles

    @property
    def registers(self) -> int:
        """Of a CTA. Registers are handed out by warpgroup, so the load warp counts as four."""
        return 128 * (self.softmax_roles * self.softmax_registers + self.load_registers)

    def smem_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Shared memory of a CTA for a padded head dim (64, 128 or 256), with barriers and the compiler's own use."""
        row = head_dim * element_bytes
        query_tiles = self.query_slots + (0 if self.stage_in_queries else 1)
        tiles = query_tiles * self.softmax_roles * ROWS_PER_ROLE * row + 2 * self.kv_slots * self.block_n * row
        return tiles + 1024


@dataclass(frozen=True)
class Row:
    """A choice of tile for the problems it fits.

    min_kv_len: from how many keys on. result_file (under bench/results/), card, date: where it was measured to be the
    fastest of those tried; None for a row that waits for its measurement.
    """

    padded_head_dim: int
    causal: bool
    tile: TileConfig
    min_kv_len: int = 1
    result_file: str | None = None
    card: str | None = None
    date: str | None = None

    def fits(self, problem: Problem, num_ctas: int | None) -> bool:
        return (
            (self.padded_head_dim, self.causal) == (problem.padded_head_dim, problem.causal)
            and num_ctas in (None, self.tile.num_ctas)
            and problem.kv_len >= self.min_kv_len
        )


def tile(
    softmax_roles: int,
    block_n: int,
    query_slots: int,
    kv_slots: int,
    softmax_registers: int,
    *,
    take_turns: bool,
    stage_in_queries: bool = False,
    num_ctas: int = 1,
) -> TileConfig:
    return TileConfig(
        softmax_roles=softmax_roles,
        block_n=block_n,
        query_slots=query_slots,
        kv_slots=kv_slots,
        take_turns=take_turns,
        stage_in_queries=stage_in_queries,
        softmax_registers=softmax_registers,
        load_registers=24,
        cga_layout=((1, 0),) if num_ctas == 2 else (),
    )


TABLE: tuple[Row, ...] = (
    Row(64, False, tile(3, 128, 2, 2, 160, take_turns=True)),
    Row(64, True, tile(3, 128, 2, 2, 160, take_turns=True)),
    Row(64, False, tile(3, 128, 2, 2, 160, take_turns=True, num_ctas=2)),
    Row(64, True, tile(2, 128, 2, 2, 240, take_turns=True, num_ctas=2)),
    Row(128, False, tile(2, 128, 2, 2, 240, take_turns=False)),
    Row(128, True, tile(2, 128, 2, 2, 240, take_turns=False)),
    Row(128, False, tile(2, 128, 2, 2, 240, take_turns=False, num_ctas=2)),
    Row(128, True, tile(2, 128, 2, 2, 240, take_turns=True, num_ctas=2)),
    Row(256, False, tile(2, 64, 1, 2, 240, take_turns=False, stage_in_queries=True)),
    Row(256, True, tile(2, 64, 1, 2, 240, take_turns=False, stage_in_queries=True)),
    Row(256, False, tile(2, 64, 1, 2, 240, take_turns=False, stage_in_queries=True, num_ctas=2)),
    Row(256, True, tile(2, 64, 1, 2, 240, take_turns=False, stage_in_queries=True, num_ctas=2)),
)


def pick_tile(problem: Problem, device: Device, num_ctas: int | None = None) -> TileConfig:
    """The tile configuration for a problem: the first row of TABLE that fits. Pure.

    num_ctas: 1 or 2 to insist on it; default: whichever comes first in the table.
    Raises ValueError if no row fits the device.
    """
    for row in TABLE:
        if row.fits(problem, num_ctas) and row.tile.smem_bytes(row.padded_head_dim, 2) <= device.smem_bytes:
            return row.tile
    raise ValueError(
        f"tile: no row of the tuning table fits head_dim {problem.head_dim}, num_ctas {num_ctas} and the "
        f"{device.smem_bytes} bytes of shared memory of {device.name}; give a TileConfig as tile"
    )


def require_fits(tile: TileConfig, problem: Problem, device: Device) -> None:
    """ValueError if the tile needs more shared memory than the device has."""
    needed = tile.smem_bytes(problem.padded_head_dim, problem.dtype.itemsize)
    if needed > device.smem_bytes:
        raise ValueError(
            f"tile: expected a tile that fits the {device.smem_bytes} bytes of shared memory of {device.name}, got one "
            f"that needs {needed} at head_dim {problem.head_dim}; lower kv_slots, query_slots or block_n"
        )
