"""Models of transformers by our kernels: small ones of random weights, on the CPU, where ours run on gluon_cpu."""

import collections
import copy
import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gluon_attn.device import Device
from tests.slow import slow_if

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from gluon_attn import hf  # noqa: E402  # it imports transformers

HOPPER = Device.hopper()
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,  # so that scores are far from equal, and masks show
}  # fmt: skip
WINDOW, NEW_TOKENS = 8, 5
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(**TINY),
    "Qwen 3": lambda: transformers.Qwen3Config(**TINY),
    "Mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=WINDOW),
    "Gemma 2": lambda: transformers.Gemma2Config(
        **TINY, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=2.0
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **TINY, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None
    ),
}
# Who computes 20 tokens, of which the last three's windows hide some.
ELSE = {"Gemma 2": "eager", "gpt-oss": "eager"}  # who does what is not ours; SDPA for others
WHO = {"Llama": "ours", "Qwen 3": "ours", "Mistral": "ours", "Gemma 2": "ours", "gpt-oss": "ours"}
WHOSE = ("transformers' SDPA", "the model's eager attention")


@pytest.fixture
def ran(monkeypatch) -> Iterator[list[tuple[str, int]]]:
    """Who computed attention, and of how many queries, since the list was last cleared."""
    calls: list[tuple[str, int]] = []

    def counted(who: str, attend: Callable[..., Any], q_at: int) -> Callable[..., Any]:
        def run(*args: Any, **kw: Any) -> Any:
            calls.append((who, args[q_at].shape[2]))
            return attend(*args, **kw)

        return run

    attentions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(attentions, "sdpa", counted("SDPA", attentions["sdpa"], 1))
    for name in (hf.NAME, hf.NAME_IN_BATCHES):  # taken out again afterwards
        monkeypatch.setitem(attentions, name, None)
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, None)
    monkeypatch.setattr(hf, "attention", counted("ours", hf.attention, 0))
    varlen = hf.attention_varlen

    def packed(q: Tensor, *args: Any, **kw: Any) -> Any:
        calls.append(("packed", len(q)))
        return varlen(q, *args, **kw)

    monkeypatch.setattr(hf, "attention_varlen", packed)
    eager_of = hf.eager_of
    monkeypatch.setattr(hf, "eager_of", lambda *args: counted("eager", eager_of(*args), 1))
    monkeypatch.setattr(hf, "_warned", set())
    hf.register(HOPPER)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gluon_attn leaves")
        yield calls


def model_of(name: Any, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """By eager attention until told otherwise. name: in CONFIGS, or a config."""
    torch.manual_seed(0)
    config = CONFIGS[name]() if isinstance(name, str) else name
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    model.generation_config.update(
        do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, disable_compile=True
    )
    return model


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(length))


def by(implementation: str, model: Any, run: Callable[[Any], Any]) -> Any:
    model.set_attn_implementation(implementation)
    return run(model)


def check_near(model: Any, run: Callable[[Any], list[Tensor]], *, by_name: str = hf.NAME) -> None:
    """What the model gives is as near to eager attention in fp32 as eager attention in the model's dtype is."""
    want = run(copy.deepcopy(model).float())
    plain = by("eager", model, run)
    got = by(by_name, model, run)
    for exact, eager, ours in zip(want, plain, got, strict=True):
        budget = (eager - exact).norm()
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 2 * budget + 1e-6 * exact.norm()


def logits(inputs: Tensor, **options: Any) -> Callable[[Any], list[Tensor]]:
    def run(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(inputs, **options).logits]

    return run


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow_but("Gemma 2", "gpt-oss", "Llama")
def test_logits(name, ran):
    check_near(model_of(name), logits(tokens(20)))
    assert ran == [(WHO[name], 20)] * 2


def test_logits_within_the_window(ran):
    """Where the window hides no key, its model is like others."""
    check_near(model_of("Mistral"), logits(tokens(WINDOW - 1)))
    assert ran == [("ours", WINDOW - 1)] * 2


def test_all_keys(ran):
    """An encoder's attention, which has no causal mask."""
    model = model_of("Llama", is_causal=False)
    check_near(model, logits(tokens(20)))
    causal = model_of("Llama")
    assert ran == [("ours", 20)] * 2
    assert not torch.allclose(logits(tokens(20))(model)[0], logits(tokens(20))(causal)[0], atol=0.1)


