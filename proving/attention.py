"""The proofs about attention on Blackwell: every row of the tuning table, at sizes small enough for the verifier."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from gluon_attn.bias import Bias
from gluon_attn.cpu import CpuLaunch
from gluon_attn.device import Device
from gluon_attn.documents import padded_lengths
from gluon_attn.forward.configs import BlackwellConfig
from gluon_attn.forward.launch import NOT_GIVEN, build_of, launches_of, workspaces_of
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import BLACKWELL, BLACKWELL_UNLIKE, Row
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.mask_mod import DOCUMENTS, MaskFunction, MaskMod
from gluon_attn.problem import Problem
from gluon_attn.runtime.kernel import Launch as KernelLaunch
from gluon_attn.runtime.kernel import Tensors
from gluon_attn.score_mod import ScoreFunction, alibi, softcap
from gluon_attn.tensors import FP8_DTYPES, PACKED, SCALES, output_dtype

from .attention_ptx import (
    RescaleDecision,
    choose_divisors,
    leave_out_early_arrivals,
    leave_out_floor,
    leave_out_lse,
)
from .capture import describe
from .equivalence import Equivalence, Operand, leave_barriers_valid
from .halves import fill_second_halves
from .launch import Launch
from .masks import keys_of_prefix, prefix
from .prove import Proof
from .reductions import reduce_by_exchange
from .rewrites import Rewrite
from .source import arguments_text, hash_of
from .verifier import Limits

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
MINUTES = 60
ARCH = 100  # sm_100a, which the verifier knows
# Levers of a config that decide at run time what is done next, by the data or by the hardware: the verifier follows one
# way only. They are off where a row of the table is proved; `rescale_proofs` and `LEVERS` say what holds with them on.
UNDECIDED: dict[str, Any] = {"rescale_threshold": 0.0, "dynamic": False}
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pieces": {"load_pieces": 2, "exp_pieces": 4},
    "early-p": {"early_p": True, "exp_pieces": 4},
    "turns": {"exp_turns": True},
    "not-packed": {"packed_arithmetic": False},
    "polynomial": {"polynomial_columns": 4},
    "dynamic": {"dynamic": True},  # a request for more work fails, by the verifier's premise
}
# For every commit: two minutes if none is on record.
QUICK = {
    "d64-bf16-full-1cta",
    "d64-bf16-causal-1cta",
    "d64-bf16-causal-1cta-two-row-blocks",
    "d64-e4m3-full-1cta",
    "d128-bf16-full-1cta",
    "d128-bf16-causal-1cta",
}
# A cluster of n CTAs has n² times as many pairs of threads to order as one CTA, and more products to follow.
LIMITS = {
    1: Limits(seconds=10 * MINUTES, memory_mib=4000),
    2: Limits(seconds=20 * MINUTES, memory_mib=6000),
    4: Limits(seconds=60 * MINUTES, memory_mib=12000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A launch to prove something about. clusters: how many the described card has room for: fewer than row blocks make
    the programs walk over several. Masks and changed scores: as `Problem.of` has them; sinks: whether there are any;
    bias_rows: of a bias that all heads have in common. head_dim_v: None: as Q's. documents: how many queries and keys
    each has. lengths: of packed sequences, (queries, keys) of each; then q_len and kv_len say nothing."""

    dtype: torch.dtype
    head_dim: int
    causal: bool
    config: BlackwellConfig
    q_len: int
    kv_len: int
    heads: int = 1
    kv_heads: int = 1
    clusters: int = 148
    arch: int = ARCH
    window: tuple[int | None, int | None] = (None, None)
    chunk: int | None = None
    mask_function: MaskFunction | None = None
    score_mod: ScoreFunction | None = None
    sinks: bool = False
    bias_rows: int | None = None
    head_dim_v: int | None = None
    documents: tuple[int, int] | None = None
    lengths: tuple[tuple[int, int], ...] | None = None

    def proof(self, name: str, limits: Limits, **more: Any) -> Proof:
        return Proof(name=name, launch=lambda: self.steps()[-1].described(), source=self.source, limits=limits, **more)

    def proof_before(self, name: str, **more: Any) -> Proof:
        """Of the kernel before attention."""

        def source() -> str:
            step = self.steps()[0]
            return step.source(hash_of(step.launch.build.front_end(self.arch)))

        return Proof(name=name, launch=lambda: self.steps()[0].described(), source=source, limits=LIMITS[1], **more)

    def source(self) -> str:
        """All that attention's launch is made from, without compiling it; see source.py."""
        *_, step = self.steps()
        problem = step.problem
        made = front_end(
            self.dtype, self.head_dim, problem.mask, self.config, self.arch, self.score_mod, problem.sinks,
            problem.padded_head_dim_v, problem.bias, self.lengths is not None,
        )  # fmt: skip
        return step.source(made)

    def steps(self) -> "list[Step]":
        """The launches, that of attention last. What the kernel before it writes is executed by gluon_cpu."""
        problem, tensors = self.posed()
        device = dataclasses.replace(Device.blackwell(), sm_count=self.clusters * self.config.num_ctas)
        plan = Plan.of(problem, self.config, device)
        q, k, v, out = (tensors[name] for name in ("q", "k", "v", "out"))
        *before, launch = launches_of(plan, q, k, v, out, bias=tensors["bias"])
        steps, known = list[Step](), {name: words_of(tensors[name]) for name in STARTS if tensors[name] is not None}
        make = workspaces_of(plan)
        made = {} if make is None else {name: t.fill_(UNWRITTEN) for name, t in make(tensors).items()}
        tensors |= made
        for step in before:
            steps.append(Step(problem=problem, launch=step, arch=self.arch, tensors=tensors, known=known))
            CpuLaunch(step, self.arch)(tensors)
        # Of documents not their ids, which decide about scores alone.
        ids = sum(padded_lengths(problem)) if problem.has_documents else 0
        known = {name: words_of(memory, ids) for name, memory in made.items()}
        return [*steps, Step(problem=problem, launch=launch, arch=self.arch, tensors=tensors, known=known)]

    def posed(self) -> tuple[Problem, Tensors]:
        """The problem, and the tensors of the call. Nobody reads their numbers, but where sequences begin and which
        documents there are."""
        queries: tuple[int, ...] = (1, self.heads, self.q_len)
        keys: tuple[int, ...] = (1, self.kv_heads, self.kv_len)
        starts, options = list[torch.Tensor](), dict[str, Any]()
        if self.lengths is not None:
            of_each = list(zip(*self.lengths, strict=True))  # of queries, and of keys
            starts = [torch.tensor([0, *itertools.accumulate(of)], dtype=torch.int32) for of in of_each]
            queries, keys = (sum(of_each[0]), self.heads), (sum(of_each[1]), self.kv_heads)
            options = {"layout": PACKED, "lengths": (*starts, *map(max, of_each), None)}
        q = torch.empty(*queries, self.head_dim, dtype=self.dtype)
        k = torch.empty(*keys, self.head_dim, dtype=self.dtype)
        v = torch.empty(*keys, self.head_dim_v or self.head_dim, dtype=self.dtype)
        out = torch.empty(*queries, v.shape[-1], dtype=output_dtype(self.dtype))
        lse = torch.empty(queries)
        fp8, sequences = self.dtype in FP8_DTYPES, len(self.lengths or (1,))
        scales = {name: torch.empty(sequences, self.kv_heads) if fp8 else None for name in SCALES}
        sinks = torch.empty(self.heads) if self.sinks else None
        bias = None if self.bias_rows is None else torch.empty(1, 1, self.bias_rows, self.kv_len, dtype=self.dtype)
        problem = Problem.of(
            q, k, v, causal=self.causal, window=self.window, chunk=self.chunk, score_mod=self.score_mod, sinks=sinks,
            mask_function=self.mask_function if self.documents is None else DOCUMENTS, bias=bias, **options,
        )  # fmt: skip
        read = [] if self.score_mod is None else self.score_mod.tensors
        given: dict[str, Any] = {f"aux{i}": torch.empty(self.heads) for i in range(len(read))} | {"sinks": sinks}
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "bias": bias, **scales, **given}
        tensors = {**NOT_GIVEN, **tensors, **dict(zip(STARTS, starts, strict=False))}
        if self.documents is not None:
            of = zip(("q_segment_ids", "k_segment_ids"), (self.q_len, self.kv_len), self.documents, strict=True)
            tensors |= {name: torch.arange(length, dtype=torch.int32)[None] // size for name, length, size in of}
        return problem, tensors


STARTS = ("cu_seqlens_q", "cu_seqlens_k")
UNWRITTEN = -1


def words_of(memory: torch.Tensor, first: int = 0) -> dict[int, int]:
    """The int32 that are written there, by their indices from `first` on; of other memory none."""
    if memory.dtype != torch.int32:
        return {}
    return {i: word for i, word in enumerate(memory.flatten().tolist()) if i >= first and word != UNWRITTEN}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A launch and its tensors. known: of some, int32 that they hold, by name and index."""

    problem: Problem
    launch: KernelLaunch
    arch: int
    tensors: Tensors
    known: dict[str, dict[int, int]]

    @property
    def words(self) -> dict[str, dict[int, int]]:
        """By parameter."""
        pointers = self.launch.build.kernel.pointers
        names = zip(pointers, self.launch.tensor_names(pointers), strict=True)
        return {p.name: self.known[name] for p, name in names if name in self.known}

    def described(self) -> Launch:
        compiled, programs = self.launch.build.compile(self.arch), (self.launch.programs,)
        return describe(compiled, programs, self.launch.arguments(self.tensors), self.words)

    def source(self, made: str) -> str:
        """made: a hash of what the machine code depends on."""
        kernel = self.launch.build.kernel
        run_time = [p.name for group in (kernel.tma, kernel.pointers, kernel.scalars) for p in group]
        arguments = arguments_text(self.launch.arguments(self.tensors), run_time)
        return hash_of(made, str(self.launch.programs), arguments, repr(self.words))


@functools.lru_cache(maxsize=256)
def front_end(
    dtype: torch.dtype,
    head_dim: int,
    mask: Mask,
    config: BlackwellConfig,
    arch: int,
    score_mod: ScoreFunction | None = None,
    sinks: torch.dtype | None = None,
    head_dim_v: int | None = None,
    bias: Bias | None = None,
    packed: bool = False,
) -> str:
    """A hash of what the kernel's machine code depends on. Two proofs in a row are often of one kernel."""
    return hash_of(build_of(dtype, head_dim, mask, config, score_mod, sinks, packed, head_dim_v, bias).front_end(arch))


def one_row_block(dtype: torch.dtype, row: Row) -> Case:
    """One row block, that is both query tiles; two key blocks: the first, and one that rescales."""
    assert isinstance(row.config, BlackwellConfig)
    return Case(
        dtype=dtype,
        head_dim=row.padded_head_dim,
        head_dim_v=row.padded_head_dim_v,
        causal=row.causal,
        config=dataclasses.replace(row.config, **UNDECIDED),
        q_len=row.config.block_m,
        kv_len=2 * row.config.block_n,
    )


def two_row_blocks(case: Case) -> Case:
    """One program computes two row blocks, with so few slots for keys and values that they are used again and again."""
    config = dataclasses.replace(case.config, kv_slots=min(case.config.kv_slots, 3))
    return dataclasses.replace(case, config=config, q_len=2 * case.q_len, clusters=1)


def odd_lengths(case: Case) -> Case:
    """Lengths that fill no block; more queries than keys, so that under a causal mask rows see none; grouped heads."""
    return dataclasses.replace(case, q_len=case.q_len - 27, kv_len=case.kv_len - 61, heads=2, kv_heads=1, clusters=1)


def packed(case: Case) -> Case:
    """One program computes a row block each of two sequences, of which the second is short; no row block is full."""
    return dataclasses.replace(case, lengths=((case.q_len - 27, case.kv_len - 61), (40, 100)), clusters=1)


def laps(case: Case) -> Case:
    """One program computes two row blocks, with two slots for keys and values: every ring of the kernel goes round
    twice at least, that of keys and values four times."""
    config = dataclasses.replace(case.config, kv_slots=2)
    return dataclasses.replace(case, config=config, q_len=2 * case.q_len, clusters=1)


# In the kernel's own scale, as exp2 replaces exp: what is taken from fp32 is the same number on both sides.
REFERENCE = """def reference(q_desc, k_desc, v_desc, scale_log2):
    weights = (q_desc.float() @ k_desc.float().transpose(0, 1) * scale_log2).exp2()
    return (weights @ v_desc.float() / weights.sum(1, keepdim=True)).to(q_desc.dtype)
"""


def equals_softmax(case: Case, name: str) -> Proof:
    """That O is softmax(Q Kᵀ scale) V, of one head. No exponential is taken by polynomial, which is not equal to it."""
    case = dataclasses.replace(case, config=dataclasses.replace(case.config, polynomial_columns=0))
    dtype = str(case.dtype).removeprefix("torch.")
    queries, keys = (case.q_len, case.head_dim), (case.kv_len, case.head_dim)
    equivalence = Equivalence(
        reference=REFERENCE,
        inputs=(
            Operand(name="q_desc", dtype=dtype, shape=queries),
            Operand(name="k_desc", dtype=dtype, shape=keys),
            Operand(name="v_desc", dtype=dtype, shape=keys),
        ),
        outputs=(Operand(name="o_desc", dtype=dtype, shape=queries),),
        scalars=("scale_log2",),
        rewrites=(leave_barriers_valid, leave_out_lse, leave_out_floor, choose_divisors),
    )
    limits = Limits(seconds=60 * MINUTES, memory_mib=10000)
    return case.proof(name, limits, equivalence=equivalence)


def lever_proofs(case: Case, name: str) -> Iterator[Proof]:
    """One lever of the config at a time, all others as they are by default."""
    defaults = {f.name: f.default for f in dataclasses.fields(BlackwellConfig) if f.default is not dataclasses.MISSING}
    plain = defaults | {"cga_layout": case.config.cga_layout}
    for lever, options in LEVERS.items():
        changed = dataclasses.replace(case, config=dataclasses.replace(case.config, **plain | options))
        yield changed.proof(f"{name}-{lever}", LIMITS[1])


def rescale_proofs(case: Case, row: Row, name: str) -> Iterator[Proof]:
    """The row's own config, which rescales by need: that every block does, or that none does."""
    assert isinstance(row.config, BlackwellConfig)
    config = dataclasses.replace(case.config, rescale_threshold=row.config.rescale_threshold)
    case, limits = dataclasses.replace(case, config=config), LIMITS[config.num_ctas]
    yield case.proof(f"{name}-every-rescale", limits, decisions=RescaleDecision(skipped=False))
    yield case.proof(f"{name}-no-rescale", limits, decisions=RescaleDecision(skipped=True))


# By name: what a case has besides. Windows of four key blocks: the wide one has unmasked ones between masked ones, in
# the narrow one each query tile walks blocks that only the other sees; likewise with chunks.
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (300, 0), "kv_len": 512},
    "narrow-window": {"window": (60, 20), "kv_len": 512},
    "chunk": {"chunk": 256, "kv_len": 512},
    "narrow-chunk": {"chunk": 128, "kv_len": 512},
    "odd-chunk": {"chunk": 150, "kv_len": 512},
    "documents": {"documents": (100, 130), "kv_len": 512},
    "softcap": {"score_mod": softcap(15.0)},
    "alibi": {"score_mod": alibi(torch.empty(1))},
    "sinks": {"sinks": True},
    "mask-mod": {"mask_function": MaskMod(prefix, keys=keys_of_prefix, constants=(70,)).function, "kv_len": 512},
    "bias": {"bias_rows": 256},
    "bias-of-one-row": {"bias_rows": 1},
    "packed-some-empty": {"lengths": ((130, 150), (0, 60), (40, 0)), "clusters": 1},
    "packed-window": {"lengths": ((200, 400), (60, 30)), "clusters": 1, "window": (100, 20)},
}
REWRITES: dict[str, tuple[Rewrite, ...]] = {
    "odd-chunk": (fill_second_halves,),
    "documents": (reduce_by_exchange,),
}


