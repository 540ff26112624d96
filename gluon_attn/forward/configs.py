"""Configurations: how a kernel is cut, one class for each architecture. Frozen, and they check themselves."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from ..bias import Bias
from ..runtime.descriptors import Bases

REGISTERS_PER_SM = 65536
REGISTERS_PER_ROLE = range(24, 257, 8)
WARPGROUP = 128  # threads
BARRIER_BYTES = 1024  # shared memory for barriers and the compiler's own use, at most
PIECE = 64  # columns


def piece_columns(padded_head_dim: int) -> int:
    """In tiles of how many columns a tensor of that head dim is: of all; or of PIECE where they are no power of two, as
    Gluon's tensors are."""
    return padded_head_dim if padded_head_dim & (padded_head_dim - 1) == 0 else PIECE


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """What configs of both architectures have.

    block_n: keys per block, 64 or 128.
    kv_slots: depth of the channels for keys and values.
    softmax_registers, load_registers: registers per thread of those roles.
    cga_layout: how the rows of a row block are sharded over the CTAs of a cluster, as bases of a (rows, D) tile: () for
        one CTA, ((1, 0),) for two, and on Blackwell ((1, 0), (2, 0)) for four.

    Raises ValueError, which names the field, where one of these or a pair of them is not supported.
    """

    block_n: int
    kv_slots: int
    softmax_registers: int
    load_registers: int
    cga_layout: Bases = ()

    @property
    def one_program_per_item(self) -> bool:
        """Whether the grid has a program for every item, of which the hardware starts those it has room for."""
        return False

    @property
    def items_span_heads(self) -> bool:
        """Whether, of an odd number of row blocks, the middle one is an item with that of the next head."""
        return False

    def transposes_before(self, element_bytes: int) -> bool:
        """Whether, for elements of that size, a kernel of its own transposes V before."""
        return False

    def piece_columns(self, padded_head_dim: int) -> int:
        """In tiles of how many columns a tensor of that head dim is: of all; or of PIECE, as many as make it up."""
        return piece_columns(padded_head_dim)

    @property
    @abstractmethod
    def archs(self) -> tuple[int, ...]:
        """The architectures it is for: 90, 100, 103."""

    def __post_init__(self) -> None:
        if type(self) is ForwardConfig:
            raise TypeError("ForwardConfig: expected a HopperConfig or a BlackwellConfig, got their base class")
        if self.block_n not in (64, 128):
            raise ValueError(f"{self.block_n=} must be 64 or 128")
        if self.kv_slots < 1:
            raise ValueError(f"{self.kv_slots=} must be at least 1")
        for name in ("softmax_registers", "load_registers"):
            if getattr(self, name) not in REGISTERS_PER_ROLE:
                raise ValueError(f"self.{name}={getattr(self, name)} must be a multiple of 8 from 24 to 256")

    @property
    def num_ctas(self) -> int:
        return 2 ** len(self.cga_layout)

    @property
    @abstractmethod
    def block_m(self) -> int:
        """Query rows of a row block, over all CTAs of the cluster."""

    @abstractmethod
    def smem_bytes(self, head_dim: int, element_bytes: int, head_dim_v: int | None = None) -> int:
        """Shared memory of a CTA for a padded head dim, with barriers and the compiler's own use. head_dim_v: the one
        of V, padded; None: as Q's."""

    @abstractmethod
    def bias_bytes(self, bias: Bias) -> int:
        """Shared memory that a bias takes besides."""

    @abstractmethod
    def operand(self, name: Literal["q", "k", "v", "out"]) -> tuple[int, Bases]:
        """(rows, CGA layout) of the tiles in which that tensor is copied."""


