"""Which configuration of the backward serves which problem."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..bias import Bias
from ..device import Device
from ..problem import Problem
from ..sizes import Sizes, as_asked
from ..tensors import PADDED_HEAD_DIMS
from .configs import HopperBackward

HOPPER = {
    64: HopperBackward(block_m=128, keys=128, query_slots=3, dout_slots=3, ds_slots=1, rings_in_step=True),
    128: HopperBackward(block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=1, dq_slots=2),
    256: HopperBackward(block_m=64, keys=64, query_slots=2, dout_slots=1, ds_slots=1),
}

# Where causal instead. Programs then wait more for each other, above all in order.
CAUSAL = {64: replace(HOPPER[64], query_slots=2, dout_slots=2, dq_slots=2)}

# By padded head dim, under bench/results/: where they were timed beside cuDNN. docs/lab_log.md says what lost to them.
RESULT_FILES = {64: "h200_gradients.json", 128: "h200_gradients.json", 256: "h200_gradients_wide.json"}
# Where other configs were timed beside these too, if they were.
CANDIDATES = {64: "h200_gradients_dq_slots.json", 128: "h200_gradients_dq_slots.json"}


# By padded head dims of Q and of V, and where they were timed.
UNLIKE = {
    (192, 128): HopperBackward(
        block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=1, dq_slots=3, q_pieces=3, grads="apart"
    ),
}

# What there is beside it: all gradients in one launch, which has registers for half of the keys.
IN_ONE_LAUNCH = {
    (192, 128): HopperBackward(block_m=64, keys=64, query_slots=2, dout_slots=2, ds_slots=1, dq_slots=2, q_pieces=3),
}


@dataclass(frozen=True)
class BackwardRow(Sizes):
    """A choice of config for the problems it fits.

    head_dims: of Q and of V, padded. causal: None for both. result_file (under bench/results/), card, date: where it
    was timed; None for a row that waits for its measurement. candidates_file: where other configs were timed beside it,
    on such a card. Fields of `Sizes` are given by name.
    """

    head_dims: tuple[int, int]
    config: HopperBackward
    causal: bool | None = None
    result_file: str | None = None
    card: str | None = None
    date: str | None = None
    candidates_file: str | None = None

    def is_of_kind(self, problem: Problem) -> bool:
        """Whether it is for such head dims and mask, whatever the sizes."""
        of_mask = self.causal is None or self.causal == problem.mask.causal
        return of_mask and self.head_dims == padded_head_dims(problem.head_dim, problem.head_dim_v)

    def unmet(self, problem: Problem) -> str | None:
        """The field of the row that keeps it from serving the problem, the first of them; "kind" for what `is_of_kind`
        asks. None: it serves it."""
        return self.unmet_size(problem) if self.is_of_kind(problem) else "kind"


PACKAGED = (
    *(
        BackwardRow(
            (d, d),
            config,
            causal,
            result_file=RESULT_FILES[d],
            card="NVIDIA H200",
            date="2026-11-28",
            candidates_file=CANDIDATES.get(d),
        )
        for causal, configs in ((True, CAUSAL), (None, HOPPER))
        for d, config in configs.items()
    ),
    *(
        BackwardRow(dims, config, result_file="h200_unlike.json", card="NVIDIA H200", date="2026-11-28")
        for dims, config in UNLIKE.items()
    ),
)


def padded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Of Q and of V in the kernels that compute such gradients. TMA fills the columns between with zeros. Where there
    are none for two head dims, both are padded to one."""
    for d, d_v in UNLIKE:
        if PADDED_HEAD_DIMS[PADDED_HEAD_DIMS.index(d) - 1] < head_dim <= d and head_dim_v <= d_v:
            return d, d_v
    both = next(padded for padded in HOPPER if max(head_dim, head_dim_v) <= padded)
    return both, both


