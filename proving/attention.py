"""The proofs about attention on Blackwell: every row of the tuning table, at sizes small enough for the verifier."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellTile
from gluon_attn.forward.launch import compiled, launches_of
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import BLACKWELL, Row
from gluon_attn.kernels.blackwell.forward import correction as correction_module
from gluon_attn.problem import FP8_DTYPES, SCALES, Problem, output_dtype

from .capture import describe
from .equivalence import Equivalence, Operand, leave_barriers_valid, without
from .launch import Launch
from .prove import Proof
from .ptx import branches_of, strip_comment
from .registers import Definitions, definitions, the_definition
from .verifier import Limits

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
MINUTES = 60
ARCH = 100  # the verifier knows sm_100a
# Levers of a tile that decide at run time what is done next, by the data or by the hardware: the verifier follows one
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
    "d64-bf16-causal-1cta-two-tiles",
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
    """A launch to prove something about. clusters: how many the described card has room for: fewer than tiles make the
    programs walk over several."""

    dtype: torch.dtype
    head_dim: int
    causal: bool
    tile: BlackwellTile
    q_len: int
    kv_len: int
    heads: int = 1
    kv_heads: int = 1
    clusters: int = 148

    def launch(self) -> Launch:
        q = torch.empty(1, self.heads, self.q_len, self.head_dim, dtype=self.dtype)
        k = torch.empty(1, self.kv_heads, self.kv_len, self.head_dim, dtype=self.dtype)
        v, out, lse = torch.empty_like(k), torch.empty_like(q, dtype=output_dtype(self.dtype)), torch.empty(q.shape[:3])
        fp8 = self.dtype in FP8_DTYPES
        scales = {name: torch.empty(k.shape[:2]) if fp8 else None for name in SCALES}
        problem = Problem.of(q, k, v, causal=self.causal, scale=None, layout="bhsd")
        device = dataclasses.replace(Device.blackwell(), sm_count=self.clusters * self.tile.num_ctas)
        plan = Plan.of(problem, self.tile, device)
        (launch,) = launches_of(plan, q, k, v, out)
        values = launch.arguments({"q": q, "k": k, "v": v, "out": out, "lse": lse, **scales})
        kernel = compiled(self.dtype, problem.padded_head_dim, problem.mask, self.tile, arch=ARCH)
        return describe(kernel, (plan.programs,), values)


def one_tile(dtype: torch.dtype, row: Row) -> Case:
    """One row block of each query tile, two key blocks: the first, and one that rescales."""
    assert isinstance(row.tile, BlackwellTile)
    return Case(
        dtype=dtype,
        head_dim=row.padded_head_dim,
        causal=row.causal,
        tile=dataclasses.replace(row.tile, **UNDECIDED),
        q_len=row.tile.block_m,
        kv_len=2 * row.tile.block_n,
    )


def two_tiles(case: Case) -> Case:
    """One program computes two tiles, with so few slots for keys and values that they are used again and again."""
    tile = dataclasses.replace(case.tile, kv_slots=min(case.tile.kv_slots, 3))
    return dataclasses.replace(case, tile=tile, q_len=2 * case.q_len, clusters=1)


def odd_lengths(case: Case) -> Case:
    """Lengths that fill no tile; more queries than keys, so that under a causal mask rows see no key; grouped heads."""
    return dataclasses.replace(case, q_len=case.q_len - 27, kv_len=case.kv_len - 61, heads=2, kv_heads=1, clusters=1)


# In the kernel's own scale, as exp2 replaces exp: what is taken from fp32 is the same number on both sides.
REFERENCE = """def reference(q_desc, k_desc, v_desc, scale_log2):
    weights = (q_desc.float() @ k_desc.float().transpose(0, 1) * scale_log2).exp2()
    return (weights @ v_desc.float() / weights.sum(1, keepdim=True)).to(q_desc.dtype)