@pytest.mark.parametrize("name", slow_if(lambda name: name not in ("Llama", "gpt-oss"), CONFIGS))
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.slow_but("left-gpt-oss", "right-Llama")
def test_padding_is_never_ignored(name, side, ran):
    """A padded row is as it is alone."""
    row, model = tokens(14, batch=1), model_of(name)
    pad = torch.zeros(1, 6, dtype=torch.long)
    padded = torch.cat([pad, row] if side == "left" else [row, pad], 1)
    inputs, mask = torch.cat([padded, tokens(20, batch=1)]), torch.ones(2, 20, dtype=torch.long)
    mask[0] = padded[0] != 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    check_near(model, lambda m: [logits(inputs, attention_mask=mask, position_ids=positions)(m)[0][mask.bool()]])
    windowed = {(ELSE.get(name, "SDPA"), 20)} if name not in ("Llama", "Qwen 3") else set()
    assert set(ran) == windowed | ({("packed", 40)} if name != "Mistral" else set())
    alone = by("eager", copy.deepcopy(model).float(), logits(row))[0][0]
    got = by(hf.NAME, model, logits(inputs, attention_mask=mask, position_ids=positions))[0][0, mask[0].bool()]
    assert (got - alone).norm() < 0.05 * alone.norm()


@pytest.mark.parametrize("name", slow_if(lambda name: name not in ("Llama", "Mistral"), CONFIGS))
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.slow_but("dynamic-Llama", "static-Mistral")
def test_generation(name, cache, ran):
    """Token by token, the first ones at once."""
    model = model_of(name, torch.float16)

    def generate(inputs: Tensor) -> Any:
        return model.generate(inputs, cache_implementation=cache, return_dict_in_generate=True, output_logits=True)

    inputs, want = next((inputs, want) for inputs in map(tokens, range(20, 40)) if is_clear(want := generate(inputs)))
    got = by(hf.NAME, model, lambda _: generate(inputs))
    assert torch.equal(got.sequences, want.sequences)
    steps = ELSE.get(name, "SDPA")  # a single query is not ours
    assert ran[:2] == [(WHO[name] if cache == "dynamic" else steps, inputs.shape[1])] * 2
    assert ran[2:] == [(steps, 1)] * (2 * (NEW_TOKENS - 1))


def is_clear(generated: Any) -> bool:
    """Whether the likeliest token is so by more than rounding errors, each time."""
    best = torch.stack(generated.logits).topk(2).values
    return bool((best[..., 0] - best[..., 1]).min() > 0.1)


@pytest.mark.parametrize("padded", [False, True])
def test_more_tokens_at_once(padded, ran):
    """Fewer queries than keys: the next turn of a conversation."""
    model, inputs = model_of("Llama"), tokens(30)
    mask = torch.ones_like(inputs)
    mask[0, :4] = 1 - padded

    def run(m: Any) -> list[Tensor]:
        with torch.no_grad():
            cache = m(inputs[:, :20], attention_mask=mask[:, :20], use_cache=True).past_key_values
            return [m(inputs[:, 20:], attention_mask=mask, past_key_values=cache).logits]

    check_near(model, run)
    assert ran == ([("packed", 40)] * 2 + [("SDPA", 10)] * 2 if padded else [("ours", 20)] * 2 + [("ours", 10)] * 2)


def test_mask_that_is_only_causal(ran):
    make = transformers.AttentionMaskInterface()[hf.NAME]
    causal = {
        "batch_size": 1, "q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": None,
        "mask_function": hf.causal_mask_function,
    }  # fmt: skip
    assert hf.known_window(make(**causal)) == (None, 0)
    assert hf.known_window(make(**causal).clone()) is None
    written = make(**causal)
    written[..., 3] = False
    assert hf.known_window(written) is None
    with torch.inference_mode():  # where nobody counts what is written
        assert hf.known_window(make(**causal)) is None
    padding = torch.ones(1, 9, dtype=torch.bool)
    assert hf.known_window(make(**causal | {"attention_mask": padding})) == (None, 0)
    padding[0, 0] = False
    for other in (
        {"attention_mask": padding},
        {"mask_function": lambda *at: hf.causal_mask_function(*at)},
        {"mask_function": hf.sliding_window_causal_mask_function(4), "local_size": 5},
        {"mask_function": hf.sliding_window_causal_mask_function(4)},
        {"allow_is_causal_skip": False},  # as for packed sequences
        {"q_offset": 4},
        {"q_offset": torch.tensor(5)},
    ):
        assert hf.known_window(make(**causal | other)) is None