@dataclass(frozen=True, kw_only=True)
class HopperConfig(ForwardConfig):
    """How the Hopper kernel is cut: blocks, channels, roles.

    softmax_roles: softmax warpgroups, 1 to 4, each with 64 query rows per CTA.
    query_slots: depth of the queries channel; kv_slots: of the keys and of the values channel, each.
    turns: the softmax roles take turns to issue their products, each when the one before has its scores, so that one's
        softmax runs beside another's products.
    integer_max: find the row maxima of unmasked blocks by comparing scores as integers, unless some row of a role has
        seen only scores far below 0. For 16 bits and one CTA.
    early_exp: quarters of a block's exponentials that are computed before the product P V of the block before is
        waited for, 0 to 2.
    half_by_polynomial: compute half of the exponentials of unmasked blocks by polynomial on the multiply-add units.
        For scores that a function keeps near 0, in bf16.
    stage_in_queries: stage O for its store in the tile of Q, rather than in a buffer of its own.
    last_heads_longest_first: under a causal mask, walk the row blocks of the last heads one by one, those with most
        keys first, so that no program ends much later than others.
    transpose_registers: registers per thread of the role, a warpgroup, that transposes V in fp8. 0: no such role, as in
        16 bits; in fp8 a kernel of its own transposes V before.
    With two CTAs one load of K and V serves both.
    """

    softmax_roles: int
    query_slots: int
    turns: bool
    stage_in_queries: bool
    early_exp: int = 0
    integer_max: bool = False
    half_by_polynomial: bool = False
    last_heads_longest_first: bool = False
    transpose_registers: int = 0

    ROWS_PER_CTA = 64  # of a role: query rows that a warpgroup product covers

    @property
    def archs(self) -> tuple[int, ...]:
        return (90,)

    def __post_init__(self) -> None:
        if self.softmax_roles not in (1, 2, 3, 4):
            raise ValueError(f"{self.softmax_roles=} must be 1, 2, 3 or 4")
        if self.query_slots < 1:
            raise ValueError(f"{self.query_slots=} must be at least 1")
        if self.integer_max and self.num_ctas > 1:
            raise ValueError(
                f"{self.integer_max=} must be False with {self.num_ctas} CTAs, over which a role's rows are spread"
            )
        if self.early_exp not in (0, 1, 2):
            raise ValueError(f"{self.early_exp=} must be 0, 1 or 2")
        super().__post_init__()
        if self.transpose_registers and self.transpose_registers not in REGISTERS_PER_ROLE:
            raise ValueError(
                f"{self.transpose_registers=} must be a multiple of 8 from 24 to 256, or 0 for no such role"
            )
        if self.cga_layout not in ((), ((1, 0),)):
            raise ValueError(f"{self.cga_layout=} must be () for one CTA or ((1, 0),) for two, sharded along the rows")
        if self.registers > REGISTERS_PER_SM:
            raise ValueError(f"{self.registers=} must be at most {REGISTERS_PER_SM}, all warps of a CTA together")

    def transposes_before(self, element_bytes: int) -> bool:
        return element_bytes == 1 and self.transpose_registers == 0

    @property
    def rows_per_role(self) -> int:
        """Query rows of a softmax role, over all CTAs of the cluster."""
        return self.ROWS_PER_CTA * self.num_ctas

    @property
    def block_m(self) -> int:
        return self.rows_per_role * self.softmax_roles

    @property
    def registers(self) -> int:
        """Of a CTA. Registers are handed out by warpgroup, so the load warp counts as four."""
        softmax = self.softmax_roles * self.softmax_registers
        return WARPGROUP * (softmax + self.transpose_registers + self.load_registers)

    def smem_bytes(self, head_dim: int, element_bytes: int, head_dim_v: int | None = None) -> int:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        results = 0 if self.stage_in_queries else self.ROWS_PER_CTA * head_dim_v * 2
        queries = self.softmax_roles * (self.query_slots * self.ROWS_PER_CTA * head_dim * element_bytes + results)
        columns = head_dim + (2 if self.transpose_registers else 1) * head_dim_v
        return queries + self.kv_slots * self.block_n * columns * element_bytes + BARRIER_BYTES

    def bias_bytes(self, bias: Bias) -> int:
        tiles = self.softmax_roles if bias.each_row else 1
        return self.kv_slots * tiles * bias.tile_bytes(self.rows_per_role, self.block_n)

    def operand(self, name: Literal["q", "k", "v", "out"]) -> tuple[int, Bases]:
        if name in ("q", "out"):
            return self.rows_per_role, self.cga_layout
        return self.block_n, tuple((0, 0) for _ in self.cga_layout)  # the same in every CTA


