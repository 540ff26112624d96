"""Attention with masks, changed scores, sinks and packed sequences on the machine: launches ready to be repeated, as
`attention.py` has them without."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from channels.compat import gl, jit
from gluon_attn import MaskMod, ScoreMod, reference_attention
from gluon_attn.api import plan_of
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.launch import NOT_THERE, backward_launches_of, workspaces
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config
from gluon_attn.call import Extras, Options, problem_of
from gluon_attn.device import Device
from gluon_attn.features import FEATURES as LISTED
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.launch import launches_of, workspaces_of
from gluon_attn.mask_mod import compiled_part as compiled_mask
from gluon_attn.runtime.kernel import Launch, Tensors
from gluon_attn.score_mod import compiled_part
from gluon_attn.tensors import FP8_DTYPES, PACKED, empty_output, shape_of_lse
from gluon_attn.testing import config_for_rounds
from tests.gluon_cpu.attention import normal_like, normal_qkv, run

HEADS, KV_HEADS = 4, 2
MAY_BE_OFF = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.15}


@jit
def prefix(q_index, k_index, head, batch, prefixes):
    """All see the keys of a prefix; after it none sees what is after itself."""
    return (k_index < gl.load(prefixes + batch)) | (k_index <= q_index)


@jit
def prefix_keys(first_row, last_row, q_len, k_len, head, batch, prefixes):
    length = gl.load(prefixes + batch)
    return 0, gl.maximum(length, last_row + 1), 0, gl.maximum(length, first_row + 1)


@jit
def prefix_rows(first_key, last_key, q_len, k_len, kv_head, batch, prefixes):
    length = gl.load(prefixes + batch)
    return gl.where(first_key < length, 0, first_key), q_len, gl.where(last_key < length, 0, last_key), q_len


@jit
def stripes(q_index, k_index, head, batch):
    return (k_index // 7 + head) % 3 != 0


@jit
def halved(score, q_index, k_index, head, batch):
    return score * 0.5


@jit
def halved_back(dscore, score, modified, q_index, k_index, head, batch):
    return dscore * 0.5


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for besides q, k and v: by the names of `Options` and `Extras`, and of `reference_attention`'s
    arguments."""

    options: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(**same: Any) -> "Asked":
        """What all of them call the same."""
        options = {name: x for name, x in same.items() if name in Options._fields}
        return Asked(options=options, extras={n: x for n, x in same.items() if n not in options}, reference=same)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """asked: given (Sq, Sk), and the number of query heads. argument: that `gluon_attn.features` lists it by."""

    argument: str
    asked: Callable[[tuple[int, int], int], Asked]
    packed: bool = False