def test_mask_that_is_a_sliding_window(ran):
    make = transformers.AttentionMaskInterface()[hf.NAME]
    window: dict[str, Any] = {
        "batch_size": 1, "q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": None, "local_size": 4,
        "mask_function": hf.sliding_window_causal_mask_function(4),
    }  # fmt: skip
    mask = make(**window)
    assert hf.known_window(mask) == (3, 0)
    assert torch.equal(mask, torch.ones(1, 1, 4, 9).tril(5).triu(2).bool())
    assert hf.known_window(make(**window | {"attention_mask": torch.arange(9)[None] > 0})) is None


def test_empty_static_cache(ran):
    """SDPA makes no mask for it, and aligns None to the top left; a model may drop queries after that."""
    options = {"batch_size": 1, "q_length": 4, "kv_length": 9, "q_offset": 0, "attention_mask": None}
    assert transformers.AttentionMaskInterface()["sdpa"](**options) is None
    mask = transformers.AttentionMaskInterface()[hf.NAME](**options)
    assert torch.equal(mask, torch.ones(1, 1, 4, 9).tril().bool())
    assert hf.known_window(mask) is None


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_model_that_drops_queries(static, keep, ran):
    """Gemma 4's last layers share keys, and compute what is asked for: fewer queries than the mask was made for."""
    layers = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = transformers.Gemma4TextConfig(
        **TINY | layers, sliding_window=64, hidden_size_per_layer_input=16, vocab_size_per_layer_input=64
    )
    model, inputs = model_of(config), tokens(20)

    def run(m: Any) -> list[Tensor]:
        cache = transformers.StaticCache(config, max_cache_len=40) if static else None
        with torch.no_grad():
            return [m(inputs, past_key_values=cache, logits_to_keep=keep).logits]

    check_near(model, run)
    rest = "ours" if keep > 1 else "SDPA"
    assert ran == [("SDPA", 20)] * 2 + [("SDPA", keep)] * 2 if static else [("ours", 20)] * 2 + [(rest, keep)] * 2


@pytest.mark.parametrize("name", slow_if(lambda name: name in ("Qwen 3", "Mistral"), CONFIGS))
@pytest.mark.slow_but("gpt-oss")
def test_training_step(name, ran):
    inputs, model = tokens(20), model_of(name).train()

    def run(m: Any) -> list[Tensor]:
        loss = m(inputs, labels=inputs, use_cache=False).loss
        return list(torch.autograd.grad(loss, list(m.parameters())))

    check_near(model, run)
    assert ran == [(WHO[name], 20)] * 2


class Operators(TorchDispatchMode):
    """Names of those that are called within, but for views, which cost the card nothing, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.called: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        if not operator.is_view and not re.search("gluon_attn|attention", name):
            self.called[name] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("train", [False, True], ids=["prefill", "training step"])
def test_around_attention_a_model_does_what_it_does_with_sdpa(train, ran):
    """Nothing is copied, converted or repeated for our kernels, whose time alone is a model's gain."""
    inputs, model = tokens(20), model_of("Llama")
    called = []
    for implementation in ("sdpa", hf.NAME):
        model.set_attn_implementation(implementation)
        with Operators() as operators, torch.set_grad_enabled(train):
            logits = model(inputs, use_cache=False).logits
            if train:
                logits.float().square().mean().backward()
        model.zero_grad()
        called.append(operators.called)
    assert called[0].total() > 50
    assert called[0] == called[1]
    assert ran == [("SDPA", 20)] * 2 + [("ours", 20)] * 2


