"""The launches whose synchronisation operations the campaign breaks: kernels by name, with what they run on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig, ForwardConfig
from gluon_attn.forward.launch import launches_of
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config
from gluon_attn.problem import Problem
from tests.gluon_cpu.attention import BackwardRun, Run, TransposeRun, bias_of, kv_scales, normal_qkv
from tests.gluon_cpu.features import FeatureBackwardRun, FeatureCall, FeatureRun

AnyRun = Run | TransposeRun | BackwardRun | FeatureRun | FeatureBackwardRun


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel and the problems (Sq, Sk) that its mutants are tried on, by one program, row block after row
    block. If V is transposed before, the kernel that does that.

    The config is not the tuning table's, which changes: the lengths are chosen for it. head_dim_v: None: as Q's. bias:
    as for `bias_of`.
    """

    head_dim: int
    head_dim_v: int | None = None
    causal: bool
    lengths: tuple[tuple[int, int], ...]
    config: ForwardConfig
    dtype: torch.dtype = torch.bfloat16
    bias: str = ""

    def runs(self) -> Sequence[AnyRun]:
        device = Device.blackwell() if isinstance(self.config, BlackwellConfig) else Device.hopper()
        options: dict[str, Any] = {"causal": self.causal, "device": device}
        kind: dict[str, Any] = {"head_dim": self.head_dim, "head_dim_v": self.head_dim_v, "dtype": self.dtype}
        scales = kv_scales(1, 1) if self.dtype.itemsize == 1 else ()
        inputs = [normal_qkv(q_len=q, kv_len=kv, **kind) for q, kv in self.lengths]
        if self.config.transposes_before(self.dtype.itemsize):
            return [transpose_run(*qkv, self.config, device) for qkv in inputs]
        biases = [bias_of(self.bias, *qkv[:2]) for qkv in inputs]
        options |= {"config": self.config, "programs": 1}
        return [Run(*qkv, *scales, bias=bias, **options) for qkv, bias in zip(inputs, biases, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Another:
    """One more problem of the gradients, of one KV head, and the programs that there are for it."""

    q_len: int
    kv_len: int
    heads: int  # of the queries
    programs: int
    shared_parts: int = 0  # parts of shared key blocks that these programs then have


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One of the kernels of the gradients, as `BackwardRun` names them, and the problems (Sq, Sk) that its mutants are
    tried on, all launched each time. The main one, or a part of it, is one program; and, for the first problem once
    more, two, of which one waits for the other; or in a fixed order, for the last problem, three, of which the second
    is waited for while it waits. With `shared_parts`, so many programs share the key blocks of all these problems.
    These have two query heads to one KV head. another: launched with them. head_dim_v: None: as Q's. bias: as for
    `bias_of`."""

    head_dim: int
    head_dim_v: int | None = None
    lengths: tuple[tuple[int, int], ...]
    causal: bool = False
    deterministic: bool = False
    which: str = "main"
    shared_parts: int = 0
    bias: str = ""
    another: Another | None = None

    def runs(self) -> Sequence[AnyRun]:
        columns: dict[str, Any] = {"head_dim": self.head_dim, "head_dim_v": self.head_dim_v}
        inputs = [
            normal_qkv(heads=2, kv_heads=1, q_len=q, kv_len=kv, dtype=torch.float16, **columns)
            for q, kv in self.lengths
        ]
        kind: dict[str, Any] = {"causal": self.causal, "deterministic": self.deterministic, "which": self.which}
        biases = [bias_of(self.bias, *qkv[:2]) for qkv in inputs]
        runs = [
            BackwardRun(*qkv, bias=bias, programs=self.shared_parts or 1, **kind)
            for qkv, bias in zip(inputs, biases, strict=True)
        ]
        assert all(run.shared_parts == self.shared_parts for run in runs)
        if self.which not in ("before", "after") and not self.shared_parts:
            which, programs = (-1, 3) if self.deterministic else (0, 2)
            runs.insert(0, BackwardRun(*inputs[which], bias=biases[which], programs=programs, **kind))
        if more := self.another:
            sizes = {"heads": more.heads, "kv_heads": 1, "q_len": more.q_len, "kv_len": more.kv_len}
            qkv = normal_qkv(**sizes, dtype=torch.float16, **columns)
            runs.append(BackwardRun(*qkv, bias=bias_of(self.bias, *qkv[:2]), programs=more.programs, **kind))
            assert runs[-1].shared_parts == more.shared_parts
        for run in runs:
            run.keep_bits()
        return runs


@dataclass(frozen=True, kw_only=True)
class Featured:
    """The forward kernel with a feature of features.py, and the problems (Sq, Sk) that its mutants are tried on, by one
    program; packed: of all sequences together. Of two heads: a short first row block is followed by a long last one.
    also: another feature with the same kernel, for the same problems."""

    feature: str
    also: str = ""
    lengths: tuple[tuple[int, int], ...]
    config: ForwardConfig
    head_dim: int = 64

    def runs(self) -> Sequence[AnyRun]:
        device = Device.blackwell() if isinstance(self.config, BlackwellConfig) else Device.hopper()
        features = (self.feature, self.also) if self.also else (self.feature,)
        calls = [
            FeatureCall(feature, of, heads=2, kv_heads=1, head_dim=self.head_dim)
            for of in self.lengths
            for feature in features
        ]
        return [FeatureRun(call, device=device, programs=1, config=self.config) for call in calls]


@dataclass(frozen=True, kw_only=True)
class FeaturedBackward:
    """The main kernel of the gradients with a feature, and the problems (Sq, Sk) that its mutants are tried on, by one
    program; the first one also by two, of which one waits for the other, and in a fixed order by three. These have two
    query heads to one KV head. another: launched with them, first."""

    feature: str
    lengths: tuple[tuple[int, int], ...]
    head_dim: int = 64
    deterministic: bool = False
    another: Another | None = None

    def runs(self) -> Sequence[AnyRun]:
        calls = [FeatureCall(self.feature, of, heads=2, kv_heads=1, head_dim=self.head_dim) for of in self.lengths]
        programs = [(calls[0], 3 if self.deterministic else 2), *((call, 1) for call in calls)]
        if more := self.another:
            of = (more.q_len, more.kv_len)
            call = FeatureCall(self.feature, of, heads=more.heads, kv_heads=1, head_dim=self.head_dim)
            programs.insert(0, (call, more.programs))  # which finds most, in few steps
        runs = [FeatureBackwardRun(call, deterministic=self.deterministic, programs=n) for call, n in programs]
        assert not any(run.shared_parts for run in runs)
        for run in runs:
            run.keep_bits()
        return runs


def transpose_run(q: Tensor, k: Tensor, v: Tensor, config: ForwardConfig, device: Device) -> TransposeRun:
    plan = Plan.of(Problem.of(q, k, v), config, device)
    before, _ = launches_of(plan, q, k, v, q)
    return TransposeRun(plan, v, before)


# Lengths such that, under a causal mask, every role has a second masked block in some row block, and skips one in
# another; that row blocks have one key block, where nothing but the channel of the queries orders one after another, or
# two, where nothing but the channel of the keys orders the first key block of one after the last but one; and that a
# role skips right after a row block of two, where it could release a slot before another has released its last lap.
# On Blackwell, queries to a CTA; a ring of three slots, which a row block of two key blocks walks around already. Three
# row blocks of one to five key blocks; row blocks of one, where nothing is rescaled; row blocks of two.
BLACKWELL_LENGTHS = ((700, 600), (520, 100), (600, 250))
# Of the gradients, by head dim: several row blocks, and key blocks of which the last is not whole, and so masked; one
# row block and several key blocks.
BACKWARD_LENGTHS = {64: ((400, 200), (100, 300)), 128: ((200, 200), (60, 300)), 256: ((200, 150), (60, 180))}
# Of those in a fixed order, more: with more keys than queries, so that of four key blocks two walk all rows. So others
# wait for who adds to the last row that it walks, and for who waits itself.
IN_ORDER_LENGTHS = {64: (300, 420), 128: (200, 420), 256: (150, 200)}
# Of key blocks that programs share, by mask and order: full, the last of 200 keys are masked; causal, one share has
# no row blocks, another several without a mask. In any order, one more, in which a program's reduce role may be at
# its next part while its gradient role waits for another program's part. If both parts add to the row block with
# which the next part begins, nothing but one wait keeps them from a deadlock. Causal, that takes 12 row blocks: in
# fewer, no part reaches the row block with which a later key block's unmasked rows begin.
SHARED_LENGTHS: dict[tuple[str, str], tuple[tuple[tuple[int, int], ...], Another | None]] = {
    ("full", ""): (
        ((512, 200), (768, 256)),
        Another(q_len=768, kv_len=256, heads=1, programs=4, shared_parts=4),
    ),
    ("full", ", in order"): (((512, 200),), None),
    ("causal", ""): (((512, 256),), Another(q_len=768, kv_len=768, heads=1, programs=12, shared_parts=12)),
    ("causal", ", in order"): (((512, 256),), None),
}
IN_PIECES: dict[str, Any] = {"block_n": 64, "result_slots": 1}  # on Blackwell at D=192, for which there is room
KERNELS: dict[str, Kernel | Backward | Featured | FeaturedBackward] = {
    "two CTAs, turns": Kernel(
        head_dim=64,
        causal=True,
        lengths=((1160, 1229), (1600, 100), (768, 694), (800, 446)),
        config=hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, num_ctas=2),
    ),
    "one CTA, turns": Kernel(
        head_dim=64,
        causal=True,
        lengths=((580, 649), (800, 100), (400, 517), (384, 387), (400, 416), (400, 420)),
        config=hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1),
    ),
    "one CTA, no turns": Kernel(
        head_dim=128,
        causal=False,
        lengths=((390, 650), (500, 100), (600, 200)),
        config=hopper_config(2, 128, 2, 2, 232),
    ),
    "two CTAs, O staged in Q": Kernel(
        head_dim=256,
        causal=False,
        lengths=((500, 330), (800, 60), (800, 100)),
        config=hopper_config(2, 64, 1, 2, 232, stage_in_queries=True, num_ctas=2),
    ),
    "one CTA, one role": Kernel(
        head_dim=64,
        causal=True,
        lengths=((290, 390), (400, 100), (192, 320)),
        config=hopper_config(1, 128, 2, 2, 232),
    ),
    "one CTA, fp8": Kernel(
        head_dim=64,
        causal=True,
        lengths=((580, 649), (400, 100), (384, 387), (400, 300), (400, 446)),
        config=hopper_config(2, 128, 2, 2, 216, transpose_registers=56),
        dtype=torch.float8_e4m3fn,
    ),
    "two CTAs, fp8, turns": Kernel(
        head_dim=64,
        causal=True,
        lengths=((1160, 1229), (1600, 100), (768, 694), (800, 446)),
        config=hopper_config(2, 128, 2, 2, 216, turns=True, num_ctas=2, transpose_registers=56),
        dtype=torch.float8_e4m3fn,
    ),
    "one CTA, turns, bias": Kernel(
        head_dim=64,
        causal=True,
        lengths=((580, 649), (800, 100), (400, 517), (384, 387)),
        config=hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True),
        bias="a row each",
    ),
    "one CTA, bias of a row": Kernel(
        head_dim=64,
        causal=True,
        lengths=((390, 520), (500, 100), (256, 400)),
        config=hopper_config(2, 64, 2, 2, 232),
        bias="one row",
    ),
    "fp8, V transposed before": Kernel(
        head_dim=64,
        causal=False,
        lengths=((1, 333), (1, 100)),
        config=hopper_config(2, 128, 2, 2, 232),
        dtype=torch.float8_e4m3fn,
    ),
    **{
        f"Blackwell, {name}": Kernel(
            head_dim=64,
            causal=True,
            # The last is one row block, whose query tile 0 has masked key blocks and, in a cluster, unmasked ones.
            lengths=(*((q * num_ctas, kv) for q, kv in BLACKWELL_LENGTHS), (256 * num_ctas, 325 * num_ctas)),
            config=blackwell_config(slots, 192, num_ctas=num_ctas, exp_pieces=4, early_p=True, exp_turns=True),
        )
        for name, num_ctas, slots in (("one CTA", 1, 3), ("two CTAs", 2, 3), ("four CTAs", 4, 3))
    },
    # With a bias, a channel more for each query tile. With V of another head dim than Q, a channel for K and one for V,
    # of two slots each: of one, to wait for V would be to wait for K. At D=192, Q and K in pieces.
    **{
        f"Blackwell, one CTA, {name}": Kernel(
            head_dim=64,
            causal=True,
            lengths=(*BLACKWELL_LENGTHS, (256, 325)),
            config=blackwell_config(2, 192, exp_pieces=4, early_p=True, exp_turns=True),
            bias=bias,
        )
        for name, bias in (("bias", "a row each"), ("bias of a row", "one row"))
    },
    **{
        f"Blackwell, {ctas}, D={head_dim}/128": Kernel(
            head_dim=head_dim,
            head_dim_v=128,
            causal=True,
            lengths=(*((q * num_ctas, kv) for q, kv in BLACKWELL_LENGTHS), (256 * num_ctas, 325 * num_ctas)),
            config=replace(
                blackwell_config(4, 192, num_ctas=num_ctas, exp_pieces=4, early_p=True, exp_turns=True),
                **(IN_PIECES if head_dim == 192 else {}),
            ),
        )
        for ctas, num_ctas, head_dim in (
            ("one CTA", 1, 64),
            ("one CTA", 1, 192),
            ("two CTAs", 2, 192),
            ("four CTAs", 4, 64),
        )
    },
    **{
        f"gradients, D={head_dim}, {mask}{order}": Backward(
            head_dim=head_dim,
            # With two slots of dQ, causal at D=64, a key block needs three steps in a row without a mask.
            lengths=lengths + ((IN_ORDER_LENGTHS[head_dim],) if order or (head_dim, mask) == (64, "causal") else ()),
            causal=mask == "causal",
            deterministic=bool(order),
            # With more steps of 128 rows than FEW_STEPS for a key block. In the other runs it has fewer.
            another=Another(q_len=100, kv_len=300, heads=18, programs=3) if order and head_dim == 64 else None,
        )
        for head_dim, lengths in BACKWARD_LENGTHS.items()
        for mask in ("full", "causal")
        for order in ("", ", in order")
    },
    **{
        f"gradients, D=128, {mask}, shared{order}": Backward(
            head_dim=128,
            lengths=lengths,
            causal=mask == "causal",
            deterministic=bool(order),
            shared_parts=4 if order else 3,
            another=another,
        )
        for (mask, order), (lengths, another) in SHARED_LENGTHS.items()
    },
    **{
        f"gradients, D=192/128, {which}, {mask}{order}": Backward(
            head_dim=192,
            head_dim_v=128,
            lengths=BACKWARD_LENGTHS[128] + ((IN_ORDER_LENGTHS[128],) if order else ()),
            causal=mask == "causal",
            deterministic=bool(order),
            which=which,
        )
        for which, mask, order in (
            ("dv", "full", ""),
            ("dv", "causal", ", in order"),
            ("main", "causal", ""),
            ("main", "full", ", in order"),
        )
    },
    **{
        f"gradients, D=192/128, {which}, full, shared": Backward(
            head_dim=192,
            head_dim_v=128,
            lengths=((512, 200),),
            shared_parts=3,
            which=which,
            another=another,
        )
        for which, another in (("dv", None), ("main", SHARED_LENGTHS["full", ""][1]))
    },
    **{
        f"gradients, D={head_dim}, bias, {bias}": Backward(
            head_dim=head_dim,
            lengths=lengths,
            causal=True,
            bias=bias,
            # Key blocks of one step, where nothing but the channel of claims orders one claim after the next but one.
            another=Another(q_len=60, kv_len=180, heads=1, programs=1) if head_dim == 256 else None,
        )
        # With rows of a bias each, row blocks are of 64 rows at D=64 too. With one row there are two slots of dQ, and a
        # key block needs three steps in a row without a mask.
        for head_dim, bias, lengths in (
            (64, "a row each", BACKWARD_LENGTHS[128]),
            (64, "one row", (*BACKWARD_LENGTHS[64], IN_ORDER_LENGTHS[64])),
            (256, "a row each", BACKWARD_LENGTHS[256]),
        )
    },
    **{
        f"gradients, kernel {which}, D={head_dim}": Backward(
            head_dim=head_dim, lengths=lengths, deterministic=True, which=which
        )
        for head_dim, lengths in BACKWARD_LENGTHS.items()
        for which in ("before", "after")
    },
    # Those of features whose synchronisation differs, see test_synchronisation.py. A window so wide that between masked
    # blocks there are others.
    **{
        f"{name}, one CTA, turns": Featured(
            feature=feature,
            also=also,
            lengths=((580, 649), (400, 100), (384, 387), (300, 600)),
            config=hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2),
        )
        for name, feature, also in (
            ("window", "wide window", ""),
            ("documents", "documents", "documents, alternating"),
            ("packed", "packed, causal", ""),
        )
    },
    "window, one CTA, four roles": Featured(
        feature="wide window",
        lengths=((580, 580), (300, 517)),  # in the first, pairs of row blocks, of which the roles exchange shares
        config=hopper_config(4, 64, 1, 2, 112, last_heads_longest_first=True),
    ),
    "window, two CTAs, turns": Featured(
        feature="wide window",
        lengths=((600, 600), (1160, 1229), (800, 100), (384, 446)),
        config=hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, num_ctas=2),
    ),
    **{
        f"Blackwell, {ctas}, {name}": Featured(
            feature=feature,
            lengths=(*((q * num_ctas, kv) for q, kv in BLACKWELL_LENGTHS), (256 * num_ctas, 325 * num_ctas)),
            config=blackwell_config(3, 192, num_ctas=num_ctas, exp_pieces=4, early_p=True, exp_turns=True),
        )
        for ctas, num_ctas, name, feature in (
            ("one CTA", 1, "window", "wide window"),
            ("one CTA", 1, "documents", "documents, full"),
            ("one CTA", 1, "packed", "packed, causal"),
            ("two CTAs", 2, "window", "wide window"),
        )
    },
    **{
        f"gradients, D={head_dim}, {feature}{', in order' * order}": FeaturedBackward(
            feature=feature,
            head_dim=head_dim,
            lengths=lengths,
            deterministic=order,
            # With more steps than FEW_STEPS for a key block, as above.
            another=Another(q_len=180, kv_len=560, heads=18, programs=3) if (head_dim, order) == (64, True) else None,
        )
        for head_dim, feature, order, lengths in (
            (64, "wide window", False, ((300, 420), (400, 200), (100, 300))),
            (64, "packed, causal", False, ((300, 420), (400, 200), (100, 300))),
            # Four key blocks of the last sequence, two of which walk all rows; one row block to several key blocks.
            (64, "packed, causal", True, ((450, 630), (400, 200), (180, 560))),
            # More row blocks than see the first keys: so the keys after are the first of some, and wait for others.
            (128, "wide window", True, ((330, 600), (60, 300))),
        )
    },
}