# With a bias of each row: a tile of it takes memory. At D=64 its gradient goes through the slots of dQ in two parts,
# and with row blocks of 128 they would wait for each other. At D=128 there is no room for it beside two slots of dQ.
WITH_BIAS = {
    64: HopperBackward(block_m=128, keys=128, query_slots=2, dout_slots=2, ds_slots=1, rings_in_step=True),
    128: HopperBackward(block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=2),
}
WITH_DBIAS = {
    64: HopperBackward(block_m=64, keys=128, query_slots=2, dout_slots=2, ds_slots=2, dq_slots=3),
    128: WITH_BIAS[128],
}


def pick_row(problem: Problem, rows: Sequence[BackwardRow] = PACKAGED) -> BackwardRow:
    """The first row that fits. Pure. With a bias, of the packaged ones: others were timed without, and may leave it no
    room."""
    typical = problem.typical
    asked = PACKAGED if problem.bias is not None else rows
    return next(row for row in as_asked(asked, problem) if row.unmet(typical) is None)  # one of the packaged ones does


def pick_config(problem: Problem, rows: Sequence[BackwardRow] = PACKAGED, *, of_bias: bool = False) -> HopperBackward:
    """The config for a problem, by `pick_row`; with a bias, one that leaves it room. rows: the table;
    `tuning.backward_rows_for` has the one in use. of_bias: the bias has a gradient."""
    row = pick_row(problem, rows)
    if problem.bias is None:
        return row.config
    d, d_v = row.head_dims
    configs = [row.config]
    if problem.bias.each_row and d == d_v and d in WITH_BIAS:
        configs = [WITH_DBIAS[d]] if of_bias else [WITH_BIAS[d], WITH_DBIAS[d]]
    configs.append(replace(configs[-1], query_slots=1, rings_in_step=False))
    configs.append(replace(configs[-1], dout_slots=1))
    *others, last = configs
    for config in others:
        try:
            require_fits(config, row.head_dims, Device.hopper(), problem.bias)
        except ValueError:
            continue
        return config
    require_fits(last, row.head_dims, Device.hopper(), problem.bias)
    return last


def require_fits(config: HopperBackward, head_dims: tuple[int, int], device: Device, bias: Bias | None = None) -> None:
    """ValueError unless there are such kernels for these padded head dims, of Q and of V, and they fit into the
    device's memory. bias: that is added to scores."""
    known = {row.head_dims: row.config for row in PACKAGED}
    if device.arch != 90:
        raise ValueError(f"config: expected a Hopper card for gradients, got {device.name}")
    if head_dims not in known:
        kinds = ", ".join(f"{d} and {d_v}" for d, d_v in known)
        raise ValueError(f"config: expected padded head dims of {kinds}, got {head_dims[0]} and {head_dims[1]}")
    like = known[head_dims]
    if head_dims in IN_ONE_LAUNCH and config.grads == "all":
        like = IN_ONE_LAUNCH[head_dims]
    for name in ("grads", "keys", "q_pieces"):
        if getattr(config, name) != getattr(like, name):
            raise ValueError(
                f"config: expected {name}={getattr(like, name)!r} at head_dim {head_dims[0]}, got "
                f"{getattr(config, name)!r}"
            )
    needed = config.smem_bytes(*head_dims, bias)
    if needed > device.smem_bytes:
        raise ValueError(
            f"config: expected a config that fits the {device.smem_bytes} bytes of shared memory of {device.name}, "
            f"got one that needs {needed} at head_dim {head_dims[0]}{' with a bias' * (bias is not None)}; lower "
            "query_slots, dout_slots, ds_slots or dq_slots"
        )


def rows_by_default(
    head_dims: tuple[int, int], causal: bool, rows: Sequence[BackwardRow] = PACKAGED
) -> list[BackwardRow]:
    """The rows that `pick_config` chooses from, by sizes: up to one that fits whatever they are. head_dims: padded."""
    found: list[BackwardRow] = []
    for row in rows:
        if row.head_dims == head_dims and row.causal in (None, causal):
            found.append(row)
            if row.are_any:
                break
    return found
