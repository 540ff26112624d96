"""From a plan to the launches of attention backward: two or three kernels, which hand on statistics and sums of dQ, of
which the main one may come in two launches; before them, of packed sequences, one that lists the key blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from ..bias import Bias, view_of_bias
from ..documents import compiled_documents, documents_given, documents_launch, documents_shape
from ..forward.launch import AUX, BIAS, LENGTHS, RECORDS, absent_lengths, types_of
from ..kernels.common.mask import Mask
from ..kernels.common.packed import RECORD
from ..kernels.hopper.backward.finish import COLUMNS, ROWS, SUM_ROWS, SWIZZLE
from ..kernels.hopper.backward.kernel import attention_backward
from ..kernels.hopper.backward.packed import list_key_blocks
from ..kernels.hopper.backward.postprocess import finish_backward
from ..kernels.hopper.backward.preprocess import MOST_SHARED_PARTS, prepare_backward
from ..kernels.hopper.backward.sinks import sum_sinks
from ..runtime.compat import CompiledKernel
from ..runtime.descriptors import Block, View
from ..runtime.kernel import (
    Build,
    CardLaunch,
    CardLaunches,
    Kernel,
    Launch,
    Launches,
    Pointer,
    Scalar,
    Tensors,
    Tma,
    allocated_at_once,
)
from ..score_mod import TENSOR_TYPES, ScoreFunction
from ..tensors import in_bhsd
from .configs import GRADS, HopperBackward
from .plan import BackwardPlan
from .table import padded_head_dims

# Of the finish role: dQ and its sums, which other roles have in blocks of other shapes.
DQ_PIECES, SUM_PIECES = Tma("dq_pieces_desc", "dq_pieces"), Tma("sum_pieces_desc", "sum_pieces")
OF_PIECES = {DQ_PIECES.tensor: "dq", SUM_PIECES.tensor: "dq_sums"}
DONE = Pointer("done_ptr", "done", "i32")

# The gradient of a bias: of one of each row, or of one that queries have in common. At most one of them is there.
DBIAS, DBIAS_ROW = Tma("dbias_desc", "dbias"), Pointer("dbias_ptr", "dbias")

LIST = Kernel(
    list_key_blocks,
    *LENGTHS,
    RECORDS,
    *map(Scalar, ("sequences", "q_rows", "k_rows", "reach", "most_queries", "capacity")),
)
PREPARE = Kernel(
    prepare_backward,
    Tma("out_desc", "out"),
    Tma("do_desc", "dout"),
    Pointer("lse_ptr", "lse"),
    Pointer("dlse_ptr", "dlse"),
    Pointer("lse_log2_ptr", "lse_log2"),
    Pointer("delta_ptr", "delta"),
    Pointer("dq_ptr", "dq_sums"),
    Pointer("added_ptr", "added", "i32"),
    Pointer("has_handed_in_ptr", "has_handed_in", "i32"),
    Pointer("claimed_ptr", "claimed", "i32"),
    DONE,
    LENGTHS[0],
    Scalar("sets_zero"),
    Scalar("sequences"),
)
MAIN = Kernel(
    attention_backward,
    Tma("q_desc", "q"),
    Tma("k_desc", "k"),
    Tma("v_desc", "v"),
    Tma("do_desc", "dout"),
    Tma("dk_desc", "dk"),
    Tma("dv_desc", "dv"),
    Tma("lse_desc", "lse_log2"),
    Tma("delta_desc", "delta"),
    Tma("dq_desc", "dq_sums"),
    BIAS,
    DBIAS,
    DQ_PIECES,
    SUM_PIECES,
    Pointer("added_ptr", "added", "i32"),
    Pointer("handed_in_ptr", "handed_in"),
    Pointer("has_handed_in_ptr", "has_handed_in", "i32"),
    DBIAS_ROW,
    *AUX,
    RECORDS,
    DONE,
    LENGTHS[0],
    Pointer("claimed_ptr", "claimed", "i32"),
    Scalar("scale_log2", "fp32"),
    Scalar("scale", "fp32"),
    Scalar("blocks_per_item"),
    Scalar("last_heads"),
    Scalar("heads_at_once"),
    Scalar("shared"),
    Scalar("shared_parts"),
    Scalar("sequences"),
)
FINISH = Kernel(
    finish_backward,
    Tma("out_desc", "dq"),
    Pointer("dq_ptr", "dq_sums"),
    Pointer("added_ptr", "added", "i32"),
    LENGTHS[0],
    Scalar("scale", "fp32"),
    Scalar("sequences"),
)

SINKS = Kernel(
    sum_sinks,
    Pointer("dsinks_ptr", "dsinks"),
    Pointer("sinks_ptr", "sinks"),
    Pointer("lse_log2_ptr", "lse_log2"),
    Pointer("delta_ptr", "delta"),
    Scalar("batches"),
    Scalar("heads"),
    Scalar("rows"),
)

# What a call gives for what there may not be: workspaces that it does not need, a bias, and what a ScoreFunction reads.
NOT_THERE = dict.fromkeys(
    ("handed_in", "has_handed_in", "done", "bias", "dbias", *(p.tensor for p in (*AUX, *LENGTHS, RECORDS)))
)

Found = TypeVar("Found")

SUM_COLUMNS = 32  # of dq_sums: what a thread's neighbouring registers are laid out in


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the kernels of a backward pass are compiled for.

    dtype: float16 or bfloat16. padded_head_dims: of Q and of V. finishes: the main kernel makes dQ of its sums, see
    `plan.finishes`. shared: programs share key blocks. packed: of packed sequences, for which one kernel more comes
    before all; used: of each, some keys count. bias: that is added to scores; of_bias: compute its gradient too.
    """

    dtype: torch.dtype
    padded_head_dims: tuple[int, int]
    mask: Mask
    config: HopperBackward
    finishes: bool
    deterministic: bool = False
    shared: bool = False
    score_mod: ScoreFunction | None = None
    packed: bool = False
    used: bool = False
    bias: Bias | None = None
    of_bias: bool = False

    @staticmethod
    def of(plan: BackwardPlan, *, used: bool = False, of_bias: bool = False) -> "Choices":
        problem = plan.problem
        return Choices(
            dtype=problem.dtype,
            padded_head_dims=padded_head_dims(problem.head_dim, problem.head_dim_v),
            mask=problem.mask,
            config=plan.config,
            deterministic=plan.deterministic,
            shared=plan.shared > 0,
            score_mod=problem.score_mod,
            packed=problem.sequences is not None,
            used=used,
            bias=problem.bias,
            of_bias=of_bias,
            finishes=plan.finishes,
        )

    @property
    def steps(self) -> tuple[str, ...]:
        """What `builds_of` makes, in order: of the main kernel, by what each part of it computes."""
        lists, after = ("list",) * self.packed, ("after",) * (not self.finishes)
        return *lists, "before", *(part.grads for part in self.config.launches), *after

    @property
    def of_dbias(self) -> Block | None:
        """A tile of the gradient of a bias of each row, if that is computed."""
        if self.bias is None or not self.of_bias or not self.bias.each_row:
            return None
        rows = self.config.dbias_rows(self.bias, self.padded_head_dims[0])
        return Block.of(self.bias.gradient_dtype, rows, self.config.keys)

    def blocks(self) -> dict[str, Block]:
        """By tensor, but for that gradient."""
        config, (head_dim, head_dim_v) = self.config, self.padded_head_dims
        columns = head_dim // config.q_pieces
        rows, rows_v = (Block.of(self.dtype, config.block_m, d, packed=self.packed) for d in (columns, head_dim_v))
        keys, keys_v = (Block.of(self.dtype, config.keys, d, packed=self.packed) for d in (columns, head_dim_v))
        statistics = Block.of(torch.float32, 1, config.block_m)
        sums = Block.of(torch.float32, config.block_m * head_dim // config.dq_parts // SUM_COLUMNS, SUM_COLUMNS)
        found = dict.fromkeys(("q", "dq"), rows) | dict.fromkeys(("dout", "out"), rows_v)
        found |= dict.fromkeys(("k", "dk"), keys) | dict.fromkeys(("v", "dv"), keys_v)
        found |= {"lse_log2": statistics, "delta": statistics, "dq_sums": sums}
        if self.finishes:
            found[DQ_PIECES.tensor] = Block.of(
                self.dtype, ROWS.value, COLUMNS.value, packed=self.packed, most_swizzle=SWIZZLE.value
            )
            found[SUM_PIECES.tensor] = Block.of(torch.float32, SUM_ROWS.value, SUM_COLUMNS)
        if self.bias is not None:
            found[BIAS.tensor] = self.bias.block(config.block_m, config.keys)
        return found


def builds_of(choices: Choices) -> tuple[Build, ...]:
    """One for each of the choices' steps: the kernel before, the main one, or its parts, and the one after."""
    config, packed, used, blocks = choices.config, choices.packed, choices.used, choices.blocks()
    absent = {} if choices.shared else {"has_handed_in_ptr": None}
    pieces = config.q_pieces
    return (
        *((key_list_build(config.keys, used),) if packed else ()),
        Build(
            kernel=PREPARE,
            blocks=blocks,
            constants=absent
            | absent_lengths(packed, used, PREPARE)
            | {"DQ": (pieces, choices.padded_head_dims[0] // pieces)}
            | ({} if choices.finishes else {DONE.name: None}),
            starts_early=packed,
        ),
        *(main_build(choices, part, blocks) for part in config.launches),
        *(() if choices.finishes else (finish_build(choices, blocks),)),
    )


def finish_build(choices: Choices, blocks: Mapping[str, Block]) -> Build:
    """The kernel after."""
    config = choices.config
    return Build(
        kernel=FINISH,
        blocks=blocks,
        constants={"PARTS": config.dq_parts, "PIECES": config.q_pieces}
        | absent_lengths(choices.packed, choices.used, FINISH)
        | ({} if choices.packed else {"added_ptr": None}),
        num_warps=config.WARPS,
        starts_early=True,
    )


def main_build(choices: Choices, config: HopperBackward, blocks: Mapping[str, Block]) -> Build:
    """The main kernel, or one part of it, which `config` says. blocks: those of the choices."""
    bias, mask, score_mod = choices.bias, choices.mask, choices.score_mod
    pointers = types_of(score_mod, None, mask)
    absent = [] if choices.packed else [RECORDS.name]
    absent += [] if choices.shared else ["handed_in_ptr", "has_handed_in_ptr"]
    absent += [] if bias is not None else [BIAS.name]
    sums_dbias = False
    if bias is not None and choices.of_bias and config.has_dk:  # from dS, which dV does not need
        of_dbias = choices.of_dbias
        blocks = blocks if of_dbias is None else {**blocks, DBIAS.tensor: of_dbias}
        absent.append(DBIAS_ROW.name if bias.each_row else DBIAS.name)
        sums_dbias = bias.sums_gradient
    else:
        absent += [DBIAS.name, DBIAS_ROW.name]
    absent += [p.name for p in AUX if p.name not in pointers]
    absent += [] if choices.finishes else [DQ_PIECES.name, SUM_PIECES.name, DONE.name]
    absent += [] if choices.finishes and choices.packed else [LENGTHS[0].name]
    return Build(
        kernel=MAIN,
        blocks=blocks,
        constants={"MASK": mask, "SCORE_MOD": score_mod, "CONFIG": config, "DETERMINISTIC": choices.deterministic}
        | {"PIECES": config.q_pieces, "SUMS_DBIAS": sums_dbias}
        | dict.fromkeys(absent),
        pointers=pointers,
        num_warps=config.WARPS,
        starts_early=True,
    )


def key_list_build(keys: int, used: bool) -> Build:
    """The kernel that lists the key blocks, of so many keys, of packed sequences. used: of each, some keys count."""
    return Build(kernel=LIST, blocks={}, constants=absent_lengths(True, used, LIST) | {"KEYS": keys})


def sinks_build(dtype: torch.dtype) -> Build:
    """The kernel that sums the gradient of sinks of that dtype."""
    pointers = dict.fromkeys(("dsinks_ptr", "sinks_ptr"), TENSOR_TYPES[dtype])
    return Build(kernel=SINKS, blocks={}, constants={}, num_warps=8, pointers=pointers)


@lru_cache(maxsize=8)
def compiled_sinks(dtype: torch.dtype, *, device_index: int | None = None) -> CompiledKernel:
    """device_index: the card to launch it on; None: to look at only."""
    return sinks_build(dtype).compile(90)


@lru_cache(maxsize=128)
def compiled_backward(
    choices: Choices, *, arch: int = 90, device_index: int | None = None
) -> tuple[CompiledKernel, ...]:
    """The kernels, one for each of the choices' steps. device_index: the card to launch them on; None: to look at
    only."""
    return tuple(build.compile(arch) for build in builds_of(choices))


def main_of(choices: Choices, found: Sequence[Found]) -> dict[str, Found]:
    """Of what is there for each of the choices' steps, that of the main kernel, by what it computes."""
    return {step: of for step, of in zip(choices.steps, found, strict=True) if step in GRADS}


def main_kernels(plan: BackwardPlan) -> dict[str, CompiledKernel]:
    """Of a plan, by what they compute."""
    choices = Choices.of(plan)
    return main_of(choices, compiled_backward(choices, arch=plan.arch))


def workspaces(plan: BackwardPlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the memory that the launches hand on to each other: LSE in base 2 and delta, (B, H, 1, R), and
    the sums of dQ, (B, H, R D / 32, 32), fp32, with R queries, rounded up to whole blocks, and D padded.

    int32: how many key blocks have added to each row block; how many items have been claimed, by launch. If the main
    kernel makes dQ of its sums: how many key blocks of a KV head are done, (B, H), of which the first B Hkv are used.
    Of packed sequences, the list of key blocks.

    If programs share key blocks: dK and dV that each part hands in, (shared_parts, 2, KEYS, D) fp32, and which has,
    int32."""
    problem, config = plan.problem, plan.config
    heads, statistics = (problem.batch, problem.heads), (1, plan.rows)
    head_dim, head_dim_v = padded_head_dims(problem.head_dim, problem.head_dim_v)
    sums = (plan.rows * head_dim // SUM_COLUMNS, SUM_COLUMNS)
    found = {
        "lse_log2": ((*heads, *statistics), torch.float32),
        "delta": ((*heads, *statistics), torch.float32),
        "dq_sums": ((*heads, *sums), torch.float32),
        "added": ((*heads, plan.row_blocks), torch.int32),
        "claimed": ((2,), torch.int32),
    }
    if plan.shared:
        found["handed_in"] = ((plan.shared_parts, config.keys, head_dim + head_dim_v), torch.float32)
        found["has_handed_in"] = ((MOST_SHARED_PARTS.value,), torch.int32)
    if plan.finishes:
        found["done"] = (heads, torch.int32)
    if problem.sequences is not None:
        found["records"] = (((1 + plan.capacity) * RECORD.value,), torch.int32)
    if problem.has_documents:
        found["documents"] = (documents_shape(problem), torch.int32)
    return found


def backward_launches_of(
    plan: BackwardPlan, tensors: Tensors, used: bool = False, bias: Tensor | None = None, of_bias: bool = False
) -> list[Launch]:
    """The launches of a call, in order. tensors: q, k, v, out, dout, dq, dk, dv; looked at for shapes and strides only,
    any may be on the meta device. used: of packed sequences, some keys count. bias: the problem's; of_bias: compute its
    gradient too."""
    problem = plan.problem
    packed = problem.sequences is not None
    view = View.packed if packed else View.of
    views = {name: view(in_bhsd(t, problem.layout)) for name, t in tensors.items()}
    views |= {n: View.of(torch.empty(shape, device="meta")) for n, (shape, _) in workspaces(plan).items()}
    views |= {pieces: views[whole] for pieces, whole in OF_PIECES.items()}
    if bias is not None and problem.bias is not None:
        views[BIAS.tensor] = view_of_bias(bias)
        views[DBIAS.tensor] = view_of_bias(problem.bias.zero_gradient(bias.shape, "meta"))
    choices = Choices.of(plan, used=used, of_bias=of_bias)
    builds = builds_of(choices)
    count = {"sequences": problem.sequences or 0}
    prepared, given = [], {}
    if problem.has_documents:
        prepared, given = [documents_launch(problem, of_keys=True)], documents_given(problem)
    if plan.finishes:
        given = given | OF_PIECES
    scale = {"scale": problem.scale}
    order = {n: getattr(plan, n) for n in ("blocks_per_item", "last_heads", "heads_at_once", "shared", "shared_parts")}
    numbers = scale | order | count | {"scale_log2": plan.scale_log2}
    launch_of = {
        "list": partial(Launch, programs=plan.list_programs, views={}, scalars=plan.list_numbers),
        "before": partial(
            Launch, programs=plan.row_programs, views=views, scalars=count | {"sets_zero": plan.sets_zero}
        ),
        **dict.fromkeys(GRADS, partial(Launch, programs=plan.programs, views=views, scalars=numbers, given=given)),
        "after": partial(Launch, programs=plan.row_programs, views=views, scalars=scale | count),
    }
    launches = [
        *prepared,  # done when the next begins, and so before the main one does
        *(launch_of[step](build=build) for step, build in zip(choices.steps, builds, strict=True)),
    ]
    if problem.sinks is not None:
        sizes = {"batches": problem.batch, "heads": problem.heads, "rows": plan.rows}
        launches.append(Launch(build=sinks_build(problem.sinks), programs=problem.heads, views={}, scalars=sizes))
    return launches


def allocated_apart(plan: BackwardPlan) -> Callable[[Tensors], Tensors]:
    """`workspaces` as `Launches` asks for them, each a tensor on q's device. Of packed sequences, sums of dQ that
    nobody adds to keep what they have. It is no NaN, which gluon_cpu takes for rows that should have been written; but
    too much to be overlooked in a gradient."""
    like, packed = workspaces(plan), plan.problem.sequences is not None

    def allocate(tensors: Tensors) -> Tensors:
        found = {n: torch.empty(shape, dtype=dtype, device=tensors["q"].device) for n, (shape, dtype) in like.items()}
        if packed:
            found["dq_sums"].fill_(1e30)
        return found

    return allocate


def backward_on_card(
    plan: BackwardPlan, tensors: Tensors, used: bool = False, bias: Tensor | None = None, of_bias: bool = False
) -> Launches:
    """A call on q's card. All but the plan: as for `backward_launches_of`."""
    problem, index = plan.problem, tensors["q"].device.index
    kernels = compiled_backward(Choices.of(plan, used=used, of_bias=of_bias), arch=plan.arch, device_index=index)
    if problem.has_documents:
        kernels = (compiled_documents(of_keys=True, arch=plan.arch, device_index=index), *kernels)
    if problem.sinks is not None:
        kernels = (*kernels, compiled_sinks(problem.sinks, device_index=index))
    launches = backward_launches_of(plan, tensors, used, bias, of_bias)
    steps = [CardLaunch(launch, kernel, index) for launch, kernel in zip(launches, kernels, strict=True)]
    return CardLaunches(steps, allocated_at_once(workspaces(plan)), index)
