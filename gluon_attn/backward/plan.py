"""How the gradients of a problem are laid out over a device's processors."""

import heapq
import math
from dataclasses import dataclass, replace

from ..bias import Bias
from ..device import Device
from ..forward.plan import LARGEST_LENGTH, LARGEST_PACKED, pairs_even_out
from ..kernels.common.mask import Mask
from ..kernels.common.packed import CANDIDATES
from ..kernels.hopper.backward.preprocess import MOST_SHARED_PARTS
from ..kernels.hopper.backward.work import first_keys_come_first
from ..problem import Problem
from .configs import HopperBackward
from .table import padded_head_dims

# How many programs work on one head at a time, with a fixed order of sums, where L2 has no room for more heads: they
# wait for each other, one after the other. Fewer need more of Q and dO at once. By whether late keys alone are hidden,
# as by a causal mask: in a window each arrives at a row block when the one before it is done there.
PROGRAMS_OF_A_HEAD = {False: 8, True: 4}

# Of long heads more: about this share of a head's key blocks, by what is hidden too, but not in a window. They walk
# the rows of a head one after the other, so that rows come from memory, and sums of dQ go there, once for all of them.
# With fewer programs for long heads an H100 is up to 40 % slower. With more, they wait longer for the first ones.
SHARE_OF_A_HEAD = {False: 1 / 2, True: 1 / 8}

L2_SHARE = 0.375  # for rows of heads that are computed at a time, see `heads_in_order`

# Of a key block that programs share, each has at least about so many.
ROW_BLOCKS_OF_A_SHARE = 4

# Steps that sharing must save: it takes as long as a few.
LEAST_SAVED = 4

# Where key blocks that cost unlike are shared: what a part costs besides its steps, in as many rows of a step. That is
# for each key block that it has some of; and if it is not its program's first. Fitted to times of an H200, see
# docs/lab_log.md#parts-under-a-causal-mask.
ROWS_FOR_A_KEY_BLOCK = 128
ROWS_FOR_A_FURTHER_PART = 384