def feature_proofs(case: Case, name: str) -> Iterator[Proof]:
    """One kind of mask, changed scores or sinks at a time, or packed sequences."""
    for feature, options in FEATURES.items():
        limits, rewrites = LIMITS[case.config.num_ctas], REWRITES.get(feature, ())
        yield dataclasses.replace(case, **options).proof(f"{name}-{feature}", limits, rewrites=rewrites)


def is_packed_too(name: str) -> bool:
    """Whether a row's proof has one of packed sequences beside it. Not all have: with four CTAs at D=128 one takes a
    quarter of an hour."""
    return name == "d64-e4m3-full-1cta" or ("-bf16-" in name and name != "d128-bf16-causal-4cta")


def proofs_of(row: Row) -> Iterator[Proof]:
    n = row.config.num_ctas
    for dtype_name, dtype in DTYPES.items():
        if dtype.itemsize != row.element_bytes:
            continue
        name = f"d{row.padded_head_dim}-{dtype_name}-{'causal' if row.causal else 'full'}-{n}cta"
        case = one_row_block(dtype, row)
        quick = name in QUICK
        yield case.proof(name, LIMITS[n], quick=quick)
        if name.startswith("d64-e4m3-full"):
            rewrites = (leave_out_early_arrivals,) if n == 4 else ()
            yield laps(case).proof(f"{name}-laps", LIMITS[n], rewrites=rewrites)
        if is_packed_too(name):
            yield packed(case).proof(f"{name}-packed", LIMITS[n])
        if dtype_name != "bf16" or n > 2:
            continue
        if isinstance(row.config, BlackwellConfig) and row.config.rescale_threshold:
            yield from rescale_proofs(case, row, name)
        if n > 1:
            continue
        for suffix, more in (("two-row-blocks", two_row_blocks(case)), ("odd-lengths", odd_lengths(case))):
            quick = f"{name}-{suffix}" in QUICK
            yield more.proof(f"{name}-{suffix}", LIMITS[n], quick=quick)
        if name == "d64-bf16-full-1cta":
            yield from lever_proofs(case, name)
            yield from feature_proofs(case, name)
            yield equals_softmax(case, f"{name}-equals-softmax")