def test_dropout_is_left_to_sdpa(ran):
    inputs, model = tokens(20), model_of("Llama", attention_dropout=0.5).train()
    runs = []
    for implementation in ("sdpa", hf.NAME):
        torch.manual_seed(1)
        runs += by(implementation, model, logits(inputs))
    assert torch.equal(*runs)
    by(hf.NAME, model.eval(), logits(inputs))
    assert [who for who, _ in ran] == ["SDPA"] * 4 + ["ours"] * 2


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(given, ran):
    """Two sequences in a row see nothing of each other. Of `cu_seq_lens` with a cache, SDPA itself sees nothing."""
    inputs, model = tokens(20, batch=1), model_of("Llama")
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)
    options: dict[str, Any] = {"position_ids": positions, "use_cache": given == "cu_seq_lens"}
    if given == "cu_seq_lens":
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    exact = copy.deepcopy(model).float()
    want = torch.cat([*logits(inputs[:, :8])(exact), *logits(inputs[:, 8:])(exact)], 1)
    got = by(hf.NAME, model, logits(inputs, **options))[0]
    assert (got - want).norm() < 0.05 * want.norm()
    assert ran == [("packed", 20)] * 2


def test_one_warning_for_each_reason(ran):
    inputs = tokens(20)
    mask = torch.ones_like(inputs)
    mask[0, :4] = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for name in CONFIGS:
                by(hf.NAME, model_of(name), logits(inputs))
            by(hf.NAME, model_of("Llama"), logits(inputs, attention_mask=mask))
            by(hf.NAME, model_of("Llama", torch.float32), logits(inputs))
            by(hf.NAME, model_of("Gemma 2"), logits(inputs, attention_mask=mask))
    said = [str(w.message).split(": ") for w in caught if "gluon_attn" in str(w.message)]
    sdpa, eager = (f"gluon_attn leaves attention to {whose}" for whose in WHOSE)
    assert [text[:2] for text in said] == [
        [sdpa, "q"],  # its dtype
        [eager, "attention_mask"],
    ]


SEEN = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()


def changed(**places: bool) -> Tensor:
    mask = SEEN.clone()
    for place, value in places.items():
        _, batch, row, column = place.split("_")
        mask[int(batch), 0, int(row), int(column)] = value
    return mask


def test_sequences_that_a_mask_is_made_of():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    found = hf.sequences_of(SEEN & (ids[:, None, :, None] == ids[:, None, None, :]), None)
    assert found is not None
    assert found.starts_q.tolist() == found.starts_k.tolist() == [0, 2, 5, 6, 12]
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    found = hf.sequences_of(SEEN & padding.bool()[:, None, None], padding)
    assert found is not None
    assert found.starts_q.tolist() == [0, 2, 6, 9, 12]
    holes = torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])  # the last ones see the first one beyond the hole
    for other in (changed(_0_1_2=True), changed(_1_4_3=False), SEEN.float(), SEEN.tril(-1), SEEN.triu(-2)):
        assert hf.sequences_of(other, None) is None
    assert hf.sequences_of(SEEN & holes.bool()[:, None, None], holes) is None


