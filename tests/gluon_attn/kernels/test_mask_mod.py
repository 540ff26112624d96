"""Masks that are functions: what they are asked, which blocks their ranges leave out, and that nobody hangs for it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_attn
import gluon_cpu
from channels.compat import gl, jit
from gluon_attn import MaskMod, ScoreMod, reference_attention
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.table import blackwell_config, hopper_config
from tests.compat import CompilationError
from tests.gluon_cpu.attention import normal_qkv
from tests.gluon_cpu.features import halved, halved_back, prefix, prefix_keys, prefix_rows
from tests.slow import slow_if


def attention(*tensors: Tensor, **options: Any) -> Any:
    """O, or O and LSE."""
    return gluon_attn.attention(*tensors, **options)


H200, B200 = Device.hopper(), Device.blackwell()
ARCHS = {"Hopper": H200, "Blackwell": B200}
SMALL = hopper_config(2, 64, 2, 2, 232)  # 128 rows, 64 keys
CONFIGS: dict[str, tuple[Device, ForwardConfig]] = {
    "Hopper": (H200, SMALL),
    "Hopper, turns": (H200, hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True)),
    "Hopper, four roles": (H200, hopper_config(4, 64, 2, 4, 112, integer_max=True)),
    "Hopper, 2 CTAs": (H200, hopper_config(2, 64, 2, 2, 232, num_ctas=2)),
    "Blackwell": (B200, blackwell_config(3, 192, exp_pieces=4, early_p=True)),
}
QUICK = ("Hopper, turns", "Blackwell")
BY_ARCH = slow_if(lambda name: name == "Blackwell", ARCHS)


PREFIXES = torch.tensor([150, 30], dtype=torch.int32)


def prefix_mask(q_len: int, kv_len: int) -> Tensor:
    rows, keys = torch.arange(q_len)[:, None], torch.arange(kv_len)
    return ((keys < PREFIXES[:, None, None]) | (keys <= rows))[:, None]


@jit
def stripes(q_index, k_index, head, batch, WIDTH: gl.constexpr):
    """Every third stripe of keys, another of each head; the rows of a stripe see nothing at all."""
    return ((k_index // WIDTH + head) % 3 == 0) & (q_index // WIDTH != 1)


def stripes_mask(q_len: int, kv_len: int, heads: int, width: int) -> Tensor:
    rows, keys, head = torch.arange(q_len)[:, None], torch.arange(kv_len), torch.arange(heads)[:, None, None]
    return ((keys // width + head) % 3 == 0) & (rows // width != 1)


def check(
    mask: Tensor, mod: MaskMod, device: Device, config: ForwardConfig | None = None, *, lengths: tuple[int, int],
    **options: Any,
) -> None:  # fmt: skip
    q, k, v = normal_qkv(batch=2, heads=2, kv_heads=1, q_len=lengths[0], kv_len=lengths[1], dtype=torch.float16)
    out, lse = attention(q, k, v, mask_mod=mod, return_lse=True, device=device, config=config, **options)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), mask=mask, **options)
    torch.testing.assert_close(out.double(), want, atol=4e-3, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
    assert not out[want_lse.isneginf()].any()


@pytest.mark.parametrize("ranges", slow_if(lambda ranges: not ranges, [True, False]))
@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CONFIGS))
@pytest.mark.slow_but("Hopper, turns-True")
def test_a_prefix(name, ranges):
    """With blocks left out, and without; odd lengths."""
    device, config = CONFIGS[name]
    mod = MaskMod(prefix, keys=prefix_keys if ranges else None, tensors=(PREFIXES,))
    check(prefix_mask(301, 433), mod, device, config, lengths=(301, 433))


@pytest.mark.parametrize("arch", BY_ARCH)
def test_rows_without_keys(arch):
    """Combined with a causal mask and a window; the function is asked of each head."""
    mod = MaskMod(stripes, constants=(40,))
    options: dict[str, Any] = {"causal": True, "window": (170, None)}
    check(stripes_mask(270, 270, 2, 40), mod, ARCHS[arch], lengths=(270, 270), **options)


def test_another_number_of_keys_than_is_said():
    """It chooses the blocks, and nothing else."""
    mod = MaskMod(stripes, constants=(40,), most_keys=3)
    check(stripes_mask(270, 270, 2, 40), mod, H200, lengths=(270, 270), causal=True)


@jit
def bounded(q_index, k_index, head, batch, q_len, k_len, queries, keys):
    """Reads one number for each position: one beyond the last would not be there."""
    return gl.load(queries + q_index) >= gl.load(keys + k_index) + gl.where(q_index < q_len, 0, k_len)


@pytest.mark.parametrize("arch", BY_ARCH)
def test_no_position_beyond_the_last(arch):
    """gluon_cpu would find a load out of bounds. With a function of scores, whose tensors come first."""
    q_len, kv_len = 77, 139
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randint(0, 9, (n,), generator=generator, dtype=torch.int32) for n in (q_len, kv_len))
    mod = MaskMod(bounded, tensors=(queries, keys), lengths=True)
    q, k, v = normal_qkv(batch=1, heads=2, q_len=q_len, kv_len=kv_len, dtype=torch.float16)
    slopes = torch.tensor([0.5, 0.25])
    got = attention(q, k, v, mask_mod=mod, alibi_slopes=slopes, device=ARCHS[arch])
    mask = queries[:, None] >= keys
    want, _ = reference_attention(q.double(), k.double(), v.double(), mask=mask, alibi_slopes=slopes)
    torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=0)


@jit
def to_the_right(q_index, k_index, head, batch):
    return k_index <= q_index


@pytest.mark.parametrize("arch", BY_ARCH)
def test_aligned(arch):
    """A causal mask as a function is aligned to the bottom right if it is asked to be."""
    q, k, v = normal_qkv(heads=1, q_len=100, kv_len=170, dtype=torch.float16)
    got = attention(q, k, v, mask_mod=MaskMod(to_the_right, aligned=True), device=ARCHS[arch])
    want, _ = reference_attention(q.double(), k.double(), v.double(), causal=True)
    torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=0)


@jit
def anything(q_index, k_index, head, batch, numbers):
    return k_index >= 0


@jit
def odd_ranges(first, last, q_len, k_len, head, batch, numbers):
    """That of a part of a block has nothing to do with that of the block."""
    start, end, step = gl.load(numbers), gl.load(numbers + 1), gl.load(numbers + 2)
    return first * step + start, first * step + end, start, end


ODD = {
    "negative": (-500, -100, 0),
    "beyond": (10**6, 2 * 10**6, 0),
    "from the end to the beginning": (300, 20, 0),
    "whole, of no key": (64, 64, 0),
    "a part of none": (0, 64, 5),
    "backwards": (400, 500, -3),
}


@pytest.mark.parametrize("name", slow_if(lambda name: name not in ("beyond", "backwards"), ODD))
def test_whatever_ranges_say_all_roles_walk_the_same(name):
    """Ranges that contradict each other give other numbers, but no hang and no race; gradients too."""
    mod = MaskMod(anything, keys=odd_ranges, rows=odd_ranges, tensors=(torch.tensor(ODD[name], dtype=torch.int32),))
    q, k, v = (t.requires_grad_() for t in normal_qkv(heads=2, kv_heads=1, q_len=300, kv_len=430, head_dim=64))
    for device in ARCHS.values():
        out = attention(q.detach(), k.detach(), v.detach(), mask_mod=mod, device=device)
        assert out.isfinite().all()
    out = attention(q, k, v, mask_mod=mod, device=H200)
    out.sum().backward()
    for t in (q, k, v):
        assert t.grad is not None
        assert t.grad.isfinite().all()


GRADIENTS: dict[str, tuple[bool, bool, dict[str, Any]]] = {  # ranges, a function of scores too, options
    "ranges": (True, False, {}),
    "no ranges": (False, False, {}),
    "in a fixed order": (True, False, {"deterministic": True}),
    "with scores": (True, True, {}),
    "window": (True, False, {"window": (200, 90)}),
    "D=256": (True, False, {"head_dim": 256}),
}


@pytest.mark.parametrize("name", slow_if(lambda name: name != "ranges", GRADIENTS))
def test_gradients(name):
    ranges, scores, options = GRADIENTS[name]
    options = dict(options)
    q_len, kv_len, head_dim = 301, 433, options.pop("head_dim", 64)
    given = normal_qkv(
        batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=torch.bfloat16
    )
    mod = MaskMod(
        prefix, keys=prefix_keys if ranges else None, rows=prefix_rows if ranges else None, tensors=(PREFIXES,)
    )
    ours = [t.clone().requires_grad_() for t in given]
    score_mod = ScoreMod(halved, halved_back) if scores else None
    out = attention(*ours, mask_mod=mod, score_mod=score_mod, device=H200, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    got = torch.autograd.grad(out, ours, dout)
    plain = [t.double().requires_grad_() for t in given]
    options.pop("deterministic", None)
    scale = head_dim**-0.5 * (0.5 if scores else 1)
    want, _ = reference_attention(*plain, mask=prefix_mask(q_len, kv_len), scale=scale, **options)
    exact = torch.autograd.grad(want, plain, dout.double())
    for one, other in zip(got, exact, strict=True):
        assert (one.double() - other).norm() <= 6e-3 * other.norm()


@jit
def spared(q_index, k_index, head, batch, q_len, k_len):
    return (k_index % 3 != 0) & (k_index <= q_index + k_len - q_len)


@jit
def spared_keys(first_row, last_row, q_len, k_len, head, batch):
    return 0, last_row + 1 + k_len - q_len


@jit
def spared_rows(first_key, last_key, q_len, k_len, kv_head, batch):
    return first_key - k_len + q_len, q_len


@pytest.mark.slow
def test_packed_sequences():
    """Bit for bit as a call of each sequence: positions and lengths are those of the sequence."""
    mod = MaskMod(spared, keys=spared_keys, rows=spared_rows, lengths=True)
    starts = torch.tensor([0, 70, 70, 200], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    packed = [torch.randn(200, 2, 64, generator=generator).half().requires_grad_() for _ in range(3)]
    q, k, v = packed
    out = gluon_attn.attention_varlen(q, k, v, starts, starts, 130, 130, mask_mod=mod, device=H200)
    assert isinstance(out, Tensor)
    dout = torch.randn(out.shape, generator=generator).half()
    got = torch.autograd.grad(out, packed, dout)
    for start, end in ((0, 70), (70, 200)):
        alone = [t[None, start:end].detach().requires_grad_() for t in packed]
        one = attention(*alone, mask_mod=mod, layout="bshd", device=H200)
        assert torch.equal(one[0], out[start:end])
        for grad, of_all in zip(torch.autograd.grad(one, alone, dout[None, start:end]), got, strict=True):
            assert torch.equal(grad[0], of_all[start:end])


@jit
def listed(q_index, k_index, head, batch, allowed):
    return gl.load(allowed + k_index) != 0


@jit
def listed_keys(first_row, last_row, q_len, k_len, head, batch, allowed):
    return 0, k_len


@pytest.mark.parametrize("device", [H200, B200], ids=lambda device: device.name)
@pytest.mark.parametrize("keys", [None, listed_keys], ids=["", "with ranges"])
@pytest.mark.parametrize(
    ("k_lengths", "used"), [((0, 130), None), ((300, 0, 10), None), ((200, 40, 10), (200, 0, 10))], ids=str
)
def test_packed_sequences_with_queries_and_no_key(device, keys, k_lengths, used):
    """O is 0 and LSE -inf, whatever lies before the sequence; and the function reads no number before its table."""
    allowed = torch.tensor([1, 1, 0] * 100, dtype=torch.int32)
    mod = MaskMod(listed, keys=keys, tensors=(allowed,))
    lengths = {"q": (20, 30, 10)[: len(k_lengths)], "k": k_lengths}
    starts = {name: torch.tensor([0, *of]).cumsum(0).int() for name, of in lengths.items()}
    used_k = None if used is None else torch.tensor(used, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths[name]), 1, 64, generator=generator).bfloat16() for name in "qkk")
    out, lse = gluon_attn.attention_varlen(
        q, k, v, starts["q"], starts["k"], max(lengths["q"]), max(k_lengths), seqused_k=used_k, mask_mod=mod,
        device=device, return_lse=True,
    )  # fmt: skip
    for i, count in enumerate(used or k_lengths):
        rows = slice(starts["q"][i], starts["q"][i + 1])
        keys_of = slice(starts["k"][i], starts["k"][i] + count)
        seen = allowed[:count] != 0
        if not count:
            assert (out[rows] == 0).all()
            assert (lse[:, rows] == float("-inf")).all()
            continue
        one_k, one_v = (t[keys_of][seen][None] for t in (k, v))
        want, want_lse = gluon_attn.reference_attention(q[rows][None], one_k, one_v, layout="bshd")
        torch.testing.assert_close(out[rows][None].double(), want.double(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse[None, :, rows].double(), want_lse.double(), atol=0.01, rtol=0.01)


def test_no_race():
    """Of the backward, where load, gradient and reduce each find the rows that a block of keys walks."""
    mod = MaskMod(prefix, keys=prefix_keys, rows=prefix_rows, tensors=(PREFIXES,))
    q, k, v = (t.requires_grad_() for t in normal_qkv(heads=1, q_len=200, kv_len=300, head_dim=64))

    def call() -> None:
        attention(q, k, v, mask_mod=mod, device=H200).sum().backward()

    gluon_cpu.check(call, schedules=4, quiet=True)


@jit
def three_numbers(first, last, q_len, k_len, head, batch):
    return 0, k_len, 0


@jit
def one_number(first, last, q_len, k_len, head, batch):
    return k_len


@pytest.mark.parametrize(
    ("name", "function", "count"), [("keys", three_numbers, 3), ("keys", one_number, 1), ("rows", three_numbers, 3)]
)
def test_other_counts_of_numbers_do_not_compile(name, function, count):
    """What is raised first, as a traceback begins, says why."""
    q, k, v = (t.requires_grad_() for t in normal_qkv(heads=1, q_len=8, kv_len=8, dtype=torch.float16))
    mod = MaskMod(to_the_right, **{name: function})
    with pytest.raises(CompilationError) as caught:
        attention(q, k, v, mask_mod=mod, device=H200).sum().backward()
    first: Any = caught.value
    while first.__cause__ is not None or first.__context__ is not None:
        first = first.__cause__ or first.__context__
    assert f"mask_mod: expected {name} to return two or four numbers, got {count}; return (first, end)" in str(first)


def test_infinite_scores():
    """+inf where the mask lets it through; and where it does not, nothing of it."""
    q, k, v = normal_qkv(heads=1, q_len=70, kv_len=70, dtype=torch.float16)
    k[0, 0, 60] = math.inf
    q = q.abs() + 0.1
    out, lse = attention(q, k, v, mask_mod=MaskMod(to_the_right), return_lse=True, device=H200)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), causal=True)
    assert torch.equal(lse.isposinf(), want_lse.isposinf())
    assert torch.equal(out.isnan(), want.isnan())
