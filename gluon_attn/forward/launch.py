"""From a plan to the launches of attention forward: which kernels, for which tensors, with which numbers."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..bias import Bias, view_of_bias
from ..documents import compiled_documents, documents_given, documents_launch, empty_documents
from ..kernels.blackwell.forward import kernel as blackwell
from ..kernels.common.mask import Mask
from ..kernels.common.packed import RECORD, list_row_blocks
from ..kernels.common.sequence import KEYS_MULTIPLE
from ..kernels.hopper.forward import kernel as hopper
from ..kernels.hopper.transpose.kernel import transpose_values
from ..problem import Problem
from ..runtime.compat import CompiledKernel
from ..runtime.descriptors import Block, View
from ..runtime.kernel import Build, CardLaunch, CardLaunches, Kernel, Launch, Launches, Pointer, Scalar, Tensors, Tma
from ..score_mod import MAX_TENSORS, TENSOR_TYPES, ScoreFunction
from ..tensors import FP8_DTYPES, in_bhsd, output_dtype
from .configs import BlackwellConfig, ForwardConfig, HopperConfig, piece_columns
from .plan import TRANSPOSE_BLOCK_N, Plan

OPERANDS = (Tma("q_desc", "q"), Tma("k_desc", "k"), Tma("v_desc", "v"), Tma("o_desc", "out"))
STATISTICS = (
    Pointer("lse_ptr", "lse"),
    Pointer("q_scale_ptr", "q_scale"),
    Pointer("k_scale_ptr", "k_scale"),
    Pointer("v_scale_ptr", "v_scale"),
)
SCALE_POINTERS = tuple(p.name for p in STATISTICS[1:])
AUX = tuple(Pointer(f"aux{i}_ptr", f"aux{i}") for i in range(MAX_TENSORS))  # what a ScoreFunction reads
SCORES = (Pointer("sinks_ptr", "sinks"), *AUX)
RECORDS = Pointer("records_ptr", "records", "i32")
LENGTHS = (
    Pointer("cu_q_ptr", "cu_seqlens_q", "i32"),
    Pointer("cu_k_ptr", "cu_seqlens_k", "i32"),
    Pointer("used_k_ptr", "seqused_k", "i32"),
)
NUMBERS = (Scalar("scale_log2", "fp32"), Scalar("blocks_per_item"))

BIAS = Tma("bias_desc", "bias")  # None where there is none

HOPPER = Kernel(
    hopper.attention_forward, *OPERANDS, BIAS, *STATISTICS, *SCORES, RECORDS, *NUMBERS, Scalar("last_heads")
)
BLACKWELL = Kernel(
    blackwell.attention_forward, *OPERANDS, BIAS, *STATISTICS, *SCORES, RECORDS, *NUMBERS, Scalar("l2_heads")
)
TRANSPOSE = Kernel(transpose_values, Tma("v_desc", "v"), Tma("out_desc", "transposed_v"), *LENGTHS[1:])
LIST = Kernel(
    list_row_blocks, *LENGTHS, RECORDS,
    *map(Scalar, ("sequences", "q_rows", "k_rows", "reach", "most_keys", "capacity")),
)  # fmt: skip
TRANSPOSED_MULTIPLE = 16  # of V transposed: a row of it is a multiple of 16 bytes, and keys change places among 16


def kernel_of(config: ForwardConfig) -> Kernel:
    """The kernel that the config is for."""
    return BLACKWELL if isinstance(config, BlackwellConfig) else HOPPER


def build_of(
    dtype: torch.dtype,
    padded_head_dim: int,
    mask: Mask,
    config: ForwardConfig,
    score_mod: ScoreFunction | None = None,
    sinks: torch.dtype | None = None,
    packed: bool = False,
    padded_head_dim_v: int | None = None,
    bias: Bias | None = None,
) -> Build:
    """The kernel of attention for these compile-time choices.

    dtype: of q, k and v. sinks: their dtype, if there are any. packed: of packed sequences. padded_head_dim_v: None: as
    Q's. bias: that is added to scores.
    """
    before = config.transposes_before(dtype.itemsize)
    head_dim_v = padded_head_dim if padded_head_dim_v is None else padded_head_dim_v
    columns, columns_v = config.piece_columns(padded_head_dim), config.piece_columns(head_dim_v)
    staged = isinstance(config, HopperConfig) and config.stage_in_queries
    columns_of = {"q": columns, "k": columns, "v": columns_v, "out": min(columns, columns_v) if staged else columns_v}
    blocks = {}
    for name in ("q", "k", "v", "out"):
        rows, cga_layout = config.operand(name)
        transposed = name == "v" and before
        size = (columns_v, rows) if transposed else (rows, columns_of[name])
        of = output_dtype(dtype) if name == "out" else dtype
        blocks[name] = Block.of(of, *size, cga_layout, packed=packed and not transposed)
    absent = {} if dtype in FP8_DTYPES else dict.fromkeys(SCALE_POINTERS)
    pointers = types_of(score_mod, sinks, mask)
    absent |= dict.fromkeys(p.name for p in SCORES if p.name not in pointers)
    absent |= {} if packed else {RECORDS.name: None}
    if bias is not None:
        blocks[BIAS.tensor] = bias.block(config.operand("q")[0], config.block_n)
    else:
        absent |= {BIAS.name: None}
    return Build(
        kernel=kernel_of(config),
        blocks=blocks,
        constants={
            "MASK": mask,
            "SCORE_MOD": score_mod,
            "CONFIG": config,
            "PIECES": (padded_head_dim // columns, head_dim_v // columns_v),
            **absent,
        },
        num_ctas=config.num_ctas,
        starts_early=before or packed or (mask.function is not None and mask.function.found_before),
        pointers=pointers,
    )


def types_of(score_mod: ScoreFunction | None, sinks: torch.dtype | None, mask: Mask) -> dict[str, str]:
    """Triton's types behind those of the pointers SCORES that are there."""
    types = {} if sinks is None else {"sinks_ptr": TENSOR_TYPES[sinks]}
    read = [of for function in (score_mod, mask.function) if function is not None for of in function.tensors]
    return types | {f"aux{i}_ptr": of for i, of in enumerate(read)}


