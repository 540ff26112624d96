"""The gradients of attention on a card: numbers, invariants, repeats, streams, graphs; in processes of their own."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention
from gluon_attn.apart import Apart
from gluon_attn.backward.table import PACKAGED, rows_by_default
from gluon_attn.gradients import attention_backward
from gluon_attn.testing import backward_call, check_gradients, normal, normal_qkv, poison_free_memory
from tests.gpu.checks import Registry, outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

GRADIENTS = Registry()


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*inputs, **options)
    return list(torch.autograd.grad(out, inputs, dout))


# Of flash-attention's tests: queries and keys.
LENGTHS = (
    (1, 1), (1, 3), (2, 1), (64, 1), (239, 1), (511, 1), (3, 513), (64, 64), (64, 128), (128, 64), (128, 192),
    (256, 256), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (307, 256), (384, 256), (640, 128),
    (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (799, 3), (1, 239), (3, 799), (127, 512), (2048, 2048),
    (4224, 4224),
)  # fmt: skip

GROUPS = ((4, 4), (6, 2), (5, 1), (8, 2), (16, 2))  # query heads and KV heads


def numbers(head_dim: int, causal: bool) -> Callable[[], None]:
    def run() -> None:
        dtypes = itertools.cycle([torch.bfloat16, torch.float16])
        for (q_len, kv_len), (heads, kv_heads) in itertools.product(LENGTHS, GROUPS):
            dtype = next(dtypes)
            batch = 1 if q_len > 2048 else 2
            q, k, v = normal_qkv(
                batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype
            )
            dout = normal(*q.shape, dtype=dtype, seed=7)
            rows = (-(-q_len // 128) + 1) * 128
            poison_free_memory((q.shape, dtype), (k.shape, dtype), ((batch, heads, rows, 256), torch.float32))
            what = f"{tuple(q.shape)} {tuple(k.shape)} {dtype}"
            in_any, in_one = (gradients(q, k, v, dout, causal=causal, deterministic=d) for d in (False, True))
            check_gradients(q, k, v, dout, in_any, causal=causal, what=what)
            check_gradients(q, k, v, dout, in_one, causal=causal, what=f"{what} in a fixed order")
            if causal and q_len > kv_len:
                assert not any(dq[:, :, : q_len - kv_len].any() for dq in (in_any[0], in_one[0])), what

    return run


for d, is_causal in itertools.product((32, 64, 72, 128, 192, 256), (False, True)):
    GRADIENTS[f"numbers, D={d}, {'causal' if is_causal else 'full'}"] = numbers(d, is_causal)


@GRADIENTS
def programs_with_several_key_blocks() -> None:
    """More of them than processors, and an odd number to a head."""
    for head_dim, causal, deterministic in itertools.product((64, 128, 256), (False, True), (False, True)):
        q, k, v = normal_qkv(batch=4, heads=8, q_len=700, kv_len=1400, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        got = gradients(q, k, v, dout, causal=causal, deterministic=deterministic)
        check_gradients(q, k, v, dout, got, causal=causal, what=f"D={head_dim} {causal=} {deterministic=}")


SHARED = ((2, 1, 4000, 200), (8, 8, 1500, 700), (1, 1, 16384, 1), (30, 30, 1400, 700))


@GRADIENTS
def shared_key_blocks() -> None:
    """By several programs: all of fewer than processors, or the last ones; dK and dV have the same bits each time."""
    for head_dim, causal, deterministic in itertools.product((64, 128, 256), (False, True), (False, True)):
        for heads, kv_heads, q_len, kv_len in SHARED:
            q, k, v = normal_qkv(heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
            dout = normal(*q.shape, seed=7)
            got = gradients(q, k, v, dout, causal=causal, deterministic=deterministic)
            what = f"{tuple(q.shape)} {tuple(k.shape)} {causal=} {deterministic=}"
            check_gradients(q, k, v, dout, got, causal=causal, what=what)
            for _ in range(50):
                again = gradients(q, k, v, dout, causal=causal, deterministic=deterministic)
                assert all(map(torch.equal, again[1:], got[1:])), what


@GRADIENTS
def both_layouts_and_lse() -> None:
    for layout, causal in itertools.product(("bhsd", "bshd"), (False, True)):
        q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=300, kv_len=400, layout=layout)
        dout, dlse = normal(*q.shape, seed=7), normal(2, 4, 300, dtype=torch.float32, seed=8)
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = attention(*inputs, causal=causal, layout=layout, return_lse=True)
        got = torch.autograd.grad([out, lse], inputs, [dout, dlse])
        check_gradients(q, k, v, dout, got, dlse=dlse, causal=causal, layout=layout, what=layout)


@GRADIENTS
def unusual_numbers() -> None:
    for head_dim, causal, deterministic in itertools.product((64, 128, 256), (False, True), (False, True)):
        q, k, v = normal_qkv(batch=1, heads=2, q_len=700, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        options: dict[str, Any] = {"causal": causal, "deterministic": deterministic}
        for what, tensors in {
            "scores times 30": (q * 30, k, v),
            "deep negative scores": (q.abs(), -k.abs() - 2, v),
            "constant V": (q, k, torch.ones_like(v)),
        }.items():
            got = gradients(*tensors, dout, **options)
            check_gradients(*tensors, dout, got, causal=causal, what=f"{what}, D={head_dim} {options}")


@GRADIENTS
def any_strides_of_the_gradient_of_o() -> None:
    for head_dim in (64, 128, 256):
        q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=300, kv_len=400, head_dim=head_dim)
        unaligned = torch.empty(q.numel() + 8, dtype=q.dtype, device=q.device)[1 : q.numel() + 1].view(q.shape)
        of_strides = {
            "expanded": torch.ones_like(q[:1, :1, :1, :1]).expand(q.shape),
            "transposed": normal(2, 4, head_dim, 300, seed=7).transpose(2, 3),
            "unaligned": unaligned.copy_(normal(*q.shape, seed=7)),
            "the other layout, which TMA reads": normal(2, 300, 4, head_dim, seed=7).transpose(1, 2),
        }
        for what, dout in of_strides.items():
            got = gradients(q, k, v, dout, causal=True)
            check_gradients(q, k, v, dout, got, causal=True, what=f"D={head_dim} {what}")


@GRADIENTS
def nothing_to_compute() -> None:
    for q_len, kv_len, deterministic in itertools.product((0, 7), (0, 7), (False, True)):
        if q_len == kv_len == 7:
            continue
        inputs = [t.requires_grad_() for t in normal_qkv(batch=1, heads=2, q_len=q_len, kv_len=kv_len)]
        out = attention(*inputs, deterministic=deterministic)
        assert isinstance(out, Tensor)
        poison_free_memory(*((t.shape, t.dtype) for t in inputs))
        for given, t in zip(torch.autograd.grad(out, inputs, torch.ones_like(out)), inputs, strict=True):
            what = f"{q_len} {kv_len} {deterministic=}"
            assert (given.shape, given.dtype) == (t.shape, t.dtype), what
            assert not given.any(), what


def nan_like(t: Tensor) -> Tensor:
    return torch.full_like(t, float("nan"))


def poisoned(name: str, workspace: Tensor) -> Tensor:
    return workspace.fill_(12345 if workspace.dtype == torch.int32 else float("nan"))


def poisoned_outputs_and_workspaces(head_dim: int, head_dim_v: int) -> None:
    """Nothing is read before it is written, and all is written: also dQ of rows that see no key, and dK and dV of keys
    that no row sees, which are 0."""
    lengths = ((700, 300), (300, 700), (129, 129))
    masks: tuple[dict[str, Any], ...] = ({"causal": False}, {"causal": True}, {"causal": True, "window": (10, 0)})
    for mask, deterministic, (q_len, kv_len) in itertools.product(masks, (False, True), lengths):
        q, k, v = normal_qkv(
            batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=head_dim, head_dim_v=head_dim_v
        )
        dout = normal(*q.shape[:3], head_dim_v, seed=7)
        out, lse = attention(q, k, v, **mask, return_lse=True)
        config = rows_by_default((head_dim, head_dim_v), mask["causal"])[0].config
        call = backward_call(
            config, dout, q, k, v, out, lse, **mask, deterministic=deterministic,
            output=nan_like, workspaces=poisoned,
        )  # fmt: skip
        dq, dk, dv = call()
        what = f"D={head_dim} {mask} {deterministic=} {q_len} {kv_len}"
        check_gradients(q, k, v, dout, (dq, dk, dv), **mask, what=what)
        without_key = max(q_len - kv_len, 0) if mask["causal"] else 0
        unseen = max(kv_len - q_len - 10, 0) if "window" in mask else 0
        assert not dq[:, :, :without_key].any(), what
        assert not any(t[:, :, :unseen].any() for t in (dk, dv)), what


for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
    name = f"poisoned outputs and workspaces at D={' and '.join(map(str, dims))}"
    GRADIENTS[name] = partial(poisoned_outputs_and_workspaces, *dims)


def adders(q_len: int, kv_len: int, causal: bool, block_m: int, keys: int) -> list[int]:
    """Of each block of rows: how many key blocks it sees."""
    blocks = -(-q_len // block_m)
    if not causal:
        return [-(-kv_len // keys)] * blocks
    last_rows = (min((i + 1) * block_m, q_len) - 1 for i in range(blocks))
    return [-(-max(0, last + 1 + kv_len - q_len) // keys) for last in last_rows]


@GRADIENTS
def everybody_adds_once() -> None:
    """In a fixed order, the number of each block of rows begins at any value, and ends at that of its key blocks."""
    for head_dim, causal, (q_len, kv_len) in itertools.product(
        (64, 128, 256), (False, True), ((700, 300), (300, 700), (1000, 1000))
    ):
        config = rows_by_default((head_dim, head_dim), causal)[0].config
        q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        numbers: list[Tensor] = []

        def keep(name: str, workspace: Tensor, numbers: list[Tensor] = numbers) -> Tensor:
            numbers.extend([workspace] * (name == "added"))
            return poisoned(name, workspace)

        call = backward_call(config, dout, q, k, v, out, lse, causal=causal, deterministic=True, workspaces=keep)
        want = torch.tensor(adders(q_len, kv_len, causal, config.block_m, config.keys), device=q.device)
        for _ in range(20):
            call()
        for got in numbers:
            assert bool((got == want).all()), f"D={head_dim} {causal=} {q_len} {kv_len}: {got.tolist()}"


@GRADIENTS
def invariants_at_131072_tokens() -> None:
    """⟨V, dV⟩ = ⟨O, dO⟩ and ⟨Q, dQ⟩ = ⟨K, dK⟩ for each KV head: V scales O, and Q and K scale the same scores."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        """Of each KV head, and the root of the sum of its squares, to see it against."""
        a, b = (t.detach().float().unflatten(1, (2, -1)) for t in (a, b))
        return torch.stack([(a * b).sum((0, 2, 3, 4)), (a * b).square().sum((0, 2, 3, 4)).sqrt()])

    for head_dim, causal, deterministic in ((128, True, False), (64, False, True), (256, True, True)):
        q, k, v = normal_qkv(batch=1, heads=4, kv_heads=2, q_len=2**17, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out = attention(*inputs, causal=causal, deterministic=deterministic)
        assert isinstance(out, Tensor)
        dq, dk, dv = torch.autograd.grad(out, inputs, dout)
        for one, other in ((product(v, dv), product(out, dout)), (product(q, dq), product(k, dk))):
            # Rounding to 16 bits moves each term by 2^-9 at most, at random.
            error, scale = (one[0] - other[0]).abs(), one[1] + other[1]
            assert bool((error <= 2.0**-5 * scale).all()), f"D={head_dim}: {error.tolist()} of {scale.tolist()}"


def deterministic_launches_are_equal(head_dim: int, head_dim_v: int) -> None:
    """With more key blocks than processors, and with few, which programs share."""
    problems: tuple[tuple[bool, dict[str, Any]], ...] = (
        (True, {"batch": 4, "heads": 10, "q_len": 1000}),
        (False, {"batch": 4, "heads": 10, "kv_heads": 5, "q_len": 1000}),
        (False, {"heads": 2, "kv_heads": 1, "q_len": 4000, "kv_len": 200}),
    )
    for causal, sizes in problems:
        q, k, v = normal_qkv(**sizes, head_dim=head_dim, head_dim_v=head_dim_v)
        dout = normal(*q.shape[:3], head_dim_v, seed=7)
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        run = partial(attention_backward, dout, None, q, k, v, out, lse, causal=causal, deterministic=True)
        first = run()
        check_gradients(q, k, v, dout, first, causal=causal)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(10_000):
            for a, b in zip(first, run(), strict=True):
                different += (a != b).any()
        assert int(different) == 0, f"{sizes} {causal=}: {int(different)} tensors differ"


for dims in dict.fromkeys(row.head_dims for row in PACKAGED):
    name = f"deterministic launches are equal, D={' and '.join(map(str, dims))}"
    GRADIENTS[name] = partial(deterministic_launches_are_equal, *dims)


@GRADIENTS
def deterministic_replays_are_equal() -> None:
    """Of a CUDA graph, with other work between them that leaves other numbers behind in the memory."""
    for head_dim, replays in ((128, 10_000), (64, 2000), (256, 2000)):
        q, k, v = normal_qkv(batch=2, heads=4, q_len=500, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        out, lse = attention(q, k, v, causal=True, return_lse=True)

        def run(q=q, k=k, v=v, out=out, lse=lse, dout=dout) -> tuple[Tensor, ...]:
            return attention_backward(dout, None, q, k, v, out, lse, causal=True, deterministic=True)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = [t.clone() for t in run()]
        torch.cuda.current_stream().wait_stream(stream)
        check_gradients(q, k, v, dout, first, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(replays):
            for t in got:
                t.fill_(float("nan"))
            graph.replay()
            for a, b in zip(first, got, strict=True):
                different += (a != b).any()
        assert int(different) == 0, f"D={head_dim}: {int(different)} tensors differ"


@GRADIENTS
def launches_in_a_row() -> None:
    """dK and dV, which are sums in one order, have the same bits each time."""
    for head_dim in (64, 128, 256):
        q, k, v = normal_qkv(batch=1, heads=16, q_len=512, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        run = partial(attention_backward, dout, None, q, k, v, out, lse, causal=True)
        first, different = run(), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(2000):
            got = run()
            for a, b in zip(first[1:], got[1:], strict=True):
                different += (a != b).any()
        check_gradients(q, k, v, dout, got, causal=True, what=f"D={head_dim}")
        assert int(different) == 0, f"D={head_dim}: {int(different)} tensors differ"


@GRADIENTS
def two_streams_at_once() -> None:
    """Graphs of many calls, so that the card has work in both all the time, of 16 to 32 programs each, so that there is
    room for both; in a fixed order in one of them, where programs wait for each other."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls, graphs = [], []
    for i, stream in enumerate(streams):
        q, k, v = normal_qkv(batch=1, heads=4, q_len=512, head_dim=64 + 64 * i, seed=i)
        dout = normal(*q.shape, seed=9)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        backward = partial(attention_backward, dout, None, q, k, v, out, lse, causal=True, deterministic=bool(i))
        backward()  # compiles, and loads
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = [backward() for _ in range(20)][-1]
        graphs.append(graph)
        calls.append((q, k, v, dout, got))
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in streams] for _ in range(2))
    torch.cuda.synchronize()
    for replay in range(20):
        for graph, stream, start, end in zip(graphs, streams, starts, ends, strict=True):
            with torch.cuda.stream(stream):
                if replay == 0:
                    start.record()
                graph.replay()
                end.record()
    torch.cuda.synchronize()
    assert starts[0].elapsed_time(ends[1]) > 0 < starts[1].elapsed_time(ends[0]), "one ended before the other began"
    for q, k, v, dout, got in calls:
        check_gradients(q, k, v, dout, got, causal=True)


