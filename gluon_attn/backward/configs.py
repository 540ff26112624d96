"""How the backward's kernels are cut. Frozen, and they check themselves."""

from dataclasses import dataclass, replace

from ..bias import Bias
from ..forward.configs import BARRIER_BYTES, REGISTERS_PER_ROLE
from ..kernels.hopper.backward.finish import FINISH_BYTES, can_finish

GRADS = ("all", "apart", "dv", "dk, dq")


@dataclass(frozen=True, kw_only=True)
class HopperBackward:
    """A program owns `keys` keys at a time, and walks the query rows that see them in blocks of `block_m`.

    block_m: 64 or 128. keys: 128, or 64 at padded head dims of 192 and 256 in one launch, where P too goes through
        shared memory.
    grads: what is computed in one launch: "all" gradients; or "apart", dV in one and dK and dQ in the next, which at
        (192, 128) leaves registers for 128 keys, though both compute P. Of these two, one is "dv" and one "dk, dq".
    query_slots, dout_slots: depth of the channels of Q and of dO.
    ds_slots: tiles of memory for dS.
    rings_in_step: carry one position for the channels of Q and of dO, which saves registers at D=64. They must be
        equally deep.
    dq_slots: depth of the channel of dQ, or of its parts.
    q_pieces: of how many pieces of columns Q, K and dK are, and parts dQ.
    load_registers: registers per thread of the warps that compute nothing: of load, of reduce and, if there is one, of
        finish; the warpgroups that compute have what these leave.
    """

    block_m: int
    keys: int
    query_slots: int
    dout_slots: int
    ds_slots: int
    rings_in_step: bool = False
    dq_slots: int = 1
    q_pieces: int = 1
    load_registers: int = 24
    grads: str = "all"

    WARPS = 8  # that compute, two warpgroups
    num_ctas = 1

    def __post_init__(self) -> None:
        for name in ("block_m", "keys"):
            if getattr(self, name) not in (64, 128):
                raise ValueError(f"self.{name}={getattr(self, name)} must be 64 or 128")
        for name in ("query_slots", "dout_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"self.{name}={getattr(self, name)} must be at least 1")
        if self.dq_slots < 1:
            raise ValueError(f"{self.dq_slots=} must be at least 1")
        if self.grads not in GRADS:
            raise ValueError(f"{self.grads=} must be one of {', '.join(map(repr, GRADS))}")
        if self.grads != "all" and (self.keys == 64 or self.rings_in_step):
            raise ValueError(f"{self.grads=} needs 128 keys, and rings_in_step=False")
        if self.q_pieces not in (1, 3) or (self.q_pieces == 3 and self.keys == 128 and self.grads == "all"):
            raise ValueError(f"{self.q_pieces=} must be 1, or 3 with 64 keys or with grads='apart'")
        if self.ds_slots not in (1, 2):
            raise ValueError(f"{self.ds_slots=} must be 1 or 2")
        if self.rings_in_step and self.query_slots != self.dout_slots:
            raise ValueError(f"{self.rings_in_step=} needs as many query_slots as dout_slots, got {self.query_slots=}")
        if self.load_registers not in REGISTERS_PER_ROLE:
            raise ValueError(f"{self.load_registers=} must be a multiple of 8 from 24 to 256")

    @property
    def launches(self) -> tuple["HopperBackward", ...]:
        """Of the main kernel, one after the other. That of dV has memory for a slot more."""
        if self.grads != "apart":
            return (self,)
        of_dv = replace(self, grads="dv", query_slots=self.query_slots + 1, dout_slots=self.dout_slots + 1)
        return of_dv, replace(self, grads="dk, dq")

    @property
    def has_dv(self) -> bool:
        """Whether dV is computed."""
        return self.grads in ("all", "dv")

    @property
    def has_dk(self) -> bool:
        """Whether dK and dQ are."""
        return self.grads in ("all", "dk, dq")

    @property
    def exchanges_p(self) -> bool:
        """Whether both warpgroups have all keys, and so exchange P."""
        return self.keys == 64

    @property
    def dq_parts(self) -> int:
        """In how many parts of its columns dQ of a row block is computed."""
        return max(2, self.q_pieces) if self.exchanges_p else self.q_pieces

    @property
    def ds_stages(self) -> bool:
        """Whether dV, in 16 bits, has room where dS is."""
        return self.ds_tiles * self.block_m >= 128

    @property
    def ds_tiles(self) -> int:
        """How many tiles of dS there is memory for: in a launch without dS, as much as dV takes."""
        return self.ds_slots if self.has_dk else 128 // self.block_m

    def can_finish(self, head_dim: int) -> bool:
        """Whether there is a finish role for this config, and a padded head dim."""
        return self.grads == "all" and self.dq_parts == 1 and can_finish(self.block_m, head_dim)

    def smem_bytes(
        self, head_dim: int, head_dim_v: int | None = None, bias: Bias | None = None, *, finishes: bool = False
    ) -> int:
        """Shared memory of a CTA for a padded head dim, with barriers and the compiler's own use; of several launches,
        of the one that takes most. head_dim_v: the one of V, padded; None: as Q's. bias: that is added to scores.
        finishes: with the finish role."""
        if len(self.launches) > 1:
            return max(config.smem_bytes(head_dim, head_dim_v, bias) for config in self.launches)
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        statistics = 4 * self.block_m * (self.query_slots + self.dout_slots * self.has_dk)
        queries = (self.keys + self.query_slots * self.block_m) * head_dim
        values = (self.keys * self.has_dk + self.dout_slots * self.block_m) * head_dim_v
        scores = (self.ds_tiles + self.exchanges_p) * self.keys * self.block_m
        dqs = self.dq_slots * 4 * self.block_m * head_dim // self.dq_parts * self.has_dk
        biases = 0 if bias is None else self.query_slots * bias.tile_bytes(self.block_m, self.keys)
        of_finish = FINISH_BYTES.value * finishes
        return 2 * (queries + values + scores) + statistics + dqs + biases + of_finish + BARRIER_BYTES

    def dbias_rows(self, bias: Bias, head_dim: int) -> int:
        """Of how many queries a tile of a bias's gradient is, in its dtype, for which a slot of dQ has room."""
        tile = self.block_m * self.keys * bias.gradient_dtype.itemsize
        return self.block_m // max(1, tile * self.dq_parts // (4 * self.block_m * head_dim))


def label(config: HopperBackward) -> str:
    """Rows x keys, slots of Q, dO and dS, and of parts of dQ if several; whether dV is apart; registers of the single
    warps."""
    slots = f"q{config.query_slots}do{config.dout_slots}ds{config.ds_slots}" + f"dq{config.dq_slots}" * (
        config.dq_slots > 1
    )
    cut = f"{' in step' * config.rings_in_step}{' dv apart' * (config.grads == 'apart')}"
    return f"{config.block_m}x{config.keys} {slots}{cut} r{config.load_registers}"
