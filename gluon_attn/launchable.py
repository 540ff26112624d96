"""Which kernels calls may launch, whatever their lengths: those that `warmup` compiles ahead, and tests look at."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from .backward.configs import GRADS, HopperBackward, label
from .backward.launch import Choices, builds_of, key_list_build, sinks_build
from .backward.plan import can_share, finishes
from .backward.table import BackwardRow
from .backward.table import pick_config as pick_backward
from .backward.table import rows_by_default as backward_rows_by_default
from .bias import Bias
from .device import Device
from .documents import documents_build
from .forward.configs import BlackwellConfig, ForwardConfig
from .forward.launch import build_of, list_build, transpose_build
from .forward.plan import LARGEST_LENGTH
from .forward.table import Row, for_bias, for_scores, rows_by_default
from .kernels.common.mask import Mask
from .mask_mod import DOCUMENTS
from .problem import Problem, scores_of
from .runtime.kernel import Build
from .score_mod import ScoreFunction, alibi, softcap
from .sizes import Sizes

CARDS = {90: Device.hopper(), 100: Device.blackwell(), 103: Device.blackwell_ultra()}
AnyRow = TypeVar("AnyRow", bound=Sizes)


@dataclass(frozen=True)
class Features:
    """What calls have besides limits: a cap on scores or slopes, the dtype of sinks, a bias, documents, packed
    sequences."""

    cap: float | None = None
    slopes: bool = False  # one for each head, in all of the batch
    sinks: torch.dtype | None = None
    bias: Bias | None = None
    of_bias: bool = False  # its gradient, too
    documents: bool = False
    packed: bool = False

    @property
    def score_mod(self) -> ScoreFunction | None:
        """Cannot be sent to another process."""
        if self.slopes:
            return alibi(torch.empty(1, device="meta"))
        return None if self.cap is None else softcap(self.cap)

    def mask(self, limits: Mask) -> Mask:
        """With documents, if they have them. Cannot be sent to another process either."""
        return replace(limits, function=DOCUMENTS) if self.documents else limits

    def take(self, row: Row, dtype: torch.dtype) -> bool:
        """Whether `pick_config` may choose it."""
        config = row.config
        if row.scores not in (None, scores_of(self.score_mod, self.bias, dtype)):
            return False
        if self.bias is not None and config.num_ctas > 1:
            return False
        return not (self.packed and isinstance(config, BlackwellConfig) and config.dynamic)


@dataclass(frozen=True)
class Job:
    """A kernel to compile. make: can be sent to another process, unlike what it makes."""

    name: str
    make: Callable[[], Build]


def unlike(jobs: Iterable[Job]) -> list[Job]:
    """Each kernel once."""
    builds: list[Build] = []
    kept = []
    for job in jobs:
        build = job.make()
        if build not in builds:
            builds.append(build)
            kept.append(job)
    return kept


def reached(rows: Iterable[AnyRow], mask: Mask, keys: tuple[int, int]) -> list[AnyRow]:
    """But for those of more or of fewer keys than a query sees. In limits it sees the most that these let through:
    where there are fewer keys, a row is chosen as if there were no limit."""
    fewest, most = keys
    return [
        row
        for row in rows
        if row.min_kv_len <= most
        and (row.max_kv_len is None or row.max_kv_len >= (most if row.in_limits else fewest))
        and (mask.limits_keys or not row.in_limits)
    ]


def problem_of(
    dtype: torch.dtype, padded_head_dim: int, padded_head_dim_v: int, mask: Mask, bias: Bias | None
) -> Problem:
    """One with these, to choose a config for."""
    return Problem(
        dtype=dtype,
        batch=1,
        heads=1,
        kv_heads=1,
        q_len=LARGEST_LENGTH,
        kv_len=LARGEST_LENGTH,
        head_dim=padded_head_dim,
        head_dim_v=padded_head_dim_v,
        causal=mask.causal,
        left=mask.left,
        right=mask.right,
        chunk=mask.chunk,
        scale=1.0,
        layout="bhsd",
        bias=bias,
    )


def forward_jobs(
    kind: str,
    dtype: torch.dtype,
    padded_head_dim: int,
    mask: Mask,
    features: Features,
    arch: int,
    table: Sequence[Row],
    padded_head_dim_v: int | None = None,
    in_limits: tuple[int, int] | None = None,
) -> Iterator[Job]:
    """in_limits: as for `rows_by_default`."""
    head_dim_v = padded_head_dim if padded_head_dim_v is None else padded_head_dim_v
    taken = sorted((row for row in table if features.take(row, dtype)), key=lambda row: row.scores is None)  # as asked
    rows = rows_by_default(padded_head_dim, mask.causal, dtype.itemsize, arch, head_dim_v, taken, in_limits)
    if features.documents:
        yield Job("documents", partial(documents_build, of_keys=False))
    if features.packed:
        sizes = {row.config.block_m: None for row in rows}
        for block_m, used in itertools.product(sizes, (False, True)):
            yield Job(f"list of blocks of {block_m} rows{of_used(used)}", partial(list_build, block_m, used))
    plain, built = mask == Mask() and features.bias is None, set[ForwardConfig]()
    for row in rows:
        if row.row_blocks and not row.one_round and not plain:
            continue
        config = for_scores(row, features.score_mod, dtype)
        if plain and config in built:  # by another row of the same
            continue
        built.add(config)
        if features.bias is not None:
            asked = problem_of(dtype, padded_head_dim, head_dim_v, mask, features.bias)
            config = for_bias(row.config, asked, CARDS[arch])
        served = [
            f"from {row.min_kv_len} keys" * (row.min_kv_len > 1),
            f"up to {row.max_kv_len} keys" * (row.max_kv_len is not None),
            f"from {row.min_reuse} queries a KV head" * (row.min_reuse > 1),
            "little work" * (row.one_round and not (plain and row.row_blocks)),
            f"where {row.config.block_m} rows end soonest" * (plain and bool(row.row_blocks)),
        ]
        name = ", ".join(filter(None, [f"forward {kind} {config.block_m} x {config.block_n}", *served]))
        yield Job(name, partial(forward_build, features, dtype, padded_head_dim, head_dim_v, mask, config))
        if config.transposes_before(dtype.itemsize):
            for used in (False, True) if features.packed else (False,):
                make = partial(transpose_build, dtype, head_dim_v, features.packed, used)
                yield Job(f"transpose {kind}{of_used(used)}", make)


def backward_jobs(
    kind: str,
    dtype: torch.dtype,
    padded_head_dim: int,
    mask: Mask,
    features: Features,
    deterministic: bool,
    table: Sequence[BackwardRow],
    padded_head_dim_v: int | None = None,
) -> Iterator[Job]:
    """Kernels with which programs share key blocks are others."""
    if features.sinks is not None:
        yield Job("backward, sinks", partial(sinks_build, features.sinks))
    if features.documents:
        yield Job("backward, documents", partial(documents_build, of_keys=True))
    head_dim_v = padded_head_dim if padded_head_dim_v is None else padded_head_dim_v
    scores = scores_of(features.score_mod, features.bias, dtype)
    taken = sorted((row for row in table if row.scores in (None, scores)), key=lambda row: row.scores is None)
    rows = backward_rows_by_default((padded_head_dim, head_dim_v), mask.causal, taken)
    configs = [(row.config, f", {label(row.config)}" * row.is_limited) for row in rows]
    biases = [features.bias]
    if features.bias is not None:
        asked = problem_of(dtype, padded_head_dim, head_dim_v, mask, features.bias)
        configs = [(pick_backward(asked, of_bias=features.of_bias), "")]
        if features.of_bias and features.bias.each_row and not deterministic:
            biases.append(replace(features.bias, shared=True))
    if features.packed:
        for keys, used in itertools.product({config.keys: None for config, _ in configs}, (False, True)):
            yield Job(f"backward, list of blocks of {keys} keys{of_used(used)}", partial(key_list_build, keys, used))
    for (config, of_row), bias, shared in itertools.product(configs, biases, (False, True)):
        if shared and (features.packed or not can_share(mask, config)):
            continue
        choices = (dtype, padded_head_dim, head_dim_v, mask, config, deterministic, shared, bias)
        how = ", fixed order" * deterministic + ", shared key blocks" * shared + of_row
        how += ", summed over a bias" * (bias is not None and features.of_bias and bias.sums_gradient)
        for step in backward_choices(features, *choices).steps:
            name = step
            if step in GRADS:
                name = "main" if len(config.launches) == 1 else f"main, {step}"
            if step != "list":
                yield Job(f"backward {kind}, {name}{how}", partial(backward_build, features, step, *choices))


def of_used(used: bool) -> str:
    return ", used keys" * used


def forward_build(
    features: Features, dtype: torch.dtype, head_dim: int, head_dim_v: int, mask: Mask, config: ForwardConfig
) -> Build:
    return build_of(
        dtype,
        head_dim,
        features.mask(mask),
        config,
        features.score_mod,
        features.sinks,
        features.packed,
        padded_head_dim_v=head_dim_v,
        bias=features.bias,
    )


def backward_choices(
    features: Features,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    mask: Mask,
    config: HopperBackward,
    deterministic: bool,
    shared: bool,
    bias: Bias | None,
) -> Choices:
    head_dims = head_dim, head_dim_v
    return Choices(
        dtype=dtype,
        padded_head_dims=head_dims,
        mask=features.mask(mask),
        config=config,
        deterministic=deterministic,
        shared=shared,
        score_mod=features.score_mod,
        packed=features.packed,
        bias=bias,
        of_bias=features.of_bias,
        finishes=finishes(config, head_dims, CARDS[90], bias=bias),
    )


def backward_build(features: Features, step: str, *choices: Any) -> Build:
    """choices: as for `backward_choices`."""
    made = backward_choices(features, *choices)
    return builds_of(made)[made.steps.index(step)]