@pytest.mark.parametrize(("use_cache", "who"), [(True, "ours"), (False, "SDPA")])
@pytest.mark.parametrize("dynamic", slow_if(bool, [False, True]))
@pytest.mark.slow_but("False-True-ours")
def test_compiled(use_cache, who, dynamic, ran):
    """Without a cache transformers makes a mask, for sequences that may be packed, as it reads no positions then."""
    model, run = model_of("Llama"), logits(tokens(20), use_cache=use_cache)
    want = run(copy.deepcopy(model).float())[0]
    model.set_attn_implementation(hf.NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert (run(compiled)[0] - want).norm() < 0.02 * want.norm()
    assert set(ran) == {(who, 20)}


def attend(q: Tensor, k: Tensor, mask: Tensor | None = None, *, is_causal: bool = True, **options: Any) -> Tensor:
    """A layer's call, without a model; v is k."""
    module = SimpleNamespace(is_causal=is_causal, num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    out, weights = transformers.AttentionInterface()[hf.NAME](module, q, k, k, mask, **options)
    assert weights is None
    assert out.is_contiguous()
    return out.transpose(1, 2)


def seen_by(q: Tensor, k: Tensor, sees: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(
        q.double(), k.double(), k.double(), attn_mask=sees, enable_gqa=True, scale=options.get("scaling")
    )


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


Q, K, LATER = randn(2, 2, 24, 64), randn(2, 1, 24, 64), randn(2, 1, 40, 64)
ALL = torch.ones(24, 40, dtype=torch.bool)
# Queries, keys, what is asked for, which keys are seen, and who computes it.
CALLS: dict[str, tuple[Tensor, Tensor, dict[str, Any], Tensor, str]] = {
    "causal": (Q, K, {}, ALL[:, :24].tril(), "ours"),
    "scale": (Q, K, {"scaling": 0.3}, ALL[:, :24].tril(), "ours"),
    "no causal mask": (Q, K, {"is_causal": False}, ALL[:, :24], "ours"),
    "cross attention": (Q, LATER, {"is_causal": False}, ALL, "ours"),
    "queries were dropped": (Q, LATER, {}, ALL.tril(16), "ours"),
    "queries were dropped, head dim": (Q[..., :36], LATER[..., :36], {}, ALL.tril(16), "SDPA"),
    "one query": (Q[:, :, :1], LATER, {}, ALL[:1], "SDPA"),
    "one sequence": (Q, K, {"cu_seq_lens_q": torch.tensor([0, 24])}, ALL[:, :24].tril(), "ours"),
    "what is off": (Q, K, {"softcap": None, "s_aux": None, "dropout": 0.0, "output_attentions": False},
                    ALL[:, :24].tril(), "ours"),
    "what has no effect": (Q, K, {"position_ids": torch.arange(24)[None], "use_cache": True, "deterministic": True},
                           ALL[:, :24].tril(), "ours"),
    "a mask": (Q, K, {"mask": ALL[:, :24].tril(-1).logical_not()}, ALL[:, :24].tril(-1).logical_not(), "SDPA"),
    "window, no mask": (Q, K, {"sliding_window": 23}, ALL[:, :24].tril(), "SDPA"),
    "window, wide": (Q, K, {"sliding_window": 24}, ALL[:, :24].tril(), "ours"),
    "unknown": (Q, K, {"new_argument": torch.ones(1)}, ALL[:, :24].tril(), "SDPA"),
    "strides": (Q, K.mT.contiguous().mT, {}, ALL[:, :24].tril(), "SDPA"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name, ran):
    q, k, options, sees, who = CALLS[name]
    out = attend(q, k, **options)
    assert (out - seen_by(q, k, sees, **options)).abs().max() < 0.03
    assert ran == [(who, q.shape[2])]


def test_packed_unequal_lengths(ran):
    """By rows and sequences, causal to the end of each."""
    q_ends, k_ends = torch.tensor([0, 10, 24, 48]), torch.tensor([0, 16, 40, 80])
    out = attend(Q, LATER, cu_seq_lens_q=q_ends, cu_seq_lens_k=k_ends)
    sees = torch.zeros(2, 1, 24, 40, dtype=torch.bool)
    sees[0, 0, :10, :16] = ALL[:10, :16].tril(6)
    sees[0, 0, 10:, 16:] = ALL[:14, :24].tril(10)
    sees[1, 0] = ALL.tril(16)
    assert (out - seen_by(Q, LATER, sees)).abs().max() < 0.03
    assert ran == [("SDPA", 24)]


@pytest.mark.parametrize("argument", ["cache", "indices", "block_indices"])
def test_refused_by_name(argument, ran):
    with pytest.raises(NotImplementedError, match=rf"^{argument}: .*set_attn_implementation\(\"sdpa\"\)"):
        attend(Q, K, None, is_causal=True, **{argument: torch.zeros(1)})
    assert ran == []


def test_no_eager_attention_to_fall_back_to(ran):
    with pytest.raises(NotImplementedError, match=r"^softcap: .*no eager_attention_forward beside SimpleNamespace"):
        attend(Q, K, softcap=30.0, dropout=0.1)


def batch_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=made).tolist() for n in lengths]


def in_batches(model: Any, prompts: list[list[int]], **changes: Any) -> list[Any]:
    """Pages of 16 keys, so that requests have several; 32 tokens at once, so that the longest prompt is cut and goes
    along with single tokens of the others. One error would fail every request."""
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    settings = copy.deepcopy(model.generation_config)
    settings.update(eos_token_id=-1, **changes)
    done = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=pages)
    assert [request.error for request in done.values()] == [None] * len(prompts)
    return list(done.values())


@pytest.mark.parametrize("name", slow_if(lambda name: name == "Qwen 3", CONFIGS))
def test_continuous_batching(name, ran):
    """Each request's tokens are those of `generate` with its prompt alone, by the model's eager attention."""
    model = model_of(name, torch.float16)

    def alone(prompt: list[int]) -> Any:
        return model.generate(
            torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True, eos_token_id=None
        )

    prompts = [
        next(p for seed in range(40) if is_clear(alone(p := batch_of((length,), seed)[0]))) for length in (20, 3, 45)
    ]
    want = [alone(prompt).sequences[0, len(prompt) :].tolist() for prompt in prompts]
    model.set_attn_implementation(hf.NAME)
    ran.clear()
    with hf.continuous_batching(model):
        got = in_batches(model, prompts)
    assert [request.generated_tokens for request in got] == want
    assert {who for who, _ in ran} == {"packed"}
    assert {n for _, n in ran} >= {3, 32}  # three requests with one new token each, and a full batch
    assert model.config._attn_implementation == hf.NAME


@pytest.mark.parametrize("name", ["Mistral"])
def test_probabilities_of_continuous_batching(name, ran):
    """As those of transformers' own attention to pages."""
    model, prompts = model_of(name, torch.float16), batch_of((20, 3, 45), 0)

    def run() -> list[Any]:
        pages = transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=16, max_batch_tokens=32, return_logprobs=True
        )
        return list(model.generate_batch(prompts, continuous_batching_config=pages).values())

    model.set_attn_implementation("paged|eager")
    want = run()
    model.set_attn_implementation(hf.NAME)
    with hf.continuous_batching(model):
        got = run()
    for ours, plain in zip(got, want, strict=True):
        assert ours.generated_tokens == plain.generated_tokens
        assert torch.tensor(ours.logprobs) == pytest.approx(torch.tensor(plain.logprobs), abs=0.02)


