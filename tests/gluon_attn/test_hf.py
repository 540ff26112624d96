"""Models of transformers by our kernels: small ones of random weights, on the CPU, where ours run on gluon_cpu."""

import collections
import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.slow import slow_if

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from gluon_attn import hf  # noqa: E402  # it imports transformers
from tests.gluon_attn.hf_models import (  # noqa: E402
    ALL,
    CONFIGS,
    LATER,
    NEW_TOKENS,
    TINY,
    WINDOW,
    K,
    Q,
    attend,
    by,
    check_near,
    is_clear,
    logits,
    model_of,
    seen_by,
    tokens,
)

# Who computes 20 tokens, of which the last three's windows hide some.
ELSE = {"Gemma 2": "eager", "gpt-oss": "eager"}  # who does what is not ours; SDPA for others
WHO = {"Llama": "ours", "Qwen 3": "ours", "Mistral": "ours", "Gemma 2": "ours", "gpt-oss": "ours"}
WHOSE = ("transformers' SDPA", "the model's eager attention")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow_but("Gemma 2", "gpt-oss", "Llama")
def test_logits(name, ran):
    check_near(model_of(name), logits(tokens(20)))
    assert ran == [(WHO[name], 20)] * 2


def test_logits_within_the_window(ran):
    """Where the window hides no key, its model is like others."""
    check_near(model_of("Mistral"), logits(tokens(WINDOW - 1)))
    assert ran == [("ours", WINDOW - 1)] * 2


def test_single_tokens_are_sdpas_without_a_warning(ran):
    """Of a padded batch, whose masks are not known to be causal: there is nothing that a user could mend."""
    model, ids = model_of("Llama"), tokens(20)
    model.set_attn_implementation(hf.NAME)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gluon_attn leaves")
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert {who for who, _ in ran} == {"packed", "SDPA"}