def documents(lengths: tuple[int, int], heads: int, **same: Any) -> Asked:
    """Sorted, beginning within blocks; of four queries the second has none but its own keys, the last one none."""
    ids = []
    for of_keys, length in enumerate(lengths):
        starts = torch.tensor([0, length // 4, length // 4 + 1, length // 2])
        ids.append((torch.arange(length)[:, None] >= starts).sum(1, dtype=torch.int32)[None])
        ids[-1][:, length - 3 + of_keys :] += 1 + of_keys
    return Asked(
        options=same,
        extras={"q_segment_ids": ids[0], "k_segment_ids": ids[1]},
        reference={**same, "segment_ids": (ids[0], ids[1])},
    )


def documents_alternating(lengths: tuple[int, int], heads: int) -> Asked:
    """Two, of which each stretch of 64 queries has another one than the next: so the first rows of a block may see
    later keys than its last ones, and neither any of the others'."""
    ids = ((1 + torch.arange(lengths[0]) // 64) % 2, torch.arange(lengths[1]) * 2 // lengths[1])
    q_ids, k_ids = (of.int()[None] for of in ids)
    return Asked(
        options={"causal": True},
        extras={"q_segment_ids": q_ids, "k_segment_ids": k_ids},
        reference={"causal": True, "segment_ids": (q_ids, k_ids)},
    )


def by_prefix(lengths: tuple[int, int], heads: int) -> Asked:
    """A function that leaves out blocks, and says of others that all is seen."""
    length = lengths[1] // 3
    mod = MaskMod(prefix, keys=prefix_keys, rows=prefix_rows, tensors=(torch.tensor([length], dtype=torch.int32),))
    rows, keys = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    function, read = compiled_mask(mod)
    return Asked(
        options={"mask_mod": function},
        extras={"of_mask_mod": read},
        reference={"mask": (keys < length) | (keys <= rows)},
    )


def by_stripes(lengths: tuple[int, int], heads: int) -> Asked:
    """A function that leaves out no block."""
    keys, head = torch.arange(lengths[1]), torch.arange(heads)[:, None, None]
    function, _ = compiled_mask(MaskMod(stripes))
    return Asked(options={"mask_mod": function}, reference={"mask": (keys // 7 + head) % 3 != 0})


def by_half(lengths: tuple[int, int], heads: int) -> Asked:
    """Scores by a function: its reference has half of the scale, see `FeatureCall.reference`."""
    function, _ = compiled_part(ScoreMod(halved, halved_back))
    return Asked(options={"causal": True, "score_mod": function}, reference={"causal": True, "scale_by": 0.5})


def always(**same: Any) -> Callable[[tuple[int, int], int], Asked]:
    return lambda lengths, heads: Asked.of(**same)


def of_heads(name: str, **same: Any) -> Callable[[tuple[int, int], int], Asked]:
    """With a number of each head, from -1 on, called `name`."""
    return lambda lengths, heads: Asked.of(**same, **{name: torch.arange(heads) * 0.5 - 1})


WINDOW = {"window": (130, 0), "causal": True}
FEATURES: dict[str, Feature] = {
    "window": Feature(argument="window", asked=always(**WINDOW)),
    "window to both sides": Feature(argument="window", asked=always(window=(70, 20))),
    "wide window": Feature(argument="window", asked=always(window=(330, 0), causal=True)),
    "chunk": Feature(argument="chunk", asked=always(chunk=150, causal=True)),
    "documents": Feature(argument="segment_ids", asked=functools.partial(documents, causal=True)),
    "documents, full": Feature(argument="segment_ids", asked=documents),
    "documents, alternating": Feature(argument="segment_ids", asked=documents_alternating),
    "mask_mod": Feature(argument="mask_mod", asked=by_prefix),
    "mask_mod, no ranges": Feature(argument="mask_mod", asked=by_stripes),
    "softcap": Feature(argument="softcap", asked=always(softcap=15.0, causal=True)),
    "softcap, maxima": Feature(argument="softcap", asked=always(softcap=100.0, causal=True)),
    "alibi": Feature(argument="alibi_slopes", asked=of_heads("alibi_slopes", causal=True)),
    "sinks": Feature(argument="sinks", asked=of_heads("sinks", causal=True)),
    "score_mod": Feature(argument="score_mod", asked=by_half),
    "window, sinks, softcap": Feature(argument="sinks", asked=of_heads("sinks", softcap=15.0, **WINDOW)),
    "packed": Feature(argument="cu_seqlens_q", asked=always(), packed=True),
    "packed, causal": Feature(argument="cu_seqlens_q", asked=always(causal=True), packed=True),
    "packed, window, sinks": Feature(argument="cu_seqlens_q", asked=of_heads("sinks", **WINDOW), packed=True),
}
# Of FEATURES in gluon_attn, what is about masks, scores and lengths; a bias has kernels of its own in the campaigns.
ARGUMENTS = [name for name in LISTED if name in {feature.argument for feature in FEATURES.values()}]


def starts_of(length: int) -> Tensor:
    """Of packed sequences with that many rows together: one without any, one of a single row, and two of many."""
    parts = (0, length // 3, length // 3, length // 3 + 1, length)
    return torch.tensor(parts, dtype=torch.int32)


class FeatureCall:
    """A call of attention with a feature: its tensors, and what it is compared with."""

    def __init__(
        self,
        feature: str | Feature,
        lengths: tuple[int, int],
        *,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """feature: of FEATURES by its name, or one's own. lengths: Sq, Sk; packed: of all sequences together."""
        if isinstance(feature, str):
            feature = FEATURES[feature]
        asked = feature.asked(lengths, heads)
        options, extras = dict(asked.options), dict(asked.extras)
        q, k, v = normal_qkv(
            heads=heads, kv_heads=kv_heads, q_len=lengths[0], kv_len=lengths[1], head_dim=head_dim, dtype=dtype
        )
        if feature.packed:
            q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
            options |= {"layout": PACKED, "max_seqlens": lengths}
            extras |= {"cu_seqlens_q": starts_of(lengths[0]), "cu_seqlens_k": starts_of(lengths[1])}
        self.q, self.k, self.v = q, k, v
        self.options, self.extras = Options(**options), Extras(**extras)
        self.asked, self.packed = asked, feature.packed

    def reference(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """In the dtype of these, which stand for the call's."""
        given = dict(self.asked.reference)
        if "scale_by" in given:
            given["scale"] = given.pop("scale_by") * q.shape[-1] ** -0.5
        if sinks is not None:
            given["sinks"] = sinks
        if self.packed:
            given |= {name: getattr(self.extras, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        return reference_attention(q, k, v, **given)

    def lse_like(self) -> Tensor:
        return torch.empty(shape_of_lse(self.q.shape, self.options.layout), dtype=torch.float32)


def poison(*tensors: Tensor) -> None:
    for t in tensors:
        if t.is_floating_point() and t.element_size() > 1:
            t.fill_(float("nan"))
        else:
            t.view(torch.uint8).fill_(0x7F)  # in fp8 NaN


class FeatureRun:
    """The launches of a call forward; outputs and what launches hand on to each other are poisoned before each time.
    `launch` is that of attention."""

    def __init__(
        self,
        call: FeatureCall,
        *,
        device: Device,
        programs: int,
        config: ForwardConfig | None = None,
        num_ctas: int = 1,
    ) -> None:
        """programs, config, num_ctas: as for `Run`."""
        self.call, (q, k, v) = call, (call.q, call.k, call.v)
        if config is None:
            problem = problem_of(q, k, v, call.extras, call.options)
            config = config_for_rounds(problem.typical, device, num_ctas)
        device = dataclasses.replace(device, sm_count=programs * config.num_ctas)
        plan = plan_of(q, k, v, call.extras, call.options._replace(config=config, device=device))
        assert plan is not None
        self.target = f"sm_{plan.arch}a"
        self.out, self.lse = empty_output(q, v), call.lse_like()
        self.launches = launches_of(plan, q, k, v, self.out)
        self.launch = self.launches[-1]
        self.tensors: Tensors = {**call.extras.given(), "q": q, "k": k, "v": v, "out": self.out, "lse": self.lse}
        made = workspaces_of(plan)
        self.between: Tensors = {} if made is None else made(self.tensors)
        self.tensors |= self.between

    def __call__(self, **options: Any) -> Any:
        """The report of the last launch."""
        poison(self.out, self.lse, *self.between.values())
        return [run(launch, self.tensors, self.target, **options) for launch in self.launches][-1]

    def bits(self) -> Sequence[Tensor]:
        """What has the same bits under every schedule."""
        return self.out, self.lse

    def check(self, what: str = "") -> None:
        """O and LSE of the last launch against float64."""
        call = self.call
        atol = MAY_BE_OFF[call.q.dtype]
        want, want_lse = call.reference(call.q.double(), call.k.double(), call.v.double())
        torch.testing.assert_close(self.out.double(), want, atol=atol, rtol=0)
        torch.testing.assert_close(self.lse.double(), want_lse, atol=1e-4, rtol=1e-5)


class FeatureBackwardRun:
    """The launches of the gradients of a call, likewise. `launch` is that of the main kernel."""

    def __init__(
        self, call: FeatureCall, *, deterministic: bool, programs: int, config: HopperBackward | None = None
    ) -> None:
        """config: default: the table's in code."""
        self.call, self.deterministic = call, deterministic
        q, k, v, sinks = call.q, call.k, call.v, call.extras.sinks
        assert q.dtype not in FP8_DTYPES
        device = dataclasses.replace(Device.hopper(), sm_count=programs)
        problem = problem_of(q, k, v, call.extras, call.options)
        plan = BackwardPlan.of(problem, config or pick_config(problem), device, deterministic=deterministic)
        assert len(plan.config.launches) == 1
        self.shared_parts, self.finishes = plan.shared_parts, plan.finishes
        self.target = f"sm_{plan.arch}a"
        out, lse = call.reference(q, k, v)
        self.dout = normal_like(out)
        self.grads: Tensors = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        described = {"q": q, "k": k, "v": v, "out": out, "dout": self.dout, **self.grads}
        self.launches = backward_launches_of(plan, described)
        self.launch: Launch = next(one for one in self.launches if "DETERMINISTIC" in one.build.constants)
        self.between = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in workspaces(plan).items()}
        if sinks is not None:
            self.grads["dsinks"] = torch.empty_like(sinks)
        self.tensors: Tensors = {**NOT_THERE, **call.extras.given(), **described, "lse": lse.float(), "dlse": None}
        self.tensors |= self.between | self.grads
        self.exact = self.gradients(torch.float64)
        self.kept: list[Tensor] | None = None

    def gradients(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """By autograd of the reference, in that dtype."""
        call, sinks = self.call, self.call.extras.sinks
        given = [t.detach().to(dtype).requires_grad_() for t in (call.q, call.k, call.v)]
        given += [] if sinks is None else [sinks.to(dtype).requires_grad_()]
        out, _ = call.reference(*given)
        return torch.autograd.grad(out, given, self.dout.to(dtype))

    def __call__(self, **options: Any) -> Any:
        """The report of the last launch."""
        poison(*self.grads.values(), *self.between.values())
        if self.call.packed:  # as a call does: sums that nobody adds to are left as they are
            self.between["dq_sums"].fill_(1e30)
        return [run(launch, self.tensors, self.target, **options) for launch in self.launches][-1]

    def bits(self) -> Sequence[Tensor]:
        """What has the same bits under every schedule."""
        return [grad for name, grad in self.grads.items() if self.deterministic or name != "dq"]

    def keep_bits(self) -> None:
        """Launch it and remember them."""
        self(mode="lowered")
        self.check()
        self.kept = [grad.clone() for grad in self.bits()]

    def has_kept_bits(self) -> bool:
        assert self.kept is not None
        return all(map(torch.equal, self.bits(), self.kept))

    def check(self, what: str = "") -> None:
        """The gradients of the last launch against float64."""
        for (name, got), want in zip(self.grads.items(), self.exact, strict=True):
            assert got.isfinite().all(), f"{what} {name} is not finite"
            error = (got.double() - want).norm()
            assert error <= 6e-3 * want.norm(), f"{what} {name} is off by {error:.2e} of {want.norm():.2e}"