def transpose_build(dtype: torch.dtype, padded_head_dim: int, packed: bool = False, used: bool = False) -> Build:
    """The kernel that transposes V, of that head dim, before, which Hopper alone needs, in fp8. packed: of packed
    sequences; used: of each, some keys."""
    columns = piece_columns(padded_head_dim)
    blocks = {
        "v": Block.of(dtype, TRANSPOSE_BLOCK_N, columns, packed=packed),
        "transposed_v": Block.of(dtype, columns, TRANSPOSE_BLOCK_N),
    }
    absent = absent_lengths(packed, used, TRANSPOSE)
    return Build(kernel=TRANSPOSE, blocks=blocks, constants=absent | {"PIECES": padded_head_dim // columns})


def absent_lengths(packed: bool, used: bool, kernel: Kernel) -> dict[str, None]:
    """Parameters LENGTHS of a kernel that are not there."""
    there = LENGTHS[: 3 if used else 2] if packed else ()
    return {p.name: None for p in LENGTHS if p in kernel.pointers and p not in there}


def list_build(block_m: int, used: bool) -> Build:
    """The kernel that lists the row blocks, of so many rows, of packed sequences. used: of each, some keys count."""
    return Build(kernel=LIST, blocks={}, constants=absent_lengths(True, used, LIST) | {"BLOCK_M": block_m})


@lru_cache(maxsize=32)
def compiled_list(block_m: int, used: bool, arch: int, *, device_index: int | None = None) -> CompiledKernel:
    """That kernel. device_index: as for `compiled`."""
    return list_build(block_m, used).compile(arch)


@lru_cache(maxsize=256)
def compiled(
    dtype: torch.dtype,
    padded_head_dim: int,
    mask: Mask,
    config: ForwardConfig,
    *,
    score_mod: ScoreFunction | None = None,
    sinks: torch.dtype | None = None,
    packed: bool = False,
    padded_head_dim_v: int | None = None,
    bias: Bias | None = None,
    arch: int | None = None,
    device_index: int | None = None,
) -> CompiledKernel:
    """The kernel for these compile-time choices; the lengths, batches, heads and strides are arguments of the launch.

    arch: 90, 100 or 103, for sm_90a and so on; None: the first that the config is for.
    device_index: the card to launch it on, as a compiled kernel is loaded on one. None: to look at only.
    """
    return build_of(dtype, padded_head_dim, mask, config, score_mod, sinks, packed, padded_head_dim_v, bias).compile(
        config.archs[0] if arch is None else arch
    )


def compiled_for(problem: Problem, config: ForwardConfig, arch: int, device_index: int | None = None) -> CompiledKernel:
    """The kernel of attention for a problem. device_index: as for `compiled`."""
    return compiled(
        problem.dtype,
        problem.padded_head_dim,
        problem.mask,
        config,
        score_mod=problem.score_mod,
        sinks=problem.sinks,
        packed=problem.sequences is not None,
        padded_head_dim_v=problem.padded_head_dim_v,
        bias=problem.bias,
        arch=arch,
        device_index=device_index,
    )


@lru_cache(maxsize=64)
def compiled_transpose(
    dtype: torch.dtype,
    padded_head_dim: int,
    *,
    packed: bool = False,
    used: bool = False,
    device_index: int | None = None,
) -> CompiledKernel:
    """The kernel that transposes V before. device_index: as for `compiled`."""
    return transpose_build(dtype, padded_head_dim, packed, used).compile(90)


def launches_of(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, used: bool = False, bias: Tensor | None = None
) -> list[Launch]:
    """The launches of a call, in order: that of attention is the last.

    The tensors are looked at for their shapes and strides only; any may be on the meta device. used: of packed
    sequences, some keys count. bias: the problem's.
    """
    problem, config = plan.problem, plan.config
    packed = problem.sequences is not None
    view = View.packed if packed else View.of
    views = {name: view(in_bhsd(t, problem.layout)) for name, t in {"q": q, "k": k, "v": v, "out": out}.items()}
    if bias is not None:
        views[BIAS.tensor] = view_of_bias(bias)
    numbers: dict[str, float] = {"scale_log2": plan.scale_log2, "blocks_per_item": plan.blocks_per_item}
    numbers["l2_heads" if isinstance(config, BlackwellConfig) else "last_heads"] = plan.heads_longest_first
    build = build_of(
        problem.dtype,
        problem.padded_head_dim,
        problem.mask,
        config,
        problem.score_mod,
        problem.sinks,
        packed,
        problem.padded_head_dim_v,
        problem.bias,
    )
    before, given = [], {}
    if packed:
        counts = plan.list_numbers
        before = [Launch(build=list_build(config.block_m, used), programs=plan.list_programs, views={}, scalars=counts)]
    if problem.has_documents:
        before, given = [documents_launch(problem, of_keys=False)], documents_given(problem)
    if not config.transposes_before(problem.dtype.itemsize):
        return [*before, Launch(build=build, programs=plan.programs, views=views, scalars=numbers, given=given)]
    transposed = View.of(empty_transposed(v.to("meta"), plan))
    transpose = Launch(
        build=transpose_build(problem.dtype, problem.padded_head_dim_v, packed, used),
        programs=plan.transpose_programs,
        views={"v": views["v"], "transposed_v": transposed},
        scalars={},
    )
    attention = Launch(
        build=build,
        programs=plan.programs,
        views=views | {"v": transposed},
        scalars=numbers,
        given=given | {"v": "transposed_v"},
    )
    return [*before, transpose, attention]


def workspaces_of(plan: Plan) -> Callable[[Tensors], Tensors] | None:
    """What makes the memory that the launches of a call hand on to each other; see `Launches`."""
    problem, made = plan.problem, dict[str, Callable[[Tensors], Tensor]]()
    if plan.config.transposes_before(problem.dtype.itemsize):
        made["transposed_v"] = lambda tensors: empty_transposed(tensors["v"], plan)
    if problem.sequences is not None:
        size = (1 + plan.capacity) * RECORD.value
        made["records"] = lambda tensors: torch.empty(size, dtype=torch.int32, device=tensors["q"].device)
    if problem.has_documents:
        made["documents"] = lambda tensors: empty_documents(problem, tensors["q"].device)
    return (lambda tensors: {name: make(tensors) for name, make in made.items()}) if made else None


def empty_transposed(v: Tensor, plan: Plan) -> Tensor:
    """Memory for V transposed: (B, Hkv, D, Sk rounded up)."""
    batch, heads, keys, head_dim = in_bhsd(v, plan.problem.layout).shape
    if plan.problem.sequences is None:
        keys = -(-keys // TRANSPOSED_MULTIPLE) * TRANSPOSED_MULTIPLE
    else:
        keys = plan.padded_key_blocks * KEYS_MULTIPLE.value
    return torch.empty((batch, heads, head_dim, keys), dtype=v.dtype, device=v.device)


def launches_on_card(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, used: bool = False, bias: Tensor | None = None
) -> Launches:
    """A call on q's card. The tensors are looked at for their shapes, strides and device only; `out` may be on the meta
    device. used, bias: as for `launches_of`."""
    problem, index = plan.problem, q.device.index
    packed = problem.sequences is not None
    launches = launches_of(plan, q, k, v, out, used, bias)
    kernels = [compiled_for(problem, plan.config, plan.arch, index)]
    if plan.config.transposes_before(problem.dtype.itemsize):
        transpose = compiled_transpose(
            problem.dtype, problem.padded_head_dim_v, packed=packed, used=used, device_index=index
        )
        kernels.insert(0, transpose)
    if packed:
        kernels.insert(0, compiled_list(plan.config.block_m, used, plan.arch, device_index=index))
    if problem.has_documents:
        kernels.insert(0, compiled_documents(of_keys=False, arch=plan.arch, device_index=index))
    steps = [CardLaunch(launch, kernel, index) for launch, kernel in zip(launches, kernels, strict=True)]
    return CardLaunches(steps, workspaces_of(plan), index)


NOT_GIVEN = dict.fromkeys(
    (BIAS.tensor, *(p.tensor for p in (*STATISTICS, *SCORES, *LENGTHS, RECORDS)))
)  # what a call gives for tensors that it has not