def unlike_proofs(row: Row) -> Iterator[Proof]:
    """Rows of a V head dim unlike Q's, which have channels of their own for K and for V. In bf16; of pairs of CTAs one
    pair of head dims."""
    n, mask = row.config.num_ctas, "causal" if row.causal else "full"
    if row.element_bytes == 2 and (n == 1 or row.head_dims == (192, 128)):
        name = f"d{row.padded_head_dim}-{row.padded_head_dim_v}-bf16-{mask}-{n}cta"
        rewrites = (leave_out_early_arrivals,) if n == 4 else ()  # K and V have two slots and one: they make laps
        yield one_row_block(torch.bfloat16, row).proof(name, LIMITS[n], rewrites=rewrites)


# Of the kernel that lists row blocks: two programs, sequences without queries and without keys.
LISTED = ((600, 300), (0, 60), (40, 0), (2513, 700))


def list_proofs() -> Iterator[Proof]:
    """That no two programs write a record in one place. As it walks through lengths in memory, these are given."""
    row = next(row for row in BLACKWELL if ARCH in row.config.archs)
    for causal in (False, True):
        case = dataclasses.replace(one_row_block(torch.bfloat16, row), causal=causal, lengths=LISTED)
        yield case.proof_before(f"lists-{'causal' if causal else 'full'}", rewrites=(reduce_by_exchange,))