@GRADIENTS
def compiled() -> None:
    """Whole, with lengths that change. Not by inductor, which needs the Triton that torch came with."""

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(attention(q, k, v, causal=True), k, v, causal=True)  # type: ignore[arg-type, return-value]

    model = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=True)
    for q_len in (130, 200, 333):
        q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=q_len)
        dout = normal(*q.shape, seed=7)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        got, want = (torch.autograd.grad(fn(*inputs), inputs, dout) for fn in (model, twice))
        for one, other in zip(got, want, strict=True):  # their bits depend on the order of sums
            torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


@GRADIENTS
def graphs() -> None:
    for deterministic in (False, True):
        q, k, v = normal_qkv(batch=1, heads=4, q_len=500, head_dim=128)
        dout = normal(*q.shape, seed=7)
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]

        def run(inputs=inputs, dout=dout, deterministic=deterministic) -> tuple[Tensor, ...]:
            out = attention(*inputs, causal=True, deterministic=deterministic)
            return torch.autograd.grad(out, inputs, dout)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for seed in range(3):
            q, k, v = normal_qkv(batch=1, heads=4, q_len=500, head_dim=128, seed=seed)
            with torch.no_grad():
                for t, new in zip(inputs, (q, k, v), strict=True):
                    t.copy_(new)
            graph.replay()
            check_gradients(q, k, v, dout, got, causal=True, what=f"replay {seed}")


def run_test(name: str) -> None:
    GRADIENTS[name]()


APART = Apart(
    function="tests.gpu.test_gradients:run_test", group=lambda name: name.rpartition(",")[0] or name, processes=8
)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, outcome):
    settle(outcome(name))