@dataclass(frozen=True, kw_only=True)
class BlackwellConfig(ForwardConfig):
    """How the Blackwell kernel is cut: channels, roles, and what its softmax does in which way.

    A CTA computes two tiles of 128 query rows at a time; two CTAs are a pair whose products are issued together.

    kv_slots: depth of the one channel that keys and values share; where K and V have unlike head dims, of the two that
        they have then, together.
    result_slots: depth of the channel of O on its way to global memory, 1 or 2; O is there in 16 bits.
    load_registers: of the load, mma and store roles.
    load_pieces: in how many pieces the scores are loaded from tensor memory: 1, 2 or 4.
    exp_pieces: in how many pieces the exponentials are taken and the probabilities stored, a multiple of load_pieces:
        the stores of one overlap with the exponentials of the next.
    early_p: hand the probabilities to the products after three quarters of them; needs exp_pieces=4.
    exp_turns: the two softmax roles take turns at the exponential unit.
    max_in_load: let the loads from tensor memory find the row maxima (sm_103 only).
    packed_arithmetic: two fp32 operations to an instruction.
    polynomial_columns: of every 16 columns of an unmasked block, for how many to compute the exponentials by
        polynomial on the multiply-add units; even, 0 for none.
    dynamic: programs take their row blocks from the hardware (cluster launch control), rather than every n-th.
    longest_first: compute the row blocks of several heads together, as many as have their K and V in L2 together, those
        with most keys first; otherwise head after head. For causal masks.
    rescale_threshold: rescale the output only when a row's maximum has grown by more, in log2 units; 0: always.
    """

    load_pieces: int = 1
    exp_pieces: int = 1
    early_p: bool = False
    exp_turns: bool = False
    max_in_load: bool = False
    packed_arithmetic: bool = True
    polynomial_columns: int = 0
    rescale_threshold: float = 0.0
    dynamic: bool = False
    longest_first: bool = False
    result_slots: int = 2

    QUERY_TILES = 2
    ROWS_PER_CTA = 128  # of a query tile: lanes of tensor memory
    WARPGROUPS = 4  # two softmax, correction, and the single warps of load, mma and store together
    TENSOR_MEMORY_COLUMNS = 512

    @property
    def archs(self) -> tuple[int, ...]:
        return (103,) if self.max_in_load else (100, 103)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_slots < 2:
            raise ValueError(f"{self.kv_slots=} must be at least 2: the products hold a block of V and the next of K")
        if self.result_slots not in (1, 2):
            raise ValueError(f"{self.result_slots=} must be 1 or 2, as a CTA has two query tiles")
        if self.cga_layout not in ((), ((1, 0),), ((1, 0), (2, 0))):
            raise ValueError(
                f"{self.cga_layout=} must be () for one CTA, ((1, 0),) for two or ((1, 0), (2, 0)) for four, sharded "
                "along the rows"
            )
        for name in ("load_pieces", "exp_pieces"):
            if getattr(self, name) not in (1, 2, 4):
                raise ValueError(f"self.{name}={getattr(self, name)} must be 1, 2 or 4")
        if self.exp_pieces % self.load_pieces:
            raise ValueError(f"{self.exp_pieces=} must be a multiple of {self.load_pieces=}")
        if self.early_p and self.exp_pieces != 4:
            raise ValueError(f"{self.exp_pieces=} must be 4 with early_p, which hands over three of four")
        if self.polynomial_columns not in range(0, 17, 2):
            raise ValueError(f"{self.polynomial_columns=} must be even, 0 to 16")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"{self.rescale_threshold=} must be from 0 to 8: P would lose range, in fp16 beyond 15")
        if self.correction_registers not in REGISTERS_PER_ROLE:
            raise ValueError(
                f"{self.softmax_registers=} and {self.load_registers=} must leave the correction role 24 to 256 "
                f"registers, they leave {self.correction_registers}"
            )

    @property
    def one_program_per_item(self) -> bool:
        return self.dynamic

    @property
    def items_span_heads(self) -> bool:
        return True

    @property
    def rows_per_query_tile(self) -> int:
        """Query rows of a query tile, over all CTAs of the cluster."""
        return self.ROWS_PER_CTA * self.num_ctas

    @property
    def block_m(self) -> int:
        return self.QUERY_TILES * self.rows_per_query_tile

    @property
    def correction_registers(self) -> int:
        """What the other roles leave; registers are handed out by warpgroup, and the single warps are in one."""
        asked = self.QUERY_TILES * self.softmax_registers + self.load_registers
        return REGISTERS_PER_SM // WARPGROUP - asked

    def piece_columns(self, padded_head_dim: int) -> int:
        return padded_head_dim if padded_head_dim <= 2 * PIECE else PIECE

    @property
    def key_slots(self) -> int:
        """Of the channel that keys have for themselves."""
        return self.kv_slots - self.value_slots

    @property
    def value_slots(self) -> int:
        """Likewise of values, of which the products hold one block only."""
        return self.kv_slots // 2

    def tensor_memory_columns(self, head_dim_v: int) -> int:
        """Columns of tensor memory for a padded head dim of V, of the 512 there are."""
        return self.QUERY_TILES * (self.block_n + head_dim_v)

    def smem_bytes(self, head_dim: int, element_bytes: int, head_dim_v: int | None = None) -> int:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        queries = self.QUERY_TILES * self.ROWS_PER_CTA * head_dim * element_bytes
        results = self.result_slots * self.ROWS_PER_CTA * head_dim_v * 2
        columns = self.kv_slots * head_dim
        if head_dim_v != head_dim:
            columns = self.key_slots * head_dim + self.value_slots * head_dim_v
        keys_values = self.block_n * columns * element_bytes // min(2, self.num_ctas)
        return queries + results + keys_values + BARRIER_BYTES

    def bias_bytes(self, bias: Bias) -> int:
        return self.QUERY_TILES * bias.tile_bytes(self.ROWS_PER_CTA, self.block_n)

    def operand(self, name: Literal["q", "k", "v", "out"]) -> tuple[int, Bases]:
        if name in ("q", "out"):
            return self.rows_per_query_tile, self.cga_layout
        # A pair multiplies with one right operand, of which each CTA holds half: of Kᵀ and of V half of the columns.
        # Further pairs have the same.
        half = (1, 0) if name == "k" else (0, 1)
        return self.block_n, tuple(half if i == 0 else (0, 0) for i in range(len(self.cga_layout)))