def max_in_load_proofs() -> Iterator[Proof]:
    """Rows that let the loads find the maxima, which sm_103 alone has: D=64, bf16, no mask. With one CTA also compiled
    for sm_103 with maxima apart."""
    for row in BLACKWELL:
        n = row.config.num_ctas
        if row.config.archs != (103,) or (row.padded_head_dim, row.causal, row.element_bytes) != (64, False, 2):
            continue
        case = dataclasses.replace(one_row_block(torch.bfloat16, row), arch=103)
        name = f"sm103-d64-bf16-full-{n}cta"
        yield case.proof(name, LIMITS[n])
        if n == 1:
            apart = dataclasses.replace(case, config=dataclasses.replace(case.config, max_in_load=False))
            yield apart.proof(f"{name}-max-apart", LIMITS[n])


@functools.cache
def catalogue() -> tuple[Proof, ...]:
    """Every proof, the cheapest first."""
    proofs = [proof for row in BLACKWELL if ARCH in row.config.archs for proof in proofs_of(row)]
    proofs += [proof for row in BLACKWELL_UNLIKE if ARCH in row.config.archs for proof in unlike_proofs(row)]
    proofs += [*list_proofs(), *max_in_load_proofs()]
    return tuple(sorted(proofs, key=lambda proof: proof.limits.seconds))