@dataclass(frozen=True, kw_only=True)
class BackwardPlan:
    """The numbers of a backward's launches that depend on no tensor.

    programs: of the main kernel, as many as there are processors: each loads its next K and V early.
    blocks_per_item: 1, or 2 for a key block that many queries see with one that few do.
    last_heads: of how many KV heads, the last ones, an item is one key block, so that all programs end together.
    heads_at_once: of how many of those one key block follows the other.
    shared: key blocks, the last ones, that are divided into parts: those that are left where the others go into the
        number of processors; or all, where there are fewer than processors.
    shared_parts: how many parts these are.
    row_programs: of the kernels before and after it, one for each block of rows of each head.
    finishes: the main kernel makes dQ of its sums, see the function of that name.
    """

    problem: Problem
    config: HopperBackward
    programs: int
    blocks_per_item: int
    last_heads: int
    heads_at_once: int
    shared: int
    shared_parts: int
    row_programs: int
    deterministic: bool
    arch: int
    finishes: bool

    def __post_init__(self) -> None:
        """Shared key blocks are nobody's if no program shares them: dK and dV would not be written."""
        if self.shared and self.shared_parts <= self.shared:
            raise ValueError(
                f"{self.shared_parts=} parts must be more than the {self.shared=} key blocks that they are of"
            )

    @property
    def key_blocks(self) -> int:
        """Of all heads."""
        return self.problem.batch * self.problem.kv_heads * -(-self.problem.kv_len // self.config.keys)

    @property
    def row_blocks(self) -> int:
        """Of a head. Of packed sequences as many as they have at most, with those of the rows after the last one."""
        return blocks_of(self.problem, self.problem.q_len, self.config.block_m)

    @property
    def capacity(self) -> int:
        """As `row_blocks`, of key blocks."""
        return blocks_of(self.problem, self.problem.kv_len, self.config.keys)

    @property
    def list_programs(self) -> int:
        """Of the kernel that lists the key blocks of packed sequences."""
        return -(-self.capacity // CANDIDATES.value)

    @property
    def list_numbers(self) -> dict[str, float]:
        """What that kernel is given besides tensors."""
        problem, mask = self.problem, self.problem.mask
        most = problem.q_len
        if mask.left is not None and mask.reach is not None:
            most = min(most, mask.left + mask.reach + self.config.keys)
        return {
            "sequences": problem.sequences or 0,
            "q_rows": problem.q_len,
            "k_rows": problem.kv_len,
            "reach": -1 if mask.reach is None else min(mask.reach, problem.q_len),
            "most_queries": most,
            "capacity": self.capacity,
        }

    @property
    def sets_zero(self) -> bool:
        """Whether dQ's sums are set to zero before, and not by who is first to add: some rows see no key. The finish
        role, and of packed sequences the kernel after, sees by `added` where nobody has added."""
        mask, packed = self.problem.mask, self.problem.sequences is not None
        if packed or self.finishes:
            return False
        return mask.has_ranges or mask.some_rows_see_nothing(self.problem.q_len, self.problem.kv_len)

    @property
    def rows(self) -> int:
        """Of a head, rounded up to whole blocks: that many the workspaces have."""
        return self.row_blocks * self.config.block_m

    @property
    def scale_log2(self) -> float:
        return self.problem.scale * math.log2(math.e)

    @staticmethod
    def of(problem: Problem, config: HopperBackward, device: Device, *, deterministic: bool = False) -> "BackwardPlan":
        """Raises ValueError for more queries or keys than the kernels can count."""
        largest = LARGEST_LENGTH if problem.sequences is None else LARGEST_PACKED
        for name, length in (("q", problem.q_len), ("k", problem.kv_len)):
            if length > largest:
                raise ValueError(
                    f"{name}: expected at most {largest} positions, counted in 32 bits, got {length}; split the "
                    "sequence"
                )
        of_head = blocks_of(problem, problem.kv_len, config.keys)
        key_blocks = problem.batch * problem.kv_heads * of_head
        row_programs = problem.batch * problem.heads * blocks_of(problem, problem.q_len, config.block_m)
        for name, blocks in (("q", row_programs), ("k", key_blocks)):
            if blocks >= 2**31 - 2 * device.sm_count:
                raise ValueError(
                    f"{name}: expected fewer than 2^31 blocks over all heads and batches, got {blocks}; split the batch"
                )
        if problem.sequences is not None:
            return BackwardPlan.of_packed(problem, config, device, deterministic=deterministic)
        mask = problem.mask
        # Under a causal mask the first key block costs the most and the last the least. In a window most cost the same,
        # and of pairs some would cost twice one.
        uneven = replace(mask, function=None) == Mask(causal=True) or (
            mask.differs_by_row
            and mask.chunk is None
            and pairs_even_out(lambda index: row_blocks_of(problem, config, index), of_head)
        )
        uneven = uneven and not mask.has_ranges  # by which nobody knows what they cost
        blocks_per_item = 2 if uneven and not deterministic and key_blocks > device.sm_count else 1
        items_of_head = -(-of_head // blocks_per_item)
        items = problem.batch * problem.kv_heads * items_of_head
        shared, shared_parts = shares_of(problem, config, device, key_blocks, uneven, deterministic)
        head_dims = padded_head_dims(problem.head_dim, problem.head_dim_v)
        programs = min(device.sm_count, items)
        if shared:
            programs = min(max(shared_parts, items), device.sm_count)
            last_heads = heads_at_once = 0
        elif deterministic:
            last_heads, heads_at_once = problem.batch * problem.kv_heads, heads_in_order(problem, device, of_head)
        else:
            # In the last heads the first key block comes first, which costs the most only where late keys are hidden.
            to_even_out = blocks_per_item == 2 and items > device.sm_count and mask.hides_late_keys
            last_heads = heads_at_once = -(-device.sm_count // items_of_head) if to_even_out else 0
        return BackwardPlan(
            problem=problem,
            config=config,
            programs=programs,
            blocks_per_item=blocks_per_item,
            last_heads=last_heads,
            heads_at_once=max(1, heads_at_once),
            shared=shared,
            shared_parts=shared_parts,
            row_programs=row_programs,
            deterministic=deterministic,
            arch=device.arch,
            finishes=finishes(config, head_dims, device, bias=problem.bias),
        )

    @staticmethod
    def of_packed(problem: Problem, config: HopperBackward, device: Device, *, deterministic: bool) -> "BackwardPlan":
        """Of packed sequences, whose lengths are not known: no key blocks are paired or shared. Unless sums are in a
        fixed order, the kernel finds by itself how many heads it computes at a time."""
        key_blocks = problem.kv_heads * blocks_of(problem, problem.kv_len, config.keys)
        return BackwardPlan(
            problem=problem,
            config=config,
            programs=min(device.sm_count, key_blocks),
            blocks_per_item=1,
            last_heads=0,
            heads_at_once=heads_in_order(problem, device, None) if deterministic else 1,
            shared=0,
            shared_parts=0,
            row_programs=problem.heads * blocks_of(problem, problem.q_len, config.block_m),
            deterministic=deterministic,
            arch=device.arch,
            finishes=finishes(config, padded_head_dims(problem.head_dim, problem.head_dim_v), device),
        )


def finishes(
    config: HopperBackward,
    head_dims: tuple[int, int],
    device: Device,
    *,
    bias: Bias | None = None,
) -> bool:
    """Whether the main kernel makes dQ of its sums, so that none comes after it. It does not where there is no role for
    the config, or no memory for it, as with some biases. head_dims: padded, of Q and of V."""
    if not config.can_finish(head_dims[0]):
        return False
    return config.smem_bytes(*head_dims, bias, finishes=True) <= device.smem_bytes


def blocks_of(problem: Problem, rows: int, size: int) -> int:
    """How many blocks of `size` a head's rows are in; of packed sequences, of each of which the last block may not be
    full, at most."""
    return -(-rows // size) if problem.sequences is None else rows // size + problem.sequences + 1


def heads_in_order(problem: Problem, device: Device, key_blocks: int | None) -> int:
    """How many KV heads are computed at a time if sums are in a fixed order: as many as L2 has room for the rows of, up
    to one for each program, so that few programs stand in line for one row block. But no fewer than such that a head
    has PROGRAMS_OF_A_HEAD; or, if it is long, programs for SHARE_OF_A_HEAD of its key blocks.

    key_blocks: of a head; None of packed sequences, whose lengths are not known.
    """
    mask, group = problem.mask, problem.heads // problem.kv_heads
    only_late = mask.hides_late_keys and not mask.hides_early_keys
    needed = -(-device.sm_count // PROGRAMS_OF_A_HEAD[only_late])
    if key_blocks is None:
        return needed
    if not mask.hides_early_keys:
        of_long = SHARE_OF_A_HEAD[only_late] * max(1, key_blocks)
        needed = min(needed, max(1, int(device.sm_count / of_long)))
    row_bytes = (2 + 4) * problem.head_dim + 2 * problem.head_dim_v  # Q in 16 bits, the sums of dQ in 32; dO
    room = int(L2_SHARE * device.l2_bytes) // (group * max(1, problem.q_len) * row_bytes)
    return min(max(needed, min(room, device.sm_count)), problem.batch * problem.kv_heads)


def row_blocks_of(problem: Problem, config: HopperBackward, index: int) -> int:
    """How many row blocks of a head see a key block, that is, how many steps it costs for each query head."""
    first = index * config.keys
    last = min(first + config.keys, problem.kv_len) - 1
    rows = problem.mask.rows_seen(first, last, problem.q_len, problem.kv_len)
    return -(-rows.stop // config.block_m) - rows.start // config.block_m if rows else 0


def can_share(mask: Mask, config: HopperBackward) -> bool:
    """Whether programs ever share key blocks under that mask: not where too few rows see each."""
    in_chunk = None if mask.chunk is None else mask.chunk - 1
    before, after = (
        min((limit for limit in limits if limit is not None), default=None)
        for limits in ((mask.reach, in_chunk), (mask.left, in_chunk))
    )
    if before is None or after is None:
        return True
    rows = before + config.keys + after
    return -(-(rows - 1) // config.block_m) + 1 >= 2 * ROW_BLOCKS_OF_A_SHARE


def shares_of(
    problem: Problem, config: HopperBackward, device: Device, key_blocks: int, uneven: bool, deterministic: bool
) -> tuple[int, int]:
    """(how many key blocks are shared, in how many parts), or twice 0: see `BackwardPlan`."""
    if key_blocks < device.sm_count:
        shared = key_blocks
    else:  # pairs of key blocks that cost unlike, and programs in a fixed order, end together well enough
        shared = 0 if uneven or deterministic else key_blocks % device.sm_count
    if not shared:
        return 0, 0
    row_blocks = -(-problem.q_len // config.block_m)
    if problem.mask.hides_early_keys:
        # Few queries see only some key blocks, up to the last.
        seen = problem.mask.keys_seen(0, problem.q_len - 1, problem.q_len, problem.kv_len)
        some = range((problem.kv_len - seen) // config.keys, -(-problem.kv_len // config.keys))
        row_blocks = max(row_blocks_of(problem, config, index) for index in some[:: -(-len(some) // 64)])
    most = min(MOST_SHARED_PARTS.value, shared * (row_blocks // ROW_BLOCKS_OF_A_SHARE))
    shared_parts = min(device.sm_count, most)
    if uneven and not deterministic:
        return shared_by_claims(problem, config, device, shared, most)
    if deterministic:  # each part has shares of one key block, or it could wait for itself
        shared_parts -= shared_parts % shared
    steps = row_blocks * (problem.heads // problem.kv_heads)
    if shared_parts <= shared or steps * (shared_parts - shared) < LEAST_SAVED * shared_parts:
        return 0, 0
    return shared, shared_parts


def shared_by_claims(
    problem: Problem, config: HopperBackward, device: Device, shared: int, most: int
) -> tuple[int, int]:
    """`shares_of` where key blocks cost unlike and all are shared, in at most `most` parts. Each program claims a part
    when it is free. So there are more parts than programs if the last one ends sooner so."""
    heads, group = problem.batch * problem.kv_heads, problem.heads // problem.kv_heads
    of_head = [row_blocks_of(problem, config, i) * config.block_m * group for i in range(shared // heads)]
    if first_keys_come_first(problem.mask, config.keys, rotated=True):
        rows = [of_index for of_index in of_head for _ in range(heads)]
    else:
        rows = of_head * heads

    def end(parts: int) -> float:
        """When the last program ends, in rows of its steps."""
        free_at = [0.0] * device.sm_count
        for part in range(parts):
            block, first = divmod(part * shared, parts)
            of_next = max(0, first + shared - parts)
            cost = ROWS_FOR_A_KEY_BLOCK + (shared - of_next) / parts * rows[block]
            if of_next:
                cost += ROWS_FOR_A_KEY_BLOCK + of_next / parts * rows[block + 1]
            if part >= device.sm_count:
                cost += ROWS_FOR_A_FURTHER_PART
            heapq.heapreplace(free_at, free_at[0] + cost)
        return max(free_at)

    one_each = min(device.sm_count, most)
    whole = range(shared * max(2, one_each // shared), most + 1, shared)  # each of one key block
    ends = {parts: end(parts) for parts in (one_each, *whole) if parts > shared}
    parts = min(ends, key=lambda parts: ends[parts], default=0)
    return (shared, parts) if parts and ends[parts] < max(rows) else (0, 0)