def label(config: ForwardConfig) -> str:
    """Short name in tables. Hopper: roles x keys, slots of Q / K and V, T for turns, e and the quarters of early
    exponentials, i for maxima as integers, p for half of the exponentials by polynomial, s for O staged in Q, v for a
    role that transposes V. Blackwell: keys, slots, and a letter for each lever that is on. Then l for longest first,
    and the CTAs."""
    if isinstance(config, HopperConfig):
        slots = f"q{config.query_slots}kv{config.kv_slots}"
        early = f"e{config.early_exp}" * (config.early_exp > 0) + "i" * config.integer_max
        early += "p" * config.half_by_polynomial
        staged = "s" * config.stage_in_queries
        transpose = " v" * (config.transpose_registers > 0)
        name = f"{config.softmax_roles}x{config.block_n} {slots}{'T' * config.turns}{early}{staged}{transpose}"
    else:
        assert isinstance(config, BlackwellConfig)
        pieces = f"{config.load_pieces}/{config.exp_pieces}"
        levers = (
            "e" * config.early_p + "t" * config.exp_turns + "m" * config.max_in_load + "2" * config.packed_arithmetic
        )
        levers += f"p{config.polynomial_columns}" * (config.polynomial_columns > 0)
        levers += f"r{config.rescale_threshold:g}" * (config.rescale_threshold > 0) + "d" * config.dynamic
        levers += "o" * (config.result_slots == 1)
        name = f"{config.block_n} kv{config.kv_slots} {pieces}{levers}"
    return f"{name}{'l' * orders_heads(config)} {config.num_ctas}cta"


def orders_heads(config: ForwardConfig) -> bool:
    """Whether it takes row blocks of several heads together, those with most keys first: under a mask only."""
    return (
        config.last_heads_longest_first
        if isinstance(config, HopperConfig)
        else isinstance(config, BlackwellConfig) and config.longest_first
    )