def test_a_model_with_continuous_batching_generates_as_before(ran):
    model = model_of("Mistral")
    padding = torch.ones(2, 20, dtype=torch.long)
    padding[0, :5] = 0
    want = by(hf.NAME, model, logits(tokens(20), attention_mask=padding))[0]
    before = list(ran)
    ran.clear()
    with hf.continuous_batching(model), hf.continuous_batching(model):
        assert "flash" in model.config._attn_implementation
        got = logits(tokens(20), attention_mask=padding)(model)[0]
    assert torch.equal(got, want)
    assert ran == before
    assert model.config._attn_implementation == hf.NAME


def test_what_a_layer_may_not_ask_for_is_an_error_in_each_answer(ran, monkeypatch):
    """And the name is restored."""
    model = model_by_ours("Llama")
    layer = type(model.model.layers[0].self_attn)
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda self, *args, **kw: forward(self, *args, **kw, position_bias=torch.zeros(1))
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    with hf.continuous_batching(model):
        done = model.generate_batch(batch_of((5, 9), 0), continuous_batching_config=pages)
    assert [request.error.split(":")[0] for request in done.values()] == ["position_bias"] * 2
    assert name_of(model) == hf.NAME
    assert ran == []


def test_a_manager_made_within_is_used_afterwards(ran):
    """Its requests come when the name is back, and the answers are those of within."""
    model, prompts = model_by_ours("Mistral"), batch_of((20, 3), 0)
    with hf.continuous_batching(model):
        want = [request.generated_tokens for request in in_batches(model, prompts)]
    ran.clear()
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    with hf.continuous_batching(model):
        manager = model.init_continuous_batching(continuous_batching_config=pages)
    assert name_of(model) == hf.NAME
    manager.start()
    try:
        ids = [manager.add_request(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=-1) for prompt in prompts]
        done = {answer.request_id: answer for answer in (manager.get_result(timeout=60) for _ in ids)}
    finally:
        manager.stop(block=True)
    assert [done[at].error for at in ids] == [None, None]
    assert [done[at].generated_tokens for at in ids] == want
    assert {who for who, _ in ran} == {"packed"}