"""


def leave_out_lse(ptx: str) -> tuple[str, int]:
    """Without the stores to global memory that are not TMA's: LSE's.

    Why: every output must be compared, and the verifier finds no proof for a logarithm. Exact for O, which goes by TMA.
    """
    return without(r"(@!?%p\d+ )?st\.global\.")(ptx)


LARGER = re.compile(r"max\.NaN\.f32\s+(?P<result>%r\d+), (?P<first>%r\d+), (?P<second>%r\d+);")
LONGEST_CHOICE = 4  # lines from a division to the choice between its result and 0
LEAST_LOG2_BITS = "0fF1800000"  # -2^100, `LEAST_LOG2` of row_stats.py


def leave_out_floor(ptx: str) -> tuple[str, int]:
    """Without the least maximum that a first block leaves: see `first_maximum`.

    Why: it makes the function another one for a row whose scores are all below -2^100 in units of log 2. Exact above,
    and below it fp32 holds no difference of two scores.
    """
    lines, sources, count = ptx.split("\n"), definitions(ptx.split("\n")), 0
    for i, line in enumerate(lines):
        found = LARGER.fullmatch(strip_comment(line))
        if found and is_floor(found["second"], sources):
            lines[i] = f"\tmov.b32 {found['result']}, {found['first']};"
            count += 1
    return "\n".join(lines), count


def is_floor(value: str, sources: Definitions) -> bool:
    operation, reads = the_definition(value, sources)
    return operation == "div.full.f32" and the_definition(reads[0], sources) == ("mov.b32", [LEAST_LOG2_BITS])


RECIPROCAL = re.compile(r"div\.full\.f32\s+(?P<result>%r\d+), (?P<one>%r\d+), (?P<divisor>%r\d+);")
ZERO, ONE = "0f00000000", "0f3F800000"


def choose_divisors(ptx: str) -> tuple[str, int]:
    """x == 0 ? 0 : 1 / x becomes 1 / (x == 0 ? 1 : x), in `inverse` of row_stats.py.

    Why: the verifier decides a choice between divisors, and none between a quotient and 0. Exact for a row that sees a
    key, as every row of this proof does: its largest score adds 1 to the sum x, which is never 0 then.
    """
    lines, sources, count = ptx.split("\n"), definitions(ptx.split("\n")), 0
    for i, line in enumerate(lines):
        division = RECIPROCAL.fullmatch(strip_comment(line))
        if not division or the_definition(division["one"], sources) != ("mov.b32", [ONE]):
            continue
        quotient, divisor = division["result"], division["divisor"]
        for j in range(i + 1, min(i + LONGEST_CHOICE, len(lines))):
            choice = re.fullmatch(rf"selp\.f32\s+(%r\d+), {ZERO}, {quotient}, (%p\d+);", strip_comment(lines[j]))
            if choice and the_definition(choice[2], sources) == ("setp.eq.f32", [divisor, ZERO]):
                lines[i] = (
                    f"\t{{ .reg .b32 %divisor; selp.f32 %divisor, {ONE}, {divisor}, {choice[2]}; "
                    f"div.full.f32 {quotient}, {division['one']}, %divisor; }}"
                )
                lines[j] = f"\tmov.b32 {choice[1]}, {quotient};"
                count += 1
                break
    return "\n".join(lines), count


def equals_softmax(case: Case, name: str) -> Proof:
    """That O is softmax(Q Kᵀ scale) V, of one head. No exponential is taken by polynomial, which is not equal to it."""
    case = dataclasses.replace(case, tile=dataclasses.replace(case.tile, polynomial_columns=0))
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
    return Proof(name=name, launch=case.launch, limits=limits, equivalence=equivalence)


def rescale_decision(taken: bool) -> Callable[[str], dict[int, bool]]:
    """For a kernel that rescales only where a maximum has grown: that the branch over it is always taken, or never."""

    def decisions(ptx: str) -> dict[int, bool]:
        source = inspect.getsource(correction_module).split("\n")
        place = 1 + next(i for i, line in enumerate(source) if line.strip().startswith("if needed"))
        lines = branches_of(ptx, f"correction.py:{place}")
        if not lines:
            raise ValueError(f"ptx: expected branches of correction.py:{place}, which rescales, found none")
        return dict.fromkeys(lines, taken)

    return decisions


def lever_proofs(case: Case, name: str) -> Iterator[Proof]:
    """One lever of the tile at a time, all others as they are by default."""
    defaults = {f.name: f.default for f in dataclasses.fields(BlackwellTile) if f.default is not dataclasses.MISSING}
    plain = defaults | {"cga_layout": case.tile.cga_layout}
    for lever, options in LEVERS.items():
        changed = dataclasses.replace(case, tile=dataclasses.replace(case.tile, **plain | options))
        yield Proof(name=f"{name}-{lever}", launch=changed.launch, limits=LIMITS[1])


def rescale_proofs(case: Case, row: Row, name: str) -> Iterator[Proof]:
    """The row's own tile, which rescales by need: that every block does, or that none does."""
    assert isinstance(row.tile, BlackwellTile)
    tile = dataclasses.replace(case.tile, rescale_threshold=row.tile.rescale_threshold)
    launch = dataclasses.replace(case, tile=tile).launch
    limits = LIMITS[tile.num_ctas]
    yield Proof(name=f"{name}-every-rescale", launch=launch, limits=limits, decisions=rescale_decision(False))
    yield Proof(name=f"{name}-no-rescale", launch=launch, limits=limits, decisions=rescale_decision(True))


def proofs_of(row: Row) -> Iterator[Proof]:
    n = row.tile.num_ctas
    for dtype_name, dtype in DTYPES.items():
        if dtype.itemsize != row.element_bytes:
            continue
        name = f"d{row.padded_head_dim}-{dtype_name}-{'causal' if row.causal else 'full'}-{n}cta"
        case = one_tile(dtype, row)
        quick = name in QUICK
        yield Proof(name=name, launch=case.launch, limits=LIMITS[n], quick=quick)
        if dtype_name != "bf16" or n > 2:
            continue
        if isinstance(row.tile, BlackwellTile) and row.tile.rescale_threshold:
            yield from rescale_proofs(case, row, name)
        if n > 1:
            continue
        for suffix, more in (("two-tiles", two_tiles(case)), ("odd-lengths", odd_lengths(case))):
            quick = f"{name}-{suffix}" in QUICK
            yield Proof(name=f"{name}-{suffix}", launch=more.launch, limits=LIMITS[n], quick=quick)
        if name == "d64-bf16-full-1cta":
            yield from lever_proofs(case, name)
            yield equals_softmax(case, f"{name}-equals-softmax")


@functools.cache
def catalogue() -> tuple[Proof, ...]:
    """Every proof, the cheapest first."""
    proofs = [proof for row in BLACKWELL if ARCH in row.tile.archs for proof in proofs_of(row)]
    return tuple(sorted(proofs, key=lambda proof: proof.limits.seconds))