class Logits(torch.nn.Module):
    """Of a model, with tensors alone coming in and out, as torch.jit wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_traced_by_torch_jit(padded, ran):
    """Our attention refuses, and SDPA is traced."""
    model, ids = model_of("Llama"), tokens(20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if padded else 1
    whole = Logits(model)
    model.set_attn_implementation(hf.NAME)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(whole, (ids, mask), check_trace=False)(ids, mask)
        assert {who for who, _ in ran} == {"SDPA"}
        want = by("sdpa", model, lambda _: whole(ids, mask))
    torch.testing.assert_close(traced, want)


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
    assert set(ran) == {("packed", 40)}
    alone = by("eager", copy.deepcopy(model).float(), logits(row))[0][0]
    got = by(hf.NAME, model, logits(inputs, attention_mask=mask, position_ids=positions))[0][0, mask[0].bool()]
    assert (got - alone).norm() < 0.05 * alone.norm()


@pytest.mark.parametrize("padded", [False, True])
def test_chunks(padded, ran):
    """Of Llama 4: each chunk is a sequence. In a padded batch rows of padding are not compared."""
    config = transformers.Llama4TextConfig(
        **TINY, attention_chunk_size=WINDOW, no_rope_layers=[1, 0], num_local_experts=2, num_experts_per_tok=1,
        intermediate_size_mlp=64,
    )  # fmt: skip
    model, inputs = model_of(config), tokens(20)
    mask = torch.ones_like(inputs)
    mask[0, :6] = 1 - padded
    check_near(model, lambda m: [logits(inputs, attention_mask=mask)(m)[0][mask.bool()]])
    assert ran == [("packed", 40), ("packed", 40) if padded else ("ours", 20)]


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
    mask[0, 4] = 0  # a hole: tokens after it see those before it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for name in CONFIGS:
                by(hf.NAME, model_of(name), logits(inputs))
            by(hf.NAME, model_of("Llama", torch.float32), logits(inputs))
            by(hf.NAME, model_of("Gemma 2"), logits(inputs, attention_mask=mask))
    said = [str(w.message).split(": ") for w in caught if "gluon_attn" in str(w.message)]
    sdpa, eager = (f"gluon_attn leaves attention to {whose}" for whose in WHOSE)
    assert [text[:2] for text in said] == [
        [sdpa, "q"],  # its dtype
        [eager, "attention_mask"],
    ]


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


# Queries, keys, what is asked for, which keys are seen, and who computes it.
CALLS: dict[str, tuple[Tensor, Tensor, dict[str, Any], Tensor, str]] = {
    "causal": (Q, K, {}, ALL[:, :24].tril(), "ours"),
    "scale": (Q, K, {"scaling": 0.3}, ALL[:, :24].tril(), "ours"),
    "no causal mask": (Q, K, {"is_causal": False}, ALL[:, :24], "ours"),
    "cross attention": (Q, LATER, {"is_causal": False}, ALL, "ours"),
    "queries were dropped": (Q, LATER, {}, ALL.tril(16), "ours"),
    # Transformers' SDPA aligns these to the top left.
    "more queries than keys": (LATER.expand(2, 2, 40, 64), K, {}, ALL.T.tril(), "SDPA"),
    "a layer that says nothing": (Q, K, {"is_causal": None}, ALL[:, :24].tril(), "ours"),
    "one that attends to fewer": (LATER.expand(2, 2, 40, 64), K, {"is_causal": None}, ALL.T.tril(), "SDPA"),
    "one that attends to more": (Q, LATER, {"is_causal": None}, ALL.tril(), "SDPA"),
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


def test_what_is_no_device_or_no_model_is_refused():
    no_device: Any = "cuda"
    no_model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^device: expected a gluon_attn Device or None, got .*; leave it out"):
        hf.register(no_device)
    with (
        pytest.raises(TypeError, match=r"^model: expected a model of transformers, .*got .*Linear; give that"),
        hf.continuous_batching(no_model),
    ):
        pass


@pytest.mark.parametrize(
    ("context", "says"),
    [
        (torch.inference_mode, r"made under torch\.inference_mode.*no_grad"),
        (FakeTensorMode, "of a tensor that stands for others, or for none"),
    ],
)
def test_why_a_mask_is_not_known(context, says, ran):
    """It is causal, but nobody could look at it."""
    with context():
        q, k = torch.randn(1, 2, 24, 64).bfloat16(), torch.randn(1, 1, 24, 64).bfloat16()
        mask = torch.ones(24, 24).tril().bool()
        with pytest.warns(UserWarning, match=f"attention_mask: .*{says}"):
            attend(q, k, mask)
    assert ran == [("SDPA", 24)]


def test_a_mask_in_a_graph(ran):
    compiled = torch.compile(attend, backend="eager")
    with pytest.warns(UserWarning, match="attention_mask: what a mask says is not known in a graph"):
        compiled(Q, K, ALL[:, :24].tril())


@pytest.mark.parametrize("asks", [{"softcap": 20.0}, {"s_aux": torch.zeros(2)}])
def test_more_queries_than_keys_by_eager_attention(asks, ran):
    """Which knows no causal call but by a mask."""
    seen: list[Tensor] = []

    def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        seen.append(mask)
        return query.transpose(1, 2).contiguous(), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "eager_of", lambda *_: eager)
        attend(LATER.expand(2, 2, 40, 64), K, **asks)
    assert torch.equal(seen[0].expand(1, 1, 40, 24) == 0, ALL.T.tril()[None, None])


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


# Causal models that transformers does not give to SDPA, and whose layers do not say that they are causal. Those of
# PegasusX ask for attention; those of Git add the mask to their scores themselves.
SEQ2SEQ = {
    "vocab_size": 64, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64,
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "init_std": 0.2,
}  # fmt: skip


def pegasus() -> Any:
    torch.manual_seed(0)
    config = transformers.PegasusXConfig(**SEQ2SEQ, block_size=4)
    model = transformers.PegasusXForConditionalGeneration._from_config(config, attn_implementation="eager")
    return model.bfloat16().eval()


def decoded(inputs: Tensor, mask: Tensor | None = None) -> Any:
    return lambda model: logits(torch.full((2, 8), 5), decoder_input_ids=inputs, decoder_attention_mask=mask)(model)


def git() -> Any:
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    small = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "initializer_range")}
    config = transformers.GitConfig(
        **small, num_hidden_layers=2, num_attention_heads=2, vision_config=vision | {"image_size": 32, "patch_size": 16}
    )
    return model_of(config)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", ["PegasusX", "Git"])
def test_models_that_are_causal_by_their_mask_alone(name, padded, ran):
    inputs = tokens(20)
    mask = torch.ones_like(inputs)
    mask[0, 16:] = 0
    given = mask if padded else None
    model, run = (
        (pegasus(), decoded(inputs, given)) if name == "PegasusX" else (git(), logits(inputs, attention_mask=given))
    )
    check_near(model, lambda model: [out[mask.bool()] for out in run(model)])
    assert (("ours", 20) in ran) == (name == "PegasusX" and not padded)


def test_an_audio_part_that_is_not_given_to_sdpa(ran):
    """Of a model whose other parts are."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
    config, runs = transformers.Gemma4AudioConfig(**sizes), []
    for implementation in ("eager", hf.NAME):
        torch.manual_seed(0)
        model = transformers.Gemma4AudioModel._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            runs.append(model(torch.ones(1, 40, 128), torch.ones(1, 40, dtype=torch.bool)).last_hidden_state)
    assert torch.equal(*runs)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_model_that_is_not_causal_and_not_given_to_sdpa(padded, ran):
    """Its layers do not say that they are not causal."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AlignTextConfig(**sizes, intermediate_size=64, initializer_range=0.2, pad_token_id=0)
    torch.manual_seed(0)
    model, inputs = transformers.AlignTextModel(config).eval(), tokens(14)
    mask = torch.ones_like(inputs)
    mask[0, 10:] = 0
    given = mask if padded else None

    def run(model: Any) -> Tensor:
        with torch.no_grad():
            return model(input_ids=inputs, attention_mask=given).last_hidden_state[mask.bool()]

    want, got = by("eager", model, run), by(hf.NAME, model, run)
    assert (got - want).norm() < 1e-4 * want.norm()
    assert {who for who, _ in ran} == {"SDPA"}


def test_a_padded_mask_of_one_row_for_a_batch(ran):
    padding = torch.ones(1, 24, dtype=torch.bool)
    padding[0, :3] = False
    mask = transformers.AttentionMaskInterface()[hf.NAME](
        batch_size=1, q_length=24, kv_length=24, q_offset=0, kv_offset=0, attention_mask=padding, device="cpu",
        mask_function=transformers.masking_utils.causal_mask_function, allow_is_causal_skip=True,
    )  # fmt: skip
    out = attend(Q, K, mask)[:, :, 3:]
    assert (out - seen_by(Q, K, mask)[:, :, 3:]).abs().max() < 0.03