def name_of(model: Any) -> str:
    """In its config, by which transformers chooses attention and masks."""
    return model.config._attn_implementation


@pytest.mark.parametrize("first", [0, 1])
def test_continuous_batching_entered_twice(first, ran):
    """The name is back when the last is left, whichever that is."""
    model = model_by_ours("Llama")
    entered = [hf.continuous_batching(model) for _ in range(2)]
    for within in entered:
        within.__enter__()
    entered[first].__exit__(None, None, None)
    assert name_of(model) == hf.NAME_IN_BATCHES
    assert [r.error for r in in_batches(model, batch_of((5,), 0))] == [None]
    entered[1 - first].__exit__(None, None, None)
    assert name_of(model) == hf.NAME
    assert not hf._entered


def test_continuous_batching_left_by_an_exception(ran):
    model = model_by_ours("Llama")
    with hf.continuous_batching(model):
        with pytest.raises(ZeroDivisionError), hf.continuous_batching(model):
            raise ZeroDivisionError
        assert name_of(model) == hf.NAME_IN_BATCHES
    with pytest.raises(ZeroDivisionError), hf.continuous_batching(model):
        raise ZeroDivisionError
    assert name_of(model) == hf.NAME
    assert not hf._entered


def test_another_implementation_that_is_set_within_stays(ran):
    model = model_by_ours("Llama")
    with hf.continuous_batching(model):
        model.set_attn_implementation("eager")
    assert name_of(model) == "eager"


def test_a_copy_made_within_takes_its_name_by_hand(ran):
    model = model_by_ours("Llama")
    with hf.continuous_batching(model):
        copied = copy.deepcopy(model)
    assert name_of(copied) == hf.NAME_IN_BATCHES
    copied.set_attn_implementation(hf.NAME)
    assert name_of(copied) == hf.NAME


OF_BATCHES: dict[str, Any] = {
    "cu_seq_lens_q": torch.tensor([0, 5, 6, 6, 6], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 9, 29, 29, 29], dtype=torch.int32),
    "max_length_q": 24, "max_length_k": 1024,
    "write_index": torch.zeros(24, dtype=torch.long), "read_index": torch.zeros(40, dtype=torch.long),
    "logits_indices": torch.zeros(4, dtype=torch.int32), "logits_processor_args": torch.zeros(0, 4),
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("requests", [1, 2])
def test_padding_of_continuous_batching(requests, window, ran):
    """What a CUDA graph pads: requests without tokens, rows after the last request, and lengths that are too long."""
    k = LATER[:1].clone()
    options = dict(OF_BATCHES, sliding_window=window, is_causal=True)
    if requests == 1:  # and no empty ones, as with room for one request
        options["cu_seq_lens_q"], options["cu_seq_lens_k"] = (
            options[name][:2].clone() for name in ("cu_seq_lens_q", "cu_seq_lens_k")
        )
    rows, keys = int(options["cu_seq_lens_q"][-1]), int(options["cu_seq_lens_k"][-1])
    k[:, :, keys:] = torch.nan
    out = attend(Q[:1], k, **options)
    assert out.shape == (1, 2, 24, 64)
    sees = torch.zeros(rows, keys, dtype=torch.bool)
    sees[:5, :9] = ALL[:5, :9].tril(4)
    sees[5:, 9:] = True
    if window is not None:
        sees[:5, :9] &= ALL[:5, :9].triu(4 - window + 1)
        sees[5:, 9:-window] = False
    want = seen_by(Q[:1, :, :rows], k[:, :, :keys], sees)
    assert (out[:, :, :rows] - want).abs().max() < 0.03
    assert ran == [("packed", 24)]


REFUSED_IN_BATCHES: dict[str, dict[str, Any]] = {
    "attention_mask": {"mask": torch.ones(1, 1, 24, 40, dtype=torch.bool)},
    "dropout": {"dropout": 0.1},
    "block_table": {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
    "position_bias": {"position_bias": torch.zeros(1)},
    "sliding_window": {"sliding_window": 6, "is_causal": False},
    "cu_seq_lens_k": {"cu_seq_lens_k": {"full_attention": torch.zeros(2, dtype=torch.int32)}},
}


@pytest.mark.parametrize("name", REFUSED_IN_BATCHES)
def test_refused_with_continuous_batching(name, ran):
    with pytest.raises(NotImplementedError, match=f"^{name}: .*continuous batching"):
        attend(Q[:1], LATER[:1], **{**OF_BATCHES, **REFUSED_IN_BATCHES[name]})
    assert ran == []


def test_refused_with_continuous_batching_by_supports(ran):
    """What `supports` refuses goes to nobody else, as others would leave the requests' masks out."""
    with pytest.raises(NotImplementedError, match=r"^q: .*float32.*continuous batching; .*\(\"sdpa\"\)$"):
        attend(Q[:1].float(), LATER[:1].float(), **OF_BATCHES)
    assert ran == []


def model_by_ours(name: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = model_of(name, dtype)
    model.set_attn_implementation(hf.NAME)
    return model


def check_refused(model: Any, error: type[Exception], message: str) -> None:
    before = model.config._attn_implementation
    with pytest.raises(error, match=message), hf.continuous_batching(model):
        pass
    assert model.config._attn_implementation == before


def test_models_refused_with_continuous_batching(ran, monkeypatch):
    check_refused(model_of("Llama"), ValueError, r"^model: expected .*, got 'eager'; call gluon_attn.hf.register\(\)")
    check_refused(model_by_ours("Llama", torch.float32), NotImplementedError, r"^q: .*float32.*\(\"sdpa\"\)")
    model = model_by_ours("Llama")
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    check_refused(model, NotImplementedError, r"^model: expected .* no mask tensor, got LlamaForCausalLM.*\(\"sdpa\"\)")


# Configs that do not give one number for all layers, in transformers' own way and in those of custom models.
UNSAID: dict[str, Callable[[], Any]] = {
    "head dim": lambda: transformers.Gemma4TextConfig(
        **TINY, global_head_dim=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "list of KV heads": lambda: SimpleNamespace(num_attention_heads=2, num_key_value_heads=[1, 2], head_dim=32),
    "list of heads": lambda: SimpleNamespace(num_attention_heads=[2, 4], hidden_size=64),
    "other names": lambda: SimpleNamespace(n_head=2, n_embd=64),
}


@pytest.mark.parametrize("unsaid", UNSAID)
def test_a_config_that_does_not_say_it_is_left_to_the_layers(unsaid, ran, monkeypatch):
    """In fp32, which is refused if the config says the numbers."""
    model, config = model_by_ours("Llama", torch.float32), UNSAID[unsaid]()
    assert hf.supports_heads_of(model) is not None
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self: config)
    assert hf.supports_heads_of(model) is None


def test_prefix_lm_is_refused_for_continuous_batching(ran):
    """Transformers refuses a name with "flash" in it, too, but not set so."""
    config = transformers.HrmTextConfig(**TINY, num_layers_per_stack=1, prefix_lm=True)
    check_refused(model_by_ours(config), NotImplementedError, r"^prefix_lm: .*, got HrmText.*\(\"sdpa\"\)")


def test_older_transformers_are_refused_for_continuous_batching(ran, monkeypatch):
    monkeypatch.setattr(hf, "transformers_version", "5.23.0")
    check_refused(model_by_ours("Llama"), NotImplementedError, r"expected transformers 5\.24 or newer.*, got 5\.23\.0")


def test_a_cache_of_pages_that_hands_over_no_lengths_is_refused(ran, monkeypatch):
    from transformers.generation.continuous_batching import PagedAttentionCache

    monkeypatch.setattr(PagedAttentionCache, "update", lambda self, key, value, layer_idx: (key, value))
    check_refused(model_by_ours("Llama"), NotImplementedError, r"^continuous_batching: expected transformers 5\.24")


def test_continuous_batching_without_being_asked_is_refused(ran):
    """By transformers, which takes no attention whose name it does not know."""
    model = model_by_ours("Llama")
    with pytest.raises(ValueError, match=r"gluon_attn\W* is not supported"):
        model.generate_batch([[5, 6, 7]], progress_bar=False)
